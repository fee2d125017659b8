from loadtests.workload.request_lengths import (  # noqa: F401
    PRESETS,
    JointTable,
    preset_table,
)

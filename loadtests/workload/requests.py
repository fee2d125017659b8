from loadtests.workload.request_lengths import (  # noqa: F401
    Ask,
    Workload,
    draw,
    in_words,
    source,
)

from loadtests.host.child_processes import Child, last_line  # noqa: F401
from loadtests.host.cpu_pinning import Layout, divide_cores  # noqa: F401

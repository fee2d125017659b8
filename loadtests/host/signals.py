from loadtests.host.child_processes import SIGNALS, signals_interrupt  # noqa: F401

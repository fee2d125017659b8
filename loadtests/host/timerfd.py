from loadtests.host.precise_timer import Alarm  # noqa: F401

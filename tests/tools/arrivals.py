"""One arrival process of each kind, for the tests of arrivals and of their check."""

from loadtests.workload.arrivals import (
    Arrivals,
    Constant,
    Gamma,
    OnOff,
    Piecewise,
    Poisson,
)

RATE, LONG = 20.0, 6000.0  # requests/s, seconds
KINDS: list[Arrivals] = [
    Constant(),
    Poisson(),
    Gamma(cv=2.5),
    OnOff(5.0, 10.0),
    Piecewise(((30.0, 1.0), (10.0, 4.0))),
]


def kind(process: Arrivals) -> str:
    return type(process).__name__

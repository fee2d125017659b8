"""A machine that could be a replica of a plan: how it serves, how sure that is, what it costs."""

from __future__ import annotations

import math

import msgspec

from reports.plan.sizing import Errors, Server
from reports.planning.machines import Kind


class Cost(msgspec.Struct, frozen=True, kw_only=True):
    """A price with its lowest and highest, dollars."""

    estimate: float
    low: float
    high: float

    def at(self, place: str) -> float:
        """One of its three numbers, by name."""
        return {"estimate": self.estimate, "low": self.low, "high": self.high}[place]

    @classmethod
    def of(cls, price: float | tuple[float, float]) -> Cost:
        if isinstance(price, tuple):
            return cls(estimate=math.sqrt(price[0] * price[1]), low=price[0], high=price[1])
        return cls(estimate=price, low=price, high=price)


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """A machine that could be a replica, or `devices` of it together. Missing is None."""

    name: str
    kind: Kind
    is_cpu: bool
    server: Server | None = None  # None: `reason` says why
    reason: str = ""  # with a server: what is not known of it
    errors: Errors = Errors()
    factor: float = 1.0  # measured over simulated capacity
    devices: int = 1  # of a replica
    owned: int = 0
    dollars_per_hour: Cost | None = None  # of one device
    dollars: Cost | None = None  # of buying one
    lifetime_months: float = 36.0
    watts: float | None = None  # of one device
    price_source: str = ""

    @property
    def title(self) -> str:
        return f"{self.devices} x {self.name} together" if self.devices > 1 else self.name

    @property
    def is_order_of_magnitude(self) -> bool:
        """A CPU that nobody calibrated: predicted to a factor, so it never wins."""
        return self.is_cpu and self.kind == "predicted"

"""One level of load, as the runner sends it to the load generator: a LoadPlan."""

from __future__ import annotations

from math import isfinite

import msgspec

from loadtests.errors import LoadError
from loadtests.generator.endpoint import Target, TargetFacts
from loadtests.metrics.slo import SLO_PRESETS
from loadtests.workload.arrivals import Arrivals, Poisson
from loadtests.workload.requests import Workload
from models import formatting

DEFAULT_WORKLOAD = Workload(preset="chat", max_prompt_tokens=1024, max_output_tokens=256)


class LoadPlan(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    omit_defaults=True,
    tag="plan",
):
    """One level of load: an open loop where there is a rate, else a closed loop.

    Raises LoadError for numbers that cannot be.
    """

    target: Target
    workload: Workload = DEFAULT_WORKLOAD
    arrivals: Arrivals = Poisson()
    rate_per_second: float | None = None
    concurrency: int | None = None  # users of a closed loop
    warmup_seconds: float = 0.0
    window_seconds: float = 30.0
    drain_seconds: float = 60.0  # how long requests may go on after the last one was due
    follow_seconds: float = 0.0  # how long others may come after it: they do not count
    seed: int = 1
    cell: str = "load"
    level: str = "load"
    facts: TargetFacts | None = None  # None: the load generator probes the target
    late_seconds: float | None = None  # report requests that wait longer for their first token
    requests_file: str | None = None  # append RequestRecords here
    quiet: bool = False  # nobody looks at Locust's own statistics
    slo: str = "chat"  # what the live page calls a good request

    def __post_init__(self) -> None:
        if (self.rate_per_second is None) == (self.concurrency is None):
            raise LoadError("a level has either a rate (open loop) or a concurrency (closed loop)")
        if self.slo not in SLO_PRESETS:
            raise LoadError(f"SLO {self.slo!r} is not one of {', '.join(SLO_PRESETS)}")
        for name in ("rate_per_second", "concurrency", "window_seconds"):
            value = getattr(self, name)
            if value is not None and not (value > 0 and isfinite(value)):
                raise LoadError(f"{name} must be above 0, got {value}")
        for name in ("warmup_seconds", "drain_seconds", "follow_seconds"):
            value = getattr(self, name)
            if not (value >= 0 and isfinite(value)):
                raise LoadError(f"{name} must be 0 or more, got {value}")

    @property
    def is_open(self) -> bool:
        return self.rate_per_second is not None

    @property
    def duration_seconds(self) -> float:
        """How long requests become due, those of `follow_seconds` left out."""
        return self.warmup_seconds + self.window_seconds

    @property
    def load_in_words(self) -> str:
        return formatting.load(self.rate_per_second, self.concurrency, 3, formatting.requests)

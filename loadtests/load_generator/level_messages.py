"""One level of load, as a runner asks for it, and what a load generator tells of it.

    LoadPlan(target=Target(url=url), rate=2.0, window_seconds=60.0)              # open loop
    LoadPlan(target=Target(url=url), concurrency=1, requests=20)                 # single stream
    LoadPlan(target=Target(url=url), asks=asks, due=(0.0, 0.0))                  # these, at once

All times are seconds since the level's start, on one CLOCK_MONOTONIC for all processes.
"""

from __future__ import annotations

import msgspec

from crossover.loadtests.load_generator.openai_endpoint import Target, TargetFacts
from crossover.loadtests.records.request_record import RequestRecord
from crossover.models import formatting
from crossover.serving.workload.arrivals import Arrivals, Poisson
from crossover.serving.workload.request_lengths import DEFAULT_WORKLOAD, RequestSpec, Workload


class LoadPlan(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One level: exactly one of `rate` (open loop), `concurrency` (closed loop), `asks` (given)."""

    target: Target
    workload: Workload = DEFAULT_WORKLOAD
    arrivals: Arrivals = Poisson()
    rate: float | None = None  # requests/s or sessions/s, begun whatever comes back
    concurrency: int | None = None  # users that each send one request after the other
    requests: int | None = None  # of a closed loop: it ends after so many; None: by time alone
    asks: tuple[RequestSpec, ...] | None = (
        None  # these requests, with their lengths, in place of drawn
    )
    due: tuple[float, ...] = ()  # when each of `asks` is due, ascending
    warmup_seconds: float = 0.0
    window_seconds: float = 30.0
    drain_seconds: float = 60.0  # how long requests may go on after the last one was due
    follow_seconds: float = 0.0  # open loop: how long others may come after it, uncounted
    seed: int = 1
    cell: str = "load"
    level: str = "load"
    facts: TargetFacts | None = None  # None: the load generator probes the target

    @property
    def duration_seconds(self) -> float:
        """How long requests become due, those of `follow_seconds` left out."""
        return self.warmup_seconds + self.window_seconds

    @property
    def has_sessions(self) -> bool:
        """Whether the requests are turns of conversations, of which `rate` then begin. Raises
        WorkloadError."""
        return self.asks is None and self.workload.has_sessions

    @property
    def load_in_words(self) -> str:
        if self.asks is not None:
            return f"{len(self.asks)} requests at once"
        if self.has_sessions and self.rate is not None:
            return f"{self.rate:.3g} conversations/s"
        return formatting.of_requests(formatting.load(self.rate, self.concurrency, 3))


class Started(msgspec.Struct, frozen=True, tag="started"):
    """All requests are made; the clock of the level starts at this moment."""

    unix_seconds: float


class Recorded(msgspec.Struct, frozen=True, tag="recorded"):
    """A request has ended."""

    record: RequestRecord


class Ended(msgspec.Struct, kw_only=True, tag="ended"):
    """The account of a level, after its last record."""

    due: int = 0  # requests whose time came
    recorded: int = 0
    cpu_seconds: float = 0.0
    busy_share: float | None = None  # of the time: at work, or ready and without a core


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The level cannot be run."""

    problem: str


WireMessage = Started | Recorded | Ended | Failed  # what a plan is answered with, over the pipe
GeneratorEvent = Started | RequestRecord | Ended | None  # to the runner; None: a moment has passed

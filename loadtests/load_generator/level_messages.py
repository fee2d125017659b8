"""One level of load as the runner plans it, and the messages with which a load generator reports.

    LoadPlan(target=Target(url=url), rate=2.0, window_seconds=60.0)              # open loop
    LoadPlan(target=Target(url=url), concurrency=1, requests=20)                 # single stream
    LoadPlan(target=Target(url=url), asks=specs, due=(0.0, 0.0))                 # a burst

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
    """One level: exactly one of `rate` (open loop), `concurrency` (closed loop) and `asks` (given
    requests, such as a burst) is set."""

    target: Target
    workload: Workload = DEFAULT_WORKLOAD
    arrivals: Arrivals = Poisson()
    rate: float | None = None  # offered rate, requests/s or sessions/s
    concurrency: int | None = None  # users that each send one request after the other
    requests: int | None = None  # a closed loop ends after this many; None: it ends by time alone
    asks: tuple[RequestSpec, ...] | None = None  # the requests to send; None: they are drawn
    due: tuple[float, ...] = ()  # scheduled time of each of `asks`, ascending
    warmup_seconds: float = 0.0
    window_seconds: float = 30.0
    drain_seconds: float = 60.0  # maximum wait for answers after the last scheduled request
    follow_seconds: float = 0.0  # open loop: maximum time of load after the window, uncounted
    seed: int = 1
    cell: str = "load"
    level: str = "load"
    facts: TargetFacts | None = None  # None: the load generator probes the target

    @property
    def duration_seconds(self) -> float:
        """Seconds from the start of the level to the end of its window."""
        return self.warmup_seconds + self.window_seconds

    @property
    def has_sessions(self) -> bool:
        """Whether the requests are turns of conversations; `rate` then counts sessions. Raises
        WorkloadError."""
        return self.asks is None and self.workload.has_sessions

    @property
    def load_in_words(self) -> str:
        """The load as a phrase, such as `2 requests/s`."""
        if self.asks is not None:
            return f"{len(self.asks)} requests at once"
        if self.has_sessions and self.rate is not None:
            return f"{self.rate:.3g} conversations/s"
        return formatting.of_requests(formatting.load(self.rate, self.concurrency, 3))


class Started(msgspec.Struct, frozen=True, tag="started"):
    """All requests are made, and the clock of the level starts at this moment."""

    unix_seconds: float


class Recorded(msgspec.Struct, frozen=True, tag="recorded"):
    """A request has ended."""

    record: RequestRecord


class Ended(msgspec.Struct, kw_only=True, tag="ended"):
    """The account of a level, sent after its last record."""

    due: int = 0  # requests that became due
    recorded: int = 0
    cpu_seconds: float = 0.0  # of the load generator
    # Share of the time in which the load generator ran or waited for a core.
    busy_share: float | None = None


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The level could not be run."""

    problem: str


WireMessage = Started | Recorded | Ended | Failed  # over the pipe, in answer to a plan
GeneratorEvent = Started | RequestRecord | Ended | None  # for the runner; None: a regular tick

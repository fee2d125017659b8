"""What the runner tells a load generator to send, and the messages with which that reports.

    LoadPlan(target=Target(url=url), plan=LevelPlan(rate=2.0, window_seconds=60.0))

All times are seconds since the level's start, on one CLOCK_MONOTONIC for all processes.
"""

from __future__ import annotations

import msgspec

from crossover.loadtests.load_generator.target import Target, TargetFacts
from crossover.loadtests.records.level_plan import LevelPlan
from crossover.loadtests.records.request_record import RequestRecord
from crossover.models import formatting
from crossover.serving.workload.arrivals import Arrivals, Poisson
from crossover.serving.workload.conversations import mean_turns_of
from crossover.serving.workload.request_lengths import DEFAULT_WORKLOAD, Workload


class LoadPlan(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One level, its endpoint, and the requests of which its load consists."""

    target: Target
    plan: LevelPlan
    workload: Workload = DEFAULT_WORKLOAD  # the requests of a burst have their own lengths
    arrivals: Arrivals = Poisson()
    drain_seconds: float = 60.0  # maximum wait for answers after the last scheduled request
    follow_seconds: float = 0.0  # open loop: maximum time of load after the window, uncounted
    cell: str = "load"
    level: str = "load"  # its name
    facts: TargetFacts | None = None  # None: the load generator probes the target

    @property
    def has_sessions(self) -> bool:
        """Whether the requests are turns of conversations. Raises WorkloadError."""
        return self.plan.burst is None and self.workload.has_sessions

    def load_in_words(self, unit_rate: float | None = None) -> str:
        """Return the load as a phrase, such as `2 requests/s`, in the unit that suits
        `unit_rate`."""
        plan = self.plan
        if plan.burst is not None:
            is_check = plan.is_unloaded_check
            return f"{plan.burst.streams} requests {'one at a time' if is_check else 'at once'}"
        if self.has_sessions and plan.rate is not None:
            conversations = plan.rate / mean_turns_of(self.workload)
            rate = formatting.rate(conversations, 3, like=unit_rate)
            return formatting.of_requests(rate, "conversations")
        return formatting.of_requests(formatting.load(plan.rate, plan.concurrency, 3, unit_rate))


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

"""The journal of a run: what the runner did, in order, one struct per kind of event.

    {"kind": "level_started", "unix_seconds": 1780000000.0, "cell": "...", "level": "...#1.1", ...}

One line of events.jsonl is one event; its `kind` is the struct's name in snake case. `Capacity` is
the one struct of a result: in the journal, in reports and in plans.
"""

from __future__ import annotations

import functools
import operator
import re
import time
from collections.abc import Iterable
from typing import Any, Literal, TypeVar

import msgspec

from crossover.models.model_spec import ModelSpec
from crossover.serving.capacity.scheduler_settings import RequestedSettings, SchedulerSettings
from crossover.serving.capacity.simulated_capacity import PrefixReuse
from crossover.serving.capacity.step_time_model import StepTimeModel

FORMAT_VERSION = 6  # goes up when what is written means something else
READABLE_VERSIONS = (5, FORMAT_VERSION)


CapacityState = Literal["confirmed", "not_confirmed", "misses_slo_unloaded"]


class Capacity(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The highest rate that meets an SLO, in requests/s;
    crossover.loadtests.capacity.capacity_estimate makes it.

    `confirmed_rate` ran long enough, steadily and undisturbed, and met the SLO. `estimated_rate` is
    the estimate, with its 90 % confidence interval from `low` to `high`; an end is None where
    nothing bounds it. All of them are 0.0 for `misses_slo_unloaded`: requests miss the SLO even one
    at a time.
    """

    state: CapacityState
    confirmed_rate: float | None = None  # as offered, or as achieved where less was achieved
    confirmed_seconds: float | None = None  # of the levels at that rate, together
    confirmed_requests: int | None = None
    confirmed_attainment: float | None = None  # share of them that met the SLO, 0..1
    starts: int = 0  # of the server, that the confirming levels (else all levels) ran on
    estimated_rate: float | None = None
    low: float | None = None
    high: float | None = None
    # step_times: simulated from step times that this run measured; levels: between levels that met
    # and that missed the SLO
    method: Literal["step_times", "levels"] = "levels"
    steepness: float | None = None  # d ln rate / d ln step time, as a positive number
    factor: float | None = None  # by which the levels' steps took longer than the step-time model
    # By how much the machine's step times moved while it was measured, 0.2: 20 %; None: not seen
    speed_moved: float | None = None
    reason: str = ""
    confirm_seconds: float | None = None  # measuring that would confirm 0.8 x the estimate
    # Conversations under way at `estimated_rate`, with users who read and think; None: no
    # conversations
    users: float | None = None
    # `estimated_rate` if the server computed each conversation's history again; None: no
    # conversations, or a server that does
    estimated_rate_without_reuse: float | None = None
    advice: str = ""  # the SLO under which a wide interval would be sharp; "": none

    @property
    def is_confirmed(self) -> bool:
        """Whether some rate is confirmed."""
        return self.state == "confirmed"


class Disturbance(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """What was taken from the engine during a level; crossover.loadtests.levels.disturbance says
    how."""

    share: float | None = None  # taken of the CPU time that it wanted, 0..1; None: not known
    # What was taken, of the level's time: little where the engine hardly needs the CPU.
    lost_share: float | None = None
    who: str = ""  # took most, where the level is disturbed
    is_disturbed: bool = False
    counts: bool = False  # all the same: the campaign says so, or little was taken and it holds

    @property
    def is_set_aside(self) -> bool:
        """The level says nothing of the server."""
        return self.is_disturbed and not self.counts


class EngineTime(msgspec.Struct, frozen=True, kw_only=True):
    """Where an engine's time went while it had work: seconds by its own clock, since it started."""

    steps: int
    device_seconds: float  # the backend's, with the calls that start its kernels
    # all others of a busy stretch: scheduling, sampling outside the backend, text, messages
    host_seconds: float

    @property
    def host_share(self) -> float | None:
        """Share of its busy time that the device waited for the host; None: no step."""
        busy = self.device_seconds + self.host_seconds
        return self.host_seconds / busy if busy > 0 else None

    def since(self, before: EngineTime) -> EngineTime | None:
        """From `before` to this; None where the counters began anew between them."""
        if self.steps < before.steps or self.device_seconds < before.device_seconds:
            return None
        return EngineTime(
            steps=self.steps - before.steps,
            device_seconds=round(self.device_seconds - before.device_seconds, 6),
            host_seconds=round(max(0.0, self.host_seconds - before.host_seconds), 6),
        )


class EngineInfo(RequestedSettings, frozen=True, kw_only=True, omit_defaults=True):
    """What a Crossover server said of its engine and its settings (/v1/placement); all None for
    another server."""

    name: str | None = None  # of the backend
    device: str | None = None
    device_name: str | None = None  # the CPU or GPU that it runs on
    weight_format: str | None = None
    threads: int | None = None
    prefix_reuse: str | None = None  # what it goes on from, in words
    predicted: dict[str, Any] | None = None  # memory in bytes by what holds it
    command: str | None = None  # of an engine of others


def _kind(name: str) -> str:
    return re.sub(r"(?<!^)([A-Z])", r"_\1", name).lower()


class Event(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="kind", tag=_kind
):
    """What all events have."""

    unix_seconds: float = msgspec.field(default_factory=time.time)
    cell: str | None = None  # Cell.key
    level: str | None = None  # unique per attempt


class RunStarted(Event, frozen=True, kw_only=True):
    """A sitting begins: the first, or one that goes on."""


class RunFinished(Event, frozen=True, kw_only=True):
    """Every cell is measured or skipped."""


class Interrupted(Event, frozen=True, kw_only=True):
    """The run (no cell), a cell's server or a level was interrupted."""

    reason: str


class CellStarted(Event, frozen=True, kw_only=True):
    """A cell's part of a block is begun."""

    cell: str
    block: int = 1
    until_seconds: float  # of measuring that it may have had, all its parts together, at the end


class CellReady(Event, frozen=True, kw_only=True):
    """The server answers."""

    cell: str
    info: EngineInfo = EngineInfo()
    load_seconds: float | None = None
    synthetic: bool = False  # random weights
    spec: ModelSpec | None = None  # of a model that the ladder does not have; None: not known
    url: str | None = None
    layout: dict[str, Any] | None = None  # crossover.loadtests.host.cpu_pinning.Layout
    # crossover.loadtests.load_generator.openai_endpoint.TargetFacts
    target: dict[str, Any] | None = None

    @property
    def shared_cores(self) -> list[str]:
        """Which processes share cores."""
        return list((self.layout or {}).get("shared") or ())

    @property
    def endpoint_notes(self) -> list[str]:
        """What the endpoint lacks."""
        return list((self.target or {}).get("notes") or ())


def device_of(named: str | None, ready: CellReady | None) -> str | None:
    """Return the device of a configuration, "cpu" or "gpu": the one that the cell names, else the
    one that its engine reported, as in a run that was written before cells named one.

    None: it is not known, as of an endpoint that does not say.
    """
    return named or (None if ready is None else ready.info.device)


class EngineChosen(Event, frozen=True, kw_only=True):
    """The CPU engine of a cell whose backend is `best`, chosen when the cell started."""

    cell: str
    backend: str
    weight_format: str
    reason: str  # with what each of the others would hold, or why it cannot be chosen
    threads: int | None = None  # chosen among several numbers; None: no other was tried


class Calibrated(Event, frozen=True, kw_only=True):
    """The step-time model of a cell's engine, from single streams and bursts."""

    cell: str
    spent_seconds: float
    # None: none fits
    step_times: StepTimeModel | None = None
    policy: SchedulerSettings | None = None  # of the engine; of another server, as far as found
    reused_share: float = 0.0  # of shared prefixes, how much the server found in its cache
    # What it saved of the histories of conversations; None: the workload has none
    reuse: PrefixReuse | None = None
    reasoning_share: float = 0.0  # of an answer's time, until its first token behind all reasoning
    reason: str = ""  # why there is no step-time model


class CellSkipped(Event, frozen=True, kw_only=True):
    cell: str
    reason: str


class CellFinished(Event, frozen=True, kw_only=True):
    cell: str
    capacity: Capacity  # under the campaign's SLO


class LevelStarted(Event, frozen=True, kw_only=True):
    cell: str
    level: str
    rate_per_second: float | None = None  # open loop; None: closed loop, or a burst
    concurrency: int | None = None  # closed loop; None: open loop, or a burst
    warmup_seconds: float = 0.0  # requests due before this do not count
    window_seconds: float  # requests due in [warmup_seconds, warmup_seconds + window_seconds) count
    seed: int = 0
    start: int | None = None  # 1..: which start of the cell's server; None: not known
    started_unix_seconds: float = 0.0  # the moment that RequestRecord's times count from

    @property
    def is_burst(self) -> bool:
        """Of a calibration: the step-time model is made from its steps, and it says nothing of a
        rate."""
        return self.rate_per_second is None and self.concurrency is None


class LevelFinished(Event, frozen=True, kw_only=True):
    cell: str
    level: str
    due: int  # requests on record, those of the warm-up included
    window_seconds: float  # as it came out
    spent_seconds: float = 0.0  # of the budget: start, warm-up, window and drain
    is_valid: bool = True  # no serious warning but `Disturbed`
    warnings: list[str] = []  # their codes
    disturbance: Disturbance | None = None  # None: it was not watched
    # of the whole level, warm-up and drain included; None: the server does not say
    engine_time: EngineTime | None = None
    # of the busiest load generator process: at work, or ready for it and without a core
    generator_busy_share: float | None = None


class LevelAbandoned(Event, frozen=True, kw_only=True):
    cell: str
    level: str
    reason: str
    spent_seconds: float = 0.0  # of the budget; a runner that was killed does not say


class Waited(Event, frozen=True, kw_only=True):
    """The campaign waited for a quiet machine."""

    cell: str
    reason: str  # by whom it was disturbed
    spent_seconds: float


class NeverQuiet(Event, frozen=True, kw_only=True):
    """The cell's patience was used up: no level was measured after it."""

    cell: str
    reason: str  # by whom the machine was disturbed


AnyEvent: Any = functools.reduce(operator.or_, Event.__subclasses__())  # every kind above
E = TypeVar("E", bound=Event)


def of_kind(events: Iterable[Event], kind: type[E], cell: str | None = None) -> list[E]:
    """The events of one kind, in order; of one cell, where one is named."""
    return [e for e in events if isinstance(e, kind) and cell in (None, e.cell)]

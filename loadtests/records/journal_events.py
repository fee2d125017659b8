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

from crossover.loadtests.records.level_plan import LevelPlan
from crossover.models.shape.model_spec import ModelSpec
from crossover.serving.capacity.scheduler_settings import (
    DEFAULT_SETTINGS,
    RequestedSettings,
    SchedulerSettings,
)
from crossover.serving.capacity.simulated_capacity import ServerModel

FORMAT_VERSION = 7  # incremented when the meaning of what is written changes


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
    confirmed_rate: float | None = None  # nominal, or as offered where less was offered
    confirmed_seconds: float | None = None  # total duration of the levels at that rate
    confirmed_requests: int | None = None
    confirmed_attainment: float | None = None  # share of these requests that met the SLO, 0..1
    starts: int = 0  # starts of the server on which the confirming levels (else all levels) ran
    estimated_rate: float | None = None
    low: float | None = None
    high: float | None = None
    # step_times: simulated from step times that this run measured; levels: interpolated between
    # levels that met and levels that missed the SLO.
    method: Literal["step_times", "levels"] = "levels"
    steepness: float | None = None  # d ln rate / d ln step time, as a positive number
    factor: float | None = None  # by which the levels' steps took longer than the step-time model
    # Relative change of the machine's step times during the run, 0.2: 20 %; None: no change seen.
    speed_moved: float | None = None
    reason: str = ""
    confirm_seconds: float | None = None  # of a level that would confirm 0.8 x the estimate
    # Concurrent conversations at `estimated_rate`, including the think times of their users; None:
    # the workload has no conversations.
    users: float | None = None
    # `estimated_rate` if the server computed each conversation's history again; None: the workload
    # has no conversations, or the server does so.
    estimated_rate_without_reuse: float | None = None
    # Concurrent conversations at that rate, and at the rate with no prompt cache beside the slots;
    # None: not known, or there is no prompt cache.
    users_without_reuse: float | None = None
    users_without_prompt_cache: float | None = None
    # Advice about the SLO: one under which the interval would be narrow, or under which there would
    # be a capacity; "": none.
    advice: str = ""
    # The share of its CPU time that the engine lost to other processes, as the mean of the levels;
    # None: no level was disturbed. By step times, `estimated_rate` is that of the machine without
    # them, and `busy_rate` that of the machine as busy as it was. They are equal if the campaign
    # accepts disturbed levels as they are. By levels, all rates are those of the machine as busy as
    # it was, and `busy_rate` is None.
    taken_share: float | None = None
    busy_rate: float | None = None
    # The estimate from step times, where a level that met the SLO at a higher rate has raised
    # `estimated_rate`; None: no level contradicted it.
    contradicted_rate: float | None = None
    # What requests measured that miss the SLO unloaded by the step-time model, and were therefore
    # sent alone; "": none was sent.
    checked: str = ""

    @property
    def is_confirmed(self) -> bool:
        """Whether some rate is confirmed."""
        return self.state == "confirmed"

    @property
    def is_none(self) -> bool:
        """Whether single requests miss the SLO, as measured or by the step-time model, so that no
        rate meets it."""
        is_none_by_model = self.method == "step_times" and not self.estimated_rate
        return self.state == "misses_slo_unloaded" or (is_none_by_model and not self.is_confirmed)


class Disturbance(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """CPU contention during a level: the CPU time that was taken from the engine
    (crossover.loadtests.levels.disturbance has the formula)."""

    share: float | None = None  # taken share of the CPU time that it wanted, 0..1; None: not known
    # Taken CPU time over the level's duration: small if the engine hardly needs the CPU.
    lost_share: float | None = None
    who: str = ""  # who took most of it, if the level is disturbed
    is_disturbed: bool = False
    # The level counts although it is disturbed: the campaign accepts that, the level met the SLO
    # all the same, or what was taken does not explain that it missed it.
    counts: bool = False
    # The times of its steps stand for the undisturbed machine once they are shortened by `share`.
    # False: they are taken as they were, because the campaign accepts that.
    is_corrected: bool = False

    @property
    def is_set_aside(self) -> bool:
        """Whether the level does not count, because it says nothing about the server."""
        return self.is_disturbed and not self.counts


class EngineTime(msgspec.Struct, frozen=True, kw_only=True):
    """How an engine spent its time while it had work, by its own clock, since it started."""

    steps: int
    device_seconds: float  # in the backend, including the calls that launch its kernels
    # All other busy time: scheduling, sampling outside the backend, detokenizing, messages.
    host_seconds: float

    @property
    def host_share(self) -> float | None:
        """Share of its busy time in which the device waited for the host; None: no step ran."""
        busy = self.device_seconds + self.host_seconds
        return self.host_seconds / busy if busy > 0 else None

    def since(self, before: EngineTime) -> EngineTime | None:
        """Return the difference from `before` to this; None: the engine was restarted between
        them."""
        if self.steps < before.steps or self.device_seconds < before.device_seconds:
            return None
        return EngineTime(
            steps=self.steps - before.steps,
            device_seconds=round(self.device_seconds - before.device_seconds, 6),
            host_seconds=round(max(0.0, self.host_seconds - before.host_seconds), 6),
        )


class EngineInfo(RequestedSettings, frozen=True, kw_only=True, omit_defaults=True):
    """The engine and settings that a Crossover server reports (/v1/placement); all None for
    another server."""

    name: str | None = None  # of the backend
    device: str | None = None
    device_name: str | None = None  # the CPU or GPU that it runs on
    weight_format: str | None = None
    threads: int | None = None
    prefix_reuse: str | None = None  # what the engine reuses, as a phrase
    predicted: dict[str, int] | None = None  # memory: a field of EngineMemory -> bytes
    # Share of its memory on the NUMA nodes that it was given; None: it was given none.
    memory_share_on_nodes: float | None = None
    command: str | None = None  # of another project's engine
    stored_tokens: int | None = None  # of its prompt cache
    stored_sequence_tokens: int | None = None  # what a sequence in it takes beyond its tokens
    copy_token_seconds: float | None = None  # of a token to or from it

    @property
    def reported_settings(self) -> SchedulerSettings:
        """Return the scheduler settings of a Crossover server, with its device's defaults for what
        it does not report."""
        return msgspec.structs.replace(
            self.filled(DEFAULT_SETTINGS[self.device or "cpu"]),
            stored_tokens=self.stored_tokens or 0,
            stored_sequence_tokens=self.stored_sequence_tokens or 0,
            copy_token_seconds=self.copy_token_seconds or 0.0,
        )


def _kind(name: str) -> str:
    return re.sub(r"(?<!^)([A-Z])", r"_\1", name).lower()


class Event(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="kind", tag=_kind
):
    """The fields that all events have."""

    unix_seconds: float = msgspec.field(default_factory=time.time)
    cell: str | None = None  # Cell.key
    level: str | None = None  # unique per attempt


class RunStarted(Event, frozen=True, kw_only=True):
    """The run started, or was resumed."""


class RunFinished(Event, frozen=True, kw_only=True):
    """Every configuration is measured or skipped."""


class Interrupted(Event, frozen=True, kw_only=True):
    """The run (no cell), a cell's server or a level was interrupted."""

    reason: str


class CellStarted(Event, frozen=True, kw_only=True):
    """A configuration's part of a block began."""

    cell: str
    block: int = 1
    # Maximum measuring time of the configuration at the end of this part, over all its parts.
    until_seconds: float


class CellReady(Event, frozen=True, kw_only=True):
    """The server of a configuration answers requests."""

    cell: str
    info: EngineInfo = EngineInfo()
    load_seconds: float | None = None  # of the budget
    synthetic: bool = False  # random weights
    spec: ModelSpec | None = None  # shape of a model that is not of the ladder; None: not known
    url: str | None = None
    layout: dict[str, Any] | None = None  # crossover.loadtests.host.cpu_pinning.Layout
    # crossover.loadtests.load_generator.openai_endpoint.TargetFacts
    target: dict[str, Any] | None = None

    @property
    def shared_cores(self) -> list[str]:
        return list((self.layout or {}).get("shared") or ())

    @property
    def endpoint_notes(self) -> list[str]:
        """Features that the endpoint lacks, as sentences."""
        return list((self.target or {}).get("notes") or ())


def device_of(named: str | None, ready: CellReady | None) -> str | None:
    """Return the device of a configuration, "cpu" or "gpu": the one that the cell names, else the
    one that its server reports, as another project's engine may.

    None: it is not known, as of an endpoint that does not say.
    """
    return named or (None if ready is None else ready.info.device)


class EngineChosen(Event, frozen=True, kw_only=True):
    """The CPU engine of a cell whose backend is `best`, chosen when the cell started."""

    cell: str
    backend: str
    weight_format: str
    reason: str  # includes the estimated capacity of each other engine, or why it cannot be used
    threads: int | None = None  # chosen among several numbers; None: only the default was tried
    slots: int | None = None  # None: as the campaign says, or the default, since nothing was timed
    # That serve from one queue, and the NUMA nodes that they run on together; None: not recorded,
    # or the machine has one node.
    engines: int | None = None
    nodes: int | None = None


class SlotsChosen(Event, frozen=True, kw_only=True):
    """The number of slots with which the engine of a cell has the highest capacity by its
    calibration. If it is another number, the server is started again."""

    cell: str
    slots: int
    rate: float  # the simulated capacity with them, requests/s
    previous_slots: int
    previous_rate: float  # ... and with these

    @property
    def is_change(self) -> bool:
        return self.slots != self.previous_slots


class Calibrated(Event, frozen=True, kw_only=True):
    """The server of a cell as single streams and bursts showed it."""

    cell: str
    spent_seconds: float
    # Its settings are those of the engine, or as far as known those of another server; its `reuse`
    # is None where the workload has no conversations. None: no step-time model fits.
    server: ServerModel | None = None
    reason: str = ""  # why there is no step-time model


class CellSkipped(Event, frozen=True, kw_only=True):
    cell: str
    reason: str


class CellFinished(Event, frozen=True, kw_only=True):
    cell: str
    capacity: Capacity  # under the campaign's SLO
    # The rate in whose unit the texts of `capacity` have their rates; None: that which suits them.
    unit_rate: float | None = None


class LevelStarted(Event, frozen=True, kw_only=True):
    cell: str
    level: str
    plan: LevelPlan
    start: int | None = None  # 1..: which start of the cell's server; None: not known
    started_unix_seconds: float = 0.0  # the moment that RequestRecord's times count from


class LevelFinished(Event, frozen=True, kw_only=True):
    cell: str
    level: str
    due: int  # requests on record, including those of the warm-up
    window_seconds: float  # as measured
    spent_seconds: float = 0.0  # of the budget: start, warm-up, window and drain
    is_valid: bool = True  # no serious warning except `Disturbed`
    warnings: list[str] = []  # codes of the warnings
    disturbance: Disturbance | None = None  # None: not measured
    # Of the whole level, including warm-up and drain; None: the server does not report it.
    engine_time: EngineTime | None = None
    # Share of the time in which the busiest load generator process ran or waited for a core.
    generator_busy_share: float | None = None


class LevelAbandoned(Event, frozen=True, kw_only=True):
    cell: str
    level: str
    reason: str
    spent_seconds: float = 0.0  # of the budget; 0.0 if the runner was killed


class Waited(Event, frozen=True, kw_only=True):
    """The campaign waited for a quiet machine, before it repeated a level."""

    cell: str
    reason: str  # who disturbed it
    spent_seconds: float


class NeverQuiet(Event, frozen=True, kw_only=True):
    """A level missed the SLO while it was disturbed, and so did its repetition. Its rate is neither
    met nor missed by the machine without other processes."""

    cell: str
    reason: str  # who disturbed the machine


class Elapsed(Event, frozen=True, kw_only=True):
    """Time that passed between measurements, such as that of simulations."""

    cell: str
    spent_seconds: float


AnyEvent: Any = functools.reduce(operator.or_, Event.__subclasses__())  # every kind above
E = TypeVar("E", bound=Event)


def of_kind(events: Iterable[Event], kind: type[E], cell: str | None = None) -> list[E]:
    """Return the events of one kind, in order. `cell`: only those of this configuration."""
    return [event for event in events if isinstance(event, kind) and cell in (None, event.cell)]

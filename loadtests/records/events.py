"""The journal of a run: what the runner did, in order, one struct per kind of event.

    {"kind": "level_started", "unix_seconds": 1780000000.0, "cell": "...", "level": "...#1.1", ...}

One line of events.jsonl is one event; its `kind` is the struct's name in snake case.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable
from enum import StrEnum
from typing import Any, TypeVar

import msgspec

from loadtests.records.schema import Disturbance, EngineTime, WorkerFacts


class SkipCause(StrEnum):
    """Why a cell was not measured."""

    MEMORY = "memory"  # it does not fit
    SETTINGS = "settings"  # the backend, format or device cannot be had here
    SERVER = "server"  # the server did not start, or ended
    ENDPOINT = "endpoint"  # the server refused the probe


class LevelPurpose(StrEnum):
    SINGLE_STREAM = "single_stream"  # one request at a time
    SEARCH = "search"
    LOAD = "load"  # `crossover load`


class CapacityStatus(StrEnum):
    """What is known of the capacity; one function decides (loadtests.capacity.estimate)."""

    CONFIRMED = "confirmed"  # a level at `held` ran long enough and met the SLO; higher ones broke
    AT_LEAST = "at_least"  # as confirmed, and no rate was seen to break the SLO
    ALONE_ONLY = "alone_only"  # single-stream requests meet the SLO; no rate is confirmed
    NONE = "none"  # at no rate: single-stream requests miss the SLO
    UNRESOLVED = "unresolved"  # the levels do not tell


class Confirmation(msgspec.Struct, frozen=True, kw_only=True):
    """The levels at the confirmed rate that were long and steady enough, together."""

    levels: int
    seconds: float
    requests: int
    asked_rate: float | None = None  # requests/s that the levels asked for; None: not on record


class Capacity(msgspec.Struct, frozen=True, kw_only=True):
    """The highest rate that meets the SLO, requests/s, by measured levels only.

    `held` was run, long enough, and met the SLO; None: no rate did. It is the rate that was asked
    for, or that of the requests that came where they were fewer. low..high holds the capacity
    that the next start of the server finds, each end at the search's confidence; None where no
    level bounds it. All four are 0.0 for `none`.
    """

    status: CapacityStatus
    held: float | None = None
    low: float | None = None
    estimate: float | None = None
    high: float | None = None
    is_narrow: bool = False  # the interval is as narrow as asked
    reason: str
    confirmed_by: Confirmation | None = None  # None where `held` is none, or not on record
    starts: int | None = None  # of the server, that the levels ran on; None: not on record
    left_out: int = 0  # levels cut short under another SLO, which say nothing of this one

    @property
    def holds(self) -> bool:
        """Some rate is confirmed."""
        return self.held is not None and self.held > 0


class PredictedRate(msgspec.Struct, frozen=True, kw_only=True):
    """A capacity by calibration and simulation, requests/s, with quantiles of its error."""

    rate: float  # 0.0: single-stream requests fail the SLO
    low: float | None = None  # p10; None: of a rate of 0
    high: float | None = None  # p90


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a Crossover server said of its engine (/v1/placement); all None for another server."""

    name: str | None = None  # of the backend
    device: str | None = None
    device_name: str | None = None
    weight_format: str | None = None
    quality_kl_nats: float | None = None
    slots: int | None = None
    context_tokens: int | None = None
    kv_tokens: int | None = None
    threads: int | None = None
    cores: list[int] | None = None  # that it may run on; []: all
    nice: int | None = None  # above 0: HTTP goes before it
    predicted: dict[str, Any] | None = None  # memory in bytes by what holds it
    measured: dict[str, Any] | None = None
    gpu: dict[str, Any] | None = None  # where its memory and the load's time went
    details: dict[str, Any] | None = None


def _kind(name: str) -> str:
    return re.sub(r"(?<!^)([A-Z])", r"_\1", name).lower()


class Event(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="kind", tag=_kind
):
    """What all events have."""

    unix_seconds: float = msgspec.field(default_factory=time.time)
    cell: str | None = None  # Cell.key
    level: str | None = None  # unique per attempt

    @property
    def kind(self) -> str:
        return str(self.__struct_config__.tag)


class RunStarted(Event, frozen=True, kw_only=True):
    cells: int | None = None


class RunResumed(Event, frozen=True, kw_only=True):
    dropped_bytes: dict[str, int] = {}  # cut-off last lines, by file


class RunFinished(Event, frozen=True, kw_only=True):
    pass


class Interrupted(Event, frozen=True, kw_only=True):
    """The run (no cell), a cell's server or a level was interrupted."""

    reason: str
    last_event: str | None = None  # its kind, where the runner was killed


class CellStarted(Event, frozen=True, kw_only=True):
    """A cell's part of a block is begun. Seconds are of measuring, since the cell's first part."""

    cell: str
    budget_seconds: float | None = None  # of all its parts; None: one level of `crossover load`
    block: int = 1
    until_seconds: float | None = None  # its budget up to the end of this part


class CellReady(Event, frozen=True, kw_only=True):
    """The server answers."""

    cell: str
    info: EngineInfo = EngineInfo()
    load_seconds: float | None = None
    rss_bytes: int | None = None
    peak_rss_bytes: int | None = None
    synthetic: bool | None = None  # random weights; None: not known
    url: str | None = None
    layout: dict[str, Any] | None = None  # loadtests.host.processes.Layout
    placement: Any = None  # the server's explanation
    memory_cap: str | None = None
    target: dict[str, Any] | None = None  # loadtests.generator.endpoint.TargetFacts
    sampling: Any = None  # resources that are not sampled, and why

    @property
    def shared_cores(self) -> list[str]:
        """Which processes share cores."""
        return list((self.layout or {}).get("shared") or ())

    @property
    def endpoint_notes(self) -> list[str]:
        """What the endpoint lacks."""
        return list((self.target or {}).get("notes") or ())


class EngineRating(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An engine that was looked at for a cell; tokens/s, None where it was not measured."""

    backend: str
    weight_format: str
    is_chosen: bool = False
    why_not: str = ""  # why it cannot be chosen; "": it can
    measured_on: str = ""  # the model measured, where that is another one; the rates are scaled
    slots: int | None = None
    prompt_tokens_per_second: float | None = None
    decode_tokens_per_second: float | None = None  # of one stream
    decode_slots_tokens_per_second: float | None = None  # of all slots together
    requests_per_second: float | None = None  # under the cell's workload, all slots busy


class EngineChosen(Event, frozen=True, kw_only=True):
    """The engine of a cell whose backend is `best`, chosen when the cell started."""

    cell: str
    backend: str
    weight_format: str
    reason: str
    engines: list[EngineRating]
    spent_seconds: float  # measuring and making weights for that; not of the budget


class Calibrated(Event, frozen=True, kw_only=True):
    """The fields of loadtests.simulation.calibration.Prediction."""

    cell: str
    spent_seconds: float
    observations: list[dict[str, Any]] = []
    slots: int | None = None
    law: dict[str, Any] | None = None
    policy: dict[str, Any] | None = None
    rates: dict[str, PredictedRate] = {}  # by the SLO's name
    reason: str = ""


class CellSkipped(Event, frozen=True, kw_only=True):
    cell: str
    cause: SkipCause
    reason: str


class CellFinished(Event, frozen=True, kw_only=True):
    cell: str
    capacities: dict[
        str, Capacity
    ] = {}  # by the SLO's name, the campaign's first SLO first; empty: `crossover load`

    @property
    def capacity(self) -> Capacity | None:
        """The capacity under the campaign's first SLO."""
        return next(iter(self.capacities.values()), None)


class LevelStarted(Event, frozen=True, kw_only=True):
    cell: str
    level: str
    purpose: LevelPurpose
    rate_per_second: float | None  # open loop; None: closed loop
    concurrency: int | None  # closed loop; None: open loop
    arrivals: dict[str, Any]  # the arrival process, as loadtests.workload.arrivals names it
    warmup_seconds: float  # requests due before this do not count
    window_seconds: float  # requests due in [warmup_seconds, warmup_seconds + window_seconds) count
    seed: int
    attempt: int  # 1..: how often this level was tried, this time included
    start: int | None = None  # 1..: which start of the cell's server; None: not known
    started_unix_seconds: float  # the moment that RequestRecord's times count from
    target: float | None = None  # share of good requests that the search asked for
    probe_seconds: float | None = None  # of a short request before it; None: too slow, or not ours


class LevelFinished(Event, frozen=True, kw_only=True):
    cell: str
    level: str
    due: int  # requests on record, those of the warm-up included
    good: int  # within the window
    failed: int
    window_due: int
    window_seconds: float  # as it came out: shorter than asked where the level was cut short
    cut_short: str | None = None  # why
    gave_up: int = (
        0  # requests that were ended at the end of the drain time, or sent after the window
    )
    spent_seconds: float  # of the budget: start of the load generator, warm-up, window and drain
    verdict: str
    is_valid: bool
    warnings: list[str] = []
    # loadtests.workload.goodness_of_fit.ArrivalCheck; None: closed loop
    arrivals: dict[str, Any] | None = None
    disturbance: Disturbance | None = None  # None: it was not watched
    # of the whole level, warm-up and drain included; None: the server does not say
    engine_time: EngineTime | None = None
    workers: list[WorkerFacts] = []  # of several load generators
    held: bool = False  # disturbed, and yet it counts under an SLO that it meets

    @property
    def is_disturbed(self) -> bool:
        """And the campaign does not take the machine as it is."""
        found = self.disturbance
        return found is not None and found.is_disturbed and not found.counts

    @property
    def is_set_aside(self) -> bool:
        """Disturbed, and to be measured again: no search sees it."""
        return self.is_disturbed and not self.held


class LevelAbandoned(Event, frozen=True, kw_only=True):
    cell: str
    level: str
    reason: str
    spent_seconds: float | None = None


class Waited(Event, frozen=True, kw_only=True):
    """The campaign waited for a quiet machine."""

    cell: str
    reason: str  # by whom it was disturbed
    spent_seconds: float
    became_quiet: bool


class NeverQuiet(Event, frozen=True, kw_only=True):
    """The cell's patience was used up: no level was measured after it."""

    cell: str
    reason: str  # by whom the machine was disturbed
    slos: list[str]  # names of those that were not searched to the end


AnyEvent = (
    RunStarted
    | RunResumed
    | RunFinished
    | Interrupted
    | CellStarted
    | CellReady
    | EngineChosen
    | Calibrated
    | CellSkipped
    | CellFinished
    | LevelStarted
    | LevelFinished
    | LevelAbandoned
    | Waited
    | NeverQuiet
)
E = TypeVar("E", bound=Event)


def of_kind(events: Iterable[Event], kind: type[E], cell: str | None = None) -> list[E]:
    """The events of one kind, in order; of one cell, where one is named."""
    return [e for e in events if isinstance(e, kind) and cell in (None, e.cell)]


def started_levels(events: Iterable[Event]) -> dict[str, LevelStarted]:
    """All levels that were begun, by name, in order."""
    return {event.level: event for event in of_kind(events, LevelStarted)}


def completed_levels(events: Iterable[Event]) -> dict[str, LevelFinished]:
    """The levels that were measured to their end, by name, in order."""
    return {event.level: event for event in of_kind(events, LevelFinished)}

"""The data of a report: the configurations of a run, read once.

    data = read_report(Path("runs/20261124-demo"))
    for cell in data.cells:                       # smallest model first
        cell.capacity, cell.single_stream.ttft_seconds, cell.step_times

Page, Markdown, CSV, JSON, PNG and plan show these values. Times are in seconds, sizes in bytes,
rates in requests per second. A missing value is None, shown as "not measured".
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from crossover.loadtests.campaign.campaign_file import Search
from crossover.loadtests.capacity.capacity_estimate import MIN_SECONDS, estimate, server_under_load
from crossover.loadtests.capacity.capacity_text import estimate_words, rates_of
from crossover.loadtests.errors import BadRunFolder
from crossover.loadtests.levels.level_columns import Judged, Level, levels_of
from crossover.loadtests.levels.level_warnings import NamedWarning, level_warnings
from crossover.loadtests.records.journal_events import (
    Calibrated,
    Capacity,
    CellFinished,
    CellReady,
    CellSkipped,
    CellStarted,
    EngineChosen,
    Event,
    Interrupted,
    LevelAbandoned,
    LevelFinished,
    NeverQuiet,
    SlotsChosen,
    device_of,
    of_kind,
)
from crossover.loadtests.records.resource_sample import Power, ResourceSample, power_of
from crossover.loadtests.records.run_folder import EVENTS, RunManifest, RunRecords, read_records
from crossover.models import formatting
from crossover.models.identity.identify_model import ModelIdentity
from crossover.models.identity.model_ladder import find_ladder_model
from crossover.models.shape.model_spec import ModelSpec, Routing
from crossover.reports.devices.device_capacity import Traffic
from crossover.reports.devices.device_catalog import Device, device_of_driver_name
from crossover.reports.errors import BadRun
from crossover.serving.capacity.simulated_capacity import (
    QUICK_REQUESTS,
    Demand,
    Server,
    ServerModel,
)
from crossover.serving.capacity.slo import Slo
from crossover.serving.capacity.step_time_model import StepTimeModel
from crossover.serving.errors import WorkloadError
from crossover.serving.workload.arrivals import Poisson, Trace, recorded_arrivals
from crossover.serving.workload.request_lengths import Workload

CPU, GPU = "cpu", "gpu"  # the two sides of a crossover
SIDES = (CPU, GPU)
SIDE_NAMES = {CPU: "CPU", GPU: "GPU"}  # as people read them

CellState = Literal["measured", "skipped", "unfinished", "not_started"]
CampaignPart = TypeVar("CampaignPart")
EventKind = TypeVar("EventKind", bound=Event)
MIN_SINGLE_STREAM_REQUESTS = 5  # fewer do not decide whether enough requests meet the SLO


class Memory(msgspec.Struct, frozen=True, kw_only=True):
    """What the memory of one model is used for, as placement predicted it, and its measured peak.
    In bytes."""

    weight_bytes: int | None = None
    kv_bytes: int | None = None
    state_bytes: int | None = None  # recurrent states and checkpoints
    buffer_bytes: int | None = None  # for the computation of a step
    overhead_bytes: int | None = None
    prompt_cache_bytes: int | None = None
    peak_bytes: int | None = None  # measured: the engine's peak RSS
    # measured: the GPU's peak memory in use, by all processes; None for what ran on the CPU
    gpu_bytes: int | None = None

    @property
    def parts(self) -> dict[str, int | None]:
        """Predicted bytes by part; None: not predicted."""
        return {
            "weights": self.weight_bytes,
            "KV cache": self.kv_bytes,
            "recurrent state": self.state_bytes,
            "buffers": self.buffer_bytes,
            "overhead": self.overhead_bytes,
            "prompt cache": self.prompt_cache_bytes,
        }

    @property
    def predicted_bytes(self) -> int | None:
        if self.weight_bytes is None or self.kv_bytes is None or self.overhead_bytes is None:
            return None
        return sum(size for size in self.parts.values() if size is not None)

    @property
    def measured_bytes(self) -> int | None:
        return self.peak_bytes if self.gpu_bytes is None else self.gpu_bytes

    @property
    def peak_or_predicted_bytes(self) -> int | None:
        """The measured peak, else the prediction."""
        return self.predicted_bytes if self.measured_bytes is None else self.measured_bytes


class SingleStream(msgspec.Struct, frozen=True, kw_only=True):
    """Requests sent one at a time: their median times."""

    requests: int
    ttft_seconds: float | None  # None: no request was answered
    tpot_seconds: float | None  # None: no answer had a second chunk
    # Whether SLO attainment reaches the target; None: too few requests to decide.
    meets_slo: bool | None


class LevelData(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """One finished load level, judged by the report's SLO."""

    level: Level
    judged: Judged
    watts: float | None = None  # of the device that served, mean of the level; None: not measured
    machine_watts: float | None = None  # of CPU and GPU together, or of the one that was measured
    warnings: tuple[NamedWarning, ...] = ()

    def load_words(self, unit_rate: float | None) -> str:
        """Return `1.8/s`, `8 users` or `single stream`.

        A rate is written in the unit of `CellData.unit_rate`.
        """
        return formatting.load(self.level.rate, self.level.concurrency, like=unit_rate)

    def quantile(self, name: str, q: float) -> float | None:
        """Return a quantile of "ttft", "tpot", "e2e" or "send_delay", seconds; None: unknown."""
        return self.level.quantile(getattr(self.level, name), q)


class RateInterval(NamedTuple):
    """The 90 % confidence interval of a capacity, requests/s."""

    low: float
    high: float

    def overlaps(self, other: RateInterval) -> bool:
        return self.low <= other.high and other.low <= self.high


class CellData(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """One configuration: a model in a weight format, on an engine, on a device of one machine."""

    key: str
    run_id: str
    folder: str
    model: str
    spec: ModelSpec | None  # None: its shape is not known
    source: str = ""  # the path or hub id of a model that the ladder does not have
    weight_format: str
    backend: str
    device: str | None  # "cpu" or "gpu", which served; None: not known, as for an endpoint
    engine: str = ""  # name of another project's engine; "": one of our backends served
    slots: int | None = None
    engines: int = 1  # that serve from one queue, each with these slots
    cores: int | None = None  # of the engine, if the campaign measured several numbers of cores
    state: CellState = "not_started"
    reason: str = ""  # why it was skipped or not finished; "": it was measured
    levels: tuple[LevelData, ...] = ()  # single streams and loads, in the order measured
    capacity: Capacity | None = None  # None: not measured
    # All rates of a device are written in the unit of this one (formatting.rate_unit), so that they
    # can be compared. None: no rate is known.
    unit_rate: float | None = None
    min_level_seconds: float = MIN_SECONDS  # duration of the shortest level that can confirm a rate
    # As it was calibrated, slowed down by the factor that the load levels showed. None: there is no
    # step-time model.
    server: ServerModel | None = None
    calibrated: ServerModel | None = None  # that server without load, as it was calibrated
    traffic: Traffic | None = None  # None: the run does not record the lengths of its requests
    memory: Memory = Memory()
    ready: CellReady | None = None  # the event of its last server
    load_seconds: tuple[float, ...] = ()  # of each time that the model was loaded, in order
    engine_choice: EngineChosen | None = None  # None: the campaign named its engine
    slots_choice: SlotsChosen | None = None  # None: its slots were not chosen
    are_slots_set: bool = False  # by the campaign
    is_endpoint: bool = False  # it ran already, and was not started by the campaign
    never_idle_reason: str = ""  # "": the machine was idle before the configuration was measured

    @property
    def confirmed_rate(self) -> float | None:
        """The confirmed rate, requests/s."""
        if self.capacity is None or not self.capacity.is_confirmed:
            return None
        return self.capacity.confirmed_rate

    @property
    def estimated_rate(self) -> float | None:
        """The estimated capacity, else the confirmed rate, requests/s; 0.0: the SLO is missed
        unloaded; None: not known."""
        capacity = self.capacity
        if capacity is None:
            return None
        if capacity.estimated_rate is not None:
            return capacity.estimated_rate
        if capacity.method == "step_times" and not capacity.is_confirmed:
            return 0.0  # by the step-time model single requests miss the SLO
        return self.confirmed_rate

    @property
    def confirmed_words(self) -> str:
        """The confirmed rate: `23/s`."""
        return formatting.rate(self.confirmed_rate, rounded="down", like=self.unit_rate)

    @property
    def estimated_words(self) -> str:
        """The estimated capacity with its interval: `31/s (27–36)`."""
        return estimate_words(self.capacity, self.unit_rate)

    @property
    def capacity_interval(self) -> RateInterval | None:
        """The interval of the capacity; None: one of its ends is not known."""
        capacity = self.capacity
        if capacity is None or capacity.low is None or capacity.high is None:
            return None
        return RateInterval(capacity.low, capacity.high)

    @property
    def side(self) -> str:
        """CPU or GPU. A device that is not known to be a GPU is treated as a CPU."""
        return GPU if self.device == GPU else CPU

    @property
    def device_words(self) -> str:
        """`CPU`, `GPU`, or `not known`."""
        return SIDE_NAMES.get(self.device or "", "not known")

    @property
    def name(self) -> str:
        """`llama-3.2-1b on the GPU`; for an unknown device `llama-3.2-1b`."""
        return f"{self.model} on the {self.device_words}" if self.device else self.model

    @property
    def is_served(self) -> bool:
        """Whether some rate is confirmed or estimated."""
        return bool(self.confirmed_rate or self.estimated_rate)

    @property
    def engine_words(self) -> str:
        """`onnx int8`."""
        return " ".join(filter(None, (self.engine or self.backend, self.weight_format)))

    @property
    def parameters(self) -> int | None:
        return None if self.spec is None else self.spec.parameters

    @property
    def size_words(self) -> str:
        """`8.0B`; for a mixture of experts `31B, 3.0B active`."""
        words = formatting.parameters(self.parameters)
        if self.spec is None or self.spec.experts is None:
            return words
        return f"{words}, {formatting.parameters(self.spec.active_parameters)} active"

    @property
    def step_times(self) -> StepTimeModel | None:
        """The step-time model of its server."""
        return None if self.server is None else self.server.step_times

    def simulated(self, requests: int = QUICK_REQUESTS) -> Server | None:
        """Return its server under its requests, `requests` of them at each rate; None: there is no
        step-time model, or the lengths of requests are not known."""
        if self.server is None or self.traffic is None:
            return None
        return self.server.simulated(self.traffic.demand, requests)

    @property
    def answer_seconds(self) -> float | None:
        """The mean time of a whole answer at the estimated capacity, simulated; None: there is no
        step-time model, or no capacity above 0."""
        server = self.simulated()
        if server is None or not self.estimated_rate:
            return None
        return float(server.play(self.estimated_rate).e2e.mean())

    @property
    def experts(self) -> Routing | None:
        """The routing of a mixture of experts; None: a dense model, or not known."""
        return None if self.step_times is None else self.step_times.experts

    @property
    def levels_under_load(self) -> tuple[LevelData, ...]:
        """The levels at a rate that count, the lowest rate first."""
        at_rate = [
            measured for measured in self.levels if measured.level.rate and measured.level.counts
        ]
        return tuple(sorted(at_rate, key=lambda measured: measured.level.rate or 0.0))

    def _meets_slo_unloaded(self, judged: Judged) -> bool | None:
        """Return whether single requests meet the SLO; None: too few to decide.

        `judged`: the verdict on the last level of single requests.
        """
        if self.capacity is not None and self.capacity.state == "misses_slo_unloaded":
            return False
        if self.confirmed_rate:  # the SLO is met under load, so it is met without
            return True
        if self.estimated_rate == 0.0 or judged.due < MIN_SINGLE_STREAM_REQUESTS:
            return None
        if judged.verdict == "misses":
            return False
        if judged.verdict == "meets" or judged.good == judged.due:
            return True
        return None

    @property
    def single_stream_levels(self) -> list[Level]:
        """The levels of one request at a time."""
        return [measured.level for measured in self.levels if measured.level.is_single_stream]

    @property
    def single_stream(self) -> SingleStream | None:
        """The requests that were sent one at a time, in all levels that count; None: none was."""
        single_streams = [
            measured
            for measured in self.levels
            if measured.level.is_single_stream and measured.level.counts and measured.judged.due
        ]
        if not single_streams:
            return None
        levels = [measured.level for measured in single_streams]
        return SingleStream(
            requests=sum(measured.judged.due for measured in single_streams),
            ttft_seconds=_median([level.ttft[level.counted] for level in levels]),
            tpot_seconds=_median([level.tpot[level.counted] for level in levels]),
            meets_slo=self._meets_slo_unloaded(single_streams[-1].judged),
        )


def _median(latencies: Sequence[npt.NDArray[np.float64]]) -> float | None:
    """Return the median of all latencies together, by nearest rank as for a level; None: there is
    none."""
    known = np.concatenate(latencies)
    known = known[~np.isnan(known)]
    return float(np.quantile(known, 0.5, method="inverted_cdf")) if len(known) else None


class GpuData(msgspec.Struct, frozen=True, kw_only=True):
    """The GPU of the machine that was measured, as the run recorded it. Missing is None."""

    name: str
    count: int = 1  # of this name in the machine; an engine takes one
    memory_bytes: int | None = None
    power_limit_watts: float | None = None
    device: Device | None = None  # its entry in the catalog; None: no single entry matches it

    @property
    def dollars_per_hour(self) -> float | None:
        """List price of one GPU."""
        return None if self.device is None else self.device.dollars_per_hour

    @property
    def words(self) -> str:
        """`NVIDIA H200`, `one of 4 NVIDIA H200`."""
        return self.name if self.count == 1 else f"one of {self.count} {self.name}"


class ReportData(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """A run under one SLO."""

    manifest: RunManifest
    folder: str
    slo: Slo
    cells: tuple[CellData, ...]  # smallest model first, unknown sizes last
    events: tuple[Event, ...] = ()  # in order
    damage: tuple[str, ...] = ()  # the parts of its files that cannot be read, in words

    @property
    def facts(self) -> dict[str, Any]:
        """Facts of the machine that serves; for an endpoint only its `url`."""
        return self.manifest.server_facts

    @property
    def gpu(self) -> GpuData | None:
        """The machine's first GPU; None: its facts name none."""
        gpus = [gpu for gpu in self.facts.get("gpus") or () if gpu.get("name")]
        if not gpus:
            return None
        name, memory_bytes = str(gpus[0]["name"]), gpus[0].get("total_bytes")
        return GpuData(
            name=name,
            count=sum(gpu["name"] == name for gpu in gpus),
            memory_bytes=memory_bytes,
            power_limit_watts=gpus[0].get("power_limit_watts"),
            device=device_of_driver_name(name, memory_bytes),
        )

    @property
    def sides(self) -> tuple[str, ...]:
        """The devices on which configurations of this run ran, the CPU first."""
        return tuple(side for side in SIDES if any(cell.side == side for cell in self.cells))

    @property
    def workload(self) -> Workload:
        return _campaign_part(self.manifest, "workload", Workload)

    @property
    def request_count(self) -> int:
        """The number of requests that were due in the finished levels."""
        return sum(measured.judged.due for cell in self.cells for measured in cell.levels)


def read_report(folder: Path, slo: Slo | None = None) -> ReportData:
    """Return the run in a folder, judged by its own SLO or by another.

    Raises BadRun if there is no run in it, or one of another format version.
    """
    try:
        run = read_records(folder)
    except BadRunFolder as problem:
        raise BadRun(str(problem)) from problem
    if not run.events:
        raise BadRun(f"The run {folder} is empty: {folder / EVENTS} is empty or missing")
    slo = slo or _campaign_part(run.manifest, "slo", Slo)
    return ReportData(
        manifest=run.manifest,
        folder=str(run.folder),
        slo=slo,
        cells=tuple(sorted(_cells_of(run, slo), key=_rank_in_report)),
        events=tuple(run.events),
        damage=tuple(run.damage()),
    )


def _rank_in_report(cell: CellData) -> tuple[float, str, str, str, str]:
    """Return the key that sorts models from fast to slow, since a report says "serves up to" a
    model. A step's time grows with the active parameters."""
    active_parameters = math.inf if cell.spec is None else cell.spec.active_parameters
    return active_parameters, cell.model, cell.side, cell.weight_format, cell.backend


def _campaign_part(manifest: RunManifest, key: str, kind: type[CampaignPart]) -> CampaignPart:
    """Return a part of the run's campaign as its struct. Raises BadRun."""
    value = manifest.campaign.get(key)
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as problem:
        raise BadRun(
            f"Run {manifest.run_id}: its campaign has no valid {key}: {key} = {value!r} ({problem})"
        ) from problem


def _cells_of(run: RunRecords, slo: Slo) -> list[CellData]:
    """Return the configurations of a run, in the order of its manifest."""
    levels_by_cell: dict[str, list[Level]] = {}
    for level in levels_of(run):
        levels_by_cell.setdefault(level.cell, []).append(level)
    demand = _demand(run.manifest)
    cells = []
    for entry in run.manifest.cells:
        levels = levels_by_cell.get(str(entry.get("key")), [])
        cells.append(_cell_of(run, entry, levels, demand, slo))
    unit_rates = {
        side: _unit_rate(run, [cell for cell in cells if cell.side == side], slo) for side in SIDES
    }
    return [msgspec.structs.replace(cell, unit_rate=unit_rates[cell.side]) for cell in cells]


def _unit_rate(run: RunRecords, cells: Sequence[CellData], slo: Slo) -> float | None:
    """Return the rate in whose unit the rates of these configurations are written: that of the
    campaign's texts, if it is recorded and the SLO is the campaign's, or else one that suits their
    capacities."""
    recorded: list[float | None] = []
    if slo == _campaign_part(run.manifest, "slo", Slo):
        keys = {cell.key for cell in cells}
        finished = of_kind(run.events, CellFinished)
        recorded = [event.unit_rate for event in finished if event.cell in keys]
    return formatting.RateUnits().keep(None, rates_of(cell.capacity for cell in cells), recorded)


def _demand(manifest: RunManifest) -> Demand | None:
    """Return the requests of a run, for simulations; None: its trace file is not here.

    The arrivals of a closed loop and of a trace are simulated as Poisson.
    """
    workload = _campaign_part(manifest, "workload", Workload)
    arrivals = recorded_arrivals(manifest.campaign.get("arrivals") or {"kind": "poisson"})
    if isinstance(arrivals, Trace):
        arrivals = Poisson()
    demand = Demand(workload, arrivals)
    try:
        demand.lengths()
    except WorkloadError:
        return None
    return demand


def _cell_of(
    run: RunRecords,
    entry: Mapping[str, Any],
    levels: Sequence[Level],
    demand: Demand | None,
    slo: Slo,
) -> CellData:
    """Return a configuration.

    `entry` is its entry in the manifest, which says what was asked for; what its server reported
    counts more. `levels` are its finished levels, `demand` the requests of the run.
    """
    key = str(entry.get("key"))
    events = [event for event in run.events if event.cell == key]
    ready = _last(events, CellReady)
    info = (ready or CellReady(cell=key)).info
    engine_choice = _last(events, EngineChosen)
    slots_choice = _last(events, SlotsChosen)
    requested = entry if engine_choice is None else msgspec.structs.asdict(engine_choice)
    weight_format = str(info.weight_format or requested.get("weight_format") or "")
    state, reason = _state(events, levels)
    search = msgspec.convert(run.manifest.campaign.get("search") or {}, Search)
    device = device_of(entry.get("device"), ready)
    min_level_seconds = search.level_seconds_on(device)
    last_calibrated = _last(events, Calibrated)
    calibrated = None if last_calibrated is None else last_calibrated.server
    server = calibrated
    capacity = None
    if slo.is_same_promise(_campaign_part(run.manifest, "slo", Slo)):
        capacity = _journal_capacity(events)
    if capacity is None and levels:
        capacity = estimate(levels, slo, server, demand, min_level_seconds=min_level_seconds)
    if server is not None:
        server = server_under_load(server, capacity)
    cores = entry.get("cores")
    identity = _identity_of(entry)
    never_quiet = _last(events, NeverQuiet)
    samples = [sample for sample in run.samples if sample.cell == key]
    load_seconds = [event.load_seconds for event in of_kind(events, CellReady)]
    return CellData(
        key=key,
        run_id=run.manifest.run_id,
        folder=str(run.folder),
        model=str(entry.get("model", "unknown")),
        spec=_shape_of(entry, ready),
        source="" if identity is None else identity.source,
        weight_format="" if weight_format == "none" else weight_format,
        backend=str(info.name or requested.get("backend") or ""),
        device=device,
        engine=str(entry.get("engine") or ""),
        slots=info.slots or (slots_choice and slots_choice.slots) or entry.get("slots"),
        engines=info.engines or 1,
        cores=cores if isinstance(cores, int) else None,
        state=state,
        reason=reason,
        levels=tuple(
            _level_of(level, slo, samples, device)
            for level in levels
            if level.is_single_stream or level.rate is not None
        ),
        capacity=capacity,
        min_level_seconds=min_level_seconds,
        server=server,
        calibrated=calibrated,
        traffic=None if demand is None else Traffic(demand, server),
        memory=_memory(info.predicted or {}, samples, device),
        ready=ready,
        load_seconds=tuple(seconds for seconds in load_seconds if seconds is not None),
        engine_choice=engine_choice,
        slots_choice=slots_choice,
        are_slots_set=entry.get("slots") is not None,
        is_endpoint=entry.get("url") is not None,
        never_idle_reason="" if never_quiet is None else never_quiet.reason,
    )


def _journal_capacity(events: Sequence[Event]) -> Capacity | None:
    """Return the capacity that the journal states; None: it states none, or levels ran after it."""
    finished = _last(events, CellFinished)
    if finished is None or of_kind(events[events.index(finished) :], LevelFinished):
        return None
    return finished.capacity


def _identity_of(entry: Mapping[str, Any]) -> ModelIdentity | None:
    """Return what a model that is not of the ladder was identified as; None: a ladder model."""
    with contextlib.suppress(msgspec.ValidationError):
        return msgspec.convert(entry.get("identity"), ModelIdentity | None)
    return None


def _shape_of(entry: Mapping[str, Any], ready: CellReady | None) -> ModelSpec | None:
    """Return the model's shape: the manifest's, the journal's, or the ladder's; None: not known."""
    identity, model = _identity_of(entry), str(entry.get("model"))
    if identity is not None and identity.spec is not None:
        return identity.spec
    if ready is not None and ready.spec is not None:
        return ready.spec
    published = find_ladder_model(model) if identity is None else None
    return None if published is None else published.spec


def _last(events: Sequence[Event], kind: type[EventKind]) -> EventKind | None:
    return next(reversed(of_kind(events, kind)), None)


def _state(events: Sequence[Event], levels: Sequence[Level]) -> tuple[CellState, str]:
    """Return how far the measurement of a configuration came, and why it came no further ("" if it
    came to its end)."""
    starts = [index for index, event in enumerate(events) if isinstance(event, CellStarted)]
    last_start = starts[-1] if starts else -1
    # A cell that was skipped may have been started again by `campaign resume`.
    endings = [
        event
        for index, event in enumerate(events)
        if isinstance(event, CellFinished)
        or (isinstance(event, CellSkipped) and index > last_start)
    ]
    if endings and isinstance(endings[-1], CellSkipped) and not levels:
        return "skipped", endings[-1].reason
    if not of_kind(events, CellStarted):
        return "not_started", "the campaign ended before it"
    if endings:
        return "measured", ""
    reasons = [event.reason for event in events if isinstance(event, Interrupted | LevelAbandoned)]
    reason = reasons[-1] if reasons else "the run ended or was interrupted during it"
    return ("measured" if levels else "unfinished"), reason


def _level_of(
    level: Level, slo: Slo, samples: Sequence[ResourceSample], device: str | None
) -> LevelData:
    """Return a level, judged by the SLO; `samples` are those of its configuration."""
    own_samples = [sample for sample in samples if sample.level == level.name]
    begin, end = (level.started.started_unix_seconds + seconds for seconds in level.window)
    power = power_of(own_samples, begin, end)
    if device == CPU:  # whether an idle GPU beside it was throttled does not matter
        own_samples = [
            msgspec.structs.replace(sample, gpu_throttled=None) for sample in own_samples
        ]
    return LevelData(
        level=level,
        judged=level.judge(slo),
        watts=_watts_of(power, device),
        machine_watts=power.together,
        warnings=level_warnings(level, slo, own_samples),
    )


def _watts_of(power: Power, device: str | None) -> float | None:
    if device == GPU:
        return power.gpu_watts
    return power.cpu_watts if device == CPU else power.together


def _memory(
    predicted: Mapping[str, int], samples: Sequence[ResourceSample], device: str | None
) -> Memory:
    rss = [sample.engine.rss_bytes for sample in samples if sample.engine is not None]
    on_gpu = [sample.gpu_memory_bytes for sample in samples if device != CPU]
    return msgspec.structs.replace(
        msgspec.convert(predicted, Memory),
        peak_bytes=max((size for size in rss if size is not None), default=None),
        gpu_bytes=max((size for size in on_gpu if size is not None), default=None),
    )

"""What a report is made of: the cells of a run, read once.

    data = read_report(Path("runs/20261124-demo"))
    for cell in data.cells:                       # smallest model first
        cell.capacity, cell.alone.ttft_seconds, cell.step_times

Page, Markdown, CSV, JSON, PNG and plan show these values; nothing is worded here. Times are
seconds, sizes bytes, rates per second. Missing is None, shown as "not measured".
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec
import numpy as np

from crossover.loadtests.campaign.campaign_file import Search
from crossover.loadtests.capacity.capacity_estimate import MIN_SECONDS, estimate
from crossover.loadtests.capacity.capacity_text import common_rate
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
    device_of,
    of_kind,
)
from crossover.loadtests.records.resource_sample import ResourceSample
from crossover.loadtests.records.run_folder import EVENTS, RunManifest, RunRecords, read_records
from crossover.models import formatting
from crossover.models.identify_model import ModelIdentity
from crossover.models.model_ladder import is_ladder_model, ladder_model
from crossover.models.model_spec import ModelSpec, Routing
from crossover.reports.devices.device_capacity import Traffic
from crossover.reports.devices.device_catalog import Device, device_of_driver_name
from crossover.reports.errors import BadRun
from crossover.reports.watts import Power, power_of
from crossover.serving.capacity.scheduler_settings import SchedulerSettings
from crossover.serving.capacity.simulated_capacity import LOADED, QUICK_REQUESTS, lengths_of
from crossover.serving.capacity.slo import Slo
from crossover.serving.capacity.step_time_model import StepTimeModel
from crossover.serving.errors import WorkloadError
from crossover.serving.workload.arrivals import Poisson, Trace, process_of
from crossover.serving.workload.request_lengths import Workload

CPU, GPU = "cpu", "gpu"  # the two sides of a crossover
SIDES = (CPU, GPU)
SIDE_NAMES = {CPU: "CPU", GPU: "GPU"}  # as people read them
CPU_BACKENDS = ("onnx",)  # that drive no GPU

CellState = Literal["measured", "skipped", "unfinished", "not_started"]
T = TypeVar("T")
MIN_ALONE = 5  # requests one at a time, fewer of which tell nothing of a share


class Memory(msgspec.Struct, frozen=True, kw_only=True):
    """Where the memory of one model goes, bytes: as placement predicted it, and as measured."""

    weight_bytes: int | None = None
    kv_bytes: int | None = None
    state_bytes: int | None = None  # recurrent states and checkpoints
    buffer_bytes: int | None = None  # of a step's computation
    overhead_bytes: int | None = None
    peak_bytes: int | None = None  # measured: the engine's peak RSS
    # measured: the most of the GPU in use, by whomever; None for what ran on the CPU
    gpu_bytes: int | None = None

    @property
    def parts(self) -> dict[str, int | None]:
        """Predicted, by what holds it. Runs that were recorded before states and buffers were
        predicted have them in the overhead, or not at all."""
        return {
            "weights": self.weight_bytes,
            "KV cache": self.kv_bytes,
            "recurrent state": self.state_bytes,
            "buffers": self.buffer_bytes,
            "overhead": self.overhead_bytes,
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
    def most_bytes(self) -> int | None:
        """As measured, else as predicted."""
        return self.predicted_bytes if self.measured_bytes is None else self.measured_bytes


class Alone(msgspec.Struct, frozen=True, kw_only=True):
    """Requests one at a time: medians; None: no request answered, or by one chunk."""

    requests: int
    ttft_seconds: float | None
    tpot_seconds: float | None
    is_good: bool | None  # the share of good requests reaches the target; None: too few to tell


class LevelData(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """One finished level, judged by the report's SLO."""

    level: Level
    judged: Judged
    watts: float | None = None  # of the device that served, mean of the window; None: not measured
    machine_watts: float | None = None  # of CPU and GPU together, as far as either is measured
    warnings: tuple[NamedWarning, ...] = ()

    def load(self, like: float | None) -> str:
        """In words: `1.8/s`, `8 users`, `alone`; `like`: of the cell."""
        return formatting.load(self.level.rate, self.level.started.concurrency, like=like)

    def quantile(self, name: str, q: float) -> float | None:
        """Of `ttft`, `tpot`, `e2e` or `send_delay`."""
        return self.level.quantile(getattr(self.level, name), q)


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
    device: str | None  # "cpu" or "gpu": what served; None: not known, as of an endpoint
    engine: str = ""  # of others: its name
    slots: int | None = None
    state: CellState = "not_started"
    reason: str = ""  # why it was skipped or not finished; "": it was measured
    levels: tuple[LevelData, ...] = ()  # single streams and loads, in the order measured
    capacity: Capacity | None = None  # None: not measured
    like: float | None = None  # the rate in whose unit all rates on its side are read
    least_seconds: float = MIN_SECONDS  # of the shortest level that confirms
    step_times: StepTimeModel | None = None  # under load: this run's, slower by the levels' factor
    policy: SchedulerSettings | None = None
    traffic: Traffic | None = None  # None: the run does not say what was asked
    memory: Memory = Memory()
    ready: CellReady | None = None  # what its last server said
    loads: tuple[float, ...] = ()  # seconds of each load of the model, in order
    choice: EngineChosen | None = None  # of its engine among several; None: it was named
    busy: str = ""  # by whom the machine was disturbed until the search gave up

    @property
    def confirmed_rate(self) -> float | None:
        """The confirmed rate, requests/s."""
        return (
            self.capacity.confirmed_rate
            if self.capacity is not None and self.capacity.is_confirmed
            else None
        )

    @property
    def estimated_rate(self) -> float | None:
        """The best guess of the capacity, requests/s; 0.0: not even alone; None: not known."""
        found = self.capacity
        if found is None:
            return None
        if found.estimated_rate is None and found.method == "step_times" and not found.is_confirmed:
            return 0.0  # by its step times requests one at a time miss the SLO
        return self.confirmed_rate if found.estimated_rate is None else found.estimated_rate

    @property
    def side(self) -> str:
        """CPU or GPU; what is not known to be a GPU is compared as a CPU is."""
        return GPU if self.device == GPU else CPU

    @property
    def device_words(self) -> str:
        """`CPU`, `GPU`, or `not known`."""
        return SIDE_NAMES.get(self.device or "", "not known")

    @property
    def name(self) -> str:
        """`llama-3.2-1b on the GPU`; of an unknown device `llama-3.2-1b`."""
        return f"{self.model} on the {self.device_words}" if self.device else self.model

    @property
    def is_served(self) -> bool:
        """Some rate is confirmed or estimated."""
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
        """`8.0B`; of a mixture of experts `31B, 3.0B active`."""
        words = formatting.parameters(self.parameters)
        if self.spec is None or self.spec.experts is None:
            return words
        return f"{words}, {formatting.parameters(self.spec.active_parameters)} active"

    @property
    def experts(self) -> Routing | None:
        """Of a mixture of experts; None: a dense model, or not known."""
        return None if self.step_times is None else self.step_times.experts

    @property
    def loaded(self) -> tuple[LevelData, ...]:
        """The levels at a rate that count, lowest first."""
        at_rate = [one for one in self.levels if one.level.rate and one.level.counts]
        return tuple(sorted(at_rate, key=lambda one: one.level.rate or 0.0))

    def _is_good_alone(self, judged: Judged) -> bool | None:
        if self.capacity is not None and self.capacity.state == "misses_slo_unloaded":
            return False
        if self.confirmed_rate:  # kept beside others, so it is kept alone
            return True
        if self.estimated_rate == 0.0 or judged.due < MIN_ALONE:
            return None
        if judged.verdict == "misses":
            return False
        return True if judged.verdict == "meets" or judged.good == judged.due else None

    @property
    def alone(self) -> Alone | None:
        """All requests one at a time that count, of every start; None: not measured."""
        single = [
            one
            for one in self.levels
            if one.level.is_single_stream and one.level.counts and one.judged.due
        ]
        if not single:
            return None

        def median_of(name: str) -> float | None:
            each = [getattr(one.level, name)[one.level.counted] for one in single]
            values = np.concatenate(each)
            values = values[~np.isnan(values)]
            # nearest rank, as of a level
            return float(np.quantile(values, 0.5, method="inverted_cdf")) if len(values) else None

        return Alone(
            requests=sum(one.judged.due for one in single),
            ttft_seconds=median_of("ttft"),
            tpot_seconds=median_of("tpot"),
            is_good=self._is_good_alone(single[-1].judged),
        )


class GpuData(msgspec.Struct, frozen=True, kw_only=True):
    """The GPU of the machine that was measured, by the run's own facts. Missing is None."""

    name: str
    count: int = 1  # of this name in the machine; an engine takes one
    memory_bytes: int | None = None
    power_limit_watts: float | None = None
    device: Device | None = None  # its entry in the catalogue; None: none is surely the same

    @property
    def dollars_per_hour(self) -> float | None:
        """List price of one."""
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
    damage: tuple[str, ...] = ()  # what is left out of the files

    @property
    def facts(self) -> dict[str, Any]:
        """Of the machine that serves; `url` alone for an endpoint."""
        return self.manifest.server_facts

    @property
    def gpu(self) -> GpuData | None:
        """The machine's GPU; None: its facts name none."""
        found = [one for one in self.facts.get("gpus") or () if one.get("name")]
        if not found:
            return None
        name, memory = str(found[0]["name"]), found[0].get("total_bytes")
        return GpuData(
            name=name,
            count=sum(one["name"] == name for one in found),
            memory_bytes=memory,
            power_limit_watts=found[0].get("power_limit_watts"),
            device=device_of_driver_name(name, memory),
        )

    @property
    def sides(self) -> tuple[str, ...]:
        """The devices that configurations of this run are of, the CPU first."""
        return tuple(side for side in SIDES if any(cell.side == side for cell in self.cells))

    @property
    def workload(self) -> Workload:
        return _converted(self.manifest, "workload", Workload)

    @property
    def requests(self) -> int:
        """Due in the window of a finished level."""
        return sum(one.judged.due for cell in self.cells for one in cell.levels)


def read_report(folder: Path, slo: Slo | None = None) -> ReportData:
    """The run in a folder, judged by its own SLO or by another.

    Raises BadRun (no run, or another version).
    """
    try:
        run = read_records(folder)
    except BadRunFolder as problem:
        raise BadRun(str(problem)) from problem
    if not run.events:
        raise BadRun(f"The run {folder} is empty: {folder / EVENTS} is empty or missing")
    asked = slo or _converted(run.manifest, "slo", Slo)

    def order(cell: CellData) -> tuple[float, str, str, str, str]:
        """From quick to slow models, as "serves up to" means it: by active parameters."""
        name = cell.model, cell.side, cell.weight_format, cell.backend
        return (math.inf if cell.spec is None else cell.spec.active_parameters), *name

    return ReportData(
        manifest=run.manifest,
        folder=str(run.folder),
        slo=asked,
        cells=tuple(sorted(_cells_of(run, asked), key=order)),
        events=tuple(run.events),
        damage=tuple(run.damage()),
    )


def _converted(manifest: RunManifest, key: str, kind: type[T]) -> T:
    try:
        return msgspec.convert(manifest.campaign.get(key), kind)
    except msgspec.ValidationError as problem:
        value = manifest.campaign.get(key)
        raise BadRun(
            f"Run {manifest.run_id}: its campaign has no valid {key}: {key} = {value!r} ({problem})"
        ) from problem


def _cells_of(run: RunRecords, slo: Slo) -> list[CellData]:
    levels: dict[str, list[Level]] = {}
    for level in levels_of(run):
        levels.setdefault(level.cell, []).append(level)
    workload = _converted(run.manifest, "workload", Workload)
    traffic = _traffic(run.manifest, workload)
    found = []
    for said in run.manifest.cells:
        own = levels.get(str(said.get("key")), [])
        found.append(_cell_of(run, said, own, workload, traffic, slo))
    like = {
        side: common_rate(cell.capacity for cell in found if cell.side == side) for side in SIDES
    }
    return [msgspec.structs.replace(cell, like=like[cell.side]) for cell in found]


def _traffic(manifest: RunManifest, workload: Workload) -> Traffic | None:
    """What was asked, and when; a closed loop's and a trace's arrivals are Poisson."""
    arrivals = process_of(manifest.campaign.get("arrivals") or {"kind": "poisson"})
    if isinstance(arrivals, Trace):
        arrivals = Poisson()
    try:
        return Traffic(lengths_of(workload, QUICK_REQUESTS, seed=1), arrivals, workload)
    except WorkloadError:  # a trace file that is not here
        return None


def _cell_of(
    run: RunRecords,
    said: Mapping[str, Any],
    levels: Sequence[Level],
    workload: Workload,
    traffic: Traffic | None,
    slo: Slo,
) -> CellData:
    """A cell as it served where it was ready, else as it was asked."""
    key = str(said.get("key"))
    events = [event for event in run.events if event.cell == key]
    ready = _last(events, CellReady)
    info = (ready or CellReady(cell=key)).info
    choice = _last(events, EngineChosen)
    chosen = said if choice is None else msgspec.structs.asdict(choice)
    weight_format = str(info.weight_format or chosen.get("weight_format") or "")
    backend = str(info.name or chosen.get("backend") or "")
    state, reason = _state(events, levels)
    finished, calibrated = _last(events, CellFinished), _last(events, Calibrated)
    step_times = policy = None
    if (
        calibrated is not None
        and calibrated.step_times is not None
        and calibrated.policy is not None
    ):
        step_times, policy = calibrated.step_times, calibrated.policy
    search = msgspec.convert(run.manifest.campaign.get("search") or {}, Search)
    found, least_seconds = None, search.level_seconds_on(device_of(said.get("device"), ready))
    levels_since = finished and of_kind(events[events.index(finished) :], LevelFinished)
    if finished is not None and not levels_since and slo == _converted(run.manifest, "slo", Slo):
        found = finished.capacity
    if found is None and levels:
        found = estimate(
            levels,
            slo,
            step_times=step_times,
            policy=policy,
            reused_share=0.0 if calibrated is None else calibrated.reused_share,
            reuse=None if calibrated is None else calibrated.reuse,
            reasoning_share=0.0 if calibrated is None else calibrated.reasoning_share,
            workload=None if traffic is None else workload,
            arrivals=None if traffic is None else traffic.arrivals,
            least_seconds=least_seconds,
        )
    factor = found.factor if found is not None and found.factor else LOADED
    if calibrated is not None and traffic is not None and step_times is not None:
        traffic = traffic.served_with(calibrated.reuse, calibrated.reasoning_share)
    model, identity = str(said.get("model", "unknown")), _identity_of(said)
    never_quiet = _last(events, NeverQuiet)
    samples = [sample for sample in run.samples if sample.cell == key]
    device = _device_of(run.manifest, said, ready)
    return CellData(
        key=key,
        run_id=run.manifest.run_id,
        folder=str(run.folder),
        model=model,
        spec=_shape_of(said, ready),
        source="" if identity is None else identity.source,
        weight_format="" if weight_format == "none" else weight_format,
        backend=backend,
        device=device,
        engine=str(said.get("engine") or ""),
        slots=info.slots or said.get("slots"),
        state=state,
        reason=reason,
        levels=tuple(
            _level_of(one, slo, samples, device)
            for one in levels
            if one.is_single_stream or one.rate is not None
        ),
        capacity=found,
        least_seconds=least_seconds,
        step_times=None if step_times is None else step_times.slower(factor),
        policy=policy,
        traffic=traffic,
        memory=_memory(info.predicted or {}, samples, device),
        ready=ready,
        loads=tuple(t for one in of_kind(events, CellReady) if (t := one.load_seconds) is not None),
        choice=choice,
        busy=never_quiet.reason if never_quiet is not None else "",
    )


def _identity_of(said: Mapping[str, Any]) -> ModelIdentity | None:
    """Of a model that the ladder does not have."""
    with contextlib.suppress(msgspec.ValidationError):
        return msgspec.convert(said.get("identity"), ModelIdentity | None)
    return None


def _shape_of(said: Mapping[str, Any], ready: CellReady | None) -> ModelSpec | None:
    """The model's shape: the manifest's, the journal's, or the ladder's."""
    identity, model = _identity_of(said), str(said.get("model"))
    if identity is not None and identity.spec is not None:
        return identity.spec
    if ready is not None and ready.spec is not None:
        return ready.spec
    is_of_ladder = identity is None and is_ladder_model(model)
    return ladder_model(model).spec if is_of_ladder else None


E = TypeVar("E", bound=Event)


def _last(events: Sequence[Event], kind: type[E]) -> E | None:
    return next(reversed(of_kind(events, kind)), None)


def _state(events: Sequence[Event], levels: Sequence[Level]) -> tuple[CellState, str]:
    """How far a cell came, and why no further."""
    ended = [one for one in events if isinstance(one, CellSkipped | CellFinished)]
    if ended and isinstance(ended[-1], CellSkipped) and not levels:
        return "skipped", ended[-1].reason
    if not of_kind(events, CellStarted):
        return "not_started", "the campaign ended before it"
    if ended:
        return "measured", ""
    told = [one.reason for one in events if isinstance(one, Interrupted | LevelAbandoned)]
    why = told[-1] if told else "the run ended or was interrupted during it"
    return ("measured" if levels else "unfinished"), why


def _device_of(
    manifest: RunManifest, said: Mapping[str, Any], ready: CellReady | None
) -> str | None:
    """What served a configuration; else what it was to run on, where only one device can be.

    Configurations of runs of early format 5 name no device: their engine did, once it was ready.
    """
    if device := device_of(said.get("device"), ready):
        return device
    if said.get("url"):
        return None
    is_sure = said.get("backend") in CPU_BACKENDS or not manifest.server_facts.get("gpus")
    return CPU if is_sure else None


def _level_of(
    level: Level, slo: Slo, samples: Sequence[ResourceSample], device: str | None
) -> LevelData:
    mine = [one for one in samples if one.level == level.name]
    began = level.started.started_unix_seconds
    start, end = (began + at for at in level.window)
    power = power_of(mine, start, end)
    if device == CPU:  # a GPU that idles beside it says nothing of the level
        mine = [msgspec.structs.replace(one, gpu_throttled=None) for one in mine]
    return LevelData(
        level=level,
        judged=level.judge(slo),
        watts=_watts_of(power, device),
        machine_watts=power.together,
        warnings=level_warnings(level, slo, mine),
    )


def _watts_of(power: Power, device: str | None) -> float | None:
    if device == GPU:
        return power.gpu_watts
    return power.cpu_watts if device == CPU else power.together


def _memory(
    predicted: Mapping[str, Any], samples: Sequence[ResourceSample], device: str | None
) -> Memory:
    engines = [one.engine.rss_bytes for one in samples if one.engine is not None]
    gpus = [one.gpu_memory_bytes for one in samples if device != CPU]
    return Memory(
        weight_bytes=predicted.get("weight_bytes"),
        kv_bytes=predicted.get("kv_bytes"),
        state_bytes=predicted.get("state_bytes"),
        buffer_bytes=predicted.get("buffer_bytes"),
        overhead_bytes=predicted.get("overhead_bytes"),
        peak_bytes=max((one for one in engines if one is not None), default=None),
        gpu_bytes=max((one for one in gpus if one is not None), default=None),
    )

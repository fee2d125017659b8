"""A run folder -> its numbers: per cell its levels, its capacity with interval, its memory.

    run = read_run(Path("runs/2026-05-28-demo"))
    run.cells[0].capacity.held, run.cells[0].levels[0].summary.latencies.ttft.p50

All is computed from the records; what the runner concluded is not read. Another SLO than the run's
own may be asked for: one measured level serves every SLO.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from loadtests.capacity.estimate import estimate, never_quiet
from loadtests.capacity.levels import Level, judged, level_of
from loadtests.capacity.search_config import SearchConfig
from loadtests.errors import BadRunFolder
from loadtests.metrics.disturbance import is_slight
from loadtests.metrics.energy import energy_of
from loadtests.metrics.level_warnings import longest_send_lag
from loadtests.metrics.request_metrics import (
    first_chunk_tokens,
    judged_tpot_seconds,
    outcome,
    ttft_seconds,
)
from loadtests.metrics.slo import Slo, is_as_strict
from loadtests.metrics.stationarity import grows, in_flight_at_ends
from loadtests.records import events as journal
from loadtests.records import old_run_folder as run_folder
from loadtests.records.events import Event, of_kind
from loadtests.records.old_run_folder import LevelRecords, RunRecords
from loadtests.records.schema import RequestRecord, ResourceSample, RunManifest
from models.errors import UnknownModel
from models.ladder import rung
from models.spec import KV_ELEMENT_BYTES, ModelSpec
from reports.errors import BadRun
from reports.numbers import (
    Answer,
    CellNumbers,
    CellState,
    LevelNumbers,
    MemoryNumbers,
    RunNumbers,
)
from reports.planning.predict import memory_here
from reports.steps import with_steps
from reports.warnings import run_warnings
from serving.backends.base import GpuLoad
from serving.backends.spec import AUTO

T = TypeVar("T")


def read_run(folder: Path, slo: Slo | None = None) -> RunNumbers:
    """The numbers of one run, under its own SLO or under another. Raises BadRun."""
    return numbers_of(read_records(folder), slo)


def read_records(folder: Path) -> RunRecords:
    """All of a run folder. Raises BadRun where it is none, or where nothing was begun in it."""
    try:
        run = run_folder.read_records(folder)
    except BadRunFolder as problem:
        raise BadRun(str(problem)) from problem
    if not run.events:
        journal = folder / run_folder.EVENTS
        raise BadRun(f"in run {folder} nothing was begun: {journal} is empty or missing")
    return run


def numbers_of(run: RunRecords, slo: Slo | None = None) -> RunNumbers:
    """The numbers of one run, under its own SLO or under another."""
    asked = slo or slo_of(run.manifest)
    cells = tuple(sorted(_cells(run, asked), key=cell_order))
    stamps = [event.unix_seconds for event in run.events]
    numbers = RunNumbers(
        manifest=run.manifest,
        folder=str(run.folder),
        slo=asked,
        cells=cells,
        requests=len(run.requests),
        requests_counted=sum(level.summary.counts.due for cell in cells for level in cell.levels),
        measured_seconds=max(stamps) - min(stamps) if stamps else None,
    )
    return msgspec.structs.replace(numbers, warnings=run_warnings(run, numbers))


def cell_order(cell: CellNumbers) -> tuple[float, str, str, str]:
    """Smallest model first, unknown sizes last."""
    return cell.parameters or math.inf, cell.model, cell.weight_format, cell.backend


def slo_of(manifest: RunManifest) -> Slo:
    """The SLO of the campaign. Raises BadRun where there is none."""
    return _converted(manifest, "slo", manifest.campaign.get("slo"), Slo)


def slos_of(manifest: RunManifest) -> list[Slo]:
    """All SLOs that the campaign searched for. Raises BadRun."""
    several = manifest.campaign.get("slos")
    return _converted(manifest, "slos", several, list[Slo]) if several else [slo_of(manifest)]


def search_config(manifest: RunManifest) -> SearchConfig:
    """How the campaign searched, as far as its estimate depends on it."""
    asked = manifest.campaign.get("search")
    known = asked if isinstance(asked, dict) else {}
    settings = {name: known[name] for name in SearchConfig.__struct_fields__ if name in known}
    return _converted(manifest, "search", settings, SearchConfig)


def _converted(manifest: RunManifest, key: str, value: Any, kind: type[T]) -> T:
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as problem:
        raise BadRun(
            f"run {manifest.run_id}: its campaign has no {key} that can be read: "
            f"{key} = {value!r} ({problem})"
        ) from problem


def _cells(run: RunRecords, slo: Slo) -> Iterator[CellNumbers]:
    """Every cell of the manifest, begun or not, in its order."""
    samples: dict[str, list[ResourceSample]] = defaultdict(list)
    levels: dict[str, list[LevelNumbers]] = defaultdict(list)
    events: dict[str | None, list[Event]] = defaultdict(list)
    requests: dict[str, dict[str, list[RequestRecord]]] = defaultdict(lambda: defaultdict(list))
    for record in run.requests:
        requests[record.cell][record.level].append(record)
    for sample in run.samples:
        samples[sample.cell].append(sample)
    for level in run.levels():
        levels[level.started.cell].append(level_numbers(level, slo))
    for event in run.events:
        events[event.cell].append(event)
    for cell in run.manifest.cells:
        key = str(cell.get("key"))
        found = _cell(run.manifest.run_id, cell, events[key], tuple(levels[key]))
        found = _with_capacity(found, run.manifest, events[key], slo)
        found = with_steps(found, events[key], requests[key])
        yield _with_memory(found, run.manifest.server_facts, events[key], samples[key])


def level_numbers(level: LevelRecords, slo: Slo) -> LevelNumbers:
    """One finished level; its window is as long as it came out."""
    said, end = level.started, level.finished
    summary, _ = judged(level, slo)
    inside = summary.window.due(level.requests)
    begin = said.started_unix_seconds
    taken = end.disturbance if end.is_disturbed else None
    window = (begin + summary.window.start_seconds, begin + summary.window.end_seconds)
    return LevelNumbers(
        cell=said.cell,
        level=said.level,
        purpose=said.purpose,
        rate_per_second=said.rate_per_second,
        concurrency=said.concurrency,
        start=said.start,
        cut_short=end.cut_short,
        summary=summary,
        answers=tuple(_answer(record) for record in inside),
        send_lag_seconds=longest_send_lag(inside),
        engine_time=end.engine_time,
        energy=energy_of(level.samples, *window),
        is_slightly_disturbed=taken is not None and is_slight(taken),
        queue_grows=grows(*in_flight_at_ends(level.requests, summary.window)),
    )


def _answer(record: RequestRecord) -> Answer:
    """As `is_good` sees it."""
    due = record.due_seconds
    if outcome(record) == "ok":
        return Answer(due, ttft_seconds(record), judged_tpot_seconds(record))
    ended, first = record.ended_seconds, record.first_content_seconds
    if record.error != "timeout" or ended is None:
        return Answer(due, None, None)
    if first is None:
        return Answer(due, None, None, known_ttft_seconds=ended - due)
    to_come = (record.asked_output_tokens or 2) - (first_chunk_tokens(record) or 1)
    return Answer(due, None, None, known_tpot_seconds=(ended - first) / max(1, to_come))


def _cell(
    run_id: str, cell: Mapping[str, Any], events: Sequence[Event], levels: tuple[LevelNumbers, ...]
) -> CellNumbers:
    """A cell without capacity and memory: as it served where it was ready, else as asked."""
    ready = _ready(events)
    info = ready.info
    slots = info.slots or cell.get("slots")
    context = info.context_tokens or cell.get("context_tokens")
    whole = slots * context if slots and context else None
    layout = ready.layout or {}
    skipped = of_kind(events, journal.CellSkipped)
    chosen = next(reversed(of_kind(events, journal.EngineChosen)), None)
    if chosen is not None:
        engine = {"backend": chosen.backend, "weight_format": chosen.weight_format}
        cell = {**cell, **engine}
    weight_format = str(info.weight_format or cell.get("weight_format") or "")
    kv_held = str((info.details or {}).get("kv_dtype"))
    state, reason = _state(events, levels)
    return CellNumbers(
        key=str(cell.get("key")),
        run_id=run_id,
        model=str(cell.get("model", "unknown")),
        spec=_spec(str(cell.get("model"))),
        weight_format="" if weight_format == "none" else weight_format,
        backend=str(info.name or cell.get("backend") or ""),
        device=info.device or cell.get("device"),
        url=cell.get("url"),
        hardware=str((cell.get("hardware") or {}).get("name") or ""),
        workload=str(cell.get("workload") or ""),
        command=_command(info) if cell.get("engine") else None,
        engine_version=(info.details or {}).get("version") if cell.get("engine") else None,
        slots=slots,
        context_tokens=context,
        kv_tokens=info.kv_tokens or cell.get("kv_tokens") or whole,
        kv_dtype="fp16" if cell.get("kv_dtype") in (None, AUTO) else str(cell["kv_dtype"]),
        kv_held=kv_held if kv_held in KV_ELEMENT_BYTES else None,
        state=state,
        reason=reason,
        skip_cause=skipped[-1].cause if skipped else None,
        levels=levels,
        capacity=None,
        random_weights=ready.synthetic if cell.get("synthetic") is None else cell["synthetic"],
        load_seconds=ready.load_seconds,
        threads=info.threads or layout.get("engine_threads"),
        engine_cores=len(layout.get("engine") or ()) or None,
        shares_cores=bool({*layout.get("engine", ())} & {*layout.get("client", ())}),
        nice=info.nice or 0,
        quality_kl_nats=info.quality_kl_nats,
        choice=chosen,
    )


def _command(info: journal.EngineInfo) -> str:
    """Of an engine of others, as it was run; "" where it was never ready."""
    return str((info.details or {}).get("command") or "")


def _ready(events: Sequence[Event]) -> journal.CellReady:
    """What the cell's last server said; nothing, where none was ready."""
    return next(reversed(of_kind(events, journal.CellReady)), journal.CellReady(cell=""))


def _state(events: Sequence[Event], levels: Sequence[LevelNumbers]) -> tuple[CellState, str]:
    """How far a cell came, and why no further."""
    skipped = of_kind(events, journal.CellSkipped)
    if skipped:
        return "skipped", skipped[-1].reason
    if not events:
        return "not_started", "the campaign ended before it"
    told = [
        event.reason
        for event in events
        if isinstance(event, journal.Interrupted | journal.LevelAbandoned)
    ]
    why = told[-1] if told else "the run ended, or was interrupted, within it"
    if not levels:
        return "unfinished", why
    if of_kind(events, journal.CellFinished):
        return "measured", ""
    return "measured", f"the cell was not finished: {why}"


def _spec(model: str) -> ModelSpec | None:
    try:
        return rung(model).spec
    except UnknownModel:
        return None


def _with_capacity(
    cell: CellNumbers, manifest: RunManifest, events: Sequence[Event], slo: Slo
) -> CellNumbers:
    ended = of_kind(events, journal.NeverQuiet)
    if ended:
        cell = msgspec.structs.replace(cell, busy=ended[-1].reason, busy_slos=tuple(ended[-1].slos))
    found = busy_or_not(cell, capacity_of(cell.levels, slo, manifest), slo, slos_of(manifest))
    return msgspec.structs.replace(
        cell,
        levels=marked(cell.levels, found),
        capacity=found,
        predicted=predicted_of(manifest, events, slo),
    )


def predicted_of(
    manifest: RunManifest, events: Sequence[Event], slo: Slo
) -> journal.PredictedRate | None:
    """What the cell's calibration predicted for this SLO; None: no such prediction."""
    made = of_kind(events, journal.Calibrated)
    return made[0].rates.get(slo.name) if made and slo in slos_of(manifest) else None


def capacity_of(
    levels: Sequence[LevelNumbers], slo: Slo, manifest: RunManifest
) -> journal.Capacity | None:
    """The capacity that these levels show together; None where none was measured to its end."""
    seen = [
        level_of(one.summary, one.cut_short is None, one.start)
        for one in counting(levels, slo, slos_of(manifest))
    ]
    return estimate_of(levels, seen, slo, search_config(manifest))


def busy_or_not(
    cell: CellNumbers, found: journal.Capacity | None, slo: Slo, slos: Sequence[Slo]
) -> journal.Capacity | None:
    """The capacity; where the search for `slo` ended on a busy machine, it says so.

    An SLO that is none of the campaign's `slos` was not searched for: it fares like those given up.
    """
    is_searched = slo in slos and slo.name not in cell.busy_slos
    if found is None or not cell.busy or is_searched:
        return found
    return never_quiet(found, cell.busy)


def marked(
    levels: Sequence[LevelNumbers], found: journal.Capacity | None
) -> tuple[LevelNumbers, ...]:
    """The levels, those marked that confirm the capacity."""
    by = found.confirmed_by if found is not None else None
    return tuple(
        msgspec.structs.replace(
            one,
            confirms=one.rate_per_second is not None
            and by is not None
            and one.rate_per_second == by.asked_rate
            and one.counts
            and one.cut_short is None,
        )
        for one in levels
    )


def estimate_of(
    levels: Sequence[LevelNumbers], seen: Sequence[Level], slo: Slo, config: SearchConfig
) -> journal.Capacity | None:
    """`seen` are those of `levels` that count, as the search sees them."""
    told = [one for one in levels if one.rate_per_second or one.is_single_stream]
    if not told:
        return None
    found = estimate(seen, config, slo)
    return msgspec.structs.replace(found, left_out=len(told) - len(seen))


def counting(levels: Sequence[LevelNumbers], slo: Slo, slos: Sequence[Slo]) -> list[LevelNumbers]:
    """The levels that say something about `slo`; `slos` are those of the campaign.

    One that was cut short fails by an SLO of the campaign, so by every stricter one; of a looser
    one it says nothing, and the capacity says how many were left out.
    """
    is_known = any(is_as_strict(slo, one) for one in slos)
    return [
        one
        for one in levels
        if (one.rate_per_second or one.is_single_stream) and (is_known or one.cut_short is None)
    ]


def _with_memory(
    cell: CellNumbers,
    facts: Mapping[str, Any],
    events: Sequence[Event],
    samples: Sequence[ResourceSample],
) -> CellNumbers:
    """Predicted from the shape and the machine; peaks from the samples; what holds what as the
    engine counts."""
    predicted = MemoryNumbers() if cell.spec is None else memory_here(cell.spec, cell, facts)
    info = _ready(events).info
    measured = info.measured or {}
    engines = [sample.engine for sample in samples if sample.engine is not None]
    peaks = [engine.rss_bytes for engine in engines if engine.rss_bytes is not None]
    used = [one.gpu_memory_bytes for one in samples if one.gpu_memory_bytes is not None]
    memory = msgspec.structs.replace(
        predicted,
        measured_peak_bytes=max(peaks, default=None),
        measured_weight_bytes=measured.get("weight_bytes"),
        measured_kv_bytes=measured.get("kv_bytes"),
        measured_compute_bytes=measured.get("compute_bytes"),
        measured_gpu_bytes=max(used, default=None),
    )
    gpu = None if info.gpu is None else msgspec.convert(info.gpu, GpuLoad)
    return msgspec.structs.replace(cell, memory=memory, gpu=gpu)

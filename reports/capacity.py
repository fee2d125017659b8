"""A run folder -> what it says: per cell its levels (a Summary each), its capacity with interval, its memory.

    run = read_run(Path("runs/2026-05-28-demo"))
    run.cells[0].capacity.low, run.cells[0].levels[0].summary.ttft.p50

Everything is computed from requests.jsonl, samples.jsonl and the levels' starts in events.jsonl. What the runner or its search concluded
on the way is not read: two computations that agree are worth more than one that is copied. Another promise than the run's own may be asked
for: one measured level serves every promise.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from loadtests.arrivals import process_of
from loadtests.errors import BadRunFolder
from loadtests.records import Event, RequestRecord, ResourceSample, RunManifest
from loadtests.search import SearchConfig, estimate, level_of
from loadtests.slo import Promise
from loadtests.store import LevelStarted, completed_levels, read_events, read_manifest, read_requests, read_samples, started_levels
from loadtests.summary import Window, summarise
from loadtests.timings import itl_seconds, outcome, tpot_seconds, ttft_seconds
from models.errors import UnknownModel
from models.formats import weight_bytes
from models.ladder import rung
from models.spec import ModelSpec
from reports.errors import BadRun
from reports.numbers import CapacityNumbers, CellNumbers, LevelNumbers, MemoryNumbers, RunNumbers
from serving.placement import overhead_bytes


class RunRecords(msgspec.Struct, frozen=True):
    """A run folder as read; `dropped_bytes` are of cut-off last lines."""

    folder: Path
    manifest: RunManifest
    requests: list[RequestRecord]
    samples: list[ResourceSample]
    events: list[Event]
    dropped_bytes: dict[str, int]


def read_records(folder: Path) -> RunRecords:
    """All of a run folder. Raises BadRun where it is none, or where nothing was begun in it."""
    try:
        manifest = read_manifest(folder)
        requests, samples, events = read_requests(folder), read_samples(folder), read_events(folder)
    except BadRunFolder as problem:
        raise BadRun(str(problem)) from problem
    if not events.records:
        raise BadRun(f"{folder} holds a run in which nothing was begun: {folder / 'events.jsonl'} is empty or missing")
    dropped = {
        name: read.dropped_bytes
        for name, read in (("requests.jsonl", requests), ("samples.jsonl", samples), ("events.jsonl", events))
        if read.dropped_bytes
    }
    return RunRecords(folder, manifest, requests.records, samples.records, events.records, dropped)


def read_run(folder: Path, promise: Promise | None = None) -> RunNumbers:
    """The numbers of one run, under its own promise or under another."""
    from reports.doubts import run_doubts

    run = read_records(folder)
    asked = promise or promise_of(run.manifest)
    cells = tuple(
        sorted(numbers_of_cells(run, asked), key=lambda cell: (cell.parameters or math.inf, cell.model, cell.weight_format, cell.backend))
    )
    counted = [level for cell in cells for level in cell.levels]
    stamps = [event.unix_seconds for event in run.events]
    numbers = RunNumbers(
        manifest=run.manifest,
        folder=str(folder),
        promise=asked,
        cells=cells,
        requests=len(run.requests),
        requests_counted=sum(level.summary.due for level in counted),
        measured_seconds=max(stamps) - min(stamps) if stamps else None,
    )
    return msgspec.structs.replace(numbers, doubts=run_doubts(run, numbers))


def promise_of(manifest: RunManifest) -> Promise:
    """The promise of the campaign. Raises BadRun where there is none."""
    found = manifest.campaign.get("promise")
    try:
        return msgspec.convert(found, Promise)
    except (msgspec.ValidationError, ValueError) as problem:
        raise BadRun(f"the campaign of run {manifest.run_id} has no promise that can be read: promise = {found!r} ({problem})") from problem


def numbers_of_cells(run: RunRecords, promise: Promise) -> Iterable[CellNumbers]:
    """Every cell of the manifest, begun or not, in its order."""
    requests: dict[str, list[RequestRecord]] = defaultdict(list)
    samples: dict[str, list[ResourceSample]] = defaultdict(list)
    for record in run.requests:
        requests[record.level].append(record)
    for sample in run.samples:
        samples[sample.cell].append(sample)
    starts, ends = started_levels(run.events), completed_levels(run.events)
    config = search_config(run.manifest)
    for cell in run.manifest.cells:
        key = str(cell.get("key"))
        own = [event for event in run.events if event.cell == key]
        levels = tuple(
            level_numbers(starts[name], ends[name], requests[name], [s for s in samples[key] if s.level == name], promise)
            for name in ends
            if name in starts and starts[name].cell == key
        )
        yield cell_numbers(run.manifest.run_id, cell, own, levels, samples[key], promise, config, promises_of(run.manifest))


def level_numbers(
    start: Event, end: Event, records: Sequence[RequestRecord], samples: Sequence[ResourceSample], promise: Promise
) -> LevelNumbers:
    """One finished level. `records` are all of the level's, `samples` all that were taken during it.

    The window is as long as asked, or as it came out where the level was cut short: its level_finished event says so.
    """
    said = msgspec.convert(start.detail, LevelStarted)
    lasted = float(end.detail.get("window_seconds") or said.window_seconds)
    window = Window(said.warmup_seconds, said.warmup_seconds + lasted)
    inside = sorted(
        (r for r in records if window.start_seconds <= r.due_seconds < window.end_seconds), key=lambda r: (r.due_seconds, r.index)
    )
    return LevelNumbers(
        cell=start.cell or "",
        level=start.level or "",
        purpose=said.purpose,
        rate_per_second=said.rate_per_second,
        concurrency=said.concurrency,
        attempt=said.attempt,
        seed=said.seed,
        started_unix_seconds=said.started_unix_seconds,
        summary=summarise(
            records,
            samples,
            window,
            promise,
            rate=said.rate_per_second,
            started_unix_seconds=said.started_unix_seconds,
            client_processes=max(1, len({r.worker for r in records if r.worker is not None})),
            arrivals=process_of(said.arrivals),
        ),
        cut_short=end.detail.get("cut_short"),
        answers=tuple(_answer(record) for record in inside),
    )


def _answer(record: RequestRecord) -> tuple[float | None, float | None]:
    """(TTFT, TPOT) as `is_good` sees them: chunks stand for tokens where the server did not count."""
    if outcome(record) != "ok":
        return None, None
    tpot = tpot_seconds(record)
    if tpot is None and record.output_tokens is None and len(record.content_seconds) > 1:
        gaps = itl_seconds(record)
        tpot = sum(gaps) / len(gaps)
    return ttft_seconds(record), tpot


def cell_numbers(
    run_id: str, cell: Mapping[str, Any], events: Sequence[Event], levels: tuple[LevelNumbers, ...], samples: Sequence[ResourceSample],
    promise: Promise, config: SearchConfig, promises: Sequence[Promise] = (),
) -> CellNumbers:  # fmt: skip
    """One cell from its entry in the manifest, its events, its finished levels and its samples."""
    kinds = [event.kind for event in events]
    ready = next((event.detail for event in reversed(events) if event.kind == "cell_ready"), {})
    info: Mapping[str, Any] = ready.get("info") or {}
    model = str(cell.get("model", "unknown"))
    spec = _spec(model)
    weight_format = str(info.get("weight_format") or cell.get("weight_format") or "").replace("none", "")
    slots = info.get("slots") or cell.get("slots")
    context = info.get("context_tokens") or cell.get("context_tokens")
    kv_tokens = info.get("kv_tokens") or cell.get("kv_tokens")
    if kv_tokens is None and slots and context:
        kv_tokens = slots * context
    kv_dtype = str(cell.get("kv_dtype") or "fp16")
    if "cell_skipped" in kinds:
        state, reason = "skipped", str(next(event.detail.get("reason", "") for event in reversed(events) if event.kind == "cell_skipped"))
    elif not events:
        state, reason = "not_started", "the campaign ended before it"
    elif not levels:
        state, reason = "unfinished", _why_unfinished(events)
    else:
        state, reason = "measured", "" if "cell_finished" in kinds else "the cell was not finished: " + _why_unfinished(events)
    predicted = predicted_rate(events, promise, promises)
    backend, device = str(info.get("name") or cell.get("backend") or ""), str(info.get("device") or cell.get("device") or "cpu")
    return CellNumbers(
        key=str(cell.get("key")),
        run_id=run_id,
        model=model,
        spec=spec,
        weight_format=weight_format,
        backend=backend,
        device=device,
        url=cell.get("url"),
        hardware=str((cell.get("hardware") or {}).get("name") or ""),
        slots=slots,
        context_tokens=context,
        kv_tokens=kv_tokens,
        kv_dtype=kv_dtype,
        state=state,  # type: ignore[arg-type]
        reason=reason,
        levels=levels,
        capacity=capacity_of(levels, promise, config if predicted is None else msgspec.structs.replace(config, predicted_rate=predicted)),
        predicted_rate=predicted,
        measured_only=capacity_of(levels, promise, config) if predicted is not None else None,
        memory=_with_measured(predicted_memory(spec, weight_format, kv_tokens, kv_dtype, backend, device, slots), ready, samples),
        random_weights=_random_weights(cell, ready),
        load_seconds=ready.get("load_seconds"),
        quality_kl_nats=info.get("quality_kl_nats"),
    )


def promises_of(manifest: RunManifest) -> tuple[Promise, ...]:
    """All promises that the campaign searched for."""
    several = msgspec.convert(manifest.campaign.get("promises") or [], list[Promise])
    return tuple(several) or (promise_of(manifest),)


def predicted_rate(events: Sequence[Event], promise: Promise, promises: Sequence[Promise]) -> float | None:
    """What the cell's calibration predicted for this promise; None where it did for another one, or for none."""
    made = next((event.detail for event in events if event.kind == "calibrated"), None)
    if made is None or promise not in promises:
        return None
    rate = (made.get("rates") or {}).get(promise.name)
    return float(rate) if rate else None


def capacity_of(levels: Sequence[LevelNumbers], promise: Promise, config: SearchConfig) -> CapacityNumbers:
    """The capacity that these levels show together. Levels that are not valid (Summary.is_valid) do not count."""
    if not levels:
        return CapacityNumbers("not_measured", reason="no level was measured to its end")
    found = estimate([level_of(level.summary) for level in levels if level.rate_per_second or level.is_lone], config, promise)
    if found.status == "none":
        return CapacityNumbers("none", reason=found.reason)
    if found.low > 0 and found.high is not None and found.estimate is not None:
        return CapacityNumbers("interval", found.low, found.estimate, found.high, found.status == "resolved", found.reason)
    if found.low > 0 and found.high is None:
        return CapacityNumbers("at_least", low=found.low, reason=found.reason)
    return CapacityNumbers("unresolved", high=found.high, reason=found.reason)


def search_config(manifest: RunManifest) -> SearchConfig:
    """How the campaign searched, as far as its estimate depends on it; the defaults where it does not say."""
    asked = manifest.campaign.get("search")
    known = {name: asked[name] for name in SearchConfig.__struct_fields__ if name in asked} if isinstance(asked, dict) else {}
    try:
        return msgspec.convert(known, SearchConfig)
    except msgspec.ValidationError as problem:
        raise BadRun(f"the campaign of run {manifest.run_id} has a search that cannot be read: {problem}") from problem


def _spec(model: str) -> ModelSpec | None:
    try:
        return rung(model).spec
    except UnknownModel:
        return None


def _why_unfinished(events: Sequence[Event]) -> str:
    told = [event for event in events if event.detail.get("reason")]
    return str(told[-1].detail["reason"]) if told else "the run ended, or was interrupted, within it"


def _with_measured(predicted: MemoryNumbers, ready: Mapping[str, Any], samples: Sequence[ResourceSample]) -> MemoryNumbers:
    info: Mapping[str, Any] = ready.get("info") or {}
    measured: Mapping[str, Any] = info.get("measured") or {}
    peaks = [sample.engine.rss_bytes for sample in samples if sample.engine is not None and sample.engine.rss_bytes is not None]
    return msgspec.structs.replace(
        predicted,
        measured_peak_bytes=max(peaks, default=None),
        measured_weight_bytes=measured.get("weight_bytes"),
        measured_kv_bytes=measured.get("kv_bytes"),
    )


def predicted_memory(
    spec: ModelSpec | None, weight_format: str, kv_tokens: int | None, kv_dtype: str, backend: str, device: str, slots: int | None
) -> MemoryNumbers:
    """What arithmetic says, as placement says it before a load: weights as this engine holds them, KV for all tokens, the rest of the
    process. All None for an unknown shape."""
    if spec is None or kv_tokens is None:
        return MemoryNumbers()
    try:
        weights = weight_bytes(spec, weight_format)
        kv = kv_tokens * spec.kv_bytes_per_token(kv_dtype)
    except KeyError:
        return MemoryNumbers()
    overhead = overhead_bytes(backend, device, weight_format, weights, spec, slots or 1)
    return MemoryNumbers(weight_bytes=weights, kv_bytes=kv, overhead_bytes=overhead)


def _random_weights(cell: Mapping[str, Any], ready: Mapping[str, Any]) -> bool | None:
    """Whether the weights were made up: as the cell or the engine says; None where neither does."""
    for told in (cell.get("synthetic"), ready.get("synthetic")):
        if isinstance(told, bool):
            return told
    return None

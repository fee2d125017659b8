"""The figures of a report, in order: each a chart with title, caption and kind of number.

for figure in figures(run, found):
    figure.slug, figure.title, figure.spec(width=760)     # Vega-Lite as a dict
    figure.svg(), figure.png()                            # drawn by vl-convert: no browser
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from models import formatting
from models.formatting import model_title
from reports.accelerator.batching import batching_of
from reports.accelerator.costs import comparisons_of
from reports.accelerator.formats import formats_of
from reports.accelerator.joules import energies_of
from reports.accelerator.phases import phases_of
from reports.charts import latency, memory, throughput
from reports.charts.batching import batch_chart
from reports.charts.costs import cost_chart, joule_chart
from reports.charts.crossover_map import above_words, crossover_map
from reports.charts.energy import energy_chart
from reports.charts.fallback import fallback_chart
from reports.charts.figure import MEASURED, Figure, Source
from reports.charts.formats import format_chart
from reports.charts.phases import roofline
from reports.findings import Crossover, Rung
from reports.numbers import CellNumbers, RunNumbers
from reports.planning.predict import need_of
from reports.sentences import names_of, setting_words, slo_words

MAP_CAPTION = (
    "Blue: a level at that rate or above ran, long enough, and met the SLO ({slo}). Pale blue: not "
    "confirmed, and not known to be too much. Palest orange: {above}. Grey: not known. Marks are "
    "measured levels: a circle met the SLO, a cross missed it, a diamond had too few requests to "
    "say.{more}"
)
PREDICTED_CAPTION = " Violet, dashed: the rate that was predicted, with its own interval."
GPU_CAPTION = (
    " Above: the cheapest GPU of the list that is predicted to hold the rate under the run's SLO; "
    "thin lines: the 90 % interval of where its band ends."
)
ALONE_CAPTION = (
    "Median of requests sent one at a time (the mean where there are few). "
    "A model above the line meets the SLO at no rate."
)
LATENCY_CAPTION = (
    "Solid: p50; dashed: p95. Green levels met the SLO, red ones missed it, ochre are unresolved."
)
THROUGHPUT_CAPTION = (
    "Output tokens per second that arrived within the window. Full dots met the SLO. "
    "Where a line flattens, the machine is saturated."
)
ATTAINMENT_CAPTION = (
    "Share of good requests among all that were due, with its {confidence} bounds (Wilson). "
    "Failed and refused requests are not good."
)
MEMORY_CAPTION = (
    "Bars are predicted{setting}: weights as the engine stores them, KV cache, and the rest of the "
    "process; pale bars were not run."
)
ROOFLINE_CAPTION = (
    "Each phase of each model: operations per byte that it reads, and operations per second. Under "
    "the slope memory is the bound, under the flat roof arithmetic."
)
ENERGY_CAPTION = "Joules per output token of each level at a rate, CPU and GPU as far as measured."
FORMATS_CAPTION = "Memory of the weights and decode speed of one stream, by format."
FALLBACK_CAPTION = (
    "Time to the first token of each request by the moment it was due; crosses failed. Shaded: "
    "until the other engine's first token."
)
BOTH: tuple[Source, ...] = ("measured here", "predicted")
ALL_KINDS: tuple[Source, ...] = ("measured here", "predicted", "published")
JOULES_CAPTION = (
    "Joules per output token for each rate: the watts of as many machines as hold it, throughout."
)
COST_CAPTION = (
    "Dollars an hour for each rate: as many machines as hold it. Dashed: above that rate the GPU "
    "costs less."
)
BATCH_CAPTION = "Decode speed against the number of streams that decode together."
PEAK_CAPTION = (
    " Diamonds: the measured peak of the engine's resident memory. "
    "A KV cache that was never filled is not resident."
)


def figures(run: RunNumbers, found: Crossover) -> tuple[Figure, ...]:
    """All figures that this run has numbers for."""
    return (
        *(*_maps(run, found), *_alone(run), *_under_load(run), *_whole(run, found)),
        *(*_speeds(run), *_formats(run), *_costs(run, found), *_fallbacks(run)),
    )


def _maps(run: RunNumbers, found: Crossover) -> Iterator[Figure]:
    series = series_of(run.cells)
    for name, cells in series.items():
        chart = crossover_map(cells, gpu_texts(found), found.asked_rate, found.capacities)
        is_predicted = any(cell.predicted is not None for cell in cells)
        caption = MAP_CAPTION.format(
            slo=slo_words(run.slo),
            above=above_words(cells),
            more=(PREDICTED_CAPTION if is_predicted else "")
            + (GPU_CAPTION if any(cell.key in found.capacities for cell in cells) else ""),
        )
        both: tuple[Source, ...] = ("measured here", "predicted")
        sources = both if is_predicted or found.capacities else MEASURED
        slug = f"crossover-{_slug(name)}" if len(series) > 1 else "crossover"
        title = f"Crossover map: {name}" if len(series) > 1 else "Crossover map"
        if chart is not None:
            yield Figure("crossover", slug, title, caption, chart, sources)


def _metrics(run: RunNumbers) -> list[tuple[latency.Metric, str, float | None]]:
    return [
        ("ttft", "time to first token", run.slo.ttft_seconds),
        ("tpot", "time per output token", run.slo.tpot_seconds),
    ]


def _alone(run: RunNumbers) -> Iterator[Figure]:
    for metric, name, limit in _metrics(run):
        chart = latency.alone(run.cells, metric, limit)
        title = f"{name.capitalize()}, one request at a time"
        if chart is not None:
            yield Figure("alone", f"alone-{metric}", title, ALONE_CAPTION, chart, half=True)


def _under_load(run: RunNumbers) -> Iterator[Figure]:
    names = names_of(run.cells)
    for cell in run.cells:
        for metric, name, limit in _metrics(run):
            chart = latency.under_load(cell, metric, limit)
            slug = f"latency-{metric}-{_slug(cell.key)}"
            title = f"{names[cell.key]}: {name}"
            if chart is not None:
                yield Figure(
                    "latency", slug, title, LATENCY_CAPTION, chart, half=True, cell=cell.key
                )


def _whole(run: RunNumbers, found: Crossover) -> Iterator[Figure]:
    loaded = [cell for cell in run.cells if cell.loaded]
    bounds = ATTAINMENT_CAPTION.format(confidence=formatting.share(run.slo.confidence))
    tokens = throughput.throughput(loaded)
    good = throughput.attainment(loaded, run.slo.target)
    bars = memory.memory(found.rungs, run.facts.get("memory_total_bytes"))
    every: tuple[Source, ...] = ("predicted", "measured here", "published")
    for slug, title, caption, chart, sources in (
        ("throughput", "Throughput against load", THROUGHPUT_CAPTION, tokens, MEASURED),
        ("attainment", "How many requests meet the SLO", bounds, good, MEASURED),
        ("memory", "Memory against model size", _memory_caption(found.rungs), bars, every),
    ):
        if chart is not None:
            yield Figure(slug, slug, title, caption, chart, sources)


def _speeds(run: RunNumbers) -> Iterator[Figure]:
    """Prefill against decode, and speed against batch."""
    roof = roofline(phases_of(run))
    if roof is not None:
        yield Figure("phases", "roofline", "Roofline of this machine", ROOFLINE_CAPTION, roof)
    names = names_of(run.cells)
    for one in batching_of(run):
        title = f"{names[one.cell.key]}: speed against batch"
        chart = batch_chart(one, run.slo.tpot_seconds)
        yield Figure(
            *("batch", f"batch-{_slug(one.cell.key)}", title, BATCH_CAPTION, chart),
            *(BOTH, True, one.cell.key),
        )


def _formats(run: RunNumbers) -> Iterator[Figure]:
    rows = formats_of(run)
    for model in dict.fromkeys(row.model for row in rows):
        chart = format_chart([row for row in rows if row.model == model])
        title = f"{model_title(model)}: formats"
        if chart is not None:
            yield Figure(
                *("formats", f"formats-{_slug(model)}", title, FORMATS_CAPTION, chart),
                *(BOTH, True),
            )


def _costs(run: RunNumbers, found: Crossover) -> Iterator[Figure]:
    """Energy as measured; dollars and joules against the rate."""
    measured = energy_chart(energies_of(run))
    if measured is not None:
        yield Figure("energy", "energy", "Energy per token against load", ENERGY_CAPTION, measured)
    names = names_of(run.cells)
    for one in comparisons_of(run, found.capacities):
        for kind, name, caption, chart in (
            ("cost", "cost against rate", COST_CAPTION, cost_chart(one)),
            ("joules", "energy against rate", JOULES_CAPTION, joule_chart(one)),
        ):
            if chart is not None:
                title = f"{names[one.cell.key]}: {name}"
                yield Figure(
                    *("cost", f"{kind}-{_slug(one.cell.key)}", title, caption, chart),
                    *(ALL_KINDS, True, one.cell.key),
                )


def _fallbacks(run: RunNumbers) -> Iterator[Figure]:
    names = names_of(run.cells)
    for cell in run.cells:
        for place, change in enumerate(cell.fallbacks):
            chart = fallback_chart(change)
            slug = f"fallback-{place}-{_slug(cell.key)}"
            title = f"{names[cell.key]}: a fallback"
            if chart is not None:
                yield Figure("fallback", slug, title, FALLBACK_CAPTION, chart, cell=cell.key)


def series_of(cells: Sequence[CellNumbers]) -> dict[str, list[CellNumbers]]:
    """Cells that differ only in their model, by a name for what they share: a map each."""
    if len({cell.model for cell in cells}) == len(cells):
        return {"all": list(cells)}
    out: dict[str, list[CellNumbers]] = {}
    for cell in cells:
        shared = (cell.backend, cell.weight_format, cell.hardware)
        out.setdefault(" ".join(part for part in shared if part), []).append(cell)
    return out


def gpu_texts(found: Crossover) -> dict[str, str]:
    """Cell -> the memory that a GPU would need."""
    needs = {rung.cell.key: need_of(rung.cell) for rung in found.rungs if rung.cell}
    return {key: formatting.size(need.total_bytes) for key, need in needs.items() if need}


def _memory_caption(rungs: Sequence[Rung]) -> str:
    like = next((rung.cell for rung in reversed(rungs) if rung.cell is not None), None)
    text = MEMORY_CAPTION.format(setting=setting_words(like) if like else "")
    measured = any(rung.memory.measured_peak_bytes for rung in rungs)
    return text + (PEAK_CAPTION if measured else "")


def _slug(key: str) -> str:
    kept = [letter if letter.isalnum() or letter in ".-" else "-" for letter in key.lower()]
    return "".join(kept).strip("-")

"""The figures of a report, in order: each a chart with title, caption and kind of number.

for figure in figures(run, found):
    figure.slug, figure.title, figure.spec(width=760)     # Vega-Lite as a dict
    figure.svg(), figure.png()                            # drawn by vl-convert: no browser
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal

import msgspec

from models import formatting
from reports.charts import latency, memory, style, throughput
from reports.charts.crossover_map import above_words, crossover_map
from reports.charts.parts import Spec
from reports.errors import MissingPackage
from reports.findings import Crossover, Rung
from reports.numbers import CellNumbers, RunNumbers
from reports.planning.predict import need_of
from reports.sentences import names_of, setting_words, slo_words

Source = Literal["measured here", "predicted", "published"]
MEASURED: tuple[Source, ...] = ("measured here",)
STATIC_WIDTH = 860
HALF_WIDTH = 400

MAP_CAPTION = (
    "Blue: a level at that rate or above ran, long enough, and met the SLO ({slo}). Pale blue: not "
    "confirmed, and not known to be too much. Orange: {above}. Grey: not known. Marks are measured "
    "levels: a circle met the SLO, a cross missed it, a diamond had too few requests to say.{more}"
)
PREDICTED_CAPTION = " Violet, dashed: the rate that was predicted, with its own interval."
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
PEAK_CAPTION = (
    " Diamonds: the measured peak of the engine's resident memory. "
    "A KV cache that was never filled is not resident."
)


class Figure(msgspec.Struct, frozen=True):
    """One chart. `group` puts small multiples together; two `half` ones stand side by side."""

    group: str
    slug: str
    title: str
    caption: str
    chart: Spec  # as wide as its container
    sources: tuple[Source, ...] = MEASURED
    half: bool = False
    cell: str = ""  # the key of the one cell that it shows

    def spec(self, width: int | None = None) -> Spec:
        """Vega-Lite with a fixed width in pixels."""
        return self.chart | {"width": width or (HALF_WIDTH if self.half else STATIC_WIDTH)}

    def svg(self) -> str:
        return str(vl_convert().vegalite_to_svg(self.spec()))

    def png(self, scale: float = 2.0) -> bytes:
        framed = self.spec() | {"background": style.PAPER, "padding": 12}
        return bytes(vl_convert().vegalite_to_png(framed, scale=scale))


def figures(run: RunNumbers, found: Crossover) -> tuple[Figure, ...]:
    """All figures that this run has numbers for."""
    return (*_maps(run, found), *_alone(run), *_under_load(run), *_whole(run, found))


def _maps(run: RunNumbers, found: Crossover) -> Iterator[Figure]:
    series = series_of(run.cells)
    for name, cells in series.items():
        chart = crossover_map(cells, gpu_texts(found), found.asked_rate)
        is_predicted = any(cell.predicted is not None for cell in cells)
        caption = MAP_CAPTION.format(
            slo=slo_words(run.slo),
            above=above_words(cells),
            more=PREDICTED_CAPTION if is_predicted else "",
        )
        sources: tuple[Source, ...] = ("measured here", "predicted") if is_predicted else MEASURED
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


def vl_convert() -> Any:
    """The package that draws. Raises MissingPackage where it is not installed."""
    try:
        import vl_convert as package
    except ImportError as problem:
        raise MissingPackage(
            "charts need the package vl-convert-python; install llm-crossover[report]"
        ) from problem
    return package

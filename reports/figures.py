"""The figures of a report, in order: a chart each with its title, its caption and what kind of number it shows.

for figure in figures(run, found):
    figure.slug, figure.title, figure.spec(width=760)     # Vega-Lite as a dict
    figure.svg(), figure.png()                            # drawn by vl-convert: no browser, no network
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal

import msgspec

from reports import charts, crossover_map, formatting, hardware
from reports.crossover import Crossover, Rung, promise_words
from reports.errors import MissingPackage
from reports.formatting import model_title
from reports.numbers import CellNumbers, RunNumbers

Source = Literal["measured here", "predicted", "published"]
STATIC_WIDTH = 860
HALF_WIDTH = 400


class Figure(msgspec.Struct, frozen=True):
    """One chart. `group` puts small multiples together; `half`: two of them stand side by side."""

    slug: str
    group: str
    title: str
    caption: str
    sources: tuple[Source, ...]
    chart: dict[str, Any]  # Vega-Lite, as wide as its container
    half: bool = False

    def spec(self, width: int | None = None) -> dict[str, Any]:
        """Vega-Lite with a fixed width in pixels."""
        return self.chart | {"width": width or (HALF_WIDTH if self.half else STATIC_WIDTH)}

    def svg(self) -> str:
        return str(vl_convert().vegalite_to_svg(self.spec()))

    def png(self, scale: float = 2.0) -> bytes:
        return bytes(vl_convert().vegalite_to_png(self.spec() | {"background": "white", "padding": 12}, scale=scale))


def figures(run: RunNumbers, found: Crossover) -> tuple[Figure, ...]:
    """All figures that this run has numbers for."""
    return tuple(_all(run, found))


def _all(run: RunNumbers, found: Crossover) -> Iterable[Figure]:
    promise = run.promise
    words = promise_words(promise)
    names = charts.names_of(run.cells)
    many = len(series_of(run.cells)) > 1
    for series, cells in series_of(run.cells).items():
        yield from _figure(
            crossover_map.crossover_map(cells, gpu_texts(found), found.asked_rate),
            "crossover" + (f"-{_slug(series)}" if many else ""),
            "crossover",
            "Crossover map" + (f": {series}" if many else ""),
            f"Blue: the CPU keeps the promise ({words}). Pale blue: the interval of the capacity. Orange: a GPU takes over, with the "
            "memory it needs. Grey: not measured. Marks are measured levels: circle held, cross failed, diamond too few requests to say.",
            ("measured here", "predicted"),
        )
    for which, name, limit in (
        ("ttft", "Time to first token", promise.ttft_seconds),
        ("tpot", "Time per output token", promise.tpot_seconds),
    ):
        yield from _figure(
            charts.alone([cell for cell in run.cells if cell.lone], which, limit),
            f"alone-{which}",
            "alone",
            f"{name}, one request alone",
            "Median of requests sent one at a time (the mean where there are few). A model above the line keeps the promise at no rate.",
            ("measured here",),
            half=True,
        )
    for cell in run.cells:
        for which, name, limit in (
            ("ttft", "time to first token", promise.ttft_seconds),
            ("tpot", "time per output token", promise.tpot_seconds),
        ):
            yield from _figure(
                charts.latency(cell, which, limit),
                f"latency-{which}-{_slug(cell.key)}",
                "latency",
                f"{names[cell.key]}: {name}",
                "Solid p50, dashed p95. Green: the level held, red: it failed, ochre: unresolved.",
                ("measured here",),
                half=True,
            )
    loaded = [cell for cell in run.cells if cell.loaded]
    yield from _figure(
        charts.throughput(loaded),
        "throughput",
        "throughput",
        "Throughput against load",
        "Output tokens that arrived within the window, per second. Full dots: the promise held. Where a line flattens, the machine is "
        "saturated.",
        ("measured here",),
    )
    yield from _figure(
        charts.attainment(loaded, promise.target),
        "attainment",
        "attainment",
        "How many requests keep the promise",
        f"Share of good requests among all that were due, with its {formatting.share(promise.confidence)} bounds (Wilson). Failed and "
        "refused requests are not good.",
        ("measured here",),
    )
    yield from _figure(
        charts.memory(memory_rows(found.rungs), run.facts.get("memory_total_bytes"), hardware.CARD_SIZES_GIB),
        "memory",
        "memory",
        "Memory against model size",
        _memory_caption(found.rungs),
        ("predicted", "measured here", "published"),
    )


def series_of(cells: Sequence[CellNumbers]) -> dict[str, list[CellNumbers]]:
    """Cells that differ in nothing but their model, by a name for what they share: a map each. One entry where no model is there twice."""
    if len({cell.model for cell in cells}) == len(cells):
        return {"all": list(cells)}
    out: dict[str, list[CellNumbers]] = {}
    for cell in cells:
        out.setdefault(" ".join(part for part in (cell.backend, cell.weight_format, cell.hardware) if part), []).append(cell)
    return out


def gpu_texts(found: Crossover) -> dict[str, str]:
    """Cell -> what stands where the GPU takes over."""
    texts = {}
    for rung in found.rungs:
        cell = rung.cell
        if cell is not None and cell.spec is not None and cell.kv_tokens is not None:
            try:
                need = hardware.gpu_need(cell.spec, cell.weight_format, cell.kv_tokens, cell.kv_dtype)
            except KeyError:
                continue
            texts[cell.key] = f"GPU with\n{formatting.size(need.total_bytes)}"
    return texts


def memory_rows(rungs: Sequence[Rung]) -> list[dict[str, Any]]:
    """What the memory chart is drawn from: rungs with a prediction."""
    return [
        {
            "model": model_title(rung.spec.name),
            "weights": rung.memory.weight_bytes,
            "KV cache": rung.memory.kv_bytes,
            "overhead": rung.memory.overhead_bytes,
            "peak_bytes": rung.memory.measured_peak_bytes,
            "measured": rung.cell is not None and bool(rung.cell.levels),
        }
        for rung in rungs
        if rung.memory.predicted_bytes is not None
    ]


def _memory_caption(rungs: Sequence[Rung]) -> str:
    like = next((rung.cell for rung in reversed(rungs) if rung.cell is not None), None)
    setting = (
        f" for {like.slots} slots of {like.context_tokens:,} tokens" if like is not None and like.slots and like.context_tokens else ""
    )
    text = f"Bars are predicted{setting}: weights as the engine holds them, KV cache, and the rest of the process; pale bars were not run."
    if any(rung.memory.measured_peak_bytes for rung in rungs):
        text += " Diamonds: the highest resident memory of the engine that was measured. A cache that was never filled is not resident."
    return text


def _figure(
    chart: charts.Chart | None, slug: str, group: str, heading: str, caption: str, sources: tuple[Source, ...], *, half: bool = False
) -> Iterable[Figure]:
    if chart is not None:
        yield Figure(slug, group, heading, caption, sources, chart.to_dict(), half)


def _slug(key: str) -> str:
    return "".join(letter if letter.isalnum() or letter in ".-" else "-" for letter in key.lower()).strip("-")


def vl_convert() -> Any:
    """The package that draws. Raises MissingPackage where it is not installed."""
    try:
        import vl_convert as package
    except ImportError as problem:
        raise MissingPackage("charts need the package vl-convert-python; install llm-crossover[report]") from problem
    return package

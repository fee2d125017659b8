"""The crossover map: model size x request rate, where the CPU suffices and where a GPU takes over.

Its data are named (`columns`, `points`), so that the page can replace them when the SLO moves.
A log axis has no zero: a model that meets the SLO at no rate is a whole column, not a point.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import altair as alt
import msgspec

from models import formatting
from models.formatting import model_title
from reports.charts import parts, style
from reports.findings import does_not_fit
from reports.numbers import CellNumbers, LevelNumbers

_REGIONS = {
    "CPU suffices": style.CPU,
    "within the interval": style.INTERVAL,
    "GPU takes over": style.GPU,
    "not measured": style.UNKNOWN,
}
_SHAPES = {"holds": "circle", "fails": "cross", "unresolved": "diamond"}


class MapRows(msgspec.Struct, frozen=True):
    """What the map is drawn from: a column per cell, a point per level, and the rate axis."""

    columns: list[parts.Row]
    points: list[parts.Row]
    bottom: float  # requests/s
    top: float
    half: float  # half a column's width, as a factor on the size axis


def map_rows(
    cells: Sequence[CellNumbers],
    gpu_texts: Mapping[str, str] | None = None,
    asked_rate: float | None = None,
) -> MapRows:
    """The map's data for the cells of known size."""
    known = [cell for cell in cells if cell.parameters]
    rates = [level.rate_per_second for cell in known for level in cell.loaded]
    rates += [end for cell in known for end in (cell.capacity.low, cell.capacity.high)]
    seen = [rate for rate in (*rates, asked_rate) if rate]
    half = _half_width([cell.parameters or 1 for cell in known])
    return MapRows(
        columns=[_column(cell, half, (gpu_texts or {}).get(cell.key, "")) for cell in known],
        points=[_point(cell, level) for cell in known for level in cell.loaded],
        bottom=min(seen) / 2.2 if seen else 0.1,
        top=max(seen) * 2.2 if seen else 10.0,
        half=half,
    )


def _point(cell: CellNumbers, level: LevelNumbers) -> parts.Row:
    return {
        "key": cell.key,
        "model": model_title(cell.model),
        "size": cell.parameters,
        "rate": level.rate_per_second,
        "verdict": level.verdict,
        "good": level.summary.counts.attainment,
    }


def _column(cell: CellNumbers, half: float, gpu_text: str) -> parts.Row:
    size = cell.parameters or 1
    capacity = cell.capacity
    return {
        "key": cell.key,
        "model": model_title(cell.model),
        "size": size,
        "left": size / half,
        "right": size * half,
        "state": "skipped" if does_not_fit(cell) else capacity.state,
        "low": capacity.low,
        "estimate": capacity.estimate,
        "high": capacity.high,
        "label": column_label(cell),
        "gpu": gpu_text,
    }


def column_label(cell: CellNumbers) -> str:
    """What stands in a cell's column: its capacity, or why there is none."""
    capacity = cell.capacity
    if cell.state == "skipped":
        return "does not fit" if does_not_fit(cell) else "skipped"
    match capacity.state:
        case "interval":
            return formatting.rate(capacity.estimate)
        case "at_least":
            return f"≥ {formatting.rate(capacity.low)}"
        case "none":
            return "at no rate"
        case "unresolved":
            return "unresolved"
    return formatting.NOT_MEASURED


def _half_width(sizes: Sequence[int]) -> float:
    """Half a column's width as a factor on the size axis, so that neighbours do not touch."""
    ordered = sorted(set(sizes))
    ratios = [b / a for a, b in zip(ordered, ordered[1:], strict=False)]
    return min(1.36, math.sqrt(min(ratios, default=4.0)) * 0.97)


def crossover_map(
    cells: Sequence[CellNumbers], gpu_texts: Mapping[str, str], asked_rate: float | None = None
) -> parts.Spec | None:
    """The map of these cells; None where the size of none is known."""
    rows = map_rows(cells, gpu_texts, asked_rate)
    if not rows.columns:
        return None
    scale = parts.log_scale(rows.bottom, rows.top)
    layers = [
        _regions(rows, scale),
        _needs(),
        *_capacities(scale),
        _no_capacities(),
        _levels(scale),
        *_asked(asked_rate, scale),
    ]
    datasets = {"columns": rows.columns, "points": rows.points}
    return parts.spec(layers, height=380, datasets=datasets)


def _regions(rows: MapRows, scale: alt.Scale) -> parts.Layer:
    """Up to three rectangles a column: below the interval, within it, above it."""
    bottom, top = rows.bottom, rows.top
    # Above `roof` the CPU is known not to suffice; where nothing failed there is no such rate.
    ceiling = f"datum.state == 'none' || datum.state == 'skipped' ? {bottom} : {top}"
    between = "datum.state == 'interval' || datum.state == 'unresolved' && datum.low != null"
    pieces = (
        f"[{{a: {bottom}, b: datum.floor, r: 'CPU suffices'}}, "
        "{a: datum.floor, b: datum.roof, r: datum.middle}, "
        f"{{a: datum.roof, b: {top}, r: 'GPU takes over'}}]"
    )
    rectangles = (
        _columns()
        .transform_calculate(
            floor=f"datum.low == null ? {bottom} : datum.low",
            roof=f"datum.high == null ? ({ceiling}) : datum.high",
            middle=f"{between} ? 'within the interval' : 'not measured'",
        )
        .transform_calculate(pieces=pieces)
        .transform_flatten(["pieces"])
        .transform_calculate(a="datum.pieces.a", b="datum.pieces.b", region="datum.pieces.r")
        .transform_filter("datum.b > datum.a")
    )
    axis = alt.Axis(
        title="requests per second (log scale)", format="~r", values=parts.log_ticks(bottom, top)
    )
    palette = alt.Scale(domain=list(_REGIONS), range=list(_REGIONS.values()))
    legend = alt.Legend(values=[name for name in _REGIONS if name != "not measured"])
    return rectangles.mark_rect(cornerRadius=1).encode(
        x=_size_axis(rows),
        x2="right:Q",
        y=alt.Y("a:Q", scale=scale, axis=axis),
        y2="b:Q",
        color=alt.Color("region:N", scale=palette, legend=legend),
        tooltip=[
            alt.Tooltip("model:N", title="model"),
            alt.Tooltip("label:N", title="capacity"),
            alt.Tooltip("low:Q", title="suffices at least up to", format=".3~r"),
            alt.Tooltip("high:Q", title="no longer suffices at", format=".3~r"),
            alt.Tooltip("gpu:N", title="GPU memory (predicted)"),
        ],
    )


def _size_axis(rows: MapRows) -> alt.X:
    edge = math.sqrt(rows.half)
    low = min(column["left"] for column in rows.columns) / edge
    high = max(column["right"] for column in rows.columns) * edge
    axis = alt.Axis(
        values=sorted({column["size"] for column in rows.columns}),
        labelExpr=parts.lookup({column["size"]: column["model"] for column in rows.columns}),
        title="model, by its parameters (log scale)",
        ticks=False,
        labelFontSize=13,
        labelColor=style.INK,
        labelOverlap=False,
    )
    return alt.X("left:Q", scale=parts.log_scale(low, high), axis=axis)


def _needs() -> parts.Layer:
    """The GPU's memory at the top of each column."""
    look: dict[str, Any] = {"fontSize": 11, "color": style.GPU_INK, "baseline": "top"}
    texts = _columns().mark_text(**look, lineBreak="\n", lineHeight=14)
    return texts.encode(x="size:Q", y=alt.value(8), text="gpu:N")


def _capacities(scale: alt.Scale) -> parts.Layers:
    """The capacity beside its height in the column."""
    at = (
        "datum.estimate != null ? datum.estimate : datum.high == null || datum.low == null "
        "? datum.low : sqrt(datum.low * datum.high)"
    )
    known = (
        _columns()
        .transform_filter("datum.estimate != null || datum.low != null")
        .transform_calculate(at=at)
    )
    place = {"x": "right:Q", "y": alt.Y("at:Q", scale=scale), "text": "label:N"}
    look: dict[str, Any] = {"fontWeight": 700, "fontSize": 13, "color": style.INK}
    return parts.haloed(known, place, **look, dx=-6, align="right", baseline="middle")


def _no_capacities() -> parts.Layer:
    """Why there is no capacity, in the middle of the column."""
    unknown = _columns().transform_filter("datum.estimate == null && datum.low == null")
    look: dict[str, Any] = {"fontWeight": 700, "fontSize": 13, "color": style.GPU_INK}
    texts = unknown.mark_text(**look, baseline="middle")
    return texts.encode(x="size:Q", y=alt.value(150), text="label:N")


def _levels(scale: alt.Scale) -> parts.Layer:
    """A mark for each measured level."""
    shapes = alt.Scale(domain=list(_SHAPES), range=list(_SHAPES.values()))
    points = alt.Chart(alt.NamedData(name="points"))
    return points.mark_point(size=70, strokeWidth=1.6, opacity=1).encode(
        x="size:Q",
        y=alt.Y("rate:Q", scale=scale),
        shape=alt.Shape("verdict:N", scale=shapes, legend=None),
        fill=parts.colours("verdict:N", style.VERDICTS, alt.Fill),
        stroke=alt.value("white"),
        tooltip=[
            alt.Tooltip("model:N"),
            alt.Tooltip("rate:Q", title="requests/s asked", format=".3~r"),
            alt.Tooltip("good:Q", title="good requests", format=".1%"),
            alt.Tooltip("verdict:N", title="the SLO"),
        ],
    )


def _asked(asked_rate: float | None, scale: alt.Scale) -> parts.Layers:
    """A line at the rate that is asked for."""
    if not asked_rate:
        return []
    line = parts.data([{"rate": asked_rate, "text": f"your rate: {formatting.rate(asked_rate)}"}])
    y = alt.Y("rate:Q", scale=scale)
    place = {"x": alt.value(0), "y": y, "text": "text:N"}
    return [
        line.mark_rule(color=style.INK, strokeDash=[5, 4]).encode(y=y),
        *parts.haloed(line, place, align="left", dx=4, dy=-8, fontWeight=600),
    ]


def _columns() -> parts.Layer:
    return alt.Chart(alt.NamedData(name="columns"))

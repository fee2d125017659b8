"""The crossover map: model size x request rate, and what of it this CPU is confirmed to hold.

Its data are named (`columns`, `points`), so that the page can replace them when the SLO moves.
A log axis has no zero: a model that meets the SLO at no rate is a whole column, not a point.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import altair as alt
import msgspec

from loadtests.capacity.words import ALONE_ONLY, AT_NO_RATE, UNRESOLVED, in_words
from loadtests.records.events import Capacity, CapacityStatus
from models import formatting
from models.formatting import model_title
from reports.charts import machine_bands, parts, style
from reports.elsewhere import Capacities
from reports.findings import does_not_fit, is_on_cpu
from reports.numbers import CellNumbers, LevelNumbers

HOLDS = "holds (confirmed)"
UNSURE = "not confirmed, within the interval"
UNKNOWN = "not known"
HEIGHT = 380  # pixels
ROOM = 1.6  # above the highest predicted rate
_SHAPES = {"holds": "circle", "fails": "cross", "unresolved": "diamond"}


class MapRows(msgspec.Struct, frozen=True):
    """What the map is drawn from: a column per cell, a point per level, and the rate axis."""

    columns: list[parts.Row]
    points: list[parts.Row]
    machines: list[parts.Row]  # bands of GPUs, predicted
    bottom: float  # requests/s
    top: float
    half: float  # half a column's width, as a factor on the size axis


def map_rows(
    cells: Sequence[CellNumbers],
    gpu_texts: Mapping[str, str] | None = None,
    asked_rate: float | None = None,
    capacities: Capacities | None = None,
) -> MapRows:
    """The map's data for the cells of known size."""
    known = [cell for cell in cells if cell.parameters]
    half = _half_width([cell.parameters or 1 for cell in known])
    bottom, top = rate_ends(known, asked_rate)
    machines = machine_bands.bands_of(known, capacities or {})
    top = max([top, *(ROOM * row["estimate"] for row in machines)])
    return MapRows(
        columns=[
            _column(cell, half, (gpu_texts or {}).get(cell.key, ""))
            | {"beside_levels": beside_levels(cell, bottom, top)}
            for cell in known
        ],
        points=[_point(cell, level) for cell in known for level in cell.loaded],
        machines=machines,
        bottom=bottom,
        top=top,
        half=half,
    )


def rate_ends(cells: Sequence[CellNumbers], asked_rate: float | None) -> tuple[float, float]:
    """The lowest and the highest rate of the map, with room, in requests/s."""
    rates = [level.rate_per_second for cell in cells for level in cell.loaded]
    found = [cell.capacity for cell in cells if cell.capacity is not None]
    rates += [end for one in found for end in (one.held, one.high)]
    made = [cell.predicted for cell in cells if cell.predicted is not None]
    rates += [end for one in made for end in (one.rate, one.low, one.high)]
    seen = [rate for rate in (*rates, asked_rate) if rate]
    return (min(seen) / 2.2, max(seen) * 2.2) if seen else (0.1, 10.0)


def beside_levels(cell: CellNumbers, bottom: float, top: float) -> float:
    """A rate at which a word has room: below the marks of the cell's levels, else above them."""
    line: float = (top / bottom) ** (24 / HEIGHT)
    rates = [level.rate_per_second for level in cell.loaded if level.rate_per_second]
    if not rates:
        return bottom * line**4
    below = min(rates) / line
    return below if below > bottom * math.sqrt(line) else max(rates) * line


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
    predicted = cell.predicted
    return {
        "key": cell.key,
        "model": model_title(cell.model),
        "size": size,
        "left": size / half,
        "beside": size / half**0.6,  # where the prediction's interval stands
        "right": size * half,
        **column_of(cell, cell.capacity),
        "predicted": predicted.rate or None if predicted is not None else None,
        "predicted_low": predicted.low if predicted is not None else None,
        "predicted_high": predicted.high if predicted is not None else None,
        "predicted_text": (
            f"pred. {formatting.rate(predicted.rate)}" if predicted is not None else ""
        ),
        "gpu": gpu_text,
    }


def column_of(cell: CellNumbers, found: Capacity | None) -> parts.Row:
    """What a capacity makes of a column.

    `floor` and `roof` in requests/s: confirmed below the floor, not held above the roof, `middle`
    between them; floor None: nothing is confirmed; roof 0: no rate holds; None: not known.
    """
    row: parts.Row = {"floor": None, "roof": None, "middle": UNKNOWN}
    row |= {"label": column_label(cell, found), "words": cell.reason or in_words(found)}
    if does_not_fit(cell) or (found is not None and found.status is CapacityStatus.NONE):
        return row | {"roof": 0.0}
    if found is None:
        return row
    middle = UNSURE if found.high is not None else UNKNOWN
    return row | {"floor": found.held, "roof": found.high, "middle": middle}


def column_label(cell: CellNumbers, found: Capacity | None) -> str:
    """What stands in a cell's column: the confirmed rate, or why there is none."""
    if cell.state == "skipped":
        return "does not fit" if does_not_fit(cell) else "skipped"
    held = formatting.rate(found.held if found is not None else None, rounded="down")
    match found.status if found is not None else None:
        case CapacityStatus.CONFIRMED:
            return held
        case CapacityStatus.AT_LEAST:
            return f"≥ {held}"
        case CapacityStatus.NONE:
            return AT_NO_RATE
        case CapacityStatus.ALONE_ONLY:
            return ALONE_ONLY
        case CapacityStatus.UNRESOLVED:
            return UNRESOLVED
    return formatting.NOT_MEASURED


def above_words(cells: Sequence[CellNumbers]) -> str:
    """What lies above the roof; an endpoint of unknown hardware is no CPU."""
    here = "this CPU" if all(is_on_cpu(cell) for cell in cells) else "this server"
    return f"above what {here} holds"


def _half_width(sizes: Sequence[int]) -> float:
    """Half a column's width as a factor on the size axis, so that neighbours do not touch."""
    ordered = sorted(set(sizes))
    ratios = [b / a for a, b in zip(ordered, ordered[1:], strict=False)]
    return min(1.36, math.sqrt(min(ratios, default=4.0)) * 0.97)


def crossover_map(
    cells: Sequence[CellNumbers],
    gpu_texts: Mapping[str, str],
    asked_rate: float | None = None,
    capacities: Capacities | None = None,
) -> parts.Spec | None:
    """The map of these cells; None where the size of none is known."""
    rows = map_rows(cells, gpu_texts, asked_rate, capacities)
    if not rows.columns:
        return None
    scale = parts.log_scale(rows.bottom, rows.top)
    colour = _colour(above_words(cells), machine_bands.devices_of(rows.machines, capacities or {}))
    same = colour.copy()
    same["legend"] = None  # one legend is enough
    bands = machine_bands.layers(same, scale, rows.bottom, rows.half) if rows.machines else []
    layers = [
        _regions(rows, scale, above_words(cells), colour),
        *bands,
        *_predictions(scale),
        *_capacities(scale),
        *_no_capacities(scale),
        _levels(scale),
        *_asked(asked_rate, scale),
    ]
    datasets = {"columns": rows.columns, "points": rows.points}
    if rows.machines:
        datasets["machines"] = rows.machines
    return parts.spec(layers, height=HEIGHT, datasets=datasets)


def _colour(above: str, devices: Mapping[str, str]) -> alt.Color:
    """Of a region: what this CPU holds, which GPU is predicted to."""
    colours = {
        HOLDS: style.CPU,
        UNSURE: style.INTERVAL,
        above: style.ABOVE,
        UNKNOWN: style.UNKNOWN,
        **devices,
    }
    return alt.Color(
        "region:N",
        scale=alt.Scale(domain=list(colours), range=list(colours.values())),
        legend=alt.Legend(columns=parts.when_wide(4, 1), labelLimit=300),
    )


def _regions(rows: MapRows, scale: alt.Scale, above: str, colour: alt.Color) -> parts.Layer:
    """Up to three rectangles a column: below the floor, up to the roof, above it."""
    bottom, top = rows.bottom, rows.top
    pieces = (
        f"[{{a: {bottom}, b: datum.under, r: '{HOLDS}'}}, "
        "{a: datum.under, b: datum.over, r: datum.middle}, "
        f"{{a: datum.over, b: {top}, r: '{above}'}}]"
    )
    rectangles = (
        _columns()
        .transform_calculate(under=f"datum.floor == null ? {bottom} : datum.floor")
        .transform_calculate(
            over=f"datum.roof == null ? {top} : max(datum.roof, datum.under)",
        )
        .transform_calculate(pieces=pieces)
        .transform_flatten(["pieces"])
        .transform_calculate(a="datum.pieces.a", b="datum.pieces.b", region="datum.pieces.r")
        .transform_filter("datum.b > datum.a")
    )
    axis = parts.rate_labels("requests (log scale)", bottom, top)
    return rectangles.mark_rect(cornerRadius=1).encode(
        x=_size_axis(rows),
        x2="right:Q",
        y=alt.Y("a:Q", scale=scale, axis=axis),
        y2="b:Q",
        color=colour,
        tooltip=[
            alt.Tooltip("model:N", title="model"),
            alt.Tooltip("words:N", title="capacity"),
            alt.Tooltip("predicted_text:N", title="prediction"),
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
        labelFontSize=parts.when_wide(13, 11),
        labelAngle=parts.when_wide(0, -38),
        labelAlign=parts.when_wide("center", "right"),
        labelColor=style.INK,
        labelOverlap=False,
    )
    return alt.X("left:Q", scale=parts.log_scale(low, high), axis=axis)


def _predictions(scale: alt.Scale) -> parts.Layers:
    """A dashed line at the predicted rate, and its interval as a thin one."""
    made = _columns().transform_filter("datum.predicted != null")
    y = alt.Y("predicted:Q", scale=scale)
    ends = made.transform_filter("datum.predicted_low != null && datum.predicted_high != null")
    look: dict[str, Any] = {"color": style.PREDICTED, "strokeWidth": 1.6}
    text = {"align": "left", "baseline": "bottom", "dx": 4, "dy": -2, "fontStyle": "italic"}
    size = {"fontSize": parts.when_wide(11, 0), "color": style.PREDICTED}
    return [
        ends.mark_rule(**look).encode(
            x="beside:Q", y=alt.Y("predicted_low:Q", scale=scale), y2="predicted_high:Q"
        ),
        made.mark_rule(**look, strokeDash=[4, 3]).encode(x="left:Q", x2="right:Q", y=y),
        *parts.haloed(made, {"x": "left:Q", "y": y, "text": "predicted_text:N"}, **text, **size),
    ]


def _capacities(scale: alt.Scale) -> parts.Layers:
    """The confirmed rate at its height in the column."""
    known = _columns().transform_filter("datum.floor != null && datum.roof !== 0")
    place = {"x": "right:Q", "y": alt.Y("floor:Q", scale=scale), "text": "label:N"}
    size = parts.when_wide(13, 11)
    look: dict[str, Any] = {"fontWeight": 700, "fontSize": size, "color": style.INK}
    return parts.haloed(known, place, **look, dx=-6, dy=9, align="right", baseline="middle")


def _no_capacities(scale: alt.Scale) -> parts.Layers:
    """Why there is no capacity: where no level's mark is; on a phone along the column."""
    unknown = _columns().transform_filter("datum.floor == null || datum.roof === 0")
    size = parts.when_wide(13, 10)
    look: dict[str, Any] = {"fontWeight": 700, "fontSize": size, "color": style.ABOVE_INK}
    turned = {
        "angle": parts.when_wide(0, -90),
        "dy": parts.when_wide(0, 12),
        "align": parts.when_wide("center", "left"),
    }
    place = {"x": "size:Q", "y": alt.Y("beside_levels:Q", scale=scale), "text": "label:N"}
    return parts.haloed(unknown, place, **look, **turned, baseline="middle")


def _levels(scale: alt.Scale) -> parts.Layer:
    """A mark for each measured level."""
    shapes = alt.Scale(domain=list(_SHAPES), range=list(_SHAPES.values()))
    points = alt.Chart(alt.NamedData(name="points"))
    return points.mark_point(size=70, strokeWidth=1.6, opacity=1).encode(
        x="size:Q",
        y=alt.Y("rate:Q", scale=scale),
        shape=alt.Shape("verdict:N", scale=shapes, legend=None),
        fill=parts.colours("verdict:N", style.VERDICTS, alt.Fill),
        stroke=alt.value(style.PAPER),
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

"""The crossover map: model size x request rate; where the CPU suffices, the interval, and where a GPU takes over with how much memory.

Its data are named (`columns`, `points`), so that the page can put others in when the promise is moved. A log axis holds no zero: a rung
that holds at no rate is drawn as a whole column, not as a point at the bottom.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import altair as alt

from reports import formatting, theme
from reports.charts import VERDICTS, Chart, Row, data, finish, haloed, log_ticks, lookup
from reports.crossover import does_not_fit
from reports.formatting import model_title
from reports.numbers import CellNumbers


def map_rows(cells: Sequence[CellNumbers], gpu_texts: dict[str, str], asked_rate: float | None = None) -> tuple[list[Row], list[Row], Row]:
    """Columns (one per cell), points (one per level) and the ends of the axes: what the crossover map is drawn from."""
    known = [cell for cell in cells if cell.parameters]
    rates = [level.rate_per_second for cell in known for level in cell.loaded if level.rate_per_second]
    rates += [value for cell in known for value in (cell.capacity.low, cell.capacity.high) if value]
    rates += [asked_rate] if asked_rate else []
    low, high = (min(rates) / 2.2, max(rates) * 2.2) if rates else (0.1, 10.0)
    half = _half_width([cell.parameters or 1 for cell in known])
    columns = []
    for cell in known:
        capacity = cell.capacity
        columns.append(
            {
                "key": cell.key,
                "model": model_title(cell.model),
                "short": formatting.parameters(cell.parameters),
                "size": cell.parameters,
                "left": (cell.parameters or 1) / half,
                "right": (cell.parameters or 1) * half,
                "state": "skipped" if cell.state == "skipped" and does_not_fit(cell) else capacity.state,
                "low": capacity.low,
                "estimate": capacity.estimate,
                "high": capacity.high,
                "label": column_label(cell),
                "gpu": gpu_texts.get(cell.key, ""),
            }
        )
    points = [
        {
            "key": cell.key,
            "model": model_title(cell.model),
            "size": cell.parameters,
            "rate": level.rate_per_second,
            "verdict": level.verdict,
            "good": level.summary.attainment,
        }
        for cell in known
        for level in cell.loaded
    ]
    return columns, points, {"bottom": low, "top": high}


def column_label(cell: CellNumbers) -> str:
    """What stands in a cell's column: its capacity, or why there is none."""
    capacity = cell.capacity
    if cell.state == "skipped":
        return "does not fit" if does_not_fit(cell) else "skipped"
    if capacity.state == "interval":
        return formatting.rate(capacity.estimate)
    if capacity.state == "at_least":
        return f"≥ {formatting.rate(capacity.low)}"
    return {"none": "at no rate", "unresolved": "unresolved", "not_measured": "not measured"}[capacity.state]


def _half_width(sizes: Sequence[int]) -> float:
    """Half a column's width as a factor on the size axis, so that neighbours do not touch."""
    ordered = sorted(set(sizes))
    ratios = [b / a for a, b in zip(ordered, ordered[1:], strict=False)]
    return min(1.36, math.sqrt(min(ratios, default=4.0)) * 0.97)


def crossover_map(cells: Sequence[CellNumbers], gpu_texts: dict[str, str], asked_rate: float | None = None) -> Chart | None:
    """Model size x request rate: where the CPU suffices, the interval, and where the GPU takes over.

    Its data are named (`columns`, `points`), so that the page can put others in when the promise is moved.
    """
    columns, points, ends = map_rows(cells, gpu_texts, asked_rate)
    if not columns:
        return None
    bottom, top = ends["bottom"], ends["top"]
    half = columns[0]["right"] / columns[0]["size"]
    x_domain = [min(c["left"] for c in columns) / half**0.5, max(c["right"] for c in columns) * half**0.5]
    sizes = sorted({c["size"] for c in columns})
    names = {c["size"]: c["model"] for c in columns}
    size_axis = alt.Axis(
        values=sizes,
        labelExpr=lookup(names),
        title="model, by its parameters (log scale)",
        ticks=False,
        labelFontSize=13,
        labelColor=theme.INK,
        labelOverlap=False,
    )
    x = alt.X("left:Q", scale=alt.Scale(type="log", domain=x_domain, nice=False), axis=size_axis)
    y_scale = alt.Scale(type="log", domain=[bottom, top], nice=False)
    y_axis = alt.Axis(title="requests per second (log scale)", format="~r", values=log_ticks(bottom, top))

    region = alt.Color(
        "region:N",
        scale=alt.Scale(
            domain=["CPU suffices", "within the interval", "GPU takes over", "not measured"],
            range=[theme.CPU, theme.INTERVAL, theme.GPU, "#edf0f3"],
        ),
        legend=alt.Legend(values=["CPU suffices", "within the interval", "GPU takes over"]),
    )
    hover = [
        alt.Tooltip("model:N", title="model"),
        alt.Tooltip("label:N", title="capacity"),
        alt.Tooltip("low:Q", title="holds at least up to", format=".3~r"),
        alt.Tooltip("high:Q", title="no longer holds at", format=".3~r"),
        alt.Tooltip("gpu:N", title="GPU memory (predicted)"),
    ]
    rectangles = (
        alt.Chart(alt.NamedData(name="columns"))
        .transform_calculate(
            floor=f"datum.low == null ? {bottom} : datum.low",
            # Above `roof` the CPU is known not to hold; where nothing failed there is no such rate.
            roof=f"datum.high == null ? (datum.state == 'none' || datum.state == 'skipped' ? {bottom} : {top}) : datum.high",
            middle="datum.state == 'interval' || datum.state == 'unresolved' && datum.low != null ? 'within the interval' : 'not measured'",
        )
        .transform_calculate(
            pieces=f"[{{a: {bottom}, b: datum.floor, r: 'CPU suffices'}}, {{a: datum.floor, b: datum.roof, r: datum.middle}}, "
            f"{{a: datum.roof, b: {top}, r: 'GPU takes over'}}]"
        )
        .transform_flatten(["pieces"])
        .transform_calculate(a="datum.pieces.a", b="datum.pieces.b", region="datum.pieces.r")
        .transform_filter("datum.b > datum.a")
        .mark_rect(cornerRadius=1)
        .encode(x=x, x2="right:Q", y=alt.Y("a:Q", scale=y_scale, axis=y_axis), y2="b:Q", color=region, tooltip=hover)
    )
    dots = (
        alt.Chart(alt.NamedData(name="points"))
        .mark_point(size=70, strokeWidth=1.6, opacity=1)
        .encode(
            x=alt.X("size:Q"),
            y=alt.Y("rate:Q", scale=y_scale),
            shape=alt.Shape(
                "verdict:N", scale=alt.Scale(domain=["holds", "fails", "unresolved"], range=["circle", "cross", "diamond"]), legend=None
            ),
            fill=alt.Fill("verdict:N", scale=alt.Scale(domain=list(VERDICTS), range=list(VERDICTS.values())), legend=None),
            stroke=alt.value("white"),
            tooltip=[
                alt.Tooltip("model:N"),
                alt.Tooltip("rate:Q", title="requests/s asked", format=".3~r"),
                alt.Tooltip("good:Q", title="good requests", format=".1%"),
                alt.Tooltip("verdict:N", title="the promise"),
            ],
        )
    )
    base = alt.Chart(alt.NamedData(name="columns"))
    labels = (
        base.transform_calculate(
            at="datum.estimate != null ? datum.estimate : datum.high == null || datum.low == null ? datum.low : "
            "sqrt(datum.low * datum.high)"
        )
        .mark_text(
            fontWeight=700,
            fontSize=13,
            dx=-6,
            align="right",
            baseline="middle",
            color="white",
            stroke="white",
            strokeWidth=3,
            strokeOpacity=0.85,
        )
        .encode(x="right:Q", y=alt.Y("at:Q", scale=y_scale), text="label:N")
        .transform_filter("datum.estimate != null || datum.low != null")
    )
    labels_front = labels.mark_text(fontWeight=700, fontSize=13, color=theme.INK, dx=-6, align="right", baseline="middle")
    nothing = (
        base.transform_filter("datum.estimate == null && datum.low == null")
        .mark_text(fontWeight=700, fontSize=13, color=theme.GPU_INK, baseline="middle")
        .encode(x="size:Q", y=alt.value(150), text="label:N")
    )
    needs = base.mark_text(fontSize=11, color=theme.GPU_INK, baseline="top", lineBreak="\n", lineHeight=14).encode(
        x="size:Q", y=alt.value(8), text="gpu:N"
    )
    layers: list[Any] = [rectangles, needs, labels, labels_front, nothing, dots]
    if asked_rate:
        asked = alt.Chart(data([{"rate": asked_rate, "text": f"your rate: {formatting.rate(asked_rate)}"}]))
        layers.append(asked.mark_rule(color=theme.INK, strokeDash=[5, 4]).encode(y=alt.Y("rate:Q", scale=y_scale)))
        at: dict[str, Any] = {"x": alt.value(0), "y": alt.Y("rate:Q", scale=y_scale), "text": "text:N"}
        layers.append(haloed(asked, align="left", dx=4, dy=-8, fontWeight=600).encode(**at))
        layers.append(asked.mark_text(align="left", dx=4, dy=-8, fontWeight=600).encode(**at))
    chart = alt.layer(*layers).properties(datasets={"columns": columns, "points": points})
    return finish(chart, height=380)

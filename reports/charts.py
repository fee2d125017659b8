"""Values in, Altair charts out. No file is read or written here, nothing is measured, and no number is computed that a table does not hold too.

    chart = throughput(run.cells)        # None where there is nothing to draw
    chart.to_dict()                      # Vega-Lite

A log axis holds no zero: a rung that holds at no rate is drawn as a whole column, not as a point at the bottom.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import altair as alt

from reports import formatting, theme
from reports.formatting import GIB, model_title
from reports.numbers import CellNumbers, middle

Chart = alt.LayerChart | alt.Chart
Row = dict[str, Any]

VERDICTS = {"holds": theme.HOLDS, "fails": theme.FAILS, "unresolved": theme.UNRESOLVED}
_SECONDS_LABEL = "datum.value < 0.00095 ? format(datum.value * 1e6, '~r') + ' µs' : datum.value < 0.95 ? format(datum.value * 1000, '~r') + ' ms' : format(datum.value, '~r') + ' s'"


def finish(chart: Chart, width: int | str = "container", height: int = 300) -> Chart:
    """The theme, and the size; `container` follows the width of the page."""
    done = chart.properties(width=width, height=height).configure(**theme.config())
    return done.configure_view(stroke=None)


# ---------------------------------------------------------------- crossover map


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
                "state": cell.state if cell.state != "measured" else capacity.state,
                "low": capacity.low,
                "estimate": capacity.estimate,
                "high": capacity.high,
                "label": column_label(cell),
                "gpu": gpu_texts.get(cell.key, ""),
            }
        )
    points = [
        {"key": cell.key, "model": model_title(cell.model), "size": cell.parameters, "rate": level.rate_per_second, "verdict": level.verdict, "good": level.summary.attainment}
        for cell in known
        for level in cell.loaded
    ]
    return columns, points, {"bottom": low, "top": high}


def column_label(cell: CellNumbers) -> str:
    """What stands in a cell's column: its capacity, or why there is none."""
    capacity = cell.capacity
    if cell.state == "skipped":
        return "does not fit" if "fit" in cell.reason or "memory" in cell.reason.lower() else "skipped"
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
    size_axis = alt.Axis(values=sizes, labelExpr=_lookup(names), title="model, by its parameters (log scale)", ticks=False, labelFontSize=13, labelColor=theme.INK, labelOverlap=False)
    x = alt.X("left:Q", scale=alt.Scale(type="log", domain=x_domain, nice=False), axis=size_axis)
    y_scale = alt.Scale(type="log", domain=[bottom, top], nice=False)
    y_axis = alt.Axis(title="requests per second (log scale)", format="~r", tickCount=6)

    region = alt.Color(
        "region:N",
        scale=alt.Scale(domain=["CPU suffices", "within the interval", "GPU takes over", "not measured"], range=[theme.CPU, theme.INTERVAL, theme.GPU, "#edf0f3"]),
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
            pieces=f"[{{a: {bottom}, b: datum.floor, r: 'CPU suffices'}}, {{a: datum.floor, b: datum.roof, r: datum.middle}}, {{a: datum.roof, b: {top}, r: 'GPU takes over'}}]"
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
            shape=alt.Shape("verdict:N", scale=alt.Scale(domain=["holds", "fails", "unresolved"], range=["circle", "cross", "diamond"]), legend=None),
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
        base.transform_calculate(at=f"datum.estimate != null ? datum.estimate : datum.low != null ? datum.low : {math.sqrt(bottom * top)}")
        .mark_text(fontWeight=700, fontSize=13, color=theme.INK, dx=12, align="left", baseline="middle", stroke="white", strokeWidth=3, strokeOpacity=0.85)
        .encode(x="size:Q", y=alt.Y("at:Q", scale=y_scale), text="label:N")
        .transform_filter("datum.estimate != null || datum.low != null")
    )
    labels_front = labels.mark_text(fontWeight=700, fontSize=13, color=theme.INK, dx=12, align="left", baseline="middle")
    nothing = (
        base.transform_filter("datum.estimate == null && datum.low == null")
        .mark_text(fontWeight=700, fontSize=13, color=theme.GPU_INK, baseline="middle")
        .encode(x="size:Q", y=alt.value(150), text="label:N")
    )
    needs = base.mark_text(fontSize=11, color=theme.GPU_INK, baseline="top", lineBreak="\n", lineHeight=14).encode(x="size:Q", y=alt.value(8), text="gpu:N")
    layers: list[Any] = [rectangles, needs, labels, labels_front, nothing, dots]
    if asked_rate:
        asked = alt.Chart(alt.Data(values=[{"rate": asked_rate, "text": f"your rate: {formatting.rate(asked_rate)}"}]))
        layers.append(asked.mark_rule(color=theme.INK, strokeDash=[5, 4]).encode(y=alt.Y("rate:Q", scale=y_scale)))
        layers.append(asked.mark_text(align="left", dx=4, dy=-8, fontWeight=600).encode(x=alt.value(0), y=alt.Y("rate:Q", scale=y_scale), text="text:N"))
    chart = alt.layer(*layers).properties(datasets={"columns": columns, "points": points})
    return finish(chart, height=380)


# ---------------------------------------------------------------- latency


def latency(cell: CellNumbers, which: str, limit_seconds: float | None) -> Chart | None:
    """`which` ("ttft" or "tpot") of one model against load: p50 and p95, a lone request, and the promise."""
    rows = [
        {"rate": level.rate_per_second, "quantile": name, "seconds": value, "verdict": level.verdict}
        for level in cell.loaded
        for name, value in (("p50", getattr(level.summary, which).p50), ("p95", getattr(level.summary, which).p95))
        if value is not None and value > 0
    ]
    if not rows:
        return None
    rules: list[Row] = [{"seconds": limit_seconds, "text": f"promise {formatting.seconds(limit_seconds)}", "kind": "promise"}] if limit_seconds else []
    lone = middle(getattr(cell.lone.summary, which)) if cell.lone else None
    if lone:
        rules.append({"seconds": lone, "text": f"alone {formatting.seconds(lone)}", "kind": "alone"})
    values = [row["seconds"] for row in rows] + [rule["seconds"] for rule in rules]
    scale = alt.Scale(type="log", domain=[min(values) / 1.5, max(values) * 1.6], nice=False)
    rates = sorted({row["rate"] for row in rows})
    x = alt.X("rate:Q", scale=_rate_scale(rates), axis=alt.Axis(title="requests per second", format="~r", tickCount=5))
    y = alt.Y("seconds:Q", scale=scale, axis=alt.Axis(title=None, labelExpr=_SECONDS_LABEL, tickCount=4))
    base = alt.Chart(alt.Data(values=rows))
    dash = alt.StrokeDash("quantile:N", scale=alt.Scale(domain=["p50", "p95"], range=[[1, 0], [5, 3]]), legend=None)
    tips = [alt.Tooltip("quantile:N"), alt.Tooltip("rate:Q", title="requests/s", format=".3~r"), alt.Tooltip("seconds:Q", title="seconds", format=".3~r")]
    lines = base.mark_line(color=theme.CPU, strokeWidth=2).encode(x=x, y=y, strokeDash=dash)
    dots = base.mark_point(filled=True, size=42, opacity=1).encode(
        x=x, y=y, color=alt.Color("verdict:N", scale=alt.Scale(domain=list(VERDICTS), range=list(VERDICTS.values())), legend=None), tooltip=tips
    )
    last = [row for row in rows if row["rate"] == rates[-1]]
    ends = alt.Chart(alt.Data(values=last)).mark_text(align="left", dx=7, fontSize=11, color=theme.CPU).encode(x=x, y=y, text="quantile:N")
    lines_across = alt.Chart(alt.Data(values=rules))
    colour = alt.Color("kind:N", scale=alt.Scale(domain=["promise", "alone"], range=[theme.PROMISE, theme.MUTED]), legend=None)
    across = lines_across.mark_rule(strokeDash=[2, 2], strokeWidth=1.2).encode(y=y, color=colour)
    texts = lines_across.mark_text(align="left", baseline="bottom", dx=2, dy=-2, fontSize=11).encode(x=alt.value(0), y=y, text="text:N", color=colour)
    return finish(alt.layer(across, texts, lines, dots, ends).resolve_scale(color="independent"), height=190)


def alone(cells: Sequence[CellNumbers], which: str, limit_seconds: float | None) -> Chart | None:
    """`which` of a lone request against model size: where latency alone ends what a CPU can do."""
    rows = [
        {
            "size": cell.parameters,
            "model": formatting.parameters(cell.parameters),
            "seconds": value,
            "text": formatting.seconds(value),
            "verdict": "fails" if limit_seconds and value > limit_seconds else "holds",
        }
        for cell in cells
        if cell.parameters and cell.lone and (value := middle(getattr(cell.lone.summary, which)))
    ]
    if not rows:
        return None
    values = [row["seconds"] for row in rows] + ([limit_seconds] if limit_seconds else [])
    sizes = sorted({row["size"] for row in rows})
    x = alt.X(
        "size:Q",
        scale=alt.Scale(type="log", domain=[sizes[0] / 1.5, sizes[-1] * 1.8], nice=False),
        axis=alt.Axis(values=sizes, labelExpr=_lookup({row["size"]: row["model"] for row in rows}), title="parameters of the model", labelOverlap=True),
    )
    y = alt.Y("seconds:Q", scale=alt.Scale(type="log", domain=[min(values) / 1.8, max(values) * 1.8], nice=False), axis=alt.Axis(title=None, labelExpr=_SECONDS_LABEL, tickCount=4))
    base = alt.Chart(alt.Data(values=rows))
    colour = alt.Color("verdict:N", scale=alt.Scale(domain=list(VERDICTS), range=list(VERDICTS.values())), legend=None)
    layers: list[Any] = [
        base.mark_line(color="#aab4be", strokeWidth=1.5).encode(x=x, y=y),
        base.mark_point(filled=True, size=90, opacity=1).encode(x=x, y=y, color=colour, tooltip=["model:N", "text:N"]),
        base.mark_text(dy=-14, fontSize=11, fontWeight=600).encode(x=x, y=y, text="text:N", color=colour),
    ]
    if limit_seconds:
        layers += _promise_line(limit_seconds, f"promise {formatting.seconds(limit_seconds)}", y)
    return finish(alt.layer(*layers), height=230)


# ---------------------------------------------------------------- throughput and attainment


def throughput(cells: Sequence[CellNumbers]) -> Chart | None:
    """Output tokens per second against the rate asked, one line per model."""
    rows = _level_rows(cells, lambda level: level.summary.output_tokens_per_second)
    if not rows:
        return None
    y = alt.Y("value:Q", scale=alt.Scale(zero=True, nice=True), axis=alt.Axis(title="output tokens per second", tickCount=5))
    return finish(_lines(rows, y, "output tokens/s", ".3~r"), height=300)


def attainment(cells: Sequence[CellNumbers], target: float) -> Chart | None:
    """Share of good requests against the rate asked, with its interval; the target is a line."""
    rows = _level_rows(cells, lambda level: level.summary.attainment)
    if not rows:
        return None
    y = alt.Y("value:Q", scale=alt.Scale(domain=[0, 1.04], nice=False), axis=alt.Axis(title="requests that keep the promise", format=".0%", values=[0, 0.25, 0.5, 0.75, 1]))
    bars = (
        alt.Chart(alt.Data(values=rows))
        .mark_rule(strokeWidth=1.4, opacity=0.75)
        .encode(x=alt.X("rate:Q"), y=alt.Y("low:Q"), y2="high:Q", color=_series([row["model"] for row in rows]))
    )
    return finish(alt.layer(bars, *_promise_line(target, f"target {formatting.share(target)}", y, below=True), _lines(rows, y, "good", ".1%")), height=300)


def _level_rows(cells: Iterable[CellNumbers], value: Any) -> list[Row]:
    return [
        {
            "model": model_title(cell.model),
            "rate": level.rate_per_second,
            "value": value(level),
            "low": level.summary.attainment_low,
            "high": level.summary.attainment_high,
            "verdict": level.verdict,
        }
        for cell in cells
        for level in cell.loaded
        if value(level) is not None
    ]


def _lines(rows: list[Row], y: Any, title: str, number_format: str) -> alt.LayerChart:
    """One line per model with its name at the end; full dots where the promise held."""
    models = list(dict.fromkeys(row["model"] for row in rows))
    rates = sorted({row["rate"] for row in rows})
    x = alt.X("rate:Q", scale=_rate_scale(rates, room=1.9), axis=alt.Axis(title="requests per second asked (log scale)", format="~r", tickCount=6))
    colour = _series(models)
    base = alt.Chart(alt.Data(values=rows))
    last = [max((row for row in rows if row["model"] == model), key=lambda row: row["rate"]) for model in models]
    tips = [
        alt.Tooltip("model:N"),
        alt.Tooltip("rate:Q", title="requests/s asked", format=".3~r"),
        alt.Tooltip("value:Q", title=title, format=number_format),
        alt.Tooltip("verdict:N", title="the promise"),
    ]
    fill = alt.condition("datum.verdict == 'holds'", colour, alt.value("white"))
    return alt.layer(
        base.mark_line(strokeWidth=2).encode(x=x, y=y, color=colour),
        base.mark_point(size=62, strokeWidth=2, opacity=1).encode(x=x, y=y, stroke=_series(models, "stroke"), fill=fill, tooltip=tips),
        alt.Chart(alt.Data(values=last)).mark_text(align="left", dx=9, fontWeight=600).encode(x=x, y=y, text="model:N", color=colour),
    )


# ---------------------------------------------------------------- memory


def memory(rows: Sequence[Row], ram_bytes: int | None, card_sizes_gib: Sequence[int]) -> Chart | None:
    """Memory against model size: predicted bars, measured markers, lines for the sizes of cards and for this machine.

    A row: model, parts (weights, KV cache, overhead) in bytes or None, `peak_bytes` measured or None, `measured` whether this rung was run.
    """
    bars: list[Row] = []
    for row in rows:
        low = 0.0
        for part in ("weights", "KV cache", "overhead"):
            high = low + row[part] / GIB
            bars.append({"model": row["model"], "part": part, "low": low, "high": high, "text": formatting.size(row[part]), "measured": row["measured"]})
            low = high
    if not bars:
        return None
    totals = [{"model": row["model"], "total": sum(row[p] for p in ("weights", "KV cache", "overhead")) / GIB} for row in rows]
    for total in totals:
        total["text"] = formatting.size(total["total"] * GIB)
    peaks = [{"model": row["model"], "peak": row["peak_bytes"] / GIB, "text": formatting.size(row["peak_bytes"])} for row in rows if row["peak_bytes"]]
    top = max([bar["high"] for bar in bars] + [(ram_bytes or 0) / GIB]) * 1.12
    lines: list[Row] = [{"gib": size, "text": f"{size} GiB card", "kind": "card"} for size in card_sizes_gib if size <= top]
    if ram_bytes:
        lines.append({"gib": ram_bytes / GIB, "text": f"this machine's RAM {formatting.size(ram_bytes)}", "kind": "ram"})
    names = [row["model"] for row in rows]
    x = alt.X("model:N", sort=names, scale=alt.Scale(paddingInner=0.45, paddingOuter=0.3), axis=alt.Axis(title=None, labelAngle=-30 if len(names) > 6 else 0, labelColor=theme.INK, ticks=False))
    # Square roots, since 70B is five hundred times 135M and the lines of the cards lie between.
    scale = alt.Scale(type="sqrt", domain=[0, top], nice=False)
    y = alt.Y("low:Q", scale=scale, axis=alt.Axis(title="GiB (square-root scale)", values=[0.25, 1, 2, 4, 8, 16, 24, 32, 48, 64, 80], grid=False))
    part_colour = alt.Color("part:N", sort=["weights", "KV cache", "overhead"], scale=alt.Scale(domain=["weights", "KV cache", "overhead"], range=[theme.WEIGHTS, theme.KV, theme.OVERHEAD]))
    body = (
        alt.Chart(alt.Data(values=bars))
        .mark_bar()
        .encode(
            x=x, y=y, y2="high:Q", color=part_colour, opacity=alt.condition("datum.measured", alt.value(1), alt.value(0.45)),
            tooltip=["model:N", "part:N", alt.Tooltip("text:N", title="predicted")],
        )
    )  # fmt: skip
    rules = alt.Chart(alt.Data(values=lines))
    line_y = alt.Y("gib:Q", scale=scale)
    line_colour = alt.Color("kind:N", scale=alt.Scale(domain=["card", "ram"], range=["#97a3af", theme.PROMISE]), legend=None)
    layers: list[Any] = [
        rules.mark_rule(strokeDash=[3, 3]).encode(y=line_y, color=line_colour),
        body,
        rules.mark_text(align="left", baseline="bottom", dx=3, dy=-2, fontSize=11).encode(x=alt.value(0), y=line_y, text="text:N", color=line_colour),
        alt.Chart(alt.Data(values=totals)).mark_text(dy=-9, fontSize=11, color=theme.MUTED).encode(x=x, y=alt.Y("total:Q", scale=scale), text="text:N"),
    ]
    if peaks:
        marks = alt.Chart(alt.Data(values=peaks))
        layers.append(
            marks.mark_point(shape="diamond", filled=True, size=110, opacity=1, color=theme.INK, stroke="white", strokeWidth=1.5).encode(
                x=x, y=alt.Y("peak:Q", scale=scale), tooltip=["model:N", alt.Tooltip("text:N", title="measured peak")]
            )
        )
    return finish(alt.layer(*layers).resolve_scale(color="independent"), height=360)


# ---------------------------------------------------------------- shared


def _series(names: Sequence[str], channel: str = "color") -> Any:
    colours = theme.series_colours(list(dict.fromkeys(names)))
    scale = alt.Scale(domain=list(colours), range=list(colours.values()))
    return (alt.Stroke if channel == "stroke" else alt.Color)("model:N", scale=scale, legend=None)


def _rate_scale(rates: Sequence[float], room: float = 1.15) -> alt.Scale:
    return alt.Scale(type="log", domain=[rates[0] / 1.15, rates[-1] * room], nice=False)


def _promise_line(value: float, text: str, y: Any, below: bool = False) -> list[alt.Chart]:
    field = str(y.to_dict()["field"])
    line = alt.Chart(alt.Data(values=[{field: value, "text": text}]))
    return [
        line.mark_rule(color=theme.PROMISE, strokeDash=[4, 3]).encode(y=y),
        line.mark_text(color=theme.PROMISE, align="left", baseline="top" if below else "bottom", dx=3, dy=4 if below else -3, fontSize=11).encode(
            x=alt.value(0), y=y, text="text:N"
        ),
    ]


def _lookup(names: dict[Any, str]) -> str:
    """A Vega expression from an axis value to its label."""
    pairs = ", ".join(f"{str(key)!r}: {name!r}" for key, name in names.items())
    return f"({{{pairs}}})[datum.value]"


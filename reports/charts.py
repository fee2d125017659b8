"""Values in, Altair charts out: latency, throughput, attainment, memory. The map is in reports/crossover_map.py.

No file is read or written here, nothing is measured, and no number is computed that a table does not hold too.

    chart = throughput(run.cells)        # None where there is nothing to draw
    chart.to_dict()                      # Vega-Lite
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import altair as alt

from reports import formatting, theme
from reports.formatting import GIB, model_title
from reports.numbers import CellNumbers, middle

Chart = alt.Chart | alt.LayerChart | alt.FacetChart
Row = dict[str, Any]

VERDICTS = {"holds": theme.HOLDS, "fails": theme.FAILS, "unresolved": theme.UNRESOLVED}
_SECONDS_LABEL = (
    "datum.value < 0.00095 ? format(datum.value * 1e6, '~r') + ' µs' : "
    "datum.value < 0.95 ? format(datum.value * 1000, '~r') + ' ms' : format(datum.value, '~r') + ' s'"
)


def finish(chart: Chart, width: int | str = "container", height: int = 300) -> Chart:
    """The theme, and the size; `container` follows the width of the page."""
    done: Chart = chart.properties(width=width, height=height).configure(**theme.config())
    return done


def names_of(cells: Sequence[CellNumbers]) -> dict[str, str]:
    """Cell -> what it is called in a chart: its model, and as much more as tells it from the others."""
    models = [cell.model for cell in cells]
    formats, backends = len({cell.weight_format for cell in cells}) > 1, len({cell.backend for cell in cells}) > 1
    out = {}
    for cell in cells:
        parts = [model_title(cell.model)]
        if models.count(cell.model) > 1:
            parts += [cell.weight_format] if formats else []
            parts += [cell.backend] if backends else []
            parts += [cell.hardware] if cell.hardware else []
        out[cell.key] = " ".join(parts)
    return out


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
    rules: list[Row] = (
        [{"seconds": limit_seconds, "text": f"promise {formatting.seconds(limit_seconds)}", "kind": "promise"}] if limit_seconds else []
    )
    lone = middle(getattr(cell.lone.summary, which)) if cell.lone else None
    if lone:
        rules.append({"seconds": lone, "text": f"alone {formatting.seconds(lone)}", "kind": "alone"})
    values = [row["seconds"] for row in rows] + [rule["seconds"] for rule in rules]
    scale = alt.Scale(type="log", domain=[min(values) / 1.5, max(values) * 1.6], nice=False)
    rates = sorted({row["rate"] for row in rows})
    x = alt.X(
        "rate:Q",
        scale=_rate_scale(rates),
        axis=alt.Axis(title="requests per second", format="~r", values=log_ticks(rates[0] / 1.15, rates[-1] * 1.15, 6)),
    )
    y = alt.Y("seconds:Q", scale=scale, axis=_seconds_axis(values, 5))
    base = alt.Chart(data(rows))
    dash = alt.StrokeDash("quantile:N", scale=alt.Scale(domain=["p50", "p95"], range=[[1, 0], [5, 3]]), legend=None)
    tips = [
        alt.Tooltip("quantile:N"),
        alt.Tooltip("rate:Q", title="requests/s", format=".3~r"),
        alt.Tooltip("seconds:Q", title="seconds", format=".3~r"),
    ]
    lines = base.mark_line(color=theme.CPU, strokeWidth=2).encode(x=x, y=y, strokeDash=dash)
    dots = base.mark_point(filled=True, size=42, opacity=1).encode(
        x=x,
        y=y,
        color=alt.Color("verdict:N", scale=alt.Scale(domain=list(VERDICTS), range=list(VERDICTS.values())), legend=None),
        tooltip=tips,
    )
    last = [row for row in rows if row["rate"] == rates[-1]]
    named = alt.Chart(data(last))
    ends = [  # apart from each other, also where the two meet
        named.transform_filter(f"datum.quantile == '{name}'")
        .mark_text(align="left", dx=7, dy=dy, fontSize=11, color=theme.CPU)
        .encode(x=x, y=y, text="quantile:N")
        for name, dy in (("p50", 5), ("p95", -5))
    ]
    lines_across = alt.Chart(data(rules))
    colour = alt.Color("kind:N", scale=alt.Scale(domain=["promise", "alone"], range=[theme.PROMISE, theme.MUTED]), legend=None)
    across = lines_across.mark_rule(strokeDash=[2, 2], strokeWidth=1.2).encode(y=y, color=colour)
    promised = lines_across.transform_filter("datum.kind == 'promise'").mark_text(align="left", baseline="bottom", dx=2, dy=-2, fontSize=11)
    lonely = lines_across.transform_filter("datum.kind == 'alone'").mark_text(align="right", baseline="top", dx=-2, dy=3, fontSize=11)
    texts = [
        promised.encode(x=alt.value(0), y=y, text="text:N", color=colour),
        lonely.encode(x=alt.value("width"), y=y, text="text:N", color=colour),
    ]
    return finish(alt.layer(across, *texts, lines, dots, *ends).resolve_scale(color="independent"), height=190)


def alone(cells: Sequence[CellNumbers], which: str, limit_seconds: float | None) -> Chart | None:
    """`which` of a lone request against model size: where latency alone ends what a CPU can do."""
    rows: list[Row] = [
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
        axis=alt.Axis(
            values=sizes, labelExpr=lookup({row["size"]: row["model"] for row in rows}), title="parameters of the model", labelOverlap=True
        ),
    )
    y = alt.Y(
        "seconds:Q", scale=alt.Scale(type="log", domain=[min(values) / 1.8, max(values) * 1.8], nice=False), axis=_seconds_axis(values, 6)
    )
    base = alt.Chart(data(rows))
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
    y = alt.Y(
        "value:Q",
        scale=alt.Scale(domain=[0, 1.04], nice=False),
        axis=alt.Axis(title="requests that keep the promise", format=".0%", values=[0, 0.25, 0.5, 0.75, 1]),
    )
    bars = (
        alt.Chart(data(rows))
        .mark_rule(strokeWidth=1.4, opacity=0.75)
        .encode(x=alt.X("rate:Q"), y=alt.Y("low:Q"), y2="high:Q", color=_series([row["model"] for row in rows]))
    )
    return finish(
        alt.layer(bars, *_promise_line(target, f"target {formatting.share(target)}", y, below=True), _lines(rows, y, "good", ".1%")),
        height=300,
    )


def _level_rows(cells: Sequence[CellNumbers], value: Any) -> list[Row]:
    names = names_of(cells)
    return [
        {
            "model": names[cell.key],
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


def _lines(rows: list[Row], y: Any, title: str, number_format: str) -> Chart:
    """One line per model with its name at the end; full dots where the promise held."""
    models = list(dict.fromkeys(row["model"] for row in rows))
    rates = sorted({row["rate"] for row in rows})
    x = alt.X(
        "rate:Q",
        scale=_rate_scale(rates, room=1.9),
        axis=alt.Axis(title="requests per second asked (log scale)", format="~r", values=log_ticks(rates[0] / 1.15, rates[-1] * 1.9)),
    )
    colour = _series(models)
    base = alt.Chart(data(rows))
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
        haloed(alt.Chart(data(last)), align="left", dx=10, fontWeight=600).encode(x=x, y=y, text="model:N"),
        alt.Chart(data(last)).mark_text(align="left", dx=10, fontWeight=600).encode(x=x, y=y, text="model:N", color=colour),
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
            bars.append(
                {
                    "model": row["model"],
                    "part": part,
                    "low": low,
                    "high": high,
                    "text": formatting.size(row[part]),
                    "measured": row["measured"],
                }
            )
            low = high
    if not bars:
        return None
    totals = [{"model": row["model"], "total": sum(row[p] for p in ("weights", "KV cache", "overhead")) / GIB} for row in rows]
    for total in totals:
        total["text"] = formatting.size(total["total"] * GIB)
    peaks = [
        {"model": row["model"], "peak": row["peak_bytes"] / GIB, "text": formatting.size(row["peak_bytes"])}
        for row in rows
        if row["peak_bytes"]
    ]
    top = max([bar["high"] for bar in bars] + [(ram_bytes or 0) / GIB]) * 1.12
    lines: list[Row] = [{"gib": size, "text": f"{size} GiB card", "kind": "card"} for size in card_sizes_gib if size <= top]
    if ram_bytes:
        lines.append({"gib": ram_bytes / GIB, "text": f"this machine's RAM {formatting.size(ram_bytes)}", "kind": "ram"})
    names = [row["model"] for row in rows]
    x = alt.X(
        "model:N",
        sort=names,
        scale=alt.Scale(paddingInner=0.45, paddingOuter=0.3),
        axis=alt.Axis(title=None, labelAngle=-30 if len(names) > 6 else 0, labelColor=theme.INK, ticks=False),
    )
    # Square roots, since 70B is five hundred times 135M and the lines of the cards lie between.
    scale = alt.Scale(type="sqrt", domain=[0, top], nice=False)
    y = alt.Y(
        "low:Q", scale=scale, axis=alt.Axis(title="GiB (square-root scale)", values=[0, 1, 2, 4, 8, 16, 24, 32, 48, 64, 80], grid=False)
    )
    part_colour = alt.Color(
        "part:N",
        sort=["weights", "KV cache", "overhead"],
        scale=alt.Scale(domain=["weights", "KV cache", "overhead"], range=[theme.WEIGHTS, theme.KV, theme.OVERHEAD]),
    )
    body = (
        alt.Chart(data(bars))
        .mark_bar()
        .encode(
            x=x, y=y, y2="high:Q", color=part_colour, opacity=alt.condition("datum.measured", alt.value(1), alt.value(0.45)),
            tooltip=["model:N", "part:N", alt.Tooltip("text:N", title="predicted")],
        )
    )  # fmt: skip
    rules = alt.Chart(data(lines))
    line_y = alt.Y("gib:Q", scale=scale)
    line_colour = alt.Color("kind:N", scale=alt.Scale(domain=["card", "ram"], range=["#97a3af", theme.PROMISE]), legend=None)
    layers: list[Any] = [
        rules.mark_rule(strokeDash=[3, 3]).encode(y=line_y, color=line_colour),
        body,
        rules.transform_filter("datum.kind == 'card'")
        .mark_text(align="left", baseline="bottom", dx=3, dy=-2, fontSize=11)
        .encode(x=alt.value(0), y=line_y, text="text:N", color=line_colour),
        rules.transform_filter("datum.kind == 'ram'")
        .mark_text(align="left", baseline="top", dx=3, dy=4, fontSize=11)
        .encode(x=alt.value(0), y=line_y, text="text:N", color=line_colour),
        haloed(alt.Chart(data(totals)), dy=-9, fontSize=11).encode(x=x, y=alt.Y("total:Q", scale=scale), text="text:N"),
        alt.Chart(data(totals))
        .mark_text(dy=-9, fontSize=11, color=theme.MUTED)
        .encode(x=x, y=alt.Y("total:Q", scale=scale), text="text:N"),
    ]
    if peaks:
        marks = alt.Chart(data(peaks))
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


def data(rows: Sequence[Row]) -> alt.InlineData:
    """Rows as they stand in the specification."""
    return alt.InlineData(values=list(rows))


def log_ticks(low: float, high: float, most: int = 9) -> list[float]:
    """Round numbers between the two for a log axis: 1, 2, 5 of every decade, fewer where these are more than `most`."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks: list[float] = []
    for steps in ((1, 2, 5), (1, 3), (1,)):
        ticks = [float(f"{step}e{decade}") for decade in decades for step in steps if low <= float(f"{step}e{decade}") <= high]
        if len(ticks) <= most:
            break
    if len(ticks) > 1:
        return ticks
    finer = [
        float(f"{step}e{decade}")
        for decade in decades
        for step in (1, 1.5, 2, 3, 4, 5, 6, 7, 8, 9)
        if low <= float(f"{step}e{decade}") <= high
    ]
    return finer or ticks


def _seconds_axis(values: Sequence[float], most: int) -> alt.Axis:
    return alt.Axis(title=None, labelExpr=_SECONDS_LABEL, values=log_ticks(min(values) / 1.8, max(values) * 1.8, most))


def haloed(chart: alt.Chart, **mark: Any) -> alt.Chart:
    """White behind a text, so that it is read where it crosses a line."""
    behind: alt.Chart = chart.mark_text(color="white", stroke="white", strokeWidth=4, strokeJoin="round", opacity=0.9, **mark)
    return behind


def _rate_scale(rates: Sequence[float], room: float = 1.15) -> alt.Scale:
    return alt.Scale(type="log", domain=[rates[0] / 1.15, rates[-1] * room], nice=False)


def _promise_line(value: float, text: str, y: Any, below: bool = False) -> list[alt.Chart]:
    field = str(y.to_dict()["field"])
    line = alt.Chart(data([{field: value, "text": text}]))
    return [
        line.mark_rule(color=theme.PROMISE, strokeDash=[4, 3]).encode(y=y),
        line.mark_text(
            color=theme.PROMISE, align="left", baseline="top" if below else "bottom", dx=3, dy=4 if below else -3, fontSize=11
        ).encode(x=alt.value(0), y=y, text="text:N"),
    ]


def lookup(names: dict[Any, str]) -> str:
    """A Vega expression from an axis value to its label."""
    pairs = ", ".join(f"{str(key)!r}: {name!r}" for key, name in names.items())
    return f"({{{pairs}}})[datum.value]"

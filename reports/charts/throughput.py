"""Output tokens per second, and the share of good requests, against the rate asked."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import altair as alt

from models import formatting
from reports.charts import parts, style
from reports.numbers import CellNumbers, LevelNumbers
from reports.sentences import names_of


def throughput(cells: Sequence[CellNumbers]) -> parts.Spec | None:
    """Output tokens per second, one line per model."""
    rows = _rows(cells, lambda level: level.summary.throughput.output_tokens_per_second)
    if not rows:
        return None
    axis = alt.Axis(title="output tokens per second", tickCount=5)
    y = alt.Y("value:Q", scale=alt.Scale(zero=True, nice=True), axis=axis)
    value = [alt.Tooltip("value:Q", title="output tokens/s", format=".3~r")]
    return parts.spec(_lines(rows, y, value), height=300)


def attainment(cells: Sequence[CellNumbers], target: float) -> parts.Spec | None:
    """Share of good requests with its interval; the target is a line."""
    rows = _rows(cells, lambda level: level.summary.counts.attainment)
    if not rows:
        return None
    axis = alt.Axis(
        title="requests that meet the SLO", format=".0%", values=[0, 0.25, 0.5, 0.75, 1]
    )
    y = alt.Y("value:Q", scale=alt.Scale(domain=[0, 1.04], nice=False), axis=axis)
    value = [
        alt.Tooltip("value:Q", title="good", format=".1%"),
        alt.Tooltip("low:Q", title="from", format=".1%"),
        alt.Tooltip("high:Q", title="to", format=".1%"),
    ]
    bars = parts.data(rows).mark_rule(strokeWidth=1.4, opacity=0.75)
    layers = [
        bars.encode(x="rate:Q", y="low:Q", y2="high:Q", color=_series(rows)),
        *parts.line_at(target, f"target {formatting.share(target)}", y, **parts.BELOW),
        *_lines(rows, y, value),
    ]
    return parts.spec(layers, height=300)


def _rows(
    cells: Sequence[CellNumbers], value_of: Callable[[LevelNumbers], float | None]
) -> list[parts.Row]:
    names = names_of(cells)
    return [
        {
            "model": names[cell.key],
            "rate": level.rate_per_second,
            "value": value,
            "low": level.summary.counts.attainment_low,
            "high": level.summary.counts.attainment_high,
            "verdict": level.verdict,
            "kind": f"measured here, {level.summary.counts.due:,} requests",
        }
        for cell in cells
        for level in cell.loaded
        if (value := value_of(level)) is not None
    ]


def _lines(rows: list[parts.Row], y: alt.Y, value: list[alt.Tooltip]) -> parts.Layers:
    """One line per model with its name at its end; dots are full where the SLO was met."""
    rates = sorted({row["rate"] for row in rows})
    x = parts.rate_axis(rates, "requests asked (log scale)", room=1.9)
    middle = math.sqrt(rates[0] * rates[-1])
    last = {
        row["model"]: row | {"is_early": row["rate"] < middle}
        for row in sorted(rows, key=lambda row: row["rate"])
    }
    tips = [
        alt.Tooltip("model:N"),
        alt.Tooltip("rate:Q", title="requests/s asked", format=".3~r"),
        *value,
        alt.Tooltip("verdict:N", title="the SLO"),
        alt.Tooltip("kind:N"),
    ]
    base = parts.data(rows)
    colour = _series(rows)
    fill = alt.condition("datum.verdict == 'holds'", colour, alt.value(style.PAPER))
    dots = base.mark_point(size=62, strokeWidth=2, opacity=1)
    # On a phone there is room beside a line's end only towards the middle.
    is_left = f"width < {parts.NARROW_PIXELS} && !datum.is_early"
    at_end = {
        "align": alt.ExprRef(f"{is_left} ? 'right' : 'left'"),
        "dx": alt.ExprRef(f"{is_left} ? -8 : 10"),
    }
    named = {"x": x, "y": y, "text": "model:N"}
    return [
        base.mark_line(strokeWidth=2).encode(x=x, y=y, color=colour),
        dots.encode(x=x, y=y, stroke=_series(rows, alt.Stroke), fill=fill, tooltip=tips),
        *parts.haloed(parts.data(list(last.values())), named, **at_end, fontWeight=600),
    ]


def _series(
    rows: list[parts.Row], channel: type[alt.Color] | type[alt.Stroke] = alt.Color
) -> alt.Color:
    names = list(dict.fromkeys(row["model"] for row in rows))
    found: alt.Color = parts.colours("model:N", style.series_colours(names), channel)
    return found

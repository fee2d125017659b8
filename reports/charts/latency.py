"""TTFT and TPOT: under load, and of single-stream requests against model size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import altair as alt

from models import formatting
from reports.charts import parts, style
from reports.numbers import CellNumbers, middle

Metric = Literal["ttft", "tpot"]


def under_load(cell: CellNumbers, metric: Metric, limit_seconds: float | None) -> parts.Spec | None:
    """p50 and p95 of one model against the rate, with the SLO and the single-stream median."""
    rows: list[parts.Row] = [
        {
            "rate": level.rate_per_second,
            "quantile": name,
            "seconds": value,
            "verdict": level.verdict,
            "kind": f"measured here, {level.summary.counts.due:,} requests",
        }
        for level in cell.loaded
        for name in ("p50", "p95")
        if (value := getattr(getattr(level.summary.latencies, metric), name))
    ]
    if not rows:
        return None
    rates = sorted({row["rate"] for row in rows})
    single = cell.single_stream
    single_seconds = middle(getattr(single.summary.latencies, metric)) if single else None
    lines = [value for value in (limit_seconds, single_seconds) if value]
    x = parts.rate_axis(rates, "requests asked", most=6)
    y = parts.seconds_axis([row["seconds"] for row in rows] + lines, room=1.6, most=5)
    layers = _slo(limit_seconds, y)
    if single_seconds:
        text = f"alone {formatting.seconds(single_seconds)}"
        right: parts.Row = {"align": "right", "dx": -2, **parts.BELOW}
        layers += parts.line_at(single_seconds, text, y, style.MUTED, **right)
    last = [row for row in rows if row["rate"] == rates[-1]]
    return parts.spec([*layers, *_quantiles(rows, last, x, y)], height=190)


def _slo(limit_seconds: float | None, y: alt.Y) -> parts.Layers:
    if not limit_seconds:
        return []
    return parts.line_at(limit_seconds, f"SLO {formatting.limit(limit_seconds)}", y)


def _quantiles(rows: list[parts.Row], last: list[parts.Row], x: alt.X, y: alt.Y) -> parts.Layers:
    base = parts.data(rows)
    dashes = alt.Scale(domain=["p50", "p95"], range=[[1, 0], [5, 3]])
    dash = alt.StrokeDash("quantile:N", scale=dashes, legend=None)
    tips = [
        alt.Tooltip("quantile:N"),
        alt.Tooltip("rate:Q", title="requests/s", format=".3~r"),
        alt.Tooltip("seconds:Q", title="seconds", format=".3~r"),
        alt.Tooltip("verdict:N", title="the SLO"),
        alt.Tooltip("kind:N"),
    ]
    names = [  # apart from each other, also where the two meet
        parts.data([row for row in last if row["quantile"] == name])
        .mark_text(align="left", dx=7, dy=dy, fontSize=11, color=style.CPU)
        .encode(x=x, y=y, text="quantile:N")
        for name, dy in (("p50", 5), ("p95", -5))
    ]
    dots = base.mark_point(filled=True, size=42, opacity=1)
    return [
        base.mark_line(color=style.CPU, strokeWidth=2).encode(x=x, y=y, strokeDash=dash),
        dots.encode(x=x, y=y, color=parts.colours("verdict:N", style.VERDICTS), tooltip=tips),
        *names,
    ]


def alone(
    cells: Sequence[CellNumbers], metric: Metric, limit_seconds: float | None
) -> parts.Spec | None:
    """The single-stream median against model size."""
    rows: list[parts.Row] = [
        {
            "size": cell.parameters,
            "model": formatting.parameters(cell.parameters),
            "seconds": value,
            "text": formatting.seconds(value),
            "verdict": "fails" if limit_seconds and value > limit_seconds else "holds",
            "kind": f"measured here, {cell.single_stream.summary.counts.due:,} requests alone",
        }
        for cell in cells
        if cell.parameters
        and cell.single_stream
        and (value := middle(getattr(cell.single_stream.summary.latencies, metric)))
    ]
    if not rows:
        return None
    sizes = sorted({row["size"] for row in rows})
    labels = parts.lookup({row["size"]: row["model"] for row in rows})
    axis = alt.Axis(
        values=sizes, labelExpr=labels, title="parameters of the model", labelOverlap=True
    )
    x = alt.X("size:Q", scale=parts.log_scale(sizes[0] / 1.5, sizes[-1] * 1.8), axis=axis)
    values = [row["seconds"] for row in rows] + ([limit_seconds] if limit_seconds else [])
    y = parts.seconds_axis(values, room=1.8, most=6)
    base = parts.data(rows)
    colour = parts.colours("verdict:N", style.VERDICTS)
    dots = base.mark_point(filled=True, size=90, opacity=1)
    texts = base.mark_text(dy=-14, fontSize=11, fontWeight=600)
    layers = [
        *_slo(limit_seconds, y),
        base.mark_line(color=style.LINE, strokeWidth=1.5).encode(x=x, y=y),
        dots.encode(x=x, y=y, color=colour, tooltip=["model:N", "text:N", "kind:N"]),
        texts.encode(x=x, y=y, text="text:N", color=colour),
    ]
    return parts.spec(layers, height=230)

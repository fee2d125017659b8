"""Decode speed against the number of streams. The page replaces the data when a slider moves."""

from __future__ import annotations

import altair as alt

from models import formatting
from reports.accelerator.batching import Batching
from reports.charts import parts, style

LAW, ROOF = "step law", "roofline"
KINDS = {LAW: "predicted by the law fitted here", ROOF: "predicted, at the peaks"}

_LEGEND = alt.Legend(columns=2, symbolType="stroke", symbolStrokeWidth=2)
_TIPS = (
    alt.Tooltip("rows:Q", title="streams"),
    alt.Tooltip("speed:Q", title="tokens/s", format=".3~r"),
    alt.Tooltip("kind:N", title="kind"),
)


def batch_rows(
    one: Batching, context_tokens: float, limit_seconds: float | None
) -> dict[str, list[parts.Row]]:
    """The lines at one context and TPOT limit, by the name of their dataset."""
    lines = [
        {
            "rows": rows,
            "speed": rows / seconds,
            "seconds": seconds,
            "line": name,
            "kind": KINDS[name],
        }
        for name, seconds_of in ((LAW, one.law_seconds), (ROOF, one.roof_seconds))
        for rows in range(1, one.most + 1)
        if (seconds := seconds_of(rows, context_tokens))
    ]
    best = one.best(limit_seconds, context_tokens)
    chosen = [] if best is None else [{"rows": best.rows, "speed": best.tokens_per_second}]
    return {"lines": lines, "best": chosen, "limit": limit_rows(one.most, limit_seconds)}


def limit_rows(most: int, limit_seconds: float | None) -> list[parts.Row]:
    """The speed at which a step takes just the limit."""
    if not limit_seconds:
        return []
    return [{"rows": rows, "speed": rows / limit_seconds} for rows in (1, most)]


def batch_chart(one: Batching, limit_seconds: float | None) -> parts.Spec:
    """Measured points on the law's line, the roofline above, the limit's line, the best batch."""
    rows = batch_rows(one, one.context_tokens, limit_seconds)
    top = max(row["speed"] for row in (*rows["lines"], *_points(one))) * 1.08
    axis = alt.Axis(title="streams that decode together", tickMinStep=1, format="d")
    ends = [max(0.5, 1 - one.most / 40), one.most * 1.025]
    x = alt.X("rows:Q", scale=alt.Scale(domain=ends, nice=False), axis=axis)
    y_scale = alt.Scale(domain=[0, top], nice=False, clamp=True)
    y = alt.Y("speed:Q", scale=y_scale, axis=alt.Axis(title="tokens/s", tickCount=5))
    lines = alt.Chart(alt.NamedData(name="lines"))
    limit = alt.Chart(alt.NamedData(name="limit"))
    best = alt.Chart(alt.NamedData(name="best"))
    palette = alt.Scale(domain=[LAW, ROOF], range=[style.CPU, style.PREDICTED])
    dash = alt.Scale(domain=[LAW, ROOF], range=[[1, 0], [5, 4]])
    layers = [
        limit.mark_line(color=style.SLO, strokeDash=[3, 3], clip=True).encode(x=x, y=y),
        lines.mark_line(strokeWidth=2, clip=True).encode(
            x=x,
            y=y,
            color=alt.Color("line:N", scale=palette, legend=_LEGEND),
            strokeDash=alt.StrokeDash("line:N", scale=dash, legend=None),
        ),
        best.mark_rule(color=style.INK, strokeWidth=1.2).encode(x=x, y=y),
        *_measured(one, x, y),
        lines.mark_point(size=120, opacity=0, color=style.INK).encode(
            x=x,
            y=y,
            tooltip=[
                *_TIPS[:2],
                alt.Tooltip("seconds:Q", title="seconds a step", format=".3~s"),
                _TIPS[2],
            ],
        ),
    ]
    return parts.spec(layers, height=210, datasets=rows)


def _points(one: Batching) -> list[parts.Row]:
    return [
        {
            "rows": point.rows,
            "speed": point.tokens_per_second,
            "low": point.rows / point.high,
            "high": point.rows / point.low,
            "interval": formatting.interval(point.rows / point.high, point.rows / point.low),
            "kind": f"measured here, {point.count} steps",
        }
        for point in one.points
    ]


def _measured(one: Batching, x: alt.X, y: alt.Y) -> parts.Layers:
    points = parts.data(_points(one))
    tips = [*_TIPS[:2], alt.Tooltip("interval:N", title="p10–p90"), _TIPS[2]]
    look = {"size": 55, "filled": True, "opacity": 1, "stroke": style.PAPER, "strokeWidth": 1}
    return [
        points.mark_rule(color=style.INK, strokeWidth=1.2, clip=True).encode(
            x=x, y=alt.Y("low:Q"), y2="high:Q"
        ),
        points.mark_point(color=style.INK, **look).encode(x=x, y=y, tooltip=tips),
    ]

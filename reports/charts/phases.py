"""The roofline of this machine with prefill and decode on it."""

from __future__ import annotations

from collections.abc import Sequence

import altair as alt

from models import formatting
from reports.accelerator.peaks import Peaks
from reports.accelerator.phases import Phase
from reports.charts import parts, style
from reports.sentences import names_of

SHAPES = {"prefill": "triangle-up", "decode, all slots": "square", "decode, one stream": "circle"}


def roofline(phases: Sequence[Phase]) -> parts.Spec | None:
    """Operations/s against operations a byte; the roof is that of the first phase's peaks."""
    known = [one for one in phases if one.work is not None]
    peaks = known[0].peaks if known else Peaks()
    if not peaks.bytes_per_second:
        return None
    rows = _rows(known)
    low = min(row["intensity"] for row in rows) / 2
    high = max(row["intensity"] for row in rows) * 2.5
    flops = [row["flops"] for row in rows] + [one["flops"] for one in _roof(peaks, low, high)]
    x_axis = alt.Axis(
        title="operations a byte read (log scale)", values=parts.log_ticks(low, high, 7)
    )
    x = alt.X("intensity:Q", scale=parts.log_scale(low, high), axis=x_axis)
    bottom, top = min(flops) / 1.5, max(flops) * 1.9
    y_axis = alt.Axis(
        title="GFLOP/s (log scale)",
        values=parts.log_ticks(bottom, top, 7),
        labelExpr="format(datum.value / 1e9, '~r')",
    )
    y = alt.Y("flops:Q", scale=parts.log_scale(bottom, top), axis=y_axis)
    found = parts.spec([*_roof_layers(peaks, low, high, x, y), _points(rows, x, y)], height=320)
    stacked = {"layout": {"top": {"direction": "vertical", "anchor": "start", "margin": 6}}}
    config = found["config"]
    return found | {"config": config | {"legend": config["legend"] | stacked}}


def _rows(phases: Sequence[Phase]) -> list[parts.Row]:
    names = names_of(list({one.cell.key: one.cell for one in phases}.values()))
    return [
        {
            "model": names[one.cell.key],
            "phase": one.name,
            "intensity": one.work.flops / one.work.bytes,
            "flops": one.flops_per_second,
            "speed": formatting.significant(one.tokens_per_second),
            "interval": formatting.interval(one.low, one.high),
            "compute": formatting.share(one.compute_share),
            "memory": formatting.share(one.bandwidth_share),
            "kind": "measured here",
        }
        for one in phases
        if one.work is not None
    ]


def _roof(peaks: Peaks, low: float, high: float) -> list[parts.Row]:
    """The bandwidth's slope up to the arithmetic peak, and that from there on."""
    bandwidth, peak = peaks.bytes_per_second or 0.0, peaks.flops_per_second
    ridge = min(peak / bandwidth, high) if peak else high
    ends = [(low, low * bandwidth), (ridge, ridge * bandwidth)]
    ends += [(high, peak)] if peak and ridge < high else []
    return [{"intensity": at, "flops": flops} for at, flops in ends]


def _roof_layers(peaks: Peaks, low: float, high: float, x: alt.X, y: alt.Y) -> parts.Layers:
    line = parts.data(_roof(peaks, low, high))
    slope = f"memory {formatting.bandwidth(peaks.bytes_per_second)}"
    at = low * 1.8
    texts = [(at, at * (peaks.bytes_per_second or 0.0), slope, "left", 12, 8)]
    if peaks.flops_per_second:
        flat = f"float32 products {formatting.operations(peaks.flops_per_second)}"
        texts.append((high / 1.1, peaks.flops_per_second, flat, "right", 0, -10))
    layers: parts.Layers = [line.mark_line(color=style.MUTED, strokeWidth=1.6).encode(x=x, y=y)]
    for at, flops, text, align, dx, dy in texts:
        place = parts.data([{"intensity": at, "flops": flops, "text": text}])
        look = {"align": align, "dx": dx, "dy": dy, "fontSize": 11, "color": style.MUTED}
        layers += parts.haloed(place, {"x": x, "y": y, "text": "text:N"}, **look)
    return layers


def _points(rows: list[parts.Row], x: alt.X, y: alt.Y) -> parts.Layer:
    names = list(dict.fromkeys(row["model"] for row in rows))
    shape = alt.Scale(domain=list(SHAPES), range=list(SHAPES.values()))
    colours = style.series_colours(names)
    palette = alt.Scale(domain=names, range=list(colours.values()))
    columns = parts.when_wide(4, 2)
    legend = alt.Legend(columns=columns, labelLimit=200)
    marks = alt.Legend(columns=columns, symbolFillColor=style.MUTED, symbolStrokeWidth=0)
    return (
        parts.data(rows)
        .mark_point(size=95, filled=True, opacity=1, stroke=style.PAPER, strokeWidth=1)
        .encode(
            x=x,
            y=y,
            color=alt.Color("model:N", scale=palette, sort=names, legend=legend),
            shape=alt.Shape("phase:N", scale=shape, sort=list(SHAPES), legend=marks),
            tooltip=[
                "model:N",
                "phase:N",
                alt.Tooltip("speed:N", title="tokens/s"),
                alt.Tooltip("interval:N", title="p10–p90"),
                alt.Tooltip("compute:N", title="of the arithmetic peak"),
                alt.Tooltip("memory:N", title="of the bandwidth"),
                alt.Tooltip("kind:N", title="kind"),
            ],
        )
    )

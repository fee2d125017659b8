"""Memory against model size: predicted bars, measured peaks, lines for cards and this machine."""

from __future__ import annotations

from collections.abc import Sequence

import altair as alt

from models import formatting
from models.formatting import GIB, model_title
from reports.charts import parts, style
from reports.findings import Rung
from reports.planning.hardware import CARD_SIZES_GIB

_TICKS_GIB = [0, 1, 2, 4, 8, 16, 24, 32, 48, 64, 80]


def memory(rungs: Sequence[Rung], ram_bytes: int | None) -> parts.Spec | None:
    """A bar for each rung whose memory is predicted."""
    known = [rung for rung in rungs if rung.memory.predicted_bytes is not None]
    if not known:
        return None
    totals = [_row(rung, "total", rung.memory.predicted_bytes) for rung in known]
    top = max([row["total"] for row in totals] + [(ram_bytes or 0) / GIB]) * 1.12
    names = [row["model"] for row in totals]
    axis = alt.Axis(
        title=None, labelAngle=-30 if len(names) > 6 else 0, labelColor=style.INK, ticks=False
    )
    spacing = alt.Scale(paddingInner=0.45, paddingOuter=0.3)
    x = alt.X("model:N", sort=names, scale=spacing, axis=axis)
    # Square roots: 70B is five hundred times 135M, and the lines of the cards lie between.
    scale = alt.Scale(type="sqrt", domain=[0, top], nice=False)
    at_total = {"x": x, "y": alt.Y("total:Q", scale=scale), "text": "text:N"}
    layers = [
        *_lines(ram_bytes, top, scale),
        _bars(known, x, scale),
        *parts.haloed(
            parts.data(totals), at_total, dy=-9, fontSize=parts.when_wide(11, 0), color=style.MUTED
        ),
        *_peaks(known, x, scale),
    ]
    return parts.spec(layers, height=360)


def _row(rung: Rung, name: str, size_bytes: int | None) -> parts.Row:
    text = formatting.size(size_bytes)
    return {"model": model_title(rung.spec.name), name: (size_bytes or 0) / GIB, "text": text}


def _lines(ram_bytes: int | None, top: float, scale: alt.Scale) -> parts.Layers:
    """The sizes of cards, and this machine's memory."""
    y = alt.Y("gib:Q", scale=scale)
    layers: parts.Layers = []
    for size in CARD_SIZES_GIB:
        if size <= top:
            layers += parts.line_at(size, f"{size} GiB card", y, style.CARD)
    if ram_bytes:
        text = f"this machine's RAM {formatting.size(ram_bytes)}"
        layers += parts.line_at(ram_bytes / GIB, text, y, **parts.BELOW)
    return layers


def _bars(rungs: Sequence[Rung], x: alt.X, scale: alt.Scale) -> parts.Layer:
    rows: list[parts.Row] = []
    for rung in rungs:
        low = 0.0
        memory = rung.memory
        measured = rung.cell is not None and bool(rung.cell.levels)
        sizes = (memory.weight_bytes, memory.kv_bytes, memory.overhead_bytes)
        for part, size in zip(style.PARTS, sizes, strict=True):
            row = _row(rung, "size", size) | {"part": part, "measured": measured, "low": low}
            low += row["size"]
            rows.append(row | {"high": low})
    axis = alt.Axis(title="GiB (square-root scale)", values=_TICKS_GIB, grid=False)
    palette = alt.Scale(domain=list(style.PARTS), range=list(style.PARTS.values()))
    bars = parts.data(rows).mark_bar()
    return bars.encode(
        x=x,
        y=alt.Y("low:Q", scale=scale, axis=axis),
        y2="high:Q",
        color=alt.Color("part:N", sort=list(style.PARTS), scale=palette),
        opacity=alt.condition("datum.measured", alt.value(1), alt.value(0.45)),
        tooltip=["model:N", "part:N", alt.Tooltip("text:N", title="predicted")],
    )


def _peaks(rungs: Sequence[Rung], x: alt.X, scale: alt.Scale) -> parts.Layers:
    rows = [
        _row(rung, "peak", rung.memory.measured_peak_bytes)
        for rung in rungs
        if rung.memory.measured_peak_bytes
    ]
    if not rows:
        return []
    look: parts.Row = {"shape": "diamond", "size": 110, "color": style.INK, "stroke": style.PAPER}
    marks = parts.data(rows).mark_point(**look, filled=True, opacity=1, strokeWidth=1.5)
    tips = ["model:N", alt.Tooltip("text:N", title="measured peak")]
    return [marks.encode(x=x, y=alt.Y("peak:Q", scale=scale), tooltip=tips)]

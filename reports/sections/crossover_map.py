"""The crossover map: a bar a model over the request rate. Confirmed, estimated, then a GPU.

An SVG of ours: the sliders of the page move its bars by the same scale (report.js).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

import msgspec

from models import formatting
from reports.chart_style import CPU, ESTIMATED, GPU, INK, LINE, MUTED, UNKNOWN, ticks
from reports.headline import Answer
from reports.sections.section import Chart

WIDTH, LEFT, RIGHT, ROW, TOP, BAR = 860, 150, 16, 42, 12, 24
ON_GPU = "#22160c"  # text on the GPU's bar, on a dark page too
ROOM = 1.6  # beyond the highest and below the lowest rate


class Bars(msgspec.Struct, frozen=True):
    """Ends of a model's bars, requests/s; None: no such bar."""

    held: float | None
    limit: float | None
    low: float | None
    high: float | None
    gpu: float | None  # what the GPU holds
    gpu_name: str = ""


def bars_of(answer: Answer) -> Bars:
    """What is known of one model."""
    found = answer.cell.capacity
    gpu = answer.over.gpu if answer.over is not None else None
    limit = None if found is None else (found.limit or found.high)
    return Bars(
        held=answer.cell.held,
        limit=limit or None,
        low=None if found is None else found.low or None,
        high=None if found is None else found.high or None,
        gpu=None if gpu is None else gpu.rate or None,
        gpu_name="" if gpu is None else gpu.name,
    )


def domain(bars: Sequence[Bars]) -> tuple[float, float] | None:
    """The ends of the axis; None: nothing to draw."""
    known = [x for one in bars for x in (one.held, one.limit, one.low, one.high, one.gpu) if x]
    return (min(known) / ROOM / 2, max(known) * ROOM) if known else None


def place(rate: float, ends: tuple[float, float]) -> float:
    """Pixels from the left for a rate."""
    low, high = ends
    part = math.log(min(max(rate, low), high) / low) / math.log(high / low)
    return LEFT + part * (WIDTH - LEFT - RIGHT)


def crossover_map(answers: Sequence[Answer]) -> Chart | None:
    """The map; None where nothing was measured."""
    bars = [bars_of(one) for one in answers]
    ends = domain(bars)
    if ends is None:
        return None
    height = TOP + ROW * len(bars) + 30
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        f'data-low="{ends[0]:.6g}" data-high="{ends[1]:.6g}" data-left="{LEFT}" '
        f'data-right="{WIDTH - RIGHT}" font-family="inherit" font-size="12">',
        '<defs><pattern id="hatch" width="7" height="7" patternUnits="userSpaceOnUse" '
        f'patternTransform="rotate(45)"><rect width="7" height="7" fill="{ESTIMATED}"/>'
        f'<rect width="3" height="7" fill="{CPU}"/></pattern></defs>',
    ]
    bottom = TOP + ROW * len(bars)
    for rate in _axis(ends):
        x = place(rate, ends)
        parts.append(f'<path d="M{x:.1f} {TOP}V{bottom}" stroke="{LINE}" stroke-opacity=".45"/>')
        parts.append(
            f'<text x="{x:.1f}" y="{bottom + 18}" text-anchor="middle" fill="{MUTED}">'
            f"{formatting.rate(rate).replace(' a minute', '/min').replace(' an hour', '/h')}</text>"
        )
    for index, (answer, one) in enumerate(zip(answers, bars, strict=True)):
        parts += _row(index, answer, one, ends)
    parts.append("</svg>")
    return Chart(
        slug="map",
        title="Model size against request rate",
        label="For each model, from slow to quick rates: confirmed on this CPU (solid), estimated "
        "on this CPU (hatched), and what the GPU that takes over holds (orange, predicted).",
        svg="".join(parts),
    )


def _axis(ends: tuple[float, float]) -> list[float]:
    """Round rates in the units that people read."""
    found = [
        tick / times
        for times, least, below in ((3600, 0.0, 1 / 6), (60, 1 / 6, 1.0), (1, 1.0, math.inf))
        for tick in ticks(ends[0] * times, ends[1] * times, 6)
        if least <= tick / times < below
    ]
    return found[:: math.ceil(len(found) / 7)] if len(found) > 7 else found


def _row(index: int, answer: Answer, one: Bars, ends: tuple[float, float]) -> list[str]:
    """A model's name and its bars; empty ones are there for the sliders, without width."""
    y = TOP + index * ROW + (ROW - BAR) / 2
    name = escape(answer.title)
    size = formatting.parameters(answer.cell.parameters)
    start, held = float(LEFT), place(one.held, ends) if one.held else float(LEFT)
    limit = max(held, place(one.limit, ends)) if one.limit else held
    gpu = max(limit, place(one.gpu, ends)) if one.gpu else limit

    def bar(kind: str, left: float, right: float, fill: str, says: str) -> str:
        return (
            f'<rect data-model="{index}" data-bar="{kind}" x="{left:.1f}" y="{y:.1f}" '
            f'width="{max(0.0, right - left):.1f}" height="{BAR}" fill="{fill}">'
            f"<title>{escape(says)}</title></rect>"
        )

    text = "unknown" if answer.cell.capacity is None else ""
    parts = [
        f'<text x="{LEFT - 12}" y="{y + BAR / 2 - 1:.1f}" text-anchor="end" fill="{INK}" '
        f'font-weight="600">{name}</text>'
        f'<text x="{LEFT - 12}" y="{y + BAR / 2 + 12:.1f}" text-anchor="end" fill="{MUTED}" '
        f'font-size="10.5">{size}</text>',
        bar(
            "held", start, held, CPU, f"confirmed up to {formatting.rate(one.held, rounded='down')}"
        ),
        bar("limit", held, limit, "url(#hatch)", f"estimated up to {formatting.rate(one.limit)}"),
        bar("gpu", limit, gpu, GPU, f"{one.gpu_name}: predicted {formatting.rate(one.gpu)}"),
    ]
    if one.low and one.high:
        low, high = place(one.low, ends), place(one.high, ends)
        middle = y + BAR / 2
        parts.append(
            f'<path data-model="{index}" data-bar="interval" d="M{low:.1f} {middle}H{high:.1f}'
            f'M{low:.1f} {middle - 5}v10M{high:.1f} {middle - 5}v10" stroke="{INK}" '
            f'fill="none" stroke-width="1.4"><title>90 % interval of the estimate</title></path>'
        )
    if one.gpu_name and gpu - limit > 90:
        parts.append(
            f'<text data-model="{index}" data-bar="name" x="{gpu - 6:.1f}" y="{y + 16:.1f}" '
            f'text-anchor="end" fill="{ON_GPU}" font-size="11">{escape(one.gpu_name)}</text>'
        )
    if text:
        parts.append(f'<text x="{LEFT + 6}" y="{y + 16:.1f}" fill="{UNKNOWN}">not measured</text>')
    return parts

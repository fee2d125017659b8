"""The crossover map: a bar a model over the request rate. Confirmed, estimated, then a GPU.

An SVG of ours: the sliders of the page move its bars by the same scale (report.js).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

import msgspec

from models import formatting
from reports.chart_style import (
    CPU,
    ESTIMATED,
    GPU,
    INK,
    LINE,
    MUTED,
    rate_label,
    rate_ticks,
)
from reports.headline import Answer
from reports.sections.section import Chart

WIDTH, LEFT, RIGHT, ROW, TOP, BAR = 860, 150, 16, 42, 12, 24
NARROW, NARROW_LEFT = 360, 104  # on a phone, so that its text can be read
ON_GPU = "#22160c"  # text on the GPU's bar, on a dark page too
ROOM = 1.6  # beyond the highest and below the lowest rate


def ends_of(answer: Answer) -> dict[str, float | None]:
    """Ends of a model's bars, requests/s; None: no such bar."""
    found, gpu = answer.cell.capacity, answer.gpu
    known = {name: None if found is None else getattr(found, name) for name in ("low", "high")}
    known["limit"] = None if found is None else found.limit or found.high
    known |= {"held": answer.cell.held, "gpu": None if gpu is None else gpu.rate}
    return {name: rate or None for name, rate in known.items()}


class Scale(msgspec.Struct, frozen=True):
    """Of the axis: the rates at its ends, and where these lie."""

    low: float
    high: float
    left: float
    right: float

    def place(self, rate: float | None, least: float = 0.0) -> float:
        """Pixels from the left; `least`: where no bar is, or it would end before it."""
        least = max(least, self.left)
        if rate is None:
            return least
        inside = min(max(rate, self.low), self.high)
        part = math.log(inside / self.low) / math.log(self.high / self.low)
        return max(least, self.left + part * (self.right - self.left))


def crossover_map(answers: Sequence[Answer], *, is_narrow: bool = False) -> Chart | None:
    """The map, for a page or for a phone; None where nothing was measured."""
    bars = [ends_of(one) for one in answers]
    known = [rate for one in bars for rate in one.values() if rate]
    if not known:
        return None
    kind, width, left = ("narrow", NARROW, NARROW_LEFT) if is_narrow else ("wide", WIDTH, LEFT)
    scale = Scale(min(known) / ROOM / 2, max(known) * ROOM, left, width - RIGHT)
    bottom = TOP + ROW * len(bars)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {bottom + 30}" '
        f'class="{kind}" data-low="{scale.low:.6g}" data-high="{scale.high:.6g}" '
        f'data-left="{left}" data-right="{width - RIGHT}" font-family="inherit" font-size="12">',
        f'<defs><pattern id="hatch-{kind}" width="7" height="7" patternUnits="userSpaceOnUse" '
        f'patternTransform="rotate(45)"><rect width="7" height="7" fill="{ESTIMATED}"/>'
        f'<rect width="3" height="7" fill="{CPU}"/></pattern></defs>',
    ]
    like = answers[0].cell.like
    for rate in rate_ticks(scale.low, scale.high, like, 4 if is_narrow else 7):
        x = scale.place(rate)
        parts += [
            f'<path d="M{x:.1f} {TOP}V{bottom}" stroke="{LINE}" stroke-opacity=".45"/>',
            _text(x, bottom + 18, rate_label(rate, like), f'text-anchor="middle" fill="{MUTED}"'),
        ]
    for index, (answer, one) in enumerate(zip(answers, bars, strict=True)):
        parts += _row(index, answer, one, scale, f"url(#hatch-{kind})")
    return Chart(
        slug="map",
        label="For each model, from slow to quick rates: confirmed on this CPU (solid), estimated "
        "on this CPU (hatched), and what the GPU that takes over holds (orange, predicted).",
        svg="".join([*parts, "</svg>"]),
    )


def _text(x: float, y: float, said: str, more: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" {more}>{escape(said)}</text>'


def _row(
    index: int, answer: Answer, ends: dict[str, float | None], scale: Scale, hatched: str
) -> list[str]:
    """A model's name and its bars; empty ones are there for the sliders, without width."""
    y = TOP + index * ROW + (ROW - BAR) / 2
    middle = y + BAR / 2
    held = scale.place(ends["held"])
    limit = scale.place(ends["limit"], held)
    gpu = scale.place(ends["gpu"], limit)
    gpu_name = answer.gpu.name if answer.gpu is not None else ""

    def bar(kind: str, left: float, right: float, fill: str, says: str) -> str:
        return (
            f'<rect data-model="{index}" data-bar="{kind}" x="{left:.1f}" y="{y:.1f}" '
            f'width="{right - left:.1f}" height="{BAR}" fill="{fill}">'
            f"<title>{escape(says)}</title></rect>"
        )

    size = formatting.parameters(answer.cell.parameters)
    like = answer.cell.like
    confirmed = f"confirmed up to {formatting.rate(ends['held'], rounded='down', like=like)}"
    estimated = f"estimated up to {formatting.rate(ends['limit'], like=like)}"
    predicted = f"{gpu_name}: predicted {formatting.rate(ends['gpu'], like=like)}"
    own = 'text-anchor="end"'
    parts = [
        _text(scale.left - 12, middle - 1, answer.title, f'{own} fill="{INK}" font-weight="600"'),
        _text(scale.left - 12, middle + 12, size, f'{own} fill="{MUTED}" font-size="10.5"'),
        bar("held", scale.left, held, CPU, confirmed),
        bar("limit", held, limit, hatched, estimated),
        bar("gpu", limit, gpu, GPU, predicted),
    ]
    if ends["low"] and ends["high"]:
        low, high = scale.place(ends["low"]), scale.place(ends["high"])
        parts.append(
            f'<path data-model="{index}" data-bar="interval" d="M{low:.1f} {middle}H{high:.1f}'
            f'M{low:.1f} {middle - 5}v10M{high:.1f} {middle - 5}v10" stroke="{INK}" '
            f'fill="none" stroke-width="1.4"><title>90 % interval of the estimate</title></path>'
        )
    if gpu_name and gpu - limit > 90:
        marks = f'data-model="{index}" data-bar="name" {own} fill="{ON_GPU}" font-size="11"'
        parts.append(_text(gpu - 6, y + 16, gpu_name, marks))
    if not any(ends.values()):
        said = "not measured" if answer.cell.capacity is None else "no rate known"
        parts.append(_text(scale.left + 16, y + 16, said, f'fill="{MUTED}"'))
    return parts

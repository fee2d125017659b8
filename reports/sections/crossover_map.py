"""The crossover map: bars of each model over the request rate, by device and by grade.

Where the CPU alone was measured a model has one row: confirmed, estimated, then the GPU that takes
over, predicted. Where CPU and GPU were measured each has a row of its own. Solid: confirmed;
hatched: estimated; within a dashed line: predicted.

An SVG of ours: the sliders of the page move its bars by the same scale (report.js).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape

import msgspec

from crossover.models import formatting
from crossover.reports.chart_style import (
    CPU,
    ESTIMATED,
    GPU,
    GPU_ESTIMATED,
    INK,
    LINE,
    MUTED,
    PREDICTED,
    rate_label,
    rate_ticks,
)
from crossover.reports.devices.device_capacity import DeviceCapacity
from crossover.reports.headline import Answer
from crossover.reports.own_gpu import predicted_here
from crossover.reports.report_data import CPU as CPU_SIDE
from crossover.reports.report_data import GPU as GPU_SIDE
from crossover.reports.report_data import SIDE_NAMES, CellData, ReportData
from crossover.reports.sections.section import Chart

WIDTH, LEFT, RIGHT, TOP = 860, 150, 16, 12
ROW, BAR = 42, 24  # of a model with one row
LANE, LANE_BAR, BETWEEN = 26, 18, 14  # of a model with a row a device; between two models
SIDE_WIDTH = 38  # of the device's name before its bar
NARROW, NARROW_LEFT = 360, 104  # on a phone, so that its text can be read
ROOM = 1.6  # beyond the highest and below the lowest rate
COLOURS = {CPU_SIDE: (CPU, ESTIMATED), GPU_SIDE: (GPU, GPU_ESTIMATED)}


class Lane(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """A row of bars: one device of a model. Rates are requests/s; None: no such bar."""

    model: int  # its place among the answers
    side: str
    cell: CellData | None
    confirmed_rate: float | None = None
    estimated_rate: float | None = None
    low: float | None = None
    high: float | None = None
    gpu: DeviceCapacity | None = None  # predicted: what takes over, behind the CPU's bars
    forecast: DeviceCapacity | None = None  # predicted of the GPU that was measured

    @property
    def rates(self) -> list[float]:
        both = [one.rate for one in (self.gpu, self.forecast) if one is not None]
        return [
            rate
            for rate in (self.confirmed_rate, self.estimated_rate, self.low, self.high, *both)
            if rate
        ]


def lanes_of(answers: Sequence[Answer], data: ReportData) -> Iterator[Lane]:
    """One a model where one device was measured, else one for each of the two."""
    for place, answer in enumerate(answers):
        for side in data.sides:
            cell = answer.side(side)
            gpu = answer.takeover_gpu
            is_shown = (side == CPU_SIDE) if len(data.sides) == 1 else side == GPU_SIDE
            lane = Lane(
                model=place,
                side=side,
                cell=cell,
                gpu=gpu if is_shown and answer.gpu is None else None,
                forecast=predicted_here(cell, data),
            )
            found = None if cell is None else cell.capacity
            if cell is None or found is None:
                yield lane
                continue
            yield msgspec.structs.replace(
                lane,
                confirmed_rate=cell.confirmed_rate or None,
                estimated_rate=found.estimated_rate or found.high or None,
                low=found.low or None,
                high=found.high or None,
            )


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


def crossover_map(
    answers: Sequence[Answer], data: ReportData, *, is_narrow: bool = False
) -> Chart | None:
    """The map, for a page or for a phone; None where nothing was measured."""
    lanes = list(lanes_of(answers, data))
    known = [rate for lane in lanes for rate in lane.rates]
    if not known:
        return None
    kind, width, left = ("narrow", NARROW, NARROW_LEFT) if is_narrow else ("wide", WIDTH, LEFT)
    both = len(data.sides) > 1
    if both:
        left += SIDE_WIDTH
    scale = Scale(min(known) / ROOM / 2, max(known) * ROOM, left, width - RIGHT)
    each = 2 * LANE + BETWEEN if both else ROW
    bottom = TOP + each * len(answers)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {bottom + 30}" '
        f'class="{kind}" data-low="{scale.low:.6g}" data-high="{scale.high:.6g}" '
        f'data-left="{left}" data-right="{width - RIGHT}" font-family="inherit" font-size="12">',
        "<defs>",
        *(_hatch(f"hatch-{side}-{kind}", *COLOURS[side]) for side in data.sides),
        "</defs>",
    ]
    # the rates of both devices on one axis: in the unit of the quicker one
    like = max((lane.cell.like or 0.0 for lane in lanes if lane.cell), default=0.0) or None
    for rate in rate_ticks(scale.low, scale.high, like, 4 if is_narrow else 7):
        x = scale.place(rate)
        parts += [
            f'<path d="M{x:.1f} {TOP}V{bottom}" stroke="{LINE}" stroke-opacity=".45"/>',
            _text(x, bottom + 18, rate_label(rate, like), f'text-anchor="middle" fill="{MUTED}"'),
        ]
    for place, answer in enumerate(answers):
        y = TOP + each * place
        parts += _name(answer, scale.left - (SIDE_WIDTH if both else 0) - 12, y + each / 2)
        for row, lane in enumerate(lane for lane in lanes if lane.model == place):
            inset = BETWEEN / 2 + row * LANE + (LANE - LANE_BAR) / 2 if both else (ROW - BAR) / 2
            top = y + inset
            parts += _bars(lane, scale, kind, top, LANE_BAR if both else BAR, is_named=both)
    measured = "confirmed (solid) and estimated (hatched)"
    label = (
        f"For each model, from slow to quick rates: {measured} on this CPU, and predicted of the "
        "GPU that takes over (dashed)."
    )
    if both:
        label = (
            f"For each model, from slow to quick rates: {measured} on this CPU (blue) and on this "
            "machine's GPU (orange); a diamond is what was predicted of this GPU."
        )
    elif data.sides == (GPU_SIDE,):
        label = f"For each model, from slow to quick rates: {measured} on this machine's GPU."
    return Chart(slug="map", label=label, svg="".join([*parts, "</svg>"]))


def _hatch(name: str, dark: str, light: str) -> str:
    return (
        f'<pattern id="{name}" width="7" height="7" patternUnits="userSpaceOnUse" '
        f'patternTransform="rotate(45)"><rect width="7" height="7" fill="{light}"/>'
        f'<rect width="3" height="7" fill="{dark}"/></pattern>'
    )


def _text(x: float, y: float, said: str, more: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" {more}>{escape(said)}</text>'


def _name(answer: Answer, right: float, middle: float) -> list[str]:
    size = answer.cell.size_words
    own = 'text-anchor="end"'
    return [
        _text(right, middle - 1, answer.title, f'{own} fill="{INK}" font-weight="600"'),
        _text(right, middle + 12, size, f'{own} fill="{MUTED}" font-size="10.5"'),
    ]


def _bars(
    lane: Lane, scale: Scale, kind: str, y: float, height: float, *, is_named: bool
) -> list[str]:
    """The bars of a device; empty ones are there for the sliders, without width."""
    middle = y + height / 2
    held = scale.place(lane.confirmed_rate)
    limit = scale.place(lane.estimated_rate, held)
    gpu = scale.place(None if lane.gpu is None else lane.gpu.rate, limit)
    own = f'data-model="{lane.model}" data-side="{lane.side}"'
    like = None if lane.cell is None else lane.cell.like
    where = SIDE_NAMES[lane.side]

    def bar(name: str, left: float, right: float, fill: str, says: str, more: str = "") -> str:
        return (
            f'<rect {own} data-bar="{name}" x="{left:.1f}" y="{y:.1f}" '
            f'width="{right - left:.1f}" height="{height}" fill="{fill}"{more}>'
            f"<title>{escape(says)}</title></rect>"
        )

    confirmed = formatting.rate(lane.confirmed_rate, rounded="down", like=like)
    estimated = formatting.rate(lane.estimated_rate, like=like)
    hatched = f"url(#hatch-{lane.side}-{kind})"
    parts = [
        bar("held", scale.left, held, COLOURS[lane.side][0], f"{where}: confirmed {confirmed}"),
        bar("limit", held, limit, hatched, f"{where}: estimated capacity {estimated}"),
    ]
    if is_named:
        marks = f'text-anchor="end" fill="{MUTED}" font-size="11"'
        parts.append(_text(scale.left - 10, middle + 4, where, marks))
    if lane.gpu is not None or not is_named:
        name = "" if lane.gpu is None else lane.gpu.name
        says = (
            f"{name}: predicted {formatting.rate(lane.gpu.rate if lane.gpu else None, like=like)}"
        )
        dashed = f' stroke="{GPU}" stroke-width="1.2" stroke-dasharray="4 3"'
        parts.append(bar("gpu", limit, gpu, PREDICTED, says, dashed if gpu > limit else ""))
        if name and gpu - limit > 90:
            marks = f'{own} data-bar="name" text-anchor="end" fill="{INK}" font-size="11"'
            parts.append(_text(gpu - 6, middle + 4, name, marks))
    if lane.forecast is not None and lane.forecast.rate:
        parts.append(_forecast(lane.forecast, scale, own, y + height + 3, like))
    if lane.low and lane.high:
        low, high = scale.place(lane.low), scale.place(lane.high)
        parts.append(
            f'<path {own} data-bar="interval" d="M{low:.1f} {middle}H{high:.1f}'
            f'M{low:.1f} {middle - 5}v10M{high:.1f} {middle - 5}v10" stroke="{INK}" '
            f'fill="none" stroke-width="1.4"><title>90 % confidence interval of the estimate'
            "</title></path>"
        )
    if not lane.rates:
        parts.append(_text(scale.left + 8, middle + 4, _why_none(lane.cell), f'fill="{MUTED}"'))
    return parts


def _forecast(
    predicted: DeviceCapacity, scale: Scale, own: str, y: float, like: float | None
) -> str:
    """A diamond at what was predicted of the GPU that was measured, below its bar."""
    x, low, high = (scale.place(one) for one in (predicted.rate, predicted.low, predicted.high))
    interval = formatting.rate_with_interval(predicted.rate, predicted.low, predicted.high, like)
    return (
        f'<path {own} data-bar="forecast" d="M{low:.1f} {y}H{high:.1f}M{x - 4:.1f} {y}l4 -4 4 4 '
        f'-4 4Z" stroke="{GPU}" fill="{PREDICTED}" stroke-width="1.2"><title>'
        f"{escape(predicted.name)}: predicted {interval}</title></path>"
    )


def _why_none(cell: CellData | None) -> str:
    if cell is None or cell.capacity is None:
        return "not measured"
    if cell.capacity.state == "misses_slo_unloaded":
        return "misses the SLO unloaded"
    return "no rate known"

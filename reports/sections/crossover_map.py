"""The crossover map: bars of each model over the request rate, by device and by grade.

Where only the CPU was measured, a model has one lane: confirmed, then estimated, then the takeover
GPU, predicted. Where CPU and GPU were measured, each has a lane of its own. Solid bars are
confirmed, hatched ones estimated, those with a dashed outline predicted.

The map is drawn here as SVG, because the page's sliders move its bars by the same scale
(report.js).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape
from typing import NamedTuple

import msgspec

from crossover.models import formatting
from crossover.reports.answers.cheapest_gpu import predicted_here
from crossover.reports.answers.model_answers import ModelAnswer
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
from crossover.reports.report_data import CPU as CPU_SIDE
from crossover.reports.report_data import GPU as GPU_SIDE
from crossover.reports.report_data import SIDE_NAMES, CellData, ReportData
from crossover.reports.sections.section import Chart, ChartGroup, KeyEntry, Picture

# Pixels.
WIDTH, LEFT, RIGHT, TOP = 860, 150, 16, 12  # of the map, and of its margins around the bars
NARROW, NARROW_LEFT = 360, 104  # the same on a phone, so that the text can be read
ROW, BAR = 42, 24  # heights for a model with one lane
LANE, LANE_BAR, MODEL_GAP = 26, 18, 14  # heights for a model with a lane for each device
CHARACTER = 6.9  # the width of a bold character, on average
SIDE_WIDTH = 38  # of the name of a device, left of its bar
MIN_NAME_WIDTH = 90  # of a takeover GPU's bar that has room for its name
AXIS_MARGIN = 1.6  # the axis ends at this many times the highest rate
COLORS = {CPU_SIDE: (CPU, ESTIMATED), GPU_SIDE: (GPU, GPU_ESTIMATED)}  # confirmed, estimated
TITLES = {
    (): "Which rates this machine serves",
    (CPU_SIDE,): "Which rates the CPU serves, and where a GPU takes over",
    (GPU_SIDE,): "Which rates this machine's GPU serves",
    (CPU_SIDE, GPU_SIDE): "Which rates the CPU serves, and where this machine's GPU takes over",
}


class Lane(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """The bars of one device of a model. Rates are requests/s; None: there is no such bar."""

    model: int  # index of its answer, which is its row in the first table
    side: str
    cell: CellData | None
    confirmed_rate: float | None = None
    estimated_rate: float | None = None
    low: float | None = None
    high: float | None = None
    gpu: DeviceCapacity | None = None  # the takeover GPU, predicted: a bar behind the CPU's
    forecast: DeviceCapacity | None = None  # what was predicted of the GPU that was measured

    @property
    def rates(self) -> list[float]:
        """All rates in the lane, requests/s, for the ends of the axis."""
        predicted = [capacity.rate for capacity in (self.gpu, self.forecast) if capacity]
        own = (self.confirmed_rate, self.estimated_rate, self.low, self.high)
        return [rate for rate in (*own, *predicted) if rate]

    @property
    def has_forecast(self) -> bool:
        return self.forecast is not None and bool(self.forecast.rate)


def lanes_of(answers: Sequence[ModelAnswer], data: ReportData) -> Iterator[Lane]:
    """Yield a lane for each model and each device that was measured."""
    takeover_side = CPU_SIDE if len(data.sides) == 1 else GPU_SIDE
    for index, answer in enumerate(answers):
        for side in data.sides:
            cell = answer.cell_on(side)
            has_takeover = side == takeover_side and answer.gpu is None
            lane = Lane(
                model=index,
                side=side,
                cell=cell,
                gpu=answer.takeover_gpu if has_takeover else None,
                forecast=predicted_here(cell, data),
            )
            if cell is not None and cell.capacity is not None:
                capacity = cell.capacity
                lane = msgspec.structs.replace(
                    lane,
                    confirmed_rate=cell.confirmed_rate or None,
                    estimated_rate=capacity.estimated_rate or capacity.high or None,
                    low=capacity.low or None,
                    high=capacity.high or None,
                )
            yield lane


class Scale(msgspec.Struct, frozen=True):
    """The logarithmic axis: the rates at its ends, and where these lie, in pixels."""

    low: float
    high: float
    left: float
    right: float

    def x_of(self, rate: float | None, min_x: float = 0.0) -> float:
        """Return the pixels from the left at which a rate lies.

        They are at least those of the axis' left end, and at least `min_x`: a bar that begins there
        must not end before it. For no rate (None) that minimum is returned.
        """
        min_x = max(min_x, self.left)
        if rate is None:
            return min_x
        rate_on_axis = min(max(rate, self.low), self.high)
        fraction = math.log(rate_on_axis / self.low) / math.log(self.high / self.low)
        return max(min_x, self.left + fraction * (self.right - self.left))


def map_picture(data: ReportData, answers: Sequence[ModelAnswer]) -> Picture | None:
    """Return the map for the page, wide and narrow; None where no rate is known."""
    wide = crossover_map(answers, data)
    narrow = crossover_map(answers, data, is_narrow=True)
    if wide is None or narrow is None:
        return None
    chart = msgspec.structs.replace(wide, svg=wide.svg + narrow.svg)  # CSS shows one of them
    key = []
    if CPU_SIDE in data.sides:
        key.append(KeyEntry(mark="cpu", text="confirmed on this CPU"))
        key.append(KeyEntry(mark="est", text="estimated on this CPU"))
    if GPU_SIDE in data.sides:
        key.append(KeyEntry(mark="gpu", text="confirmed on this machine's GPU"))
        key.append(KeyEntry(mark="gpu-est", text="estimated on it"))
    else:
        key.append(KeyEntry(mark="pre", text="the GPU that takes over, predicted"))
    if any(lane.has_forecast for lane in lanes_of(answers, data)):
        key.append(KeyEntry(mark="diamond", text="predicted of this GPU"))
    key.append(KeyEntry(text="Whiskers: 90 % confidence interval."))
    return Picture(groups=(ChartGroup(title=TITLES[data.sides], charts=(chart,)),), key=tuple(key))


def crossover_map(
    answers: Sequence[ModelAnswer], data: ReportData, *, is_narrow: bool = False
) -> Chart | None:
    """Return the map for a page or, narrow, for a phone; None where no rate is known."""
    lanes = list(lanes_of(answers, data))
    rates = [rate for lane in lanes for rate in lane.rates]
    if not rates:
        return None
    kind, width, left = "wide", WIDTH, LEFT
    if is_narrow:
        kind, width, left = "narrow", NARROW, NARROW_LEFT
    has_both = len(data.sides) > 1
    if has_both:
        left += SIDE_WIDTH
    # Left of the lowest rate there is twice as much room, so that its bar can be seen.
    lowest, highest = min(rates) / (2 * AXIS_MARGIN), max(rates) * AXIS_MARGIN
    scale = Scale(lowest, highest, left, width - RIGHT)
    model_height = 2 * LANE + MODEL_GAP if has_both else ROW
    bottom = TOP + model_height * len(answers)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {bottom + 30}" '
        f'class="{kind}" data-low="{scale.low:.6g}" data-high="{scale.high:.6g}" '
        f'data-left="{left}" data-right="{width - RIGHT}" font-family="inherit" font-size="12">',
        "<defs>",
        *(_hatch(f"hatch-{side}-{kind}", *COLORS[side]) for side in data.sides),
        "</defs>",
    ]
    # One axis for both devices: its unit is that of the faster one.
    unit_rate = (
        max((lane.cell.unit_rate or 0.0 for lane in lanes if lane.cell), default=0.0) or None
    )
    for rate in rate_ticks(scale.low, scale.high, unit_rate, 4 if is_narrow else 7):
        x = scale.x_of(rate)
        parts += [
            f'<path d="M{x:.1f} {TOP}V{bottom}" stroke="{LINE}" stroke-opacity=".45"/>',
            _text(
                x,
                bottom + 18,
                rate_label(rate, unit_rate),
                f'text-anchor="middle" fill="{MUTED}"',
            ),
        ]
    name_right = scale.left - (SIDE_WIDTH if has_both else 0) - 12
    for index, answer in enumerate(answers):
        y = TOP + model_height * index
        parts += _model_name(answer, name_right, y + model_height / 2)
        for number, lane in enumerate(lane for lane in lanes if lane.model == index):
            if has_both:
                top = y + MODEL_GAP / 2 + number * LANE + (LANE - LANE_BAR) / 2
            else:
                top = y + (ROW - BAR) / 2
            height = LANE_BAR if has_both else BAR
            parts += _bars(lane, scale, kind, top, height, is_named=has_both)
    parts.append("</svg>")
    return Chart(slug="map", label=_label(data.sides), svg="".join(parts))


def _label(sides: tuple[str, ...]) -> str:
    """Return what the map shows, for readers who cannot see it."""
    subject = "For each model, the rates that are confirmed (solid) and estimated (hatched) on"
    if len(sides) > 1:
        return (
            f"{subject} this CPU (blue) and on this machine's GPU (orange); a diamond is what was "
            "predicted of this GPU."
        )
    if sides == (GPU_SIDE,):
        return f"{subject} this machine's GPU."
    return f"{subject} this CPU, and those predicted of the GPU that takes over (dashed)."


def _hatch(name: str, dark: str, light: str) -> str:
    return (
        f'<pattern id="{name}" width="7" height="7" patternUnits="userSpaceOnUse" '
        f'patternTransform="rotate(45)"><rect width="7" height="7" fill="{light}"/>'
        f'<rect width="3" height="7" fill="{dark}"/></pattern>'
    )


def _text(x: float, y: float, text: str, attributes: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" {attributes}>{escape(text)}</text>'


def _model_name(answer: ModelAnswer, right: float, middle: float) -> list[str]:
    """Return the model's name and size, which end at `right` and stand around `middle`. A long name
    has two lines, and an ellipsis where those are too short."""
    at_right = 'text-anchor="end"'
    lines = wrapped(answer.model, int(right / CHARACTER))
    top = middle - 1 - 6 * (len(lines) - 1)
    bold = f'{at_right} fill="{INK}" font-weight="600"'
    size = f'{at_right} fill="{MUTED}" font-size="10.5"'
    texts = [_text(right, top + 12 * number, line, bold) for number, line in enumerate(lines)]
    return [*texts, _text(right, top + 12 * len(lines) + 1, answer.cell.size_words, size)]


def wrapped(name: str, characters: int) -> list[str]:
    """Return the name in one or two lines of at most so many characters, broken after a separator
    if there is one."""
    if len(name) <= characters:
        return [name]
    last_separator = max(name.rfind(separator, 0, characters) for separator in "-_./: ")
    break_at = last_separator + 1 if last_separator >= 0 else characters
    first_line, second_line = name[:break_at], name[break_at:]
    if len(second_line) > characters:
        second_line = f"{second_line[: characters - 1]}…"
    return [first_line, second_line]


def _bars(
    lane: Lane, scale: Scale, kind: str, y: float, height: float, *, is_named: bool
) -> list[str]:
    """Return the SVG of a lane: its bars from the left, a diamond, whiskers, or why it is empty.

    `kind` is that of the map, "wide" or "narrow". `is_named`: whether the device's name stands left
    of its bars. Empty bars are drawn too, without width: the sliders move them.
    """
    middle = y + height / 2
    confirmed_end = scale.x_of(lane.confirmed_rate)
    estimated_end = scale.x_of(lane.estimated_rate, confirmed_end)
    unit_rate = None if lane.cell is None else lane.cell.unit_rate
    device = SIDE_NAMES[lane.side]
    confirmed = formatting.rate(lane.confirmed_rate, rounded="down", like=unit_rate)
    estimated = formatting.rate(lane.estimated_rate, like=unit_rate)
    solid, hatched = COLORS[lane.side][0], f"url(#hatch-{lane.side}-{kind})"
    parts = [
        _bar(
            lane,
            "confirmed",
            _Rectangle(scale.left, confirmed_end, y, height),
            solid,
            f"{device}: confirmed {confirmed}",
        ),
        _bar(
            lane,
            "estimated",
            _Rectangle(confirmed_end, estimated_end, y, height),
            hatched,
            f"{device}: estimated capacity {estimated}",
        ),
    ]
    if is_named:
        attributes = f'text-anchor="end" fill="{MUTED}" font-size="11"'
        parts.append(_text(scale.left - 10, middle + 4, device, attributes))
    if lane.gpu is not None or not is_named:
        parts += _takeover_bar(lane, scale, estimated_end, y, height, unit_rate)
    if lane.forecast is not None and lane.has_forecast:
        parts.append(_forecast(lane, lane.forecast, scale, y + height + 3, unit_rate))
    if lane.low and lane.high:
        parts.append(_whiskers(lane, scale.x_of(lane.low), scale.x_of(lane.high), middle))
    if not lane.rates:
        parts.append(_text(scale.left + 8, middle + 4, _why_none(lane.cell), f'fill="{MUTED}"'))
    return parts


class _Rectangle(NamedTuple):
    """Where a bar is drawn, in pixels."""

    left: float
    right: float
    y: float
    height: float


def _lane_attributes(lane: Lane) -> str:
    """Return the attributes by which the page's script finds the parts of a lane."""
    return f'data-model="{lane.model}" data-side="{lane.side}"'


def _bar(lane: Lane, name: str, where: _Rectangle, fill: str, title: str, outline: str = "") -> str:
    """Return a bar with a tooltip. The page's script finds it by its `name`."""
    return (
        f'<rect {_lane_attributes(lane)} data-bar="{name}" x="{where.left:.1f}" y="{where.y:.1f}" '
        f'width="{where.right - where.left:.1f}" height="{where.height}" fill="{fill}"{outline}>'
        f"<title>{escape(title)}</title></rect>"
    )


def _takeover_bar(
    lane: Lane,
    scale: Scale,
    left: float,
    y: float,
    height: float,
    unit_rate: float | None,
) -> list[str]:
    """Return the bar of the takeover GPU, which begins at `left`; with its name if that fits in."""
    name = "" if lane.gpu is None else lane.gpu.name
    rate = None if lane.gpu is None else lane.gpu.rate
    right = scale.x_of(rate, left)
    outline = f' stroke="{GPU}" stroke-width="1.2" stroke-dasharray="4 3"' if right > left else ""
    title = f"{name}: predicted {formatting.rate(rate, like=unit_rate)}"
    where = _Rectangle(left, right, y, height)
    parts = [_bar(lane, "takeover", where, PREDICTED, title, outline)]
    if name and right - left > MIN_NAME_WIDTH:
        attributes = (
            f'{_lane_attributes(lane)} data-bar="name" text-anchor="end" fill="{INK}" '
            'font-size="11"'
        )
        parts.append(_text(right - 6, y + height / 2 + 4, name, attributes))
    return parts


def _whiskers(lane: Lane, low: float, high: float, middle: float) -> str:
    """Return the whiskers of the estimate's interval, from the pixels `low` to `high`."""
    return (
        f'<path {_lane_attributes(lane)} data-bar="interval" d="M{low:.1f} {middle}H{high:.1f}'
        f'M{low:.1f} {middle - 5}v10M{high:.1f} {middle - 5}v10" stroke="{INK}" '
        f'fill="none" stroke-width="1.4"><title>90 % confidence interval of the estimate'
        "</title></path>"
    )


def _forecast(
    lane: Lane, predicted: DeviceCapacity, scale: Scale, y: float, unit_rate: float | None
) -> str:
    """Return a diamond at what was predicted of the GPU that was measured, below its bar."""
    x, low, high = (scale.x_of(rate) for rate in (predicted.rate, predicted.low, predicted.high))
    interval = formatting.rate_with_interval(
        predicted.rate, predicted.low, predicted.high, unit_rate
    )
    return (
        f'<path {_lane_attributes(lane)} data-bar="forecast" d="M{low:.1f} {y}H{high:.1f}'
        f'M{x - 4:.1f} {y}l4 -4 4 4 -4 4Z" stroke="{GPU}" fill="{PREDICTED}" '
        f'stroke-width="1.2"><title>{escape(predicted.name)}: predicted {interval}</title></path>'
    )


def _why_none(cell: CellData | None) -> str:
    if cell is None or cell.capacity is None:
        return "not measured"
    if cell.capacity.state == "misses_slo_unloaded":
        return "misses the SLO unloaded"
    return "no rate known"

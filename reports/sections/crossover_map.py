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

import msgspec

from crossover.models import formatting
from crossover.reports.answers.model_answers import ModelAnswer
from crossover.reports.answers.own_gpu import predicted_here
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
WIDTH, LEFT, RIGHT, TOP = 860, 150, 16, 12
ROW, BAR = 42, 24  # heights for a model with one lane
LANE, LANE_BAR, MODEL_GAP = 26, 18, 14  # heights for a model with a lane for each device
CHARACTER = 6.9  # the width of a bold one, on average
SIDE_WIDTH = 38  # the name of a device before its bar
NARROW, NARROW_LEFT = 360, 104  # on a phone, so that the text can be read
MIN_NAME_WIDTH = 90  # of a takeover GPU's bar, to have its name in it
MARGIN = 1.6  # the axis ends at the highest rate times this, and begins at half the lowest over it
COLORS = {CPU_SIDE: (CPU, ESTIMATED), GPU_SIDE: (GPU, GPU_ESTIMATED)}  # confirmed, estimated
TITLES = {
    (): "Which rates this machine serves",
    (CPU_SIDE,): "Which rates the CPU serves, and where a GPU takes over",
    (GPU_SIDE,): "Which rates this machine's GPU serves",
    (CPU_SIDE, GPU_SIDE): "Which rates the CPU serves, and where this machine's GPU takes over",
}


class Lane(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """The bars of one device of a model. Rates are requests/s; None: there is no such bar."""

    model: int  # index of its answer
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

    def place(self, rate: float | None, min_place: float = 0.0) -> float:
        """Return the pixels from the left at which a rate lies.

        It is at least `min_place` (for a bar that begins there) and the axis' left end; these are
        also the place where the rate is None.
        """
        min_place = max(min_place, self.left)
        if rate is None:
            return min_place
        inside = min(max(rate, self.low), self.high)
        part = math.log(inside / self.low) / math.log(self.high / self.low)
        return max(min_place, self.left + part * (self.right - self.left))


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
    kind, width, left = ("narrow", NARROW, NARROW_LEFT) if is_narrow else ("wide", WIDTH, LEFT)
    has_both = len(data.sides) > 1
    if has_both:
        left += SIDE_WIDTH
    scale = Scale(min(rates) / MARGIN / 2, max(rates) * MARGIN, left, width - RIGHT)
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
    like = max((lane.cell.like or 0.0 for lane in lanes if lane.cell), default=0.0) or None
    for rate in rate_ticks(scale.low, scale.high, like, 4 if is_narrow else 7):
        x = scale.place(rate)
        parts += [
            f'<path d="M{x:.1f} {TOP}V{bottom}" stroke="{LINE}" stroke-opacity=".45"/>',
            _text(x, bottom + 18, rate_label(rate, like), f'text-anchor="middle" fill="{MUTED}"'),
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
    begin = (
        "For each model, from slow to quick rates: confirmed (solid) and estimated (hatched) on "
    )
    if len(sides) > 1:
        return (
            f"{begin}this CPU (blue) and on this machine's GPU (orange); a diamond is what was "
            "predicted of this GPU."
        )
    if sides == (GPU_SIDE,):
        return f"{begin}this machine's GPU."
    return f"{begin}this CPU, and predicted of the GPU that takes over (dashed)."


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
    """Return the name in one or two lines of at most so many characters, broken where a part of it
    ends."""
    if len(name) <= characters:
        return [name]
    ends = [place for place in range(1, characters + 1) if name[place - 1] in "-_./: "]
    at = ends[-1] if ends else characters
    rest = name[at:]
    return [name[:at], rest if len(rest) <= characters else f"{rest[: characters - 1]}…"]


def _bars(
    lane: Lane, scale: Scale, kind: str, y: float, height: float, *, is_named: bool
) -> list[str]:
    """Return the bars of a lane. Empty ones are drawn too, without width: the sliders move them."""
    middle = y + height / 2
    confirmed_end = scale.place(lane.confirmed_rate)
    estimated_end = scale.place(lane.estimated_rate, confirmed_end)
    gpu_end = scale.place(None if lane.gpu is None else lane.gpu.rate, estimated_end)
    lane_data = f'data-model="{lane.model}" data-side="{lane.side}"'
    like = None if lane.cell is None else lane.cell.like
    device = SIDE_NAMES[lane.side]

    def bar(name: str, left: float, right: float, fill: str, title: str, more: str = "") -> str:
        return (
            f'<rect {lane_data} data-bar="{name}" x="{left:.1f}" y="{y:.1f}" '
            f'width="{right - left:.1f}" height="{height}" fill="{fill}"{more}>'
            f"<title>{escape(title)}</title></rect>"
        )

    solid, hatched = COLORS[lane.side][0], f"url(#hatch-{lane.side}-{kind})"
    confirmed = formatting.rate(lane.confirmed_rate, rounded="down", like=like)
    estimated = formatting.rate(lane.estimated_rate, like=like)
    parts = [
        bar("held", scale.left, confirmed_end, solid, f"{device}: confirmed {confirmed}"),
        bar(
            "limit",
            confirmed_end,
            estimated_end,
            hatched,
            f"{device}: estimated capacity {estimated}",
        ),
    ]
    if is_named:
        attributes = f'text-anchor="end" fill="{MUTED}" font-size="11"'
        parts.append(_text(scale.left - 10, middle + 4, device, attributes))
    if lane.gpu is not None or not is_named:
        name = "" if lane.gpu is None else lane.gpu.name
        predicted = formatting.rate(lane.gpu.rate if lane.gpu else None, like=like)
        dashed = f' stroke="{GPU}" stroke-width="1.2" stroke-dasharray="4 3"'
        outline = dashed if gpu_end > estimated_end else ""
        title = f"{name}: predicted {predicted}"
        parts.append(bar("gpu", estimated_end, gpu_end, PREDICTED, title, outline))
        if name and gpu_end - estimated_end > MIN_NAME_WIDTH:
            attributes = (
                f'{lane_data} data-bar="name" text-anchor="end" fill="{INK}" font-size="11"'
            )
            parts.append(_text(gpu_end - 6, middle + 4, name, attributes))
    if lane.forecast is not None and lane.has_forecast:
        parts.append(_forecast(lane.forecast, scale, lane_data, y + height + 3, like))
    if lane.low and lane.high:
        low, high = scale.place(lane.low), scale.place(lane.high)
        parts.append(
            f'<path {lane_data} data-bar="interval" d="M{low:.1f} {middle}H{high:.1f}'
            f'M{low:.1f} {middle - 5}v10M{high:.1f} {middle - 5}v10" stroke="{INK}" '
            f'fill="none" stroke-width="1.4"><title>90 % confidence interval of the estimate'
            "</title></path>"
        )
    if not lane.rates:
        parts.append(_text(scale.left + 8, middle + 4, _why_none(lane.cell), f'fill="{MUTED}"'))
    return parts


def _forecast(
    predicted: DeviceCapacity, scale: Scale, lane_data: str, y: float, like: float | None
) -> str:
    """Return a diamond at what was predicted of the GPU that was measured, below its bar."""
    x, low, high = (scale.place(rate) for rate in (predicted.rate, predicted.low, predicted.high))
    interval = formatting.rate_with_interval(predicted.rate, predicted.low, predicted.high, like)
    return (
        f'<path {lane_data} data-bar="forecast" d="M{low:.1f} {y}H{high:.1f}M{x - 4:.1f} {y}'
        f'l4 -4 4 4 -4 4Z" stroke="{GPU}" fill="{PREDICTED}" stroke-width="1.2"><title>'
        f"{escape(predicted.name)}: predicted {interval}</title></path>"
    )


def _why_none(cell: CellData | None) -> str:
    if cell is None or cell.capacity is None:
        return "not measured"
    if cell.capacity.state == "misses_slo_unloaded":
        return "misses the SLO unloaded"
    return "no rate known"

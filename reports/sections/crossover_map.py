"""The crossover map: bars of each model over the request rate, by device and by grade.

Where only the CPU was measured, a model has one lane: confirmed, then estimated, then the takeover
GPU, predicted. Where CPU and GPU were measured, each has a lane of its own. Solid bars are
confirmed, hatched ones estimated, those with a dashed outline predicted.

Its SVG is a template, reports/render/assets/map.svg. The page's sliders move its bars by the same
scale (report.js).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from crossover.models import formatting
from crossover.reports.answers.cheapest_gpu import predicted_here
from crossover.reports.answers.model_answers import ModelAnswer
from crossover.reports.chart_style import (
    CPU,
    ESTIMATED,
    GPU,
    GPU_ESTIMATED,
    rate_label,
    rate_ticks,
    svg_of,
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
AXIS_HEIGHT = 30
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

    @property
    def device(self) -> str:
        return SIDE_NAMES[self.side]

    @property
    def unit_rate(self) -> float | None:
        return None if self.cell is None else self.cell.unit_rate

    @property
    def confirmed_title(self) -> str:
        if self.confirmed_rate is None:
            return f"{self.device}: no confirmed rate"
        rate = formatting.rate(self.confirmed_rate, rounded="down", like=self.unit_rate)
        return f"{self.device}: confirmed {rate}"

    @property
    def estimated_title(self) -> str:
        if self.estimated_rate is None:
            return f"{self.device}: no estimated capacity"
        rate = formatting.rate(self.estimated_rate, like=self.unit_rate)
        return f"{self.device}: estimated capacity {rate}"

    @property
    def takeover_title(self) -> str:
        name, rate = ("", None) if self.gpu is None else (self.gpu.name, self.gpu.rate)
        return f"{name}: predicted {formatting.rate(rate, like=self.unit_rate)}"

    @property
    def forecast_title(self) -> str:
        if self.forecast is None:
            return ""
        rate, low, high = self.forecast.rate, self.forecast.low, self.forecast.high
        interval = formatting.rate_with_interval(rate, low, high, self.unit_rate)
        return f"{self.forecast.name}: predicted {interval}"

    @property
    def why_empty(self) -> str:
        if self.cell is None or self.cell.capacity is None:
            return formatting.NOT_MEASURED
        if self.cell.capacity.state == "misses_slo_unloaded":
            return "misses the SLO unloaded"
        return "no rate known"


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
    model_height = _model_height(data)
    # One axis for both devices: its unit is that of the faster one.
    unit_rate = max((lane.unit_rate or 0.0 for lane in lanes), default=0.0) or None
    name_right = scale.left - (SIDE_WIDTH if has_both else 0) - 12
    models = []
    for index, answer in enumerate(answers):
        y = TOP + model_height * index
        first_top = y + (MODEL_GAP + LANE - LANE_BAR) / 2 if has_both else y + (ROW - BAR) / 2
        model_lanes = [lane for lane in lanes if lane.model == index]
        tops = [first_top + LANE * number for number in range(len(model_lanes))]
        models.append(
            {
                **_name_of(answer, name_right, y + model_height / 2),
                "lanes": list(zip(model_lanes, tops, strict=True)),
            }
        )
    svg = svg_of(
        "map.svg",
        kind=kind,
        width=width,
        top=TOP,
        bottom=height_of(answers, data) - AXIS_HEIGHT,
        height=height_of(answers, data),
        scale=scale,
        colors={side: COLORS[side] for side in data.sides},
        ticks={
            rate: rate_label(rate, unit_rate)
            for rate in rate_ticks(scale.low, scale.high, unit_rate, 4 if is_narrow else 7)
        },
        models=models,
        name_right=name_right,
        names_devices=has_both,
        bar_height=LANE_BAR if has_both else BAR,
        min_name_width=MIN_NAME_WIDTH,
    )
    return Chart(slug="map", label=_label(data.sides), svg=svg)


def _model_height(data: ReportData) -> int:
    return 2 * LANE + MODEL_GAP if len(data.sides) > 1 else ROW


def height_of(answers: Sequence[ModelAnswer], data: ReportData) -> int:
    """Return the height of the map in pixels, where it is as wide as WIDTH."""
    return TOP + _model_height(data) * len(answers) + AXIS_HEIGHT


def _name_of(answer: ModelAnswer, right: float, middle: float) -> dict[str, Any]:
    """Return the lines of the model's name with their heights, and its size below them. They stand
    around `middle`, and end at `right`. A long name has two lines, and an ellipsis where those are
    too short."""
    lines = wrapped(answer.model, int(right / CHARACTER))
    top = middle - 1 - 6 * (len(lines) - 1)
    return {
        "name_lines": [(top + 12 * number, line) for number, line in enumerate(lines)],
        "size_y": top + 12 * len(lines) + 1,
        "size_words": answer.cell.size_words,
    }


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

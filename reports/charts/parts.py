"""What the charts share: scales, axes, texts with an edge, lines at a limit."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import altair as alt

from reports.charts import style

Row = dict[str, Any]
Spec = dict[str, Any]  # Vega-Lite
Layer = Any  # an altair chart
Layers = list[Layer]

_SECONDS_LABEL = (
    "datum.value < 0.00095 ? format(datum.value * 1e6, '~r') + ' µs' : "
    "datum.value < 0.95 ? format(datum.value * 1000, '~r') + ' ms' : "
    "format(datum.value, '~r') + ' s'"
)
NARROW_PIXELS = 520
_RATE_LABEL = (
    "datum.value < 0.0166 ? format(datum.value * 3600, '.3~r') + '/h' : "
    "datum.value < 0.0999 ? format(datum.value * 60, '.3~r') + '/min' : "
    "format(datum.value, '.3~r') + '/s'"
)
_TICK_STEPS = ((1, 2, 5), (1, 3), (1,))
_FINE_STEPS = (1, 1.5, 2, 3, 4, 5, 6, 7, 8, 9)


def spec(layers: Layers, height: int, **properties: Any) -> Spec:
    """The layers as Vega-Lite, as wide as the container."""
    chart = alt.layer(*layers).properties(width="container", height=height, **properties)
    done: Spec = chart.resolve_scale(color="independent").configure(**style.CONFIG).to_dict()
    return done


def data(rows: Sequence[Row]) -> Layer:
    """A chart of these rows, which stand in the specification."""
    return alt.Chart(alt.InlineData(values=list(rows)))


def colours(field: str, palette: Mapping[str, str], channel: Any = alt.Color) -> Any:
    """A colour for each value of `field`, without a legend."""
    scale = alt.Scale(domain=list(palette), range=list(palette.values()))
    return channel(field, scale=scale, legend=None)


def when_wide(wide: Any, narrow: Any) -> Any:
    """A value for a chart of a page's width, and one for a phone's."""
    return alt.ExprRef(f"width < {NARROW_PIXELS} ? {narrow!r} : {wide!r}")


def log_scale(low: float, high: float) -> alt.Scale:
    return alt.Scale(type="log", domain=[low, high], nice=False)


def rate_axis(rates: Sequence[float], title: str, room: float = 1.15, most: int = 9) -> alt.X:
    """Rates on a log scale from the first to the last of the sorted `rates`, in requests/s."""
    low = rates[0] / 1.15
    high = rates[-1] * room
    axis = rate_labels(title, low, high, most)
    return alt.X("rate:Q", scale=log_scale(low, high), axis=axis)


def rate_labels(title: str, low: float, high: float, most: int = 9) -> alt.Axis:
    """An axis of rates in requests/s; its labels are per second, minute or hour."""
    ticks = rate_ticks(low, high, most)
    return alt.Axis(title=title, labelExpr=_RATE_LABEL, values=ticks)


def rate_ticks(low: float, high: float, most: int = 9) -> list[float]:
    """Rates from low to high that are round in the unit that they are read in."""
    found: list[float] = []
    for steps in _TICK_STEPS:
        per_hour = [step * ten / 3600 for ten in (0.1, 1, 10) for step in steps]
        per_minute = [step / 60 for step in steps]
        per_second = log_ticks(0.1, max(high, 0.1), 10**6, steps)
        units = ((per_hour, 0.0, 1 / 60), (per_minute, 1 / 60, 0.1), (per_second, 0.1, math.inf))
        found = [
            tick
            for ticks, least, below in units
            for tick in ticks
            if least <= tick + 1e-12 < below and low <= tick <= high
        ]
        found = [one for one in found if not any(one < other < 1.3 * one for other in found)]
        if len(found) <= most:
            break
    return found if len(found) > 1 else log_ticks(low, high, most)


def seconds_axis(values: Sequence[float], room: float, most: int) -> alt.Y:
    low = min(values) / room
    high = max(values) * room
    axis = alt.Axis(title=None, labelExpr=_SECONDS_LABEL, values=log_ticks(low, high, most))
    return alt.Y("seconds:Q", scale=log_scale(low, high), axis=axis)


def log_ticks(
    low: float, high: float, most: int = 9, only: Sequence[float] | None = None
) -> list[float]:
    """Round numbers from low to high: 1, 2, 5 of every decade, fewer where there are too many.

    `only`: these steps of every decade.
    """
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)

    def ticks(steps: Sequence[float]) -> list[float]:
        every = [float(f"{step}e{decade}") for decade in decades for step in steps]
        return [tick for tick in every if low <= tick <= high]

    if only is not None:
        return ticks(only)
    found: list[float] = []
    for steps in _TICK_STEPS:
        found = ticks(steps)
        if len(found) <= most:
            break
    return found if len(found) > 1 else ticks(_FINE_STEPS) or found


def haloed(chart: Layer, encoding: Mapping[str, Any], **mark: Any) -> Layers:
    """A text with an edge in the page's colour, to be read where it crosses a line."""
    edge = {"strokeWidth": 4, "strokeJoin": "round", "opacity": 0.9}
    place = {key: value for key, value in encoding.items() if key != "color"}
    behind = chart.mark_text(**{**mark, "color": style.PAPER, "stroke": style.PAPER, **edge})
    return [behind.encode(**place), chart.mark_text(**mark).encode(**encoding)]


def line_at(value: float, text: str, y: alt.Y, colour: str = style.SLO, **place: Any) -> Layers:
    """A dashed line across at `value`, with its text above it at the left, or as `place` says."""
    encoded: Any = y.to_dict()
    line = data([{encoded["field"]: value, "text": text}])
    mark = {"align": "left", "baseline": "bottom", "dx": 3, "dy": -3, "fontSize": 11, **place}
    side = alt.value("width" if mark["align"] == "right" else 0)
    return [
        line.mark_rule(color=colour, strokeDash=[3, 3]).encode(y=y),
        line.mark_text(color=colour, **mark).encode(x=side, y=y, text="text:N"),
    ]


BELOW: Row = {"baseline": "top", "dy": 4}


def lookup(names: Mapping[Any, str]) -> str:
    """A Vega expression from an axis value to its label."""
    pairs = ", ".join(f"{str(key)!r}: {name!r}" for key, name in names.items())
    return f"({{{pairs}}})[datum.value]"

"""The style of charts and their drawing: altair makes Vega-Lite, and vl-convert makes SVG of it.

    chart = layered([line, dots], height=260)          # Vega-Lite
    svg(chart, 420)                                    # text of an SVG
    svg_of("map.svg", width=860, ...)                  # text of an SVG that is a template

Importing this module raises MissingPackage if altair or vl-convert is not installed.

The colors are safe for color-blind readers (Okabe and Ito 2008). CSS recolors the SVG on a dark
page.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import resources
from typing import Any

import jinja2

from crossover.models import formatting
from crossover.reports.errors import MissingPackage

# altair looks for the home directory when it is imported, and fails where the user has none.
if os.path.expanduser("~") == "~":
    os.environ["HOME"] = "/"

try:
    import altair as alt
    import vl_convert
except ImportError as problem:
    raise MissingPackage(
        "charts need altair and vl-convert-python, which are not installed: "
        "pip install 'llm-crossover[report]'"
    ) from problem

Row = dict[str, Any]
Spec = dict[str, Any]  # a Vega-Lite specification
Layer = Any  # an altair chart

FONT = 'Inter, "Helvetica Neue", Helvetica, Arial, "Liberation Sans", sans-serif'
INK = "#1b2530"
MUTED = "#5b6875"
FAINT = "#e3e8ed"
LINE = "#aab4be"
SLO = "#b3261e"
PAPER = "#ffffff"
CPU = "#2a78b5"  # confirmed on this CPU
ESTIMATED = "#9cc5e3"
GPU = "#d97b3f"  # confirmed on this machine's GPU
GPU_ESTIMATED = "#f1c9a9"
PREDICTED = "#fbeadd"  # within a dashed outline in the GPU's color
SERIES = (
    "#0072b2",
    "#d55e00",
    "#009e73",
    "#cc79a7",
    "#56b4e9",
    "#7a5195",
    "#444c56",
    "#e69f00",
)
DARK = {  # color on a light page -> color on a dark page
    INK: "#e6ecf1",
    MUTED: "#a3b1bd",
    FAINT: "#2a3641",
    LINE: "#56646f",
    SLO: "#ff8a80",
    PAPER: "#10181f",
    CPU: "#5aa9e6",
    ESTIMATED: "#2f5f86",
    GPU: "#e09a63",
    GPU_ESTIMATED: "#7a4a28",
    PREDICTED: "#3a281b",
    "#0072b2": "#4aa3e0",
    "#56b4e9": "#a6d8f7",
    "#c3ccd5": "#6b7782",
    "#444c56": "#aeb8c2",
    "#7a5195": "#b28fd0",
}
_AXIS = {
    "labelFont": FONT,
    "labelFontSize": 12,
    "labelColor": MUTED,
    "titleFont": FONT,
    "titleFontSize": 12,
    "titleColor": MUTED,
    "titleFontWeight": "normal",
    "gridColor": FAINT,
    "domainColor": LINE,
    "tickColor": LINE,
}
CONFIG: dict[str, Any] = {
    "background": "transparent",
    "font": FONT,
    "view": {"stroke": None},
    "axis": _AXIS,
    "axisX": {"grid": False},
    "legend": {
        "orient": "top",
        "title": None,
        "labelFontSize": 12,
        "labelColor": INK,
        "symbolStrokeWidth": 2,
        "columns": 2,  # more would make a chart wider than a phone shows it
    },
    "title": {"font": FONT, "fontSize": 13, "color": INK, "anchor": "start", "fontWeight": 600},
    "text": {"font": FONT, "fontSize": 12, "color": INK},
}
_SECONDS_LABEL = (
    "datum.value < 0.00095 ? format(datum.value * 1e6, '~r') + ' µs' : "
    "datum.value < 0.95 ? format(datum.value * 1000, '~r') + ' ms' : "
    "format(datum.value, '~r') + ' s'"
)

_ASSETS = resources.files("crossover.reports").joinpath("render", "assets")
_SHORT_UNITS = {"/s": "/s", " a minute": "/min", " an hour": "/h"}


def chart_of(rows: Sequence[Row]) -> Layer:
    """Return a chart of these rows, to which marks and axes are added. Its specification contains
    the rows, so no file is needed."""
    return alt.Chart(alt.InlineData(values=list(rows)))


def layered(layers: Sequence[Layer], height: int, title: str = "") -> Spec:
    """Return the layers as one Vega-Lite chart, `height` pixels high. `svg` sets the width."""
    chart = alt.layer(*layers).properties(height=height)
    if title:
        chart = chart.properties(title=title)
    spec: Spec = chart.resolve_scale(color="independent").configure(**CONFIG).to_dict()
    return spec


def palette(field: str, colors: Mapping[str, str], legend: bool = True) -> Any:
    """Return the color encoding of `field`. `colors`: value of the field -> color."""
    scale = alt.Scale(domain=list(colors), range=list(colors.values()))
    return alt.Color(field, scale=scale, legend=alt.Legend() if legend else None)


def series(names: Sequence[str]) -> dict[str, str]:
    """Return a color for each name. Colors repeat after eight names."""
    return {name: SERIES[index % len(SERIES)] for index, name in enumerate(names)}


def ticks(low: float, high: float, max_ticks: int = 7) -> list[float]:
    """Return round numbers from `low` to `high` for a log scale: 1, 2 and 5 of every decade, or
    fewer of each decade if these are more than `max_ticks`."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks_in_range: list[float] = []
    for digits in ((1, 2, 5), (1, 3), (1,)):
        ticks_in_range = []
        for decade in decades:
            candidates = [float(f"{digit}e{decade}") for digit in digits]
            ticks_in_range += [tick for tick in candidates if low <= tick <= high]
        if len(ticks_in_range) <= max_ticks:
            break
    return ticks_in_range


def rate_ticks(low: float, high: float, unit_rate: float | None, max_ticks: int = 7) -> list[float]:
    """Return ticks from `low` to `high`, in requests/s. They are round numbers in the unit (a
    second, a minute or an hour) in which `unit_rate` is written."""
    factor, _ = formatting.rate_unit(unit_rate)
    return [tick / factor for tick in ticks(low * factor, high * factor, max_ticks)]


def rate_label(rate: float, unit_rate: float | None) -> str:
    """Return a rate in the unit in which `unit_rate` is written: `20/h`, `50/min`."""
    factor, unit = formatting.rate_unit(unit_rate)
    return f"{formatting.significant(rate * factor, 1)}{_SHORT_UNITS[unit]}"


def rate_axis(low: float, high: float, unit_rate: float | None) -> alt.X:
    """Return a logarithmic axis of the field `rate`, from `low` to `high` requests/s, with labels
    in the unit in which `unit_rate` is written."""
    factor, unit = formatting.rate_unit(unit_rate)
    axis = alt.Axis(
        title=f"requests{unit.replace('/s', ' a second')}, logarithmic",
        labelExpr=f"format(datum.value * {factor}, ',.3~r')",
        values=rate_ticks(low, high, unit_rate, 6),
        labelOverlap=False,
    )
    return alt.X("rate:Q", scale=alt.Scale(type="log", domain=[low, high], nice=False), axis=axis)


def seconds_axis(low: float, high: float) -> alt.Y:
    """Return a logarithmic axis of the field `seconds`. Values outside the range are drawn at its
    ends."""
    axis = alt.Axis(title=None, labelExpr=_SECONDS_LABEL, values=ticks(low, high, 6))
    scale = alt.Scale(type="log", domain=[low, high], nice=False, clamp=True)
    return alt.Y("seconds:Q", scale=scale, axis=axis)


def rule_at(value: float, text: str, y: alt.Y, color: str = SLO) -> list[Layer]:
    """Return a dashed horizontal line at `value` of the axis `y`, with its text above its left
    end."""
    axis: Any = y.to_dict()
    line = chart_of([{axis["field"]: value, "text": text}])
    mark = {"align": "left", "baseline": "bottom", "dx": 3, "dy": -3, "fontSize": 11}
    return [
        line.mark_rule(color=color, strokeDash=[4, 3]).encode(y=y),
        line.mark_text(color=color, **mark).encode(x=alt.value(0), y=y, text="text:N"),
    ]


def rate_line(rate: float, text: str, x: alt.X) -> list[Layer]:
    """Return a vertical line at `rate` of the axis `x`, with its text left of its upper end."""
    line = chart_of([{"rate": rate, "text": text}])
    mark = {"align": "right", "baseline": "top", "dx": -4, "fontSize": 11}
    return [
        line.mark_rule(color=MUTED, strokeDash=[2, 3]).encode(x=x),
        line.mark_text(color=MUTED, **mark).encode(x=x, y=alt.value(0), text="text:N"),
    ]


def svg(chart: Spec, width: int) -> str:
    """Return the chart as the text of an SVG, `width` pixels wide."""
    return str(vl_convert.vegalite_to_svg(chart | {"width": width}))


def png(chart: Spec, width: int) -> bytes:
    """Return the chart as a PNG on white, `width` pixels wide at a scale of 2."""
    on_white = chart | {"width": width, "config": chart["config"] | {"background": PAPER}}
    return bytes(vl_convert.vegalite_to_png(on_white, scale=2.0))


def svg_of(template: str, **values: object) -> str:
    """Return the text of an SVG: a Jinja template of reports/render/assets, filled with `values`
    and the colors of this module."""
    return _svg_template(template).render(**values)


@cache
def _svg_template(name: str) -> jinja2.Template:
    """Return a template whose lines are joined: what indents them is not part of the SVG."""
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    environment.filters["px"] = "{:.1f}".format
    colors = {"INK": INK, "MUTED": MUTED, "LINE": LINE, "PAPER": PAPER, "GPU": GPU}
    environment.globals |= {**colors, "PREDICTED": PREDICTED}
    lines = _ASSETS.joinpath(name).read_text("utf-8").splitlines()
    return environment.from_string("".join(map(str.strip, lines)))


def dark_rules() -> str:
    """Return CSS that recolors charts for readers who prefer dark pages."""
    rules = [
        f'.chart svg [{attribute}="{light}"]{{{attribute}:{dark}}}'
        for light, dark in DARK.items()
        for attribute in ("fill", "stroke")
    ]
    return f"@media screen and (prefers-color-scheme: dark) {{ {' '.join(rules)} }}\n"

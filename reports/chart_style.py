"""How charts look, and how they are drawn: Vega-Lite by altair, SVG and PNG by vl-convert.

    chart = layered([line, dots], height=260)          # Vega-Lite
    svg(chart, 420)                                    # text of an SVG

To import it raises MissingPackage where what draws is not installed.

Colours are safe for the colour-blind (Okabe and Ito 2008). On a dark page CSS recolours the SVG.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from crossover.models import formatting
from crossover.reports.errors import MissingPackage

try:
    import altair as alt
    import vl_convert
except ImportError as problem:
    raise MissingPackage(
        "charts need altair and vl-convert-python, which are not installed: "
        "pip install 'llm-crossover[report]'"
    ) from problem

Row = dict[str, Any]
Spec = dict[str, Any]  # Vega-Lite
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
PREDICTED = "#fbeadd"  # within a dashed line of the GPU's colour
SERIES = tuple("#0072b2 #d55e00 #009e73 #cc79a7 #56b4e9 #7a5195 #444c56 #e69f00".split())
DARK = {
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
        "columns": 4,
    },
    "title": {"font": FONT, "fontSize": 13, "color": INK, "anchor": "start", "fontWeight": 600},
    "text": {"font": FONT, "fontSize": 12, "color": INK},
}
_SECONDS_LABEL = (
    "datum.value < 0.00095 ? format(datum.value * 1e6, '~r') + ' µs' : "
    "datum.value < 0.95 ? format(datum.value * 1000, '~r') + ' ms' : "
    "format(datum.value, '~r') + ' s'"
)

_SHORT = {"/s": "/s", " a minute": "/min", " an hour": "/h"}


def data(rows: Sequence[Row]) -> Layer:
    """A chart of these rows, which stand in the specification."""
    return alt.Chart(alt.InlineData(values=list(rows)))


def layered(layers: Sequence[Layer], height: int, title: str = "") -> Spec:
    """The layers as Vega-Lite; `svg` and `png` give the width."""
    chart = alt.layer(*layers).properties(height=height)
    if title:
        chart = chart.properties(title=title)
    done: Spec = chart.resolve_scale(color="independent").configure(**CONFIG).to_dict()
    return done


def palette(field: str, colours: Mapping[str, str], legend: bool = True) -> Any:
    """A colour for each value of `field`."""
    scale = alt.Scale(domain=list(colours), range=list(colours.values()))
    shown = alt.Legend() if legend else None
    return alt.Color(field, scale=scale, legend=shown)


def series(names: Sequence[str]) -> dict[str, str]:
    """A colour for each name; they repeat after eight."""
    return {name: SERIES[index % len(SERIES)] for index, name in enumerate(names)}


def ticks(low: float, high: float, most: int = 7) -> list[float]:
    """Round numbers from low to high: 1, 2, 5 of every decade, fewer where there are too many."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    found: list[float] = []
    for steps in ((1, 2, 5), (1, 3), (1,)):
        every = [float(f"{step}e{decade}") for decade in decades for step in steps]
        found = [tick for tick in every if low <= tick <= high]
        if len(found) <= most:
            break
    return found


def rate_ticks(low: float, high: float, like: float | None, most: int = 7) -> list[float]:
    """Requests/s that are round in the unit of `like`."""
    times, _ = formatting.rate_unit(like)
    return [tick / times for tick in ticks(low * times, high * times, most)]


def rate_label(rate: float, like: float | None) -> str:
    """`20/h`, `50/min`, `5/s`."""
    times, unit = formatting.rate_unit(like)
    return f"{formatting.significant(rate * times, 1)}{_SHORT[unit]}"


def rate_axis(low: float, high: float, like: float | None) -> alt.X:
    """Rates on a log scale, in the unit of `like`."""
    times, unit = formatting.rate_unit(like)
    axis = alt.Axis(
        title=f"requests{unit.replace('/s', ' a second')}, logarithmic",
        labelExpr=f"format(datum.value * {times}, ',.3~r')",
        values=rate_ticks(low, high, like, 6),
        labelOverlap=False,
    )
    return alt.X("rate:Q", scale=alt.Scale(type="log", domain=[low, high], nice=False), axis=axis)


def seconds_axis(low: float, high: float) -> alt.Y:
    """Times on a log scale; what lies above its end is drawn at the end."""
    axis = alt.Axis(title=None, labelExpr=_SECONDS_LABEL, values=ticks(low, high, 6))
    scale = alt.Scale(type="log", domain=[low, high], nice=False, clamp=True)
    return alt.Y("seconds:Q", scale=scale, axis=axis)


def rule_at(value: float, text: str, y: alt.Y, colour: str = SLO) -> list[Layer]:
    """A dashed line across, with its text above it at the left."""
    field: Any = y.to_dict()
    line = data([{str(field["field"]): value, "text": text}])
    mark = {"align": "left", "baseline": "bottom", "dx": 3, "dy": -3, "fontSize": 11}
    return [
        line.mark_rule(color=colour, strokeDash=[4, 3]).encode(y=y),
        line.mark_text(color=colour, **mark).encode(x=alt.value(0), y=y, text="text:N"),
    ]


def rate_line(rate: float, text: str, x: alt.X) -> list[Layer]:
    """A line upwards at a rate, with its text at the top, left of it."""
    line = data([{"rate": rate, "text": text}])
    mark = {"align": "right", "baseline": "top", "dx": -4, "fontSize": 11}
    return [
        line.mark_rule(color=MUTED, strokeDash=[2, 3]).encode(x=x),
        line.mark_text(color=MUTED, **mark).encode(x=x, y=alt.value(0), text="text:N"),
    ]


def svg(chart: Spec, width: int) -> str:
    """The chart as an SVG of this width in pixels."""
    return str(vl_convert.vegalite_to_svg(chart | {"width": width}))


def dark_rules() -> str:
    """CSS that recolours drawn charts where the reader prefers a dark page."""
    rules = [
        f'.chart svg [{where}="{light}"]{{{where}:{dark}}}'
        for light, dark in DARK.items()
        for where in ("fill", "stroke")
    ]
    return f"@media screen and (prefers-color-scheme: dark) {{ {' '.join(rules)} }}\n"

"""The colours and the theme of all charts. Safe for the colour-blind (Okabe and Ito 2008)."""

from __future__ import annotations

from typing import Any

FONT = 'Inter, "Helvetica Neue", Helvetica, Arial, "Liberation Sans", sans-serif'
INK = "#1b2530"
MUTED = "#5b6875"
FAINT = "#e3e8ed"
LINE = "#aab4be"
CARD = "#6b7783"
SLO = "#b3261e"
PAPER = "#ffffff"
CPU = "#2a78b5"  # confirmed to hold
INTERVAL = "#9cc5e3"  # up to the end of the interval
ABOVE = "#fcefdc"  # above what holds
ABOVE_INK = "#8a4b00"
GPUS = ("#fbd38d", "#f0a35e", "#d97b3f", "#ab5327", "#7a3517")  # predicted, cheapest first
PREDICTED = "#7a3e9d"
UNKNOWN = "#e4e8ec"
VERDICTS = {"holds": "#0b7a5a", "fails": "#b3261e", "unresolved": "#8a6d00"}
PARTS = {"weights": "#0072b2", "KV cache": "#56b4e9", "overhead": "#c3ccd5"}
SERIES = tuple("#56b4e9 #009e73 #0072b2 #cc79a7 #d55e00 #7a5195 #444c56 #e69f00".split())

_AXIS = {
    "labelFont": FONT,
    "labelFontSize": 12,
    "labelColor": MUTED,
    "labelPadding": 5,
    "titleFont": FONT,
    "titleFontSize": 12,
    "titleColor": MUTED,
    "titlePadding": 8,
    "titleFontWeight": "normal",
    "gridColor": FAINT,
    "domainColor": LINE,
    "tickColor": LINE,
}
_AXIS_Y = {
    "domain": False,
    "ticks": False,
    "titleAnchor": "end",
    "titleAngle": 0,
    "titleAlign": "left",
    "titleY": -12,
    "titleX": 0,
}
_LEGEND = {
    "orient": "top",
    "title": None,
    "labelFontSize": 12,
    "labelColor": INK,
    "offset": 30,
    "symbolType": "square",
    "symbolSize": 140,
    "symbolStrokeWidth": 0,
    "columnPadding": 18,
}
CONFIG: dict[str, Any] = {
    "background": "transparent",
    "font": FONT,
    "view": {"stroke": None},
    "axis": _AXIS,
    "axisY": _AXIS_Y,
    "axisX": {"grid": False},
    "legend": _LEGEND,
    "text": {"font": FONT, "fontSize": 12, "color": INK},
}


# Colour -> the one that takes its place on a dark page.
DARK = {
    INK: "#e6ecf1",
    MUTED: "#a3b1bd",
    FAINT: "#2a3641",
    LINE: "#56646f",
    CARD: "#7d8b97",
    SLO: "#ff8a80",
    PAPER: "#10181f",
    CPU: "#3a8bd0",
    INTERVAL: "#22527a",
    ABOVE: "#3a3020",
    ABOVE_INK: "#f3c98b",
    PREDICTED: "#d3a4ef",
    UNKNOWN: "#27323c",
    **dict(zip(GPUS, ("#8a6a2a", "#a0662f", "#99502a", "#813c1e", "#5f2812"), strict=True)),
    "#0b7a5a": "#35b58b",
    "#8a6d00": "#d9b53c",
    "#0072b2": "#2583c7",
    "#c3ccd5": "#67747f",
    "#444c56": "#aeb8c2",
    "#7a5195": "#b28fd0",
}


def dark_rules() -> str:
    """CSS that recolours drawn charts where the reader prefers a dark page."""
    rules = [
        f'.chart svg [{where}="{light}"]{{{where}:{dark}}}'
        for light, dark in DARK.items()
        for where in ("fill", "stroke")
    ]
    return f"@media screen and (prefers-color-scheme: dark) {{ {' '.join(rules)} }}\n"


def series_colours(names: list[str]) -> dict[str, str]:
    """A colour for each name; they repeat after eight."""
    return {name: SERIES[index % len(SERIES)] for index, name in enumerate(names)}

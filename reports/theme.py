"""One look for all charts: colours that colour-blind people tell apart (Okabe and Ito 2008), quiet axes, labels at the line."""

from __future__ import annotations

from typing import Any

FONT = 'Inter, "Helvetica Neue", Helvetica, Arial, "Liberation Sans", sans-serif'
INK = "#1b2530"
MUTED = "#5b6875"
FAINT = "#e3e8ed"
PROMISE = "#b3261e"

CPU = "#2a78b5"  # the CPU suffices
INTERVAL = "#9cc5e3"  # between the ends of the interval
GPU = "#f7d9ae"  # the GPU takes over
GPU_INK = "#8a4b00"
MEMORY = "#c9ced4"  # does not fit in this machine's memory
HOLDS, FAILS, UNRESOLVED = "#0b7a5a", "#b3261e", "#8a6d00"
SERIES: tuple[str, ...] = ("#56b4e9", "#009e73", "#0072b2", "#cc79a7", "#d55e00", "#7a5195", "#444c56", "#e69f00")
WEIGHTS, KV, OVERHEAD = "#0072b2", "#56b4e9", "#c3ccd5"


def config() -> dict[str, Any]:
    """Vega-Lite's `config` for every chart."""
    return {
        "background": "transparent",
        "font": FONT,
        "view": {"stroke": None},
        "axis": {
            "labelFont": FONT,
            "titleFont": FONT,
            "labelFontSize": 12,
            "titleFontSize": 12,
            "titleFontWeight": "normal",
            "labelColor": MUTED,
            "titleColor": MUTED,
            "gridColor": FAINT,
            "domainColor": "#aab4be",
            "tickColor": "#aab4be",
            "titlePadding": 8,
            "labelPadding": 5,
        },
        "axisY": {"domain": False, "ticks": False, "titleAnchor": "end", "titleAngle": 0, "titleAlign": "left", "titleY": -12, "titleX": 0},
        "axisX": {"grid": False},
        "legend": {
            "orient": "top",
            "title": None,
            "labelFontSize": 12,
            "labelColor": INK,
            "symbolType": "square",
            "symbolSize": 140,
            "symbolStrokeWidth": 0,
            "columnPadding": 18,
            "offset": 30,
        },
        "text": {"font": FONT, "fontSize": 12, "color": INK},
        "title": {"font": FONT, "anchor": "start", "fontSize": 14, "fontWeight": 600, "color": INK, "subtitleColor": MUTED, "offset": 14},
    }


def series_colours(names: list[str]) -> dict[str, str]:
    """A colour for each name, in the order given; colours come again after eight."""
    return {name: SERIES[index % len(SERIES)] for index, name in enumerate(names)}

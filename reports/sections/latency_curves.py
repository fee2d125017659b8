"""Latency against rate: the simulated curves of TTFT and TPOT, every measured level as a dot.

The reader sees at a glance whether simulation and measurement agree.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from crossover.models import formatting
from crossover.reports.chart_style import (
    CPU,
    SLO,
    Row,
    data,
    layered,
    palette,
    rate_axis,
    rate_line,
    rule_at,
    seconds_axis,
)
from crossover.reports.report_data import CellData
from crossover.reports.sections.section import Chart
from crossover.serving.capacity.simulated_capacity import Server
from crossover.serving.capacity.slo import Slo

POINTS = 14  # of a curve
REQUESTS = 1_000  # that each is simulated with
QUANTILES = {"median": 0.5, "nine of ten": 0.9}
COLOURS = {"median": CPU, "nine of ten": "#d55e00"}
TITLES = {"ttft": "Time to first token", "tpot": "Time per output token"}
MAX_OVER = 8  # times the limit: the end of the axis of seconds
NEVER = 1e9  # seconds: drawn at the top


def latency_curves(cell: CellData, slo: Slo) -> tuple[Chart, ...]:
    """TTFT and TPOT of one cell; () where neither a step-time model nor a level is known."""
    found = cell.capacity
    known = [one.level.rate or 0.0 for one in cell.loaded]
    if found is not None:
        known += [one for one in (found.estimated_rate, found.confirmed_rate, found.high) if one]
    top = max(known, default=0.0)
    if not top:
        return ()
    rates = np.geomspace(top / 12, top * 1.15, POINTS).tolist()
    curves, dots = _curves(cell, rates), _dots(cell)
    charts = []
    for name, limit in (("ttft", slo.ttft_seconds), ("tpot", slo.tpot_seconds)):
        lines = [row for row in curves if row["name"] == name]
        marks = [row for row in dots if row["name"] == name]
        if lines or marks:
            charts.append(_chart(cell, name, lines, marks, limit, (rates[0], rates[-1])))
    return tuple(charts)


def _curves(cell: CellData, rates: Sequence[float]) -> list[Row]:
    """Simulated: a row for each rate, quantile and kind of latency."""
    if cell.step_times is None or cell.policy is None or cell.traffic is None:
        return []
    traffic = cell.traffic
    server = Server(cell.step_times, cell.policy, traffic.lengths, traffic.arrivals, count=REQUESTS)
    return [
        {"name": name, "rate": rate, "seconds": value, "of": of}
        for rate in rates
        for name in TITLES
        for of, q in QUANTILES.items()
        if math.isfinite(value := float(np.nanquantile(getattr(server.play(rate), name), q)))
    ]


def _dots(cell: CellData) -> list[Row]:
    """Measured: of each level that counts."""
    return [
        {"name": name, "rate": one.level.rate, "seconds": min(value, NEVER), "of": of}
        for one in cell.loaded
        for name in TITLES
        for of, q in QUANTILES.items()
        if (value := one.quantile(name, q))
    ]


def _chart(
    cell: CellData,
    name: str,
    lines: list[Row],
    dots: list[Row],
    limit: float | None,
    ends: tuple[float, float],
) -> Chart:
    seen = [row["seconds"] for row in (*lines, *dots) if row["seconds"] < NEVER]
    high = max(seen, default=1.0)
    if limit is not None:
        high = min(max(high, 1.5 * limit), MAX_OVER * limit)
    x, y = rate_axis(*ends, cell.like), seconds_axis(min([*seen, high / 10]) / 1.4, high * 1.2)
    layers = []
    if lines:
        drawn = data(lines).mark_line(strokeWidth=2, clip=True)
        layers.append(drawn.encode(x=x, y=y, color=palette("of:N", COLOURS)))
    if dots:
        marks = data(dots).mark_point(filled=True, size=70, opacity=1, clip=False)
        layers.append(marks.encode(x=x, y=y, color=palette("of:N", COLOURS, legend=not lines)))
    if limit is not None:
        layers += rule_at(limit, "SLO", y, SLO)
    if cell.estimated_rate:
        capacity = formatting.rate(cell.estimated_rate, like=cell.like)
        layers += rate_line(cell.estimated_rate, f"capacity {capacity}", x)
    return Chart(
        slug=f"{name}-{cell.key}",
        label=f"{TITLES[name]} of {cell.name} against the request rate: lines are "
        "simulated from this run's step times, dots are measured levels.",
        spec=layered(layers, 230, TITLES[name]),
        half=True,
    )

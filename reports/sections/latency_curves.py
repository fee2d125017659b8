"""Latency against rate: the simulated curves of TTFT, TPOT and the
other times that the SLO limits, and every measured level as a dot.

The reader sees at a glance whether simulation and measurement agree.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from crossover.models import formatting
from crossover.reports.answers.model_answers import ModelAnswer
from crossover.reports.chart_style import (
    CPU,
    SLO,
    Row,
    chart_of,
    layered,
    palette,
    rate_axis,
    rate_line,
    rule_at,
    seconds_axis,
)
from crossover.reports.report_data import SIDES, CellData, ReportData
from crossover.reports.sections.section import Chart, ChartGroup, Picture
from crossover.serving.capacity.slo import LIMITED_TIMES, Slo

POINTS = 14  # of a curve
REQUESTS = 1_000  # of the simulation of each point
QUANTILES = {"median": 0.5, "90th percentile": 0.9}
COLORS = {"median": CPU, "90th percentile": "#d55e00"}
SHOWN_TIMES = ("ttft", "tpot")  # besides the times that the SLO limits
MAX_TIMES_LIMIT = 8  # the axis of seconds ends at most at this many times the SLO's limit
NEVER_SECONDS = 1e9  # stands for infinity; it is drawn at the top


def latency_curves(data: ReportData, answers: Sequence[ModelAnswer]) -> Picture | None:
    """Return the curves of one configuration for each device; None where neither a step-time model
    nor a level is known."""
    groups = []
    for side in SIDES:
        cell = featured_cell(answers, side)
        charts = () if cell is None else charts_of(cell, data.slo)
        if cell is not None and charts:
            title = f"Latency against request rate: {cell.name} ({cell.engine_words})"
            groups.append(ChartGroup(title=title, charts=charts))
    if not groups:
        return None
    return Picture(
        groups=tuple(groups),
        note="Lines: median and 90th percentile, simulated from this run's step times. Dots: "
        "measured levels. Red: the limit of the SLO. Gray: the estimated capacity.",
    )


def featured_cell(answers: Sequence[ModelAnswer], side: str) -> CellData | None:
    """Return the configuration of the largest model that a device serves, if possible one with load
    levels; else the first that was measured under load."""
    cells = [cell for answer in answers if (cell := answer.cell_on(side)) is not None]
    served = [cell for cell in cells if cell.is_served]
    served_under_load = [cell for cell in served if cell.levels_under_load]
    if served_under_load:
        return served_under_load[-1]
    if served:
        return served[-1]
    return next((cell for cell in cells if cell.levels_under_load), None)


def charts_of(cell: CellData, slo: Slo) -> tuple[Chart, ...]:
    """Return the charts of TTFT, TPOT and the other times that the SLO limits, of one
    configuration; (): no rate is known."""
    capacity = cell.capacity
    rates = [measured.level.rate for measured in cell.levels_under_load]
    if capacity is not None:
        rates += [capacity.estimated_rate, capacity.confirmed_rate, capacity.high]
    highest_rate = max((rate for rate in rates if rate), default=None)
    if highest_rate is None:
        return ()
    curve_rates = np.geomspace(highest_rate / 12, highest_rate * 1.15, POINTS).tolist()
    names = tuple(dict.fromkeys((*SHOWN_TIMES, *slo.limits)))
    curves = _simulated_rows(cell, names, curve_rates)
    dots = _measured_rows(cell, names)
    charts = []
    for name in names:
        curve_rows = [row for row in curves if row["name"] == name]
        dot_rows = [row for row in dots if row["name"] == name]
        if curve_rows or dot_rows:
            ends = curve_rates[0], curve_rates[-1]
            limit = slo.limits.get(name)
            charts.append(_chart(cell, name, curve_rows, dot_rows, limit, ends))
    return tuple(charts)


def _simulated_rows(cell: CellData, names: Sequence[str], rates: Sequence[float]) -> list[Row]:
    """Return a row for each rate, kind of latency and quantile; []: there is no step-time model."""
    server = cell.simulated(REQUESTS)
    if server is None:
        return []
    rows: list[Row] = []
    for rate in rates:
        simulated = server.play(rate)
        for name in names:
            for quantile, q in QUANTILES.items():
                seconds = float(np.nanquantile(getattr(simulated, name), q))
                if math.isfinite(seconds):
                    rows.append({"name": name, "rate": rate, "seconds": seconds, "of": quantile})
    return rows


def _measured_rows(cell: CellData, names: Sequence[str]) -> list[Row]:
    """Return a row for each level that counts, kind of latency and quantile."""
    rows: list[Row] = []
    for measured in cell.levels_under_load:
        rate = measured.level.rate
        for name in names:
            for quantile, q in QUANTILES.items():
                if seconds := measured.quantile(name, q):
                    seconds = min(seconds, NEVER_SECONDS)
                    rows.append({"name": name, "rate": rate, "seconds": seconds, "of": quantile})
    return rows


def _chart(
    cell: CellData,
    name: str,
    curve_rows: list[Row],
    dot_rows: list[Row],
    limit: float | None,
    ends: tuple[float, float],
) -> Chart:
    """Return the chart of a time. `limit`: of the SLO, seconds; `ends`: the rates at which the axis
    begins and ends."""
    title = LIMITED_TIMES[name].title.capitalize()
    rows = [*curve_rows, *dot_rows]
    finite = [row["seconds"] for row in rows if row["seconds"] < NEVER_SECONDS]
    high = max(finite, default=1.0)
    if limit is not None:
        high = min(max(high, 1.5 * limit), MAX_TIMES_LIMIT * limit)
    x = rate_axis(*ends, cell.unit_rate)
    y = seconds_axis(min([*finite, high / 10]) / 1.4, high * 1.2)
    layers = []
    if curve_rows:
        curves = chart_of(curve_rows).mark_line(strokeWidth=2, clip=True)
        layers.append(curves.encode(x=x, y=y, color=palette("of:N", COLORS)))
    if dot_rows:
        dots = chart_of(dot_rows).mark_point(filled=True, size=70, opacity=1, clip=False)
        color = palette("of:N", COLORS, legend=not curve_rows)
        layers.append(dots.encode(x=x, y=y, color=color))
    if limit is not None:
        layers += rule_at(limit, "SLO", y, SLO)
    if cell.estimated_rate:
        capacity = formatting.rate(cell.estimated_rate, like=cell.unit_rate)
        layers += rate_line(cell.estimated_rate, f"capacity {capacity}", x)
    return Chart(
        slug=f"{name}-{cell.key}",
        label=f"{title} of {cell.name} against the request rate: lines are "
        "simulated from this run's step times, dots are measured levels.",
        spec=layered(layers, 230, title),
        half=True,
    )

"""Latency against rate: the simulated curves of TTFT and TPOT, every measured level as a dot.

The reader sees at a glance whether simulation and measurement agree.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from loadtests.analysis.slo import Slo
from loadtests.simulation.simulated_capacity import latency_curve
from models.formatting import model_title
from reports.chart_style import (
    CPU,
    SLO,
    Row,
    Spec,
    data,
    layered,
    palette,
    rate_axis,
    rule_at,
    seconds_axis,
)
from reports.report_data import CellData
from reports.sections.section import Chart

POINTS = 14  # of a curve
REQUESTS = 1_000  # that each is simulated with
QUANTILES = {"median": CPU, "nine of ten": "#d55e00"}
MOST_OVER = 8  # times the limit: the end of the axis of seconds


def latency_curves(cell: CellData, slo: Slo) -> tuple[Chart, ...]:
    """TTFT and TPOT of one cell; () where neither a law nor a level is known."""
    top = _highest(cell)
    if top is None:
        return ()
    rates = np.geomspace(top / 12, top * 1.15, POINTS).tolist()
    curves = _curves(cell, rates)
    charts = []
    for name, limit in (("ttft", slo.ttft_seconds), ("tpot", slo.tpot_seconds)):
        rows = [row for row in curves if row["name"] == name]
        dots = _dots(cell, name)
        if rows or dots:
            charts.append(_chart(cell, name, rows, dots, limit, (rates[0], rates[-1])))
    return tuple(charts)


def _highest(cell: CellData) -> float | None:
    """The highest rate that is drawn."""
    found = cell.capacity
    known = [one.level.rate or 0.0 for one in cell.loaded]
    if found is not None:
        known += [one for one in (found.limit, found.held, found.high) if one]
    return max(known) if known and max(known) > 0 else None


def _curves(cell: CellData, rates: Sequence[float]) -> list[Row]:
    """Simulated: a row for each rate, quantile and kind of latency."""
    if cell.law is None or cell.policy is None or cell.traffic is None:
        return []
    points = latency_curve(
        cell.law,
        cell.policy,
        cell.traffic.lengths,
        rates,
        arrivals=cell.traffic.arrivals,
        requests=REQUESTS,
    )
    rows: list[Row] = []
    for one in points:
        for name, label, value in (
            ("ttft", "median", one.ttft_p50),
            ("ttft", "nine of ten", one.ttft_p90),
            ("tpot", "median", one.tpot_p50),
            ("tpot", "nine of ten", one.tpot_p90),
        ):
            if value is not None and math.isfinite(value) and value > 0:
                rows.append({"name": name, "rate": one.rate, "seconds": value, "of": label})
    return rows


def _dots(cell: CellData, name: str) -> list[Row]:
    """Measured: two for each level that counts; what never came is drawn at the top."""
    rows: list[Row] = []
    for one in (level for level in cell.loaded if level.counts):
        for label, q in (("median", 0.5), ("nine of ten", 0.9)):
            value = one.quantile(name, q)
            if value:
                seconds = value if math.isfinite(value) else 1e9
                rows.append({"rate": one.level.rate, "seconds": seconds, "of": label})
    return rows


def _chart(
    cell: CellData,
    name: str,
    rows: list[Row],
    dots: list[Row],
    limit: float | None,
    ends: tuple[float, float],
) -> Chart:
    title = "Time to first token" if name == "ttft" else "Time per output token"
    seen = [row["seconds"] for row in (*rows, *dots) if row["seconds"] < 1e8]
    high = max(seen, default=1.0)
    if limit is not None:
        high = min(max(high, 1.5 * limit), MOST_OVER * limit)
    low = min([*seen, high / 10]) / 1.4
    x = rate_axis(*ends, title="request rate")
    y = seconds_axis(low, high * 1.2)
    colour, same = palette("of:N", QUANTILES), palette("of:N", QUANTILES, legend=not rows)
    layers = []
    if rows:
        layers.append(data(rows).mark_line(strokeWidth=2, clip=True).encode(x=x, y=y, color=colour))
    if dots:
        marks = data(dots).mark_point(filled=True, size=70, opacity=1, clip=False)
        layers.append(marks.encode(x=x, y=y, color=same))
    if limit is not None:
        layers += rule_at(limit, "SLO", y, SLO)
    spec: Spec = layered(layers, 230, title)
    return Chart(
        slug=f"{name}-{cell.key}",
        title=f"{model_title(cell.model)}: {title.lower()}",
        label=f"{title} of {model_title(cell.model)} against the request rate: lines are "
        "simulated from this run's step times, dots are measured levels.",
        spec=spec,
        half=True,
    )

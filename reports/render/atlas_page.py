"""The atlas as one offline page.

html = atlas_page(atlas)          # str
"""

from __future__ import annotations

import altair as alt

from crossover.reports.answers.atlas import Atlas
from crossover.reports.chart_style import CPU, GPU, chart_of, layered, palette, rate_axis
from crossover.reports.render.atlas_text import CAPACITY_NOTE, capacities, details
from crossover.reports.render.html_page import render_template
from crossover.reports.sections.section import Chart

COLORS = {"CPU": CPU, "GPU": GPU}
LINE_HEIGHT = 26  # pixels of a machine in a chart
MIN_MACHINES = 2  # of a chart: one machine is compared with nothing
AXIS_ROOM = 1.25  # factor between the ends of intervals and of the axis


def atlas_page(atlas: Atlas) -> str:
    return render_template(
        "atlas.html",
        atlas=atlas,
        matrix=capacities(atlas),
        details=details(atlas),
        charts=_charts(atlas),
        note=CAPACITY_NOTE,
    )


def _charts(atlas: Atlas) -> list[Chart]:
    """Return a chart of the capacities for each model that several machines serve."""
    charts = []
    for model in atlas.models:
        points = []
        for measured in atlas.machines:
            entry = atlas.best(measured, model)
            capacity = None if entry is None else entry.capacity
            if entry is not None and capacity is not None and capacity.low and capacity.rate:
                points.append(
                    {
                        "machine": measured.name,
                        "device": measured.device.upper(),
                        "low": capacity.low,
                        "rate": capacity.rate,
                        "high": capacity.high,
                    }
                )
        if len(points) >= MIN_MACHINES:
            charts.append(_chart_of_model(model, points))
    return charts


def _chart_of_model(model: str, points: list[dict[str, object]]) -> Chart:
    rates = [float(str(point[end])) for point in points for end in ("low", "high")]
    lowest, highest = min(rates), max(rates)
    x = rate_axis(lowest / AXIS_ROOM, highest * AXIS_ROOM, lowest)
    y = alt.Y("machine:N", title=None, sort="-x", axis=alt.Axis(labelLimit=170))
    color = palette("device:N", COLORS, legend=False)
    intervals = (
        chart_of([point | {"rate": point["low"]} for point in points])
        .mark_rule(strokeWidth=3, opacity=0.5)
        .encode(x=x, x2="high:Q", y=y, color=color)
    )
    dots = (
        chart_of(points).mark_point(filled=True, size=70, opacity=1).encode(x=x, y=y, color=color)
    )
    height = LINE_HEIGHT * len(points) + 10
    return Chart(
        slug=f"capacity-{model}",
        label=f"Capacity of {model} by machine, with its interval.",
        half=True,
        spec=layered([intervals, dots], height=height, title=model),
    )

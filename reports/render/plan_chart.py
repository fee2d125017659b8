"""The chart of a plan: the cost of each option against the rate in the busiest hour."""

from __future__ import annotations

from typing import Any

from crossover.reports.chart_style import chart_of
from crossover.reports.plan.plan_costs import Plan


def cost_chart(plan: Plan, width: int = 640, height: int = 320) -> Any:
    """Return an altair chart with a step curve for each of the plan's first four rows.

    A dashed vertical line marks the forecast. `width` and `height` are in pixels.
    """
    import altair as alt

    rows = [
        {"rate": point.peak_rate, "dollars": point.dollars, "option": title}
        for title, curve in plan.cost_curves.items()
        for point in curve
    ]
    curves = (
        chart_of(rows)
        .mark_line(interpolate="step-after", strokeWidth=2)
        .encode(
            x=alt.X(
                "rate:Q",
                scale=alt.Scale(type="log", nice=False),
                title="requests/s in the busiest hour",
            ),
            y=alt.Y("dollars:Q", title="$ a month"),
            color=alt.Color(
                "option:N", title=None, legend=alt.Legend(orient="top", columns=1, labelLimit=0)
            ),
        )
    )
    forecast = chart_of([{"rate": plan.peak_rate}]).mark_rule(strokeDash=[4, 4]).encode(x="rate:Q")
    return (curves + forecast).properties(width=width, height=height)

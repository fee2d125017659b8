"""The staircases of a plan: dollars a month against the rate of the busiest hour."""

from __future__ import annotations

from typing import Any

from crossover.reports.chart_style import data
from crossover.reports.plan.plan_costs import Plan


def staircase(plan: Plan, width: int = 640, height: int = 320) -> Any:
    """A line for each of the first four rows; the forecast is a rule."""
    import altair as alt

    rows = [
        {"rate": rate, "dollars": dollars, "way": name}
        for name, points in plan.stairs.items()
        for rate, dollars in points
    ]
    lines = (
        data(rows)
        .mark_line(interpolate="step-after", strokeWidth=2)
        .encode(
            x=alt.X(
                "rate:Q",
                scale=alt.Scale(type="log", nice=False),
                title="requests/s in the busiest hour",
            ),
            y=alt.Y("dollars:Q", title="$ a month"),
            color=alt.Color(
                "way:N", title=None, legend=alt.Legend(orient="top", columns=1, labelLimit=0)
            ),
        )
    )
    asked = data([{"rate": plan.peak_rate}]).mark_rule(strokeDash=[4, 4]).encode(x="rate:Q")
    return (lines + asked).properties(width=width, height=height)

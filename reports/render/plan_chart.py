"""The chart of a plan: dollars a month against requests a day, of each option and of the API.

svg(cost_chart(plan), 640)
"""

from __future__ import annotations

from collections.abc import Iterator

import altair as alt

from crossover.reports.chart_style import (
    INK,
    MUTED,
    PAPER,
    Layer,
    Row,
    Spec,
    chart_of,
    layered,
    series,
)
from crossover.reports.plan.plan_costs import CostCurve, CostPlan
from crossover.reports.plan.plan_file import SECONDS_A_DAY
from crossover.reports.render.plan_text import your_machine

HEIGHT = 320  # pixels
# The axis of dollars ends at so many times the cost of the cheapest option at the highest rate.
# What costs more is cut off, and an option that always costs more is left out.
COST_MARGIN = 2.5
API = "API"
LABEL_PIXELS = 15  # from the label of a vertical line down to that of the next one
LONG_NAME = 28  # characters: such names have a line of the legend each
Curve = list[tuple[float, float]]  # requests a day, dollars a month


def cost_chart(plan: CostPlan) -> Spec:
    """Return a chart with a line for each cost curve of the plan, whose steps are further machines,
    and the straight line of the API.

    Dots mark where options cost less than the API with 90 % confidence. Vertical lines mark the
    forecast and, if it grows, the months in which more is needed.
    """
    curves: dict[str, Curve] = {
        _name(plan, curve): [
            (plan.requests_a_day(point.peak_rate), point.dollars) for point in curve.points
        ]
        for curve in plan.cost_curves
    }
    max_day = max((day for curve in curves.values() for day, _ in curve), default=1.0)
    api: dict[str, Curve] = {}
    if plan.api is not None:
        dollars = plan.api.dollars_per_month(max_day / SECONDS_A_DAY)
        api[API] = [(0.0, 0.0), (max_day, dollars)]
    ends = [curve[-1] for curve in (*curves.values(), *api.values())]
    costs_at_the_end = [dollars for day, dollars in ends if day == max_day and dollars]
    max_dollars = COST_MARGIN * min(costs_at_the_end, default=1.0)
    curves = {
        name: curve
        for name, curve in curves.items()
        if min(dollars for _, dollars in curve) <= max_dollars
    }
    colors = series(list(curves)) | dict.fromkeys(api, INK)
    curves |= api
    labels = [(day, text) for day, text in _labels(plan) if day <= max_day]
    labels.sort(key=lambda label: label[0])
    label_band = len(labels) * LABEL_PIXELS
    x = alt.X(
        "day:Q",
        title="requests on a mean day",
        scale=alt.Scale(domain=[0, max_day], nice=False),
        axis=alt.Axis(format=",.3~r", tickCount=5),
    )
    y = alt.Y(
        "dollars:Q",
        title="$ a month",
        scale=alt.Scale(domain=[0, max_dollars], range=[HEIGHT, label_band]),
        axis=alt.Axis(format="$,.3~r", tickCount=6),
    )
    columns = 1 if max(map(len, curves)) > LONG_NAME else 2
    color = alt.Color(
        "option:N",
        scale=alt.Scale(domain=list(colors), range=list(colors.values())),
        legend=alt.Legend(orient="top", columns=columns, labelLimit=0),
    )
    rows = [
        {"day": day, "dollars": dollars, "option": name}
        for name, curve in curves.items()
        for day, dollars in curve
    ]
    dash = alt.condition(alt.datum.option == API, alt.value([6, 3]), alt.value([1, 0]))
    lines = chart_of(rows).mark_line(strokeWidth=2, clip=True)
    layers: list[Layer] = [lines.encode(x=x, y=y, color=color, strokeDash=dash)]
    dots = list(_break_evens(plan, max_day))
    if dots:
        mark = {"size": 50, "filled": True, "fill": PAPER, "stroke": INK, "strokeWidth": 1.5}
        layers.append(chart_of(dots).mark_point(**mark, clip=True).encode(x=x, y=y))
    if labels:  # curves go on above the highest cost: the band of the labels hides them
        band = chart_of([{"day": 0.0, "end": max_day}])
        height = {"y": alt.value(0), "y2": alt.value(label_band)}
        mark = {"fill": PAPER, "opacity": 1, "x2Offset": 2}
        layers.append(band.mark_rect(**mark).encode(x=x, x2="end:Q", **height))
    for row, (day, text) in enumerate(labels):
        layers += _labeled_line(day, text, x, row * LABEL_PIXELS, is_right=day > max_day / 2)
    return layered(layers, height=HEIGHT)


def _name(plan: CostPlan, curve: CostCurve) -> str:
    """Return the name of a curve. Where machines can also be bought or reserved, it says which are
    rented by the hour."""
    title = curve.option
    if curve.kind != "rented":
        (machine, *_) = sorted({one.machine for one in plan.options if one.kind == "as it is"})
        title = title.replace(machine, your_machine(plan, machine), 1)
    has_other_terms = any(other.terms not in (None, "by the hour") for other in plan.cost_curves)
    is_hourly = has_other_terms and curve.terms == "by the hour"
    return f"{title}, by the hour" if is_hourly else title


def _break_evens(plan: CostPlan, max_day: float) -> Iterator[Row]:
    """Yield the points of the chart at which an option begins to cost less than the API. Costs are
    those of enough machines with 90 % confidence, so the capacity is at its low end."""
    for even in plan.break_evens:
        if plan.api is not None and even.high:
            day = plan.requests_a_day(even.high)
            if day <= max_day:
                dollars = plan.api.dollars_per_month(day / SECONDS_A_DAY)
                yield {"day": day, "dollars": dollars}


def _labels(plan: CostPlan) -> Iterator[tuple[float, str]]:
    """Yield the requests a day of each vertical line, and what it marks. A line that marks several
    things has a label for each."""
    yield plan.requests_a_day(plan.peak_rate), "forecast"
    for milestone in plan.growth.milestones if plan.growth is not None else ():
        if not milestone.month or milestone.rate is None:
            continue
        match milestone.kind:
            case "no longer enough":
                event = f"{your_machine(plan, milestone.machine)} is not enough"
            case "no choice":
                event = "no option is enough"
            case "further machine":
                event = "one more machine"
        yield plan.requests_a_day(milestone.rate), f"month {milestone.month}: {event}"


def _labeled_line(day: float, label: str, x: alt.X, top: int, *, is_right: bool) -> list[Layer]:
    """Return a vertical line that starts `top` pixels below the upper end of the chart, with its
    label beside it: left of it if the line is in the right half of the chart, where the label would
    not fit."""
    line = chart_of([{"day": day, "label": label}])
    align, offset = ("right", -4) if is_right else ("left", 4)
    mark = {"align": align, "baseline": "top", "dx": offset, "fontSize": 11}
    halo = {"stroke": PAPER, "strokeWidth": 4, "fill": PAPER}  # what is behind the label
    position = {"x": x, "y": alt.value(top), "text": "label:N"}
    rule = line.mark_rule(color=MUTED, strokeDash=[2, 3])
    return [
        rule.encode(x=x, y=alt.value(top), y2=alt.value(HEIGHT)),
        line.mark_text(**mark, **halo).encode(**position),
        line.mark_text(color=MUTED, **mark).encode(**position),
    ]

"""What a rate costs: machines like this one against a GPU. The page moves the price."""

from __future__ import annotations

from collections.abc import Sequence

import altair as alt

from models import formatting
from reports.accelerator.costs import Comparison, Side
from reports.charts import parts, style

HERE = "machines like this one"
GPU_COLOURS = (style.SERIES[1], style.SERIES[3], style.SERIES[4])  # as many as MOST_GPUS


def cost_rows(sides: Sequence[Side], rates: Sequence[float]) -> list[parts.Row]:
    """$/h of each side at each of the rates in requests/s; the first side is this machine."""
    rows = []
    for place, side in enumerate(sides):
        for rate in rates:
            dollars = side.dollars(rate)
            if dollars is not None:
                rows.append(
                    {
                        "side": side.name if place else HERE,
                        "rate": rate,
                        "dollars": dollars,
                        "machines": side.machines(rate),
                        "holds": side.holds,
                        "kind": side.kind,
                        "source": side.price_source,
                    }
                )
    return rows


def cost_chart(one: Comparison) -> parts.Spec | None:
    """Dollars an hour by rate, with the break-even drawn; None where no price is known."""
    rows = cost_rows((one.here, *one.there), one.rates)
    if not rows:
        return None
    even = one.soonest[1] if one.there else None
    x = parts.rate_axis(list(one.rates), "requests (log scale)", most=6)
    axis = alt.Axis(title="$ an hour (log scale)", tickCount=5, format="~r", grid=False)
    y = alt.Y("dollars:Q", scale=alt.Scale(type="log"), axis=axis)
    lines = alt.Chart(alt.NamedData(name="costs"))
    meet = alt.Chart(alt.NamedData(name="even"))
    tips = [
        alt.Tooltip("side:N", title="by"),
        alt.Tooltip("rate:Q", title="requests/s", format=".3~r"),
        alt.Tooltip("machines:Q", title="how many"),
        alt.Tooltip("dollars:Q", title="$ an hour", format=".3~r"),
        alt.Tooltip("holds:N", title="one holds"),
        alt.Tooltip("kind:N", title="that is"),
        alt.Tooltip("source:N", title="price"),
    ]
    layers = [
        meet.mark_rule(color=style.INK, strokeDash=[4, 3]).encode(x=x),
        *parts.haloed(
            meet, {"x": x, "y": alt.value(10), "text": "text:N"}, align="right", dx=-5, fontSize=11
        ),
        lines.mark_line(strokeWidth=2, interpolate="step-before").encode(
            x=x, y=y, color=_sides(rows, one)
        ),
        lines.mark_point(size=90, opacity=0, color=style.INK).encode(x=x, y=y, tooltip=tips),
    ]
    return parts.spec(layers, height=230, datasets={"costs": rows, "even": even_rows(even)})


def joule_rows(one: Comparison) -> list[parts.Row]:
    """J per output token of each side whose watts are known, at each rate."""
    sides = (one.here, *one.there)
    return [
        {
            "side": side.name if place else HERE,
            "rate": rate,
            "joules": joules,
            "machines": side.machines(rate),
            "source": side.watts_source,
        }
        for place, side in enumerate(sides)
        for rate in one.rates
        if (joules := side.joules_per_token(rate, one.output_tokens)) is not None
    ]


def joule_chart(one: Comparison) -> parts.Spec | None:
    """Joules per output token by rate; None where no side's watts are known."""
    rows = joule_rows(one)
    if not rows:
        return None
    x = parts.rate_axis(list(one.rates), "requests (log scale)", most=6)
    axis = alt.Axis(title="J a token (log scale)", tickCount=5, format="~r", grid=False)
    y = alt.Y("joules:Q", scale=alt.Scale(type="log"), axis=axis)
    lines = alt.Chart(alt.NamedData(name="joules"))
    tips = [
        alt.Tooltip("side:N", title="by"),
        alt.Tooltip("rate:Q", title="requests/s", format=".3~r"),
        alt.Tooltip("machines:Q", title="how many"),
        alt.Tooltip("joules:Q", title="J a token", format=".3~r"),
        alt.Tooltip("source:N", title="watts"),
    ]
    layers = [
        lines.mark_line(strokeWidth=2).encode(x=x, y=y, color=_sides(rows, one)),
        lines.mark_point(size=90, opacity=0, color=style.INK).encode(x=x, y=y, tooltip=tips),
    ]
    return parts.spec(layers, height=230, datasets={"joules": rows})


def _sides(rows: Sequence[parts.Row], one: Comparison) -> alt.Color:
    """A side has the same colour in both charts."""
    every = [HERE, *(side.name for side in one.there)]
    colours = dict(zip(every, (style.CPU, *GPU_COLOURS), strict=False))
    names = [name for name in every if any(row["side"] == name for row in rows)]
    palette = alt.Scale(domain=names, range=[colours[name] for name in names])
    legend = alt.Legend(columns=1, symbolType="stroke", symbolStrokeWidth=2)
    return alt.Color("side:N", scale=palette, sort=names, legend=legend)


def even_rows(even: float | None) -> list[parts.Row]:
    """The break-even, where it lies above no rate at all."""
    return [{"rate": even, "text": f"equal at {formatting.rate(even)}"}] if even else []

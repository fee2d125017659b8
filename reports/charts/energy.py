"""Joules per output token against the rate, as measured."""

from __future__ import annotations

from collections.abc import Sequence

import altair as alt

from reports.accelerator.joules import LevelEnergy
from reports.charts import parts, style
from reports.sentences import names_of


def energy_chart(found: Sequence[LevelEnergy]) -> parts.Spec | None:
    """One line per model; None where no level at a rate was measured."""
    names = names_of(list({one.cell.key: one.cell for one in found}.values()))
    rows: list[parts.Row] = [
        {
            "model": names[one.cell.key],
            "rate": one.level.rate_per_second,
            "joules": one.joules_per_token,
            "watts": one.watts,
            "kind": f"measured here by {one.energy.measured_by}",
        }
        for one in found
        if one.level.rate_per_second and one.joules_per_token is not None
    ]
    if not rows:
        return None
    x = parts.rate_axis(sorted({row["rate"] for row in rows}), "requests asked (log scale)")
    axis = alt.Axis(title="joules per output token", tickCount=5)
    y = alt.Y("joules:Q", scale=alt.Scale(zero=True), axis=axis)
    palette = style.series_colours(list(dict.fromkeys(row["model"] for row in rows)))
    scale = alt.Scale(domain=list(palette), range=list(palette.values()))
    legend = alt.Legend(columns=parts.when_wide(4, 1))
    colour, quiet = (alt.Color("model:N", scale=scale, legend=one) for one in (legend, None))
    tips = [
        "model:N",
        alt.Tooltip("rate:Q", title="requests/s asked", format=".3~r"),
        alt.Tooltip("joules:Q", title="J a token", format=".3~r"),
        alt.Tooltip("watts:Q", title="watts", format=".3~r"),
        "kind:N",
    ]
    base = parts.data(rows)
    return parts.spec(
        [
            base.mark_line(strokeWidth=2).encode(x=x, y=y, color=quiet),
            base.mark_point(size=62, filled=True, opacity=1).encode(
                x=x, y=y, color=colour, tooltip=tips
            ),
        ],
        height=260,
    )

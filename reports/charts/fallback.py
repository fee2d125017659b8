"""The time to the first token of each request around a change of the engine."""

from __future__ import annotations

import altair as alt

from loadtests.metrics.fallback import Fallback
from reports.charts import parts, style

COLOURS = {"before": style.CPU, "during": style.SLO, "after": style.VERDICTS["holds"]}


def fallback_chart(found: Fallback) -> parts.Spec | None:
    """TTFT by due time; failed requests are crosses on the axis. None without a good answer."""
    waits = [one.ttft_seconds for one in found.points if one.ttft_seconds]
    if not waits:
        return None
    low = min(waits) / 1.8
    rows: list[parts.Row] = [
        {
            "due": one.due_seconds,
            "seconds": one.ttft_seconds or low * 1.1,
            "part": one.part,
            "outcome": "answered" if one.ttft_seconds else "failed",
            "shown": one.ttft_seconds,
            "kind": "measured here",
        }
        for one in found.points
    ]
    x = alt.X("due:Q", axis=alt.Axis(title="due, seconds into the level", tickCount=6))
    y = parts.seconds_axis(waits, room=1.8, most=6)
    shapes = alt.Scale(domain=["answered", "failed"], range=["circle", "cross"])
    spans = parts.data([{"from": found.lost_seconds, "to": found.back_seconds}])
    tips = [
        alt.Tooltip("due:Q", title="due at, s", format=".3~r"),
        alt.Tooltip("shown:Q", title="TTFT, s", format=".3~r"),
        alt.Tooltip("outcome:N"),
        alt.Tooltip("part:N"),
        alt.Tooltip("kind:N"),
    ]
    palette = alt.Scale(domain=list(COLOURS), range=list(COLOURS.values()))
    marks = parts.data(rows).mark_point(size=50, filled=True, opacity=0.9)
    return parts.spec(
        [
            spans.mark_rect(color=style.ABOVE, opacity=0.5).encode(x="from:Q", x2="to:Q"),
            marks.encode(
                x=x,
                y=y,
                color=alt.Color("part:N", scale=palette, sort=list(COLOURS), legend=alt.Legend()),
                shape=alt.Shape("outcome:N", scale=shapes, legend=None),
                tooltip=tips,
            ),
        ],
        height=240,
    )

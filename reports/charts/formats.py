"""Formats of one model: how much memory their weights take, and how fast one stream decodes."""

from __future__ import annotations

from collections.abc import Sequence

import altair as alt

from models import formatting
from models.formatting import GIB
from reports.accelerator.formats import FormatRow, kind_words
from reports.charts import parts, style


def format_chart(found: Sequence[FormatRow]) -> parts.Spec | None:
    """The formats of one model; None where fewer than two have both figures."""
    rows: list[parts.Row] = [
        {
            "name": f"{one.weight_format} {one.backend}",
            "gib": one.weight_bytes / GIB,
            "speed": one.decode_tokens_per_second,
            "size": formatting.size(one.weight_bytes),
            "kl": "not measured" if one.kl_nats is None else f"{one.kl_nats:.2g} nats",
            "kind": kind_words(one),
        }
        for one in found
        if one.weight_bytes and one.decode_tokens_per_second
    ]
    if len(rows) < 2:
        return None
    most = max(row["gib"] for row in rows)
    fastest = max(row["speed"] for row in rows)
    x_axis = alt.Axis(title="weights, GiB (predicted by the format)", tickCount=5)
    x = alt.X("gib:Q", scale=alt.Scale(domain=[0, most * 1.5], nice=False), axis=x_axis)
    y_axis = alt.Axis(title="tokens/s, one stream", tickCount=5)
    y = alt.Y("speed:Q", scale=alt.Scale(domain=[0, fastest * 1.15], nice=False), axis=y_axis)
    base = parts.data(rows)
    tips = [
        alt.Tooltip("name:N", title="format"),
        alt.Tooltip("speed:Q", title="tokens/s", format=".3~r"),
        alt.Tooltip("size:N", title="weights"),
        alt.Tooltip("kl:N", title="KL"),
        alt.Tooltip("kind:N", title="kind"),
    ]
    marks = base.mark_point(size=80, filled=True, opacity=1, color=style.CPU)
    names = {"x": x, "y": y, "text": "name:N"}
    return parts.spec(
        [
            marks.encode(x=x, y=y, tooltip=tips),
            *parts.haloed(base, names, align="left", dx=9, fontSize=11),
        ],
        height=210,
    )

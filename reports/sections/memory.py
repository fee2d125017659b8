"""Memory: weights, KV cache and overhead of each model, predicted, beside the measured peak."""

from __future__ import annotations

from collections.abc import Sequence

from models import formatting
from models.formatting import GIB
from reports.chart_style import INK, MUTED, Row, data, layered, palette
from reports.headline import Answer
from reports.report_data import Memory, ReportData
from reports.sections.section import Chart, Section, table

PARTS = {"weights": "#0072b2", "KV cache": "#56b4e9", "overhead": "#c3ccd5"}
CARDS_GIB = (8, 16, 24, 48, 80)  # lines for GPUs that one can buy


def memory(data_: ReportData, answers: Sequence[Answer]) -> Section | None:
    """None where no memory is known."""
    rows = [
        (f"{cell.model} {cell.weight_format}".strip(), cell.memory)
        for cell in data_.cells
        if cell.memory.most_bytes is not None
    ]
    if not rows:
        return None
    largest, its = max(rows, key=lambda row: row[1].most_bytes or 0)
    return Section(
        slug="memory",
        title="Memory",
        sentence=f"{largest} takes {formatting.size(its.most_bytes)}, the most of these.",
        grades=("predicted", "measured"),
        table=table(
            ("model", "weights", "KV cache", "overhead", "together, predicted", "measured peak"),
            (
                (
                    name,
                    *map(formatting.size, one.parts),
                    formatting.size(one.predicted_bytes),
                    formatting.size(one.measured_bytes),
                )
                for name, one in rows
            ),
        ),
        charts=_charts(rows),
        note="Predicted by placement before loading; measured: the engine's peak resident memory. "
        "Grey lines: memory of GPUs that one can buy.",
    )


def _charts(rows: list[tuple[str, Memory]]) -> tuple[Chart, ...]:
    import altair as alt

    bars: list[Row] = [
        {"model": name, "part": part, "gib": size / GIB, "order": order}
        for name, one in rows
        for order, (part, size) in enumerate(zip(PARTS, one.parts, strict=True))
        if size is not None
    ]
    if not bars:
        return ()
    marks: list[Row] = [
        {"model": name, "gib": one.measured_bytes / GIB}
        for name, one in rows
        if one.measured_bytes is not None
    ]
    most = (
        1.1 * max(max(one.measured_bytes or 0, one.predicted_bytes or 0) for _, one in rows) / GIB
    )
    x = alt.X("gib:Q", title="GiB", scale=alt.Scale(domain=[0, most]))
    y = alt.Y("model:N", title=None, sort=[name for name, _ in rows])
    order = alt.Order("order:Q")
    layers = [data(bars).mark_bar().encode(x=x, y=y, color=palette("part:N", PARTS), order=order)]
    if marks:
        layers.append(data(marks).mark_tick(color=INK, thickness=3).encode(x=x, y=y))
    if cards := [{"gib": size} for size in CARDS_GIB if size <= most]:
        layers.append(data(cards).mark_rule(color=MUTED, strokeDash=[2, 3]).encode(x=x))
    spec = layered(layers, 34 * len(rows) + 10)
    label = "Bars: predicted memory of each model by part; black ticks: the measured peak."
    return (Chart(slug="memory", label=label, spec=spec),)

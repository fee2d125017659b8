"""Memory: weights, KV cache and overhead of each model, predicted, beside the measured peak."""

from __future__ import annotations

from collections.abc import Sequence

from models import formatting
from models.formatting import GIB, model_title
from reports.chart_style import MUTED, Row, data, layered, palette
from reports.headline import Answer
from reports.report_data import Memory, ReportData
from reports.sections.section import Chart, Section, Table

PARTS = {"weights": "#0072b2", "KV cache": "#56b4e9", "overhead": "#c3ccd5"}
CARDS_GIB = (8, 16, 24, 48, 80)  # lines for GPUs that one can buy


def memory(data_: ReportData, answers: Sequence[Answer]) -> Section | None:
    """None where no memory is known."""
    rows = []
    for cell in data_.cells:
        held = cell.memory
        if held.predicted_bytes is None and held.peak_bytes is None and held.gpu_bytes is None:
            continue
        measured = held.peak_bytes if held.gpu_bytes is None else held.gpu_bytes
        name = f"{model_title(cell.model)} {cell.weight_format}".strip()
        rows.append((name, held, measured))
    if not rows:
        return None
    largest = max(rows, key=lambda row: row[2] or row[1].predicted_bytes or 0)
    table = Table(
        ("model", "weights", "KV cache", "overhead", "together, predicted", "measured peak"),
        tuple(_row(name, held, measured) for name, held, measured in rows),
        numeric=(1, 2, 3, 4, 5),
    )
    taken = formatting.size(largest[2] or largest[1].predicted_bytes)
    return Section(
        slug="memory",
        title="Memory",
        sentence=f"{largest[0]} takes {taken}, the most of these.",
        grades=("predicted", "measured"),
        table=table,
        charts=_charts(rows),
        note="Predicted by placement before loading; measured: the engine's peak resident memory. "
        "Grey lines: memory of GPUs that one can buy.",
    )


def _row(name: str, held: Memory, measured: int | None) -> tuple[str, ...]:
    parts = (held.weight_bytes, held.kv_bytes, held.overhead_bytes, held.predicted_bytes, measured)
    return (name, *map(formatting.size, parts))


def _charts(rows: list[tuple[str, Memory, int | None]]) -> tuple[Chart, ...]:
    import altair as alt

    bars: list[Row] = [
        {"model": name, "part": part, "gib": size / GIB, "order": order}
        for name, held, _ in rows
        for order, (part, size) in enumerate(
            zip(PARTS, (held.weight_bytes, held.kv_bytes, held.overhead_bytes), strict=True)
        )
        if size is not None
    ]
    marks: list[Row] = [
        {"model": name, "gib": peak / GIB} for name, _, peak in rows if peak is not None
    ]
    if not bars:
        return ()
    most = max([row["gib"] for row in marks] + [held.predicted_bytes / GIB for _, held, _ in rows
                                                if held.predicted_bytes])  # fmt: skip
    x = alt.X("gib:Q", title="GiB", scale=alt.Scale(domain=[0, most * 1.1]))
    y = alt.Y("model:N", title=None, sort=[name for name, _, _ in rows])
    order = alt.Order("order:Q")
    layers = [data(bars).mark_bar().encode(x=x, y=y, color=palette("part:N", PARTS), order=order)]
    if marks:
        layers.append(data(marks).mark_tick(color="#1b2530", thickness=3).encode(x=x, y=y))
    cards = [{"gib": size} for size in CARDS_GIB if size <= most * 1.1]
    if cards:
        layers.append(data(cards).mark_rule(color=MUTED, strokeDash=[2, 3]).encode(x=x))
    spec = layered(layers, 34 * len(rows) + 10)
    label = "Bars: predicted memory of each model by part; black ticks: the measured peak."
    return (Chart(slug="memory", title="Memory of each model", label=label, spec=spec),)

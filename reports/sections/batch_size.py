"""Batch size: what several requests in one step gain, and what each of them pays."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from models import formatting
from reports.chart_style import Row, data, layered, palette, series
from reports.headline import Answer
from reports.report_data import CellData, ReportData
from reports.sections.section import Chart, Section, Table

ROWS = (1, 2, 4, 8, 16, 32)


def batch_size(data_: ReportData, answers: Sequence[Answer]) -> Section | None:
    """None where no cell has a law."""
    known = [one for one in answers if one.cell.law is not None and one.cell.traffic is not None]
    if not known:
        return None
    last = known[-1]
    steps = step_seconds(last.cell)
    many = max(steps)
    gain = many * steps[1] / steps[many]
    table = Table(
        ("model", *(f"{rows} at once" for rows in ROWS)),
        tuple(
            (one.title, *(_cell(step_seconds(one.cell), rows) for rows in ROWS)) for one in known
        ),
        numeric=tuple(range(1, len(ROWS) + 1)),
    )
    return Section(
        slug="batch-size",
        title="Batch",
        sentence=f"{many} answers of {last.title} together come {gain:.1f} times as fast as one "
        f"after the other; each token then takes {steps[many] / steps[1]:.1f} times as long.",
        grades=("estimated",),
        table=table,
        charts=(_chart(known),),
        note="Tokens/s of all together, and the time of a step, by the step law of this run.",
    )


def step_seconds(cell: CellData) -> dict[int, float]:
    """Seconds of a decode step by its rows, up to the slots."""
    assert cell.law is not None and cell.traffic is not None
    lengths = cell.traffic.lengths
    context = float(np.mean(lengths.prompt) + np.mean(lengths.output) / 2)
    most = cell.slots or (cell.policy.slots if cell.policy is not None else 1)
    counts = [rows for rows in ROWS if rows <= most] or [1]
    return {rows: cell.law.seconds(rows, 0, rows * context) for rows in counts}


def _cell(steps: dict[int, float], rows: int) -> str:
    if rows not in steps:
        return "–"
    return f"{formatting.significant(rows / steps[rows])}/s, {formatting.seconds(steps[rows])}"


def _chart(known: Sequence[Answer]) -> Chart:
    import altair as alt

    rows: list[Row] = [
        {"model": one.title, "rows": count, "tokens": count / seconds}
        for one in known
        for count, seconds in step_seconds(one.cell).items()
    ]
    lines = data(rows).mark_line(point=True, strokeWidth=2)
    x = alt.X("rows:Q", title="requests in a step", scale=alt.Scale(type="log", base=2))
    y = alt.Y("tokens:Q", title="tokens/s of all together")
    colour = palette("model:N", series([one.title for one in known]))
    spec = layered([lines.encode(x=x, y=y, color=colour)], 230)
    label = "Tokens a second of all requests together against how many share a step, by model."
    return Chart(slug="batch", title="What batching gains", label=label, spec=spec)

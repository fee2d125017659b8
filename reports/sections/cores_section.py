"""Capacity against cores: what an engine serves with each number of cores, and a pod's requests."""

from __future__ import annotations

from collections.abc import Sequence

import altair as alt

from crossover.models import formatting
from crossover.models.tables import Column, table_of
from crossover.reports.answers.cores_needed import CoresCell, cells_by_cores
from crossover.reports.answers.model_answers import ModelAnswer
from crossover.reports.chart_style import chart_of, layered, palette, series
from crossover.reports.report_data import ReportData
from crossover.reports.sections.section import Chart, Section


def cores(data: ReportData, answers: Sequence[ModelAnswer]) -> Section | None:
    """Return the models that were measured with several numbers of cores; None: there are none."""
    rows = cells_by_cores(data)
    if not rows:
        return None
    return Section(
        slug="cores",
        title="Capacity against cores",
        sentence=_sentence(rows),
        grades=("measured", "estimated"),
        table=table_of(
            rows,
            Column("model", "text", lambda row: row.cell.model),
            Column("engine", "text", lambda row: row.cell.engine_words),
            Column("cores", "count", lambda row: row.cores),
            Column("confirmed rate", "text", lambda row: row.cell.confirmed_words),
            Column("estimated capacity (90 % CI)", "text", lambda row: row.cell.estimated_words),
            Column("pod CPU request", "text", lambda row: row.pod.cpu),
            Column("pod memory request", "text", lambda row: row.pod.memory),
        ),
        charts=_charts(rows),
        note="Cores are physical cores of the engine. The pod requests the CPUs that the engine "
        "had, a tenth of a core more if HTTP ran on other cores, and its peak memory with 512 MiB "
        "for HTTP. `crossover report --cores-for 20/min` names the least cores for a rate.",
    )


def _sentence(rows: Sequence[CoresCell]) -> str:
    """Return how much more the most cores serve than the fewest, for each series."""
    sentences: list[str] = []
    for name in dict.fromkeys(row.series for row in rows):
        own = [row for row in rows if row.series == name]
        few, many = own[0], own[-1]
        few_rate, many_rate = few.cell.estimated_rate, many.cell.estimated_rate
        if not few_rate or not many_rate:
            continue
        times = formatting.significant(many_rate / few_rate)
        unit = "core" if few.cores == 1 else "cores"
        sentences.append(
            f"{name} on {many.cores} cores has {times} times the capacity that it has on "
            f"{few.cores} {unit}."
        )
    return " ".join(sentences) or "No capacity is known for two numbers of cores."


def _charts(rows: Sequence[CoresCell]) -> tuple[Chart, ...]:
    known = [row for row in rows if row.cell.estimated_rate is not None]
    if not known:
        return ()
    unit_seconds, unit = formatting.rate_unit(
        max(row.cell.estimated_rate or 0.0 for row in known) or 1.0
    )
    points = []
    for row in known:
        rate = row.cell.estimated_rate or 0.0
        interval = row.cell.capacity_interval
        low, high = (rate, rate) if interval is None else interval
        points.append(
            {
                "series": row.series,
                "cores": row.cores,
                "rate": rate * unit_seconds,
                "low": low * unit_seconds,
                "high": high * unit_seconds,
            }
        )
    color = palette("series:N", series(list(dict.fromkeys(row.series for row in known))))
    x = alt.X(
        "cores:Q",
        title="physical cores of the engine",
        axis=alt.Axis(values=sorted({row.cores for row in known}), format="d"),
        scale=alt.Scale(domainMin=0),
    )
    title = f"capacity, requests{unit}"
    chart = chart_of(points)
    lines = chart.mark_line(point=True).encode(x=x, y=alt.Y("rate:Q", title=title), color=color)
    intervals = chart.mark_rule(strokeWidth=2, opacity=0.5).encode(
        x=x, y=alt.Y("low:Q", title=title), y2="high:Q", color=color
    )
    return (
        Chart(
            slug="cores",
            label="Estimated capacity of each model by cores of the engine, with its interval.",
            spec=layered([intervals, lines], height=220),
        ),
    )

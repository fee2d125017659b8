"""The table of all load levels of a run."""

from __future__ import annotations

from crossover.models.tables import Column, Table, table_of
from crossover.reports.report_data import ReportData
from crossover.reports.sections.section import LEVEL, CellLevel, name_with_format


def levels_table(data: ReportData) -> Table:
    """Return a row for each finished level."""
    return table_of(
        [CellLevel(cell, measured) for cell in data.cells for measured in cell.levels],
        Column("model", "text", lambda row: name_with_format(row.cell)),
        *LEVEL[1:],
        Column("met the SLO", "text", _met_the_slo),
        Column("verdict", "text", lambda row: row.measured.judged.verdict),
        Column("TTFT p50", "seconds", lambda row: row.measured.quantile("ttft", 0.5)),
        Column("TTFT p90", "seconds", lambda row: row.measured.quantile("ttft", 0.9)),
        Column("TPOT p50", "seconds", lambda row: row.measured.quantile("tpot", 0.5)),
        Column("TPOT p90", "seconds", lambda row: row.measured.quantile("tpot", 0.9)),
        Column("tokens/s", "number", lambda row: row.measured.level.output_tokens_per_second),
        Column("send delay p99", "seconds", lambda row: row.measured.quantile("send_delay", 0.99)),
        Column("seconds", "number", lambda row: f"{row.measured.level.window_seconds:.0f}"),
        Column("notes", "text", _notes),
    )


def _met_the_slo(row: CellLevel) -> str:
    judged = row.measured.judged
    return f"{judged.good} of {judged.due}"


def _notes(row: CellLevel) -> str:
    level = row.measured.level
    notes = [] if level.finished is None else list(level.finished.warnings)
    if not level.counts:
        notes.append("does not count")
    return ", ".join(notes)

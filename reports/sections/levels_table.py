"""The table of all load levels of a run."""

from __future__ import annotations

from crossover.models import formatting
from crossover.reports.report_data import CellData, LevelData, ReportData
from crossover.reports.sections.section import Table, table

COLUMNS = (
    "model",
    "device",
    "load",
    "met the SLO",
    "verdict",
    "TTFT p50",
    "TTFT p90",
    "TPOT p50",
    "TPOT p90",
    "tokens/s",
    "send delay p99",
    "seconds",
    "notes",
)


def levels_table(data: ReportData) -> Table:
    """Return a row for each finished level."""
    rows = [_row(cell, measured) for cell in data.cells for measured in cell.levels]
    return table(COLUMNS, rows, words=("device", "load", "met the SLO", "verdict", "notes"))


def _row(cell: CellData, measured: LevelData) -> tuple[str, ...]:
    level, judged = measured.level, measured.judged
    notes = [] if level.finished is None else list(level.finished.warnings)
    if not level.counts:
        notes.append("does not count")
    tokens = level.output_tokens_per_second
    return (
        f"{cell.model} {cell.weight_format}".strip(),
        cell.device_words,
        measured.load_words(cell.unit_rate),
        f"{judged.good} of {judged.due}",
        judged.verdict,
        formatting.seconds(measured.quantile("ttft", 0.5)),
        formatting.seconds(measured.quantile("ttft", 0.9)),
        formatting.seconds(measured.quantile("tpot", 0.5)),
        formatting.seconds(measured.quantile("tpot", 0.9)),
        formatting.NOT_MEASURED if tokens is None else formatting.significant(tokens),
        formatting.seconds(measured.quantile("send_delay", 0.99)),
        f"{level.window_seconds:.0f}",
        ", ".join(notes),
    )

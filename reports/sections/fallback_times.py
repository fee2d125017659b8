"""Fallback: levels in which the engine changed while requests came, and what clients saw."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from crossover.models import formatting
from crossover.models.tables import Column, table_of
from crossover.reports.answers.model_answers import ModelAnswer
from crossover.reports.report_data import ReportData
from crossover.reports.sections.section import LEVEL, CellLevel, Section


def fallback_times(data: ReportData, answers: Sequence[ModelAnswer]) -> Section | None:
    """Return the levels that several engines answered; None where there is none."""
    changed = [
        CellLevel(cell, measured)
        for cell in data.cells
        for measured in cell.levels
        if len(measured.level.backends) > 1
    ]
    if not changed:
        return None
    return Section(
        slug="fallback",
        title="Fallback",
        sentence=f"The engine changed in {len(changed)} levels; the longest time without a token "
        f"was {formatting.seconds(max(map(_gap_seconds, changed)))}.",
        grades=("measured",),
        table=table_of(
            changed,
            *LEVEL,
            Column("answered by", "text", lambda row: _counts(row.measured.level.backends)),
            Column("failed", "count", lambda row: row.measured.judged.failed),
            Column("no token for", "seconds", _gap_seconds),
        ),
    )


def _gap_seconds(row: CellLevel) -> float:
    """Return the longest time without a content chunk, over all streams together."""
    return float(np.diff(np.sort(row.measured.level.chunks)).max(initial=0.0))


def _counts(requests: Mapping[str, int]) -> str:
    """Return `torch: 40, llama_cpp: 12`."""
    return ", ".join(f"{backend}: {count}" for backend, count in requests.items())

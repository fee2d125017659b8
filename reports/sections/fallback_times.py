"""Fallback: levels in which the engine changed while requests came, and what clients felt."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from models import formatting
from models.formatting import model_title
from reports.headline import Answer
from reports.report_data import LevelData, ReportData
from reports.sections.section import Section, Table


def fallback_times(data: ReportData, answers: Sequence[Answer]) -> Section | None:
    """None where every level was answered by one engine."""
    rows = [
        (model_title(cell.model), one)
        for cell in data.cells
        for one in cell.levels
        if len(one.level.backends) > 1
    ]
    if not rows:
        return None
    gaps = [_longest_gap(one) for _, one in rows]
    return Section(
        slug="fallback",
        title="Fallback",
        sentence=f"The engine changed in {len(rows)} levels; for at most "
        f"{formatting.seconds(max(gaps))} no token came.",
        grades=("measured",),
        table=Table(
            ("model", "load", "answered by", "failed", "no token for"),
            tuple(
                (
                    name,
                    formatting.load(one.level.rate, one.level.started.concurrency),
                    ", ".join(f"{who}: {count}" for who, count in one.level.backends.items()),
                    str(one.judged.failed),
                    formatting.seconds(gap),
                )
                for (name, one), gap in zip(rows, gaps, strict=True)
            ),
            numeric=(3, 4),
        ),
    )


def _longest_gap(one: LevelData) -> float:
    """Seconds without any content chunk, of all streams together."""
    stamps = np.sort(one.level.chunks[np.isfinite(one.level.chunks)])
    return float(np.diff(stamps).max()) if len(stamps) > 1 else 0.0

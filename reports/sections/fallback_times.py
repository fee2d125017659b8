"""Fallback: levels in which the engine changed while requests came, and what clients saw."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from crossover.models import formatting
from crossover.reports.answers.model_answers import ModelAnswer
from crossover.reports.report_data import CellData, LevelData, ReportData
from crossover.reports.sections.section import Section, table


class _Fallback(msgspec.Struct, frozen=True, eq=False):
    """A level in which the engine changed."""

    cell: CellData
    measured: LevelData
    gap_seconds: float  # the longest time without a content chunk, over all streams together


def fallback_times(data: ReportData, answers: Sequence[ModelAnswer]) -> Section | None:
    """Return the levels that several engines answered; None where there is none."""
    rows = []
    for cell in data.cells:
        for measured in cell.levels:
            level = measured.level
            if len(level.backends) > 1:
                gap_seconds = float(np.diff(np.sort(level.chunks)).max(initial=0.0))
                rows.append(_Fallback(cell, measured, gap_seconds))
    if not rows:
        return None
    longest_gap = max(row.gap_seconds for row in rows)
    return Section(
        slug="fallback",
        title="Fallback",
        sentence=f"The engine changed in {len(rows)} levels; the longest time without a token was "
        f"{formatting.seconds(longest_gap)}.",
        grades=("measured",),
        table=table(
            ("model", "device", "load", "answered by", "failed", "no token for"),
            (
                (
                    row.cell.model,
                    row.cell.device_words,
                    row.measured.load_words(row.cell.unit_rate),
                    _counts(row.measured.level.backends),
                    str(row.measured.judged.failed),
                    formatting.seconds(row.gap_seconds),
                )
                for row in rows
            ),
            words=("device", "load", "answered by"),
        ),
    )


def _counts(requests: Mapping[str, int]) -> str:
    """Return `torch: 40, llama_cpp: 12`."""
    return ", ".join(f"{backend}: {count}" for backend, count in requests.items())

"""Fallback: levels in which the engine changed while requests came, and what clients saw."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from crossover.models import formatting
from crossover.reports.answers.model_answers import ModelAnswer
from crossover.reports.report_data import ReportData
from crossover.reports.sections.section import Section, table


def fallback_times(data: ReportData, answers: Sequence[ModelAnswer]) -> Section | None:
    """Return the levels that several engines answered; None where there is none."""
    rows = []
    for cell in data.cells:
        for measured in cell.levels:
            level = measured.level
            if len(level.backends) > 1:
                # The longest time without a content chunk, over all streams together.
                gap_seconds = float(np.diff(np.sort(level.chunks)).max(initial=0.0))
                rows.append((cell, measured, gap_seconds))
    if not rows:
        return None
    longest_gap = max(gap_seconds for _, _, gap_seconds in rows)
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
                    cell.model,
                    cell.device_words,
                    measured.load(cell.like),
                    _counts(measured.level.backends),
                    str(measured.judged.failed),
                    formatting.seconds(gap_seconds),
                )
                for cell, measured, gap_seconds in rows
            ),
            words=("device", "load", "answered by"),
        ),
    )


def _counts(requests: Mapping[str, int]) -> str:
    """Return `torch: 40, llama_cpp: 12`."""
    return ", ".join(f"{backend}: {count}" for backend, count in requests.items())

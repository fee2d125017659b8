"""Fallback: levels in which the engine changed while requests came, and what clients felt."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from crossover.models import formatting
from crossover.reports.headline import Answer
from crossover.reports.report_data import ReportData
from crossover.reports.sections.section import Section, table


def fallback_times(data: ReportData, answers: Sequence[Answer]) -> Section | None:
    """None where every level was answered by one engine."""
    rows = []
    for cell in data.cells:
        for one in cell.levels:
            if len(one.level.backends) > 1:
                # the longest time without any content chunk, of all streams together
                gap = float(np.diff(np.sort(one.level.chunks)).max(initial=0.0))
                rows.append((cell, one, gap))
    if not rows:
        return None
    return Section(
        slug="fallback",
        title="Fallback",
        sentence=f"The engine changed in {len(rows)} levels; the longest time without a token was "
        f"{formatting.seconds(max(gap for _, _, gap in rows))}.",
        grades=("measured",),
        table=table(
            ("model", "device", "load", "answered by", "failed", "no token for"),
            (
                (
                    cell.model,
                    cell.device_words,
                    one.load(cell.like),
                    ", ".join(f"{who}: {count}" for who, count in one.level.backends.items()),
                    str(one.judged.failed),
                    formatting.seconds(gap),
                )
                for cell, one, gap in rows
            ),
            words=("device", "load", "answered by"),
        ),
    )

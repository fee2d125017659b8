"""Formats and engines of one model side by side: speed and memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from loadtests.analysis.capacity_text import in_words
from models import formatting
from reports.headline import Answer
from reports.report_data import CellData, ReportData
from reports.sections.section import Section, table
from reports.sections.speeds import speeds


def formats(data: ReportData, answers: Sequence[Answer]) -> Section | None:
    """Of models that were measured in several ways; else what their engine was chosen from."""
    counts = Counter(cell.model for cell in data.cells)
    several = [cell for cell in data.cells if counts[cell.model] > 1]
    if not several:
        return _chosen(data)
    best = max(several, key=lambda cell: cell.limit or 0.0)
    return Section(
        slug="formats",
        title="Formats and engines",
        sentence=f"{best.engine_words} serves most of {best.model}.",
        grades=("measured",),
        table=table(
            ("model", "engine", "capacity", "reads", "writes", "memory"),
            map(_row, several),
            words=("engine", "capacity"),
        ),
    )


def _row(cell: CellData) -> tuple[str, ...]:
    speed = speeds(cell)
    tokens = [formatting.NOT_MEASURED] * 2
    if speed is not None:
        tokens = [f"{formatting.significant(one)} tokens/s" for one in speed[:2]]
    return (
        cell.model,
        cell.engine_words,
        in_words(cell.capacity, cell.like) if cell.capacity is not None else cell.reason,
        *tokens,
        formatting.size(cell.memory.peak_bytes or cell.memory.predicted_bytes),
    )


def _chosen(data: ReportData) -> Section | None:
    rows = [
        (cell.model, cell.engine_words, cell.choice.reason)
        for cell in data.cells
        if cell.choice is not None
    ]
    if not rows:
        return None
    return Section(
        slug="formats",
        title="Engines that were chosen",
        sentence=", ".join(f"{model}: {engine}" for model, engine, _ in rows) + ".",
        grades=("estimated",),
        table=table(("model", "engine", "why"), rows, words=("engine", "why")),
        note="From step times that seconds of calibration gave of each candidate.",
    )

"""Formats and engines of one model on one device side by side: speed and memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from crossover.loadtests.capacity.capacity_text import in_words
from crossover.models import formatting
from crossover.reports.headline import Answer
from crossover.reports.report_data import SIDE_NAMES, SIDES, CellData, ReportData
from crossover.reports.sections.section import Section, table
from crossover.reports.sections.speeds import speeds


def formats(data: ReportData, answers: Sequence[Answer]) -> Section | None:
    """Of models that were measured in several ways on one device; else what their engine was chosen
    from. A format on the CPU is not compared with one on the GPU."""
    counts = Counter((cell.model, cell.side) for cell in data.cells)
    several = [cell for cell in data.cells if counts[cell.model, cell.side] > 1]
    if not several:
        return _chosen(data)
    sentences = []
    for side in SIDES:
        if own := [cell for cell in several if cell.side == side]:
            best = max(own, key=lambda cell: cell.estimated_rate or 0.0)
            where = f"On the {SIDE_NAMES[side]} " if len(data.sides) > 1 else ""
            sentences.append(
                f"{where}{best.engine_words} has the highest capacity for {best.model}."
            )
    return Section(
        slug="formats",
        title="Formats and engines",
        sentence=" ".join(sentences),
        grades=("measured",),
        table=table(
            ("model", "device", "engine", "capacity", "reads", "writes", "memory"),
            map(_row, several),
            words=("device", "engine", "capacity"),
        ),
    )


def _row(cell: CellData) -> tuple[str, ...]:
    speed = speeds(cell)
    tokens = [formatting.NOT_MEASURED] * 2
    if speed is not None:
        tokens = [f"{formatting.significant(one)} tokens/s" for one in speed[:2]]
    return (
        cell.model,
        cell.device_words,
        cell.engine_words,
        in_words(cell.capacity, cell.like) if cell.capacity is not None else cell.reason,
        *tokens,
        formatting.size(cell.memory.most_bytes),
    )


def _chosen(data: ReportData) -> Section | None:
    rows = [
        (cell.model, cell.device_words, cell.engine_words, cell.choice.reason)
        for cell in data.cells
        if cell.choice is not None
    ]
    if not rows:
        return None
    return Section(
        slug="formats",
        title="Engines that were chosen",
        sentence=", ".join(f"{model}: {engine}" for model, _, engine, _ in rows) + ".",
        grades=("estimated",),
        table=table(("model", "device", "engine", "why"), rows, words=("device", "engine", "why")),
        note="From the step times of each candidate, measured in seconds.",
    )

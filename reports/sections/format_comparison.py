"""Formats and engines of one model on one device side by side: speed and memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from crossover.loadtests.capacity.capacity_text import in_words
from crossover.models import formatting
from crossover.reports.answers.model_answers import ModelAnswer
from crossover.reports.report_data import SIDE_NAMES, SIDES, CellData, ReportData
from crossover.reports.sections.section import Section, table
from crossover.reports.sections.speeds import speeds_of


def formats(data: ReportData, answers: Sequence[ModelAnswer]) -> Section | None:
    """Return the models that were measured in several ways on one device; if there is none, the
    engines that were chosen among several. A format on the CPU is not compared with one on the
    GPU."""
    counts = Counter((cell.model, cell.side) for cell in data.cells)
    compared = [cell for cell in data.cells if counts[cell.model, cell.side] > 1]
    if not compared:
        return _chosen_engines(data)
    sentences = []
    for side in SIDES:
        where = f"On the {SIDE_NAMES[side]} " if len(data.sides) > 1 else ""
        for model in dict.fromkeys(cell.model for cell in compared if cell.side == side):
            cells = [cell for cell in compared if (cell.model, cell.side) == (model, side)]
            if words := _fastest_words(model, cells):
                sentences.append(f"{where}{words}")
    return Section(
        slug="formats",
        title="Formats and engines",
        sentence=" ".join(sentences) or "No engine was found to serve requests within the SLO.",
        grades=("measured",),
        table=table(
            ("model", "device", "engine", "capacity", "reads", "writes", "memory"),
            map(_row, compared),
            words=("device", "engine", "capacity"),
        ),
    )


def _fastest_words(model: str, cells: Sequence[CellData]) -> str:
    """Return which of a model's engines has the highest capacity, and from which others the run
    does not tell it apart; "": none meets the SLO at any rate."""
    best = max(cells, key=lambda cell: cell.estimated_rate or 0.0)
    if not best.estimated_rate:
        return ""
    words = f"{best.engine_words} has the highest capacity for {model}"
    interval = best.capacity_interval
    similar = [
        cell.engine_words
        for cell in cells
        if cell is not best
        and interval is not None
        and cell.capacity_interval is not None
        and interval.overlaps(cell.capacity_interval)
    ]
    if similar:
        others = ", ".join(similar)
        words += f"; no difference is shown from {others}"
    return f"{words}."


def _row(cell: CellData) -> tuple[str, ...]:
    speeds = speeds_of(cell)
    reads = writes = formatting.NOT_MEASURED
    if speeds is not None:
        reads = f"{formatting.significant(speeds.prompt_tokens_per_second)} tokens/s"
        writes = f"{formatting.significant(speeds.stream_tokens_per_second)} tokens/s"
    return (
        cell.model,
        cell.device_words,
        cell.engine_words,
        in_words(cell.capacity, cell.unit_rate) if cell.capacity is not None else cell.reason,
        reads,
        writes,
        formatting.size(cell.memory.peak_or_predicted_bytes),
    )


def _chosen_engines(data: ReportData) -> Section | None:
    """Return the engines that were chosen among several, and why; None: all were named."""
    rows = [
        (cell.model, cell.device_words, cell.engine_words, cell.engine_choice.reason)
        for cell in data.cells
        if cell.engine_choice is not None
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

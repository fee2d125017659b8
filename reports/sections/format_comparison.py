"""Formats and engines of one model on one device side by side: speed and memory."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from crossover.loadtests.capacity.capacity_text import capacity_in_words
from crossover.models.tables import Column, table_of
from crossover.reports.answers.model_answers import ModelAnswer
from crossover.reports.report_data import SIDE_NAMES, SIDES, CellData, RateInterval, ReportData
from crossover.reports.sections.section import DEVICE, MODEL, Section
from crossover.reports.sections.speeds import reading_speed, writing_speed

ENGINE = Column[CellData]("engine", "text", lambda cell: cell.engine_words)


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
            sentences.append(f"{where}{_fastest_words(model, cells)}")
    return Section(
        slug="formats",
        title="Formats and engines",
        sentence=" ".join(sentences),
        grades=("measured",),
        table=table_of(
            compared,
            MODEL,
            DEVICE,
            ENGINE,
            Column("capacity", "text", _capacity_words),
            Column("reads", "tokens/s", reading_speed),
            Column("writes", "tokens/s", writing_speed),
            Column("memory", "size", lambda cell: cell.memory.peak_or_predicted_bytes),
        ),
    )


def _fastest_words(model: str, cells: Sequence[CellData]) -> str:
    """Return which of a model's engines has the highest capacity, and from which others the run
    does not tell it apart."""
    measured = [cell for cell in cells if cell.capacity is not None]
    known = [cell for cell in measured if cell.estimated_rate]
    if not known:
        if measured and all(cell.estimated_rate == 0.0 for cell in measured):
            return f"{model} is not served within the SLO by any engine that was measured."
        return f"{model} has no engine whose capacity is known."
    best = max(known, key=lambda cell: cell.estimated_rate or 0.0)
    if len(measured) == 1:
        return f"{best.engine_words} is the only engine that was measured for {model}."
    words = f"{best.engine_words} has the highest capacity for {model}"
    similar = [
        cell.engine_words for cell in measured if cell is not best and _is_similar(cell, best)
    ]
    if similar:
        words += f"; no difference is shown from {', '.join(similar)}"
    return f"{words}."


def _is_similar(cell: CellData, best: CellData) -> bool:
    """Return whether the intervals of two capacities overlap. An end that is not known bounds
    nothing."""
    if cell.estimated_rate == 0.0 or cell.capacity is None or best.capacity is None:
        return False
    intervals = [
        RateInterval(capacity.low or 0.0, math.inf if capacity.high is None else capacity.high)
        for capacity in (cell.capacity, best.capacity)
    ]
    return intervals[0].overlaps(intervals[1])


def _capacity_words(cell: CellData) -> str:
    if cell.capacity is None:
        return cell.reason
    return capacity_in_words(cell.capacity, cell.unit_rate)


def _chosen_engines(data: ReportData) -> Section | None:
    """Return the engines that were chosen among several, and why; None: all were named."""
    choices = {cell: cell.engine_choice for cell in data.cells if cell.engine_choice is not None}
    if not choices:
        return None
    return Section(
        slug="formats",
        title="Engines that were chosen",
        sentence=", ".join(f"{cell.model}: {cell.engine_words}" for cell in choices) + ".",
        grades=("estimated",),
        table=table_of(
            choices, MODEL, DEVICE, ENGINE, Column("why", "text", lambda cell: choices[cell].reason)
        ),
        note="From the step times of each candidate, measured in seconds.",
    )

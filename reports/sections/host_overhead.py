"""Host overhead: how long the device waits for scheduling, sampling and text between two steps."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from crossover.models import formatting
from crossover.reports.headline import Answer
from crossover.reports.report_data import CellData, ReportData
from crossover.reports.sections.section import Section, table


def host_overhead(data: ReportData, answers: Sequence[Answer]) -> Section | None:
    """None where no engine told its time."""
    rows = [
        (cell, one.load(cell.like), told.host_share, told)
        for cell in data.cells
        for one in cell.loaded
        if one.level.finished and (told := one.level.finished.engine_time) is not None
        if told.host_share is not None and told.steps
    ]
    if not rows:
        return None
    worst, load, most, _ = max(rows, key=lambda row: row[2])
    return Section(
        slug="host-overhead",
        title="Host overhead",
        sentence=f"At most {formatting.share(most, 2)} of the engine's busy time was spent between "
        f"its steps ({worst.name} at {load}).",
        grades=("measured",),
        table=table(
            ("model", "device", "load", "host share", "a step", "host, a step"),
            (
                (
                    *(cell.model, cell.device_words, load, formatting.share(share, 2)),
                    formatting.seconds(told.device_seconds / told.steps),
                    formatting.seconds(told.host_seconds / told.steps),
                )
                for cell, load, share, told in rows
            ),
            words=("device", "load"),
        ),
        note="By the engine's own clock: scheduling, sampling outside the backend, text and "
        "messages. The faster the device, the larger this share."
        + _words_of_single_requests(data.cells),
    )


def _words_of_single_requests(cells: Sequence[CellData]) -> str:
    """Return the sentence on the time outside the engine; "" where it is not known."""
    parts = [
        f"{formatting.seconds(seconds)} ({cell.name})"
        for cell in cells
        if (seconds := seconds_outside_engine(cell)) is not None
    ]
    if not parts:
        return ""
    return (
        f" A single request spent {', '.join(parts)} outside the engine on average: HTTP, "
        "tokenizer, messages between processes, and once what a first request sets up. The "
        "step-time model has no part for it."
    )


def seconds_outside_engine(cell: CellData) -> float | None:
    """Return the mean time of a single request less the engine's busy time; None where the engine
    told no time, or a request failed."""
    seconds, requests = 0.0, 0
    for level in (one.level for one in cell.levels):
        told = level.finished.engine_time if level.finished else None
        if not level.is_single_stream or told is None or not np.isfinite(level.e2e).all():
            continue
        seconds += float(level.e2e.sum()) - told.device_seconds - told.host_seconds
        requests += len(level.e2e)
    return seconds / requests if requests else None

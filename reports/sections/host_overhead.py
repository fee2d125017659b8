"""Host overhead: how long the device waits for scheduling, sampling and text between two steps."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from crossover.loadtests.capacity.calibration_bursts import seconds_outside_engine
from crossover.models import formatting
from crossover.reports.answers.model_answers import ModelAnswer
from crossover.reports.report_data import CellData, ReportData
from crossover.reports.sections.section import Section, table


class _Overhead(msgspec.Struct, frozen=True, eq=False):
    """The host overhead of one level."""

    cell: CellData
    load: str
    host_share: float  # of the engine's busy time
    step_seconds: float  # on the device, mean
    host_step_seconds: float  # on the host, mean


def host_overhead(data: ReportData, answers: Sequence[ModelAnswer]) -> Section | None:
    """Return the overhead of each load level; None where no engine reported its time."""
    rows = []
    for cell in data.cells:
        for measured in cell.levels_under_load:
            finished = measured.level.finished
            times = None if finished is None else finished.engine_time
            if times is None or times.host_share is None or not times.steps:
                continue
            rows.append(
                _Overhead(
                    cell,
                    measured.load_words(cell.unit_rate),
                    times.host_share,
                    times.device_seconds / times.steps,
                    times.host_seconds / times.steps,
                )
            )
    if not rows:
        return None
    worst = max(rows, key=lambda row: row.host_share)
    return Section(
        slug="host-overhead",
        title="Host overhead",
        sentence=f"At most {formatting.share(worst.host_share, 2)} of the engine's busy time was "
        f"spent between its steps ({worst.cell.name} at {worst.load}).",
        grades=("measured",),
        table=table(
            ("model", "device", "load", "host share", "a step", "host, a step"),
            (
                (
                    row.cell.model,
                    row.cell.device_words,
                    row.load,
                    formatting.share(row.host_share, 2),
                    formatting.seconds(row.step_seconds),
                    formatting.seconds(row.host_step_seconds),
                )
                for row in rows
            ),
            words=("device", "load"),
        ),
        note="By the engine's own clock. The host schedules, samples outside the backend, makes "
        "text and sends messages. The faster the device, the larger this share."
        + _sentence_on_single_requests(data.cells),
    )


def _sentence_on_single_requests(cells: Sequence[CellData]) -> str:
    """Return the sentence on the time outside the engine; "" where it is not known."""
    times = [
        f"{formatting.seconds(seconds)} ({cell.name})"
        for cell in cells
        if (seconds := seconds_outside_engine(cell.single_stream_levels)) is not None
    ]
    if not times:
        return ""
    return (
        f" A single request spent {', '.join(times)} outside the engine on average: HTTP, "
        "tokenizer, messages between processes, and what the first request sets up. The simulation "
        "adds to TTFT the part of it that step times do not explain."
    )

"""Host overhead: how long the device waits for scheduling, sampling and text between two steps."""

from __future__ import annotations

from collections.abc import Sequence

from crossover.loadtests.capacity.calibration_bursts import seconds_outside_engine
from crossover.models import formatting
from crossover.models.tables import Column, table_of
from crossover.reports.answers.model_answers import ModelAnswer
from crossover.reports.report_data import CellData, ReportData
from crossover.reports.sections.section import LEVEL, CellLevel, Section


def host_overhead(data: ReportData, answers: Sequence[ModelAnswer]) -> Section | None:
    """Return the overhead of each load level; None where no engine reported its time."""
    times = {
        CellLevel(cell, measured): finished.engine_time
        for cell in data.cells
        for measured in cell.levels_under_load
        if (finished := measured.level.finished) is not None
        and finished.engine_time is not None
        and finished.engine_time.host_share is not None
        and finished.engine_time.steps
    }
    if not times:
        return None
    worst = max(times, key=lambda row: times[row].host_share or 0.0)
    return Section(
        slug="host-overhead",
        title="Host overhead",
        sentence=f"At most {formatting.share(times[worst].host_share, 2)} of the engine's busy "
        f"time was spent between its steps ({worst.cell.name} at {worst.load_words}).",
        grades=("measured",),
        table=table_of(
            times,
            *LEVEL,
            Column("host share", "share", lambda row: times[row].host_share),
            Column("a step", "seconds", lambda row: times[row].device_seconds / times[row].steps),
            Column(
                "host, a step", "seconds", lambda row: times[row].host_seconds / times[row].steps
            ),
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

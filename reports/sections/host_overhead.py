"""Host overhead: how long the device waits for scheduling, sampling and text between two steps."""

from __future__ import annotations

from collections.abc import Sequence

from models import formatting
from reports.headline import Answer
from reports.report_data import ReportData
from reports.sections.section import Section, table


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
        sentence=f"At most {formatting.share(most, 2)} of the engine's busy time went to work "
        f"between its steps ({worst.name} at {load}).",
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
        "messages. The quicker the device, the more of its time this share is.",
    )

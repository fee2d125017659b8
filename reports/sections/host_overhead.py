"""Host overhead: how long the device waits for scheduling, sampling and text between two steps."""

from __future__ import annotations

from collections.abc import Sequence

from models import formatting
from models.formatting import model_title
from reports.headline import Answer
from reports.report_data import ReportData
from reports.sections.section import Section, Table


def host_overhead(data: ReportData, answers: Sequence[Answer]) -> Section | None:
    """None where no engine told its time."""
    rows = []
    for cell in data.cells:
        for one in cell.loaded:
            said = one.level.finished
            told = said.engine_time if said is not None else None
            if told is not None and told.host_share is not None and told.steps:
                load = formatting.load(one.level.rate, one.level.started.concurrency)
                rows.append((model_title(cell.model), load, told.host_share, told))
    if not rows:
        return None
    worst = max(rows, key=lambda row: row[2])
    return Section(
        slug="host-overhead",
        title="Host overhead",
        sentence=f"At most {formatting.share(worst[2], 2)} of the engine's busy time went to work "
        f"between its steps ({worst[0]} at {worst[1]}).",
        grades=("measured",),
        table=Table(
            ("model", "load", "host share", "a step", "host, a step"),
            tuple(
                (
                    name,
                    load,
                    formatting.share(share, 2),
                    formatting.seconds(told.device_seconds / told.steps),
                    formatting.seconds(told.host_seconds / told.steps),
                )
                for name, load, share, told in rows
            ),
            numeric=(2, 3, 4),
        ),
        note="By the engine's own clock: scheduling, sampling outside the backend, text and "
        "messages. The quicker the device, the more of its time this share is.",
    )

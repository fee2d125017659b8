"""What the runner makes of a level's workers: their records on one clock, and facts of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from loadtests.generator.messages import Ended, WorkerClock
from loadtests.metrics.level_warnings import longest_send_lag
from loadtests.records.schema import RequestRecord, WorkerFacts

Clocks = Mapping[int, WorkerClock]
_STAMPS = (
    *("due_seconds", "sent_seconds", "first_content_seconds", "first_answer_seconds"),
    *("last_content_seconds", "ended_seconds"),
)


def on_masters_clock(record: RequestRecord, clocks: Clocks) -> RequestRecord:
    """All its stamps moved alike: what lies between two of them is as the worker measured it."""
    known = clocks.get(record.worker or 0)
    if known is None or known.shift_seconds == 0:
        return record
    shift = known.shift_seconds
    moved = {name: at + shift for name in _STAMPS if (at := getattr(record, name)) is not None}
    contents = [at + shift for at in record.content_seconds]
    return msgspec.structs.replace(record, content_seconds=contents, **moved)


def workers_of(ended: Ended, records: Sequence[RequestRecord], clocks: Clocks) -> list[WorkerFacts]:
    """In order; [] for a load generator alone."""
    if not clocks:
        return []
    found = []
    for account in sorted(ended.each, key=lambda one: one.worker):
        known = clocks.get(account.worker)
        own = [record for record in records if record.worker == account.worker]
        found.append(
            WorkerFacts(
                worker=account.worker,
                name=known.name if known is not None else None,
                due=account.due,
                send_lag_p99_seconds=longest_send_lag(own),
                cpu_share=_share(account.cpu_seconds, account.wall_seconds),
                busy_share=_share(account.busy_seconds, account.wall_seconds),
                clock_offset_seconds=known.offset_seconds if known is not None else None,
                clock_moved_seconds=-known.shift_seconds if known is not None else None,
                clock_uncertainty_seconds=(
                    known.uncertainty_seconds if known is not None else None
                ),
            )
        )
    return found


def _share(seconds: float | None, of_seconds: float) -> float | None:
    return seconds / of_seconds if seconds is not None and of_seconds else None

"""Cold starts as a table and sentences, for the text of a plan."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from crossover.models import formatting
from crossover.models.tables import Column, Table, table_of
from crossover.reports.plan.cold_start import ColdStart


def cold_start_table(cold_starts: Sequence[ColdStart]) -> Table:
    """Return a row for each machine that stops when it is idle."""
    return table_of(
        cold_starts,
        Column("machine", "text", lambda start: start.machine),
        Column("loads in", "text", _load_words),
        Column("first user waits", "text", lambda start: formatting.duration(start.start_seconds)),
        Column("requests wait", "share", lambda start: formatting.share(start.waiting_share)),
        Column("$/month stopping", "number", lambda start: _dollars(start.stopping_dollars)),
        Column("$/month warm", "number", lambda start: _dollars(start.warm_dollars)),
    )


def cold_start_sentences(cold_starts: Sequence[ColdStart], unit_rate: float) -> Iterator[str]:
    """Yield what your machine serves while rented ones start, and what the columns mean; nothing if
    there are no cold starts. Rates are in the unit of `unit_rate`."""
    if not cold_starts:
        return
    bridged = [start for start in cold_starts if start.bridge and start.bridged_share is not None]
    machines_by_words: dict[tuple[str, str], list[str]] = {}
    for start in bridged:
        rate = formatting.requests(start.bridge_rate, rounded="down", like=unit_rate)
        waits = (
            "nobody waits for a start"
            if not start.bridged_share
            else f"{formatting.share(start.bridged_share)} of the requests wait for a start"
        )
        duration = formatting.duration(start.start_seconds)
        bridge = f"{start.bridge} serves up to {rate}, so {waits}"
        machines_by_words.setdefault((duration, bridge), []).append(start.machine)
    for (duration, bridge), machines in machines_by_words.items():
        yield f"While {' or '.join(machines)} starts ({duration}), {bridge}."
    yield (
        "First user waits: until the machine runs and its model is loaded. Requests wait: those "
        "that find the machine stopped, or come while it starts. Stopping: the cost if a machine "
        "that is alone stops while it is idle; warm: the cost if at least one runs day and night."
    )


def _load_words(start: ColdStart) -> str:
    return f"{formatting.seconds(start.load_seconds)} ({start.grade})"


def _dollars(dollars: float | None) -> str:
    return "-" if dollars is None else formatting.dollars(dollars)

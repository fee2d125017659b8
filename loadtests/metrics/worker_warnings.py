"""Warnings about a level's load generators where there are several."""

from __future__ import annotations

from collections.abc import Sequence

from loadtests.metrics.level_warnings import CLIENT_BUSY_SHARE, LATE_SHARE
from loadtests.metrics.named_warning import NamedWarning, Severity
from loadtests.metrics.slo import Slo
from loadtests.records.schema import WorkerFacts
from models import formatting


def worker_warnings(workers: Sequence[WorkerFacts], slo: Slo) -> tuple[NamedWarning, ...]:
    """Who is too busy to read answers in time, and whose clock is known too little. Serious."""
    found: list[NamedWarning] = []
    for one in workers:
        name = f"load generator {one.worker}" + (f" on {one.name}" if one.name else "")
        if one.busy_share is not None and one.busy_share > CLIENT_BUSY_SHARE:
            found.append(
                NamedWarning(
                    "GeneratorBusy",
                    Severity.SERIOUS,
                    f"{name} was at work or waited for a core {one.busy_share:.0%} of the time: "
                    f"more than {CLIENT_BUSY_SHARE:.0%}",
                    "give each load generator a core of its own, and add some where there are more",
                )
            )
        apart, limit = one.clock_uncertainty_seconds, slo.ttft_seconds
        if apart is not None and limit is not None and apart > LATE_SHARE * limit:
            found.append(
                NamedWarning(
                    "ClocksApart",
                    Severity.SERIOUS,
                    f"the clock of {name} is known to {formatting.seconds(apart, 2)} only, more "
                    f"than {LATE_SHARE:.0%} of the TTFT limit, {formatting.seconds(limit, 3)}",
                    "round trips between master and worker take too long: bring them nearer, or "
                    "keep other traffic off their network",
                )
            )
    return tuple(found)

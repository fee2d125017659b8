"""Records and samples of one level -> Summary with its warnings. Pure.

level = summarise(records, samples, Window(10.0, 70.0), SLO_PRESETS["chat"], rate=0.8)
level.verdict, level.counts.attainment, level.latencies.ttft.p99, level.warnings
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import msgspec

from loadtests.metrics.level_summary import (
    Summary,
    Window,
    arrivals_of,
    backends_of,
    counts_of,
    is_one_at_a_time,
    latencies_of,
    resources_of,
    throughput_of,
)
from loadtests.metrics.level_warnings import Evidence, disturbed, level_warnings
from loadtests.metrics.request_metrics import is_good, outcome, ttft_seconds
from loadtests.metrics.slo import Slo, Verdict, verdict
from loadtests.metrics.stationarity import grows, in_flight_at_ends, is_steady
from loadtests.metrics.worker_warnings import worker_warnings
from loadtests.records.schema import (
    Disturbance,
    RequestRecord,
    ResourceSample,
    WorkerFacts,
)
from loadtests.workload.arrivals import Arrivals


def summarise(
    records: Sequence[RequestRecord],
    samples: Iterable[ResourceSample],
    window: Window,
    slo: Slo,
    *,
    rate: float | None = None,
    arrivals: Arrivals | None = None,
    started_unix_seconds: float | None = None,
) -> Summary:
    """Numbers of one level. Raises ValueError for an empty window.

    `records` are all of the level's, also those due outside the window. `rate` is the asked one
    (None: closed loop), `arrivals` the process that due times were drawn from. `samples` count
    where they fall into the window; all of them without `started_unix_seconds`.
    """
    if not window.seconds > 0:
        raise ValueError(
            f"window must be longer than 0 s, got {window.start_seconds} to {window.end_seconds}"
        )
    inside = window.due(records)
    seen = [
        s
        for s in samples
        if started_unix_seconds is None or window.holds(s.unix_seconds - started_unix_seconds)
    ]
    counts = counts_of(inside, slo, rate is None and is_one_at_a_time(inside))
    steady = None if rate is None else _is_steady(records, inside, window, slo)
    shown = slo.shown_in(window.seconds)
    summary = Summary(
        window=window,
        slo=slo.name,
        asked_rate=rate,
        verdict=level_verdict(counts.good, counts.due, counts.dispersion, slo, steady),
        counts=counts,
        latencies=latencies_of(inside),
        throughput=throughput_of(records, inside, window, counts),
        resources=resources_of(seen),
        backends=backends_of(inside),
        arrivals=arrivals_of(records, arrivals, rate, window),
        is_steady=steady,
        good_soon=None if shown == slo else sum(is_good(one, shown) for one in inside),
        grows_soon=rate is not None
        and shown != slo
        and _is_steady(records, inside, window, shown) is False,
    )
    warnings = level_warnings(Evidence(summary, inside, records, seen, slo))
    return msgspec.structs.replace(summary, warnings=warnings)


def with_facts(
    summary: Summary, found: Disturbance | None, workers: Sequence[WorkerFacts], slo: Slo
) -> Summary:
    """The summary of a level with what LevelFinished says of its disturbance and its workers."""
    warning = disturbed(found, summary.verdict)
    added = (*(() if warning is None else (warning,)), *worker_warnings(workers, slo))
    return msgspec.structs.replace(summary, warnings=(*summary.warnings, *added))


def _is_steady(
    records: Sequence[RequestRecord], inside: Sequence[RequestRecord], window: Window, slo: Slo
) -> bool | None:
    """`records` are all of the level's, `inside` those due in the window."""
    if grows(*in_flight_at_ends(records, window)):
        return False
    ttft = [ttft_seconds(r) if outcome(r) == "ok" else None for r in inside]
    return is_steady(
        [r.due_seconds for r in inside],
        [math.inf if seconds is None else seconds for seconds in ttft],
        window.start_seconds,
        window.end_seconds,
        slo.ttft_seconds,
    )


def level_verdict(good: int, due: int, dispersion: float, slo: Slo, steady: bool | None) -> Verdict:
    """On effective counts; a level whose queue grows does not hold."""
    found = verdict(good, due, slo, dispersion)
    return "unresolved" if found == "holds" and steady is False else found

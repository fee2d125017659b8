"""One level of load as numbers: what was asked, counts, latencies, throughput, resources.

Requests due inside the window count, and are followed to their end; throughput counts the chunks
that arrive inside it. Failed and cut-off requests are infinitely late, never dropped.
`loadtests.metrics.level.summarise` makes the whole Summary. Rates are per second, times seconds,
shares 0..1.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise

import msgspec
import numpy as np

from loadtests.metrics.clustering import clumping, dispersion
from loadtests.metrics.distribution import Distribution, distribution, mean_of, runs_of
from loadtests.metrics.named_warning import NamedWarning
from loadtests.metrics.request_metrics import (
    e2e_seconds,
    failure_kind,
    first_chunk_tokens,
    is_good,
    itl_seconds,
    outcome,
    send_lag_seconds,
    tpot_seconds,
    ttft_seconds,
)
from loadtests.metrics.slo import Slo, Verdict
from loadtests.metrics.wilson import wilson
from loadtests.records.schema import RequestRecord, ResourceSample
from loadtests.workload.arrivals import Arrivals
from loadtests.workload.goodness_of_fit import ArrivalCheck, check

LATE_SECONDS = 0.001  # gaps between sends are not read finer than this


class Window(msgspec.Struct, frozen=True):
    """The measured part of a level: [start, end) in seconds since the level started."""

    start_seconds: float
    end_seconds: float

    @property
    def seconds(self) -> float:
        return self.end_seconds - self.start_seconds

    def holds(self, seconds: float) -> bool:
        return self.start_seconds <= seconds < self.end_seconds

    def due(self, records: Iterable[RequestRecord]) -> list[RequestRecord]:
        """The records due inside the window, in order of due time."""
        inside = (r for r in records if self.holds(r.due_seconds))
        return sorted(inside, key=lambda r: (r.due_seconds, r.index))


class Counts(msgspec.Struct, frozen=True, kw_only=True):
    """Requests due in the window, by outcome."""

    due: int
    ok: int
    failed: dict[str, int]  # kind -> requests
    good: int  # met the SLO
    attainment: float | None  # good / due
    attainment_low: float  # Wilson's bounds, each at the SLO's confidence, for effective counts
    attainment_high: float
    dispersion: float  # how many requests count as one
    runs: tuple[int, ...]  # lengths of runs of good, bad, good, ... in order of due time


class Latencies(msgspec.Struct, frozen=True, kw_only=True):
    """Times of the requests due in the window."""

    ttft: Distribution
    tpot: Distribution
    itl: Distribution
    e2e: Distribution
    send_lag: Distribution


class Throughput(msgspec.Struct, frozen=True, kw_only=True):
    """What arrived in the window. Tokens are None where the server did not count them."""

    offered_rate: float  # requests/s due
    goodput: float  # good requests/s
    output_tokens_per_second: float | None
    prompt_tokens_per_second: float | None
    mean_prompt_tokens: float | None
    mean_output_tokens: float | None
    mean_in_flight: float  # L: requests between due and end, time average
    littles_law: float | None  # lambda W; None where a request did not end


class Resources(msgspec.Struct, frozen=True, kw_only=True):
    """Processes during the window. CPU is a share of one core, mean over the window."""

    client_cpu_share: float | None
    engine_cpu_share: float | None
    engine_rss_bytes: int | None  # highest seen


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that is said about one level."""

    window: Window
    slo: str
    asked_rate: float | None  # requests/s; None: closed loop
    verdict: Verdict
    counts: Counts
    latencies: Latencies
    throughput: Throughput
    resources: Resources
    backends: dict[str, int]  # backend -> requests
    is_steady: bool | None = None  # False: a queue grew over the window; None: too few requests
    good_soon: int | None = None  # by slo.shown_in(window); None: that is the SLO itself
    grows_soon: bool = False  # by that limit TTFT grows too fast: it confirms nothing
    arrivals: ArrivalCheck | None = None  # None: closed loop, a ramp, or not known
    warnings: tuple[NamedWarning, ...] = ()

    @property
    def is_valid(self) -> bool:
        """False: the numbers are not the server's, and the level does not count in a search."""
        return not any(warning.is_serious for warning in self.warnings)


def counts_of(inside: Sequence[RequestRecord], slo: Slo, is_alone: bool = False) -> Counts:
    """`inside` are the records due in the window, in order of due time.

    `is_alone`: one at a time, so none shares its fate with another.
    """
    good = [is_good(r, slo) for r in inside]
    runs = runs_of(good)
    together = 1.0 if is_alone else counted_as_one(sum(good), len(good), runs)
    low, high = wilson(sum(good) / together, len(good) / together, slo.confidence)
    failed = Counter(kind for r in inside if (kind := failure_kind(r)) is not None)
    return Counts(
        due=len(inside),
        ok=len(inside) - failed.total(),
        failed=dict(sorted(failed.items())),
        good=sum(good),
        attainment=sum(good) / len(good) if good else None,
        attainment_low=low,
        attainment_high=high,
        dispersion=together,
        runs=runs,
    )


def is_one_at_a_time(inside: Sequence[RequestRecord]) -> bool:
    """No request met another."""
    return all(
        one.ended_seconds is not None and one.ended_seconds <= after.due_seconds + LATE_SECONDS
        for one, after in pairwise(inside)
    )


def counted_as_one(good: int, due: int, runs: Sequence[int]) -> float:
    """How many requests of a level count as one, by its own clusters of bad requests."""
    bad = due - good
    return dispersion((bad + 0.5) / (due + 1), clumping([(bad, due, runs)]))


def latencies_of(inside: Sequence[RequestRecord]) -> Latencies:
    """TTFT, TPOT and E2E of requests that are not ok are infinite; ITL is of every stream."""
    oks = [r for r in inside if outcome(r) == "ok"]
    late = len(inside) - len(oks)
    return Latencies(
        ttft=distribution((ttft_seconds(r) for r in oks), late=late),
        tpot=distribution((tpot_seconds(r) for r in oks), late=late),
        itl=distribution(gap for r in inside for gap in itl_seconds(r)),
        e2e=distribution((e2e_seconds(r) for r in oks), late=late),
        send_lag=distribution(send_lag_seconds(r) for r in inside),
    )


def throughput_of(
    records: Sequence[RequestRecord],
    inside: Sequence[RequestRecord],
    window: Window,
    counts: Counts,
) -> Throughput:
    """`records` are all of the level's, `inside` those due in the window."""
    oks = [r for r in inside if outcome(r) == "ok"]
    return Throughput(
        offered_rate=counts.due / window.seconds,
        goodput=counts.good / window.seconds,
        output_tokens_per_second=_output_tokens_per_second(records, window),
        prompt_tokens_per_second=_prompt_tokens_per_second(records, window),
        mean_prompt_tokens=mean_of(r.prompt_tokens for r in oks),
        mean_output_tokens=mean_of(r.output_tokens for r in oks),
        mean_in_flight=mean_in_flight(records, window),
        littles_law=_littles_law(inside, window),
    )


def resources_of(samples: Sequence[ResourceSample]) -> Resources:
    engines = [s.engine for s in samples if s.engine is not None]
    return Resources(
        client_cpu_share=mean_of(s.client.cpu_share for s in samples if s.client is not None),
        engine_cpu_share=mean_of(engine.cpu_share for engine in engines),
        engine_rss_bytes=max(
            (engine.rss_bytes for engine in engines if engine.rss_bytes is not None), default=None
        ),
    )


def backends_of(inside: Sequence[RequestRecord]) -> dict[str, int]:
    return dict(sorted(Counter(r.backend for r in inside if r.backend is not None).items()))


def arrivals_of(
    records: Sequence[RequestRecord], process: Arrivals | None, rate: float | None, window: Window
) -> ArrivalCheck | None:
    """How requests of all load generators left, from the level's start to the window's end.

    None for a ramp: its slope belongs to the whole level, of which this may be a part.
    """
    if process is None or rate is None:
        return None
    sent = [
        r.sent_seconds
        for r in records
        if r.sent_seconds is not None and r.due_seconds < window.end_seconds
    ]
    lags = [lag for r in records if (lag := send_lag_seconds(r)) is not None]
    late = max(LATE_SECONDS, float(np.quantile(lags, 0.99))) if lags else LATE_SECONDS
    return check(process, np.array(sent), rate, window.end_seconds, late)


def mean_in_flight(records: Iterable[RequestRecord], window: Window) -> float:
    """Time average of requests between due and end. One without an end stays to the window's."""
    total = 0.0
    for r in records:
        ended = window.end_seconds if r.ended_seconds is None else r.ended_seconds
        start = max(r.due_seconds, window.start_seconds)
        total += max(0.0, min(ended, window.end_seconds) - start)
    return total / window.seconds


def _output_tokens_per_second(records: Iterable[RequestRecord], window: Window) -> float | None:
    """The first chunk holds first_chunk_tokens, the others share the rest equally.

    Chunks of a stream that was cut off hold the mean tokens of those that were counted.
    """
    begun = [r for r in records if r.content_seconds]
    counted = [r for r in begun if r.output_tokens is not None]
    if begun and not counted:
        return None
    chunks = sum(len(r.content_seconds) for r in counted)
    usual = sum(r.output_tokens or 0 for r in counted) / chunks if chunks else 0.0
    tokens = 0.0
    for r in begun:
        stamps = r.content_seconds
        first: float = first_chunk_tokens(r) or usual
        later = usual
        if r.output_tokens is not None:
            later = (r.output_tokens - first) / max(1, len(stamps) - 1)
        arrived = bisect_left(stamps, window.end_seconds) - bisect_left(
            stamps, window.start_seconds
        )
        holds_first = window.holds(stamps[0])
        tokens += later * (arrived - holds_first) + first * holds_first
    return tokens / window.seconds


def _prompt_tokens_per_second(records: Iterable[RequestRecord], window: Window) -> float | None:
    """Each prompt counts when its first content arrives."""
    begun = [(r.first_content_seconds, r.prompt_tokens) for r in records]
    prompts = [(at, tokens) for at, tokens in begun if at is not None]
    if prompts and all(tokens is None for _, tokens in prompts):
        return None
    return sum(tokens or 0 for at, tokens in prompts if window.holds(at)) / window.seconds


def _littles_law(inside: Sequence[RequestRecord], window: Window) -> float | None:
    lasted = [r.ended_seconds - r.due_seconds for r in inside if r.ended_seconds is not None]
    if not lasted or len(lasted) < len(inside):
        return None
    return sum(lasted) / window.seconds

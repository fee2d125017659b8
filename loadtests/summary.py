"""One level of load as numbers: records and samples in a window -> Summary. Pure: the same records always give the same numbers.

    level = summarise(records, samples, Window(10.0, 70.0), PROMISES["chat"], rate=0.8)
    level.verdict, level.attainment, level.ttft.p99, [doubt.code for doubt in level.doubts]

Requests that are due inside the window count, and are followed to their end; throughput counts the chunks that arrive inside it. Failed,
refused and cut-off requests are infinitely late: they push percentiles up and are never dropped. A percentile is given only when at least
three observations lie beyond it (p99: 300 requests), else it is None.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence

import msgspec
import numpy as np

from loadtests import timings
from loadtests.arrivals import ArrivalCheck, Arrivals, Ramp, check
from loadtests.doubts import Doubt, level_doubts
from loadtests.records import RequestRecord, ResourceSample
from loadtests.slo import Promise, Verdict, verdict, wilson
from loadtests.timings import e2e_seconds, is_good, itl_seconds, outcome, send_lag_seconds, tpot_seconds, ttft_seconds

__all__ = [
    "Distribution", "Doubt", "Summary", "Window", "distribution", "e2e_seconds", "is_good", "itl_seconds", "send_lag_seconds",
    "summarise", "tpot_seconds", "ttft_seconds", "verdict", "warm_up_seconds",
]  # fmt: skip

PERCENTILES: tuple[tuple[str, float], ...] = (("p50", 0.50), ("p90", 0.90), ("p95", 0.95), ("p99", 0.99))
BEYOND = 3  # observations that must lie beyond a percentile for it to be given
BATCHES = 10
LATE_SECONDS = 0.001  # gaps between sends are not read finer than this
T_975_9 = 2.262  # Student's t for 95 % two-sided at BATCHES - 1 degrees of freedom


class Window(msgspec.Struct, frozen=True):
    """The measured part of a level: [start, end) in seconds since the level started."""

    start_seconds: float
    end_seconds: float

    @property
    def seconds(self) -> float:
        return self.end_seconds - self.start_seconds


class Distribution(msgspec.Struct, frozen=True, kw_only=True):
    """Percentiles (nearest rank) and mean of one time over `count` observations, of which `late` never came (infinitely late).

    None: too few observations, or, where the name is in `never`, so many of them never came that the percentile is not a finite time.
    The mean is over those that came; its 95 % interval is by batch means (queueing output is autocorrelated), None below 20.
    """

    count: int
    late: int
    mean: float | None = None
    mean_low: float | None = None
    mean_high: float | None = None
    p50: float | None = None
    p90: float | None = None
    p95: float | None = None
    p99: float | None = None
    never: tuple[str, ...] = ()


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that is said about one level. Rates per second, times in seconds, shares 0..1."""

    window: Window
    promise: str
    asked_rate: float | None  # requests/s; None: closed loop
    due: int
    offered_rate: float  # due / window
    sent: int
    ok: int
    failed: dict[str, int]  # kind -> requests
    good: int
    attainment: float | None  # good / due
    attainment_low: float  # Wilson's bounds, each at the promise's confidence
    attainment_high: float
    goodput: float  # good requests/s
    verdict: Verdict
    batches: tuple[tuple[int, int], ...]  # (good, due) in consecutive parts of the window
    runs: tuple[int, ...] = ()  # lengths of runs of good, bad, good, ... requests in order of their due times
    correlated: float | None = None  # how many consecutive latencies count as one
    ttft: Distribution
    tpot: Distribution
    itl: Distribution
    e2e: Distribution
    send_lag: Distribution
    output_tokens_per_second: float | None
    prompt_tokens_per_second: float | None
    mean_prompt_tokens: float | None
    mean_output_tokens: float | None
    cached_share: float | None  # of prompt tokens
    mean_in_flight: float  # L, by integration over the window
    littles_law: float | None  # lambda W
    client_cpu_share: float | None  # of one core, mean over the window
    engine_cpu_share: float | None
    engine_rss_bytes: int | None  # highest seen
    backends: dict[str, int]
    arrivals: ArrivalCheck | None = None  # how requests left, held against the process that was asked; None: closed loop, or not known
    doubts: tuple[Doubt, ...]

    @property
    def is_valid(self) -> bool:
        """False when a doubt says that the numbers are not those of the server: such a level does not count in a search."""
        return not any(doubt.invalidates for doubt in self.doubts)


def summarise(
    records: Sequence[RequestRecord],
    samples: Iterable[ResourceSample],
    window: Window,
    promise: Promise,
    *,
    rate: float | None = None,
    started_unix_seconds: float | None = None,
    client_processes: int = 1,
    arrivals: Arrivals | None = None,
) -> Summary:
    """Numbers of one level.

    `records` are all of the level's, also those due outside the window. `samples` count when they fall into the window, where
    `started_unix_seconds` says when the level began (else all of them count). `rate` is the asked rate; None for closed loop.
    `arrivals` is the process that due times were drawn from: how requests left is tested against it. Raises ValueError for an empty window.
    """
    if not window.seconds > 0:
        raise ValueError(f"window must be longer than 0 s, got {window.start_seconds} to {window.end_seconds}")
    inside = sorted(
        (r for r in records if window.start_seconds <= r.due_seconds < window.end_seconds), key=lambda r: (r.due_seconds, r.index)
    )
    seen = [s for s in samples if started_unix_seconds is None or _falls_into(s, window, started_unix_seconds)]
    good = [is_good(r, promise) for r in inside]
    oks = [r for r in inside if outcome(r) == "ok"]
    low, high = wilson(sum(good), len(good), promise.confidence)
    late = len(inside) - len(oks)
    e2e = distribution([e2e_seconds(r) for r in oks], late=late)
    summary = Summary(
        window=window,
        promise=promise.name,
        asked_rate=rate,
        due=len(inside),
        offered_rate=len(inside) / window.seconds,
        sent=sum(r.sent_seconds is not None for r in inside),
        ok=len(oks),
        failed=dict(sorted(Counter(kind for r in inside if (kind := timings.failure_kind(r)) is not None).items())),
        good=sum(good),
        attainment=sum(good) / len(good) if good else None,
        attainment_low=low,
        attainment_high=high,
        goodput=sum(good) / window.seconds,
        verdict=verdict(sum(good), len(good), promise),
        batches=batch_counts([r.due_seconds for r in inside], good, window),
        runs=runs_of(good),
        correlated=max(
            (c for c in (correlation([ttft_seconds(r) for r in oks]), correlation([tpot_seconds(r) for r in oks])) if c), default=None
        ),
        ttft=distribution([ttft_seconds(r) for r in oks], late=late),
        tpot=distribution([tpot_seconds(r) for r in oks]),
        itl=distribution([gap for r in inside for gap in itl_seconds(r)]),
        e2e=e2e,
        send_lag=distribution([send_lag_seconds(r) for r in inside]),
        output_tokens_per_second=output_throughput(records, window),
        prompt_tokens_per_second=prompt_throughput(records, window),
        mean_prompt_tokens=_mean([r.prompt_tokens for r in oks]),
        mean_output_tokens=_mean([r.output_tokens for r in oks]),
        cached_share=_cached_share(oks),
        mean_in_flight=mean_in_flight(records, window),
        littles_law=_littles_law(inside, window),
        client_cpu_share=_mean([s.client.cpu_share for s in seen if s.client is not None]),
        engine_cpu_share=_mean([s.engine.cpu_share for s in seen if s.engine is not None]),
        engine_rss_bytes=max((s.engine.rss_bytes for s in seen if s.engine is not None and s.engine.rss_bytes is not None), default=None),
        backends=dict(sorted(Counter(r.backend for r in inside if r.backend is not None).items())),
        arrivals=_arrivals(records, arrivals, rate, window),
        doubts=(),
    )
    return msgspec.structs.replace(summary, doubts=level_doubts(summary, inside, records, seen, promise, client_processes))


def distribution(values: Iterable[float | None], late: int = 0) -> Distribution:
    """Percentiles of the values that are known, plus `late` observations at infinity. The values stay in their order in time."""
    known = np.array([value for value in values if value is not None], dtype=np.float64)
    count = len(known) + late
    ordered = np.sort(known)
    found: dict[str, float] = {}
    never: list[str] = []
    for name, share in PERCENTILES:
        if count * (1 - share) < BEYOND - 1e-9:
            continue
        rank = math.ceil(share * count - 1e-9) - 1
        if rank < len(ordered):
            found[name] = float(ordered[rank])
        else:
            never.append(name)
    mean_low, mean_high = _batch_means(known)
    return Distribution(
        count=count,
        late=late,
        mean=float(known.mean()) if len(known) else None,
        mean_low=mean_low,
        mean_high=mean_high,
        never=tuple(never),
        **found,
    )


def _batch_means(values: np.ndarray[tuple[int], np.dtype[np.float64]]) -> tuple[float | None, float | None]:
    """95 % interval of a mean from the means of ten consecutive batches (Law & Kelton): right where neighbours are alike."""
    if len(values) < 2 * BATCHES:
        return None, None
    means = np.array([batch.mean() for batch in np.array_split(values, BATCHES)])
    half = T_975_9 * float(means.std(ddof=1)) / math.sqrt(BATCHES)
    centre = float(values.mean())
    return centre - half, centre + half


def batch_counts(due_seconds: Sequence[float], good: Sequence[bool], window: Window) -> tuple[tuple[int, int], ...]:
    """(good, due) in ten equal parts of the window."""
    counts = [[0, 0] for _ in range(BATCHES)]
    for due, is_it in zip(due_seconds, good, strict=True):
        part = min(BATCHES - 1, int((due - window.start_seconds) / window.seconds * BATCHES))
        counts[part][0] += bool(is_it)
        counts[part][1] += 1
    return tuple((g, d) for g, d in counts)


def runs_of(good: Iterable[bool]) -> tuple[int, ...]:
    """Lengths of the runs of good, bad, good, ... requests; the first is 0 where the first request was bad."""
    lengths, current = [0], True
    for is_good_one in good:
        if is_good_one != current:
            lengths.append(0)
            current = is_good_one
        lengths[-1] += 1
    return tuple(lengths)


def correlation(values: Iterable[float | None]) -> float | None:
    """How many consecutive values count as one: variance of batch means times batch length over the variance. 1: independent.

    None below 20 values, or where all are the same.
    """
    known = np.array([value for value in values if value is not None], dtype=np.float64)
    length = len(known) // BATCHES
    if length < 2 or np.ptp(known) == 0:
        return None
    means = known[: length * BATCHES].reshape(BATCHES, length).mean(axis=1)
    return float(length * means.var(ddof=1) / known.var())


def output_throughput(records: Iterable[RequestRecord], window: Window) -> float | None:
    """Output tokens per second by the stamps of the chunks that arrived in the window; None where tokens were not counted.

    The first chunk holds first_chunk_tokens, the others share the rest equally. A stream that was cut off has no count: its chunks hold as
    many tokens each as those of the streams that were counted.
    """
    records = [r for r in records if r.content_seconds]
    counted = [r for r in records if r.output_tokens is not None]
    if records and not counted:
        return None
    chunks = sum(len(r.content_seconds) for r in counted)
    usual = sum(r.output_tokens or 0 for r in counted) / chunks if chunks else 0.0
    tokens = 0.0
    for r in records:
        first: float = timings.first_chunk_tokens(r) or usual
        later = usual if r.output_tokens is None else (r.output_tokens - first) / max(1, len(r.content_seconds) - 1)
        stamps = r.content_seconds  # in order
        inside = bisect_left(stamps, window.end_seconds) - bisect_left(stamps, window.start_seconds)
        begun = window.start_seconds <= stamps[0] < window.end_seconds
        tokens += later * (inside - begun) + first * begun
    return tokens / window.seconds


def prompt_throughput(records: Iterable[RequestRecord], window: Window) -> float | None:
    """Prompt tokens per second, each prompt counted when its first content arrived; None where prompts were not counted."""
    begun = [r for r in records if r.first_content_seconds is not None]
    if begun and all(r.prompt_tokens is None for r in begun):
        return None
    inside = (r for r in begun if window.start_seconds <= (r.first_content_seconds or 0.0) < window.end_seconds)
    return sum(r.prompt_tokens or 0 for r in inside) / window.seconds


def mean_in_flight(records: Iterable[RequestRecord], window: Window) -> float:
    """Time average of the number of requests between due and end, over the window. A request without an end stays to the window's end."""
    total = 0.0
    for r in records:
        start = max(r.due_seconds, window.start_seconds)
        end = min(r.ended_seconds if r.ended_seconds is not None else window.end_seconds, window.end_seconds)
        total += max(0.0, end - start)
    return total / window.seconds


def warm_up_seconds(records: Sequence[RequestRecord], end_seconds: float) -> float:
    """How much to cut from the start of a level by MSER-5 (White 1997) on E2E in order of due time.

    Means of five requests; the cut minimises the standard error of the mean of what is left, searched over the first half. Requests that
    never ended count as having lasted to `end_seconds`. 0.0 when there are fewer than 20 requests: too few to tell.
    """
    ordered = sorted(records, key=lambda r: r.due_seconds)
    if len(ordered) < 20:
        return 0.0
    lasted = np.array([max(0.0, (e if (e := e2e_seconds(r)) is not None else end_seconds - r.due_seconds)) for r in ordered])
    fives = lasted[: len(lasted) // 5 * 5].reshape(-1, 5).mean(axis=1)
    errors = [float(fives[cut:].var()) / (len(fives) - cut) for cut in range(len(fives) // 2 + 1)]
    cut = int(np.argmin(errors))
    return 0.0 if cut == 0 else ordered[cut * 5].due_seconds


def _arrivals(records: Sequence[RequestRecord], process: Arrivals | None, rate: float | None, window: Window) -> ArrivalCheck | None:
    """From the level's start to the window's end, by the moments at which requests left: all load generators together."""
    if (
        process is None or rate is None or isinstance(process, Ramp)
    ):  # a ramp's slope belongs to the whole level, of which this may be a part
        return None
    sent = [r.sent_seconds for r in records if r.sent_seconds is not None and r.due_seconds < window.end_seconds]
    lags = [lag for r in records if (lag := send_lag_seconds(r)) is not None]
    late = max(LATE_SECONDS, float(np.quantile(lags, 0.99))) if lags else LATE_SECONDS
    return check(process, np.array(sent), rate, window.end_seconds, late)


def _littles_law(inside: Sequence[RequestRecord], window: Window) -> float | None:
    lasted = [r.ended_seconds - r.due_seconds for r in inside if r.ended_seconds is not None]
    if not lasted or len(lasted) < len(inside):
        return None
    return len(inside) / window.seconds * (sum(lasted) / len(lasted))


def _cached_share(records: Sequence[RequestRecord]) -> float | None:
    counted = [r for r in records if r.cached_tokens is not None and r.prompt_tokens]
    prompts = sum(r.prompt_tokens or 0 for r in counted)
    return sum(r.cached_tokens or 0 for r in counted) / prompts if prompts else None


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _falls_into(sample: ResourceSample, window: Window, started_unix_seconds: float) -> bool:
    return window.start_seconds <= sample.unix_seconds - started_unix_seconds < window.end_seconds

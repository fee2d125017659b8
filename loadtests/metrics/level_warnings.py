"""Warnings about one level, computed with its numbers. A serious one leaves the level out."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence

import msgspec

from loadtests.metrics.distribution import mean_of
from loadtests.metrics.disturbance import in_words, is_slight, steadily_in_words
from loadtests.metrics.level_summary import Summary
from loadtests.metrics.named_warning import NamedWarning, Severity
from loadtests.metrics.request_metrics import outcome, send_lag_seconds
from loadtests.metrics.slo import Slo, Verdict, requests_to_hold
from loadtests.metrics.stationarity import grows, in_flight_at_ends
from loadtests.records.schema import Disturbance, RequestRecord, ResourceSample
from models import formatting

CLIENT_BUSY_SHARE = 0.80  # of one core
LATE_SHARE = 0.01  # p99 send lag / median TTFT
LATE_FLOOR_SECONDS = 0.001  # below the resolution that any latency here is read at
SWAP_GROWTH_BYTES = 16 << 20
STOLEN_SHARE = 0.02
THROTTLED_SHARE = 0.02
SHORT_SHARE = 0.01
PROMPTS_OFF_SHARE = 0.02
LEAST_FOR_LITTLES_LAW = 20

LATE_SENDS = "LateSends"
DISTURBED = "Disturbed"
NOTE, WARNING, SERIOUS = Severity.NOTE, Severity.WARNING, Severity.SERIOUS


class Evidence(msgspec.Struct, frozen=True):
    """What a level's warnings are read from."""

    summary: Summary  # without warnings
    inside: Sequence[RequestRecord]  # due in the window
    records: Sequence[RequestRecord]  # all of the level's
    samples: Sequence[ResourceSample]  # taken in the window
    slo: Slo


def level_warnings(level: Evidence) -> tuple[NamedWarning, ...]:
    """All warnings about one level, in the order of WARNINGS."""
    return tuple(found for warning in WARNINGS if (found := warning(level)) is not None)


def too_few_samples(level: Evidence) -> NamedWarning | None:
    counts = level.summary.counts
    if level.summary.verdict != "unresolved":
        return None
    if level.summary.is_steady is False:
        return None
    return NamedWarning(
        "TooFewSamples",
        NOTE,
        f"{counts.good} of {counts.due} requests were good: too few to say whether "
        f"{level.slo.target:.4g} of them are",
        f"measure longer: a level needs at least {requests_to_hold(level.slo)} requests, "
        "all good, to hold",
    )


def generator_busy(level: Evidence) -> NamedWarning | None:
    """A process that computes most of the time reads answers late; late_sends judges the rest.

    Each of several is judged by itself (worker_warnings).
    """
    share = level.summary.resources.client_cpu_share
    is_alone = len({r.worker or 0 for r in level.records}) < 2
    if not is_alone or share is None or share <= CLIENT_BUSY_SHARE:
        return None
    return NamedWarning(
        "GeneratorBusy",
        SERIOUS,
        f"the load generator used {share:.0%} of a core: more than {CLIENT_BUSY_SHARE:.0%}",
        "give it more processes or cores, or a machine of its own",
    )


def late_sends(level: Evidence) -> NamedWarning | None:
    """Serious only above 1 % of the TTFT limit: below, a late send decides no request."""
    lag = longest_send_lag(level.inside)
    median = level.summary.latencies.ttft.median_or_mean
    if lag is None or median is None or lag <= max(LATE_SHARE * median, LATE_FLOOR_SECONDS):
        return None
    return NamedWarning(
        LATE_SENDS,
        SERIOUS if late_sends_decide(lag, level.slo.ttft_seconds) else WARNING,
        f"requests left {formatting.seconds(lag, 3)} after they were due (p99), more than "
        f"{LATE_SHARE:.0%} of the median TTFT, {formatting.seconds(median, 3)}",
        "give the load generator a core of its own or more processes",
    )


def longest_send_lag(inside: Sequence[RequestRecord]) -> float | None:
    """p99 of the send lag in seconds, nearest rank, of the load generator that has the longest.

    None where nothing was sent.
    """
    lags: dict[int, list[float]] = defaultdict(list)
    for r in inside:
        if (lag := send_lag_seconds(r)) is not None:
            lags[r.worker or 0].append(lag)
    return max((sorted(own)[math.ceil(0.99 * len(own)) - 1] for own in lags.values()), default=None)


def late_sends_decide(lag_seconds: float, ttft_limit_seconds: float | None) -> bool:
    """Whether so late a send may decide whether a request is good."""
    return ttft_limit_seconds is None or lag_seconds > LATE_SHARE * ttft_limit_seconds


def unsent(level: Evidence) -> NamedWarning | None:
    never_sent = sum(r.sent_seconds is None for r in level.inside)
    if not never_sent:
        return None
    return NamedWarning(
        "Unsent",
        WARNING,
        f"{never_sent} of {len(level.inside)} requests were due and never left",
        "see the errors on their records: no connection, or a level that was cut off",
    )


def swapping(level: Evidence) -> NamedWarning | None:
    """Not serious: the answers that paging made late are bad, and count."""
    used = [s.swap_used_bytes for s in level.samples if s.swap_used_bytes is not None]
    if len(used) < 2 or max(used) - used[0] < SWAP_GROWTH_BYTES:
        return None
    return NamedWarning(
        "Swapping",
        WARNING,
        f"swap in use grew by {formatting.size(max(used) - used[0])} during the level",
        "use a smaller model or format, fewer slots, or free memory",
    )


def unsteady(level: Evidence) -> NamedWarning | None:
    summary = level.summary
    first, last = in_flight_at_ends(level.records, summary.window)
    if grows(first, last):
        seen = f"requests in flight rose from {first:.1f} to {last:.1f} over the level"
    elif summary.is_steady is False:
        seen = "TTFT grew over the level"
    else:
        return None
    return NamedWarning(
        "Unsteady",
        WARNING,
        f"{seen}: the server does not keep up",
        "the times depend on how long the level lasted; measure longer, or at a lower rate",
    )


def fell_back(level: Evidence) -> NamedWarning | None:
    backends = level.summary.backends
    if len(backends) < 2:
        return None
    seen = ", ".join(f"{name} ({count})" for name, count in backends.items())
    return NamedWarning(
        "FellBack",
        SERIOUS,
        f"answers came from more than one backend: {seen}",
        "see the server's placement",
    )


def littles_law(level: Evidence) -> NamedWarning | None:
    """The two ends of the window differ by about sqrt(L) requests, each for about W."""
    throughput = level.summary.throughput
    product = throughput.littles_law
    if product is None or level.summary.counts.due < LEAST_FOR_LITTLES_LAW:
        return None
    ends = math.sqrt(2.0 * (product + 1.0)) * product / throughput.offered_rate
    allowed = 0.10 * product + 3.0 * ends / level.summary.window.seconds
    if abs(throughput.mean_in_flight - product) <= allowed:
        return None
    return NamedWarning(
        "LittlesLaw",
        WARNING,
        f"{throughput.mean_in_flight:.2f} requests were in flight on average, "
        f"and rate x time in system says {product:.2f}",
        "the level was not steady: measure longer, or cut more warm-up",
    )


def tokens_unknown(level: Evidence) -> NamedWarning | None:
    oks = [r for r in level.inside if outcome(r) == "ok"]
    unknown = sum(r.output_tokens is None for r in oks)
    if not unknown:
        return None
    return NamedWarning(
        "TokensUnknown",
        WARNING,
        f"{unknown} of {len(oks)} answers came without a token count: "
        "chunks stand for tokens in their TPOT",
        "ask the endpoint for usage in its stream (stream_options.include_usage)",
    )


def short_answers(level: Evidence) -> NamedWarning | None:
    pairs = [
        (r.output_tokens, r.asked_output_tokens)
        for r in level.inside
        if outcome(r) == "ok" and r.output_tokens is not None and r.asked_output_tokens is not None
    ]
    short = sum(came < asked for came, asked in pairs)
    if short <= SHORT_SHARE * len(pairs):
        return None
    return NamedWarning(
        "ShortAnswers",
        WARNING,
        f"{short} of {len(pairs)} answers were shorter than asked: "
        "the load is lighter than the workload says",
        "the endpoint ignores ignore_eos or min_tokens, or has a lower limit of its own",
    )


def stand_ins(level: Evidence) -> NamedWarning | None:
    later = [r for r in level.inside if r.turn]
    count = sum(r.stand_in for r in later)
    if not count:
        return None
    return NamedWarning(
        "StandIns",
        WARNING,
        f"{count} of {len(later)} later turns were due before the answer that they continue: "
        "filler of the same length was sent in its place",
        "the server has not seen that text: less of the prompt is reused; raise think_seconds",
    )


def prompts_off(level: Evidence) -> NamedWarning | None:
    pairs = [
        (r.prompt_tokens, r.asked_prompt_tokens)
        for r in level.inside
        if r.prompt_tokens is not None and r.asked_prompt_tokens
    ]
    counted = sum(pair[0] for pair in pairs)
    asked = sum(pair[1] for pair in pairs)
    if abs(counted - asked) <= PROMPTS_OFF_SHARE * asked:
        return None
    return NamedWarning(
        "PromptsOff",
        WARNING,
        f"the server counted {counted / len(pairs):.0f} tokens per prompt, "
        f"{asked / len(pairs):.0f} were asked",
        "prompts were made without the server's tokenizer, or its chat template adds tokens",
    )


def rate_off(level: Evidence) -> NamedWarning | None:
    """The count of a Poisson level varies by its square root: three of these are allowed."""
    summary = level.summary
    if summary.asked_rate is None:
        return None
    expected = summary.asked_rate * summary.window.seconds
    if abs(summary.counts.due - expected) <= 3.0 * math.sqrt(expected) + 1.0:
        return None
    return NamedWarning(
        "RateOff",
        NOTE,
        f"{summary.throughput.offered_rate:.3g} requests/s were due, "
        f"{summary.asked_rate:.3g} were asked",
        "read the rate as it came out; bursty arrivals need longer levels",
    )


def arrivals_off(level: Evidence) -> NamedWarning | None:
    """One honest level in about 500 shows this by chance."""
    found = level.summary.arrivals
    if found is None or found.as_asked is not False:
        return None
    measures = (("CV of gaps", found.cv), ("lag-1", found.lag1), ("KS p", found.ks_p))
    parts = [f"{name} {value:.3g}" for name, value in measures if value is not None]
    parts += [f"dispersion {d.index:.2f} at {d.window_seconds:g} s" for d in found.dispersion[-1:]]
    return NamedWarning(
        "ArrivalsOff",
        WARNING,
        f"requests did not leave as the arrival process says ({found.against}): {', '.join(parts)}",
        "see the send lag; where it is small, this may be chance: repeat the level",
    )


def cpu_stolen(level: Evidence) -> NamedWarning | None:
    mean = mean_of(s.steal_share for s in level.samples) or 0.0
    if mean <= STOLEN_SHARE:
        return None
    return NamedWarning(
        "CpuStolen",
        WARNING,
        f"the hypervisor gave {mean:.1%} of this machine's CPU time to others during the level",
        "the server was slower than it is; use a quieter host, or a machine of one's own",
    )


def throttled(level: Evidence) -> NamedWarning | None:
    mean = mean_of(s.quota_share for s in level.samples) or 0.0
    held = [s for s in level.samples if s.gpu_throttled]
    parts = []
    if mean > THROTTLED_SHARE:
        parts.append(
            f"the control group's CPU quota held processes back for {mean:.1%} of the time"
        )
    if len(held) > THROTTLED_SHARE * len(level.samples):
        why = ", ".join(sorted({reason for s in held for reason in s.gpu_throttled or ()}))
        told = [s for s in level.samples if s.gpu_throttled is not None]
        watts = mean_of(s.gpu_watts for s in held)
        at = f" at {watts:.0f} W" if watts is not None else ""
        parts.append(
            f"the GPU's clock was held down in {len(held)} of {len(told)} samples{at} ({why})"
        )
    if not parts:
        return None
    return NamedWarning(
        "Throttled",
        WARNING,
        " and ".join(parts),
        "raise the quota, the power cap or the cooling, or read the result as that of this limit",
    )


WARNINGS: tuple[Callable[[Evidence], NamedWarning | None], ...] = (
    too_few_samples,
    generator_busy,
    late_sends,
    unsent,
    swapping,
    unsteady,
    fell_back,
    littles_law,
    tokens_unknown,
    short_answers,
    stand_ins,
    prompts_off,
    rate_off,
    arrivals_off,
    cpu_stolen,
    throttled,
)


def disturbed(found: Disturbance | None, word: Verdict) -> NamedWarning | None:
    """Serious, unless the level holds all the same, or the campaign takes the machine as it is.
    Steady steal is of the machine."""
    if found is None:
        return None
    if not found.is_disturbed:
        if found.steady_steal_share is None:
            return None
        return NamedWarning(
            "SteadySteal",
            WARNING,
            steadily_in_words(found.steady_steal_share),
            "for the capacity of the whole cores use a host that is not shared",
        )
    if word == "holds" and is_slight(found) and not found.counts:
        return NamedWarning(
            DISTURBED,
            WARNING,
            f"{in_words(found)}; the level holds all the same, so it counts",
            "the latencies are not the server's: for those measure on a quiet machine",
        )
    return NamedWarning(
        DISTURBED,
        WARNING if found.counts else SERIOUS,
        in_words(found),
        "the numbers are not the server's: measure on a quiet machine, or take this one as it is "
        'with disturbance = "ignore" in the campaign',
    )

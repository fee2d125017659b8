"""Named doubts about a level, carried beside its numbers: what was seen, and what to do about it.

A doubt that `invalidates` says that the numbers are not those of the server (the client was late, the machine swapped): the level does not
count in a search. The others are to be read beside the number.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import msgspec

from loadtests.records import RequestRecord, ResourceSample
from loadtests.slo import Promise, requests_to_hold
from loadtests.timings import outcome, send_lag_seconds

if TYPE_CHECKING:
    from loadtests.summary import Summary

Code = Literal[
    "TooFewSamples", "GeneratorBusy", "LateSends", "Unsent", "Swapping", "Unsteady", "FellBack", "LittlesLaw", "TokensUnknown",
    "ShortAnswers", "PromptsOff", "RateOff", "ArrivalsOff", "CpuStolen", "Throttled",
]  # fmt: skip

CLIENT_BUSY_SHARE = 0.80  # of one core per load generator process
LATE_SHARE = 0.01  # p99 send lag / median TTFT
LATE_FLOOR_SECONDS = 0.001  # below the resolution that any latency here is read at
SWAP_GROWTH_BYTES = 16 << 20
STOLEN_SHARE = 0.02
THROTTLED_SHARE = 0.02


class Doubt(msgspec.Struct, frozen=True):
    """One reason to distrust a number."""

    code: Code
    text: str
    advice: str
    invalidates: bool = False


def level_doubts(
    summary: Summary,
    inside: Sequence[RequestRecord],
    records: Sequence[RequestRecord],
    samples: Sequence[ResourceSample],
    promise: Promise,
    client_processes: int = 1,
) -> tuple[Doubt, ...]:
    """All doubts about one level, in a fixed order. `inside` are the records due in the window, `records` all of the level's."""
    found = [
        _too_few(summary, promise),
        _generator_busy(summary, client_processes),
        _late_sends(summary, inside, promise),
        _unsent(inside),
        _swapping(samples),
        _unsteady(summary, records),
        _fell_back(summary),
        _littles_law(summary),
        _tokens_unknown(inside),
        _short_answers(inside),
        _prompts_off(inside),
        _rate_off(summary),
        _arrivals_off(summary),
        _cpu_stolen(samples),
        _throttled(samples),
    ]
    return tuple(doubt for doubt in found if doubt is not None)


def _too_few(summary: Summary, promise: Promise) -> Doubt | None:
    if summary.verdict != "unresolved":
        return None
    return Doubt(
        "TooFewSamples",
        f"{summary.good} of {summary.due} requests were good: too few to say whether {promise.target:.4g} of them are",
        f"measure longer: at least {requests_to_hold(promise)} requests are needed, all good, to say that a level holds",
    )


def _generator_busy(summary: Summary, client_processes: int) -> Doubt | None:
    share = summary.client_cpu_share
    if share is None or share <= CLIENT_BUSY_SHARE * client_processes:
        return None
    return Doubt(
        "GeneratorBusy",
        f"the load generator used {share:.2f} cores of its {client_processes}: more than {CLIENT_BUSY_SHARE:.0%}",
        "give it more processes or cores, or a machine of its own",
        invalidates=True,
    )


def _late_sends(summary: Summary, inside: Sequence[RequestRecord], promise: Promise) -> Doubt | None:
    """A late send can only make an answer look later, as times count from when it was due: under 1 % of the promise it decides nothing."""
    lags = sorted(lag for r in inside if (lag := send_lag_seconds(r)) is not None)
    if not lags:
        return None
    lag = lags[math.ceil(0.99 * len(lags)) - 1]  # by nearest rank whatever the number: a guard, not a result
    median = summary.ttft.p50 if summary.ttft.p50 is not None else summary.ttft.mean
    if median is None or lag <= max(LATE_SHARE * median, LATE_FLOOR_SECONDS):
        return None
    return Doubt(
        "LateSends",
        f"requests left {lag * 1e3:.3g} ms after they were due (p99), more than {LATE_SHARE:.0%} of the median TTFT, {median * 1e3:.3g} ms",
        "give the load generator a core of its own or more processes",
        invalidates=promise.ttft_seconds is None or lag > LATE_SHARE * promise.ttft_seconds,
    )


def _unsent(inside: Sequence[RequestRecord]) -> Doubt | None:
    unsent = sum(r.sent_seconds is None for r in inside)
    if not unsent:
        return None
    return Doubt(
        "Unsent",
        f"{unsent} of {len(inside)} requests were due and never left",
        "see the errors on their records: a connection that cannot be made, or a level that was cut off",
    )


def _swapping(samples: Sequence[ResourceSample]) -> Doubt | None:
    used = [s.swap_used_bytes for s in samples if s.swap_used_bytes is not None]
    if len(used) < 2 or max(used) - used[0] < SWAP_GROWTH_BYTES:
        return None
    return Doubt(
        "Swapping",
        f"swap in use grew by {(max(used) - used[0]) / 2**20:.0f} MiB during the level",
        "use a smaller model or format, fewer slots, or free memory",
        invalidates=True,
    )


def _unsteady(summary: Summary, records: Sequence[RequestRecord]) -> Doubt | None:
    """More in flight in the last third than in the first, by more than a queue in balance would wander."""
    from loadtests.summary import Window, mean_in_flight

    third = summary.window.seconds / 3
    start = summary.window.start_seconds
    first = mean_in_flight(records, Window(start, start + third))
    last = mean_in_flight(records, Window(summary.window.end_seconds - third, summary.window.end_seconds))
    if last - first <= 2.0 + 3.0 * math.sqrt(first + 1.0):
        return None
    return Doubt(
        "Unsteady",
        f"requests in flight rose from {first:.1f} to {last:.1f} over the level: the server does not keep up",
        "the times depend on how long the level lasted; read the verdict, not the percentiles",
    )


def _fell_back(summary: Summary) -> Doubt | None:
    if len(summary.backends) < 2:
        return None
    seen = ", ".join(f"{name} ({count})" for name, count in summary.backends.items())
    return Doubt("FellBack", f"answers came from more than one backend: {seen}", "see the server's placement", invalidates=True)


def _littles_law(summary: Summary) -> Doubt | None:
    if summary.littles_law is None or summary.due < 20:
        return None
    in_flight, product = summary.mean_in_flight, summary.littles_law
    # What is in flight at the two ends of the window is in one and not in the other: about sqrt(L) requests, each for about W.
    lasted = product / summary.offered_rate
    allowed = 0.10 * product + 3.0 * math.sqrt(2.0 * (product + 1.0)) * lasted / summary.window.seconds
    if abs(in_flight - product) <= allowed:
        return None
    return Doubt(
        "LittlesLaw",
        f"{in_flight:.2f} requests were in flight on average, and rate x time in system says {product:.2f}",
        "the level was not steady: measure longer, or cut more warm-up",
    )


def _tokens_unknown(inside: Sequence[RequestRecord]) -> Doubt | None:
    oks = [r for r in inside if outcome(r) == "ok"]
    unknown = sum(r.output_tokens is None for r in oks)
    if not unknown:
        return None
    return Doubt(
        "TokensUnknown",
        f"{unknown} of {len(oks)} answers came without a token count: chunks stand for tokens in their TPOT",
        "ask the endpoint for usage in its stream (stream_options.include_usage)",
    )


def _short_answers(inside: Sequence[RequestRecord]) -> Doubt | None:
    asked = [r for r in inside if outcome(r) == "ok" and r.output_tokens is not None and r.asked_output_tokens is not None]
    short = sum((r.output_tokens or 0) < (r.asked_output_tokens or 0) for r in asked)
    if not asked or short <= 0.01 * len(asked):
        return None
    return Doubt(
        "ShortAnswers",
        f"{short} of {len(asked)} answers were shorter than asked: the load is lighter than the workload says",
        "the endpoint does not honour ignore_eos or min_tokens, or has a lower limit of its own",
    )


def _prompts_off(inside: Sequence[RequestRecord]) -> Doubt | None:
    pairs = [(r.prompt_tokens, r.asked_prompt_tokens) for r in inside if r.prompt_tokens is not None and r.asked_prompt_tokens]
    if not pairs:
        return None
    told = sum(pair[0] for pair in pairs)
    asked = sum(pair[1] for pair in pairs)
    if abs(told - asked) <= 0.02 * asked:
        return None
    return Doubt(
        "PromptsOff",
        f"the server counted {told / len(pairs):.0f} tokens per prompt, {asked / len(pairs):.0f} were asked",
        "prompts were made without the server's tokenizer, or its chat template adds tokens",
    )


def _rate_off(summary: Summary) -> Doubt | None:
    """The count of a Poisson level varies by its square root; beyond three of these the load was not what was asked."""
    if summary.asked_rate is None:
        return None
    expected = summary.asked_rate * summary.window.seconds
    if abs(summary.due - expected) <= 3.0 * math.sqrt(expected) + 1.0:
        return None
    return Doubt(
        "RateOff",
        f"{summary.offered_rate:.3g} requests/s were due, {summary.asked_rate:.3g} were asked",
        "read the rate as it came out; bursty arrivals need longer levels",
    )


def _arrivals_off(summary: Summary) -> Doubt | None:
    """Of honest levels one in about 500 shows this by chance."""
    found = summary.arrivals
    if found is None or found.as_asked is not False:
        return None
    parts = [
        f"{name} {value:.3g}"
        for name, value in (("CV of gaps", found.cv), ("lag-1", found.lag1), ("KS p", found.ks_p))
        if value is not None
    ]
    parts += [f"dispersion {d.index:.2f} at {d.window_seconds:g} s" for d in found.dispersion[-1:]]
    return Doubt(
        "ArrivalsOff",
        f"requests did not leave as the arrival process says ({found.against}): {', '.join(parts)}",
        "see the send lag; where it is small, this may be chance: repeat the level",
    )


def _cpu_stolen(samples: Sequence[ResourceSample]) -> Doubt | None:
    shares = [s.steal_share for s in samples if s.steal_share is not None]
    if not shares or (mean := sum(shares) / len(shares)) <= STOLEN_SHARE:
        return None
    return Doubt(
        "CpuStolen",
        f"the hypervisor gave {mean:.1%} of this machine's CPU time to others during the level",
        "the server was slower than it is; measure when the host is quieter, or on a machine of one's own",
    )


def _throttled(samples: Sequence[ResourceSample]) -> Doubt | None:
    quota = [s.quota_share for s in samples if s.quota_share is not None]
    held = [s for s in samples if s.gpu_throttled]
    parts = []
    if quota and sum(quota) / len(quota) > THROTTLED_SHARE:
        parts.append(f"the control group's CPU quota held processes back for {sum(quota) / len(quota):.1%} of the time")
    if len(held) > THROTTLED_SHARE * len(samples):
        why = sorted({reason for s in held for reason in s.gpu_throttled})
        parts.append(f"the GPU's clock was held down in {len(held)} of {len(samples)} samples ({', '.join(why)})")
    if not parts:
        return None
    return Doubt(
        "Throttled", " and ".join(parts), "raise the quota, the power cap or the cooling, or read the result as that of this limit"
    )

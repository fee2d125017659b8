"""Reasons to read a level with care: a table of rules. A serious one leaves the level out.

    for warning in level_warnings(level, slo, run.samples_of(level.name)):
        warning.code, warning.seriousness, warning.text, warning.advice

Each rule is a function of what is known of the level; it returns what was seen, in words, or None.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from enum import StrEnum

import msgspec
import numpy as np

from loadtests.analysis.disturbance import in_words, is_slight
from loadtests.analysis.level import Judged, Level
from loadtests.analysis.percentiles import distribution
from loadtests.analysis.slo import Slo, requests_to_hold
from loadtests.analysis.steady_state import grows
from loadtests.records.resource_sample import ResourceSample
from models import formatting

CLIENT_BUSY_SHARE = 0.80  # of one core
LATE_SHARE = 0.01  # p99 send lag / median TTFT
LATE_FLOOR_SECONDS = 0.001  # below the resolution that any latency here is read at
SWAP_GROWTH_BYTES = 16 << 20
HELD_BACK_SHARE = 0.02  # of the time: steal, quota, a GPU's clock
SHORT_SHARE = 0.01
PROMPTS_OFF_SHARE = 0.02

DISTURBED = "Disturbed"


class Seriousness(StrEnum):
    """How much a warning weighs. A level with a serious one is left out of the capacity."""

    NOTE = "note"
    WARNING = "warning"
    SERIOUS = "serious"

    @property
    def rank(self) -> int:
        """Serious first: 0, 1, 2."""
        return (Seriousness.SERIOUS, Seriousness.WARNING, Seriousness.NOTE).index(self)


NOTE, WARNING, SERIOUS = Seriousness.NOTE, Seriousness.WARNING, Seriousness.SERIOUS


class NamedWarning(msgspec.Struct, frozen=True):
    """One warning. `code` is its name, `text` what was seen with the values."""

    code: str
    seriousness: Seriousness
    text: str
    advice: str
    cells: tuple[str, ...] = ()  # keys of the cells it is about; empty: the level or the run

    @property
    def is_serious(self) -> bool:
        return self.seriousness is SERIOUS


class _Seen(msgspec.Struct, frozen=True):
    """What the rules read."""

    level: Level
    slo: Slo
    judged: Judged
    samples: Sequence[ResourceSample]  # taken in the window


def level_warnings(
    level: Level, slo: Slo, samples: Iterable[ResourceSample] = ()
) -> tuple[NamedWarning, ...]:
    """All warnings about one level, in the order of RULES. `samples` are of the whole level."""
    start, end = (level.started.started_unix_seconds + at for at in level.window)
    inside = [sample for sample in samples if start <= sample.unix_seconds < end]
    seen = _Seen(level, slo, level.judge(slo), inside)
    found = []
    for code, seriousness, rule, advice in RULES:
        if (text := rule(seen)) is not None:
            weight = seriousness if isinstance(seriousness, Seriousness) else seriousness(seen)
            found.append(NamedWarning(code, weight, text, advice))
    return tuple(found)


def is_valid(warnings: Iterable[NamedWarning]) -> bool:
    """The numbers are the server's. Whether a disturbed level counts, its SLO decides."""
    return not any(one.is_serious and one.code != DISTURBED for one in warnings)


def send_lag_p99(level: Level) -> float | None:
    """Of the counted requests, seconds, nearest rank; None where nothing was sent."""
    lags = level.send_lag[level.counted]
    lags = np.sort(lags[~np.isnan(lags)])
    return float(lags[math.ceil(0.99 * len(lags)) - 1]) if len(lags) else None


Rule = Callable[[_Seen], str | None]
RULES: list[tuple[str, Seriousness | Callable[[_Seen], Seriousness], Rule, str]] = []


def _rule(
    code: str, seriousness: Seriousness | Callable[[_Seen], Seriousness], advice: str
) -> Callable[[Rule], Rule]:
    """The function below is a rule of this name; the advice says what to do."""

    def added(rule: Rule) -> Rule:
        RULES.append((code, seriousness, rule, advice))
        return rule

    return added


def _late_sends_decide(seen: _Seen) -> Seriousness:
    """Serious only above 1 % of the TTFT limit: below, a late send decides no request."""
    limit = seen.slo.ttft_seconds
    lag = send_lag_p99(seen.level) or 0.0
    return SERIOUS if limit is None or lag > LATE_SHARE * limit else WARNING


def _how_disturbed(seen: _Seen) -> Seriousness:
    """Serious, unless the level holds all the same, or the campaign takes the machine as it is."""
    found = seen.level.finished and seen.level.finished.disturbance
    is_kept = found and (found.counts or (seen.judged.verdict == "holds" and is_slight(found)))
    return WARNING if is_kept else SERIOUS


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


@_rule("TooFewSamples", NOTE, "measure longer")
def _too_few_samples(seen: _Seen) -> str | None:
    judged = seen.judged
    if judged.verdict != "unresolved" or judged.steady is False:
        return None
    return (
        f"{judged.good} of {judged.due} requests were good: too few to say whether "
        f"{seen.slo.target:.4g} of them are; {requests_to_hold(seen.slo)} are the least, all good"
    )


@_rule("GeneratorBusy", SERIOUS, "give it more processes or cores, or a machine of its own")
def _generator_busy(seen: _Seen) -> str | None:
    finished = seen.level.finished
    share = None if finished is None else finished.generator_busy_share
    if share is None:
        shares = [s.client.cpu_share for s in seen.samples if s.client is not None]
        share = _mean(shares)
    if share is None or share <= CLIENT_BUSY_SHARE:
        return None
    return (
        f"the load generator was at work or waited for a core {share:.0%} of the time: "
        f"more than {CLIENT_BUSY_SHARE:.0%}"
    )


@_rule("LateSends", _late_sends_decide, "give the load generator a core of its own")
def _late_sends(seen: _Seen) -> str | None:
    lag = send_lag_p99(seen.level)
    median = distribution(seen.level.ttft[seen.level.counted]).median_or_mean
    if lag is None or median is None or lag <= max(LATE_SHARE * median, LATE_FLOOR_SECONDS):
        return None
    return (
        f"requests left {formatting.seconds(lag, 3)} after they were due (p99), more than "
        f"{LATE_SHARE:.0%} of the median TTFT, {formatting.seconds(median, 3)}"
    )


@_rule("Swapping", WARNING, "use a smaller model or format, fewer slots, or free memory")
def _swapping(seen: _Seen) -> str | None:
    used = [s.swap_used_bytes for s in seen.samples if s.swap_used_bytes is not None]
    if len(used) < 2 or max(used) - used[0] < SWAP_GROWTH_BYTES:
        return None
    return f"swap in use grew by {formatting.size(max(used) - used[0])} during the level"


@_rule("Unsteady", WARNING, "measure longer, or at a lower rate")
def _unsteady(seen: _Seen) -> str | None:
    first, last = seen.level.in_flight_at_ends
    if grows(first, last):
        return (
            f"requests in flight rose from {first:.1f} to {last:.1f} over the level: "
            "the server does not keep up"
        )
    if seen.judged.steady is False:
        return "TTFT grew over the level: the server does not keep up"
    return None


@_rule("FellBack", SERIOUS, "see the server's placement")
def _fell_back(seen: _Seen) -> str | None:
    backends = seen.level.backends
    if len(backends) < 2:
        return None
    named = ", ".join(f"{name} ({count})" for name, count in backends.items())
    return f"answers came from more than one backend: {named}"


@_rule("TokensUnknown", WARNING, "ask the endpoint for stream_options.include_usage")
def _tokens_unknown(seen: _Seen) -> str | None:
    ok = seen.level.counted & ~seen.level.failed
    unknown = int(np.isnan(seen.level.output_tokens[ok]).sum())
    if not unknown:
        return None
    return (
        f"{unknown} of {int(ok.sum())} answers came without a token count: "
        "chunks stand for tokens in their TPOT"
    )


@_rule(
    "ShortAnswers",
    WARNING,
    "the endpoint ignores ignore_eos or min_tokens, or has its own limit",
)
def _short_answers(seen: _Seen) -> str | None:
    level = seen.level
    ok = level.counted & ~level.failed & np.isfinite(level.output_tokens)
    ok &= np.isfinite(level.asked_output_tokens)
    short = int((level.output_tokens[ok] < level.asked_output_tokens[ok]).sum())
    if short <= SHORT_SHARE * ok.sum():
        return None
    return (
        f"{short} of {int(ok.sum())} answers were shorter than asked: "
        "the load is lighter than the workload says"
    )


@_rule("StandIns", WARNING, "less of the prompt is reused; raise think_seconds")
def _stand_ins(seen: _Seen) -> str | None:
    later = seen.level.counted & (seen.level.turn > 0)
    count = int(seen.level.stand_in[later].sum())
    if not count:
        return None
    return (
        f"{count} of {int(later.sum())} later turns were due before the answer that they continue: "
        "filler of the same length was sent in its place"
    )


@_rule("PromptsOff", WARNING, "the tokenizer is not the server's, or its chat template adds tokens")
def _prompts_off(seen: _Seen) -> str | None:
    level = seen.level
    both = level.counted & np.isfinite(level.prompt_tokens) & (level.asked_prompt_tokens > 0)
    if not both.any():
        return None
    counted = float(level.prompt_tokens[both].mean())
    asked = float(level.asked_prompt_tokens[both].mean())
    if abs(counted - asked) <= PROMPTS_OFF_SHARE * asked:
        return None
    return f"the server counted {counted:.0f} tokens per prompt, {asked:.0f} were asked"


def _share_of_time(seen: _Seen, name: str) -> float:
    """Of seconds that were taken from the cores that are watched."""
    parts = [sample.cores for sample in seen.samples if sample.cores is not None]
    taken = sum(getattr(part, name) or 0.0 for part in parts)
    return float(taken / max(sum(part.seconds for part in parts), 1e-9))


@_rule("CpuStolen", WARNING, "use a quieter host, or a machine of one's own")
def _cpu_stolen(seen: _Seen) -> str | None:
    """Of a level whose cores were not watched; else Disturbed says it of the engine's cores."""
    mean = _share_of_time(seen, "steal_seconds")
    is_watched = seen.level.finished and seen.level.finished.disturbance
    if is_watched or mean <= HELD_BACK_SHARE:
        return None
    return f"the hypervisor gave {mean:.1%} of a core's time to others during the level"


@_rule("Throttled", WARNING, "raise the quota, the power cap or the cooling")
def _throttled(seen: _Seen) -> str | None:
    mean = _share_of_time(seen, "throttled_seconds")
    held = [s for s in seen.samples if s.gpu_throttled]
    parts = []
    if mean > HELD_BACK_SHARE:
        parts.append(
            f"the control group's CPU quota held processes back for {mean:.1%} of the time"
        )
    if len(held) > HELD_BACK_SHARE * len(seen.samples):
        why = ", ".join(sorted({reason for s in held for reason in s.gpu_throttled or ()}))
        told = sum(s.gpu_throttled is not None for s in seen.samples)
        watts = _mean(s.gpu_watts for s in held)
        at = f" at {watts:.0f} W" if watts is not None else ""
        parts.append(f"the GPU's clock was held down in {len(held)} of {told} samples{at} ({why})")
    return " and ".join(parts) or None


@_rule(
    DISTURBED,
    _how_disturbed,
    'measure on a quiet machine, or take this one as it is with disturbance = "ignore"',
)
def _disturbed(seen: _Seen) -> str | None:
    found = seen.level.finished and seen.level.finished.disturbance
    if not found or not found.is_disturbed:
        return None
    is_kept = _how_disturbed(seen) is WARNING and not found.counts
    return in_words(found) + ("; the level holds all the same, so it counts" if is_kept else "")


@_rule("SteadySteal", WARNING, "use a host that is not shared")
def _steady_steal(seen: _Seen) -> str | None:
    found = seen.level.finished and seen.level.finished.disturbance
    if not found or found.is_disturbed or found.steady_steal_share is None:
        return None
    return (
        f"the host takes {found.steady_steal_share:.0%} of this machine's time steadily; "
        "the capacity is of this machine with that"
    )

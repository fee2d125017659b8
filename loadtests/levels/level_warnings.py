"""Warnings about a level. A level with a serious warning does not count.

for warning in level_warnings(level, slo, samples):
    warning.code, warning.seriousness, warning.text, warning.advice
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from enum import StrEnum

import msgspec
import numpy as np

from crossover.loadtests.levels.disturbance import in_words
from crossover.loadtests.levels.level_columns import Level
from crossover.loadtests.levels.percentiles import distribution
from crossover.loadtests.records.resource_sample import ResourceSample
from crossover.models import formatting
from crossover.serving.capacity.slo import Slo

CLIENT_BUSY_SHARE = 0.80  # of one core
LATE_SHARE = 0.01  # p99 send delay / median TTFT
LATE_FLOOR_SECONDS = 0.001  # below the resolution that any latency here is read at
SWAP_GROWTH_BYTES = 16 << 20
HELD_BACK_SHARE = 0.02  # of the samples: a GPU's clock
SHORT_SHARE = 0.01
PROMPTS_OFF_SHARE = 0.02

DISTURBED = "Disturbed"
ADVICE = {
    "GeneratorBusy": "give it its own core or machine",
    "LateSends": "give the load generator its own core",
    "Swapping": "use a smaller model or format, fewer slots, or free memory",
    "Unsteady": "measure longer, or at a lower rate",
    "FellBack": "see the server's placement",
    "TokensUnknown": "use an endpoint that supports stream_options.include_usage",
    "ShortAnswers": "the endpoint ignores ignore_eos, or has its own limit",
    "PromptsOff": "the server uses another tokenizer, or its chat template adds tokens",
    "Throttled": "raise the power cap or improve the cooling",
    DISTURBED: 'measure on an idle machine, or accept this one with disturbance = "ignore"',
}


class Seriousness(StrEnum):
    """How much a warning weighs. A level with a serious one is left out of the capacity."""

    NOTE = "note"
    WARNING = "warning"
    SERIOUS = "serious"

    @property
    def rank(self) -> int:
        """Serious first: 0, 1, 2."""
        return (Seriousness.SERIOUS, Seriousness.WARNING, Seriousness.NOTE).index(self)


WARNING, SERIOUS = Seriousness.WARNING, Seriousness.SERIOUS


class NamedWarning(msgspec.Struct, frozen=True):
    """One warning. `code` is its name, `text` what was seen with the values."""

    code: str
    seriousness: Seriousness
    text: str
    advice: str

    @property
    def is_serious(self) -> bool:
        return self.seriousness is SERIOUS


Found = Iterator[tuple[str, Seriousness, str]]  # code, weight, what was seen


def level_warnings(
    level: Level, slo: Slo, samples: Iterable[ResourceSample] = ()
) -> tuple[NamedWarning, ...]:
    """All warnings about one level. `samples` are of the whole level."""
    start, end = (level.started.started_unix_seconds + at for at in level.window)
    inside = [sample for sample in samples if start <= sample.unix_seconds < end]
    found = (*_of_load(level, slo), *_of_answers(level), *_of_machine(level, inside))
    return tuple(NamedWarning(code, weight, text, ADVICE[code]) for code, weight, text in found)


def is_valid(warnings: Iterable[NamedWarning]) -> bool:
    """The numbers are the server's. Whether a disturbed level counts, its SLO decides."""
    return not any(one.is_serious and one.code != DISTURBED for one in warnings)


def send_delay_p99(level: Level) -> float | None:
    """Of the counted requests, seconds, nearest rank; None where nothing was sent."""
    lags = level.send_delay[level.counted]
    lags = np.sort(lags[~np.isnan(lags)])
    return float(lags[math.ceil(0.99 * len(lags)) - 1]) if len(lags) else None


def _of_load(level: Level, slo: Slo) -> Found:
    """How it was sent, and whether the server kept up."""
    busy = (level.finished and level.finished.generator_busy_share) or 0.0
    if busy > CLIENT_BUSY_SHARE:
        yield "GeneratorBusy", SERIOUS, f"the load generator was busy {busy:.0%} of the time"
    lag, median = send_delay_p99(level), distribution(level.ttft[level.counted]).median_or_mean
    # Below 1 % of the TTFT limit a late send decides no request.
    most = max(LATE_FLOOR_SECONDS, LATE_SHARE * max(median or 0.0, slo.ttft_seconds or 0.0))
    if lag is not None and median is not None and lag > most:
        text = f"requests were sent {formatting.seconds(lag, 3)} after their scheduled time (p99)"
        yield "LateSends", SERIOUS, text
    if level.judge(slo).steady is False:
        first, last = level.in_flight_at_ends
        text = (
            f"the server does not keep up: requests in flight rose from {first:.1f} to {last:.1f}"
        )
        yield "Unsteady", WARNING, text


def _of_answers(level: Level) -> Found:
    """What came back, against what was asked."""
    if len(level.backends) > 1:
        named = ", ".join(f"{name} ({count})" for name, count in level.backends.items())
        yield "FellBack", SERIOUS, f"answers came from more than one backend: {named}"
    ok = level.counted & ~level.failed
    if unknown := int(np.isnan(level.output_tokens[ok]).sum()):
        text = f"{unknown} of {int(ok.sum())} answers have no token count"
        yield "TokensUnknown", WARNING, f"{text}, so their TPOT counts chunks as tokens"
    told = ok & np.isfinite(level.output_tokens) & np.isfinite(level.requested_output_tokens)
    short = int((level.output_tokens[told] < level.requested_output_tokens[told]).sum())
    if short > SHORT_SHARE * told.sum():
        text = f"{short} of {int(told.sum())} answers were shorter than requested"
        yield "ShortAnswers", WARNING, f"{text}: the load is lighter than the workload says"
    both = level.counted & np.isfinite(level.prompt_tokens) & (level.requested_prompt_tokens > 0)
    if both.any():
        counted = float(level.prompt_tokens[both].mean())
        asked = float(level.requested_prompt_tokens[both].mean())
        if abs(counted - asked) > PROMPTS_OFF_SHARE * asked:
            text = f"the server counted {counted:.0f} tokens per prompt instead of {asked:.0f}"
            yield "PromptsOff", WARNING, text


def _of_machine(level: Level, samples: Sequence[ResourceSample]) -> Found:
    """What became of its memory, cores and clocks."""
    swap = [one.swap_used_bytes for one in samples if one.swap_used_bytes is not None]
    if swap and (grown := max(swap) - swap[0]) >= SWAP_GROWTH_BYTES:
        yield "Swapping", WARNING, f"swap in use grew by {formatting.size(grown)} during the level"
    held = [one for one in samples if one.gpu_throttled]
    if len(held) > HELD_BACK_SHARE * len(samples):
        why = ", ".join(sorted({reason for one in held for reason in one.gpu_throttled or ()}))
        text = f"the GPU's clock was throttled in {len(held)} of {len(samples)} samples ({why})"
        yield "Throttled", WARNING, text
    found = level.finished and level.finished.disturbance
    if found and found.is_disturbed:
        yield DISTURBED, SERIOUS if found.is_set_aside else WARNING, in_words(found)

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

from crossover.loadtests.levels.disturbance import disturbance_in_words
from crossover.loadtests.levels.level_columns import Level
from crossover.loadtests.levels.percentiles import distribution
from crossover.loadtests.records.resource_sample import ResourceSample
from crossover.models import formatting
from crossover.serving.capacity.slo import Slo

CLIENT_BUSY_SHARE = 0.80  # of one core
LATE_SHARE = 0.01  # p99 send delay / median TTFT
LATE_FLOOR_SECONDS = 0.001  # smaller delays do not matter to any latency that is reported
SWAP_GROWTH_BYTES = 16 << 20
THROTTLED_SHARE = 0.02  # of the samples
SHORT_SHARE = 0.01  # of the answers
PROMPTS_OFF_SHARE = 0.02  # of the mean prompt tokens

DISTURBED = "Disturbed"
BUFFERED = "Buffered"
BUFFER_ADVICE = (
    "turn buffering off in the proxy (nginx: proxy_buffering off), or have the server send the "
    "header X-Accel-Buffering: no"
)
ADVICE = {
    BUFFERED: BUFFER_ADVICE,
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
    """One warning about a level."""

    code: str  # its name, a key of ADVICE
    seriousness: Seriousness
    text: str  # what was observed, with the values
    advice: str  # what to do about it

    @property
    def is_serious(self) -> bool:
        return self.seriousness is SERIOUS


Observations = Iterator[tuple[str, Seriousness, str]]  # code, seriousness, text of a warning


def level_warnings(
    level: Level, slo: Slo, samples: Iterable[ResourceSample] = ()
) -> tuple[NamedWarning, ...]:
    """Return all warnings about one level. `samples`: those of the whole level."""
    start, end = (level.started.started_unix_seconds + seconds for seconds in level.window)
    in_window = [sample for sample in samples if start <= sample.unix_seconds < end]
    observations = (*_of_load(level, slo), *_of_answers(level), *_of_machine(level, in_window))
    return tuple(
        NamedWarning(code, seriousness, text, ADVICE[code])
        for code, seriousness, text in observations
    )


def is_valid(warnings: Iterable[NamedWarning]) -> bool:
    """Whether the level measured the server and not the load generator or a fault. A disturbed
    level is valid; whether it counts depends on its SLO attainment."""
    return not any(warning.is_serious and warning.code != DISTURBED for warning in warnings)


def send_delay_p99(level: Level) -> float | None:
    """Return the 99th percentile (nearest rank) of the send delay of the counted requests, in
    seconds; None if nothing was sent."""
    delays = level.send_delay[level.counted]
    delays = np.sort(delays[~np.isnan(delays)])
    return float(delays[math.ceil(0.99 * len(delays)) - 1]) if len(delays) else None


def _of_load(level: Level, slo: Slo) -> Observations:
    """Observe how the requests were sent, and whether the server kept up with them."""
    busy_share = (level.finished and level.finished.generator_busy_share) or 0.0
    if busy_share > CLIENT_BUSY_SHARE:
        yield "GeneratorBusy", SERIOUS, f"the load generator was busy {busy_share:.0%} of the time"
    delay = send_delay_p99(level)
    median_ttft = distribution(level.ttft[level.counted]).median_or_mean
    # A delay below 1 % of the shortest limit does not decide whether a request meets the SLO.
    short_time = max(median_ttft or 0.0, slo.shortest_queueing_limit or 0.0)
    max_delay = max(LATE_FLOOR_SECONDS, LATE_SHARE * short_time)
    if delay is not None and median_ttft is not None and delay > max_delay:
        text = f"requests were sent {formatting.seconds(delay, 3)} after their scheduled time (p99)"
        yield "LateSends", SERIOUS, text
    if level.judge(slo).steady is False:
        first, last = level.in_flight_at_ends
        text = (
            f"the server does not keep up: requests in flight rose from {first:.1f} to {last:.1f}"
        )
        yield "Unsteady", WARNING, text


def _of_answers(level: Level) -> Observations:
    """Observe whether the answers are what the requests asked for."""
    if len(level.backends) > 1:
        backends = ", ".join(f"{name} ({count})" for name, count in level.backends.items())
        yield "FellBack", SERIOUS, f"answers came from more than one backend: {backends}"
    is_ok = level.counted & ~level.failed
    if uncounted := int(np.isnan(level.output_tokens[is_ok]).sum()):
        text = f"{uncounted} of {int(is_ok.sum())} answers have no token count"
        yield "TokensUnknown", WARNING, f"{text}, so their TPOT counts chunks as tokens"
    if level.is_collected:
        yield BUFFERED, WARNING, buffered_in_words(level)
    output, requested_output = level.output_tokens, level.requested_output_tokens
    has_output = is_ok & np.isfinite(output) & np.isfinite(requested_output)
    short_count = int((output[has_output] < requested_output[has_output]).sum())
    if short_count > SHORT_SHARE * has_output.sum():
        text = f"{short_count} of {int(has_output.sum())} answers were shorter than requested"
        yield "ShortAnswers", WARNING, f"{text}: the load is lighter than the workload says"
    prompt, requested_prompt = level.prompt_tokens, level.requested_prompt_tokens
    has_prompt = level.counted & np.isfinite(prompt) & (requested_prompt > 0)
    if has_prompt.any():
        counted = float(prompt[has_prompt].mean())
        requested = float(requested_prompt[has_prompt].mean())
        if abs(counted - requested) > PROMPTS_OFF_SHARE * requested:
            text = f"the server counted {counted:.0f} tokens per prompt instead of {requested:.0f}"
            yield "PromptsOff", WARNING, text


def buffered_in_words(level: Level) -> str:
    """Return what the chunks of a level show of a proxy that collects them."""
    collected, telling = level.collected_answers
    groups = level.chunk_groups[level.chunk_counts > 0].sum()
    return (
        f"the chunks of {collected} of {telling} answers arrived in groups of about "
        f"{len(level.chunks) / groups:.0f}: a proxy between here and the server collects them, so "
        "TTFT and the times between tokens are the proxy's"
    )


def _of_machine(level: Level, samples: Sequence[ResourceSample]) -> Observations:
    """Observe the machine's swap, GPU clock and CPU contention. `samples`: those of the window."""
    swap_bytes = [
        sample.swap_used_bytes for sample in samples if sample.swap_used_bytes is not None
    ]
    growth_bytes = max(swap_bytes) - swap_bytes[0] if swap_bytes else 0
    if growth_bytes >= SWAP_GROWTH_BYTES:
        text = f"swap in use grew by {formatting.size(growth_bytes)} during the level"
        yield "Swapping", WARNING, text
    throttled = [sample for sample in samples if sample.gpu_throttled]
    if len(throttled) > THROTTLED_SHARE * len(samples):
        reasons = sorted({reason for sample in throttled for reason in sample.gpu_throttled or ()})
        text = f"the GPU's clock was throttled in {len(throttled)} of {len(samples)} samples"
        yield "Throttled", WARNING, f"{text} ({', '.join(reasons)})"
    disturbance = level.finished and level.finished.disturbance
    if disturbance and disturbance.is_disturbed:
        seriousness = SERIOUS if disturbance.is_set_aside else WARNING
        yield DISTURBED, seriousness, disturbance_in_words(disturbance)

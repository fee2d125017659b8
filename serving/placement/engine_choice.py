"""Which engine serves most requests on this CPU: a pure choice between measured step times.

    choice = choose(candidates, Work(prompt_tokens=220, output_tokens=128, streams=16))
    choice.backend, choice.weight_format, choice.reason

One request costs the engine its prompt's prefill alone, and its share of the decode steps that it
makes together with the other streams.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from models.formatting import count, requests, significant
from models.spec import BITS_PER_WEIGHT

BUSY = 0.05  # of the time, waited for a core: other work made the steps longer
NEAR = 0.10  # of the best rate: what two measurements of a second differ by on a machine at work


class Work(msgspec.Struct, frozen=True):
    """What is asked of an engine: mean tokens of a request, and how many requests run at once."""

    prompt_tokens: float
    output_tokens: float
    streams: int


class EngineTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Measured times of one engine on one machine; a row of the kept table."""

    model: str
    parameters: int
    backend: str
    weight_format: str
    threads: int
    slots: int
    prompt_tokens: int  # of a prompt, rounded up to a power of two
    prompt_tokens_per_second: float
    decode_seconds: float  # of a step of one row
    decode_slots_seconds: float  # of a step of `slots` rows
    spent_seconds: float  # of the measurement, loading included
    unix_seconds: float
    waited_share: float = 0.0  # of the time, by the engine's thread that waited most for a core
    kv_dtype: str = "auto"

    def step_seconds(self, streams: int) -> float:
        """Time of a decode step, linear between one row and all slots."""
        share = (min(streams, self.slots) - 1) / max(1, self.slots - 1)
        return self.decode_seconds + share * (self.decode_slots_seconds - self.decode_seconds)

    def scaled(self, model: str, parameters: int, factor: float) -> EngineTimes:
        """The times of another model that takes `factor` times the arithmetic for a token."""
        return msgspec.structs.replace(
            self,
            model=model,
            parameters=parameters,
            prompt_tokens_per_second=self.prompt_tokens_per_second / factor,
            decode_seconds=self.decode_seconds * factor,
            decode_slots_seconds=self.decode_slots_seconds * factor,
        )


class EngineCandidate(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An engine that was looked at. `why_not`: why it cannot be chosen; "": it can."""

    backend: str
    weight_format: str
    why_not: str = ""
    times: EngineTimes | None = None  # of the model that is asked for; None: not measured
    measured_on: str = ""  # the model measured, where that is another one; its times are scaled
    requests_per_second: float | None = None  # under the work asked for, by `times`

    @property
    def name(self) -> str:
        return f"{self.backend} {self.weight_format}".strip()

    @property
    def bits(self) -> float:
        """Bits of a weight; formats with more are nearer to the float model."""
        return BITS_PER_WEIGHT.get(self.weight_format, 0.0)


class EngineChoice(msgspec.Struct, frozen=True, kw_only=True):
    """The engine chosen, why, and all that were looked at."""

    backend: str
    weight_format: str
    reason: str
    candidates: tuple[EngineCandidate, ...]


def requests_per_second(times: EngineTimes, work: Work) -> float:
    """The rate at which an engine that never idles ends requests, `work.streams` at once.

    Seconds of a request = prompt / prefill rate + (output - 1) x step(streams) / streams: the first
    token comes from the prefill.
    """
    streams = max(1, min(work.streams, times.slots))
    prefill = work.prompt_tokens / times.prompt_tokens_per_second
    decode = max(0.0, work.output_tokens - 1) * times.step_seconds(streams) / streams
    return 1.0 / (prefill + decode)


def choose(candidates: Sequence[EngineCandidate], work: Work) -> EngineChoice:
    """The candidate with the highest rate; of those within NEAR of it, the one with most bits.

    Where none was measured, the first that is possible. Raises ValueError where none is possible.
    """
    rated = [
        msgspec.structs.replace(one, requests_per_second=requests_per_second(one.times, work))
        if one.times is not None
        else one
        for one in candidates
    ]
    possible = [one for one in rated if not one.why_not]
    if not possible:
        raise ValueError("no engine is possible")
    measured = [one for one in possible if one.requests_per_second is not None]
    best = possible[0]
    if measured:
        best = max(measured, key=_rate)
        near = [one for one in measured if _rate(one) >= (1 - NEAR) * _rate(best)]
        best = max(near, key=lambda one: (one.bits, _rate(one)))
    reason = _reason(best, possible, work)
    if any(one.times is not None and one.times.waited_share > BUSY for one in possible):
        reason += "; other work on the machine disturbed the measurement"
    return EngineChoice(
        backend=best.backend,
        weight_format=best.weight_format,
        reason=reason,
        candidates=tuple(rated),
    )


def work_words(work: Work) -> str:
    """`prompts of 36 and answers of 6.5 tokens, 8 at once`."""
    return (
        f"prompts of {significant(work.prompt_tokens)} and answers of "
        f"{significant(work.output_tokens)} tokens, {count(work.streams)} at once"
    )


def _rate(one: EngineCandidate) -> float:
    return one.requests_per_second or 0.0


def _reason(best: EngineCandidate, possible: Sequence[EngineCandidate], work: Work) -> str:
    others = [one for one in possible if one is not best]
    if not others:
        return f"{best.name}: the only engine that can run this model here now"
    if best.requests_per_second is None:
        return f"{best.name}: the first of {len(possible)} engines, none of which was measured"
    rival = max(others, key=_rate)
    rate = requests(_rate(best))
    on = f", measured on {best.measured_on} and scaled" if best.measured_on else ""
    text = f"{best.name}: {rate} by its step times ({work_words(work)}{on})"
    if rival.requests_per_second is None:
        return f"{text}; no other engine was measured"
    ratio = _rate(best) / _rate(rival)
    if ratio < 1 or 1 - 1 / ratio <= NEAR:
        tie = f"{text}; a near tie with {rival.name} ({requests(_rate(rival))})"
        if best.bits > rival.bits:
            tie += f", whose weights of {rival.bits:g} bits are further from the float model's"
        return tie
    return f"{text}, {significant(ratio)} x that of {rival.name}"

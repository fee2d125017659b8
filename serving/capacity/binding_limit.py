"""What limits the capacity of a simulated server, and what would lift it. Pure.

    binding = binding_limit(server, slo, rate)
    binding.kind, binding.shares.prompts       # "prompts", 0.62
    sentence_of(binding)                       # the one place that words it

What binds is what would raise the capacity most if it cost half: prompt tokens, decode rows,
context, or the fixed cost of each step, which on a CPU is mostly reading the weights
from memory. The shares of the engine's busy time, by the step-time model, say why. Slots and KV
memory bind where most requests that missed the SLO had waited for them, and twice as much would
raise the capacity about as much as the half cost: they are settings, and come first. Before all of
these come other processes that took a tenth of the engine's time.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import msgspec
import numpy as np
import numpy.typing as npt

from crossover.models import formatting
from crossover.serving.capacity.batching_simulator import Simulated
from crossover.serving.capacity.scheduler_settings import SchedulerSettings
from crossover.serving.capacity.simulated_capacity import Server
from crossover.serving.capacity.slo import Slo
from crossover.serving.capacity.step_time_model import StepTimeModel

Flags = npt.NDArray[np.bool_]
LimitKind = Literal[
    "unloaded_ttft",
    "unloaded_tpot",
    "prompts",
    "weights",
    "rows",
    "context",
    "slots",
    "kv_memory",
    "other_processes",
]
REQUESTS = 800  # of the simulations that are compared with each other
LIFTED_COST = 0.5  # of what binds: what the lifted capacity is simulated with
MORE = 2  # times as many slots, or as much KV memory
MIN_GAIN = 1.1  # of the capacity, from which more slots or KV memory bind
AS_GOOD = 0.9  # of the capacity with half the largest cost: settings that reach it come first
MIN_WAITED = 0.5  # of the requests that missed the SLO
MIN_TAKEN, MAX_TAKEN = 0.1, 0.9  # of the engine's time
# What may cost half, and the numbers of the step-time model that say so.
COSTS: dict[LimitKind, tuple[str, ...]] = {
    "prompts": ("prompt_token_seconds", "pass_seconds"),
    "weights": ("base_seconds", "expert_seconds"),
    "rows": ("row_seconds",),
    "context": ("context_token_seconds",),
}

KIND_WORDS: dict[LimitKind, str] = {
    "unloaded_ttft": "the prompt of a single request",
    "unloaded_tpot": "the tokens of a single request",
    "prompts": "reading prompts",
    "weights": "memory bandwidth",
    "rows": "computing tokens",
    "context": "attention over the context",
    "slots": "the number of slots",
    "kv_memory": "KV memory",
    "other_processes": "other processes",
}
REMEDIES: dict[LimitKind, str] = {
    "unloaded_ttft": "an engine that computes in 8 bits, a smaller model, or a GPU",
    "unloaded_tpot": "a smaller model or weight format, or memory with more bandwidth",
    "prompts": "an engine that computes in 8 bits, shorter prompts, more cores, or a GPU",
    "weights": "a smaller model or weight format, or memory with more bandwidth",
    "rows": "more cores, a smaller model, or a GPU",
    "context": "shorter contexts, a KV cache in 8 bits, or memory with more bandwidth",
    "slots": "more slots",
    "kv_memory": "a larger KV cache, or one in 8 bits",
    "other_processes": "ending them, or keeping them from the engine's cores",
}
GPU_REMEDIES: dict[LimitKind, str] = {  # where a GPU serves already, and cores do not help
    "unloaded_ttft": "a smaller model, shorter prompts, reuse of prefixes, or a faster GPU",
    "prompts": "shorter prompts, reuse of prefixes, or a faster GPU",
    "rows": "a smaller model, or a faster GPU",
}


class BusyShares(msgspec.Struct, frozen=True, kw_only=True):
    """Where the engine's busy time goes; together 1."""

    prompts: float  # prompt tokens, and the passes of prompts
    weights: float  # what every step costs, and the experts that it reads
    rows: float  # tokens that are generated
    context: float  # of the rows that are generated


class BindingLimit(msgspec.Struct, frozen=True, kw_only=True):
    """What limits a capacity. None: it is not known, or there is nothing to tell."""

    kind: LimitKind
    rate: float  # the capacity, requests/s; 0.0: a single request misses the SLO
    shares: BusyShares | None = None  # None: nothing was simulated
    late_by_ttft_share: float | None = None  # of requests that missed the SLO; the others by TPOT
    waited_share: float | None = None  # of requests that missed the SLO: for a slot or KV memory
    taken_share: float | None = None  # by other processes, of the engine's time
    # With half the cost of what binds, or twice the slots or the KV memory.
    lifted_rate: float | None = None
    lifted_to: int | None = None  # slots, or tokens of KV memory, that it is simulated with
    is_on_gpu: bool = False  # the remedies differ

    @property
    def words(self) -> str:
        """`reading prompts`."""
        return KIND_WORDS[self.kind]


def binding_limit(
    server: Server, slo: Slo, rate: float, *, taken_share: float | None = None
) -> BindingLimit:
    """Return what limits a server whose simulated capacity is `rate`, requests/s.

    `taken_share`: the part of the time that other processes took from the engine, 0..1; None: it
    was not watched.
    """
    if taken_share is not None and taken_share >= MIN_TAKEN:
        return by_other_processes(rate, taken_share)
    alone = server.alone()
    if alone.good(slo.ttft_seconds, slo.tpot_seconds).mean() < slo.target or not rate:
        return BindingLimit(kind=_unloaded(alone, slo), rate=0.0, taken_share=taken_share)
    played = server.play(rate)
    missed = ~played.good(slo.ttft_seconds, slo.tpot_seconds)
    by_ttft = ~played.good(slo.ttft_seconds, None)
    best = BindingLimit(
        kind="weights",
        rate=rate,
        shares=busy_shares(server.step_times, played),
        late_by_ttft_share=float(by_ttft[missed].mean()) if missed.any() else None,
        taken_share=taken_share,
    )
    replace = msgspec.structs.replace
    gain_of = _Gains(server, slo)
    gain = 0.0
    for kind in COSTS:
        if (own := gain_of.cheaper(kind)) > gain:
            best, gain = replace(best, kind=kind, lifted_rate=rate * own), own
    for kind, waits, settings, more in _with_more(server.settings, played):
        waited = float(waits[missed].mean()) if missed.any() else 0.0
        if waited < MIN_WAITED:
            continue
        own = gain_of.with_settings(settings)
        if own >= max(MIN_GAIN, AS_GOOD * gain):
            gain = own
            found = {"waited_share": waited, "lifted_rate": rate * own, "lifted_to": more}
            best = replace(best, kind=kind, **found)
    return best


def by_other_processes(rate: float, taken_share: float) -> BindingLimit:
    """Return the limit of a server from which other processes took so much, at a capacity."""
    lifted = rate / (1 - min(taken_share, MAX_TAKEN))
    return BindingLimit(
        kind="other_processes",
        rate=rate,
        taken_share=taken_share,
        lifted_rate=lifted if rate else None,
    )


class _Gains:
    """How many times the capacity of a server another one has, by the same draws of requests."""

    def __init__(self, server: Server, slo: Slo) -> None:
        self._server, self._slo = server, slo
        self._own = self._capacity(server.step_times, server.settings)

    def cheaper(self, kind: LimitKind) -> float:
        """With half the cost of one thing."""
        step_times = self._server.step_times
        lowered = {name: getattr(step_times, name) * LIFTED_COST for name in COSTS[kind]}
        if not any(lowered.values()):
            return 1.0
        cheaper = msgspec.structs.replace(step_times, **lowered)
        return self._gain(cheaper, self._server.settings)

    def with_settings(self, settings: SchedulerSettings) -> float:
        """With these settings."""
        return self._gain(self._server.step_times, settings)

    def _gain(self, step_times: StepTimeModel, settings: SchedulerSettings) -> float:
        return max(1.0, self._capacity(step_times, settings) / self._own) if self._own else 1.0

    def _capacity(self, step_times: StepTimeModel, settings: SchedulerSettings) -> float:
        server = self._server
        count = min(server.count, REQUESTS)
        return Server(step_times, settings, server.lengths, server.arrivals, count=count).crossing(
            self._slo
        )


def _with_more(
    settings: SchedulerSettings, played: Simulated
) -> Iterator[tuple[LimitKind, Flags, SchedulerSettings, int]]:
    """Yield the settings with more of what requests waited for, and which of them did."""
    replace = msgspec.structs.replace
    if played.waited_for_slot is not None:
        more = settings.slots * MORE
        step_tokens = max(settings.step_tokens, 2 * more)
        wider = replace(settings, slots=more, step_tokens=step_tokens)
        yield "slots", played.waited_for_slot, wider, more
    if played.waited_for_kv is not None and settings.kv_tokens is not None:
        more = settings.kv_tokens * MORE
        yield "kv_memory", played.waited_for_kv, replace(settings, kv_tokens=more), more


def busy_shares(step_times: StepTimeModel, played: Simulated) -> BusyShares:
    """Return where the busy time of a simulation went, by its step-time model."""
    work = played.work
    assert work is not None and work.seconds > 0
    prompts = step_times.prompt_token_seconds * work.prompt_tokens
    prompts += step_times.pass_seconds * (work.passes - work.steps)
    rows = step_times.row_seconds * work.rows
    context = step_times.context_token_seconds * work.context_tokens
    # The rest is what every step costs, and the experts that its passes read.
    weights = max(0.0, work.seconds - prompts - rows - context)
    whole = prompts + rows + context + weights
    return BusyShares(
        prompts=prompts / whole,
        weights=weights / whole,
        rows=rows / whole,
        context=context / whole,
    )


def _unloaded(alone: Simulated, slo: Slo) -> LimitKind:
    """Return which limit single requests miss more often."""
    by_ttft = alone.good(slo.ttft_seconds, None).mean()
    by_tpot = alone.good(None, slo.tpot_seconds).mean()
    return "unloaded_ttft" if by_ttft <= by_tpot else "unloaded_tpot"


def sentence_of(binding: BindingLimit) -> str:
    """Return what binds, why, and what would lift it."""
    remedy = REMEDIES[binding.kind]
    if binding.is_on_gpu:
        remedy = GPU_REMEDIES.get(binding.kind, remedy)
    if binding.kind == "unloaded_ttft":
        return f"Even a single request misses the TTFT limit. What helps: {remedy}."
    if binding.kind == "unloaded_tpot":
        return f"Even a single request misses the TPOT limit. What helps: {remedy}."
    words = f"{binding.words[:1].upper()}{binding.words[1:]}"
    rise = _rise(binding)
    if binding.kind in ("slots", "kv_memory"):
        what = "slots" if binding.kind == "slots" else "tokens of KV memory"
        return (
            f"{words} binds: {_percent(binding.waited_share)} of the requests that miss the SLO "
            f"had to wait for {'a slot' if binding.kind == 'slots' else 'it'}. "
            f"{binding.lifted_to:,} {what} would raise the capacity{rise}."
        )
    if binding.kind == "other_processes":
        without = f" Without them the capacity would rise{rise}." if rise else ""
        return (
            f"{words} bind: they took {_percent(binding.taken_share)} of the engine's time on its "
            f"cores.{without} What helps: {remedy}."
        )
    shares = binding.shares
    assert shares is not None
    named: dict[LimitKind, float] = {
        "prompts": shares.prompts,
        "weights": shares.weights,
        "rows": shares.rows,
        "context": shares.context,
    }
    own = named.pop(binding.kind)
    cost = {
        "prompts": "the cost of prompts",
        "weights": "the fixed cost of each step, mostly reading the weights,",
        "rows": "the cost of each generated token",
        "context": "the cost of reading the KV cache",
    }[binding.kind]
    others = ", ".join(
        f"{KIND_WORDS[kind]} {_percent(share)}"
        for kind, share in sorted(named.items(), key=lambda pair: -pair[1])
        if share >= 0.005
    )
    late = ""
    if binding.late_by_ttft_share is not None:
        limit = "TTFT" if binding.late_by_ttft_share >= 0.5 else "TPOT"
        late = f" Requests that miss the SLO mostly miss the {limit} limit."
    rest = f" (the rest: {others})" if others else ""
    return (
        f"{words} binds: halving {cost} would raise the capacity{rise}. It takes "
        f"{_percent(own)} of the engine's busy time{rest}.{late} What helps: {remedy}."
    )


def _rise(binding: BindingLimit) -> str:
    """` from 23 to about 58 requests a minute`."""
    if binding.lifted_rate is None:
        return ""
    unit = formatting.rate_unit(binding.rate)[1]
    now = formatting.rate(binding.rate, like=binding.rate).removesuffix(unit)
    lifted = formatting.of_requests(formatting.rate(binding.lifted_rate, like=binding.rate))
    return f" from {now} to about {lifted}"


def _percent(share: float | None) -> str:
    return formatting.share(None if share is None else round(share, 2), 2)

"""What limits the capacity of a simulated server, and what would lift it. Pure.

    binding = binding_limit(server, slo, rate)
    binding.kind, binding.shares.prompts       # "prompts", 0.62
    sentence_of(binding)                       # the one place that words it

The binding limit is the cost whose halving would raise the capacity most: prompt tokens, decode
rows, context, or the fixed cost of each step, which on a CPU is mostly reading the weights from
memory. The shares of the engine's busy time, by the step-time model, explain it. Slots or KV memory
bind if most requests that missed the SLO had waited for them, and if the best number of slots
(slot_count.py), or twice the memory, would raise the capacity about as much as the halved cost
would: they take precedence, because they are settings. So does the room for the histories of
conversations, if a tenth of all prompt tokens are computed again because their KV was lost, and if
room for all of them would raise the capacity about as much.
Other processes that took a tenth of the engine's time take precedence over all of these, if single
requests would meet the SLO without them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Literal, NamedTuple

import msgspec
import numpy as np

from crossover.models import formatting
from crossover.serving.capacity.batching_simulator import SimulatedLoad
from crossover.serving.capacity.scheduler_settings import MAX_GPU_SLOTS, SchedulerSettings
from crossover.serving.capacity.simulated_capacity import Server
from crossover.serving.capacity.slo import LIMITED_TIMES, Flags, Slo, Times
from crossover.serving.capacity.slot_count import (
    MIN_GAIN,
    SlotsChoice,
    best_slots,
    compared_requests,
)
from crossover.serving.capacity.step_time_model import StepTimeModel

LimitKind = Literal[
    "unloaded_prompt",
    "unloaded_tokens",
    "prompts",
    "weights",
    "rows",
    "context",
    "slots",
    "kv_memory",
    "histories",
    "other_processes",
]
LIFTED_COST = 0.5  # factor of a cost, to simulate the capacity without that limit
MORE = 2  # factor of the KV memory, to simulate the capacity without that limit
# Slots or KV memory bind only if more of them raise the capacity by MIN_GAIN, if the gain is at
# least AS_GOOD times that of the halved cost, and if MIN_WAITED of the requests that missed the SLO
# had waited for them.
AS_GOOD = 0.9
MIN_WAITED = 0.5
MIN_LOST = 0.1  # histories bind only if this share of all prompt tokens is computed again
# The seconds to copy the KV of a token to or from a prompt cache, as a share of those to compute
# it, where they were not measured: the largest share of any model (135M in int8).
COPY_SHARE = 1 / 50
MIN_TAKEN, MAX_TAKEN = 0.1, 0.9  # of the engine's time, by other processes
# The costs that may be halved, and the coefficients of the step-time model that belong to each.
COSTS: dict[LimitKind, tuple[str, ...]] = {
    "prompts": ("prompt_token_seconds", "pass_seconds"),
    "weights": ("base_seconds", "expert_seconds"),
    "rows": ("row_seconds",),
    "context": ("context_token_seconds",),
}

KIND_WORDS: dict[LimitKind, str] = {
    "unloaded_prompt": "the prompt of a single request",
    "unloaded_tokens": "the tokens of a single request",
    "prompts": "reading prompts",
    "weights": "memory bandwidth",
    "rows": "computing tokens",
    "context": "attention over the context",
    "slots": "the number of slots",
    "kv_memory": "KV memory",
    "histories": "room for the histories of conversations",
    "other_processes": "other processes",
}
INT8_ENGINE = "an engine that computes in int8 if this one does not"
REMEDIES: dict[LimitKind, str] = {
    "unloaded_prompt": f"a smaller model, a GPU, or {INT8_ENGINE}",
    "unloaded_tokens": "a smaller model or weight format, or memory with more bandwidth",
    "prompts": f"shorter prompts, more cores, a GPU, or {INT8_ENGINE}",
    "weights": "a smaller model or weight format, or memory with more bandwidth",
    "rows": "more cores, a smaller model, or a GPU",
    "context": "shorter contexts, a KV cache in 8 bits, or memory with more bandwidth",
    "slots": "more slots",
    "kv_memory": "a larger KV cache, or one in 8 bits",
    "histories": "more slots, or a larger prompt cache",
    "other_processes": "ending other programs, or keeping them off the engine's cores",
}
COST_WORDS: dict[LimitKind, str] = {
    "prompts": "the cost of prompts",
    "weights": "the fixed cost of each step, mostly reading the weights,",
    "rows": "the cost of each generated token",
    "context": "the cost of reading the KV cache",
}
MIN_SHOWN_SHARE = 0.005  # of the busy time; less is shown as 0 %
GPU_REMEDIES: dict[LimitKind, str] = {  # where a GPU serves already, and cores do not help
    "unloaded_prompt": "a smaller model, shorter prompts, reuse of prefixes, or a faster GPU",
    "prompts": "shorter prompts, reuse of prefixes, or a faster GPU",
    "rows": "a smaller model, or a faster GPU",
    "histories": "more slots with a larger KV cache",
}
INT8_REMEDIES: dict[LimitKind, str] = {  # where the engine computes in int8 already
    "unloaded_prompt": "a smaller model or a GPU",
    "prompts": "shorter prompts, more cores, or a GPU",
}


class BusyShares(msgspec.Struct, frozen=True, kw_only=True):
    """The shares of the engine's busy time; their sum is 1."""

    prompts: float  # prompt tokens, and the passes of prompts
    weights: float  # the fixed cost of each step, and the experts that it reads
    rows: float  # generated tokens
    context: float  # reading the KV cache for the generated tokens


class BindingLimit(msgspec.Struct, frozen=True, kw_only=True):
    """What limits a capacity. None: unknown, or it does not apply to this kind of limit."""

    kind: LimitKind
    rate: float  # the capacity, requests/s; 0.0: a single request misses the SLO
    shares: BusyShares | None = None  # None: nothing was simulated
    # The time whose limit most of the requests that miss the SLO miss first, in the order of
    # LIMITED_TIMES, and their share of these requests; None: none of them misses the SLO.
    missed_limit: str | None = None
    missed_limit_share: float | None = None
    # The share of the requests that miss the SLO that had waited for a slot or for KV memory.
    waited_share: float | None = None
    # The share of all prompt tokens that are computed again because their KV was lost.
    lost_share: float | None = None
    taken_share: float | None = None  # the share of the engine's time that other processes took
    # The capacity with the binding cost halved, or with twice the slots or KV memory, or with room
    # for all histories, requests/s.
    lifted_rate: float | None = None
    # The slots, or tokens of KV memory or of histories, of that simulation.
    lifted_to: int | None = None
    # A GPU serves, or the weights are int8, for which other remedies help.
    is_on_gpu: bool = False
    is_int8: bool = False
    # How its server is told the slots, with "{slots}" for their number: "--slots {slots}"; "": not
    # known.
    slots_option: str = ""

    @property
    def words(self) -> str:
        """`reading prompts`."""
        return KIND_WORDS[self.kind]


def binding_limit(
    server: Server,
    slo: Slo,
    rate: float,
    *,
    taken_share: float | None = None,
    max_slots: int = MAX_GPU_SLOTS,
    doubling_cost: float = 0.0,
) -> BindingLimit:
    """Return what limits a server whose simulated capacity is `rate`, requests/s.

    `taken_share`: the part of the time that other processes took from the engine, 0..1; None: it
    was not watched. `max_slots` and `doubling_cost` are those of slot_count.best_slots.
    """
    unloaded = server.unloaded()
    if slo.met_by(unloaded).mean() < slo.target or not rate:
        unloaded_limit = missed_unloaded([unloaded], slo)
        return msgspec.structs.replace(unloaded_limit, taken_share=taken_share)
    if taken_share is not None and taken_share >= MIN_TAKEN:
        return by_other_processes(rate, taken_share)
    simulated = server.play(rate)
    missed = ~slo.met_by(simulated)
    missed_limit, missed_limit_share = _first_missed(simulated, slo)
    binding = BindingLimit(
        kind="weights",
        rate=rate,
        shares=busy_shares(server.step_times, simulated),
        missed_limit=missed_limit,
        missed_limit_share=missed_limit_share,
        taken_share=taken_share,
    )
    gains = _Gains(server, slo)
    gain_by_cost = {kind: gains.cheaper(kind) for kind in COSTS}
    kind = max(COSTS, key=gain_by_cost.__getitem__)
    gain = gain_by_cost[kind]
    binding = msgspec.structs.replace(binding, kind=kind, lifted_rate=rate * gain)
    choose = partial(best_slots, server, slo, max_slots=max_slots, doubling_cost=doubling_cost)
    for setting in _larger_settings(gains, simulated, missed, choose):
        if setting.gain >= max(MIN_GAIN, AS_GOOD * gain):
            gain = setting.gain
            binding = msgspec.structs.replace(
                binding,
                kind=setting.kind,
                waited_share=setting.waited_share,
                lifted_rate=rate * gain,
                lifted_to=setting.amount,
            )
    lost_share = _lost_share(server, simulated)
    if lost_share >= MIN_LOST:
        settings = _with_all_histories(server)
        histories_gain = gains.with_settings(settings)
        if histories_gain >= max(MIN_GAIN, AS_GOOD * gain):
            lifted_rate = rate * histories_gain
            binding = msgspec.structs.replace(
                binding,
                kind="histories",
                lost_share=lost_share,
                waited_share=None,
                lifted_rate=lifted_rate,
                lifted_to=_history_tokens(
                    server.changed(None, settings, count=compared_requests(server)), lifted_rate
                ),
            )
    return binding


def by_other_processes(rate: float, taken_share: float) -> BindingLimit:
    """Return the limit of a server from which other processes took this share of time.

    `rate`: its capacity with them, requests/s.
    """
    lifted = rate / (1 - min(taken_share, MAX_TAKEN))
    return BindingLimit(
        kind="other_processes",
        rate=rate,
        taken_share=taken_share,
        lifted_rate=lifted if rate else None,
    )


class _Gains:
    """The capacities of changed servers as multiples of one server's, with the same requests."""

    def __init__(self, server: Server, slo: Slo) -> None:
        self.server, self._slo = server, slo
        self._own = self._capacity()

    def cheaper(self, kind: LimitKind) -> float:
        """Return the gain of halving one cost."""
        step_times = self.server.step_times
        lowered = {name: getattr(step_times, name) * LIFTED_COST for name in COSTS[kind]}
        if not any(lowered.values()):
            return 1.0
        return self._gain(msgspec.structs.replace(step_times, **lowered))

    def with_settings(self, settings: SchedulerSettings) -> float:
        return self._gain(settings=settings)

    def _gain(
        self,
        step_times: StepTimeModel | None = None,
        settings: SchedulerSettings | None = None,
    ) -> float:
        return max(1.0, self._capacity(step_times, settings) / self._own) if self._own else 1.0

    def _capacity(
        self,
        step_times: StepTimeModel | None = None,
        settings: SchedulerSettings | None = None,
    ) -> float:
        count = compared_requests(self.server)
        return self.server.changed(step_times, settings, count=count).crossing(self._slo)


class _LargerSetting(NamedTuple):
    """More slots or KV memory, and what they gain."""

    kind: LimitKind
    waited_share: float  # of the requests that missed the SLO: those that had waited for it
    gain: float  # the capacity with it as a multiple of the server's
    amount: int  # the slots, or tokens of KV memory


def _larger_settings(
    gains: _Gains, simulated: SimulatedLoad, missed: Flags, choose: Callable[[], SlotsChoice]
) -> Iterator[_LargerSetting]:
    """Yield the best number of slots and twice the KV memory, each only if most requests that
    missed the SLO had waited for it."""

    def waited_share(has_waited: Flags) -> float:
        return float(has_waited[missed].mean()) if missed.any() else 0.0

    slots_share = waited_share(simulated.waited_for_slot)
    kv_share = waited_share(simulated.waited_for_kv)
    settings = gains.server.settings
    if slots_share >= MIN_WAITED:
        choice = choose()
        if choice.slots > settings.slots:
            yield _LargerSetting("slots", slots_share, choice.gain, choice.slots)
    if kv_share >= MIN_WAITED and settings.kv_tokens is not None:
        kv_tokens = settings.kv_tokens * MORE
        larger = msgspec.structs.replace(settings, kv_tokens=kv_tokens)
        yield _LargerSetting("kv_memory", kv_share, gains.with_settings(larger), kv_tokens)


def _with_all_histories(server: Server) -> SchedulerSettings:
    """Return the server's settings with a prompt cache that never drops a history."""
    settings, lengths = server.settings, server.lengths
    copy_seconds = COPY_SHARE * server.step_times.prompt_token_seconds
    return msgspec.structs.replace(
        settings,
        stored_tokens=int((lengths.prompt + lengths.output).sum()),
        stored_sequence_tokens=0,
        copy_token_seconds=settings.copy_token_seconds or copy_seconds,
    )


def _history_tokens(server: Server, rate: float) -> int:
    """Return the tokens in the histories of the users who are there at this rate, rounded to two
    digits."""
    tokens = (server.users(rate) or 0.0) * float(
        (server.lengths.prompt + server.lengths.output).mean()
    )
    return int(float(f"{tokens:.1e}"))


def _lost_share(server: Server, simulated: SimulatedLoad) -> float:
    """Return the share of all prompt tokens that the server computes again because another
    conversation took the place of their KV, 0..1."""
    if server.lengths.turns is None:
        return 0.0
    lost_tokens = server.max_cached().mean() - np.nanmean(simulated.cached)
    return max(0.0, float(lost_tokens / server.lengths.prompt.mean()))


def busy_shares(step_times: StepTimeModel, simulated: SimulatedLoad) -> BusyShares:
    """Return how the busy time of a simulation divides, by its step-time model."""
    work = simulated.work
    prompts = step_times.prompt_token_seconds * work.prompt_tokens
    prompts += step_times.pass_seconds * (work.passes - work.steps)
    rows = step_times.row_seconds * work.rows
    context = step_times.context_token_seconds * work.context_tokens
    # The rest is what every step costs, and the experts that its passes read.
    weights = max(0.0, work.seconds - prompts - rows - context)
    total = prompts + rows + context + weights
    return BusyShares(
        prompts=prompts / total,
        weights=weights / total,
        rows=rows / total,
        context=context / total,
    )


def _first_missed(times: Times, slo: Slo) -> tuple[str | None, float | None]:
    """Return the time whose limit most of the requests that miss the SLO miss first, and their
    share of these requests; (None, None): all meet it."""
    is_left = ~slo.met_by(times)
    missed = int(is_left.sum())
    counts: dict[str, int] = {}
    for name, is_met in slo.met_limits(times).items():
        counts[name] = int((is_left & ~is_met).sum())
        is_left &= is_met
    if not missed or not counts:
        return None, None
    name = max(counts, key=counts.__getitem__)
    return name, counts[name] / missed


def missed_unloaded(streams: Sequence[Times], slo: Slo) -> BindingLimit:
    """Return the limit of a server whose single requests miss the SLO.

    `streams`: times of single requests, simulated or measured. The limit that most of them miss
    counts. The prompt binds if at least half of that time has passed at the first token.
    """
    missed = dict.fromkeys(slo.limits, 0)
    for times in streams:
        for name, is_met in slo.met_limits(times).items():
            missed[name] += int((~is_met).sum())
    name = max(missed, key=missed.__getitem__)
    kind: LimitKind = "unloaded_tokens"
    if LIMITED_TIMES[name].includes_queue:
        first_tokens = np.concatenate([times.ttft for times in streams])
        limited = np.concatenate([getattr(times, name) for times in streams])
        if np.median(first_tokens) >= np.median(limited) / 2:
            kind = "unloaded_prompt"
    return BindingLimit(kind=kind, rate=0.0, missed_limit=name)


def sentence_of(binding: BindingLimit, unit_rate: float | None = None) -> str:
    """Return a text that says what binds, why, and what would raise the capacity.

    `unit_rate`: the rate in whose unit rates are written; None: the capacity.
    """
    rise = _rise(binding, unit_rate)
    remedy = REMEDIES[binding.kind]
    if binding.is_on_gpu:
        remedy = GPU_REMEDIES.get(binding.kind, remedy)
    elif binding.is_int8:
        remedy = INT8_REMEDIES.get(binding.kind, remedy)
    if binding.kind in ("unloaded_prompt", "unloaded_tokens"):
        return f"Even a single request misses {_missed_words(binding)}. What helps: {remedy}."
    subject = f"{binding.words[:1].upper()}{binding.words[1:]}"
    if binding.kind in ("slots", "kv_memory"):
        unit, waited_for, how = "tokens of KV memory", "it", ""
        if binding.kind == "slots":
            unit, waited_for = "slots", "a slot"
            if binding.slots_option:
                how = f" To set them: {binding.slots_option.format(slots=binding.lifted_to)}."
        return (
            f"{subject} binds: {_percent(binding.waited_share)} of the requests that miss the SLO "
            f"had to wait for {waited_for}. {binding.lifted_to:,} {unit} would raise the capacity"
            f"{rise}.{how}"
        )
    if binding.kind == "histories":
        return (
            f"{subject} binds: {_percent(binding.lost_share)} of all prompt tokens are computed "
            "again, because the histories that they belong to do not fit. Room for about "
            f"{binding.lifted_to:,} tokens of them would raise the capacity{rise}. "
            f"What helps: {remedy}."
        )
    if binding.kind == "other_processes":
        without_words = f" Without them the capacity would rise{rise}." if rise else ""
        return (
            f"{subject} bind: they took {_percent(binding.taken_share)} of the engine's time on "
            f"its cores.{without_words} What helps: {remedy}."
        )
    late_words = ""
    if binding.missed_limit is not None:
        late_words = f" Requests that miss the SLO mostly miss {_missed_words(binding)}."
    return (
        f"{subject} binds: halving {COST_WORDS[binding.kind]} would raise the capacity"
        f"{rise}. It takes {_shares_words(binding)}.{late_words} What helps: {remedy}."
    )


def _missed_words(binding: BindingLimit) -> str:
    """Return `the TTFT limit`; `the SLO` if the limit is not known."""
    name = binding.missed_limit
    return "the SLO" if name is None else f"the {name.upper()} limit"


def _shares_words(binding: BindingLimit) -> str:
    """Return `62 % of the engine's busy time (the rest: memory bandwidth 30 %, ...)`."""
    assert binding.shares is not None
    share_by_kind: dict[LimitKind, float] = {
        "prompts": binding.shares.prompts,
        "weights": binding.shares.weights,
        "rows": binding.shares.rows,
        "context": binding.shares.context,
    }
    own_share = share_by_kind.pop(binding.kind)
    largest_first = sorted(share_by_kind.items(), key=lambda pair: -pair[1])
    rest = ", ".join(
        f"{KIND_WORDS[kind]} {_percent(share)}"
        for kind, share in largest_first
        if share >= MIN_SHOWN_SHARE
    )
    rest_words = f" (the rest: {rest})" if rest else ""
    return f"{_percent(own_share)} of the engine's busy time{rest_words}"


def _rise(binding: BindingLimit, unit_rate: float | None) -> str:
    """Return ` from 23 to about 58 requests a minute`; "" if the lifted rate is unknown."""
    if binding.lifted_rate is None:
        return ""
    unit_rate = unit_rate or binding.rate
    unit = formatting.rate_unit(unit_rate)[1]
    current = formatting.rate(binding.rate, like=unit_rate).removesuffix(unit)
    lifted = formatting.of_requests(formatting.rate(binding.lifted_rate, like=unit_rate))
    return f" from {current} to about {lifted}"


def _percent(share: float | None) -> str:
    return formatting.share(None if share is None else round(share, 2), 2)

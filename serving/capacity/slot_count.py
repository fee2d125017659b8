"""Chooses the number of slots with which a server has the highest simulated capacity. Pure.

    choice = best_slots(server, slo, max_slots=64)
    choice.slots, choice.rate, choice.gain

The one rule by which `serve`, campaigns and the advice of reports choose slots. With more of them,
more requests run at once and more histories of conversations are kept, but each step takes longer,
so that the SLO may be missed. On some engines a step also takes longer because its rows lie in
slots that are not neighbors (`doubling_cost`). Memory sets `max_slots`.
"""

from __future__ import annotations

import math

import msgspec

from crossover.serving.capacity.scheduler_settings import (
    MAX_GPU_SLOTS,
    SLOT_COUNTS,
    SchedulerSettings,
)
from crossover.serving.capacity.simulated_capacity import Server
from crossover.serving.capacity.slo import Slo

REQUESTS = 800  # in each of the simulations that are compared with each other
# Turns of conversations, whose histories must have filled and left the slots several times: with
# 800, a server with too few slots for its histories had 0.6 of the capacity that it has with 3,200
# and more, and with 1,600 it had 0.94 of it.
CONVERSATION_REQUESTS = 1_600
MIN_GAIN = 1.1  # a server is started again, or advice given, only for a capacity this much higher
NEARLY_BEST = 0.98  # capacities above this share of the highest one cannot be told apart


class SlotsChoice(msgspec.Struct, frozen=True):
    """The number of slots with the highest capacity, beside the server's present number."""

    slots: int
    rate: float  # the simulated capacity with them, requests/s
    present_slots: int
    present_rate: float  # the simulated capacity with the present ones, requests/s

    @property
    def gain(self) -> float:
        """How many times the present capacity the chosen slots give; 1.0: both are 0."""
        if self.present_rate:
            return self.rate / self.present_rate
        return math.inf if self.rate else 1.0

    @property
    def is_worth_a_restart(self) -> bool:
        return self.slots != self.present_slots and self.gain >= MIN_GAIN


def best_slots(
    server: Server,
    slo: Slo,
    *,
    max_slots: int = MAX_GPU_SLOTS,
    doubling_cost: float = 0.0,
    prefers_more: bool = False,
) -> SlotsChoice:
    """Return the number of slots with the highest capacity, at most `max_slots`.

    Where the capacities of several numbers cannot be told apart, it is the present number, or else
    the smallest, which needs the least memory; with `prefers_more` it is the largest, because idle
    slots keep the histories of conversations that the workload does not have. If even single
    requests miss the SLO, it is the present number.
    `doubling_cost`: by which share a decode step takes longer with twice as many slots.
    """
    present = server.settings.slots
    if slo.met_by(server.unloaded()).mean() < slo.target:
        return SlotsChoice(present, 0.0, present, 0.0)
    counts = {count for count in SLOT_COUNTS if count <= max_slots}
    rates = {
        count: _rate(server, slo, count, doubling_cost) for count in sorted({*counts, present})
    }
    enough = NEARLY_BEST * max(rates.values())
    nearly_best = [count for count, rate in rates.items() if rate >= enough]
    if prefers_more:
        slots = max(nearly_best)
    else:
        slots = present if present in nearly_best else min(nearly_best)
    return SlotsChoice(slots, rates[slots], present, rates[present])


def _rate(server: Server, slo: Slo, slots: int, doubling_cost: float) -> float:
    """Return the simulated capacity with this number of slots, requests/s."""
    doublings = max(0.0, math.log2(slots / server.settings.slots))
    slower = (1 + doubling_cost) ** doublings
    step_times = msgspec.structs.replace(
        server.step_times,
        base_seconds=server.step_times.base_seconds * slower,
        row_seconds=server.step_times.row_seconds * slower,
    )
    settings = with_slots(server.settings, slots)
    return server.changed(step_times, settings, count=compared_requests(server)).crossing(slo)


def compared_requests(server: Server) -> int:
    """Return how many requests of a server are simulated to compare it with changed ones."""
    is_independent = server.lengths.turns is None
    return min(server.count, REQUESTS if is_independent else CONVERSATION_REQUESTS)


def with_slots(settings: SchedulerSettings, slots: int) -> SchedulerSettings:
    """Return the settings with another number of slots. A step has room for two tokens of each, and
    a KV cache that had room for all contexts keeps it."""
    kv_tokens = settings.kv_tokens
    if kv_tokens is not None and kv_tokens >= settings.slots * settings.context_tokens:
        kv_tokens = slots * settings.context_tokens
    return msgspec.structs.replace(
        settings,
        slots=slots,
        kv_tokens=kv_tokens,
        step_tokens=max(settings.step_tokens, 2 * slots),
    )

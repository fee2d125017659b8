"""The number of slots with the highest capacity, on servers whose best number is known."""

from __future__ import annotations

import msgspec
import pytest

from crossover.serving.capacity.scheduler_settings import SchedulerSettings
from crossover.serving.capacity.simulated_capacity import SEED, Server, lengths_of
from crossover.serving.capacity.slo import SLO_PRESETS, Slo
from crossover.serving.capacity.slot_count import best_slots, with_slots
from crossover.serving.capacity.step_time_model import StepTimeModel
from crossover.serving.workload.request_lengths import Workload

CHAT = SLO_PRESETS["chat"]
WORKLOAD = Workload(preset="chat", max_prompt_tokens=64, max_output_tokens=64)
SHORT = Workload(preset="chat", max_prompt_tokens=64, max_output_tokens=16)
PATIENT = Slo("patient", ttft_seconds=8.0, tpot_seconds=0.2, target=0.9)
COUNT = 300  # requests of a simulation


def server(
    base: float, row: float, slots: int = 16, prompt: float = 0.1, workload: Workload = WORKLOAD
) -> Server:
    """Times are in milliseconds."""
    step_times = StepTimeModel(
        base_seconds=base / 1e3, row_seconds=row / 1e3, prompt_token_seconds=prompt / 1e3
    )
    settings = SchedulerSettings(slots=slots, step_tokens=2048, step_seconds_target=None)
    return Server(step_times, settings, lengths_of(workload, COUNT, SEED), count=COUNT)


def measured(one: Server, slots: int, slo: Slo = CHAT) -> float:
    changed = one.changed(None, with_slots(one.settings, slots), count=COUNT)
    return changed.crossing(slo)


@pytest.mark.parametrize(
    ("one", "slo", "has_more"),
    [
        (server(60, 0.2), CHAT, True),  # a step takes as long with any number of rows
        # Sixteen rows take longer than a token may, and those who wait have time.
        (server(20, 40, workload=SHORT), PATIENT, False),
    ],
    ids=["cheap rows", "dear rows"],
)
def test_the_slots_with_the_highest_capacity_are_chosen(
    one: Server, slo: Slo, has_more: bool
) -> None:
    choice = best_slots(one, slo, max_slots=64)
    assert choice.slots != 16 and (choice.slots > 16) == has_more and choice.is_worth_a_restart
    assert choice.rate == pytest.approx(measured(one, choice.slots, slo))
    assert choice.present_rate == pytest.approx(measured(one, 16, slo))
    assert choice.rate >= 0.98 * max(measured(one, slots, slo) for slots in (4, 8, 16, 32, 64))


def test_memory_bounds_the_slots() -> None:
    choice = best_slots(server(60, 0.2), CHAT, max_slots=32)
    assert choice.slots == 32
    kept = best_slots(server(60, 0.2), CHAT, max_slots=16)
    assert kept.slots == 16 and not kept.is_worth_a_restart


def test_steps_that_take_longer_with_more_slots_may_outweigh_the_gain() -> None:
    one = server(40, 1.0)
    free = best_slots(one, CHAT, max_slots=64)
    priced = best_slots(one, CHAT, max_slots=64, doubling_cost=0.5)
    assert free.slots > 16 and priced.slots < free.slots and priced.rate < free.rate
    assert best_slots(one, CHAT, max_slots=16, doubling_cost=0.5).rate == pytest.approx(
        best_slots(one, CHAT, max_slots=16).rate
    ), "the present slots cost nothing more"


def test_numbers_with_equal_capacity_keep_the_present_one_unless_histories_count() -> None:
    """Where prompts bind, slots make no difference."""
    prompts = Workload(preset="chat", max_prompt_tokens=1024, max_output_tokens=8)
    one = server(1, 0.0, prompt=0.5, workload=prompts)
    assert best_slots(one, CHAT, max_slots=64).slots == 16
    assert best_slots(one, CHAT, max_slots=64, prefers_more=True).slots == 64


def test_the_present_slots_stay_where_single_requests_miss_the_slo() -> None:
    choice = best_slots(server(500, 1), CHAT)
    assert (choice.slots, choice.gain) == (16, 1.0) and not choice.is_worth_a_restart


def test_a_cache_with_room_for_all_contexts_keeps_it_and_a_smaller_pool_stays() -> None:
    whole = SchedulerSettings(slots=16, context_tokens=1024, kv_tokens=16 * 1024)
    assert with_slots(whole, 32).kv_tokens == 32 * 1024
    pool = msgspec.structs.replace(whole, kv_tokens=4096)
    assert with_slots(pool, 32).kv_tokens == 4096
    assert with_slots(whole, 512).step_tokens == 1024, "two tokens for each slot"


def test_the_gain_of_slots_with_conversations_is_that_of_the_capacities() -> None:
    """Eight slots lose most histories. Of so few conversations that none is lost at first, the
    capacity would be another."""
    talk = Workload(prompt_tokens=200, output_tokens=40, turns=5, think_seconds=20.0)
    step_times = StepTimeModel(
        base_seconds=0.0075,
        row_seconds=0.00115,
        prompt_token_seconds=0.00085,
        context_token_seconds=3e-6,
    )
    settings = SchedulerSettings(slots=8, context_tokens=2048)
    one = Server(step_times, settings, lengths_of(talk, 4000, SEED), count=4000)
    slo = SLO_PRESETS["conversation"]
    choice = best_slots(one, slo, max_slots=32)
    present, best = (
        one.changed(None, with_slots(settings, slots), count=4000).crossing(slo)
        for slots in (8, choice.slots)
    )
    assert choice.slots == 32 and choice.gain == pytest.approx(best / present, rel=0.15)

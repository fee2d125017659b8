"""Worlds whose limit is known since they were built for it: the function must name it, and no other
relief of the same size may raise the capacity more."""

from __future__ import annotations

from typing import NamedTuple

import msgspec
import pytest

from crossover.serving.capacity.binding_limit import (
    AS_GOOD,
    COPY_SHARE,
    KIND_WORDS,
    REMEDIES,
    BindingLimit,
    BusyShares,
    LimitKind,
    binding_limit,
    sentence_of,
)
from crossover.serving.capacity.scheduler_settings import SchedulerSettings
from crossover.serving.capacity.simulated_capacity import SEED, Server, lengths_of
from crossover.serving.capacity.slo import SLO_PRESETS, Slo
from crossover.serving.capacity.slot_count import with_slots
from crossover.serving.capacity.step_time_model import StepTimeModel
from crossover.serving.workload.request_lengths import Workload

CHAT = SLO_PRESETS["chat"]
COUNT = 300  # requests of a simulation


class World(NamedTuple):
    step_times: StepTimeModel
    settings: SchedulerSettings
    prompt_tokens: int
    output_tokens: int
    turns: int | None = None  # of a conversation; None: independent requests

    def server(self, **changes: object) -> Server:
        world = self._replace(**changes)  # type: ignore[arg-type]
        workload = Workload(
            preset="chat",
            max_prompt_tokens=world.prompt_tokens,
            max_output_tokens=world.output_tokens,
        )
        if world.turns is not None:
            workload = Workload(
                prompt_tokens=world.prompt_tokens,
                output_tokens=world.output_tokens,
                turns=world.turns,
                think_seconds=20.0,
                turn_tokens=40,
            )
        lengths = lengths_of(workload, COUNT, SEED)
        return Server(world.step_times, world.settings, lengths, count=COUNT)


def settings(slots: int = 16, kv_tokens: int | None = None) -> SchedulerSettings:
    return SchedulerSettings(
        slots=slots, kv_tokens=kv_tokens, step_tokens=2048, step_seconds_target=None
    )


def step_times(
    base: float, row: float, prompt: float, context: float = 0.0, **more: float
) -> StepTimeModel:
    """In milliseconds."""
    numbers = {
        "base_seconds": base,
        "row_seconds": row,
        "prompt_token_seconds": prompt,
        "context_token_seconds": context,
    }
    return StepTimeModel(**{name: value / 1e3 for name, value in numbers.items()}, **more)


WORLDS: dict[LimitKind, World] = {
    "prompts": World(step_times(5, 1, 1.2), settings(), 1024, 32),
    "weights": World(step_times(60, 0.5, 0.02), settings(64), 64, 256),
    "rows": World(step_times(3, 12, 0.1), settings(), 64, 256),
    "context": World(step_times(5, 0.5, 0.01, 0.012), settings(), 2000, 200),
    "slots": World(step_times(30, 0.5, 0.05), settings(2), 64, 128),
    "kv_memory": World(step_times(30, 0.5, 0.05), settings(64, kv_tokens=2500), 512, 128),
    "histories": World(step_times(8, 0.5, 1.5), settings(4, kv_tokens=8192), 200, 40, turns=8),
}


def reliefs(world: World) -> dict[str, World]:
    """The world with half of each cost, or twice of each setting."""

    def cheaper(*names: str) -> World:
        halved = {name: getattr(world.step_times, name) / 2 for name in names}
        return world._replace(step_times=msgspec.structs.replace(world.step_times, **halved))

    def more(**values: float) -> World:
        return world._replace(settings=msgspec.structs.replace(world.settings, **values))

    found = {
        "prompts": cheaper("prompt_token_seconds"),
        "weights": cheaper("base_seconds"),
        "rows": cheaper("row_seconds"),
        "context": cheaper("context_token_seconds"),
        "slots": more(slots=2 * world.settings.slots),
    }
    if world.turns is not None:
        copy_seconds = world.step_times.prompt_token_seconds * COPY_SHARE
        found["histories"] = more(stored_tokens=10**7, copy_token_seconds=copy_seconds)
    elif world.settings.kv_tokens is not None:
        found["kv_memory"] = more(kv_tokens=2 * world.settings.kv_tokens)
    return found


@pytest.mark.parametrize("kind", WORLDS)
def test_the_limit_that_a_world_was_built_for_binds(kind: LimitKind) -> None:
    world = WORLDS[kind]
    server = world.server()
    rate = server.crossing(CHAT)
    binding = binding_limit(server, CHAT, rate)
    assert binding.kind == kind
    lifted = {name: other.server().crossing(CHAT) for name, other in reliefs(world).items()}
    if kind == "slots":  # not twice as many, but the best number
        assert binding.lifted_to is not None
        best = with_slots(world.settings, binding.lifted_to)
        lifted[kind] = world.server(settings=best).crossing(CHAT)
    assert lifted[kind] >= AS_GOOD * max(lifted.values())
    assert binding.lifted_rate == pytest.approx(lifted[kind], rel=0.05)
    assert binding.lifted_rate is not None and binding.lifted_rate > 1.1 * rate
    shares = msgspec.structs.astuple(binding.shares)  # type: ignore[arg-type]
    assert sum(shares) == pytest.approx(1.0)
    words = sentence_of(binding)
    assert binding.missed_limit is not None
    assert words.lower().startswith(KIND_WORDS[kind].lower())
    assert kind in ("slots", "kv_memory") or REMEDIES[kind] in words


def test_histories_that_fit_bind_nothing() -> None:
    world = WORLDS["histories"]
    stored = msgspec.structs.replace(world.settings, stored_tokens=10**7)
    server = world.server(settings=stored)
    binding = binding_limit(server, CHAT, server.crossing(CHAT))
    assert binding.kind != "histories" and binding.lost_share is None
    # Room for as many tokens as the sentence says is enough.
    lossy = world.server()
    binding = binding_limit(lossy, CHAT, lossy.crossing(CHAT))
    assert binding.lost_share is not None and binding.lost_share > 0.1
    assert binding.lifted_to is not None and binding.lifted_rate is not None
    enough = world.server(
        settings=msgspec.structs.replace(world.settings, stored_tokens=binding.lifted_to)
    )
    assert enough.crossing(CHAT) > 0.8 * binding.lifted_rate
    assert f"{binding.lifted_to:,} tokens" in sentence_of(binding)


def test_without_load_the_limit_that_single_requests_miss_binds() -> None:
    slow_prompts = World(step_times(5, 1, 20), settings(), 1024, 32).server()
    slow_tokens = World(step_times(200, 1, 0.2), settings(), 1024, 32).server()
    e2e, ttfa = Slo("answer", e2e_seconds=4.0), Slo("answer itself", ttfa_seconds=2.0)
    for server, slo, kind, limit in (
        (slow_prompts, CHAT, "unloaded_prompt", "TTFT"),
        (slow_tokens, CHAT, "unloaded_tokens", "TPOT"),
        (slow_prompts, e2e, "unloaded_prompt", "E2E"),
        (slow_tokens, e2e, "unloaded_tokens", "E2E"),
        (slow_prompts, ttfa, "unloaded_prompt", "TTFA"),
    ):
        binding = binding_limit(server, slo, 0.0)
        assert (binding.kind, binding.rate, binding.lifted_rate) == (kind, 0.0, None)
        assert f"misses the {limit} limit" in sentence_of(binding)


def test_other_processes_bind_where_they_took_a_tenth_of_the_engine() -> None:
    server = WORLDS["rows"].server()
    rate = server.crossing(CHAT)
    assert binding_limit(server, CHAT, rate, taken_share=0.02).kind == "rows"
    binding = binding_limit(server, CHAT, rate, taken_share=0.3)
    assert binding.kind == "other_processes"
    assert binding.lifted_rate == pytest.approx(rate / 0.7)
    assert "30 %" in sentence_of(binding)


def test_the_busy_time_of_a_simulation_is_that_of_its_steps() -> None:
    """Shares are of all steps by the step-time model: their sum is the engine's busy time."""
    world = WORLDS["kv_memory"]
    server = world.server(step_times=step_times(20, 2, 0.4, 0.001, pass_seconds=0.004))
    played = server.play(1.0)
    assert server.step_times.of(played.work) == pytest.approx(played.work.seconds)


def test_every_kind_has_a_sentence() -> None:
    assert set(KIND_WORDS) == set(REMEDIES)
    for kind in KIND_WORDS:
        if kind in WORLDS or kind == "other_processes":
            continue
        assert sentence_of(BindingLimit(kind=kind, rate=0.0)).endswith(".")


def test_the_capacities_have_the_unit_of_the_table_around_the_sentence() -> None:
    shares = BusyShares(prompts=0.25, weights=0.25, rows=0.25, context=0.25)
    binding = BindingLimit(kind="prompts", rate=1.1, lifted_rate=1.6, shares=shares)
    assert "from 1.1 to about 1.6 requests/s" in sentence_of(binding)
    assert "from 66 to about 96 requests a minute" in sentence_of(binding, unit_rate=0.5)


def test_no_gpu_is_advised_to_have_cores_or_a_gpu() -> None:
    kinds: tuple[LimitKind, ...] = (
        "unloaded_prompt",
        "unloaded_tokens",
        "weights",
        "rows",
        "prompts",
    )
    for kind in kinds:
        shares = BusyShares(prompts=0.25, weights=0.25, rows=0.25, context=0.25)
        words = sentence_of(BindingLimit(kind=kind, rate=1.0, shares=shares, is_on_gpu=True))
        assert "cores" not in words and "or a GPU" not in words


def test_no_engine_that_computes_in_int8_is_advised_to_compute_in_int8() -> None:
    shares = BusyShares(prompts=0.25, weights=0.25, rows=0.25, context=0.25)
    kinds: tuple[LimitKind, ...] = ("unloaded_prompt", "prompts")
    for kind in kinds:
        binding = BindingLimit(kind=kind, rate=1.0, shares=shares)
        assert "an engine that computes in int8" in sentence_of(binding)
        words = sentence_of(msgspec.structs.replace(binding, is_int8=True))
        assert "int8" not in words and "a GPU." in words

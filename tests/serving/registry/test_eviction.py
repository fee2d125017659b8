"""Who must go so that another model fits: numbers in, names out."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest

from crossover.serving.backends.backend_interface import EngineMemory
from crossover.serving.errors import NoRoom
from crossover.serving.placement.placement_policy import Attempt, NoPlacement
from crossover.serving.registry.eviction import bytes_by_place, bytes_free, choose_eviction


class Resident(NamedTuple):
    """What is asked of a ServedModel."""

    served_name: str
    predicted_bytes: dict[str, int]
    last_used_at: float
    is_busy: bool
    measured_bytes: int = 0


def memory(weights: int, kv: int, overhead: int) -> EngineMemory:
    return EngineMemory(weight_bytes=weights, kv_bytes=kv, overhead_bytes=overhead)


def resident(name: str, takes: int, used_at: float, busy: bool = False, place: str = "cpu") -> Any:
    return Resident(name, {place: takes}, used_at, busy)


def first_to_go(need: int, *residents: Any) -> str | None:
    """For so many bytes of RAM, of which 10 are free."""
    return choose_eviction([{"cpu": need}], residents, {"cpu": 10})[1]


def test_the_least_recently_used_goes_first_and_nobody_without_need() -> None:
    residents = [resident("young", 5, 3.0), resident("old", 5, 1.0), resident("middle", 5, 2.0)]
    assert first_to_go(10, *residents) is None
    assert first_to_go(14, *residents) == first_to_go(16, *residents) == "old"
    assert first_to_go(16, *residents[:1], residents[2]) == "middle"


def test_a_busy_model_never_goes() -> None:
    with pytest.raises(NoRoom, match="needed on the CPU, .* while busy are busy"):
        first_to_go(15, resident("busy", 20, 1.0, busy=True), resident("idle", 2, 2.0))


def test_the_first_device_is_preferred_even_where_somebody_must_go_for_it() -> None:
    options = [{"GPU-1": 8}, {"cpu": 8}]
    free = {"GPU-1": 2, "cpu": 10}
    for busy, expected in ((False, (0, "a")), (True, (1, None))):
        residents = [resident("a", 8, 1.0, busy, "GPU-1")]
        assert choose_eviction(options, residents, free) == expected
    assert choose_eviction([{"GPU-1": 1 << 60}], [], {"GPU-1": None})[0] == 0, "it does not say"


def test_of_two_cards_only_the_one_that_is_needed_gives_memory_back() -> None:
    """Half of the need free on each card is room on none."""
    residents = [resident("a", 20, 1.0, False, "GPU-1"), resident("b", 20, 2.0, False, "GPU-2")]
    assert choose_eviction([{"GPU-2": 24}], residents, {"GPU-2": 4}) == (0, "b")
    with pytest.raises(NoPlacement, match="even without other models"):
        choose_eviction([{"GPU-2": 30}], residents, {"GPU-2": 4})


def test_needs_and_free_bytes_are_those_of_a_place_and_a_standby_engine_needs_room_too() -> None:
    on_gpu = Attempt("gpu", "torch", "bf16", "H100", memory(5, 3, 2), 4, device_id="GPU-1")
    on_cpu = Attempt("cpu", "llama_cpp", "Q4_0", "CPU", memory(2, 1, 1), 50)
    assert bytes_by_place([on_gpu, on_cpu]) == {"GPU-1": 10, "cpu": 4}
    residents: list[Any] = [Resident("x", {"cpu": 30}, 0.0, False, measured_bytes=25)]
    assert bytes_free([on_gpu, on_cpu], residents, None) == {"GPU-1": 4, "cpu": 45}
    assert bytes_free([on_gpu, on_cpu], residents, 60) == {"GPU-1": 4, "cpu": 30}

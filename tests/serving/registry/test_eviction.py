"""Who must go so that another model fits: numbers in, names out."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from serving.placement.placement_policy import Attempt
from serving.registry.eviction import Resident, bytes_free, bytes_needed, make_room

FREE: dict[str, int | None] = {"cpu": 10}


def resident(
    name: str, takes: int, used_at: float, busy: bool = False, device: str = "cpu"
) -> Resident:
    return Resident(name, {device: takes}, used_at, busy)


def test_what_fits_evicts_nobody() -> None:
    verdict = make_room([{"cpu": 10}], [resident("a", 5, 1.0)], FREE)
    assert (verdict.option, verdict.evict) == (0, ())


def test_the_least_recently_used_goes_first_and_no_more_than_needed() -> None:
    residents = [resident("young", 5, 3.0), resident("old", 5, 1.0), resident("middle", 5, 2.0)]
    assert make_room([{"cpu": 14}], residents, FREE).evict == ("old",)
    assert make_room([{"cpu": 16}], residents, FREE).evict == ("old", "middle")


def test_an_old_small_one_stays_where_the_next_one_alone_is_enough() -> None:
    residents = [resident("small", 1, 1.0), resident("big", 20, 2.0)]
    assert make_room([{"cpu": 25}], residents, FREE).evict == ("big",)


def test_a_busy_model_never_goes_and_the_refusal_says_who_is_in_the_way() -> None:
    residents = [resident("busy", 20, 1.0, busy=True), resident("idle", 2, 2.0)]
    verdict = make_room([{"cpu": 15}], residents, FREE)
    assert (verdict.option, verdict.evict, verdict.may_change) == (None, (), True)
    assert "busy is busy" in verdict.text and "CPU" in verdict.text


def test_what_would_not_fit_even_alone_is_told_apart_from_what_may_fit_later() -> None:
    verdict = make_room([{"cpu": 100}], [resident("a", 20, 1.0, busy=True)], FREE)
    assert verdict.option is None and not verdict.may_change and "even alone" in verdict.text


def test_the_first_device_is_preferred_even_where_somebody_must_go_for_it() -> None:
    options = [{"gpu": 8}, {"cpu": 8}]
    idle, busy = resident("a", 8, 1.0, device="gpu"), resident("a", 8, 1.0, busy=True, device="gpu")
    free: dict[str, int | None] = {"gpu": 2, "cpu": 10}
    assert make_room(options, [idle], free) == make_room(options, [idle], free)
    assert (make_room(options, [idle], free).option, make_room(options, [idle], free).evict) == (
        0,
        ("a",),
    )
    assert (make_room(options, [busy], free).option, make_room(options, [busy], free).evict) == (
        1,
        (),
    )


def test_the_number_of_loaded_models_is_a_limit_of_its_own() -> None:
    residents = [resident("a", 0, 1.0), resident("b", 0, 2.0)]
    assert make_room([{"cpu": 1}], residents, FREE, most_loaded=2).evict == ("a",)
    assert make_room([{"cpu": 1}], residents, FREE, most_loaded=1).evict == ("a", "b")
    held = [resident("a", 0, 1.0, busy=True)]
    verdict = make_room([{"cpu": 1}], held, FREE, most_loaded=1)
    assert (
        verdict.option is None
        and verdict.may_change
        and "1 model may be loaded at once" in verdict.text
    )


def test_a_device_that_does_not_say_what_is_free_is_not_in_the_way() -> None:
    assert make_room([{"gpu": 1 << 60}], [], {"gpu": None}).option == 0


def test_an_engine_on_standby_needs_room_on_both_devices() -> None:
    residents = [resident("a", 6, 1.0)]
    assert make_room([{"gpu": 1, "cpu": 12}], residents, {"gpu": 5, "cpu": 10}).evict == ("a",)


@given(
    need=st.integers(0, 60),
    free=st.integers(-10, 40),
    sizes=st.lists(st.tuples(st.integers(0, 20), st.integers(0, 100), st.booleans()), max_size=6),
    most=st.none() | st.integers(1, 6),
)
def test_whatever_comes_the_answer_fits_spares_the_busy_and_takes_nobody_in_vain(
    need: int, free: int, sizes: list[tuple[int, int, bool]], most: int | None
) -> None:
    residents = [
        resident(str(number), takes, float(used), busy)
        for number, (takes, used, busy) in enumerate(sizes)
    ]
    verdict = make_room([{"cpu": need}], residents, {"cpu": free}, most)
    by_name = {one.name: one for one in residents}

    def fits(gone: set[str]) -> bool:
        room = free + sum(by_name[name].takes["cpu"] for name in gone)
        return room >= need and (most is None or len(residents) - len(gone) < most)

    idle = {one.name for one in residents if not one.busy}
    if verdict.option is None:
        assert not fits(idle)  # there was really nothing to be done
        assert verdict.may_change == fits(set(by_name))
    else:
        gone = set(verdict.evict)
        assert gone <= idle and fits(gone)
        assert not any(fits(gone - {name}) for name in gone)


def test_of_two_cards_only_the_one_that_is_needed_gives_memory_back() -> None:
    """Half of the need free on each card is room on none."""
    residents = [resident("a", 20, 1.0, device="GPU-1"), resident("b", 20, 2.0, device="GPU-2")]
    free: dict[str, int | None] = {"GPU-2": 4}
    assert make_room([{"GPU-2": 24}], residents, free).evict == ("b",)
    assert make_room([{"GPU-2": 30}], residents, free).option is None


def test_attempts_and_residents_of_a_gpu_are_told_apart_by_its_uuid() -> None:
    on_first = Attempt("gpu", "torch", "bf16", "H100", 5, 3, 2, 4, device_id="GPU-1")
    on_cpu = Attempt("cpu", "llama_cpp", "Q4_0", "CPU", 2, 1, 1, 50)
    assert bytes_needed([on_first, on_cpu], standby=True) == [{"GPU-1": 10, "cpu": 4}, {"cpu": 4}]
    held = [Resident("x", {"cpu": 30}, 0.0, False)]
    assert bytes_free([on_first, on_cpu], held, 5, 60) == {"GPU-1": 4, "cpu": 30}

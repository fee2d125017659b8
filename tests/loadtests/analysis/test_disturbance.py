"""Who took CPU time from the engine: the formula, by tables, and its words."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from loadtests.analysis.disturbance import (
    busiest,
    disturbance_of,
    in_words,
    is_lost,
    is_quiet,
    is_slight,
    is_steady_steal,
)
from loadtests.records.resource_sample import CoresSample, Stranger


def part(**figures: object) -> CoresSample:
    """A second in which the engine computed all the time, unless said otherwise."""
    quiet = {
        "seconds": 1.0,
        "busy_seconds": 1.0,
        "work_seconds": 1.0,
        "stalled_seconds": 0.0,
        "ours_seconds": 0.0,
        "strangers_seconds": 0.0,
        "steal_seconds": 0.0,
        "throttled_seconds": 0.0,
    }
    return CoresSample(**(quiet | figures))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("figures", "taken", "is_disturbed"),
    [
        ({}, 0.0, False),
        # A stranger that has the core half of the time.
        (
            {"work_seconds": 0.5, "stalled_seconds": 0.5, "strangers_seconds": 0.5},
            *(0.5, True),
        ),
        # One that ran while the engine had nothing to do.
        ({"work_seconds": 0.5, "strangers_seconds": 0.5}, 0.0, False),
        # Our API on the engine's core: the engine queues, and nobody else is to blame.
        ({"work_seconds": 0.8, "stalled_seconds": 0.2, "ours_seconds": 0.2}, 0.0, False),
        # Both, by the CPU time that each had.
        (
            {"stalled_seconds": 0.3, "ours_seconds": 0.2, "strangers_seconds": 0.1},
            *(0.1, True),
        ),
        # Threads of the engine behind each other: a stranger took no more than it ran.
        ({"stalled_seconds": 0.6, "strangers_seconds": 0.01}, 0.01, False),
        # Tick counters may be a little off in both directions.
        ({"stalled_seconds": 0.2, "strangers_seconds": -0.02}, 0.0, False),
        ({"steal_seconds": 0.1}, 0.1, False),  # the same in all parts: it is of the machine
        # Steal on a core of which the engine had a quarter.
        (
            {
                "busy_seconds": 0.2,
                "work_seconds": 0.2,
                "strangers_seconds": 0.6,
                "steal_seconds": 0.2,
            },
            *(0.05, False),
        ),
        ({"throttled_seconds": 0.2}, 0.2, True),
        # Above 3 % of what little it wanted, but nothing that delays a request.
        (
            {"work_seconds": 0.01, "stalled_seconds": 0.001, "strangers_seconds": 0.001},
            *(0.001, False),
        ),
        # 3 % is the limit.
        ({"steal_seconds": 0.02}, 0.02, False),
        ({"steal_seconds": 0.04}, 0.04, False),
        ({"throttled_seconds": 0.02}, 0.02, False),
        ({"throttled_seconds": 0.04}, 0.04, True),
    ],
)
def test_what_is_taken_and_by_whom(
    figures: dict[str, object], taken: float, is_disturbed: bool
) -> None:
    parts = [part(**figures)] * 20
    found = disturbance_of(parts)
    assert found is not None
    assert found.total.seconds == 20.0
    assert found.taken_seconds == pytest.approx(20 * taken)
    work = found.total.work_seconds
    assert work is not None
    assert found.share == pytest.approx(20 * taken / (work + 20 * taken), abs=1e-4)
    assert found.is_disturbed is is_disturbed
    taken_as_it_is = disturbance_of(parts, counts=True)
    assert taken_as_it_is is not None and not taken_as_it_is.is_set_aside


def stolen(shares: Sequence[float], work_seconds: float = 0.9) -> list[CoresSample]:
    """A reading for each share of what the engine wanted."""
    return [
        part(work_seconds=work_seconds, steal_seconds=work_seconds * share / (1 - share))
        for share in shares
    ]


def test_a_steal_that_is_always_the_same_is_the_machine_that_there_is() -> None:
    ticks = np.random.default_rng(1).poisson(6, 60) / 100
    for shares in ([0.06] * 60, ticks.tolist(), [0.05, 0.07] * 30):
        found = disturbance_of(stolen(shares))
        assert found is not None and not found.is_disturbed
        assert found.steady_steal_share == pytest.approx(0.06, abs=0.005)
        assert not is_lost(stolen(shares)[:2], 0.0, may_hold=False), "too early to tell"


@pytest.mark.parametrize(
    "shares", [[0.0] * 40 + [0.2] * 20, [0.02] * 30 + [0.12] * 30, [0.0] * 54 + [0.5] * 6]
)
def test_a_steal_that_comes_and_goes_is_a_disturbance(shares: list[float]) -> None:
    found = disturbance_of(stolen(shares))
    assert found is not None and found.is_disturbed and found.steady_steal_share is None
    assert is_lost(stolen(shares), 0.0, may_hold=False)


def test_a_steady_steal_excuses_no_stranger_and_needs_work_to_be_told() -> None:
    assert not is_steady_steal(stolen([0.06] * 60, work_seconds=0.04))
    assert not is_steady_steal(stolen([0.01] * 60)), "too little to speak of"
    beside = [
        part(steal_seconds=0.06, stalled_seconds=0.1, strangers_seconds=0.1) for _ in range(60)
    ]
    found = disturbance_of(beside)
    assert found is not None and found.steady_steal_share is not None and found.is_disturbed


def test_the_seconds_of_a_stranger_in_the_middle_are_those_of_the_whole_level() -> None:
    busy = part(work_seconds=0.5, stalled_seconds=0.5, strangers_seconds=0.5)
    found = disturbance_of([part()] * 15 + [busy] + [part()] * 4)
    assert found is not None
    assert found.share == pytest.approx(0.5 / 20, abs=1e-4) and not found.is_disturbed
    found = disturbance_of([part()] * 15 + [busy] * 2 + [part()] * 3)
    assert found is not None and found.is_disturbed


def test_what_cannot_be_read_is_none() -> None:
    assert disturbance_of([]) is None
    found = disturbance_of([CoresSample(seconds=1.0, strangers_seconds=0.4)])
    assert found is not None
    assert found.total.strangers_seconds == 0.4 and not found.is_disturbed
    for figure in ("busy", "work", "stalled", "steal", "throttled"):
        assert getattr(found.total, f"{figure}_seconds") is None
    for figure in ("by_strangers", "steal", "taken"):
        assert getattr(found, f"{figure}_seconds") is None
    assert found.share is None
    without_steal = disturbance_of([part(steal_seconds=None, throttled_seconds=0.1)])
    assert without_steal is not None and without_steal.is_disturbed


def test_a_level_that_may_hold_is_lost_where_a_tenth_is_taken() -> None:
    some = part(work_seconds=0.94, stalled_seconds=0.06, strangers_seconds=0.06)
    much = part(work_seconds=0.88, stalled_seconds=0.12, strangers_seconds=0.12)
    for parts, is_slightly in (([some], True), ([much], False)):
        found = disturbance_of(parts)
        assert found is not None and found.is_disturbed and is_slight(found) is is_slightly
        assert is_lost(parts, 0.0, may_hold=False)
        assert is_lost(parts, 0.0, may_hold=True) is not is_slightly


@pytest.mark.parametrize(
    ("disturbed", "left_seconds", "is_over"), [(1, 0.0, True), (1, 60.0, False), (4, 60.0, True)]
)
def test_a_running_level_is_lost_once_nothing_can_save_it(
    disturbed: int, left_seconds: float, is_over: bool
) -> None:
    busy = part(work_seconds=0.4, stalled_seconds=0.6, strangers_seconds=0.6)
    assert is_lost([busy] * disturbed, left_seconds, may_hold=False) is is_over
    assert not is_lost([], left_seconds, may_hold=False)


def test_it_names_who_took_most() -> None:
    hog, small = Stranger("make (j8)", 12, 0.5), Stranger("cron", 3, 0.01)
    busy = part(work_seconds=0.4, stalled_seconds=0.6, strangers_seconds=0.55)
    found = disturbance_of([busy, CoresSample(seconds=0.0, strangers=[hog, small])])
    assert found is not None
    assert in_words(found) == (
        "`make (j8)` (pid 12, 0.5 cores) took 58% of the CPU time that the engine wanted"
    )
    hidden = disturbance_of([busy])
    assert hidden is not None and in_words(hidden).startswith(
        "processes that cannot be seen (0.6 cores)"
    )
    several = disturbance_of([part(stalled_seconds=0.9, strangers_seconds=0.9, strangers=[hog])])
    assert several is not None
    assert in_words(several).startswith(
        "`make (j8)` (pid 12, 0.5 cores) and others (0.9 cores in all)"
    )
    stolen = disturbance_of([part(steal_seconds=0.25)])
    assert stolen is not None and in_words(stolen).startswith("the hypervisor (0.25 cores)")
    held = disturbance_of([part(throttled_seconds=0.25)])
    assert held is not None and in_words(held).startswith("the CPU quota (25% of the time)")


def test_strangers_are_summed_by_process() -> None:
    seen = [Stranger(name, pid, 0.1) for name, pid in zip("abcdb", (1, 2, 3, 4, 2), strict=True)]
    assert busiest(seen)[0] == Stranger("b", 2, 0.2) and len(busiest(seen)) == 3


def test_quiet_is_a_tenth_of_a_core() -> None:
    assert is_quiet(part(strangers_seconds=0.09)) and not is_quiet(part(strangers_seconds=0.11))
    assert is_quiet(part(seconds=2.0, strangers_seconds=0.19))
    assert is_quiet(part(strangers_seconds=None)), "what cannot be seen is not waited for"

"""Who took CPU time from the engine: the formula, by tables, and its words."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from loadtests.metrics.disturbance import (
    Probes,
    busiest,
    disturbance_of,
    in_words,
    is_lost,
    is_quiet,
    is_slight,
    is_slow,
    is_steady_steal,
    who,
)
from loadtests.metrics.level_warnings import disturbed
from loadtests.records.schema import CoresSample, Probe, Stranger


def part(**figures: object) -> CoresSample:
    """A second in which the engine computed all the time, unless said otherwise."""
    quiet = {
        "seconds": 1.0,
        "busy_seconds": 1.0,
        "work_seconds": 1.0,
        "waited_seconds": 0.0,
        "stalled_seconds": 0.0,
        "ours_seconds": 0.0,
        "strangers_seconds": 0.0,
        "steal_seconds": 0.0,
        "throttled_seconds": 0.0,
    }
    return CoresSample(**(quiet | figures))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("figures", "taken", "queued", "is_disturbed"),
    [
        ({}, 0.0, 0.0, False),
        # A stranger that has the core half of the time.
        (
            {"work_seconds": 0.5, "stalled_seconds": 0.5, "strangers_seconds": 0.5},
            *(0.5, 0.0, True),
        ),
        # One that ran while the engine had nothing to do.
        ({"work_seconds": 0.5, "strangers_seconds": 0.5}, 0.0, 0.0, False),
        # Our API on the engine's core: the engine queues, and nobody else is to blame.
        ({"work_seconds": 0.8, "stalled_seconds": 0.2, "ours_seconds": 0.2}, 0.0, 0.2, False),
        # Both, by the CPU time that each had.
        (
            {"stalled_seconds": 0.3, "ours_seconds": 0.2, "strangers_seconds": 0.1},
            *(0.1, 0.2, True),
        ),
        # Threads of the engine behind each other: a stranger took no more than it ran.
        ({"stalled_seconds": 0.6, "strangers_seconds": 0.01}, 0.01, 0.59, False),
        # Tick counters may be a little off in both directions.
        ({"stalled_seconds": 0.2, "strangers_seconds": -0.02}, 0.0, 0.2, False),
        ({"steal_seconds": 0.1}, 0.1, 0.0, False),  # the same in all parts: it is of the machine
        # Steal on a core of which the engine had a quarter.
        (
            {
                "busy_seconds": 0.2,
                "work_seconds": 0.2,
                "strangers_seconds": 0.6,
                "steal_seconds": 0.2,
            },
            *(0.05, 0.0, False),
        ),
        ({"throttled_seconds": 0.2}, 0.2, 0.0, True),
        # Above 3 % of what little it wanted, but nothing that delays a request.
        (
            {"work_seconds": 0.01, "stalled_seconds": 0.001, "strangers_seconds": 0.001},
            *(0.001, 0.0, False),
        ),
        # 3 % is the limit.
        ({"steal_seconds": 0.02}, 0.02, 0.0, False),
        ({"steal_seconds": 0.04}, 0.04, 0.0, False),
        ({"throttled_seconds": 0.02}, 0.02, 0.0, False),
        ({"throttled_seconds": 0.04}, 0.04, 0.0, True),
    ],
)
def test_what_is_taken_and_by_whom(
    figures: dict[str, object], taken: float, queued: float, is_disturbed: bool
) -> None:
    parts = [part(**figures)] * 20
    found = disturbance_of(parts, "engine")
    assert found is not None
    assert found.seconds == 20.0
    assert found.taken_seconds == pytest.approx(20 * taken)
    assert found.queued_seconds == pytest.approx(20 * queued)
    work = found.work_seconds
    assert work is not None
    assert found.share == pytest.approx(20 * taken / (work + 20 * taken), abs=1e-4)
    assert found.is_disturbed is is_disturbed
    elsewhere = disturbance_of(parts, "load generator")
    assert elsewhere is not None and elsewhere.share == found.share
    assert not elsewhere.is_disturbed, "an endpoint's engine is not watched"


def stolen(shares: Sequence[float], work_seconds: float = 0.9) -> list[CoresSample]:
    """A reading for each share of what the engine wanted."""
    return [
        part(work_seconds=work_seconds, steal_seconds=work_seconds * share / (1 - share))
        for share in shares
    ]


def test_a_steal_that_is_always_the_same_is_the_machine_that_there_is() -> None:
    ticks = np.random.default_rng(1).poisson(6, 60) / 100
    for shares in ([0.06] * 60, ticks.tolist(), [0.05, 0.07] * 30):
        found = disturbance_of(stolen(shares), "engine")
        assert found is not None and not found.is_disturbed
        assert found.steady_steal_share == pytest.approx(0.06, abs=0.005)
        assert not is_lost(stolen(shares)[:2], 0.0, may_hold=False), "too early to tell"
        warning = disturbed(found, "unresolved")
        assert warning is not None and warning.code == "SteadySteal" and not warning.is_serious
        assert warning.text == (
            "the host takes 6% of this machine's time steadily; "
            "the capacity is of this machine with that"
        )


@pytest.mark.parametrize(
    "shares", [[0.0] * 40 + [0.2] * 20, [0.02] * 30 + [0.12] * 30, [0.0] * 54 + [0.5] * 6]
)
def test_a_steal_that_comes_and_goes_is_a_disturbance(shares: list[float]) -> None:
    found = disturbance_of(stolen(shares), "engine")
    assert found is not None and found.is_disturbed and found.steady_steal_share is None
    assert is_lost(stolen(shares), 0.0, may_hold=False)
    warning = disturbed(found, "unresolved")
    assert warning is not None and warning.code == "Disturbed" and warning.is_serious


def test_a_steady_steal_excuses_no_stranger_and_needs_work_to_be_told() -> None:
    assert not is_steady_steal(stolen([0.06] * 60, work_seconds=0.04))
    assert not is_steady_steal(stolen([0.01] * 60)), "too little to speak of"
    beside = [
        part(steal_seconds=0.06, stalled_seconds=0.1, strangers_seconds=0.1) for _ in range(60)
    ]
    found = disturbance_of(beside, "engine")
    assert found is not None and found.steady_steal_share is not None and found.is_disturbed


def test_the_seconds_of_a_stranger_in_the_middle_are_those_of_the_whole_level() -> None:
    busy = part(work_seconds=0.5, stalled_seconds=0.5, strangers_seconds=0.5)
    found = disturbance_of([part()] * 15 + [busy] + [part()] * 4, "engine")
    assert found is not None
    assert found.share == pytest.approx(0.5 / 20, abs=1e-4) and not found.is_disturbed
    found = disturbance_of([part()] * 15 + [busy] * 2 + [part()] * 3, "engine")
    assert found is not None and found.is_disturbed


def test_what_cannot_be_read_is_none() -> None:
    assert disturbance_of([], "engine") is None
    found = disturbance_of([CoresSample(seconds=1.0, strangers_seconds=0.4)], "engine")
    assert found is not None
    assert found.strangers_seconds == 0.4 and not found.is_disturbed
    for figure in ("busy", "work", "stalled", "by_strangers", "queued", "steal", "throttled"):
        assert getattr(found, f"{figure}_seconds") is None
    assert found.share is None and found.taken_seconds is None and found.clock_hertz is None
    without_steal = disturbance_of([part(steal_seconds=None, throttled_seconds=0.1)], "engine")
    assert without_steal is not None and without_steal.is_disturbed


def test_a_level_that_may_hold_is_lost_where_a_tenth_is_taken() -> None:
    some = part(work_seconds=0.94, stalled_seconds=0.06, strangers_seconds=0.06)
    much = part(work_seconds=0.88, stalled_seconds=0.12, strangers_seconds=0.12)
    for parts, is_slightly in (([some], True), ([much], False)):
        found = disturbance_of(parts, "engine")
        assert found is not None and found.is_disturbed and is_slight(found) is is_slightly
        assert is_lost(parts, 0.0, may_hold=False)
        assert is_lost(parts, 0.0, may_hold=True) is not is_slightly
    slow = disturbance_of([some], "engine", probe=Probe(0.3, 0.2))
    assert slow is not None and not is_slight(slow), "nobody knows how much a slow probe tells of"


@pytest.mark.parametrize(
    ("disturbed", "left_seconds", "is_over"), [(1, 0.0, True), (1, 60.0, False), (4, 60.0, True)]
)
def test_a_running_level_is_lost_once_nothing_can_save_it(
    disturbed: int, left_seconds: float, is_over: bool
) -> None:
    busy = part(work_seconds=0.4, stalled_seconds=0.6, strangers_seconds=0.6)
    assert is_lost([busy] * disturbed, left_seconds, may_hold=False) is is_over
    assert not is_lost([], left_seconds, may_hold=False)


@pytest.mark.parametrize(
    ("seconds", "usual", "slow"),
    [(0.2, None, False), (0.2, 0.2, False), (0.229, 0.2, False), (0.231, 0.2, True)],
)
def test_a_slow_probe(seconds: float, usual: float | None, slow: bool) -> None:
    probe = Probe(seconds, usual)
    assert is_slow(probe) is slow
    found = disturbance_of([part()], "engine", probe=probe)
    assert found is not None and found.is_disturbed is slow
    if slow:
        assert in_words(found) == "a short request took 1.16 times its median (200 ms)"


def test_a_probe_is_the_fastest_of_three_against_the_median_of_those_before() -> None:
    asked = iter([0.3, 0.2, 0.4] * 4 + [0.5, 0.6, 0.7])
    probes = Probes(lambda: next(asked))
    assert probes.take(60.0) == Probe(0.2, 0.2), "three for the median come first"
    assert probes.take(60.0) == Probe(0.5, 0.2)


def test_a_probe_takes_three_percent_of_a_level() -> None:
    asked: list[float] = []

    def ask() -> float:
        asked.append(0.25)
        return 0.25

    probes = Probes(ask)
    assert probes.take(20.0) == Probe(0.25, 0.25) and len(asked) == 2 * 4, "two fit into 0.6 s"
    assert probes.take(10.0) == Probe(0.25, 0.25) and len(asked) == 9


def test_there_is_no_probe_where_requests_take_too_long() -> None:
    """Three times: the first may have met a busy machine."""
    seconds = [0.9, 0.9, 0.9]
    probes = Probes(lambda: seconds.pop())
    assert [probes.take(20.0) for _ in range(5)] == [None] * 5 and not seconds
    again = iter([0.9, *[0.1] * 12])
    probes = Probes(lambda: next(again))
    assert [probes.take(20.0) for _ in range(2)] == [None, Probe(0.1, 0.1)]
    assert Probes(lambda: None).take(20.0) is None, "the request failed"


def test_it_names_who_took_most() -> None:
    hog, small = Stranger("make (j8)", 12, 0.5), Stranger("cron", 3, 0.01)
    busy = part(work_seconds=0.4, stalled_seconds=0.6, strangers_seconds=0.55)
    found = disturbance_of([busy, CoresSample(seconds=0.0, strangers=[hog, small])], "engine")
    assert found is not None
    assert who(found) == "`make (j8)` (pid 12, 0.5 cores)"
    assert in_words(found) == f"{who(found)} took 58% of the CPU time that the engine wanted"
    hidden = disturbance_of([busy], "engine")
    assert hidden is not None and who(hidden) == "processes that cannot be seen (0.6 cores)"
    several = disturbance_of(
        [part(stalled_seconds=0.9, strangers_seconds=0.9, strangers=[hog])], "engine"
    )
    assert several is not None
    assert who(several) == "`make (j8)` (pid 12, 0.5 cores) and others (0.9 cores in all)"
    stolen = disturbance_of([part(steal_seconds=0.25)], "engine")
    assert stolen is not None and who(stolen) == "the hypervisor (0.25 cores)"
    held = disturbance_of([part(throttled_seconds=0.25)], "engine")
    assert held is not None and who(held) == "the CPU quota (25% of the time)"


def test_strangers_are_summed_by_process() -> None:
    seen = [Stranger(name, pid, 0.1) for name, pid in zip("abcdb", (1, 2, 3, 4, 2), strict=True)]
    assert busiest(seen)[0] == Stranger("b", 2, 0.2) and len(busiest(seen)) == 3


def test_quiet_is_a_tenth_of_a_core() -> None:
    assert is_quiet(part(strangers_seconds=0.09)) and not is_quiet(part(strangers_seconds=0.11))
    assert is_quiet(part(seconds=2.0, strangers_seconds=0.19))
    assert is_quiet(part(strangers_seconds=None)), "what cannot be seen is not waited for"

"""Who took CPU time from the engine: the formula, by tables, and its words."""

from __future__ import annotations

import pytest

from crossover.loadtests.levels.disturbance import disturbance_in_words, disturbance_of
from crossover.loadtests.records.journal_events import Disturbance
from crossover.loadtests.records.resource_sample import CoresSample, OtherProcess, busiest


def part(**figures: object) -> CoresSample:
    """A second in which the engine computed all the time, unless said otherwise."""
    quiet = {
        "seconds": 1.0,
        "busy_seconds": 1.0,
        "work_seconds": 1.0,
        "stalled_seconds": 0.0,
        "ours_seconds": 0.0,
        "other_processes_seconds": 0.0,
        "steal_seconds": 0.0,
        "throttled_seconds": 0.0,
    }
    return CoresSample(**(quiet | figures))  # type: ignore[arg-type]


def found_in(*parts: CoresSample) -> Disturbance:
    found = disturbance_of(parts)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("figures", "taken", "is_disturbed"),
    [
        ({}, 0.0, False),
        # A stranger that has the core half of the time.
        ({"work_seconds": 0.5, "stalled_seconds": 0.5, "other_processes_seconds": 0.5}, 0.5, True),
        # Our API on the engine's core: the engine queues, and nobody else is to blame.
        ({"work_seconds": 0.8, "stalled_seconds": 0.2, "ours_seconds": 0.2}, 0.0, False),
        # Both, by the CPU time that each had.
        ({"stalled_seconds": 0.3, "ours_seconds": 0.2, "other_processes_seconds": 0.1}, 0.1, True),
        # Threads of the engine behind each other: another process took no more than it ran.
        ({"stalled_seconds": 0.6, "other_processes_seconds": 0.01}, 0.01, False),
        ({"steal_seconds": 0.1}, 0.1, True),
        # Steal on a core of which the engine had a quarter.
        (
            {
                "busy_seconds": 0.2,
                "work_seconds": 0.2,
                "other_processes_seconds": 0.6,
                "steal_seconds": 0.2,
            },
            *(0.05, True),
        ),
        # Above 3 % of what little it wanted, but nothing that delays a request.
        (
            {"work_seconds": 0.01, "stalled_seconds": 0.001, "other_processes_seconds": 0.001},
            *(0.001, False),
        ),
        # 3 % is the limit.
        ({"throttled_seconds": 0.02}, 0.02, False),
        ({"throttled_seconds": 0.04}, 0.04, True),
        # Waking a thread costs a little on a virtual core, each time.
        ({"throttled_seconds": 0.04, "turns": 300}, 0.04, False),
    ],
)
def test_what_is_taken(figures: dict[str, object], taken: float, is_disturbed: bool) -> None:
    parts = [part(**figures)] * 20
    found = found_in(*parts)
    work = parts[0].work_seconds or 0.0
    assert found.share == pytest.approx(taken / (work + taken), abs=1e-4)
    assert found.is_disturbed is found.is_set_aside is is_disturbed
    as_it_is = disturbance_of(parts, counts=True)
    assert as_it_is is not None and not as_it_is.is_set_aside


def test_the_seconds_of_a_stranger_in_the_middle_are_those_of_the_whole_level() -> None:
    busy = part(work_seconds=0.5, stalled_seconds=0.5, other_processes_seconds=0.5)
    found = found_in(*[part()] * 15, busy, *[part()] * 4)
    assert found.share == pytest.approx(0.5 / 20, abs=1e-4) and not found.is_disturbed
    assert found_in(*[part()] * 15, busy, busy, *[part()] * 3).is_disturbed


def test_what_cannot_be_read_is_none() -> None:
    assert disturbance_of([]) is None
    found = found_in(CoresSample(seconds=1.0, other_processes_seconds=0.4))
    assert found.share is None and not found.is_disturbed
    assert found_in(part(steal_seconds=None, throttled_seconds=0.1)).is_disturbed


def test_it_names_who_took_most() -> None:
    hog, small = OtherProcess("make (j8)", 12, 0.5), OtherProcess("cron", 3, 0.01)
    busy = {"work_seconds": 0.4, "stalled_seconds": 0.6, "other_processes_seconds": 0.55}
    assert disturbance_in_words(found_in(part(**busy, other_processes=[hog, small]))) == (
        "`make (j8)` (pid 12) took 58% of the CPU time that the engine needed"
    )
    for parts, who in (
        (busy, "unidentified processes"),
        ({"steal_seconds": 0.25}, "the hypervisor"),
        ({"throttled_seconds": 0.25}, "the CPU quota"),
    ):
        assert found_in(part(**parts)).who == who


def test_strangers_are_summed_by_process() -> None:
    seen = [
        OtherProcess(name, pid, 0.1) for name, pid in zip("abcdb", (1, 2, 3, 4, 2), strict=True)
    ]
    assert busiest(seen)[0] == OtherProcess("b", 2, 0.2) and len(busiest(seen)) == 3

"""When the preferred engine is tried again, on a clock that is a number."""

from __future__ import annotations

import asyncio

import msgspec

from serving.errors import Cause
from serving.supervisor.restart_policy import Ending, RecoveryLimits
from serving.supervisor.return_to_gpu import Failback

LIMITS = RecoveryLimits()  # 30 s until the first attempt, 30 s of looking usable, four an hour
DIED = [Ending(0, Cause.runtime_oom, "it said so", 0.0, 10.0)]


class Scene:
    """A fall at second 0, a GPU that is usable or not, and a clock that is moved by hand."""

    def __init__(self, limits: RecoveryLimits = LIMITS, ends: list[Ending] = DIED) -> None:
        self.now, self.usable, self.asked, self.ends = 0.0, True, 0, ends
        self.way = Failback(limits, self._is_usable, lambda: self.now)
        self.way.fell_back_at = 0.0

    async def _is_usable(self) -> bool:
        self.asked += 1
        return self.usable

    def first_open(self, until: float, step: float = 5.0) -> float | None:
        """The first moment, up to `until`, at which the way is open."""
        while self.now < until:
            self.now += step
            if asyncio.run(self.way.is_open(lambda: self.way.is_due(self.ends))):
                return self.now
        return None


def test_it_is_due_after_30_seconds_and_must_then_look_usable_for_30_seconds() -> None:
    assert Scene().first_open(1000.0) == 60.0


def test_one_bad_look_begins_the_30_seconds_again() -> None:
    scene = Scene()
    assert scene.first_open(50.0) is None
    scene.usable = False
    assert scene.first_open(55.0) is None
    scene.usable = True
    assert scene.first_open(1000.0) == 90.0  # 60 is the first good look after the bad one


def test_the_driver_is_not_asked_before_it_is_due() -> None:
    scene = Scene()
    scene.first_open(25.0)
    assert scene.asked == 0


def test_attempts_that_fail_come_less_often_and_at_most_four_an_hour() -> None:
    scene, moments = Scene(), []
    while (moment := scene.first_open(3 * 3600.0)) is not None:
        moments.append(moment)
        scene.way.begin()
    gaps = [second - first for first, second in zip(moments, moments[1:], strict=False)]
    assert gaps[:3] == [90.0, 150.0, 270.0]  # 60, 120, 240 s of pause, each with 30 s of looking
    for index in range(len(moments) - 4):
        assert moments[index + 4] - moments[index] >= 3600.0
    assert len(moments) <= 12


def test_there_is_none_without_a_fall_after_a_permanent_cause_or_when_forgotten() -> None:
    assert Scene(ends=[Ending(0, Cause.no_driver, "gone", 0.0, None)]).first_open(1000.0) is None
    scene = Scene()
    scene.way.forget()
    assert scene.first_open(1000.0) is None
    assert Scene(msgspec.structs.replace(LIMITS, flips_per_hour=0)).first_open(1000.0) is None

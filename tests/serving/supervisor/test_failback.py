"""When the preferred engine is tried again, on a clock that is a number."""

from __future__ import annotations

import msgspec

from serving.errors import Cause
from serving.supervisor.restart_policy import Ending, RecoveryLimits
from serving.supervisor.return_to_gpu import return_at

LIMITS = RecoveryLimits()  # 30 s until the first attempt, four an hour


def ended(cause: Cause = Cause.runtime_oom, at: float = 0.0, ready: float = 10.0) -> Ending:
    return Ending(0, cause, "it said so", at, ready)


def test_attempts_that_fail_come_less_often_and_at_most_four_an_hour() -> None:
    moments: list[float] = []
    while (at := return_at([ended()], 0.0, moments, LIMITS)) is not None and at < 3 * 3600.0:
        moments.append(at)
    gaps = [second - first for first, second in zip(moments, moments[1:], strict=False)]
    assert moments[0] == 30.0 and gaps[:3] == [60.0, 120.0, 240.0]
    for index in range(len(moments) - 4):
        assert moments[index + 4] - moments[index] >= 3600.0
    assert len(moments) <= 12


def test_there_is_none_after_a_permanent_cause_or_where_none_is_wanted() -> None:
    assert return_at([ended(Cause.no_driver)], 0.0, [], LIMITS) is None
    never = msgspec.structs.replace(LIMITS, flips_per_hour=0)
    assert return_at([ended()], 0.0, [], never) is None


def test_an_engine_that_lasted_starts_with_short_pauses_again() -> None:
    died = [ended(at=50.0), ended(at=5000.0, ready=4000.0)]
    assert return_at(died, 5000.0, [100.0, 900.0], LIMITS) == 5030.0

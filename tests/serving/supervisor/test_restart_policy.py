"""Decisions after a death, and when to go back, on a clock that is a number."""

import pytest

from crossover.serving.errors import Cause
from crossover.serving.supervisor.restart_policy import (
    PERMANENT,
    EngineExit,
    RecoveryLimits,
    after_death,
    return_at,
)

LIMITS = RecoveryLimits()


def ending(
    cause: Cause, at: float = 0.0, engine: int = 0, ready: float | None = 10.0
) -> EngineExit:
    return EngineExit(engine, cause, "it said so", at, ready)


@pytest.mark.parametrize("cause", sorted(PERMANENT))
def test_a_permanent_cause_falls_back_at_once_and_fails_where_there_is_nothing_to_fall_back_to(
    cause: Cause,
) -> None:
    assert after_death([ending(cause, ready=None)], 2, LIMITS).engine == 1
    verdict = after_death([ending(cause, ready=None)], 1, LIMITS)
    assert verdict.engine is None and cause.value in verdict.text and "it said so" in verdict.text


@pytest.mark.parametrize("cause", [Cause.load_oom, Cause.load_failed])
def test_a_load_that_fails_twice_is_no_chance(cause: Cause) -> None:
    first = ending(cause, 0.0, ready=None)
    assert after_death([first], 1, LIMITS).engine == 0
    assert after_death([first, ending(cause, 1.0, ready=None)], 1, LIMITS).engine is None
    assert (
        after_death(
            [first, ending(Cause.engine_died, 1.0, ready=5.0), ending(cause, 9.0, ready=None)],
            1,
            LIMITS,
        ).engine
        == 0
    )
    assert after_death([first], 2, LIMITS).engine == 1


def test_a_death_is_worth_one_restart_and_the_second_within_the_window_falls_back() -> None:
    first = ending(Cause.engine_died, 0.0)
    assert after_death([first], 2, LIMITS).engine == 0
    assert after_death([first, ending(Cause.engine_died, 299.0)], 2, LIMITS).engine == 1
    assert after_death([first, ending(Cause.engine_died, 301.0)], 2, LIMITS).engine == 0


@pytest.mark.parametrize("cause", [Cause.runtime_oom, Cause.health_timeout])
def test_memory_and_hangs_fall_back_at_once(cause: Cause) -> None:
    assert after_death([ending(cause)], 2, LIMITS).engine == 1
    assert after_death([ending(cause)], 1, LIMITS).engine == 0


def test_the_last_engine_restarts_with_growing_pauses_until_the_breaker_opens() -> None:
    endings = [ending(Cause.engine_died, 10.0 * n) for n in range(5)]
    pauses = [after_death(endings[: n + 1], 1, LIMITS).delay_seconds for n in range(4)]
    assert pauses == [0.5, 1.0, 2.0, 4.0]
    verdict = after_death(endings, 1, LIMITS)
    assert verdict.engine is None and "5 times in 40 s" in verdict.text


def test_failed_returns_between_do_not_reset_the_breaker_of_the_engine_that_serves() -> None:
    endings = []
    for n in range(5):
        endings += [
            ending(Cause.load_oom, 10.0 * n, 0, None),
            ending(Cause.engine_died, 10.0 * n + 5, 1),
        ]
    assert after_death(endings, 2, LIMITS).engine is None


def test_attempts_that_fail_come_less_often_and_none_comes_after_a_permanent_cause() -> None:
    moments: list[float] = []
    for _ in range(8):
        at = return_at([ending(Cause.runtime_oom)], 0.0, moments, LIMITS)
        assert at is not None
        moments.append(at)
    gaps = [second - first for first, second in zip(moments, moments[1:], strict=False)]
    assert moments[0] == 30.0 and gaps == [60.0, 120.0, 240.0, 480.0, 900.0, 900.0, 900.0]
    assert return_at([ending(Cause.unsupported)], 0.0, [], LIMITS) is None

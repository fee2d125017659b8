"""When a level is decided before its time is over."""

from __future__ import annotations

import msgspec
import pytest

from loadtests.campaign.level_tally import LEAST_BAD, LevelTally
from loadtests.generator.endpoint import Target
from loadtests.generator.load_plan import LoadPlan
from loadtests.metrics.slo import Slo
from loadtests.records.schema import RequestRecord

QUICK = Slo("quick", 1.0, None, target=0.9)
SLOW = Slo("slow", 5.0, None, target=0.9)
PLAN = LoadPlan(
    target=Target(url="http://x"), rate_per_second=10.0, warmup_seconds=2.0, window_seconds=10.0
)
CLOSED = msgspec.structs.replace(PLAN, rate_per_second=None, concurrency=8)


def record(index: int, ttft: float, due: float = 5.0) -> RequestRecord:
    return RequestRecord(
        cell="c",
        level="l",
        index=index,
        due_seconds=due,
        sent_seconds=due,
        first_content_seconds=due + ttft,
        last_content_seconds=due + ttft,
        ended_seconds=due + ttft,
        content_seconds=[due + ttft],
        status=200,
    )


def bad_until_verdict(tally: LevelTally, most: int = 1000) -> int | None:
    """How many bad requests it takes; None where `most` do not do."""
    for index in range(most):
        tally.add(record(index, 9.0))
        if tally.verdict() is not None:
            return index + 1
    return None


def test_a_closed_loop_is_never_cut_short_by_a_few_bad_requests() -> None:
    """Nobody knows how many requests will come: five bad ones may be five of thousands."""
    tally = LevelTally.of(CLOSED, [QUICK])
    for index in range(2000):
        tally.add(record(index, 9.0 if index < 50 else 0.1))
        assert tally.verdict() is None
    assert (tally.ended, tally.counted, tally.good) == (2000, 2000, 1950)


def test_an_open_level_is_decided_by_what_can_still_come() -> None:
    planned = 100
    found = bad_until_verdict(LevelTally([QUICK], range(planned)))
    assert found is not None and 10 < found < 20, "one in ten may be bad, with some confidence"
    tally = LevelTally([QUICK], range(planned))
    tally.late(range(found - 1))
    assert tally.verdict() is None
    tally.late([found])
    assert tally.verdict() == (
        f"{found} of 100 requests are bad: the level cannot meet the SLO any more"
    )
    tally = LevelTally([QUICK], range(planned))
    tally.late(range(200, 300))
    assert tally.verdict() is None, "those of the warm-up and the like count for nothing"


def test_a_late_request_that_ends_is_one_bad_request() -> None:
    one, other = (LevelTally([QUICK], range(100)) for _ in range(2))
    one.late(range(40))
    other.late(range(20))
    for index in range(40):
        one.add(record(index, 9.0))
    assert one.verdict() is not None and "40 of 100" in (one.verdict() or "")


@pytest.mark.parametrize(("least", "found"), [(1, 3), (LEAST_BAD, 5)])
def test_few_requests_decide_nothing(least: int, found: int) -> None:
    assert bad_until_verdict(LevelTally([QUICK], range(8), least_bad=least)) == found


def test_with_several_slos_all_must_be_lost() -> None:
    tally = LevelTally([QUICK, QUICK, SLOW], range(100))
    for index in range(100):
        tally.add(record(index, 2.0))
    assert tally.good == 0 and tally.verdict() is None, "the slow one may still hold"
    assert bad_until_verdict(tally) is not None


def test_only_the_window_counts() -> None:
    tally = LevelTally.of(PLAN, [QUICK])
    for index in range(500):
        tally.add(record(index, 9.0, due=1.9))
        tally.add(record(1000 + index, 9.0, due=12.0))
    assert (tally.ended, tally.counted, tally.good) == (1000, 0, 0) and tally.verdict() is None
    tally.add(record(5000, 0.5, due=2.0))
    assert (tally.counted, tally.good) == (1, 1)

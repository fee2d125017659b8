"""When a level is decided before its time is over."""

from __future__ import annotations

import math

import msgspec
import numpy as np
import pytest

from loadtests.campaign.level_tally import LEAST_BAD, Cut, LevelTally
from loadtests.generator.endpoint import Target
from loadtests.generator.load_plan import LoadPlan
from loadtests.metrics.request_metrics import is_good
from loadtests.metrics.slo import Slo
from loadtests.records.schema import RequestRecord
from loadtests.simulation.batching import Policy, simulate
from loadtests.simulation.step_time import StepLaw
from loadtests.workload.arrivals import due_times

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


# A level that is cut short.


LIMIT = Slo("limit", 1.0, 0.2, target=0.99)
RATE = 1.25
TOKENS = (60, 200)  # of an answer: it lasts for some ten seconds
PATIENCE_SECONDS = 1.0 + 0.2 * TOKENS[1]


def played(seed: int) -> tuple[LoadPlan, list[RequestRecord]]:
    """A level on a simulated server with continuous batching, served to its end."""
    plan = LoadPlan(
        target=Target(url="http://x"),
        rate_per_second=RATE,
        warmup_seconds=5.0,
        window_seconds=120.0,
        seed=seed,
    )
    due = due_times(plan.arrivals, RATE, plan.duration_seconds, seed)
    rng = np.random.default_rng(seed)
    pairs = np.column_stack([rng.integers(20, 300, len(due)), rng.integers(*TOKENS, len(due))])
    law = StepLaw(
        base_seconds=0.02, row_seconds=0.003, prompt_token_seconds=0.0005, kv_token_seconds=2e-7
    )
    served = simulate(law, Policy(slots=16), due, pairs)
    firsts = due + served.ttft_seconds
    records = [
        RequestRecord(
            cell="c",
            level="l",
            index=index,
            due_seconds=at,
            sent_seconds=at,
            first_content_seconds=first,
            last_content_seconds=last,
            ended_seconds=last,
            content_seconds=[first, last],
            first_chunk_tokens=1,
            output_tokens=tokens,
            status=200,
        )
        for index, (at, first, last, tokens) in enumerate(
            zip(
                due.tolist(),
                firsts.tolist(),
                served.last_token.tolist(),
                pairs[:, 1].tolist(),
                strict=True,
            )
        )
    ]
    return plan, records


def stopped(plan: LoadPlan, records: list[RequestRecord]) -> tuple[float, float, float] | None:
    """When the level was decided, where its window ends, when it was stopped; None: never."""
    assert LIMIT.ttft_seconds is not None
    tally = LevelTally.of(plan, [LIMIT])
    cut = Cut(tally, PATIENCE_SECONDS)
    decided = 0.0
    events: list[tuple[float, RequestRecord | int]] = []
    for one in records:
        events.append((one.ended_seconds or 0.0, one))
        if (one.first_content_seconds or 0.0) > one.due_seconds + LIMIT.ttft_seconds:
            events.append((one.due_seconds + LIMIT.ttft_seconds, one.index))
    for now, event in sorted(events, key=lambda pair: pair[0]):
        if now >= plan.duration_seconds:
            return None
        if isinstance(event, int):
            tally.late([event])
        else:
            tally.add(event)
        is_stopped = cut.may_stop(now)
        decided = decided or (now if cut.reason is not None else 0.0)
        if is_stopped:
            assert cut.end_seconds is not None
            return decided, cut.end_seconds, now
    return None


def share(records: list[RequestRecord], plan: LoadPlan, end: float, cut: float) -> tuple[int, int]:
    """Good requests and all, due in the window until `end`; at `cut` the client gives up."""
    inside = [r for r in records if plan.warmup_seconds <= r.due_seconds < end]
    good = sum(is_good(r, LIMIT) and (r.ended_seconds or 0.0) <= cut for r in inside)
    return good, len(inside)


def test_what_is_recorded_of_a_level_that_is_cut_short_is_what_was_served() -> None:
    """To the request. Stopped where they were decided, such levels lost a fifth of their share."""
    served, at_once = np.zeros(2, dtype=int), np.zeros(2, dtype=int)  # until it was decided
    waits = []
    for seed in range(60):
        plan, records = played(seed)
        found = stopped(plan, records)
        if found is None:
            continue
        decided, end, stop = found
        assert share(records, plan, end, stop) == share(records, plan, end, math.inf)
        served += share(records, plan, decided, math.inf)
        at_once += share(records, plan, decided, decided)
        assert plan.warmup_seconds < decided <= end <= stop
        waits.append(stop - decided)
    assert len(waits) > 20, "levels that are cut short"
    assert served[0] / served[1] > at_once[0] / at_once[1] + 0.15, "what it was"
    assert np.mean(waits) < PATIENCE_SECONDS / 2


def test_who_hangs_does_not_hold_a_decided_level_for_ever() -> None:
    tally = LevelTally.of(PLAN, [QUICK])
    cut = Cut(tally, 8.0)
    tally.late(range(25, 60))
    assert not cut.may_stop(6.0) and cut.reason is not None and cut.end_seconds is None
    assert not cut.may_stop(13.9) and cut.may_stop(14.0)
    assert not cut.may_stop(15.0), "once"
    assert cut.end_seconds == 6.0


def test_the_window_ends_at_the_oldest_request_that_is_not_decided() -> None:
    tally = LevelTally.of(PLAN, [QUICK])
    cut = Cut(tally, 60.0)
    due = due_times(PLAN.arrivals, 10.0, PLAN.duration_seconds, PLAN.seed).tolist()
    settled = [index for index, at in enumerate(due) if 2.0 <= at < 7.0]
    tally.late(settled)
    assert cut.may_stop(6.5)
    assert cut.end_seconds == 6.5, "nobody waits who was due until now"
    other = Cut(tally, 60.0)
    assert other.may_stop(6.9) and other.end_seconds == 6.9
    tally = LevelTally.of(PLAN, [QUICK])
    tally.late(settled[:-1])
    cut = Cut(tally, 60.0)
    assert not cut.may_stop(7.5)
    tally.late(settled[-1:])
    tally.late([index for index, at in enumerate(due) if 7.0 <= at < 7.8])
    assert cut.may_stop(9.0)
    assert cut.end_seconds == pytest.approx(next(at for at in due if at >= 7.8), abs=1e-3)

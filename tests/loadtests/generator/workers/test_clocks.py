"""Clocks of other processes: bounds that hold whatever the network and the clocks do."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import numpy as np
import pytest

from loadtests.generator.dispatcher import _busy_seconds
from loadtests.generator.messages import Ended, WorkerClock, total
from loadtests.generator.workers.clocks import MOST_DRIFT, Offset, OtherClock
from loadtests.generator.workers.facts import on_masters_clock, workers_of
from loadtests.metrics.slo import SLO_PRESETS
from loadtests.metrics.worker_warnings import worker_warnings
from loadtests.records.schema import RequestRecord


@pytest.mark.parametrize("drift", [0.0, 2e-5, -MOST_DRIFT, MOST_DRIFT])
def test_the_true_offset_is_within_the_bounds_whatever_the_ways_take(drift: float) -> None:
    """Two ways of very different lengths: the middle is wrong, and the uncertainty covers it."""
    rng = np.random.default_rng(7)
    for seed in range(50):
        other, now, ahead = OtherClock(), 100.0, float(rng.uniform(-1e5, 1e5))
        slow_way = 0.02 if seed % 2 else 0.0  # always the same one: no mean helps
        fastest = np.inf
        for _ in range(100):
            there_in = slow_way + float(rng.exponential(0.001))
            back_in = float(rng.exponential(0.001))
            at = now + there_in
            assert other.exchange(now, at + ahead + drift * (at - 100.0), at + back_in)
            now = at + back_in
            fastest = min(fastest, there_in + back_in)
            found = other.at(now)
            truth = ahead + drift * (now - 100.0)
            assert abs(found.seconds - truth) <= found.uncertainty_seconds + 1e-9
            now += 0.05
        assert found.uncertainty_seconds < fastest / 2 + MOST_DRIFT * 64 * 0.08
        later = other.at(now + 10.0)
        assert later.uncertainty_seconds > found.uncertainty_seconds, "bounds age"


def test_a_clock_that_jumps_contradicts_itself() -> None:
    other = OtherClock()
    assert other.exchange(10.0, 510.0005, 10.001) and other.exchange(11.0, 511.0005, 11.001)
    assert not other.exchange(12.0, 511.5, 12.001)


def test_an_offset_moves_only_if_it_must() -> None:
    found = Offset(5.0, 0.5)
    assert [found.nearest(at) for at in (4.7, 5.5, 4.0, 9.0)] == [4.7, 5.5, 4.5, 5.5]


def test_records_move_to_the_masters_clock_in_one_piece() -> None:
    record = RequestRecord(
        cell="c",
        level="l",
        index=3,
        worker=1,
        due_seconds=1.0,
        sent_seconds=1.25,
        first_content_seconds=1.5,
        last_content_seconds=2.0,
        ended_seconds=2.0,
        content_seconds=[1.5, 2.0],
    )
    clock = WorkerClock(
        worker=1, name="b", shift_seconds=-0.5, uncertainty_seconds=0.03, offset_seconds=7.0
    )
    moved = on_masters_clock(record, {1: clock})
    assert (moved.due_seconds, moved.sent_seconds, moved.content_seconds) == (0.5, 0.75, [1.0, 1.5])
    assert (moved.first_content_seconds, moved.last_content_seconds) == (1.0, 1.5)
    assert moved.ended_seconds == 1.5 and moved.first_answer_seconds is None
    assert on_masters_clock(record, {0: clock}) == record

    accounts = [
        Ended(worker=1, due=1, recorded=1, cpu_seconds=0.5, busy_seconds=0.9, wall_seconds=1.0),
        Ended(worker=0, due=2, recorded=2, cpu_seconds=0.1, wall_seconds=1.0),
    ]
    still = WorkerClock(
        worker=0, name="a", shift_seconds=0.0, uncertainty_seconds=0.001, offset_seconds=0.0
    )
    quick, slow = workers_of(total(accounts), [record], {0: still, 1: clock})
    assert (slow.name, slow.due, slow.send_lag_p99_seconds) == ("b", 1, 0.25)
    assert (slow.clock_offset_seconds, slow.clock_moved_seconds) == (7.0, 0.5)
    assert quick.send_lag_p99_seconds is None and quick.cpu_share == pytest.approx(0.1)
    found = worker_warnings([quick, slow], SLO_PRESETS["chat"])  # TTFT 2 s
    assert [(warning.code, warning.is_serious) for warning in found] == [
        ("GeneratorBusy", True),
        ("ClocksApart", True),
    ]
    assert "30 ms" in found[1].text and "on b" in found[1].text
    assert workers_of(total(accounts), [record], {}) == [], "a load generator alone"


def test_a_thread_without_a_core_is_busy() -> None:
    """As of two load generators on one core: neither computes more than half of the time."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    spin = "print(flush=True)\nwhile True: pass"
    other = subprocess.Popen([sys.executable, "-c", spin], stdout=subprocess.PIPE)
    try:
        assert other.stdout is not None and other.stdout.readline()
        began, ran, busy = time.monotonic(), time.thread_time(), _busy_seconds()
        while time.monotonic() < began + 0.3:
            pass
        wall, ran = time.monotonic() - began, time.thread_time() - ran
        if busy is None:
            pytest.skip("a kernel without schedstat")
        assert ran < 0.8 * wall < 0.9 * wall < (_busy_seconds() or 0) - busy
    finally:
        os.sched_setaffinity(0, cores)
        other.kill()
        other.communicate()

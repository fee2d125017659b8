"""The kernel's counters of cores and threads: from text, and of real processes on one core."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from crossover.loadtests.host.cpu_time_taken import CoreWatch, parse_process, throttled_seconds
from crossover.loadtests.levels.disturbance import disturbance_of

pytestmark = pytest.mark.quiet_machine
CORE = max(os.sched_getaffinity(0))
SPIN = f"import os\nos.sched_setaffinity(0, [{CORE}])\nwhile True: pass"


@pytest.fixture
def spinning() -> Iterator[list[subprocess.Popen[bytes]]]:
    """Two busy processes on one core."""
    found = [subprocess.Popen([sys.executable, "-c", SPIN]) for _ in range(2)]
    time.sleep(0.2)
    yield found
    for one in found:
        one.kill()
        one.wait()


def test_a_stranger_on_the_core_is_seen_and_named(
    spinning: list[subprocess.Popen[bytes]],
) -> None:
    engine, hog = spinning
    without_family = CoreWatch(lambda: [engine.pid], engine.pid)
    family = CoreWatch(lambda: [engine.pid], os.getpid())
    assert without_family.read() is None and family.read() is None, (
        "the first reading sets the mark"
    )
    time.sleep(1.0)
    theirs, ours = without_family.read(), family.read()
    assert theirs is not None and ours is not None
    assert theirs.seconds >= 1.0
    assert theirs.work_seconds is not None and theirs.work_seconds > 0.05
    assert theirs.stalled_seconds is not None and theirs.stalled_seconds > 0.2
    assert hog.pid in [one.pid for one in theirs.other_processes]
    assert engine.pid not in [one.pid for one in theirs.other_processes]
    found = disturbance_of([theirs])
    assert found is not None and found.is_disturbed
    assert hog.pid not in [one.pid for one in ours.other_processes], "it is a child of the runner"
    assert ours.ours_seconds is not None and ours.ours_seconds > 0.05


def test_without_a_subject_there_is_no_reading(spinning: list[subprocess.Popen[bytes]]) -> None:
    engine, _ = spinning
    pids: list[int] = []
    watch = CoreWatch(lambda: pids, os.getpid())
    assert watch.read() is None and watch.read() is None
    pids.append(engine.pid)
    assert watch.read() is None, "the mark"
    assert watch.read() is not None
    pids.clear()
    assert watch.read() is None


def test_threads_that_come_and_go() -> None:
    """A thread that began between two readings counts whole, one that ended is left out."""
    go = threading.Event()

    def spin() -> None:
        while not go.is_set():
            pass

    watch = CoreWatch(lambda: [os.getpid()], os.getpid())
    watch.read()
    thread = threading.Thread(target=spin)
    thread.start()
    time.sleep(0.5)
    before = watch.read()
    go.set()
    thread.join()
    time.sleep(0.1)
    after = watch.read()
    assert before is not None and after is not None
    assert before.work_seconds is not None and before.work_seconds > 0.05
    assert after.work_seconds is not None and 0 <= after.work_seconds < 0.1
    assert after.stalled_seconds is not None and after.stalled_seconds >= 0


def test_a_process_name_may_contain_brackets() -> None:
    line = b"12 (a) b (c) S 7 12 12 0 -1 4194560 1 0 0 0 150 50 3 4 20 0 9 0 777 1 2 " + b"0 " * 14
    found = parse_process(line + b"5 0 0\n")
    assert (found.name, found.parent, found.start_ticks, found.core) == ("a) b (c", 7, 777, 5)
    assert found.cpu_seconds == 200 / os.sysconf("SC_CLK_TCK")


@pytest.mark.parametrize(
    ("files", "seconds"),
    [
        ({"a/b": "nr_throttled 3\nthrottled_usec 250000\n"}, 0.25),
        ({"a/b": "throttled_usec 100000\n", "a": "throttled_usec 700000\n"}, 0.7),
        ({"a": "usage_usec 5\n"}, None),
        ({"cpu/a/b": "nr_throttled 3\nthrottled_time 250000000\n"}, 0.25),  # version 1
        ({"cpu/a": "throttled_time 700000000\n", "a": "throttled_usec 100000\n"}, 0.7),
    ],
)
def test_the_quota_of_the_control_groups(
    tmp_path: Path, files: dict[str, str], seconds: float | None
) -> None:
    (tmp_path / "proc/5").mkdir(parents=True)
    (tmp_path / "proc/5/cgroup").write_text("2:cpu:/a/b\n0::/a/b\n")
    for folder, text in files.items():
        place = tmp_path / "sys/fs/cgroup" / folder
        place.mkdir(parents=True, exist_ok=True)
        (place / "cpu.stat").write_text(text)
    found = throttled_seconds(5, tmp_path)
    assert found == (None if seconds is None else pytest.approx(seconds))

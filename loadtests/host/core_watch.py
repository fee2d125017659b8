"""Reads who took CPU time from the engine: steal, run-queue delay, strangers, quota.

    watch = CoreWatch(lambda: engine_pids(server), runner_pid)
    watch.read()                              # None: sets the mark that the next one counts from
    parts = [watch.read(), watch.read()]      # CoresSample, whenever one likes

A run-queue delay is the time that a thread was ready to run and had no core
(/proc/PID/task/TID/schedstat, second number). All counters are differences, so readings of any
length may be summed. loadtests.analysis.disturbance says what they mean.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from loadtests.analysis.disturbance import busiest
from loadtests.records.resource_sample import CoresSample, Stranger
from models.machine import ROOT, cgroup_folders, read_text, sizes

PROC = Path("/proc")
TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")

Pids = Callable[[], list[int]]


class Process(NamedTuple):
    """One process at one moment."""

    name: str
    parent: int
    cpu_seconds: float  # user and system, of all threads, ended ones included
    started: int  # clock ticks since boot: tells processes with the same number apart
    core: int  # that its main thread ran on last


class Thread(NamedTuple):
    """A line of /proc/PID/task/TID/schedstat."""

    ran_seconds: float
    waited_seconds: float  # it was ready and had no core
    turns: int  # on a core


class _Reading(NamedTuple):
    """All counters at one moment."""

    at: float
    cores: frozenset[int]
    subject: frozenset[int]
    ours: frozenset[int]  # without the subject
    threads: dict[tuple[int, int], Thread]
    processes: dict[int, Process]
    counters: dict[int, tuple[float, float]] | None
    throttled: float | None


class CoreWatch:
    """Reads the cores that a subject may run on. `runner`: all below it is ours."""

    def __init__(self, subject: Pids, runner: int) -> None:
        self._subject = subject
        self._runner = runner
        self._before: _Reading | None = None

    def read(self) -> CoresSample | None:
        """Since the last call; None at the first, without a subject, and where nothing is told."""
        before, now = self._before, self._look()
        self._before = now
        if before is None or now is None or before.cores != now.cores or now.at <= before.at:
            return None
        return _between(before, now)

    def _look(self) -> _Reading | None:
        at, pids = time.monotonic(), self._subject()
        try:
            cores = frozenset(os.sched_getaffinity(pids[0])) if pids else None
        except OSError:  # it has just ended
            cores = None
        if not cores:
            return None
        seen = processes()
        return _Reading(
            at=at,
            cores=cores,
            subject=frozenset(pids),
            ours=_below(self._runner, seen) - set(pids),
            threads=threads(pids),
            processes=seen,
            counters=core_counters(cores),
            throttled=throttled_seconds(pids[0]),
        )


def _between(before: _Reading, now: _Reading) -> CoresSample:
    """What the counters say of the time between two readings."""
    used: dict[int, float] = {}
    for pid, one in now.processes.items():
        old = before.processes.get(pid)  # none, or another's: it has started since
        is_same = old is not None and old.started == one.started
        used[pid] = one.cpu_seconds - (old.cpu_seconds if old is not None and is_same else 0.0)
    own = sum(used[pid] for pid in now.subject if pid in used)
    near = {pid for pid, one in now.processes.items() if one.core in now.cores}
    ours = sum(used[pid] for pid in near & now.ours)
    strangers = [
        Stranger(now.processes[pid].name, pid, round(used[pid], 4))
        for pid in near - now.subject - now.ours
        if used[pid] > 0
    ]
    rest = steal = throttled = None
    if before.counters is not None and now.counters is not None:
        pairs = [(before.counters[core], now.counters[core]) for core in now.counters]
        rest = round(sum(new[0] - old[0] for old, new in pairs) - own - ours, 4)
        steal = round(max(new[1] - old[1] for old, new in pairs), 4)
    seconds = now.at - before.at
    if before.throttled is not None and now.throttled is not None:
        # Counted for each core: together they cannot stop the engine for longer than there was.
        throttled = round(min(max(0.0, now.throttled - before.throttled), seconds), 4)
    none, times = Thread(0.0, 0.0, 0), []
    for key, new in now.threads.items():
        was = before.threads.get(key, none)  # a new one began after it
        if new.turns < was.turns:
            was = none  # another thread with the number of an ended one
        times.append([value - earlier for value, earlier in zip(new, was, strict=True)])
    most = [max(column) for column in zip(*times, strict=True)] or [None, None, None]
    return CoresSample(
        seconds=round(seconds, 4),
        busy_seconds=round(own, 4),
        work_seconds=most[0],
        stalled_seconds=most[1],
        turns=None if most[2] is None else round(most[2]),
        ours_seconds=round(ours, 4),
        strangers_seconds=rest,
        steal_seconds=steal,
        throttled_seconds=throttled,
        strangers=busiest(strangers),
    )


def _below(top_pid: int, seen: dict[int, Process]) -> frozenset[int]:
    """A process and all that it started."""
    children: dict[int, list[int]] = {}
    for pid, one in seen.items():
        children.setdefault(one.parent, []).append(pid)
    found = [top_pid]
    for pid in found:  # grows while it is walked
        found += children.get(pid, ())
    return frozenset(found)


def processes() -> dict[int, Process]:
    """All processes that are there, by number. psutil takes four times as long."""
    found: dict[int, Process] = {}
    for pid in filter(str.isdigit, os.listdir(PROC)):
        with contextlib.suppress(OSError, ValueError, IndexError):  # it ended meanwhile
            with open(f"{PROC}/{pid}/stat", "rb", buffering=0) as file:
                found[int(pid)] = process_of(file.read(4096))
    return found


def process_of(line: bytes) -> Process:
    """A line of /proc/PID/stat; the name in brackets may hold anything, also brackets."""
    name = line[line.index(b"(") + 1 : line.rindex(b")")].decode(errors="replace")
    fields = line[line.rindex(b")") + 2 :].split()
    used = int(fields[11]) + int(fields[12])
    return Process(name, int(fields[1]), used / TICKS_PER_SECOND, int(fields[19]), int(fields[36]))


def threads(pids: Iterable[int], proc: Path = PROC) -> dict[tuple[int, int], Thread]:
    """Threads by (process, thread); empty: this kernel does not tell."""
    found: dict[tuple[int, int], Thread] = {}
    for pid in pids:
        with contextlib.suppress(OSError):
            for name in os.listdir(f"{proc}/{pid}/task"):
                with contextlib.suppress(OSError, ValueError):
                    with open(f"{proc}/{pid}/task/{name}/schedstat", "rb", buffering=0) as file:
                        ran, waited, turns = map(int, file.read(256).split())
                    found[pid, int(name)] = Thread(ran * 1e-9, waited * 1e-9, turns)
    return found


def core_counters(cores: Iterable[int], proc: Path = PROC) -> dict[int, tuple[float, float]] | None:
    """Core -> seconds in which processes ran, seconds stolen (/proc/stat); None: not told here."""
    try:
        lines = dict(line.split(" ", 1) for line in read_text(proc / "stat").splitlines())
        ticks = {core: [int(one) for one in lines[f"cpu{core}"].split()] for core in cores}
        each = TICKS_PER_SECOND
        return {core: (sum(one[:3]) / each, one[7] / each) for core, one in ticks.items()}
    except (KeyError, IndexError, ValueError):
        return None


def throttled_seconds(pid: int, root: Path = ROOT) -> float | None:
    """Seconds that the CPU quota of a process's control groups has held cores back; None: not told.

    A limit may stand on any group above its own: the group that was held back most counts.
    """
    told = [sizes(read_text(one / "cpu.stat"), 1) for one in cgroup_folders(root, pid)]
    found = [one["throttled_usec"] * 1e-6 for one in told if "throttled_usec" in one]
    return max(found, default=None)

"""Reads who took CPU time from the engine: steal, run-queue delay, other processes, quota.

    watch = CoreWatch(lambda: engine_pids(server), runner_pid)
    watch.read()                              # None: sets the mark that the next one counts from
    parts = [watch.read(), watch.read()]      # CoresSample, whenever one likes

A run-queue delay is the time that a thread was ready to run and had no core
(/proc/PID/task/TID/schedstat, second number). All counters are differences, so readings of any
length may be summed. crossover.loadtests.levels.disturbance says what they mean.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable
from operator import sub
from pathlib import Path
from typing import NamedTuple

import psutil

from crossover.loadtests.records.resource_sample import CoresSample, OtherProcess, busiest
from crossover.models.machine_limits import ROOT, cgroup_folders, read_text, sizes

TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
Threads = dict[tuple[int, int], tuple[float, float, int]]


class Process(NamedTuple):
    """One process at one moment."""

    name: str
    parent: int
    cpu_seconds: float  # user and system, of all threads, ended ones included
    started: int  # clock ticks since boot: tells processes with the same number apart
    core: int  # that its main thread ran on last


class _Reading(NamedTuple):
    """All counters at one moment."""

    at: float
    subject: set[int]
    ours: set[int]  # the subject among them
    cores: dict[int, tuple[float, float]]
    threads: Threads
    processes: dict[int, Process]
    throttled: float | None


class CoreWatch:
    """Reads the cores that a subject may run on. `runner`: all below it is ours."""

    def __init__(self, subject: Callable[[], list[int]], runner: int) -> None:
        self._subject, self._runner = subject, runner
        self._before: _Reading | None = None

    def read(self) -> CoresSample | None:
        """Since the last call; None at the first, without a subject, and where nothing is told."""
        before, now = self._before, self._look()
        self._before = now
        if before is None or now is None or before.cores.keys() != now.cores.keys():
            return None
        return _between(before, now)

    def _look(self) -> _Reading | None:
        at, pids = time.monotonic(), self._subject()
        try:
            cores = core_counters(os.sched_getaffinity(pids[0]))
        except (IndexError, AttributeError, OSError):  # there is none, it has just ended, not told
            return None
        seen = processes()
        ours = {*pids, *_below(self._runner, seen)}
        throttled = throttled_seconds(pids[0])
        return _Reading(at, {*pids}, ours, cores, threads(pids), seen, throttled)


def _between(before: _Reading, now: _Reading) -> CoresSample:
    """Return the differences of all counters between two readings.

    A process or thread that started in between counts with everything that it has used.
    """
    seconds, throttled = now.at - before.at, None
    # A process number may be given again: the start time tells two processes apart.
    cpu_before = {
        (pid, process.started): process.cpu_seconds for pid, process in before.processes.items()
    }
    cpu_seconds: dict[int, float] = {}  # by process number, between the readings
    on_engine_cores: set[int] = set()  # processes that ran last on one of the engine's cores
    for pid, process in now.processes.items():
        cpu_seconds[pid] = process.cpu_seconds - cpu_before.get((pid, process.started), 0.0)
        if process.core in now.cores:
            on_engine_cores.add(pid)
    engine_seconds = sum(cpu_seconds[pid] for pid in now.subject & cpu_seconds.keys())
    our_other_pids = on_engine_cores & now.ours - now.subject  # load generator, API, runner
    ours_seconds = sum(cpu_seconds[pid] for pid in our_other_pids)
    busy_and_stolen = [tuple(map(sub, now.cores[core], before.cores[core])) for core in now.cores]
    other_processes = [
        OtherProcess(now.processes[pid].name, pid, round(cpu_seconds[pid], 4))
        for pid in on_engine_cores - now.ours
    ]
    if before.throttled is not None and now.throttled is not None:
        # Counted for each core: together they cannot stop the engine for longer than there was.
        throttled = round(min(max(0.0, now.throttled - before.throttled), seconds), 4)
    new_thread = (0.0, 0.0, 0)
    differences = [
        map(sub, counters, before.threads.get(thread, new_thread))
        for thread, counters in now.threads.items()
    ]
    # Of the thread with the most of each: seconds at work, seconds in a run queue, turns on a core.
    work_seconds, stalled_seconds, turns = [
        max(0, *column) for column in zip(*differences, strict=True)
    ] or [None, None, None]
    return CoresSample(
        seconds=round(seconds, 4),
        busy_seconds=round(engine_seconds, 4),
        work_seconds=work_seconds,
        stalled_seconds=stalled_seconds,
        turns=None if turns is None else round(turns),
        ours_seconds=round(ours_seconds, 4),
        other_processes_seconds=round(
            sum(busy for busy, _ in busy_and_stolen) - engine_seconds - ours_seconds, 4
        ),
        steal_seconds=round(max(stolen for _, stolen in busy_and_stolen), 4),
        throttled_seconds=throttled,
        other_processes=busiest(process for process in other_processes if process.cpu_seconds > 0),
    )


def _below(top_pid: int, seen: dict[int, Process]) -> list[int]:
    """A process and all that it started."""
    children: dict[int, list[int]] = {}
    for pid, one in seen.items():
        children.setdefault(one.parent, []).append(pid)
    found = [top_pid]
    for pid in found:  # grows while it is walked
        found += children.get(pid, ())
    return found


def processes() -> dict[int, Process]:
    """All processes that are there, by number. psutil takes four times as long."""
    found: dict[int, Process] = {}
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError, ValueError, IndexError):  # it ended meanwhile
            with open(f"/proc/{pid}/stat", "rb", buffering=0) as file:
                found[int(pid)] = process_of(file.read(4096))
    return found


def process_of(line: bytes) -> Process:
    """A line of /proc/PID/stat; the name in brackets may hold anything, also brackets."""
    name = line[line.index(b"(") + 1 : line.rindex(b")")].decode(errors="replace")
    fields = line[line.rindex(b")") + 2 :].split()
    used = int(fields[11]) + int(fields[12])
    return Process(name, int(fields[1]), used / TICKS_PER_SECOND, int(fields[19]), int(fields[36]))


def threads(pids: Iterable[int]) -> Threads:
    """(process, thread) -> seconds it ran, seconds it was ready and had no core, turns on a core.

    Empty: this kernel does not tell.
    """
    found: Threads = {}
    for pid in pids:
        with contextlib.suppress(OSError):
            for name in os.listdir(f"/proc/{pid}/task"):
                with contextlib.suppress(OSError, ValueError):
                    with open(f"/proc/{pid}/task/{name}/schedstat", "rb", buffering=0) as file:
                        ran, waited, turns = map(int, file.read(256).split())
                    found[pid, int(name)] = ran * 1e-9, waited * 1e-9, turns
    return found


def core_counters(cores: Iterable[int]) -> dict[int, tuple[float, float]]:
    """Core -> seconds in which processes ran, seconds stolen. Raises IndexError, AttributeError."""
    told = psutil.cpu_times(percpu=True)
    each = {core: told[core] for core in cores}
    return {core: (one.user + one.nice + one.system, one.steal) for core, one in each.items()}


def throttled_seconds(pid: int, root: Path = ROOT) -> float | None:
    """Return the seconds for which CPU quotas of a process's control groups have held cores back.

    None: not told. A limit may stand on any group above its own; the longest counts. Version 2
    counts microseconds (throttled_usec), version 1 nanoseconds (throttled_time).
    """
    groups = [*cgroup_folders(root, pid), *cgroup_folders(root, pid, controller="cpu")]
    stats = [sizes(read_text(group / "cpu.stat"), 1) for group in groups]
    seconds = [
        stat[key] * unit
        for stat in stats
        for key, unit in (("throttled_usec", 1e-6), ("throttled_time", 1e-9))
        if key in stat
    ]
    return max(seconds, default=None)

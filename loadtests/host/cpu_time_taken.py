"""Reads how much CPU time was taken from the engine, and by whom: steal, run-queue delay, other
processes, quota.

    watch = CoreWatch(lambda: engine_pids(server), runner_pid)
    watch.read()                              # None: the first call only reads the counters
    watch.read()                              # a CoresSample of the time since the last call

Run-queue delay is the time for which a thread was ready to run and had no core
(/proc/PID/task/TID/schedstat, second number). All values are differences of counters, so the
samples of a longer time may be added. crossover.loadtests.levels.disturbance interprets them.
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


class Process(NamedTuple):
    """One process at one moment."""

    name: str
    parent: int
    cpu_seconds: float  # user and system, of all threads, including those that ended
    start_ticks: int  # clock ticks since boot; distinguishes processes with the same id
    core: int  # that its main thread ran on last


class Thread(NamedTuple):
    """The scheduler's counters of one thread."""

    work_seconds: float  # that it ran
    stalled_seconds: float  # that it was ready to run and had no core
    turns: int  # time slices


class Core(NamedTuple):
    """The kernel's counters of one logical core."""

    busy_seconds: float  # in which processes ran
    stolen_seconds: float  # taken by the hypervisor


Threads = dict[tuple[int, int], Thread]  # (process id, thread id) -> counters


class _Reading(NamedTuple):
    """All counters at one moment."""

    at: float  # seconds, monotonic
    engine: set[int]  # process ids
    crossover: set[int]  # process ids of the runner, its descendants and the engine
    cores: dict[int, Core]  # those that the engine may use
    threads: Threads  # of the engine
    processes: dict[int, Process]  # all of the machine
    throttled_seconds: float | None


class CoreWatch:
    """Reads the cores that the engine may use."""

    def __init__(self, engine_pids: Callable[[], list[int]], runner: int) -> None:
        """`engine_pids`: returns the engine's process ids. `runner`: the process id of the runner,
        which all other processes of Crossover descend from."""
        self._engine_pids = engine_pids
        self._runner = runner
        self._previous: _Reading | None = None

    def read(self) -> CoresSample | None:
        """Return what happened since the last call. None: it is the first call, the engine does not
        run or may use other cores now, or the system does not report it."""
        previous, now = self._previous, self._read_counters()
        self._previous = now
        if previous is None or now is None or previous.cores.keys() != now.cores.keys():
            return None
        return _between(previous, now)

    def _read_counters(self) -> _Reading | None:
        at, pids = time.monotonic(), self._engine_pids()
        try:
            cores = core_counters(os.sched_getaffinity(pids[0]))
        except (IndexError, AttributeError, OSError):  # no engine, not reported, it has just ended
            return None
        all_processes = processes()
        return _Reading(
            at=at,
            engine={*pids},
            crossover={*pids, *_descendants(self._runner, all_processes)},
            cores=cores,
            threads=threads(pids),
            processes=all_processes,
            throttled_seconds=throttled_seconds(pids[0]),
        )


def _between(before: _Reading, now: _Reading) -> CoresSample:
    """Return the differences of all counters between two readings.

    A process or thread that started in between counts with everything that it has used.
    """
    seconds = now.at - before.at
    # The same process id may be given to another process; their start times differ.
    cpu_before = {
        (pid, process.start_ticks): process.cpu_seconds for pid, process in before.processes.items()
    }
    cpu_seconds: dict[int, float] = {}  # by process id, between the readings
    on_engine_cores: set[int] = set()  # processes that ran last on one of the engine's cores
    for pid, process in now.processes.items():
        cpu_seconds[pid] = process.cpu_seconds - cpu_before.get((pid, process.start_ticks), 0.0)
        if process.core in now.cores:
            on_engine_cores.add(pid)
    engine_seconds = sum(cpu_seconds[pid] for pid in now.engine & cpu_seconds.keys())
    # Crossover's load generator, API and runner.
    crossover_others = on_engine_cores & now.crossover - now.engine
    crossover_seconds = sum(cpu_seconds[pid] for pid in crossover_others)
    core_differences = [Core(*map(sub, now.cores[core], before.cores[core])) for core in now.cores]
    busy_seconds = sum(core.busy_seconds for core in core_differences)
    other_processes = [
        OtherProcess(now.processes[pid].name, pid, round(cpu_seconds[pid], 4))
        for pid in on_engine_cores - now.crossover
    ]
    throttled = None
    if before.throttled_seconds is not None and now.throttled_seconds is not None:
        # The counter is a sum over cores, but the engine is not stopped for longer than `seconds`.
        difference = now.throttled_seconds - before.throttled_seconds
        throttled = round(min(max(0.0, difference), seconds), 4)
    work_seconds, stalled_seconds, turns = _largest_differences(before.threads, now.threads)
    return CoresSample(
        seconds=round(seconds, 4),
        busy_seconds=round(engine_seconds, 4),
        work_seconds=work_seconds,
        stalled_seconds=stalled_seconds,
        turns=turns,
        ours_seconds=round(crossover_seconds, 4),
        other_processes_seconds=round(busy_seconds - engine_seconds - crossover_seconds, 4),
        steal_seconds=round(max(core.stolen_seconds for core in core_differences), 4),
        throttled_seconds=throttled,
        other_processes=busiest(process for process in other_processes if process.cpu_seconds > 0),
    )


def _largest_differences(
    before: Threads, now: Threads
) -> tuple[float | None, float | None, int | None]:
    """Return the largest difference of each counter of Thread, over all threads; None: there are no
    counters."""
    if not now:
        return None, None, None
    unused = Thread(0.0, 0.0, 0)
    differences = [
        Thread(*map(sub, counters, before.get(thread, unused))) for thread, counters in now.items()
    ]
    return (
        max(0, *(thread.work_seconds for thread in differences)),
        max(0, *(thread.stalled_seconds for thread in differences)),
        max(0, *(thread.turns for thread in differences)),
    )


def _descendants(top_pid: int, all_processes: dict[int, Process]) -> list[int]:
    """Return a process and all its descendants."""
    children: dict[int, list[int]] = {}
    for pid, process in all_processes.items():
        children.setdefault(process.parent, []).append(pid)
    pids = [top_pid]
    for pid in pids:  # the list grows during the iteration
        pids += children.get(pid, ())
    return pids


def processes() -> dict[int, Process]:
    """Return all processes of the machine by process id. psutil takes four times as long."""
    found: dict[int, Process] = {}
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError, ValueError, IndexError):  # it has ended meanwhile
            with open(f"/proc/{pid}/stat", "rb", buffering=0) as file:
                found[int(pid)] = parse_process(file.read(4096))
    return found


def parse_process(line: bytes) -> Process:
    """Parse a line of /proc/PID/stat (proc_pid_stat(5)). The name is in parentheses, and may
    contain any characters, also parentheses."""
    name = line[line.index(b"(") + 1 : line.rindex(b")")].decode(errors="replace")
    fields = line[line.rindex(b")") + 2 :].split()  # from the third field of the manual page on
    user_ticks, system_ticks = int(fields[11]), int(fields[12])
    return Process(
        name=name,
        parent=int(fields[1]),
        cpu_seconds=(user_ticks + system_ticks) / TICKS_PER_SECOND,
        start_ticks=int(fields[19]),
        core=int(fields[36]),
    )


def threads(pids: Iterable[int]) -> Threads:
    """Return the counters of all threads of some processes; {}: this kernel does not report
    them."""
    found: Threads = {}
    for pid in pids:
        with contextlib.suppress(OSError):
            for thread_id in os.listdir(f"/proc/{pid}/task"):
                with contextlib.suppress(OSError, ValueError):
                    path = f"/proc/{pid}/task/{thread_id}/schedstat"
                    with open(path, "rb", buffering=0) as file:
                        ran_ns, waited_ns, turns = map(int, file.read(256).split())
                    found[pid, int(thread_id)] = Thread(ran_ns * 1e-9, waited_ns * 1e-9, turns)
    return found


def core_counters(cores: Iterable[int]) -> dict[int, Core]:
    """Return the counters of some logical cores. Raises IndexError for a core that does not exist,
    AttributeError if the system does not report steal time."""
    all_times = psutil.cpu_times(percpu=True)
    times = {core: all_times[core] for core in cores}
    return {core: Core(t.user + t.nice + t.system, t.steal) for core, t in times.items()}


def throttled_seconds(pid: int, root: Path = ROOT) -> float | None:
    """Return the seconds for which CPU quotas have stopped a process, summed over cores.

    A quota may be set on the process's control group or any group above it; the largest value
    counts. Version 2 of control groups counts microseconds (throttled_usec), version 1 nanoseconds
    (throttled_time). None: not reported.
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

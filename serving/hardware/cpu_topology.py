"""Divides the CPU cores between the engine and the HTTP process.

On a machine with at most SHARED_CORES cores, the engine uses all of them and HTTP has priority over
it (`nice`). HTTP needs a few hundredths of a core, so that a core of its own would mostly be
wasted. On a larger machine HTTP gets one core, because the engine's threads wait for each other at
every operator: a process that takes one core from the engine delays all of its threads. If other
work runs on the machine, `--cores` and `--api-cores` keep it apart.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import msgspec

from crossover.models.machine_limits import ROOT, read_text, whole_cores
from crossover.serving.errors import ServingError

SHARED_CORES = 8  # up to this many cores, engine and HTTP share all of them by default
SHARED_NICE = 3  # of an engine that shares a core with HTTP: half of HTTP's scheduling weight
MAX_CORE = 65_535  # larger numbers are typing errors, which must not fill the memory


class CoreSplit(msgspec.Struct, frozen=True):
    """How the cores are divided."""

    engine: tuple[int, ...]  # core numbers of the engine
    api: tuple[int, ...]  # core numbers of the HTTP process
    threads: int  # of the engine
    nice: int  # the engine's niceness, above 0 if it shares cores with HTTP
    note: str  # the same in words, with the reason


def split_cores(
    allowed: tuple[int, ...],
    engine: tuple[int, ...] = (),
    api: tuple[int, ...] = (),
    threads: int | None = None,
    root: Path = ROOT,
    quota: float | None = None,
) -> CoreSplit:
    """Divide the allowed cores.

    `engine`, `api`, `threads`: what the user has set; (), None: nothing. The default is one thread
    per physical core of the engine, but no more than the whole cores of the CPU `quota` (None:
    unlimited).

    Raises ServingError if the user names a core that is not allowed.
    """
    for name, requested in (("--cores", engine), ("--api-cores", api)):
        outside = [core for core in requested if core not in allowed]
        if outside:
            raise ServingError(
                f"{name} names core {outside[0]}, which this process may not use. "
                f"Allowed cores: {cores_text(allowed)}."
            )
    options = "--cores and --api-cores change this"
    if engine or api:
        # If only one of them is set, the other gets the remaining cores, or all if none remain.
        remaining = tuple(core for core in allowed if core not in (engine or api)) or allowed
        engine, api = engine or remaining, api or remaining
        why = "as set by options"
    elif len(allowed) > SHARED_CORES:
        engine, api = allowed[:-1], allowed[-1:]
        why = f"one core is kept for HTTP; {options}"
    else:
        engine = api = allowed
        why = f"shared, HTTP has priority; {options}"
    physical_cores = len(set(physical_of(engine, root).values()))
    count = threads or whole_cores(physical_cores, quota)
    threads_text = "1 thread" if count == 1 else f"{count} threads"
    if threads is None and count < physical_cores:
        threads_text += f" (the CPU quota is {quota:g} {'core' if quota == 1 else 'cores'})"
    nice = SHARED_NICE if set(engine) & set(api) else 0
    nice_text = f" at nice {nice}" if nice else ""
    note = (
        f"engine on cores {cores_text(engine)} with {threads_text}{nice_text}, "
        f"HTTP on {cores_text(api)} ({why})"
    )
    return CoreSplit(engine, api, count, nice, note)


def parse_cores(text: str, option: str = "") -> tuple[int, ...]:
    """Return the core numbers of a list as the kernel and taskset write it: (0, 1, 2, 3, 5) for
    "0-3,5", and () for "".

    Raises ServingError, which names the option, if the text is not such a list.
    """
    cores: set[int] = set()
    for part in text.split(",") if text.strip() else ():
        first, dash, last = part.strip().partition("-")
        last = last if dash else first
        are_numbers = first.isdigit() and last.isdigit()
        if not are_numbers or not int(first) <= int(last) <= MAX_CORE:
            why = f"{text!r} is not a list of cores. Write, for example, 0-3 or 0,2,4."
            raise ServingError(f"{option} {why}".lstrip())
        cores.update(range(int(first), int(last) + 1))
    return tuple(sorted(cores))


def cores_text(cores: Iterable[int]) -> str:
    """Return core numbers as text, with ranges: "0-2,5" for (0, 1, 2, 5)."""
    runs: list[list[int]] = []  # of consecutive numbers
    for core in sorted(cores):
        if runs and runs[-1][-1] == core - 1:
            runs[-1].append(core)
        else:
            runs.append([core])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def physical_of(cores: Iterable[int], root: Path = ROOT) -> dict[int, int]:
    """Map each logical core to the lowest logical core on the same physical core, or to itself if
    the kernel does not report it."""
    lowest_siblings: dict[int, int] = {}
    for core in cores:
        file = root / f"sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list"
        siblings = parse_cores(read_text(file).strip())
        lowest_siblings[core] = min(siblings, default=core)
    return lowest_siblings

"""Divides the CPU cores between the engine and HTTP: pure decisions over core numbers.

Up to SHARED_CORES cores, the engine uses all of them and HTTP has priority over it (`nice`). HTTP
needs a few hundredths of a core, and a core of its own would be half of a machine with two. The
engine's threads wait for each other at every operator, so a process that takes one core delays all
of them; if other work runs on the machine, `--cores` and `--api-cores` keep it apart.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import msgspec

from crossover.models.machine_limits import ROOT, read_text, whole_cores
from crossover.serving.errors import ServingError

SHARED_CORES = 8  # up to this many cores, engine and HTTP share all of them by default
SHARED_NICE = 3  # of an engine that shares a core with HTTP: half of HTTP's scheduling weight


class CoreSplit(msgspec.Struct, frozen=True):
    """Core numbers of the engine and of the HTTP process, the engine's threads, and why.

    `nice`: the engine's niceness, above 0 if it shares cores with HTTP.
    """

    engine: tuple[int, ...]
    api: tuple[int, ...]
    threads: int
    nice: int
    note: str


def split_cores(
    allowed: tuple[int, ...],
    engine: tuple[int, ...] = (),
    api: tuple[int, ...] = (),
    threads: int | None = None,
    root: Path = ROOT,
    quota: float | None = None,
) -> CoreSplit:
    """Divide the allowed cores. `engine`, `api`: the user's choice; (): decide. `threads` None: one
    per physical core, at most the whole cores of the CPU `quota`. Raises ServingError for a core
    that is not allowed."""
    for name, requested in (("--cores", engine), ("--api-cores", api)):
        outside = [core for core in requested if core not in allowed]
        if outside:
            raise ServingError(
                f"{name} names core {outside[0]}, which this process may not use. "
                f"Allowed cores: {cores_text(allowed)}."
            )
    remaining = tuple(core for core in allowed if core not in (engine or api)) or allowed
    change = "--cores and --api-cores change this"
    if engine or api:
        engine, api, why = engine or remaining, api or remaining, "as set by options"
    elif len(allowed) > SHARED_CORES:
        engine, api, why = allowed[:-1], allowed[-1:], f"one core is kept for HTTP; {change}"
    else:
        engine = api = allowed
        why = f"shared, HTTP has priority; {change}"
    physical = len(set(physical_of(engine, root).values()))
    count = threads or whole_cores(physical, quota)
    threads_text = "1 thread" if count == 1 else f"{count} threads"
    if threads is None and count < physical:
        threads_text += f" (the CPU quota is {quota:g} {'core' if quota == 1 else 'cores'})"
    nice = SHARED_NICE if set(engine) & set(api) else 0
    nice_text = f" at nice {nice}" if nice else ""
    note = (
        f"engine on cores {cores_text(engine)} with {threads_text}{nice_text}, "
        f"HTTP on {cores_text(api)} ({why})"
    )
    return CoreSplit(engine, api, count, nice, note)


def parse_cores(text: str, option: str = "") -> tuple[int, ...]:
    """Return (0, 1, 2, 3, 5) for "0-3,5", and () for "". Raises ServingError, which names the
    option, for anything else."""
    cores: set[int] = set()
    for part in text.split(",") if text.strip() else ():
        first, dash, last = part.strip().partition("-")
        last = last if dash else first
        is_range = first.isdigit() and last.isdigit()
        if not is_range or not int(first) <= int(last) < 1 << 16:
            why = f"{text!r} is not a list of cores. Write, for example, 0-3 or 0,2,4."
            raise ServingError(f"{option} {why}".lstrip())
        cores.update(range(int(first), int(last) + 1))
    return tuple(sorted(cores))


def cores_text(cores: Iterable[int]) -> str:
    """Return "0-2,5" for (0, 1, 2, 5)."""
    parts: list[list[int]] = []
    for core in sorted(cores):
        if parts and parts[-1][-1] == core - 1:
            parts[-1].append(core)
        else:
            parts.append([core])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in parts)


def physical_of(cores: Iterable[int], root: Path = ROOT) -> dict[int, int]:
    """Map each core to the lowest core on the same physical core, or to itself if the kernel does
    not say."""
    table: dict[int, int] = {}
    for core in cores:
        file = root / f"sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list"
        table[core] = min(parse_cores(read_text(file).strip()), default=core)
    return table

"""Divides the CPU cores between the engine and the HTTP process.

On a machine with at most SHARED_CORES cores, the engine uses all of them and HTTP has priority over
it (`nice`). HTTP needs a few hundredths of a core, so that a core of its own would mostly be
wasted. On a larger machine HTTP gets one core with all of its hyperthreads, because the engine's
threads wait for each other at every operator: a process that takes one core from the engine delays
all of its threads. If other work runs on the machine, `--cores` and `--api-cores` keep it apart.

The engine does not use all cores where some would slow it down: cores of another NUMA node, since
its weights lie on one node, and small cores beside big ones. HTTP then runs on those.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import msgspec

from crossover.models.machine_limits import ROOT, read_text, whole_cores
from crossover.serving.errors import ServingError
from crossover.serving.hardware.numa import nodes_of, numa_nodes, parse_cpu_list

SHARED_CORES = 8  # up to this many cores, engine and HTTP share all of them by default
SHARED_NICE = 3  # of an engine that shares a core with HTTP: half of HTTP's scheduling weight


class CoreSplit(msgspec.Struct, frozen=True):
    """How the cores are divided."""

    engine: tuple[int, ...]  # core numbers of the engine
    api: tuple[int, ...]  # core numbers of the HTTP process
    threads: int  # of the engine
    nice: int  # the engine's niceness, above 0 if it shares cores with HTTP
    note: str  # the same in words, with the reason
    # NUMA nodes that the engine's memory is allocated on: one, or several in turns; (): the machine
    # has only one.
    memory_nodes: tuple[int, ...] = ()


def split_cores(
    allowed: tuple[int, ...],
    engine: tuple[int, ...] = (),
    api: tuple[int, ...] = (),
    threads: int | None = None,
    root: Path = ROOT,
    quota: float | None = None,
    memory_bytes: int = 0,
) -> CoreSplit:
    """Divide the allowed cores.

    `engine`, `api`, `threads`: what the user has set; (), None: nothing. The default is one thread
    per physical core of the engine, but no more than the whole cores of the CPU `quota` (None:
    unlimited). `memory_bytes`: the engine's predicted memory, which must fit on a NUMA node if the
    engine is to run on that node alone; 0: not known yet.

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
    best_cores, why_best = best_engine_cores(allowed, root, memory_bytes)
    if engine or api:
        # If only one of them is set, the other gets the remaining cores, or all if none remain.
        remaining = tuple(core for core in allowed if core not in (engine or api)) or allowed
        engine, api = engine or remaining, api or remaining
        why = "as set by options"
    elif best_cores != allowed:
        engine = best_cores
        api = tuple(core for core in allowed if core not in best_cores)
        why = f"{why_best}; {options}"
    elif len(allowed) > SHARED_CORES:
        siblings = physical_of(allowed, root)
        api = tuple(core for core in allowed if siblings[core] == siblings[allowed[-1]])
        engine = tuple(core for core in allowed if core not in api)
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
    memory_nodes = _memory_nodes(engine, root, memory_bytes)
    note = (
        f"engine on cores {cores_text(engine)} with {threads_text}{nice_text}"
        f"{_memory_text(memory_nodes)}, HTTP on {cores_text(api)} ({why})"
    )
    return CoreSplit(engine, api, count, nice, note, memory_nodes)


def best_engine_cores(
    allowed: tuple[int, ...], root: Path = ROOT, memory_bytes: int = 0
) -> tuple[tuple[int, ...], str]:
    """Return the cores on which an engine runs best, and the reason if these are not all.

    These are the cores of one NUMA node, if the engine's memory fits there: the node with the most
    cores, or of several the one with the most free memory. Of cores with different speeds, they are
    those that compute most together, since each operator waits for the slowest of them.
    """
    cores, why = allowed, ""
    nodes = nodes_of(allowed, numa_nodes(root))
    fitting_nodes = [node for node in nodes if memory_bytes <= node.free_bytes]
    if len(nodes) > 1 and fitting_nodes:
        count = {node.number: len(set(node.cpus) & set(allowed)) for node in nodes}
        best = max(fitting_nodes, key=lambda node: (count[node.number], node.free_bytes))
        cores = tuple(core for core in allowed if core in best.cpus)
        why = f"one NUMA node of {len(nodes)}, since the weights lie on one"
    fast_cores = _fast_cores(cores, root)
    if fast_cores != cores:
        reason = "the faster cores, since each operator waits for the slowest"
        return fast_cores, f"{why}; {reason}" if why else reason
    return cores, why


def _fast_cores(cores: tuple[int, ...], root: Path) -> tuple[int, ...]:
    """Return the cores that compute most together if all of them wait for the slowest; all cores
    where the kernel does not report their capacity."""
    capacities: dict[int, int] = {}
    for core in cores:
        text = read_text(root / f"sys/devices/system/cpu/cpu{core}/cpu_capacity").strip()
        if not text.isdigit():
            return cores
        capacities[core] = int(text)

    def cores_from(capacity: int) -> tuple[int, ...]:
        return tuple(core for core in cores if capacities[core] >= capacity)

    # Of equal ones the fewer cores.
    best = max(
        sorted(set(capacities.values()), reverse=True),
        key=lambda capacity: capacity * len(cores_from(capacity)),
        default=0,
    )
    return cores_from(best)


def _memory_nodes(engine: tuple[int, ...], root: Path, memory_bytes: int) -> tuple[int, ...]:
    """Return the NUMA nodes for an engine's memory: those of its cores, or all if it does not fit
    there; (): there is only one node."""
    nodes = numa_nodes(root)
    if len(nodes) < 2:
        return ()
    own_nodes = nodes_of(engine, nodes)
    fits = memory_bytes <= sum(node.free_bytes for node in own_nodes)
    return tuple(node.number for node in (own_nodes if fits else nodes))


def _memory_text(memory_nodes: tuple[int, ...]) -> str:
    """Return where the engine's memory lies, as a part of a sentence; "": there is one node."""
    if not memory_nodes:
        return ""
    if len(memory_nodes) == 1:
        return f", memory on NUMA node {memory_nodes[0]}"
    return f", memory in turns on NUMA nodes {cores_text(memory_nodes)}"


def parse_cores(text: str, option: str = "") -> tuple[int, ...]:
    """Return the core numbers of a list as the kernel and taskset write it: (0, 1, 2, 3, 5) for
    "0-3,5", and () for "".

    Raises ServingError, which names the option, if the text is not such a list.
    """
    try:
        return parse_cpu_list(text)
    except ServingError as problem:
        raise ServingError(f"{option} {problem}".lstrip()) from problem


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

"""Divides the CPU cores between the engine and the HTTP process.

On a machine with at most SHARED_CORES cores, the engine uses all of them and HTTP has priority over
it (`nice`). HTTP needs a few hundredths of a core, so that a core of its own would mostly be
wasted. On a larger machine HTTP gets one core with all of its hyperthreads, because the engine's
threads wait for each other at every operator: a process that takes one core from the engine delays
all of its threads. If other work runs on the machine, `--cores` and `--api-cores` keep it apart.

By default an engine avoids cores that would slow it down: cores of another NUMA node, since
its weights lie on one node, and small cores beside big ones. HTTP then runs on those, or, on
several nodes, further engines (`arrangements`).
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import msgspec

from crossover.models.machine_limits import ROOT, read_text, whole_cores
from crossover.serving.errors import ServingError
from crossover.serving.hardware.numa import NumaNode, nodes_of, numa_nodes, parse_cpu_list

SHARED_CORES = 8  # up to this many cores, engine and HTTP share all of them by default
SHARED_NICE = 3  # of an engine that shares a core with HTTP: half of HTTP's scheduling weight


class Arrangement(NamedTuple):
    """How the engines of a model are spread over NUMA nodes."""

    engines: int = 1
    nodes: int | None = None  # that they run on together; None: one for each engine


class Topology(NamedTuple):
    """The logical cores that a process may use, as the kernel reports them at one time."""

    allowed: tuple[int, ...]
    nodes: tuple[NumaNode, ...]  # of the machine; (): the kernel reports none
    physical: dict[int, int]  # by allowed core: the lowest logical core on its physical core
    capacities: dict[int, int]  # by allowed core: its speed; {}: the kernel does not report it

    @property
    def own_nodes(self) -> tuple[NumaNode, ...]:
        """Return the nodes that have some of the allowed cores."""
        return nodes_of(self.allowed, self.nodes)


class EngineCores(msgspec.Struct, frozen=True):
    """What one engine runs on."""

    cores: tuple[int, ...]
    # NUMA nodes that its memory is allocated on: one, or several in turns; (): the machine has only
    # one.
    memory_nodes: tuple[int, ...] = ()


class CoreSplit(msgspec.Struct, frozen=True):
    """How the cores are divided."""

    engines: tuple[EngineCores, ...]  # at least one; several serve the model from one queue
    api: tuple[int, ...]  # core numbers of the HTTP process
    threads: int  # of each engine
    nice: int  # the engines' niceness, above 0 if they share cores with HTTP
    note: str  # the same in words, with the reason

    @property
    def engine(self) -> tuple[int, ...]:
        """Return the core numbers of all engines."""
        return tuple(sorted(core for engine in self.engines for core in engine.cores))

    @property
    def memory_nodes(self) -> tuple[int, ...]:
        """Return the NUMA nodes of all engines' memory."""
        return tuple(sorted({node for engine in self.engines for node in engine.memory_nodes}))

    @property
    def arrangement(self) -> Arrangement:
        """Return how the engines are spread over NUMA nodes."""
        return Arrangement(len(self.engines), len(self.memory_nodes) or None)


def read_topology(allowed: tuple[int, ...], root: Path = ROOT) -> Topology:
    """Return what the kernel reports about the allowed cores now."""
    capacities: dict[int, int] = {}
    for core in allowed:
        text = read_text(root / f"sys/devices/system/cpu/cpu{core}/cpu_capacity").strip()
        if not text.isdigit():
            capacities = {}
            break
        capacities[core] = int(text)
    return Topology(allowed, numa_nodes(root), physical_of(allowed, root), capacities)


def split_cores(
    allowed: tuple[int, ...],
    engine: tuple[int, ...] = (),
    api: tuple[int, ...] = (),
    threads: int | None = None,
    root: Path = ROOT,
    quota: float | None = None,
    memory_bytes: int = 0,
    engines: int = 1,
    nodes: int | None = None,
) -> CoreSplit:
    """Divide the allowed cores.

    `engine`, `api`, `threads`: what the user has set; (), None: nothing. The default is one thread
    per physical core of an engine, but no more than the whole cores of its part of the CPU `quota`
    (None: unlimited). `engines`: that divide the cores of `engine`; each is on one NUMA node.
    `nodes`: NUMA nodes that they run on together; None: one for each engine.
    `memory_bytes`: the predicted memory of all engines, which must fit on their nodes if they are
    to run there alone; 0: not known yet.

    Raises ServingError if the user names a core that is not allowed, or wants more engines than
    there are cores.
    """
    for name, requested in (("--cores", engine), ("--api-cores", api)):
        outside = [core for core in requested if core not in allowed]
        if outside:
            raise ServingError(
                f"{name} names core {outside[0]}, which this process may not use. "
                f"Allowed cores: {cores_text(allowed)}."
            )
    options = "--cores and --api-cores change this"
    topology = read_topology(allowed, root)
    best_cores, why_best = best_engine_cores(topology, memory_bytes, engines, nodes)
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
        siblings = topology.physical
        api = tuple(core for core in allowed if siblings[core] == siblings[allowed[-1]])
        engine = tuple(core for core in allowed if core not in api)
        why = f"one core is kept for HTTP; {options}"
    else:
        engine = api = allowed
        why = f"shared, HTTP has priority; {options}"
    parts = _divide_among(engines, engine, topology, quota)
    places = [nodes_of(part, topology.nodes) for part in parts]
    shares = tuple(
        EngineCores(
            part, _memory_nodes(place, topology, memory_bytes // engines * places.count(place))
        )
        for part, place in zip(parts, places, strict=True)
    )
    physical_cores = len({topology.physical[core] for core in parts[0]})
    own_quota = None if quota is None else quota / engines
    count = threads or whole_cores(physical_cores, own_quota)
    with_threads = threads_text(count)
    if threads is None and count < physical_cores:
        with_threads += f" (the CPU quota is {quota:g} {'core' if quota == 1 else 'cores'})"
    nice = SHARED_NICE if set(engine) & set(api) else 0
    nice_text = f" at nice {nice}" if nice else ""
    engines_text = "engine" if engines == 1 else f"{engines} engines"
    each_text = "" if engines == 1 else " each"
    cores_and_memory = " and ".join(
        f"{cores_text(share.cores)}{_memory_text(share.memory_nodes)}" for share in shares
    )
    note = (
        f"{engines_text} on cores {cores_and_memory} with {with_threads}{each_text}{nice_text}, "
        f"HTTP on {cores_text(api)} ({why})"
    )
    return CoreSplit(shares, api, count, nice, note)


def _divide_among(
    engines: int, cores: tuple[int, ...], topology: Topology, quota: float | None
) -> tuple[tuple[int, ...], ...]:
    """Return the cores of each of these engines: equally many physical cores, all on one NUMA node
    if there are at least as many engines as nodes. No core is in two engines, and cores that remain
    are left out.

    Raises ServingError if an engine would have no core.
    """
    if engines == 1:
        return (cores,)
    groups = [cores]
    places = _places(nodes_of(cores, topology.nodes))
    if 1 < len(places) <= engines:
        groups = [tuple(core for core in cores if core in place.cpus) for place in places]
    if engines % len(groups):
        fewer = engines // len(groups) * len(groups)
        raise ServingError(
            f"--engines {engines} cannot be divided among the {len(groups)} NUMA nodes of cores "
            f"{cores_text(cores)}. Use {fewer} or {fewer + len(groups)}."
        )
    engines_of_group = engines // len(groups)
    groups_by_physical: list[list[list[int]]] = []
    for group in groups:
        by_physical: dict[int, list[int]] = {}
        for core in group:
            by_physical.setdefault(topology.physical[core], []).append(core)
        groups_by_physical.append(list(by_physical.values()))
    count = min(map(len, groups_by_physical)) // engines_of_group
    if not count or (quota is not None and quota < engines):
        quota_text = "" if quota is None else f" and a CPU quota of {quota:g}"
        total = sum(map(len, groups_by_physical))
        raise ServingError(
            f"--engines {engines} needs a physical core for each engine, but cores "
            f"{cores_text(cores)} are {total}{quota_text}."
        )
    parts: list[tuple[int, ...]] = []
    for physical_cores in groups_by_physical:
        for start in range(0, engines_of_group * count, count):
            logical = [core for one in physical_cores[start : start + count] for core in one]
            parts.append(tuple(sorted(logical)))
    return tuple(parts)


def arrangements(topology: Topology, quota: float | None = None) -> tuple[Arrangement, ...]:
    """Return how the engines of a model may be spread over the NUMA nodes of the allowed cores: one
    on each node, one on one node, and one on all nodes.

    On one node there is one engine; so it is with a CPU quota below all cores, which several
    engines would have to divide, and where nodes share cores, as emulated ones do. There is one on
    each node only if the nodes have equally many cores, since engines get equal shares, all equally
    fast, and if cores remain on each beside HTTP.
    """
    allowed, physical, nodes = topology.allowed, topology.physical, topology.own_nodes
    are_apart = len(_places(nodes)) == len(nodes)
    has_low_quota = quota is not None and quota < len(set(physical.values()))
    if len(nodes) < 2 or not are_apart or has_low_quota:
        return (Arrangement(),)
    sizes = {len({physical[cpu] for cpu in node.cpus if cpu in physical}) for node in nodes}
    single = Arrangement(), Arrangement(1, len(nodes))
    are_alike = len(sizes) == 1 and _fast_cores(allowed, topology) == allowed
    if not are_alike or (len(allowed) > SHARED_CORES and min(sizes) <= 2):
        return single
    return Arrangement(len(nodes)), *single


def best_engine_cores(
    topology: Topology, memory_bytes: int = 0, engines: int = 1, nodes: int | None = None
) -> tuple[tuple[int, ...], str]:
    """Return the cores on which the engines of a model run best, and the reason if these are not
    all.

    These are the cores of `nodes` NUMA nodes (None: one for each engine, as far as there are
    nodes), if the memory of all engines fits there: the nodes with the most cores, or of several
    the ones with the most free memory. Of cores with different speeds, they are those that compute
    most together, since each operator waits for the slowest of them.
    """
    allowed, places = topology.allowed, _places(topology.own_nodes)
    cores, why = allowed, ""
    count = len(places)
    needed = min(nodes or engines, count)
    fitting = [place for place in places if memory_bytes <= place.free_bytes * needed]
    if needed < count and len(fitting) >= needed:
        fitting.sort(
            key=lambda place: (len(place.cpus & set(allowed)), place.free_bytes), reverse=True
        )
        best = {cpu for place in fitting[:needed] for cpu in place.cpus}
        cores = tuple(core for core in allowed if core in best)
        why = f"one NUMA node of {count}, since the weights lie on one"
        if Arrangement(count) in arrangements(topology):
            why += f"; --engines {count} uses all"
        if needed > 1:
            why = f"{needed} NUMA nodes of {count}, one for each engine"
    fast_cores = _fast_cores(cores, topology)
    if fast_cores != cores:
        reason = "the faster cores, since each operator waits for the slowest"
        return fast_cores, f"{why}; {reason}" if why else reason
    return cores, why


class _Place(NamedTuple):
    """A NUMA node, or several that share CPUs, as emulated ones do."""

    cpus: frozenset[int]
    free_bytes: int


def _places(nodes: Iterable[NumaNode]) -> list[_Place]:
    """Return the places of these nodes, by their first CPU. No two share a CPU."""
    places: list[_Place] = []
    for node in nodes:
        merged, apart = _Place(frozenset(node.cpus), node.free_bytes), []
        for place in places:
            if place.cpus.isdisjoint(merged.cpus):
                apart.append(place)
            else:
                merged = _Place(place.cpus | merged.cpus, place.free_bytes + merged.free_bytes)
        places = [*apart, merged]
    return sorted(places, key=lambda place: min(place.cpus))


def _fast_cores(cores: tuple[int, ...], topology: Topology) -> tuple[int, ...]:
    """Return the cores that compute most together if all of them wait for the slowest; all cores
    where the kernel does not report their capacity."""
    capacities = topology.capacities
    if not capacities:
        return cores

    def cores_from(capacity: int) -> tuple[int, ...]:
        return tuple(core for core in cores if capacities[core] >= capacity)

    # Of equal ones the fewer cores.
    best = max(
        sorted({capacities[core] for core in cores}, reverse=True),
        key=lambda capacity: capacity * len(cores_from(capacity)),
        default=0,
    )
    return cores_from(best)


def _memory_nodes(
    own_nodes: tuple[NumaNode, ...], topology: Topology, memory_bytes: int
) -> tuple[int, ...]:
    """Return the NUMA nodes for an engine's memory: those of its cores, or all if the memory of the
    engines there does not fit; (): there is only one node."""
    if len(topology.nodes) < 2:
        return ()
    fits = memory_bytes <= sum(node.free_bytes for node in own_nodes)
    return tuple(node.number for node in (own_nodes if fits else topology.nodes))


def _memory_text(memory_nodes: tuple[int, ...]) -> str:
    """Return where the engine's memory lies, in parentheses; "": there is one node."""
    if not memory_nodes:
        return ""
    if len(memory_nodes) == 1:
        return f" (memory on NUMA node {memory_nodes[0]})"
    return f" (memory in turns on NUMA nodes {cores_text(memory_nodes)})"


def parse_cores(text: str, option: str = "") -> tuple[int, ...]:
    """Return the core numbers of a list as the kernel and taskset write it: (0, 1, 2, 3, 5) for
    "0-3,5", and () for "".

    Raises ServingError, which names the option, if the text is not such a list.
    """
    try:
        return parse_cpu_list(text)
    except ServingError as problem:
        raise ServingError(f"{option} {problem}".lstrip()) from problem


def threads_text(count: int) -> str:
    """Return a number of threads as text."""
    return "1 thread" if count == 1 else f"{count} threads"


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

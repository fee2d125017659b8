"""NUMA nodes: which CPUs and how much memory each has, and where a process's memory is allocated.

    numa_nodes()                         # two nodes of 64 CPUs and 252 GiB each
    run_on(cores, (0,))                  # this thread and those that it starts
    bytes_by_node(pid)                   # {0: 5368709120, 1: 40960}

A page lies on the node of the thread that writes it first, and engines load their weights with one
thread. So an engine whose threads run on two nodes would read all weights from one of them. The
system calls are made through ctypes; libnuma is not needed.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import re
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

import msgspec

from crossover.models import formatting
from crossover.models.machine_limits import ROOT, read_text, sizes
from crossover.serving.errors import ServingError

SYS_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}  # by machine
MPOL_BIND, MPOL_INTERLEAVE = 2, 3  # linux/mempolicy.h
MIN_SHARE_ON_NODE = 0.95  # of an engine's memory, on the nodes that it was given
MISPLACED_ADVICE = "free memory there, or choose cores of another node (--cores)"
MAX_NODES = 1024  # bits of a mask of nodes
MAX_CPU = 65_535  # larger numbers are typing errors, which must not fill the memory


class NumaNode(msgspec.Struct, frozen=True):
    """A node with CPUs."""

    number: int
    cpus: tuple[int, ...]
    total_bytes: int
    free_bytes: int  # with the page cache, which the kernel drops when memory is needed


def numa_nodes(root: Path = ROOT) -> tuple[NumaNode, ...]:
    """Return the nodes that have CPUs, by number; () where the kernel reports none.

    Nodes without CPUs are memory of a GPU (Grace) or of CXL.
    """
    nodes: list[NumaNode] = []
    for folder in (root / "sys/devices/system/node").glob("node[0-9]*"):
        cpus = parse_cpu_list(read_text(folder / "cpulist").strip())
        # Lines are "Node 0 MemTotal:       263840000 kB".
        lines = re.sub(r"^Node \d+ ", "", read_text(folder / "meminfo"), flags=re.MULTILINE)
        memory = sizes(lines)
        cache_bytes = memory.get("Active(file)", 0) + memory.get("Inactive(file)", 0)
        if cpus:
            nodes.append(
                NumaNode(
                    number=int(folder.name.removeprefix("node")),
                    cpus=cpus,
                    total_bytes=memory.get("MemTotal", 0),
                    free_bytes=memory.get("MemFree", 0) + cache_bytes,
                )
            )
    return tuple(sorted(nodes, key=lambda node: node.number))


def nodes_of(cpus: Collection[int], nodes: Iterable[NumaNode]) -> tuple[NumaNode, ...]:
    """Return the nodes that have some of these CPUs."""
    return tuple(node for node in nodes if not set(node.cpus).isdisjoint(cpus))


def parse_cpu_list(text: str) -> tuple[int, ...]:
    """Return the numbers of a list as the kernel writes it: (0, 1, 2, 5) for "0-2,5", () for "".

    Raises ServingError if the text is not such a list.
    """
    cpus: set[int] = set()
    for part in text.split(",") if text.strip() else ():
        first, dash, last = part.strip().partition("-")
        last = last if dash else first
        are_numbers = first.isdigit() and last.isdigit()
        if not are_numbers or not int(first) <= int(last) <= MAX_CPU:
            raise ServingError(
                f"{text!r} is not a list of cores. Write, for example, 0-3 or 0,2,4."
            )
        cpus.update(range(int(first), int(last) + 1))
    return tuple(sorted(cpus))


def allocate_memory_on(nodes: Collection[int]) -> None:
    """Allocate the memory of this thread, and of threads that it starts, on these nodes: on one of
    them only, or in turns on several.

    Raises OSError where the kernel or a container forbids it; memory then lies where threads run.
    """
    number = SYS_SET_MEMPOLICY.get(platform.machine())
    if number is None:
        raise OSError(f"set_mempolicy is not known for {platform.machine()}")
    bits_per_word = 8 * ctypes.sizeof(ctypes.c_ulong)
    mask = (ctypes.c_ulong * (MAX_NODES // bits_per_word))()
    for node in nodes:
        mask[node // bits_per_word] |= 1 << node % bits_per_word
    mode = MPOL_BIND if len(nodes) == 1 else MPOL_INTERLEAVE
    libc = ctypes.CDLL(None, use_errno=True)
    # The kernel reads one bit less than it is told.
    if libc.syscall(ctypes.c_long(number), mode, mask, ctypes.c_ulong(MAX_NODES + 1)) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


@contextlib.contextmanager
def running_on(cores: Collection[int]) -> Iterator[None]:
    """Run this thread on these cores meanwhile; (): where it runs already.

    A process that is started here runs there from its beginning, so what the interpreter allocates
    before `run_on` lies on the cores' NUMA node too. In a small engine that is a tenth of its
    memory.
    """
    previous_cores = os.sched_getaffinity(0)
    try:
        if cores:
            os.sched_setaffinity(0, cores)
        yield
    finally:
        os.sched_setaffinity(0, previous_cores)


def run_on(cores: Collection[int], memory_nodes: Collection[int]) -> str:
    """Run this thread, and those that it starts, on these cores with memory on these NUMA nodes;
    (): wherever the kernel puts them. Return why the memory's place is not enforced; "": it is.

    Must be called before memory is allocated, since pages that were written stay where they are.
    """
    if cores:
        os.sched_setaffinity(0, cores)
    try:
        if memory_nodes:
            allocate_memory_on(memory_nodes)
    except OSError as problem:
        noun = "node" if len(memory_nodes) == 1 else "nodes"
        return (
            f"memory is not bound to NUMA {noun} {', '.join(map(str, memory_nodes))} ({problem}); "
            "it lies where the threads run that write it first"
        )
    return ""


def memory_share_on(
    memory_nodes: Collection[int], pid: int | str = "self", root: Path = ROOT
) -> float | None:
    """Return the share of a process's own memory that lies on these nodes; None: no nodes are
    given, or the kernel does not report it."""
    size_by_node = bytes_by_node(pid, root) if memory_nodes else {}
    total = sum(size_by_node.values())
    if not total:
        return None
    return sum(size_by_node.get(node, 0) for node in memory_nodes) / total


def misplaced_words(share: float | None) -> str:
    """Return a warning if too little of an engine's memory lies on the nodes that it was given; ""
    if enough of it does, or it is not known. `share`: as of `memory_share_on`."""
    if share is None or share >= MIN_SHARE_ON_NODE:
        return ""
    return (
        f"only {formatting.share(share, 2)} of the engine's memory lies on its NUMA node, so steps "
        "wait for the link to other nodes"
    )


def bytes_by_node(pid: int | str = "self", root: Path = ROOT) -> dict[int, int]:
    """Return the bytes of a process's own memory by node, without files that it maps; {} where the
    kernel does not report them."""
    total_bytes: dict[int, int] = {}
    for line in read_text(root / f"proc/{pid}/numa_maps").splitlines():
        if " file=" in line:
            continue
        page_size = re.search(r"kernelpagesize_kB=(\d+)", line)
        page_bytes = 1024 * int(page_size[1]) if page_size else 4096
        for node, pages in re.findall(r" N(\d+)=(\d+)", line):
            node_number = int(node)
            total_bytes[node_number] = total_bytes.get(node_number, 0) + int(pages) * page_bytes
    return total_bytes

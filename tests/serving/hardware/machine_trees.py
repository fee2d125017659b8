"""Machines made of files: their CPUs, hyperthreads, caches and NUMA nodes under /sys."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from crossover.serving.hardware.cpu_topology import cores_text

NODE_TOTAL_KIB = 263_840_000  # 252 GiB
NODE_FREE_KIB = 200_000_000


class Tree(NamedTuple):
    root: Path
    cpus: tuple[int, ...]
    nodes: dict[int, list[int]]

    def node_of(self, cpu: int) -> int:
        return next(node for node, cpus in self.nodes.items() if cpu in cpus)


def make_tree(
    root: Path,
    nodes: Mapping[int, list[int]],
    siblings: Callable[[int], list[int]],
    cache_size: str,
    cache_cpus: Callable[[int], list[int]],
    free_kib: Mapping[int, int] | None = None,
) -> Tree:
    """Make the files. `siblings`: the CPUs of a CPU's physical core. `cache_cpus`: those that share
    its last cache."""

    def write(path: str, text: str) -> None:
        file = root / "sys/devices/system" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")

    cpus = tuple(sorted({cpu for of_node in nodes.values() for cpu in of_node}))
    for cpu in cpus:
        write(f"cpu/cpu{cpu}/topology/thread_siblings_list", cores_text(siblings(cpu)))
        write(f"cpu/cpu{cpu}/cache/index3/size", cache_size)
        write(f"cpu/cpu{cpu}/cache/index3/shared_cpu_list", cores_text(cache_cpus(cpu)))
    for node, of_node in nodes.items():
        free = (free_kib or {}).get(node, NODE_FREE_KIB)
        write(f"node/node{node}/cpulist", cores_text(of_node))
        write(
            f"node/node{node}/meminfo",
            f"Node {node} MemTotal:       {NODE_TOTAL_KIB} kB\n"
            f"Node {node} MemFree:        {free} kB\n"
            f"Node {node} Active(file):   1000 kB\n"
            f"Node {node} Inactive(file): 2000 kB",
        )
    return Tree(root, cpus, dict(nodes))


def two_xeons(root: Path, free_kib: Mapping[int, int] | None = None) -> Tree:
    """Two sockets of 32 cores. The second hyperthreads follow the first ones."""
    nodes = {
        0: [*range(32), *range(64, 96)],
        1: [*range(32, 64), *range(96, 128)],
    }
    return make_tree(
        root,
        nodes,
        lambda cpu: [cpu % 64, cpu % 64 + 64],
        "61440K",
        lambda cpu: nodes[0] if cpu in nodes[0] else nodes[1],
        free_kib,
    )


def epyc_with_four_nodes(root: Path) -> Tree:
    """A socket of 64 cores in four nodes (NPS4), with a last cache for each eight cores."""
    nodes = {
        node: [*range(16 * node, 16 * node + 16), *range(64 + 16 * node, 80 + 16 * node)]
        for node in range(4)
    }

    def complex_of(cpu: int) -> list[int]:
        first = cpu % 64 // 8 * 8
        return [*range(first, first + 8), *range(first + 64, first + 72)]

    return make_tree(root, nodes, lambda cpu: [cpu % 64, cpu % 64 + 64], "32768K", complex_of)


def alternating_xeons(root: Path) -> Tree:
    """Two sockets of 16 cores. Even CPUs are on node 0."""
    nodes = {0: [*range(0, 64, 2)], 1: [*range(1, 64, 2)]}
    return make_tree(
        root, nodes, lambda cpu: [cpu % 32, cpu % 32 + 32], "20480K", lambda cpu: nodes[cpu % 2]
    )


def two_cores_on_two_nodes(root: Path) -> Tree:
    """As the virtual machine of tests/two_nodes/check.sh has them."""
    return make_tree(
        root, {0: [0], 1: [1]}, lambda cpu: [cpu], "16384K", lambda cpu: [cpu], {0: 2_900_000}
    )


def graviton(root: Path) -> Tree:
    """One node of 64 cores without hyperthreads."""
    nodes = {0: [*range(64)]}
    return make_tree(root, nodes, lambda cpu: [cpu], "32M", lambda cpu: nodes[0])


def grace(root: Path) -> Tree:
    """One socket of 72 cores, and a node without CPUs, which is a GPU's memory."""
    nodes = {0: [*range(72)], 1: []}
    return make_tree(root, nodes, lambda cpu: [cpu], "116736K", lambda cpu: nodes[0])


def xeon_with_hyperthreads(root: Path) -> Tree:
    """One node of 64 cores. The second hyperthreads follow the first ones."""
    nodes = {0: [*range(128)]}
    return make_tree(
        root, nodes, lambda cpu: [cpu % 64, cpu % 64 + 64], "61440K", lambda cpu: nodes[0]
    )

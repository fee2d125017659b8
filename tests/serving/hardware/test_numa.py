"""Machines with several NUMA nodes, with hyperthreads, and with big and little cores."""

import ctypes
import errno
import platform
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from crossover.loadtests.host.cpu_pinning import divide_cores
from crossover.models.identity.model_ladder import ladder_model
from crossover.serving.cli.doctor_command import cpus_to_measure, machine_rows
from crossover.serving.errors import ServingError
from crossover.serving.hardware.core_speeds import (
    last_cache_bytes,
    spread_over_cores,
)
from crossover.serving.hardware.cpu_topology import (
    Arrangement,
    arrangements,
    cores_text,
    physical_of,
    read_topology,
    split_cores,
)
from crossover.serving.hardware.numa import (
    allocate_memory_on,
    bytes_by_node,
    memory_share_on,
    misplaced_words,
    numa_nodes,
    run_on,
)
from crossover.serving.placement.engines import Engine
from crossover.serving.placement.node_splits import fitting_splits
from crossover.serving.placement.placement_policy import with_settings
from tests.serving.hardware.machine_trees import (
    NODE_FREE_KIB,
    NODE_TOTAL_KIB,
    Tree,
    alternating_xeons,
    epyc_with_four_nodes,
    grace,
    graviton,
    make_tree,
    two_cores_on_two_nodes,
    two_xeons,
    xeon_with_hyperthreads,
)
from tests.serving.placement.test_plan import machine
from tests.tools.core_splits import split_of_tree
from tests.tools.with_settings import placement_request

MIB, GIB = 1 << 20, 1 << 30


@pytest.mark.parametrize(
    ("make", "engine", "api", "threads", "memory_nodes"),
    [
        (two_xeons, "0-31,64-95", "32-63,96-127", 32, (0,)),
        (epyc_with_four_nodes, "0-15,64-79", "16-63,80-127", 16, (0,)),
        (alternating_xeons, cores_text(range(0, 64, 2)), cores_text(range(1, 64, 2)), 16, (0,)),
        (graviton, "0-62", "63", 63, ()),
        (grace, "0-70", "71", 71, ()),
        (xeon_with_hyperthreads, "0-62,64-126", "63,127", 63, ()),
    ],
)
def test_an_engine_runs_on_one_node_with_its_memory_there(
    tmp_path: Path,
    make: Callable[[Path], Tree],
    engine: str,
    api: str,
    threads: int,
    memory_nodes: tuple[int, ...],
) -> None:
    tree = make(tmp_path)
    split = split_cores(tree.cpus, root=tmp_path, memory_bytes=8 * GIB)
    assert (cores_text(split.engine), cores_text(split.api)) == (engine, api)
    assert (split.threads, split.memory_nodes, split.nice) == (threads, memory_nodes, 0)
    assert ("memory on NUMA node 0" in split.note) == bool(memory_nodes)


def test_weights_that_fit_on_no_node_are_spread_over_all_of_them(tmp_path: Path) -> None:
    tree = two_xeons(tmp_path)
    split = split_cores(tree.cpus, root=tmp_path, memory_bytes=300 * GIB)
    assert cores_text(split.engine) == "0-62,64-126" and split.threads == 63
    assert split.memory_nodes == (0, 1) and "in turns on NUMA nodes 0-1" in split.note
    # Cores that the user names stay, and the memory is spread.
    named = split_cores(tree.cpus, (0, 1), root=tmp_path, memory_bytes=300 * GIB)
    assert named.engine == (0, 1) and named.memory_nodes == (0, 1)


@pytest.mark.parametrize(
    ("make", "engines", "cores", "memory_nodes", "threads", "why"),
    [
        (two_xeons, 2, ["0-30,64-94", "32-62,96-126"], [(0,), (1,)], 31, "kept for HTTP"),
        (
            two_xeons,
            4,
            ["0-14,64-78", "15-29,79-93", "32-46,96-110", "47-61,111-125"],
            [(0,), (0,), (1,), (1,)],
            15,
            "kept for HTTP",
        ),
        (
            epyc_with_four_nodes,
            2,
            ["0-15,64-79", "16-31,80-95"],
            [(0,), (1,)],
            16,
            "2 NUMA nodes of 4, one for each engine",
        ),
        (xeon_with_hyperthreads, 2, ["0-30,64-94", "31-61,95-125"], [(), ()], 31, "kept for HTTP"),
    ],
)
def test_engines_have_equal_shares_each_on_one_node(
    tmp_path: Path,
    make: Callable[[Path], Tree],
    engines: int,
    cores: list[str],
    memory_nodes: list[tuple[int, ...]],
    threads: int,
    why: str,
) -> None:
    split = split_cores(make(tmp_path).cpus, root=tmp_path, memory_bytes=8 * GIB, engines=engines)
    assert [cores_text(engine.cores) for engine in split.engines] == cores
    assert [engine.memory_nodes for engine in split.engines] == memory_nodes
    assert split.threads == threads and why in split.note
    assert f"{engines} engines on cores {cores[0]}" in split.note
    assert not set(split.engine) & set(split.api)


ONE_NODE, ALL_NODES = Arrangement(), Arrangement(1, 2)


def test_engines_may_be_spread_over_nodes_that_are_alike(tmp_path: Path) -> None:
    cpus = two_xeons(tmp_path).cpus
    assert arrangements(read_topology(cpus, tmp_path)) == (Arrangement(2), ONE_NODE, ALL_NODES)
    assert arrangements(read_topology(cpus, tmp_path), quota=64.0) == (
        Arrangement(2),
        ONE_NODE,
        ALL_NODES,
    )
    assert arrangements(read_topology(cpus, tmp_path), quota=40.0) == (ONE_NODE,), (
        "they would divide it"
    )
    uneven = tuple(cpu for cpu in cpus if cpu % 64 < 60)
    assert arrangements(read_topology(uneven, tmp_path)) == (ONE_NODE, ALL_NODES)
    assert arrangements(read_topology((0, 1, 32, 33), tmp_path))[0] == Arrangement(2)
    two_each = (0, 1, 32, 33, 64, 65, 96, 97, 2, 34)  # with hyperthreads: no core for HTTP
    assert arrangements(read_topology(two_each, tmp_path))[0] == Arrangement(2)
    four = epyc_with_four_nodes(tmp_path / "epyc")
    assert arrangements(read_topology(four.cpus, tmp_path / "epyc"))[0] == Arrangement(4)
    few = tuple(cpu for node in range(4) for cpu in four.nodes[node][:2])
    with_siblings = (*few, *(cpu + 64 for cpu in few))
    assert arrangements(read_topology(with_siblings, tmp_path / "epyc"))[0] == ONE_NODE, (
        "HTTP needs one"
    )
    for make in (graviton, grace, xeon_with_hyperthreads):
        tree = make(tmp_path / make.__name__)
        assert arrangements(read_topology(tree.cpus, tree.root)) == (ONE_NODE,)


@pytest.mark.parametrize(
    ("free_gib", "expected"),
    [
        ({0: 190, 1: 190}, [(2, 2), (1, 2)]),
        ({0: 3, 1: 190}, [(1, 1), (1, 2)]),  # on the second node only
        ({0: 8, 1: 8}, [(1, 2)]),  # half of it on each
    ],
)
def test_there_is_an_engine_on_each_node_if_it_fits_on_each(
    tmp_path: Path, free_gib: dict[int, int], expected: list[tuple[int, int]]
) -> None:
    tree = two_xeons(tmp_path, {node: gib * GIB // 1024 for node, gib in free_gib.items()})
    request = with_settings(placement_request(ladder_model("8b").spec), context_tokens=2048)
    facts = machine(sum(free_gib.values()), allowed_cores=tree.cpus)
    q4 = Engine("llama_cpp", "Q4_0", "cpu")

    def arrangements_of(ways: tuple[Arrangement, ...]) -> list[Arrangement]:
        splits = fitting_splits(request, facts, q4, ways, split_of_tree(tree.cpus, tmp_path))
        return [split.arrangement for split in splits]

    assert arrangements_of(arrangements(read_topology(tree.cpus, tmp_path))) == expected
    # What the user sets is done, wherever its memory lies.
    asked = arrangements_of((Arrangement(2),))
    assert [engines for engines, _ in asked] == ([2] if sum(free_gib.values()) > 20 else [])


def test_a_campaign_measures_several_engines_on_their_nodes(tmp_path: Path) -> None:
    tree = two_xeons(tmp_path)
    layout = divide_cores(tree.cpus, root=tmp_path, arrangement=Arrangement(2))
    split = split_cores(tree.cpus, layout.engine, layout.api, root=tmp_path, engines=2)
    assert [len(engine.cores) for engine in split.engines] == [60, 60]
    assert [engine.memory_nodes for engine in split.engines] == [(0,), (1,)]
    assert not set(split.engine) & {*layout.api, *layout.client}
    over_all = divide_cores(tree.cpus, root=tmp_path, arrangement=ALL_NODES)
    assert over_all.engine == layout.engine


def test_engines_share_no_core_where_nodes_do(tmp_path: Path) -> None:
    """Two sockets of 8 cores, each emulated as two nodes that list all of its CPUs."""
    first, second = [*range(8)], [*range(8, 16)]
    make_tree(
        tmp_path,
        {0: first, 1: second, 2: first, 3: second},
        lambda cpu: [cpu],
        "32M",
        lambda cpu: first if cpu < 8 else second,
    )
    cpus = tuple(range(16))

    def cores_of(engines: int) -> list[str]:
        split = split_cores(cpus, cpus, root=tmp_path, engines=engines)
        return [cores_text(engine.cores) for engine in split.engines]

    assert cores_of(2) == ["0-7", "8-15"]
    assert cores_of(4) == ["0-3", "4-7", "8-11", "12-15"]
    best = split_cores(cpus, root=tmp_path, memory_bytes=8 * GIB)
    assert cores_text(best.engine) == "0-7" and best.memory_nodes == (0, 2)
    assert arrangements(read_topology(cpus, tmp_path)) == (ONE_NODE,)
    one_socket = split_cores(tuple(first), root=tmp_path, engines=2)
    assert [cores_text(engine.cores) for engine in one_socket.engines] == ["0-3", "4-7"]


def test_engines_whose_memory_fits_on_no_node_have_it_on_all(tmp_path: Path) -> None:
    cpus = two_xeons(tmp_path, free_kib={0: 10_000_000, 1: 10_000_000}).cpus

    def memory_nodes(engines: int, gib: int) -> set[tuple[int, ...]]:
        split = split_cores(cpus, root=tmp_path, memory_bytes=gib * GIB, engines=engines)
        return {engine.memory_nodes for engine in split.engines}

    assert memory_nodes(2, 16) == memory_nodes(4, 16) == {(0,), (1,)}
    assert memory_nodes(2, 24) == memory_nodes(4, 24) == {(0, 1)}


def test_engines_that_cannot_be_divided_are_refused(tmp_path: Path) -> None:
    cpus = two_xeons(tmp_path).cpus
    with pytest.raises(ServingError, match="--engines 3 cannot be divided .* Use 2 or 4"):
        split_cores(cpus, root=tmp_path, engines=3)
    with pytest.raises(ServingError, match="--engines 5 needs a physical core .* 0-3 are 4"):
        split_cores(cpus, (0, 1, 2, 3), root=tmp_path, engines=5)
    with pytest.raises(ServingError, match="are 2 and a CPU quota of 1.5"):
        split_cores(cpus, (0, 1), root=tmp_path, engines=2, quota=1.5)
    assert "--engines 2 uses all" in split_cores(cpus, root=tmp_path).note


def test_of_two_equal_nodes_the_one_with_more_free_memory_is_taken(tmp_path: Path) -> None:
    tree = two_xeons(tmp_path, free_kib={0: 10_000_000, 1: 20_000_000})
    assert split_cores(tree.cpus, root=tmp_path).memory_nodes == (1,)
    # A node with more cores that are allowed is better than one with more free memory.
    allowed = tuple(cpu for cpu in tree.cpus if cpu not in range(96, 128))
    assert split_cores(allowed, root=tmp_path).memory_nodes == (0,)
    # If the model does not fit there, it runs on the other one.
    assert split_cores(allowed, root=tmp_path, memory_bytes=15 * GIB).memory_nodes == (1,)


def test_named_cores_decide_which_nodes_have_the_memory(tmp_path: Path) -> None:
    tree = two_xeons(tmp_path)
    assert split_cores(tree.cpus, (40, 41), root=tmp_path).memory_nodes == (1,)
    assert split_cores(tree.cpus, (0, 40), root=tmp_path).memory_nodes == (0, 1)


def test_nodes_are_read_with_their_memory(tmp_path: Path) -> None:
    two_xeons(tmp_path)
    first, second = numa_nodes(tmp_path)
    assert (first.number, second.number) == (0, 1)
    assert first.total_bytes == NODE_TOTAL_KIB * 1024
    assert first.free_bytes == (NODE_FREE_KIB + 3000) * 1024  # with the page cache
    assert [node.number for node in numa_nodes(grace(tmp_path / "grace").root)] == [0]
    assert numa_nodes(tmp_path / "nothing") == ()


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (two_xeons, "2 nodes of 32 cores, 252 GiB each"),
        (epyc_with_four_nodes, "4 nodes of 16 cores, 252 GiB each"),
        (two_cores_on_two_nodes, "2 nodes of 1 core, 252 GiB each"),
        (graviton, None),
        (grace, None),
    ],
)
def test_doctor_lists_the_nodes(
    tmp_path: Path, make: Callable[[Path], Tree], expected: str | None
) -> None:
    tree = make(tmp_path)
    rows = dict(machine_rows(machine(allowed_cores=tree.cpus), tmp_path))
    assert rows.get("NUMA") == expected
    engines = 1 if expected is None else len(tree.nodes)
    note = split_cores(tree.cpus, root=tmp_path, engines=engines).note
    assert rows["serve would use"].startswith(note)
    assert ("one engine if the model does not fit" in rows["serve would use"]) == (engines > 1)


def test_doctor_measures_the_cpus_of_one_node(tmp_path: Path) -> None:
    tree = two_xeons(tmp_path)
    facts = machine(allowed_cores=tree.cpus)
    assert sorted(cpus_to_measure(facts, tmp_path)) == tree.nodes[0]
    few = msgspec.structs.replace(facts, cgroup_cores=4.0)
    measured = cpus_to_measure(few, tmp_path)
    assert len(measured) == 4 and len(set(physical_of(measured, tmp_path).values())) == 4


@pytest.mark.parametrize("make", [two_xeons, xeon_with_hyperthreads, graviton])
@pytest.mark.parametrize("count", [1, 2, 4, 32])
def test_few_cpus_are_never_two_hyperthreads_of_a_core(
    tmp_path: Path, make: Callable[[Path], Tree], count: int
) -> None:
    tree = make(tmp_path)
    cpus = spread_over_cores(tree.cpus, count, tmp_path)
    assert len(cpus) == len(set(cpus)) == count
    assert len(set(physical_of(cpus, tmp_path).values())) == count
    everything = spread_over_cores(tree.cpus, len(tree.cpus), tmp_path)
    assert sorted(everything) == [*tree.cpus]


def test_all_last_caches_count(tmp_path: Path) -> None:
    """With one of eight, memory that is to be read would lie in the others."""
    tree = epyc_with_four_nodes(tmp_path)
    assert last_cache_bytes(tree.cpus, tmp_path) == 8 * 32 * MIB
    assert last_cache_bytes(tree.nodes[0], tmp_path) == 2 * 32 * MIB
    assert last_cache_bytes(two_xeons(tmp_path / "xeons").cpus, tmp_path / "xeons") == 120 * MIB


def big_and_little(root: Path, capacities: dict[int, int]) -> tuple[int, ...]:
    for cpu, capacity in capacities.items():
        file = root / f"sys/devices/system/cpu/cpu{cpu}/cpu_capacity"
        file.parent.mkdir(parents=True)
        file.write_text(f"{capacity}\n")
    return tuple(capacities)


@pytest.mark.parametrize(
    ("capacities", "engine"),
    [
        # RK3588: eight cores at the pace of the little ones compute less than the four big ones.
        ({0: 414, 1: 414, 2: 414, 3: 414, 4: 1024, 5: 1024, 6: 1010, 7: 1010}, (4, 5, 6, 7)),
        # One fast core alone computes less than all together.
        ({0: 700, 1: 700, 2: 700, 3: 1024}, (0, 1, 2, 3)),
        ({0: 1024, 1: 1024}, (0, 1)),
    ],
)
def test_little_cores_are_left_to_http_where_they_slow_the_engine_down(
    tmp_path: Path, capacities: dict[int, int], engine: tuple[int, ...]
) -> None:
    allowed = big_and_little(tmp_path, capacities)
    split = split_cores(allowed, root=tmp_path)
    assert split.engine == engine and split.threads == len(engine)
    rest = tuple(cpu for cpu in allowed if cpu not in engine)
    assert split.api == (rest or allowed)
    assert ("the faster cores" in split.note) == bool(rest)
    layout = divide_cores(allowed, root=tmp_path)
    assert layout.engine == engine and set(layout.client) <= set(split.api)


def test_a_campaign_measures_an_engine_on_one_node(tmp_path: Path) -> None:
    tree = two_xeons(tmp_path)
    layout = divide_cores(tree.cpus, root=tmp_path)
    assert (sorted(layout.engine), layout.engine_threads) == (tree.nodes[0], 32)
    assert {tree.node_of(cpu) for cpu in (*layout.api, *layout.client)} == {1}
    more = divide_cores(tree.cpus, engine_cores=40, root=tmp_path)
    assert more.engine_threads == 40 and set(tree.nodes[0]) < set(more.engine)


# The system call, on the kernel of this machine.


def in_child(code: str) -> str:
    """Run code in a Python of its own, since a policy stays with its process; return its output."""
    imports = (
        "from crossover.serving.hardware.numa import allocate_memory_on, run_on, bytes_by_node"
    )
    done = subprocess.run(
        [sys.executable, "-c", f"{imports}\n{code}"], capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def is_policy_allowed() -> bool:
    """Whether the kernel has NUMA policies and this process may use them."""
    try:
        in_child("allocate_memory_on((0,))")
    except subprocess.CalledProcessError:
        return False
    return True


@pytest.mark.skipif(not is_policy_allowed(), reason="set_mempolicy is not permitted here")
def test_memory_is_bound_to_a_node() -> None:
    code = "print(repr(run_on((), (0,)))); x = bytearray(8 << 20); print(sorted(bytes_by_node()))"
    assert in_child(code) == "''\n[0]"
    missing = in_child("print(run_on((), (63,)))")
    assert "memory is not bound to NUMA node 63 ([Errno 22] Invalid argument)" in missing


def test_an_engine_without_the_permission_says_where_its_memory_lies(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    with pytest.raises(OSError, match="riscv64"):
        allocate_memory_on((0,))
    assert "not bound to NUMA nodes 0, 1" in run_on((), (0, 1))
    monkeypatch.undo()

    class Refusing:
        def syscall(self, *_: object) -> int:
            ctypes.set_errno(errno.EPERM)
            return -1

    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: Refusing())
    assert "Operation not permitted" in run_on((), (0,))


def test_pages_are_counted_by_node(tmp_path: Path) -> None:
    file = tmp_path / "proc/7/numa_maps"
    file.parent.mkdir(parents=True)
    file.write_text(
        "7f00 bind:0 anon=3 dirty=3 N0=2 N1=1 kernelpagesize_kB=4\n"
        "7f01 default anon=1 dirty=1 N1=1 kernelpagesize_kB=2048\n"
        "7f02 default file=/usr/lib/libc.so mapped=9 N0=9 kernelpagesize_kB=4\n"
    )
    assert bytes_by_node(7, tmp_path) == {0: 8192, 1: 4096 + 2 * MIB}
    assert bytes_by_node(8, tmp_path) == {}


@pytest.mark.parametrize(
    ("pages", "nodes", "expected"),
    [
        ("N0=60 N1=40", (0,), "only 60 % of the engine's memory lies on its NUMA node"),
        ("N0=96 N1=4", (0,), ""),
        ("N0=60 N1=40", (0, 1), ""),  # in turns
        ("N0=60 N1=40", (), ""),
        ("", (0,), ""),
    ],
)
def test_an_engine_whose_memory_lies_elsewhere_says_so(
    tmp_path: Path, pages: str, nodes: tuple[int, ...], expected: str
) -> None:
    file = tmp_path / "proc/self/numa_maps"
    file.parent.mkdir(parents=True)
    file.write_text(f"7f00 bind:0 anon=100 dirty=100 {pages} kernelpagesize_kB=4\n")
    warning = misplaced_words(memory_share_on(nodes, root=tmp_path))
    assert warning.startswith(expected) and bool(warning) == bool(expected)

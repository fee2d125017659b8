"""How many engines a server starts where nobody says so: on two sockets made of files, with step
times from a scripted table or with none."""

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

from crossover.models.identity.identify_model import ModelIdentity
from crossover.models.identity.model_ladder import ladder_model
from crossover.serving.hardware.cpu_topology import Arrangement, cores_text
from crossover.serving.hardware.machine_facts import HardwareFacts, hardware_facts
from crossover.serving.metrics import ServerMetrics
from crossover.serving.placement.engine_times import EngineTimes, save_times
from crossover.serving.placement.fastest_backend import EngineCandidate, EngineQuestion
from crossover.serving.placement.placement_policy import Placement, explain
from crossover.serving.registry import prepare_model
from crossover.serving.registry.model_loader import RegistryLimits
from crossover.serving.registry.prepare_model import Host, Prepared, prepare
from crossover.serving.registry.registry import Registry
from crossover.serving.server_options import ModelOptions
from crossover.serving.supervisor.engine_supervisor import Supervisor
from tests.serving.hardware.machine_trees import Tree, two_xeons
from tests.tools.with_settings import placement_request

GIB = 1 << 30


class OnTree(Host):
    """A machine made of files, with so much free memory."""

    def __init__(self, tree: Tree, memory_bytes: int = 380 * GIB) -> None:
        super().__init__(str(tree.root), root=tree.root)
        self._allowed_cores, self._memory_bytes = tree.cpus, memory_bytes

    def facts(self) -> HardwareFacts:
        return msgspec.structs.replace(
            hardware_facts(),
            allowed_cores=self._allowed_cores,
            memory_available_bytes=self._memory_bytes,
            cgroup_memory_bytes=None,
            gpus=(),
        )


@pytest.fixture(autouse=True)
def no_quota(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare_model, "cgroup_cores", lambda: None)


def prepared_on(tree: Tree, **options: Any) -> Prepared:
    """Of the fake model, of which no step times are measured."""
    return prepare(ModelOptions(source="fake", **options), OnTree(tree))


def test_without_step_times_there_is_one_engine_on_each_node(tmp_path: Path) -> None:
    prepared = prepared_on(two_xeons(tmp_path))
    cores = [cores_text(config.cores) for config in prepared.configs]
    assert cores == ["0-30,64-94", "32-62,96-126"]
    assert [config.memory_nodes for config in prepared.configs] == [(0,), (1,)]
    assert {config.threads for config in prepared.configs} == {31}
    on_nodes = "0-30,64-94 (memory on NUMA node 0) and 32-62,96-126 (memory on NUMA node 1)"
    assert f"2 engines on cores {on_nodes} with 31 threads each" in prepared.split.note
    assert prepared.request.settings.engines == 2, "a later placement is the same"
    text = "\n".join(explain(prepared.placement))
    assert "2 engines each with " in text
    assert "because: 2 engines, one on each NUMA node" in text and "--engines 1 uses" in text


@pytest.mark.parametrize(
    ("options", "cores"),
    [
        ({"engines": 1}, "0-31,64-95"),
        ({"threads": 8}, "0-31,64-95"),
        ({"cores": "0-31"}, "0-31"),
        ({"cores": "30-33"}, "30-33"),
        ({"standby": "warm"}, "0-31,64-95"),
    ],
)
def test_what_the_user_sets_stays(tmp_path: Path, options: dict[str, Any], cores: str) -> None:
    (config,) = prepared_on(two_xeons(tmp_path), **options).configs
    assert cores_text(config.cores) == cores and config.settings.engines == 1


def test_a_load_repeats_why_there_are_so_many_engines(tmp_path: Path) -> None:
    machine = OnTree(two_xeons(tmp_path))
    prepared = prepare(ModelOptions(source="fake"), machine)
    registry = Registry(
        ServerMetrics(), machine, lambda model: Supervisor(model.configs), RegistryLimits()
    )
    registry.add_prepared(prepared)
    model = registry.models["fake"]
    placement = asyncio.run(registry.loader._place(model, may_evict=False))
    assert placement.reasons == prepared.placement.reasons
    assert "one on each NUMA node" in placement.reasons[-1].text


def test_an_engine_that_fits_on_no_node_is_spread_over_all(tmp_path: Path) -> None:
    tree = two_xeons(tmp_path, free_kib={0: 40_000, 1: 40_000})
    (config,) = prepared_on(tree).configs
    assert config.memory_nodes == (0, 1) and config.threads == 63


@pytest.mark.parametrize(
    ("all_nodes_seconds", "engines", "best"),
    [
        (0.01, 2, "onnx int8 on each of 2 NUMA nodes with 31 threads is the best"),
        (0.001, 1, "onnx int8 on 2 NUMA nodes with 63 threads is the best"),
    ],
)
def test_step_times_decide_where_they_are_known(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    all_nodes_seconds: float,
    engines: int,
    best: str,
) -> None:
    class Placed(Exception):
        def __init__(self, placement: Placement) -> None:
            self.placement = placement

    def stop(model: ModelIdentity, placement: Placement, *_: object) -> None:
        raise Placed(placement)

    machine = OnTree(two_xeons(tmp_path))
    request = placement_request(ladder_model("135m").spec)
    model = ModelOptions(source="135m", weight_format="int8")
    question = EngineQuestion(request=request, split_of=machine.split_of(model))
    for arrangement, seconds in (
        (Arrangement(2), 0.01),
        (Arrangement(1, 2), all_nodes_seconds),
    ):
        split = machine.split_of(model)(arrangement, 0)
        for threads in (split.threads, split.threads // 2):
            fewer = msgspec.structs.replace(split, threads=threads)
            engine = EngineCandidate(backend="onnx", weight_format="int8", split=fewer)
            slower = seconds if threads == split.threads else 2 * seconds
            times = EngineTimes(
                slots=16,
                prompt_tokens_per_second=1 / slower,
                pass_seconds=0.0,
                decode_seconds=slower,
                decode_slots_seconds=slower,
            )
            save_times(tmp_path, machine.facts(), question.key(engine), times)
    monkeypatch.setattr(prepare_model, "files_of_engines", stop)
    with pytest.raises(Placed) as stopped:
        prepare(model, machine)
    placement = stopped.value.placement
    assert placement.settings.engines == engines
    reason = " ".join(reason.text for reason in placement.reasons)
    assert "onnx int8 on each of 2 NUMA nodes with 31 threads: " in reason
    assert "onnx int8 on 2 NUMA nodes with 63 threads: " in reason
    assert best in reason

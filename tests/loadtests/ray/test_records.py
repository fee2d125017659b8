"""The records of cells go to nodes and come back, by the runner on a simulated server."""

from __future__ import annotations

from pathlib import Path

import msgspec

from loadtests.campaign.bench import Level
from loadtests.campaign.campaign_file import Plan
from loadtests.campaign.manifest import manifest_of
from loadtests.campaign.run_state import CellState, campaign_of
from loadtests.errors import LevelFailed
from loadtests.ray.cell_on_node import Measured, measure_here
from loadtests.ray.records import add, files_of_cell
from loadtests.records.events import CellFinished, Interrupted, RunFinished, RunStarted, of_kind
from loadtests.records.old_run_folder import RunFolder, read_events
from serving.hardware.facts import HardwareFacts
from serving.hardware.gpu_facts import GpuFacts
from tests.loadtests.campaign.campaigns import two_cells
from tests.loadtests.campaign.checks import check_folder
from tests.loadtests.campaign.simulated import FACTS, Simulated


def run_of(plan: Plan, folder: Path, facts: HardwareFacts = FACTS) -> RunFolder:
    opened = RunFolder.create(folder, manifest_of(plan, folder.name, facts, ["test"]))
    opened.event(RunStarted(cells=len(plan.cells)))
    return opened


def measured(opened: RunFolder, number: int, world: Simulated, budget: float) -> Measured:
    """A cell as a node would measure it, its records added."""
    _, cells = campaign_of(opened.manifest)
    files = files_of_cell(opened, cells[number], budget)
    found = measure_here(files, (), True, None, world.world)
    add(opened, cells[number], found)
    return found


def test_cells_that_nodes_measured_are_one_run(tmp_path: Path) -> None:
    plan = two_cells(budget=600, starts=2)
    with run_of(plan, tmp_path / "run") as opened:
        for number in (1, 0):
            assert measured(opened, number, Simulated(), 300.0).problem is None
        opened.event(RunFinished())
        assert {level.cell for level in opened.levels} == {cell.key for cell in plan.cells}
    check_folder(tmp_path / "run")
    events = read_events(tmp_path / "run").records
    assert not of_kind(events, Interrupted), "the journals of the nodes' folders are left out"


def test_a_task_sees_those_gpus_of_its_node_that_it_was_given(tmp_path: Path) -> None:
    l4 = GpuFacts("L4", "nvidia", 24 << 30)
    node = msgspec.structs.replace(FACTS, gpus=(l4, l4))
    task = Simulated(facts=msgspec.structs.replace(FACTS, gpus=(l4,)))
    other = msgspec.structs.replace(FACTS, cpu_model="another CPU")
    with run_of(two_cells(budget=600), tmp_path / "run", node) as opened:
        assert measured(opened, 0, task, 300.0).problem is None
        again = measured(opened, 1, Simulated(facts=other), 300.0)
        assert again.problem is not None and "begun on another machine (CPU" in again.problem


def test_a_cell_that_was_given_up_goes_on_with_its_levels_on_another_node(tmp_path: Path) -> None:
    def fate(state: CellState, level: Level) -> None:
        if len(state.finished) >= 2:
            raise LevelFailed("the load generator ended early")

    plan = two_cells(budget=600)
    with run_of(plan, tmp_path / "run") as opened:
        lost = measured(opened, 0, Simulated(fate=fate), 300.0)
        assert lost.problem is not None and "could not be measured" in lost.problem
        levels = [level.name for level in opened.levels]
        assert len(levels) == 2
        again = Simulated()
        assert measured(opened, 0, again, 300.0).problem is None
        assert measured(opened, 1, again, 300.0).problem is None
        opened.event(RunFinished())
        assert [level.name for level in opened.levels][:2] == levels
        assert len(of_kind(opened.events, CellFinished)) == 2
    check_folder(tmp_path / "run")

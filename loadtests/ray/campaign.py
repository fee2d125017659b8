"""A campaign on a Ray cluster: each cell is a task on a node, which it has for itself meanwhile.

    folders = run_on_ray(plan, Path("runs"), progress)
    resume_on_ray(folder, progress)

A task gets what is on record of its cell and sends back what it added, so a node that is lost takes
the cell that it was measuring with it and nothing else. A run folder is of one kind of machine:
nodes that differ in a fact of the machine have a folder each. Such a folder is like any other: it
can be resumed, shown and reported without Ray.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import ray
from ray.exceptions import NodeDiedError, RayError, RayTaskError, TaskUnschedulableError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from loadtests.campaign.campaign_file import Campaign, Plan, check_trust
from loadtests.campaign.cell_planning import least_part_seconds, shares
from loadtests.campaign.cells import Cell
from loadtests.campaign.manifest import manifest_of, new_folder
from loadtests.campaign.progress import Progress
from loadtests.campaign.run_state import CellState, campaign_of
from loadtests.campaign.runner import note_resumed
from loadtests.errors import BadRunFolder, Incomplete
from loadtests.host.signals import signals_interrupt
from loadtests.ray.cell_on_node import Measured, facts_here, measure_here
from loadtests.ray.nodes import Node, fits, kind_of_cell, needs, next_of, node_of
from loadtests.ray.records import add, files_of_cell
from loadtests.records.comparability import machine_differences
from loadtests.records.events import Interrupted, RunFinished, RunStarted, of_kind
from loadtests.records.old_run_folder import RunFolder
from loadtests.records.schema import RunManifest
from models.cache import CACHE_VARIABLE
from serving.hardware.facts import HardwareFacts
from serving.ray.connection import connect, disconnect, last_line, living_nodes

_measure = ray.remote(max_calls=1)(measure_here)  # a process of its own for each cell
TRIES = 2  # of a cell whose node is lost, on another one
LOOK_SECONDS = 0.5
FACTS_SECONDS = 120.0  # that a node gets to say what it is: it starts a process, which is slow on
# a busy machine, and a node that is left out measures nothing


@dataclass
class Run:
    """The run folder of one kind of machine, the nodes that are such, and its cells not done."""

    opened: RunFolder
    campaign: Campaign
    nodes: list[Node]
    waiting: list[Cell]
    # Cell key -> nodes that were lost with it; twice where a process of the node died, and again.
    lost: dict[str, list[str]] = field(default_factory=dict)

    def budget_of(self, cell: Cell) -> float | None:
        """Seconds of measuring for a cell, those that are spent included; None: the search's."""
        whole = self.campaign.budget_seconds
        if whole is None:
            return None
        cells = campaign_of(self.opened.manifest)[1]
        states = [CellState(self.opened, self.campaign, one) for one in cells]
        left = max(0.0, whole - sum(state.spent_seconds for state in states))
        to_come = {state.cell: float(state.blocks) for state in states if not state.is_done}
        spent = CellState(self.opened, self.campaign, cell).spent_seconds
        return spent + shares(to_come, left, least_part_seconds(self.campaign))[cell.key]


def run_on_ray(
    plan: Plan, out: Path, progress: Progress, *, trusted: Sequence[str] = (), beside: bool = False
) -> list[Path]:
    """A new run in a folder of its own below `out`, or one for each kind of machine.

    Raises BadCampaign, ServingError, and Incomplete when cells are missing.
    """
    with contextlib.ExitStack() as stack:
        kinds = _kinds(_connected(stack), plan)
        nodes = [[node for node, _ in kind] for kind in kinds]
        cells: list[list[Cell]] = [[] for _ in kinds]
        for cell in plan.cells:
            cells[kind_of_cell(cell, nodes)].append(cell)
        runs = []
        for kind, own in zip(kinds, cells, strict=True):
            if not own:
                continue
            folder = new_folder(out, plan.campaign.name)
            part = Plan(plan.campaign, own, plan.text)
            manifest = manifest_of(part, folder.name, kind[0][1], sys.argv)
            opened = stack.enter_context(RunFolder.create(folder, manifest))
            opened.event(RunStarted(cells=len(own)))
            progress.say(f"run {folder}: {len(own)} cells on {len(kind)} nodes")
            runs.append(Run(opened, plan.campaign, [node for node, _ in kind], list(own)))
        _Work(runs, progress, trusted, beside).go()
        return [run.opened.folder for run in runs]


def resume_on_ray(
    folder: Path, progress: Progress, *, trusted: Sequence[str] = (), beside: bool = False
) -> None:
    """Go on with a run on the nodes that are of its kind. Raises as `run_on_ray`, and BadRunFolder
    where no node is."""
    opened, dropped = RunFolder.open_existing(folder)
    with opened, contextlib.ExitStack() as stack:
        campaign, cells = campaign_of(opened.manifest)
        check_trust(Plan(campaign, cells, ""), trusted)
        if of_kind(opened.events, RunFinished):
            progress.say(f"{folder} is complete: nothing to do")
            return
        found = _with_facts(_connected(stack))
        alike = [node for node, facts in found if not _differs(opened.manifest, facts)]
        waiting = [cell for cell in cells if not CellState(opened, campaign, cell).is_done]
        for cell in waiting:
            if not any(fits(cell, node) for node in alike):
                raise BadRunFolder(
                    f"{folder}: no node of the cluster is like the machine that began the run and "
                    f"has what cell {cell.key} asks for"
                )
        note_resumed(opened, dropped)
        progress.say(f"going on with {folder}: {len(waiting)} of {len(cells)} cells to measure")
        _Work([Run(opened, campaign, alike, waiting)], progress, trusted, beside).go()


def _connected(stack: contextlib.ExitStack) -> list[Node]:
    found = connect()
    stack.callback(disconnect)
    return [node_of(one) for one in found]


def _with_facts(nodes: Iterable[Node]) -> list[tuple[Node, HardwareFacts]]:
    """Each node with its facts, asked one after the other: bandwidth is measured.

    A node that does not answer is left out: one that is lost stays in Ray's table for a while.
    """
    found = []
    for node in nodes:
        asked = ray.remote(facts_here).options(num_cpus=0, **_on(node)).remote()
        with contextlib.suppress(RayError):
            found.append((node, ray.get(asked, timeout=FACTS_SECONDS)))
    return found


def _kinds(nodes: Iterable[Node], plan: Plan) -> list[list[tuple[Node, HardwareFacts]]]:
    """The nodes by kind: those of a kind differ in no fact of the machine."""
    kinds: list[list[tuple[Node, HardwareFacts]]] = []
    for node, facts in _with_facts(nodes):
        for kind in kinds:
            if not _differs(manifest_of(plan, "", kind[0][1], ()), facts):
                kind.append((node, facts))
                break
        else:
            kinds.append([(node, facts)])
    return kinds


def _differs(manifest: RunManifest, facts: HardwareFacts) -> bool:
    return bool(machine_differences(manifest, msgspec.to_builtins(facts)))


def _on(node: Node) -> dict[str, Any]:
    return {"scheduling_strategy": NodeAffinitySchedulingStrategy(node.key, soft=False)}


class _Work:
    """The cells of all runs on their nodes, one on a node at a time."""

    def __init__(
        self, runs: list[Run], progress: Progress, trusted: Sequence[str], beside: bool
    ) -> None:
        self._runs = runs
        self._progress = progress
        self._how = (tuple(trusted), beside, os.environ.get(CACHE_VARIABLE))
        self._under_way: dict[Any, tuple[Run, Cell, Node]] = {}  # by the task's reference

    def go(self) -> None:
        """Raises Incomplete where cells are missing, or the user stops it."""
        with signals_interrupt():
            try:
                self._give_out()
                while self._under_way:
                    done, _ = ray.wait(list(self._under_way), timeout=LOOK_SECONDS)
                    for task in done:
                        self._ended(task)
                    self._give_out()
                    self._tick()
            except BaseException as problem:
                self._progress.quiet()
                for run in self._runs:
                    run.opened.event(Interrupted(reason=f"{type(problem).__name__}: {problem}"))
                for task in self._under_way:
                    ray.cancel(task, force=True)
                if not isinstance(problem, KeyboardInterrupt):
                    raise
                raise Incomplete(
                    "stopped; the cells that are done are kept. Go on with: " + self._again()
                ) from None
        for run in self._runs:
            if not self._missing(run):
                run.opened.event(RunFinished())
                self._progress.say(f"complete: {run.opened.folder}")
        missing = [key for run in self._runs for key in self._missing(run)]
        if missing:
            raise Incomplete(
                f"{len(missing)} cells could not be measured: {', '.join(missing)}; "
                f"try again with: {self._again()}"
            )

    def _again(self) -> str:
        folders = [run.opened.folder for run in self._runs if self._missing(run)]
        return "; ".join(f"crossover campaign resume {folder} --on ray" for folder in folders)

    def _missing(self, run: Run) -> list[str]:
        _, cells = campaign_of(run.opened.manifest)
        states = [CellState(run.opened, run.campaign, cell) for cell in cells]
        return [state.key for state in states if not state.is_done]

    def _give_out(self) -> None:
        """A cell to each node that has none."""
        busy = {node.key for _, _, node in self._under_way.values()}
        for run in self._runs:
            for node in run.nodes:
                cell = next_of(run.waiting, node) if node.key not in busy else None
                if cell is None:
                    continue
                run.waiting.remove(cell)
                files = files_of_cell(run.opened, cell, run.budget_of(cell))
                asked = {**needs(cell, node), **_on(node)}
                task = _measure.options(**asked).remote(files, *self._how)
                self._under_way[task] = run, cell, node
                self._progress.say(f"{cell.key}: on {node.name}")

    def _ended(self, task: Any) -> None:
        run, cell, node = self._under_way.pop(task)
        try:
            found: Measured = ray.get(task)
        except RayTaskError as problem:  # a full disk, a mistake of ours: no other node helps
            self._gave_up(run, cell, f"failed on node {node.name}: {last_line(str(problem))}")
            return
        except RayError as problem:
            self._lost(run, cell, node, problem)
            return
        add(run.opened, cell, found)
        if found.problem is None:
            self._progress.say(f"{cell.key}: measured on {node.name}", style="bold")
        else:
            self._progress.say(f"{cell.key}: {found.problem}", style="red")

    def _lost(self, run: Run, cell: Cell, node: Node, problem: RayError) -> None:
        """The task's process, or its node, is gone; the cell waits for another node, if any."""
        why = str(problem).strip().splitlines()[0]
        self._gave_up(run, cell, f"lost with node {node.name}: {why}")
        alive = {one["NodeID"] for one in living_nodes()}
        is_node = isinstance(problem, NodeDiedError | TaskUnschedulableError)
        if is_node:
            alive.discard(node.key)  # Ray's table learns of it later
        run.nodes = [one for one in run.nodes if one.key in alive]
        lost = run.lost.setdefault(cell.key, [])
        if not is_node or node.key not in lost:  # its process died first: one loss, told twice
            lost.append(node.key)
        if len(lost) < TRIES and any(fits(cell, one) for one in run.nodes):
            run.waiting.append(cell)

    def _gave_up(self, run: Run, cell: Cell, why: str) -> None:
        run.opened.event(Interrupted(cell=cell.key, reason=why))
        self._progress.say(f"{cell.key}: {why}", style="red")

    def _tick(self) -> None:
        if self._under_way:
            at = (f"{cell.key} on {node.name}" for _, cell, node in self._under_way.values())
            self._progress.tick(", ".join(at))

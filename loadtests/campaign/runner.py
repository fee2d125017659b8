"""Runs a campaign from its first cell to its last; it may be killed at any moment and resumed.

    folder = run(read_campaign(path), Path("runs"), progress)
    resume(folder, progress)
    run(repeat_of(folder), Path("runs"), progress)

All state is the run folder, which is read once, at resume. A level that was not finished is
abandoned, and measured again under another name. Whatever this process starts ends with it.

Cells are measured in blocks: in each block every cell gets a server of its own, in an order drawn
anew, and its part of the budget. So a drift of the machine is no difference between cells, and an
interval holds what differs from start to start.
"""

from __future__ import annotations

import contextlib
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from loadtests.campaign.bench import OpenBench, open_bench
from loadtests.campaign.campaign_file import Campaign, Plan, check_trust
from loadtests.campaign.cell_planning import layout_of, least_part_seconds, settle, shares, why_not
from loadtests.campaign.cell_runner import already_decided, budget_of, run_cell
from loadtests.campaign.cells import Cell, cell_of_target
from loadtests.campaign.manifest import manifest_of, new_folder
from loadtests.campaign.progress import Progress
from loadtests.campaign.run_state import CellState, campaign_of, open_level_of
from loadtests.campaign.rungs import with_rungs
from loadtests.campaign.servers import External
from loadtests.capacity.words import in_words
from loadtests.errors import (
    BadRunFolder,
    EndpointRefuses,
    Incomplete,
    LoadError,
    OverMemory,
    ServerFailed,
)
from loadtests.generator.endpoint import probe
from loadtests.host.machine_lock import machine_lock
from loadtests.host.signals import signals_interrupt
from loadtests.records.comparability import machine_differences
from loadtests.records.events import (
    Capacity,
    CellFinished,
    CellSkipped,
    CellStarted,
    Interrupted,
    LevelAbandoned,
    RunFinished,
    RunResumed,
    RunStarted,
    SkipCause,
    of_kind,
)
from loadtests.records.old_run_folder import RunFolder
from loadtests.simulation.prediction_words import predicted_beside
from models import formatting
from serving.hardware.facts import HardwareFacts, allowed_cores, hardware_facts


@dataclass(frozen=True)
class World:
    """What a sitting measures with: tests pass a simulated one."""

    facts: Callable[[], HardwareFacts] = hardware_facts
    open_bench: OpenBench | None = None  # None: real servers and load generators
    clock: Callable[[], float] = time.monotonic


def run(
    plan: Plan,
    out: Path,
    progress: Progress,
    *,
    command: Sequence[str] = (),
    beside_others: bool = False,
    world: World | None = None,
) -> Path:
    """A new run in a folder of its own below `out`. Raises Incomplete when cells are missing.

    Raises MachineBusy where another campaign measures on this machine, unless `beside_others`.
    """
    measuring_real = World(lambda: hardware_facts(bandwidth=plan.campaign.target is None))
    with _lock(f"campaign {plan.campaign.name}", beside_others):
        plan = _named(plan)
        world = world or measuring_real
        facts = world.facts()
        plan = with_rungs(plan, facts, progress)
        folder = new_folder(out, plan.campaign.name)
        manifest = manifest_of(plan, folder.name, facts, command or sys.argv)
        with RunFolder.create(folder, manifest) as opened:
            opened.event(RunStarted(cells=len(plan.cells)))
            progress.say(f"run {folder}: {len(plan.cells)} cells")
            _Sitting(opened, plan.campaign, plan.cells, facts, progress, world).go()
    return folder


def resume(
    folder: Path,
    progress: Progress,
    *,
    trusted: Sequence[str] = (),
    allow_commands: bool = False,
    beside_others: bool = False,
    world: World | None = None,
) -> Path:
    """Goes on with a run; one that is complete is left as it is.

    Raises Incomplete, BadRunFolder (also on another machine), BadCampaign, MachineBusy.
    """
    world = world or World()
    opened, dropped = RunFolder.open_existing(folder)
    with opened, _lock(f"run {folder}", beside_others):
        campaign, cells = campaign_of(opened.manifest)
        check_trust(Plan(campaign, cells, ""), trusted, allow_commands=allow_commands)
        if of_kind(opened.events, RunFinished):
            progress.say(f"{folder} is complete: nothing to do")
            return folder
        facts = world.facts()
        _check_machine(opened, facts)
        note_resumed(opened, dropped)
        sitting = _Sitting(opened, campaign, cells, facts, progress, world)
        done = sum(state.is_done for state in sitting.states)
        progress.say(
            f"going on with {folder}: {done} of {len(cells)} cells and "
            f"{len(opened.levels)} levels are done"
        )
        if dropped:
            cuts = ", ".join(f"{cut} bytes of {name}" for name, cut in dropped.items())
            progress.say(f"taken off, cut-off last lines: {cuts}")
        for name, lines in opened.broken_lines.items():
            progress.say(f"left out, broken lines of {name}: {len(lines)}", style="yellow")
        sitting.go()
    return folder


def note_resumed(opened: RunFolder, dropped_bytes: dict[str, int]) -> None:
    """Writes that a run goes on, and how it had ended. `dropped_bytes`: cut-off last lines."""
    last = opened.events[-1] if opened.events else None
    _close_open_level(opened, "the runner ended within it")
    if not (isinstance(last, Interrupted) and last.cell is None):
        kind = last.kind if last is not None else None
        opened.event(Interrupted(reason="the runner was killed", last_event=kind))
    opened.event(RunResumed(dropped_bytes=dropped_bytes))


def _lock(what: str, beside_others: bool) -> contextlib.AbstractContextManager[Any]:
    return contextlib.nullcontext() if beside_others else machine_lock(what)


def _check_machine(opened: RunFolder, facts: HardwareFacts) -> None:
    """Raises BadRunFolder on another machine than the one that began the run."""
    found = machine_differences(opened.manifest, msgspec.to_builtins(facts))
    if found:
        apart = "; ".join(f"{one.name} {one.first} then, {one.second} now" for one in found)
        raise BadRunFolder(
            f"{opened.folder} was begun on another machine ({apart}): start a new run"
        )


def _close_open_level(opened: RunFolder, reason: str) -> None:
    level = open_level_of(opened.events)
    if level is not None:
        opened.event(LevelAbandoned(cell=level.cell, level=level.level, reason=reason))


def _named(plan: Plan) -> Plan:
    """The plan with the name of the model that its endpoint serves. Raises TargetUnusable."""
    target = plan.campaign.target
    if target is None or target.model is not None:
        return plan
    External(target).wait_ready(lambda what, fraction: None)
    target = msgspec.structs.replace(target, model=probe(target).model)
    cells = [cell_of_target(target, cell.workload) for cell in plan.cells]
    return Plan(msgspec.structs.replace(plan.campaign, target=target), cells, plan.text)


class _Sitting:
    """All cells of a run that are not done, one after the other."""

    def __init__(
        self,
        opened: RunFolder,
        campaign: Campaign,
        cells: Sequence[Cell],
        facts: HardwareFacts,
        progress: Progress,
        world: World,
    ) -> None:
        self._run = opened
        self._campaign = campaign
        self._facts = facts
        self._progress = progress
        self._clock = world.clock
        self._open_bench = world.open_bench or (lambda state: open_bench(state, progress))
        self._given_up: set[str] = set()  # in this sitting
        self.states = [CellState(opened, campaign, cell) for cell in cells]

    def go(self) -> None:
        with signals_interrupt():
            try:
                for block in range(1, max(state.blocks for state in self.states) + 1):
                    self._block(block)
            except KeyboardInterrupt:
                self._interrupted("stopped by the user")
                again = f"crossover campaign resume {self._run.folder}"
                raise Incomplete(
                    f"stopped; what was measured is kept. Go on with: {again}"
                ) from None
            except BaseException as problem:
                self._interrupted(f"{type(problem).__name__}: {problem}")
                raise
        missing = [state.key for state in self.states if not state.is_done]
        if missing:
            raise Incomplete(
                f"{len(missing)} of {len(self.states)} cells could not be measured: "
                f"{', '.join(missing)}; "
                f"try again with: crossover campaign resume {self._run.folder}"
            )
        self._run.event(RunFinished())
        self._progress.say(f"complete: {self._run.folder}")

    def _interrupted(self, reason: str) -> None:
        self._progress.quiet()
        _close_open_level(self._run, reason)
        self._run.event(Interrupted(reason=reason))

    def _block(self, block: int) -> None:
        """Each cell that is not done, on a server of its own; first those that are decided."""
        order = [state for state in self.states if block <= state.blocks]
        if max(state.blocks for state in order) > 1:
            random.Random(f"{self._campaign.seed}/{block}").shuffle(order)
        for state in order:
            if state.is_done or not state.finished:
                continue
            found = already_decided(state, self._budget(state, block))
            if found is not None:
                self._finish(state, found, self._place(state))
        for state in order:
            if not state.is_done and state.key not in self._given_up:
                self._part(state, block)

    def _part(self, state: CellState, block: int) -> None:
        """A cell in one block: measured to its end, or as far as the block goes, or skipped.

        One that has levels is given up for now, not skipped: a later start may be better.
        """
        place = self._place(state)
        why = why_not(state.cell, self._campaign, self._facts)
        why = why or settle(state, self._facts, self._progress)
        if why is not None and not state.finished:
            return self._skip(state, why.cause, why.reason, place)
        if why is not None:
            return self._give_up(state, why.reason, place)
        part = state.part(block)
        if part is None:
            part = self._begin(state, block, place)
        elif block < state.blocks and state.spent_seconds >= (part.until_seconds or 0.0):
            return None
        try:
            found = run_cell(state, self._open_bench, part, self._progress, self._clock)
        except OverMemory as problem:
            return self._skip(state, SkipCause.MEMORY, str(problem), place)
        except BadRunFolder:  # nothing can be written any more
            raise
        except LoadError as problem:
            if not state.finished and isinstance(problem, ServerFailed):
                return self._skip(state, SkipCause.SERVER, str(problem), place)
            refuses = isinstance(problem, EndpointRefuses) and state.cell.url is None
            if not state.finished and refuses:
                return self._skip(state, SkipCause.ENDPOINT, str(problem), place)
            return self._give_up(state, str(problem), place)
        if found is not None:
            self._finish(state, found, place)
        return None

    def _begin(self, state: CellState, block: int, place: str) -> CellStarted:
        """The cell's part of this block, on record."""
        blocks = state.blocks
        budget = self._budget(state, block)
        spent = state.spent_seconds
        until = spent + (budget - spent) / (blocks - block + 1)
        part = CellStarted(cell=state.key, budget_seconds=budget, block=block, until_seconds=until)
        self._run.event(part)
        which = f", start {block} of {blocks}" if blocks > 1 else ""
        said = formatting.duration(until - spent)
        self._progress.say(f"{place}{which}: at most {said} of measuring")
        if block == 1:
            layout = layout_of(state.cell, allowed_cores(), state.campaign.load.workers)
            for line in layout.shared if layout is not None else ():
                self._progress.say(f"  note: {line}")
        return part

    def _place(self, state: CellState) -> str:
        return f"cell {self.states.index(state) + 1} of {len(self.states)}, {state.key}"

    def _give_up(self, state: CellState, reason: str, place: str) -> None:
        self._given_up.add(state.key)
        self._run.event(Interrupted(cell=state.key, reason=reason))
        self._progress.say(f"{place}: given up for now, {reason}", style="red")

    def _skip(self, state: CellState, cause: SkipCause, reason: str, place: str) -> None:
        self._run.event(CellSkipped(cell=state.key, cause=cause, reason=reason))
        self._progress.say(f"{place}: skipped, {reason}", style="red")

    def _finish(self, state: CellState, found: dict[str, Capacity], place: str) -> None:
        self._run.event(CellFinished(cell=state.key, capacities=found))
        for one in self._campaign.all_slos:
            name = f" (SLO {one.name})" if len(found) > 1 else ""
            words = in_words(found[one.name])
            made = state.prediction.rates.get(one.name) if state.prediction is not None else None
            if made is not None:
                words += f"; {predicted_beside(made, found[one.name])}"
            self._progress.say(f"{place}{name}: {words}", style="bold")

    def _budget(self, state: CellState, block: int) -> float:
        """Seconds of measuring, what is spent included: the cell's share of what is left.

        A cell counts as often as there are blocks for it to come, this one included.
        """
        if (part := state.part(block)) is not None:
            return budget_of(state, part)
        whole = self._campaign.budget_seconds
        if whole is None:
            return self._campaign.search.budget_seconds
        left = max(0.0, whole - sum(one.spent_seconds for one in self.states))
        to_come = {
            one.cell: max(0, one.blocks - block + (one.part(block) is None))
            for one in self.states
            if not one.is_done and why_not(one.cell, self._campaign, self._facts) is None
        }
        least = least_part_seconds(self._campaign)
        return state.spent_seconds + shares(to_come, left, least)[state.key]

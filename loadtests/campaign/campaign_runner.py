"""Runs a campaign from its first cell to its last; it can be killed at any moment and resumed.

    folder = run(read_campaign(path), Path("runs"), progress)
    resume(folder, progress)                        # confirm=True: also confirm estimated cells

All state is in the run folder, which is read once, at resume. An unfinished level is abandoned and
measured again under another name. All processes that this process starts end with it.

If more than one server start must confirm a rate, cells are measured in blocks: in each block every
cell gets a new server, in a new random order, and its part of the budget. A drift of the machine
then does not look like a difference between cells.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from crossover.loadtests.campaign import cell_selection
from crossover.loadtests.campaign.campaign_file import (
    Campaign,
    Cell,
    Plan,
    cell_of_target,
    check_trust,
)
from crossover.loadtests.campaign.cell_runner import CellRun, capacity_of
from crossover.loadtests.campaign.level_runner import OpenBench, ServerBench, wait_until_it_serves
from crossover.loadtests.campaign.progress import Progress
from crossover.loadtests.campaign.resume_state import CellState, campaign_of, new_run
from crossover.loadtests.campaign.server_launch import Server
from crossover.loadtests.capacity import capacity_text
from crossover.loadtests.comparison.run_environment import machine_differences
from crossover.loadtests.errors import BadRunFolder, Incomplete, ServerFailed
from crossover.loadtests.host.child_processes import signals_interrupt
from crossover.loadtests.host.machine_lock import machine_lock
from crossover.loadtests.levels.level_columns import levels_of
from crossover.loadtests.records import journal_events as journal
from crossover.loadtests.records.run_folder import RunFolder
from crossover.models import formatting
from crossover.models.errors import CrossoverError
from crossover.serving.hardware.machine_facts import HardwareFacts
from crossover.serving.placement.fastest_backend import BEST
from crossover.serving.registry.prepare_model import Machine
from crossover.serving.workload.request_lengths import notes_of

CONFIRM_MARGIN = 1.5  # of the seconds that confirming is said to take, and ...
CONFIRM_SECONDS = 60.0  # ... so many more: warm-up, last answers


@dataclass(frozen=True)
class Dependencies:
    """What a sitting measures with: tests pass a simulated one."""

    machine: Machine = field(default_factory=Machine)
    open_bench: OpenBench | None = None  # None: real servers and load generators
    clock: Callable[[], float] = time.monotonic


def run(
    plan: Plan,
    out: Path,
    progress: Progress,
    *,
    command: Sequence[str] = (),
    world: Dependencies | None = None,
) -> Path:
    """A new run in a folder of its own below `out`. A cell that cannot be measured is skipped.

    Raises Incomplete where nothing was measured, MachineBusy where another campaign measures here.
    """
    world = world or Dependencies()
    with machine_lock(f"campaign {plan.campaign.name!r}"):
        facts = world.machine.facts()
        plan = _named(plan, progress)
        plan = cell_selection.on_this_machine(plan, world.machine, facts, progress)
        with new_run(out, plan, facts, command or sys.argv) as opened:
            opened.event(journal.RunStarted())
            progress.say(f"run {opened.folder}: {len(plan.cells)} cells")
            for note in notes_of(plan.campaign.workload, plan.campaign.arrivals):
                progress.say(f"note: {note}")
            states = [CellState(opened, plan.campaign, cell) for cell in plan.cells]
            CampaignSession(opened, plan.campaign, states, facts, progress, world).go()
    return opened.folder


def resume(
    folder: Path,
    progress: Progress,
    *,
    confirm: bool = False,
    trust: bool = False,
    world: Dependencies | None = None,
) -> Path:
    """Goes on with a run; one that is complete is left as it is, but for what is to be confirmed.

    Cells that were skipped are tried again, also those of a run that is complete.
    `confirm`: cells with an estimate and no confirmed rate get the time that confirming takes.
    Raises Incomplete, BadRunFolder (also on another machine), BadCampaign, MachineBusy.
    """
    world = world or Dependencies()
    with RunFolder(folder) as opened, machine_lock(f"the run in {folder}"):
        campaign, cells = campaign_of(opened.manifest)
        if not trust:
            check_trust(Plan(campaign, cells, ""))
        levels = levels_of(opened)
        states = [CellState(opened, campaign, cell, levels) for cell in cells]
        sitting = CampaignSession(
            opened, campaign, states, world.machine.facts(), progress, world, confirm
        )
        done = sum(state.ended is not None for state in states)
        if done == len(states) and journal.of_kind(opened.events, journal.RunFinished):
            what = "no cell is left to confirm" if confirm else "there is nothing to do"
            progress.say(f"{folder} is complete: {what}")
            return folder
        facts = msgspec.to_builtins(sitting.facts)
        if found := machine_differences(opened.manifest, facts):
            apart = "; ".join(f"{one.name} was {one.first}, is {one.second}" for one in found)
            raise BadRunFolder(
                f"{folder} was started on another machine ({apart}). Start a new run here."
            )
        _close_open_level(opened, "the runner ended during the level")
        last = opened.events[-1] if opened.events else None
        if not isinstance(last, journal.RunFinished | journal.Interrupted) or last.cell:
            opened.event(journal.Interrupted(reason="the runner was killed"))
        opened.event(journal.RunStarted())
        confirming = f", {len(sitting.again)} to confirm" if sitting.again else ""
        progress.say(
            f"resuming {folder}: {done} of {len(cells)} cells and {len(levels)} levels are "
            f"done{confirming}"
        )
        for damage in opened.damage():
            progress.say(f"left out: {damage}", style="yellow")
        sitting.go()
    return folder


def _close_open_level(opened: RunFolder, reason: str) -> None:
    """The level that was begun and neither finished nor abandoned."""
    closed = {
        e.level
        for e in opened.events
        if isinstance(e, journal.LevelFinished | journal.LevelAbandoned)
    }
    for level in journal.of_kind(opened.events, journal.LevelStarted):
        if level.level not in closed:
            opened.event(journal.LevelAbandoned(cell=level.cell, level=level.level, reason=reason))


def _named(plan: Plan, progress: Progress) -> Plan:
    """The plan with the name of the model that its endpoint serves. Raises TargetUnusable."""
    target = plan.campaign.target
    if target is None or target.model is not None:
        return plan
    facts = wait_until_it_serves(Server(plan.cells[0], plan.campaign, Path()), progress)
    target = msgspec.structs.replace(target, model=facts.model)
    campaign = msgspec.structs.replace(plan.campaign, target=target)
    return Plan(campaign, [cell_of_target(target)], plan.text)


class CampaignSession:
    """All cells of a run that are not done, one after the other."""

    def __init__(
        self,
        opened: RunFolder,
        campaign: Campaign,
        states: list[CellState],
        facts: HardwareFacts,
        progress: Progress,
        world: Dependencies,
        confirm: bool = False,
    ) -> None:
        """`confirm`: also cells that have ended with an estimate which a level could confirm."""
        self.facts, self._run, self._campaign = facts, opened, campaign
        self._states, self._progress, self._clock = states, progress, world.clock
        self._open_bench = world.open_bench or (lambda state: ServerBench(state, progress).open())
        is_searched = not campaign.search.rates and campaign.target is None
        self._blocks = campaign.search.starts if is_searched else 1
        self.again: dict[str, int] = {}  # cells to confirm after all: their block, behind the last
        for state in states:
            last = max(state.blocks, default=0)
            if state.ended is None and last > self._blocks:  # a runner was killed within it
                self.again[state.key] = last
            elif confirm and _is_estimated(state):
                self.again[state.key] = max(last, self._blocks) + 1
            if isinstance(state.ended, journal.CellSkipped) or state.key in self.again:
                state.ended = None
        smallest = cell_selection.to_confirm(campaign, [state.cell for state in states])
        self._confirmed = smallest | self.again.keys()

    def go(self) -> None:
        """Raises Incomplete where nothing was measured."""
        for state in self._states:
            found = getattr(state.ended, "capacity", None)
            self._progress.found(state.key, capacity_text.in_words(found) if found else "waits")
        with signals_interrupt():
            try:
                for state in self._states:
                    if state.key in self.again:
                        self._part(state, self.again[state.key])
                for block in range(1, self._blocks + 1):
                    order = list(self._states)
                    if self._blocks > 1:
                        random.Random(f"{self._campaign.seed}/{block}").shuffle(order)
                    for state in order:
                        if state.ended is None:
                            self._part(state, block)
            except KeyboardInterrupt as stop:
                # A time limit says so in its words; Ctrl-C has none.
                self._interrupted(str(stop) or "stopped by the user")
                raise self._incomplete("Stopped. All finished measurements are kept") from None
            except BaseException as problem:
                self._interrupted(f"{type(problem).__name__}: {problem}")
                raise
        skipped = [one.ended for one in self._states if isinstance(one.ended, journal.CellSkipped)]
        if len(skipped) == len(self._states):
            self._interrupted("nothing was measured")
            raise self._incomplete(f"Nothing was measured: {str(skipped[0].reason).rstrip('.')}")
        self._run.event(journal.RunFinished())
        self._progress.quiet()
        missing = f"; skipped: {', '.join(one.cell for one in skipped)}" if skipped else ""
        self._progress.say(f"complete: {self._run.folder}{missing}")

    def _incomplete(self, why: str) -> Incomplete:
        return Incomplete(f"{why}. To continue: crossover campaign resume {self._run.folder}")

    def _interrupted(self, reason: str) -> None:
        self._progress.quiet()
        _close_open_level(self._run, reason)
        self._run.event(journal.Interrupted(reason=reason))

    def _part(self, state: CellState, block: int) -> None:
        """A cell in one block: measured as far as the block goes, or skipped."""
        place = f"cell {self._states.index(state) + 1} of {len(self._states)}, {state.key}"
        say, found = self._progress.say, self._progress.found
        found(state.key, "now", self._left_seconds)
        confirms = state.key in self._confirmed
        try:
            if state.cell.backend == BEST:
                asked = state.cell, self._campaign, self.facts, self._progress
                state.event(cell_selection.fastest_engine(*asked))
            if (why := self._why_not(state.cell)) is not None:
                raise ServerFailed(why)
            part = state.blocks.get(block) or self._begin(state, block, place)
            cell = CellRun(state, part, self._progress, self._clock, to_confirm=confirms)
            capacity = cell.run(self._open_bench)
        except BadRunFolder:  # nothing can be written any more
            raise
        except CrossoverError as problem:
            _close_open_level(self._run, str(problem))
            state.event(journal.CellSkipped(cell=state.key, reason=str(problem)))
            found(state.key, f"skipped, {problem}")
            return say(f"{place}: skipped, {problem}", style="red")
        if block >= self._blocks or not confirms:
            state.event(journal.CellFinished(cell=state.key, capacity=capacity))
            found(state.key, capacity_text.in_words(capacity))
            say(f"{place}: {capacity_text.in_words(capacity)}", style="bold")
            users = capacity_text.users_words(capacity)
            said = (users and f"{users}.", capacity_text.reuse_words(capacity), capacity.advice)
            for text in filter(None, said):
                say(f"  {text[:1].upper()}{text[1:]}")

    def _why_not(self, cell: Cell) -> str | None:
        return cell_selection.why_not(cell, self._campaign, self.facts)

    def _begin(self, state: CellState, block: int, place: str) -> journal.CellStarted:
        """The cell's part of this block, on record."""
        share = self._share(state) / max(1, self._blocks - block + 1)
        until = round(state.spent_seconds + share, 3)
        part = state.event(journal.CellStarted(cell=state.key, block=block, until_seconds=until))
        which = f", start {block} of {self._blocks}" if 1 < self._blocks >= block else ""
        self._progress.say(f"{place}{which}: measuring for at most {formatting.duration(share)}")
        return part

    def _share(self, state: CellState) -> float:
        """Seconds of measuring that the cell may still have: its share of what is left."""
        if state.key in self.again:
            needed = capacity_of(state).confirm_seconds or 0.0
            return CONFIRM_MARGIN * needed + CONFIRM_SECONDS
        to_come = [
            one.cell
            for one in self._states
            if one is state or (one.ended is None and self._why_not(one.cell) is None)
        ]
        left = self._left_seconds
        return cell_selection.shares(to_come, self._confirmed, left, self._campaign)[state.key]

    @property
    def _left_seconds(self) -> float:
        whole = cell_selection.budget_of(self._campaign, len(self._states))
        return max(0.0, whole - sum(state.spent_seconds for state in self._states))


def _is_estimated(state: CellState) -> bool:
    """A cell that has ended with an estimate that a level could confirm."""
    found = state.ended.capacity if isinstance(state.ended, journal.CellFinished) else None
    return found is not None and not found.is_confirmed and found.confirm_seconds is not None

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
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from crossover.loadtests.campaign import cell_selection
from crossover.loadtests.campaign.campaign_file import (
    Campaign,
    Plan,
    check_trust,
)
from crossover.loadtests.campaign.cell_runner import CellRun
from crossover.loadtests.campaign.cells_on_machine import on_this_machine
from crossover.loadtests.campaign.level_runner import OpenBench, ServerBench, wait_until_serving
from crossover.loadtests.campaign.progress import Progress
from crossover.loadtests.campaign.resume_state import CellState, campaign_of, keep_units, new_run
from crossover.loadtests.campaign.time_budget import TimeBudget
from crossover.loadtests.capacity import capacity_text
from crossover.loadtests.comparison.run_environment import machine_differences
from crossover.loadtests.errors import BadRunFolder, Incomplete
from crossover.loadtests.host.child_processes import signals_interrupt
from crossover.loadtests.host.machine_lock import machine_lock
from crossover.loadtests.levels.level_columns import levels_of
from crossover.loadtests.records import journal_events as journal
from crossover.loadtests.records.run_folder import RunFolder
from crossover.models import formatting
from crossover.models.errors import CrossoverError
from crossover.serving.hardware.machine_facts import HardwareFacts
from crossover.serving.placement.fastest_backend import BEST
from crossover.serving.registry.prepare_model import Host
from crossover.serving.workload.request_lengths import notes_of


@dataclass(frozen=True)
class Dependencies:
    """The machine, servers and clock of a campaign. Tests pass simulated ones."""

    machine: Host = field(default_factory=Host)
    open_bench: OpenBench | None = None  # None: real servers and load generators
    clock: Callable[[], float] = time.monotonic


def run(
    plan: Plan,
    out: Path,
    progress: Progress,
    *,
    command: Sequence[str] = (),
    dependencies: Dependencies | None = None,
) -> Path:
    """Run a campaign in a new folder below `out` and return the folder.

    A cell that cannot be measured is skipped. Raises Incomplete if nothing was measured,
    MachineBusy if another campaign is measuring on this machine.
    """
    dependencies = dependencies or Dependencies()
    with machine_lock(f"campaign {plan.campaign.name!r}"):
        facts = dependencies.machine.facts()
        plan = msgspec.structs.replace(plan, campaign=_with_served_model(plan.campaign, progress))
        plan = on_this_machine(plan, dependencies.machine, facts, progress)
        with new_run(out, plan, facts, command or sys.argv) as run_folder:
            run_folder.append_event(journal.RunStarted())
            progress.say(f"run {run_folder.folder}: {len(plan.cells)} cells")
            for note in notes_of(plan.campaign.workload, plan.campaign.arrivals):
                progress.say(f"note: {note}")
            states = [CellState(run_folder, plan.campaign, cell) for cell in plan.cells]
            session = CampaignSession(
                run_folder, plan.campaign, states, facts, progress, dependencies
            )
            session.measure_all()
    return run_folder.folder


def resume(
    folder: Path,
    progress: Progress,
    *,
    confirm: bool = False,
    trust: bool = False,
    dependencies: Dependencies | None = None,
) -> Path:
    """Continue a run and return its folder. A complete run is left as it is, except that cells
    which were skipped are tried again.

    `confirm`: cells with an estimate and no confirmed rate get the time that confirming takes.
    Raises Incomplete, BadRunFolder (also on another machine), BadCampaign, MachineBusy.
    """
    dependencies = dependencies or Dependencies()
    with RunFolder(folder) as run_folder, machine_lock(f"the run in {folder}"):
        campaign, cells = campaign_of(run_folder.manifest)
        if not trust:
            check_trust(campaign)
        levels = levels_of(run_folder)
        states = [CellState(run_folder, campaign, cell, levels) for cell in cells]
        session = CampaignSession(
            run_folder,
            campaign,
            states,
            dependencies.machine.facts(),
            progress,
            dependencies,
            confirm,
        )
        done = sum(state.ended is not None for state in states)
        if done == len(states) and journal.of_kind(run_folder.events, journal.RunFinished):
            why = "no cell is left to confirm" if confirm else "there is nothing to do"
            progress.say(f"{folder} is complete: {why}")
            return folder
        facts = msgspec.to_builtins(session.facts)
        if differences := machine_differences(run_folder.manifest, facts):
            words = "; ".join(f"{one.name} was {one.first}, is {one.second}" for one in differences)
            raise BadRunFolder(
                f"{folder} was started on another machine ({words}). Start a new run here."
            )
        _abandon_open_level(run_folder, "the runner ended during the level")
        last = run_folder.events[-1] if run_folder.events else None
        # An event with a cell ended only that cell, so the runner was killed after it.
        if not isinstance(last, journal.RunFinished | journal.Interrupted) or last.cell:
            run_folder.append_event(journal.Interrupted(reason="the runner was killed"))
        run_folder.append_event(journal.RunStarted())
        number = len(session.confirming_blocks)
        confirming = f", {number} to confirm" if number else ""
        progress.say(
            f"resuming {folder}: {done} of {len(cells)} cells and {len(levels)} levels are "
            f"done{confirming}"
        )
        for damage in run_folder.damage():
            progress.say(f"left out: {damage}", style="yellow")
        session.measure_all()
    return folder


def _abandon_open_level(run_folder: RunFolder, reason: str) -> None:
    """Record that the level which was started and neither finished nor abandoned is abandoned."""
    closed = {
        event.level
        for event in run_folder.events
        if isinstance(event, journal.LevelFinished | journal.LevelAbandoned)
    }
    for level in journal.of_kind(run_folder.events, journal.LevelStarted):
        if level.level not in closed:
            run_folder.append_event(
                journal.LevelAbandoned(cell=level.cell, level=level.level, reason=reason)
            )


def _with_served_model(campaign: Campaign, progress: Progress) -> Campaign:
    """Return the campaign with the name of the model that its endpoint serves, if it measures an
    endpoint and does not name the model. Raises TargetUnusable."""
    target = campaign.target
    if target is None or target.model is not None:
        return campaign
    facts = wait_until_serving(target, progress)
    target = msgspec.structs.replace(target, model=facts.model)
    return msgspec.structs.replace(campaign, target=target)


class CampaignSession:
    """Measures all cells of a run that are not done, one after the other."""

    def __init__(
        self,
        run_folder: RunFolder,
        campaign: Campaign,
        states: list[CellState],
        facts: HardwareFacts,
        progress: Progress,
        dependencies: Dependencies,
        confirm: bool = False,
    ) -> None:
        """`confirm`: also measure cells that ended with an estimate which a level could confirm."""
        self.facts = facts
        self._run = run_folder
        self._campaign = campaign
        self._states = states
        self._progress = progress
        self._clock = dependencies.clock
        self._open_bench = dependencies.open_bench or (
            lambda state: ServerBench(state, progress).open()
        )
        is_searched = not campaign.search.rates and campaign.target is None
        self._blocks = campaign.search.starts if is_searched else 1
        # The block in which a cell that had only an estimate is confirmed, after the campaign's own
        # blocks: cell key -> number.
        self.confirming_blocks: dict[str, int] = {}
        for state in states:
            last_block = max(state.blocks, default=0)
            if state.ended is None and last_block > self._blocks:  # a runner was killed within it
                self.confirming_blocks[state.key] = last_block
            elif confirm and state.is_confirmable:
                self.confirming_blocks[state.key] = max(last_block, self._blocks) + 1
            if isinstance(state.ended, journal.CellSkipped) or state.key in self.confirming_blocks:
                state.ended = None
        self._budget = TimeBudget(campaign, states, self.confirming_blocks)

    def measure_all(self) -> None:
        """Measure until all cells are done. Raises Incomplete if nothing was measured."""
        rate_units = self._progress.rate_units
        devices = Counter(state.device for state in self._states)
        rate_units.devices_with_several |= {key for key, count in devices.items() if count > 1}
        capacities = {state.key: getattr(state.ended, "capacity", None) for state in self._states}
        keep_units(rate_units, self._states, capacities)
        for state in self._states:
            words = "waits"
            if (capacity := capacities[state.key]) is not None:
                words = capacity_text.capacity_in_words(capacity, state.unit_rate)
            self._progress.set_status(state.key, words)
        with signals_interrupt(), self._progress.kept_alive():
            try:
                self._skip_cells_that_cannot_run()
                for state in self._states:
                    if state.key in self.confirming_blocks and state.ended is None:
                        self._measure_block(state, self.confirming_blocks[state.key])
                for block in range(1, self._blocks + 1):
                    order = list(self._states)
                    if self._blocks > 1:
                        random.Random(f"{self._campaign.seed}/{block}").shuffle(order)
                    for state in order:
                        if state.ended is None:
                            self._measure_block(state, block)
            except KeyboardInterrupt as interrupt:
                # A time limit says so in its words; Ctrl-C has none.
                self._record_interruption(str(interrupt) or "stopped by the user")
                raise self._incomplete("Stopped. All finished measurements are kept") from None
            except BaseException as problem:
                self._record_interruption(f"{type(problem).__name__}: {problem}")
                raise
        ends = [state.ended for state in self._states]
        skipped = [end for end in ends if isinstance(end, journal.CellSkipped)]
        if len(skipped) == len(self._states):
            self._record_interruption("nothing was measured")
            raise self._incomplete(f"Nothing was measured: {str(skipped[0].reason).rstrip('.')}")
        self._run.append_event(journal.RunFinished())
        self._progress.clear()
        skipped_keys = ", ".join(event.cell for event in skipped)
        missing = f"; skipped: {skipped_keys}" if skipped else ""
        self._progress.say(f"complete: {self._run.folder}{missing}")

    def _skip_cells_that_cannot_run(self) -> None:
        """Skip the cells of which it is known before any measurement that they cannot run here, so
        that the reason can be seen, and removed, before the campaign has taken its time."""
        for state in self._states:
            if state.ended is None:
                reason = cell_selection.why_not(state.cell, self._campaign, self.facts)
                if reason is not None:
                    self._skip(state, reason)

    def _skip(self, state: CellState, reason: str) -> None:
        """Record that a cell is skipped, and print why."""
        state.record(journal.CellSkipped(cell=state.key, reason=reason))
        self._progress.set_status(state.key, f"skipped, {reason}")
        self._progress.say(f"{self._position_of(state)}: skipped, {reason}", style="red")

    def _position_of(self, state: CellState) -> str:
        return f"cell {self._states.index(state) + 1} of {len(self._states)}, {state.key}"

    def _incomplete(self, why: str) -> Incomplete:
        return Incomplete(f"{why}. To continue: crossover campaign resume {self._run.folder}")

    def _record_interruption(self, reason: str) -> None:
        self._progress.clear()
        _abandon_open_level(self._run, reason)
        self._run.append_event(journal.Interrupted(reason=reason))

    def _measure_block(self, state: CellState, block: int) -> None:
        """Measure a cell in one block, or record why it is skipped."""
        position = self._position_of(state)
        progress = self._progress
        progress.set_status(state.key, "now", self._budget.remaining_seconds)
        confirms = state.key in self._budget.to_confirm
        try:
            if state.cell.backend == BEST:
                since = self._clock()
                choice = cell_selection.fastest_engine(
                    state.cell, self._campaign, self.facts, progress
                )
                state.record(choice)
                state.record_elapsed(self._clock() - since)  # engines may have been measured
            cell_block = state.blocks.get(block) or self._begin_block(state, block, position)
            cell_run = CellRun(
                state,
                cell_block,
                progress,
                self._clock,
                confirms=confirms,
                max_slots=cell_selection.max_slots_of(state.cell, self._campaign, self.facts),
            )
            capacity = cell_run.run(self._open_bench)
        except BadRunFolder:  # nothing can be written any more
            raise
        except CrossoverError as problem:
            _abandon_open_level(self._run, str(problem))
            self._skip(state, str(problem))
            return
        if block >= self._blocks or not confirms:
            self._finish_cell(state, capacity, position)

    def _finish_cell(self, state: CellState, capacity: journal.Capacity, position: str) -> None:
        """Record the capacity of a cell and print it."""
        unit_rate = state.unit_rate
        state.record(journal.CellFinished(cell=state.key, capacity=capacity, unit_rate=unit_rate))
        words = capacity_text.capacity_in_words(capacity, unit_rate)
        self._progress.set_status(state.key, words)
        self._progress.say(f"{position}: {words}", style="bold")
        users = capacity_text.users_words(capacity)
        details = (
            capacity_text.disturbance_words(capacity, unit_rate),
            capacity_text.contradiction_words(capacity, unit_rate),
            capacity_text.check_words(capacity),
            users and f"{users}.",
            capacity_text.reuse_words(capacity, unit_rate),
            capacity.advice,
        )
        for text in filter(None, details):
            self._progress.say(f"  {text[:1].upper()}{text[1:]}")

    def _begin_block(self, state: CellState, block: int, position: str) -> journal.CellStarted:
        """Record that a cell begins a block, with the measuring time that it may use there."""
        seconds = self._budget.seconds_of(state, max(1, self._blocks - block + 1))
        until_seconds = round(state.spent_seconds + seconds, 3)
        cell_block = state.record(
            journal.CellStarted(cell=state.key, block=block, until_seconds=until_seconds)
        )
        number = f", start {block} of {self._blocks}" if 1 < self._blocks >= block else ""
        what = f"for at most {formatting.duration(seconds)}"
        if rates := self._campaign.search.rates:  # all are measured, however long that takes
            noun = "rate" if len(rates) == 1 else f"{len(rates)} rates"
            what = f"the campaign's {noun}"
        self._progress.say(f"{position}{number}: measuring {what}")
        return cell_block

"""The measuring time of a campaign: how much of it is left, and each cell's part.

    budget = TimeBudget(campaign, states, confirming=())
    budget.remaining_seconds, budget.seconds_of(state, blocks=1)

A cell that is to be confirmed gets more time than one that is only estimated.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from crossover.loadtests.campaign.campaign_file import Campaign, Cell
from crossover.loadtests.campaign.cell_runner import estimate_of
from crossover.loadtests.campaign.cell_selection import are_slots_open
from crossover.loadtests.campaign.resume_state import CellRecord
from crossover.loadtests.capacity.capacity_estimate import shortest_level
from crossover.loadtests.records.journal_events import CellSkipped

CELL_SECONDS = 600.0  # measuring time of a cell if the campaign sets no budget
ESTIMATE_SECONDS = 60.0  # single streams of 20 s, bursts of 10 to 30 s: a cell without levels
SLOTS_SECONDS = 20.0  # to start a server again and calibrate it with a better number of slots
# On a GPU, measured on an H200 (64 slots, 1B and 8B): bursts took 2 to 3 s, a level 7 to 8 s more
# than its window.
GPU_CALIBRATION_SECONDS = 5.0
GPU_LEVEL_MARGIN_SECONDS = 10.0
# Measuring time of a cell that is to be confirmed after all: the seconds that its capacity says a
# confirming level takes, times the margin for a second level, and time for warm-ups and last
# answers.
CONFIRM_MARGIN = 1.5
CONFIRM_EXTRA_SECONDS = 60.0


class TimeBudget:
    """The measuring time of the cells of a run."""

    def __init__(
        self, campaign: Campaign, states: Sequence[CellRecord], confirming: Collection[str]
    ) -> None:
        """`confirming`: keys of the cells that had only an estimate and are confirmed after all."""
        self._campaign = campaign
        self._states = states
        self._confirming = confirming
        to_confirm = cells_to_confirm(campaign, [state.cell for state in states])
        self.to_confirm = to_confirm.union(confirming)  # keys; the other cells are only estimated
        self._seconds = campaign.budget_seconds or CELL_SECONDS * len(states)

    @property
    def remaining_seconds(self) -> float:
        """Measuring time that is left for all cells together."""
        return max(0.0, self._seconds - sum(state.spent_seconds for state in self._states))

    def seconds_of(self, state: CellRecord, blocks: int) -> float:
        """Return the seconds that a cell may use in the first of its remaining `blocks`.

        Until it is calibrated it gets at least the time that an estimate takes (but no more than an
        even part of the budget), even if the cells before it took longer than their shares: answers
        that come late make a level longer than planned, and the last cells would not be measured at
        all.
        """
        if state.key in self._confirming:
            needed = estimate_of(state).confirm_seconds or 0.0
            seconds = CONFIRM_MARGIN * needed + CONFIRM_EXTRA_SECONDS
        else:
            remaining_cells = [
                other.cell for other in self._states if other is state or other.ended is None
            ]
            shares = share_budget(
                remaining_cells, self.to_confirm, self.remaining_seconds, self._campaign
            )
            seconds = shares[state.key]
        if state.calibrated is not None:
            return seconds / blocks
        runnable = sum(not isinstance(one.ended, CellSkipped) for one in self._states)
        cell_seconds = self._campaign.budget_seconds or CELL_SECONDS * runnable
        estimate_seconds = _needed_seconds(state.cell, False, self._campaign)
        return max(seconds / blocks, min(estimate_seconds, cell_seconds / max(1, runnable)))


def cells_to_confirm(campaign: Campaign, cells: Sequence[Cell]) -> set[str]:
    """Return the keys of the cells to confirm: on each device those of `search.confirm` models, or
    all.

    On the CPU these are the smallest models, which take the least time; on the GPU the largest,
    since it is there for what the CPU does not serve. The size of a mixture of experts is its
    active parameters. A model whose shape is not known counts as the largest.
    """
    sizes = {
        cell.model: float("inf") if cell.spec is None else cell.spec.active_parameters
        for cell in cells
    }
    keys: set[str] = set()
    for device in dict.fromkeys(cell.device for cell in cells):
        device_cells = [cell for cell in cells if cell.device == device]
        by_size = sorted(
            dict.fromkeys(cell.model for cell in device_cells),
            key=lambda model: sizes[model],
            reverse=device == "gpu",
        )
        models = by_size[: campaign.search.confirm]  # None: all
        keys |= {cell.key for cell in device_cells if cell.model in models}
    return keys


def share_budget(
    cells: Sequence[Cell], to_confirm: set[str], seconds: float, campaign: Campaign
) -> dict[str, float]:
    """Return the seconds of measuring for each cell: cell key -> its part of `seconds`.

    A cell that is only estimated gets the time that an estimate takes, and a cell on a GPU the time
    that an estimate and one level take, since a GPU answers many requests in little time. The other
    cells share the rest evenly. `to_confirm`: keys of the cells that are not only estimated.
    """
    even_seconds = seconds / max(1, len(cells))
    shares_rest = {cell.key for cell in cells if cell.key in to_confirm and cell.device != "gpu"}
    if not shares_rest:  # then the GPU's cells share the rest
        shares_rest = {cell.key for cell in cells if cell.key in to_confirm}
    needed = {
        cell.key: min(even_seconds, _needed_seconds(cell, cell.key in to_confirm, campaign))
        for cell in cells
        if cell.key not in shares_rest
    }
    rest_seconds = (seconds - sum(needed.values())) / max(1, len(cells) - len(needed))
    return {cell.key: needed.get(cell.key, rest_seconds) for cell in cells}


def _needed_seconds(cell: Cell, confirms: bool, campaign: Campaign) -> float:
    """Return the seconds of measuring that an estimate takes and, on a GPU, the level that confirms
    it. On a GPU that is some 40 s, or 75 s if a TTFT limit of 2 s makes the level a minute long."""
    if cell.device != "gpu":
        return ESTIMATE_SECONDS + (SLOTS_SECONDS if are_slots_open(cell, campaign) else 0.0)
    estimate_seconds = campaign.search.single_stream_seconds_on("gpu") + GPU_CALIBRATION_SECONDS
    if not confirms:
        return estimate_seconds
    min_level_seconds = campaign.search.level_seconds_on("gpu")
    level_seconds = shortest_level(campaign.slo, None, min_level_seconds)
    return estimate_seconds + GPU_LEVEL_MARGIN_SECONDS + level_seconds

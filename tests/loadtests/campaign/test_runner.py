"""The runner's logic on a simulated server: search, budget, blocks, SLOs, calibration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from loadtests.campaign.bench import Level
from loadtests.campaign.campaign_file import parse_campaign
from loadtests.campaign.run_state import CellState, repeat_in_turns, repeat_of
from loadtests.errors import (
    BadRunFolder,
    Incomplete,
    ServerFailed,
)
from loadtests.records.events import (
    Calibrated,
    CapacityStatus,
    CellFinished,
    CellSkipped,
    CellStarted,
    Interrupted,
    LevelFinished,
    of_kind,
)
from loadtests.records.old_run_folder import (
    read_events,
    read_records,
)
from loadtests.records.schema import RequestRecord
from loadtests.simulation.prediction_error import pairs_in
from reports.run import read_run
from tests.loadtests.campaign.campaigns import (
    CAMPAIGN,
    SLO,
    calibrated,
    campaign,
    rates,
    started,
    two_cells,
)
from tests.loadtests.campaign.checks import check_folder, kinds
from tests.loadtests.campaign.simulated import (
    Bench,
    Simulated,
    interrupted,
)


def test_a_cell_that_the_others_left_nothing_of_the_budget_has_nothing(tmp_path: Path) -> None:
    """Its share is 0 seconds, and not the default of a campaign without a budget."""
    folder = Simulated().run(two_cells(budget=0.1), tmp_path)
    (_, second) = of_kind(read_events(folder).records, CellStarted)
    ended = of_kind(read_events(folder).records, LevelFinished, second.cell)
    assert second.budget_seconds == 0.0
    assert sum(one.spent_seconds or 0.0 for one in ended) < 100.0


def test_it_finds_the_capacity_of_a_known_server(tmp_path: Path) -> None:
    """Two slots of 0.1 s: 20 requests/s at the very most; the wait of 0.25 s takes some off. Above
    it the interval goes since another start may differ: this is one.
    """
    world = Simulated()
    folder = world.run(campaign(budget=600), tmp_path)
    check_folder(folder)
    (ended,) = of_kind(read_events(folder).records, CellFinished)
    found = ended.capacity
    assert found is not None and found.status is CapacityStatus.CONFIRMED
    assert found.low is not None and found.high is not None and 10 < found.low < found.high < 24
    assert found.held is not None and 8 < found.held <= found.high
    tried = [rate for rate in rates(folder) if rate is not None]
    assert rates(folder)[0] is None, "single-stream requests first"
    assert min(tried) < found.high and max(tried) > found.low, "levels on both sides"
    for part in ("cell 1 of 1", "single-stream requests: 3 of 3 good", "requests/s", "complete:"):
        assert part in world.said.getvalue(), part
    before = kinds(folder)
    world.resume(folder)
    assert kinds(folder) == before, "a complete run is left as it is"


def test_an_slo_that_a_single_stream_request_breaks_is_met_at_no_rate(tmp_path: Path) -> None:
    folder = Simulated().run(campaign(more="[slo]\nttft_seconds = 0.01"), tmp_path)
    check_folder(folder)
    (ended,) = of_kind(read_events(folder).records, CellFinished)
    assert ended.capacity is not None
    assert ended.capacity.status is CapacityStatus.NONE
    assert set(rates(folder)) == {None}


@pytest.mark.parametrize("budget", [40.0, 120.0])
def test_the_budget_is_kept(tmp_path: Path, budget: float) -> None:
    folder = Simulated().run(campaign(budget, search="precision = 0.001"), tmp_path)
    check_folder(folder)
    ended = of_kind(read_events(folder).records, LevelFinished)
    spent = sum(event.spent_seconds for event in ended)
    assert 0.5 * budget < spent < budget + 25, "the last level may run over"


def test_cells_share_the_budget_and_the_later_have_what_is_left(tmp_path: Path) -> None:
    folder = Simulated().run(two_cells(budget=100), tmp_path)
    check_folder(folder)
    first, second = of_kind(read_events(folder).records, CellStarted)
    assert first.budget_seconds is not None and second.budget_seconds is not None
    ended = of_kind(read_events(folder).records, LevelFinished, first.cell)
    spent = sum(event.spent_seconds for event in ended)
    assert first.budget_seconds < second.budget_seconds or spent > first.budget_seconds
    assert second.budget_seconds == pytest.approx(max(0.0, 100 - spent))


def test_cells_are_measured_in_blocks_each_on_a_server_of_its_own(tmp_path: Path) -> None:
    """Three blocks of two cells; the last start of each begins with a rate measured before."""
    world = Simulated()
    folder = world.run(two_cells(budget=1200, starts=3), tmp_path)
    check_folder(folder)
    parts = of_kind(read_events(folder).records, CellStarted)
    cells = {one.cell for one in parts}
    assert [one.block for one in parts] == [1, 1, 2, 2, 3, 3] and len(cells) == 2
    assert world.opened == [one.cell for one in parts]
    assert all({one.cell for one in parts[at : at + 2]} == cells for at in (0, 2, 4))
    for cell in cells:
        own = [one for one in started(folder) if one.cell == cell and one.rate_per_second]
        assert {one.start for one in own} == {1, 2, 3}
        assert [one.start for one in own] == sorted(one.start or 0 for one in own)
        on_last = next(one for one in own if one.start == 3)
        before = {one.rate_per_second for one in own if one.start != 3}
        assert on_last.rate_per_second in before, "a check of drift"
        (ended,) = of_kind(read_events(folder).records, CellFinished, cell)
        assert ended.capacity is not None and ended.capacity.starts == 3
        assert ended.capacity.status is CapacityStatus.CONFIRMED
        single = [one for one in started(folder) if one.cell == cell and not one.rate_per_second]
        assert len(single) == 1, "one single-stream level is enough"


def test_the_order_of_a_block_is_drawn_by_the_seed(tmp_path: Path) -> None:
    orders = set()
    for seed in range(6):
        plan = two_cells(budget=60, starts=3)
        plan = msgspec.structs.replace(
            plan, campaign=msgspec.structs.replace(plan.campaign, seed=seed)
        )
        folder = Simulated().run(plan, tmp_path / str(seed))
        parts = of_kind(read_events(folder).records, CellStarted)
        orders.add(tuple(one.cell for one in parts[:2]))
    assert len(orders) == 2


def test_starts_of_different_speed_are_named_and_widen_the_interval(tmp_path: Path) -> None:
    def slower(state: CellState) -> None:
        world.service_seconds = 0.14 if state.starts == 2 else 0.1

    world = Simulated(opening=slower)
    same = Simulated().run(campaign(budget=600, starts=3), tmp_path / "same")
    folder = world.run(campaign(budget=600, starts=3), tmp_path / "slower")
    warned = {one.code: one.text for one in read_run(folder).warnings}
    assert "TPOT 7.1 ms on start" in warned["StartsDiffer"]
    assert "13 ms on start 3" in warned["StartsDiffer"]
    assert "StartsDiffer" not in {one.code for one in read_run(same).warnings}
    (wide,) = of_kind(read_events(folder).records, CellFinished)
    (narrow,) = of_kind(read_events(same).records, CellFinished)
    assert wide.capacity is not None and narrow.capacity is not None
    assert wide.capacity.low is not None and narrow.capacity.low is not None
    assert wide.capacity.low < 0.9 * narrow.capacity.low
    assert "3 starts" in world.said.getvalue()


def test_a_later_start_that_fails_leaves_what_was_measured(tmp_path: Path) -> None:
    def opening(state: CellState) -> None:
        if state.starts == 1 and "135m" in state.key:
            raise ServerFailed("it did not start")

    world = Simulated(opening=opening)
    with pytest.raises(Incomplete, match="1 of 2 cells could not be measured: smollm2-135m-fake"):
        world.run(two_cells(budget=400, starts=3), tmp_path)
    (folder,) = tmp_path.iterdir()
    events = read_events(folder).records
    assert not of_kind(events, CellSkipped)
    assert [one.cell for one in of_kind(events, CellFinished)] == ["smollm2-360m-fake"]
    world.opening = lambda state: None
    world.resume(folder)
    check_folder(folder)
    assert len(of_kind(read_events(folder).records, CellFinished)) == 2


def test_a_server_that_stays_busy_after_a_level_costs_no_cell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def settle(self: Bench) -> None:
        raise interrupted()

    monkeypatch.setattr(Bench, "settle", settle)
    recovered: list[str] = []
    world = Simulated(recovering=lambda state: recovered.append(state.key))
    folder = world.run(campaign(search="rates = [40.0]\nrate_seconds = [10.0]"), tmp_path)
    assert of_kind(read_events(folder).records, CellFinished) and recovered


def test_a_cell_that_is_decided_early_leaves_its_time_to_the_others(tmp_path: Path) -> None:
    """A cell that holds at no rate ends in the first block: the other one has its budget."""

    def slow(state: CellState, level: Level) -> None:
        world.service_seconds = 5.0 if "360m" in state.key else 0.1

    world = Simulated(fate=slow)
    folder = world.run(two_cells(budget=600, starts=3), tmp_path)
    check_folder(folder)
    events = read_events(folder).records
    assert len(of_kind(events, CellStarted, "smollm2-360m-fake")) == 1
    parts = of_kind(events, CellStarted, "smollm2-135m-fake")
    assert len(parts) == 3
    other = of_kind(events, LevelFinished, "smollm2-360m-fake")
    left = 600 - sum(one.spent_seconds for one in other)
    assert parts[-1].budget_seconds == pytest.approx(left)


def test_a_confirmed_rate_is_held_again_for_longer(tmp_path: Path) -> None:
    folder = Simulated().run(two_cells(budget=600), tmp_path / "first")
    ended = of_kind(read_events(folder).records, CellFinished)
    held = {one.cell: one.capacity.held for one in ended if one.capacity is not None}
    ((_, again),) = repeat_in_turns(
        [folder], 1, False, lambda plan: Simulated().run(plan, tmp_path / "again"), 300.0
    )
    check_folder(again)
    for cell, rate in held.items():
        own = [one for one in started(again) if one.cell == cell and one.rate_per_second]
        assert [(one.rate_per_second, one.window_seconds) for one in own] == [(rate, 300.0)]
    seeds = {one.seed for one in started(folder)}
    assert not seeds & {one.seed for one in started(again)}, "other requests"
    nothing = Simulated().run(campaign(more="[slo]\nttft_seconds = 0.01"), tmp_path / "none")
    with pytest.raises(BadRunFolder, match="no confirmed rate to hold again"):
        repeat_of(nothing, 300.0)


def test_every_level_serves_both_slos(tmp_path: Path) -> None:
    more = (
        'slos = [{ name = "quick", ttft_seconds = 0.1, tpot_seconds = 0.1, target = 0.8 },'
        ' { name = "patient", ttft_seconds = 1.0, tpot_seconds = 0.1, target = 0.8 }]'
    )
    folder = Simulated().run(campaign(budget=400, more=more), tmp_path)
    check_folder(folder)
    (ended,) = of_kind(read_events(folder).records, CellFinished)
    assert list(ended.capacities) == ["quick", "patient"]
    quick, patient = ended.capacities.values()
    assert quick.estimate is not None and patient.estimate is not None
    assert quick.estimate < patient.estimate and patient.low < 20
    assert ended.capacity == quick


def test_given_rates_are_measured_and_no_others(tmp_path: Path) -> None:
    asked = "rates = [5.0, 40.0, 5.0]\nrate_seconds = [10.0, 10.0, 12.0]"
    world = Simulated()
    folder = world.run(campaign(search=asked), tmp_path)
    check_folder(folder)
    assert rates(folder) == [None, 5.0, 40.0, 5.0]
    assert [one.window_seconds for one in started(folder)[1:]] == [10.0, 10.0, 12.0]
    assert world.settled == 1, "after the level that left requests behind"


def test_the_search_starts_at_the_prediction(tmp_path: Path) -> None:
    world = Simulated(slots=4)
    folder = calibrated(tmp_path, world)
    check_folder(folder)
    (made,) = of_kind(read_events(folder).records, Calibrated)
    assert made.law is not None and made.slots == 4, "found by bursts of 2, 4, 8"
    (predicted,) = made.rates.values()
    assert rates(folder)[1] == pytest.approx(predicted.rate)
    found = kinds(folder)
    assert found.index("calibrated") > found.index("level_finished"), "single-stream first"
    (ended,) = of_kind(read_events(folder).records, CellFinished)
    assert ended.capacity is not None and world.bursts >= 3
    assert "calibrated in" in world.said.getvalue() and "predicted" in world.said.getvalue()
    bursts = [r for r in read_records(folder).requests if r.level.endswith("#calibration")]
    assert len({record.index for record in bursts}) == len(bursts) >= 2 + 4 + 8


def test_a_later_cell_is_predicted_with_the_errors_of_the_earlier_ones(tmp_path: Path) -> None:
    """In one sitting: the journal in memory is as the one that is read again."""
    text = CAMPAIGN.format(budget=300, more=SLO, search="", starts=1).replace(
        '["135m"]', '["135m", "360m"]'
    )
    plan = parse_campaign(text.replace("calibration_seconds = 0", "calibration_seconds = 20"))
    folder = Simulated(slots=4).run(plan, tmp_path)
    check_folder(folder)
    events = read_events(folder).records
    made = of_kind(events, Calibrated)
    assert len(made) == 2 and all(rate.low for one in made for rate in one.rates.values())
    assert len(pairs_in(events)) == 2


@pytest.mark.parametrize("disturbed", [1, 99])
def test_a_burst_that_is_disturbed_is_sent_again_or_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, disturbed: int
) -> None:
    sent = Bench.burst

    def burst(self: Bench, *asked: Any) -> list[RequestRecord]:
        is_disturbed = self.server.bursts < disturbed
        self.server.hog = (self.server.now, self.server.now + (5.0 if is_disturbed else 0.0))
        try:
            return sent(self, *asked)
        finally:
            self.server.hog = (0.0, 0.0)

    monkeypatch.setattr(Bench, "burst", burst)
    world = Simulated(slots=4)
    folder = calibrated(tmp_path, world)
    check_folder(folder)
    said = of_kind(read_events(folder).records, Interrupted)
    assert all("calibration, " in one.reason and "`hog` (pid 7" in one.reason for one in said)
    (made,) = of_kind(read_events(folder).records, Calibrated)
    if disturbed == 1:
        assert len(said) == 1 and made.rates
    else:
        assert len(said) == world.bursts >= 2 and made.slots is None
        assert all("burst" not in one for one in made.observations)


def test_an_interrupted_calibration_is_given_up_and_the_search_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def burst(self: Bench, *_: object) -> list[object]:
        raise interrupted()

    monkeypatch.setattr(Bench, "burst", burst)
    recovered: list[str] = []
    world = Simulated(recovering=lambda state: recovered.append(state.key))
    folder = calibrated(tmp_path, world)
    check_folder(folder)
    assert not of_kind(read_events(folder).records, Calibrated) and len(recovered) == 1
    (event,) = of_kind(read_events(folder).records, Interrupted)
    assert event.reason == "calibration: the engine was restarted"

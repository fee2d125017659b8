"""The runner's logic on a simulated server: search, budget, SLOs, calibration, repeat, resume,
skips, kills at every append.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from loadtests.campaign.campaign_file import Plan, parse_campaign
from loadtests.campaign.cell_runner import MOST_ATTEMPTS, MOST_SERVERS, Level
from loadtests.campaign.progress import Progress
from loadtests.campaign.run_state import CellState, repeat_in_turns, repeat_of
from loadtests.campaign.runner import run
from loadtests.comparison.compare import compare
from loadtests.comparison.run_values import read_arm
from loadtests.errors import (
    BadRunFolder,
    EndpointRefuses,
    Incomplete,
    MachineBusy,
    OverMemory,
    ServerFailed,
    ServerLost,
    TargetUnusable,
)
from loadtests.host.machine_lock import machine_lock
from loadtests.records import run_folder
from loadtests.records.events import (
    Calibrated,
    CapacityStatus,
    CellFinished,
    CellSkipped,
    CellStarted,
    Interrupted,
    LevelAbandoned,
    LevelFinished,
    LevelStarted,
    RunFinished,
    RunResumed,
    SkipCause,
    of_kind,
)
from loadtests.records.lines import read_lines
from loadtests.records.run_folder import (
    REQUESTS,
    read_events,
    read_manifest,
    read_records,
)
from loadtests.records.schema import RequestRecord
from loadtests.simulation.prediction_error import pairs_in
from reports.run import read_run
from reports.write import Asked, write_report
from tests.loadtests.campaign.checks import check_folder, kinds
from tests.loadtests.campaign.simulated import (
    Bench,
    Simulated,
    fails_once,
    interrupted,
    killed_after,
)

CAMPAIGN = """
name = "simulated"
models = ["135m"]
backends = ["fake"]
budget_seconds = {budget}
workload = {{ prompt_tokens = 16, output_tokens = 8 }}
{more}
[search]
starts = {starts}
calibration_seconds = 0
level_seconds_min = 10
level_seconds_max = 20
level_requests_min = 30
single_stream_requests = 3
{search}
"""
SLO = "[slo]\nttft_seconds = 0.3\ntpot_seconds = 0.1\ntarget = 0.9"


def campaign(budget: float = 120, more: str = SLO, search: str = "", starts: int = 1) -> Plan:
    return parse_campaign(CAMPAIGN.format(budget=budget, more=more, search=search, starts=starts))


def two_cells(budget: float = 60, starts: int = 1) -> Plan:
    text = CAMPAIGN.format(budget=budget, more=SLO, search="", starts=starts)
    return parse_campaign(text.replace('["135m"]', '["135m", "360m"]'))


def started(folder: Path) -> list[LevelStarted]:
    return of_kind(read_events(folder).records, LevelStarted)


def rates(folder: Path) -> list[float | None]:
    return [event.rate_per_second for event in started(folder)]


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


# Calibration.


def calibrated(tmp_path: Path, world: Simulated) -> Path:
    search = "calibration_seconds = 20"
    plan = parse_campaign(
        CAMPAIGN.format(budget=300, more=SLO, search="", starts=1).replace(
            "calibration_seconds = 0", search
        )
    )
    return world.run(plan, tmp_path)


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


# What goes wrong.


def test_an_interrupted_level_is_measured_again_under_another_name(tmp_path: Path) -> None:
    folder = Simulated(fate=fails_once("#2.1", interrupted)).run(campaign(), tmp_path)
    check_folder(folder)
    (abandoned,) = of_kind(read_events(folder).records, LevelAbandoned)
    assert abandoned.level.endswith("#2.1") and abandoned.spent_seconds
    names = {one.level.partition("#")[2]: one for one in started(folder)}
    assert names["2.2"].attempt == 2 and names["2.2"].seed != names["2.1"].seed
    counted = {level.name for level in read_records(folder).levels()}
    assert abandoned.level not in counted


def test_a_level_that_never_ends_well_costs_the_cell_and_resume_tries_again(
    tmp_path: Path,
) -> None:
    def fate(state: CellState, level: Level) -> None:
        if "#2." in level.name and state.key.startswith("smollm2-135m"):
            raise interrupted()

    world = Simulated(fate=fate)
    with pytest.raises(Incomplete, match="1 of 2 cells could not be measured: smollm2-135m-fake"):
        world.run(two_cells(budget=400), tmp_path)
    (folder,) = tmp_path.iterdir()
    events = read_events(folder).records
    assert len(of_kind(events, LevelAbandoned)) == MOST_ATTEMPTS
    assert [event.cell for event in of_kind(events, CellFinished)] == ["smollm2-360m-fake"]
    world.fate = lambda state, level: None
    world.resume(folder)
    check_folder(folder)
    assert started(folder)[-1].cell == "smollm2-135m-fake"
    assert any(one.level.endswith(f"#2.{MOST_ATTEMPTS + 1}") for one in started(folder))


def test_a_lost_server_is_started_again_and_the_third_loss_skips_the_cell(tmp_path: Path) -> None:
    left = [MOST_SERVERS - 1]

    def fate(state: CellState, level: Level) -> None:
        if left[0]:
            left[0] -= 1
            raise ServerLost("the server ended (SIGKILL)")

    world = Simulated(fate=fate)
    folder = world.run(campaign(), tmp_path / "some")
    assert len(world.opened) == MOST_SERVERS and of_kind(read_events(folder).records, CellFinished)
    left[0] = MOST_SERVERS
    folder = world.run(campaign(), tmp_path / "all")
    (skipped,) = of_kind(read_events(folder).records, CellSkipped)
    assert skipped.cause is SkipCause.SERVER and "lost 3 servers" in skipped.reason


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (ServerFailed("it did not start"), SkipCause.SERVER),
        (OverMemory("2.1 GiB of 2 GiB"), SkipCause.MEMORY),
        (EndpointRefuses("400: context of 8 tokens"), SkipCause.ENDPOINT),
    ],
)
def test_a_cell_that_cannot_be_served_is_skipped_and_the_next_is_measured(
    tmp_path: Path, error: Exception, cause: SkipCause
) -> None:
    def opening(state: CellState) -> None:
        if "135m" in state.key:
            raise error

    folder = Simulated(opening=opening).run(two_cells(), tmp_path)
    check_folder(folder)
    (skipped,) = of_kind(read_events(folder).records, CellSkipped)
    assert (skipped.cause, skipped.reason) == (cause, str(error)) and "135m" in skipped.cell
    (ended,) = of_kind(read_events(folder).records, CellFinished)
    assert "360m" in ended.cell


def test_an_endpoint_that_does_not_answer_costs_its_cell_for_now(tmp_path: Path) -> None:
    def opening(state: CellState) -> None:
        if "135m" in state.key:
            raise TargetUnusable("it cannot be reached")

    world = Simulated(opening=opening)
    with pytest.raises(Incomplete, match="smollm2-135m"):
        world.run(two_cells(), tmp_path)
    (folder,) = tmp_path.iterdir()
    assert len(of_kind(read_events(folder).records, CellFinished)) == 1
    world.opening = lambda state: None
    world.resume(folder)
    check_folder(folder)


def test_a_cell_over_its_memory_budget_is_not_even_started(tmp_path: Path) -> None:
    text = CAMPAIGN.format(
        budget=60, more=SLO + "\n[[hardware]]\nmemory_gib = 1.0", search="", starts=1
    )
    plan = parse_campaign(text.replace('["135m"]', '["8b"]').replace('"fake"', '"llama_cpp"'))
    world = Simulated()
    folder = world.run(plan, tmp_path)
    (skipped,) = of_kind(read_events(folder).records, CellSkipped)
    assert skipped.cause is SkipCause.MEMORY and not world.opened
    assert kinds(folder) == ["run_started", "cell_skipped", "run_finished"]


def test_ctrl_c_ends_in_order_and_says_how_to_go_on(tmp_path: Path) -> None:
    def fate(state: CellState, level: Level) -> None:
        raise KeyboardInterrupt

    world = Simulated(fate=fate)
    with pytest.raises(Incomplete, match="crossover campaign resume"):
        world.run(campaign(), tmp_path)
    (folder,) = tmp_path.iterdir()
    assert kinds(folder)[-2:] == ["level_abandoned", "interrupted"]
    world.fate = lambda state, level: None
    world.resume(folder)
    check_folder(folder)
    assert kinds(folder).count("interrupted") == 1, "its own last word says so"


def test_another_machine_does_not_go_on(tmp_path: Path) -> None:
    world = Simulated(fate=fails_once("#1.1", KeyboardInterrupt))
    with pytest.raises(Incomplete):
        world.run(campaign(), tmp_path)
    (folder,) = tmp_path.iterdir()
    before = kinds(folder)
    world.facts = msgspec.structs.replace(world.facts, cpu_model="another CPU")
    with pytest.raises(BadRunFolder, match="begun on another machine .*another CPU now"):
        world.resume(folder)
    assert kinds(folder) == before


# Repeats.


def test_a_run_is_repeated_level_by_level_with_its_seeds(tmp_path: Path) -> None:
    """Also where an attempt failed in the first run: its later levels keep their arrivals."""
    world = Simulated(fate=fails_once("#3.1", interrupted))
    folder = world.run(campaign(), tmp_path / "first")
    world.fate = lambda state, level: None
    again = world.run(repeat_of(folder), tmp_path / "again")
    check_folder(again)

    def measured(run: Path) -> list[tuple[float | None, float, int]]:
        levels = [level.started for level in read_records(run).levels()]
        alone = [one for one in levels if one.rate_per_second is None][:1]
        loads = [one for one in levels if one.rate_per_second is not None]
        assert len(loads) >= 3
        return [(one.rate_per_second, one.window_seconds, one.seed) for one in alone + loads]

    assert [(r, t) for r, t, _ in measured(again)][1:] == [(r, t) for r, t, _ in measured(folder)][
        1:
    ]
    assert [seed for *_, seed in measured(again)] == [seed for *_, seed in measured(folder)]
    assert read_manifest(again).campaign["repeats"] == folder.name
    assert not of_kind(read_events(again).records, Calibrated)


def test_a_cell_without_levels_of_load_is_repeated_not_searched(tmp_path: Path) -> None:
    world = Simulated()
    folder = world.run(campaign(more="[slo]\nttft_seconds = 0.01"), tmp_path / "first")
    plan = repeat_of(folder)
    slo = msgspec.structs.replace(plan.campaign.slo, ttft_seconds=1.0)  # now it would be searched
    plan = Plan(msgspec.structs.replace(plan.campaign, slo=slo), plan.cells, plan.text)
    again = world.run(plan, tmp_path / "again")
    assert set(rates(again)) == {None}


def in_turns(tmp_path: Path, second: Simulated, times: int, new_seeds: bool) -> list[list[Path]]:
    """Two servers whose runs are repeated in turns."""
    servers = [Simulated(service_seconds=0.1), second]
    search = "rates = [6.0, 12.0]\nrate_seconds = [60.0, 60.0]"
    firsts = [server.run(campaign(search=search), tmp_path) for server in servers]
    turn = itertools.cycle(servers)
    return repeat_in_turns(firsts, times, new_seeds, lambda plan: next(turn).run(plan, tmp_path))


@pytest.mark.parametrize("new_seeds", [False, True])
def test_repeats_in_turns_are_what_compare_wants(tmp_path: Path, new_seeds: bool) -> None:
    """With their seeds, and with new ones that no two runs share."""
    slower = Simulated(service_seconds=0.13)
    arms = in_turns(tmp_path, slower, times=3, new_seeds=new_seeds)
    drawn = [[one.seed for one in started(folder)] for arm in arms for folder in arm]
    repeats = drawn[1:4] + drawn[5:]
    assert len({tuple(seeds) for seeds in drawn}) == (7 if new_seeds else 1)
    assert len({seed for seeds in repeats for seed in seeds}) == (18 if new_seeds else 3)
    found = compare(read_arm(arms[0]), read_arm(arms[1]))
    assert (found.verdict, len(found.first)) == ("slower", 4)
    assert {row.load for row in found.rows} == {None, 6.0, 12.0}


def test_repeats_of_equal_servers_are_no_different(tmp_path: Path) -> None:
    arms = in_turns(tmp_path, Simulated(service_seconds=0.1), times=2, new_seeds=True)
    assert compare(read_arm(arms[0]), read_arm(arms[1])).verdict == "no difference"


def test_records_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run reads none of its own; resume, report and each arm of a comparison read them once."""
    reads: list[Path] = []

    def read(path: Path, kind: object) -> object:
        reads.append(path)
        return read_lines(path, kind)

    monkeypatch.setattr(run_folder, "read_lines", read)

    def requests_files() -> int:
        found = sum(path.name == REQUESTS for path in reads)
        reads.clear()
        return found

    world = Simulated()
    folder = world.run(campaign(budget=60), tmp_path)
    assert requests_files() == 0
    world.resume(folder)
    assert requests_files() == 1
    again = repeat_in_turns([folder], 2, True, lambda plan: world.run(plan, tmp_path))[0][1:]
    assert requests_files() == 1
    compare(read_arm([folder]), read_arm(again))
    assert requests_files() == 3
    write_report([folder], tmp_path / "report", Asked(formats=("md",)))
    assert requests_files() == 1


def test_nothing_is_measured_where_one_of_the_runs_cannot_be_repeated(tmp_path: Path) -> None:
    first = Simulated().run(campaign(), tmp_path / "runs")
    with pytest.raises(BadRunFolder, match="holds no run"):
        repeat_in_turns([first, tmp_path], 2, False, lambda plan: pytest.fail("measured"))


# Kills.


def killed_run(
    plan: Plan, out: Path, monkeypatch: pytest.MonkeyPatch, appends: int, world: Simulated
) -> Path:
    with killed_after(monkeypatch, appends):
        world.run(plan, out)
    (folder,) = out.iterdir()
    return folder


def test_killed_after_every_append_and_gone_on_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whenever the runner dies: nothing that was finished is measured again, and the end is the
    same kind of run.
    """
    plan = two_cells(budget=50)
    whole = kinds(Simulated().run(plan, tmp_path / "whole"))
    assert whole.count("level_finished") >= 4
    for appends in range(1, len(whole)):
        folder = killed_run(plan, tmp_path / str(appends), monkeypatch, appends, Simulated())
        assert kinds(folder) == whole[:appends], "what was appended is there, and no more"
        kept = [level.name for level in read_records(folder).levels()]
        with open(folder / REQUESTS, "ab") as file:
            file.write(b'{"cell":"cut of')  # what a power cut leaves
        Simulated().resume(folder)
        check_folder(folder)
        events = read_events(folder).records
        assert [level.name for level in read_records(folder).levels()][: len(kept)] == kept
        (resumed,) = of_kind(events, RunResumed)
        assert resumed.dropped_bytes == {REQUESTS: 15}
        (stopped,) = of_kind(events, Interrupted)
        assert stopped.last_event == whole[appends - 1]
        ended = [event.cell for event in of_kind(events, CellFinished)]
        assert ended == [cell.key for cell in plan.cells]


@settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(cuts=st.lists(st.integers(1, 12), max_size=5), bad=st.sets(st.integers(1, 6), max_size=3))
def test_any_sequence_of_kills_and_interruptions_ends_well(
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    cuts: list[int],
    bad: set[int],
) -> None:
    """Resumed after each kill, with first attempts that fail: one whole run in the end."""

    def fate(state: CellState, level: Level) -> None:
        number, _, attempt = level.name.rpartition("#")[2].partition(".")
        if attempt == "1" and int(number) in bad:
            raise interrupted()

    out = tmp_path_factory.mktemp("runs")
    world = Simulated(fate=fate)
    done: list[Path] = []

    def sitting() -> None:
        found = list(out.iterdir())
        done.append(world.resume(found[0]) if found else world.run(campaign(budget=60), out))

    for appends in cuts:
        with killed_after(monkeypatch, appends):
            sitting()
    sitting()
    folder = done[-1]
    check_folder(folder)
    assert len(of_kind(read_events(folder).records, RunFinished)) == 1
    for event in of_kind(read_events(folder).records, LevelFinished):
        number = int(event.level.rpartition("#")[2].partition(".")[0])
        assert number not in bad or not event.level.endswith(".1")


# What is refused before anything is begun.


def test_an_endpoint_that_is_not_there(tmp_path: Path) -> None:
    plan = parse_campaign('name = "x"\n[target]\nurl = "http://127.0.0.1:9"\nready_seconds = 0.5')
    with pytest.raises(TargetUnusable, match="127.0.0.1:9 cannot be reached"):
        Simulated().run(plan, tmp_path)
    assert not list(tmp_path.glob("*"))


def test_two_campaigns_at_once_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = Simulated()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))  # a machine of its own
    with machine_lock("runs/other"):
        with pytest.raises(MachineBusy, match=r"\(runs/other\) measures on this machine now"):
            run(campaign(), tmp_path / "runs", Progress(world.said), world=world.world)
        assert not (tmp_path / "runs").exists()
    run(campaign(), tmp_path / "runs", Progress(world.said), world=world.world)


def test_a_folder_without_levels_is_not_repeated(tmp_path: Path) -> None:
    with pytest.raises(BadRunFolder, match="holds no run"):
        repeat_of(tmp_path)

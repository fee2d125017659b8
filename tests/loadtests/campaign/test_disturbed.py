"""The runner's logic on a machine that is not quiet: levels measured again, waiting, giving up."""

from __future__ import annotations

from pathlib import Path

import pytest

from loadtests.campaign.campaign_file import Plan, parse_campaign
from loadtests.errors import BadCampaign
from loadtests.records.events import (
    Capacity,
    CapacityStatus,
    CellFinished,
    CellStarted,
    LevelFinished,
    NeverQuiet,
    Waited,
    of_kind,
)
from loadtests.records.old_run_folder import read_events, read_manifest, read_records
from loadtests.records.schema import Probe
from reports.findings import crossover
from reports.run import read_run, slos_of
from reports.sentences import headline
from tests.loadtests.campaign.campaigns import SLO, campaign
from tests.loadtests.campaign.checks import check_folder
from tests.loadtests.campaign.simulated import Simulated, killed_after

START_SECONDS = 5.0  # that the simulated server takes
FOREVER = (30.0, float("inf"))
FIXED = "rates = [4.0, 5.0, 6.0]\nrate_seconds = [10.0, 10.0, 10.0]"


def ignoring() -> Plan:
    return campaign(more=f'disturbance = "ignore"\n{SLO}', search=FIXED)


def finished(folder: Path) -> list[LevelFinished]:
    return of_kind(read_events(folder).records, LevelFinished)


def capacity_of(folder: Path) -> Capacity:
    (ended,) = of_kind(read_events(folder).records, CellFinished)
    assert ended.capacity is not None
    return ended.capacity


def test_a_disturbed_level_is_measured_again_when_the_machine_is_quiet(tmp_path: Path) -> None:
    """The hog has the core from the middle of the second level for 20 s."""
    world = Simulated(hog=(20.0, 40.0))
    folder = world.run(campaign(search=FIXED), tmp_path)
    check_folder(folder)
    levels = read_records(folder).levels()
    said = [(level.name.rpartition("#")[2], level.started.rate_per_second) for level in levels]
    assert said == [("1.1", None), ("2.1", 4.0), ("3.1", 5.0), ("3.2", 5.0), ("4.1", 6.0)]
    (lost,) = [one for one in finished(folder) if one.is_set_aside]
    assert lost.disturbance is not None and not lost.is_valid and "Disturbed" in lost.warnings
    assert [one.pid for one in lost.disturbance.strangers] == [7]
    assert lost.disturbance.share is not None and lost.disturbance.share > 0.03
    (wait,) = of_kind(read_events(folder).records, Waited)
    assert wait.became_quiet and "`hog` (pid 7" in wait.reason
    assert world.rested == wait.spent_seconds > 2
    words = world.said.getvalue()
    for part in ("disturbed: `hog` (pid 7", "waiting for a quiet machine", "quiet after"):
        assert part in words, part


def test_a_slightly_disturbed_level_counts_where_it_holds_or_quiet_never_comes(
    tmp_path: Path,
) -> None:
    """Two requests at a time, 0.1 s each: 4 requests/s hold, and 30 do not."""
    rates = "rates = [4.0, 30.0]\nrate_seconds = [30.0, 30.0]"
    world = Simulated(hog=(8.0, float("inf")), hog_share=0.06)
    folder = world.run(campaign(more=f"wait_seconds = 40\n{SLO}", search=rates), tmp_path)
    check_folder(folder)
    counted = [one for one in finished(folder) if not one.is_set_aside]
    assert [one.held for one in counted] == [False, True, False]
    assert [one.disturbance.counts for one in counted if one.disturbance] == [False, False, True]
    assert all(one.is_valid for one in counted) and "Disturbed" not in counted[0].warnings
    assert counted[1].warnings == ["Disturbed"] and "Disturbed" in counted[2].warnings
    assert "at most 10% taken count now" in world.said.getvalue()
    lost = [one for one in finished(folder) if one.is_set_aside]
    assert lost and all(not one.is_valid for one in lost)
    assert not of_kind(read_events(folder).records, NeverQuiet)
    assert capacity_of(folder) == read_run(folder).cells[0].capacity


def test_a_level_that_holds_for_one_slo_is_measured_again_for_the_other(tmp_path: Path) -> None:
    slos = "slos = [\n" + "".join(
        f'  {{ name = "{name}", ttft_seconds = {limit}, tpot_seconds = 0.1, target = 0.9 }},\n'
        for name, limit in (("quick", 0.0501), ("patient", 9.0))
    )
    rates = "rates = [12.0]\nrate_seconds = [30.0]"
    world = Simulated(hog=(8.0, 45.0), hog_share=0.06)
    folder = world.run(campaign(more=f"{slos}]", search=rates), tmp_path)
    check_folder(folder)
    (ended,) = of_kind(read_events(folder).records, CellFinished)
    held = [one for one in finished(folder) if one.held]
    assert held and not held[0].is_valid, "the first SLO is not met"
    for slo in slos_of(read_manifest(folder)):
        (cell,) = read_run(folder, slo).cells
        assert cell.capacity == ended.capacities[slo.name]
        assert [one.counts for one in cell.loaded] == [slo.name == "patient", True]


def test_the_capacity_is_that_of_a_quiet_machine(tmp_path: Path) -> None:
    """The levels that count are the same in number; the seeds of repeated ones differ."""
    quiet = capacity_of(Simulated().run(campaign(budget=600), tmp_path / "quiet"))
    world = Simulated(hog=(30.0, 80.0))
    folder = world.run(campaign(budget=600), tmp_path / "busy")
    check_folder(folder)
    found = capacity_of(folder)
    assert found.status is quiet.status is CapacityStatus.CONFIRMED
    assert found.high is not None and quiet.high is not None
    assert found.low < quiet.high and quiet.low < found.high
    assert any(one.is_set_aside for one in finished(folder))


@pytest.mark.parametrize("wait_seconds", [0.0, 40.0, 300.0])
def test_where_quiet_never_comes_the_cell_is_unresolved_and_names_who_it_was(
    tmp_path: Path, wait_seconds: float
) -> None:
    world = Simulated(hog=FOREVER)
    folder = world.run(campaign(more=f"wait_seconds = {wait_seconds}\n{SLO}"), tmp_path)
    check_folder(folder)
    found = capacity_of(folder)
    assert found.status == "unresolved"
    assert found.reason.startswith("the machine was busy: `hog` (pid 7, 0.")
    assert "of the CPU time that the engine wanted" in found.reason
    run = read_run(folder)
    assert run.cells[0].capacity == found, "the report says what the campaign said"
    assert f"unresolved: {found.reason}" in headline(run, crossover(run))
    assert "MachineBusy" in {warning.code for warning in run.warnings}
    (begun,) = of_kind(read_events(folder).records, CellStarted)
    assert begun.budget_seconds is not None
    patience = min(wait_seconds, begun.budget_seconds)
    lost = [one for one in finished(folder) if one.is_set_aside]
    waits = of_kind(read_events(folder).records, Waited)
    assert not waits[-1].became_quiet
    spent = sum(one.spent_seconds for one in [*lost, *waits])
    longest = max(one.spent_seconds for one in lost)
    assert patience <= spent < patience + 2 * longest + 2, "it ends, at most two levels late"
    assert world.now < START_SECONDS + 30 + spent + longest


def test_what_a_busy_machine_costs_is_not_of_the_budget(tmp_path: Path) -> None:
    """The same levels fit into the budget, beside 60 s of disturbance."""
    quiet = Simulated().run(campaign(budget=100), tmp_path / "quiet")
    busy = Simulated(hog=(30.0, 90.0)).run(campaign(budget=100), tmp_path / "busy")
    counted = [one for one in finished(busy) if not one.is_set_aside]
    assert len(counted) == len(finished(quiet)) and len(finished(busy)) > len(counted)


def test_a_campaign_may_take_the_machine_as_it_is(tmp_path: Path) -> None:
    world = Simulated(hog=FOREVER)
    folder = world.run(ignoring(), tmp_path)
    check_folder(folder)
    levels = finished(folder)
    assert not of_kind(read_events(folder).records, Waited) and len(levels) == 4
    disturbed = [one for one in levels if "Disturbed" in one.warnings]
    assert disturbed and all(one.is_valid and not one.is_set_aside for one in disturbed)
    assert "busy" not in capacity_of(folder).reason


def test_a_slow_probe_is_waited_for(tmp_path: Path) -> None:
    """What no counter shows: requests take half as long again, for 40 s."""
    world = Simulated(probing=lambda now: Probe(0.3 if 20 < now < 70 else 0.2, 0.2))
    folder = world.run(campaign(search=FIXED), tmp_path)
    check_folder(folder)
    waits = of_kind(read_events(folder).records, Waited)
    assert waits and all(one.became_quiet for one in waits)
    assert waits[0].reason == "a short request took 1.50 times its median (200 ms)"
    seconds = [one.spent_seconds for one in waits]
    assert seconds == sorted(seconds) and seconds[0] == 2.0, "longer each time"
    assert all(not one.is_set_aside for one in finished(folder))


def test_a_probe_that_stays_slow_ends_the_cell(tmp_path: Path) -> None:
    world = Simulated(probing=lambda now: Probe(0.3 if now > 20 else 0.2, 0.2))
    folder = world.run(campaign(), tmp_path)
    check_folder(folder)
    found = capacity_of(folder)
    assert found.status == "unresolved"
    assert found.reason.endswith("a short request took 1.50 times its median (200 ms)")


def test_a_slow_probe_names_who_is_there(tmp_path: Path) -> None:
    world = Simulated(hog=(27.0, 60.0), probing=lambda now: Probe(0.3 if now > 27 else 0.2, 0.2))
    folder = world.run(campaign(search=FIXED), tmp_path)
    assert (
        "its median (200 ms) beside `hog` (pid 7, 0."
        in [one.reason for one in of_kind(read_events(folder).records, Waited)][0]
    )


def test_of_several_slos_only_those_not_searched_to_the_end_are_busy(tmp_path: Path) -> None:
    slos = "slos = [\n" + "".join(
        f'  {{ name = "{name}", ttft_seconds = {limit}, tpot_seconds = 0.1, target = 0.9 }},\n'
        for name, limit in (("quick", 0.3), ("patient", 0.9))
    )
    world = Simulated(hog=(120.0, float("inf")))
    folder = world.run(campaign(budget=600, more=f"{slos}]"), tmp_path)
    check_folder(folder)
    (ended,) = of_kind(read_events(folder).records, CellFinished)
    reasons = {name: found.reason for name, found in ended.capacities.items()}
    assert list(reasons) == ["quick", "patient"]
    assert "busy" in reasons["patient"] and ended.capacities["patient"].status == "unresolved"
    for slo in slos_of(read_manifest(folder)):
        (cell,) = read_run(folder, slo).cells
        assert cell.capacity == ended.capacities[slo.name]


@pytest.mark.parametrize("appends", [6, 8, 9, 10, 12])
def test_a_runner_killed_on_a_busy_machine_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, appends: int
) -> None:
    """What was lost before the kill counts after it."""
    world = Simulated(hog=FOREVER)
    plan = campaign(more=f"wait_seconds = 60\n{SLO}")
    with killed_after(monkeypatch, appends):
        world.run(plan, tmp_path)
    (folder,) = tmp_path.iterdir()
    world.resume(folder)
    check_folder(folder)
    assert "busy" in capacity_of(folder).reason
    lost = [one for one in finished(folder) if one.is_set_aside]
    waits = of_kind(read_events(folder).records, Waited)
    spent = sum(one.spent_seconds for one in [*lost, *waits])
    assert spent < 60 + 2 * max(one.spent_seconds for one in lost) + 2


@pytest.mark.parametrize(
    ("line", "place"),
    [('disturbance = "maybe"', "$.disturbance"), ("wait_seconds = -1", "$.wait_seconds")],
)
def test_keys_that_cannot_be(line: str, place: str) -> None:
    with pytest.raises(BadCampaign) as problem:
        parse_campaign(f'name = "x"\nmodels = ["135m"]\n{line}\n')
    assert place in str(problem.value)

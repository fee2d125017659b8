"""Interruptions, losses, skips and kills of a campaign on a simulated server, and what is gone on
with.
"""

from __future__ import annotations

from io import StringIO
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from crossover.loadtests.campaign.campaign_file import Plan, parse_campaign
from crossover.loadtests.campaign.campaign_runner import run
from crossover.loadtests.campaign.campaign_text import show_run
from crossover.loadtests.campaign.cell_runner import MAX_SERVER_STARTS
from crossover.loadtests.campaign.progress import Progress
from crossover.loadtests.campaign.resume_state import CellState
from crossover.loadtests.campaign.time_budget import ESTIMATE_SECONDS
from crossover.loadtests.errors import (
    BadRunFolder,
    Incomplete,
    MachineBusy,
    ServerFailed,
    ServerLost,
    TargetUnusable,
)
from crossover.loadtests.host.machine_lock import machine_lock
from crossover.loadtests.records.journal_events import (
    Calibrated,
    CellFinished,
    CellSkipped,
    CellStarted,
    Elapsed,
    Interrupted,
    LevelAbandoned,
    LevelFinished,
    LevelStarted,
    RunStarted,
    of_kind,
)
from crossover.loadtests.records.run_folder import MANIFEST, REQUESTS, read_records
from tests.loadtests.campaign.checks import check_folder, kinds
from tests.loadtests.campaign.simulated import (
    Simulated,
    campaign,
    fails_once,
    interrupted,
    killed_after,
)

pytestmark = pytest.mark.usefixtures("capacities_of_few_requests")

TWO = '["135m", "360m"]'


def ended(folder: Path) -> list[str]:
    return [one.cell for one in of_kind(read_records(folder).events, CellFinished)]


def test_a_run_that_its_time_limit_ends_names_the_limit(tmp_path: Path) -> None:
    def fate(state: CellState, level: str) -> None:
        raise KeyboardInterrupt("the time limit of 90 s was reached")

    with pytest.raises(Incomplete, match="All finished measurements are kept"):
        Simulated(fate=fate).run(campaign(), tmp_path)
    (folder,) = tmp_path.iterdir()
    reasons = [event.reason for event in of_kind(read_records(folder).events, Interrupted)]
    assert reasons == ["the time limit of 90 s was reached"]


def test_an_interrupted_level_is_measured_again_under_another_name(tmp_path: Path) -> None:
    world = Simulated(fate=fails_once("#2.1", interrupted))
    folder = world.run(campaign(), tmp_path)
    check_folder(folder)
    run = read_records(folder)
    (abandoned,) = of_kind(run.events, LevelAbandoned)
    assert abandoned.level.endswith("#2.1") and abandoned.spent_seconds and len(world.opened) == 2
    names = {one.level.partition("#")[2]: one for one in of_kind(run.events, LevelStarted)}
    assert names["2.2"].plan.seed != names["2.1"].plan.seed
    assert abandoned.level not in run.finished_levels


def test_an_interrupted_burst_costs_no_cell(tmp_path: Path) -> None:
    world = Simulated(fate=fails_once("#burst.1.1", interrupted))
    check_folder(world.run(campaign(), tmp_path))


def test_a_level_that_never_ends_well_costs_the_cell_and_resume_tries_again(tmp_path: Path) -> None:
    def fate(state: CellState, level: str) -> None:
        if "#2." in level and state.key.startswith("smollm2-135m"):
            raise interrupted()

    world = Simulated(fate=fate)
    folder = world.run(campaign(1800, models=TWO), tmp_path)
    assert "skipped: smollm2-135m-fake" in world.output.getvalue()
    abandoned = of_kind(read_records(folder).events, LevelAbandoned)
    assert len(abandoned) == MAX_SERVER_STARTS and ended(folder) == ["smollm2-360m-fake"]
    world.fate = lambda state, level: None
    world.resume(folder)
    check_folder(folder)
    assert ended(folder) == ["smollm2-360m-fake", "smollm2-135m-fake"]


NOT_INSTALLED = """
[[engines]]
name = "absent"
command = "no-such-program {port}"
install = "make absent"
"""


def test_an_engine_that_is_not_installed_is_skipped_at_once_and_takes_no_time_of_the_others(
    tmp_path: Path,
) -> None:
    plan = campaign(search=f"confirm = 1{NOT_INSTALLED}")
    world = Simulated()
    folder = world.run(plan, tmp_path)
    events = read_records(folder).events
    (skipped,) = of_kind(events, CellSkipped)
    (started,) = of_kind(events, CellStarted)
    assert "needs the program 'no-such-program', not found. Install it: make absent" in str(
        skipped.reason
    )
    assert events.index(skipped) < events.index(started), "said before anything is measured"
    assert started.until_seconds == plan.campaign.budget_seconds
    assert world.opened == [started.cell]


def test_an_engine_that_has_been_installed_is_measured_by_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = Simulated()
    folder = world.run(campaign(search=f"confirm = 1{NOT_INSTALLED}"), tmp_path)
    program = tmp_path / "no-such-program"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    world.resume(folder, trust=True)
    events = read_records(folder).events
    (skipped,) = of_kind(events, CellSkipped)
    started = of_kind(events, CellStarted, skipped.cell)
    assert started and of_kind(events, Calibrated, skipped.cell)


@pytest.mark.parametrize("starts", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_cell_has_the_time_of_an_estimate_though_the_one_before_took_all_of_the_budget(
    tmp_path: Path, starts: int
) -> None:
    world = Simulated()

    def fate(state: CellState, level: str) -> None:
        if level.endswith("135m-fake#1.1"):  # answers that come minutes late
            world.now += 600

    world.fate = fate
    folder = world.run(campaign(600, models=TWO, starts=starts), tmp_path)
    first, second = of_kind(read_records(folder).events, CellStarted)[:2]
    assert (first.until_seconds, second.until_seconds) == (300 / starts, ESTIMATE_SECONDS)
    assert of_kind(read_records(folder).events, Calibrated, "smollm2-360m-fake")


def test_a_table_has_no_room_for_why_a_cell_was_skipped_and_a_line_below_it_has(
    tmp_path: Path,
) -> None:
    folder = Simulated().run(campaign(search=f"confirm = 1{NOT_INSTALLED}"), tmp_path)
    shown = StringIO()
    show_run(folder, Console(file=shown, width=200), levels=False)
    (row, line) = (one for one in shown.getvalue().splitlines() if "-absent" in one)
    assert row.split()[1:] == ["-", "-", "-", "skipped"]
    assert line.endswith("not found. Install it: make absent")


def test_a_lost_server_is_started_again_and_losing_all_skips_the_cell(tmp_path: Path) -> None:
    left = [MAX_SERVER_STARTS - 1]

    def fate(state: CellState, level: str) -> None:
        if left[0]:
            left[0] -= 1
            raise ServerLost("the server ended (SIGKILL)")

    world = Simulated(fate=fate)
    folder = world.run(campaign(), tmp_path / "some")
    assert len(world.opened) == MAX_SERVER_STARTS and ended(folder)
    left[0] = MAX_SERVER_STARTS
    with pytest.raises(Incomplete, match=f"Nothing was measured.*{MAX_SERVER_STARTS} times"):
        world.run(campaign(), tmp_path / "all")
    (folder,) = (tmp_path / "all").iterdir()
    (skipped,) = of_kind(read_records(folder).events, CellSkipped)
    assert f"interrupted {MAX_SERVER_STARTS} times; the last time: the server" in skipped.reason


@pytest.mark.parametrize(
    "error",
    [ServerFailed("it did not start"), TargetUnusable("it cannot be reached")],
)
def test_a_cell_that_cannot_be_served_is_skipped_and_the_next_is_measured(
    tmp_path: Path, error: Exception
) -> None:
    def opening(state: CellState) -> None:
        if "135m" in state.key:
            raise error

    world = Simulated(opening=opening)
    folder = world.run(campaign(models=TWO), tmp_path)
    check_folder(folder)
    (skipped,) = of_kind(read_records(folder).events, CellSkipped)
    assert skipped.reason == str(error) and "135m" in skipped.cell
    assert ended(folder) == ["smollm2-360m-fake"]
    world.opening = lambda state: None
    world.resume(folder)
    check_folder(folder)
    assert ended(folder) == ["smollm2-360m-fake", "smollm2-135m-fake"], "resume tries again"


def test_a_run_in_which_nothing_was_measured_is_not_complete(tmp_path: Path) -> None:
    def opening(state: CellState) -> None:
        raise ServerFailed("it did not start: giving up: no such model")

    world = Simulated(opening=opening)
    why = "Nothing was measured: .*no such model. To continue"
    with pytest.raises(Incomplete, match=why):
        world.run(campaign(), tmp_path)
    (folder,) = tmp_path.iterdir()
    with pytest.raises(Incomplete, match=why):
        world.resume(folder)
    assert kinds(folder)[-3:] == ["run_started", "cell_skipped", "interrupted"]
    world.opening = lambda state: None
    world.resume(folder)
    check_folder(folder)
    assert ended(folder) == ["smollm2-135m-fake"]


def test_a_killed_confirmation_is_gone_on_with_and_shown_as_it_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = Simulated()
    folder = world.run(campaign(search="confirm = 0"), tmp_path)
    with killed_after(monkeypatch, 5):  # the level has finished, and the cell has not
        world.resume(folder, confirm=True)
    assert kinds(folder)[-1] == "level_finished"
    out = StringIO()
    show_run(folder, Console(file=out, width=160))
    assert "not complete" in out.getvalue() and "confirmed" in out.getvalue()
    world.resume(folder)
    check_folder(folder)
    found = of_kind(read_records(folder).events, CellFinished)
    assert [one.capacity.is_confirmed for one in found] == [False, True]


def test_only_what_can_be_confirmed_is_offered_to_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that was killed after its single streams has no estimate, and simply goes on; one
    without a step-time model has ended without an estimate."""
    world = Simulated()
    with killed_after(monkeypatch, 5):
        world.run(campaign(), tmp_path / "killed")
    (folder,) = (tmp_path / "killed").iterdir()
    assert kinds(folder)[-1] == "level_finished"
    shown = StringIO()
    show_run(folder, Console(file=shown, width=160))
    assert "single stream" in shown.getvalue() and "--confirm" not in shown.getvalue()
    by_levels = Simulated(chunk=4).run(campaign(search="confirm = 0"), tmp_path / "by-levels")
    shown = StringIO()
    show_run(by_levels, Console(file=shown, width=500))
    assert f": crossover campaign resume {by_levels} --confirm" in shown.getvalue()
    assert "To confirm a rate, which takes about " in shown.getvalue()


def test_cells_are_measured_in_blocks_each_on_a_server_of_its_own(tmp_path: Path) -> None:
    world = Simulated()
    folder = world.run(campaign(1800, models=TWO, starts=2), tmp_path)
    check_folder(folder)
    parts = of_kind(read_records(folder).events, CellStarted)
    assert [one.block for one in parts] == [1, 1, 2, 2] and len({one.cell for one in parts}) == 2
    assert sorted(world.opened) == sorted(one.cell for one in parts)
    assert len(ended(folder)) == 2


def test_what_one_cell_leaves_of_the_budget_the_next_has(tmp_path: Path) -> None:
    folder = Simulated().run(campaign(900, models=TWO), tmp_path)
    first, second = of_kind(read_records(folder).events, CellStarted)
    events = read_records(folder).events
    measured, between = of_kind(events, LevelFinished, first.cell), of_kind(events, Elapsed)
    spent = sum(level.spent_seconds for level in measured)
    spent += sum(event.spent_seconds for event in between if event.cell == first.cell)
    assert first.until_seconds == 450.0
    spent += 5.0  # the server's start
    assert second.until_seconds == pytest.approx(900 - spent, abs=1.0)


def test_ctrl_c_ends_in_order_and_prints_how_to_resume(tmp_path: Path) -> None:
    world = Simulated(fate=fails_once("#2.1", KeyboardInterrupt))
    with pytest.raises(Incomplete, match="crossover campaign resume"):
        world.run(campaign(), tmp_path)
    (folder,) = tmp_path.iterdir()
    assert kinds(folder)[-2:] == ["level_abandoned", "interrupted"]
    world.resume(folder)
    check_folder(folder)
    assert kinds(folder).count("interrupted") == 1, "its own last word says so"


def test_another_machine_or_version_does_not_go_on(tmp_path: Path) -> None:
    world = Simulated(fate=fails_once("#1.1", KeyboardInterrupt))
    with pytest.raises(Incomplete):
        world.run(campaign(), tmp_path)
    (folder,) = tmp_path.iterdir()
    before = kinds(folder)
    world.facts = msgspec.structs.replace(world.facts, cpu_model="another CPU")
    with pytest.raises(BadRunFolder, match="started on another machine .*another CPU"):
        world.resume(folder)
    assert kinds(folder) == before
    text = (folder / MANIFEST).read_text()
    (folder / MANIFEST).write_text(text.replace('"format_version": 7', '"format_version": 4'))
    with pytest.raises(BadRunFolder, match="format_version 4"):
        world.resume(folder)


def killed_run(
    plan: Plan, out: Path, monkeypatch: pytest.MonkeyPatch, appends: int, world: Simulated
) -> Path:
    with killed_after(monkeypatch, appends):
        world.run(plan, out)
    (folder,) = out.iterdir()
    return folder


@pytest.mark.parametrize("every", [4, pytest.param(1, marks=pytest.mark.slow)])
def test_killed_after_every_append_and_gone_on_with(
    every: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whenever the runner dies: nothing that was finished is measured again, bursts neither, and
    the end is the same kind of run with the same answer. `every`: of so many appends, one is the
    last.
    """
    plan = campaign(400, models=TWO, search="confirm = 1")
    whole_folder = Simulated().run(plan, tmp_path / "whole")
    whole = kinds(whole_folder)
    assert whole.count("level_finished") >= 7
    answers = of_kind(read_records(whole_folder).events, CellFinished)
    for appends in range(1, len(whole), every):
        folder = killed_run(plan, tmp_path / str(appends), monkeypatch, appends, Simulated())
        assert kinds(folder) == whole[:appends], "what was appended is there, and no more"
        kept = list(read_records(folder).finished_levels)
        with open(folder / REQUESTS, "ab") as file:
            file.write(b'{"cell":"cut of')  # what a power cut leaves
        Simulated().resume(folder)
        check_folder(folder)
        run = read_records(folder)
        assert list(run.finished_levels)[: len(kept)] == kept
        assert len(of_kind(run.events, RunStarted)) == 2
        (stopped,) = of_kind(run.events, Interrupted)
        assert stopped.reason == "the runner was killed"
        found = of_kind(run.events, CellFinished)
        assert [one.cell for one in found] == [one.cell for one in answers]
        for one, other in zip(found, answers, strict=True):
            assert one.capacity.state == other.capacity.state
            assert one.capacity.estimated_rate == pytest.approx(
                other.capacity.estimated_rate, rel=0.25
            )


def test_a_disturbed_burst_is_left_out_of_the_step_times_after_a_kill_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = Simulated(speed=lambda now: 0.3 if world.hog[0] < now < world.hog[1] else 1.0)

    def fate(state: CellState, level: str) -> None:
        if level.endswith("#1.1"):
            world.hog = (world.now, 1e9)
        if level.endswith("#burst.1.1"):
            world.hog = (world.hog[0], world.now)

    world.fate = fate
    folder = killed_run(campaign(), tmp_path, monkeypatch, 9, world)
    bursts = [name for name in read_records(folder).finished_levels if "burst" in name]
    assert [name[-3:] for name in bursts] == ["1.1", "1.2"], "disturbed, and measured again"
    world.resume(folder)
    run = read_records(folder)
    assert any(name.endswith("#burst.2.1") for name in run.finished_levels)
    (made,) = of_kind(run.events, Calibrated)
    assert made.server is not None
    assert made.server.step_times.row_seconds == pytest.approx(world.row, rel=0.1)


def test_an_endpoint_that_is_not_there(tmp_path: Path) -> None:
    plan = parse_campaign('name = "x"\n[target]\nurl = "http://127.0.0.1:9"\nready_seconds = 0.5')
    with pytest.raises(TargetUnusable, match="127.0.0.1:9 cannot be reached"):
        Simulated().run(plan, tmp_path)
    assert not list(tmp_path.glob("*"))


def test_two_campaigns_at_once_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = Simulated()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))  # a machine of its own
    with machine_lock("runs/other"):
        with pytest.raises(MachineBusy, match=r"is running on this machine: runs/other \("):
            run(campaign(), tmp_path / "runs", Progress(world.output), dependencies=world.world)
        assert not (tmp_path / "runs").exists()
    run(campaign(), tmp_path / "runs", Progress(world.output), dependencies=world.world)


def test_a_full_disk_is_named_and_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(state: CellState, level: str) -> None:
        raise BadRunFolder("requests.jsonl cannot be written: No space left on device")

    world = Simulated(fate=full)
    with pytest.raises(BadRunFolder, match="No space left"):
        world.run(campaign(), tmp_path)
    (folder,) = tmp_path.iterdir()
    world.fate = lambda state, level: None
    world.resume(folder)
    check_folder(folder)

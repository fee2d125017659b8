"""Interruptions, losses, skips and kills of a campaign on a simulated server, and what is gone on
with.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from loadtests.campaign.bench import Level
from loadtests.campaign.campaign_file import Plan, parse_campaign
from loadtests.campaign.cell_runner import MOST_ATTEMPTS, MOST_SERVERS
from loadtests.campaign.progress import Progress
from loadtests.campaign.run_state import CellState
from loadtests.campaign.runner import run
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
from loadtests.records.events import (
    CellFinished,
    CellSkipped,
    Interrupted,
    LevelAbandoned,
    LevelFinished,
    RunFinished,
    RunResumed,
    SkipCause,
    of_kind,
)
from loadtests.records.old_run_folder import (
    REQUESTS,
    read_events,
    read_records,
)
from tests.loadtests.campaign.campaigns import (
    CAMPAIGN,
    SLO,
    campaign,
    started,
    two_cells,
)
from tests.loadtests.campaign.checks import check_folder, kinds
from tests.loadtests.campaign.simulated import (
    Simulated,
    fails_once,
    interrupted,
    killed_after,
)


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

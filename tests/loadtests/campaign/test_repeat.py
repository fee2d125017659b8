"""Runs measured again, level by level, on a simulated server."""

from __future__ import annotations

import itertools
from pathlib import Path

import msgspec
import pytest

from loadtests.campaign.campaign_file import Plan
from loadtests.campaign.run_state import repeat_in_turns, repeat_of
from loadtests.comparison.compare import compare
from loadtests.comparison.run_values import read_arm
from loadtests.errors import (
    BadRunFolder,
)
from loadtests.records import old_run_folder as run_folder
from loadtests.records.events import (
    Calibrated,
    of_kind,
)
from loadtests.records.lines import read_lines
from loadtests.records.old_run_folder import (
    REQUESTS,
    read_events,
    read_manifest,
    read_records,
)
from reports.write import Asked, write_report
from tests.loadtests.campaign.campaigns import (
    campaign,
    rates,
    started,
)
from tests.loadtests.campaign.checks import check_folder
from tests.loadtests.campaign.simulated import (
    Simulated,
    fails_once,
    interrupted,
)


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


def test_a_folder_without_levels_is_not_repeated(tmp_path: Path) -> None:
    with pytest.raises(BadRunFolder, match="holds no run"):
        repeat_of(tmp_path)

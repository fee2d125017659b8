"""Runs of one machine become one; those of others are not mixed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from reports.errors import NotComparable
from reports.merge import check_comparable, merged
from reports.run import read_run
from tests.reports.example_run import FACTS, RUNGS, SLO, cell_key, write_example_run
from tests.reports.small_runs import LARGE, SMALL, change_manifest, read_small


def test_runs_of_different_machines_are_not_mixed(tmp_path: Path) -> None:
    one = read_small(tmp_path / "one")
    other = read_small(tmp_path / "other", facts=FACTS | {"cpu_model": "Intel Xeon 6980P"})
    with pytest.raises(
        NotComparable, match="runs one and other differ in CPU: AMD EPYC 7B13 and Intel Xeon 6980P"
    ):
        check_comparable([one, other])
    more = read_small(tmp_path / "more", facts=FACTS | {"memory_total_bytes": 16 << 30})
    with pytest.raises(NotComparable, match=r"differ in memory: 8 GiB and 16 GiB"):
        check_comparable([one, more])
    slo = read_small(tmp_path / "slo", slo=msgspec.structs.replace(SLO, target=0.95))
    with pytest.raises(NotComparable, match=r"differ in their SLO: target 0\.9 and 0\.95"):
        check_comparable([one, slo])
    close = read_small(
        tmp_path / "close",
        facts=FACTS | {"memory_total_bytes": (8 << 30) - (20 << 20), "kernel": "6.2"},
    )
    check_comparable([one, close])


def test_runs_of_one_machine_become_one(tmp_path: Path) -> None:
    one = read_run(write_example_run(tmp_path / "one", SMALL))
    again = read_run(
        write_example_run(
            tmp_path / "again",
            {"smollm2-135m": (RUNGS["smollm2-135m"][0], (2.0, 2.4)), **LARGE},
            seed=8,
        )
    )
    both = merged([one, again])
    assert [cell.model for cell in both.cells] == ["smollm2-135m", "llama-3.2-3b"]
    cell = both.cells[0]
    assert cell.key == cell_key("smollm2-135m") and len(cell.levels) == len(
        one.cells[0].levels
    ) + len(again.cells[0].levels)
    assert cell.capacity is not None and cell.capacity.reason.startswith("4 levels")
    assert cell.held == 1.6 and cell.predicted is None
    assert both.requests == one.requests + again.requests and both.name == "one, again"


@pytest.mark.parametrize(
    ("key", "one", "other", "message"),
    [
        ("server", {"slots": 4}, {"slots": 64}, "differ in their server.slots: 4 and 64"),
        ("workloads", [{"name": "a"}], [{"name": "b"}], "differ in their workloads"),
    ],
)
def test_runs_of_other_settings_are_not_mixed(
    tmp_path: Path, key: str, one: Any, other: Any, message: str
) -> None:
    runs = []
    for name, value in (("one", one), ("other", other)):
        folder = write_example_run(tmp_path / name, SMALL, window=30.0)
        campaign = {"slo": msgspec.to_builtins(SLO), "seed": 7, key: value}
        runs.append(read_run(change_manifest(folder, campaign=campaign)))
    with pytest.raises(NotComparable, match=message):
        merged(runs)

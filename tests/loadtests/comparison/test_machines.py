"""Machines beside each other: divided by what they have, and refused where that says nothing."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from crossover import app
from loadtests.comparison.compare import compare
from loadtests.comparison.machines import Machines, Prices
from loadtests.comparison.run_values import CellValues, LoadValues, RunValues, Value
from loadtests.errors import LoadError, NotComparable
from loadtests.terminal.comparison import show_comparison
from tests.loadtests.comparison.worlds import CAMPAIGN, CELL, MACHINE, manifest
from tests.reports.example_run import RUNGS, write_example_run

SMALL = MACHINE | {"bandwidth_bytes_per_second": 40e9}
BIG = SMALL | {
    "cpu_model": "Xeon",
    "logical_cores": 16,
    "allowed_cores": list(range(16)),
    "cgroup_cores": 8.0,
    "bandwidth_bytes_per_second": 160e9,
}


def run(name: str, capacity: float, machine: dict[str, Any], **changes: Any) -> RunValues:
    """One stream has 20 tokens/s a request/s of capacity."""
    alone = LoadValues(None, frozenset({1}), {"TPOT p50": Value(0.05 / capacity)})
    cell = CellValues(
        "c",
        CELL | changes.pop("facts", {}),
        [alone],
        capacity,
        peak_tokens_per_second=100 * capacity,
        peak_watts=changes.pop("watts", None),
        peak_watts_by=changes.pop("by", "RAPL"),
    )
    return RunValues(manifest(name, machine=machine, **changes), [cell])


def by(found: Machines | None, quantity: str) -> dict[str, tuple[float, float]]:
    assert found is not None
    return {row.per: (row.first, row.second) for row in found.rows if row.quantity == quantity}


def test_each_quantity_is_divided_by_what_both_machines_have() -> None:
    small, big = run("a", 1.0, SMALL, watts=50.0), run("b", 3.0, BIG, watts=300.0)
    with pytest.raises(NotComparable, match="differ in CPU: EPYC and Xeon; .*--machines"):
        compare([small], [big])
    found = compare([small], [big], machines=Prices(0.1, 0.6)).machines
    capacity = by(found, "capacity")
    assert capacity["machine"] == (1.0, 3.0)
    assert capacity["core"] == (0.5, 3 / 8), "the quota counts where it is less than the cores"
    assert capacity["GB/s"] == pytest.approx((1 / 40, 3 / 160))
    assert capacity["dollar"] == pytest.approx((36000.0, 18000.0))
    assert "watt" not in capacity, "watts are those of the level with most tokens"
    assert by(found, "output tokens/s")["watt"] == pytest.approx((2.0, 1.0))
    assert by(found, "tokens/s of one stream")["machine"] == pytest.approx((20.0, 60.0))
    assert found is not None and found.notes == []
    assert ("CPU", "EPYC", "Xeon") in found.differ
    assert ("memory bandwidth", "40 GB/s", "160 GB/s") in found.differ
    assert not any(name == "memory" for name, _, _ in found.differ)


def test_what_is_not_known_is_left_out_and_said() -> None:
    found = compare([run("a", 1.0, SMALL)], [run("b", 3.0, MACHINE)], machines=Prices()).machines
    assert set(by(found, "output tokens/s")) == {"machine", "core"}
    assert found is not None
    assert [note.partition(":")[0] for note in found.notes] == [
        "a run has no measured memory bandwidth",
        "prices are not known",
    ]
    card = SMALL | {"gpus": [{"name": "NVIDIA L4"}]}
    gpu = compare([run("a", 1.0, SMALL)], [run("b", 9.0, card)], machines=Prices(0.1, 0.7)).machines
    assert set(by(gpu, "capacity")) == {"machine", "dollar"}
    assert gpu is not None and "a machine has a GPU" in gpu.notes[0]


def test_watts_of_other_devices_divide_nothing() -> None:
    one, other = run("a", 1.0, SMALL, watts=50.0), run("b", 3.0, BIG, watts=300.0, by="NVML")
    found = compare([one], [other], machines=Prices(0.1, 0.6)).machines
    assert set(by(found, "output tokens/s")) == {"machine", "core", "GB/s", "dollar"}
    assert found is not None
    assert found.notes == [
        "c: watts are by NVML in one run and by RAPL in another: not of the same devices, so "
        "nothing is divided by them"
    ]


def test_an_arm_is_of_one_machine() -> None:
    with pytest.raises(NotComparable, match="Xeon; an arm is of one machine: name them in"):
        compare([run("a", 1.0, SMALL), run("b", 3.0, BIG)], [run("c", 3.0, BIG)])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"facts": {"model": "llama-3.2-1b"}}, "differ in model"),
        ({"campaign": CAMPAIGN | {"workload": {"preset": "code"}}}, "differ in workload"),
        ({"campaign": CAMPAIGN | {"slo": {"name": "interactive"}}}, "differ in slo"),
    ],
)
def test_another_model_workload_or_slo_is_no_comparison(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(NotComparable, match=message):
        compare([run("a", 1.0, SMALL)], [run("b", 3.0, BIG, **changes)], machines=Prices())


def test_settings_of_the_server_may_differ_and_an_endpoint_has_no_facts() -> None:
    other = run("b", 3.0, BIG, campaign=CAMPAIGN | {"server": {"slots": 64}})
    found = compare([run("a", 1.0, SMALL)], [other], machines=Prices())
    assert found.machines is not None and any("server.slots differs" in one for one in found.notes)
    endpoint = run("b", 3.0, {"url": "http://x"})
    with pytest.raises(NotComparable, match="run b measured an endpoint: its machine is not known"):
        compare([run("a", 1.0, SMALL)], [endpoint], machines=Prices())


def test_the_verb_prints_the_machines(tmp_path: Path) -> None:
    rungs = {"smollm2-135m": RUNGS["smollm2-135m"]}
    folders = [str(write_example_run(tmp_path / name, rungs)) for name in "ab"]
    prices = ("--dollars-per-hour", "0.1", "--dollars-per-hour", "0.2")
    done = CliRunner().invoke(app, ["compare", "--machines", *folders, *prices])
    assert done.exit_code == 0, done.exception
    for part in ("output tokens/s", "dollar", "core", "0.5"):
        assert part in done.output, part
    for wrong in (prices[:2], ("--dollars-per-hour", "0", *prices[:2])):
        refused = CliRunner().invoke(app, ["compare", "--machines", *folders, *wrong])
        assert isinstance(refused.exception, LoadError)
        assert "--dollars-per-hour is given twice, above 0" in str(refused.exception)
    out = io.StringIO()
    found = compare([run("a", 1.0, SMALL)], [run("b", 3.0, BIG)], machines=Prices())
    show_comparison(found, Console(file=out, width=200))
    assert "the machines differ in CPU: EPYC and Xeon" in out.getvalue()

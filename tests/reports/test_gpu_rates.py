"""What GPUs of the list would hold of a run's requests: bands of the map, table, sentence, rows."""

from __future__ import annotations

import msgspec
import pytest

from models import formatting
from reports.charts.crossover_map import crossover_map, map_rows
from reports.elsewhere import gpu_capacities
from reports.findings import Crossover, crossover
from reports.numbers import RunNumbers
from reports.planning.hardware import device_named
from reports.render.elsewhere import gpu_errors, gpu_rates_table
from reports.render.tables import gpu_records
from reports.sentences import sentences

NAMES = ("NVIDIA T4", "NVIDIA L4", "NVIDIA H100 SXM")
RATE = 1.0


@pytest.fixture(scope="module")
def asked(run: RunNumbers) -> RunNumbers:
    """The example run with lengths on record."""
    campaign = {**run.manifest.campaign, "workload": {"preset": "chat", "scale": 0.1}}
    manifest = msgspec.structs.replace(run.manifest, campaign=campaign)
    return msgspec.structs.replace(run, manifest=manifest)


@pytest.fixture(scope="module")
def predicted(asked: RunNumbers) -> Crossover:
    devices = [device_named(name) for name in NAMES]
    return crossover(asked, RATE, gpu_capacities(asked, devices=devices))


def test_bands_go_up_from_what_the_cpu_holds_to_what_the_dearest_is_predicted_to(
    asked: RunNumbers, predicted: Crossover
) -> None:
    rows = map_rows(asked.cells, {}, RATE, predicted.capacities).machines
    assert {row["device"] for row in rows} == set(NAMES)
    for cell in asked.cells:
        own = [row for row in rows if row["key"] == cell.key]
        held = {one.name: one for one in predicted.capacities[cell.key]}
        below = None if cell.capacity is None else cell.capacity.high or cell.capacity.held or None
        for row in own:
            assert row["from"] == below
            below = row["estimate"]
            one = held[row["device"]]
            assert one.dollars_per_hour is not None
            assert (row["low"] or 0.0, below, row["high"]) == (one.low, one.estimate, one.high)
            assert formatting.rate_with_interval(one.estimate, one.low, one.high) in row["words"]
    chart = crossover_map(asked.cells, {}, RATE, predicted.capacities)
    assert chart is not None
    text = msgspec.json.encode(chart).decode()
    assert "NVIDIA H100 SXM (predicted)" in text and '"machines":[{' in text


def test_every_gpu_says_what_it_holds_and_costs_or_why_not(
    asked: RunNumbers, predicted: Crossover
) -> None:
    table = gpu_rates_table(predicted)
    assert len(table.rows) == len(NAMES) * len(predicted.takeovers)
    for row in table.rows:
        assert all(row)
    cell = predicted.takeovers[0].cell
    one = predicted.capacities[cell.key][-1]
    text = " ".join(table.rows[len(NAMES) - 1])
    assert one.ttft_seconds is not None and one.joules_per_token is not None
    for said in (
        formatting.seconds(one.ttft_seconds),
        formatting.significant(one.joules_per_token),
        formatting.size(one.memory_bytes_high),
    ):
        assert said in text
    assert any(
        "published rows" in line and "NVIDIA H100 SXM" in line for line in gpu_errors(predicted)
    )
    records = gpu_records(predicted)
    assert {record["estimate_per_second_predicted"] for record in records} >= {one.estimate}


def test_the_cheapest_that_holds_the_rate_in_nine_of_ten_is_named(
    asked: RunNumbers, predicted: Crossover
) -> None:
    takeover = predicted.takeover
    assert takeover is not None and takeover.surest is not None
    best = takeover.surest
    assert (best.low or 0.0) >= RATE
    text = next(text for text in sentences(asked, predicted) if text.startswith("A GPU"))
    assert f"is the {best.name}" in text and "in nine of ten cases" in text
    none = crossover(asked, 1e6, predicted.capacities).takeover
    assert none is not None and none.surest is None


def test_without_lengths_on_record_nothing_is_predicted(run: RunNumbers) -> None:
    assert gpu_capacities(run) == {}
    assert map_rows(run.cells).machines == []

"""Loading, formats, energy, cost and fallback: each number again by hand."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtests.metrics.energy import Energy
from loadtests.metrics.fallback import fallback_of
from loadtests.records.events import EngineChosen, EngineRating
from models import formatting
from models.formats import weight_bytes
from models.ladder import rung
from reports.accelerator.costs import (
    Comparison,
    break_even,
    comparisons_of,
    machines_for,
    priced,
)
from reports.accelerator.formats import formats_of
from reports.accelerator.joules import energies_of, estimates_of
from reports.accelerator.loading import LINK_BYTES_PER_SECOND, loadings_of
from reports.charts.costs import cost_chart, joule_chart
from reports.charts.fallback import fallback_chart
from reports.charts.formats import format_chart
from reports.numbers import RunNumbers, middle
from reports.planning import hardware
from reports.planning.machine_capacity import MachineCapacity
from reports.render.accelerator.compared import formats_section
from reports.render.accelerator.cost_lattice import cost_lattice
from reports.render.accelerator.loads import fallback_section, loading_section
from reports.render.accelerator.money import cost_section, cost_words, energy_section
from tests.tools.records import failed, request

L4 = MachineCapacity(device="NVIDIA L4", kind="predicted", low=20.0, estimate=30.0, high=45.0)


def with_cell(run: RunNumbers, **changes: object) -> RunNumbers:
    """The run with changes to its first cell."""
    first = msgspec.structs.replace(run.cells[0], **changes)
    return msgspec.structs.replace(run, cells=(first, *run.cells[1:]))


@pytest.fixture(scope="module")
def one(run: RunNumbers) -> Comparison:
    (found, *_) = comparisons_of(run, {run.cells[0].key: [L4]})
    return found


# ---------------------------------------------------------------- cost


@given(st.floats(0.01, 50.0), st.floats(0.01, 5.0), st.floats(0.01, 500.0), st.floats(0.01, 30.0))
def test_below_the_break_even_this_machine_is_no_dearer_and_above_it_is(
    held: float, price: float, other_held: float, other_price: float
) -> None:
    even = break_even((held, price), (other_held, other_price))

    def dearer(rate: float) -> bool:
        return machines_for(rate, held) * price > machines_for(rate, other_held) * other_price * (
            1 + 1e-9
        )

    if even is None:
        rates = [held * count * 1.0001 for count in range(1, 300)]
        assert not any(dearer(rate) for rate in rates)
        return
    assert dearer(even * (1 + 1e-6) + 1e-6 * held)
    below = [even * part / 50 for part in range(1, 50) if even * part]
    assert not any(dearer(rate) for rate in below)


def test_a_rate_costs_the_machines_that_hold_it(one: Comparison, run: RunNumbers) -> None:
    here, gpu = one.here, one.there[0]
    device = next(each for each in hardware.gpus() if each.name == "NVIDIA L4")
    assert here.held == run.cells[0].held and here.low is not None and here.low <= here.held
    rented = hardware.device_named("AMD EPYC 9654 (Genoa, 96c)")
    assert here.dollars_per_hour == pytest.approx(2 * (rented.dollars_per_hour or 0.0) / 96)
    assert (gpu.held, gpu.dollars_per_hour, gpu.watts) == (
        30.0,
        device.dollars_per_hour,
        device.watts,
    )
    assert [side.machines(31.0) for side in (here, gpu)] == [math.ceil(31.0 / here.held), 2]
    dollars = 2 * (device.dollars_per_hour or 0.0)
    assert gpu.dollars(31.0) == pytest.approx(dollars)
    per_token = dollars / 3600 / (31.0 * one.output_tokens)
    assert gpu.dollars_per_million(31.0, one.output_tokens) == pytest.approx(per_token * 1e6)
    joules = 2 * (device.watts or 0.0) / (31.0 * one.output_tokens)
    assert gpu.joules_per_token(31.0, one.output_tokens) == pytest.approx(joules)
    assert here.joules_per_token(1.0, one.output_tokens) is None, (
        "no TDP is taken for a measurement"
    )
    _, even = one.soonest
    low, high = one.even_interval
    assert even is not None and low is not None and high is not None and low <= even <= high
    assert f"up to {formatting.requests(even)}" in cost_words(one)
    assert "predicted to hold" in cost_words(one)


def test_what_one_holds_is_in_one_unit_and_never_more_than_was_measured(one: Comparison) -> None:
    slow = msgspec.structs.replace(one.here, held=5.59 / 60, low=4.19 / 60, high=0.2)
    assert slow.holds == "5.5/min (4.1–12)"
    assert msgspec.structs.replace(slow, low=None, kind="predicted").holds == "5.6/min"


def test_prices_and_rates_that_are_not_known_are_no_costs(run: RunNumbers, one: Comparison) -> None:
    unpriced = priced(one, None, None)
    assert unpriced.here.dollars(1.0) is None and unpriced.soonest[1] is None
    assert "price of a machine like this is not known" in cost_words(unpriced)
    nothing = MachineCapacity(device="NVIDIA L4", kind="predicted", reason="too small")
    (alone, *_) = comparisons_of(run, {run.cells[0].key: [nothing]})
    assert alone.there == () and "per 1M output tokens when it is full" in cost_words(alone)
    cheap = priced(one, 0.001, 1000.0)
    assert "cost less than any GPU at every rate" in cost_words(cheap)
    dear = priced(one, 20.0, None)
    assert "costs less from the first request on" in cost_words(dear)
    held = [cell for cell in run.cells if cell.held]
    assert len(comparisons_of(run, {})) == len(held)


def test_chart_table_and_lattice_hold_the_same_costs(one: Comparison) -> None:
    spec = cost_chart(one)
    assert spec is not None
    for row in spec["datasets"]["costs"]:
        side = one.there[0] if row["side"] == "NVIDIA L4" else one.here
        assert row["dollars"] == side.dollars(row["rate"])
    joules = joule_chart(one)
    assert joules is not None
    for row in joules["datasets"]["joules"]:
        assert row["side"] == "NVIDIA L4" and row["source"] == "estimate from TDP"
        assert row["joules"] == one.there[0].joules_per_token(row["rate"], one.output_tokens)
    section = cost_section([one])
    assert len(section.table.rows) == 2 * len(one.shown_rates)
    assert section.finding == cost_words(one)
    data = cost_lattice([one], {one.cell.key: [0.5, one.here.held]})
    assert data["prices"][data["own"]]["value"] == one.here.dollars_per_hour
    (cell,) = data["cells"]
    alone = msgspec.structs.replace(one, there=())
    for point, of in [(cell["own"], one), *((point, alone) for point in cell["points"])]:
        for price, words, even in zip(data["prices"], point["words"], point["even"], strict=True):
            moved = priced(of, price["value"], point["held"])
            assert words == cost_words(moved)
            assert [each["rate"] for each in even] == ([moved.soonest[1]] if even else [])


# ---------------------------------------------------------------- loading, formats


def test_loading_pays_after_the_requests_that_it_costs(run: RunNumbers) -> None:
    (found, *_) = loadings_of(with_cell(run, loads=(4.0, 2.0, 3.0)))
    spec = rung("smollm2-135m").spec
    assert (found.seconds, found.low, found.high) == (3.0, 2.0, 4.0)
    assert found.weight_bytes == weight_bytes(spec, "Q4_0")
    single = run.cells[0].single_stream
    assert single is not None
    request_seconds = middle(single.summary.latencies.e2e)
    assert found.request_seconds == request_seconds and request_seconds is not None
    count = found.requests_for_a_tenth
    assert count is not None and 3.0 / (3.0 + count * request_seconds) <= 0.1
    assert 3.0 / (3.0 + (count - 1) * request_seconds) > 0.1
    gpu = found.on_gpu
    assert gpu is not None and gpu.transfer_seconds == found.weight_bytes / LINK_BYTES_PER_SECOND
    assert gpu.pays_from is not None
    gain = request_seconds - gpu.request_seconds
    assert gpu.pays_from * gain >= gpu.transfer_seconds > (gpu.pays_from - 1) * gain
    section = loading_section([found])
    assert "is loaded in 3.0 s" in section.finding and "a CPU has none" in section.finding


def test_formats_of_a_model_stand_side_by_side(run: RunNumbers) -> None:
    rating = EngineRating(
        backend="onnx",
        weight_format="dynamic-int8",
        prompt_tokens_per_second=900.0,
        decode_tokens_per_second=40.0,
        measured_on="smollm2-135m",
    )
    own = EngineRating(backend="llama_cpp", weight_format="Q4_0", is_chosen=True)
    choice = EngineChosen(
        cell="c",
        backend="llama_cpp",
        weight_format="Q4_0",
        reason="",
        engines=[own, rating],
        spent_seconds=1.0,
    )
    rows = formats_of(with_cell(run, choice=choice))
    assert [(row.weight_format, row.cell is None) for row in rows] == [
        ("Q4_0", False),
        ("dynamic-int8", True),
    ]
    assert rows[0].kl_nats == 0.0143 and rows[1].decode_tokens_per_second == 40.0
    section = formats_section(rows)
    assert "scaled" in section.table.rows[1][-1] and section.table.rows[1][-2] == "not measured"
    spec = format_chart(rows)
    assert spec is not None
    (shown,) = spec["datasets"].values()
    assert [row["speed"] for row in shown] == [row.decode_tokens_per_second for row in rows]
    assert formats_of(run) == []


# ---------------------------------------------------------------- energy, fallback


def test_energy_is_of_the_tokens_that_arrived(run: RunNumbers) -> None:
    assert energies_of(run) == []
    level = run.cells[0].levels[-1]
    seconds = level.summary.window.seconds
    measured = msgspec.structs.replace(
        level, energy=Energy(cpu_joules=5 * seconds, seconds=seconds)
    )
    changed = with_cell(run, levels=(*run.cells[0].levels[:-1], measured))
    (found,) = energies_of(changed)
    speed = level.summary.throughput.output_tokens_per_second
    assert found.watts == pytest.approx(5.0) and speed is not None
    assert found.joules_per_token == pytest.approx(5.0 / speed)
    section = energy_section([found], changed)
    assert "by RAPL" in section.finding and section.kinds == ("measured here",)
    listed = msgspec.structs.replace(
        run.manifest, server_facts=run.facts | {"cpu_model": "AMD EPYC 9654 96-Core Processor"}
    )
    (estimate, *_) = estimates_of(msgspec.structs.replace(run, manifest=listed))
    assert estimate.watts == pytest.approx(360 * 2 / 192)
    tokens = estimate.level.summary.throughput.output_tokens_per_second
    assert estimate.joules_per_token == pytest.approx(estimate.watts / (tokens or 0.0))
    assert estimates_of(run) == [], "an EPYC that is not in the list"
    told = with_cell(run, not_sampled={"cpu_watts": "no counters"})
    assert "not measured (no counters)" in energy_section([], told).finding
    (here, *_) = comparisons_of(changed, {})
    assert here.here.watts == pytest.approx(5.0)


def test_a_fallback_is_told_by_what_users_felt(run: RunNumbers, tmp_path: Path) -> None:
    records = [request(n, float(n), ttft=0.1, gap=0.01, backend="torch/cuda") for n in range(9)]
    records += [failed(9, 9.0, "stream_error")]
    records += [request(n, float(n), ttft=15.0 - n, backend="llama_cpp/cpu") for n in (10, 11)]
    records += [request(n, float(n), ttft=0.8, backend="llama_cpp/cpu") for n in range(16, 24)]
    change = fallback_of(records)
    assert change is not None
    section = fallback_section(with_cell(run, fallbacks=(change,)))
    assert "llama_cpp/cpu took over from torch/cuda within 6.0 s" in section.finding
    assert "of 3 requests due meanwhile 1 failed" in section.finding
    assert "TTFT: 100 ms before, 4.5 s during and 800 ms after" in section.finding
    assert [row[3] for row in section.table.rows] == ["before", "during", "after"]
    assert section.table.rows[1][7] == "5.0 s"
    spec = fallback_chart(change)
    assert spec is not None
    shown = next(rows for rows in spec["datasets"].values() if len(rows) == len(records))
    assert sum(row["outcome"] == "failed" for row in shown) == 1

"""Numbers of the page's second half, each computed again by hand from what the run holds."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from loadtests.records.schema import EngineTime
from loadtests.simulation.step_time import StepLaw, StepObservation
from models.formats import weight_bytes
from models.ladder import rung
from reports.accelerator.batching import Batching, batching_of
from reports.accelerator.peaks import Peaks, peaks_of, work_of
from reports.accelerator.phases import phases_of
from reports.charts.batching import batch_chart
from reports.findings import crossover
from reports.numbers import CellNumbers, RunNumbers
from reports.render.accelerator.batch_lattice import batch_lattice
from reports.render.accelerator.sections import sections_of
from reports.render.accelerator.speed import best_words, phases_words

STEPS = [StepObservation(0, n, 0, 0.01 + 0.002 * n) for n in (8, 100, 120)]
STEPS += [StepObservation(1, 0, 60, 0.02, (0.018, 0.02, 0.02, 0.022))]
STEPS += [StepObservation(4, 0, 200, 0.04, (0.04, 0.041), burst=1)]
STEPS += [StepObservation(8, 0, 480, 0.1, (0.1, 0.1), burst=1)]
LAW = StepLaw(base_seconds=0.01, row_seconds=0.01, kv_token_seconds=1e-5)


@pytest.fixture(scope="module")
def seen(run: RunNumbers) -> RunNumbers:
    """The example run with the steps above for its smallest model, on a machine with both peaks."""
    manifest = msgspec.structs.replace(
        run.manifest, server_facts=run.facts | {"gemm_flops_per_second": 1e11}
    )
    level = msgspec.structs.replace(
        run.cells[0].levels[-1],
        engine_time=EngineTime(steps=50, device_seconds=9.0, host_seconds=1.0),
    )
    first = msgspec.structs.replace(
        run.cells[0], observations=tuple(STEPS), law=LAW, levels=(*run.cells[0].levels[:-1], level)
    )
    others = (msgspec.structs.replace(one, observations=(), law=None) for one in run.cells[1:])
    return msgspec.structs.replace(run, manifest=manifest, cells=(first, *others))


@pytest.fixture(scope="module")
def cell(seen: RunNumbers) -> CellNumbers:
    return seen.cells[0]


@pytest.fixture(scope="module")
def batching(seen: RunNumbers) -> Batching:
    (found,) = batching_of(seen)
    return found


def test_shares_are_operations_and_bytes_of_the_shape_over_the_peaks(
    seen: RunNumbers, cell: CellNumbers
) -> None:
    prefill, alone, full = phases_of(seen)
    assert [one.name for one in (prefill, alone, full)] == [
        "prefill",
        "decode, one stream",
        "decode, all slots",
    ]
    spec = rung("smollm2-135m").spec
    speeds = sorted(one.prefill_tokens / one.seconds for one in STEPS[1:3])
    assert prefill.count == 2 and prefill.tokens_per_second == pytest.approx(np.mean(speeds))
    assert (alone.tokens_per_second, full.tokens_per_second) == (50.0, 80.0)
    weights = weight_bytes(spec, "Q4_0")  # a tied head: all of it is read
    read = weights + 60 * spec.kv_bytes_per_token("fp16")
    assert alone.bandwidth_share == pytest.approx(read / 0.02 / 18.4e9, rel=1e-6)
    assert alone.compute_share == pytest.approx(spec.flops_per_token(60) / 0.02 / 1e11, rel=1e-6)
    head = spec.vocabulary * spec.hidden
    body = 2 * (spec.matrix_parameters - head) * 110 + 2 * head
    inside = 4 * spec.layers * spec.heads * spec.head_dim * 110 * 110 / 2
    expected = (body + inside) / 110 * prefill.tokens_per_second / 1e11
    assert prefill.compute_share == pytest.approx(expected)
    assert phases_words([prefill, alone]).startswith("Prefill is bound by arithmetic")
    assert "not measured" in phases_words([prefill])


def test_what_a_machine_did_not_tell_is_no_share(seen: RunNumbers, cell: CellNumbers) -> None:
    facts = {key: value for key, value in seen.facts.items() if "per_second" not in key}
    bare = msgspec.structs.replace(
        seen, manifest=msgspec.structs.replace(seen.manifest, server_facts=facts)
    )
    assert all(one.compute_share is None for one in phases_of(bare))
    (found,) = batching_of(bare)
    assert found.roof_seconds(4, 100) is None and found.best(0.05, 50) is not None
    strange = msgspec.structs.replace(cell, url="http://elsewhere")
    assert peaks_of(seen, strange) == Peaks()
    assert work_of(msgspec.structs.replace(cell, spec=None), 1, 0, 0) is None
    gpu = {"gpus": [{"name": "NVIDIA L4"}]}
    there = msgspec.structs.replace(
        seen, manifest=msgspec.structs.replace(seen.manifest, server_facts=gpu)
    )
    listed = peaks_of(there, msgspec.structs.replace(cell, device="gpu"))
    assert listed.bytes_per_second == 300e9 and listed.source == "published"


def test_the_best_batch_is_the_quickest_that_keeps_the_limit(batching: Batching) -> None:
    """By hand: a step of n rows takes 10 ms + n (10 ms + context x 10 us)."""
    assert [point.rows for point in batching.points] == [1, 4, 8] and batching.most == 8
    one, four, _ = batching.points
    assert (one.seconds, one.count) == (0.02, 4) and one.low < 0.02 < one.high
    assert four.context_tokens == 50
    for limit, context, rows in ((0.055, 50, 4), (0.055, 500, 3), (None, 50, 8), (0.02, 50, None)):
        best = batching.best(limit, context)
        assert (None if best is None else best.rows) == rows
        if best is not None:
            step = 0.01 + best.rows * (0.01 + context * 1e-5)
            assert best.seconds == pytest.approx(step)
            assert best.gain == pytest.approx(best.rows / step * (0.02 + context * 1e-5))
    assert "keeps no batch within 20 ms a token" in best_words(batching, 0.02, 50)
    assert "4 streams: 77 tokens/s" in best_words(batching, 0.055, 50)
    assert "8 streams, the most that were seen" in best_words(batching, None, 50)


def test_the_page_looks_up_what_the_law_says(batching: Batching) -> None:
    limits = (0.03, 0.055, None)
    data = batch_lattice([batching], limits)
    assert [one["value"] for one in data["contexts"]] == [60, 128, 256, 512, 1024, 2048]
    (cell,) = data["cells"]
    for own, point in zip((60, 128, 256), cell["points"], strict=False):
        law = [row for row in point["lines"] if row["line"] == "step law"]
        assert [row["seconds"] for row in law] == [
            batching.law_seconds(rows, own) for rows in range(1, 9)
        ]
        roof = [row for row in point["lines"] if row["line"] == "roofline"]
        assert [row["seconds"] for row in roof] == [
            batching.roof_seconds(rows, own) for rows in range(1, 9)
        ]
        for limit, best, words in zip(limits, point["best"], point["words"], strict=True):
            found = batching.best(limit, own)
            expected = [] if found is None else [found.rows]
            assert [row["rows"] for row in best] == expected
            assert words == best_words(batching, limit, own)


def test_the_chart_shows_the_points_that_were_measured(batching: Batching) -> None:
    spec = batch_chart(batching, 0.055)
    (shown,) = (rows for name, rows in spec["datasets"].items() if name.startswith("data-"))
    assert [(row["rows"], row["speed"]) for row in shown] == [(1, 50.0), (4, 100.0), (8, 80.0)]
    assert spec["datasets"]["best"] == [{"rows": 4, "speed": pytest.approx(4 / 0.0524)}]
    assert spec["datasets"]["limit"][-1] == {"rows": 8, "speed": 8 / 0.055}


def test_the_sections_say_what_was_not_measured(seen: RunNumbers, run: RunNumbers) -> None:
    by_slug = {one.slug: one for one in sections_of(seen, crossover(seen))}
    host = by_slug["host"]
    assert "10 % of its busy time at most (SmolLM2-135M, " in host.finding
    assert [row[-1] for row in host.table.rows] == ["10 %"]
    bare = [msgspec.structs.replace(one, observations=(), law=None) for one in run.cells]
    empty = msgspec.structs.replace(run, cells=tuple(bare))
    nothing = {one.slug: one for one in sections_of(empty, crossover(empty))}
    for slug in ("phases", "batch", "host", "formats", "energy", "fallback"):
        one = nothing[slug]
        assert "not measured" in one.finding and not one.table.rows and not one.kinds

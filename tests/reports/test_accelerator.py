"""Numbers of the page's second half, each computed again by hand from what the run holds."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import msgspec
import numpy as np
import pytest

from loadtests.records.old_run_folder import EVENTS, SAMPLES
from loadtests.records.schema import EngineTime
from loadtests.simulation.step_time import StepLaw, StepObservation
from models.formats import weight_bytes
from models.ladder import rung
from reports.accelerator.batching import Batching, batching_of
from reports.accelerator.loading import loadings_of
from reports.accelerator.peaks import Peaks, peaks_of, work_of
from reports.accelerator.phases import phases_of
from reports.charts.batching import batch_chart
from reports.findings import crossover
from reports.numbers import CellNumbers, RunNumbers
from reports.render.accelerator.batch_lattice import batch_lattice
from reports.render.accelerator.loads import loading_words
from reports.render.accelerator.memory import memory_section
from reports.render.accelerator.sections import sections_of
from reports.render.accelerator.speed import best_words, phases_words
from reports.render.document import document
from reports.run import read_run

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


def test_a_cpus_memory_is_shown_by_what_holds_it(run: RunNumbers) -> None:
    section = memory_section(run)
    assert [one.title for one in section.table.columns[1:]] == [
        *("weights", "KV cache", "workspace", "RSS")
    ]
    known = [cell for cell in run.cells if cell.memory.measured_weight_bytes]
    assert len(section.table.rows) == len(known) > 2
    assert {row[3] for row in section.table.rows} == {"110 MiB"}
    assert "of KV cache and 110 MiB of workspace." in section.finding


def test_a_load_on_a_gpu_is_shown_part_by_part(folder: Path, tmp_path: Path) -> None:
    there = Path(shutil.copytree(folder, tmp_path / "run"))
    events = [json.loads(line) for line in (there / EVENTS).read_text().splitlines()]
    ready = next(one for one in events if one["kind"] == "cell_ready")
    parts = {"weight_bytes": 1 << 30, "kv_bytes": 2 << 30, "graph_bytes": 3 << 20}
    parts |= {"context_bytes": None, "allocated_bytes": 4 << 30, "reserved_bytes": 5 << 30}
    times = {"read_seconds": 6.0, "transfer_seconds": 0.7, "first_step_seconds": 0.8}
    doubt = {"valid": False, "reasons": ["context: NVML does not say what this GPU holds"]}
    ready["info"] |= {"device": "gpu", "gpu": {**parts, **times, **doubt}}
    (there / EVENTS).write_text("".join(json.dumps(one) + "\n" for one in events))
    samples = [json.loads(line) for line in (there / SAMPLES).read_text().splitlines()]
    first = next(one for one in samples if one["cell"] == ready["cell"])
    first["gpu_memory_bytes"] = 9 << 30
    (there / SAMPLES).write_text("".join(json.dumps(one) + "\n" for one in samples))
    run = read_run(there)
    table = memory_section(run).table
    cell = next(cell for cell in run.cells if cell.gpu is not None)
    names = [one.title for one in table.columns]
    row, other = (dict(zip(names, row, strict=True)) for row in table.rows[:2])
    assert [row[name] for name in names[1:4]] == ["1 GiB", "2 GiB", "not measured"]
    assert [row[name] for name in names[5:]] == [
        *("3 MiB", "not measured", "4 GiB", "5 GiB", "9 GiB", "6.0 s", "700 ms"),
        *("not measured", "800 ms", "no: context: NVML does not say what this GPU holds"),
    ]
    assert other["graphs"] == "none" and other["workspace"] == "110 MiB"
    assert "transfer on its own: 700 ms" in loading_words(
        [one for one in loadings_of(run) if one.cell.gpu]
    )
    (shown,) = (one for one in document(run, crossover(run)).cells if one.key == cell.key)
    assert shown.gpu == cell.gpu and shown.memory.measured_gpu_bytes == 9 << 30

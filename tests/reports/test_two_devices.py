"""A run of a machine with a GPU: docs/results/h200, an H200 beside 16 cores of a Xeon.

The golden values are those that were read by hand from the run when it was measured. Every
sentence, table and chart is asserted for its device.
"""

from __future__ import annotations

import csv
import io
import json
import math
import re
import shutil
from itertools import combinations
from pathlib import Path

import msgspec
import numpy as np
import pytest
from typer.testing import CliRunner

from crossover import cli
from crossover.loadtests.capacity.calibration_bursts import seconds_outside_engine
from crossover.loadtests.comparison.compare_runs import compare, read
from crossover.loadtests.errors import NotComparable
from crossover.loadtests.records.journal_events import Capacity
from crossover.loadtests.records.run_folder import EVENTS
from crossover.models import formatting
from crossover.reports.answers import headline, slo_sliders
from crossover.reports.answers.answer_table import answer_row, columns_of, side_heads
from crossover.reports.answers.cheapest_gpu import predicted_here
from crossover.reports.answers.check_conditions import check_condition
from crossover.reports.answers.model_answers import ModelAnswer, answers_of
from crossover.reports.answers.report_warnings import alerts_of, warnings_of
from crossover.reports.chart_style import DARK, SERIES
from crossover.reports.devices.device_capacity import (
    EXPECTED_STEPS,
    Service,
    machine_of,
    simulation_of,
)
from crossover.reports.devices.device_catalog import device_named
from crossover.reports.devices.server_step_times import CONSTANTS
from crossover.reports.errors import ReportError
from crossover.reports.plan.plan_costs import CostPlan, make_plan
from crossover.reports.plan.plan_machines import candidates_of, question_of_tables
from crossover.reports.render import first_screen_png, json_and_csv, markdown
from crossover.reports.render.export_run import export_run
from crossover.reports.render.plan_text import as_text, choice_sentence
from crossover.reports.report_data import read_report
from crossover.reports.sections.crossover_map import crossover_map
from crossover.reports.sections.levels_table import levels_table
from crossover.reports.sections.memory import PARTS, memory
from crossover.serving.capacity.simulated_capacity import Lengths, Server
from tests.bench.device_fit.own_runs import table_of
from tests.reports.runs import H200_RUN, h200, h200_page, shown

HEADLINE = (
    "The CPU (16 cores of an Intel Xeon) serves up to llama-3.2-1b at an estimated 1.6 requests/s; "
    "above that, and for llama-3.1-8b, this machine's NVIDIA H200 takes over (llama-3.1-8b: 23/s "
    "confirmed, about 31/s estimated)."
)


def test_the_headline_states_the_cpus_capacity_and_the_takeover_by_the_own_gpu() -> None:
    data, answers, _ = h200()
    assert headline.headline(answers, data) == HEADLINE
    assert len(HEADLINE.split()) <= 40


def test_a_run_that_was_interrupted_after_its_last_capacity_lacks_nothing_on_the_first_screen() -> (
    None
):
    data, _, _ = h200()
    (warning,) = [one for one in warnings_of(data) if one.code == "NotFinished"]
    assert "did not measure llama-3.1-8b int8 on the CPU to the end" in warning.text
    assert alerts_of(data) == []


def test_a_row_has_the_cpu_and_the_gpu_beside_each_other_each_with_its_own_figures() -> None:
    data, answers, _ = h200()
    assert [column.key for column in columns_of(data)] == [
        "model",
        *(
            f"{side}-{name}"
            for side in ("cpu", "gpu")
            for name in ("single_stream", "confirmed", "estimated", "engine")
        ),
    ]
    assert dict(side_heads(data)) == {
        "cpu": "CPU: 16 cores of an Intel Xeon, price not known",
        "gpu": "GPU: NVIDIA H200, list price $7.91/h",
    }
    texts = [[cell.text for cell in answer_row(one, data)] for one in answers]
    assert texts == [
        [
            *(
                "llama-3.2-1b",
                "160 ms, 22 ms: met",
                "none confirmed",
                "1.6/s (1.3–1.9)",
                "onnx int8, 64 slots",
            ),
            *("18 ms, 1.4 ms: met", "47/s", "66/s (59–73)", "torch bf16, 64 slots"),
        ],
        [
            *(
                "llama-3.1-8b",
                "192 ms, 121 ms: missed",
                "misses the SLO unloaded",
                "–",
                "onnx int8, 64 slots",
            ),
            *("20 ms, 5.2 ms: met", "23/s", "31/s (27–34)", "torch bf16, 64 slots"),
        ],
    ]
    grades = [[cell.grade for cell in answer_row(one, data)] for one in answers]
    both = ["confirmed", "estimated"]
    assert grades[0] == [None, None, None, "estimated", None, None, *both, None]
    assert grades[1] == [None, None, None, None, None, None, *both, None]


def test_the_golden_values() -> None:
    _, answers, _ = h200()
    one_b, eight_b = answers
    assert one_b.gpu and one_b.cpu and eight_b.gpu and eight_b.cpu
    for cell, ttft, tpot in (
        (one_b.gpu, 0.0111, 0.00137),
        (one_b.cpu, 0.0564, 0.0217),
        (eight_b.gpu, 0.0188, 0.00517),
        (eight_b.cpu, 0.192, 0.121),
    ):
        assert cell.single_stream is not None
        assert cell.single_stream.ttft_seconds == pytest.approx(ttft, rel=0.01)
        assert cell.single_stream.tpot_seconds == pytest.approx(tpot, rel=0.01)
    assert (one_b.gpu.confirmed_rate, eight_b.gpu.confirmed_rate) == (47.7, 23.0)
    assert one_b.cpu.confirmed_rate is None and one_b.cpu.estimated_rate == pytest.approx(
        1.6, rel=0.01
    )
    assert eight_b.cpu.capacity is not None and eight_b.cpu.capacity.state == "misses_slo_unloaded"
    assert one_b.gpu.estimated_rate == pytest.approx(65.6, rel=0.01)
    assert eight_b.gpu.estimated_rate == pytest.approx(30.6, rel=0.01)


def test_memory_of_a_configuration_is_that_of_its_device() -> None:
    _, answers, sections = h200()
    for cell, predicted, measured in (
        (answers[0].gpu, 5.60e9, 5.67e9),
        (answers[1].gpu, 25.85e9, 25.87e9),
        (answers[1].cpu, 26.3e9, 8.84e9),  # a CPU's KV cache is not touched before it is used
    ):
        assert cell is not None
        assert cell.memory.predicted_bytes == pytest.approx(predicted, rel=0.002)
        assert cell.memory.measured_bytes == pytest.approx(measured, rel=0.002)
    memory = sections["memory"]
    text = "llama-3.1-8b bf16 takes 24.09 GiB of GPU memory, where 24.08 GiB was predicted"
    assert memory.sentence.startswith(f"{text}; it fits in a GPU with 32 GB.")
    assert "takes 8.23 GiB on the CPU" in memory.sentence
    assert [row[1] for row in memory.table.rows] == ["CPU", "GPU", "CPU", "GPU"]
    assert [row[-1] for row in memory.table.rows if row[1] == "GPU"] == ["+1.3 %", "+0.1 %"]
    assert [chart.slug for chart in memory.charts] == ["memory-cpu", "memory-gpu"]
    assert "24 GB" in json.dumps(memory.charts[1].spec) and "on the GPU" in memory.charts[1].label
    assert "measured peak" in json.dumps(memory.charts[0].spec), "the legend explains the ticks"
    assert "Gray lines" in memory.note


@pytest.mark.parametrize("colors", [SERIES, tuple(PARTS.values())])
def test_colors_of_a_chart_differ_on_dark_pages_too(colors: tuple[str, ...]) -> None:
    dark = [DARK.get(color, color) for color in colors]
    parts = [[int(color[at : at + 2], 16) for at in (1, 3, 5)] for color in dark]
    for one, other in combinations(parts, 2):
        assert math.dist(one, other) > 40, (one, other)


def test_a_chart_of_batches_has_a_tick_at_each_size() -> None:
    (chart,) = h200()[2]["batch-size"].charts
    assert chart.spec is not None
    axis = chart.spec["layer"][0]["encoding"]["x"]["axis"]
    assert axis["values"] == [1, 2, 4, 8, 16, 32]


def test_memory_has_a_column_for_states_and_buffers_where_placement_predicted_them(
    tmp_path: Path,
) -> None:
    """As `crossover serve` predicts a hybrid's: the run below has it beside models without."""
    run = tmp_path / "run"
    shutil.copytree(H200_RUN, run)
    journal = run / EVENTS
    numbers = '"overhead_bytes":427355136'
    parts = f'"state_bytes":{3 << 30},"buffer_bytes":{1 << 30},{numbers}'
    assert journal.read_text().count(numbers) == 1
    journal.write_text(journal.read_text().replace(numbers, parts))
    data = read_report(run)
    section = memory(data, answers_of(data))
    assert section is not None
    names = section.table.columns
    assert names[2:7] == ("weights", "KV cache", "recurrent state", "buffers", "overhead")
    hybrid, dense = section.table.rows[0], section.table.rows[2]
    assert (hybrid[0], *hybrid[4:6]) == ("llama-3.2-1b int8", "3 GiB", "1 GiB")
    assert dense[4] == dense[5] == "–"
    weights, cache, overhead = 1235814400, 4294967296, 427355136
    assert hybrid[7] == formatting.size(weights + cache + overhead + (4 << 30))


def test_energy_is_of_the_device_that_served_and_not_of_a_gpu_that_idles_beside_a_cpu() -> None:
    data, answers, sections = h200()
    rows = {row[:2]: row[2] for row in sections["energy"].table.rows}
    assert rows == {
        ("llama-3.2-1b", "CPU"): "not measured",
        ("llama-3.2-1b", "GPU"): "0.035 J",
        ("llama-3.1-8b", "CPU"): "not measured",
        ("llama-3.1-8b", "GPU"): "0.12 J",
    }
    assert (
        "llama-3.1-8b takes 0.12 J on the GPU. On the CPU it was not" in sections["energy"].sentence
    )
    numbers = json_and_csv.numbers(data, answers)["answers"][1]["joules_per_token"]
    assert numbers["cpu"] is None and numbers["gpu"] == pytest.approx(0.12, rel=0.1)


def test_dollars_a_million_tokens_are_of_each_device_with_a_price() -> None:
    cost = h200()[2]["cost"]
    assert "1M output tokens of llama-3.1-8b cost $0.49" in cost.sentence
    by_device = {row[:2]: row[3:] for row in cost.table.rows}
    assert by_device["llama-3.1-8b", "GPU"] == ("23/s", "confirmed", "$7.91/h", "$0.49")
    assert by_device["llama-3.2-1b", "CPU"] == ("1.3/s", "estimated", "not known", "–")
    assert "list price of 2026-07-20" in cost.note and "CPU alone is unknown" in cost.note


def test_what_was_predicted_of_this_gpu_stands_beside_what_was_measured() -> None:
    data, answers, sections = h200()
    for answer, low, rate, high in (
        (answers[0], 36.8, 89.9, 199.0),
        (answers[1], 39.5, 52.1, 69.5),
    ):
        found = predicted_here(answer.gpu, data)
        assert (
            found is not None and found.device == "NVIDIA H200 SXM" and found.grade == "predicted"
        )
        assert (found.low, found.rate, found.high) == pytest.approx((low, rate, high), rel=0.01)
        assert predicted_here(answer.cpu, data) is None
    section = sections["prediction"]
    assert section.grades == ("predicted", "estimated")
    assert [(row[0], row[1], row[-1]) for row in section.table.rows] == [
        ("llama-3.2-1b", "GPU", "+37 %"),
        ("llama-3.1-8b", "GPU", "+70 %"),
    ]


@pytest.mark.parametrize(
    "slug",
    ["memory", "prefill-decode", "batch-size", "cost", "energy", "load-times", "host-overhead"],
)
def test_every_row_names_its_device_and_both_devices_have_rows(slug: str) -> None:
    section = h200()[2][slug]
    place = section.table.columns.index("device")
    assert {row[place] for row in section.table.rows} == {"CPU", "GPU"}
    text = section.sentence.replace("NVIDIA H200", "on the GPU")
    assert not re.search(r"llama-3", text) or re.search(r"on the (CPU|GPU)|GPU memory", text)


def test_the_map_draws_a_measured_gpu_otherwise_than_a_predicted_one() -> None:
    data, answers, _ = h200()
    drawn = crossover_map(answers, data)
    assert drawn is not None

    def bars(svg: str, side: str) -> dict[tuple[str, str], tuple[float, str]]:
        found = re.findall(
            rf'<rect data-model="(\d)" data-side="{side}" data-bar="(\w+)" x="[\d.]+" y="[\d.]+" '
            r'width="([\d.]+)" height="\d+" fill="([^"]+)"',
            svg,
        )
        return {(model, name): (float(width), fill) for model, name, width, fill in found}

    cpu, gpu = bars(drawn.svg, "cpu"), bars(drawn.svg, "gpu")
    assert cpu["0", "confirmed"][0] == 0 < cpu["0", "estimated"][0], (
        "the CPU's rate is estimated alone"
    )
    assert cpu["1", "confirmed"][0] == cpu["1", "estimated"][0] == 0
    assert gpu["0", "confirmed"][0] > gpu["0", "estimated"][0] > 0 and gpu["1", "confirmed"][0] > 0
    fills = {fill for _, fill in (*cpu.values(), *gpu.values())}
    assert len(fills) == 4 and not [name for _, name in gpu if name == "takeover"]
    assert drawn.svg.count('data-bar="forecast"') == 2 and "this machine&#x27;s" not in drawn.svg
    _, one_device, others = shown()
    predicted = crossover_map(others, one_device)
    assert predicted is not None and bars(predicted.svg, "gpu") == {}
    (fill,) = {
        fill for (_, name), (_, fill) in bars(predicted.svg, "cpu").items() if name == "takeover"
    }
    assert fill not in fills and "stroke-dasharray" in predicted.svg


def test_the_page_has_curves_of_both_devices_and_names_no_figure_of_the_gpu_as_the_cpus() -> None:
    data, answers, sections = h200()
    text = h200_page()
    plain = re.sub(r"\s+", " ", re.sub("<.*?>", " ", text)).replace("&#39;", "'")
    assert "Latency against request rate: llama-3.2-1b on the CPU (onnx int8)" in plain
    assert "Latency against request rate: llama-3.1-8b on the GPU (torch bf16)" in plain
    assert "confirmed on this machine's GPU" in plain and "predicted of this GPU" in plain
    assert "the GPU that takes over, predicted" not in plain and "Never run" not in plain
    assert len(text.encode()) < 1_200_000
    drawn = first_screen_png.drawing(data, answers)
    assert "\N{NO-BREAK SPACE}% of" in drawn and ">%" not in drawn
    assert "CPU: 16 cores of an Intel Xeon" in drawn and "GPU, confirmed" in drawn
    fills = set(re.findall(r'"(url\(.*?\))"', drawn))
    patterns = {f"url(#{name})" for name in re.findall(r'<pattern id="(.*?)"', drawn)}
    assert fills == patterns, "the key has the hatching of the map"
    assert "16 cores of an Intel Xeon and NVIDIA H200" in drawn


def test_no_text_of_the_pictures_table_reaches_into_the_next_column() -> None:
    pixels_per_character = 4.6  # of digits and small letters in the size of a cell
    data, answers, _ = h200()
    drawn = first_screen_png.drawing(data, answers)
    texts = re.findall(r'<text x="([\d.]+)" y="([\d.]+)"[^>]*>([^<]*)</text>', drawn)
    rows = [y for _, y, text in texts if text in ("llama-3.2-1b", "llama-3.1-8b")][:2]
    assert len(rows) == 2
    for row in rows:
        cells = sorted((float(x), text) for x, y, text in texts if y == row)
        assert len(cells) == 9
        edges = [*(x for x, _ in cells[1:]), first_screen_png.MARGIN + first_screen_png.INSIDE]
        for (x, text), edge in zip(cells, edges, strict=True):
            assert x + pixels_per_character * len(text) <= edge, text


def test_markdown_json_and_csv_name_the_device_of_every_row() -> None:
    data, answers, sections = h200()
    text = markdown.markdown(data, answers, list(sections.values()))
    assert text.startswith(f"# {HEADLINE}") and len(text.encode()) <= 6_000
    assert "CPU: 16 cores of an Intel Xeon, price not known; GPU: NVIDIA H200, list price" in text
    assert "| CPU: Confirmed rate |" in text and "| GPU: Confirmed rate |" in text
    numbers = json.loads(json_and_csv.as_json(data, answers))
    assert [(one["model"], one["cpu"], one["gpu"]) for one in numbers["answers"]] == [
        ("llama-3.2-1b", "llama-3.2-1b-int8-onnx", "llama-3.2-1b-bf16-torch"),
        ("llama-3.1-8b", "llama-3.1-8b-int8-onnx", "llama-3.1-8b-bf16-torch"),
    ]
    assert [one["device"] for one in numbers["cells"]] == ["cpu", "gpu", "cpu", "gpu"]
    assert numbers["gpu"]["name"] == "NVIDIA H200" and numbers["gpu"]["count"] == 1
    assert numbers["gpu"]["memory_bytes"] == 150754820096
    rows = list(csv.DictReader(io.StringIO(json_and_csv.as_csv(numbers["levels"]).decode())))
    devices = {"onnx": "cpu", "torch": "gpu"}
    assert rows and all(row["device"] == devices[row["backend"]] for row in rows)
    assert {row[1] for row in levels_table(data).rows} == {"CPU", "GPU"}


def test_sliders_move_each_device_by_its_own_steps() -> None:
    data, answers, _ = h200()
    lattice = slo_sliders.lattice_of(answers, data)
    assert lattice is not None and lattice.sides == ("cpu", "gpu")
    own = [lattice.run[name] for name in ("ttft", "tpot", "target")]
    place = (own[0] * len(lattice.tpot) + own[1]) * len(lattice.target) + own[2]
    limits = {(e.model, e.side): e.answers.estimated[place] for e in lattice.entries}
    # of 8B on the CPU no step times were fitted: it missed the SLO unloaded
    assert limits == {
        (0, "cpu"): pytest.approx(1.6, rel=0.01),
        (0, "gpu"): pytest.approx(65.6, rel=0.01),
        (1, "gpu"): pytest.approx(30.6, rel=0.01),
    }
    assert all(entry.gpus == [] for entry in lattice.entries), "the GPU is measured"


def test_a_condition_names_the_device_where_there_are_two() -> None:
    _, answers, _ = h200()
    assert check_condition("8b:gpu:confirmed>=23", answers).holds
    assert not check_condition("1b:cpu:capacity>=2", answers).holds
    assert "memory is 24.1" in check_condition("8b:gpu:memory<=32", answers).text
    for wrong, text in (
        (
            "8b:confirmed>=1",
            "Name the device: llama-3.1-8b:cpu:confirmed or llama-3.1-8b:gpu:confirmed",
        ),
        ("8b:tpu:confirmed>=1", "The run has no model '8b:tpu'"),
    ):
        with pytest.raises(ReportError, match=re.escape(text)):
            check_condition(wrong, answers)
    with pytest.raises(ReportError, match="was not measured on the GPU"):
        check_condition("135m:gpu:confirmed>=1", shown()[2])


def test_a_copy_to_give_away_keeps_the_gpu_and_the_answer(tmp_path: Path) -> None:
    export_run(H200_RUN, tmp_path / "shared")
    again = read_report(tmp_path / "shared")
    assert headline.headline(answers_of(again), again) == HEADLINE
    assert again.gpu == h200()[0].gpu


def test_compare_separates_devices_unless_an_option_pairs_them(tmp_path: Path) -> None:
    run = read(H200_RUN)
    assert {facts[3] for facts in run.values} == {"cpu", "gpu"}
    copy = msgspec.structs.replace(run.manifest, run_id="again")
    both = compare([run], [msgspec.structs.replace(run, manifest=copy)])
    assert all(row.ratio == pytest.approx(1.0) for row in both.rows), "each against its own device"
    sides = {
        device: {facts: values for facts, values in run.values.items() if facts[3] == device}
        for device in ("cpu", "gpu")
    }
    cpu, gpu = (
        msgspec.structs.replace(
            run, values=sides[one], manifest=msgspec.structs.replace(run.manifest, run_id=one)
        )
        for one in ("cpu", "gpu")
    )
    with pytest.raises(NotComparable, match="differ in format"):
        compare([cpu], [gpu])
    allowed = ["format", "backend", "device"]
    rows = compare([cpu], [gpu], allow=allowed).rows
    assert rows and all("cpu and gpu" in row.cell for row in rows)


def planned(model: str, rate: float, **keys: object) -> CostPlan:
    raw: dict[str, object] = {
        "model": model,
        "forecast": {"peak_rate": rate},
        "machines": [{"run": str(H200_RUN), **keys}],
        "devices": ["NVIDIA L4"],
    }
    question = question_of_tables(raw, Path())
    return make_plan(question, candidates_of(question))


def test_a_plan_offers_cpu_gpu_and_both_and_needs_the_machines_price() -> None:
    made = planned("1b", 1.0)
    mine = {one.title: one for one in made.options if one.kind == "as it is"}
    assert list(mine) == ["your GPU", "your CPU alone", "your CPU, GPU above it"]
    assert {one.grade for one in mine.values()} == {"confirmed", "estimated"}
    for one in mine.values():
        assert one.certainty == "yes" and one.dollars == pytest.approx(7.91 * 730.5)
    text = as_text(made, 200)
    assert "your machine: the list price of its NVIDIA H200, $7.91/h, is assumed" in text
    assert all(title in text for title in mine)


def test_a_machine_that_is_paid_for_costs_its_energy_and_one_with_a_price_that_price() -> None:
    paid = planned("8b", 20.0, is_paid=True)
    gpu = next(one for one in paid.options if one.title == "your GPU")
    # 569 W at 30.6/s, for 20/s all month
    assert gpu.kwh == pytest.approx(0.569 * 20 / 30.6 * 730.5, rel=0.01)
    assert gpu.dollars == pytest.approx(gpu.kwh * 0.15) and gpu == paid.choice
    assert choice_sentence(paid).startswith("Your GPU (NVIDIA H200) serves llama-3.1-8b at 20 ")
    assert "the cost of your machine" not in as_text(paid)
    rented = planned("8b", 20.0, dollars_per_hour=2.0)
    assert next(one.dollars for one in rented.options if one.title == "your GPU") == 2.0 * 730.5
    cpu = next(one for one in rented.options if one.title == "your CPU alone")
    assert cpu.certainty == "no" and cpu.note == "misses the SLO unloaded"


def test_the_cpu_takes_what_it_serves_and_the_gpu_what_is_above() -> None:
    made = planned("1b", 48.5, is_paid=True)
    both = next(one for one in made.options if one.title == "your CPU, GPU above it")
    gpu_only = next(one for one in made.options if one.title == "your GPU")
    # 47.7/s are confirmed of the GPU, 1.4/s are surely served by the CPU
    assert (both.certainty, gpu_only.certainty, both.grade) == ("yes", "perhaps", "estimated")


def test_the_price_is_an_option_and_nonsense_is_refused() -> None:
    def output(*words: str) -> str:
        done = CliRunner().invoke(cli.app, ["plan", "--model", "8b", "--rate", "20", *words])
        return done.output + str(done.exception or "")

    one = ("--run", str(H200_RUN), "--device", "NVIDIA L4")
    assert "$0 " not in output(*one) and "$5,778" in output(*one)
    assert "Your GPU (NVIDIA H200) serves" in (text := output(*one, "--price", "2.5"))
    assert "$1,826 a month, confirmed" in " ".join(text.split())
    assert "--price -1 must be 0 or more" in output(*one, "--price", "-1")
    assert "the machine of --run" in output("--price", "1")


def changed(side: str, capacity: Capacity | None) -> list[ModelAnswer]:
    """The answers with another capacity of every configuration on a device."""
    found = []
    for answer in h200()[1]:
        cell = answer.cell_on(side)
        assert cell is not None
        other = msgspec.structs.replace(cell, capacity=capacity)
        found.append(msgspec.structs.replace(answer, **{side: other}))
    return found


def test_sentences_of_other_outcomes() -> None:
    data = h200()[0]
    misses = Capacity(state="misses_slo_unloaded", estimated_rate=0.0, low=0.0, high=0.0)
    cpu, gpu = "The CPU (16 cores of an Intel Xeon) ", "this machine's NVIDIA H200 "
    assert headline.headline(changed("cpu", misses), data) == (
        f"{cpu}serves none of these models within the SLO; {gpu}serves up to llama-3.1-8b: 23/s "
        "confirmed, about 31/s estimated."
    )
    assert headline.headline(changed("gpu", misses), data) == (
        f"{cpu}serves up to llama-3.2-1b at an estimated 1.6 requests/s; {gpu}serves none of them "
        "within the SLO."
    )
    quick = Capacity(
        state="confirmed",
        confirmed_rate=90.0,
        estimated_rate=95.0,
        low=90.0,
        high=99.0,
        method="step_times",
    )
    assert headline.headline(changed("cpu", quick), data) == (
        f"{cpu}serves up to llama-3.1-8b at a confirmed 90 requests/s; {gpu}serves no more: "
        "llama-3.1-8b: 23/s confirmed, about 31/s estimated."
    )
    gpu_only = [msgspec.structs.replace(one, cpu=None, takeover=None) for one in h200()[1]]
    assert headline.headline(gpu_only, data) == (
        "NVIDIA H200 serves up to llama-3.1-8b: 23 requests/s, confirmed."
    )


def test_what_was_predicted_of_the_gpu_is_printed_beside_what_was_measured() -> None:
    rows = {(row[0], row[1]): row[2:] for row in table_of(H200_RUN)}
    assert rows["llama-3.1-8b, NVIDIA H200, 64", "capacity"] == (
        *("52/s (39–70)", "31/s (27–34)", "+70%"),
    )
    assert len(rows) == 6
    text = (H200_RUN.parents[2] / "tests" / "bench" / "RESULTS.md").read_text()
    for (name, what), values in rows.items():
        assert f"| {' | '.join((name, what, *values))} |" in text


def test_a_single_request_spends_as_long_outside_the_engine_whatever_the_model() -> None:
    """The recorded H200: 8 ms a request that no step explains."""
    of_gpu = [cell for cell in h200()[0].cells if cell.device == "gpu"]
    seconds = [seconds_outside_engine(cell.single_stream_levels) for cell in of_gpu]
    assert seconds == pytest.approx([0.0080, 0.0072], abs=0.0002)


def test_the_simulated_ttft_of_a_single_request_has_its_time_outside_the_engine() -> None:
    """The same requests of the recorded H200 took 15 and 19 ms on average; their steps take 7 and
    12 ms."""
    for cell in (cell for cell in h200()[0].cells if cell.device == "gpu"):
        (level,) = cell.single_stream_levels
        assert cell.server and cell.traffic and cell.spec
        prompts = level.prompt_tokens.astype(np.int64)
        lengths = Lengths(prompts, np.ones_like(prompts), np.zeros_like(prompts))
        simulated_ttft = (
            Server(cell.server.step_times, cell.server.settings, lengths).unloaded().ttft.mean()
        )
        assert simulated_ttft == pytest.approx(level.ttft.mean(), rel=0.05)
        outside_seconds = cell.server.step_times.request_seconds
        # A GPU that nobody measured is predicted with a current server, which has its own time;
        # a machine whose time is not known is predicted behind the measured server.
        for name, weight_format, expected in (
            ("NVIDIA L4", "bf16", CONSTANTS.request_seconds),
            ("Apple M4 Max", "Q4_0", outside_seconds),
        ):
            machine = machine_of(device_named(name))
            service = Service(machine, cell.spec, weight_format, cell.traffic)
            step_times = simulation_of(service, EXPECTED_STEPS).step_times
            assert step_times.request_seconds == expected

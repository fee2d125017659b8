"""The shipped results: what the shipped runs say, no more, and beside a run only what compares."""

from __future__ import annotations

import re
import tarfile
from pathlib import Path
from typing import Any

import msgspec
import pytest

from models.formatting import model_title
from reports.errors import ReportError
from reports.reference.archive import FILES, opened
from reports.reference.results import beside, references, results_of
from reports.render.references import engine_of, others_in_words, reference_table
from reports.run import numbers_of, read_records, read_run, slo_of
from reports.write import Asked, read, write
from tests.made_reference import PAGES, QUESTIONS, SAYING, SHIPPED, all_results_of, page
from tests.reports.example_run import RUNGS, write_example_run


def _digits(value: Any) -> Any:
    """With nine digits of each number: the last ones depend on the CPU that computes."""
    match msgspec.to_builtins(value):
        case dict() as each:
            return {key: _digits(one) for key, one in each.items()}
        case list() as each:
            return [_digits(one) for one in each]
        case float() as number:
            return float(f"{number:.9g}")
        case plain:
            return plain


def test_results_are_what_the_runs_say() -> None:
    archives = sorted(SHIPPED.glob("*.tar.xz"), key=lambda path: path.stat().st_size)
    names = {path.name.removesuffix(".tar.xz") for path in archives}
    assert {one.run for one in references()} == names and len(archives) >= 3
    assert sum(path.stat().st_size for path in archives) < 4 << 20, "small enough to ship"
    for path in archives:
        with tarfile.open(path) as tar:
            assert sorted(one.name.rpartition("/")[2] for one in tar) == sorted(FILES)
    with opened(archives[0]) as folder:
        name = archives[0].name.removesuffix(".tar.xz")
        found = all_results_of(read_records(folder), name)
        own = results_of(read_run(folder), name)
    assert found[: len(own)] == own, "the campaign's own SLO first"
    shipped = [one for one in references() if one.run == found[0].run]
    assert _digits(found) == _digits(shipped), "run: python -m tests.made_reference"


def test_the_page_shows_them_all_and_links_work() -> None:
    text = (PAGES / "index.html").read_text()
    assert text == page(references()), "run: python -m tests.made_reference"
    links = re.findall(r'href="([^"]+)"', text)
    rows = {(one.run, one.model, engine_of(one)) for one in references()}
    assert len(links) == len(rows) and "://" not in text
    for link in set(links):
        report = (PAGES / link).read_text()
        assert "<h2>Every level measured" in report and "/tmp" not in report
    for one in references():
        assert f'data-model="{model_title(one.model)}"' in text
        assert f'<th data-slo="{one.slo["name"]}">' in text


def test_a_run_answers_more_questions_than_were_asked(tmp_path: Path) -> None:
    """Only where its levels tell: an SLO that nobody searched for is not called unresolved."""
    folder = write_example_run(tmp_path / "run", {"smollm2-135m": RUNGS["smollm2-135m"]})
    records = read_records(folder)
    asked = slo_of(records.manifest)
    found = all_results_of(records, "run")
    own, others = found[0], found[1:]
    assert own.slo["name"] == asked.name and others
    for one in others:
        assert one.slo["name"] in QUESTIONS and one.slo["target"] == asked.target
        assert one.capacity is not None and one.capacity.status in SAYING
    judged = numbers_of(records, msgspec.convert(others[-1].slo, type(asked)))
    assert others[-1].capacity == judged.cells[0].capacity


def test_only_the_same_question_stands_beside_a_run(tmp_path: Path) -> None:
    folder = write_example_run(tmp_path / "run", {"smollm2-135m": RUNGS["smollm2-135m"]})
    run = read_run(folder)
    others = beside(run)
    assert not others.results and others.others >= 3
    assert "have another SLO or workload" in others_in_words(others)
    one = next(one for one in references() if one.model == "smollm2-135m")
    slo = msgspec.convert(one.slo, type(run.slo))
    campaign = run.manifest.campaign | {"workload": one.workload}
    manifest = msgspec.structs.replace(run.manifest, campaign=campaign)
    same = beside(msgspec.structs.replace(run, slo=slo, manifest=manifest))
    assert one in same.results and len(same.results) + same.others == others.others
    assert all(result.model == "smollm2-135m" for result in same.results)
    assert all(result.slo["ttft_seconds"] == slo.ttft_seconds for result in same.results)
    several = campaign | {"workloads": {"a": {}, "b": {}}}
    manifest = msgspec.structs.replace(manifest, campaign=several)
    with pytest.raises(ReportError, match="has several workloads, and a result is of one"):
        beside(msgspec.structs.replace(run, manifest=manifest))
    table = reference_table(run, same)
    assert len(table.rows) == 1 + len(same.results) and table.rows[0][1] == "this run"


def test_a_report_has_them_where_they_are_asked_for(tmp_path: Path) -> None:
    folder = write_example_run(tmp_path / "run", {"smollm2-135m": RUNGS["smollm2-135m"]})
    for reference in (False, True):
        asked = Asked(formats=("md",), predicts=False, reference=reference)
        text = write(read([folder], asked), tmp_path / "out", asked).read_text()
        assert ("## Shipped results beside this run" in text) is reference

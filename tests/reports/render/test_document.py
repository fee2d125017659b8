"""The report as JSON: it is what the page says, and its schema is what it is."""

from __future__ import annotations

import json

import jsonschema
import pytest

from reports.findings import Crossover
from reports.numbers import RunNumbers
from reports.render import document
from reports.sentences import headline


@pytest.fixture(scope="module")
def made(run: RunNumbers, found: Crossover) -> dict[str, object]:
    decoded: dict[str, object] = json.loads(document.encoded(document.document(run, found)))
    return decoded


def test_it_keeps_its_schema(made: dict[str, object]) -> None:
    jsonschema.Draft202012Validator(document.schema()).validate(made)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.Draft202012Validator(document.schema()).validate(made | {"cells": 1})


def test_numbers_are_those_of_the_run(
    made: dict[str, object], run: RunNumbers, found: Crossover
) -> None:
    assert (made["kind"], made["version"]) == ("crossover-report", 1)
    assert made["headline"] == headline(run, found)
    assert found.largest is not None and made["largest"] == found.largest.key
    cells = made["cells"]
    assert isinstance(cells, list) and [one["key"] for one in cells] == [c.key for c in run.cells]
    for shown, cell in zip(cells, run.cells, strict=True):
        assert (shown["capacity"] or {}).get("held") == (cell.capacity and cell.capacity.held)
        assert [one["summary"]["latencies"]["ttft"]["p95"] for one in shown["levels"]] == [
            level.summary.latencies.ttft.p95 for level in cell.levels
        ]
    assert cells[-1]["capacity"] is None  # skipped: missing is null

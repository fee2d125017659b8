"""The report as JSON: it is what the page says, and its schema is what it is."""

from __future__ import annotations

import json

import jsonschema
import msgspec
import pytest

from reports.findings import Crossover
from reports.numbers import RunNumbers
from reports.plan.output import as_json
from reports.planning.machine_capacity import MachineCapacity
from reports.render import document
from reports.sentences import headline
from tests.docs_of_structs import schema_of
from tests.reports.plan.test_ranking import machines, plan
from tests.reports.plan.worlds import office


@pytest.fixture(scope="module")
def made(run: RunNumbers, found: Crossover) -> dict[str, object]:
    decoded: dict[str, object] = json.loads(document.encoded(document.document(run, found)))
    return decoded


def test_it_keeps_its_schema(made: dict[str, object]) -> None:
    jsonschema.Draft202012Validator(schema_of(document.Document)).validate(made)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.Draft202012Validator(schema_of(document.Document)).validate(made | {"cells": 1})


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


def test_it_has_the_plan_and_the_machines_that_were_predicted(
    made: dict[str, object], run: RunNumbers, found: Crossover
) -> None:
    assert made["plan"] is None and made["predicted_machines"] == []
    key = run.cells[0].key
    card = MachineCapacity(
        device="NVIDIA L4", kind="predicted", devices=2, low=1.0, estimate=2.0, high=4.0
    )
    none = MachineCapacity(device="NVIDIA T4", kind="predicted", reason="too little memory")
    held = msgspec.structs.replace(found, capacities={key: (none, card)})
    own = plan(office(1.0), machines())
    told = json.loads(document.encoded(document.document(run, held, own)))
    jsonschema.Draft202012Validator(schema_of(document.Document)).validate(told)
    assert [one["reason"] for one in told["predicted_machines"]] == ["too little memory", ""]
    last = told["predicted_machines"][1]
    assert (last["cell"], last["machine"], last["devices"]) == (key, "NVIDIA L4", 2)
    assert (last["low_per_second_predicted"], last["high_per_second_predicted"]) == (1.0, 4.0)
    alone = json.loads(as_json(own))
    assert told["plan"]["sentence"] == alone["sentence"] != ""
    assert [one["machine"] for one in told["plan"]["options"]] == [
        one["machine"] for one in alone["options"]
    ]

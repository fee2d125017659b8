"""The plan file: the example parses, wrong input is told by key and value."""

import tomllib
from pathlib import Path

import pytest

from reports.errors import ReportError
from reports.plan.example import example
from reports.plan.file import BadPlan, question, read_plan
from tests.docs_of_structs import plan_keys

BASE = 'model = "8b"\nrequests = 500\n[forecast]\npeak_rate = 0.5\n'


def test_the_example_parses_and_names_every_key_of_the_docs() -> None:
    asked = question(tomllib.loads(example()))
    assert asked.spec.name == "llama-3.1-8b" and asked.slo.target == 0.95
    assert asked.forecast.loads[0].rate == pytest.approx(0.5)
    keys = [row.split("`")[1] for row in plan_keys() if row.startswith("| `")]
    missing = [key for key in keys if f"{key} =" not in example() and f"[{key}]" not in example()]
    assert missing == [] or missing == ["machines"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[forecast]\npeak_rate = 1.0\n", "missing required field `model`"),
        ('model = "9b"\n[forecast]\npeak_rate = 1.0\n', "'9b' is no rung"),
        ('model = "8b"\nformat = "Q9"\n[forecast]\npeak_rate = 1.0\n', "format 'Q9' is not one of"),
        ('model = "8b"\n[forecast]\n', "give one of peak_rate, mean_rate, users, trace; got none"),
        (BASE + "mean_rate = 1.0\n", "got peak_rate and mean_rate - at `$.forecast`"),
        (BASE + "users = 3\n", "got peak_rate and users"),
        ('model = "8b"\n[forecast]\nusers = 3\n', "users and requests_per_user belong together"),
        (BASE.replace("0.5", "-1.0"), "peak_rate must be above 0, got -1.0 - at `$.forecast.peak_"),
        (BASE.replace("0.5", "nan"), "peak_rate must be above 0, got nan"),
        (BASE.replace("0.5", "inf"), "peak_rate must be above 0, got inf"),
        (BASE + 'day = "sunday"\n', "day 'sunday' is not one of flat, people, office, night"),
        (BASE + "day = [0.0, 0.0]\n", "day needs rates of 0 or more, and one above 0; got"),
        (BASE + "window_minutes = 5.0\n", "window_minutes must be 60 or more, got 5.0"),
        (BASE + "months = 0\n", "months must be 1 or more, got 0"),
        (BASE + "growth_per_month = -1.0\n", "growth_per_month must be above -1, got -1.0"),
        (BASE + "rate = 1.0\n", "unknown field `rate` - at `$.forecast`; known here: peak_rate,"),
        (BASE + 'arrivals = { kind = "trace", path = "x" }\n', "Invalid value 'trace'"),
        ("violations = 1.5\n" + BASE, "violations is a share of the month's hours, 0 to below 1"),
        ("spares = -1\n" + BASE, "spares must be 0 or more, got -1"),
        ('slo = "fast"\n' + BASE, "SLO 'fast' is not one of"),
        (
            BASE + "[prices]\nL4 = [2.0, 1.0]\n",
            "a price is above 0, or [lowest, highest]; got (2.0",
        ),
        (
            BASE + "[[machines]]\nowned = 1\n",
            "give one of run, file, device; got none - at `$.mach",
        ),
        (
            BASE + '[[machines]]\nfile = "m"\nhome = 1\n',
            "unknown field `home` - at `$.machines[0]`",
        ),
        ('model = "8b"\n[forecast]\ntrace = "none.csv"\n', "there is no such file"),
        ("tensor_parallel = [0]\n" + BASE, "tensor_parallel needs numbers of devices from 1"),
        (BASE.replace("500", "10"), "requests must be 500 or more, got 10"),
    ],
)
def test_wrong_input_is_told_by_key_and_value(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "plan.toml"
    path.write_text(text)
    with pytest.raises(BadPlan) as told:
        read_plan(path)
    assert said in str(told.value) and str(path) in str(told.value)


def test_a_file_that_is_none_is_told(tmp_path: Path) -> None:
    with pytest.raises(ReportError, match="cannot be read: No such file"):
        read_plan(tmp_path / "none.toml")
    (tmp_path / "bad.toml").write_text("model = ")
    with pytest.raises(ReportError, match="is no TOML"):
        read_plan(tmp_path / "bad.toml")


def test_changes_take_the_place_of_keys_but_not_of_their_neighbours(tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    path.write_text(BASE + 'day = "office"\n')
    asked = read_plan(path, {"model": "1b", "forecast": {"peak_rate": 2.0}})
    assert asked.spec.name == "llama-3.2-1b"
    rates = [load.rate for load in asked.forecast.loads]
    assert rates[0] == pytest.approx(2.0) and rates[-1] == pytest.approx(0.1)

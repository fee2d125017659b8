"""Options as people write them, and the numbers that a plan refuses."""

from __future__ import annotations

import math
from typing import Any

import pytest

from loadtests.errors import LoadError
from loadtests.generator.endpoint import Target
from loadtests.generator.load_plan import LoadPlan
from loadtests.generator.option_values import parse_arrivals, parse_workload, plan_of_options
from loadtests.generator.options import FIELDS
from loadtests.workload.requests import Workload


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rate_per_second": 1.0, "concurrency": 1}, "either a rate"),
        ({}, "either a rate"),
        ({"rate_per_second": 0.0}, "rate_per_second must be above 0, got 0.0"),
        (
            {"rate_per_second": 1.0, "window_seconds": math.inf},
            "window_seconds must be above 0, got inf",
        ),
        (
            {"rate_per_second": 1.0, "warmup_seconds": -1.0},
            "warmup_seconds must be 0 or more, got -1.0",
        ),
    ],
)
def test_numbers_that_cannot_be_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(LoadError, match=message):
        LoadPlan(target=Target(url="x"), **changes)


def test_workloads_and_arrivals_as_people_write_them() -> None:
    assert parse_workload("256x64") == Workload(prompt_tokens=256, output_tokens=64)
    assert parse_workload("chat::64") == Workload(preset="chat", max_output_tokens=64)
    scaled = Workload(preset="chat", scale=0.1, max_prompt_tokens=200)
    assert parse_workload("chat*0.1:200") == scaled
    with pytest.raises(LoadError, match="could not convert string to float: 'x'; write a preset"):
        parse_workload("chat*x")
    with pytest.raises(LoadError, match="scale must be above 0"):
        parse_workload("chat*0")
    with pytest.raises(LoadError, match="'tea' is not one of"):
        parse_workload("tea")
    with pytest.raises(LoadError, match="^--workload 'chat:x': the cap 'x' is no number of tokens"):
        parse_workload("chat:x")
    with pytest.raises(LoadError, match="unknown field `cvv`"):
        parse_arrivals("gamma:cvv=2")
    with pytest.raises(LoadError, match="'cv' is no key=value"):
        parse_arrivals("gamma:cv")


def test_options_of_the_web_page_may_be_empty() -> None:
    """Locust's page sends "" for what was left empty; that is the default, and no rate means
    Locust's users are the load.
    """
    given: dict[str, Any] = dict.fromkeys(FIELDS, "") | {"host": "http://x"}
    plan = plan_of_options(given, users=7)
    assert (plan.rate_per_second, plan.concurrency, plan.window_seconds) == (None, 7, 30.0)
    assert plan_of_options(given | {"rate": "2.5"}, users=7).rate_per_second == 2.5
    with pytest.raises(LoadError, match="--api must be completions or chat, got 'foo'"):
        plan_of_options(given | {"api": "foo"}, users=1)
    with pytest.raises(LoadError, match="--rate must be a number, got 'many'"):
        plan_of_options(given | {"rate": "many"}, users=1)
    with pytest.raises(LoadError, match="no --host"):
        plan_of_options({}, users=1)


def test_fields_of_ones_own_and_tls_reach_the_target() -> None:
    plan = plan_of_options(
        {"host": "https://x", "rate": "1", "extra_body": '{"top_k": 1}', "verify_tls": "no"},
        users=1,
    )
    assert plan.target.extra_body == {"top_k": 1} and not plan.target.verify_tls
    for wrong in ("{", "[1]", "7"):
        with pytest.raises(LoadError, match="--extra-body must be a JSON object"):
            plan_of_options({"host": "x", "rate": "1", "extra_body": wrong}, users=1)
    with pytest.raises(LoadError, match="--verify-tls must be yes or no, got 'maybe'"):
        plan_of_options({"host": "x", "rate": "1", "verify_tls": "maybe"}, users=1)
    with pytest.raises(LoadError, match="SLO 'tea' is not one of chat"):
        plan_of_options({"host": "x", "rate": "1", "slo": "tea"}, users=1)

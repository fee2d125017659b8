"""Options as people write them, and the numbers that a plan refuses."""

from __future__ import annotations

import math
from typing import Any

import pytest

from loadtests.cli.load_command import load, parse_place
from loadtests.errors import LoadError
from loadtests.load_generator.load_options import (
    FIELDS,
    parse_arrivals,
    parse_workload,
    plan_of_options,
)
from loadtests.load_generator.load_plan import LoadPlan
from loadtests.load_generator.locust_workers import allowed
from loadtests.load_generator.openai_endpoint import Target
from loadtests.workload.request_lengths import Ask, Workload
from models.errors import CrossoverError


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rate": 1.0, "concurrency": 1}, "one of rate"),
        ({}, "one of rate"),
        ({"rate": 0.0}, "rate must be above 0, got 0.0"),
        ({"rate": 1.0, "window_seconds": math.inf}, "window_seconds must be above 0, got inf"),
        ({"rate": 1.0, "warmup_seconds": -1.0}, "warmup_seconds must be 0 or more, got -1.0"),
        ({"asks": (Ask(0, 8, 8),)}, "due has 0 times for 1 asks"),
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
    with pytest.raises(LoadError, match="Expected `float` > 0.0 - at `\\$.scale`"):
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
    assert (plan.rate, plan.concurrency, plan.window_seconds) == (None, 7, 30.0)
    assert plan_of_options(given | {"rate": "2.5"}, users=7).rate == 2.5
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


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"rate": 1.0, "workers": 2, "master": True}, "give one of them"),
        ({"rate": 1.0, "bind": "0.0.0.0"}, "--bind is of --master"),
        ({"rate": 1.0, "expect_workers": 2}, "--expect-workers is of --master"),
        ({"join": "host", "rate": 1.0}, "--join takes no --rate"),
        ({"join": "host", "master": True}, "--join takes no --master"),
        ({"rate": 1.0, "workers": 0}, "--workers must be at least 1, got 0"),
    ],
)
def test_options_that_contradict_each_other_are_refused(
    given: dict[str, object], message: str
) -> None:
    with pytest.raises(CrossoverError, match=message):
        load(url="http://127.0.0.1:9", **given)


def test_places() -> None:
    assert parse_place("--join", "host", 5557) == ("host", 5557)
    assert parse_place("--join", "10.0.0.7:99", 5557) == ("10.0.0.7", 99)
    assert parse_place("--join", "::1", 5557) == ("::1", 5557)
    assert parse_place("--join", "[::1]:99", 5557) == ("::1", 99)
    for wrong in ("", "host:tea", "host:99999", "host/path", "bob@host"):
        with pytest.raises(LoadError, match=f"--join must be HOST or HOST:PORT, got {wrong!r}"):
            parse_place("--join", wrong, 5557)


def test_a_worker_that_joined_obeys_within_its_own_command() -> None:
    """A stranger's plan: neither its URL nor its key nor its files are ours."""
    plan = LoadPlan(
        target=Target(url="http://evil", model="m", api_key_env="HOME", verify_tls=False),
        rate=1.0,
    )
    own = Target(url="http://mine", api_key_env="KEY")
    found = allowed(plan, own)
    assert found.target == Target(url="http://mine", model="m", api_key_env="KEY")
    assert allowed(plan, None) == plan
    trace = LoadPlan(target=own, rate=1.0, arrivals=parse_arrivals("trace:path=/etc/passwd"))
    rows = LoadPlan(target=own, rate=1.0, workload=Workload(file="/etc/passwd"))
    for files in (trace, rows):
        with pytest.raises(LoadError, match="reads no trace on its machine"):
            allowed(files, own)

"""Options as people write them, and the numbers that a plan refuses."""

from __future__ import annotations

import pytest

from crossover.loadtests.cli.load_command import load
from crossover.loadtests.errors import LoadError
from crossover.loadtests.load_generator.load_options import LoadOptions, parse_workload, plan_load
from crossover.models.errors import CrossoverError
from crossover.serving.workload.conversations import mean_turns_of
from crossover.serving.workload.request_lengths import Workload


def test_workloads_as_people_write_them() -> None:
    assert parse_workload("256x64") == Workload(prompt_tokens=256, output_tokens=64)
    assert parse_workload("chat::64") == Workload(preset="chat", max_output_tokens=64)
    with pytest.raises(LoadError, match="give one of preset.*Write a preset"):
        parse_workload("chat*x")
    with pytest.raises(LoadError, match="'tea' is not one of"):
        parse_workload("tea")
    with pytest.raises(LoadError, match="^--workload 'chat:x': max_prompt_tokens must be a"):
        parse_workload("chat:x")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "Give either --rate"),
        ({"rate": 1.0, "extra_body": ["{"]}, "--extra-body: '{' is not of the form KEY=VALUE"),
        ({"rate": 1e12}, "--rate must be at most 100000, got"),
        ({"url": "http://[::1", "rate": 1.0}, r"'http://\[::1' has no valid host or port"),
        ({"concurrency": 1, "arrivals": "constant"}, "--arrivals needs --rate"),
        ({"concurrency": 0}, "--concurrency must be at least 1, got 0"),
    ],
)
def test_options_that_contradict_each_other_are_refused(
    given: dict[str, object], message: str
) -> None:
    with pytest.raises(CrossoverError, match=message):
        load(**({"url": "http://127.0.0.1:9", "extra_body": None, "headers": []} | given))


@pytest.mark.parametrize("text", ["1000000000x2", "2x1000000000", "9" * 30 + "x2", "0x2"])
def test_lengths_are_bounded_and_described(text: str) -> None:
    with pytest.raises(LoadError, match=r"_tokens must be (at (most|least)|an integer)"):
        parse_workload(text)


@pytest.mark.parametrize("changes", [{"model": "\udcff"}, {"url": "http://h/\udcff"}])
def test_bytes_that_are_no_utf_8_are_refused(changes: dict[str, str]) -> None:
    options = LoadOptions(**({"url": "http://h", "rate": 1.0} | changes))  # type: ignore[arg-type]
    with pytest.raises(LoadError, match="not UTF-8"):
        plan_load(options, 30.0)


def test_the_rate_of_conversations_counts_conversations() -> None:
    """The plan counts requests, as it does in a campaign."""
    options = LoadOptions(url="http://h", rate=2.0, workload="conversation")
    load = plan_load(options, 30.0)
    mean_turns = mean_turns_of(load.workload)
    assert mean_turns > 3 and load.plan.rate == pytest.approx(2.0 * mean_turns)
    assert load.load_in_words() == "2.00 conversations/s"

"""crossover models plan: the numbers and the decision that `crossover serve` and /v1/placement
have.
"""

from __future__ import annotations

import functools
import json
import re
import subprocess
from collections.abc import Callable
from typing import Any

import pytest

from models import formatting
from models.ladder import rung
from serving.cli.models_command import machine_of
from serving.placement.placement_policy import PlacementRequest, plan

Ask = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="session")
def asked(crossover: Ask) -> Ask:
    return functools.partial(crossover, "models", "plan")


def test_it_adds_up_and_agrees_with_what_serve_decides(asked: Ask) -> None:
    done = asked(
        "1b",
        "--format",
        "Q8_0",
        "--slots",
        "4",
        "--context",
        "1024",
        "--memory",
        "3GiB",
        "--vram",
        "1GB",
        "--json",
    )
    (found,) = json.loads(done.stdout)
    by_device: dict[str, Any] = {one["device"]: one for one in found["formats"]}
    for one in by_device.values():
        assert one["kv_bytes"] == 4 * 1024 * 32_768
        assert one["total_bytes"] == one["weight_bytes"] + one["kv_bytes"] + one["overhead_bytes"]
        assert one["fits"] == (one["total_bytes"] <= one["may_use_bytes"])
    assert (by_device["cpu"]["fits"], by_device["gpu"]["fits"]) == (True, False)
    placement = plan(
        PlacementRequest(model=rung("1b").spec, weight_format="Q8_0", slots=4, context_tokens=1024),
        machine_of(3 << 30, 10**9),
    )
    assert (found["decision"]["device"], found["decision"]["overhead_bytes"]) == (
        placement.device,
        placement.overhead_bytes,
    )
    assert found["refusal"] is None and by_device["cpu"]["total_bytes"] == placement.need_bytes
    assert [reason["cause"] for reason in found["decision"]["reasons"]][0] == "insufficient_vram"


def test_it_says_the_formula_the_sum_and_the_decision_in_words(asked: Ask) -> None:
    shown = asked("8b", "--memory", "9GiB", "--vram", "24GiB", "--context", "2048").stdout
    assert (
        "16 slots x 2,048 tokens x 131,072 bytes a token (32 layers x 2 for key and value x 8 "
        "heads x 128 x 2 bytes) = 4 GiB" in shown
    )
    assert re.search(
        r"GPU torch +bf16 +weights 15 GiB \+ KV 4\.12 GiB \+ overhead .* = .*: fits, "
        r"22.8 GiB may be used",
        shown,
    )
    assert re.search(r"CPU llama_cpp Q4_0 .*: does not fit, 8.55 GiB may be used", shown)
    assert "serve --context 2048 would run llama-3.1-8b on the GPU with torch, format bf16" in shown
    assert "the CPU has room for 15 of the 16 slots, should it be fallen back to" in shown
    small = asked("8b", "--memory", "9GiB", "--vram", "4GiB", "--context", "2048").stdout
    assert "llama-3.1-8b in Q4_0 needs" in small and "15 slots instead of 16 would fit" in small


def test_what_serve_would_refuse_is_said_to_be_refused_and_why(asked: Ask) -> None:
    shown = asked("70b", "--memory", "8GiB", "--format", "Q4_0").stdout
    assert (
        "crossover serve would refuse: llama-3.3-70b can run nowhere" in shown
        and "the weights alone are too big" in shown
    )
    shown = asked("135m", "--memory", "8GiB", "--vram", "8GiB", "--policy", "cpu-only").stdout
    assert (
        "forced: the policy cpu-only leaves GPUs aside (a GPU with 8 GiB is there)" in shown
        and "GPU torch" not in shown
    )


def test_without_a_name_it_goes_up_the_whole_ladder(asked: Ask) -> None:
    found = json.loads(asked("--memory", "16GiB", "--format", "Q4_0", "--json").stdout)
    fits = [one["refusal"] is None for one in found]
    assert len(found) > 8 and fits[0] and not fits[-1] and fits == sorted(fits, reverse=True)
    assert formatting.size(found[0]["formats"][0]["total_bytes"]).endswith("MiB")


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["8b", "--context", "999999"], "--context 999999 is more than the 131072 tokens"),
        (["8b", "--memory", "lots"], "--memory 'lots' is no size"),
        (["8b", "--vram", "24"], "did you mean 24GiB?"),
        (["8b", "--format", "Q9"], "unknown format 'Q9'"),
        (["8b", "--kv-dtype", "int2"], "unknown KV dtype 'int2'"),
        (["9b"], "'9b' is no rung"),
    ],
)
def test_bad_input_is_one_sentence_and_status_2(
    asked: Ask, arguments: list[str], complaint: str
) -> None:
    done = asked(*arguments)
    assert done.returncode == 2 and complaint in done.stderr and "Traceback" not in done.stderr

"""`crossover models` as a user types it, and a plan that agrees with what `serve` says."""

from __future__ import annotations

import functools
import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from models.ladder import LADDER, rung
from serving.bounds import parse_bytes
from serving.cli.models_command import machine_of
from serving.errors import ServingError
from serving.placement.placement_policy import PlacementRequest, plan

Ran = subprocess.CompletedProcess[str]
Ask = Callable[..., Ran]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def models(crossover: Ask, cache: Path) -> Ask:
    return functools.partial(crossover, "models", CROSSOVER_CACHE=str(cache))


def test_make_then_list(models: Ask) -> None:
    made = models("make", "135m")
    assert made.returncode == 0, made.stderr
    assert "smollm2-135m: 134,515,008 parameters, Q4_0" in made.stdout
    assert "writing smollm2-135m-Q4_0.gguf" in made.stderr
    rows = {row["name"]: row for row in json.loads(models("list", "--json").stdout)}
    assert list(rows) == [one.spec.name for one in LADDER]
    assert rows["smollm2-135m"]["cached"] == ["smollm2-135m-Q4_0.gguf"]
    assert rows["smollm2-360m"]["cached"] == []
    shown = models("list").stdout
    assert all(one.spec.name in shown and f"{one.spec.parameters:,}" in shown for one in LADDER)


def test_a_plan_adds_up_and_agrees_with_what_serve_decides(models: Ask) -> None:
    words = "plan 1b --format Q8_0 --slots 4 --context 1024 --memory 3GiB --vram 1GB --json"
    (found,) = json.loads(models(*words.split()).stdout)
    by_device = {one["device"]: one for one in found["formats"]}
    for one in by_device.values():
        assert one["kv_bytes"] == 4 * 1024 * 32_768
        assert one["need_bytes"] == one["weight_bytes"] + one["kv_bytes"] + one["overhead_bytes"]
        assert one["fits"] == (one["need_bytes"] <= one["free_bytes"])
    assert (by_device["cpu"]["fits"], by_device["gpu"]["fits"]) == (True, False)
    placement = plan(
        PlacementRequest(model=rung("1b").spec, weight_format="Q8_0", slots=4, context_tokens=1024),
        machine_of(3 << 30, 10**9),
    )
    assert found["decision"]["device"] == placement.device and found["refusal"] is None
    assert by_device["cpu"]["need_bytes"] == placement.need_bytes
    assert found["decision"]["reasons"][0]["cause"] == "insufficient_vram"


def test_a_plan_says_the_sum_and_the_decision_in_words(models: Ask) -> None:
    shown = models("plan", "8b", "--memory", "9GiB", "--vram", "24GiB").stdout
    gpu = r"GPU torch +bf16 +weights 15 GiB \+ KV 4 GiB \+ .*: fits, 22.8 GiB may be used"
    assert re.search(gpu, shown)
    assert re.search(r"CPU llama_cpp Q4_0 .*: does not fit, 8.55 GiB may be used", shown)
    assert "serve --context 2048 would run llama-3.1-8b on the GPU with torch, format bf16" in shown
    small = models("plan", "8b", "--memory", "9GiB", "--vram", "4GiB").stdout
    assert "llama-3.1-8b in Q4_0 needs" in small and "15 slots instead of 16 would fit" in small
    refused = models("plan", "70b", "--memory", "8GiB", "--format", "Q4_0").stdout
    assert "crossover serve would refuse: llama-3.3-70b can run nowhere" in refused


def test_without_a_name_a_plan_goes_up_the_whole_ladder(models: Ask) -> None:
    found = json.loads(models("plan", "--memory", "16GiB", "--format", "Q4_0", "--json").stdout)
    fits = [one["refusal"] is None for one in found]
    assert len(found) > 8 and fits[0] and not fits[-1] and fits == sorted(fits, reverse=True)


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ("make", "Missing argument"),
        ("make 9b", "'9b' is no rung"),
        ("make 1b --format Q9", "'gguf' has no weight format 'Q9'"),
        ("make 1b --backend tpu", "unknown backend 'tpu'"),
        ("plan 8b --memory lots", "--memory 'lots' is no size"),
        ("plan 8b --vram 24", "--vram '24' is no size; write it like 24GiB"),
        ("plan 8b --format Q9", "unknown format 'Q9'"),
        ("plan 8b --kv-dtype int2", "No such option"),
        ("plan 9b", "'9b' is no rung"),
    ],
)
def test_bad_input_is_one_sentence_and_status_2(models: Ask, words: str, complaint: str) -> None:
    done = models(*words.split())
    assert done.returncode == 2 and complaint in done.stderr and "Traceback" not in done.stderr


def test_sizes_are_read_as_a_user_types_them() -> None:
    texts = ("24GiB", "1.5G", "24GB", "25769803776", "512 MiB")
    sizes = [parse_bytes(text, "--memory") for text in texts]
    assert sizes == [24 << 30, 3 << 29, 24 * 10**9, 24 << 30, 512 << 20]
    for text in ("", "GiB", "-1", "1e9", "5 apples", "1PiB"):
        with pytest.raises(ServingError, match="^--vram .* is no size"):
            parse_bytes(text, "--vram")

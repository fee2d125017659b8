"""`crossover models` as a user types it, and a plan that agrees with what `serve` says."""

from __future__ import annotations

import functools
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from crossover.models.identity.model_ladder import PUBLISHED
from crossover.serving.errors import ServingError
from crossover.serving.option_help import parse_bytes
from tests.gguf_families import Sizes, write_family

Ran = subprocess.CompletedProcess[str]
RunCommand = Callable[..., Ran]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def models(crossover: RunCommand, cache: Path) -> RunCommand:
    return functools.partial(crossover, "models", CROSSOVER_CACHE=str(cache))


def test_make_then_list(models: RunCommand) -> None:
    made = models("make", "135m")
    assert made.returncode == 0, made.stderr
    assert "smollm2-135m: 134,515,008 parameters, Q4_0" in made.stdout
    assert "writing smollm2-135m-Q4_0.gguf" in made.stderr
    rows = {row.split()[0]: row for row in models("list").stdout.splitlines()[2:]}
    listed = sorted(PUBLISHED, key=lambda one: one.spec.parameters)
    assert list(rows) == [one.spec.name for one in listed]
    assert all(f"{one.spec.parameters:,}" in rows[one.spec.name] for one in listed)
    by_llama_cpp = ("qwen3.5-4b", "gemma-4-e4b", "gpt-oss-20b", "gemma-4-26b-a4b", "qwen3-30b-a3b")
    active = [rows[name].split()[2] for name in by_llama_cpp]
    assert active == ["4.2B", "4.7B", "3.6B", "3.8B", "3.0B"]
    cached = [name for name, row in rows.items() if row.endswith(" smollm2-135m-Q4_0.gguf")]
    assert cached == ["smollm2-135m"]


def test_a_placement_shows_the_memory_sum_and_the_decision(models: RunCommand) -> None:
    shown = models("plan", "8b", "--memory", "9GiB", "--vram", "24GiB", "--slots", "16").stdout
    gpu = r"GPU torch +bf16 +weights 15 GiB \+ KV 4 GiB \+ .*: fits, 22.8 GiB may be used"
    assert re.search(gpu, shown)
    assert re.search(r"CPU llama_cpp Q4_0 .*: does not fit, 8.55 GiB may be used", shown)
    assert "serve --context 2048 would run llama-3.1-8b on the GPU with torch, format bf16" in shown
    open_slots = models("plan", "8b", "--memory", "9GiB", "--vram", "24GiB").stdout
    fitting = re.search(r"with torch, format bf16, (\d+) slots of 2048 tokens", open_slots)
    assert fitting and 16 < int(fitting[1]) < 32, "what the weights leave of the GPU's memory"
    small = models("plan", "8b", "--memory", "9GiB", "--vram", "4GiB").stdout
    assert "llama-3.1-8b in Q4_0 needs" in small and "15 slots instead of 16 would fit" in small
    refused = models("plan", "70b", "--memory", "8GiB", "--format", "Q4_0").stdout
    assert "crossover serve would refuse: llama-3.3-70b cannot run on this machine" in refused


def test_a_placement_of_a_file_has_its_format_and_explains_experts(
    models: RunCommand, tmp_path: Path
) -> None:
    file = write_family("qwen35moe", tmp_path, Sizes(type="Q5_1", expert_type="Q4_1"))
    shown = models("plan", str(file), "--memory", "9GiB", "--slots", "4").stdout
    assert re.search(r"CPU llama_cpp Q4_1 +weights .* \+ KV 2 MiB \+ state .* \+ buffers", shown)
    assert "each token goes through 2 of 8 experts" in shown
    assert "16 requests together use 99% of the experts in each step" in shown
    sized = models("plan", "gpt-oss-20b", "--memory", "64GiB", "--context", "32768", "--slots", "4")
    # llama.cpp says 4,202 MiB of buffers for the real shape, and half of the KV with windows only.
    assert re.search(r"MXFP4_MOE .*KV 3.0\d GiB .*buffers 4.1\d? GiB .*: fits", sized.stdout)
    assert "torch" not in sized.stdout
    refused = models("make", "qwen3-30b-a3b", "--format", "Q5_K_M")
    assert refused.returncode == 2 and "Available formats: Q4_0, Q8_0" in refused.stderr
    file.write_bytes(file.read_bytes().replace(b"ssm_out", b"ssm_oud"))
    broken = models("plan", str(file))
    assert broken.returncode == 2 and "'blk.0.ssm_out.weight' not found" in broken.stderr


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ("make", "Missing argument"),
        ("plan", "Missing argument"),
        ("make 9b", "'9b' is not a known model. Did you mean"),
        ("make 1b --format Q9", "'Q9' cannot be made for files of kind 'gguf'"),
        ("make 1b --backend tpu", "The backend 'tpu' is unknown"),
        ("plan 8b --memory lots", "--memory 'lots' is not a size"),
        ("plan 8b --vram 24", "--vram '24' is not a size"),
        ("plan 8b --format Q9", "'Q9' is not a known weight format. Examples"),
        ("plan 8b --kv-dtype int2", "No such option"),
        ("plan 9b", "'9b' is not a known model. Did you mean"),
    ],
)
def test_bad_input_is_one_sentence_and_status_2(
    models: RunCommand, words: str, complaint: str
) -> None:
    done = models(*words.split())
    assert done.returncode == 2 and complaint in done.stderr and "Traceback" not in done.stderr


def test_sizes_are_read_as_a_user_types_them() -> None:
    texts = ("24GiB", "1.5G", "24GB", "25769803776", "512 MiB")
    sizes = [parse_bytes(text, "--memory") for text in texts]
    assert sizes == [24 << 30, 3 << 29, 24 * 10**9, 24 << 30, 512 << 20]
    for text in ("", "GiB", "-1", "1e9", "5 apples", "1PiB"):
        with pytest.raises(ServingError, match="^--vram .* is not a size"):
            parse_bytes(text, "--vram")

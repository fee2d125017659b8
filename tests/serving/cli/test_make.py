"""The command line as a user types it."""

import functools
import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from models.ladder import LADDER
from serving.cli.models_command import fitting

Ran = subprocess.CompletedProcess[str]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def models(crossover: Callable[..., Ran], cache: Path) -> Callable[..., Ran]:
    return functools.partial(crossover, "models", CROSSOVER_CACHE=str(cache))


@pytest.fixture(scope="module")
def made(models: Callable[..., Ran]) -> Ran:
    return models("make", "135m")


def test_make_then_list(models: Callable[..., Ran], made: Ran) -> None:
    assert made.returncode == 0, made.stderr
    assert "smollm2-135m: 134,515,008 parameters, Q4_0" in made.stdout
    assert "writing smollm2-135m-Q4_0.gguf" in made.stderr
    rows = {row["name"]: row for row in json.loads(models("list", "--json").stdout)}
    assert list(rows) == [one.spec.name for one in LADDER]
    assert rows["smollm2-135m"]["cached"] == ["Q4_0"]
    assert rows["smollm2-360m"]["cached"] == []
    shown = models("list").stdout
    assert all(one.spec.name in shown and f"{one.spec.parameters:,}" in shown for one in LADDER)


def test_make_repairs_what_it_made_itself(
    models: Callable[..., Ran], made: Ran, cache: Path
) -> None:
    (file,) = cache.glob("synthetic/smollm2-135m/*.gguf")
    os.truncate(file, 5000)
    done = models("make", "135m", "--verify")
    assert done.returncode == 0
    assert "5000 bytes" in done.stderr
    assert "making it again" in done.stderr
    assert file.stat().st_size > 80_000_000


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["make"], "name the models to make, or give --all"),
        (["make", "1b", "--all"], "not both"),
        (["make", "9b"], "'9b' is no rung"),
        (["make", "1b", "--format", "Q9"], "'gguf' has no weight format 'Q9'"),
        (["make", "1b", "--backend", "tpu"], "unknown backend 'tpu'"),
    ],
)
def test_bad_input_is_one_sentence_and_status_2(
    models: Callable[..., Ran], arguments: list[str], complaint: str
) -> None:
    done = models(*arguments)
    assert done.returncode == 2
    assert complaint in done.stderr
    assert "Traceback" not in done.stderr


def test_all_that_fits_is_what_placement_says_of_the_backend() -> None:
    small = ["smollm2-135m", "smollm2-360m", "qwen2.5-0.5b"]
    assert fitting("gguf", "Q4_0", 900 << 20) == small
    assert "llama-3.1-8b" in fitting("gguf", "F16", 20 << 30)
    assert "llama-3.1-8b" not in fitting("hf", "bf16", 20 << 30)  # torch takes a third more
    amx = ("avx2", "avx512_vnni", "amx_int8")  # a tied embedding is held twice
    assert "llama-3.2-3b" in fitting("gguf", "F16", 7 << 30)
    assert "llama-3.2-3b" not in fitting("gguf", "F16", 7 << 30, amx)

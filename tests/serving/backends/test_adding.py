"""docs/adding-a-backend.md, followed to the letter: one folder, one row, served over HTTP."""

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from crossover.serving.backends.backend_table import (
    BACKENDS,
    MIB,
    BackendSpec,
    Overhead,
    format_of,
    missing_backends,
    spec_of,
    weights_of,
)
from crossover.serving.errors import BackendUnavailable, Unsupported
from tests.made_docs import MADE

ROOT = Path(__file__).parents[3]
FOLDER, NAME = "serving/backends/echo/backend.py", "echo"


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The product with the page's code: its first block a file, its second a row of the table."""
    for package in ("models", "serving", "loadtests", "reports"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / package, tmp_path / package, ignore=ignored)
    shutil.copytree(ROOT / "crossover", tmp_path / "crossover", symlinks=True)
    page = (ROOT / "docs/adding-a-backend.md").read_text()
    code, row = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    (tmp_path / FOLDER).parent.mkdir()
    (tmp_path / FOLDER).write_text(code)
    table = tmp_path / "serving/backends/backend_table.py"
    head, start, rest = table.read_text().partition("BACKENDS: dict[str, BackendSpec] = {\n")
    assert row.count("BackendSpec(") == 1
    table.write_text(head + start + row + rest)
    return tmp_path


@contextlib.contextmanager
def served(folder: Path, *arguments: str) -> Iterator[str]:
    """`crossover serve` of the copy; yields its address."""
    ready = folder / "ready.json"
    environment = os.environ | {
        "PYTHONPATH": str(folder),
        "CROSSOVER_CACHE": str(folder / "cache"),
    }
    command = [sys.executable, "-m", "crossover", "serve", *arguments, "--port", "0"]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [*command, "--ready-file", str(ready)],
            cwd=folder,
            env=environment,
            stdout=log,
            stderr=log,
        )
    try:
        deadline = time.monotonic() + 30
        while not ready.exists() and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
        assert ready.exists(), (folder / "log").read_text()
        yield json.loads(ready.read_text())["url"]
    finally:
        process.terminate()
        process.wait(20)


def fetch(url: str, body: dict[str, Any] | None = None) -> Any:
    data = json.dumps(body).encode() if body is not None else None
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=20) as answer:
        return json.load(answer)


def test_a_backend_is_one_folder_and_one_row(copy: Path) -> None:
    with served(copy, "135m", "--backend", NAME) as url:
        body = {"model": "smollm2-135m", "prompt": [65, 66, 67], "max_tokens": 4}
        answer = fetch(f"{url}/v1/completions", body)
        placement = fetch(f"{url}/v1/placement")
    assert answer["usage"]["completion_tokens"] == 4
    assert len(set(answer["choices"][0]["text"])) == 1  # it repeats the last token
    assert NAME in json.dumps(placement)


def test_lists_of_engines_are_those_of_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    page = (ROOT / "docs/adding-a-backend.md").read_text()
    _, row = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    names = {"BackendSpec": BackendSpec, "Overhead": Overhead, "MIB": MIB}
    for name, spec in eval(f"{{{row}}}", names).items():
        monkeypatch.setitem(BACKENDS, name, spec)
    for file in ("serving/options.toml", "loadtests/options.toml"):
        assert f'backends = "llama_cpp, onnx, torch, {NAME}"' in MADE[file]["lists"]()


def test_a_class_of_another_package_needs_no_row() -> None:
    spec = spec_of("package.module:Class")
    assert spec.devices == ("cpu", "gpu") and spec.cls == "package.module:Class"
    assert format_of("package.module:Class", "odd") == "odd"
    with pytest.raises(
        BackendUnavailable, match="The backend 'llama' is unknown. Backends: llama_cpp"
    ):
        spec_of("llama")


def test_the_backend_decides_the_kind_of_file() -> None:
    assert weights_of("llama_cpp") == ("gguf", "Q4_0")
    assert weights_of("llama_cpp", "q4_k_m") == ("gguf", "Q4_K_M")
    assert weights_of("torch", "FP32") == ("hf", "fp32")
    assert weights_of("onnx", "fp32") == ("onnx", "fp32")
    assert weights_of("fake") == ("none", "")
    assert weights_of("mine.module:Mine", "Q8_0") == ("gguf", "Q8_0")
    assert weights_of("mine.module:Mine") == ("hf", "bf16")
    assert weights_of("mine.module:Mine", "fp32") == ("hf", "fp32")
    assert weights_of("mine.module:Mine", "int4") == ("onnx", "int4")
    with pytest.raises(Unsupported, match="'torch' has no weight format 'Q4_0'. Formats: bf16"):
        weights_of("torch", "Q4_0")


def test_a_missing_package_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("crossover.serving.backends.backend_table.find_spec", lambda name: None)
    missing = missing_backends()
    assert set(missing) == {name for name, spec in BACKENDS.items() if spec.package}
    assert "llm-crossover[llama-cpp]" in missing["llama_cpp"]

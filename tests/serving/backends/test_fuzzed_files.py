"""Model files from other people, cut off and damaged by a seeded generator: the engine's process
may die of them, the server never.

Each file goes to a real engine child behind the real HTTP side. Either the engine serves it (not
every byte matters) or the server says that it does not: 503, a reason, and no path of the machine.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from crossover.models.errors import BrokenWeights
from crossover.models.gguf.reader import read_header
from crossover.models.text.tokenizer import try_tokenizer
from crossover.models.weights.random_weights import write_gguf
from crossover.models.weights.weights_manifest import manifest_path
from crossover.serving.supervisor.restart_policy import RecoveryLimits
from tests.serving.backends.hf_folders import hf_folder, onnx_folder
from tests.serving.fakes import ask, complete, wait_until
from tests.serving.http.test_app_engine import serving
from tests.shapes import TINY_LLAMA
from tests.tools.with_settings import engine_config

ONE_TRY = RecoveryLimits(
    load_attempts=1,
    deaths=1,
    backoff_first_seconds=0.01,
    health_timeout_seconds=10.0,
    kill_after_seconds=2.0,
)


def cut(data: bytearray, draw: random.Random, header: int) -> None:
    del data[draw.randrange(header) :]


def scrambled(data: bytearray, draw: random.Random, header: int) -> None:
    place = draw.randrange(header)
    data[place : place + 400] = draw.randbytes(400)


Damage = Callable[[bytearray, random.Random, int], None]


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    file = tmp_path_factory.mktemp("gguf") / "whole.gguf"
    write_gguf(TINY_LLAMA, file, "F16", seed=4)
    manifest_path(file).unlink(missing_ok=True)
    yield file


def check_server(backend: str, path: Path) -> str:
    """Serve it; returns "ready" or "failed". In both cases the HTTP side answered all along."""
    tokenizer = hf_folder("tiny-llama")
    sizes = {"slots": 1, "context_tokens": 64, "threads": 1}
    config = engine_config(backend, str(path), "m", tokenizer_path=str(tokenizer), **sizes)
    with serving(config, wait=False, limits=ONE_TRY) as (port, supervisor):
        assert ask(port, "GET", "/health").status == 200
        wait_until(lambda: supervisor.state in ("ready", "failed"), 60)
        if supervisor.state == "ready":
            answer = complete(port, prompt=[1, 2, 3], max_tokens=2, ignore_eos=True)
            assert answer.status in (200, 500, 503)
            wait_until(lambda: supervisor.state in ("ready", "failed"), 30)
        state = supervisor.state
        answer, about = complete(port, prompt=[1, 2, 3], max_tokens=1), ask(port, "GET", "/ready")
        assert ask(port, "GET", "/health").status == 200
        if state == "failed":
            assert answer.status == about.status == 503
            assert about.error["message"] and answer.error["message"]
            for body in (answer.body, about.body, ask(port, "GET", "/v1/placement").body):
                assert b"Traceback" not in body
        return state


@pytest.mark.parametrize(
    ("backend", "damage"),
    [
        pytest.param("llama_cpp", cut, id="llama_cpp-cut"),
        pytest.param("llama_cpp", scrambled, id="llama_cpp-scrambled"),
        pytest.param("onnx", cut, id="onnx-cut"),
        pytest.param("onnx", scrambled, id="onnx-scrambled", marks=pytest.mark.slow),
        pytest.param("torch", cut, id="torch-cut"),
        pytest.param("torch", scrambled, id="torch-scrambled", marks=pytest.mark.slow),
    ],
)
def test_a_damaged_file_kills_at_most_the_engine(
    gguf: Path, tmp_path: Path, backend: str, damage: Damage
) -> None:
    path = tmp_path / "x"
    if backend == "llama_cpp":
        path = file = Path(shutil.copy(gguf, tmp_path / "x.gguf"))
        header = file.stat().st_size - sum(
            one.n_bytes for one in read_header(gguf).tensors.values()
        )
    elif backend == "onnx":
        file = shutil.copytree(onnx_folder("llama-fp32"), path) / "model.onnx"
        header = min(4000, file.stat().st_size - 1)
    else:
        file = shutil.copytree(hf_folder("tiny-llama"), path) / "model.safetensors"
        header = 8 + int.from_bytes(file.read_bytes()[:8], "little")
    data = bytearray(file.read_bytes())
    damage(data, random.Random(f"{damage.__name__} 1"), header)
    file.write_bytes(data)
    assert check_server(backend, path) == "failed" or damage is not cut


def test_a_vocabulary_that_makes_llama_cpp_abort_ends_only_a_child(
    gguf: Path, tmp_path: Path
) -> None:
    """One token twice: a header in order, and SIGABRT from llama.cpp; the generator found it."""
    data, file = gguf.read_bytes(), tmp_path / "x.gguf"
    one, other = (b"\x01" + bytes(7) + letter for letter in (b"o", b"n"))
    assert data.count(one) == 1
    file.write_bytes(data.replace(one, other))
    read_header(file).spec("x")
    with pytest.raises(BrokenWeights, match=r"tokenizer of x.gguf .* died with status -6"):
        try_tokenizer(file)
    try_tokenizer(gguf)

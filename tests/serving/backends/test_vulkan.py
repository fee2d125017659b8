"""llama.cpp on a device of Vulkan, be it a GPU or Mesa's software device: `make test-vulkan`.

The software device is a real one to llama.cpp: layers are copied to its buffers, shaders compute.
It compiles a shader when it first runs, for seconds or a minute, so few shapes of steps are tested.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from crossover.models.text.tokenizer import load_tokenizer
from crossover.models.weights.random_weights import write_gguf
from crossover.serving.backends.backend_table import probe_backend
from crossover.serving.backends.llama_cpp.backend import LlamaCppBackend
from crossover.serving.hardware.gpus import VULKAN, GpuFacts
from crossover.serving.registry.prepare_model import Host, prepare
from crossover.serving.server_options import ModelOptions
from crossover.serving.supervisor.engine_supervisor import Supervisor
from crossover.serving.supervisor.restart_policy import RecoveryLimits
from tests.serving.backends.backend_steps import generate, prompt_of
from tests.serving.fakes import app_on, ask, complete, served, wait_until
from tests.shapes import TINY_LLAMA3
from tests.tools.with_settings import engine_config

NOT_BUILT = "llama.cpp is not built with Vulkan here; make test-vulkan builds it"
LIBRARY = next((Path(find_spec("llama_cpp").origin or "").parent / "lib").glob("*vulkan*"), None)  # type: ignore[union-attr]
pytestmark = [pytest.mark.vulkan, pytest.mark.skipif(LIBRARY is None, reason=NOT_BUILT)]
Make = Callable[..., LlamaCppBackend]


@pytest.fixture(scope="module")
def device() -> GpuFacts:
    answer = probe_backend("llama_cpp")
    if not answer.gpu:
        pytest.skip(f"{answer.gpu_note}; of Mesa's software device: GGML_VK_VISIBLE_DEVICES=0")
    return GpuFacts(answer.gpu_note or "a device", VULKAN)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_gguf(TINY_LLAMA3, path, "F32", seed=3)
    return path


@pytest.fixture
def make(model: Path, device: GpuFacts) -> Iterator[Make]:
    opened: list[LlamaCppBackend] = []

    def build(on: str = "gpu", **settings: Any) -> LlamaCppBackend:
        settings = {"slots": 3, "context_tokens": 256, "threads": 1} | settings
        if on == "gpu":
            settings = {"device_vendor": VULKAN} | settings
        settings = {"model_path": str(model), "model_name": "m", "device": on} | settings
        config = engine_config("llama_cpp", **settings)
        backend = LlamaCppBackend(config, lambda what, fraction: None)
        opened.append(backend)
        return backend

    yield build
    for backend in opened:
        backend.close()


def test_tokens_are_those_of_the_cpu(make: Make) -> None:
    settings = {"kv_dtype": "fp32", "options": {"flash_attention": "off"}}
    on_gpu, on_cpu = make(**settings), make("cpu", **settings)
    for seed in range(3):
        prompt = prompt_of(on_cpu, 12, seed)
        expected = generate(on_cpu, prompt, 24, slot=seed)
        assert generate(on_gpu, prompt, 24, slot=seed, chunk=1) == expected
    prompt = prompt_of(on_cpu, 33, 7)
    expected = generate(on_cpu, prompt, 24, slot=0)
    assert generate(on_gpu, prompt, 24, slot=0) == expected, "a prompt in one step"


def test_a_killed_engine_falls_back_to_the_cpu_and_returns(model: Path, device: GpuFacts) -> None:
    """Placement, engines and the look at the device before the return are those of `serve`."""
    options = ModelOptions(source=str(model), name="m", slots=2, context_tokens=256)
    prepared = prepare(options, Host())
    places = [(one.device, one.backend, one.device_id) for one in prepared.placement.attempts]
    assert places == [("gpu", "llama_cpp", ""), ("cpu", "llama_cpp", "")]

    limits = RecoveryLimits(
        backoff_first_seconds=0.05,
        return_first_seconds=2.0,
        health_timeout_seconds=150.0,
    )
    supervisor = Supervisor(prepared.configs, limits=limits)
    app = app_on(supervisor, tokenizer=load_tokenizer(prepared.tokenizer_path))
    with served(app, supervisor=supervisor) as port:

        def answer() -> tuple[str, str]:
            found = complete(port, prompt=[7], max_tokens=8, ignore_eos=True, temperature=0)
            assert found.status == 200, found.body
            return found.headers["x-crossover-backend"], found.json["choices"][0]["text"]

        def kill() -> None:
            pid = supervisor.engine_pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            wait_until(
                lambda: supervisor.state == "ready" and supervisor.engine_pid not in (None, pid),
                60,
            )

        wait_until(lambda: supervisor.state == "ready", 60)
        where, text = answer()
        assert where == "llama_cpp/gpu"
        kill()  # a death is worth one restart
        assert answer() == ("llama_cpp/gpu", text)
        kill()
        assert answer()[0] == "llama_cpp/cpu"
        wait_until(lambda: answer()[0] == "llama_cpp/gpu", 60)
        assert answer() == ("llama_cpp/gpu", text)
        placed = ask(port, "GET", "/v1/placement").json
        assert (placed["restarts"], placed["fallbacks"]) == (1, 1)
        died = [event["cause"] for event in placed["events"] if event["kind"] == "died"]
        assert died == ["engine_died", "engine_died"]

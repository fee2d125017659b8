"""llama.cpp on a device of Vulkan, be it a GPU or Mesa's software device: `make test-vulkan`.

The software device is a real one to llama.cpp: layers are copied to its buffers, shaders compute.
It compiles a shader when it first runs, for seconds or a minute, so few shapes of steps are tested.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from models.synthetic.write import write_gguf
from models.tokenization.tokenizer import load_tokenizer
from serving.backends.backend_interface import EngineConfig
from serving.backends.backend_table import probe_backend
from serving.backends.llama_cpp.backend import LlamaCppBackend
from serving.backends.llama_cpp.loading import bytes_in_ram
from serving.cli.doctor_command import examine, machine_rows
from serving.errors import BackendUnavailable, OutOfMemory
from serving.hardware.gpus import VULKAN, FoundGpus, GpuFacts, find_gpus, run_probe
from serving.hardware.machine_facts import hardware_facts
from serving.hardware.vulkan import library
from serving.placement.placement_policy import has_room_again
from serving.registry.engine_config import Machine, prepare
from serving.server_options import ModelOptions
from serving.supervisor.restart_policy import RecoveryLimits
from serving.supervisor.supervisor import Supervisor
from tests.serving.backends.backend_steps import generate, prompt_of
from tests.serving.fakes import app_on, ask, complete, served, wait_until
from tests.shapes import TINY_LLAMA3

NOT_BUILT = "llama.cpp is not built with Vulkan here; make test-vulkan builds it"
pytestmark = [pytest.mark.vulkan, pytest.mark.skipif(library() is None, reason=NOT_BUILT)]
Make = Callable[..., LlamaCppBackend]
BUFFERS = """
import re, sys, msgspec
from serving.backends.backend_interface import EngineConfig
from serving.backends.llama_cpp.backend import LlamaCppBackend
from serving.backends.llama_cpp.library import LOG
config = msgspec.json.decode(sys.argv[1], type=EngineConfig)
LlamaCppBackend(config, lambda what, fraction: None)
print(*sorted(set(re.findall(r"(Vulkan\\d+) +(?:model|KV) buffer", "\\n".join(LOG.lines)))))
"""


@pytest.fixture(scope="module")
def device() -> GpuFacts:
    told = run_probe("serving.hardware.vulkan:list_gpus", 60.0)
    assert told.status == 0, told.reason
    listed = msgspec.json.decode(told.output, type=FoundGpus)
    if not listed.gpus:
        pytest.skip(f"{listed.note}; of Mesa's software device: GGML_VK_VISIBLE_DEVICES=0")
    found = find_gpus()
    return next(gpu for gpu in found.gpus if gpu.vendor == VULKAN)


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
            settings = {"device_id": device.uuid, "device_vendor": VULKAN} | settings
        settings = {"model_path": str(model), "model_name": "m", "device": on} | settings
        config = EngineConfig("llama_cpp", **settings)
        backend = LlamaCppBackend(config, lambda what, fraction: None)
        opened.append(backend)
        return backend

    yield build
    for backend in opened:
        backend.close()


def test_the_device_is_a_gpu_of_llama_cpp_alone(device: GpuFacts) -> None:
    assert device.uuid == "Vulkan0" and device.name
    assert device.total_bytes and device.free_bytes and device.free_bytes <= device.total_bytes
    probe = probe_backend("llama_cpp")
    assert (probe.gpu, probe.gpu_vendor, probe.gpu_note) == (True, VULKAN, "built with Vulkan")
    diagnosis = examine()
    assert dict(machine_rows(diagnosis))["Vulkan0"].startswith(device.name)
    (mine,) = (one for one in diagnosis.backends if one.probe.backend == "llama_cpp")
    assert mine.advice is None


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


def test_memory_is_told_by_device(make: Make, model: Path, device: GpuFacts) -> None:
    backend = make()
    measured = backend.info.measured
    assert backend.info.device_name == device.name and measured is not None
    on_gpu = model.stat().st_size - bytes_in_ram(model)
    assert measured.weight_bytes == pytest.approx(on_gpu, rel=0.15)
    row_bytes = 3 * 256 * TINY_LLAMA3.kv_bytes_per_token("fp16")
    assert measured.kv_bytes == pytest.approx(row_bytes, abs=1 << 14)
    assert backend.info.predicted is not None
    assert backend.info.predicted.kv_bytes == pytest.approx(row_bytes, abs=1 << 14)
    half = make(options={"gpu_layers": 1}).info.measured
    assert half is not None and 0 < (half.weight_bytes or 0) < (measured.weight_bytes or 0)


def test_what_the_device_has_no_room_for_is_out_of_memory(make: Make, tmp_path: Path) -> None:
    """A KV cache of 32 GiB for each half of a layer: more than a buffer may have."""
    spec = msgspec.structs.replace(TINY_LLAMA3, heads=64, kv_heads=64, head_dim=128)
    write_gguf(spec, tmp_path / "wide.gguf", "Q8_0", seed=3)
    with pytest.raises(OutOfMemory, match="cannot make a context of 1048576 tokens.* allocate"):
        make(
            model_path=str(tmp_path / "wide.gguf"),
            slots=256,
            context_tokens=4096,
            kv_dtype="fp32",
            check_memory=False,
            options={"dry_run": False},
        )


def test_of_two_devices_the_engine_uses_its_own(model: Path, device: GpuFacts) -> None:
    config = EngineConfig(
        *("llama_cpp", str(model), "m"),
        device="gpu",
        device_id="Vulkan1",
        device_vendor=VULKAN,
        slots=2,
        context_tokens=256,
        threads=1,
    )
    done = subprocess.run(
        [sys.executable, "-c", BUFFERS, msgspec.json.encode(config).decode()],
        env=os.environ | {"GGML_VK_VISIBLE_DEVICES": "0,0"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout.split() == ["Vulkan1"], done.stderr


def test_a_kv_cache_above_the_largest_buffer_is_a_failed_load_that_says_why(
    model: Path, device: GpuFacts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """llama.cpp aborts; 4 MiB of keys of a layer, where a buffer may have 2."""
    monkeypatch.setenv("GGML_VK_FORCE_MAX_BUFFER_SIZE", str(2 << 20))
    options = ModelOptions(source=str(model), name="m", slots=32, context_tokens=2048)
    prepared = prepare(options, Machine(), hardware_facts())
    limits = RecoveryLimits(backoff_first_seconds=0.05, return_first_seconds=600.0)
    supervisor = Supervisor(prepared.configs, limits=limits)
    app = app_on(supervisor, tokenizer=load_tokenizer(prepared.tokenizer_path))
    with served(app, supervisor=supervisor) as port:
        wait_until(lambda: supervisor.state == "ready", 60)
        assert complete(port, prompt=[7], max_tokens=2).headers["x-crossover-backend"] == (
            "llama_cpp/cpu"
        )
        events = ask(port, "GET", "/v1/placement").json["events"]
    why = [event["message"] for event in events if event["kind"] == "died"]
    assert why and all("fewer slots or a shorter context need less" in text for text in why), events


def test_a_device_that_is_gone_is_named(make: Make) -> None:
    with pytest.raises(BackendUnavailable, match="llama.cpp sees no device Vulkan7"):
        make(device_id="Vulkan7")


def test_a_killed_engine_falls_back_to_the_cpu_and_returns(model: Path, device: GpuFacts) -> None:
    """Placement, engines and the look at the device before the return are those of `serve`."""
    options = ModelOptions(source=str(model), name="m", slots=2, context_tokens=256)
    prepared = prepare(options, Machine(), hardware_facts())
    places = [(one.device, one.backend, one.device_id) for one in prepared.placement.attempts]
    assert places == [("gpu", "llama_cpp", device.uuid), ("cpu", "llama_cpp", "")]

    async def usable() -> bool:
        found = await asyncio.to_thread(find_gpus)
        return has_room_again(prepared.placement, found.gpus)

    limits = RecoveryLimits(
        backoff_first_seconds=0.05,
        return_first_seconds=2.0,
        steady_seconds=0.5,
        health_timeout_seconds=150.0,
        gpu_step_timeout_seconds=150.0,
        gpu_load_timeout_seconds=150.0,
    )
    supervisor = Supervisor(prepared.configs, limits=limits, preferred_usable=usable)
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

"""GPUs as drivers tell of them: NVIDIA's by the real nvidia-ml-py over a made-up library with the
real ABI, AMD's by made-up files. No GPU is needed, and none is looked at.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from models import isolated
from serving.errors import Cause
from serving.hardware import amd
from serving.hardware.gpu import find_gpus, visible
from serving.hardware.gpu_facts import VULKAN, FoundGpus, GpuFacts
from serving.hardware.nvml import cause_of
from tests.tools.fake_nvml import built

GIB = 1 << 30


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = built(tmp_path_factory.mktemp("nvml"))
    if folder is None:
        pytest.skip("there is no C compiler to build the made-up driver's library")
    return folder


def asked(library: Path, wrong: str, code: str) -> Any:
    """What Python code prints, as JSON, beside such a driver."""
    environment = {**os.environ, "LD_LIBRARY_PATH": str(library), "FAKE_NVML": wrong}
    environment["PYTHONPATH"] = isolated.python_path()
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=60
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return msgspec.json.decode(done.stdout)


def listed(library: Path, wrong: str) -> FoundGpus:
    code = (
        "import msgspec, serving.hardware.nvml as n; "
        "print(msgspec.json.encode(n.list_gpus()).decode())"
    )
    return msgspec.convert(asked(library, wrong, code), FoundGpus)


def test_an_old_driver_tells_what_it_knows(library: Path) -> None:
    one, two = listed(library, "").gpus
    assert (one.name, two.uuid, one.driver) == ("Made-up GPU 1", "GPU-0002", "470.1")
    assert (one.total_bytes, one.free_bytes) == (24 * GIB, 23 * GIB)
    assert (one.compute_capability, one.power_limit_watts) == ("8.6", 350.0)
    assert (one.core_hertz, one.memory_hertz) == (2.1e9, 9.751e9)
    assert one.has_ecc is None and one.pcie_lanes is None and not one.is_part


def test_a_gpu_that_is_lost_does_not_hide_the_other(library: Path) -> None:
    found = listed(library, "lost")
    assert [gpu.uuid for gpu in found.gpus] == ["GPU-0002"] and found.cause is None
    assert "GPU 0 cannot be read: GPU is lost" in (found.note or "")


def test_a_divided_gpu_is_its_parts(library: Path) -> None:
    whole, *parts = listed(library, "mig").gpus
    assert [part.uuid for part in parts] == ["MIG-0003", "MIG-0004"] and not whole.is_part
    assert all(part.is_part and part.total_bytes == 10 * GIB for part in parts)
    assert {part.index for part in parts} == {1}


@pytest.mark.parametrize(
    ("wrong", "cause"), [("mismatch", Cause.driver_mismatch), ("not_loaded", Cause.no_driver)]
)
def test_a_driver_that_does_not_start_is_a_cause(library: Path, wrong: str, cause: Cause) -> None:
    found = listed(library, wrong)
    assert found.gpus == () and found.cause is cause and found.note


def test_the_sampler_survives_an_old_driver(library: Path) -> None:
    code = (
        "import msgspec, os; from loadtests.host.resource_sampler import Gpu; from pathlib import Path;"
        "os.environ['CUDA_VISIBLE_DEVICES'] = 'GPU-0002'; gpu = Gpu(root=Path('/nowhere'));"
        "import subprocess, sys;"
        "wait = 'import time; print(1, flush=True); time.sleep(60)';"
        "engine = subprocess.Popen([sys.executable, '-c', wait], stdout=subprocess.PIPE);"
        "engine.stdout.readline();"
        "found = gpu.read([engine.pid]); engine.kill(); gpu.close();"
        "print(msgspec.json.encode([found, gpu.missing, gpu.reason]).decode())"
    )
    found, missing, reason = asked(library, "", code)
    assert reason is None and found["gpu_watts"] == 200.0, "the engine's GPU, not the first"
    assert (found["gpu_memory_bytes"], found["gpu_energy_joules"]) == (2 * GIB, 5000.0)
    assert (found["gpu_clock_hertz"], found["gpu_memory_clock_hertz"]) == (1.695e9, 9.501e9)
    assert found["gpu_engine_bytes"] is None and found["gpu_throttled"] is None
    assert {"gpu_engine_bytes", "gpu_throttled", "gpu_reserved_bytes"} <= missing.keys()


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("GPU 0 cannot be read: GPU is lost", Cause.no_device),
        ("NVML Shared Library Not Found", Cause.no_driver),
        ("Driver/library version mismatch", Cause.driver_mismatch),
        ("No device were found", Cause.no_device),
    ],
)
def test_causes_in_the_drivers_words(text: str, cause: Cause) -> None:
    assert cause_of(text) is cause


@pytest.mark.parametrize(
    ("variables", "left"),
    [
        ({}, ["GPU-1", "GPU-2", "GPU-a"]),
        ({"CUDA_VISIBLE_DEVICES": "1"}, ["GPU-2", "GPU-a"]),
        ({"CUDA_VISIBLE_DEVICES": "1,0"}, ["GPU-2", "GPU-1", "GPU-a"]),
        ({"CUDA_VISIBLE_DEVICES": "GPU-1"}, ["GPU-1", "GPU-a"]),
        ({"CUDA_VISIBLE_DEVICES": "0,7,1"}, ["GPU-1", "GPU-a"]),
        ({"CUDA_VISIBLE_DEVICES": ""}, ["GPU-a"]),
        ({"CUDA_VISIBLE_DEVICES": "-1", "HIP_VISIBLE_DEVICES": "-1"}, []),
        ({"HIP_VISIBLE_DEVICES": ""}, ["GPU-1", "GPU-2", "GPU-a"]),
    ],
)
def test_gpus_that_are_hidden_from_us_are_no_place(
    variables: dict[str, str], left: list[str]
) -> None:
    gpus = (
        GpuFacts("A", "nvidia", uuid="GPU-1"),
        GpuFacts("B", "nvidia", uuid="GPU-2", index=1),
        GpuFacts("C", "amd", uuid="GPU-a"),
    )
    assert [gpu.uuid for gpu in visible(gpus, variables)] == left


# --- AMD


def card(root: Path, number: int, total: int, used: int = 0, **files: str) -> Path:
    (root / "dev").mkdir(parents=True, exist_ok=True)
    (root / "dev/kfd").touch()
    device = root / f"sys/class/drm/card{number}/device"
    sensors = device / "hwmon/hwmon3"
    sensors.mkdir(parents=True)
    (device / "mem_info_vram_total").write_text(f"{total}\n")
    (device / "mem_info_vram_used").write_text(f"{used}\n")
    for name, text in files.items():
        where = sensors if name.startswith(("power", "freq", "energy")) else device
        (where / name).write_text(text + "\n")
    return device


def test_amd_gpus_are_read_from_files(tmp_path: Path) -> None:
    big = card(
        *(tmp_path, 10, 192 * GIB, 4 * GIB),
        product_name="AMD Instinct MI300X",
        unique_id="abc123",
        gpu_busy_percent="97",
        power1_average="512000000",
        power1_cap="750000000",
        freq1_input="2100000000",
    )
    card(tmp_path, 2, 16 * GIB)
    small, mi300 = find_gpus(root=tmp_path).gpus
    assert (small.name, small.index, small.uuid) == ("AMD GPU", 0, None), "card2 before card10"
    assert (mi300.uuid, mi300.free_bytes) == ("GPU-abc123", 188 * GIB)
    assert mi300.power_limit_watts == 750.0
    now = amd.read(big)
    assert (now.used_bytes, now.utilisation, now.watts) == (4 * GIB, 0.97, 512.0)
    assert now.core_hertz == 2.1e9 and now.energy_joules is None


def test_a_ryzens_own_graphics_hides_no_card(
    tmp_path: Path, library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    card(tmp_path, 0, 512 << 20)
    found = find_gpus(root=tmp_path)
    assert found.gpus == () and found.cause is Cause.no_device
    assert "too little memory" in (found.note or "")
    (tmp_path / "dev/nvidiactl").touch()
    monkeypatch.setenv("LD_LIBRARY_PATH", str(library))
    names = [gpu.name for gpu in find_gpus(root=tmp_path, timeout_seconds=30.0).gpus]
    assert names == ["Made-up GPU 1", "Made-up GPU 2"]
    card(tmp_path, 1, 16 * GIB)
    found = find_gpus(root=tmp_path, timeout_seconds=30.0)
    assert [gpu.vendor for gpu in found.gpus] == ["nvidia", "nvidia", "amd"]


GGML = """
#include <stddef.h>
#include <stdlib.h>
static int devices() { const char *told = getenv("FAKE_VULKAN"); return told ? atoi(told) : 0; }
void *ggml_backend_vk_reg(void) { if (devices() > 8) abort(); return devices() < 0 ? 0 : "reg"; }
size_t ggml_backend_reg_dev_count(void *reg) { return devices(); }
void *ggml_backend_reg_dev_get(void *reg, size_t index) { return "Vulkan0\\0Vulkan1" + 8 * index; }
const char *ggml_backend_dev_name(void *device) { return device; }
const char *ggml_backend_dev_description(void *device) { return "Made-up (RADV)"; }
void ggml_backend_dev_memory(void *device, size_t *free, size_t *total) {
  *free = (size_t)15 << 30; *total = (size_t)16 << 30;
}
"""


@pytest.fixture(scope="module")
def vulkan_build(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a llama_cpp that is built with Vulkan, as far as GGML's functions go."""
    folder = tmp_path_factory.mktemp("vulkan")
    (folder / "llama_cpp/lib").mkdir(parents=True)
    (folder / "llama_cpp/__init__.py").touch()
    command = ["cc", "-shared", "-fPIC", "-w", "-xc", "-", "-o"]
    try:
        library = str(folder / "llama_cpp/lib/libggml-vulkan.so")
        subprocess.run([*command, library], input=GGML.encode(), check=True, timeout=60)
    except FileNotFoundError:
        pytest.skip("there is no C compiler to build the made-up library")
    return folder


def by_vulkan(folder: Path, devices: int, root: Path) -> FoundGpus:
    """What find_gpus finds beside such a build, with so many devices."""
    code = (
        "import msgspec, pathlib, serving.hardware.gpu as g; "
        f"print(msgspec.json.encode(g.find_gpus(root=pathlib.Path({str(root)!r}))).decode())"
    )
    environment = {**os.environ, "FAKE_VULKAN": str(devices)}
    environment["PYTHONPATH"] = f"{folder}:{isolated.python_path()}"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=60
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return msgspec.json.decode(done.stdout, type=FoundGpus)


def test_devices_of_a_vulkan_build_are_gpus_by_its_names(
    vulkan_build: Path, tmp_path: Path
) -> None:
    one, two = by_vulkan(vulkan_build, 2, tmp_path).gpus
    assert (one.uuid, two.uuid, two.index) == ("Vulkan0", "Vulkan1", 1)
    assert (one.name, one.vendor, one.driver) == ("Made-up (RADV)", VULKAN, "Vulkan")
    assert (one.free_bytes, one.total_bytes) == (15 * GIB, 16 * GIB)


@pytest.mark.parametrize(
    ("devices", "cause", "note"),
    [
        (0, Cause.no_device, "Vulkan has no GPU here"),
        (-1, Cause.no_driver, "Vulkan finds no driver here"),
        (9, Cause.driver_mismatch, "asking Vulkan failed: ended by SIGABRT"),
    ],
)
def test_a_vulkan_build_without_a_device_says_why(
    vulkan_build: Path, tmp_path: Path, devices: int, cause: Cause, note: str
) -> None:
    found = by_vulkan(vulkan_build, devices, tmp_path)
    assert found.gpus == () and found.cause is cause and note in (found.note or "")


def test_an_ill_vulkan_driver_takes_no_card_away(vulkan_build: Path, tmp_path: Path) -> None:
    device = tmp_path / "sys/class/drm/card0/device"
    device.mkdir(parents=True)
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/kfd").touch()
    (device / "mem_info_vram_total").write_text(str(16 * GIB))
    (device / "mem_info_vram_used").write_text("0")
    assert [gpu.vendor for gpu in by_vulkan(vulkan_build, 9, tmp_path).gpus] == ["amd"]
    assert [gpu.vendor for gpu in by_vulkan(vulkan_build, 1, tmp_path).gpus] == ["amd", VULKAN]

"""GPUs as drivers tell of them: NVIDIA's by the real nvidia-ml-py over a made-up library with the
real ABI. No GPU is needed, and none is looked at.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from crossover.models import child_process
from crossover.serving.errors import Cause
from crossover.serving.hardware.gpus import FoundGpus, GpuFacts, visible
from tests.tools.fake_nvml import built

GIB = 1 << 30


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = built(tmp_path_factory.mktemp("nvml"))
    if folder is None:
        pytest.skip("there is no C compiler to build the made-up driver's library")
    return folder


def output_beside(library: Path, wrong: str, code: str) -> Any:
    """What Python code prints, as JSON, beside such a driver."""
    environment = {**os.environ, "LD_LIBRARY_PATH": str(library), "FAKE_NVML": wrong}
    environment["PYTHONPATH"] = child_process.python_variables()["PYTHONPATH"]
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=60
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return msgspec.json.decode(done.stdout)


def listed(library: Path, wrong: str) -> FoundGpus:
    code = (
        "import msgspec, crossover.serving.hardware.gpus as n; "
        "print(msgspec.json.encode(n.list_gpus()).decode())"
    )
    return msgspec.convert(output_beside(library, wrong, code), FoundGpus)


def test_gpus_of_an_old_driver_of_a_lost_gpu_and_of_a_divided_one(library: Path) -> None:
    one, two = listed(library, "").gpus
    assert (one.name, two.uuid, one.driver) == ("Made-up GPU 1", "GPU-0002", "470.1")
    assert (one.total_bytes, one.free_bytes) == (24 * GIB, 23 * GIB)

    lost = listed(library, "lost")
    assert [gpu.uuid for gpu in lost.gpus] == ["GPU-0002"] and lost.cause is None
    assert "GPU 0 cannot be read: GPU is lost" in (lost.note or "")

    divided = listed(library, "mig")
    assert [gpu.uuid for gpu in divided.gpus] == ["GPU-0001"]
    assert "GPU 1 cannot be read: it is divided into MIG partitions" in (divided.note or "")


@pytest.mark.parametrize(
    ("wrong", "cause"), [("mismatch", Cause.driver_mismatch), ("not_loaded", Cause.no_driver)]
)
def test_a_driver_that_does_not_start_is_a_cause(library: Path, wrong: str, cause: Cause) -> None:
    found = listed(library, wrong)
    assert found.gpus == () and found.cause is cause and found.note


def test_the_sampler_survives_an_old_driver(library: Path) -> None:
    code = (
        "import msgspec, os; from crossover.loadtests.host.resource_sampler import GpuMeter;"
        "os.environ['CUDA_VISIBLE_DEVICES'] = 'GPU-0002'; gpu = GpuMeter();"
        "import subprocess, sys;"
        "wait = 'import time; print(1, flush=True); time.sleep(60)';"
        "engine = subprocess.Popen([sys.executable, '-c', wait], stdout=subprocess.PIPE);"
        "engine.stdout.readline();"
        "found = gpu.read([engine.pid]); engine.kill();"
        "print(msgspec.json.encode(found).decode())"
    )
    found = output_beside(library, "", code)
    assert found["gpu_watts"] == 200.0, "the engine's GPU, not the first"
    assert (found["gpu_memory_bytes"], found["gpu_energy_joules"]) == (2 * GIB, 5000.0)
    assert found["gpu_throttled"] is None


@pytest.mark.parametrize(
    ("visible_devices", "left"),
    [
        (None, ["GPU-1", "GPU-2"]),
        ("1", ["GPU-2"]),
        ("1,0", ["GPU-1", "GPU-2"]),
        ("GPU-1", ["GPU-1"]),
        ("", []),
    ],
)
def test_gpus_that_are_hidden_from_us_are_no_place(
    visible_devices: str | None, left: list[str]
) -> None:
    gpus = GpuFacts("A", "nvidia", uuid="GPU-1"), GpuFacts("B", "nvidia", uuid="GPU-2", index=1)
    assert [gpu.uuid for gpu in visible(gpus, visible_devices)] == left

"""Variables of an engine's process: its configuration, its threads, its GPU, its allocator."""

from __future__ import annotations

import json
import os

import msgspec

from serving.backends import spec_of
from serving.backends.base import EngineConfig
from serving.hardware.gpu_facts import VULKAN

CONFIG_VARIABLE = "CROSSOVER_ENGINE"
SOCKET_VARIABLE = "CROSSOVER_ENGINE_FD"
_TUNABLES = "GLIBC_TUNABLES"
_HUGE_PAGES = "glibc.malloc.hugetlb"
# Of a thread of OpenMP that waits for one without a core, before it leaves its own to it; 300,000
# by default. Two threads, two cores and other work on both (load 7): 9 tokens/s, and 12 with this.
SHORT_SPINS = "1000"


def environment(config: EngineConfig, socket_number: int) -> dict[str, str]:
    """Variables of the engine beside ours: its configuration, thread counts, the allocator."""
    threads = str(config.threads or len(config.cores) or len(os.sched_getaffinity(0)))
    variables = {
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "OPENBLAS_NUM_THREADS": "1",  # numpy samples on one thread beside the engine's own
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",  # weights are resolved before; an engine opens no connection
        CONFIG_VARIABLE: json.dumps(msgspec.to_builtins(config)),
        SOCKET_VARIABLE: str(socket_number),
    } | allocator(config.backend)
    variables |= visible_devices(config)
    if config.nice:
        variables["GOMP_SPINCOUNT"] = os.environ.get("GOMP_SPINCOUNT", SHORT_SPINS)
    return variables


def visible_devices(config: EngineConfig) -> dict[str, str]:
    """Which GPUs the engine sees: none on the CPU, else the one that was placed on, by its UUID.

    Drivers and runtimes number GPUs differently. HIP takes an empty list as none at all, and -1 as
    no GPU, and counts within ROCm's list: an inherited number may mean none of it. Of Vulkan's
    devices, llama.cpp is told one when it loads.
    """
    if config.device == "cpu":
        nobody = dict.fromkeys(("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"), "-1")
        return nobody | {"GGML_VK_VISIBLE_DEVICES": ""}
    if not config.device_id or config.device_vendor == VULKAN:
        return {}
    if config.device_vendor == "amd":
        return {"ROCR_VISIBLE_DEVICES": config.device_id, "HIP_VISIBLE_DEVICES": "0"}
    return {"CUDA_VISIBLE_DEVICES": config.device_id}


def allocator(backend: str) -> dict[str, str]:
    """What glibc's allocator is told (huge_pages in serving.backends); GLIBC_TUNABLES come first.

    GLIBC_TUNABLES=glibc.malloc.hugetlb=0 turns huge pages off.
    """
    given = os.environ.get(_TUNABLES, "")
    if not spec_of(backend).huge_pages or _HUGE_PAGES in given:
        return {}
    return {_TUNABLES: ":".join(filter(None, (given, f"{_HUGE_PAGES}=1")))}

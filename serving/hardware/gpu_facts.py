"""What is known of a GPU, whoever made it."""

from __future__ import annotations

import msgspec

from serving.errors import Cause

VULKAN = "vulkan"  # the vendor of what a build of llama.cpp drives by Vulkan, whoever made it


class GpuFacts(msgspec.Struct, frozen=True):
    """One GPU, or one part of a divided one, as its driver describes it. Not told is None."""

    name: str
    vendor: str  # "nvidia", "amd" or VULKAN
    total_bytes: int | None = None
    free_bytes: int | None = None
    driver: str | None = None
    compute_capability: str | None = None  # "9.0"; NVIDIA only
    index: int = 0  # in the driver's order, which is not that of CUDA
    uuid: str | None = None  # by which an engine is given this one and no other; or its name
    power_limit_watts: float | None = None
    core_hertz: float | None = None  # at most
    memory_hertz: float | None = None  # at most
    pcie_generation: int | None = None
    pcie_lanes: int | None = None
    has_ecc: bool | None = None
    is_part: bool = False  # of a GPU that is divided (MIG)


class FoundGpus(msgspec.Struct, frozen=True):
    """The GPUs, or the cause why there is none; `note`: why, or which GPU cannot be read."""

    gpus: tuple[GpuFacts, ...] = ()
    cause: Cause | None = None
    note: str | None = None


class GpuMemory(msgspec.Struct, frozen=True):
    """One GPU's memory by its driver, in bytes, what other processes hold included."""

    index: int
    name: str
    used_bytes: int
    total_bytes: int
    uuid: str | None = None

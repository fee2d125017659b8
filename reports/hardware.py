"""GPUs and CPUs that one can buy or rent: hardware.toml as records, and what a GPU would need to take a model over.

    >>> [device.name for device in sufficient(gpus(), need_bytes=20 * 2**30)][:2]
    ['NVIDIA L4', 'NVIDIA A10G']

Everything in here is **published** (facts, prices) or **predicted** (needs, floors); nothing is measured. Sizes are bytes, rates bytes/s.
"""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Iterable
from importlib import resources

import msgspec

from models.formats import weight_bytes
from models.spec import ModelSpec
from reports.errors import ReportError
from reports.formatting import GIB

# What the driver leaves of the memory on the label, at least: L4 23034 of 24576 MiB, L40S 46068 of 49152, T4 15360 of 16384 (nvidia-smi).
USABLE_SHARE = 0.937
# Beside weights and KV on a GPU: CUDA context about 0.5 GiB, 0.13-0.6 GiB outside the allocator, buffers of a step (llm-d's measurements).
GPU_FIXED_BYTES = 1 * GIB
GPU_WEIGHT_SHARE = 0.05
# The sizes that cards come in, for the lines of a chart.
CARD_SIZES_GIB: tuple[int, ...] = (8, 16, 24, 48, 80)


class Device(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One entry of hardware.toml. Missing is None: not known, or not for rent."""

    name: str
    bandwidth_gb_per_second: float
    source: str
    confidence: str
    memory_gib: float | None = None
    dense_tflops: float | None = None
    watts: float | None = None
    dollars_per_hour: float | None = None
    price_basis: str | None = None
    price_source: str | None = None
    price_date: str | None = None

    @property
    def usable_bytes(self) -> float | None:
        return None if self.memory_gib is None else self.memory_gib * GIB * USABLE_SHARE


class _Catalogue(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    gpu: list[Device]
    cpu: list[Device]


class Need(msgspec.Struct, frozen=True):
    """The memory that serving one model takes on a GPU, in bytes. Predicted."""

    weight_format: str
    weight_bytes: int
    kv_bytes: int
    overhead_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.weight_bytes + self.kv_bytes + self.overhead_bytes


@functools.cache
def _catalogue() -> _Catalogue:
    text = resources.files("reports").joinpath("hardware.toml").read_text(encoding="utf-8")
    try:
        return msgspec.convert(tomllib.loads(text), _Catalogue)
    except (msgspec.ValidationError, tomllib.TOMLDecodeError) as problem:
        raise ReportError(f"reports/hardware.toml is broken: {problem}") from problem


def gpus() -> tuple[Device, ...]:
    """The GPUs of hardware.toml, smallest memory first."""
    return tuple(sorted(_catalogue().gpu, key=lambda device: (device.memory_gib or 0, device.dollars_per_hour or 1e9)))


def cpus() -> tuple[Device, ...]:
    """The CPUs of hardware.toml, lowest bandwidth first."""
    return tuple(sorted(_catalogue().cpu, key=lambda device: device.bandwidth_gb_per_second))


def gpu_need(spec: ModelSpec, weight_format: str, kv_tokens: int, kv_dtype: str = "fp16") -> Need:
    """Weights as their file has them, KV for `kv_tokens` tokens of all requests, overhead. Raises KeyError for an unknown format."""
    weights = weight_bytes(spec, weight_format)
    return Need(
        weight_format=weight_format,
        weight_bytes=weights,
        kv_bytes=kv_tokens * spec.kv_bytes_per_token(kv_dtype),
        overhead_bytes=GPU_FIXED_BYTES + int(GPU_WEIGHT_SHARE * weights),
    )


def sufficient(devices: Iterable[Device], need_bytes: float) -> list[Device]:
    """Those whose memory suffices, in the order given. Memory only: see `tpot_floor_seconds` for the time."""
    return [device for device in devices if device.usable_bytes is not None and device.usable_bytes >= need_bytes]


def tpot_floor_seconds(device: Device, spec: ModelSpec, weight_format: str, context_tokens: int, kv_dtype: str = "fp16") -> float:
    """No token of a single stream can come quicker: each reads all weights and the KV before it once, at the peak of the memory.

    A lower bound, not a forecast: real engines reach 0.57 (HBM, llama.cpp) to 0.88 of the peak, plus 1 to 5 ms a step.
    """
    read_bytes = weight_bytes(spec, weight_format) + context_tokens * spec.kv_bytes_per_token(kv_dtype)
    return read_bytes / (device.bandwidth_gb_per_second * 1e9)

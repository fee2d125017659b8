"""Arithmetic from a model's shape: the memory that it takes here and on a GPU, and the TPOT floor.

Everything in here is **predicted**. Sizes are bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from models.formats import weight_bytes
from models.formatting import GIB
from models.spec import ModelSpec
from reports.numbers import CellNumbers, MemoryNumbers
from reports.planning.hardware import Device
from serving.backends.backend_table import KvRequest, spec_of
from serving.errors import BackendUnavailable
from serving.placement.memory_estimate import extra_weight_bytes, overhead_bytes

# On a GPU beside weights and KV, but for vLLM: CUDA context about 0.5 GiB, 0.13-0.6 GiB outside
# the allocator, buffers of a step (llm-d's measurements).
GPU_FIXED_BYTES = 1 * GIB
GPU_WEIGHT_SHARE = 0.05


class Need(msgspec.Struct, frozen=True):
    """The memory that serving one model takes on a GPU."""

    weight_bytes: int
    kv_bytes: int
    overhead_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.weight_bytes + self.kv_bytes + self.overhead_bytes


def memory_here(spec: ModelSpec, cell: CellNumbers, facts: Mapping[str, Any]) -> MemoryNumbers:
    """What a model takes with a cell's format, KV cache and engine, as placement predicts it.

    Matrices that are held twice count as weights, as the engine accounts for them.
    `facts` are those of the machine that serves, without CPU flags where they are not known.
    All None where the format, the KV cache or the machine of an endpoint is not known.
    """
    device = cell.device or ("cpu" if cell.url is None else None)
    if cell.kv_tokens is None or device is None:
        return MemoryNumbers()
    isa = frozenset(facts.get("isa") or ())
    try:
        weights = weight_bytes(spec, cell.weight_format)
        kv = cell.kv_tokens * spec.kv_bytes_per_token(cell.kv_held or _held(cell, device, isa))
    except (KeyError, BackendUnavailable):
        return MemoryNumbers()
    engine = (cell.backend, device, cell.weight_format)
    overhead = overhead_bytes(*engine, weights, spec, cell.slots or 1, isa)
    extra = extra_weight_bytes(*engine, spec, isa)
    return MemoryNumbers(weight_bytes=weights + extra, kv_bytes=kv, overhead_bytes=overhead - extra)


def _held(cell: CellNumbers, device: str, isa: frozenset[str]) -> str:
    """The KV type of an engine that was never asked: a cell that was skipped."""
    request = KvRequest(cell.kv_dtype, cell.weight_format, device, isa)
    return spec_of(cell.backend).kv_dtype(request)


def gpu_need(spec: ModelSpec, weight_format: str, kv_tokens: int, kv_dtype: str = "fp16") -> Need:
    """Weights as their file has them, KV and overhead. Raises KeyError for an unknown format."""
    weights = weight_bytes(spec, weight_format)
    kv = kv_tokens * spec.kv_bytes_per_token(kv_dtype)
    return Need(weights, kv, GPU_FIXED_BYTES + int(GPU_WEIGHT_SHARE * weights))


def need_of(cell: CellNumbers) -> Need | None:
    """What a cell takes on a GPU; None where its shape, format or KV cache is not known."""
    if cell.spec is None or cell.kv_tokens is None:
        return None
    try:
        return gpu_need(cell.spec, cell.weight_format, cell.kv_tokens, cell.kv_dtype)
    except KeyError:
        return None


def known_weight_bytes(spec: ModelSpec | None, weight_format: str) -> int | None:
    """As a file of that format has them; None where shape or format is not known."""
    try:
        return None if spec is None else weight_bytes(spec, weight_format)
    except KeyError:
        return None


def token_bytes(
    spec: ModelSpec, weight_format: str, context_tokens: int, kv_dtype: str = "fp16"
) -> int:
    """Bytes read for one token of a single stream: all weights, and the KV before it."""
    return weight_bytes(spec, weight_format) + context_tokens * spec.kv_bytes_per_token(kv_dtype)


class Roofline(msgspec.Struct, frozen=True):
    """What a GPU cannot beat, by the peaks on its datasheet. Bounds, not forecasts.

    `ttft_seconds` is of a mean prompt alone. `rate_per_second` is of requests of mean lengths with
    every slot decoding; without the arithmetic peak it is by bandwidth alone. None: not known.
    """

    tpot_seconds: float
    ttft_seconds: float | None = None
    rate_per_second: float | None = None
    has_arithmetic: bool = True  # False: the datasheet's arithmetic peak is not in the list


def roofline(device: Device, cell: CellNumbers, lengths: tuple[int, int] | None) -> Roofline | None:
    """For the cell's model, format, slots and mean (prompt, output) tokens.

    A step reads all weights once for its streams and the KV of each; a token costs two operations a
    parameter, at the 16-bit peak. None: the shape or the format is not known.
    """
    if cell.spec is None:
        return None
    prompt, output = lengths or (0, 0)
    context = prompt + output // 2
    try:
        weights = weight_bytes(cell.spec, cell.weight_format)
        alone = token_bytes(cell.spec, cell.weight_format, context, cell.kv_dtype)
    except KeyError:
        return None
    per_second = (device.dense_tflops or 0.0) * 1e12
    arithmetic = 2 * cell.spec.parameters / per_second if per_second else 0.0  # s a token
    bandwidth = device.bandwidth_gb_per_second * 1e9
    tpot = max(tpot_floor_seconds(device, alone), arithmetic)
    if lengths is None:
        return Roofline(tpot, has_arithmetic=bool(per_second))
    read = (weights / (cell.slots or 1) + alone - weights) / bandwidth
    busy = prompt * arithmetic + output * max(arithmetic, read)
    return Roofline(
        tpot,
        max(prompt * arithmetic, weights / bandwidth),
        1 / busy if busy else None,
        bool(per_second),
    )


def tpot_floor_seconds(device: Device, read_bytes: int) -> float:
    """The least time per token, at the peak of the memory bandwidth. A bound, not a forecast.

    Real engines reach 0.57 (HBM, llama.cpp) to 0.88 of the peak, plus 1 to 5 ms a step.
    """
    return read_bytes / (device.bandwidth_gb_per_second * 1e9)

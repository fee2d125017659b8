"""What goes to the device: the numbers of a step, which nobody waits for, and the weights.

A copy from pageable memory, as `torch.tensor(values, device=...)` makes one, holds the host until
the device has done all that was asked before. So a step's numbers go in one page-locked buffer.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

GRAIN_BYTES = 16  # parts begin at multiples, so that any type can be seen in them
STAGE_BYTES = 64 << 20  # of weights that are read, then moved
Array = npt.NDArray[Any]


def send(arrays: Sequence[Array], device: torch.device) -> list[Tensor]:
    """The arrays as tensors on the device, all in one copy that the host does not wait for."""
    if device.type == "cpu":
        return [torch.from_numpy(np.ascontiguousarray(array)) for array in arrays]
    host = torch.empty(packed_bytes(arrays), dtype=torch.uint8, pin_memory=device.type == "cuda")
    pack(arrays, host.numpy())
    return unpacked(arrays, host.to(device, non_blocking=True))


def fetch(tensor: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
    """The tensor on the host, and what to wait for before it is read there; None: nothing."""
    if tensor.device.type == "cpu":
        return tensor, None
    on_cuda = tensor.device.type == "cuda"
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=on_cuda)
    host.copy_(tensor, non_blocking=True)
    if not on_cuda:
        return host, None
    copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
    copied.record()
    return host, copied


def packed_bytes(arrays: Sequence[Array]) -> int:
    """Bytes of the arrays one after the other."""
    return sum(_padded(array) for array in arrays)


def pack(arrays: Sequence[Array], buffer: npt.NDArray[np.uint8]) -> None:
    """Write the arrays one after the other into a buffer of `packed_bytes`."""
    first = 0
    for array in arrays:
        flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        buffer[first : first + flat.size] = flat
        first += _padded(array)


def unpacked(arrays: Sequence[Array], buffer: Tensor) -> list[Tensor]:
    """Views of a packed uint8 buffer with the types and shapes of `arrays`."""
    views, first = [], 0
    for array in arrays:
        part = buffer[first : first + array.nbytes]
        views.append(part.view(_TYPES[array.dtype.name]).view(array.shape))
        first += _padded(array)
    return views


_TYPES = {"int32": torch.int32, "int64": torch.int64, "float64": torch.float64}


def _padded(array: Array) -> int:
    return -(-array.nbytes // GRAIN_BYTES) * GRAIN_BYTES


class Uplink:
    """Moves weights to a GPU through a page-locked buffer; knows how long both parts took."""

    def __init__(self, device: torch.device) -> None:
        self.read_seconds = 0.0  # from the mapped file, or the kernel's cache of it
        self.transfer_seconds = 0.0  # over the bus
        self.bytes = 0
        self._device = device
        pins = device.type == "cuda"
        self._stage = torch.empty(STAGE_BYTES, dtype=torch.uint8, pin_memory=pins)

    def __call__(self, tensor: Tensor) -> Tensor:
        """The tensor on the device."""
        moved = torch.empty(tensor.shape, dtype=tensor.dtype, device=self._device)
        source, target = (one.reshape(-1).view(torch.uint8) for one in (tensor.contiguous(), moved))
        for first in range(0, len(source), STAGE_BYTES):
            part = source[first : first + STAGE_BYTES]
            began = time.perf_counter()
            stage = self._stage[: len(part)].copy_(part)
            read = time.perf_counter()
            target[first : first + len(part)].copy_(stage)
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
            self.read_seconds += read - began
            self.transfer_seconds += time.perf_counter() - read
        self.bytes += len(source)
        return moved

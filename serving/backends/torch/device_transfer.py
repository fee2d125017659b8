"""Numbers of a step to the device and back, by copies that nobody waits for.

A copy from pageable memory, as `torch.tensor(values, device=...)` makes one, holds the host until
the device has done all that was asked before. So a step's numbers go in one page-locked buffer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

GRAIN_BYTES = 16  # parts begin at multiples, so that any type can be seen in them
_TYPES = {"int32": torch.int32, "int64": torch.int64, "float64": torch.float64}


def send(arrays: Sequence[npt.NDArray[Any]], device: torch.device) -> list[Tensor]:
    """The arrays as tensors on the device, all in one copy that the host does not wait for."""
    arrays = [np.ascontiguousarray(array) for array in arrays]
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    ends = np.cumsum([-(-array.nbytes // GRAIN_BYTES) * GRAIN_BYTES for array in arrays]).tolist()
    places = [
        slice(end, end + array.nbytes) for end, array in zip([0, *ends], arrays, strict=False)
    ]
    host = torch.empty(ends[-1], dtype=torch.uint8, pin_memory=device.type == "cuda")
    for place, array in zip(places, arrays, strict=True):
        host.numpy()[place] = array.reshape(-1).view(np.uint8)
    there = host.to(device, non_blocking=True)
    return [
        there[place].view(_TYPES[array.dtype.name]).view(array.shape)
        for place, array in zip(places, arrays, strict=True)
    ]


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

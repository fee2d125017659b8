"""What a load on a GPU takes: memory by NVML, by the driver and by torch's allocator, and time."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import torch

from serving.backends.base import GpuLoad
from serving.backends.torch.transfer import Uplink
from serving.hardware.gpu import gpu_memory
from serving.hardware.gpu_facts import GpuMemory


class LoadWatch:
    """Marks memory and time while an engine loads. To be made before CUDA is first used."""

    def __init__(self, device: torch.device) -> None:
        self.uplink = Uplink(device)
        self.weight_bytes: int | None = None
        self.kv_bytes: int | None = None
        self.graph_bytes: int | None = None
        self.largest_step_bytes: int | None = None
        self.capture_seconds: float | None = None
        self.first_step_seconds: float | None = None
        before = own_memory()
        self.free_bytes, self.total_bytes = torch.cuda.mem_get_info()  # makes the context
        self._context = _difference(before, own_memory())

    def captured(self, capture: Callable[[], None]) -> None:
        """Time the capture of graphs, and the memory that their pool keeps."""
        torch.cuda.empty_cache()
        before, began = torch.cuda.memory_reserved(), time.perf_counter()
        capture()
        torch.cuda.synchronize()
        self.capture_seconds = time.perf_counter() - began
        torch.cuda.empty_cache()
        self.graph_bytes = max(0, torch.cuda.memory_reserved() - before)

    def first_step(self, step: Callable[[], None]) -> None:
        """Time the first steps, which load and build what all later ones use."""
        began = time.perf_counter()
        step()
        torch.cuda.synchronize()
        self.first_step_seconds = time.perf_counter() - began

    def peak_of(self, step: Callable[[], None]) -> int:
        """Most bytes that a step has in tensors beyond those that are there before it."""
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        torch.cuda.synchronize()
        return max(0, torch.cuda.max_memory_allocated() - before)

    def account(self) -> GpuLoad:
        """Where memory and time went, now that all is loaded and warm."""
        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info()
        reserved = torch.cuda.memory_reserved()
        known = [self.weight_bytes, self.kv_bytes, self.graph_bytes]
        rest = reserved - sum(part or 0 for part in known)
        reasons = []
        if rest < 0:
            reasons.append("the allocator holds less than weights, KV cache and graphs together")
        if self._context is None:
            reasons.append("context: NVML does not say what this GPU holds")
        elif self._context < 0:
            reasons.append("context: another process gave memory back meanwhile")
        is_known = self._context is not None and self._context >= 0
        return GpuLoad(
            weight_bytes=self.weight_bytes,
            kv_bytes=self.kv_bytes,
            graph_bytes=self.graph_bytes,
            workspace_bytes=rest if rest >= 0 else None,
            context_bytes=self._context if is_known else None,
            allocated_bytes=torch.cuda.memory_allocated(),
            reserved_bytes=reserved,
            largest_step_bytes=self.largest_step_bytes,
            device_used_bytes=total - free,
            device_total_bytes=total,
            read_seconds=self.uplink.read_seconds,
            transfer_seconds=self.uplink.transfer_seconds,
            capture_seconds=self.capture_seconds,
            first_step_seconds=self.first_step_seconds,
            valid=not reasons,
            reasons=tuple(reasons),
        )


def own_memory() -> GpuMemory | None:
    """What NVML says of this process's GPU; None: nothing, or there are several and none is named.

    NVML counts GPUs its own way, so CUDA_VISIBLE_DEVICES tells which one only as a UUID.
    """
    found = gpu_memory()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    named = [one for one in found if one.uuid and one.uuid == visible]
    if named:
        return named[0]
    return found[0] if len(found) == 1 else None


def _difference(before: GpuMemory | None, after: GpuMemory | None) -> int | None:
    if before is None or after is None:
        return None
    return after.used_bytes - before.used_bytes

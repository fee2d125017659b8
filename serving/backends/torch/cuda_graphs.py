"""CUDA graphs of the decode step, one per (batch bucket, context bucket).

Launching the kernels of 24 layers takes Python 5 to 8 ms, the GPU's work less than 1 ms. A graph
has fixed shapes: batch and context are rounded up to buckets, and the rows that fill up a bucket
compute a dummy token. Graphs share a memory pool and are captured largest first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from serving.backends.torch.model import DecodeSpan, SlotModel


def batch_buckets(rows: int) -> list[int]:
    """1, 2, 4, 8, multiples of 8 up to 64, then of 32, and `rows` itself."""
    sizes = [size for size in (1, 2, 4) if size < rows]
    size = 8
    while size < rows:
        sizes.append(size)
        size += 8 if size < 64 else 32
    return [*sizes, rows]


def context_buckets(width: int) -> list[int]:
    """256, 512, 1024, ... and the cache's whole `width`."""
    sizes, size = [], 256
    while size < width:
        sizes.append(size)
        size *= 2
    return [*sizes, width]


def bucket_of(size: int, buckets: list[int]) -> int:
    """The smallest bucket that holds `size`. Raises ValueError where none does."""
    for bucket in buckets:
        if bucket >= size:
            return bucket
    raise ValueError(f"{size} is more than the largest bucket, {buckets[-1]}")


@dataclass
class Captured:
    """A graph with the tensors it reads and writes."""

    graph: Any
    ids: Tensor  # int64 [batch]
    positions: Tensor  # int64 [batch]
    logits: Tensor  # float32 [batch, vocabulary]


class DecodeGraphs:
    """The decode step by bucket. With `capture=False` the same code runs eagerly, on any device."""

    def __init__(
        self,
        model: SlotModel,
        rows: int,
        *,
        capture: bool,
        progress: Callable[[str, float | None], None] | None = None,
    ) -> None:
        self._model = model
        self._device = model.device
        self.batches = batch_buckets(rows)
        self.contexts = context_buckets(model.width)
        self._columns = torch.arange(model.width, device=self._device)
        self._index = torch.arange(rows, device=self._device)
        self._closed = torch.full((), float("-inf"), dtype=model.dtype, device=self._device)
        self._captured: dict[tuple[int, int], Captured] = {}
        if capture:
            self._capture_all(progress or (lambda what, fraction: None))

    def run(self, ids: Tensor, positions: Tensor, longest: int) -> Tensor:
        """Logits float32 [n, vocabulary] of one token in each of rows 0..n-1, n a batch bucket.

        `ids`, `positions`: int64 [n] on the host. The next run overwrites the result.
        """
        width = bucket_of(longest, self.contexts)
        captured = self._captured.get((len(ids), width))
        if captured is None:
            return self._step(ids.to(self._device), positions.to(self._device), width)
        captured.ids.copy_(ids, non_blocking=True)
        captured.positions.copy_(positions, non_blocking=True)
        captured.graph.replay()
        return captured.logits

    def _step(self, ids: Tensor, positions: Tensor, width: int) -> Tensor:
        count = len(ids)
        allowed = self._columns[None, :width] <= positions[:, None]
        mask = torch.where(allowed, 0.0, self._closed)[:, None, None]
        return self._model.forward(
            ids, positions, [DecodeSpan(0, 0, count, mask, self._index[:count])], None
        )

    def _capture_all(self, progress: Callable[[str, float | None], None]) -> None:
        shapes = [
            (batch, width) for width in reversed(self.contexts) for batch in reversed(self.batches)
        ]
        pool = None
        for done, (batch, width) in enumerate(shapes):
            progress(
                f"capturing the decode step for {batch} rows of up to {width} tokens",
                done / len(shapes),
            )
            ids = torch.zeros(batch, dtype=torch.int64, device=self._device)
            positions = torch.zeros(batch, dtype=torch.int64, device=self._device)
            stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):  # lazy initialisations must not fall into a capture
                for _ in range(2):
                    self._step(ids, positions, width)
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                logits = self._step(ids, positions, width)
            pool = pool or graph.pool()
            self._captured[batch, width] = Captured(graph, ids, positions, logits)

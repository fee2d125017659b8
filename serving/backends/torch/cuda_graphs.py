"""CUDA graphs of the decode step: one per batch bucket, and per context bucket for plain attention.

Launching the kernels of 24 layers takes Python 5 to 8 ms, the GPU's work less than 1 ms. A graph
has fixed shapes: the batch is rounded up to a bucket, and the rows that fill it up compute a dummy
token. With flash attention that is all; plain attention also has contexts rounded up.

Graphs share a memory pool and are captured largest first, on one stream: cuBLAS keeps a workspace
for each (pytorch issue 99196). What they read and write lies outside of the pool, once for all.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from models.manifest import Progress
from serving.backends.torch.forward_pass import SlotModel, additive_mask, known
from serving.backends.torch.varlen_attention import FlashStep, PlainStep


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


class DecodeGraphs:
    """The decode step by bucket. With `capture=False` the same code runs eagerly, on any device.

    `logits`: float32 [at least rows, vocabulary], where every step writes.
    """

    def __init__(
        self, model: SlotModel, rows: int, logits: Tensor, capture: bool, progress: Progress
    ) -> None:
        self._model = model
        self._logits = logits
        self.batches = batch_buckets(rows)
        self.contexts = [model.width] if model.is_flash else context_buckets(model.width)
        self._inputs = torch.zeros(3 * rows, dtype=torch.int64, device=model.device)
        self._rows = torch.arange(rows + 1, device=model.device)
        self._starts_q, self._starts_k = self._rows.int(), (self._rows * model.width).int()
        self._captured: dict[tuple[int, int], Any] = {}
        if capture:
            self._capture_all(progress)

    def run(
        self, host: Tensor, batch: int, longest: int, drawn: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Logits float32 [batch, vocabulary] of one token in each of rows 0..batch-1, a bucket.

        `host`: int64 on the host: `batch` tokens, their positions, and up to `batch` more numbers,
        which come back on the device. `longest`: keys of the longest row. The next run overwrites
        both results. `drawn`: see forward_pass.known.
        """
        width = bucket_of(longest, self.contexts)
        self._inputs[: len(host)].copy_(host, non_blocking=True)
        if drawn is not None:
            ids = self._inputs[:batch]
            ids.copy_(known(ids, drawn))
        graph = self._captured.get((batch, width))
        if graph is None:
            self._step(batch, width)
        else:
            graph.replay()
        return self._logits[:batch], self._inputs[2 * batch : len(host)]

    def _step(self, batch: int, width: int) -> None:
        ids, positions = self._inputs[:batch], self._inputs[batch : 2 * batch]
        step: FlashStep | PlainStep
        if self._model.is_flash:
            starts_q, starts_k = self._starts_q[: batch + 1], self._starts_k[: batch + 1]
            at = torch.add(positions, self._rows[:batch], alpha=width)
            step = FlashStep(at, starts_q, starts_k, (positions + 1).int(), 1, width)
        else:
            allowed = self._model.columns[None, :width] <= positions[:, None]
            mask = additive_mask(allowed, self._model.dtype)[:, None, None]
            step = PlainStep(self._rows[:batch], positions, 0, batch, mask, [])
        self._model.forward(ids, positions, step, None, self._logits)

    def _capture_all(self, progress: Progress) -> None:
        widths, batches = reversed(self.contexts), self.batches[::-1]
        shapes = [(batch, width) for width in widths for batch in batches]
        pool = None
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        for done, (batch, width) in enumerate(shapes):
            what = f"capturing the decode step for {batch} rows of up to {width} tokens"
            progress(what, done / len(shapes))
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):  # lazy initialisations must not fall into a capture
                self._step(batch, width)
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool, stream=stream):
                self._step(batch, width)
            pool = pool or graph.pool()
            self._captured[batch, width] = graph

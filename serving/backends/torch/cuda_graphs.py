"""CUDA graphs of the decode step with flash attention, one per batch bucket.

Launching the kernels of 24 layers takes Python 5 to 8 ms, the GPU's work less than 1 ms. A graph
has fixed shapes: the batch is rounded up to a bucket, and what fills it up computes a dummy token
in the cache's spare place. An entry may be of any KV row and its context of any length.

Graphs share a memory pool and are captured largest first, on one stream: cuBLAS keeps a workspace
for each (pytorch issue 99196). What they read and write lies outside of the pool, once for all.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from models.weights_manifest import Progress
from serving.backends.torch.forward_pass import SlotModel, known
from serving.backends.torch.varlen_attention import FlashStep
from serving.sampling.step_inputs import Row


def batch_buckets(rows: int) -> list[int]:
    """1, 2, 4, 8, ... and `rows` itself."""
    return [*(1 << power for power in range((rows - 1).bit_length())), rows]


class DecodeGraphs:
    """The decode step by bucket. With `capture=False` the same code runs eagerly, on any device.

    `logits`: float32 [at least rows, vocabulary], where every step writes.
    """

    def __init__(
        self, model: SlotModel, rows: int, logits: Tensor, capture: bool, progress: Progress
    ) -> None:
        self._model = model
        self._logits = logits
        self._spare = rows  # the KV row of dummy tokens
        self._batches = batch_buckets(rows)
        self._inputs = torch.zeros(3 * rows + 1, dtype=torch.int64, device=model.device)
        self._starts = torch.arange(rows + 1, dtype=torch.int32, device=model.device)
        self._captured: dict[int, Any] = {}
        if capture:
            self._capture_all(progress)

    def run(self, rows: list[Row], drawn: Tensor | None = None) -> Tensor:
        """Logits float32 [rows, vocabulary] of one token each; the next run overwrites them.
        `drawn`: see forward_pass.known."""
        batch = next(size for size in self._batches if size >= len(rows))
        fill = [0] * (batch - len(rows))
        numbers = [
            *(*(int(row.tokens[0]) for row in rows), *fill),
            *(*(row.start for row in rows), *fill),
            *(*(row.slot for row in rows), *[self._spare] * (len(fill) + 1)),
        ]
        is_pinned = self._model.device.type == "cuda"
        host = torch.tensor(numbers, dtype=torch.int64, pin_memory=is_pinned)
        self._inputs[: len(host)].copy_(host, non_blocking=True)
        if drawn is not None:
            ids = self._inputs[:batch]
            ids.copy_(known(ids, drawn))
        graph = self._captured.get(batch)
        if graph is None:
            self._step(batch)
        else:
            graph.replay()
        return self._logits[: len(rows)]

    def _step(self, batch: int) -> None:
        width = self._model.width
        ids, positions = self._inputs[:batch], self._inputs[batch : 2 * batch]
        firsts = self._inputs[2 * batch : 3 * batch + 1] * width
        at, held = firsts[:batch] + positions, (positions + 1).int()
        step = FlashStep(at, self._starts[: batch + 1], firsts.int(), held, 1, width)
        self._model.forward(ids, positions, step, None, self._logits)

    def _capture_all(self, progress: Progress) -> None:
        pool = None
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        for done, batch in enumerate(reversed(self._batches)):
            progress(f"capturing the decode step for {batch} rows", done / len(self._batches))
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):  # lazy initialisations must not fall into a capture
                self._step(batch)
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool, stream=stream):
                self._step(batch)
            pool = pool or graph.pool()
            self._captured[batch] = graph

"""CUDA graphs of whole steps with flash attention: decode rows alone, and with pieces of prompts.

Launching the kernels of a layer takes Python 0.4 ms, of which the GPU needs a tenth for a few
tokens. A graph has fixed shapes (PassShape): steps of decode rows have one for each batch bucket,
steps with prompts one for each bucket of tokens. What fills a step up is a dummy token, whose key
and value go to the cache's spare place. An entry may be of any KV row, and its context of any
length. Steps of more tokens or pieces than the largest bucket are launched kernel by kernel: from
there on, the GPU's arithmetic takes longer than that.

Graphs share a memory pool and are captured largest first, on one stream: cuBLAS keeps a workspace
for each (pytorch issue 99196). What they read and write lies outside of the pool, once for all.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from crossover.models.weights_manifest import Progress
from crossover.serving.backends.torch.forward_pass import (
    PassShape,
    SlotModel,
    in_pass_order,
    known,
    packed,
    pinned,
    unpacked,
)
from crossover.serving.backends.torch.memory_overhead import decode_buckets, token_buckets
from crossover.serving.sampling.step_inputs import Row

MAX_PIECES = 16  # of prompts in a captured step: attention's grid grows with them


class Graphs:
    """Captures functions in one pool, on one stream. With `is_capturing` False they run as they
    are, on any device."""

    def __init__(self, is_capturing: bool) -> None:
        self._stream: Any = None
        if is_capturing:
            self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._pool: Any = None

    def captured(self, function: Callable[[], object]) -> Callable[[], object]:
        """What replays the function: its kernels read and write the same memory each time."""
        if self._stream is None:
            return function
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):  # lazy initialisations must not fall into a capture
            function()
        torch.cuda.current_stream().wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            function()
        self._pool = self._pool or graph.pool()
        return graph.replay


def step_shapes(slots: int, limit: int) -> list[PassShape]:
    """The shapes that are captured, smallest first: decode rows alone, then steps with prompts of
    up to `limit` tokens."""
    alone = [PassShape(rows, rows, 0, 0) for rows in decode_buckets(slots)]
    mixed = [
        PassShape(tokens, min(tokens, slots), min(tokens // 2, MAX_PIECES), min(tokens, slots))
        for tokens in token_buckets(limit)
    ]
    return alone + mixed


class StepGraphs:
    """Steps by shape.

    `logits`: float32 [slots, vocabulary], where every step writes. `limit`: most tokens of a step
    with prompts.
    """

    def __init__(
        self, model: SlotModel, logits: Tensor, limit: int, graphs: Graphs, progress: Progress
    ) -> None:
        self._model = model
        self._logits = logits
        slots = len(logits)
        self._spare = slots * model.width  # the cache's place of dummy tokens
        self._shapes = step_shapes(slots, limit)
        most = max(sum(shape.sizes) for shape in self._shapes)
        self._inputs = torch.zeros(most, dtype=torch.int64, device=model.device)
        self._drawn = torch.zeros(slots, dtype=torch.int64, device=model.device)
        self._replays: dict[PassShape, Callable[[], object]] = {}
        largest_first = sorted(self._shapes, reverse=True)
        for done, shape in enumerate(largest_first):
            progress(f"capturing steps of {shape.tokens} tokens", done / len(largest_first))
            self._fill([], shape)
            self._replays[shape] = graphs.captured(partial(self._step, shape))

    def run(self, rows: list[Row], drawn: Tensor | None = None) -> tuple[Tensor, list[Row]] | None:
        """Logits float32 [n, vocabulary] of the rows that want a token, and these rows in the
        logits' order; the next run overwrites them. None: no graph holds so many tokens or pieces.
        `drawn`: see forward_pass.known."""
        step = PassShape.of(rows)
        shape = next((one for one in self._shapes if one.holds(step)), None)
        if shape is None:
            return None
        rows = in_pass_order(rows)
        self._fill(rows, shape)
        if drawn is not None:
            self._drawn[: len(drawn)].copy_(drawn)
        self._replays[shape]()
        wanting = [row for row in rows if row.wants_token]
        return self._logits[: len(wanting)], wanting

    def _fill(self, rows: list[Row], shape: PassShape) -> None:
        numbers = packed(rows, shape, self._model.width, self._spare)
        host = pinned(numbers, self._model.device)
        self._inputs[: len(host)].copy_(host, non_blocking=True)

    def _step(self, shape: PassShape) -> None:
        numbers = self._inputs[: sum(shape.sizes)]
        width = self._model.width
        ids, positions, wanted, step = unpacked(numbers, shape, shape.tokens, width)
        self._model.forward(known(ids, self._drawn), positions, step, wanted, self._logits)

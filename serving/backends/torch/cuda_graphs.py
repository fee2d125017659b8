"""CUDA graphs of whole steps with flash attention: of decode rows, or with pieces of prompts too.

Launching the kernels of a layer takes Python 0.4 ms. For a few tokens, the GPU needs a tenth of
that to compute them. A graph replays all launches at once, but its shape (PassShape) is fixed.
There is one graph for each bucket of decode rows, and for steps with prompts one for each bucket of
tokens. Dummy tokens fill a step up, and their keys and values go to the cache's last entry. The
rows of a step may be of any slots, with contexts of any length. Steps with more tokens or pieces
than the largest bucket are launched kernel by kernel, because the GPU then takes longer to compute
them than Python to launch them.

Graphs share a memory pool and are captured largest first, so that the smaller ones find room in it.
They are captured on one stream, because cuBLAS keeps a workspace for each stream (pytorch issue
99196). The buffers that they read and write lie outside the pool, and all graphs share them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from crossover.models.weights.weights_manifest import Progress
from crossover.serving.backends.torch.forward_pass import (
    PassLogits,
    PassShape,
    SlotModel,
    in_pass_order,
    pack,
    pinned,
    resolve_references,
    unpack,
)
from crossover.serving.backends.torch.memory_overhead import decode_buckets, token_buckets
from crossover.serving.sampling.step_inputs import Row

MAX_PIECES = 16  # of prompts in a captured step; attention takes longer with more, even if unused


class Graphs:
    """Captures functions as CUDA graphs that share one memory pool and one stream.

    `is_capturing`: False returns the functions as they are, which works on any device.
    """

    def __init__(self, is_capturing: bool) -> None:
        self._stream: Any = None
        if is_capturing:
            self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._pool: Any = None

    def captured(self, function: Callable[[], object]) -> Callable[[], object]:
        """Return a function that replays the kernels of `function`. They read and write the same
        memory each time."""
        if self._stream is None:
            return function
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            function()  # libraries initialize themselves in the first call, not in the capture
        torch.cuda.current_stream().wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            function()
        self._pool = self._pool or graph.pool()
        return graph.replay


def step_shapes(slots: int, max_tokens: int) -> list[PassShape]:
    """Return the shapes that are captured, smallest first: those of decode steps, then those of
    steps with prompts.

    `max_tokens`: the tokens of a step with prompts for which there must be a graph, if one of
    TOKEN_BUCKETS is large enough.
    """
    decode_steps = [
        PassShape(tokens=rows, decode_rows=rows, pieces=0, logits=0)
        for rows in decode_buckets(slots)
    ]
    steps_with_prompts = [
        PassShape(
            tokens=tokens,
            decode_rows=min(tokens, slots),
            pieces=min(tokens // 2, MAX_PIECES),  # a piece has at least two tokens
            logits=min(tokens, slots),
        )
        for tokens in token_buckets(max_tokens)
    ]
    return decode_steps + steps_with_prompts


class StepGraphs:
    """Captured steps, by shape.

    `logits`: float32 [slots, vocabulary], the buffer to which every step writes. `max_tokens`: see
    `step_shapes`.
    """

    def __init__(
        self, model: SlotModel, logits: Tensor, max_tokens: int, graphs: Graphs, progress: Progress
    ) -> None:
        self._model = model
        self._logits = logits
        slots = len(logits)
        self._dummy_index = slots * model.width  # the last entry of the cache
        self._shapes = step_shapes(slots, max_tokens)
        max_inputs = max(sum(shape.sizes) for shape in self._shapes)
        self._inputs = torch.zeros(max_inputs, dtype=torch.int64, device=model.device)
        self._previous_tokens = torch.zeros(slots, dtype=torch.int64, device=model.device)
        self._replays: dict[PassShape, Callable[[], object]] = {}
        largest_first = sorted(self._shapes, reverse=True)
        for number, shape in enumerate(largest_first):
            progress(f"capturing steps of {shape.tokens} tokens", number / len(largest_first))
            self._fill([], shape)
            self._replays[shape] = graphs.captured(partial(self._step, shape))

    def run(self, rows: list[Row], previous_tokens: Tensor | None = None) -> PassLogits | None:
        """Run a step as a graph; None, with nothing done, if no graph has room for its tokens or
        pieces. The next run overwrites the logits.

        `previous_tokens`: see forward_pass.resolve_references.
        """
        step = PassShape.of(rows)
        shape = next((shape for shape in self._shapes if shape.has_room_for(step)), None)
        if shape is None:
            return None
        rows = in_pass_order(rows)
        self._fill(rows, shape)
        if previous_tokens is not None:
            self._previous_tokens[: len(previous_tokens)].copy_(previous_tokens)
        self._replays[shape]()
        sampling_rows = [row for row in rows if row.wants_token]
        return PassLogits(self._logits[: len(sampling_rows)], sampling_rows)

    def _fill(self, rows: list[Row], shape: PassShape) -> None:
        """Copy the inputs of a step to the buffer that the graph of this shape reads."""
        packed = pack(rows, shape, self._model.width, self._dummy_index)
        host = pinned(packed, self._model.device)
        self._inputs[: len(host)].copy_(host, non_blocking=True)

    def _step(self, shape: PassShape) -> None:
        """Run the step in the buffer. This is what is captured, so all its sizes are maximums."""
        packed = self._inputs[: sum(shape.sizes)]
        max_keys = self._model.width
        inputs = unpack(packed, shape, shape.tokens, max_keys)
        ids = resolve_references(inputs.ids, self._previous_tokens)
        self._model.forward(ids, inputs.positions, inputs.step, inputs.logit_indices, self._logits)

"""The forward pass of crossover.models.shape.model_families, over a KV cache of fixed slots.

A step is one pass over the weights. The tokens of all decode rows and prompt pieces are laid end to
end, and only attention (varlen_attention.py) treats them as separate sequences. What the pass
computes does not depend on values that are on the device, so that a CUDA graph can capture it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from crossover.models.shape.model_spec import ModelSpec
from crossover.serving.backends.torch.torch_weights import Dense, Layer, ModelTensors
from crossover.serving.backends.torch.varlen_attention import (
    FlashStep,
    KvCache,
    PlainStep,
    Sequences,
    SlotBlock,
    Step,
)
from crossover.serving.sampling.step_inputs import Row


class SlotModel:
    """The weights, the RoPE table and the KV cache, all on the device of the cache."""

    def __init__(
        self, spec: ModelSpec, weights: ModelTensors, cache: KvCache, is_flash: bool
    ) -> None:
        self.spec = spec
        self.weights = weights
        self.cache = cache
        self.width, self.is_flash = cache.width, is_flash
        self.dtype, self.device = cache.layers[0].dtype, cache.layers[0].device
        self.columns = torch.arange(self.width, device=self.device)
        cos, sin = (table.to(self.dtype) for table in rope_tables(spec, self.width))
        # RoPE as 2 x 2 matrices over the halves of a head: [positions, 1, 2, 2, head_dim / 2].
        rotations = torch.stack((torch.stack((cos, -sin), 1), torch.stack((sin, cos), 1)), 1)
        self._rotations = rotations[:, None].to(self.device)
        self._head_norms = [_head_norm(spec, layer) for layer in weights.layers]

    def forward(
        self,
        ids: Tensor,
        positions: Tensor,
        step: Step,
        logit_indices: Tensor | None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Return the logits of n tokens, float32 [n, vocabulary].

        `ids`, `positions`: int64 [tokens]. The key and value of each token are written to the
        cache, so that it attends to itself as well. `logit_indices`: int64 [n], the indices of
        these tokens; None: all tokens. `out`: a buffer for the logits, [at least n, vocabulary].
        """
        x = functional.embedding(ids, self.weights.embedding)  # the hidden state
        rotations = self._rotations[positions]
        for index in range(len(self.weights.layers)):
            self._attend(index, x, rotations, step)
            self._feed_forward(index, x)
        if logit_indices is not None:
            x = x.index_select(0, logit_indices)
        logits = self.weights.head(self._norm(x, self.weights.norm))
        return logits.float() if out is None else out[: len(x)].copy_(logits)

    # These are functions of their own, so that the tensors of one are freed before the next begins.

    def _attend(self, index: int, x: Tensor, rotations: Tensor, step: Step) -> None:
        """Add the attention of a layer to x."""
        spec, layer, cache = self.spec, self.weights.layers[index], self.cache.layers[index]
        heads = layer.qkv(self._norm(x, layer.attention_norm)).view(len(x), -1, spec.head_dim)
        queries_and_keys = heads[:, : -spec.kv_heads]
        normed = queries_and_keys
        head_norm = self._head_norms[index]
        if head_norm is not None:
            head_shape = queries_and_keys.shape[2:]
            normed = functional.rms_norm(queries_and_keys, head_shape, None, spec.norm_epsilon)
            normed = normed * head_norm
        _rotate_into(queries_and_keys, normed, rotations)
        queries, keys_and_values = torch.split(heads, [spec.heads, 2 * spec.kv_heads], 1)
        entries = keys_and_values.view(len(x), 2, spec.kv_heads, -1)
        cache.index_copy_(0, step.cache_indices, entries)
        _add_product(x, layer.out, step.attend(queries, cache))

    def _feed_forward(self, index: int, x: Tensor) -> None:
        """Add the feed-forward part of a layer to x."""
        layer = self.weights.layers[index]
        gate, up = layer.gate_up(self._norm(x, layer.mlp_norm)).chunk(2, -1)
        _add_product(x, layer.down, functional.silu(gate).mul_(up))

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return functional.rms_norm(x, (x.shape[-1],), weight, self.spec.norm_epsilon)


class PassLogits(NamedTuple):
    """The logits of a pass, on its device."""

    logits: Tensor  # float32 [n, vocabulary]
    rows: list[Row]  # the n rows that want a token, in the order of their logits


def run_pass(
    model: SlotModel,
    rows: Sequence[Row],
    out: Tensor | None = None,
    previous_tokens: Tensor | None = None,
) -> PassLogits:
    """Run a step, kernel by kernel. `out`: a buffer for the logits of n rows, float32 [at least n,
    vocabulary]. `previous_tokens`: see `resolve_references`."""
    rows = in_pass_order(rows)
    if model.is_flash:
        logits = _flash_logits(model, rows, out, previous_tokens)
    else:
        logits = _plain_logits(model, rows, out, previous_tokens)
    sampling_rows = [row for row in rows if row.wants_token]
    return PassLogits(logits[: len(sampling_rows)], sampling_rows)


def _flash_logits(
    model: SlotModel, rows: Sequence[Row], out: Tensor | None, previous_tokens: Tensor | None
) -> Tensor:
    """Run a step with flash attention. See `run_pass`."""
    shape = PassShape.of(rows)
    max_queries = max(len(row.tokens) for row in rows)
    max_keys = max(row.position for row in rows)
    # The shape is exact, so there are no dummy tokens, and their index in the cache is not used.
    packed = to_device(pack(rows, shape, model.width, dummy_index=0), model.device)
    inputs = unpack(packed, shape, max_queries, max_keys)
    ids = resolve_references(inputs.ids, previous_tokens)
    return model.forward(ids, inputs.positions, inputs.step, inputs.logit_indices, out)


def _plain_logits(
    model: SlotModel, rows: list[Row], out: Tensor | None, previous_tokens: Tensor | None
) -> Tensor:
    """Run a step with plain attention. See `run_pass`."""
    row_tokens = np.array([len(row.tokens) for row in rows])
    row_ends = row_tokens.cumsum()  # behind the last token of each row, in the pass
    end_positions = np.array([row.position for row in rows])  # in the sequence
    slot_starts = np.array([row.slot for row in rows]) * model.width
    tokens = int(row_ends[-1])
    token_positions = np.repeat(end_positions - row_ends, row_tokens) + np.arange(tokens)
    cache_indices = token_positions + np.repeat(slot_starts, row_tokens)
    wants_token = np.array([row.wants_token for row in rows])
    logit_indices = None
    if wants_token.sum() != tokens:
        logit_indices = to_device(row_ends[wants_token] - 1, model.device)
    ids = to_device(np.concatenate([row.tokens for row in rows]).astype(np.int64), model.device)
    positions = to_device(token_positions, model.device)
    step = PlainStep(
        to_device(cache_indices, model.device), _blocks(model, rows, positions), model.width
    )
    ids = resolve_references(ids, previous_tokens)
    return model.forward(ids, positions, step, logit_indices, out)


def in_pass_order(rows: Sequence[Row]) -> list[Row]:
    """Return the rows as a pass lays them out: decode rows first, and of these the ones that want a
    token. Rows of one kind stay in slot order."""
    return sorted(rows, key=lambda row: (len(row.tokens) > 1, not row.wants_token))


class PassShape(NamedTuple):
    """The sizes of a flash pass. Those of a captured pass are maximums: a step may have less of
    each, and dummy tokens fill it up."""

    tokens: int
    decode_rows: int  # rows of one token, which come first in the pass
    pieces: int  # longer rows
    logits: int  # rows of logits if there are pieces; 0 if not, because each token then has one

    @classmethod
    def of(cls, rows: Sequence[Row]) -> PassShape:
        """Return the exact shape of a pass over these rows."""
        row_tokens = [len(row.tokens) for row in rows]
        decode_rows = row_tokens.count(1)
        pieces = len(rows) - decode_rows
        logits = sum(row.wants_token for row in rows) if pieces else 0
        return cls(sum(row_tokens), decode_rows, pieces, logits)

    def has_room_for(self, step: PassShape) -> bool:
        """Return whether a captured pass of this shape can run a step of shape `step`."""
        if bool(self.pieces) != bool(step.pieces):
            return False
        return all(maximum >= size for maximum, size in zip(self, step, strict=True))

    @property
    def sizes(self) -> list[int]:
        """Return the lengths of the arrays that `pack` puts behind each other: ids, positions,
        cache indices, logit indices, and then query_starts, key_starts and key_counts (see
        Sequences) of the decode rows and of the pieces."""
        attention = [0, 0, 0, 0, 0, 0]
        if self.decode_rows:
            attention[:3] = [self.decode_rows + 1, self.decode_rows + 1, self.decode_rows]
        if self.pieces:
            sequences = self.pieces + 1  # the dummy tokens are one more
            attention[3:] = [sequences + 1, sequences + 1, sequences]
        return [self.tokens, self.tokens, self.tokens, self.logits, *attention]


def pack(
    rows: Sequence[Row], shape: PassShape, width: int, dummy_index: int
) -> npt.NDArray[np.int64]:
    """Return everything that a pass takes as one array, so that one copy brings it to the device.

    `rows` are in pass order. `width`: entries of a slot in the cache. `dummy_index`: the entry that
    takes the keys and values of dummy tokens.
    """
    row_tokens = np.array([len(row.tokens) for row in rows], np.int64)
    tokens, decode_rows = int(row_tokens.sum()), int((row_tokens == 1).sum())
    row_ends = row_tokens.cumsum()  # behind the last token of each row, in the pass
    end_positions = np.array([row.position for row in rows], np.int64)  # in the sequence
    slot_starts = np.array([row.slot for row in rows], np.int64) * width
    packed = np.zeros(sum(shape.sizes), np.int64)
    parts = np.split(packed, np.cumsum(shape.sizes)[:-1])
    ids, positions, cache_indices, logit_indices = parts[:4]
    ids[:tokens] = np.concatenate([ids[:0], *(row.tokens for row in rows)])
    positions[:tokens] = np.repeat(end_positions - row_ends, row_tokens) + np.arange(tokens)
    cache_indices[:tokens] = positions[:tokens] + np.repeat(slot_starts, row_tokens)
    cache_indices[tokens:] = dummy_index
    if shape.pieces:
        wants_token = np.array([row.wants_token for row in rows], np.bool_)
        last_tokens = row_ends[wants_token] - 1
        logit_indices[: len(last_tokens)] = last_tokens
    if shape.decode_rows:
        query_starts, key_starts, key_counts = parts[4:7]
        query_starts[:] = np.arange(shape.decode_rows + 1)
        key_starts[:decode_rows] = slot_starts[:decode_rows]
        key_counts[:decode_rows] = end_positions[:decode_rows]
    if shape.pieces:
        query_starts, key_starts, key_counts = parts[7:]
        pieces = len(rows) - decode_rows
        # The pieces, then sequences without tokens, then one with all dummy tokens.
        query_starts[:] = tokens
        query_starts[0] = decode_rows
        query_starts[1 : pieces + 1] = row_ends[decode_rows:]
        query_starts[-1] = shape.tokens
        key_starts[:pieces] = slot_starts[decode_rows:]
        key_counts[:pieces] = end_positions[decode_rows:]
    return packed


class PassInputs(NamedTuple):
    """What a flash pass takes, on the device."""

    ids: Tensor  # int64 [tokens]; may have references, see resolve_references
    positions: Tensor  # int64 [tokens]
    logit_indices: Tensor | None  # int64 [n]: tokens whose logits are computed; None: all
    step: FlashStep


def unpack(packed: Tensor, shape: PassShape, max_queries: int, max_keys: int) -> PassInputs:
    """Return what `pack` put into one array, which is on the device now, as views of it.
    `max_queries`, `max_keys`: see Sequences."""
    sizes = shape.sizes
    ids, positions, cache_indices, logit_indices, attention = torch.split(
        packed, [*sizes[:4], sum(sizes[4:])]
    )
    parts = torch.split(attention.int(), sizes[4:])
    decode_rows = pieces = is_decode_row = None
    if shape.decode_rows:
        decode_rows = Sequences(parts[0], parts[1], parts[2], 1, max_keys)
    if shape.pieces:
        pieces = Sequences(parts[3], parts[4], parts[5], max_queries, max_keys)
    if decode_rows is not None and pieces is not None:
        is_decode_row = (decode_rows.key_counts > 0)[:, None, None]
    step = FlashStep(cache_indices, decode_rows, pieces, is_decode_row)
    return PassInputs(ids, positions, logit_indices if shape.pieces else None, step)


def _blocks(model: SlotModel, rows: list[Row], positions: Tensor) -> list[tuple[SlotBlock, Tensor]]:
    """Return the blocks of a pass (see PlainStep), each with its mask. `positions`: int64 [tokens],
    on the device."""
    blocks: list[SlotBlock] = []
    first_token = 0
    for row in rows:
        count = len(row.tokens)
        last = blocks[-1] if blocks else None
        if last is not None and last.end_slot == row.slot and last.row_tokens == count:
            max_keys = max(last.max_keys, row.position)
            blocks[-1] = last._replace(end_slot=row.slot + 1, max_keys=max_keys)
        else:
            blocks.append(SlotBlock(first_token, count, row.slot, row.slot + 1, row.position))
        first_token += count
    masked_blocks = []
    for block in blocks:
        slots = block.end_slot - block.first_slot
        end_token = block.first_token + slots * block.row_tokens
        own_positions = positions[block.first_token : end_token].view(slots, 1, block.row_tokens, 1)
        is_attended = model.columns[: block.max_keys] <= own_positions
        mask = torch.zeros(is_attended.shape, dtype=model.dtype, device=model.device)
        mask = mask.masked_fill_(~is_attended, float("-inf"))
        mask = mask.repeat(1, 1, model.spec.heads // model.spec.kv_heads, 1)
        masked_blocks.append((block, mask))
    return masked_blocks


def pinned(array: npt.NDArray[Any], device: torch.device) -> Tensor:
    """Return the array as a tensor on the host, in pinned memory if the device is a GPU. A copy
    from pageable memory, such as `torch.tensor(values, device=...)`, would wait for all earlier
    work of the device."""
    host = torch.from_numpy(np.ascontiguousarray(array))
    return host.pin_memory() if device.type == "cuda" else host


def to_device(array: npt.NDArray[Any], device: torch.device) -> Tensor:
    """Return the array on the device, by a copy that the host does not wait for."""
    return pinned(array, device).to(device, non_blocking=True)


def resolve_references(ids: Tensor, previous_tokens: Tensor | None) -> Tensor:
    """Return the token ids with each -1 - n replaced by previous_tokens[n], the n-th token that the
    step before drew. The host launches a step before it knows these tokens."""
    if previous_tokens is None or not len(previous_tokens):
        return ids
    return torch.where(ids < 0, previous_tokens[(-1 - ids).clamp_(min=0)], ids)


def rope_tables(spec: ModelSpec, positions: int) -> tuple[Tensor, Tensor]:
    """Return the cosines and sines of RoPE, each float32 [positions, head_dim / 2].

    If the spec has it, with Llama 3's scaling (transformers.modeling_rope_utils): frequencies with
    few turns in the original context are divided by a factor, those with many remain, and those in
    between are interpolated.
    """
    exponents = torch.arange(0, spec.head_dim, 2, dtype=torch.int64).float() / spec.head_dim
    frequencies = 1.0 / spec.rope_theta**exponents
    scaling = spec.rope_scaling
    if scaling is not None:
        turns = scaling.original_context / (2 * math.pi / frequencies)
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        unscaled_share = ((turns - low) / (high - low)).clamp(0, 1)
        scaled = frequencies / scaling.factor
        frequencies = (1 - unscaled_share) * scaled + unscaled_share * frequencies
    angles = torch.outer(torch.arange(positions).float(), frequencies)
    return angles.cos(), angles.sin()


def _head_norm(spec: ModelSpec, layer: Layer) -> Tensor | None:
    """Return the norm weights of query and key heads as one tensor [heads + kv_heads, head_dim];
    None if the model does not normalize heads."""
    if layer.query_norm is None or layer.key_norm is None:
        return None
    queries = layer.query_norm.expand(spec.heads, -1)
    return torch.cat((queries, layer.key_norm.expand(spec.kv_heads, -1)))


def _rotate_into(out: Tensor, x: Tensor, rotations: Tensor) -> None:
    """Write RoPE of x [tokens, heads, head_dim] to `out`, which may be x, in two kernels.
    `rotations`: SlotModel's matrices at the tokens' positions."""
    product = x.view(*x.shape[:2], 1, 2, -1) * rotations
    torch.add(product[:, :, :, 0], product[:, :, :, 1], out=out.view(*out.shape[:2], 2, -1))


def _add_product(x: Tensor, matrix: Dense, y: Tensor) -> None:
    """Compute x += matrix(y). Without a bias, the kernel of the product also adds."""
    if matrix.bias is None:
        x.addmm_(y, matrix.weight.t())
    else:
        x.add_(matrix(y))

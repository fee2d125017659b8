"""Divides a step of the llama_cpp backend into the llama_decode calls that take the least time, and
fills llama.cpp's batch through numpy arrays.

On a CPU with a separate KV part per slot, one pass of llama.cpp computes only neighboring slots
that have the same number of tokens. It attends to the KV cache in blocks of 256 tokens, and
multiplies 4-bit matrices with 16 or 4 tokens at a time; tokens beyond these blocks cost more than
twice as much each. How a step is divided does not change the logits: they are bit-identical with
4-bit weights, and otherwise equal up to float32 rounding.
"""

from __future__ import annotations

import ctypes
from collections.abc import Collection
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np

from crossover.serving.backends.llama_cpp.cache_layout import KV_BLOCK
from crossover.serving.sampling.step_inputs import Row, Tokens

NEVER = 1 << 30  # as a minimum of tokens: more than any row has
SMALL_BLOCK, LARGE_BLOCK = 4, 16  # tokens that the matrix kernels multiply with at a time

# Costs of a pass over neighboring slots without attention: of starting the pass, of a block of 4
# rows, and of a block of 16 rows. The unit is the cost of a single row. On an AVX2 core, 1, 4, 8,
# 12, 15 and 16 rows of 135M Q4_0 take 11, 35, 65, 94, 115 and 105 ms, of which attention and head
# are 2.2 ms per row.
_PASS_COST, _SMALL_BLOCK_COST, _LARGE_BLOCK_COST = 0.7, 2.3, 7.2
_DUMMY_COST = 0.15  # of a dummy row that completes a block: only its attention costs extra
NO_TOKEN: Tokens = np.zeros(1, np.int32)  # the tokens of a dummy row


def calls_of(rows: list[Row], min_split_tokens: int, min_own_call: int) -> list[list[Row]]:
    """Return the rows of each call, in order. Rows may be split between calls.

    1. A row is split at the end of a KV block if at least `min_split_tokens` of its tokens lie
       before it. llama.cpp attends with every token of a pass to as many blocks as the longest
       sequence has, so 262 tokens cost 262 x 512 in one pass, and 256 x 256 + 6 x 512 in two.
    2. Decode rows get a call of their own, and so does every prompt of at least `min_own_call`
       tokens, for which another pass over the weights pays off. Shorter prompts share a call.
    """
    calls: list[list[Row]] = []
    while True:
        first_pieces, remaining_rows = [], []
        for row in rows:
            # How many tokens of the row lie before the end of the first KV block at which there
            # are at least `min_split_tokens`.
            block_end = -(-(row.start + min_split_tokens) // KV_BLOCK) * KV_BLOCK
            count = block_end - row.start
            if count < len(row.tokens):
                first_pieces.append(replace(row, tokens=row.tokens[:count], wants_token=False))
                row = replace(row, tokens=row.tokens[count:], start=block_end)
            remaining_rows.append(row)
        if not first_pieces:
            break
        calls.append(first_pieces)
        rows = remaining_rows
    decoding: list[Row] = []
    short_prompts: list[Row] = []
    for row in rows:
        if len(row.tokens) == 1:
            decoding.append(row)
        elif len(row.tokens) < min_own_call:
            short_prompts.append(row)
        else:
            calls.append([row])
    if short_prompts:
        calls.append(short_prompts)
    if decoding:
        calls.append(decoding)
    return calls


def dummies(decoding: Collection[int], free: Collection[int]) -> list[int]:
    """Return the free slots that should compute a dummy token beside the decoding slots, because
    closing a gap between slots or completing a block saves more than the dummy rows cost."""
    ordered = sorted(decoding)
    gaps = [range(below + 1, above) for below, above in pairwise(ordered) if above > below + 1]
    # Up to 3 slots behind the last decoding one may complete a block of 4 rows.
    behind_last = ordered[-1] + 1
    gaps += [range(behind_last, behind_last + count) for count in range(1, SMALL_BLOCK)]
    chosen: list[int] = []
    for gap in gaps:
        computed = [*decoding, *chosen]
        added = [slot for slot in gap if slot not in chosen]
        if all(slot in free for slot in added):
            cost_with_dummies = _cost([*computed, *added]) + _DUMMY_COST * len(added)
            if cost_with_dummies < _cost(computed):
                chosen += added
    return chosen


def _cost(slots: Collection[int]) -> float:
    """Return the cost of one token in each of these slots, with one pass for each run of
    neighboring slots. The unit is the cost of a single row."""
    computed = set(slots)
    total = 0.0
    for slot in computed:
        if slot - 1 in computed:
            continue  # not the first of its run
        count = 1
        while slot + count in computed:
            count += 1
        large_blocks, remaining = divmod(count, LARGE_BLOCK)
        small_blocks, single_rows = divmod(remaining, SMALL_BLOCK)
        if large_blocks or small_blocks:
            total += _PASS_COST
        total += large_blocks * _LARGE_BLOCK_COST + small_blocks * _SMALL_BLOCK_COST + single_rows
    return total


class Batch:
    """llama.cpp's batch on numpy arrays that are allocated once, so that a step only writes
    numbers."""

    def __init__(self, llama: Any, max_tokens: int) -> None:
        """`max_tokens` is the maximum of one call."""
        self._token, self._position, self._slot = np.zeros((3, max_tokens), np.int32)
        self._wants_logits = np.zeros(max_tokens, np.int8)
        # llama.cpp allows a token to be in several sequences, so it takes for each token a number
        # of sequences, here 1, and a pointer to a list of them, here one int32 of `_slot`.
        self._ones = np.ones(max_tokens, np.int32)
        self._slot_pointers = self._slot.ctypes.data + 4 * np.arange(max_tokens, dtype=np.uintp)
        self.batch = llama.llama_batch()
        pointer_types = dict(llama.llama_batch._fields_)
        for name, array in (
            ("token", self._token),
            ("pos", self._position),
            ("n_seq_id", self._ones),
            ("seq_id", self._slot_pointers),
            ("logits", self._wants_logits),
        ):
            setattr(self.batch, name, ctypes.cast(array.ctypes.data, pointer_types[name]))

    def fill(self, rows: list[Row]) -> None:
        """Write the tokens of these rows."""
        row_lengths = [len(row.tokens) for row in rows]
        count = sum(row_lengths)
        np.concatenate([row.tokens for row in rows], out=self._token[:count])
        if count == len(rows):  # one token each
            self._position[:count] = [row.start for row in rows]
            self._slot[:count] = [row.slot for row in rows]
            self._wants_logits[:count] = [row.wants_token for row in rows]
        else:
            self._wants_logits[:count] = 0
            end = 0
            for row, length in zip(rows, row_lengths, strict=True):
                begin, end = end, end + length
                self._position[begin:end] = np.arange(row.start, row.start + length)
                self._slot[begin:end] = row.slot
                self._wants_logits[end - 1] = row.wants_token
        self.batch.n_tokens = count

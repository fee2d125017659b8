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

from crossover.serving.sampling.step_inputs import Row, Tokens

NEVER = 1 << 30  # more tokens than any row has
KV_BLOCK = 256  # llama.cpp rounds the KV length that a pass attends to up to a multiple of this
FEW_TOKENS, MANY_TOKENS = 4, 16  # block sizes of the matrix kernels, in tokens

# Costs of a pass over neighboring slots without attention: of starting the pass, of a block of 4
# rows, and of a block of 16 rows. The unit is the cost of a single row. On an AVX2 core, 1, 4, 8,
# 12, 15 and 16 rows of 135M Q4_0 take 11, 35, 65, 94, 115 and 105 ms, of which attention and head
# are 2.2 ms per row.
_PASS_COST, _FEW_COST, _MANY_COST = 0.7, 2.3, 7.2
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
        first_pieces, later_pieces = [], []
        for row in rows:
            # The end of the first block up to which the row has at least `min_split_tokens`.
            end = -(-(row.start + min_split_tokens) // KV_BLOCK) * KV_BLOCK - row.start
            if end < len(row.tokens):
                first_pieces.append(replace(row, tokens=row.tokens[:end], wants_token=False))
                row = replace(row, tokens=row.tokens[end:], start=row.start + end)
            later_pieces.append(row)
        if not first_pieces:
            break
        calls.append(first_pieces)
        rows = later_pieces
    counts = [(len(row.tokens), row) for row in rows]
    prompts = [[row] for count, row in counts if count >= max(2, min_own_call)]
    short_prompts = [row for count, row in counts if 1 < count < min_own_call]
    decoding = [row for count, row in counts if count == 1]
    return [*calls, *prompts, *(call for call in (short_prompts, decoding) if call)]


def dummies(decoding: Collection[int], free: Collection[int]) -> list[int]:
    """Return the free slots that should compute a dummy token beside the decoding slots, because
    closing a gap between slots or completing a block saves more than the dummy rows cost."""
    ordered, chosen = sorted(decoding), list[int]()
    gaps = [range(below + 1, above) for below, above in pairwise(ordered) if above > below + 1]
    gaps += [range(ordered[-1] + 1, ordered[-1] + 1 + more) for more in range(1, FEW_TOKENS)]
    for gap in gaps:
        computed = [*decoding, *chosen]
        added = [slot for slot in gap if slot not in chosen]
        if all(slot in free for slot in added):
            if _cost([*computed, *added]) + _DUMMY_COST * len(added) < _cost(computed):
                chosen += added
    return chosen


def _cost(slots: Collection[int]) -> float:
    """Return the cost of one token in each of these slots, with one pass for each run of
    neighboring slots. The unit is the cost of a single row."""
    present = set(slots)
    total = 0.0
    for slot in present:
        if slot - 1 in present:
            continue
        count = 1
        while slot + count in present:
            count += 1
        large_blocks, remaining = divmod(count, MANY_TOKENS)
        small_blocks, single_rows = divmod(remaining, FEW_TOKENS)
        pass_cost = _PASS_COST if large_blocks or small_blocks else 0.0
        total += pass_cost + large_blocks * _MANY_COST + small_blocks * _FEW_COST + single_rows
    return total


class Batch:
    """llama.cpp's batch on numpy arrays that are allocated once, so that a step only writes
    numbers."""

    def __init__(self, llama: Any, tokens: int) -> None:
        """`tokens` is the maximum of a call."""
        self._token, self._position, self._slot = np.zeros((3, tokens), np.int32)
        self._wanted, self._ones = np.zeros(tokens, np.int8), np.ones(tokens, np.int32)
        self._slot_of = self._slot.ctypes.data + 4 * np.arange(tokens, dtype=np.uintp)  # pointers
        self.batch = llama.llama_batch()
        kinds = dict(llama.llama_batch._fields_)
        for name, array in (
            ("token", self._token),
            ("pos", self._position),
            ("n_seq_id", self._ones),
            ("seq_id", self._slot_of),
            ("logits", self._wanted),
        ):
            setattr(self.batch, name, ctypes.cast(array.ctypes.data, kinds[name]))

    def fill(self, rows: list[Row]) -> None:
        """Write the tokens of these rows."""
        counts = [len(row.tokens) for row in rows]
        count = sum(counts)
        np.concatenate([row.tokens for row in rows], out=self._token[:count])
        if count == len(rows):
            self._position[:count] = [row.start for row in rows]
            self._slot[:count] = [row.slot for row in rows]
            self._wanted[:count] = [row.wants_token for row in rows]
        else:
            self._wanted[:count] = 0
            end = 0
            for row, length in zip(rows, counts, strict=True):
                begin, end = end, end + length
                self._position[begin:end] = np.arange(row.start, row.start + length)
                self._slot[begin:end] = row.slot
                self._wanted[end - 1] = row.wants_token
        self.batch.n_tokens = count

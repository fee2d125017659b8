"""A step of the llama_cpp backend as the llama_decode calls that compute it in the least time, and
numpy views on the arrays of llama.cpp's batch.

On a CPU with a KV part per slot, llama.cpp takes in one pass only neighbouring slots with equally
many tokens each, attends to the KV cache in blocks of 256, and multiplies 4-bit matrices with 16
or 4 tokens at a time; the rest cost more than twice as much each. Logits do not change with the
cut: to the bit with 4-bit weights, else up to the rounding of float32.
"""

from __future__ import annotations

import ctypes
from collections.abc import Collection
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np

from crossover.serving.sampling.step_inputs import Row, Tokens

NEVER = 1 << 30  # more tokens than any run has
KV_BLOCK = 256  # llama.cpp rounds the KV length that a pass attends to up to a multiple of this
FEW_TOKENS, MANY_TOKENS = 4, 16  # that its matrix kernels take at a time

# Cost of a pass over neighbouring slots without attention, in rows alone: start of a run, block of
# 4, block of 16. 135M Q4_0 on an AVX2 core: 1 / 4 / 8 / 12 / 15 / 16 rows take 11, 35, 65, 94, 115,
# 105 ms, of which 2.2 a row are attention and head.
_RUN, _FEW, _MANY = 0.7, 2.3, 7.2
_DUMMY = 0.15  # of a row whose product comes with the block: its attention
NO_TOKEN: Tokens = np.zeros(1, np.int32)  # of a dummy row


def calls_of(rows: list[Row], least: int, alone: int) -> list[list[Row]]:
    """Return the calls, in order.

    1. No run of `least` tokens or more is computed with a later KV block: llama.cpp attends with
       every token of a pass to as many blocks as the longest sequence has. 262 tokens in one pass
       cost 262 x 512, in two passes 256 x 256 + 6 x 512.
    2. Decode rows go apart, and so does every prompt of `alone` tokens or more, which pays for
       another pass over the weights.
    """
    calls: list[list[Row]] = []
    while True:
        first_pieces, later_pieces = [], []
        for row in rows:
            # End of the first block that holds `least` tokens.
            end = -(-(row.start + least) // KV_BLOCK) * KV_BLOCK - row.start
            if end < len(row.tokens):
                first_pieces.append(replace(row, tokens=row.tokens[:end], wants_token=False))
                row = replace(row, tokens=row.tokens[end:], start=row.start + end)
            later_pieces.append(row)
        if not first_pieces:
            break
        calls.append(first_pieces)
        rows = later_pieces
    counts = [(len(row.tokens), row) for row in rows]
    prompts = [[row] for count, row in counts if count >= max(2, alone)]
    short_prompts = [row for count, row in counts if 1 < count < alone]
    decoding = [row for count, row in counts if count == 1]
    return [*calls, *prompts, *(call for call in (short_prompts, decoding) if call)]


def dummies(decoding: Collection[int], free: Collection[int]) -> list[int]:
    """Slots of `free` that compute a dummy token, to close a gap or to fill up a block."""
    ordered, chosen = sorted(decoding), list[int]()
    gaps = [range(below + 1, above) for below, above in pairwise(ordered) if above > below + 1]
    gaps += [range(ordered[-1] + 1, ordered[-1] + 1 + more) for more in range(1, FEW_TOKENS)]
    for gap in gaps:
        fresh, now = [slot for slot in gap if slot not in chosen], [*decoding, *chosen]
        if all(slot in free for slot in fresh):
            if _cost([*now, *fresh]) + _DUMMY * len(fresh) < _cost(now):
                chosen += fresh
    return chosen


def _cost(slots: Collection[int]) -> float:
    """Of a token in each of these slots, in rows alone; a pass for each run of neighbours."""
    present = set(slots)
    total = 0.0
    for slot in present:
        if slot - 1 in present:
            continue
        count = 1
        while slot + count in present:
            count += 1
        many, remaining = divmod(count, MANY_TOKENS)
        few, ones = divmod(remaining, FEW_TOKENS)
        total += (_RUN if many or few else 0.0) + many * _MANY + few * _FEW + ones
    return total


class Batch:
    """llama.cpp's batch over numpy arrays, so that a step only writes numbers."""

    def __init__(self, llama: Any, tokens: int) -> None:
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

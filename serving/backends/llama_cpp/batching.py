"""A step of the llama_cpp backend as the llama_decode calls that compute it in the least time, and
numpy views on the arrays of llama.cpp's batch and logits.

On a CPU with a KV part per slot, llama.cpp takes in one pass only neighbouring slots with equally
many tokens each, attends to the KV cache in blocks of 256, and multiplies 4-bit matrices with 16
or 4 tokens at a time; the rest cost more than twice as much each. Logits do not change with the
cut: to the bit with 4-bit weights, else up to the rounding of float32.
"""

from __future__ import annotations

import ctypes
from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from serving.errors import EngineFailed
from serving.sampling.step_rows import Row, Tokens

NEVER = 1 << 30  # more tokens than any run has
KV_BLOCK = 256  # llama.cpp rounds the KV length that a pass attends to up to a multiple of this
FEW_TOKENS, MANY_TOKENS = 4, 16  # that its matrix kernels take at a time

# Cost of a pass over neighbouring slots without attention, in rows alone: start of a run, block of
# 4, block of 16. 135M Q4_0 on an AVX2 core: 1 / 4 / 8 / 12 / 15 / 16 rows take 11, 35, 65, 94, 115,
# 105 ms, of which 2.2 a row are attention and head.
_RUN, _FEW, _MANY = 0.7, 2.3, 7.2
_DUMMY = 0.15  # of a row whose product comes with the block: its attention
_TOKEN = 0.35  # of a prompt, computed among many
NO_TOKEN: Tokens = np.zeros(1, np.int32)  # of a dummy row


def calls_of(rows: list[Row], least: int, alone: int) -> list[list[Row]]:
    """The calls, in order.

    1. No run of `least` tokens or more is computed with a later KV block: llama.cpp attends with
       every token of a pass to as many blocks as the longest sequence has. 262 tokens in one pass
       cost 262 x 512, in two passes 256 x 256 + 6 x 512.
    2. Decode rows go apart, and so does every prompt of `alone` tokens or more, which pays for
       another pass over the weights.
    3. A prompt's last token goes with the decode rows where that completes a block (`rides`).
    """
    calls: list[list[Row]] = []
    while True:
        heads, rests = [], []
        for row in rows:
            # End of the first block that holds `least` tokens.
            end = -(-(row.start + least) // KV_BLOCK) * KV_BLOCK - row.start
            if end < len(row.tokens):
                heads.append(replace(row, tokens=row.tokens[:end], wants_token=False))
                row = replace(row, tokens=row.tokens[end:], start=row.start + end)
            rests.append(row)
        if not heads:
            break
        calls.append(heads)
        rows = rests
    decoding = {row.slot: row for row in rows if len(row.tokens) == 1}
    prompts, shorter = [], []
    for row in rows:
        count = len(row.tokens)
        if count == 1:
            continue
        if decoding and count % FEW_TOKENS and rides(decoding, row.slot):
            decoding[row.slot] = replace(row, tokens=row.tokens[-1:], start=row.start + count - 1)
            row = replace(row, tokens=row.tokens[:-1], wants_token=False)
            count -= 1
        if count >= max(2, alone):
            prompts.append([row])
        else:
            shorter.append(row)
    together = sorted(decoding.values(), key=lambda row: row.slot)
    return [*calls, *prompts, *(call for call in (shorter, together) if call)]


def rides(decoding: Collection[int], slot: int) -> bool:
    """Whether a prompt's token in `slot` costs less with the decoding slots than alone."""
    return _cost([*decoding, slot]) - _cost(decoding) < _TOKEN


def dummies(decoding: Collection[int], free: Collection[int]) -> list[int]:
    """Slots of `free` that compute a dummy token, to close a gap or to fill up a block."""
    chosen: list[int] = []

    def pays(gap: range) -> bool:
        now = [*decoding, *chosen]
        if not all(slot in free for slot in gap):
            return False
        return _cost([*now, *gap]) + _DUMMY * len(gap) < _cost(now)

    for gap in _gaps(decoding):
        if pays(gap):
            chosen += gap
    last = max(decoding, default=-1)
    for more in range(1, FEW_TOKENS):
        gap = range(last + 1, last + 1 + more)
        if pays(gap):
            return [*chosen, *gap]
    return chosen


def _gaps(slots: Collection[int]) -> Iterator[range]:
    """The runs of slots between two of `slots`."""
    ordered = sorted(slots)
    for below, above in zip(ordered, ordered[1:], strict=False):
        if above > below + 1:
            yield range(below + 1, above)


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
        many, rest = divmod(count, MANY_TOKENS)
        few, ones = divmod(rest, FEW_TOKENS)
        total += (_RUN if many or few else 0.0) + many * _MANY + few * _FEW + ones
    return total


class Batch:
    """llama.cpp's batch. `seq_id[i]` points into one int32 array, so a step only writes numbers."""

    def __init__(self, llama: Any, tokens: int) -> None:
        self._llama = llama
        self.batch = llama.llama_batch_init(tokens, 0, 1)
        view = np.ctypeslib.as_array
        self._token = view(self.batch.token, (tokens,))
        self._position = view(self.batch.pos, (tokens,))
        self._wanted = view(self.batch.logits, (tokens,))
        view(self.batch.n_seq_id, (tokens,))[:] = 1
        self._slot = np.zeros(tokens, np.int32)
        self._ours = ctypes.cast(self.batch.seq_id, ctypes.POINTER(ctypes.c_void_p))
        self._theirs = [self._ours[index] for index in range(tokens)]
        address = self._slot.ctypes.data
        for index in range(tokens):
            self._ours[index] = address + 4 * index

    def fill(self, rows: list[Row]) -> None:
        """Write the tokens of these rows."""
        counts = [len(row.tokens) for row in rows]
        count = sum(counts)
        if count > len(self._token):
            raise ValueError(f"a step of {count} tokens; at most {len(self._token)} fit")
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

    def free(self) -> None:
        """llama_batch_free frees the pointers that it allocated: put them back first."""
        for index, pointer in enumerate(self._theirs):
            self._ours[index] = pointer
        self._llama.llama_batch_free(self.batch)


class LogitsView:
    """llama.cpp's logits without a copy, valid until the next step; rebuilt when they move."""

    def __init__(self, llama: Any, context: Any, rows: int, vocabulary: int) -> None:
        self._context = context
        self._shape = (rows, vocabulary)
        self._address = -1
        self._view: npt.NDArray[np.float32] = np.empty((0, vocabulary), np.float32)
        # By index: a function object of our own, whose types may be set.
        self._get = llama.llama_cpp._lib["llama_get_logits"]
        self._get.argtypes = [ctypes.c_void_p]
        self._get.restype = ctypes.c_void_p

    def __call__(self, rows: int) -> npt.NDArray[np.float32]:
        address = self._get(self._context)
        if not address:
            raise EngineFailed("llama.cpp gave no logits")
        if address != self._address:
            pointer = ctypes.cast(address, ctypes.POINTER(ctypes.c_float))
            self._view = np.ctypeslib.as_array(pointer, self._shape)
            self._address = address
        return self._view[:rows]

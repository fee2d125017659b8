"""A step of the llama_cpp backend as the calls of llama_decode that compute it in the least time.

On a CPU, where each slot has a KV part of its own, llama.cpp computes in one pass only neighbouring slots with equally many tokens each,
attends to the KV cache in whole blocks of 256, and multiplies 4-bit matrices with 16 or 4 tokens at a time; those left over cost more
than twice as much each. Left to itself it cuts a step where it hurts: the first token of every prompt goes with the decoding rows, then as
many of each prompt as the shortest has, and so on. Logits do not change with the cut: to the bit with 4-bit weights, whose kernels sum
each token by itself and always in one order; else up to the rounding of float32.

Pure functions over rows: nothing here needs a model.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace

import numpy as np

from serving.backends.base import Row, Tokens

NEVER = 1 << 30  # more tokens than any run has
KV_BLOCK = 256  # llama.cpp rounds the KV length that a pass attends to up to a multiple of this
FEW_TOKENS, MANY_TOKENS = 4, 16  # what its matrix kernels take at a time

# What a pass over neighbouring slots costs beside attention, in times of one row alone: a run's start, a block of 4, a block of 16.
# Measured with SmolLM2-135M Q4_0 on an AVX2 core: 1 / 4 / 8 / 12 / 15 / 16 rows take 11, 35, 65, 94, 115, 105 ms, of which 2.2 a row are
# attention and head (`python -m tests.bench.llama_cpp_steps`).
_RUN, _FEW, _MANY = 0.7, 2.3, 7.2
_DUMMY = 0.15  # what is left of a row's cost where its product comes with the block: attention
_TOKEN = 0.35  # of a prompt, computed among many
NO_TOKEN: Tokens = np.zeros(1, np.int32)  # what a rider without a token of its own computes


def calls_of(rows: list[Row], least: int, alone: int) -> list[list[Row]]:
    """The calls, to be made one after the other.

    1. No run of `least` tokens or more is computed together with a later KV block. llama.cpp multiplies every token of a pass with as
       many blocks of 256 as the longest sequence has: a prompt of 262 tokens in one pass costs the attention of 262 x 512, in two (256,
       then 6) that of 256 x 256 + 6 x 512.
    2. Decoding rows go apart, and so does every prompt of at least `alone` tokens. Another pass over the weights costs what a few tokens
       for each thread do: `alone` says when that pays.
    3. The last token of a prompt's piece goes with the decoding rows where that makes neighbours or a full block of them (`rides`).
    """
    calls: list[list[Row]] = []
    while True:
        heads, rests = [], []
        for row in rows:
            end = -(-(row.start + least) // KV_BLOCK) * KV_BLOCK - row.start  # of the first block that holds `least` tokens
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
    """Whether a token of the prompt in `slot` costs less computed with the decoding slots than with its prompt."""
    return _cost([*decoding, slot]) - _cost(decoding) < _TOKEN


def dummies(decoding: Collection[int], free: Collection[int]) -> list[int]:
    """Slots of `free` that had best compute a token for nothing, to make neighbours of the decoding slots on both sides of a gap, or to
    fill up a block."""
    chosen: list[int] = []
    for gap in _gaps(decoding):
        now = [*decoding, *chosen]
        if all(slot in free for slot in gap) and _cost([*now, *gap]) + _DUMMY * len(gap) < _cost(now):
            chosen += gap
    last = max(decoding, default=-1)
    for more in range(1, FEW_TOKENS):
        gap = range(last + 1, last + 1 + more)
        now = [*decoding, *chosen]
        if all(slot in free for slot in gap) and _cost([*now, *gap]) + _DUMMY * more < _cost(now):
            return [*chosen, *gap]
    return chosen


def _gaps(slots: Collection[int]) -> Iterator[range]:
    """The runs of slots that lie between two of `slots` and are not among them."""
    ordered = sorted(slots)
    for below, above in zip(ordered, ordered[1:], strict=False):
        if above > below + 1:
            yield range(below + 1, above)


def _cost(slots: Collection[int]) -> float:
    """Of one token in each of these slots, in rows alone; a pass for each run of neighbours."""
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

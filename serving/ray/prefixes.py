"""Which replica a request goes to, by load and by prefix. Pure, but for what it remembers.

    table = PrefixTable(slots=16)
    name = table.choose(blocks_of(body), {"a": 3, "b": 0})
    table.sent(blocks, name)

A replica keeps the KV cache of prompts that it has served (serving.engine.slot_pool), so a prompt
that begins as an earlier one is answered sooner where that one went. It goes elsewhere where that
replica has SLACK requests more than the one with the fewest, or has no free slot and another has:
there the prompt would wait for the end of an answer.
"""

from __future__ import annotations

import hashlib
import re
from collections import OrderedDict
from collections.abc import Mapping, Sequence, Set

BLOCK_BYTES = 256  # of a body: some 60 tokens
MOST_BLOCKS = 64  # 16 KiB: what agrees so far is decided by it
MOST_BEFORE = 1 << 16  # bytes before the prompt: each quote in them is looked at
MOST_REMEMBERED = 1 << 16  # blocks; a block takes some 200 bytes
SLACK = 4  # requests: what half a prompt's prefill is worth waiting for

# What is asked of the model: everything before (its name, max_tokens, stream) is no prefix.
_PROMPT = re.compile(rb'"(?:prompt|messages|input)"\s*:\s*')


def blocks_of(body: bytes) -> tuple[bytes, ...]:
    """A digest for each block of the prompt, of all up to its end: equal ones begin alike.

    The last, partial block counts too, so that a short prompt has one. () where there is no prompt.
    """
    found = _PROMPT.search(body, 0, MOST_BEFORE)
    if found is None:
        return ()
    prompt = memoryview(body)[found.end() : found.end() + MOST_BLOCKS * BLOCK_BYTES]
    digest, digests = hashlib.blake2b(digest_size=12), []
    for start in range(0, len(prompt), BLOCK_BYTES):
        digest.update(prompt[start : start + BLOCK_BYTES])
        digests.append(digest.digest())
    return tuple(digests)


class PrefixTable:
    """Which replica had which beginnings last; the oldest are forgotten. `slots`: of a replica."""

    def __init__(self, slots: int, most: int = MOST_REMEMBERED) -> None:
        self._slots = slots
        self._most = most
        self._had: OrderedDict[bytes, str] = OrderedDict()
        self._turns: dict[str, int] = {}  # replica -> number of the last request it was sent
        self._turn = 0

    def choose(self, blocks: Sequence[bytes], loads: Mapping[str, int]) -> str:
        """A replica of `loads`, which has the requests in flight of each that may be asked.

        The one that has had the longest part of the prompt, unless it is busy; else the least
        busy, of several the one that was asked longest ago.
        """
        fewest = min(loads.values())
        most = fewest + SLACK if fewest >= self._slots else min(fewest + SLACK, self._slots - 1)
        for block in reversed(blocks):
            name = self._had.get(block, "")
            if name in loads and loads[name] <= most:
                return name
        return min(loads, key=lambda name: (loads[name], self._turns.get(name, 0)))

    def sent(self, blocks: Sequence[bytes], name: str) -> None:
        """The replica has this prompt from now on."""
        self._turn += 1
        self._turns[name] = self._turn
        for block in blocks:
            self._had[block] = name
            self._had.move_to_end(block)
        while len(self._had) > self._most:
            self._had.popitem(last=False)

    def keep(self, names: Set[str]) -> None:
        """Forget when all others were asked; what they had is forgotten as it grows old."""
        for name in self._turns.keys() - names:
            del self._turns[name]

"""The prompt cache: copies of the KV of sequences that no slot holds any more, in RAM.

The KV of a slot that another conversation takes is stored here first. A prompt that begins like a
stored sequence, for longer than like what any slot holds, gets that KV copied into its slot. When
to do so is decided by `crossover.serving.capacity.choose_slot`, and what is dropped by
`crossover.serving.capacity.stored_sequences`; the simulation uses both too.

Memory is written to once before it is used, so that copies rarely wait for the kernel to provide
pages: for 4 GiB that took 7 s where copying them takes 1 s. A first part is written to at the
start, the rest while the engine is idle, or when it is needed. Memory is divided into blocks,
because sequences differ in length; the backend reads and writes one sequence in one piece, the
staging buffer.

The cache never fails a request: what cannot be stored is lost, and what cannot be restored is
computed again.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from crossover.serving.backends.backend_interface import Exporting
from crossover.serving.capacity.choose_slot import StoredMatch
from crossover.serving.capacity.stored_sequences import StoredSequences
from crossover.serving.engine.common_prefix import common_prefix
from crossover.serving.engine.ipc_messages import PromptCacheStats
from crossover.serving.errors import EngineFailed, KvFull
from crossover.serving.sampling.step_inputs import Tokens

BLOCK_BYTES = 1 << 16
_MEASURED_BLOCKS = 256  # 16 MiB, which takes milliseconds
_TOUCHED_BLOCKS = 32  # 2 MiB, which took 3 ms; a request that comes meanwhile waits for it


@dataclass(frozen=True, eq=False)
class StoredSequence:
    """A sequence in the prompt cache."""

    tokens: Tokens
    salt: str  # a prompt with another one has no common prefix with it
    blocks: npt.NDArray[np.intp]  # where its bytes are, in this order
    bytes: int


def stored_tokens_of(max_bytes: int, context_bytes: int, context_tokens: int) -> int:
    """Return how many tokens a prompt cache of `max_bytes` stores beside its staging buffer.

    `context_bytes`: what a backend exports of a slot with `context_tokens` tokens.
    """
    staging_blocks = -(-context_bytes // BLOCK_BYTES)
    blocks = max(0, max_bytes // BLOCK_BYTES - staging_blocks)
    return blocks * BLOCK_BYTES * context_tokens // max(1, context_bytes)


class PromptCache:
    """Stored sequences of one backend, at most `max_bytes` with the staging buffer.

    `stored_tokens` says how many tokens fit; 0: there is no room for any, and nothing may be
    stored. Raises MemoryError.
    """

    def __init__(self, backend: Exporting, max_bytes: int) -> None:
        self._backend = backend
        context_tokens = backend.info.settings.context_tokens
        context_bytes = backend.state_bytes(context_tokens)
        self.stored_tokens = stored_tokens_of(max_bytes, context_bytes, context_tokens)
        staging_blocks = -(-context_bytes // BLOCK_BYTES) if self.stored_tokens else 0
        blocks = max_bytes // BLOCK_BYTES - staging_blocks if self.stored_tokens else 0
        self._staging = np.empty((staging_blocks, BLOCK_BYTES), np.uint8)
        self._staging.fill(0)
        self._blocks = np.empty((blocks, BLOCK_BYTES), np.uint8)
        self._free: list[int] = []
        self._index = StoredSequences[StoredSequence](0)
        while self._index.capacity < _MEASURED_BLOCKS and self.touch_more():
            pass
        self.copy_token_seconds = self._measure_copy_seconds() * context_bytes / context_tokens
        self._stats = PromptCacheStats(max_bytes=(staging_blocks + blocks) * BLOCK_BYTES)

    @property
    def stats(self) -> PromptCacheStats:
        self._stats.used_bytes = self._index.used * BLOCK_BYTES
        self._stats.sequences = len(self._index)
        return self._stats

    def touch_more(self) -> bool:
        """Make a further part of the memory ready for use. Return False if all of it is."""
        start = self._index.capacity
        end = min(start + _TOUCHED_BLOCKS, len(self._blocks))
        self._blocks[start:end] = 0
        self._free += range(start, end)
        self._index.capacity = end
        return end > start

    def longest(self, prompt: Tokens, salt: str) -> tuple[StoredSequence | None, StoredMatch]:
        """Return the sequence with the longest common prefix with a prompt, the most recently used
        if there are several, and how it matches."""
        best: StoredSequence | None = None
        common = second = 0
        for sequence in self._index:
            if sequence.salt != salt:
                continue
            tokens = common_prefix(sequence.tokens, prompt)
            if tokens > common:
                best, common, second = sequence, tokens, common
            else:
                second = max(second, tokens)
        held_tokens = 0 if best is None else len(best.tokens)
        return best, StoredMatch(common, held_tokens, second)

    def store(
        self, slot: int, tokens: Tokens, salt: str, pinned: StoredSequence | None = None
    ) -> None:
        """Store what a slot holds, instead of the sequences that it continues, if there is room.

        `pinned`: a sequence that must stay, because it is about to be restored.
        """
        started = time.perf_counter()
        try:
            size_bytes = self._backend.export(slot, self._staging.reshape(-1))
        except (EngineFailed, MemoryError):
            return  # it is lost, as without a prompt cache
        for sequence in list(self._index):
            if sequence.salt != salt or sequence is pinned:
                continue
            if common_prefix(sequence.tokens, tokens) == len(sequence.tokens):
                self._remove(sequence)
        blocks = -(-size_bytes // BLOCK_BYTES)
        ids = np.empty(blocks, np.intp)
        stored = StoredSequence(tokens.copy(), salt, ids, size_bytes)
        while self._index.used + blocks > self._index.capacity and self.touch_more():
            pass
        dropped = self._index.add(stored, blocks, pinned)
        if dropped is None:
            return
        for sequence in dropped:
            self._free += sequence.blocks.tolist()
            self._stats.dropped_tokens += len(sequence.tokens)
        ids[:] = [self._free.pop() for _ in range(blocks)]
        self._blocks[ids] = self._staging[:blocks]
        self._stats.stored_tokens += len(tokens)
        self._stats.copy_seconds += time.perf_counter() - started

    def restore(self, slot: int, sequence: StoredSequence, match: StoredMatch) -> bool:
        """Make a slot hold the first `match.common` tokens of a sequence. Return False, with an
        empty slot, if the backend cannot; the sequence is dropped then."""
        started = time.perf_counter()
        blocks = len(sequence.blocks)
        # Without "clip", numpy.take would make a copy first.
        np.take(self._blocks, sequence.blocks, axis=0, out=self._staging[:blocks], mode="clip")
        data = self._staging.reshape(-1)[: sequence.bytes]
        try:
            self._backend.load(slot, data, match.common)
        except (EngineFailed, KvFull, MemoryError):
            self._backend.truncate(slot, 0)
            self._remove(sequence)
            self._stats.dropped_tokens += len(sequence.tokens)
            return False
        if match.is_continued:
            self._remove(sequence)
        else:
            self._index.use(sequence)
        self._stats.restored_tokens += match.common
        self._stats.copy_seconds += time.perf_counter() - started
        return True

    def copy(self, source: int, slot: int, tokens: int) -> None:
        """Copy the first tokens of a slot to another one at once, by way of the staging buffer.
        Raises EngineFailed."""
        staging = self._staging.reshape(-1)
        size_bytes = self._backend.export(source, staging)
        self._backend.load(slot, staging[:size_bytes], tokens)

    def _measure_copy_seconds(self) -> float:
        """Return the seconds to copy a byte of KV to or from the cache: between a slot and the
        staging buffer, and between that and the blocks, both as fast as the second is."""
        blocks = min(len(self._staging), self._index.capacity, _MEASURED_BLOCKS)
        if not blocks:
            return 0.0
        seconds = []
        for _ in range(2):  # the first copy may still wait for caches
            started = time.perf_counter()
            self._blocks[np.arange(blocks)] = self._staging[:blocks]
            seconds.append(time.perf_counter() - started)
        return 2 * min(seconds) / (blocks * BLOCK_BYTES)

    def _remove(self, sequence: StoredSequence) -> None:
        self._index.remove(sequence)
        self._free += sequence.blocks.tolist()

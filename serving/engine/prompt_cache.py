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

If slots cannot be truncated, a stored sequence has its longest checkpoint with it, from which
prompts go on that do not continue all of it.

The cache never fails a request: what cannot be stored is lost, and what cannot be restored is
computed again.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from crossover.serving.backends.backend_interface import Exporting, Saved
from crossover.serving.capacity.choose_slot import StoredMatch, checkpointed_tokens
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
    exported_bytes: int
    saved_tokens: int  # of its checkpoint, whose bytes follow; 0: it has none
    saved_bytes: int


class _Sizes(NamedTuple):
    """The bytes of stored sequences, as a line over their tokens."""

    context_bytes: int  # of a sequence of the longest context
    token_bytes: float
    sequence_tokens: int  # what a sequence takes beyond its tokens, in tokens


def _sizes_of(backend: Exporting) -> _Sizes:
    def sequence_bytes(tokens: int) -> int:
        saved = backend.saved_bytes(tokens) if backend.info.has_checkpoints else 0
        return backend.state_bytes(tokens) + saved

    # Between half a context and a whole one, where windows have their full length.
    context_tokens = backend.info.settings.context_tokens
    half_tokens = context_tokens // 2
    context_bytes = sequence_bytes(context_tokens)
    growth = (context_bytes - sequence_bytes(half_tokens)) / (context_tokens - half_tokens)
    token_bytes = max(1.0, growth)  # if no layer keeps tokens, a unit of one byte
    fixed_bytes = max(0.0, context_bytes - token_bytes * context_tokens)
    return _Sizes(context_bytes, token_bytes, int(fixed_bytes / token_bytes))


class PromptCache:
    """Stored sequences of one backend, at most `max_bytes` with the staging buffer.

    `stored_tokens` says how many tokens fit; 0: there is no room for any, and nothing may be
    stored. `sequence_tokens`: what each sequence takes beyond its tokens. Raises MemoryError.
    """

    def __init__(self, backend: Exporting, max_bytes: int) -> None:
        self._backend = backend
        sizes = _sizes_of(backend)
        staging_blocks = -(-sizes.context_bytes // BLOCK_BYTES)
        blocks = max(0, max_bytes // BLOCK_BYTES - staging_blocks)
        self.sequence_tokens = sizes.sequence_tokens
        self.stored_tokens = int(blocks * BLOCK_BYTES / sizes.token_bytes)
        if self.stored_tokens <= self.sequence_tokens:
            self.stored_tokens = staging_blocks = blocks = 0
        self._staging = np.empty((staging_blocks, BLOCK_BYTES), np.uint8)
        self._staging.fill(0)
        self._blocks = np.empty((blocks, BLOCK_BYTES), np.uint8)
        self._free: list[int] = []
        self._index = StoredSequences[StoredSequence](0)
        while self._index.capacity < _MEASURED_BLOCKS and self.touch_more():
            pass
        self.copy_token_seconds = self._measure_copy_seconds() * sizes.token_bytes
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

    def longest(
        self, prompt: Tokens, salt: str, checkpoints: Iterable[int] = ()
    ) -> tuple[StoredSequence | None, StoredMatch]:
        """Return the sequence of which a prompt can reuse most, the most recently used if there are
        several, and how it matches.

        `checkpoints`: the lengths of those that the prompt begins with.
        """
        best: StoredSequence | None = None
        reusable = common = second = 0
        for sequence in self._index:
            if sequence.salt != salt:
                continue
            own_common = own_reusable = common_prefix(sequence.tokens, prompt)
            if self._backend.info.has_checkpoints:
                lengths = [sequence.saved_tokens, *checkpoints]
                own_reusable = checkpointed_tokens(own_common, len(sequence.tokens), lengths)
            if own_reusable > reusable:
                second = max(second, common)
                best, reusable, common = sequence, own_reusable, own_common
            else:
                second = max(second, own_common)
        held_tokens = 0 if best is None else len(best.tokens)
        return best, StoredMatch(reusable, common, held_tokens, second)

    def store(
        self,
        slot: int,
        tokens: Tokens,
        salt: str,
        pinned: StoredSequence | None = None,
        saved: Saved | None = None,
    ) -> None:
        """Store what a slot holds, instead of the sequences that it continues, if there is room.

        `pinned`: a sequence that must stay, because it is about to be restored. `saved`: the
        longest checkpoint of these tokens.
        """
        started = time.perf_counter()
        staging = self._staging.reshape(-1)
        try:
            exported_bytes = self._backend.export(slot, staging)
        except (EngineFailed, MemoryError):
            return  # it is lost, as without a prompt cache
        saved_tokens, saved_bytes = 0, 0
        if saved is not None and exported_bytes + len(saved.data) <= len(staging):
            saved_tokens, saved_bytes = saved.tokens, len(saved.data)
            staging[exported_bytes : exported_bytes + saved_bytes] = saved.data
        for sequence in list(self._index):
            if sequence.salt != salt or sequence is pinned:
                continue
            if common_prefix(sequence.tokens, tokens) == len(sequence.tokens):
                self._remove(sequence)
        blocks = -(-(exported_bytes + saved_bytes) // BLOCK_BYTES)
        ids = np.empty(blocks, np.intp)
        stored = StoredSequence(tokens.copy(), salt, ids, exported_bytes, saved_tokens, saved_bytes)
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

    def restore(
        self,
        slot: int,
        sequence: StoredSequence,
        match: StoredMatch,
        saved: Saved | None = None,
    ) -> bool:
        """Make a slot hold the first `match.reusable` tokens of a sequence. Return False, with an
        empty slot, if the backend cannot; the sequence is dropped then.

        `saved`: the checkpoint with so many tokens, if it is not the sequence's own.
        """
        started = time.perf_counter()
        blocks = len(sequence.blocks)
        # Without "clip", numpy.take would make a copy first.
        np.take(self._blocks, sequence.blocks, axis=0, out=self._staging[:blocks], mode="clip")
        staging = self._staging.reshape(-1)
        data = staging[: sequence.exported_bytes]
        try:
            if match.reusable < len(sequence.tokens) and self._backend.info.has_checkpoints:
                if match.reusable == sequence.saved_tokens:
                    end = sequence.exported_bytes + sequence.saved_bytes
                    saved = Saved(match.reusable, staging[sequence.exported_bytes : end])
                assert saved is not None  # as `longest` says
                self._backend.load(slot, data, len(sequence.tokens))
                self._backend.restore(slot, saved, slot)
            else:
                self._backend.load(slot, data, match.reusable)
        except (EngineFailed, KvFull, MemoryError):
            self._backend.truncate(slot, 0)
            self._remove(sequence)
            self._stats.dropped_tokens += len(sequence.tokens)
            return False
        if match.is_continued:
            self._remove(sequence)
        else:
            self._index.use(sequence)
        self._stats.restored_tokens += match.reusable
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

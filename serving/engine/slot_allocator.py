"""KV slots: which are free, which prefix each idle slot still holds, which one a sequence gets.

If a backend can truncate a slot, a sequence may reuse any common prefix. If it cannot (a recurrent
state, sliding-window attention), a sequence may continue exactly what a free slot holds, or start
from a checkpoint, which is a copy of that state. Checkpoints are made at two points of a prompt:
shortly before its end, where the next turn of the conversation continues, and at the end of a
prefix that it shares with another sequence, where the next such sequence continues. Sequences with
different cache salts have no common prefix.
`crossover.serving.capacity.choose_slot` decides which slot a sequence gets, and what the prompt
cache (prompt_cache.py) stores and restores.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import numpy as np

from crossover.serving.backends.backend_interface import Backend, Exporting, Saved
from crossover.serving.capacity.choose_slot import (
    COMPUTED_TAIL,
    StoredMatch,
    checkpoint_marks,
    choose_checkpointed_slot,
    choose_slot,
    is_worth_storing,
    max_checkpoints,
    oldest_slot,
)
from crossover.serving.engine.common_prefix import common_prefix
from crossover.serving.engine.prompt_cache import PromptCache, StoredSequence
from crossover.serving.sampling.step_inputs import Tokens

_NOTHING: Tokens = np.empty(0, np.int32)


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """A backend's copy of the state of a slot that held these tokens."""

    tokens: Tokens
    salt: str
    saved: Saved


class SlotAllocation(NamedTuple):
    """A slot for a sequence."""

    slot: int
    reused: int  # tokens of the prompt that its KV holds already
    checkpoints: tuple[int, ...] = ()  # prompt lengths at which to make checkpoints, ascending


class SlotAllocator:
    """The slots of one backend.

    `reuses`: released slots keep their KV for prefix reuse. `prompt_cache_bytes`: for the KV of
    sequences that lose their slots; 0: there is no prompt cache. Only a backend that can export
    slots has one.
    """

    def __init__(self, backend: Backend, reuses: bool, prompt_cache_bytes: int = 0) -> None:
        info, slots = backend.info, backend.info.settings.slots
        self._pool_tokens = info.settings.pool_tokens
        self._backend: Any = backend
        self._reuses = reuses and (info.rewinds or info.has_checkpoints)
        self._uses_checkpoints = self._reuses and not info.rewinds
        # The tokens in the KV of each idle slot; none for slots in use.
        self._idle_tokens: list[Tokens] = [_NOTHING] * slots
        self._idle_since = [0.0] * slots
        self._salts = [""] * slots  # of what each slot holds, idle or running
        self._checkpoints: list[Checkpoint] = []  # the most recently used last
        self._max_checkpoints = max_checkpoints(slots)
        self.prompt_cache: PromptCache | None = None
        if prompt_cache_bytes and self._reuses and info.has_export:
            with contextlib.suppress(MemoryError):  # the engine serves without one
                prompt_cache = PromptCache(cast("Exporting", backend), prompt_cache_bytes)
                self.prompt_cache = prompt_cache if prompt_cache.stored_tokens else None

    @property
    def idle_tokens(self) -> int:
        """Return the tokens in the KV of all idle slots together."""
        return sum(self._idle_lengths)

    def take(self, prompt: Tokens, running: Mapping[int, Tokens], salt: str = "") -> SlotAllocation:
        """Return a free slot for this prompt, with as much of it reused as possible.

        The last COMPUTED_TAIL tokens are never reused, so that no piece of one token remains.
        `running`: the computed tokens of each slot in use, whose prefixes may be copied.
        `salt`: only what has the same one is reused.
        """
        allocation = self._choose(prompt, running, salt)
        self._idle_tokens[allocation.slot] = _NOTHING
        self._salts[allocation.slot] = salt
        self._backend.truncate(allocation.slot, allocation.reused)
        return allocation

    def save(self, slot: int, tokens: Tokens) -> None:
        """Make a checkpoint of a slot that holds these tokens, unless there is one."""
        salt = self._salts[slot]
        if any(
            checkpoint.salt == salt and np.array_equal(checkpoint.tokens, tokens)
            for checkpoint in self._checkpoints
        ):
            return
        self._checkpoints.append(Checkpoint(tokens.copy(), salt, self._backend.save(slot)))
        del self._checkpoints[: -self._max_checkpoints]

    def release(self, slot: int, tokens: Tokens, now: float) -> None:
        """Make the slot idle; `tokens` are in its KV."""
        if self._reuses and len(tokens):
            self._idle_tokens[slot] = tokens
            self._idle_since[slot] = now
        else:
            self._backend.truncate(slot, 0)

    def preempt(self, slot: int, tokens: Tokens) -> None:
        """Free the KV of a running sequence, of which `tokens` are computed."""
        self._store(slot, tokens, 0)
        self._backend.truncate(slot, 0)

    def drop_oldest(self, pinned: StoredSequence | None = None) -> bool:
        """Free the KV of the slot that has been idle for longest. Return False if all idle slots
        are empty. `pinned`: a sequence that the prompt cache must keep."""
        non_empty = [slot for slot, tokens in enumerate(self._idle_tokens) if len(tokens)]
        if not non_empty:
            return False
        oldest = min(non_empty, key=lambda slot: self._idle_since[slot])
        self._store(oldest, self._idle_tokens[oldest], 0, pinned)
        self._backend.truncate(oldest, 0)
        self._idle_tokens[oldest] = _NOTHING
        return True

    def _choose(self, prompt: Tokens, running: Mapping[int, Tokens], salt: str) -> SlotAllocation:
        """Return a free slot that holds the reused part of the prompt, and may hold more."""
        free = [slot for slot in range(len(self._idle_tokens)) if slot not in running]
        if not self._reuses:
            return SlotAllocation(free[0], 0)
        reusable = prompt[: max(0, len(prompt) - COMPUTED_TAIL)]
        common = self._common(reusable, running, salt)
        slots = (common, self._idle_lengths, free, self._idle_since)
        checkpoint = None
        checkpoints: dict[int, Checkpoint] = {}  # those that it begins with, by their tokens
        if self._uses_checkpoints:
            checkpoints = self._checkpoints_of(reusable, salt)
            # A longer one is useless, since no slot holds the rest of its KV.
            lengths = (tokens for tokens in checkpoints if tokens <= max(common))
            longest = max(lengths, default=0)
            (slot, reused, source), is_restored = choose_checkpointed_slot(*slots, longest)
            checkpoint = checkpoints[longest] if is_restored else None
        else:
            slot, reused, source = choose_slot(*slots)
        sequence, match = None, StoredMatch()
        if self.prompt_cache is not None:
            sequence, match = self.prompt_cache.longest(reusable, salt, checkpoints)
        if sequence is not None and match.is_worth_restoring(reused):
            slot = oldest_slot(free, self._idle_lengths, self._idle_since)
            checkpoint = checkpoints.get(match.reusable)
            reused = self._restore(slot, sequence, match, checkpoint, running)
        else:
            self._store(slot, self._idle_tokens[slot], reused if source == slot else 0)
            if checkpoint is not None:
                self._backend.restore(slot, checkpoint.saved, source)
            elif source != slot:
                self._copy(source, slot, reused)
        if checkpoint is not None:  # now the most recently used
            self._checkpoints.remove(checkpoint)
            self._checkpoints.append(checkpoint)
        if not self._uses_checkpoints:
            return SlotAllocation(slot, reused)
        marks = checkpoint_marks(len(prompt), reused, max(*common, match.common, match.second))
        return SlotAllocation(slot, reused, marks)

    def _copy(self, source: int, slot: int, tokens: int) -> None:
        """Copy the first tokens of a slot to another one."""
        if self.prompt_cache is None or not getattr(self._backend, "defers_copies", False):
            self._backend.copy(source, slot, tokens)
        else:
            self.prompt_cache.copy(source, slot, tokens)

    def _restore(
        self,
        slot: int,
        sequence: StoredSequence,
        match: StoredMatch,
        checkpoint: Checkpoint | None,
        running: Mapping[int, Tokens],
    ) -> int:
        """Copy a stored sequence into a free slot. Return how many of its tokens the slot holds."""
        assert self.prompt_cache is not None
        self._store(slot, self._idle_tokens[slot], 0, sequence)
        self._backend.truncate(slot, 0)
        self._idle_tokens[slot] = _NOTHING
        running_tokens = sum(len(tokens) for tokens in running.values())
        # A shared pool must have room for the whole sequence while it is loaded.
        while running_tokens + self.idle_tokens + len(sequence.tokens) > self._pool_tokens:
            if not self.drop_oldest(pinned=sequence):
                break
        saved = None if checkpoint is None else checkpoint.saved
        is_restored = self.prompt_cache.restore(slot, sequence, match, saved)
        return match.reusable if is_restored else 0

    def _store(
        self, slot: int, tokens: Tokens, kept_tokens: int, pinned: StoredSequence | None = None
    ) -> None:
        """Store what a slot holds before it is overwritten from `kept_tokens` tokens on."""
        salt = self._salts[slot]
        # One of all tokens would be no more than what the slot itself holds.
        checkpoints = self._checkpoints_of(tokens[:-1], salt) if self._uses_checkpoints else {}
        longest = max(checkpoints, default=0)
        if longest > kept_tokens:  # it was for the next turn in this slot
            self._checkpoints.remove(checkpoints[longest])
            self._checkpoints.insert(0, checkpoints[longest])  # the first to be dropped
        if self.prompt_cache is not None and is_worth_storing(len(tokens), kept_tokens):
            saved = checkpoints[longest].saved if checkpoints else None
            self.prompt_cache.store(slot, tokens, salt, pinned, saved)

    @property
    def _idle_lengths(self) -> list[int]:
        """Return the number of tokens in the KV of each idle slot; 0 for slots in use."""
        return [len(tokens) for tokens in self._idle_tokens]

    def _checkpoints_of(self, tokens: Tokens, salt: str) -> dict[int, Checkpoint]:
        """Return the checkpoints that these tokens begin with, by their lengths."""
        return {
            len(checkpoint.tokens): checkpoint
            for checkpoint in self._checkpoints
            if checkpoint.salt == salt
            and common_prefix(checkpoint.tokens, tokens) == len(checkpoint.tokens)
        }

    def _common(self, reusable: Tokens, running: Mapping[int, Tokens], salt: str) -> list[int]:
        """Return, by slot, how many of the reusable tokens its KV begins with."""
        return [
            common_prefix(running.get(slot, idle_tokens), reusable)
            if self._salts[slot] == salt
            else 0
            for slot, idle_tokens in enumerate(self._idle_tokens)
        ]

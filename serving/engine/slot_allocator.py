"""KV slots: which are free, which prefix each idle one still holds, which one a sequence gets.

Where a backend can cut a slot back, a sequence may reuse any common prefix. Where it cannot (a
recurrent state, a window), it may go on where a free slot stands, or from a checkpoint: a copy of
that state, made at two points of a prompt: shortly before its end, where the next turn of a chat
begins, and where a beginning that it shares with another sequence ends, which is where the next of
them will go on. Which slot that is, `crossover.serving.capacity.choose_slot` decides.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from crossover.serving.backends.backend_interface import Backend
from crossover.serving.capacity.choose_slot import (
    COMPUTED_TAIL,
    choose_checkpointed_slot,
    choose_slot,
    max_checkpoints,
)
from crossover.serving.sampling.step_inputs import Tokens

_NOTHING: Tokens = np.empty(0, np.int32)


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """What a backend saved of a slot when it held these tokens."""

    tokens: Tokens
    saved: Any


class Taken(NamedTuple):
    """A slot for a sequence."""

    slot: int
    reused: int  # tokens that its KV holds
    checkpoints: tuple[int, ...] = ()  # lengths at which it is to be saved, ascending


class SlotAllocator:
    """The slots of one backend. `reuses`: released slots keep their KV for prefix reuse."""

    def __init__(self, backend: Backend, reuses: bool) -> None:
        info, slots = backend.info, backend.info.settings.slots
        self._backend: Any = backend
        self._reuses = reuses and (info.rewinds or info.saves)
        self._saves = self._reuses and not info.rewinds
        self._held: list[Tokens] = [_NOTHING] * slots  # of idle slots
        self._idle_since = [0.0] * slots
        self._checkpoints: list[Checkpoint] = []  # the last used one last
        self._max_checkpoints = max_checkpoints(slots)

    @property
    def idle_tokens(self) -> int:
        """Tokens in the KV of idle slots."""
        return sum(len(held) for held in self._held)

    def take(self, prompt: Tokens, running: Mapping[int, Tokens]) -> Taken:
        """A free slot for this prompt. All but its last two tokens may be reused, so that no piece
        of one token is left. `running`: the tokens computed in the slots in use, whose prefixes may
        be copied."""
        choose = self._choose_saved if self._saves else self._choose
        taken = choose(prompt, running)
        self._held[taken.slot] = _NOTHING
        self._backend.truncate(taken.slot, taken.reused)
        return taken

    def save(self, slot: int, tokens: Tokens) -> None:
        """Make a checkpoint of a slot that holds these tokens."""
        same = (one for one in self._checkpoints if np.array_equal(one.tokens, tokens))
        if next(same, None) is None:
            self._checkpoints.append(Checkpoint(tokens.copy(), self._backend.save(slot)))
            del self._checkpoints[: -self._max_checkpoints]

    def release(self, slot: int, tokens: Tokens, now: float) -> None:
        """Make the slot idle; `tokens` are in its KV."""
        if self._reuses and len(tokens):
            self._held[slot] = tokens
            self._idle_since[slot] = now
        else:
            self._backend.truncate(slot, 0)

    def drop_oldest(self) -> bool:
        """Free the KV of the slot idle for longest; False where no idle slot holds any."""
        held = [slot for slot, tokens in enumerate(self._held) if len(tokens)]
        if not held:
            return False
        oldest = min(held, key=lambda slot: self._idle_since[slot])
        self._backend.truncate(oldest, 0)
        self._held[oldest] = _NOTHING
        return True

    def _choose(self, prompt: Tokens, running: Mapping[int, Tokens]) -> Taken:
        """Where a slot can be cut back, or nothing is reused."""
        free = self._free(running)
        if not self._reuses:
            return Taken(free[0], 0)
        common = self._common(prompt[: max(0, len(prompt) - COMPUTED_TAIL)], running)
        slot, reused, source = choose_slot(common, self._held_tokens, free, self._idle_since)
        if source != slot:
            self._backend.copy(source, slot, reused)
        return Taken(slot, reused)

    def _choose_saved(self, prompt: Tokens, running: Mapping[int, Tokens]) -> Taken:
        """Where a slot cannot be cut back."""
        wanted = prompt[: max(0, len(prompt) - COMPUTED_TAIL)]
        common = self._common(wanted, running)
        checkpoint = self._longest_checkpoint(wanted, max(common))
        (slot, reused, source), is_restored, marks = choose_checkpointed_slot(
            common,
            self._held_tokens,
            self._free(running),
            self._idle_since,
            prompt_tokens=len(prompt),
            checkpoint_tokens=0 if checkpoint is None else len(checkpoint.tokens),
        )
        if is_restored and checkpoint is not None:
            self._backend.restore(slot, checkpoint.saved, source)
            self._checkpoints.remove(checkpoint)
            self._checkpoints.append(checkpoint)  # the last used one
        elif not reused:
            self._backend.truncate(slot, 0)
        return Taken(slot, reused, marks)

    def _free(self, running: Mapping[int, Tokens]) -> list[int]:
        return [slot for slot in range(len(self._held)) if slot not in running]

    @property
    def _held_tokens(self) -> list[int]:
        """Tokens in the KV of each idle slot."""
        return [len(held) for held in self._held]

    def _longest_checkpoint(self, wanted: Tokens, most: int) -> Checkpoint | None:
        """The longest one that `wanted` begins with; of `most` tokens, which some slot holds."""
        fitting = [
            one
            for one in self._checkpoints
            if len(one.tokens) <= most and common_prefix(one.tokens, wanted) == len(one.tokens)
        ]
        return max(fitting, key=lambda one: len(one.tokens), default=None)

    def _common(self, wanted: Tokens, running: Mapping[int, Tokens]) -> list[int]:
        """By slot, how many of the wanted tokens its KV begins with."""
        return [
            common_prefix(running.get(slot, held), wanted) for slot, held in enumerate(self._held)
        ]


def common_prefix(a: Tokens, b: Tokens) -> int:
    """How many leading tokens the two have in common."""
    shortest = min(len(a), len(b))
    if not shortest or a[0] != b[0]:
        return 0
    different = np.flatnonzero(a[:shortest] != b[:shortest])
    return int(different[0]) if len(different) else shortest

"""KV slots: which are free, which prefix each idle one still holds, which one a sequence gets.

Where a backend can cut a slot back, a sequence may reuse any common prefix. Where it cannot (a
recurrent state, a window), it may go on where a free slot stands, or from a checkpoint: a copy of
that state, made at two points of a prompt (`checkpoints_of`): shortly before its end, where the
next turn of a chat begins, and where a beginning that it shares with another sequence ends, which
is where the next of them will go on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from serving.backends.backend_interface import Backend, max_checkpoints
from serving.sampling.step_inputs import Tokens

MIN_REUSED_TOKENS = 16  # a shorter common prefix is not worth a copy
# Tokens of a prompt behind its last checkpoint. What a chat template puts there (`<think>`, an
# empty thought) is gone in the next turn's prompt, which could not use a checkpoint behind it.
PROMPT_TAIL = 8
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
        wanted = prompt[: max(0, len(prompt) - 2)]
        choose = self._choose_saved if self._saves else self._choose
        taken = choose(wanted, running)
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

    def _choose(self, wanted: Tokens, running: Mapping[int, Tokens]) -> Taken:
        """Where a slot can be cut back, or nothing is reused."""
        free = [slot for slot in range(len(self._held)) if slot not in running]
        if not self._reuses:
            return Taken(free[0], 0)
        common = self._common(wanted, running)
        best = max(range(len(common)), key=lambda slot: (common[slot], slot in free, -slot))
        if common[best] < MIN_REUSED_TOKENS:
            return Taken(min(free, key=self._age), 0)
        target = self._target(best, common[best], free)
        if target != best:
            self._backend.copy(best, target, common[best])
        return Taken(target, common[best])

    def _choose_saved(self, wanted: Tokens, running: Mapping[int, Tokens]) -> Taken:
        """Where a slot cannot be cut back."""
        free = [slot for slot in range(len(self._held)) if slot not in running]
        common = self._common(wanted, running)
        standing = [slot for slot in free if common[slot] == len(self._held[slot])]
        target = max(standing, key=lambda slot: common[slot], default=free[0])
        reused = common[target] if standing else 0
        checkpoint = self._longest_checkpoint(wanted, max(common))
        if checkpoint is not None and len(checkpoint.tokens) > reused:
            reused = len(checkpoint.tokens)
            source = max(range(len(common)), key=lambda slot: (common[slot], slot in free, -slot))
            target = self._target(source, reused, free)
            self._backend.restore(target, checkpoint.saved, source)
            self._checkpoints.remove(checkpoint)
            self._checkpoints.append(checkpoint)  # the last used one
        elif reused < MIN_REUSED_TOKENS:
            target, reused = min(free, key=self._age), 0
            self._backend.truncate(target, 0)
        shared, end = max(common), len(wanted) + 2 - PROMPT_TAIL
        lengths = (shared, end) if shared < end - MIN_REUSED_TOKENS else (end,)
        marks = tuple(one for one in lengths if one >= max(MIN_REUSED_TOKENS, reused + 1))
        return Taken(target, reused, marks)

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

    def _target(self, best: int, reused: int, free: list[int]) -> int:
        """The free slot for a sequence that reuses tokens of slot `best`: that one, unless it is in
        use or would lose much that others could reuse."""
        mostly_shared = reused * 2 >= len(self._held[best])
        if best in free and (mostly_shared or len(free) == 1):
            return best
        return min(free, key=lambda slot: (slot == best, *self._age(slot)))

    def _age(self, slot: int) -> tuple[bool, float, int]:
        """Order of free slots: empty ones first, then the one idle for longest."""
        return len(self._held[slot]) > 0, self._idle_since[slot], slot


def common_prefix(a: Tokens, b: Tokens) -> int:
    """How many leading tokens the two have in common."""
    shortest = min(len(a), len(b))
    if not shortest or a[0] != b[0]:
        return 0
    different = np.flatnonzero(a[:shortest] != b[:shortest])
    return int(different[0]) if len(different) else shortest

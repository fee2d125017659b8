"""KV slots: which are free, which prefix each idle one still holds, which one a sequence gets."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from serving.backends.backend_interface import Backend
from serving.sampling.step_inputs import Tokens

MIN_REUSED_TOKENS = 16  # a shorter common prefix is not worth a copy
_NOTHING: Tokens = np.empty(0, np.int32)


class SlotAllocator:
    """The slots of one backend. `reuses`: released slots keep their KV for prefix reuse."""

    def __init__(self, backend: Backend, reuses: bool) -> None:
        self._backend = backend
        self._reuses = reuses
        self._held: list[Tokens] = [_NOTHING] * backend.info.settings.slots  # of idle slots
        self._idle_since = [0.0] * backend.info.settings.slots

    @property
    def idle_tokens(self) -> int:
        """Tokens in the KV of idle slots."""
        return sum(len(held) for held in self._held)

    def take(self, wanted: Tokens, running: Mapping[int, Tokens]) -> tuple[int, int]:
        """A free slot, and how many tokens of `wanted` its KV holds. `running`: the tokens computed
        in the slots in use, whose prefixes may be copied."""
        slot, reused = self._choose(wanted, running)
        self._held[slot] = _NOTHING
        self._backend.truncate(slot, reused)
        return slot, reused

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

    def _choose(self, wanted: Tokens, running: Mapping[int, Tokens]) -> tuple[int, int]:
        free = [slot for slot in range(len(self._held)) if slot not in running]
        if not self._reuses:
            return free[0], 0
        common = [
            common_prefix(running.get(slot, held), wanted) for slot, held in enumerate(self._held)
        ]
        best = max(range(len(common)), key=lambda slot: (common[slot], slot in free, -slot))
        if common[best] < MIN_REUSED_TOKENS:
            return min(free, key=self._age), 0
        mostly_shared = common[best] * 2 >= len(self._held[best])
        if best in free and (mostly_shared or len(free) == 1):
            return best, common[best]
        target = min(free, key=lambda slot: (slot == best, *self._age(slot)))
        if target != best:
            self._backend.copy(best, target, common[best])
        return target, common[best]

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

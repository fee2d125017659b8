"""The index of the prompt cache: which sequences it stores, how much room they take, and which of
them it drops. Pure.

    stored = StoredSequences[str](capacity=100)
    stored.add("first", 60)      # []: nothing had to go
    stored.add("second", 60)     # ["first"], which was used least recently

The engine's prompt cache counts blocks of memory and the simulation counts tokens, so that both
store and drop the same sequences. When to store and restore one is decided in choose_slot.py.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)


class StoredSequences(Generic[Key]):
    """Stored sequences of at most `capacity` together, in the unit of their sizes. It may grow."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.used = 0
        self._sizes: dict[Key, int] = {}  # the most recently used last

    def __len__(self) -> int:
        return len(self._sizes)

    def __contains__(self, key: object) -> bool:
        return key in self._sizes

    def __iter__(self) -> Iterator[Key]:
        """Yield the keys, the most recently used first."""
        return reversed(self._sizes)

    def add(self, key: Key, size: int, pinned: Key | None = None) -> list[Key] | None:
        """Store a sequence. Return the keys that are dropped for it, or None if it does not fit.

        `pinned`: the key of a sequence that is about to be restored, and is not dropped.
        """
        pinned_size = 0 if pinned is None else self._sizes.get(pinned, 0)
        if size + pinned_size > self.capacity:
            return None
        dropped = []
        least_recent_first = iter(list(self._sizes))
        while self.used + size > self.capacity:
            victim = next(least_recent_first)
            if victim != pinned:
                self.remove(victim)
                dropped.append(victim)
        self._sizes[key] = size
        self.used += size
        return dropped

    def use(self, key: Key) -> None:
        """Note that a sequence was used, which makes it the last to be dropped."""
        self._sizes[key] = self._sizes.pop(key)

    def remove(self, key: Key) -> None:
        self.used -= self._sizes.pop(key)

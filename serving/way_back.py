"""When the preferred engine may be tried again: it is due, and it has looked usable for a while.

    way_back.fell_back_at = clock()
    await way_back.watch(may, load)

The pauses and the limit of attempts an hour are serving.recovery.return_at's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from serving.recovery import Ending, RecoveryLimits, return_at

_KEPT = 100


class WayBack:
    """`usable` asks whether the preferred engine could load now (its GPU has room); None: nobody can tell, so it is tried."""

    def __init__(self, limits: RecoveryLimits, usable: Callable[[], Awaitable[bool]] | None, clock: Callable[[], float]) -> None:
        self.fell_back_at: float | None = None  # None: there is nothing to go back to
        self.pause_seconds = min(5.0, max(0.05, limits.return_first_seconds / 6, limits.steady_seconds / 6))
        self._limits, self._usable, self._clock = limits, usable, clock
        self._attempts: list[float] = []
        self._usable_since: float | None = None

    def forget(self) -> None:
        """Begin anew, as if nothing had ever failed."""
        self.fell_back_at, self._usable_since = None, None
        self._attempts = []

    def is_due(self, endings: Sequence[Ending]) -> bool:
        """True when enough time has passed since the fall, and since earlier attempts."""
        if self.fell_back_at is None:
            return False
        at = return_at(endings, self.fell_back_at, self._attempts, self._limits)
        return at is not None and self._clock() >= at

    async def is_open(self, may: Callable[[], bool]) -> bool:
        """To be asked every `pause_seconds`: True once `may` held and the engine looked usable for `steady_seconds` without a break."""
        if not may() or (self._usable is not None and not await self._usable()):
            self._usable_since = None
            return False
        now = self._clock()
        if self._usable_since is None:
            self._usable_since = now
        return now - self._usable_since >= self._limits.steady_seconds and may()

    async def watch(self, may: Callable[[], bool], load: Callable[[], Awaitable[None]]) -> None:
        """Loads the preferred engine beside the one that serves whenever it can be had again; until it is cancelled."""
        while True:
            await asyncio.sleep(self.pause_seconds)
            if await self.is_open(may):
                self.begin()
                await load()

    def begin(self) -> None:
        """An attempt begins now."""
        self._usable_since = None
        self._attempts = [*self._attempts[-_KEPT + 1 :], self._clock()]

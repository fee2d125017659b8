"""When to go back to the preferred engine, which is the GPU's where there is one.

Failback is tried after `return_first_seconds`, then after twice as long for each attempt that did
not last, up to `return_longest_seconds`, at most `flips_per_hour` times an hour, never after a
permanent cause (RecoveryLimits in serving.supervisor.restart_policy).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from serving.hardware.gpus import GpuFacts
from serving.placement.placement_policy import Placement
from serving.supervisor.restart_policy import PERMANENT, Ending, RecoveryLimits

# What must be free on a GPU for a failback: the least of so much of the need, the need and so much
# of the card, and so much of the card.
RETURN_NEED, RETURN_SPARE, RETURN_MOST = 1.2, 0.05, 0.97
_KEPT_ATTEMPTS = 100


def return_at(
    endings: Sequence[Ending],
    fell_back_at: float,
    returns: Sequence[float],
    limits: RecoveryLimits,
) -> float | None:
    """The earliest time to try the preferred engine, the first, again. None: never.

    `returns`: when earlier attempts began. Never, where its last cause is permanent.
    """
    of_preferred = [one for one in endings if one.engine == 0]
    if not of_preferred or of_preferred[-1].cause in PERMANENT or limits.flips_per_hour <= 0:
        return None
    lasted = [
        one.at_seconds
        for one in of_preferred
        if one.ready_seconds is not None and one.ready_seconds >= limits.lasted_seconds
    ]
    unlucky = [at for at in returns if not lasted or at >= lasted[-1]]
    pause = min(limits.return_longest_seconds, limits.return_first_seconds * 2.0 ** len(unlucky))
    earliest = max(fell_back_at, returns[-1] if returns else fell_back_at) + pause
    if len(returns) >= limits.flips_per_hour:
        earliest = max(earliest, returns[-limits.flips_per_hour] + 3600.0)
    return earliest


class Failback:
    """Whether to try the preferred engine again: it is due, and has looked usable for a while.

    `usable`: could it load now (its GPU has room)? None: nobody can tell, so it is tried.
    """

    def __init__(
        self,
        limits: RecoveryLimits,
        usable: Callable[[], Awaitable[bool]] | None,
        clock: Callable[[], float],
    ) -> None:
        self.fell_back_at: float | None = None  # None: there is nothing to go back to
        self.pause_seconds = min(
            5.0, max(0.05, limits.return_first_seconds / 6, limits.steady_seconds / 6)
        )
        self._limits = limits
        self._usable = usable
        self._clock = clock
        self._attempts: list[float] = []
        self._usable_since: float | None = None

    def forget(self) -> None:
        """Begin again, as if nothing had ever failed."""
        self.fell_back_at = None
        self._usable_since = None
        self._attempts = []

    def is_due(self, endings: Sequence[Ending]) -> bool:
        """True when enough time has passed since the fall, and since earlier attempts."""
        if self.fell_back_at is None:
            return False
        at = return_at(endings, self.fell_back_at, self._attempts, self._limits)
        return at is not None and self._clock() >= at

    async def is_open(self, may: Callable[[], bool]) -> bool:
        """Ask every `pause_seconds`: True once `may` held and the engine looked usable for
        `steady_seconds` without a break."""
        if not may() or (self._usable is not None and not await self._usable()):
            self._usable_since = None
            return False
        now = self._clock()
        if self._usable_since is None:
            self._usable_since = now
        return now - self._usable_since >= self._limits.steady_seconds and may()

    def begin(self) -> None:
        """An attempt begins now."""
        self._usable_since = None
        self._attempts = [*self._attempts[-_KEPT_ATTEMPTS + 1 :], self._clock()]


def has_room_again(placement: Placement, gpus: Sequence[GpuFacts]) -> bool:
    """Whether the first attempt, which is on a GPU, would fit on its GPU now, with a little to
    spare: a load that fails again costs more than a late one. Never more than a card has."""
    need, device_id = placement.need_bytes, placement.attempts[0].device_id
    if placement.attempts[0].vendor not in ("", "nvidia"):
        return True  # nobody can tell
    mine = [gpu for gpu in gpus if not device_id or gpu.uuid == device_id]
    for gpu in mine:
        wanted = RETURN_NEED * need
        if gpu.total_bytes is not None:
            spare = need + RETURN_SPARE * gpu.total_bytes
            wanted = min(wanted, spare, RETURN_MOST * gpu.total_bytes)
        if gpu.free_bytes is None or gpu.free_bytes >= wanted:
            return True
    return False

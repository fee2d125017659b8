"""When to go back to the preferred engine, which is the GPU's where there is one.

Failback is tried after `return_first_seconds`, then after twice as long for each attempt that did
not last, up to `return_longest_seconds`, at most `flips_per_hour` times an hour, never after a
permanent cause (RecoveryLimits in serving.supervisor.restart_policy).
"""

from __future__ import annotations

from collections.abc import Sequence

from serving.hardware.gpus import GpuFacts
from serving.placement.placement_policy import Placement
from serving.supervisor.restart_policy import PERMANENT, Ending, RecoveryLimits

# What must be free on a GPU for a failback: the least of so much of the need, the need and so much
# of the card, and so much of the card.
RETURN_NEED, RETURN_SPARE, RETURN_MOST = 1.2, 0.05, 0.97


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
    earliest = max(fell_back_at, *returns) + pause if returns else fell_back_at + pause
    if len(returns) >= limits.flips_per_hour:
        earliest = max(earliest, returns[-limits.flips_per_hour] + 3600.0)
    return earliest


def has_room_again(placement: Placement, gpus: Sequence[GpuFacts]) -> bool:
    """Whether the first attempt, which is on a GPU, would fit on its GPU now, with a little to
    spare: a load that fails again costs more than a late one. Never more than a card has."""
    first = placement.attempts[0]
    if first.vendor not in ("", "nvidia"):
        return True  # nobody can tell
    for gpu in gpus:
        wanted = RETURN_NEED * first.need_bytes
        if gpu.total_bytes is not None:
            spare = first.need_bytes + RETURN_SPARE * gpu.total_bytes
            wanted = min(wanted, spare, RETURN_MOST * gpu.total_bytes)
        is_mine = not first.device_id or gpu.uuid == first.device_id
        if is_mine and (gpu.free_bytes is None or gpu.free_bytes >= wanted):
            return True
    return False

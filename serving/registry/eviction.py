"""Which models must be evicted so that another one fits: pure decisions over bytes.

    option, evict = make_room([{"GPU-1": 9e9}, {"cpu": 6e9}], residents, free={"GPU-1": 2e9, ...})

Memory is that of one place: "cpu" for RAM, a GPU's UUID for its own (Attempt.place). The first
option that can be had is taken (the placement's order: GPU first), even where others are evicted
for it; the least recently used go first; no more go than needed; a busy model never goes.

`free`: what a new engine may take now, less what loaded engines were promised and have not touched
yet (KV caches fill as they are used). So evicting a resident frees max(predicted, measured) bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from models import formatting
from serving.errors import NoRoom
from serving.placement.placement_policy import Attempt, NoPlacement

Bytes = Mapping[str, int]  # place -> bytes
Free = Mapping[str, int | None]  # None: the device does not say


class Resident(msgspec.Struct, frozen=True):
    """A model that is loaded or loading. `used_at`: when its last request began or ended."""

    name: str
    takes: dict[str, int]  # place -> bytes that its end would give back
    used_at: float
    busy: bool
    promised_bytes: int = 0  # of RAM, that it may still touch


def make_room(
    options: Sequence[Bytes],
    residents: Sequence[Resident],
    free: Free,
    most_loaded: int | None = None,
) -> tuple[int, tuple[str, ...]]:
    """Which of `options` (bytes needed in each place) can be had, and who goes for it, in order.

    `most_loaded`: models at once, the new one counted. Raises NoRoom where busy models are in the
    way, NoPlacement where it would not even fit alone.
    """

    def fits(needs: Bytes, gone: Sequence[Resident]) -> bool:
        if most_loaded is not None and len(residents) - len(gone) >= most_loaded:
            return False
        for place, need in needs.items():
            there = free.get(place)
            if there is not None and there + sum(one.takes.get(place, 0) for one in gone) < need:
                return False
        return True

    idle = sorted((one for one in residents if not one.busy), key=lambda one: one.used_at)
    for index, needs in enumerate(options):
        if fits(needs, idle):
            gone = idle
            for one in reversed(idle):  # whoever may stay; the youngest first
                others = [other for other in gone if other is not one]
                gone = others if fits(needs, others) else gone
            return index, tuple(one.name for one in gone)
    parts = [
        f"{formatting.size(need)} needed on the {'CPU' if place == 'cpu' else 'GPU'}, "
        f"{formatting.size(max(0, there))} may be used"
        for needs in options
        for place, need in needs.items()
        if (there := free.get(place)) is not None and there < need
    ]
    why = "; ".join(dict.fromkeys(parts))
    if not any(fits(needs, residents) for needs in options):
        raise NoPlacement(f"it would not fit even alone: {why}")
    busy = [one.name for one in residents if one.busy]
    if not why or (most_loaded is not None and len(busy) >= most_loaded):
        why = f"{most_loaded} model{'' if most_loaded == 1 else 's'} may be loaded at once"
    raise NoRoom(f"{why}, and {', '.join(busy)} {'is' if len(busy) == 1 else 'are'} busy")


def bytes_needed(attempts: Sequence[Attempt], standby: bool) -> list[dict[str, int]]:
    """Bytes by place for each way to run a model, with the engine on standby."""
    needs: list[dict[str, int]] = []
    for index, attempt in enumerate(attempts):
        need = {attempt.place: attempt.need_bytes}
        for other in attempts[index + 1 : index + 2] if standby else ():
            need[other.place] = need.get(other.place, 0) + other.need_bytes
        needs.append(need)
    return needs


def bytes_free(
    attempts: Sequence[Attempt], residents: Sequence[Resident], limit_bytes: int | None
) -> dict[str, int | None]:
    """Bytes by place that a new engine may take. `limit_bytes`: RAM of all engines together."""
    free: dict[str, int | None] = {}
    for attempt in attempts:
        there = attempt.free_bytes
        if attempt.place == "cpu":
            if there is not None:
                there -= sum(one.promised_bytes for one in residents)
            if limit_bytes is not None:
                left = limit_bytes - sum(one.takes.get("cpu", 0) for one in residents)
                there = left if there is None else min(there, left)
        free[attempt.place] = there
    return free

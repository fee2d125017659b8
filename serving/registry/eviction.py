"""Which idle models are evicted so that another one fits. Pure: numbers in, a choice out.

Memory is that of one place: "cpu" for RAM, a GPU's UUID for its own (Attempt.place).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Protocol

from crossover.models import formatting
from crossover.serving.errors import NoRoom
from crossover.serving.placement.placement_policy import Attempt, NoPlacement

BytesByPlace = Mapping[str, int]


class Resident(Protocol):
    """A model whose engines take memory, as eviction needs it."""

    @property
    def served_name(self) -> str: ...

    @property
    def predicted_bytes(self) -> BytesByPlace:
        """Return the bytes that unloading it frees."""

    @property
    def measured_bytes(self) -> int:
        """Return the current RSS of its engine processes."""

    @property
    def last_used_at(self) -> float: ...

    @property
    def is_busy(self) -> bool: ...


def make_room(
    options: Sequence[BytesByPlace],
    residents: Sequence[Resident],
    free_bytes: Mapping[str, int | None],
) -> tuple[int, str | None]:
    """Return the index of the first of `options` that can be had, and the model to evict for it:
    the least recently used that frees memory where some is missing, or None if it fits already.

    `options`: bytes needed in each place, in the placement's order (GPU first). The first option
    is preferred even if models must be evicted for it. `free_bytes`: None where the device does
    not report it. Raises NoRoom if busy models are in the way, NoPlacement if no option would fit
    even without other models.
    """

    def places_short(needed: BytesByPlace, evicted: Sequence[Resident] = ()) -> list[str]:
        """Return the places that lack memory for `needed` after these evictions."""
        short = []
        for place, needed_bytes in needed.items():
            free = free_bytes.get(place)
            freed = sum(resident.predicted_bytes.get(place, 0) for resident in evicted)
            if free is not None and free + freed < needed_bytes:
                short.append(place)
        return short

    idle = [resident for resident in residents if not resident.is_busy]
    idle.sort(key=lambda resident: resident.last_used_at)
    for index, needed in enumerate(options):
        short = places_short(needed)
        if not places_short(needed, idle):
            for resident in idle:
                if any(resident.predicted_bytes.get(place) for place in short):
                    return index, resident.served_name
            return index, None
    shortages = "; ".join(
        f"{formatting.size(needed[place])} needed on the {'CPU' if place == 'cpu' else 'GPU'}, "
        f"{formatting.size(max(0, free_bytes[place] or 0))} may be used"
        for needed in options
        for place in places_short(needed)
    )
    if all(places_short(needed, residents) for needed in options):
        raise NoPlacement(f"it would not fit even without other models: {shortages}")
    busy = ", ".join(resident.served_name for resident in residents if resident.is_busy)
    raise NoRoom(f"{shortages}, while {busy} are busy")


def bytes_by_place(attempts: Sequence[Attempt]) -> dict[str, int]:
    """Return the bytes that engines need together, by place."""
    needed = Counter[str]()
    for attempt in attempts:
        needed[attempt.place] += attempt.need_bytes
    return dict(needed)


def bytes_free(
    attempts: Sequence[Attempt], residents: Sequence[Resident], limit_bytes: int | None
) -> dict[str, int | None]:
    """Return the bytes, by place, that a new engine may use. `limit_bytes`: RAM for all engines.

    What a resident was predicted to take and has not taken yet is not free, because KV caches fill
    as they are used.
    """
    free = {attempt.place: attempt.free_bytes for attempt in attempts}
    in_ram = [resident for resident in residents if "cpu" in resident.predicted_bytes]
    unreserved = free.get("cpu")
    if unreserved is not None:
        predicted = [resident.predicted_bytes["cpu"] for resident in in_ram]
        measured = [resident.measured_bytes for resident in in_ram]
        unreserved -= sum(
            max(0, total - resident) for total, resident in zip(predicted, measured, strict=True)
        )
        if limit_bytes is not None:
            unreserved = min(unreserved, limit_bytes - sum(predicted))
        free["cpu"] = unreserved
    return free

"""Which idle models are evicted so that another one fits. Pure: numbers in, a choice out.

Memory is counted by place: "cpu" for RAM, a GPU's UUID for the memory of that GPU (Attempt.place).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

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


class Eviction(NamedTuple):
    """The option that was chosen, as its index, and the name of the model to evict for it first;
    None: it fits already."""

    option: int
    evicted_name: str | None


def choose_eviction(
    options: Sequence[BytesByPlace],
    residents: Sequence[Resident],
    free_bytes: Mapping[str, int | None],
) -> Eviction:
    """Return the first option that fits once idle models are evicted, and the model to evict: the
    least recently used one that has memory in a place where some is missing.

    `options`: the bytes needed in each place, best first. The first option is preferred even if
    models must be evicted for it. `free_bytes`: by place; None: the device does not report it.
    Raises NoRoom if busy models are in the way, NoPlacement if no option would fit even without
    other models.
    """

    def find_shortages(needed: BytesByPlace, evicted: Sequence[Resident] = ()) -> list[str]:
        """Return the places that lack memory for `needed` after these evictions."""
        short_places = []
        for place, needed_bytes in needed.items():
            free = free_bytes.get(place)
            freed = sum(resident.predicted_bytes.get(place, 0) for resident in evicted)
            if free is not None and free + freed < needed_bytes:
                short_places.append(place)
        return short_places

    idle = [resident for resident in residents if not resident.is_busy]
    idle.sort(key=lambda resident: resident.last_used_at)
    for index, needed in enumerate(options):
        if find_shortages(needed, evicted=idle):
            continue
        short_places = find_shortages(needed)
        for resident in idle:
            if any(resident.predicted_bytes.get(place) for place in short_places):
                return Eviction(index, resident.served_name)
        return Eviction(index, None)
    shortages = []
    for needed in options:
        for place in find_shortages(needed):
            device = "CPU" if place == "cpu" else "GPU"
            needed_text = formatting.size(needed[place])
            free_text = formatting.size(max(0, free_bytes[place] or 0))
            shortages.append(f"{needed_text} needed on the {device}, {free_text} may be used")
    shortages_text = "; ".join(shortages)
    if all(find_shortages(needed, evicted=residents) for needed in options):
        raise NoPlacement(f"it would not fit even without other models: {shortages_text}")
    busy = ", ".join(resident.served_name for resident in residents if resident.is_busy)
    raise NoRoom(f"{shortages_text}, while {busy} are busy")


def bytes_by_place(attempts: Sequence[Attempt]) -> dict[str, int]:
    """Return the bytes that engines need together, by place."""
    needed = Counter[str]()
    for attempt in attempts:
        needed[attempt.place] += attempt.need_bytes
    return dict(needed)


def bytes_free(
    attempts: Sequence[Attempt], residents: Sequence[Resident], limit_bytes: int | None
) -> dict[str, int | None]:
    """Return the bytes that a new engine may use, by place; None: the device does not report it.

    RAM that a resident is predicted to take, but has not taken yet, is reserved for it, because KV
    caches fill as they are used. `limit_bytes`: RAM that all engines may use together; None: all
    that is free.
    """
    free = {attempt.place: attempt.free_bytes for attempt in attempts}
    free_ram = free.get("cpu")
    if free_ram is None:
        return free
    predicted_ram = 0
    for resident in residents:
        if "cpu" in resident.predicted_bytes:
            predicted = resident.predicted_bytes["cpu"]
            predicted_ram += predicted
            free_ram -= max(0, predicted - resident.measured_bytes)
    if limit_bytes is not None:
        free_ram = min(free_ram, limit_bytes - predicted_ram)
    free["cpu"] = free_ram
    return free

"""Which models must be evicted so that another one fits: pure decisions over bytes.

    verdict = make_room([{"GPU-1": 9e9}, {"cpu": 6e9}], residents, free={"GPU-1": 2e9, "cpu": 1e9})
    verdict.option, verdict.evict            # 0, ("least-recently-used",)

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
from serving.placement.placement_policy import (
    Attempt,
    NoPlacement,
    Placement,
    Reason,
    narrowed,
)
from serving.registry.engine_config import Prepared

Bytes = Mapping[str, int]  # place -> bytes


class RegistryLimits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`memory_bytes`: RAM of all engines together; None: what the machine has free."""

    memory_bytes: int | None = None
    most_loaded: int | None = None
    load_wait_seconds: float = 60.0  # that a request waits for its model
    drain_seconds: float = 60.0  # of an unload


class Resident(msgspec.Struct, frozen=True):
    """A model that is loaded or loading. `used_at`: when its last request began or ended."""

    name: str
    takes: dict[str, int]  # place -> bytes that its end would give back
    used_at: float
    busy: bool


class RoomVerdict(msgspec.Struct, frozen=True):
    """`option`: index of the one that fits once `evict` are gone, in this order; None: none fits,
    for the reason in `text`. `may_change`: what is in the way is busy, so ask again."""

    option: int | None
    evict: tuple[str, ...] = ()
    text: str = ""
    may_change: bool = False


def room_for(
    prepared: Prepared,
    wanted: Placement,
    residents: Sequence[Resident],
    promised_bytes: int,
    limits: RegistryLimits,
) -> tuple[tuple[Attempt, ...], tuple[str, ...]]:
    """The attempts of a placement that can be had (the one that fits, then those it may fall back
    to), and who must go for them. Raises NoRoom or NoPlacement.

    `promised_bytes`: RAM that the residents may still touch.
    """
    check = prepared.model.check_memory
    known = {(config.backend, config.device) for config in prepared.configs}
    attempts = tuple(one for one in wanted.attempts if (one.backend, one.device) in known)
    if not attempts:
        why = "; ".join(reason.text for reason in wanted.reasons)
        raise NoPlacement(f"{prepared.name} can run nowhere any more: {why}")
    free: Mapping[str, int | None] = {}
    if check:
        free = bytes_free(attempts, residents, promised_bytes, limits.memory_bytes)
    needs = bytes_needed(attempts, prepared.model.standby == "warm")
    verdict = make_room(needs, residents, free, limits.most_loaded)
    if verdict.option is None:
        what = f"{prepared.name}: {verdict.text}"
        raise NoRoom(what) if verdict.may_change else NoPlacement(what)
    first, *others = attempts[verdict.option :]
    later = (one for one in others if one.fits or not check)
    return (first, *later), verdict.evict


def placement_in(
    attempts: tuple[Attempt, ...], wanted: Placement, evicted: Sequence[str]
) -> Placement:
    """The placement with the chosen attempts, and who was evicted for it."""
    reason = None
    if evicted:
        text = f"unloaded {', '.join(evicted)}, idle for longest, to make room"
        reason = Reason(None, text)
    return narrowed(wanted, attempts, reason)


def make_room(
    options: Sequence[Bytes],
    residents: Sequence[Resident],
    free: Mapping[str, int | None],
    most_loaded: int | None = None,
) -> RoomVerdict:
    """Choose one of `options` (bytes needed in each place; at least one) and who goes for it.

    `free`: None where the device does not say. `most_loaded`: models at once, the new one counted.
    """

    def fits(needs: Bytes, gone: Sequence[Resident]) -> bool:
        if most_loaded is not None and len(residents) - len(gone) >= most_loaded:
            return False
        for place, need in needs.items():
            there = free.get(place)
            if there is not None and there + sum(one.takes.get(place, 0) for one in gone) < need:
                return False
        return True

    def evicted(needs: Bytes, candidates: Sequence[Resident]) -> list[Resident] | None:
        """Those who must go, oldest first; None where all candidates together are not enough."""
        chosen: list[Resident] = []
        for one in candidates:
            if fits(needs, chosen):
                break
            chosen.append(one)
        if not fits(needs, chosen):
            return None
        # The last one chosen may be so big that earlier ones can stay; the youngest stays first.
        for one in list(reversed(chosen)):
            without = [other for other in chosen if other is not one]
            if fits(needs, without):
                chosen = without
        return chosen

    idle = sorted((one for one in residents if not one.busy), key=lambda one: one.used_at)
    for index, needs in enumerate(options):
        evict = evicted(needs, idle)
        if evict is not None:
            return RoomVerdict(index, tuple(one.name for one in evict))
    why = _shortage(options, free)
    if all(evicted(needs, residents) is None for needs in options):
        return RoomVerdict(None, text=f"it would not fit even alone: {why}")
    busy = [one.name for one in residents if one.busy]
    if most_loaded is not None and len(busy) >= most_loaded:
        why = f"{most_loaded} model{'s' if most_loaded > 1 else ''} may be loaded at once"
    are = f"{', '.join(busy)} {'is' if len(busy) == 1 else 'are'}" if busy else "nothing is"
    return RoomVerdict(None, text=f"{why}, and {are} busy", may_change=True)


def _shortage(options: Sequence[Bytes], free: Mapping[str, int | None]) -> str:
    parts: list[str] = []
    for needs in options:
        for place, need in needs.items():
            there = free.get(place)
            if there is not None and there < need:
                device = "CPU" if place == "cpu" else "GPU"
                usable = formatting.size(max(0, there))
                parts.append(
                    f"{formatting.size(need)} needed on the {device}, {usable} may be used"
                )
    return "; ".join(dict.fromkeys(parts)) or "the number of loaded models is limited"


def bytes_needed(attempts: Sequence[Attempt], standby: bool) -> list[dict[str, int]]:
    """Bytes by place for each way to run a model, with the engine on standby."""
    needs: list[dict[str, int]] = []
    for index, attempt in enumerate(attempts):
        need = {attempt.place: attempt.need_bytes}
        if standby and index + 1 < len(attempts):
            other = attempts[index + 1]
            need[other.place] = need.get(other.place, 0) + other.need_bytes
        needs.append(need)
    return needs


def bytes_free(
    attempts: Sequence[Attempt],
    residents: Sequence[Resident],
    promised_bytes: int,
    limit_bytes: int | None,
) -> dict[str, int | None]:
    """Bytes by place that a new engine may take.

    `promised_bytes`: RAM that loaded engines may still touch. `limit_bytes`: RAM of all engines.
    """
    free: dict[str, int | None] = {}
    for attempt in attempts:
        there = attempt.free_bytes
        if attempt.place == "cpu":
            there = None if there is None else there - promised_bytes
            if limit_bytes is not None:
                left = limit_bytes - sum(one.takes.get("cpu", 0) for one in residents)
                there = left if there is None else min(there, left)
        free[attempt.place] = there
    return free

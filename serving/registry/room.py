"""Where a model goes among those that are loaded, and who is evicted for it: pure decisions."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from serving.errors import NoRoom
from serving.placement.decision import Attempt, NoPlacement, Placement, Reason
from serving.placement.plan import narrowed
from serving.registry.eviction import Resident, bytes_free, bytes_needed, make_room
from serving.registry.prepare import Prepared


class RegistryLimits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`memory_bytes`: RAM of all engines together; None: what the machine has free."""

    memory_bytes: int | None = None
    most_loaded: int | None = None
    load_wait_seconds: float = 60.0  # that a request waits for its model
    drain_seconds: float = 60.0  # of an unload or swap
    residence_seconds: float = 30.0  # of a loaded model that others than the next one's asker use


class ChosenRoom(msgspec.Struct, frozen=True):
    """`attempts`: the engine that fits once `evict` are gone, then those it may fall back to."""

    attempts: tuple[Attempt, ...]
    evict: tuple[str, ...]


def choose_room(
    prepared: Prepared,
    wanted: Placement,
    residents: list[Resident],
    promised_bytes: int,
    limits: RegistryLimits,
) -> ChosenRoom:
    """Choose among the placement's attempts that have files. Raises NoRoom or NoPlacement.

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
    return ChosenRoom((first, *later), verdict.evict)


def placement_in(room: ChosenRoom, wanted: Placement, evicted: list[str]) -> Placement:
    """The placement with the chosen attempts, and who was evicted for it."""
    reason = None
    if evicted:
        text = f"unloaded {', '.join(evicted)}, idle for longest, to make room"
        reason = Reason(None, text)
    return narrowed(wanted, room.attempts, reason)

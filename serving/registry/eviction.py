"""Which models must be evicted so that another one fits: pure decisions over bytes.

    verdict = make_room([{"gpu": 9e9}, {"cpu": 6e9}], residents, free={"gpu": 2e9, "cpu": 1e9})
    verdict.option, verdict.evict            # 0, ("least-recently-used",)

The first option that can be had is taken (the placement's order: GPU first), even where others are
evicted for it; the least recently used go first; no more go than needed; a busy model never goes.

`free`: what a new engine may take now, less what loaded engines were promised and have not touched
yet (KV caches fill as they are used). So evicting a resident frees max(predicted, measured) bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from models import formatting
from serving.errors import NoRoom
from serving.placement.placement_policy import Attempt, NoPlacement, Placement, Reason, narrowed
from serving.registry.engine_config import Prepared

Bytes = Mapping[str, int]  # device -> bytes


class Resident(msgspec.Struct, frozen=True):
    """A model that is loaded or loading. `used_at`: when its last request began or ended."""

    name: str
    takes: dict[str, int]  # device -> bytes that its end would give back
    used_at: float
    busy: bool


class RoomVerdict(msgspec.Struct, frozen=True):
    """`option`: index of the one that fits once `evict` are gone, in this order; None: none fits,
    for the reason in `text`. `may_change`: what is in the way is busy, so ask again."""

    option: int | None
    evict: tuple[str, ...] = ()
    text: str = ""
    may_change: bool = False


class Room(msgspec.Struct, frozen=True):
    """What there is: bytes by device (None: the device does not say), and who is loaded."""

    free: Mapping[str, int | None]
    residents: Sequence[Resident]
    most_loaded: int | None = None  # models at once, the new one counted

    def fits(self, needs: Bytes, gone: Sequence[Resident]) -> bool:
        """Whether an engine with these needs fits once `gone` are gone."""
        loaded = len(self.residents) - len(gone) + 1
        if self.most_loaded is not None and loaded > self.most_loaded:
            return False
        for device, need in needs.items():
            there = self.free.get(device)
            if there is not None and there + sum(one.takes.get(device, 0) for one in gone) < need:
                return False
        return True

    def evicted(self, needs: Bytes, candidates: Sequence[Resident]) -> list[Resident] | None:
        """Those who must go, oldest first; None where all candidates together are not enough."""
        chosen: list[Resident] = []
        for one in candidates:
            if self.fits(needs, chosen):
                break
            chosen.append(one)
        if not self.fits(needs, chosen):
            return None
        # The last one chosen may be so big that earlier ones can stay; the youngest stays first.
        for one in list(reversed(chosen)):
            without = [other for other in chosen if other is not one]
            if self.fits(needs, without):
                chosen = without
        return chosen


def make_room(
    options: Sequence[Bytes],
    residents: Sequence[Resident],
    free: Mapping[str, int | None],
    most_loaded: int | None = None,
) -> RoomVerdict:
    """Choose one of `options` (bytes needed on each device) and who goes for it.

    Raises ValueError for no options at all.
    """
    if not options:
        raise ValueError("there is nothing to make room for")
    room = Room(free, residents, most_loaded)
    idle = sorted((one for one in residents if not one.busy), key=lambda one: one.used_at)
    for index, needs in enumerate(options):
        evict = room.evicted(needs, idle)
        if evict is not None:
            return RoomVerdict(index, tuple(one.name for one in evict))
    if all(room.evicted(needs, residents) is None for needs in options):
        return RoomVerdict(None, text=f"it would not fit even alone: {_shortage(options, free)}")
    busy = _named([one.name for one in residents if one.busy])
    why = _shortage(options, free)
    if most_loaded is not None and len(residents) - len(idle) >= most_loaded:
        why = f"{most_loaded} model{'s' if most_loaded > 1 else ''} may be loaded at once"
    return RoomVerdict(None, text=f"{why}, and {busy} busy", may_change=True)


def _shortage(options: Sequence[Bytes], free: Mapping[str, int | None]) -> str:
    parts: list[str] = []
    for needs in options:
        for device, need in needs.items():
            there = free.get(device)
            if there is not None and there < need:
                usable = formatting.size(max(0, there))
                parts.append(
                    f"{formatting.size(need)} needed on the {device.upper()}, {usable} may be used"
                )
    return "; ".join(dict.fromkeys(parts)) or "the number of loaded models is limited"


def _named(names: Sequence[str]) -> str:
    if not names:
        return "nothing is"
    return f"{', '.join(names)} {'is' if len(names) == 1 else 'are'}"


def bytes_needed(attempts: Sequence[Attempt], standby: bool) -> list[dict[str, int]]:
    """Bytes by device for each way to run a model, with the engine on standby."""
    needs: list[dict[str, int]] = []
    for index, attempt in enumerate(attempts):
        need = {attempt.device: attempt.need_bytes}
        if standby and index + 1 < len(attempts):
            other = attempts[index + 1]
            need[other.device] = need.get(other.device, 0) + other.need_bytes
        needs.append(need)
    return needs


def bytes_free(
    attempts: Sequence[Attempt],
    residents: Sequence[Resident],
    promised_bytes: int,
    limit_bytes: int | None,
) -> dict[str, int | None]:
    """Bytes by device that a new engine may take.

    `promised_bytes`: RAM that loaded engines may still touch. `limit_bytes`: RAM of all engines.
    """
    free: dict[str, int | None] = {}
    for attempt in attempts:
        there = attempt.free_bytes
        if attempt.device == "cpu":
            there = None if there is None else there - promised_bytes
            if limit_bytes is not None:
                left = limit_bytes - sum(one.takes.get("cpu", 0) for one in residents)
                there = left if there is None else min(there, left)
        free[attempt.device] = there
    return free


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

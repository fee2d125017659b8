"""Which models stay in memory: who must go so that another one fits. Pure decisions over numbers of bytes.

    verdict = make_room([{"gpu": 9e9}, {"cpu": 6e9}], residents, free={"gpu": 2e9, "cpu": 1e9}, most_loaded=None)
    verdict.option, verdict.evict            # 0, ("least-recently-used",)

The rules: the first option (by the placement's order: GPU first) that can be had is taken, even where others must go for it; those that
have not been used for longest go first; no more go than are needed; a busy model never goes.

`free` is what a new engine may take now, after what the loaded ones were promised and have not touched yet (KV caches fill as they are
used). So by letting a resident go, max(predicted, measured) of its bytes become free.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from serving.placement import gib

Bytes = Mapping[str, int]  # device -> bytes


class Resident(msgspec.Struct, frozen=True):
    """A model that is loaded, or loading. `used_at`: when its last request came or ended, on any clock."""

    name: str
    takes: dict[str, int]  # device -> bytes that its end would give back
    used_at: float
    busy: bool


class RoomVerdict(msgspec.Struct, frozen=True):
    """`option`: which of the options fits, once `evict` are gone, in this order; None: none, for the reason in `text`.

    `may_change`: what is in the way is busy, so it is worth asking again.
    """

    option: int | None
    evict: tuple[str, ...] = ()
    text: str = ""
    may_change: bool = False


def make_room(
    options: Sequence[Bytes], residents: Sequence[Resident], free: Mapping[str, int | None], most_loaded: int | None = None
) -> RoomVerdict:
    """Choose one of `options` (bytes needed on each device) and who goes for it. `free`: None where a device does not say.

    `most_loaded`: so many models may be loaded at once, the new one counted. Raises ValueError for no options at all.
    """
    if not options:
        raise ValueError("there is nothing to make room for")
    idle = sorted((one for one in residents if not one.busy), key=lambda one: one.used_at)
    for index, needs in enumerate(options):
        evict = _enough(needs, idle, free, len(residents), most_loaded)
        if evict is not None:
            return RoomVerdict(index, tuple(one.name for one in evict))
    busy = [one.name for one in residents if one.busy]
    could = any(_enough(needs, list(residents), free, len(residents), most_loaded) is not None for needs in options)
    if not could:
        return RoomVerdict(None, text=f"it would not fit even alone: {_shortage(options, free)}")
    if most_loaded is not None and len(residents) - len(idle) >= most_loaded:
        return RoomVerdict(
            None,
            text=f"{most_loaded} model{'s' if most_loaded > 1 else ''} may be loaded at once, and {_named(busy)} busy",
            may_change=True,
        )
    return RoomVerdict(None, text=f"{_shortage(options, free)}, and {_named(busy)} busy", may_change=True)


def _enough(
    needs: Bytes, candidates: Sequence[Resident], free: Mapping[str, int | None], loaded: int, most_loaded: int | None
) -> list[Resident] | None:
    """Those who must go, oldest first; None where all of them together are not enough."""
    chosen: list[Resident] = []
    for one in candidates:
        if _fits(needs, chosen, free, loaded, most_loaded):
            break
        chosen.append(one)
    if not _fits(needs, chosen, free, loaded, most_loaded):
        return None
    for one in list(reversed(chosen)):  # the last one chosen may be so big that earlier ones can stay; the youngest stays first
        without = [other for other in chosen if other is not one]
        if _fits(needs, without, free, loaded, most_loaded):
            chosen = without
    return chosen


def _fits(needs: Bytes, gone: Sequence[Resident], free: Mapping[str, int | None], loaded: int, most_loaded: int | None) -> bool:
    if most_loaded is not None and loaded - len(gone) + 1 > most_loaded:
        return False
    for device, need in needs.items():
        there = free.get(device)
        if there is not None and there + sum(one.takes.get(device, 0) for one in gone) < need:
            return False
    return True


def _shortage(options: Sequence[Bytes], free: Mapping[str, int | None]) -> str:
    parts: list[str] = []
    for needs in options:
        for device, need in needs.items():
            there = free.get(device)
            if there is not None and there < need:
                parts.append(f"{gib(need)} needed on the {device.upper()}, {gib(max(0, there))} may be used")
    return "; ".join(dict.fromkeys(parts)) or "the number of loaded models is limited"


def _named(names: Sequence[str]) -> str:
    if not names:
        return "nothing is"
    return f"{', '.join(names)} {'is' if len(names) == 1 else 'are'}"

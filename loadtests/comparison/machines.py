"""Two machines beside each other: what each does for a core, a GB/s, a dollar and a watt.

The facts that divide are those of the run's manifest: usable cores (or the CPU quota, where that is
less) and the memory bandwidth that was measured when the run began. Watts are those sampled during
the level; a price is known where it is given. What is not known is left out, and said.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from loadtests.comparison.run_values import CellValues
from loadtests.errors import NotComparable
from loadtests.metrics.distribution import mean_of
from loadtests.records.comparability import MACHINE, server_machine, show, usable_cores
from loadtests.records.schema import RunManifest

SECONDS_PER_HOUR = 3600.0


class Prices(msgspec.Struct, frozen=True):
    """Dollars per hour of the two machines; None: not known."""

    first: float | None = None
    second: float | None = None


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """What a machine is divided by; None: not known, or not what binds it."""

    cores: float | None = None
    bandwidth_bytes_per_second: float | None = None
    dollars_per_hour: float | None = None


class MachineRow(msgspec.Struct, frozen=True, kw_only=True):
    """One quantity of one cell on both machines. `per`: machine, core, GB/s, dollar or watt."""

    cell: str
    quantity: str  # "capacity", "output tokens/s", "tokens/s of one stream"
    per: str
    first: float
    second: float

    @property
    def ratio(self) -> float:
        """Second over first."""
        return self.second / self.first


class Machines(msgspec.Struct, frozen=True, kw_only=True):
    """`differ`: name of the fact, and what it is on each, for people."""

    first: Machine
    second: Machine
    differ: list[tuple[str, str, str]]
    rows: list[MachineRow]
    notes: list[str]


def compare_machines(
    manifests: tuple[RunManifest, RunManifest],
    cells: Iterable[tuple[Sequence[CellValues], Sequence[CellValues]]],
    prices: Prices,
) -> Machines:
    """`cells` are pairs of the same thing in the runs of both arms.

    Raises NotComparable where it is not known what serves.
    """
    facts = [server_machine(manifest) for manifest in manifests]
    for manifest, known in zip(manifests, facts, strict=True):
        if known is None:
            raise NotComparable(
                f"run {manifest.run_id} measured an endpoint: its machine is not known, and cannot "
                "be compared by its facts"
            )
    first, second = [_machine(known or {}) for known in facts]
    first = msgspec.structs.replace(first, dollars_per_hour=prices.first)
    second = msgspec.structs.replace(second, dollars_per_hour=prices.second)
    differ = []
    for fact, name in (*MACHINE.items(), ("bandwidth_bytes_per_second", "memory bandwidth")):
        mine, theirs = [show(fact, (known or {}).get(fact)) for known in facts]
        if mine != theirs:
            differ.append((name, mine, theirs))
    rows: list[MachineRow] = []
    notes = _notes(facts, (first, second))
    for one, other in cells:
        unlike = _unlike_watts(one, other)
        notes += unlike
        for quantity, is_loaded in QUANTITIES.items():
            rows += _rows((one, other), quantity, (first, second), is_loaded and not unlike)
    return Machines(first=first, second=second, differ=differ, rows=rows, notes=notes)


def _unlike_watts(one: Sequence[CellValues], other: Sequence[CellValues]) -> list[str]:
    """Why watts are of different devices in the runs; nothing where they are of the same."""
    measured = sorted({cell.peak_watts_by for cell in (*one, *other) if cell.peak_watts})
    if len(measured) < 2:
        return []
    return [
        f"{one[0].key}: watts are by {' in one run and by '.join(measured)} in another: not of "
        "the same devices, so nothing is divided by them"
    ]


def _machine(facts: dict[str, object]) -> Machine:
    """The engine of a machine with a GPU may be there: its cores and their memory bind nothing."""
    if facts.get("gpus"):
        return Machine()
    bandwidth = facts.get("bandwidth_bytes_per_second")
    return Machine(
        cores=usable_cores(facts),
        bandwidth_bytes_per_second=bandwidth if isinstance(bandwidth, float) else None,
    )


# Quantity -> whether it is of a loaded machine, whose watts were sampled then.
QUANTITIES: dict[str, bool] = {
    "capacity": False,
    "output tokens/s": True,
    "tokens/s of one stream": False,
}


def _rows(
    cells: tuple[Sequence[CellValues], Sequence[CellValues]],
    quantity: str,
    machines: tuple[Machine, Machine],
    has_watts: bool,
) -> list[MachineRow]:
    values = [mean_of(_value(cell, quantity) for cell in own) for own in cells]
    if values[0] is None or values[1] is None:
        return []
    divisors: dict[str, list[float | None]] = {
        "machine": [1.0, 1.0],
        "core": [one.cores for one in machines],
        "GB/s": [
            None if (rate := one.bandwidth_bytes_per_second) is None else rate / 1e9
            for one in machines
        ],
        "dollar": [
            None if (price := one.dollars_per_hour) is None else price / SECONDS_PER_HOUR
            for one in machines
        ],
        "watt": [mean_of(cell.peak_watts for cell in own) if has_watts else None for own in cells],
    }
    return [
        MachineRow(
            cell=cells[0][0].key,
            quantity=quantity,
            per=per,
            first=values[0] / mine,
            second=values[1] / theirs,
        )
        for per, (mine, theirs) in divisors.items()
        if mine and theirs
    ]


def _value(cell: CellValues, quantity: str) -> float | None:
    if quantity == "capacity":
        return cell.capacity
    if quantity == "output tokens/s":
        return cell.peak_tokens_per_second
    alone = cell.at(None)
    found = None
    if alone is not None:
        found = alone.values.get("TPOT p50") or alone.values.get("TPOT mean")
    return 1 / found.value if found is not None else None


def _notes(
    facts: Sequence[dict[str, object] | None], machines: tuple[Machine, Machine]
) -> list[str]:
    notes = []
    if any((known or {}).get("gpus") for known in facts):
        notes.append(
            "a machine has a GPU: nothing is divided by CPU cores and the CPU's memory bandwidth"
        )
    elif any(one.bandwidth_bytes_per_second is None for one in machines):
        notes.append("a run has no measured memory bandwidth: nothing is divided by it")
    if any(one.dollars_per_hour is None for one in machines):
        notes.append("prices are not known: --dollars-per-hour FIRST --dollars-per-hour SECOND")
    return notes

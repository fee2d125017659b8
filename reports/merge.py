"""Several runs as one: their cells together, where machine, promise and workload are the same; else a refusal that names the fact.

check_comparable(runs)        # raises NotComparable
merged(runs)                  # one RunNumbers
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from loadtests.facts import MACHINE, same, show
from reports.capacity import capacity_of, search_config
from reports.errors import NotComparable
from reports.numbers import CellNumbers, RunNumbers


def check_comparable(runs: Sequence[RunNumbers]) -> None:
    """Raises NotComparable for the first fact that differs: which, and both values."""
    first = runs[0]
    for other in runs[1:]:
        pair = f"runs {first.manifest.run_id} and {other.manifest.run_id} differ in"
        for fact, name in MACHINE.items():
            mine, theirs = first.facts.get(fact), other.facts.get(fact)
            if not same(fact, mine, theirs):
                raise NotComparable(
                    f"{pair} {name}: {show(fact, mine)} and {show(fact, theirs)}; "
                    "a chart of both would compare machines, use --separate for a report each"
                )
        for key in ("workload", "arrivals"):
            mine, theirs = first.manifest.campaign.get(key), other.manifest.campaign.get(key)
            if mine != theirs:
                raise NotComparable(f"{pair} their {key}: {_difference(mine, theirs)}; use --separate for a report each")
        if first.promise != other.promise:
            raise NotComparable(
                f"{pair} their promise: {_difference(first.promise, other.promise)}; name one for both with --promise, or use --separate"
            )


def merged(runs: Sequence[RunNumbers]) -> RunNumbers:
    """One run with the cells of all. A cell that is in several has all its levels, and its capacity is estimated from these together."""
    check_comparable(runs)
    first = runs[0]
    if len(runs) == 1:
        return first
    config = search_config(first.manifest)
    cells: dict[str, CellNumbers] = {}
    for run in runs:
        for cell in run.cells:
            seen = cells.get(cell.key)
            if seen is None or not seen.levels:
                cells[cell.key] = cell
            elif cell.levels:
                levels = seen.levels + cell.levels
                # Two runs, two predictions: together their levels speak for themselves.
                both = capacity_of(levels, first.promise, config)
                cells[cell.key] = msgspec.structs.replace(seen, levels=levels, capacity=both, predicted_rate=None, measured_only=None)
    spent = [run.measured_seconds for run in runs if run.measured_seconds is not None]
    return msgspec.structs.replace(
        first,
        cells=tuple(sorted(cells.values(), key=lambda cell: (cell.parameters or 0, cell.model, cell.weight_format, cell.backend))),
        doubts=tuple(dict.fromkeys(doubt for run in runs for doubt in run.doubts)),
        requests=sum(run.requests for run in runs),
        requests_counted=sum(run.requests_counted for run in runs),
        measured_seconds=sum(spent) if spent else None,
        folder=" ".join(run.folder for run in runs),
        also=tuple(run.manifest.run_id for run in runs[1:]),
    )


def _difference(mine: Any, theirs: Any) -> str:
    """The keys in which two values differ, with both values."""
    a, b = msgspec.to_builtins(mine), msgspec.to_builtins(theirs)
    if not isinstance(a, dict) or not isinstance(b, dict):
        return f"{a!r} and {b!r}"
    keys = [key for key in dict.fromkeys([*a, *b]) if a.get(key) != b.get(key)]
    return ", ".join(f"{key} {a.get(key)!r} and {b.get(key)!r}" for key in keys)

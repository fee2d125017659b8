"""Several comparable runs as one, with the cells of all.

check_comparable(runs)        # raises NotComparable, which names the fact and both values
merged(runs)                  # one RunNumbers
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from loadtests.comparison.run_environment import MACHINE, differences
from reports.errors import NotComparable
from reports.numbers import CellNumbers, RunNumbers
from reports.run import busy_or_not, capacity_of, cell_order, marked, slos_of


def check_comparable(runs: Sequence[RunNumbers]) -> None:
    """Raises NotComparable for the first fact that differs."""
    first = runs[0]
    for other in runs[1:]:
        pair = f"runs {first.manifest.run_id} and {other.manifest.run_id} differ in"
        for found in differences(first.manifest, other.manifest):
            if found.fact in ("slo", "slos"):
                continue  # the SLO that the report judges by decides, see below
            name = found.name if found.fact in MACHINE else f"their {found.name}"
            raise NotComparable(
                f"{pair} {name}: {found.first} and {found.second}; use --separate for a report each"
            )
        if first.slo != other.slo:
            raise NotComparable(
                f"{pair} their SLO: {_difference(first, other)}; "
                "name one for both with --slo, or use --separate"
            )


def merged(runs: Sequence[RunNumbers]) -> RunNumbers:
    """One run. The capacity of a cell that is in several is estimated from all its levels."""
    check_comparable(runs)
    first = runs[0]
    if len(runs) == 1:
        return first
    cells: dict[str, CellNumbers] = {}
    for run in runs:
        for cell in run.cells:
            seen = cells.get(cell.key)
            if seen is None or not seen.levels:
                cells[cell.key] = cell
            elif cell.levels:
                cells[cell.key] = _both(seen, cell, first)
    spent = [run.measured_seconds for run in runs if run.measured_seconds is not None]
    return msgspec.structs.replace(
        first,
        cells=tuple(sorted(cells.values(), key=cell_order)),
        warnings=tuple(dict.fromkeys(warning for run in runs for warning in run.warnings)),
        requests=sum(run.requests for run in runs),
        requests_counted=sum(run.requests_counted for run in runs),
        measured_seconds=sum(spent) if spent else None,
        folder=" ".join(run.folder for run in runs),
        also=tuple(run.manifest.run_id for run in runs[1:]),
    )


def _both(one: CellNumbers, other: CellNumbers, run: RunNumbers) -> CellNumbers:
    """A cell with the levels of two runs; their predictions are left out.

    Where both searches ended on a busy machine, so has this.
    """
    levels = one.levels + other.levels
    capacity = capacity_of(levels, run.slo, run.manifest)
    if other.busy:
        capacity = busy_or_not(one, capacity, run.slo, slos_of(run.manifest))
    levels = marked(levels, capacity)
    return msgspec.structs.replace(one, levels=levels, capacity=capacity, predicted=None)


def _difference(one: RunNumbers, other: RunNumbers) -> str:
    """The keys in which two SLOs differ, with both values."""
    mine, theirs = msgspec.to_builtins(one.slo), msgspec.to_builtins(other.slo)
    keys = [key for key in mine if mine[key] != theirs[key]]
    return ", ".join(f"{key} {mine[key]!r} and {theirs[key]!r}" for key in keys)

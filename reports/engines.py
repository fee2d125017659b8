"""Engines side by side: ours and those of others, on the same model, hardware and workload.

for group in side_by_side(run):
    group.rows[1].ratio          # its capacity over that of our best engine: low, middle, high
"""

from __future__ import annotations

import msgspec

from reports.numbers import CellNumbers, RunNumbers

Ratio = tuple[float | None, float, float | None]


class EngineRow(msgspec.Struct, frozen=True):
    """One engine; `ratio` is None for ours, and where a capacity is not known."""

    cell: CellNumbers
    ratio: Ratio | None = None


class EngineGroup(msgspec.Struct, frozen=True):
    """Engines that were asked the same on the same cores, ours first."""

    model: str
    hardware: str
    workload: str
    ours: CellNumbers | None  # of ours the one with the greatest capacity; None: none was measured
    rows: tuple[EngineRow, ...]


def side_by_side(run: RunNumbers) -> list[EngineGroup]:
    """The models that an engine of others served, smallest first."""
    groups: dict[tuple[str, str, str], list[CellNumbers]] = {}
    for cell in run.cells:
        groups.setdefault((cell.model, cell.hardware, cell.workload), []).append(cell)
    return [
        _group(place, cells)
        for place, cells in groups.items()
        if any(one.command is not None for one in cells)
    ]


def _group(place: tuple[str, str, str], cells: list[CellNumbers]) -> EngineGroup:
    own = [one for one in cells if one.command is None]
    best = max((one for one in own if one.held), key=lambda one: one.held or 0.0, default=None)
    cells = sorted(cells, key=lambda one: (one.command is not None, one.backend, one.weight_format))
    return EngineGroup(*place, best, tuple(EngineRow(one, _ratio(one, best)) for one in cells))


def _ratio(cell: CellNumbers, ours: CellNumbers | None) -> Ratio | None:
    """By the ends of both intervals; the middle by the confirmed rates."""
    if cell.command is None or ours is None or not cell.held or not ours.held:
        return None
    mine, theirs = cell.capacity, ours.capacity
    assert mine is not None and theirs is not None
    return (
        _over(mine.low, theirs.high),
        cell.held / ours.held,
        _over(mine.high, theirs.low),
    )


def _over(one: float | None, other: float | None) -> float | None:
    return one / other if one and other else None

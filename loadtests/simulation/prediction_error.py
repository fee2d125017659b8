"""How far predictions were off before: pairs of predicted and measured capacities, and their scale.

    error_scale([*packaged_pairs(), *pairs_in(run.events)])     # of ln(predicted / measured)

A finished run holds its pairs: the rate of a `calibrated` event beside the capacity of the cell's
`cell_finished`. The pairs that the project knows are in predicted_measured.toml, each with its
source.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Literal

import msgspec

from loadtests.records.events import Calibrated, CellFinished, Event, of_kind

PACKAGED = Path(__file__).parent / "predicted_measured.toml"
FLOOR = 0.15  # no pair of ours is measured better
WIDEST = 2.0  # high over low of a measured interval that still tells how far a prediction was off
ENOUGH = 3  # pairs of the present law; with fewer, those of the older one stand in
NORMAL = 1.4826  # standard deviation over median size of a normal error
INTERVAL_90 = 3.29  # standard deviations between the ends of a 90 % interval


class Pair(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A capacity that was predicted and measured."""

    what: str
    ratio: float  # predicted / measured
    low: float | None = None  # predicted over the high end of the measured interval
    high: float | None = None  # ... over its low end; both None: the capacity is known
    law: Literal["line", "rows"] = "rows"  # of step times by decode rows
    source: str = ""

    @property
    def measured_error(self) -> float:
        """Standard deviation of ln(measured)."""
        return math.log(self.high / self.low) / INTERVAL_90 if self.low and self.high else 0.0

    @property
    def counts(self) -> bool:
        return not (self.low and self.high) or self.high / self.low <= WIDEST


def pairs_in(events: Iterable[Event]) -> list[Pair]:
    """Of a journal's finished cells, under each SLO whose capacity levels bound on both sides."""
    journal = list(events)
    pairs = []
    for ended in of_kind(journal, CellFinished):
        made = of_kind(journal, Calibrated, ended.cell)
        for name, found in ended.capacities.items():
            predicted = made[0].rates.get(name) if made else None
            if predicted is None or predicted.low is None or not predicted.rate:
                continue
            if found.low and found.high and found.estimate:
                pairs.append(
                    Pair(
                        what=f"{ended.cell}, SLO {name}",
                        ratio=predicted.rate / found.estimate,
                        low=predicted.rate / found.high,
                        high=predicted.rate / found.low,
                    )
                )
    return pairs


@cache
def packaged_pairs() -> tuple[Pair, ...]:
    """The pairs that the project has measured."""
    table = msgspec.toml.decode(PACKAGED.read_bytes(), type=dict[str, tuple[Pair, ...]])
    return table["pair"]


def error_scale(pairs: Sequence[Pair]) -> float:
    """Standard deviation of ln(predicted / true capacity), from pairs; at least 0.15.

    sqrt((1.4826 median |ln ratio|)^2 - median measured_error^2): the spread about 1, robust against
    single pairs, less what the measurement adds. Pairs count whose measured interval is no wider
    than a factor of 2; those of the present law alone once there are three of them. Raises
    ValueError where no pair counts.
    """
    known = [pair for pair in pairs if pair.counts]
    present = [pair for pair in known if pair.law == "rows"]
    if len(present) >= ENOUGH:
        known = present
    if not known:
        raise ValueError("no pair of a predicted and a measured capacity to take the error from")
    spread = NORMAL * _median([abs(math.log(pair.ratio)) for pair in known])
    measured = _median([pair.measured_error**2 for pair in known])
    return max(FLOOR, math.sqrt(max(0.0, spread**2 - measured)))


def _median(values: Sequence[float]) -> float:
    ordered = sorted(values)
    middle = len(ordered) // 2
    return (ordered[middle] + ordered[~middle]) / 2

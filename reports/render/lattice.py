"""Capacities at other limits of TTFT and TPOT, computed here, so that the page looks them up.

One measured level serves every SLO: its requests are judged again. What cannot be known is left
out: a level that was cut short says nothing of a looser SLO, and no limit is longer than answers
were waited for.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from loadtests.capacity.levels import Level
from loadtests.metrics.distribution import runs_of
from loadtests.metrics.level import level_verdict
from loadtests.metrics.level_summary import counted_as_one
from loadtests.metrics.level_warnings import DISTURBED, LATE_SENDS, late_sends_decide
from loadtests.metrics.slo import Slo, Verdict
from loadtests.metrics.stationarity import is_steady
from loadtests.records.schema import RunManifest
from models import formatting
from reports import sentences
from reports.charts.crossover_map import column_of, rate_ends
from reports.findings import Crossover, standing
from reports.numbers import Answer, CellNumbers, LevelNumbers, RunNumbers
from reports.run import busy_or_not, counting, estimate_of, marked, search_config, slos_of

TTFT_SECONDS = (0.1, 0.2, 0.3, 0.5, 1.0, 2.0, 3.0, 5.0, 10.0, 20.0, 30.0)
TPOT_SECONDS = (0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0)
RATES = 40  # steps of the rate that one needs


class Axes(msgspec.Struct, frozen=True):
    """The limits that may be asked for, ascending, in seconds; None: no limit."""

    ttft: tuple[float | None, ...]
    tpot: tuple[float | None, ...]
    waited_ttft: float | None = None  # longer ones were not waited for; None: none was given up
    waited_tpot: float | None = None

    def slos(self, own: Slo) -> list[Slo]:
        """One SLO a point, TPOT fastest; the target is the run's."""
        return [
            msgspec.structs.replace(own, ttft_seconds=ttft, tpot_seconds=tpot)
            for ttft in self.ttft
            for tpot in self.tpot
        ]


def axes(run: RunNumbers) -> Axes:
    """Limits around what was measured, the run's own among them."""
    seen = [one for level in run.levels for one in level.answers]
    whole = [level for level in run.levels if level.cut_short is None]
    given_up = [one for level in whole for one in level.answers]
    waited_ttft = _least(one.known_ttft_seconds for one in given_up)
    waited_tpot = _least(one.known_tpot_seconds for one in given_up)
    ttft = _limits(TTFT_SECONDS, (one.ttft_seconds for one in seen), waited_ttft)
    tpot = _limits(TPOT_SECONDS, (one.tpot_seconds for one in seen), waited_tpot)
    return Axes(
        _with_own(ttft, run.slo.ttft_seconds),
        _with_own(tpot, run.slo.tpot_seconds),
        waited_ttft,
        waited_tpot,
    )


def _least(values: Iterable[float | None]) -> float | None:
    return min((value for value in values if value is not None), default=None)


def _limits(
    every: Sequence[float], values: Iterable[float | None], waited: float | None
) -> list[float]:
    """Those between the fastest and the slowest answer, and the next one on either side."""
    known = [value for value in values if value is not None]
    if not known:
        return []
    low = max((one for one in every if one <= min(known)), default=every[0])
    high = min((one for one in every if one >= max(known)), default=every[-1])
    return [one for one in every if low <= one <= min(high, waited or math.inf)]


def _with_own(limits: list[float], own: float | None) -> tuple[float | None, ...]:
    if own is None:
        return (*limits, None)
    return tuple(sorted({*limits, own}))


class Rejudged:
    """Levels under other limits than the run's; each is judged once."""

    def __init__(self) -> None:
        self._levels: dict[tuple[int, Slo], Level] = {}
        self._steady: dict[tuple[int, float | None], bool | None] = {}

    def __call__(self, level: LevelNumbers, slo: Slo) -> Level:
        """As the search for `slo` sees it."""
        key = (id(level), slo)
        if key not in self._levels:
            self._levels[key] = self._judged(level, slo)
        return self._levels[key]

    def _judged(self, level: LevelNumbers, slo: Slo) -> Level:
        good = [is_good(one, slo) for one in level.answers]
        shown = slo.shown_in(level.summary.window.seconds)
        runs, steady = runs_of(good), self._is_steady(level, slo.ttft_seconds)
        word = _verdict(level, sum(good), len(good), runs, slo, steady)
        return Level(
            rate=level.rate_per_second,
            due=len(good),
            good=sum(good),
            good_soon=None if shown == slo else sum(is_good(one, shown) for one in level.answers),
            grows_soon=shown != slo and self._is_steady(level, shown.ttft_seconds) is False,
            duration_seconds=level.summary.window.seconds,
            warmup_seconds=level.summary.window.start_seconds,
            runs=runs,
            mean_e2e_seconds=level.summary.latencies.e2e.mean,
            is_valid=_is_valid(level, slo, word),
            is_steady=steady,
            is_whole=level.cut_short is None,
            start=level.start,
        )

    def _is_steady(self, level: LevelNumbers, limit_seconds: float | None) -> bool | None:
        if level.queue_grows and level.rate_per_second is not None:
            return False
        key = (id(level), limit_seconds)
        if level.rate_per_second is not None and key not in self._steady:
            window = level.summary.window
            ttft = (one.ttft_seconds for one in level.answers)
            self._steady[key] = is_steady(
                [one.due_seconds for one in level.answers],
                [math.inf if seconds is None else seconds for seconds in ttft],
                window.start_seconds,
                window.end_seconds,
                limit_seconds,
            )
        return self._steady.get(key)


def is_good(answer: Answer, slo: Slo) -> bool:
    """As loadtests.metrics.request_metrics.is_good judges its record."""
    ttft, tpot = answer.ttft_seconds, answer.tpot_seconds
    if ttft is None or (slo.ttft_seconds is not None and ttft > slo.ttft_seconds):
        return False
    return slo.tpot_seconds is None or tpot is None or tpot <= slo.tpot_seconds


def _verdict(
    level: LevelNumbers, good: int, due: int, runs: Sequence[int], slo: Slo, steady: bool | None
) -> Verdict:
    together = 1.0 if level.is_single_stream else counted_as_one(good, due, runs)
    return level_verdict(good, due, together, slo, steady)


def _is_valid(level: LevelNumbers, slo: Slo, word: Verdict) -> bool:
    """Late sends and slight disturbances are the warnings whose weight the SLO decides."""
    warnings = level.summary.warnings
    if level.is_slightly_disturbed:
        warnings = tuple(one for one in warnings if one.code != DISTURBED)
        if word != "holds":
            return False
    if any(one.is_serious and one.code != LATE_SENDS for one in warnings):
        return False
    is_late = any(one.code == LATE_SENDS for one in warnings)
    return not (is_late and late_sends_decide(level.send_lag_seconds or 0.0, slo.ttft_seconds))


def at(
    cell: CellNumbers, slo: Slo, manifest: RunManifest, judged: Rejudged | None = None
) -> CellNumbers:
    """The cell with its capacity under `slo`."""
    under = judged or Rejudged()
    if cell.capacity is None:
        return cell
    counted = counting(cell.levels, slo, slos_of(manifest))
    seen = [under(level, slo) for level in counted]
    found = estimate_of(cell.levels, seen, slo, search_config(manifest))
    found = busy_or_not(cell, found, slo, slos_of(manifest))
    return msgspec.structs.replace(cell, capacity=found)


def lattice(run: RunNumbers, found: Crossover) -> dict[str, Any]:
    """What the page looks up; a point is an index, TPOT fastest."""
    asked = axes(run)
    slos = asked.slos(run.slo)
    judged = Rejudged()
    cells = [[at(cell, slo, run.manifest, judged) for cell in run.cells] for slo in slos]
    says = [
        sentences.summary_words(slo, standing(row)) for slo, row in zip(slos, cells, strict=True)
    ]
    names = sentences.names_of(run.cells)
    rates = _rates(run, found.asked_rate)
    own = slos_of(run.manifest)
    return {
        "ttft": [_limit(value) for value in asked.ttft],
        "tpot": [_limit(value) for value in asked.tpot],
        "own": slos.index(run.slo),
        "says": _each_once(says),
        "rates": [{"value": rate, "text": formatting.rate(rate)} for rate in rates],
        "asked": rates.index(found.asked_rate) if found.asked_rate in rates else None,
        "cells": [
            {
                "key": cell.key,
                "name": names[cell.key],
                "found": _each_once([_found(cell, row[index]) for row in cells]),
                "levels": [
                    _level(
                        [judged(level, slo) for slo in slos],
                        "".join(
                            _letter(level, row[index], slo, own, judged)
                            for row, slo in zip(cells, slos, strict=True)
                        ),
                    )
                    for level in cell.levels
                    if level.rate_per_second
                ],
            }
            for index, cell in enumerate(run.cells)
        ],
    }


def _limit(value: float | None) -> dict[str, Any]:
    return {"value": value, "text": "no limit" if value is None else formatting.limit(value)}


def _rates(run: RunNumbers, asked: float | None) -> list[float]:
    low, high = rate_ends(run.cells, asked)
    steps = [low * (high / low) ** (index / (RATES - 1)) for index in range(RATES)]
    rounded = {float(f"{step:.2g}") for step in steps}
    return sorted({*rounded, *([asked] if asked is not None else [])})


def _each_once(values: Sequence[Any]) -> dict[str, Any]:
    """The distinct values in order, and for each point the index of its own."""
    every = list(dict.fromkeys(msgspec.json.encode(value) for value in values))
    index = {value: position for position, value in enumerate(every)}
    return {
        "values": [msgspec.json.decode(value) for value in every],
        "at": [index[msgspec.json.encode(value)] for value in values],
    }


def _found(cell: CellNumbers, point: CellNumbers) -> dict[str, Any]:
    """A capacity, and what the map and the table show of it."""
    found = point.capacity
    column = column_of(cell, found)
    if found is None:
        return column | {"status": None, "held": None}
    values = {"status": found.status.value}
    values |= {key: getattr(found, key) for key in ("held", "low", "estimate", "high")}
    return column | values


def _level(under: Sequence[Level], verdicts: str) -> dict[str, Any]:
    """Its good requests at each point, and its verdicts by their first letters."""
    first = under[0]
    return {
        "rate": first.rate,
        "due": first.due,
        "good": [one.good for one in under],
        "verdicts": verdicts,
    }


def _letter(
    level: LevelNumbers, cell: CellNumbers, slo: Slo, own: Sequence[Slo], judged: Rejudged
) -> str:
    """The level's verdict at one point: h, f or u; `-` where it does not count."""
    if not counting([level], slo, own):
        return "-"
    if marked([level], cell.capacity)[0].confirms:
        return "h"
    one = judged(level, slo)
    return _verdict(level, one.good, one.due, one.runs, slo, one.is_steady)[0]

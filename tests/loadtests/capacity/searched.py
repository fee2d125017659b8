"""Searches of the worlds of known_worlds.py, measured as the product measures.

    found, levels, seconds = search(world, SearchConfig(budget_seconds=900.0), seed=1)

A level begins on an idle server, warms up, counts what is due in its window, goes on with arrivals
that do not count until the last counted answer, and is cut short once it is decided. One that saw
the machine disturbed counts only where it holds all the same and little was taken, else it is
measured again at no cost to the budget; once PATIENCE is used up, all of which little was taken
count.
"""

from __future__ import annotations

import msgspec
import numpy as np
import numpy.typing as npt

from loadtests.campaign.level_tally import LEAST_BAD
from loadtests.capacity.estimate import estimate, never_quiet
from loadtests.capacity.levels import Level
from loadtests.capacity.search import Finished, Measure, next_step
from loadtests.capacity.search_config import SearchConfig
from loadtests.metrics.distribution import runs_of
from loadtests.metrics.disturbance import MOST_SLIGHT_SHARE
from loadtests.metrics.level import level_verdict
from loadtests.metrics.level_summary import counted_as_one
from loadtests.metrics.slo import Slo, is_hopeless
from loadtests.metrics.stationarity import grows, is_steady
from tests.loadtests.capacity.known_worlds import STARTS, Played, World

PATIENCE = 300.0  # seconds that disturbed levels may cost besides the budget
OVERHEAD = 3.0  # seconds to start a load generator


def measure(
    world: World, step: Measure, rng: np.random.Generator, at: float, is_patient: bool
) -> tuple[Level, float]:
    """One level on the simulated clock, and the seconds that it took."""
    if step.rate is None:
        return _single_stream(world, step, rng, at)
    warm = step.warmup_seconds
    end = warm + step.duration_seconds
    due = world.due(step.rate, 2 * end + 120.0, int(rng.integers(2**31)))
    played = (world.disturbed or world.play)(due, rng, at)
    counted = np.flatnonzero((due >= warm) & (due < end))
    cut = _decided_at(played, counted, world.slo)
    if cut is not None:
        end = max(warm + 1e-3, min(end, cut))  # what is under way is followed until it is decided
        counted = counted[due[counted] < end]
    good = played.good[counted]
    shown = world.slo.shown_in(end - warm)
    limit = shown.ttft_seconds
    soon = good if limit is None else good & (played.ttft[counted] <= limit)
    steady = _is_steady(played, counted, warm, end, world.slo)
    lost_at = _lost_at(world, played, counted, at, end, steady, is_patient)
    last = float(played.ends[counted].max()) if len(counted) else end
    level = Level(
        rate=step.rate,
        due=len(counted),
        good=int(good.sum()),
        good_soon=int(soon.sum()),
        grows_soon=shown != world.slo and _is_steady(played, counted, warm, end, shown) is False,
        duration_seconds=max(end - warm, 1e-3),
        warmup_seconds=warm,
        runs=runs_of(good.tolist()),
        mean_e2e_seconds=float((played.ends - due)[counted].mean()) if len(counted) else None,
        is_valid=lost_at is None,
        is_steady=steady,
        is_whole=cut is None,
    )
    drained = last if cut is None else min(last, end + (world.slo.ttft_seconds or 0.0))
    return level, (drained if lost_at is None else lost_at - at) + OVERHEAD


def _lost_at(
    world: World,
    played: Played,
    counted: npt.NDArray[np.int64],
    at: float,
    end: float,
    steady: bool | None,
    is_patient: bool,
) -> float | None:
    """When a disturbed level was given up, or ended for nothing; None: it counts."""
    seen = world.disturbed_at(at, at + end)
    if seen is None:
        return None
    much = world.disturbed_at(at, at + end, MOST_SLIGHT_SHARE)
    if not is_patient:
        return much
    known = counted[played.ends[counted] <= seen - at]
    if len(known) and played.good[known].mean() < world.slo.target:
        return seen
    if much is not None:
        return much
    good = played.good[counted].tolist()
    together = counted_as_one(sum(good), len(good), runs_of(good))
    word = level_verdict(sum(good), len(good), together, world.slo, steady)
    return None if word == "holds" else at + end


def _is_steady(
    played: Played, counted: npt.NDArray[np.int64], start: float, end: float, slo: Slo
) -> bool | None:
    third = (end - start) / 3

    def in_flight(begin: float) -> float:
        within = np.minimum(played.ends, begin + third) - np.maximum(played.due, begin)
        return float(np.maximum(within, 0.0).sum()) / third

    if grows(in_flight(start), in_flight(end - third)):
        return False
    due, ttft = played.due[counted], played.ttft[counted]
    return is_steady(due, ttft, start, end, slo.ttft_seconds)


def _single_stream(
    world: World, step: Measure, rng: np.random.Generator, at: float
) -> tuple[Level, float]:
    due = np.arange(step.requests or 1) * 1e5
    played = world.play(due, rng, at)
    each = played.ends - due
    begun = np.concatenate([[0.0], np.cumsum(each)[:-1]])
    good = played.good & (begun < step.duration_seconds)
    count, bad = 0, 0
    for index in range(len(due)):
        if begun[index] >= step.duration_seconds:
            break
        count, bad = index + 1, bad + int(not played.good[index])
        if bad >= LEAST_BAD and is_hopeless(bad, len(due), world.slo):
            break
    good = played.good[:count]
    level = Level(
        rate=None,
        due=count,
        good=int(good.sum()),
        duration_seconds=float(each[:count].sum()),
        mean_e2e_seconds=float(each[:count].mean()),
    )
    return level, level.duration_seconds


def _decided_at(played: Played, counted: npt.NDArray[np.int64], slo: Slo) -> float | None:
    """The moment at which the level cannot meet the SLO any more; None: it may to its end."""
    bad = counted[~played.good[counted]]
    limit = slo.ttft_seconds
    known = played.ends[bad]
    if limit is not None:
        late = played.ttft[bad] > limit
        known = np.where(late, np.minimum(known, played.due[bad] + limit), known)
    known = np.sort(known)
    for number, moment in enumerate(known.tolist(), 1):
        if number >= LEAST_BAD and is_hopeless(number, len(counted), slo):
            return float(moment)
    return None


def search(world: World, config: SearchConfig, seed: int) -> tuple[Finished, list[Level], float]:
    """A whole search on the simulated clock: its end, its levels, and the seconds it took."""
    rng = np.random.default_rng(seed)
    levels: list[Level] = []
    elapsed = lost = 0.0
    now = float(rng.uniform(0, 3600))
    while isinstance(step := next_step(levels, config, world.slo, elapsed), Measure):
        start = min(STARTS - 1, int(STARTS * elapsed / config.budget_seconds))
        server = world.of_start(start, seed)
        level, seconds = measure(server, step, rng, now, lost <= PATIENCE)
        now += seconds
        if not level.is_valid:
            was_patient, lost = lost <= PATIENCE, lost + seconds
            if not was_patient:
                found = never_quiet(estimate(levels, config, world.slo), "the machine was busy")
                return Finished(found), levels, elapsed
            continue
        levels.append(level if server is world else msgspec.structs.replace(level, start=start))
        elapsed += seconds
        assert len(levels) < 100, "the search does not end"
    return step, levels, elapsed

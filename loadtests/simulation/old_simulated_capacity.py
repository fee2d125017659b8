"""The capacity of a simulated server: the rate at which the share of good requests is the target.

    found = predict(law, Policy(slots=16), pairs, SLO_PRESETS["chat"], seed=1)
    found.rate, found.error

Several runs, each with arrivals, lengths and residuals of its own seed, are played at rates 4 %
apart around the answer; the same seeds at every rate (common random numbers), so that the
difference in share is that of the rates. The answer is where the line through the two shares beside
the target meets it, its error that of a jackknife over runs. Arrivals are drawn at the rate that is
asked for: an on-period of 10 s lasts 10 s at every rate.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import numpy as np

from loadtests.errors import LoadError
from loadtests.metrics.slo import Slo
from loadtests.simulation.batching import Array, Pairs, Policy, Simulated, simulate
from loadtests.simulation.step_replay import LawSteps, ReplayedSteps, Residuals
from loadtests.simulation.step_time import StepLaw
from loadtests.workload.arrivals import Arrivals, Poisson, due_times
from loadtests.workload.goodness_of_fit import cycle_seconds

LEAST_LENGTHS = 50
SINGLE_STREAM_LENGTHS = 400
COARSE_LENGTHS = 1_000  # of the bisection before the runs
RUN_LENGTHS = 2_000  # of one run
LONGEST_RUN = 5_000
CYCLES = 8  # of on/off or stepped arrivals that a run holds, where it may be so long
LEAST_RUNS = 4  # before a small error ends it
PRECISION = 0.01  # error of ln(rate) that ends it
WARM_UP = 0.1  # of a run's duration; its requests do not count
COOL_DOWN = 0.05  # of it, nor do these: they end in a server that empties
STEP = 0.04  # of ln(rate), from one rate of the last search to the next
MOST_STEPS = 12  # that the coarse answer may be off
FAR = 0.2  # of ln(rate), that a line is trusted beyond the two rates it goes through
LEAST_FALL = 0.1  # of the share per ln(rate); less is chance
SLOWER = 1.05  # factor of all step times that the sensitivity is told from
MOST_SENSITIVE = 8.0
OVERLOAD = 1.1  # times the rate at which the server is saturated: what holds there has no limit
LOWEST = 1e-4  # of the rate at which the server is saturated
NO_EVIDENCE = "the arrivals leave too long without a request: no simulated request counts"


class SimulatedCapacity(msgspec.Struct, frozen=True, kw_only=True):
    """The highest rate at which the simulated share of good requests reaches the target."""

    rate: float  # requests/s; 0.0: single-stream requests fail the SLO
    error: float | None = None  # standard error of ln(rate) between runs; None: one run
    sensitivity: float = 1.0  # by how many percent it falls if all steps are 1 % slower
    single_stream_share: float
    requests: int  # simulated per rate


class _Server:
    """The simulated server, at any rate, under any seed."""

    def __init__(
        self,
        law: StepLaw,
        policy: Policy,
        pairs: Pairs,
        residuals: Residuals | None,
        arrivals: Arrivals,
        seed: int,
    ) -> None:
        self.law = law
        self.policy = policy
        self.pairs = pairs
        self._residuals = residuals
        self._arrivals = arrivals
        self._seed = seed
        self._played: dict[tuple[float, int, int], Simulated] = {}

    def steps(self, run: int) -> LawSteps:
        if self._residuals is None:
            return LawSteps(self.law)
        return ReplayedSteps(self.law, self._residuals, self._seed + run)

    def saturated_rate(self) -> float:
        """Requests/s that it answers while all of them wait: the middle half of them."""
        pairs = self.pairs[:COARSE_LENGTHS]
        played = simulate(self.steps(0), self.policy, np.zeros(len(pairs)), pairs)
        first, last = np.quantile(played.last_token, (0.25, 0.75))
        return len(pairs) / 2 / max(float(last - first), 1e-9)

    def single_stream_share(self, slo: Slo) -> float:
        """Share of good requests with one at a time."""
        pairs = self.pairs[:SINGLE_STREAM_LENGTHS]
        step = max(self.law.seconds(1, 1, float(pairs.sum(axis=1).max())), 1e-9)
        slowest = 100.0 * (float(pairs.sum(axis=1).max()) * step + 1.0)  # a stall of 100 steps
        due = np.arange(len(pairs), dtype=np.float64) * slowest
        return float(np.mean(simulate(self.steps(0), self.policy, due, pairs).good(slo)))

    def play(self, rate: float, run: int, count: int) -> Simulated:
        """About `count` requests at this rate; the same seeds at every rate."""
        key = (rate, run, count)
        if key not in self._played:
            due = due_times(self._arrivals, rate, count / rate, 1_000 * self._seed + run)
            places = (run * count + np.arange(len(due))) % len(self.pairs)
            pairs = self.pairs[places]
            self._played[key] = simulate(self.steps(run), self.policy, due, pairs)
        return self._played[key]

    def share(self, rate: float, runs: Sequence[int], count: int, slo: Slo) -> Array:
        """Share of good requests between warm-up and cool-down of each run: float64 [runs].

        nan where no request was due then: that is no evidence.
        """
        shares = []
        for run in runs:
            played = self.play(rate, run, count)
            part = played.due * rate / count
            counts = (part >= WARM_UP) & (part < 1.0 - COOL_DOWN)
            shares.append(float(played.good(slo)[counts].mean()) if counts.any() else math.nan)
        return np.array(shares)


def predict(
    law: StepLaw,
    policy: Policy,
    pairs: Pairs,
    slo: Slo,
    *,
    seed: int = 0,
    arrivals: Arrivals | None = None,
    residuals: Residuals | None = None,
) -> SimulatedCapacity:
    """The simulated capacity for these lengths, in the order they are asked.

    Runs of 2,000 requests are added until the lengths are used up or the standard error of
    ln(rate) is at most 1 %. Raises LoadError for fewer than 50 lengths, and where arrivals leave
    every run without a request that counts.
    """
    if len(pairs) < LEAST_LENGTHS:
        raise LoadError(
            f"{len(pairs)} requests are too few to predict a capacity from: "
            f"at least {LEAST_LENGTHS} are needed"
        )
    process = Poisson() if arrivals is None else arrivals
    server = _Server(law, policy, pairs, residuals, process, seed)
    alone = server.single_stream_share(slo)
    found = SimulatedCapacity(rate=0.0, single_stream_share=alone, requests=len(pairs))
    if alone < slo.target:
        return found
    top = server.saturated_rate()
    count = _run_length(process, top, len(pairs))
    runs = list(range(max(1, len(pairs) // count)))
    coarse = count if cycle_seconds(process) else min(count, COARSE_LENGTHS)
    rate = _coarse(server, slo, top, runs, coarse)
    if rate == 0.0 or rate > top:  # at no rate that can be told from 0; or limited by no SLO
        return msgspec.structs.replace(found, rate=min(rate, top))
    for used in range(min(LEAST_RUNS, len(runs)), len(runs) + 1):
        look = _around(server, slo, rate, runs[:used], count)
        if look.error is not None and look.error <= PRECISION:
            break
    return msgspec.structs.replace(
        found,
        rate=min(look.crossing, top),
        error=look.error,
        sensitivity=_sensitivity(server, slo, look, count),
        requests=len(look.runs) * count,
    )


class _Look(msgspec.Struct, frozen=True):
    """Shares of good requests at two rates, in some runs."""

    rates: tuple[float, float]
    runs: list[int]
    target: float
    shares: Array  # [rates, runs]

    @property
    def crossing(self) -> float:
        """Where the line through both shares meets the target."""
        return _crossing(self.rates, self.shares.mean(axis=1), self.target)

    @property
    def error(self) -> float | None:
        """Standard error of ln(crossing), leaving out one run at a time; None for one run."""
        count = len(self.runs)
        if count < 2:
            return None
        left = [
            math.log(
                _crossing(self.rates, np.delete(self.shares, run, axis=1).mean(axis=1), self.target)
            )
            for run in range(count)
        ]
        return math.sqrt((count - 1) * float(np.var(left)))


def _run_length(arrivals: Arrivals, rate: float, most: int) -> int:
    """Requests of one run: longer where the arrivals come in cycles."""
    cycles = CYCLES * (cycle_seconds(arrivals) or 0.0)
    return min(most, max(RUN_LENGTHS, math.ceil(min(LONGEST_RUN, cycles * rate))))


def _coarse(server: _Server, slo: Slo, top: float, runs: Sequence[int], count: int) -> float:
    """The answer of one run to a tenth; above `top` where that holds, 0.0 where no rate does.

    Of the first run that has requests.
    """

    def holds(rate: float) -> bool:
        shares = (float(server.share(rate, [run], count, slo)[0]) for run in runs)
        found = next((share for share in shares if not math.isnan(share)), None)
        if found is None:
            raise LoadError(NO_EVIDENCE)
        return found >= slo.target

    high, low = top * OVERLOAD, top / 2
    if holds(high):
        return high
    while not holds(low):
        high, low = low, low / 2
        if low < LOWEST * top:
            return 0.0
    while high / low > 1.1:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if holds(middle) else (low, middle)
    return math.sqrt(low * high)


def _around(server: _Server, slo: Slo, near: float, runs: list[int], count: int) -> _Look:
    """At two rates of a grid about `near` between which the share falls below the target."""
    rates = [near * math.exp(STEP * place) for place in range(-MOST_STEPS, MOST_STEPS + 1)]

    def holds(place: int) -> bool:
        return float(_seen(server.share(rates[place], runs, count, slo)).mean()) >= slo.target

    place = MOST_STEPS
    while place > 1 and not holds(place):
        place -= 1
    while place < len(rates) - 2 and holds(place + 1):
        place += 1
    return _look(server, slo, (rates[place], rates[place + 1]), runs, count)


def _look(
    server: _Server, slo: Slo, rates: tuple[float, float], runs: list[int], count: int
) -> _Look:
    shares = np.array([server.share(rate, runs, count, slo) for rate in rates])
    seen = ~np.isnan(shares).any(axis=0)
    kept = [run for run, is_seen in zip(runs, seen, strict=True) if is_seen]
    return _Look(rates, kept, slo.target, _seen(shares))


def _seen(shares: Array) -> Array:
    """Those of runs in which requests were due at every rate: [..., runs]. LoadError for none."""
    found: Array = shares[..., ~np.isnan(np.atleast_2d(shares)).any(axis=0)]
    if found.size == 0:
        raise LoadError(NO_EVIDENCE)
    return found


def _crossing(rates: tuple[float, float], shares: Array, target: float) -> float:
    """Where the line through both shares over ln(rate) is the target; near the two rates."""
    apart = math.log(rates[1] / rates[0])
    fall = max(float(shares[0] - shares[1]) / apart, LEAST_FALL)
    away = (float(shares.mean()) - target) / fall
    return math.sqrt(rates[0] * rates[1]) * math.exp(min(max(away, -FAR), FAR))


def _sensitivity(server: _Server, slo: Slo, look: _Look, count: int) -> float:
    """d ln(rate) / d ln(time of a step), told without a new simulation: a server that is slower by
    a factor, under rates lower by it, is the same server under limits that are tighter by it.
    """
    other = _look(server, slo.tighter(SLOWER), look.rates, look.runs, count)
    fell = math.log(look.crossing / other.crossing) / math.log(SLOWER) + 1.0
    return min(max(fell, 1.0), MOST_SENSITIVE)

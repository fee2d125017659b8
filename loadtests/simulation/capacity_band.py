"""The simulated capacity of a server whose step times are known up to a factor: low to high.

    band = capacity_band(law, Policy(slots=256), pairs, SLO_PRESETS["chat"], spread=1.6)
    band.low, band.estimate, band.high      # requests/s, mean of all arrivals

For machines that nobody has measured: their band is wide, so one run of requests is enough, played
at the few rates of a grid that lie about a guess. The guess is the mean field's: `n` requests
decode, a step takes what the law says of `n`, and as many come as go. A server that is slower by a
factor, under rates lower by it, is the same server under limits tighter by it, so the ends of the
band are read from the same runs. No rate is above what the server answers at most.

That needs arrivals that keep their form when time is stretched. Of those in cycles of so many
seconds (on/off, stepped, daily) each end has runs of its own, of whole cycles; where a cycle is
too long to be played, each of its phases is taken for steady: the requests of an hour are those of
Poisson arrivals at the hour's rate, and an on phase has no end. Requests of one cluster of gamma
arrivals share their fate, so runs are longer by cv^2, and refused where they would be too long.
"""

from __future__ import annotations

import math
from functools import cached_property

import msgspec
import numpy as np

from loadtests.errors import LoadError
from loadtests.metrics.slo import Slo
from loadtests.simulation.batching import Pairs, Policy, Simulated, simulate
from loadtests.simulation.old_simulated_capacity import LEAST_LENGTHS
from loadtests.simulation.step_time import StepLaw
from loadtests.workload.arrivals import (
    Arrivals,
    Gamma,
    OnOff,
    Poisson,
    due_times,
)
from loadtests.workload.goodness_of_fit import cycle_seconds, phases

STEP = 0.08  # of ln(rate), between the rates of the grid
LEAST_REQUESTS = 1_500  # of a run
IN_FLIGHT = 4  # times as many requests as can be in flight at once: it starts empty
MOST_REQUESTS = 12_000  # of a run: takes a third of a second
CYCLES = 8  # of on and off, whose lengths are by chance, that a run holds at least
CLUSTERS = 500  # of gamma arrivals: cv^2 requests each
WARM_UP = 0.25  # of a run
COOL_DOWN = 0.05
COUNTED = 1.0 - WARM_UP - COOL_DOWN
LOWEST = 115  # place on the grid: 1e-4 of the rate at which the server is saturated
OVERLOADED = -2  # a place above it: what holds there has no limit
BUSY = 0.5  # of that rate: below it, the server's own speed is no limit
SPARE = 2.33  # standard deviations that the requests in flight are above their mean at times: 99 %


class CapacityBand(msgspec.Struct, frozen=True, kw_only=True):
    """Requests/s under the SLO with step times x spread, as they are, and / spread; 0.0: none."""

    low: float
    estimate: float
    high: float
    played: Simulated | None = None  # near the estimate, between warm-up and cool-down
    pairs: Pairs | None = None  # ... and the lengths of those requests


def capacity_band(
    law: StepLaw,
    policy: Policy,
    pairs: Pairs,
    slo: Slo,
    spread: float,
    arrivals: Arrivals | None = None,
    seed: int = 1,
) -> CapacityBand:
    """By one run of requests, of these lengths in turn, at each rate that is looked at.

    Raises LoadError for fewer than 50 lengths, and for gamma arrivals of a `cv` above 4.9.
    """
    if len(pairs) < LEAST_LENGTHS:
        raise LoadError(f"{len(pairs)} requests are too few: at least {LEAST_LENGTHS} are needed")
    process = Poisson() if arrivals is None else arrivals
    if isinstance(process, Gamma) and CLUSTERS * process.cv**2 > MOST_REQUESTS:
        most = math.sqrt(MOST_REQUESTS / CLUSTERS)
        raise LoadError(
            f"not simulated for gamma arrivals of cv {process.cv:g}: they come in clusters of some "
            f"{process.cv**2:.0f}, too few of which fit in a run; cv up to {most:.1f} is simulated"
        )
    grid = _Grid(law, policy, pairs, process, seed)
    if grid.cycle is not None and grid.requests(grid.guess(slo)) > MOST_REQUESTS:
        grid = _Grid(law, policy, pairs, Poisson(), seed, phases(process))
    estimate = grid.crossing(slo)
    if grid.cycle is None:
        low = grid.crossing(slo.tighter(spread)) / spread
        high = grid.crossing(slo.tighter(1 / spread)) * spread
    else:
        slow, quick = (
            _Grid(law.slower(factor), policy, pairs, process, seed).crossing(slo)
            for factor in (spread, 1 / spread)
        )
        low, high = min(slow, estimate), max(quick, estimate)
    if estimate == 0.0:
        return CapacityBand(low=low, estimate=estimate, high=high)
    played, lengths = grid.counted(round(grid.usual_place(estimate)))
    return CapacityBand(low=low, estimate=estimate, high=high, played=played, pairs=lengths)


class _Grid:
    """Runs of the same requests at rates `top` x exp(-STEP x place).

    `steady`: (share of the requests, rate over the mean) of times in each of which arrivals are as
    given.
    """

    def __init__(
        self,
        law: StepLaw,
        policy: Policy,
        pairs: Pairs,
        arrivals: Arrivals,
        seed: int,
        steady: tuple[tuple[float, float], ...] = ((1.0, 1.0),),
    ) -> None:
        self.law = law
        self.policy = policy
        self.cycle = cycle_seconds(arrivals)
        self._arrivals = arrivals
        self._steady = [(share, -math.log(times) / STEP) for share, times in steady]
        self._seed = seed
        self.prompt = float(pairs[:, 0].mean())
        self.output = max(float(pairs[:, 1].mean()), 1.0)
        held = pairs[:, 0] + pairs[:, 1] / 2
        self.context = float((held * pairs[:, 1]).sum() / max(pairs[:, 1].sum(), 1))
        room = math.inf if policy.kv_tokens is None else policy.kv_tokens / max(held.mean(), 1.0)
        self.most = max(1.0, min(policy.slots, room))  # requests at once
        count = max(LEAST_REQUESTS, math.ceil(IN_FLIGHT * self.most))
        if isinstance(arrivals, Gamma):
            count = max(count, math.ceil(CLUSTERS * arrivals.cv**2))
        self.pairs = pairs[np.arange(count) % len(pairs)]
        self.top = self.rate_of(self.most)[0]
        self._counted: dict[int, tuple[Simulated, Pairs]] = {}
        self._off = 0  # places that the last answer was off its guess: the next will be, too

    def rate_of(self, decoding: float) -> tuple[float, float]:
        """Mean field: requests/s that so many requests in decode answer, and their TPOT."""
        step = self.law.seconds(decoding, 0, decoding * self.context)
        prompt = self.prompt * self.law.prompt_token_seconds
        rate = 1 / max(self.output * step / decoding + prompt, 1e-12)
        return rate, decoding / (rate * self.output)

    def guess(self, slo: Slo) -> float:
        """Requests/s at which the most that are in flight at times still meet the SLO."""
        limit = math.inf if slo.tpot_seconds is None else slo.tpot_seconds
        low, high = 1.0, self.most
        while high - low > 0.5:
            middle = (low + high) / 2
            low, high = (middle, high) if self.rate_of(middle)[1] <= limit else (low, middle)
        usual = (math.sqrt(SPARE**2 / 4 + high) - SPARE / 2) ** 2
        return self.rate_of(max(usual, 1.0))[0]

    def place_of(self, rate: float) -> float:
        return math.log(self.top / rate) / STEP

    def usual_place(self, rate: float) -> float:
        """Of the rate that requests meet on average, where the mean is this one."""
        return self.place_of(rate) + sum(share * off for share, off in self._steady)

    def requests(self, rate: float) -> float:
        """Of a run at this rate."""
        return self._counted_seconds(rate) * rate / COUNTED

    def _counted_seconds(self, rate: float) -> float:
        """Between warm-up and cool-down of a run: whole cycles where they are all alike."""
        seconds = COUNTED * len(self.pairs) / rate
        if self.cycle is None:
            return seconds
        if isinstance(self._arrivals, OnOff):
            return max(seconds, CYCLES * self.cycle)
        return math.ceil(seconds / self.cycle) * self.cycle

    def counted(self, place: int) -> tuple[Simulated, Pairs]:
        """The requests between warm-up and cool-down at this place, and their lengths."""
        if place not in self._counted:
            rate = self.top * math.exp(-STEP * place)
            seconds = self._counted_seconds(rate) / COUNTED
            due = due_times(self._arrivals, rate, seconds, self._seed)
            lengths = self.pairs[np.arange(len(due)) % len(self.pairs)]
            played = simulate(self.law, self.policy, due, lengths)
            counts = (due >= WARM_UP * seconds) & (due < (1 - COOL_DOWN) * seconds)
            part = Simulated(
                played.due[counts],
                played.first_token[counts],
                played.last_token[counts],
                played.output_tokens[counts],
            )
            self._counted[place] = (part, lengths[counts])
        return self._counted[place]

    def share(self, place: int, slo: Slo) -> float:
        """Share of good requests; between two places on a straight line."""
        found = 0.0
        for share, off in self._steady:
            at = place + off
            below = math.floor(at)
            found += share * (1 - (at - below)) * self._share(below, slo)
            if at > below:
                found += share * (at - below) * self._share(below + 1, slo)
        return found

    def _share(self, place: int, slo: Slo) -> float:
        good = self.counted(place)[0].good(slo)
        if not len(good):
            raise LoadError("not simulated: the arrivals leave too long without a request")
        return float(good.mean())

    def share_alone(self, slo: Slo) -> float:
        """Share of good requests with one at a time."""
        prompts, outputs = self.pairs.T.astype(np.float64)
        later = np.maximum(outputs - 1, 0)
        context = prompts + outputs / 2
        tpot = self.law.seconds(1, 0, 0) + self.law.kv_token_seconds * context
        first = self.law.base_seconds + self.law.prompt_token_seconds * prompts
        alone = Simulated(np.zeros(len(prompts)), first, first + tpot * later, self.pairs[:, 1])
        return float(alone.good(slo).mean())

    @cached_property
    def saturated(self) -> float:
        """Requests/s that it answers while all of them wait: the middle half of them."""
        played = simulate(self.law, self.policy, np.zeros(len(self.pairs)), self.pairs)
        first, last = np.quantile(played.last_token, (0.25, 0.75))
        return len(self.pairs) / 2 / max(float(last - first), 1e-9)

    def crossing(self, slo: Slo) -> float:
        """The rate at which the share of good requests falls below the target; 0.0: at every.

        At most what the server answers: an answer in a run that ends may be late without limit.
        """
        rate = self._crossing(slo)
        return min(rate, self.saturated) if rate > BUSY * self.top else rate

    def _crossing(self, slo: Slo) -> float:
        if self.share_alone(slo) < slo.target:
            return 0.0

        def holds(place: int) -> bool:
            return self.share(place, slo) >= slo.target

        guess = round(self.place_of(self.guess(slo)) - min(off for _, off in self._steady))
        good = bad = guess + self._off
        stride = 1
        if holds(good):
            while holds(bad := good - stride):
                if bad <= OVERLOADED:  # no limit but the server's own speed
                    return self.top * math.exp(-STEP * bad)
                good, stride = bad, 2 * stride
        else:
            while not holds(good := bad + stride):
                if good >= LOWEST:
                    return 0.0
                bad, stride = good, 2 * stride
        while good - bad > 1:
            middle = (good + bad) // 2
            good, bad = (middle, bad) if holds(middle) else (good, middle)
        self._off = good - guess
        above, below = self.share(good, slo), self.share(bad, slo)
        return self.top * math.exp(-STEP * (good - (above - slo.target) / (above - below)))

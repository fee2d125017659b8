"""The capacity of a simulated server: the rate at which the share of good requests is the target.

    found = capacity(law, SchedulerSettings(slots=8), workload, SLO_PRESETS["chat"])
    found.rate, found.steepness, found.alone_share

The one function that campaign, sliders, other machines, GPUs and the plan ask. All rates are played
with the same draws of arrivals and lengths (common random numbers), so that the difference in share
is that of the rates. Arrivals are drawn at the rate that is asked for: an on-period of 10 s lasts
10 s at every rate.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from serving.capacity.batching_simulator import Array, Simulated, simulate
from serving.capacity.scheduler_settings import SchedulerSettings
from serving.capacity.slo import Slo
from serving.capacity.step_time_model import StepTimeModel
from serving.errors import WorkloadError
from serving.workload.arrivals import Arrivals, Poisson, due_times
from serving.workload.request_lengths import Workload, draw

# By 19 cells of recorded runs, every second one held out (`python -m tests.bench.law_constants`,
# docs/benchmarks.md): steps under load took 1.05 times the step-time model of a calibration; errors
# of ln(simulated / true) over the steepness are 0.113 (held out 0.027) before any level. With one
# at 0.7 to 1.0 of that limit, where a campaign puts it, and the calibration as up to half a level,
# they are 0.065 (0.047; 0.069 and 0.057 by the level alone), and 1.645 x sd holds 90 % (92 %).
# Levels at 0.4 to 0.7 of the limit: 0.135 (0.103), no better than none.
LOADED = 1.05
SD_CALIBRATED = 0.12
CALIBRATED_AS = 0.5
SD_LEVEL, SD_CELL = 0.06, 0.026
Z_90 = 1.645  # standard deviations to either end of a 90 % interval
MIN_TELLING = 0.7
MOVED = 0.2  # steps that took longer by more than this: the machine's speed changed

SEED = 0
REQUESTS = 8_000  # a rate: the seed then leaves 2 % of the capacity; 2,000 leave 3 to 5 %
QUICK_REQUESTS = 2_000  # for sliders
WARM_UP, COOL_DOWN = 0.05, 0.03  # of the duration: its requests do not count
PRECISION = 0.02  # of ln(rate), between the two rates that the answer lies between
SLOWER = 1.1  # factor of all step times that the steepness is told from
OVERLOAD = 1.1  # times the saturated rate: what holds there has no limit
LOWEST = 1e-3  # of the saturated rate

Whole = npt.NDArray[np.int64]


class Lengths(msgspec.Struct, frozen=True, eq=False):
    """Of n requests, in tokens, in the order they are asked: [n] each."""

    prompt: Whole
    output: Whole
    cached: Whole  # of the prompt, found in the server's cache; 0: none


class SimulatedCapacity(msgspec.Struct, frozen=True, kw_only=True):
    """The highest rate at which the simulated share of good requests reaches the target."""

    rate: float  # requests/s; 0.0: not even alone, or at no rate
    steepness: float  # d ln(rate) / d ln(time of a step), at least 1
    alone_share: float  # of good requests with one at a time


def common_factor(factors: Sequence[float]) -> tuple[float, float]:
    """The factor by these of levels and by the calibration, and the levels it counts as.

    The calibration counts as half a level where the levels agree with it, less where they do not,
    and not at all where the machine had another speed then.
    """
    logs = [math.log(one / LOADED) for one in factors]
    apart = sum(logs) / len(logs) / math.log(1 + MOVED)
    counts = len(logs) + CALIBRATED_AS * max(0.0, 1 - apart**2)
    return LOADED * math.exp(sum(logs) / counts), counts


def sd_of(levels: float) -> float:
    """Standard deviation of ln(limit) over the steepness, with the factor of so many levels."""
    return math.hypot(SD_CELL, SD_LEVEL / math.sqrt(levels)) if levels else SD_CALIBRATED


def lengths_of(workload: Workload, n: int, seed: int, reused_share: float = 0.0) -> Lengths:
    """Drawn from a workload.

    `reused_share`: of shared prefixes, how much is found in the cache.
    """
    asks = draw(workload, n, seed)
    prompt = np.array([ask.prompt_tokens for ask in asks], dtype=np.int64)
    output = np.array([ask.output_tokens for ask in asks], dtype=np.int64)
    known = np.array([ask.prefix_tokens for ask in asks])
    cached = np.minimum(prompt - 1, (reused_share * known).astype(np.int64))
    return Lengths(prompt, output, cached)


def capacity(
    step_times: StepTimeModel,
    settings: SchedulerSettings,
    workload: Lengths | Workload,
    slo: Slo,
    *,
    arrivals: Arrivals | None = None,
    reused_share: float = 0.0,
    requests: int = REQUESTS,
) -> SimulatedCapacity:
    """The simulated capacity.

    Arrivals None: Poisson. `reused_share`: of the shared prefixes of a Workload, how much the
    server finds in its cache. Where even what saturates the server meets the SLO, the rate is that
    of saturation.
    """
    server = Server(
        step_times, settings, workload, arrivals, reused_share=reused_share, count=requests
    )
    alone = float(server.alone().good(slo.ttft_seconds, slo.tpot_seconds).mean())
    if alone < slo.target:
        return SimulatedCapacity(rate=0.0, steepness=1.0, alone_share=alone)
    rate = server.crossing(slo)
    steepness = 1.0
    if rate > 0:
        # A server slower by a factor, under rates lower by it, is the same server under limits
        # tighter by it: the capacity of the slower one is told from rates that were played.
        slower = server.crossing(slo.tighter(SLOWER), below=rate) / SLOWER
        if slower > 0:
            steepness = max(1.0, math.log(rate / slower) / math.log(SLOWER))
    return SimulatedCapacity(rate=rate, steepness=steepness, alone_share=alone)


class Server:
    """The simulated server at any rate, with the same draws at each; what was played is kept."""

    def __init__(
        self,
        step_times: StepTimeModel,
        settings: SchedulerSettings,
        workload: Lengths | Workload,
        arrivals: Arrivals | None = None,
        *,
        reused_share: float = 0.0,
        count: int = REQUESTS,
    ) -> None:
        if isinstance(workload, Workload):
            workload = lengths_of(workload, count, SEED, reused_share)
        self.step_times, self.settings, self.lengths = step_times, settings, workload
        self.arrivals = Poisson() if arrivals is None else arrivals
        self.count = count
        self.played: dict[float, Simulated] = {}

    def alone(self) -> Simulated:
        """Requests one at a time: TTFT and TPOT of each, in closed form."""
        step_times, lengths = self.step_times, self.lengths
        computed = np.maximum(lengths.prompt - lengths.cached, 1)
        steps = np.ceil(computed / self.settings.step_tokens)
        ttft = step_times.base_seconds * steps + step_times.prompt_token_seconds * computed
        context = lengths.prompt + (lengths.output - 2) / 2
        tpot = (
            step_times.base_seconds
            + step_times.row_seconds
            + step_times.context_token_seconds * context
        )
        if step_times.experts is not None:
            pieces = 1.0 - step_times.experts.skip_probability ** (computed / steps)
            ttft += step_times.expert_seconds * steps * pieces
            tpot += step_times.expert_seconds * step_times.experts.expected_share(1)
        return Simulated(np.zeros(len(ttft)), ttft, np.where(lengths.output > 1, tpot, np.nan))

    def play(self, rate: float) -> Simulated:
        """About `count` requests at this rate, those of warm-up and cool-down left out."""
        if rate not in self.played:
            seconds = self.count / rate
            due = due_times(self.arrivals, rate, seconds, SEED)
            played = self._simulated(due)
            part = played.due / seconds
            counts = (part >= WARM_UP) & (part < 1.0 - COOL_DOWN)
            if not counts.any():
                raise WorkloadError("The arrivals have gaps that are too long to simulate")
            self.played[rate] = played.of(counts)
        return self.played[rate]

    def share(self, rate: float, slo: Slo) -> float:
        """Of good requests at this rate."""
        return float(self.play(rate).good(slo.ttft_seconds, slo.tpot_seconds).mean())

    def saturated_rate(self) -> float:
        """Requests/s that it answers while all requests wait."""
        played = self._simulated(np.zeros(min(QUICK_REQUESTS, self.count)))
        first, last = np.quantile(played.ttft, (0.25, 0.75))  # they begin as others end
        return len(played.due) / 2 / max(float(last - first), 1e-9)

    def crossing(self, slo: Slo, below: float | None = None) -> float:
        """The rate at which the share of good requests is the target; 0.0: at no rate.

        `below`: a rate at which it is known to be lower.
        """
        if below is None:
            low = high = self.saturated_rate()
            if self.share(high * OVERLOAD, slo) >= slo.target:
                return high
            high *= OVERLOAD
        else:
            low = high = below
        lowest = LOWEST * high
        while self.share(low := low * 0.8, slo) < slo.target:
            high = low
            if low < lowest:
                return 0.0
        while math.log(high / low) > PRECISION:
            middle = math.sqrt(low * high)
            low, high = (middle, high) if self.share(middle, slo) >= slo.target else (low, middle)
        # Straight between the two: the share falls by little.
        above, beneath = self.share(low, slo), self.share(high, slo)
        part = (above - slo.target) / max(above - beneath, 1e-9)
        return float(low * (high / low) ** min(part, 1.0))

    def _simulated(self, due: Array) -> Simulated:
        lengths = self.lengths
        at = np.arange(len(due)) % len(lengths.prompt)
        columns = (lengths.prompt[at], lengths.output[at], lengths.cached[at])
        return simulate(self.step_times, self.settings, due, *columns)

"""What the SLO attainment of a level says about the speed of the steps.

    factor, sd = speed_by_attainment(server, slo, levels, factor=1.1, sd=0.06)

The times of a level's steps say how long steps took. Which of its requests met the SLO is evidence
beside that: if all of them did, steps are not so slow that some would have missed it. A level is
simulated with its own arrivals and lengths for several factors of the step times. A request misses
the SLO with the probability

    STRAY_SHARE + (1 - 2 STRAY_SHARE) Phi(ln(simulated time / limit) / MARGIN_SD)

of the time that is nearest to its limit. Requests that are delayed together count as fewer: the
logarithm of the likelihood is divided by DESIGN_EFFECT, or by DISTURBED_DESIGN_EFFECT. The result
is the mean and the standard deviation of ln(factor) when this likelihood is taken together with a
normal distribution around the factor that the step times gave.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import numpy as np

from crossover.loadtests.capacity.step_observation import replay
from crossover.loadtests.levels.level_columns import Floats, Level
from crossover.serving.capacity.simulated_capacity import ServerModel
from crossover.serving.capacity.slo import Slo

STRAY_SHARE = 0.01  # of requests meets or misses the SLO for reasons that are not simulated
MARGIN_SD = 0.15  # of ln(measured / simulated) of one request's times
DESIGN_EFFECT = 2.0
# Of a disturbed level: what other processes took is simulated as if it were the same share of every
# step. If they ran in bursts, more requests miss the SLO, or fewer, than with that.
DISTURBED_DESIGN_EFFECT = 16.0
GRID = np.linspace(-3.5, 3.5, 15)  # standard deviations of ln(factor) that are simulated


def speed_by_attainment(
    server: ServerModel, slo: Slo, levels: Sequence[Level], factor: float, sd: float
) -> tuple[float, float]:
    """Return the factor of all step times and the standard deviation of its logarithm, by the SLO
    attainment of levels together with `factor` and `sd`, which the times of steps gave."""
    steps = tuple(np.round(np.log(factor) + sd * GRID, 6).tolist())
    log_density = -0.5 * GRID**2
    for level in levels:
        log_density = log_density + _log_likelihood(server, slo, level, steps)
    density = np.exp(log_density - log_density.max())
    density /= density.sum()
    mean = float(density @ GRID)
    variance = float(density @ (GRID - mean) ** 2)
    return factor * math.exp(mean * sd), sd * math.sqrt(variance)


@functools.lru_cache(maxsize=256)  # a level is looked at again after each later one
def _log_likelihood(
    server: ServerModel, slo: Slo, level: Level, log_factors: Sequence[float]
) -> Floats:
    """Return the logarithm of the likelihood of a level's SLO attainment for each factor."""
    is_met = slo.met_by(level)
    found = []
    for log_factor in log_factors:
        # Whether its requests met the SLO is evidence of the steps as they were, so they are
        # simulated with what other processes took.
        slower = server.step_times.slower(math.exp(log_factor) / (1 - level.taken_share))
        times = replay(slower, server.settings, level, server.reasoning_share)
        counted = level.counted & np.isfinite(times.e2e)
        margins = np.log(slo.largest_share(times)[counted]) / MARGIN_SD
        missed = STRAY_SHARE + (1 - 2 * STRAY_SHARE) * _normal_cdf(margins)
        likelihoods = np.where(is_met[counted], 1 - missed, missed)
        design_effect = DISTURBED_DESIGN_EFFECT if level.taken_share else DESIGN_EFFECT
        found.append(float(np.log(likelihoods).sum()) / design_effect)
    return np.array(found)


def _normal_cdf(values: Floats) -> Floats:
    return np.array([0.5 * math.erfc(-value / math.sqrt(2)) for value in values.tolist()])

"""Advice for a capacity whose interval is wide although the step times are well known, or that is
0: an SLO under which it would be narrow, or under which there would be a capacity.

    advice(found, server, demand, slo)
    # "The interval is wide because ... It would span less than a factor of 2 with slo.target = 0.9"

If the SLO is near the best latency that a configuration can reach, the capacity falls several times
faster than step times rise (`Capacity.steepness`). A small error of the step-time model is then a
large error of the capacity. Measuring for longer hardly helps, but another target or limit does.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec

from crossover.loadtests.capacity.capacity_estimate import server_under_load
from crossover.loadtests.records.journal_events import Capacity
from crossover.models import formatting
from crossover.serving.capacity.simulated_capacity import QUICK_REQUESTS, Z_90, Demand, ServerModel
from crossover.serving.capacity.slo import Slo

MAX_WIDTH = 2.0  # an interval whose ends are further apart than this factor is wide
# If fewer single requests meet the latency limits, there is another problem than a wide interval.
MIN_UNLOADED_SHARE = 0.99
TARGETS = (0.95, 0.9, 0.8)
LIMIT_FACTORS = (1.25, 1.5, 2.0, 3.0, 4.0)
MAX_ALTERNATIVES = 2
MORE_FACTORS = (6.0, 10.0)  # of a limit that no request meets


class Alternative(NamedTuple):
    """An SLO with one key changed, to a value that is easier to meet."""

    key: str
    value: str
    slo: Slo


def advice(found: Capacity, server: ServerModel, demand: Demand, slo: Slo) -> str:
    """Return a sentence with a target and a limit under which the interval would be narrow, or
    under which there would be a capacity, if by the step times there is none.

    "": the interval is narrow, something else than the SLO made it wide, or it would be wide under
    all alternatives. Simulates up to a dozen capacities, which takes seconds.
    """
    if not found.estimated_rate and not found.is_confirmed:
        return _slo_with_a_capacity(server_under_load(server, found), demand, slo)
    low, high, steepness = found.low, found.high, found.steepness
    if found.method != "step_times" or not (low and high and found.estimated_rate and steepness):
        return ""
    if high <= MAX_WIDTH * low:
        return ""
    if found.speed_moved is not None:  # the machine, not the SLO, made it wide
        return ""
    # Standard deviation of the logarithm of step times, from high / low = exp(2 z sd steepness).
    step_sd = math.log(high / low) / (2 * Z_90 * steepness)
    loaded = server_under_load(server, found)
    narrow: list[str] = []
    unloaded_share: float | None = None  # of single requests that meet the latency limits
    for alternatives in _easier_slos(slo):
        for key, value, easier_slo in alternatives:
            simulated = loaded.capacity(demand, easier_slo, QUICK_REQUESTS)
            if key == "target":  # the latency limits are unchanged
                unloaded_share = simulated.unloaded_attainment
            width = math.exp(2 * Z_90 * step_sd * simulated.steepness)
            if simulated.rate > 0 and width <= MAX_WIDTH:
                narrow.append(f"slo.{key} = {value} (about {formatting.rate(simulated.rate)})")
                break
        if len(narrow) == MAX_ALTERNATIVES:
            break
    if not narrow or (unloaded_share is not None and unloaded_share < MIN_UNLOADED_SHARE):
        return ""
    return (
        "The interval is wide because the SLO is near the edge of what this configuration can do: "
        f"single requests meet it, but steps that take 1 % longer lower the capacity by "
        f"{steepness:.1f} %. It would span less than a factor of {MAX_WIDTH:g} with "
        f"{' or '.join(narrow)}."
    )


def _slo_with_a_capacity(server: ServerModel, demand: Demand, slo: Slo) -> str:
    """Return a sentence with the nearest SLOs under which this server would have a capacity; "":
    there is none among the alternatives."""
    found: list[str] = []
    for alternatives in _easier_slos(slo, (*LIMIT_FACTORS, *MORE_FACTORS)):
        for key, value, easier_slo in alternatives:
            rate = server.capacity(demand, easier_slo, QUICK_REQUESTS).rate
            if rate > 0:
                found.append(f"slo.{key} = {value}: about {formatting.rate(rate)}")
                break
    if not found:
        return ""
    return f"There would be a capacity with another SLO: {'; '.join(found[:MAX_ALTERNATIVES])}."


def _easier_slos(
    slo: Slo, limit_factors: Sequence[float] = LIMIT_FACTORS
) -> Iterator[list[Alternative]]:
    """Yield the alternatives for each key of the SLO, the nearest value first."""
    replace = msgspec.structs.replace
    targets = [target for target in TARGETS if target < slo.target]
    yield [Alternative("target", f"{value:g}", replace(slo, target=value)) for value in targets]
    for name, limit in slo.limits.items():
        values = [limit * factor for factor in limit_factors]
        yield [
            Alternative(f"{name}_seconds", f"{value:.3g}", slo.with_limits(**{name: value}))
            for value in values
        ]

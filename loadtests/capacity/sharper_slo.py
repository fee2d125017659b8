"""Advice for a capacity whose interval is wide although the step times are well known, or that is
0: an SLO under which it would be narrow, or under which there would be a capacity.

    advice(capacity, server, demand, slo)
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
import numpy as np

from crossover.loadtests.capacity.capacity_estimate import server_under_load
from crossover.loadtests.capacity.capacity_text import common_rate
from crossover.loadtests.levels.level_columns import Level
from crossover.loadtests.records.journal_events import Capacity
from crossover.models import formatting
from crossover.serving.capacity.simulated_capacity import (
    QUICK_REQUESTS,
    Z_90,
    Demand,
    Server,
    ServerModel,
)
from crossover.serving.capacity.slo import Slo

MAX_WIDTH = 2.0  # an interval whose ends are further apart than this factor is wide
# If fewer single requests meet the latency limits, there is another problem than a wide interval.
MIN_UNLOADED_SHARE = 0.99
TARGETS = (0.95, 0.9, 0.8)
LIMIT_FACTORS = (1.25, 1.5, 2.0, 3.0, 4.0)
MAX_ALTERNATIVES = 2
MORE_FACTORS = (6.0, 10.0)  # of a limit that no request meets
MOST_FACTORS = (20.0, 40.0)  # where nothing has to be simulated
SHORTER_PROMPTS = {1 / 2: "half as long", 1 / 4: "a quarter as long", 1 / 8: "an eighth as long"}


class Alternative(NamedTuple):
    """An SLO with one key changed, to a value that is easier to meet."""

    key: str
    value: str
    slo: Slo


def advice(
    capacity: Capacity,
    server: ServerModel,
    demand: Demand,
    slo: Slo,
    unit_rate: float | None = None,
) -> str:
    """Return a sentence with a target and a limit under which the interval would be narrow, or, if
    there is no capacity, with those (or with shorter prompts) under which there would be one.

    "": the interval is narrow, something else than the SLO made it wide, or it would be wide under
    all alternatives. `unit_rate`: the rate in whose unit rates are written; None: that which suits
    the capacity. Simulates up to a dozen capacities, which takes seconds.
    """
    if capacity.is_none:
        unloaded = server.slower(capacity.factor or 1.0)
        return what_gives_a_capacity(unloaded.simulated(demand), slo, unit_rate)
    low, high, steepness = capacity.low, capacity.high, capacity.steepness
    if capacity.method != "step_times" or not (
        low and high and capacity.estimated_rate and steepness
    ):
        return ""
    if high <= MAX_WIDTH * low:
        return ""
    if capacity.speed_moved is not None:  # the machine, not the SLO, made it wide
        return ""
    # Standard deviation of the logarithm of step times, from high / low = exp(2 z sd steepness).
    step_sd = math.log(high / low) / (2 * Z_90 * steepness)
    loaded = server_under_load(server, capacity)
    unit_rate = unit_rate or common_rate([capacity])
    narrow: list[str] = []
    unloaded_share: float | None = None  # of single requests that meet the latency limits
    for alternatives in _easier_slos(slo):
        for key, value, easier_slo in alternatives:
            simulated = loaded.capacity(demand, easier_slo, QUICK_REQUESTS)
            if key == "target":  # the latency limits are unchanged
                unloaded_share = simulated.unloaded_attainment
            width = math.exp(2 * Z_90 * step_sd * simulated.steepness)
            if simulated.rate > 0 and width <= MAX_WIDTH:
                rate = formatting.rate(simulated.rate, like=unit_rate)
                narrow.append(f"slo.{key} = {value} (about {rate})")
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


def what_gives_a_capacity(server: Server, slo: Slo, unit_rate: float | None = None) -> str:
    """Return a sentence with the nearest SLOs, and the longest prompts, with which this server
    would have a capacity; "": there are none among the alternatives.

    `unit_rate`: the rate in whose unit these capacities are written; None: that which suits them.
    """
    rates: dict[str, float] = {}  # "slo.ttft_seconds = 4" -> the capacity with it
    for alternatives in _easier_slos(slo, (*LIMIT_FACTORS, *MORE_FACTORS)):
        for key, value, easier_slo in alternatives:
            if (rate := server.capacity(easier_slo).rate) > 0:
                rates[f"slo.{key} = {value}"] = rate
                break
        if len(rates) == MAX_ALTERNATIVES:
            break
    if server.lengths.turns is None:
        for factor, words in SHORTER_PROMPTS.items():
            if (rate := _with_shorter_prompts(server, factor).capacity(slo).rate) > 0:
                rates[f"prompts {words}"] = rate
                break
    if not rates:
        return ""
    unit_rate = unit_rate or formatting.common_unit_rate(rates.values())
    *first, last = (
        f"{what} (about {formatting.requests(rate, like=unit_rate)})"
        for what, rate in rates.items()
    )
    alternatives_words = " or ".join(filter(None, (", ".join(first), last)))
    return f"There would be a capacity with {alternatives_words}."


def what_single_requests_meet(levels: Sequence[Level], slo: Slo) -> str:
    """Return a sentence with the nearest SLOs that these levels of single requests would have met,
    where no step times are known; "": there is none among the alternatives."""
    factors = (*LIMIT_FACTORS, *MORE_FACTORS, *MOST_FACTORS)
    due = sum(level.judge(slo).due for level in levels)
    met_slos: list[str] = []
    for alternatives in _easier_slos(slo, factors):
        for key, value, easier_slo in alternatives:
            good = sum(level.judge(easier_slo).good for level in levels)
            if due and good >= easier_slo.target * due:
                met_slos.append(f"slo.{key} = {value}")
                break
    if not met_slos:
        return ""
    return f"Single requests would meet the SLO with {' or '.join(met_slos[:MAX_ALTERNATIVES])}."


def _with_shorter_prompts(server: Server, factor: float) -> Server:
    """Return the server under the same requests with prompts of this share of their length."""
    lengths = server.lengths
    prompt = np.maximum(np.ceil(factor * lengths.prompt), 1).astype(np.int64)
    cached = np.minimum(lengths.cached, prompt - 1)
    shorter = msgspec.structs.replace(lengths, prompt=prompt, cached=cached)
    return Server(server.step_times, server.settings, shorter, server.arrivals, count=server.count)


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

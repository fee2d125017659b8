"""Capacities that take a quarter of the time to simulate."""

from __future__ import annotations

import functools

from crossover.serving.capacity import simulated_capacity
from crossover.serving.capacity.simulated_capacity import (
    QUICK_REQUESTS,
    Demand,
    ServerModel,
    SimulatedCapacity,
)
from crossover.serving.capacity.slo import Slo

_simulated_capacity = simulated_capacity._simulated_capacity.__wrapped__


@functools.lru_cache(maxsize=512)
def capacity_of_few_requests(
    model: ServerModel, demand: Demand, slo: Slo, requests: int
) -> SimulatedCapacity:
    return _simulated_capacity(model, demand, slo, min(requests, QUICK_REQUESTS))

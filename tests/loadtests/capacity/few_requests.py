"""Capacities that take a small part of the time to simulate."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from unittest import mock

from crossover.serving.capacity import simulated_capacity
from crossover.serving.capacity.simulated_capacity import (
    Demand,
    Server,
    ServerModel,
    SimulatedCapacity,
)
from crossover.serving.capacity.slo import Slo

FEW_REQUESTS = 500  # in place of 8,000, and of 2,000 where the product is quick

_simulated_capacity = simulated_capacity._simulated_capacity.__wrapped__
_simulated_server = simulated_capacity._simulated_server.__wrapped__


@functools.lru_cache(maxsize=512)
def capacity_of_few_requests(
    model: ServerModel, demand: Demand, slo: Slo, requests: int
) -> SimulatedCapacity:
    return _simulated_capacity(model, demand, slo, min(requests, FEW_REQUESTS))


@functools.lru_cache(maxsize=1024)
def server_of_few_requests(model: ServerModel, demand: Demand, count: int) -> Server:
    return _simulated_server(model, demand, min(count, FEW_REQUESTS))


@contextlib.contextmanager
def few_requests() -> Iterator[None]:
    """Capacities are simulated with few requests meanwhile."""
    with mock.patch.multiple(
        simulated_capacity,
        _simulated_capacity=capacity_of_few_requests,
        _simulated_server=server_of_few_requests,
    ):
        yield

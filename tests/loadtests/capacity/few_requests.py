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

FEW_REQUESTS = 250  # in place of 8,000, and of 2,000 where the product is quick

_capacity = functools.lru_cache(maxsize=512)(simulated_capacity._simulated_capacity.__wrapped__)
_server = functools.lru_cache(maxsize=1024)(simulated_capacity._simulated_server.__wrapped__)


@contextlib.contextmanager
def few_requests(count: int = FEW_REQUESTS) -> Iterator[None]:
    """Capacities are simulated with at most so many requests a rate meanwhile."""

    def capacity(model: ServerModel, demand: Demand, slo: Slo, requests: int) -> SimulatedCapacity:
        return _capacity(model, demand, slo, min(requests, count))

    def server(model: ServerModel, demand: Demand, requests: int) -> Server:
        return _server(model, demand, min(requests, count))

    with mock.patch.multiple(
        simulated_capacity, _simulated_capacity=capacity, _simulated_server=server
    ):
        yield

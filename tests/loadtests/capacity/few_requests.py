"""Capacities that take a quarter of the time to simulate."""

from __future__ import annotations

import functools

from crossover.serving.capacity.simulated_capacity import QUICK_REQUESTS, capacity

quick_capacity = functools.partial(capacity, requests=QUICK_REQUESTS)
cached_quick_capacity = functools.lru_cache(maxsize=512)(quick_capacity)

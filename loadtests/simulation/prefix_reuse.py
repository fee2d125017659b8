"""How much of the shared prefixes of a workload the server found in its cache."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from loadtests.analysis.level_columns import Level
from serving.capacity.simulated_capacity import QUICK_REQUESTS
from serving.workload.request_lengths import Workload, draw


def measured_reuse(workload: Workload, levels: Sequence[Level]) -> float:
    """The `reused_share` of a simulation: of what prompts had in common with earlier ones, how
    much the server found in its cache. 0.0 where it does not say, and without shared prefixes.
    """
    asks = draw(workload, QUICK_REQUESTS, 1)
    known = sum(ask.prefix_tokens for ask in asks)
    known_share = known / sum(ask.prompt_tokens for ask in asks)
    cached = prompts = 0.0
    for level in levels:
        told = ~np.isnan(level.cached_tokens) & ~np.isnan(level.prompt_tokens)
        cached += float(level.cached_tokens[told].sum())
        prompts += float(level.prompt_tokens[told].sum())
    return min(1.0, cached / prompts / known_share) if known and prompts else 0.0

"""What an API costs that serves the requests of a plan: dollars for each token, whatever the rate.

    api = api_cost(question)
    api.dollars_per_month(question.forecast.mean_rate)

Tokens with which an earlier prompt began, or which an earlier turn of the conversation contained,
cost the price of cached input. That is all that a cache could find, so the cost is the least that
the API may charge: providers cache neither short prefixes nor old ones.
"""

from __future__ import annotations

import msgspec
import numpy as np

from crossover.reports.plan.load_forecast import HOURS_A_MONTH
from crossover.reports.plan.plan_file import ApiKeys
from crossover.serving.capacity.simulated_capacity import (
    QUICK_REQUESTS,
    SHOWN_SEED,
    Demand,
    lengths_of,
)


class ApiCost(msgspec.Struct, frozen=True, kw_only=True):
    """The prices of an API in dollars per million tokens, and the mean tokens of a request."""

    input: float
    cached_input: float | None  # None: cached tokens cost as much as others
    output: float
    prompt_tokens: float
    cached_tokens: float  # of the prompt, that came before
    output_tokens: float

    @property
    def dollars_per_request(self) -> float:
        cached_price = self.input if self.cached_input is None else self.cached_input
        return (
            (self.prompt_tokens - self.cached_tokens) * self.input
            + self.cached_tokens * cached_price
            + self.output_tokens * self.output
        ) / 1e6

    def dollars_per_month(self, mean_rate: float) -> float:
        """Return dollars a month at a mean rate in requests/s."""
        return mean_rate * 3600 * HOURS_A_MONTH * self.dollars_per_request


def api_cost(prices: ApiKeys, demand: Demand) -> ApiCost:
    """Return what an API costs for these requests."""
    # All of a shared prefix is found in the cache (1.0), and all of a conversation's history.
    lengths = lengths_of(demand.workload, QUICK_REQUESTS, SHOWN_SEED, 1.0)
    cached = lengths.cached if lengths.turns is None else lengths.turns.history_tokens
    return ApiCost(
        input=prices.input,
        cached_input=prices.cached_input,
        output=prices.output,
        prompt_tokens=float(np.mean(lengths.prompt)),
        cached_tokens=float(np.mean(np.minimum(cached, lengths.prompt))),
        output_tokens=float(np.mean(lengths.output)),
    )

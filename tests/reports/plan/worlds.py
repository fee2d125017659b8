"""Small worlds for tests of plans: laws that were not measured, short lengths, few requests."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from loadtests.metrics.slo import Slo
from loadtests.simulation.batching import Pairs, Policy
from loadtests.simulation.step_time import StepLaw
from loadtests.workload.arrivals import Poisson
from loadtests.workload.requests import Workload, draw
from reports.plan.candidates import Candidate, Cost
from reports.plan.forecast import DAYS, Arrivals, Forecast, Shape, day_loads
from reports.plan.options import Terms
from reports.plan.sizing import Errors, Server

CPU = StepLaw(base_seconds=0.030, row_seconds=0.010, prompt_token_seconds=0.002)
GPU = StepLaw(
    form="max",
    base_seconds=0.002,
    weights_seconds=0.010,
    row_seconds=1e-4,
    prompt_token_seconds=1e-4,
)
CHAT = Slo("chat", 2.0, 0.1, target=0.95)
REQUESTS = 500


@functools.cache
def pairs() -> Pairs:
    asks = draw(Workload(preset="chat", scale=0.1), REQUESTS, 1)
    return np.array([(ask.prompt_tokens, ask.output_tokens) for ask in asks], dtype=np.int64)


@functools.cache
def server(law: StepLaw = CPU, slots: int = 8, arrivals: Arrivals = Poisson()) -> Server:  # noqa: B008
    return Server(law, Policy(slots=slots), pairs(), Shape(arrivals), requests=REQUESTS)


def laptop(**changes: Any) -> Candidate:
    fields: dict[str, Any] = {
        "name": "laptop",
        "kind": "measured",
        "is_cpu": True,
        "server": server(),
        "errors": Errors(step=0.1),
        "owned": 1,
        "watts": 60.0,
    }
    return Candidate(**{**fields, **changes})


def gpu(name: str = "GPU", dollars: float = 1.0, **changes: Any) -> Candidate:
    fields: dict[str, Any] = {
        "name": name,
        "kind": "predicted",
        "is_cpu": False,
        "server": server(GPU, 64),
        "errors": Errors(step=0.2),
        "dollars_per_hour": Cost.of(dollars),
        "watts": 300.0,
    }
    return Candidate(**{**fields, **changes})


def office(peak_rate: float, months: int = 1, growth: float = 0.0) -> Forecast:
    loads = day_loads(DAYS["office"], 0.2, peak_rate=peak_rate)
    return Forecast(loads=loads, months=months, growth_per_month=growth)


def terms(slo: Slo = CHAT, forecast: Forecast | None = None, **changes: Any) -> Terms:
    requests = 1e6 if forecast is None else forecast.requests
    return Terms(slo=slo, output_tokens=20 * requests, dollars_per_kwh=0.3, **changes)

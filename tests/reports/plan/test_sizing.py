"""The capacity of one replica is the capacity that campaigns predict, by another search."""

from __future__ import annotations

import numpy as np
import pytest

from loadtests.metrics.slo import Slo
from loadtests.simulation.batching import Policy
from loadtests.simulation.old_simulated_capacity import predict
from loadtests.simulation.step_time import StepLaw
from loadtests.workload.arrivals import Poisson
from reports.plan.forecast import Shape
from reports.plan.sizing import MOST_BUSY, Server
from tests.reports.plan.worlds import CHAT, CPU, GPU, pairs


@pytest.mark.parametrize("law", [CPU, GPU])
def test_a_replica_holds_what_the_simulation_of_campaigns_says(law: StepLaw) -> None:
    policy = Policy(slots=8 if law is CPU else 64)
    lengths = np.tile(pairs(), (8, 1))
    again = predict(law, policy, lengths, CHAT, seed=1)
    server = Server(law, policy, lengths, Shape(Poisson()), requests=4000)
    expected = min(again.rate, MOST_BUSY * server.saturated_rate)
    assert server.capacity(CHAT) == pytest.approx(expected, rel=0.12)


def test_a_slo_without_limits_is_held_up_to_the_busiest_rate() -> None:
    server = Server(CPU, Policy(slots=8), pairs(), Shape(Poisson()), requests=500)
    assert server.capacity(Slo("batch", None, None)) == MOST_BUSY * server.saturated_rate

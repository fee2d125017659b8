"""How many replicas a load asks for."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from serving.ray.scaling import IN_FLIGHT, wanted


@pytest.mark.parametrize(
    ("told", "replicas"),
    [
        (None, 3),
        ({}, 3),
        ({IN_FLIGHT: {"a": 0.0}}, 0),
        ({IN_FLIGHT: {"a": 16.0, "b": 8.0, "c": 4.0}}, 3.5),
    ],
)
def test_each_replica_gets_its_target(
    told: dict[str, dict[str, float]] | None, replicas: float
) -> None:
    config = SimpleNamespace(get_target_ongoing_requests=lambda: 8.0)
    context = SimpleNamespace(aggregated_metrics=told, target_num_replicas=3, config=config)
    assert wanted(context) == (replicas, {})

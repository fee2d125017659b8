"""Sequences that wait for an engine."""

from __future__ import annotations

import asyncio

import pytest

from serving.engine.messages import GenerationRequest, Origin
from serving.errors import Overloaded
from serving.supervisor.admission import QueueBounds
from serving.supervisor.requests import Requests


def test_a_deadline_passes_where_no_engine_lives_too() -> None:
    async def scenario() -> None:
        requests = Requests(QueueBounds(), slots=2)
        late = requests.admit(GenerationRequest([1], 5, deadline_seconds=0.02))
        patient = requests.admit(GenerationRequest([1], 5))
        requests.end_overdue()
        assert len(requests) == 2
        await asyncio.sleep(0.03)
        requests.end_overdue()
        assert [delta.finish async for delta in late] == ["deadline"]
        assert len(requests) == 1
        patient.cancel()

    asyncio.run(scenario())


def test_a_key_has_its_share_of_the_queue_and_no_more() -> None:
    async def scenario() -> None:
        requests = Requests(QueueBounds(waiting_requests=6), slots=2)
        small, large = Origin("a", 0.25), Origin("b", 0.75)
        for origin, most in ((small, 2), (large, 6)):
            for _ in range(most):
                requests.admit(GenerationRequest([1], 5, origin=origin))
            with pytest.raises(Overloaded, match=f"{most} requests of this key") as refused:
                requests.admit(GenerationRequest([1], 5, origin=origin))
            assert refused.value.kind == "queue_share"

    asyncio.run(scenario())

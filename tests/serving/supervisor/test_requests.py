"""Sequences that wait for an engine."""

from __future__ import annotations

import asyncio

from serving.engine.ipc_messages import GenerationRequest
from serving.supervisor.admission import QueueBounds
from serving.supervisor.inflight_requests import InflightRequests


def test_a_deadline_passes_where_no_engine_lives_too() -> None:
    async def scenario() -> None:
        requests = InflightRequests(QueueBounds(), slots=2)
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

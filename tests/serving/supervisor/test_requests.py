"""Sequences that wait for an engine."""

from __future__ import annotations

import asyncio

import pytest

from serving.engine.ipc_messages import GenerationRequest, Origin
from serving.errors import Overloaded
from serving.supervisor.admission import QueueBounds
from serving.supervisor.inflight_requests import Requests


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


def joined(requests: Requests, owner: str, share: float = 1.0) -> int:
    """How many of an owner's sequences may join before one is refused."""
    for count in range(100):
        try:
            requests.admit(GenerationRequest([1], 5, origin=Origin(owner, share)))
        except Overloaded:
            return count
    raise AssertionError("the queue has no end")


def test_one_client_that_fills_the_queue_leaves_the_others_their_part_of_the_slots() -> None:
    async def scenario() -> None:
        requests = Requests(QueueBounds(waiting_requests=6), slots=4)
        assert joined(requests, "192.0.2.1") == 10, "who is alone has all of it"
        assert joined(requests, "192.0.2.1") == 0
        assert joined(requests, "192.0.2.2") == 2
        assert joined(requests, "192.0.2.3") == 1
        assert [joined(requests, f"198.51.100.{n}") for n in range(20)] == [1, *[0] * 19]
        requests.fail_all("over")
        assert joined(requests, "192.0.2.2") == 10, "nothing is left of those who are gone"

    asyncio.run(scenario())


def test_the_wait_behind_others_is_not_that_of_who_is_next() -> None:
    async def scenario() -> None:
        for share in (1.0, 0.5):
            requests = Requests(QueueBounds(wait_seconds=10.0), slots=2)
            requests.ledger.worked(1, 9, 5.0)  # two tokens a second
            flood = joined(requests, "a", share)
            assert 2 < flood < 10
            assert joined(requests, "a", share) == 0 and joined(requests, "b", share) == 1

    asyncio.run(scenario())


def test_what_is_promised_of_the_first_token_is_promised_to_all() -> None:
    async def scenario() -> None:
        requests = Requests(QueueBounds(ttft_seconds=3.0), slots=2)
        requests.ledger.worked(10, 10, 5.0)
        assert joined(requests, "a") >= 2
        assert joined(requests, "b") == 0

    asyncio.run(scenario())

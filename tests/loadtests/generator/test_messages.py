"""The pipe between runner and load generator: whole messages, whatever pieces they come in."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import msgspec
import pytest

from loadtests.generator.channel import Channel, encode
from loadtests.generator.endpoint import Target
from loadtests.generator.load_plan import LoadPlan
from loadtests.generator.messages import (
    Ended,
    Failed,
    Late,
    Order,
    Recorded,
    Started,
    Stop,
    Told,
    total,
)
from loadtests.generator.option_values import parse_arrivals
from loadtests.records.schema import RequestRecord

RECORD = RequestRecord(cell="c", level="l", index=7, due_seconds=0.5, content_seconds=[0.6] * 50)
TOLD: list[Told] = [Started(1.5), Recorded(RECORD), Late([1, 2]), Ended(due=3), Failed("no")]
PLAN = LoadPlan(
    target=Target(url="http://x"), rate_per_second=2.0, arrivals=parse_arrivals("gamma:cv=3")
)


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, Channel[Told]]]:
    """The load generator's end, raw, and the runner's."""
    its, ours = socket.socketpair()
    with its, ours:
        yield its, Channel(ours, Told)


def test_orders_and_reports_arrive_as_they_were() -> None:
    for union, messages in ((Order, [PLAN, Stop()]), (Told, TOLD)):
        one, other = socket.socketpair()
        with one, other:
            sender: Channel[object] = Channel(one, union)
            receiver: Channel[object] = Channel(other, union)
            for message in messages:
                sender.send(message)  # type: ignore[arg-type]
            assert receiver.receive(1.0) == messages


def test_any_cut_of_the_bytes_loses_at_most_the_message_that_is_cut(
    ends: tuple[socket.socket, Channel[Told]],
) -> None:
    """As a SIGKILL leaves it: the whole messages before the cut are there, then the end."""
    whole = b"".join(encode(message) + b"\n" for message in TOLD)
    for cut in range(len(whole) + 1):
        its, ours = socket.socketpair()
        with ours:
            its.sendall(whole[:cut])
            its.close()
            channel: Channel[Told] = Channel(ours, Told)
            seen = channel.receive(1.0) if cut else []
            assert seen == TOLD[: whole[:cut].count(b"\n")]
            with pytest.raises(EOFError):
                channel.receive(1.0)


def test_bytes_one_by_one_are_the_same_messages(
    ends: tuple[socket.socket, Channel[Told]],
) -> None:
    its, channel = ends
    seen: list[Told] = []
    for byte in b"".join(encode(message) + b"\n" for message in TOLD):
        its.sendall(bytes([byte]))
        seen += channel.receive(1.0)
    assert seen == TOLD and channel.receive(0.0) == []


def test_more_than_the_pipe_holds_waits_for_the_reader() -> None:
    one, other = socket.socketpair()
    with one, other:
        sender: Channel[Order] = Channel(one, Order)
        receiver: Channel[Told] = Channel(other, Told)
        many = [Recorded(msgspec.structs.replace(RECORD, index=i)) for i in range(5000)]
        thread = threading.Thread(target=lambda: [sender.send(message) for message in many])
        thread.start()
        seen: list[Told] = []
        while len(seen) < len(many):
            found = receiver.receive(5.0)
            assert found, "the sender is stuck"
            seen += found
        thread.join()
    assert seen == many


def test_a_plan_with_an_unknown_key_is_refused() -> None:
    with pytest.raises(msgspec.ValidationError, match="unknown field `rate`"):
        msgspec.json.decode(b'{"type":"plan","target":{"url":"http://x"},"rate":2}', type=Order)


def test_accounts_add_up() -> None:
    one = Ended(due=3, recorded=3, gave_up=1, cpu_seconds=0.5, wall_seconds=2.0)
    two = Ended(due=2, recorded=1, stopped_seconds=1.5, cpu_seconds=0.25, wall_seconds=3.0)
    assert total([one, two]) == Ended(
        due=5,
        recorded=4,
        gave_up=1,
        stopped_seconds=1.5,
        cpu_seconds=0.75,
        wall_seconds=3.0,
        processes=2,
        each=[one, two],
    )

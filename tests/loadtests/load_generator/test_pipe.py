"""The pipe between runner and load generator, and several senders that are one."""

from __future__ import annotations

import socket
import threading

import msgspec
import pytest

from loadtests.load_generator.load_options import parse_arrivals
from loadtests.load_generator.load_plan import (
    Begin,
    Ended,
    Failed,
    Late,
    LoadPlan,
    Order,
    Ready,
    Recorded,
    Settled,
    Share,
    Wire,
)
from loadtests.load_generator.locust_process import Conductor, Pipe
from loadtests.load_generator.openai_endpoint import Target
from loadtests.records.request_record import RequestRecord

RECORD = RequestRecord(cell="c", level="l", index=7, due_seconds=0.5, content_seconds=[0.6] * 50)
TOLD: list[Wire] = [Ready("1"), Recorded(RECORD), Late([1, 2]), Ended(due=3), Failed("no")]
PLAN = LoadPlan(target=Target(url="http://x"), rate=2.0, arrivals=parse_arrivals("gamma:cv=3"))
encode = msgspec.json.Encoder().encode


def test_any_cut_of_the_bytes_loses_at_most_the_message_that_is_cut() -> None:
    """As a SIGKILL leaves it: the whole messages before the cut are there, then the end."""
    whole = b"".join(encode(message) + b"\n" for message in TOLD)
    for cut in range(len(whole) + 1):
        its, ours = socket.socketpair()
        with ours:
            its.sendall(whole[:cut])
            its.close()
            pipe: Pipe[Wire] = Pipe(ours, Wire)
            seen = pipe.receive() if cut else []
            assert seen == TOLD[: whole[:cut].count(b"\n")]
            with pytest.raises(EOFError):
                pipe.receive()


def test_more_than_the_pipe_holds_waits_for_the_reader() -> None:
    one, other = socket.socketpair()
    with one, other:
        sender: Pipe[Order] = Pipe(one, Order)
        receiver: Pipe[Wire] = Pipe(other, Wire)
        many = [Recorded(msgspec.structs.replace(RECORD, index=i)) for i in range(5000)]
        thread = threading.Thread(target=lambda: [sender.send(message) for message in many])
        thread.start()
        seen: list[Wire] = []
        while len(seen) < len(many):
            seen += receiver.receive()
        thread.join()
    assert seen == many


def test_several_senders_are_one() -> None:
    sent: dict[str, list[Order]] = {"a": [], "b": []}
    told: list[Wire] = []
    conductor = Conductor({name: orders.append for name, orders in sent.items()}, told.append)
    conductor.obey(Share(PLAN))
    conductor.obey(Begin(1.0))
    assert sent == {"a": [Share(PLAN, 0, 2), Begin(1.0)], "b": [Share(PLAN, 1, 2), Begin(1.0)]}
    one = Ended(due=3, recorded=3, gave_up=1, cpu_seconds=0.5, busy_share=0.1)
    two = Ended(due=2, recorded=1, stopped_seconds=1.5, busy_share=0.2)
    for first, second in ((Ready("1"), Ready("1")), (Settled(), Settled()), (one, two)):
        conductor.take("a", first)
        conductor.take("a", Recorded(RECORD))
        assert told.pop() == Recorded(RECORD) and not isinstance(told[-1:], type(first))
        conductor.take("b", second)
    assert sent["a"].pop() == sent["b"].pop() == Settled(), "all are: each may end its load"
    sums = {"due": 5, "recorded": 4, "gave_up": 1, "cpu_seconds": 0.5}
    assert told == [Ready("1"), Ended(**sums, stopped_seconds=1.5, busy_share=0.2)]


def test_senders_of_different_versions_would_draw_different_requests() -> None:
    told: list[Wire] = []
    conductor = Conductor({"a": lambda order: None, "b": lambda order: None}, told.append)
    conductor.take("a", Ready("numpy 2.0"))
    conductor.take("b", Ready("numpy 2.1"))
    assert told == [Failed("load generators of different versions: numpy 2.0 and numpy 2.1")]

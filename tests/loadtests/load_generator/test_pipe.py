"""The pipe between runner and load generator."""

from __future__ import annotations

import socket
import threading

import msgspec
import pytest

from loadtests.load_generator.load_plan import Ended, Failed, Ready, Recorded, Wire
from loadtests.load_generator.locust_process import Pipe
from loadtests.records.request_record import RequestRecord

RECORD = RequestRecord(cell="c", level="l", index=7, due_seconds=0.5, content_seconds=[0.6] * 50)
TOLD: list[Wire] = [Ready(), Recorded(RECORD), Ended(due=3), Failed("no")]
encode = msgspec.json.Encoder().encode


def test_any_cut_of_the_bytes_loses_at_most_the_message_that_is_cut() -> None:
    """As a SIGKILL leaves it: the whole messages before the cut are there, then the end."""
    whole = b"".join(encode(message) + b"\n" for message in TOLD)
    for cut in range(len(whole) + 1):
        its, ours = socket.socketpair()
        with ours:
            its.sendall(whole[:cut])
            its.close()
            pipe = Pipe(ours, Wire)
            seen = pipe.receive() if cut else []
            assert seen == TOLD[: whole[:cut].count(b"\n")]
            with pytest.raises(EOFError):
                pipe.receive()


def test_more_than_the_pipe_holds_waits_for_the_reader() -> None:
    one, other = socket.socketpair()
    with one, other:
        sender, receiver = Pipe(one, Wire), Pipe(other, Wire)
        many = [Recorded(msgspec.structs.replace(RECORD, index=i)) for i in range(5000)]
        thread = threading.Thread(target=lambda: [sender.send(message) for message in many])
        thread.start()
        seen: list[Wire] = []
        while len(seen) < len(many):
            seen += receiver.receive()
        thread.join()
    assert seen == many

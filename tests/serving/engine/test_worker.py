"""The engine child as it runs in the product: a real process, a real socket, the fake backend."""

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest

from crossover.models.text.tokenizer import load_tokenizer
from crossover.serving.engine.ipc_messages import (
    CONFIG_VARIABLE,
    RECEIVED_VARIABLE,
    SOCKET_VARIABLE,
    Cancel,
    Delta,
    Died,
    Frames,
    FromEngine,
    GenerationRequest,
    Loading,
    Ready,
    Step,
    Stop,
    Submit,
    decode_from_engine,
    frame,
)
from crossover.serving.sampling.step_inputs import Sampling
from crossover.serving.supervisor.inflight_requests import merged
from tests.fake_backend import continuation
from tests.tools.with_settings import engine_config

VOCABULARY = 8192


class Child:
    """One engine child and its parent's end of the socket."""

    def __init__(self, tokenizer: str, **changes: Any) -> None:
        config = engine_config(
            backend="fake", model_path="", model_name="fake", tokenizer_path=tokenizer, **changes
        )
        self.socket, theirs = socket.socketpair()
        self.received = os.eventfd(0)
        self._log = tempfile.TemporaryFile("w+")
        environment = {
            **os.environ,
            CONFIG_VARIABLE: msgspec.json.encode(config).decode(),
            SOCKET_VARIABLE: str(theirs.fileno()),
            RECEIVED_VARIABLE: str(self.received),
        }
        self.process = subprocess.Popen(
            [sys.executable, "-m", "crossover.serving.engine.engine_loop"],
            env=environment,
            pass_fds=[theirs.fileno(), self.received],
            stderr=self._log,
        )
        theirs.close()
        self.socket.settimeout(20)
        self._frames = Frames()
        self._waiting: list[FromEngine] = []

    def send(self, *messages: Submit | Cancel | Stop) -> None:
        self.socket.sendall(b"".join(frame(message) for message in messages))

    def next(self) -> FromEngine:
        while not self._waiting:
            data = self.socket.recv(1 << 16)
            if not data:
                raise EOFError(self.log())
            self._waiting += [decode_from_engine(body) for body in self._frames.feed(data)]
        return self._waiting.pop(0)

    def until(self, kind: type) -> Any:
        while not isinstance(message := self.next(), kind):
            pass
        return message

    def log(self) -> str:
        self._log.seek(0)
        return self._log.read()

    def close(self) -> None:
        self.socket.close()
        os.close(self.received)
        self.process.kill()
        self.process.wait()
        self._log.close()


@pytest.fixture
def start(shipped_tokenizer: str) -> Iterator[Callable[..., Child]]:
    children: list[Child] = []

    def make(**changes: Any) -> Child:
        children.append(Child(shipped_tokenizer, **changes))
        return children[-1]

    yield make
    for child in children:
        child.close()


def ended(child: Child) -> dict[int, Delta]:
    """All of each sequence, until the child ends."""
    found: dict[int, list[Delta]] = {}
    with contextlib.suppress(EOFError):
        while True:
            for delta in child.until(Step).deltas:
                found.setdefault(delta.id, []).append(delta)
    return {number: merged(deltas) for number, deltas in found.items()}


def test_it_loads_serves_and_finishes_what_is_in_flight(
    start: Callable[..., Child], shipped_tokenizer: str
) -> None:
    child = start(slots=4, options={"load_seconds": 0.1})
    assert isinstance(child.next(), Loading)
    ready: Ready = child.until(Ready)
    assert (
        ready.info.settings.slots == 4 and ready.load_seconds >= 0.1 and ready.rss_bytes > 1 << 20
    )
    prompts = {number: [10 + number, 11, 12] for number in range(6)}
    child.send(*(Submit(number, GenerationRequest(one, 20)) for number, one in prompts.items()))
    child.send(Stop(drain=True))
    found = ended(child)
    table = load_tokenizer(shipped_tokenizer).token_bytes()
    table += [b""] * (VOCABULARY - len(table))
    for number, prompt in prompts.items():
        text = b"".join(table[token] for token in continuation(prompt, 20)).decode(errors="replace")
        assert (found[number].tokens, found[number].finish) == (20, "length")
        assert found[number].text == text
    assert child.process.wait(10) == 0


def test_cancel_reaches_a_running_sequence(start: Callable[..., Child]) -> None:
    child = start(options={"step_seconds": 0.01})
    child.until(Ready)
    child.send(Submit(1, GenerationRequest([5], 2000)))
    child.until(Step)
    child.send(Cancel(1), Stop(drain=True))
    assert ended(child)[1].finish == "cancelled"


@pytest.mark.parametrize(
    ("fail", "at_load"), [("load_oom", True), ("load_failed", True), ("runtime_oom", False)]
)
def test_a_failure_is_reported_before_the_end(
    start: Callable[..., Child], fail: str, at_load: bool
) -> None:
    child = start(options={"fail_cause": fail, "fail_after_steps": 3})
    if not at_load:
        child.until(Ready)
        child.send(Submit(1, GenerationRequest([5], 50)))
    died: Died = child.until(Died)
    assert died.cause == fail and "told to" in died.message
    assert child.process.wait(10) == 2


def test_an_unknown_option_ends_the_load_with_its_name(start: Callable[..., Child]) -> None:
    died: Died = start(options={"speed": 9}).until(Died)
    assert "'speed'" in died.message


def test_a_grammar_that_cannot_be_used_is_refused_and_harms_nobody(
    start: Callable[..., Child],
) -> None:
    child = start()
    child.until(Ready)
    bad = Sampling(json_schema='{"type":"colour"}')
    child.send(Submit(1, GenerationRequest([5], 3, bad)), Submit(2, GenerationRequest([5], 30)))
    child.send(Submit(3, GenerationRequest([5], 3, bad)), Cancel(3), Stop(drain=True))
    found = ended(child)
    assert (found[2].finish, found[3].finish) == ("length", "cancelled")
    why = "The JSON schema cannot be used: type: 'colour' is not a JSON Schema type"
    refused = found[1].finish, found[1].error, found[1].parameter
    assert refused == ("refused", why, "response_format")
    assert child.process.wait(10) == 0


def test_a_short_schema_does_not_wait_for_long_ones(start: Callable[..., Child]) -> None:
    child = start()
    child.until(Ready)
    names = {f"k{i}": {"type": "string"} for i in range(1500)}
    long_ones = [
        Sampling(json_schema=json.dumps({"properties": names | {f"x{i}": {}}})) for i in range(6)
    ]
    short = Sampling(json_schema='{"type":"integer"}')
    for number, sampling in enumerate([*long_ones, short], 1):
        child.send(Submit(number, GenerationRequest([5], 1, sampling)))
    child.send(Stop(drain=True))
    order = [*ended(child)]
    assert len(order) == 7 and order.index(7) < 3, order


def test_it_ends_when_the_parent_is_gone(start: Callable[..., Child]) -> None:
    child = start()
    child.until(Ready)
    child.socket.close()
    assert child.process.wait(10) == 1

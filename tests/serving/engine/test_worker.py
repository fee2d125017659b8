"""The engine child as it runs in the product: a real process, a real socket, the fake backend."""

import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest

from serving.backends.backend_interface import EngineConfig
from serving.engine.engine_loop import CONFIG_VARIABLE, SOCKET_VARIABLE
from serving.engine.ipc_messages import (
    Cancel,
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
from serving.sampling.step_rows import Sampling
from tests.fake_backend import continuation

VOCABULARY = 8192


class Child:
    """One engine child and its parent's end of the socket."""

    def __init__(self, tokenizer: str, **changes: Any) -> None:
        config = EngineConfig(
            backend="fake", model_path="", model_name="fake", tokenizer_path=tokenizer, **changes
        )
        self.socket, theirs = socket.socketpair()
        self._log = tempfile.TemporaryFile("w+")
        environment = {
            **os.environ,
            CONFIG_VARIABLE: msgspec.json.encode(config).decode(),
            SOCKET_VARIABLE: str(theirs.fileno()),
        }
        self.process = subprocess.Popen(
            [sys.executable, "-m", "serving.engine.engine_loop"],
            env=environment,
            pass_fds=[theirs.fileno()],
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


def test_it_loads_serves_and_stops(start: Callable[..., Child]) -> None:
    child = start(slots=4, options={"load_seconds": 0.1})
    assert isinstance(child.next(), Loading)
    ready: Ready = child.until(Ready)
    assert ready.info.slots == 4 and ready.load_seconds >= 0.1 and ready.rss_bytes > 1 << 20
    prompts = {number: [10 + number, 11, 12] for number in range(6)}
    child.send(
        *(Submit(number, GenerationRequest(prompt, 20)) for number, prompt in prompts.items())
    )
    counts = dict.fromkeys(prompts, 0)
    finished = {}
    while len(finished) < 6:
        step: Step = child.until(Step)
        assert step.stats.running <= 4
        for delta in step.deltas:
            counts[delta.id] += delta.tokens
            if delta.finish:
                finished[delta.id] = delta.finish
    assert counts == dict.fromkeys(prompts, 20) and set(finished.values()) == {"length"}
    child.send(Stop())
    assert child.process.wait(10) == 0


def test_stop_with_drain_finishes_what_is_in_flight(start: Callable[..., Child]) -> None:
    child = start(options={"step_seconds": 0.005})
    child.until(Ready)
    child.send(Submit(1, GenerationRequest([5], 30)), Stop(drain=True))
    finishes = []
    with pytest.raises(EOFError):
        while True:
            finishes += [delta.finish for delta in child.until(Step).deltas if delta.finish]
    assert finishes == ["length"]
    assert child.process.wait(10) == 0


def test_cancel_reaches_a_running_sequence(start: Callable[..., Child]) -> None:
    child = start(options={"step_seconds": 0.01})
    child.until(Ready)
    child.send(Submit(1, GenerationRequest([5], 2000)))
    child.until(Step)
    child.send(Cancel(1))
    while not (finishes := [delta.finish for delta in child.until(Step).deltas if delta.finish]):
        pass
    assert finishes == ["cancelled"]


@pytest.mark.parametrize(
    ("fail", "cause", "at_load"),
    [
        ("load_oom", "load_oom", True),
        ("load_failed", "load_failed", True),
        ("runtime_oom", "runtime_oom", False),
        ("engine_died", "engine_died", False),
    ],
)
def test_a_failure_is_said_before_the_end(
    start: Callable[..., Child], fail: str, cause: str, at_load: bool
) -> None:
    child = start(options={"fail_cause": fail, "fail_after_steps": 3})
    if not at_load:
        child.until(Ready)
        child.send(Submit(1, GenerationRequest([5], 50)))
    died: Died = child.until(Died)
    assert died.cause == cause
    assert "told to" in died.message
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
    finished: dict[int, tuple[str, str | None, str | None]] = {}
    while len(finished) < 2:
        for delta in child.until(Step).deltas:
            if delta.finish is not None:
                finished[delta.id] = (delta.finish, delta.error, delta.parameter)
    assert finished[2] == ("length", None, None)
    why = "the JSON schema cannot be used: Invalid type: colour"
    assert finished[1] == ("refused", why, "response_format")


def test_it_ends_when_the_parent_is_gone(start: Callable[..., Child]) -> None:
    child = start()
    child.until(Ready)
    child.socket.close()
    assert child.process.wait(10) == 1


def test_the_fake_continuation_is_what_the_child_streams(
    start: Callable[..., Child], shipped_tokenizer: str
) -> None:
    from models.tokenizer import load_tokenizer

    table = load_tokenizer(shipped_tokenizer).token_bytes()
    table += [b""] * (VOCABULARY - len(table))
    child = start()
    child.until(Ready)
    child.send(Submit(1, GenerationRequest([40, 50], 12)))
    text, finished = "", False
    while not finished:
        for delta in child.until(Step).deltas:
            text, finished = text + delta.text, delta.finish is not None
    assert text == b"".join(table[token] for token in continuation([40, 50], 12)).decode(
        "utf-8", "replace"
    )

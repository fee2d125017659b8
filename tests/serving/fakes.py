"""A supervisor without an engine, for tests of the HTTP side: answers are scripted, and everything
that was asked is kept.

It has what the HTTP side uses of a Supervisor, streams are the real
crossover.serving.supervisor.inflight_requests.Stream, and `push` plays the engine. By default each
sequence is answered by itself, one delta per turn of the event loop; with `by_hand` a test pushes
them.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import uvicorn
from prometheus_client.parser import text_string_to_metric_families

from crossover.models.text.chat_template import CHATML, RendersChat
from crossover.models.text.template_process import TemplateProcess
from crossover.serving.backends.backend_interface import BackendInfo, EngineConfig
from crossover.serving.capacity.scheduler_settings import SchedulerSettings
from crossover.serving.engine.ipc_messages import (
    Delta,
    FinishReason,
    GenerationRequest,
    Ready,
    StepStats,
    TokenDetail,
)
from crossover.serving.errors import EngineState, Overloaded, Unavailable
from crossover.serving.http.http_server import server_options
from crossover.serving.http.routes import App
from crossover.serving.metrics import PREFIX, Metrics, ServerMetrics
from crossover.serving.registry.model_loader import RegistryLimits
from crossover.serving.registry.registry import Registry
from crossover.serving.registry.served_model import ServedModel, Vocabulary
from crossover.serving.sampling.step_inputs import Sampling
from crossover.serving.supervisor.admission import QueueBounds
from crossover.serving.supervisor.engine_supervisor import Supervisor
from crossover.serving.supervisor.inflight_requests import InflightRequests, Stream

INFO = BackendInfo(
    name="fake",
    device="cpu",
    device_name="no device",
    settings=SchedulerSettings(slots=4, context_tokens=256, kv_tokens=1024, step_tokens=64),
    vocabulary=300,
    weight_format="none",
    details={"library": "/opt/secret/libfake.so"},
)


class ByteTokenizer(RendersChat):
    """Each byte is a token; 256 ends a text, 257 and 258 are the marks of a chat."""

    vocabulary = 259
    eos_ids = frozenset({256})
    special_ids = frozenset({256, 257, 258})
    chat_tokens: dict[str, str] = {}
    # One for all tests, since each takes 0.1 s to start; what templates show is found once.
    templates = TemplateProcess()
    _forms: dict[Any, Any] = {}
    _calls_forms: dict[Any, Any] = {}
    _tools_shown: dict[Any, Any] = {}
    _marks = {"<|im_start|>": 257, "<|im_end|>": 258}

    def __init__(self, bos_id: int | None = None, template: str | None = CHATML) -> None:
        self.bos_id, self.chat_template = bos_id, template

    def encode(self, text: str, *, parse_special: bool = False) -> list[int]:
        ids: list[int] = []
        while parse_special and text:
            at, mark = min(((text.find(m), m) for m in self._marks if m in text), default=(-1, ""))
            if at < 0:
                break
            ids += [*text[:at].encode(), self._marks[mark]]
            text = text[at + len(mark) :]
        return [*ids, *text.encode()]

    def token_bytes(self) -> list[bytes]:
        return [bytes([byte]) for byte in range(256)] + [b"", b"", b""]

    def token_text(self, token: int) -> str:
        marks = {number: mark for mark, number in self._marks.items()} | {256: "<|end|>"}
        return marks.get(token, chr(token))


class FakeSupervisor:
    """See the module's docstring."""

    def __init__(
        self,
        words: Sequence[str] = ("Hello", ", ", "world"),
        *,
        by_hand: bool = False,
        info: BackendInfo = INFO,
    ) -> None:
        self.words, self.by_hand = list(words), by_hand
        self.state = EngineState.ready
        self.reason: str | None = None
        self.ready: Ready | None = Ready(info, 1.5, 10_000, 20_000)
        self.requests = InflightRequests(QueueBounds(), info.settings.slots)
        self.requests.stats = StepStats(1, 2, 100, 0.01, 0.008, 1, 0, 3)
        self.config = EngineConfig(
            "fake",
            "/models/secret.gguf",
            "m",
            settings=info.settings,
        )
        self.restarts = self.fallbacks = self.bridges = self.returns = 0
        self.deaths: dict[str, int] = {}
        self.events: list[Any] = []
        self.submitted: list[GenerationRequest] = []
        self.streams: dict[int, Stream] = {}
        self.cancelled: list[int] = []
        self.refuse_after: int | None = None
        self.refusal: Unavailable | Overloaded = Overloaded(
            "the queue is full", 2.4, "queue_requests"
        )
        self.pids: list[int] = []
        self.engines: list[Any] = []
        self.engine_pid: int | None = None
        self.pause_seconds = 0.0  # before each word
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop: asyncio.AbstractEventLoop

    @property
    def serving_pids(self) -> list[int]:
        return [] if self.engine_pid is None else [self.engine_pid]

    @property
    def label(self) -> str:
        return f"{self.config.backend}/{self.config.device}"

    def retry_after_seconds(self) -> float:
        return 2.5

    def unavailable(self) -> Unavailable:
        return Unavailable(self.reason or self.state, 2.5, self.state)

    def submit(self, request: GenerationRequest, arrived: asyncio.Event | None = None) -> Stream:
        if self.state != "ready":
            raise self.unavailable()
        if self.refuse_after is not None and len(self.submitted) >= self.refuse_after:
            raise self.refusal
        self._loop = asyncio.get_running_loop()
        self.submitted.append(request)
        stream = Stream(len(self.submitted), request, self._cancel, 0.0, arrived)
        self.streams[stream.id] = stream
        if not self.by_hand:
            task = asyncio.ensure_future(self._answer(stream))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return stream

    def push(
        self, sequence: int, text: str, finish: str | None = None, tokens: int = 1, **more: Any
    ) -> None:
        """Play the engine: one delta of one sequence. From the event loop's thread."""
        self.streams[sequence].push(
            Delta(sequence, tokens, text, None if finish is None else FinishReason(finish), **more)
        )

    def push_soon(
        self, sequence: int, text: str, finish: str | None = None, tokens: int = 1, **more: Any
    ) -> None:
        """The same from the test's thread, once the sequence has been submitted."""
        wait_until(lambda: sequence in self.streams)
        self._loop.call_soon_threadsafe(lambda: self.push(sequence, text, finish, tokens, **more))

    async def _answer(self, stream: Stream) -> None:
        words = self.words[: stream.request.max_tokens]
        for place, word in enumerate(words):
            await asyncio.sleep(self.pause_seconds)
            finish = (
                None
                if place + 1 < len(words)
                else "stop"
                if len(words) == len(self.words)
                else "length"
            )
            first: dict[str, Any] = (
                {"cached_tokens": 2, "queue_seconds": 0.001, "prefill_seconds": 0.002}
                if place == 0
                else {}
            )
            self.push(
                stream.id, word, finish, details=_details(word, stream.request.sampling), **first
            )

    def _cancel(self, sequence: int) -> None:
        self.cancelled.append(sequence)
        self.push(sequence, "", "cancelled", 0)


def _details(word: str, sampling: Sampling) -> list[TokenDetail]:
    if sampling.logprobs is None:
        return []
    token = word.encode()[0]
    logprob = -0.5 if sampling.seed % 2 == 0 else -0.125
    return [
        TokenDetail(
            token,
            logprob,
            [token, 256][: sampling.logprobs],
            [-0.5, float("-inf")][: sampling.logprobs],
        )
    ]


class _ShortPauses:
    """asyncio, but for the tenth of a second between two of uvicorn's looks whether it should end:
    hundreds of tests would wait for it.
    """

    def __getattr__(self, name: str) -> Any:
        return getattr(asyncio, name)

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(min(seconds, 0.002))


uvicorn.server.asyncio = _ShortPauses()  # type: ignore[assignment,attr-defined]


@contextmanager
def served(
    app: Any,
    supervisor: Supervisor | None = None,
) -> Iterator[int]:
    """The app behind a real uvicorn in a thread of its own; gives the port.

    `supervisor`: a real one, started with the server and drained when it ends.
    """
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(256)
        server = uvicorn.Server(uvicorn.Config(app, **server_options()))
        started, stop_requested = threading.Event(), asyncio.Event()
        loops: list[asyncio.AbstractEventLoop] = []
        failures: list[BaseException] = []

        async def run_until_stopped() -> (
            None
        ):  # uvicorn's own loop looks ten times a second whether it shall end: too slow for tests
            loops.append(asyncio.get_running_loop())
            if supervisor is not None:
                await supervisor.start()
            started.set()
            await stop_requested.wait()
            if supervisor is not None:
                await supervisor.stop(drain=True, timeout_seconds=2.0)

        def run() -> None:
            try:
                server.run(sockets=[listener])
            except BaseException as problem:  # shown by the test, not by the thread
                failures.append(problem)
            started.set()

        server.main_loop = run_until_stopped  # type: ignore[method-assign]
        thread = threading.Thread(target=run)
        thread.start()
        started.wait(20)
        try:
            if failures:
                raise failures[0]
            assert loops, "the server did not start"
            yield listener.getsockname()[1]
        finally:
            if loops:
                loops[0].call_soon_threadsafe(stop_requested.set)
            thread.join(15)
            assert not thread.is_alive()


def app_on(
    supervisor: Any,
    *,
    tokenizer: Any = None,
    api_key: str | None = None,
    placement: Any = None,
    name: str = "m",
) -> App:
    """The app over one supervisor (a fake one, or not), by default with a byte tokenizer."""
    nothing: Any = None  # is placed or loaded here
    registry = Registry(ServerMetrics(), nothing, nothing, RegistryLimits())
    registry.loader.is_stopping = True  # so that no request loads the model
    metrics = Metrics(registry.metrics, name, supervisor)
    tokenizer = tokenizer or ByteTokenizer()
    tokenizer.try_forms()
    vocabulary = Vocabulary(tokenizer, tokenizer.token_bytes())
    model = ServedModel(supervisor, vocabulary, metrics)
    model.placement_report = lambda: placement  # type: ignore[method-assign]
    registry.add(model)
    return App(registry, api_key)


def wait_until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    """Wait for what another thread does; fails the test when it never does."""
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "it never happened"
        time.sleep(0.002)


@dataclass
class Answer:
    """One HTTP answer, read to its end. Header names are lower case."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        found = self.json
        assert set(found) == {"error"} and {"message", "type", "param", "code"} <= set(
            found["error"]
        )
        detail: dict[str, Any] = found["error"]
        return detail

    @property
    def events(self) -> list[Any]:
        """The data of each server-sent event; "[DONE]" as it is."""
        assert self.headers["content-type"].startswith("text/event-stream")
        found = [part.removeprefix(b"data: ") for part in self.body.split(b"\n\n") if part]
        return ["[DONE]" if part == b"[DONE]" else json.loads(part) for part in found]


def ask(
    port: int, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None
) -> Answer:
    """One request on a connection of its own. `body`: bytes as they are, anything else as JSON."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        kind = {} if body is None else {"Content-Type": "application/json"}
        connection.request(method, path, data, {**kind, **(headers or {})})
        response = connection.getresponse()
        return Answer(
            response.status, {k.lower(): v for k, v in response.getheaders()}, response.read()
        )
    finally:
        connection.close()


def chat(port: int, headers: Mapping[str, str] | None = None, **fields: Any) -> Answer:
    """A chat of one user turn, unless `messages` says otherwise."""
    return ask(
        port,
        "POST",
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "hi"}], **fields},
        headers,
    )


def complete(port: int, headers: Mapping[str, str] | None = None, **fields: Any) -> Answer:
    return ask(port, "POST", "/v1/completions", {"prompt": "hi", **fields}, headers)


def scraped(data: bytes) -> dict[tuple[str, ...], float]:
    """(name without prefix, label values but the model's...) -> value."""
    found = {}
    for family in text_string_to_metric_families(data.decode()):
        for sample in family.samples:
            labels = [value for key, value in sorted(sample.labels.items()) if key != "model_name"]
            found[sample.name.removeprefix(f"{PREFIX}_"), *labels] = sample.value
    return found

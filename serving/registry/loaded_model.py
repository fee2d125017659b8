"""One model of the server, loaded or not. ServedModel: what all requests for it share. Tenant: its
files, its engines, who uses it, what memory it takes. ModelRouter: which model a request goes to.

router = ModelRouter(ServerMetrics())
router.add(ServedModel(supervisor, read_vocabulary(path), metrics))
served_model, release = await router.acquire(name)     # loads the model where it may
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeVar

import msgspec

from models.errors import BadChat
from models.tokenizer import Tokenizer, load_tokenizer
from serving.backends.backend_interface import BackendInfo, EngineConfig
from serving.errors import (
    ContextOverflow,
    EngineState,
    ModelNotNamed,
    Overloaded,
    TextTooLong,
    Unavailable,
    UnknownModel,
)
from serving.hardware.machine_facts import resident_bytes
from serving.metrics import Metrics, ServerMetrics
from serving.placement.placement_policy import Attempt, Placement, explain
from serving.registry.engine_config import Prepared
from serving.registry.eviction import Resident
from serving.supervisor.supervisor import Supervisor

T = TypeVar("T")
MOST_CHARACTERS = 8 << 20  # of all texts at work and waiting: 2 s of one core, 10 s at the worst
INLINE_CHARACTERS = 4096  # longer texts are tokenised in a thread, so that others do not wait
LONGEST_TEXT = 1 << 20  # bytes of UTF-8; more where the context is longer than usual
CONTEXT_BYTES = 16  # of a text, for each token of the context
_LONGEST_SPECIAL = 64  # bytes of text of a control token; the table of bytes does not say
_NAMES_SHOWN = 8
RETRY_FIRST_SECONDS = 5.0  # between loads of a model that does not load or keeps dying
RETRY_LONGEST_SECONDS = 300.0
RETRY_FORGET_SECONDS = 600.0  # of life after which the pause begins with the shortest again


class TextWork:
    """Work on texts beside the event loop: a thread, and a queue bounded in characters."""

    def __init__(self, most: int = MOST_CHARACTERS) -> None:
        self._pool = ThreadPoolExecutor(1, "text")
        self._most = most
        self.characters = 0  # at work and waiting

    async def run(self, size: int, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """The function's result. `size`: characters of its text. Raises Overloaded."""
        if self.characters and self.characters + size > self._most:
            text = f"{self.characters} characters of prompts wait to be tokenised"
            raise Overloaded(text, 1.0, "queue_text")
        self.characters += size
        try:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._pool, partial(function, *args, **kwargs))
        finally:
            self.characters -= size


TEXT_WORK = TextWork()


class Facts(msgspec.Struct, frozen=True):
    """What validation needs to know of an engine."""

    backend: str
    context_tokens: int
    vocabulary: int
    capabilities: frozenset[str]

    @classmethod
    def of(cls, info: BackendInfo) -> Facts:
        """Of a loaded backend. One sequence has the whole KV pool at most."""
        context = min(info.context_tokens, info.kv_tokens)
        return cls(info.name, context, info.vocabulary, info.capabilities)

    @classmethod
    def expected(cls, config: EngineConfig, vocabulary: int) -> Facts:
        """Of an engine that is not loaded, for routes that need none, such as /tokenize."""
        tokens = config.kv_tokens or config.slots * config.context_tokens
        return cls(config.backend, min(config.context_tokens, tokens), vocabulary, frozenset())


class Vocabulary(NamedTuple):
    """A tokenizer, and the bytes of each token."""

    tokenizer: Tokenizer
    table: list[bytes]


def read_vocabulary(tokenizer_path: str) -> Vocabulary:
    """Load a tokenizer: 1 to 3 s for 128,000 tokens. Raises ModelError."""
    tokenizer = load_tokenizer(tokenizer_path)
    with suppress(BadChat):  # compiles the template
        tokenizer.render_chat([{"role": "user", "content": ""}])
    return Vocabulary(tokenizer, tokenizer.token_bytes())


class ServedModel:
    """What all requests for one model share. `placement`: why it runs where it runs."""

    def __init__(
        self,
        supervisor: Supervisor,
        vocabulary: Vocabulary,
        metrics: Metrics,
        placement: Any = None,
    ) -> None:
        self.supervisor = supervisor
        self.tokenizer, self.table = vocabulary
        self.served_name = metrics.model
        self.metrics = metrics
        self.placement = placement
        supervisor.on_step = metrics.stepped
        self.created = int(time.time())
        self._longest = max(_LONGEST_SPECIAL, max(map(len, self.table), default=0))

    def facts(self) -> Facts:
        """What the serving engine can do. Raises Unavailable while none serves."""
        ready = self.supervisor.ready
        if self.supervisor.state != EngineState.ready or ready is None:
            raise self.unavailable(self.supervisor.reason)
        return Facts.of(ready.info)

    def known_facts(self) -> Facts:
        """The same, as far as the configuration tells while no engine serves."""
        ready = self.supervisor.ready
        if ready is not None:
            return Facts.of(ready.info)
        return Facts.expected(self.supervisor.config, self.tokenizer.vocabulary)

    def unavailable(self, reason: str | None) -> Unavailable:
        """`reason`: of the supervisor, as far as whoever asks may know it."""
        state = self.supervisor.state
        text = f"the model is not served at the moment ({state}): {reason or 'no reason given'}"
        return Unavailable(text, self.supervisor.retry_after_seconds(), state)

    async def tokens(
        self,
        text: str,
        parameter: str,
        *,
        most: int | None = None,
        bos: bool = False,
        parse_special: bool = False,
    ) -> list[int]:
        """Token ids of a text. Raises ContextOverflow where there must be more than `most`,
        TextTooLong, Overloaded."""
        encode = self.tokenizer.encode
        if len(text) > INLINE_CHARACTERS:
            fewest = len(text) // self._longest
            if most is not None and fewest > most:
                raise ContextOverflow(fewest, None, most, parameter, at_least=True)
            longest = max(LONGEST_TEXT, CONTEXT_BYTES * self.known_facts().context_tokens)
            size = len(text) if text.isascii() else len(text.encode(errors="replace"))
            if size > longest:
                raise TextTooLong(f"{size} bytes; {longest} are allowed", parameter)
            ids = await TEXT_WORK.run(len(text), encode, text, parse_special=parse_special)
        else:
            ids = encode(text, parse_special=parse_special)
        head = self.tokenizer.bos_id
        return [head, *ids] if bos and head is not None else ids

    def bytes_of(self, token: int) -> bytes:
        """The bytes of a token; none of control tokens."""
        return self.table[token] if token < len(self.table) else b""

    async def text_of(self, tokens: Sequence[int], skip_special: bool = True) -> str:
        """Text of token ids; a character that is cut is U+FFFD. `skip_special`: control tokens have
        no text."""

        def text() -> str:
            data = [self.bytes_of(token) for token in tokens]
            if not skip_special:
                for place, token in enumerate(tokens):
                    if token in self.tokenizer.special_ids:
                        data[place] = self.tokenizer.token_text(token).encode()
            return b"".join(data).decode("utf-8", "replace")

        return (
            text() if len(tokens) <= INLINE_CHARACTERS else await TEXT_WORK.run(len(tokens), text)
        )


class Tenant:
    """One model of the server. Times are time.monotonic(), but `used_unix`."""

    def __init__(
        self, prepared: Prepared, served_model: ServedModel, supervisor: Supervisor
    ) -> None:
        self.prepared = prepared
        self.served_model = served_model
        self.supervisor = supervisor
        self.placement: Placement = prepared.placement
        self.holders = 0  # requests that are being answered
        self.used_at = time.monotonic()
        self.used_unix: float | None = None
        self.loaded_at: float | None = None
        self.on_demand = True  # a request may load it
        self.doing: str | None = None  # what a load is at, where no engine says it
        self.load: asyncio.Task[None] | None = None
        self.failures = 0
        self.retry_at = 0.0  # of a model that failed; 0.0: it has not
        self.problem: str | None = None  # why the last load failed

    @property
    def name(self) -> str:
        return self.prepared.name

    @property
    def state(self) -> EngineState:
        """The supervisor's state; loading, too, where an asked-for load has not begun."""
        state = self.supervisor.state
        waits = state in (EngineState.unloaded, EngineState.failed) and self.load is not None
        return EngineState.loading if waits else state

    @property
    def busy(self) -> bool:
        """True while it must not be evicted: requests are in flight, or it is loading."""
        return self.holders > 0 or self.supervisor.in_flight > 0 or self.load is not None

    @property
    def given_up(self) -> bool:
        """True when it is not served, and no request changes that."""
        return self.supervisor.state == EngineState.failed and self.load is None

    def progress(self) -> tuple[str, float | None] | None:
        """What a load is at, and its fraction 0..1 where it is known; None: nothing."""
        loading = self.supervisor.loading
        if self.supervisor.state == EngineState.loading and loading is not None:
            return loading.what, loading.fraction
        return None if self.doing is None else (self.doing, None)

    def touch(self) -> None:
        """It is in use now."""
        self.used_at = time.monotonic()
        self.used_unix = time.time()

    def hold(self) -> Callable[[], None]:
        """A request uses it from now on, until the returned function is called."""
        self.holders += 1
        self.touch()
        held = True

        def release() -> None:
            nonlocal held
            if held:
                held = False
                self.holders -= 1
                self.touch()

        return release

    def check_may_load(self) -> None:
        """Raises Unavailable where a request may not load it."""
        if not self.on_demand:
            text = f"the model {self.name!r} was unloaded by an administrator"
            raise Unavailable(text, 30.0, "unloaded")
        wait = self.retry_at - time.monotonic()
        if self.load is None and wait > 0:
            text = f"the model {self.name!r} did not load: {self.problem or 'no reason given'}"
            raise Unavailable(text, wait, "load_failed")

    def loaded(self) -> None:
        """A load has succeeded."""
        self.retry_at = 0.0
        self.problem = None
        self.used_at = self.loaded_at = time.monotonic()

    def failed(self, problem: str) -> None:
        """A load has failed, or its engines kept dying: the pause before the next load doubles."""
        now = time.monotonic()
        if self.loaded_at is not None and now - self.loaded_at > RETRY_FORGET_SECONDS:
            self.failures = 0
        pause = min(RETRY_LONGEST_SECONDS, RETRY_FIRST_SECONDS * 2.0**self.failures)
        self.failures += 1
        self.retry_at = now + pause
        self.problem = problem

    def give_up_waiting(self) -> None:
        """End a load that has not begun; one whose engine runs ends with the engine."""
        if self.load is not None and self.doing is not None:
            self.load.cancel()

    def about(self) -> dict[str, Any]:
        """The decision where it runs, in numbers and in words, for /v1/placement."""
        return {**msgspec.to_builtins(self.placement), "lines": explain(self.placement)}

    def attempts(self) -> Iterator[Attempt]:
        """The placements of the engines that are or will be loaded: in use, and on standby."""
        warm = self.prepared.model.standby == "warm"
        configs = self.supervisor.configs[:2] if warm else (self.supervisor.config,)
        for config in configs:
            for attempt in self.placement.attempts[:2]:
                if (attempt.backend, attempt.device) == (config.backend, config.device):
                    yield attempt

    @property
    def measured_bytes(self) -> int:
        """RSS of its engine processes now."""
        return sum(resident_bytes(pid) or 0 for pid in self.supervisor.pids)

    def as_resident(self) -> tuple[Resident, int]:
        """What its end would free, and the bytes of RAM it was promised and has not touched yet."""
        takes: dict[str, int] = {}
        for attempt in self.attempts():
            takes[attempt.place] = takes.get(attempt.place, 0) + attempt.need_bytes
        promised = 0
        if "cpu" in takes:
            measured = self.measured_bytes
            promised = max(0, takes["cpu"] - measured)
            takes["cpu"] = max(takes["cpu"], measured)
        return Resident(self.name, takes, self.used_at, self.busy), promised


class Keeper(Protocol):
    """Loads models on demand and unloads none in use: serving.registry.model_registry.Registry."""

    async def hold(self, name: str) -> Callable[[], None]: ...

    def states(self) -> dict[str, EngineState]: ...


class ModelRouter:
    """The models of one server. Without a keeper, nothing is loaded on demand."""

    def __init__(self, metrics: ServerMetrics) -> None:
        self.metrics = metrics
        self.models: dict[str, ServedModel] = {}
        self.keeper: Keeper | None = None

    def add(self, served_model: ServedModel) -> None:
        """One more model."""
        self.models[served_model.served_name] = served_model
        self.metrics.add(served_model.metrics)

    @property
    def slot_tokens(self) -> int:
        """Tokens that all sequences of a model can have together, of the largest model."""
        configs = (one.supervisor.config for one in self.models.values())
        return max((one.slots * one.context_tokens for one in configs), default=0)

    @property
    def first(self) -> ServedModel:
        """The model that is meant where none is named."""
        return next(iter(self.models.values()))

    def named(self, model: str | None) -> ServedModel:
        """The model of this name. Raises UnknownModel, ModelNotNamed."""
        if model is None:
            if len(self.models) > 1:
                raise ModelNotNamed(f"model is needed: {self._names()} are served")
            return self.first
        served_model = self.models.get(model)
        if served_model is None:
            are = "is" if len(self.models) == 1 else "are"
            raise UnknownModel(
                f"the model {model[:200]!r} does not exist; {self._names()} {are} served"
            )
        return served_model

    def states(self) -> dict[str, EngineState]:
        """The state of every model: the keeper's word where there is one."""
        if self.keeper is not None:
            return self.keeper.states()
        return {name: served_model.supervisor.state for name, served_model in self.models.items()}

    async def acquire(self, name: str) -> tuple[ServedModel, Callable[[], None] | None]:
        """The model, held for a request, and what lets go of it. Raises Unavailable."""
        release = None if self.keeper is None else await self.keeper.hold(name)
        return self.models[name], release

    def _names(self) -> str:
        names = list(self.models)
        shown = ", ".join(repr(name) for name in names[:_NAMES_SHOWN])
        more = len(names) - _NAMES_SHOWN
        return f"{shown} and {more} more" if more > 0 else shown

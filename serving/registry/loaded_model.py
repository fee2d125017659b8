"""One model of the server, loaded or not (ServedModel), and all of them by name (ModelRouter).

router = ModelRouter(ServerMetrics())
router.add(ServedModel(supervisor, read_vocabulary(path), metrics))
release = await router.hold(name)     # loads the model, where the router is a Registry
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

import msgspec

from models.errors import BadChat
from models.tokenizer import Tokenizer, load_tokenizer
from serving.errors import (
    ContextOverflow,
    EngineState,
    Overloaded,
    TextTooLong,
    UnknownModel,
)
from serving.hardware.machine_facts import resident_bytes
from serving.metrics import Metrics, ServerMetrics
from serving.placement.placement_policy import Attempt, Placement, explain
from serving.registry.engine_config import Prepared
from serving.supervisor.supervisor import Supervisor

T = TypeVar("T")
Vocabulary = tuple[Tokenizer, list[bytes]]  # a tokenizer, and the bytes of each token
MOST_CHARACTERS = 8 << 20  # of all texts at work and waiting: 2 s of one core, 10 s at the worst
INLINE_CHARACTERS = 4096  # longer texts are tokenised in a thread, so that others do not wait
LONGEST_TEXT = 1 << 20  # bytes of UTF-8; more where the context is longer than usual
CONTEXT_BYTES = 16  # of a text, for each token of the context
_LONGEST_SPECIAL = 64  # bytes of text of a control token; the table of bytes does not say
_NAMES_SHOWN = 8
RETRY_SECONDS = 30.0  # between loads of a model that does not load or keeps dying


class TextWork:
    """Work on texts beside the event loop: a thread, and a queue bounded in characters."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, "text")
        self.characters = 0  # at work and waiting

    async def run(self, size: int, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """The function's result. `size`: characters of its text. Raises Overloaded."""
        if self.characters and self.characters + size > MOST_CHARACTERS:
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

    context_tokens: int
    vocabulary: int


def read_vocabulary(tokenizer_path: str) -> Vocabulary:
    """Load a tokenizer: 1 to 3 s for 128,000 tokens. Raises ModelError."""
    tokenizer = load_tokenizer(tokenizer_path)
    with suppress(BadChat):  # compiles the template
        tokenizer.render_chat([{"role": "user", "content": ""}])
    return tokenizer, tokenizer.token_bytes()


class ServedModel:
    """What all requests for one model share: engines, tokenizer, metrics, and who uses it.

    `prepared`: None where somebody else starts and ends its engines. Times are time.monotonic().
    """

    def __init__(
        self,
        supervisor: Supervisor,
        vocabulary: Vocabulary,
        metrics: Metrics,
        prepared: Prepared | Any = None,
    ) -> None:
        self.served_name = metrics.model
        self.supervisor = supervisor
        self.tokenizer, self.table = vocabulary
        self.metrics = metrics
        self.prepared = prepared
        self.placement: Placement | Any = None if prepared is None else prepared.placement
        supervisor.on_step = metrics.stepped
        self.created = int(time.time())
        self._longest = max(_LONGEST_SPECIAL, max(map(len, self.table), default=0))
        self.holders = 0  # requests that are being answered
        self.used_at = time.monotonic()  # when its last request began or ended, or it was loaded
        self.was_used = self.was_loaded = False
        self.on_demand = True  # a request may load it
        self.doing: str | None = None  # what a load is at, where no engine says it
        self.load: asyncio.Task[None] | None = None
        self.retry_at = 0.0  # of a model that failed; 0.0: it has not
        self.problem: str | None = None  # why the last load failed

    # What a request needs.

    def facts(self) -> Facts:
        """What the serving engine can do. Raises Unavailable while none serves."""
        if self.supervisor.state != EngineState.ready or self.supervisor.ready is None:
            raise self.supervisor.unavailable()
        return self.known_facts()

    def known_facts(self) -> Facts:
        """The same, as far as the configuration tells while no engine serves. One sequence has the
        whole KV pool at most."""
        ready = self.supervisor.ready
        if ready is not None:
            info = ready.info
            context = min(info.context_tokens, info.kv_tokens)
            return Facts(context, info.vocabulary)
        config = self.supervisor.config
        context = min(config.context_tokens, config.kv_tokens or config.context_tokens)
        return Facts(context, self.tokenizer.vocabulary)

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
                raise ContextOverflow(fewest, most, parameter)
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

    async def text_of(self, tokens: Sequence[int]) -> str:
        """Text of token ids; a character that is cut is U+FFFD, control tokens have no text."""
        data = b"".join(map(self.bytes_of, tokens))
        return await TEXT_WORK.run(len(tokens), data.decode, "utf-8", "replace")

    def about(self) -> dict[str, Any] | None:
        """The decision where it runs, in numbers and in words, for /v1/placement."""
        if self.placement is None:
            return None
        return {**msgspec.to_builtins(self.placement), "lines": explain(self.placement)}

    # Who uses it, and what it is at.

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

    def hold(self) -> Callable[[], None]:
        """A request uses it from now on, until the returned function is called, once."""
        self._held(1)
        return partial(self._held, -1)

    def _held(self, more: int) -> None:
        self.holders += more
        self.used_at, self.was_used = time.monotonic(), True

    def failed(self, problem: str) -> None:
        """A load has failed, or its engines kept dying: there is a pause before the next load."""
        self.retry_at, self.problem = time.monotonic() + RETRY_SECONDS, problem

    def give_up_waiting(self) -> None:
        """End a load that has not begun; one whose engine runs ends with the engine."""
        if self.load is not None and self.doing is not None:
            self.load.cancel()

    # Its memory.

    def attempts(self) -> list[Attempt]:
        """The placements of the engines that are or will be loaded: in use, and on standby."""
        warm = self.prepared.model.standby == "warm"
        configs = self.supervisor.configs[:2] if warm else (self.supervisor.config,)
        labels = [(one.backend, one.device) for one in configs]
        return [one for one in self.placement.attempts if (one.backend, one.device) in labels]

    @property
    def measured_bytes(self) -> int:
        """RSS of its engine processes now."""
        return sum(resident_bytes(pid) or 0 for pid in self.supervisor.pids)


class ModelRouter:
    """The models of one server by name; serving.registry.model_registry.Registry loads them too."""

    def __init__(self, metrics: ServerMetrics) -> None:
        self.metrics = metrics
        self.models: dict[str, ServedModel] = {}

    def add(self, model: ServedModel) -> None:
        """One more model."""
        self.models[model.served_name] = model

    @property
    def first(self) -> ServedModel:
        """The model that is meant where none is named."""
        return next(iter(self.models.values()))

    def named(self, name: str | None) -> ServedModel:
        """The model of this name. Raises UnknownModel."""
        if name is None and len(self.models) == 1:
            return self.first
        if name in self.models:
            return self.models[name]
        names = [repr(one) for one in self.models]
        shown = ", ".join(names[:_NAMES_SHOWN]) + ", ..." * (len(names) > _NAMES_SHOWN)
        if name is None:
            raise UnknownModel(f"model is needed: {shown} are served")
        are = "is" if len(names) == 1 else "are"
        raise UnknownModel(f"the model {name[:200]!r} does not exist; {shown} {are} served")

    def states(self) -> dict[str, EngineState]:
        """Name -> state; a model that is on its way counts as loading."""
        return {name: model.state for name, model in self.models.items()}

    async def hold(self, name: str) -> Callable[[], None]:
        """Keep this model loaded until the returned function is called. Raises Unavailable."""
        return self.models[name].hold()

"""ServedModel: what all requests for a model share. ModelRouter: which model a request goes to.

router = ModelRouter(ServerMetrics())
router.add(ServedModel(supervisor, read_vocabulary(path), metrics))
served_model, release = await router.acquire(name, owner)     # loads the model where it may
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, Protocol

import msgspec

from models.errors import BadChat
from models.tokenization.tokenizer import Tokenizer, load_tokenizer
from serving.backends.base import BackendInfo, EngineConfig
from serving.engine.messages import Delta, GenerationRequest, Origin
from serving.errors import (
    ContextOverflow,
    EngineState,
    ModelNotNamed,
    TextTooLong,
    Unavailable,
    UnknownModel,
)
from serving.metrics import Metrics, Served, ServerMetrics
from serving.registry.text_work import TEXT_WORK

INLINE_CHARACTERS = 4096  # longer texts are tokenised in a thread, so that others do not wait
LONGEST_TEXT = 1 << 20  # bytes of UTF-8; more where the context is longer than usual
CONTEXT_BYTES = 16  # of a text, for each token of the context
_LONGEST_SPECIAL = 64  # bytes of text of a control token; the table of bytes does not say
_NAMES_SHOWN = 8


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


class StreamLike(Protocol):
    """One sequence's deltas, the last with `finish`, which comes soon after `cancel`."""

    def cancel(self) -> None: ...

    def __aiter__(self) -> AsyncIterator[Delta]: ...


class EngineLike(Served, Protocol):
    """What a request needs of a Supervisor; tests/serving/fakes.py has a small one."""

    reason: str | None
    events: Any  # what befell its engines: serving.supervisor.status.Event, oldest first
    on_step: Callable[..., None] | None  # called with the StepStats of each step

    @property
    def label(self) -> str: ...

    def retry_after_seconds(self) -> float: ...

    def submit(self, request: GenerationRequest) -> StreamLike: ...

    def check_room(self, origin: Origin) -> None: ...


class Keeper(Protocol):
    """Loads models on demand and unloads none in use: serving.registry.registry.Registry."""

    async def hold(self, name: str, asker: str) -> Callable[[], None]:
        """Wait until this model serves and hold it until the returned function is called."""
        ...

    def states(self) -> dict[str, EngineState]: ...


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
        supervisor: EngineLike,
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
        return self.table[token] if token < len(self.table) else b""

    async def text_of(self, tokens: Sequence[int], skip_special: bool = True) -> str:
        """Text of token ids; a character that is cut is U+FFFD. `skip_special`: control tokens have
        no text."""
        if len(tokens) > INLINE_CHARACTERS:
            return await TEXT_WORK.run(len(tokens), self._text_of, tokens, skip_special)
        return self._text_of(tokens, skip_special)

    async def shown(self, tokens: Sequence[int]) -> list[str]:
        """Each token for people."""
        if len(tokens) > INLINE_CHARACTERS:
            return await TEXT_WORK.run(len(tokens), self._shown, tokens)
        return self._shown(tokens)

    def _shown(self, tokens: Sequence[int]) -> list[str]:
        return [self.tokenizer.token_text(token) for token in tokens]

    def _text_of(self, tokens: Sequence[int], skip_special: bool) -> str:
        data = [self.bytes_of(token) for token in tokens]
        if not skip_special:
            for place, token in enumerate(tokens):
                if token in self.tokenizer.special_ids:
                    data[place] = self.tokenizer.token_text(token).encode()
        return b"".join(data).decode("utf-8", "replace")


class ModelRouter:
    """The models of one server. Without a keeper, nothing is loaded on demand."""

    def __init__(self, metrics: ServerMetrics) -> None:
        self.metrics = metrics
        self.models: dict[str, ServedModel] = {}
        self.keeper: Keeper | None = None

    def add(self, served_model: ServedModel) -> None:
        """One more model, or another one under its name; running requests keep theirs."""
        self.models[served_model.served_name] = served_model
        self.metrics.add(served_model.metrics)

    def remove(self, name: str) -> None:
        """This name is served no more."""
        self.metrics.remove(self.models.pop(name).metrics)

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

    async def acquire(self, name: str, asker: str) -> tuple[ServedModel, Callable[[], None] | None]:
        """The model, held for a request of `asker`, and what lets go of it. Raises Unavailable."""
        release = None if self.keeper is None else await self.keeper.hold(name, asker)
        return self.models[name], release  # a swap may have come between

    def _names(self) -> str:
        names = list(self.models)
        shown = ", ".join(repr(name) for name in names[:_NAMES_SHOWN])
        more = len(names) - _NAMES_SHOWN
        return f"{shown} and {more} more" if more > 0 else shown

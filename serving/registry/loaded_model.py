"""One model of the server, loaded or not: its engines, its tokenizer, its metrics, and who uses it.

model = ServedModel(supervisor, read_vocabulary(path), metrics, prepared)
ids = await model.tokens("Once upon", "prompt", most=2048)
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
from serving.errors import ContextOverflow, EngineState
from serving.hardware.machine_facts import resident_bytes
from serving.metrics import Metrics
from serving.placement.placement_policy import Attempt, Placement, explain
from serving.registry.engine_config import Prepared
from serving.supervisor.supervisor import RETRY_SECONDS, Supervisor

T = TypeVar("T")
Vocabulary = tuple[Tokenizer, list[bytes]]  # a tokenizer, and the bytes of each token
INLINE_CHARACTERS = 4096  # longer texts are tokenised in a thread, so that others do not wait
_LONGEST_SPECIAL = 64  # bytes of text of a control token; the table of bytes does not say
_TEXT_THREAD = ThreadPoolExecutor(1, "text")


async def in_text_thread(function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """The function's result: work on long texts, one after the other, beside the event loop."""
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(_TEXT_THREAD, partial(function, *args, **kwargs))


class Facts(msgspec.Struct, frozen=True):
    """What validation needs to know of an engine."""

    backend: str
    context_tokens: int
    vocabulary: int
    capabilities: frozenset[str]


def read_vocabulary(tokenizer_path: str) -> Vocabulary:
    """Load a tokenizer: 1 to 3 s for 128,000 tokens. Raises ModelError."""
    tokenizer = load_tokenizer(tokenizer_path)
    with suppress(BadChat):  # compiles the template
        tokenizer.render_chat([{"role": "user", "content": ""}])
    return tokenizer, tokenizer.token_bytes()


class ServedModel:
    """What all requests for one model share.

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
        self.on_demand = True  # a request may load it
        self.load: asyncio.Task[None] | None = None

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
            return Facts(info.name, context, info.vocabulary, info.capabilities)
        config = self.supervisor.config
        context = min(config.context_tokens, config.kv_tokens or config.context_tokens)
        return Facts(config.backend, context, self.tokenizer.vocabulary, frozenset())

    async def tokens(
        self,
        text: str,
        parameter: str,
        *,
        most: int | None = None,
        bos: bool = False,
        parse_special: bool = False,
    ) -> list[int]:
        """Token ids of a text. Raises ContextOverflow where there must be more than `most`."""
        encode = partial(self.tokenizer.encode, text, parse_special=parse_special)
        fewest = len(text) // self._longest
        if most is not None and fewest > most:
            raise ContextOverflow(fewest, None, most, parameter, at_least=True)
        ids = encode() if len(text) <= INLINE_CHARACTERS else await in_text_thread(encode)
        head = self.tokenizer.bos_id
        return [head, *ids] if bos and head is not None else ids

    def bytes_of(self, token: int) -> bytes:
        """The bytes of a token; none of control tokens."""
        return self.table[token] if token < len(self.table) else b""

    def text_of(self, tokens: Sequence[int]) -> str:
        """Text of token ids; a character that is cut is U+FFFD, control tokens have no text."""
        return b"".join(map(self.bytes_of, tokens)).decode("utf-8", "replace")

    def about(self) -> dict[str, Any] | None:
        """The decision where it runs, in numbers and in words, for /v1/placement."""
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
        """True when it has failed, and nobody is trying again."""
        return self.supervisor.state == EngineState.failed and self.load is None

    @property
    def may_try_again(self) -> bool:
        """True once it has been given up for RETRY_SECONDS."""
        return self.given_up and time.monotonic() >= self.supervisor.since + RETRY_SECONDS

    def hold(self) -> Callable[[], None]:
        """A request uses it from now on, until the returned function is called, once."""
        self._held(1)
        return partial(self._held, -1)

    def _held(self, more: int) -> None:
        self.holders += more
        self.used_at = time.monotonic()

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

"""Several models in one server: loading, eviction, and what a request waits for.

    registry = Registry(metrics, machine, make_supervisor, RegistryLimits())
    registry.serve(prepared)                          # each of them
    await registry.start()                            # loads in order, returns at once
    model = await registry.hold("smollm2-135m")       # a request: load it, keep it loaded
    model.release_model()

Each model has one Supervisor. Only one model loads at a time, so that the free memory is known.
When memory is short, idle models are evicted, the least recently used first. A model in use is
never evicted; a request that would need that gets 503. A model that was unloaded because it was
idle, or for another model, is loaded again by its next request. One that an administrator unloaded
stays unloaded until an administrator loads it.

Memory is that of one place: "cpu" for RAM, a GPU's UUID for its own (Attempt.place).
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

import msgspec

from crossover.models import formatting
from crossover.models.errors import BadChat
from crossover.models.machine_limits import available_bytes
from crossover.models.tokenizer import Tokenizer, load_tokenizer
from crossover.serving.backends.backend_interface import EngineConfig
from crossover.serving.errors import (
    ContextOverflow,
    EngineFailed,
    EngineState,
    LoadFailed,
    NoRoom,
    ServingError,
    TokenOutOfRange,
    Unavailable,
    UnknownModel,
)
from crossover.serving.hardware.machine_facts import resident_bytes
from crossover.serving.metrics import Metrics, ServerMetrics
from crossover.serving.placement.placement_policy import (
    HEADROOM,
    Attempt,
    NoPlacement,
    Placement,
    Reason,
    explain,
    narrowed,
)
from crossover.serving.registry.engine_config import Machine, Prepared
from crossover.serving.supervisor.engine_supervisor import RETRY_SECONDS, Background, Supervisor

T = TypeVar("T")
Vocabulary = tuple[Tokenizer, list[bytes]]  # a tokenizer, and the bytes of each token
Bytes = Mapping[str, int]  # place -> bytes
INLINE_CHARACTERS = 4096  # longer texts are tokenised in a thread, so that others do not wait
_NOT_THERE = (EngineState.unloaded, EngineState.failed)
_UNLOADED = (EngineState.unloaded, EngineState.draining)  # or soon
# Until an engine of the CPU is ready: Python and its libraries, then its weights from the disk, at
# the pace of a slow one.
ENGINE_START_SECONDS, LOAD_BYTES_PER_SECOND = 2.0, 1e9
_LONGEST_SPECIAL = 64  # bytes of text of a control token; the table of bytes does not say
_TEXT_THREAD = ThreadPoolExecutor(1, "text")


async def in_text_thread(function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """Run work on a long text in the text thread, one at a time, and return its result."""
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(_TEXT_THREAD, partial(function, *args, **kwargs))


class EngineLimits(msgspec.Struct, frozen=True):
    """The limits of an engine that validation needs."""

    context_tokens: int
    vocabulary: int


def read_vocabulary(tokenizer_path: str) -> Vocabulary:
    """Load a tokenizer: 1 to 3 s for 128,000 tokens. Raises ModelError."""
    tokenizer = load_tokenizer(tokenizer_path)
    with suppress(BadChat):  # a template that cannot be compiled: each chat reports it
        tokenizer.try_forms()
    return tokenizer, tokenizer.token_bytes()


class ServedModel:
    """One model as all of its requests share it.

    `prepared`: None if something else starts and stops its engines. Times are time.monotonic().
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
        supervisor.requests.on_step = metrics.stepped
        self.created = int(time.time())
        self._longest = max(_LONGEST_SPECIAL, max(map(len, self.table), default=0))
        self.holders = 0  # requests that are being answered
        self.used_at = time.monotonic()  # when its last request began or ended, or it was loaded
        self.on_demand = True  # a request may load it
        self.load: asyncio.Task[None] | None = None

    # What a request needs.

    def facts(self, to_generate: bool = True) -> EngineLimits:
        """Return the limits of the serving engine. One sequence may use the whole KV pool.

        While no engine serves, raises Unavailable, or returns those of the configuration if nothing
        is `to_generate`.
        """
        supervisor = self.supervisor
        ready = supervisor.ready
        if to_generate and (ready is None or supervisor.state != EngineState.ready):
            raise supervisor.unavailable()
        if ready is not None:
            info = ready.info
            return EngineLimits(info.settings.longest_tokens, info.vocabulary)
        context = supervisor.config.settings.longest_tokens
        return EngineLimits(context, self.tokenizer.vocabulary)

    async def tokens(
        self,
        text: str,
        parameter: str,
        *,
        most: int | None = None,
        bos: bool = False,
        parse_special: bool = False,
        vocabulary: int | None = None,
    ) -> list[int]:
        """Return the token ids of a text. Raises ContextOverflow for more than `most`, and
        TokenOutOfRange for an id without a row in the model's `vocabulary`."""
        encode = partial(self.tokenizer.encode, text, parse_special=parse_special)
        fewest = len(text) // self._longest
        if most is not None and fewest > most:
            raise ContextOverflow(fewest, most, parameter)
        ids = encode() if len(text) <= INLINE_CHARACTERS else await in_text_thread(encode)
        head = self.tokenizer.bos_id
        if vocabulary is None:
            return [head, *ids] if bos and head is not None else ids
        if (highest := max(ids, default=0)) >= vocabulary:
            shown = self.tokenizer.token_text(highest)
            raise TokenOutOfRange(highest, shown, vocabulary, parameter)
        return [head, *ids] if bos and head is not None and head < vocabulary else ids

    def tokens_out_of_range(self) -> dict[int, str]:
        """Return the ids in the model's files that its engine has no rows for, with their texts:
        ids of the tokenizer, and of BOS and EOS tokens. Empty while no engine serves."""
        ready, tokenizer = self.supervisor.ready, self.tokenizer
        if ready is None:
            return {}
        rows = ready.info.vocabulary
        named = {one for one in (tokenizer.bos_id, *tokenizer.eos_ids) if one is not None}
        ids = {*range(rows, tokenizer.vocabulary), *(one for one in named if one >= rows)}
        texts = {one: tokenizer.token_text(one) for one in sorted(ids)}
        return {one: text for one, text in texts.items() if text or one in named}

    def bytes_of(self, token: int) -> bytes:
        """Return the bytes of a token; control tokens have none."""
        return self.table[token] if token < len(self.table) else b""

    def text_of(self, tokens: Sequence[int]) -> str:
        """Return the text of token ids; an incomplete character becomes U+FFFD, and control tokens
        have no text."""
        return b"".join(map(self.bytes_of, tokens)).decode("utf-8", "replace")

    def about(self) -> dict[str, Any] | None:
        """Return the placement decision, as numbers and text, for /v1/placement."""
        return {**msgspec.to_builtins(self.placement), "lines": explain(self.placement)}

    # Who uses it, and what it is at.

    @property
    def state(self) -> EngineState:
        """Return the supervisor's state; a requested load that has not started is loading, too."""
        state = self.supervisor.state
        waits = state in (EngineState.unloaded, EngineState.failed) and self.load is not None
        return EngineState.loading if waits else state

    @property
    def busy(self) -> bool:
        """Return whether it must not be evicted: requests are in flight, or it is loading."""
        return self.holders > 0 or self.supervisor.in_flight > 0 or self.load is not None

    @property
    def given_up(self) -> bool:
        """Return whether it has failed and no retry is under way."""
        return self.supervisor.state == EngineState.failed and self.load is None

    @property
    def is_retry_due(self) -> bool:
        """Return whether it failed at least RETRY_SECONDS ago."""
        return self.given_up and time.monotonic() >= self.supervisor.since + RETRY_SECONDS

    def release_model(self) -> None:
        """Release the model: a request that used it has ended."""
        self.holders -= 1
        self.used_at = time.monotonic()

    # Its memory.

    def attempts(self) -> list[Attempt]:
        """Return the placements of the engines that are or will be loaded, including standby."""
        warm = self.prepared.model.standby == "warm"
        supervisor = self.supervisor
        configs = supervisor.configs[:2] if warm else (supervisor.config, *supervisor.loaded)
        labels = [(one.backend, one.device) for one in configs]
        return [one for one in self.placement.attempts if (one.backend, one.device) in labels]

    @property
    def takes(self) -> Bytes:
        """Return the predicted bytes, by place, that unloading it frees."""
        return bytes_by_place(self.attempts())

    @property
    def measured_bytes(self) -> int:
        """Return the current RSS of its engine processes."""
        return sum(resident_bytes(pid) or 0 for pid in self.supervisor.pids)


def is_load_cancelled(model: ServedModel) -> Unavailable:
    """Return the error for requests that wait for a load that was canceled."""
    who = f"the model {model.served_name!r}"
    text = f"Loading {who} was canceled: it was unloaded, or the server is stopping."
    return Unavailable(text, 5.0, "unloaded")


class RegistryLimits(msgspec.Struct, frozen=True):
    """`memory_bytes`: RAM of all engines together; None: what the machine has free."""

    memory_bytes: int | None = None
    load_wait_seconds: float = 60.0  # that a request waits for its model
    drain_seconds: float = 60.0  # of an unload


def make_room(
    options: Sequence[Bytes], residents: Sequence[ServedModel], free: Mapping[str, int | None]
) -> tuple[int, str | None]:
    """Choose one of `options` (bytes needed in each place) and the models to evict for it, the
    least recently used first.

    The first possible option is used (in the placement's order: GPU first), even if models are
    evicted for it. `free`: None if the device does not report it. Raises NoRoom if busy models are
    in the way, NoPlacement if it would not fit even without other models.
    """

    def lacks(needs: Bytes, gone: Sequence[ServedModel] = ()) -> list[str]:
        room = {at: sum(one.takes.get(at, 0) for one in gone) + (free.get(at) or 0) for at in needs}
        return [at for at in needs if free.get(at) is not None and room[at] < needs[at]]

    idle = sorted((one for one in residents if not one.busy), key=lambda one: one.used_at)
    for index, needs in enumerate(options):
        short = lacks(needs)
        if not lacks(needs, idle):
            there = [one.served_name for one in idle if any(one.takes.get(at) for at in short)]
            return index, next(iter(there), None)
    why = "; ".join(
        f"{formatting.size(needs[at])} needed on the {'CPU' if at == 'cpu' else 'GPU'}, "
        f"{formatting.size(max(0, free[at] or 0))} may be used"
        for needs in options
        for at in lacks(needs)
    )
    if all(lacks(needs, residents) for needs in options):
        raise NoPlacement(f"it would not fit even without other models: {why}")
    busy = ", ".join(one.served_name for one in residents if one.busy)
    raise NoRoom(f"{why}, while {busy} are busy")


def bytes_by_place(attempts: Sequence[Attempt]) -> dict[str, int]:
    """Return the bytes that engines need together, by place."""
    found = Counter[str]()
    for one in attempts:
        found[one.place] += one.need_bytes
    return dict(found)


def bytes_free(
    attempts: Sequence[Attempt], residents: Sequence[ServedModel], limit_bytes: int | None
) -> dict[str, int | None]:
    """Return the bytes, by place, that a new engine may use. `limit_bytes`: RAM for all engines."""
    free = {one.place: one.free_bytes for one in attempts}
    taken = [(one.takes["cpu"], one.measured_bytes) for one in residents if "cpu" in one.takes]
    if (there := free.get("cpu")) is not None:
        there -= sum(max(0, said - rss) for said, rss in taken)  # KV caches fill as they are used
        most = there if limit_bytes is None else limit_bytes - sum(said for said, _ in taken)
        free["cpu"] = min(there, most)
    return free


class Registry:
    """See the module's docstring."""

    def __init__(
        self,
        metrics: ServerMetrics,
        machine: Machine,
        make_supervisor: Callable[[Prepared], Supervisor],
        limits: RegistryLimits,
    ) -> None:
        self.metrics = metrics
        self.machine = machine
        self.limits = limits
        self.models: dict[str, ServedModel] = {}
        self._make_supervisor = make_supervisor
        self._turn = asyncio.Lock()
        self._background = Background()  # what a load raises is for its waiters
        self._stopping = False

    # Models by name.

    @property
    def first(self) -> ServedModel:
        """Return the model for requests that name none."""
        return next(iter(self.models.values()))

    def named(self, name: str | None) -> ServedModel:
        """Return the model with this name. Raises UnknownModel."""
        if name is None and len(self.models) == 1:
            return self.first
        if name in self.models:
            return self.models[name]
        shown = ", ".join(map(repr, self.models))
        if name is None:
            raise UnknownModel(f"model: This key is required, because {shown} are served.")
        raise UnknownModel(f"The model {name[:200]!r} does not exist. Served models: {shown}")

    def states(self) -> dict[str, EngineState]:
        """Return the state of each model; one whose load is queued counts as loading."""
        return {name: model.state for name, model in self.models.items()}

    @property
    def in_flight(self) -> int:
        """Return the number of sequences of all models that are not finished."""
        return sum(model.supervisor.in_flight for model in self.models.values())

    # Models come and go.

    def serve(self, prepared: Prepared) -> None:
        """Add a model, not loaded yet. Raises ServingError for a name that is in use."""
        name = prepared.name
        if name in self.models:
            raise ServingError(f"Two models have the name {name!r}. Give one of them another name.")
        supervisor = self._make_supervisor(prepared)
        if prepared.model.load == "demand":
            supervisor.state = EngineState.unloaded
            supervisor.reason = "it is loaded at its first request"
        metrics = Metrics(self.metrics, name, supervisor)
        vocabulary = read_vocabulary(prepared.tokenizer_path)
        model = ServedModel(supervisor, vocabulary, metrics, prepared)
        if prepared.model.bridge:
            supervisor.estimate_load_seconds = partial(self._estimate_load_seconds, model)
        self.add(model)

    def add(self, model: ServedModel) -> None:
        """Add a model."""
        self.models[model.served_name] = model

    async def start(self) -> None:
        """Start loading the models with load = "start", in order; return immediately."""
        self._background.keep(self._watch())
        await in_text_thread(str)  # its thread is there from the start
        for one in self.models.values():
            if one.prepared.model.load == "start":
                self._load_soon(one, evict=False)

    async def stop(self, drain: bool = True, timeout_seconds: float = 30.0) -> int:
        """Stop every engine, as Supervisor.stop does; return how many sequences were aborted."""
        self._stopping = True
        for model in self.models.values():
            self._call_off(model)
        stops = (one.supervisor.stop(drain, timeout_seconds) for one in self.models.values())
        counts = await asyncio.gather(*stops)
        self._background.cancel()
        return sum(counts)

    # A request.

    async def hold(self, name: str) -> ServedModel:
        """Wait until this model serves, loading it if allowed, and keep it loaded until it is
        released. Raises Unavailable."""
        model, until = self.models[name], time.monotonic() + self.limits.load_wait_seconds
        while not self._stopping:
            state = model.supervisor.state
            ends = [EngineState.ready, EngineState.restarting]
            if model.prepared.model.load == "start" and not model.metrics.loads["ready"]:
                ends.append(EngineState.loading)  # nobody waits for the load at the server's start
            if state in ends:
                break
            if model.load is None:
                if state in _UNLOADED and not model.on_demand:
                    text = f"The model {name!r} was unloaded by an administrator."
                    raise Unavailable(text, 30.0, "unloaded")
                if state not in _UNLOADED and not model.is_retry_due:
                    break
            await self._until_loaded(model, self._load_soon(model), until)
        model.holders += 1
        model.used_at = time.monotonic()
        return model  # its facts say why it does not serve

    async def _until_loaded(
        self, model: ServedModel, load: asyncio.Task[None], until: float
    ) -> None:
        done, _ = await asyncio.wait({load}, timeout=max(0.0, until - time.monotonic()))
        who = f"the model {model.served_name!r}"
        if not done:
            waited = f"was not ready within {self.limits.load_wait_seconds:g} s"
            seconds = model.supervisor.retry_after_seconds()
            raise Unavailable(f"{who} is being loaded and {waited}", seconds, "loading")
        if load.cancelled():
            raise is_load_cancelled(model)
        problem = load.exception()
        if isinstance(problem, Unavailable):
            raise problem
        if problem is not None:
            is_full = isinstance(problem, NoRoom)
            seconds, code = (5.0, "no_room") if is_full else (RETRY_SECONDS, "load_failed")
            raise Unavailable(f"{who} cannot be loaded now: {problem}", seconds, code)

    # Loading.

    async def load(self, name: str) -> None:
        """Load a model now, for an administrator. Raises NoRoom, NoPlacement, LoadFailed, and
        Unavailable if an unload cancels it."""
        model = self.models[name]
        model.on_demand = True
        load = self._load_soon(model)
        try:
            await asyncio.shield(load)
        except asyncio.CancelledError:
            if load.cancelled():
                raise is_load_cancelled(model) from None
            raise

    def _load_soon(self, model: ServedModel, evict: bool = True) -> asyncio.Task[None]:
        if model.load is None:
            model.load = self._background.keep(self._load(model, evict))
            # Not by itself: one that is cancelled before its first step has no end of its own.
            model.load.add_done_callback(lambda _: setattr(model, "load", None))
        return model.load

    def _call_off(self, model: ServedModel) -> bool:
        """Cancel a load that has not started; one whose engine runs ends with the engine."""
        return model.load is not None and not model.supervisor.pids and model.load.cancel()

    async def _load(self, model: ServedModel, evict: bool) -> None:
        supervisor = model.supervisor
        try:
            async with self._turn:
                while supervisor.state == EngineState.draining and not self._stopping:
                    await supervisor.wait_change()
                if supervisor.state in (EngineState.ready, EngineState.restarting):
                    return
                model.placement = await self._room_for(model, evict)
                await supervisor.start(model.prepared.configs_of(model.placement))
                try:
                    await supervisor.wait_ready()
                except EngineFailed as problem:
                    if supervisor.state in _UNLOADED:
                        raise is_load_cancelled(model) from None
                    raise LoadFailed(str(problem)) from problem
            model.used_at = time.monotonic()
            model.metrics.loads["ready"] += 1
        except NoRoom as problem:
            supervisor.rest(EngineState.unloaded, str(problem))
            raise
        except Unavailable:  # it was called off
            raise
        except Exception as problem:  # whatever it is, this model did not load
            model.metrics.loads["failed"] += 1
            if supervisor.state in (*_NOT_THERE, EngineState.loading) and model.on_demand:
                supervisor.rest(EngineState.failed, str(problem))
            raise

    async def _room_for(self, model: ServedModel, evict: bool) -> Placement:
        """Return where this model goes, after evicting others for it: the first attempt that fits,
        then its fallbacks. Raises NoRoom, NoPlacement."""
        prepared, name = model.prepared, model.served_name
        request = msgspec.structs.replace(prepared.request, check_memory=False)
        check, many = prepared.request.check_memory, 2 if prepared.model.standby == "warm" else 1
        evicted: list[str] = []
        while True:
            facts = await asyncio.to_thread(self.machine.facts)
            wanted = await asyncio.to_thread(self.machine.place, request, facts)
            attempts = [one for one in wanted.attempts if one.backend in prepared.files]
            if not attempts:
                why = "; ".join(reason.text for reason in wanted.reasons)
                raise NoPlacement(f"it can no longer run anywhere: {why}")
            others = [one for one in self.models.values() if one is not model]
            residents = [one for one in others if one.supervisor.pids]
            free = bytes_free(attempts, residents, self.limits.memory_bytes) if check else {}
            needs = [bytes_by_place(attempts[at : at + many]) for at in range(len(attempts))]
            option, gone = make_room(needs, residents, free)
            if gone is None:
                first, *later = attempts[option:]
                attempts = [first, *(one for one in later if one.fits or not check)]
                text = f"unloaded {', '.join(evicted)}, least recently used, to make room"
                reason = Reason(None, text) if evicted else None
                return narrowed(wanted, tuple(attempts), reason)
            if not evict:
                raise NoRoom(f"there is no room beside {gone}; it is loaded at its first request")
            evicted.append(gone)
            # To its end, even where this load is given up: half an unload is none.
            unload = self._unload(self.models[gone], f"to make room for {name}", "evicted")
            await asyncio.shield(self._background.keep(unload))

    def _estimate_load_seconds(self, model: ServedModel, config: EngineConfig) -> float | None:
        """Return an upper bound of the seconds until this engine of the CPU is ready; None where it
        has no memory now."""
        engine = config.backend, config.device
        attempts = model.placement.attempts
        attempt = next((one for one in attempts if (one.backend, one.device) == engine), None)
        if attempt is None:
            return None
        free_bytes = int(available_bytes() * HEADROOM)
        attempt = msgspec.structs.replace(attempt, free_bytes=free_bytes)
        others = [one for one in self.models.values() if one is not model and one.supervisor.pids]
        free = bytes_free([attempt], others, self.limits.memory_bytes)[attempt.place]
        is_checked = model.prepared.request.check_memory
        if is_checked and free is not None and attempt.need_bytes > free:
            return None
        return ENGINE_START_SECONDS + attempt.weight_bytes / LOAD_BYTES_PER_SECOND

    # Unloading.

    async def unload(self, name: str, drain: bool = True) -> int:
        """Unload a model until an administrator loads it; return how many sequences it aborted."""
        model = self.models[name]
        model.on_demand = False
        if model.load is not None and self._call_off(model):
            await asyncio.wait([model.load])
        return await self._unload(model, "by request", "asked", drain)

    async def _unload(self, model: ServedModel, why: str, kind: str, drain: bool = True) -> int:
        if model.supervisor.state == EngineState.unloaded:
            model.supervisor.rest(EngineState.unloaded, why)
            return 0
        cut_off = await model.supervisor.stop(drain, self.limits.drain_seconds, unload=why)
        model.metrics.unloads[kind] += 1
        return cut_off

    async def _watch(self) -> None:
        """Unload idle models; after a pause, reload those whose engines kept dying."""
        while True:
            models = list(self.models.values())
            limits = [one.prepared.model.idle_unload_seconds for one in models]
            await asyncio.sleep(min([1.0, *(one / 5 for one in limits if one is not None)]))
            for model, limit in zip(models, limits, strict=True):
                if model.is_retry_due and model.metrics.loads["ready"]:
                    self._load_soon(model, evict=False)
                idle = time.monotonic() - model.used_at
                is_ready = model.supervisor.state == EngineState.ready
                if limit is not None and is_ready and not model.busy and idle >= limit:
                    await self._unload(model, f"idle for {idle:.0f} s", "idle")

"""Keeps one model served: starts and restarts its engine, and moves sequences between engines.

    supervisor = Supervisor([gpu_config, cpu_config])        # in order of preference
    await supervisor.start()
    await supervisor.wait_ready(600)
    stream = supervisor.submit(GenerationRequest([1, 2, 3], max_tokens=64))
    await stream.arrived.wait(); stream.take()
    await supervisor.stop(drain=True, timeout_seconds=30)

Everything happens on one event loop. States: loading -> ready <-> restarting -> failed; draining ->
stopped, or draining -> unloaded, from where `start` begins again.

There is at most one engine for each configuration of the list. The current one serves or will
serve. One that is earlier in the list takes over as soon as it is loaded, and one that is later is
on standby. When an engine dies, sequences of which the reader has received nothing start again on
the next one; the others end with finish "error".

`side_by_side`: the configurations are no alternatives. All of their engines serve at the same time,
from one queue, each on cores of its own. The model is ready once all of them have loaded, or once
some are ready and the others take much longer (MIN_WAIT_FOR_OTHERS_SECONDS), as an engine that
hangs does. Those join when they have loaded. When one of them dies, or is killed because it hangs,
it is restarted while the others serve, and one that is not restarted any more leaves the model to
the others. The state is "restarting" only while none serves, and "loading" again if those that are
left have never served.

The CPU can be a bridge while a GPU's engine restarts after its death. If the next engine of the
list is on the CPU, and `estimate_load_seconds` says that it will be ready sooner, both load, and
whichever is ready first serves. When the GPU's engine is back, sequences of which the reader has
received nothing move to it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import msgspec

from crossover.models.errors import CrossoverError
from crossover.serving.backends.backend_interface import EngineConfig
from crossover.serving.engine import ipc_messages as ipc
from crossover.serving.errors import Cause, EngineFailed, EngineState, Unavailable
from crossover.serving.supervisor.admission import QueueBounds
from crossover.serving.supervisor.engine_process import EngineProcess, label
from crossover.serving.supervisor.inflight_requests import InflightRequests, Stream
from crossover.serving.supervisor.restart_policy import (
    EngineExit,
    RecoveryLimits,
    RestartDecision,
    after_death,
    return_at,
)

logger = logging.getLogger("crossover.serving")
T = TypeVar("T")
DEFAULT_LOAD_SECONDS = 5.0  # expected of a load, if no engine has been loaded yet
CHECK_SECONDS = 0.1  # between two checks of engines and deadlines
# Engines that serve side by side load alike. When one is ready, the model waits for the others for
# as long again as it took, and at least for this long.
MIN_WAIT_FOR_OTHERS_SECONDS = 5.0
# One of them that loads alone, since the others are given up, hangs after so many times the seconds
# that another took, but not before so many seconds.
MAX_LOAD_SLOWDOWN, MIN_LAST_LOAD_SECONDS = 10.0, 60.0
_KEPT_EVENTS, _KEPT_ENDINGS = 200, 100
RETRY_SECONDS = 30.0  # before a failed model is tried again
# In these states no engine serves new requests, or will by itself.
_INACTIVE = (EngineState.failed, EngineState.stopped, EngineState.draining, EngineState.unloaded)
_BOUNDS, _LIMITS = QueueBounds(), RecoveryLimits()


class EngineEvent(msgspec.Struct, frozen=True):
    """Something that happened to an engine."""

    unix_seconds: float
    # started, ready, late, standby, died, restarting, fell_back, returning, returned, failed,
    # draining, stopped, unloaded
    kind: str
    engine: str  # "llama_cpp/cpu"
    message: str
    cause: Cause | None = None
    model: str = ""


class Supervisor:
    """See the module's docstring.

    `standby`: keep the next engine of the list loaded (warm) instead of loading it when it is
    needed (cold). `side_by_side`: see the module's docstring. `on_event` gets the events of
    engines, `on_output` the lines that they print.
    """

    def __init__(
        self,
        configs: Sequence[EngineConfig],
        *,
        bounds: QueueBounds = _BOUNDS,
        limits: RecoveryLimits = _LIMITS,
        standby: bool = False,
        side_by_side: bool = False,
        on_event: Callable[[EngineEvent], None] | None = None,
        on_output: Callable[[str], None] = print,
    ) -> None:
        self.configs = tuple(configs)
        self.state = EngineState.loading
        self.reason: str | None = "starting"
        self.since = time.monotonic()  # when the state or its reason last changed
        self._side_by_side = side_by_side
        engines = len(configs) if side_by_side else 1
        self.requests = InflightRequests(bounds, configs[0].settings.slots, engines)
        self.ready: ipc.Ready | None = None  # the serving engine's message; None: none serves
        self.loading: ipc.Loading | None = None
        self.events: deque[EngineEvent] = deque(maxlen=_KEPT_EVENTS)
        self.restarts = self.fallbacks = self.returns = 0
        self.bridges = 0  # fallbacks that began while the preferred engine was restarting
        # Returns an upper bound of the seconds that an engine takes to load the first time; None if
        # its memory does not suffice. Without this function there are no bridges.
        self.estimate_load_seconds: Callable[[EngineConfig], float | None] | None = None
        self.deaths: Counter[str] = Counter()  # unexpected ends, by cause
        self._limits = limits
        self._wants_standby = standby
        self._on_event = on_event
        self._on_output = on_output
        self._index = 0  # index of the configuration in use
        self._engines: dict[int, EngineProcess] = {}  # by index of the configuration
        self._retired: set[EngineProcess] = set()  # engines that finish their sequences and end
        self._given_up: set[int] = set()  # side by side: indices of engines not restarted any more
        self._endings: deque[EngineExit] = deque(maxlen=_KEPT_ENDINGS)
        self._fell_back_at = 0.0
        self._load_seconds: dict[int, float] = {}  # of the last load, by index
        self._ready_due_at = 0.0  # when an engine is expected to serve, by time.monotonic()
        self._returns: list[float] = []  # times of attempts to return to the preferred engine
        self._changed = asyncio.Event()
        self._background = Background(
            lambda bug: self._become(EngineState.failed, f"internal error: {bug}")
        )

    # State.

    @property
    def config(self) -> EngineConfig:
        """Return the configuration that is or will be in use."""
        return self.configs[self._index]

    @property
    def label(self) -> str:
        return label(self.config)

    @property
    def _current(self) -> EngineProcess | None:
        """Return the engine that serves or will serve; side by side: the first of them."""
        if self._side_by_side:
            return min(self.engines, key=lambda it: it.ready is None, default=None)
        return self._engines.get(self._index)

    @property
    def engine_pid(self) -> int | None:
        """Return the pid of the engine that serves or will serve; side by side: of the first."""
        current = self._current
        return current.pid if current is not None and current.alive else None

    @property
    def serving_pids(self) -> list[int]:
        """Return the pids of the engines that serve or will serve."""
        engines = self.engines if self._side_by_side else [self._current]
        return [
            engine.pid
            for engine in engines
            if engine is not None and engine.alive and engine.pid is not None
        ]

    @property
    def in_flight(self) -> int:
        """Return the number of sequences that are not finished."""
        return len(self.requests)

    @property
    def pids(self) -> list[int]:
        """Return the pids of all running engine processes, in any role."""
        return sorted(
            engine.pid for engine in self._living if engine.alive and engine.pid is not None
        )

    @property
    def _living(self) -> list[EngineProcess]:
        """Return all engines that have not ended."""
        return [*self._engines.values(), *self._retired]

    @property
    def engines(self) -> list[EngineProcess]:
        """Return the engines that serve, load or are on standby, in the order of the list."""
        return [self._engines[index] for index in sorted(self._engines)]

    @property
    def loaded(self) -> list[EngineConfig]:
        """Return the configurations of the engines that serve, load or are on standby."""
        return [engine.config for engine in self.engines]

    def retry_after_seconds(self) -> float:
        """Return after how many seconds a client should retry while no engine serves: when the load
        is expected to end, or after RETRY_SECONDS if there is none."""
        due = self.since + RETRY_SECONDS if self.state in _INACTIVE else self._ready_due_at
        return max(1.0, due - time.monotonic())

    def unavailable(self) -> Unavailable:
        """Return the error for requests while no engine serves."""
        text = f"The model is not available ({self.state}): {self.reason or 'it will be soon'}"
        return Unavailable(text, self.retry_after_seconds(), self.state)

    # Commands.

    async def start(self, configs: Sequence[EngineConfig] = ()) -> None:
        """Start the first engine, or all that serve side by side, if none is running; return
        immediately. After a stop it starts again, with new `configs` if they are given."""
        if configs and tuple(configs) != self.configs:
            self.configs = tuple(configs)
            self._load_seconds.clear()
        self._endings.clear()
        self._returns.clear()
        self._given_up.clear()
        self._index = 0
        self._ready_due_at = time.monotonic() + self._expected_load_seconds(0)
        self._become(EngineState.loading, "starting")
        self._background.cancel()
        self._background.start(self._check_periodically())
        for index in range(len(self.configs) if self._side_by_side else 1):
            self._background.start(self._spawn(index))

    def set_unavailable(self, state: EngineState, reason: str) -> None:
        """Set why no engine is running: unloaded or failed. Only while none is running."""
        idle = (EngineState.loading, EngineState.unloaded, EngineState.failed)
        if not self._living and self.state in idle:
            # A model that is not loaded for lack of room is reported once, at the start.
            is_news = state == EngineState.failed or self.state == EngineState.loading
            if is_news and reason != self.reason:
                self._record_event(state.value, reason)
            self._become(state, reason)

    async def wait_ready(self, timeout_seconds: float | None = None) -> ipc.Ready:
        """Wait until an engine serves. Raises EngineFailed if none ever will, or TimeoutError."""
        async with asyncio.timeout(timeout_seconds):
            while self.state != EngineState.ready:
                if self.state in _INACTIVE:
                    raise EngineFailed(self.reason or self.state)
                await self.wait_change()
        assert self.ready is not None
        return self.ready

    async def wait_change(self) -> None:
        """Wait until the state or the progress of a load changes."""
        await self._changed.wait()

    def submit(
        self, request: ipc.GenerationRequest, arrived: asyncio.Event | None = None
    ) -> Stream:
        """Give the engine a new sequence. Raises Unavailable or Overloaded."""
        if self.state != EngineState.ready or not self.requests.engines:
            raise self.unavailable()
        return self.requests.submit(request, arrived)

    async def stop(
        self, drain: bool = True, timeout_seconds: float = 30.0, *, unload: str | None = None
    ) -> int:
        """Stop every engine; with `drain`, running sequences may finish within the time limit.

        `unload`: the reason; the state becomes unloaded, and `start` may be called again. Returns
        how many sequences were aborted. A call with drain=False ends an earlier drain.
        """
        state, why = EngineState.stopped, "the server was stopped"
        if unload is not None:
            state, why = EngineState.unloaded, f"the model was unloaded: {unload}"
        if self.state == EngineState.stopped:
            return self.requests.failed
        if self.state != EngineState.draining:
            self._record_event("draining", f"{len(self.requests)} sequences in flight")
            self.requests.failed = 0
            self._become(EngineState.draining, why)
        if drain:
            self.requests.hand_out_all()
        self.requests.fail(why, only_waiting=True)
        for engine in self._living:
            self._stop_engine(engine, drain)
        seconds = timeout_seconds if drain and self.in_flight else self._limits.kill_after_seconds
        try:
            async with asyncio.timeout(seconds):
                while self._living:
                    await self.wait_change()
        except TimeoutError:
            for engine in self._living:
                engine.kill()
            while self._living:
                await self.wait_change()
        self.requests.fail(f"{why} before this request finished")
        cut_off = self.requests.failed
        self._background.cancel()
        # If an unload and a stop happen at the same time, the stop decides the final state. Of two
        # stops, the one that ends first records it.
        if self.state == EngineState.draining or self.state != state == EngineState.stopped:
            self._record_event(
                state.value, f"{why}, {cut_off} sequences aborted" if cut_off else why
            )
            self._become(state, why)
        return cut_off

    # Engines start and send messages.

    async def _spawn(
        self, index: int, delay_seconds: float = 0.0, *, is_bridge: bool = False
    ) -> None:
        """Start the engine of a configuration after a delay, if it is still needed then."""
        await asyncio.sleep(delay_seconds)
        if index in self._engines or not self._is_needed(index, is_bridge):
            return
        engine = self._engines[index] = EngineProcess(index, self.configs[index], self._on_output)
        if self._side_by_side:
            engine.number = index + 1
        if index == self._index:
            self.loading = None
        kind = "returning" if index < self._index else "started"
        purpose = f", to answer until {self.label} has restarted" if is_bridge else ""
        self._record_event(kind, f"loading {engine.config.model_name}{purpose}", engine)
        await engine.start(self.requests.receive_step, self._receive, self._ended)

    def _is_needed(self, index: int, is_bridge: bool) -> bool:
        """Return whether the engine of a configuration should be started in the current state."""
        if is_bridge:
            return self.state == EngineState.restarting and index == self._index + 1
        if self._side_by_side:
            return self.state not in _INACTIVE and index not in self._given_up
        if index == self._index:
            return self.state in (EngineState.loading, EngineState.restarting)
        # A preferred engine to return to, or one to keep on standby.
        last = self._index + 1 if self._wants_standby else self._index
        return self.state == EngineState.ready and index <= last

    def _receive(self, engine: EngineProcess, message: ipc.Loading | ipc.Ready) -> None:
        match message:
            case ipc.Loading() if engine is self._current:
                self.loading = message
                if self.state == EngineState.loading:
                    self.reason = message.what
                self._notify()
            case ipc.Ready() if not engine.stop_requested:
                self._became_ready(engine)

    def _became_ready(self, engine: EngineProcess) -> None:
        """Serve with an engine that has loaded, or keep it on standby."""
        assert engine.ready_at is not None
        seconds = self._load_seconds[engine.index] = engine.ready_at - engine.started_at
        took = f"loaded in {seconds:.1f} s"
        if self._side_by_side:
            self._record_event("ready", took, engine)
            self.requests.serve_with(engine)
            self._serve_side_by_side(self.requests.engines)
            return
        previous_index = self._index
        if engine.index > previous_index:  # a standby, or a bridge
            if self.state != EngineState.restarting:
                self._record_event("standby", f"{took}, ready to take over", engine)
                return
            self.fallbacks += 1
            self.bridges += 1
            self._fell_back_at = engine.ready_at
            last = next(end for end in reversed(self._endings) if end.engine == previous_index)
            text = f"to {engine.label}, {took}, until {self.label} has restarted: {last.message}"
            self._record_event("fell_back", text, cause=last.cause)
        elif engine.index == previous_index:
            self._record_event("ready", took, engine)
        else:  # a preferred engine
            self.returns += 1
            self._record_event("returned", f"{engine.label} serves again", engine)
        self._serve_with(engine)
        self._end_later_engines(engine)

    def _end_later_engines(self, engine: EngineProcess) -> None:
        """Move sequences of which the reader has received nothing from later engines to this one,
        which serves now. Let later engines finish the others and end. One on standby stays."""
        for index in [index for index in self._engines if index > engine.index]:
            later = self._engines[index]
            self.requests.recall(later)
            if self._wants_standby and index == engine.index + 1:
                continue
            self._retired.add(self._engines.pop(index))
            self._stop_engine(later, drain=True)

    def _serve_with(self, engine: EngineProcess) -> None:
        """Make this ready engine the current one."""
        self._index, self.ready, self.loading = engine.index, engine.ready, None
        if self.state != EngineState.draining:
            self._become(EngineState.ready, None)
        self.requests.serve_with(engine)
        if self._wants_standby and self._index + 1 < len(self.configs):
            self._background.start(self._spawn(self._index + 1))

    def _serve_side_by_side(self, serving: Sequence[EngineProcess]) -> None:
        """Serve with these engines, which are ready, unless others are still waited for."""
        if not serving or self._waits_for_others(serving):
            return
        self.ready, self.loading = serving[0].ready, None
        if self.state != EngineState.ready:
            self._become(EngineState.ready, None)
            for engine in self.engines:
                if engine.ready is None:
                    self._record_event(
                        "late", "still loading; the other engines serve without it", engine
                    )

    def _waits_for_others(self, serving: Sequence[EngineProcess]) -> bool:
        """Return whether the model is still loading because of engines other than these, which are
        ready."""
        missing_count = len(self.configs) - len(self._given_up) - len(serving)
        if self.state != EngineState.loading or not missing_count:
            return False
        waits_until = min(
            engine.ready_at + max(MIN_WAIT_FOR_OTHERS_SECONDS, engine.ready_at - engine.started_at)
            for engine in serving
            if engine.ready_at is not None
        )
        return time.monotonic() < waits_until

    def _stop_engine(self, engine: EngineProcess, drain: bool) -> None:
        """End an engine: now, or with `drain` after its sequences. One that loads is killed."""
        engine.stop_requested = True
        if engine.ready is not None:
            engine.send(ipc.Stop(drain))
        else:
            engine.kill()

    # Engines end.

    def _ended(self, engine: EngineProcess) -> None:
        """Handle the end of a process: find out why it ended, decide which engine comes next, and
        move its sequences there."""
        is_current = self._current is engine
        if is_current and not self._side_by_side:
            self.ready = None
        if self._engines.get(engine.index) is engine:
            del self._engines[engine.index]
        self._retired.discard(engine)
        message = "the engine was stopped"
        if not engine.ended_as_requested:  # always so if no stop was requested
            cause, message = engine.why()
            self.deaths[cause.value] += 1
            self._record_event("died", message, engine, cause)
        if not engine.stop_requested:
            now = time.monotonic()
            ready_seconds = None if engine.ready_at is None else now - engine.ready_at
            self._endings.append(EngineExit(engine.index, cause, message, now, ready_seconds))
            if self._side_by_side:
                self._one_died(engine, self._endings[-1])
            elif is_current:
                self._current_died(engine, self._endings[-1])
            elif engine.index > self._index:  # it was on standby
                pause = self._limits.backoff_longest_seconds
                self._background.start(self._spawn(engine.index, pause))
        self.requests.move(engine, message, None if self.state in _INACTIVE else self._index)
        self._notify()

    def _one_died(self, engine: EngineProcess, ending: EngineExit) -> None:
        """Restart one of the engines that serve side by side, or leave the model to the others."""
        engines = engine.index + 1  # as if it were the last of the list: it has no fallback
        decision = after_death(self._endings, engines, self._limits)
        if decision.engine is None:
            self._given_up.add(engine.index)
            self._record_event("failed", decision.text, engine, ending.cause)
        else:
            self.restarts += 1
            message = f"in {decision.delay_seconds:.1f} s: {ending.message}"
            self._record_event("restarting", message, engine, ending.cause)
            expected_seconds = decision.delay_seconds + self._expected_load_seconds(engine.index)
            self._ready_due_at = ending.at_seconds + expected_seconds
            self._background.start(self._spawn(engine.index, decision.delay_seconds))
        others = [other for other in self.requests.engines if other is not engine]
        if len(self._given_up) == len(self.configs):
            self.ready = None
            self._become(EngineState.failed, decision.text)
            self.requests.fail(decision.text, only_waiting=True)
        elif self.state == EngineState.loading:
            self._become(EngineState.loading, self._words_without(engine, decision))
            self._serve_side_by_side(others)
        elif others:
            self.ready = others[0].ready
        else:
            self.ready = None
            left = self._load_seconds.keys() - self._given_up
            state = EngineState.restarting if left else EngineState.loading
            self._become(state, self._words_without(engine, decision))

    def _words_without(self, engine: EngineProcess, decision: RestartDecision) -> str:
        """Return what is done after the death of one of several engines, none of which serves."""
        if decision.engine is not None:
            return decision.text
        return f"waiting for the other engines; {engine.name} is given up: {decision.text}"

    def _current_died(self, engine: EngineProcess, ending: EngineExit) -> None:
        """Restart the current engine, or fall back to the next one, or fail."""
        standby = self._engines.get(engine.index + 1)
        is_warm = standby is not None and standby.ready is not None
        decision = after_death(self._endings, len(self.configs), self._limits, is_warm)
        index = decision.engine
        if index is None:
            self._record_event("failed", decision.text, engine, ending.cause)
            self._become(EngineState.failed, decision.text)
            self.requests.fail(decision.text, only_waiting=True)
            return
        if index != engine.index:
            self.fallbacks += 1
            self._fell_back_at = ending.at_seconds
            standby_note = ", which was on standby" if is_warm else ""
            message = f"to {label(self.configs[index])}{standby_note}: {ending.message}"
            self._record_event("fell_back", message, engine, ending.cause)
        else:
            self.restarts += 1
            message = f"in {decision.delay_seconds:.1f} s: {ending.message}"
            self._record_event("restarting", message, engine, ending.cause)
        self._index = index
        due = ending.at_seconds + decision.delay_seconds + self._expected_load_seconds(index)
        self._ready_due_at = due
        next_engine = self._engines.get(index)  # if it is loaded or loading already
        if next_engine is not None and next_engine.ready is not None:
            self._serve_with(next_engine)
            return
        has_served = engine.ready_at is not None or self.state == EngineState.restarting
        self._become(EngineState.restarting if has_served else EngineState.loading, decision.text)
        if next_engine is None:
            self._background.start(self._spawn(index, decision.delay_seconds))
        if index == engine.index and engine.ready_at is not None:
            self._bridge(due)

    def _bridge(self, restarted_at: float) -> None:
        """Load the CPU's engine while a GPU's restarts, if it will be ready before `restarted_at`
        (by time.monotonic()) and has enough memory."""
        later = self._index + 1
        if self.estimate_load_seconds is None or later >= len(self.configs):
            return
        if self.config.device != "gpu" or self.configs[later].device != "cpu":
            return
        bound_seconds = self.estimate_load_seconds(self.configs[later])
        if bound_seconds is None:
            return
        seconds = self._load_seconds.get(later, bound_seconds)
        ready_at = time.monotonic() + seconds
        if ready_at < restarted_at:
            self._ready_due_at = ready_at
            self._background.start(self._spawn(later, is_bridge=True))

    @property
    def _max_load_silence(self) -> float | None:
        """The seconds that a loading engine may be silent; None: as its device may be.

        Engines that serve side by side load alike. So if all others are given up, and one of them
        has loaded, one that takes much longer hangs, and the model must not wait for it.
        """
        loaded = self._load_seconds.values()
        if not self._given_up or not loaded or self.requests.engines:
            return None
        return max(MIN_LAST_LOAD_SECONDS, MAX_LOAD_SLOWDOWN * max(loaded))

    def _expected_load_seconds(self, index: int) -> float:
        """Return what the last load of this engine took, else the last of any."""
        measured = self._load_seconds
        if index in measured:
            return measured[index]
        return next(reversed(measured.values()), DEFAULT_LOAD_SECONDS)

    # Periodic checks.

    async def _check_periodically(self) -> None:
        """Kill engines that hang, end waiting sequences past their deadline, and load the preferred
        engine beside the current one when that is due."""
        while True:
            await asyncio.sleep(CHECK_SECONDS)
            now = time.monotonic()
            self.requests.end_overdue()
            for engine in self._living:
                engine.end_if_hung(self._limits.health_timeout_seconds, self._max_load_silence)
            if self._side_by_side and self.state == EngineState.loading:
                self._serve_side_by_side(self.requests.engines)
            if self._index and self.state == EngineState.ready and 0 not in self._engines:
                at = return_at(self._endings, self._fell_back_at, self._returns, self._limits)
                if at is not None and now >= at:
                    self._returns.append(now)
                    await self._spawn(0)

    def _become(self, state: EngineState, reason: str | None) -> None:
        self.state, self.reason, self.since = state, reason, time.monotonic()
        self._notify()

    def _notify(self) -> None:
        """Wake up everybody who waits for a change."""
        self._changed.set()
        self._changed = asyncio.Event()

    def _record_event(
        self,
        kind: str,
        message: str,
        engine: EngineProcess | None = None,
        cause: Cause | None = None,
    ) -> None:
        """Record an event of an engine (None: the current one) and report it to `on_event`."""
        name = engine.name if engine is not None else self.label
        event = EngineEvent(time.time(), kind, name, message, cause, self.config.model_name)
        self.events.append(event)
        if self._on_event is not None:
            # Later, on the loop: a failing listener must not keep the next engine from starting.
            asyncio.get_running_loop().call_soon(self._on_event, event)


class Background:
    """Starts background tasks and keeps them referenced until they end, as asyncio itself does not.

    A CrossoverError is for whoever awaits the task. Any other error is a bug: it is logged and
    passed to `on_failure`.
    """

    def __init__(self, on_failure: Callable[[BaseException], None] = lambda bug: None) -> None:
        self._on_failure = on_failure
        self._tasks: set[asyncio.Task[Any]] = set()

    def start(self, work: Awaitable[T]) -> asyncio.Task[T]:
        """Start the work as a task and return the task."""
        task: asyncio.Task[T] = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def cancel(self) -> None:
        """Cancel all tasks except the calling one."""
        for task in self._tasks - {asyncio.current_task()}:
            task.cancel()

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        problem = None if task.cancelled() else task.exception()
        if problem is not None and not isinstance(problem, CrossoverError):
            logger.error("Internal error", exc_info=problem)
            self._on_failure(problem)

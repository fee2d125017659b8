"""Keeps one model served: starts and restarts its engine, and moves sequences between engines.

    supervisor = Supervisor([gpu_config, cpu_config])        # in order of preference
    await supervisor.start()
    await supervisor.wait_ready(600)
    stream = supervisor.submit(GenerationRequest([1, 2, 3], max_tokens=64))
    await stream.arrived.wait(); stream.take()
    await supervisor.stop(drain=True, timeout_seconds=30)

Everything happens on one event loop. States: loading -> ready <-> restarting -> failed; draining ->
stopped, or draining -> unloaded, from where `start` begins again. There is at most one engine for
each configuration. The current one serves or will serve, one of an earlier place takes over as soon
as it is loaded, and one of a later place is on standby. When an engine dies, sequences that have
sent nothing to their reader start again on the next one; the others end with finish "error".

A bridge: while a GPU's engine that died restarts, the next engine of the list, on the CPU, loads
beside it where `estimate_load_seconds` says that it will be ready sooner. Whichever is ready first
serves. When the GPU's engine is back, sequences whose reader has seen nothing move to it.
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
    after_death,
    return_at,
)

logger = logging.getLogger("crossover.serving")
T = TypeVar("T")
DEFAULT_LOAD_SECONDS = 5.0  # where no engine has been loaded yet
LOOK_SECONDS = 0.1  # between two checks of engines and deadlines
_KEPT_EVENTS, _KEPT_ENDINGS = 200, 100
RETRY_SECONDS = 30.0  # before a failed model is tried again
_OVER = (EngineState.failed, EngineState.stopped, EngineState.draining, EngineState.unloaded)
_BOUNDS, _LIMITS = QueueBounds(), RecoveryLimits()


class Event(msgspec.Struct, frozen=True):
    """Something that happened to an engine."""

    unix_seconds: float
    # started, ready, standby, died, restarting, fell_back, returning, returned, failed, draining,
    # stopped, unloaded
    kind: str
    engine: str  # "llama_cpp/cpu"
    message: str
    cause: Cause | None = None
    model: str = ""


class Supervisor:
    """See the module's docstring.

    `standby`: keep the next engine of the list loaded (warm) instead of loading it when it is
    needed (cold). `on_event` gets the events of engines, `on_output` the lines that they print.
    """

    def __init__(
        self,
        configs: Sequence[EngineConfig],
        *,
        bounds: QueueBounds = _BOUNDS,
        limits: RecoveryLimits = _LIMITS,
        standby: bool = False,
        on_event: Callable[[Event], None] | None = None,
        on_output: Callable[[str], None] = print,
    ) -> None:
        self.configs = tuple(configs)
        self.state = EngineState.loading
        self.reason: str | None = "starting"
        self.since = time.monotonic()  # when the state or its reason last changed
        self.requests = InflightRequests(bounds, configs[0].settings.slots)
        self.ready: ipc.Ready | None = None  # the serving engine's message; None: none serves
        self.loading: ipc.Loading | None = None
        self.events: deque[Event] = deque(maxlen=_KEPT_EVENTS)
        self.restarts = self.fallbacks = self.returns = 0
        self.bridges = 0  # fallbacks that began while the preferred engine was restarting
        # Upper bound of the seconds until an engine that never ran here is ready; None: it has no
        # memory. Without this function there are no bridges.
        self.estimate_load_seconds: Callable[[EngineConfig], float | None] | None = None
        self.deaths: Counter[str] = Counter()  # unexpected ends, by cause
        self._limits = limits
        self._wants_standby = standby
        self._on_event = on_event
        self._on_output = on_output
        self._place = 0  # index of the configuration in use
        self._engines: dict[int, EngineProcess] = {}  # by index of the configuration
        self._retired: set[EngineProcess] = set()  # engines that finish their sequences and end
        self._endings: deque[EngineExit] = deque(maxlen=_KEPT_ENDINGS)
        self._fell_back_at = 0.0
        self._load_seconds: dict[int, float] = {}  # of the last load, by place
        self._ready_due_at = 0.0  # when an engine is expected to serve, by time.monotonic()
        self._returns: list[float] = []  # times of attempts to return to an earlier place
        self._changed = asyncio.Event()
        self._background = Background(
            lambda bug: self._become(EngineState.failed, f"internal error: {bug}")
        )

    # State.

    @property
    def config(self) -> EngineConfig:
        """Return the configuration that is or will be in use."""
        return self.configs[self._place]

    @property
    def label(self) -> str:
        return label(self.config)

    @property
    def _current(self) -> EngineProcess | None:
        return self._engines.get(self._place)

    @property
    def engine_pid(self) -> int | None:
        current = self._current
        return current.pid if current is not None and current.alive else None

    @property
    def in_flight(self) -> int:
        """Return the number of sequences that are not finished."""
        return len(self.requests)

    @property
    def pids(self) -> list[int]:
        """Return the pids of all running engine processes, in any role."""
        return sorted(one.pid for one in self._living if one.alive and one.pid is not None)

    @property
    def _living(self) -> list[EngineProcess]:
        return [*self._engines.values(), *self._retired]

    @property
    def loaded(self) -> list[EngineConfig]:
        """Configurations of the engines that serve, load or stand by."""
        return [engine.config for engine in self._engines.values()]

    def retry_after_seconds(self) -> float:
        """Return when to retry while no engine serves: the rest of the load, as long as the last
        one took."""
        due = self.since + RETRY_SECONDS if self.state in _OVER else self._ready_due_at
        return max(1.0, due - time.monotonic())

    def unavailable(self) -> Unavailable:
        """Return the error for requests while no engine serves."""
        text = f"The model is not available ({self.state}): {self.reason or 'it will be soon'}"
        return Unavailable(text, self.retry_after_seconds(), self.state)

    # Commands.

    async def start(self, configs: Sequence[EngineConfig] = ()) -> None:
        """Start the first engine if none is running; return immediately. After a stop it starts
        again, with new `configs` if they are given."""
        if configs and tuple(configs) != self.configs:
            self.configs = tuple(configs)
            self._load_seconds.clear()
        self._endings.clear()
        self._returns.clear()
        self._place = 0
        self._ready_due_at = time.monotonic() + self._expected_load_seconds(0)
        self._become(EngineState.loading, "starting")
        self._background.cancel()
        self._background.keep(self._look())
        self._background.keep(self._spawn(0))

    def rest(self, state: EngineState, reason: str) -> None:
        """Set why no engine is running: unloaded or failed. Only while none is running."""
        idle = (EngineState.loading, EngineState.unloaded, EngineState.failed)
        if not self._living and self.state in idle:
            # A model that is not loaded for lack of room is reported once, at the start.
            is_news = state == EngineState.failed or self.state == EngineState.loading
            if is_news and reason != self.reason:
                self._tell(state.value, reason)
            self._become(state, reason)

    async def wait_ready(self, timeout_seconds: float | None = None) -> ipc.Ready:
        """Wait until an engine serves. Raises EngineFailed if none ever will, or TimeoutError."""
        async with asyncio.timeout(timeout_seconds):
            while self.state != EngineState.ready:
                if self.state in _OVER:
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
        engine = self.requests.engine
        if self.state != EngineState.ready or engine is None:
            raise self.unavailable()
        return self.requests.submit(request, engine, arrived)

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
            self._tell("draining", f"{len(self.requests)} sequences in flight")
            self.requests.failed = 0
            self._become(EngineState.draining, why)
        self.requests.fail(why, only_waiting=True)
        for engine in self._living:
            self._ask_to_end(engine, drain)
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
        # If an unload and a stop happen at the same time, the stop decides the final state.
        if self.state == EngineState.draining or state == EngineState.stopped:
            self._tell(state.value, f"{why}, {cut_off} sequences aborted" if cut_off else why)
            self._become(state, why)
        return cut_off

    # Engines start and send messages.

    async def _spawn(
        self, place: int, delay_seconds: float = 0.0, *, is_bridge: bool = False
    ) -> None:
        """Start the engine of a place after a delay, if it is still wanted then."""
        await asyncio.sleep(delay_seconds)
        is_wanted = self.state in (EngineState.loading, EngineState.restarting)
        if is_bridge:
            is_wanted = self.state == EngineState.restarting and place == self._place + 1
        elif place != self._place:
            last = self._place + 1 if self._wants_standby else self._place
            is_wanted = self.state == EngineState.ready and place <= last
        if not is_wanted or place in self._engines:
            return
        engine = self._engines[place] = EngineProcess(place, self.configs[place], self._on_output)
        if place == self._place:
            self.loading = None
        kind = "returning" if place < self._place else "started"
        purpose = f", to answer until {self.label} has restarted" if is_bridge else ""
        self._tell(kind, f"loading {engine.config.model_name}{purpose}", engine)
        await engine.start(self.requests.hear, self._hear, self._ended)

    def _hear(self, engine: EngineProcess, message: ipc.Loading | ipc.Ready) -> None:
        match message:
            case ipc.Loading() if engine is self._current:
                self.loading = message
                if self.state == EngineState.loading:
                    self.reason = message.what
                self._notify()
            case ipc.Ready() if not engine.asked_to_end:
                self._became_ready(engine)

    def _became_ready(self, engine: EngineProcess) -> None:
        assert engine.ready_at is not None
        seconds = self._load_seconds[engine.place] = engine.ready_at - engine.started_at
        took = f"loaded in {seconds:.1f} s"
        previous_place = self._place
        if engine.place > previous_place:
            if self.state != EngineState.restarting:
                self._tell("standby", f"{took}, ready to take over", engine)
                return
            self.fallbacks += 1
            self.bridges += 1
            self._fell_back_at = engine.ready_at
            last = next(end for end in reversed(self._endings) if end.engine == previous_place)
            text = f"to {engine.label}, {took}, until {self.label} has restarted: {last.message}"
            self._tell("fell_back", text, cause=last.cause)
        elif engine.place == previous_place:
            self._tell("ready", took, engine)
        else:
            self.returns += 1
            self._tell("returned", f"{engine.label} serves again", engine)
        self._serve_with(engine)
        self._end_later_engines(engine)

    def _end_later_engines(self, engine: EngineProcess) -> None:
        """Move what later engines have not begun to answer to this one, which serves now, and let
        them end with the rest; one that stands by stays loaded."""
        for place in [place for place in self._engines if place > engine.place]:
            later = self._engines[place]
            self.requests.recall(later)
            if self._wants_standby and place == engine.place + 1:
                continue
            self._retired.add(self._engines.pop(place))
            self._ask_to_end(later, drain=True)

    def _serve_with(self, engine: EngineProcess) -> None:
        """Make this ready engine the current one."""
        self._place, self.ready, self.loading = engine.place, engine.ready, None
        if self.state != EngineState.draining:
            self._become(EngineState.ready, None)
        self.requests.serve_with(engine)
        if self._wants_standby and self._place + 1 < len(self.configs):
            self._background.keep(self._spawn(self._place + 1))

    def _ask_to_end(self, engine: EngineProcess, drain: bool) -> None:
        engine.asked_to_end = True
        if engine.ready is not None:
            engine.send(ipc.Stop(drain))
        else:
            engine.kill()

    # Engines end.

    def _ended(self, engine: EngineProcess) -> None:
        """Handle the end of a process: find out why, move its sequences, decide what comes next."""
        is_current = self._current is engine
        if is_current:
            self.ready = None
        if self._engines.get(engine.place) is engine:
            del self._engines[engine.place]
        self._retired.discard(engine)
        message = "the engine was stopped"
        if not engine.ended_as_asked:
            cause, message = engine.why()
            self.deaths[cause.value] += 1
            self._tell("died", message, engine, cause)
        if not engine.asked_to_end:
            now = time.monotonic()
            lived = None if engine.ready_at is None else now - engine.ready_at
            self._endings.append(EngineExit(engine.place, cause, message, now, lived))
            if is_current:
                self._current_died(engine, self._endings[-1])
            elif engine.place > self._place:  # another stands by
                pause = self._limits.backoff_longest_seconds
                self._background.keep(self._spawn(engine.place, pause))
        self.requests.move(engine, message, None if self.state in _OVER else self._place)
        self._notify()

    def _current_died(self, engine: EngineProcess, ending: EngineExit) -> None:
        standby = self._engines.get(engine.place + 1)
        is_warm = standby is not None and standby.ready is not None
        verdict = after_death(self._endings, len(self.configs), self._limits, is_warm)
        place = verdict.engine
        if place is None:
            self._tell("failed", verdict.text, engine, ending.cause)
            self._become(EngineState.failed, verdict.text)
            self.requests.fail(verdict.text, only_waiting=True)
            return
        if place != engine.place:
            self.fallbacks += 1
            self._fell_back_at = ending.at_seconds
            warm = ", which was on standby" if is_warm else ""
            to = f"to {label(self.configs[place])}{warm}: {ending.message}"
            self._tell("fell_back", to, engine, ending.cause)
        else:
            self.restarts += 1
            when = f"in {verdict.delay_seconds:.1f} s: {ending.message}"
            self._tell("restarting", when, engine, ending.cause)
        self._place = place
        due = ending.at_seconds + verdict.delay_seconds + self._expected_load_seconds(place)
        self._ready_due_at = due
        heir = self._engines.get(place)  # an engine that is loaded or loading
        if heir is not None and heir.ready is not None:
            self._serve_with(heir)
            return
        was_up = engine.ready_at is not None or self.state == EngineState.restarting
        self._become(EngineState.restarting if was_up else EngineState.loading, verdict.text)
        if heir is None:
            self._background.keep(self._spawn(place, verdict.delay_seconds))
        if place == engine.place and engine.ready_at is not None:
            self._bridge(due)

    def _bridge(self, restarted_at: float) -> None:
        """Load the CPU's engine beside a GPU's that restarts, where it will be ready before
        `restarted_at` (by time.monotonic()) and has memory."""
        later = self._place + 1
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
            self._background.keep(self._spawn(later, is_bridge=True))

    def _expected_load_seconds(self, place: int) -> float:
        """Return what the last load of this engine took, else the last of any."""
        measured = self._load_seconds
        return measured.get(place, next(reversed(measured.values()), DEFAULT_LOAD_SECONDS))

    # Periodic checks.

    async def _look(self) -> None:
        """Kill engines that hang, end waiting sequences past their deadline, and load the preferred
        engine beside the current one when that is due."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            now = time.monotonic()
            self.requests.end_overdue()
            for engine in self._living:
                engine.end_if_hung(self._limits.health_timeout_seconds)
            if self._place and self.state == EngineState.ready and 0 not in self._engines:
                at = return_at(self._endings, self._fell_back_at, self._returns, self._limits)
                if at is not None and now >= at:
                    self._returns.append(now)
                    await self._spawn(0)

    def _become(self, state: EngineState, reason: str | None) -> None:
        self.state, self.reason, self.since = state, reason, time.monotonic()
        self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _tell(
        self,
        kind: str,
        message: str,
        engine: EngineProcess | None = None,
        cause: Cause | None = None,
    ) -> None:
        who = engine.label if engine is not None else self.label
        event = Event(time.time(), kind, who, message, cause, self.config.model_name)
        self.events.append(event)
        if self._on_event is not None:
            # Later, on the loop: a failing listener must not keep the next engine from starting.
            asyncio.get_running_loop().call_soon(self._on_event, event)


class Background:
    """Background tasks, referenced until they end. CrossoverErrors are left to whoever awaits the
    task; any other error is logged and passed to `on_failure`."""

    def __init__(self, on_failure: Callable[[BaseException], None] = lambda bug: None) -> None:
        self._on_failure = on_failure
        self._tasks: set[asyncio.Task[Any]] = set()

    def keep(self, work: Awaitable[T]) -> asyncio.Task[T]:
        """Start it as a task."""
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

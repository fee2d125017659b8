"""Keeps one model served: an engine process that lives, sequences given to it, and its state.

    supervisor = Supervisor([gpu_config, cpu_config])        # in order of preference
    await supervisor.start()
    await supervisor.wait_ready(600)
    stream = supervisor.submit(GenerationRequest([1, 2, 3], max_tokens=64))
    async for delta in stream: ...
    await supervisor.stop(drain=True, timeout_seconds=30)

Everything happens on one event loop. States: loading -> ready <-> restarting -> failed; draining ->
stopped, or draining -> unloaded, from where `start` begins again.

Roles of engines: `current` serves or will; `candidate` is the preferred engine, loading while
another serves (failback); `standby` is the next engine of the list, loaded to take over when the
current one dies; the rest are retired and finish what they have. When an engine dies, sequences
whose reader has seen nothing begin again on the next one; the others end with finish "error".
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Sequence
from enum import StrEnum
from typing import Any, TypeVar

import msgspec

from serving.backends.backend_interface import EngineConfig
from serving.engine.ipc_messages import (
    FromEngine,
    GenerationRequest,
    Loading,
    Ready,
    Step,
    StepStats,
    Stop,
)
from serving.errors import Cause, EngineFailed, EngineState, ServingError, Unavailable
from serving.supervisor.admission import QueueBounds
from serving.supervisor.engine_process import EngineProcess, label
from serving.supervisor.inflight_requests import InflightRequests, Stream
from serving.supervisor.restart_policy import (
    Ending,
    RecoveryLimits,
    after_death,
    backoff_seconds,
)
from serving.supervisor.return_to_gpu import Failback

T = TypeVar("T")
KEPT_EVENTS = 200
LAG_LOOK_SECONDS = 0.1
_KEPT_ENDINGS = 100
_SERVING = (EngineState.loading, EngineState.ready, EngineState.restarting)
_BOUNDS = QueueBounds()
_LIMITS = RecoveryLimits()
_NOT_SOON = (EngineState.failed, EngineState.stopped, EngineState.draining)


class EventKind(StrEnum):
    """What happened to an engine."""

    started = "started"
    ready = "ready"
    standby = "standby"
    died = "died"
    restarting = "restarting"
    fell_back = "fell_back"
    returning = "returning"
    returned = "returned"
    failed = "failed"
    draining = "draining"
    stopped = "stopped"
    unloaded = "unloaded"


class Event(msgspec.Struct, frozen=True):
    """Something that happened to an engine."""

    unix_seconds: float
    kind: EventKind
    engine: str  # "llama_cpp/cpu"
    message: str
    cause: Cause | None = None
    model: str = ""


class Role(StrEnum):
    """What an engine process is for."""

    current = "current"
    candidate = "candidate"
    standby = "standby"
    retired = "retired"


class Supervisor:
    """See the module's docstring.

    `standby`: keep the next engine of the list loaded (warm), not only when it is needed
    (cold). `preferred_usable`: asked before failback whether the first engine could load now.
    `on_event` hears of the engines, `on_output` gets the lines that they print; None: standard
    error.
    """

    def __init__(
        self,
        configs: Sequence[EngineConfig],
        *,
        bounds: QueueBounds = _BOUNDS,
        limits: RecoveryLimits = _LIMITS,
        standby: bool = False,
        preferred_usable: Callable[[], Awaitable[bool]] | None = None,
        on_event: Callable[[Event], None] | None = None,
        on_output: Callable[[str], None] | None = None,
    ) -> None:
        if not configs:
            raise ValueError("a supervisor needs at least one engine configuration")
        self.configs = tuple(configs)
        self.state = EngineState.loading
        self.reason: str | None = "starting"
        self.events: deque[Event] = deque(maxlen=KEPT_EVENTS)
        self._on_event = on_event
        self._changed = asyncio.Event()
        self.limits = limits
        self.stats: StepStats | None = None
        self.loading: Loading | None = None
        self.restarts = 0
        self.fallbacks = 0
        self.returns = 0
        self.deaths: Counter[str] = Counter()  # by cause
        self.on_step: Callable[[StepStats], None] | None = None  # after each step of the current
        self._on_output = on_output
        self._requests = InflightRequests(bounds, self.configs[0].slots)
        self._place = 0  # of the current engine's configuration
        self._current: EngineProcess | None = None
        self._candidate: EngineProcess | None = None
        self._standby: EngineProcess | None = None
        self._wants_standby = standby
        self._standby_deaths = 0
        self._engines: set[EngineProcess] = set()  # all that live, retired ones included
        self._endings: list[Ending] = []
        self._load_seconds: dict[int, float] = {}  # by place
        self._failback = Failback(limits, preferred_usable, time.monotonic)
        self._background = Background("the supervisor", on_failure=self._has_a_bug)
        self._failed_before_stop = 0

    # What others may know.

    @property
    def config(self) -> EngineConfig:
        """The configuration in use, or about to be."""
        return self.configs[self._place]

    @property
    def ready(self) -> Ready | None:
        """What the serving engine said when it was loaded; None while none serves."""
        return self._current.ready if self._current is not None else None

    @property
    def label(self) -> str:
        return label(self.config)

    @property
    def engine_pid(self) -> int | None:
        current = self._current
        return current.pid if current is not None and current.alive else None

    @property
    def in_flight(self) -> int:
        """Sequences submitted and not finished."""
        return len(self._requests)

    @property
    def waiting(self) -> int:
        """Those of them that have shown no token yet."""
        return self._requests.ledger.waiting

    @property
    def standby(self) -> str | None:
        """The label of the engine on standby, loaded; None where there is none."""
        return self._standby.label if self._standby is not None and self._standby.ready else None

    @property
    def pids(self) -> list[int]:
        """Every engine process that lives, in any role."""
        return sorted(one.pid for one in self._engines if one.alive and one.pid is not None)

    def predicted_wait_seconds(self) -> float | None:
        """Time until a sequence submitted now would begin; None where nothing is known yet."""
        return self._requests.ledger.predicted_wait_seconds()

    def retry_after_seconds(self) -> float:
        """When to come back where no engine serves: the rest of the load, by the last one."""
        if self.state in _NOT_SOON:
            return 30.0
        elapsed = 0.0
        if self._current is not None:
            elapsed = time.monotonic() - self._current.started_at
        usual = self._load_seconds.get(self._place)
        fraction = self.loading.fraction if self.loading is not None else None
        if usual is None and fraction is not None and fraction > 0.05:
            usual = elapsed / fraction
        return max(1.0, (5.0 if usual is None else usual) - elapsed)

    # What others may ask for.

    async def start(self, configs: Sequence[EngineConfig] = ()) -> None:
        """Start the first engine; returns when its process runs, not when it is ready.

        After `stop` or `unload` it begins again, with other `configs` where they are given. Raises
        ServingError while an engine lives.
        """
        if self._engines:
            raise ServingError(f"{self.label} cannot be started: it is {self.state}")
        if configs:
            self.configs = tuple(configs)
        self._endings = []
        self._standby = None
        self._standby_deaths = 0
        self._failback.forget()
        self._place = 0
        self._become(EngineState.loading, "starting")
        self._background.keep(self._watch_health())
        self._background.keep(self._watch_lag())
        if len(self.configs) > 1:
            self._background.keep(self._watch_failback())
        await self._spawn(0, Role.current)

    def shelve(self, reason: str) -> None:
        """Say that no engine is wanted for now. Only while none lives."""
        idle = (EngineState.loading, EngineState.unloaded, EngineState.failed)
        if not self._engines and self.state in idle:
            self._become(EngineState.unloaded, reason)

    def give_up(self, reason: str) -> None:
        """Say that no engine could even be tried. Only while none lives."""
        if not self._engines:
            self._tell(EventKind.failed, reason)
            self._become(EngineState.failed, reason)

    async def wait_ready(self, timeout_seconds: float | None = None) -> Ready:
        """Wait until an engine serves. Raises EngineFailed when none ever will, or TimeoutError."""
        async with asyncio.timeout(timeout_seconds):
            while self.state != EngineState.ready:
                if self.state in _NOT_SOON or self.state == EngineState.unloaded:
                    raise EngineFailed(self.reason or self.state)
                await self.wait_change()
        assert self.ready is not None
        return self.ready

    def submit(self, request: GenerationRequest) -> Stream:
        """Give the engine a new sequence. Raises Unavailable or Overloaded."""
        if self.state != EngineState.ready or self._current is None:
            raise Unavailable(
                f"the model is not served at the moment ({self.state}): {self.reason}",
                self.retry_after_seconds(),
                self.state,
            )
        stream = self._requests.admit(request)
        self._requests.give(stream, self._current)
        return stream

    def check_room(self) -> None:
        """Raises Overloaded where not even the shortest sequence may join now."""
        self._requests.check_room(1, 1)

    async def stop(self, drain: bool = True, timeout_seconds: float = 30.0) -> int:
        """End every engine; with `drain`, what is in flight may finish within the time limit.

        Returns how many sequences were cut off. A call with drain=False ends an earlier drain.
        """
        during, after = "the server is shutting down", "the server was stopped"
        return await self._end(
            EngineState.stopped, (during, after), timeout_seconds if drain else None
        )

    async def unload(self, reason: str, drain: bool = True, timeout_seconds: float = 30.0) -> int:
        """As `stop`, but the state becomes unloaded, and `start` may be called again."""
        during = f"the model is being unloaded: {reason}"
        after = f"the model was unloaded: {reason}"
        return await self._end(
            EngineState.unloaded, (during, after), timeout_seconds if drain else None
        )

    async def _end(
        self, state: EngineState, reasons: tuple[str, str], drain_seconds: float | None
    ) -> int:
        during, after = reasons
        if self.state == EngineState.unloaded and not self._engines:
            self._become(state, after)
            return 0
        if self.state == EngineState.stopped:
            return self._requests.failed - self._failed_before_stop
        if self.state != EngineState.draining:
            how = "stopping at once"
            if drain_seconds is not None:
                how = f"{len(self._requests)} sequences in flight"
            self._tell(EventKind.draining, how)
            self._failed_before_stop = self._requests.failed
            self._become(EngineState.draining, during)
        self._requests.fail_waiting(during)
        for engine in self._engines:
            self._ask_to_end(engine, drain=drain_seconds is not None)
        patience = self.limits.kill_after_seconds
        if drain_seconds is not None and len(self._requests):
            patience = drain_seconds
        try:
            async with asyncio.timeout(patience):
                await self._until_no_engine()
        except TimeoutError:
            for engine in self._engines:
                engine.kill()
            await self._until_no_engine()
        self._requests.fail_all(f"{after} before this request had finished")
        cut_off = self._requests.failed - self._failed_before_stop
        await asyncio.gather(*self._background.cancel(), return_exceptions=True)
        # Of an unload and a stop at the same time, the stop has the last word.
        if self.state == EngineState.draining or state == EngineState.stopped:
            self._current = None
            self._candidate = None
            self._standby = None
            said = f"{after}, {cut_off} sequences cut off" if cut_off else after
            self._tell(EventKind(state.value), said)
            self._become(state, after)
        return cut_off

    async def _until_no_engine(self) -> None:
        while self._engines:
            await self.wait_change()

    async def wait_change(self) -> None:
        """Wait until the state, or how far the load is, changes."""
        await self._changed.wait()

    # Engines begin and speak.

    async def _spawn(self, place: int, role: Role) -> None:
        engine = EngineProcess(place, self.configs[place], self._on_output)
        self._engines.add(engine)
        kind, what = EventKind.started, "loading"
        match role:
            case Role.candidate:
                self._candidate = engine
                kind = EventKind.returning
            case Role.standby:
                self._standby = engine
                what = "loading, to stand by,"
            case _:
                self._place = place
                self._current = engine
                self.loading = None
        self._tell(kind, f"{what} {engine.config.model_name}", engine)
        await engine.start(self._hear, self._ended)

    def _hear(self, engine: EngineProcess, message: FromEngine) -> None:
        match message:
            case Step():
                if engine is self._current:
                    self._account_for(message.stats)
                self._requests.hear(engine, message)
            case Loading() if engine is self._current:
                self.loading = message
                if self.state == EngineState.loading:
                    self.reason = message.what
                self._notify()
            case Ready():
                self._became_ready(engine)

    def _account_for(self, stats: StepStats) -> None:
        self.stats = stats
        if self.on_step is not None:
            self.on_step(stats)
        clock = self._requests.ledger.clock
        clock.learn(stats.decode_rows, stats.prefill_tokens, stats.step_seconds)

    def _became_ready(self, engine: EngineProcess) -> None:
        assert engine.ready_at is not None
        self._load_seconds[engine.place] = engine.ready_at - engine.started_at
        took = f"loaded in {self._load_seconds[engine.place]:.1f} s"
        match self._role_of(engine):
            case Role.standby:
                self._tell(EventKind.standby, f"{took}, ready to take over", engine)
            case Role.candidate:
                previous = self._current
                self._candidate = None
                self._failback.fell_back_at = None
                self.returns += 1
                self._tell(EventKind.returned, f"{engine.label} serves again", engine)
                if previous is not None:
                    self._retire(previous)
                self._serve_with(engine)
            case Role.current:
                self._tell(EventKind.ready, took, engine)
                self._serve_with(engine)

    def _serve_with(self, engine: EngineProcess) -> None:
        """This engine, which is ready, gets what waits and what comes."""
        assert engine.ready is not None
        self._current = engine
        self._place = engine.place
        self.loading = None
        self.stats = None
        self._requests.ledger.serve_with(engine.ready.info.slots)
        if self.state != EngineState.draining:
            self._become(EngineState.ready, None)
        self._requests.give_waiting(engine)
        self._want_standby()

    def _retire(self, engine: EngineProcess) -> None:
        """Another engine serves now; this one finishes what it has, then stands by or ends."""
        if self._wants_standby and engine.ready is not None:
            superfluous = self._standby
            self._standby = engine
            if superfluous is None:
                return
            engine = superfluous
        self._ask_to_end(engine, drain=True)

    def _ask_to_end(self, engine: EngineProcess, drain: bool) -> None:
        engine.asked_to_end = True
        if engine.ready is not None:
            engine.send(Stop(drain))
        else:
            engine.kill()

    def _role_of(self, engine: EngineProcess) -> Role:
        for role, holder in (
            (Role.standby, self._standby),
            (Role.candidate, self._candidate),
            (Role.current, self._current),
        ):
            if engine is holder:
                return role
        return Role.retired

    def _lacks_standby(self) -> bool:
        has_next = self._place + 1 < len(self.configs)
        free = self._wants_standby and self._standby is None
        return free and has_next and self.state == EngineState.ready

    def _want_standby(self) -> None:
        if self._lacks_standby():
            self._background.keep(self._load_standby())

    async def _load_standby(self) -> None:
        if self._standby_deaths:
            await asyncio.sleep(backoff_seconds(self._standby_deaths, self.limits))
        if self._lacks_standby():
            await self._spawn(self._place + 1, Role.standby)

    # Engines end.

    def _ended(self, engine: EngineProcess) -> None:
        """The process is gone: find out why, move its sequences, decide what comes next."""
        self._engines.discard(engine)
        role = self._role_of(engine)
        if engine.asked_to_end:
            self._move_requests(engine, "the engine was stopped")
            if role is Role.current:
                self._current = None
            self._notify()
            return
        ending = self._ending_of(engine)
        match role:
            case Role.standby:
                self._standby_died(engine, ending)
            case Role.candidate:
                self._candidate = None
                self._remember(ending)
            case Role.retired:
                self._remember(ending)
                self._move_requests(engine, ending.message)
            case Role.current:
                self._remember(ending)
                self._current_died(engine, ending)

    def _ending_of(self, engine: EngineProcess) -> Ending:
        cause, message = engine.why()
        now = time.monotonic()
        lived = None if engine.ready_at is None else now - engine.ready_at
        self.deaths[cause.value] += 1
        self._tell(EventKind.died, message, engine, cause)
        return Ending(engine.place, cause, message, now, lived)

    def _remember(self, ending: Ending) -> None:
        self._endings = [*self._endings[-_KEPT_ENDINGS + 1 :], ending]

    def _standby_died(self, engine: EngineProcess, ending: Ending) -> None:
        """It serves nobody: load another, unless it keeps dying."""
        self._standby = None
        self._standby_deaths += 1
        self._move_requests(engine, ending.message)  # one just retired may still have some
        if self._standby_deaths < self.limits.deaths:
            self._want_standby()

    def _current_died(self, engine: EngineProcess, ending: Ending) -> None:
        standby = self._standby if self._standby is not None and self._standby.ready else None
        engines = len(self.configs)
        verdict = after_death(self._endings, engines, self.limits, standby is not None)
        self._current = None
        if verdict.engine is None:
            self._fail(engine, ending, verdict.text)
            return
        if verdict.engine != engine.place:
            self.fallbacks += 1
            self._failback.fell_back_at = ending.at_seconds
            warm = ", which stood by" if standby is not None else ""
            to = f"to {label(self.configs[verdict.engine])}{warm}: {ending.message}"
            self._tell(EventKind.fell_back, to, engine, ending.cause)
        else:
            self.restarts += 1
            when = f"in {verdict.delay_seconds:.1f} s: {ending.message}"
            self._tell(EventKind.restarting, when, engine, ending.cause)
        self._place = verdict.engine
        if standby is not None and standby.place == verdict.engine:
            self._standby = None
            self._move_requests(engine, ending.message)
            self._serve_with(standby)
            return
        was_up = engine.ready_at is not None or self.state == EngineState.restarting
        self._become(EngineState.restarting if was_up else EngineState.loading, verdict.text)
        self._move_requests(engine, ending.message)
        if self._standby is not None and self._standby.place == verdict.engine:
            self._current = self._standby  # on its way already
            self._standby = None
        else:
            self._background.keep(self._restart(verdict.engine, verdict.delay_seconds))

    def _fail(self, engine: EngineProcess, ending: Ending, text: str) -> None:
        """Nothing is started any more; a preferred engine that is loading is the last hope."""
        self._move_requests(engine, ending.message)
        self._tell(EventKind.failed, text, engine, ending.cause)
        if self._candidate is not None:
            self._current = self._candidate
            self._candidate = None
            self._place = self._current.place
            self._become(EngineState.restarting, text)
            return
        self._become(EngineState.failed, text)
        self._requests.fail_waiting(text)

    def _move_requests(self, engine: EngineProcess, message: str) -> None:
        successor = self._current if self._current is not engine and self.ready else None
        place = self._place if self.state in _SERVING else None
        self._requests.move(engine, message, successor, place)

    async def _restart(self, place: int, delay_seconds: float) -> None:
        await asyncio.sleep(delay_seconds)
        if self.state in (EngineState.loading, EngineState.restarting) and self._current is None:
            await self._spawn(place, Role.current)

    # What is looked at all the time.

    async def _watch_health(self) -> None:
        """Give up every engine that hangs; `_ended` does the rest."""
        while True:
            await asyncio.sleep(min(0.5, self.limits.health_timeout_seconds / 5))
            for engine in list(self._engines):
                trouble = engine.trouble(self.limits)
                if trouble is not None:
                    engine.give_up(trouble)

    async def _watch_lag(self) -> None:
        """How late this process is: what waits in its sockets is not in the ledger yet.

        An engine looks at the deadlines of what it has; here those of what waits for one.
        """
        while True:
            due = time.monotonic() + LAG_LOOK_SECONDS
            await asyncio.sleep(LAG_LOOK_SECONDS)
            self._requests.ledger.lag_seconds = max(0.0, time.monotonic() - due)
            self._requests.end_overdue()

    async def _watch_failback(self) -> None:
        """Load the preferred engine beside the current one whenever it can be had again."""
        while True:
            await asyncio.sleep(self._failback.pause_seconds)
            if await self._failback.is_open(self._may_return):
                self._failback.begin()
                await self._spawn(0, Role.candidate)

    def _may_return(self) -> bool:
        free = self.state == EngineState.ready and self._place != 0 and self._candidate is None
        return free and self._failback.is_due(self._endings)

    def _has_a_bug(self, problem: BaseException) -> None:
        self._become(EngineState.failed, f"the supervisor failed: {problem}")

    def _become(self, state: EngineState, reason: str | None) -> None:
        self.state = state
        self.reason = reason
        self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _tell(
        self,
        kind: EventKind,
        message: str,
        engine: EngineProcess | None = None,
        cause: Cause | None = None,
    ) -> None:
        who = engine.label if engine is not None else self.label
        event = Event(time.time(), kind, who, message, cause, self.config.model_name)
        self.events.append(event)
        if self._on_event is None:
            return
        try:
            self._on_event(event)
        except Exception as problem:  # whoever listens must not keep an engine from its successor
            context = {"message": "a listener to engines' events failed", "exception": problem}
            asyncio.get_running_loop().call_exception_handler(context)


class Background:
    """`owner` is named where a task fails.

    `expected`: failures that are for whoever awaits the task, not for the log. `on_failure` is told
    of any other, which is a bug.
    """

    def __init__(
        self,
        owner: str,
        expected: tuple[type[Exception], ...] = (),
        on_failure: Callable[[BaseException], None] | None = None,
    ) -> None:
        self._owner = owner
        self._expected = expected
        self._on_failure = on_failure
        self._tasks: set[asyncio.Task[Any]] = set()

    def keep(self, work: Awaitable[T]) -> asyncio.Task[T]:
        """Run it from now on."""
        task: asyncio.Task[T] = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def cancel(self) -> list[asyncio.Task[Any]]:
        """Cancel all but the calling task; returns them, to be awaited where their end matters."""
        tasks = [task for task in self._tasks if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        return tasks

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        problem = None if task.cancelled() else task.exception()
        if problem is None or isinstance(problem, self._expected):
            return
        context = {"message": f"{self._owner} failed", "exception": problem, "task": task}
        asyncio.get_running_loop().call_exception_handler(context)
        if self._on_failure is not None:
            self._on_failure(problem)

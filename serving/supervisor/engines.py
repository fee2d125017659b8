"""The engine processes of one model: who serves, who loads, what follows a death.

Roles: `current` serves or will; `candidate` is the preferred engine, loading while another serves
(failback); `standby` is the next engine of the list, loaded to take over when the current one dies;
the rest are retired and finish what they have. When an engine dies, sequences whose reader has seen
nothing begin again on the next one; the others end with finish "error".
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from enum import StrEnum

from serving.backends.base import EngineConfig
from serving.engine.messages import FromEngine, Loading, Ready, Step, StepStats, Stop
from serving.errors import Cause, EngineState
from serving.supervisor.admission import QueueBounds
from serving.supervisor.process import EngineProcess, label
from serving.supervisor.requests import Requests
from serving.supervisor.restart_policy import (
    Ending,
    Failback,
    RecoveryLimits,
    after_death,
    backoff_seconds,
)
from serving.supervisor.status import Event, EventKind, Status
from serving.supervisor.tasks import Background

LAG_LOOK_SECONDS = 0.1
_KEPT_ENDINGS = 100
_SERVING = (EngineState.loading, EngineState.ready, EngineState.restarting)
_BOUNDS = QueueBounds()
_LIMITS = RecoveryLimits()


class Role(StrEnum):
    """What an engine process is for."""

    current = "current"
    candidate = "candidate"
    standby = "standby"
    retired = "retired"


class Engines(Status):
    """The engines of a Supervisor, whose docstring says what the parameters are."""

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
        super().__init__(on_event)
        self.configs = tuple(configs)
        self.limits = limits
        self.stats: StepStats | None = None
        self.loading: Loading | None = None
        self.restarts = 0
        self.fallbacks = 0
        self.returns = 0
        self.deaths: Counter[str] = Counter()  # by cause
        self.on_step: Callable[[StepStats], None] | None = None  # after each step of the current
        self._on_output = on_output
        self._requests = Requests(bounds, self.configs[0].slots)
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
        self._requests.ledger.worked(stats.prefill_tokens, stats.decode_rows, stats.step_seconds)

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
        self._requests.ledger.slots = engine.ready.info.slots
        self._requests.ledger.forget_pace()
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

    def _tell(
        self,
        kind: EventKind,
        message: str,
        engine: EngineProcess | None = None,
        cause: Cause | None = None,
    ) -> None:
        who = engine.label if engine is not None else self.label
        self._record(Event(time.time(), kind, who, message, cause, self.config.model_name))

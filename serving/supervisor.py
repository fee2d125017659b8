"""The parent's side of serving: keeps one engine process alive, gives it sequences, and says what state it is in.

    supervisor = Supervisor([gpu_config, cpu_config])        # in order of preference
    await supervisor.start()
    await supervisor.wait_ready(600)
    stream = supervisor.submit([1, 2, 3], max_tokens=64)
    async for delta in stream: ...
    await supervisor.stop(drain=True, timeout_seconds=30)

Everything happens on one event loop (asyncio's or uvloop's). States: loading -> ready <-> restarting -> failed; draining -> stopped, or
draining -> unloaded, from where `start` begins anew (a model of several that made room; see serving.fleet).

Whoever asks in another state than ready gets Unavailable with the reason; whoever asks when the queue is full, Overloaded. When an engine
dies, sequences whose reader has seen nothing begin anew on the next engine; the others end with finish "error". When the preferred engine
can be had again, it is loaded beside the one that serves, takes over, and the other one finishes what it has. With `standby`, the next
engine of the list is loaded beside the one that serves, and takes over at once when that one dies. What to do after a death is decided in
serving.recovery, who may join the queue in serving.admission: both pure.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Literal

from serving.admission import QueueBounds
from serving.backends.base import EngineConfig, Sampling
from serving.background import Background
from serving.child import Child
from serving.errors import EngineFailed, ServingError
from serving.life import Event, Life, label
from serving.messages import Died, FromEngine, Loading, Ready, Step, StepStats, Stop
from serving.placement import Cause
from serving.recovery import Ending, RecoveryLimits, after_death
from serving.sequences import Overloaded, Sequences, Unavailable
from serving.standby import Standby
from serving.streams import Stream
from serving.watching import watch_health, watch_lag
from serving.way_back import WayBack

KEPT_EVENTS = 200
_NOT_SOON = ("failed", "stopped", "draining")
_BOUNDS, _LIMITS, _GREEDY = QueueBounds(), RecoveryLimits(), Sampling()


class Supervisor:
    """See the module's docstring. `preferred_usable` is asked, before going back, whether the first engine could load now.

    `standby`: keep the engine that would be fallen back to loaded (warm), for its memory, instead of loading it when it is needed (cold).
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
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not configs:
            raise ValueError("a supervisor needs at least one engine configuration")
        self.configs = tuple(configs)
        self.limits = limits
        self.state = "loading"
        self.reason: str | None = "starting"
        self.stats: StepStats | None = None
        self.loading: Loading | None = None
        self.restarts = 0
        self.fallbacks = 0
        self.returns = 0
        self.rejections: Counter[str] = Counter()
        self.deaths: Counter[str] = Counter()  # by cause
        self.events: deque[Event] = deque(maxlen=KEPT_EVENTS)
        self.on_step: Callable[[StepStats], None] | None = None  # told of every step of the serving engine, for histograms
        self._way_back = WayBack(limits, preferred_usable, clock)
        self._on_event = on_event
        self._on_output = on_output  # lines that engines print; None: to standard error
        self._clock = clock
        self._sequences = Sequences(bounds, self.configs[0].slots, clock)
        self._place = 0
        self._current: Life | None = None
        self._candidate: Life | None = None  # the preferred engine, loading while another serves
        self._standby = Standby(standby, limits)
        self._engines: set[Life] = set()  # every child that lives, those that drain included
        self._endings: list[Ending] = []
        self._load_seconds: dict[int, float] = {}
        self._background = Background("the supervisor", on_failure=lambda bug: self._become("failed", f"the supervisor failed: {bug}"))
        self._failed_before_stop = 0
        self._changed = asyncio.Event()

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
    def engine_pid(self) -> int | None:
        child = self._current.child if self._current is not None else None
        return child.pid if child is not None and child.alive else None

    @property
    def in_flight(self) -> int:
        """Sequences submitted and not finished."""
        return len(self._sequences)

    @property
    def lost(self) -> int:
        """Sequences that ended with an error since the start: their engine died after the reader had seen something, or too often."""
        return self._sequences.failed

    @property
    def waiting(self) -> int:
        """Those of them that have shown no token yet."""
        return self._sequences.ledger.waiting

    @property
    def label(self) -> str:
        return label(self.config)

    @property
    def standby(self) -> str | None:
        """The label of the engine that waits, loaded, to take over; None where none does."""
        return self._standby.loaded.label if self._standby.loaded is not None else None

    @property
    def pids(self) -> list[int]:
        """Every engine process that lives: the one that serves, one on standby, those that drain or load."""
        return sorted(engine.child.pid for engine in self._engines if engine.child is not None and engine.child.alive)

    def predicted_wait_seconds(self) -> float | None:
        """Time until a sequence submitted now would begin; None where nothing is known yet."""
        return self._sequences.ledger.predicted_wait_seconds()

    def retry_after_seconds(self) -> float:
        """When somebody who finds no engine should come back: the rest of the load, as far as the last one tells."""
        if self.state in _NOT_SOON:
            return 30.0
        engine = self._current
        elapsed = self._clock() - engine.started_at if engine is not None else 0.0
        usual = self._load_seconds.get(self._place)
        if usual is None and self.loading is not None and self.loading.fraction and self.loading.fraction > 0.05:
            usual = elapsed / self.loading.fraction
        return max(1.0, (5.0 if usual is None else usual) - elapsed)

    # What others may ask for.

    async def start(self, configs: Sequence[EngineConfig] = ()) -> None:
        """Start the first engine; returns when its process runs. The state goes on by itself.

        After `stop` or `unload` it begins anew, with other `configs` where they are given. Raises ServingError while an engine lives.
        """
        if self._engines:
            raise ServingError(f"{self.label} cannot be started: it is {self.state}")
        if configs:
            self.configs = tuple(configs)
        self._endings = []
        self._standby.forget()
        self._way_back.forget()
        self._place = 0
        self._become("loading", "starting")
        self._background.keep(watch_health(self._engines, self.limits, self._clock))
        self._background.keep(watch_lag(self._sequences.ledger, self._clock))
        if len(self.configs) > 1:
            self._background.keep(self._way_back.watch(self._may_return, lambda: self._spawn(0, "candidate")))
        await self._spawn(self._place)

    def shelve(self, reason: str) -> None:
        """Say that no engine is wanted for now. Only while none lives."""
        if not self._engines and self.state in ("loading", "unloaded", "failed"):
            self._become("unloaded", reason)

    def give_up(self, reason: str) -> None:
        """Say that no engine could even be tried. Only while none lives."""
        if not self._engines:
            self._tell("failed", reason)
            self._become("failed", reason)

    async def wait_ready(self, timeout_seconds: float | None = None) -> Ready:
        """Wait until an engine serves. Raises EngineFailed when none ever will, TimeoutError when it takes too long."""
        async with asyncio.timeout(timeout_seconds):
            while self.state != "ready":
                if self.state in _NOT_SOON or self.state == "unloaded":
                    raise EngineFailed(self.reason or self.state)
                await self._changed.wait()
        assert self.ready is not None
        return self.ready

    async def wait_change(self) -> None:
        """Wait until the state, or how far the load is, changes."""
        await self._changed.wait()

    def submit(
        self,
        prompt: list[int],
        max_tokens: int,
        sampling: Sampling = _GREEDY,
        *,
        stop: Sequence[str] = (),
        stop_token_ids: Sequence[int] = (),
        min_tokens: int = 0,
        ignore_eos: bool = False,
        deadline_seconds: float | None = None,
        include_stop: bool = False,
        whole: bool = False,
    ) -> Stream:
        """Give the engine a new sequence. `whole`: one Delta at the end (for answers that are not streamed; see serving.streams).

        Token ids and lengths are the caller's to check. Raises Unavailable or Overloaded.
        """
        engine = self._current
        if self.state != "ready" or engine is None:
            self.rejections[self.state] += 1
            raise Unavailable(f"the model is not served at the moment ({self.state}): {self.reason}", self.retry_after_seconds())
        try:
            stream = self._sequences.admit(
                prompt, max_tokens, sampling, stop, stop_token_ids, min_tokens, ignore_eos, deadline_seconds, include_stop, whole
            )
        except Overloaded as refusal:
            self.rejections[refusal.kind] += 1
            raise
        self._sequences.give(stream, engine)
        return stream

    def check_room(self) -> None:
        """Raises Overloaded where not even the shortest sequence may join now: it costs less to ask before a prompt is made tokens of."""
        try:
            self._sequences.check_room(1, 1)
        except Overloaded as refusal:
            self.rejections[refusal.kind] += 1
            raise

    async def stop(self, drain: bool = True, timeout_seconds: float = 30.0) -> int:
        """End every engine; with `drain`, what is in flight may finish within the time limit. Returns how many sequences were cut off.

        A second call with drain=False, while the first one drains, ends it at once.
        """
        return await self._end("stopped", "the server is shutting down", "the server was stopped", drain, timeout_seconds)

    async def unload(self, reason: str, drain: bool = True, timeout_seconds: float = 30.0) -> int:
        """The same, but in the end the state is "unloaded" for this reason, and `start` may be called again."""
        during, after = f"the model is being unloaded: {reason}", f"the model was unloaded: {reason}"
        return await self._end("unloaded", during, after, drain, timeout_seconds)

    async def _end(self, state: str, during: str, after: str, drain: bool, timeout_seconds: float) -> int:
        if self.state == "unloaded" and not self._engines:
            self._become(state, after)
            return 0
        if self.state == "stopped":
            return self._sequences.failed - self._failed_before_stop
        if self.state != "draining":
            self._tell("draining", f"{len(self._sequences)} sequences in flight" if drain else "stopping at once")
            self._failed_before_stop = self._sequences.failed
            self._become("draining", during)
        self._sequences.fail_homeless(during)
        for engine in self._engines:
            engine.asked_to_end = True
            if engine.ready is None:
                engine.kill()
            else:
                engine.send(Stop(drain))
        patience = timeout_seconds if drain and len(self._sequences) else self.limits.kill_after_seconds
        try:
            async with asyncio.timeout(patience):
                await self._until_no_engine()
        except TimeoutError:
            for engine in self._engines:
                engine.kill()
            await self._until_no_engine()
        self._sequences.fail_all(f"{after} before this request had finished")
        cut_off = self._sequences.failed - self._failed_before_stop
        await asyncio.gather(*self._background.cancel(), return_exceptions=True)
        if self.state == "draining":
            self._current = self._candidate = self._standby.engine = None
            self._tell(state, f"{after}, {cut_off} sequences cut off" if cut_off else after)
            self._become(state, after)
        return cut_off

    # Engines: their beginning, their messages, their end.

    async def _spawn(self, place: int, role: Literal["current", "candidate", "standby"] = "current") -> None:
        engine = Life(place, self.configs[place], self._clock())
        match role:
            case "candidate":
                self._candidate = engine
            case "standby":
                self._standby.engine = engine
            case "current":
                self._place, self._current, self.loading = place, engine, None
        self._engines.add(engine)
        what = {"current": "loading", "candidate": "loading", "standby": "loading, to stand by,"}[role]
        self._tell("returning" if role == "candidate" else "started", f"{what} {engine.config.model_name}", engine)
        try:
            engine.child = await Child.spawn(engine.config, lambda m: self._hear(engine, m), lambda: self._ended(engine), self._on_output)
        except OSError as problem:
            engine.died = Died(Cause.load_failed.value, f"no process can be started: {problem}")
            self._ended(engine)
            return
        if engine.asked_to_end:  # stop() came while the process was being started
            engine.child.kill()

    def _hear(self, engine: Life, message: FromEngine) -> None:
        now = engine.heard_at = self._clock()
        match message:
            case Step():
                engine.step_at = now
                self._hear_step(engine, message)
            case Loading():
                if engine is self._current:
                    self.loading = message
                    self._become(self.state, message.what if self.state == "loading" else self.reason)
            case Ready():
                engine.ready, engine.ready_at = message, now
                self._load_seconds[engine.place] = now - engine.started_at
                self._hear_ready(engine)
            case Died():
                engine.died = message
            case _:
                pass  # a sign of life

    def _hear_step(self, engine: Life, step: Step) -> None:
        if engine is self._current:
            self.stats = step.stats
            if self.on_step is not None:
                self.on_step(step.stats)
            self._sequences.ledger.worked(step.stats.prefill_tokens, step.stats.decode_rows, step.stats.step_seconds)
        self._sequences.hear(engine, step)

    def _hear_ready(self, engine: Life) -> None:
        took = f"loaded in {self._load_seconds[engine.place]:.1f} s"
        if engine is self._standby.engine:
            self._tell("standby", f"{took}, ready to take over", engine)
            return
        if engine is not self._current and engine is not self._candidate:
            return
        if engine is self._candidate:
            previous, self._candidate = self._current, None
            self._way_back.fell_back_at = None
            self.returns += 1
            self._tell("returned", f"{engine.label} serves again", engine)
            self._retire(previous)
        else:
            self._tell("ready", took, engine)
        self._serve_with(engine)

    def _serve_with(self, engine: Life) -> None:
        """This engine, which is ready, gets what waits and what comes."""
        assert engine.ready is not None
        self._current, self._place = engine, engine.place
        self.loading = None
        self.stats = None
        self._sequences.ledger.slots = engine.ready.info.slots
        self._sequences.ledger.forget_pace()
        if self.state != "draining":
            self._become("ready", None)
        self._sequences.give_homeless(engine)
        self._want_standby()

    def _retire(self, engine: Life | None) -> None:
        """Another engine serves now; this one finishes what it has, and then stands by or ends."""
        if engine is None:
            return
        if self._standby.wanted and engine.ready is not None:
            engine, self._standby.engine = self._standby.engine, engine
            if engine is None:
                return
        engine.asked_to_end = True
        if engine.ready is not None:
            engine.send(Stop(drain=True))
        else:
            engine.kill()

    def _lacks_standby(self) -> bool:
        return self._standby.wanted and self._standby.engine is None and self._place + 1 < len(self.configs) and self.state == "ready"

    def _want_standby(self) -> None:
        if self._lacks_standby():
            self._background.keep(self._stand_by_later(self._standby.pause_seconds()))

    async def _stand_by_later(self, delay_seconds: float) -> None:
        await asyncio.sleep(delay_seconds)
        if self._lacks_standby():
            await self._spawn(self._place + 1, "standby")

    def _ended(self, engine: Life) -> None:
        """The child is gone: find out why, find a place for its sequences, and decide what comes next."""
        self._engines.discard(engine)
        if engine.asked_to_end:
            self._rehouse(engine, "the engine was stopped")
            if engine is self._current:
                self._current = None
            self._notify()
            return
        cause, message = engine.why()
        now = self._clock()
        lived = None if engine.ready_at is None else now - engine.ready_at
        ending = Ending(engine.place, cause, message, now, lived)
        self.deaths[cause.value] += 1
        self._tell("died", message, engine, cause)
        if engine is self._standby.engine:
            worth_a_try = self._standby.died()
            self._rehouse(engine, message)  # one that has just been retired may still have some
            if worth_a_try:
                self._want_standby()
            return
        self._endings = [*self._endings[-99:], ending]
        if engine is self._candidate:
            self._candidate = None
            return
        if engine is not self._current:
            self._rehouse(engine, message)
            return
        verdict = after_death(self._endings, len(self.configs), self.limits, self._standby.loaded is not None)
        self._current = None
        if verdict.engine is None:
            self._rehouse(engine, message)
            self._tell("failed", verdict.text, engine, cause)
            if self._candidate is not None:  # the preferred engine is on its way already: it is the last hope
                self._adopt_candidate(verdict.text)
                return
            self._become("failed", verdict.text)
            self._sequences.fail_homeless(verdict.text)
            return
        if verdict.engine != engine.place:
            self.fallbacks += 1
            self._way_back.fell_back_at = now
            warm = ", which stood by" if self._standby.loaded is not None else ""
            self._tell("fell_back", f"to {label(self.configs[verdict.engine])}{warm}: {message}", engine, cause)
        else:
            self.restarts += 1
            self._tell("restarting", f"in {verdict.delay_seconds:.1f} s: {message}", engine, cause)
        self._place = verdict.engine
        standby = self._standby.engine
        if standby is not None and standby.place == verdict.engine:
            self._standby.engine = None
            if standby.ready is not None:
                self._rehouse(engine, message)
                self._serve_with(standby)
                return
            self._current = standby  # on its way already
        self._become("restarting" if engine.ready_at is not None or self.state == "restarting" else "loading", verdict.text)
        self._rehouse(engine, message)
        if self._current is None:
            self._background.keep(self._spawn_later(verdict.engine, verdict.delay_seconds))

    def _adopt_candidate(self, reason: str) -> None:
        engine = self._candidate
        assert engine is not None
        self._candidate, self._current, self._place = None, engine, engine.place
        self._become("restarting", reason)

    async def _spawn_later(self, place: int, delay_seconds: float) -> None:
        await asyncio.sleep(delay_seconds)
        if self.state in ("loading", "restarting") and self._current is None:
            await self._spawn(place)

    def _rehouse(self, engine: Life, message: str) -> None:
        """Find a place for the sequences of an engine that is gone."""
        successor = self._current if self._current is not engine and self.ready is not None else None
        self._sequences.rehouse(engine, message, successor, retry=self.state in ("loading", "ready", "restarting"))

    def _may_return(self) -> bool:
        free = self.state == "ready" and self._place != 0 and self._candidate is None
        return free and self._way_back.is_due(self._endings)

    # Telling.

    def _become(self, state: str, reason: str | None) -> None:
        self.state, self.reason = state, reason
        self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _tell(self, kind: str, message: str, engine: Life | None = None, cause: Cause | None = None) -> None:
        about = engine.label if engine is not None else self.label
        event = Event(time.time(), kind, about, message, cause.value if cause else None, self.config.model_name)
        self.events.append(event)
        if self._on_event is not None:
            self._on_event(event)

    async def _until_no_engine(self) -> None:
        while self._engines:
            await self._changed.wait()


__all__ = ["Event", "Overloaded", "Supervisor", "Unavailable", "label"]

"""Keeps one model served: an engine process that lives, sequences given to it, and its state.

    supervisor = Supervisor([gpu_config, cpu_config])        # in order of preference
    await supervisor.start()
    await supervisor.wait_ready(600)
    stream = supervisor.submit(GenerationRequest([1, 2, 3], max_tokens=64))
    async for delta in stream: ...
    await supervisor.stop(drain=True, timeout_seconds=30)

Everything happens on one event loop. States: loading -> ready <-> restarting -> failed; draining ->
stopped, or draining -> unloaded, from where `start` begins again.

Engines and their roles: serving.supervisor.engines. What to do after a death:
serving.supervisor.restart_policy. Who may join the queue: serving.supervisor.admission.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from serving.backends.base import EngineConfig
from serving.engine.messages import GenerationRequest, Origin, Ready
from serving.errors import EngineFailed, EngineState, ServingError, Unavailable
from serving.supervisor.engines import Engines, Role
from serving.supervisor.status import EventKind
from serving.supervisor.stream import Stream

_NOT_SOON = (EngineState.failed, EngineState.stopped, EngineState.draining)


class Supervisor(Engines):
    """See the module's docstring.

    `standby`: keep the next engine of the list loaded (warm), not only when it is needed
    (cold). `preferred_usable`: asked before failback whether the first engine could load now.
    `on_output` gets the lines that engines print; None: standard error.
    """

    # What others may know.

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

    def check_room(self, origin: Origin) -> None:
        """Raises Overloaded where not even the shortest sequence may join now."""
        self._requests.check_room(1, 1, origin)

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

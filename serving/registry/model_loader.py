"""Loads and unloads the models of one server, and finds the place of each.

Only one model loads at a time, so that the free memory is known. When memory is short, idle models
are evicted, the least recently used first. A model in use is never evicted.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping

import msgspec

from crossover.models.machine_limits import available_bytes
from crossover.serving.backends.backend_interface import EngineConfig
from crossover.serving.errors import EngineFailed, EngineState, LoadFailed, NoRoom, Unavailable
from crossover.serving.placement.engines import Reason
from crossover.serving.placement.placement_policy import (
    USABLE_SHARE,
    NoPlacement,
    Placement,
    narrowed,
)
from crossover.serving.registry.eviction import bytes_by_place, bytes_free, choose_eviction
from crossover.serving.registry.prepare_model import Host
from crossover.serving.registry.served_model import ServedModel
from crossover.serving.supervisor.engine_supervisor import Background

UNLOADED_STATES = (EngineState.unloaded, EngineState.draining)  # unloaded, or about to be
# Assumptions of `estimate_load_seconds`, on the safe side: the start of Python and its libraries,
# and the speed of a slow disk.
ENGINE_START_SECONDS = 2.0
LOAD_BYTES_PER_SECOND = 1e9


class RegistryLimits(msgspec.Struct, frozen=True):
    """Limits of a server with several models."""

    memory_bytes: int | None = None  # RAM of all engines together; None: what the machine has free
    load_wait_seconds: float = 60.0  # how long a request waits until its model is loaded
    drain_seconds: float = 60.0  # how long running requests may go on when a model is unloaded


def load_cancelled(model: ServedModel) -> Unavailable:
    """Return the error for requests that wait for a load that was canceled."""
    text = (
        f"Loading the model {model.served_name!r} was canceled: it was unloaded, or the server is "
        "stopping."
    )
    return Unavailable(text, 5.0, "unloaded")


class ModelLoader:
    """See the module's docstring. `models`: the registry's own mapping, to which it adds models."""

    def __init__(
        self, machine: Host, limits: RegistryLimits, models: Mapping[str, ServedModel]
    ) -> None:
        self.machine = machine
        self.limits = limits
        self.models = models
        self.is_stopping = False
        self._load_lock = asyncio.Lock()
        # Errors of these tasks are raised where a load is waited for, and nowhere else.
        self._background = Background()

    def start(self) -> None:
        """Start loading the models with load = "start", in order; return immediately."""
        self._background.start(self._unload_idle_and_retry())
        for model in self.models.values():
            if model.prepared.model.load == "start":
                self.load_soon(model, may_evict=False)

    async def stop(self, drain: bool, timeout_seconds: float) -> int:
        """Stop every engine, as Supervisor.stop does; return how many sequences were aborted."""
        self.is_stopping = True
        for model in self.models.values():
            self._cancel_load(model)
        stops = (model.supervisor.stop(drain, timeout_seconds) for model in self.models.values())
        counts = await asyncio.gather(*stops)
        self._background.cancel()
        return sum(counts)

    # Loading.

    async def load(self, model: ServedModel) -> None:
        """Load a model now, as an administrator asked, and let requests load it again.

        Raises NoRoom, NoPlacement, LoadFailed, and Unavailable if an unload cancels the load.
        """
        model.on_demand = True
        load = self.load_soon(model)
        try:
            await asyncio.shield(load)
        except asyncio.CancelledError:
            if load.cancelled():
                raise load_cancelled(model) from None
            raise

    def load_soon(self, model: ServedModel, may_evict: bool = True) -> asyncio.Task[None]:
        """Return the task that loads this model; a new one if there is none. `may_evict`: idle
        models may be unloaded for it."""
        if model.load is None:
            model.load = self._background.start(self._load(model, may_evict))
            # Not at the end of _load: a task that is canceled before its first step runs no code.
            model.load.add_done_callback(lambda _: setattr(model, "load", None))
        return model.load

    def _cancel_load(self, model: ServedModel) -> bool:
        """Cancel a load whose engine has not been started; otherwise it ends with the engine.
        Return whether it was canceled."""
        return model.load is not None and not model.supervisor.pids and model.load.cancel()

    async def _load(self, model: ServedModel, may_evict: bool) -> None:
        """Load a model after the loads that were requested before it. The errors are those of
        `load`."""
        supervisor = model.supervisor
        try:
            async with self._load_lock:
                while supervisor.state == EngineState.draining and not self.is_stopping:
                    await supervisor.wait_change()
                if supervisor.state in (EngineState.ready, EngineState.restarting):
                    return
                model.placement = await self._place(model, may_evict)
                await supervisor.start(model.prepared.configs_of(model.placement))
                try:
                    await supervisor.wait_ready()
                except EngineFailed as problem:
                    if supervisor.state in UNLOADED_STATES:
                        raise load_cancelled(model) from None
                    raise LoadFailed(str(problem)) from problem
            model.last_used_at = time.monotonic()
            model.metrics.loads["ready"] += 1
        except NoRoom as problem:
            supervisor.set_unavailable(EngineState.unloaded, str(problem))
            raise
        except Unavailable:  # the load was canceled
            raise
        except Exception as problem:
            model.metrics.loads["failed"] += 1
            has_no_engine = supervisor.state in (
                EngineState.unloaded,
                EngineState.failed,
                EngineState.loading,
            )
            if has_no_engine and model.on_demand:
                supervisor.set_unavailable(EngineState.failed, str(problem))
            raise

    async def _place(self, model: ServedModel, may_evict: bool) -> Placement:
        """Return where this model goes, after evicting others for it: the first attempt that fits,
        then its fallbacks. Raises NoRoom, NoPlacement."""
        prepared = model.prepared
        check_memory = prepared.request.check_memory
        # Placement does not know which models can be evicted, so memory is checked here.
        request = msgspec.structs.replace(prepared.request, check_memory=False)
        engines_at_once = 2 if prepared.model.standby == "warm" else 1
        evicted: list[str] = []
        while True:
            facts = await asyncio.to_thread(self.machine.facts)
            placement = await asyncio.to_thread(self.machine.place, request, facts)
            attempts = [
                attempt for attempt in placement.attempts if attempt.backend in prepared.files
            ]
            if not attempts:
                why = "; ".join(reason.text for reason in placement.reasons)
                raise NoPlacement(f"it can no longer run anywhere: {why}")
            residents = self._other_residents(model)
            memory_limit = self.limits.memory_bytes
            free = bytes_free(attempts, residents, memory_limit) if check_memory else {}
            # With a warm standby, an attempt needs memory for its first fallback too.
            needed_by_attempt = [
                bytes_by_place(attempts[index : index + engines_at_once])
                for index in range(len(attempts))
            ]
            chosen_index, name_to_evict = choose_eviction(needed_by_attempt, residents, free)
            if name_to_evict is None:
                chosen, *fallbacks = attempts[chosen_index:]
                if check_memory:
                    fallbacks = [attempt for attempt in fallbacks if attempt.fits]
                reasons = list(prepared.choice_reasons)
                if evicted:
                    text = f"unloaded {', '.join(evicted)}, least recently used, to make room"
                    reasons.append(Reason(None, text))
                return narrowed(placement, (chosen, *fallbacks), *reasons)
            if not may_evict:
                raise NoRoom(
                    f"there is no room beside {name_to_evict}; it is loaded at its first request"
                )
            evicted.append(name_to_evict)
            why = f"to make room for {model.served_name}"
            unload = self._unload(self.models[name_to_evict], why, "evicted")
            # An unload that has begun is finished even if this load is canceled.
            await asyncio.shield(self._background.start(unload))

    def _other_residents(self, model: ServedModel) -> list[ServedModel]:
        """Return the other models that have engine processes."""
        return [
            other for other in self.models.values() if other is not model and other.supervisor.pids
        ]

    def estimate_load_seconds(self, model: ServedModel, config: EngineConfig) -> float | None:
        """Return an upper bound of the seconds until this engine of the CPU is ready; None: it does
        not fit in memory now."""
        matching = [
            attempt
            for attempt in model.placement.attempts
            if (attempt.backend, attempt.device) == (config.backend, config.device)
        ]
        if not matching:
            return None
        usable_bytes = int(available_bytes() * USABLE_SHARE)
        attempt = msgspec.structs.replace(matching[0], free_bytes=usable_bytes)
        residents = self._other_residents(model)
        free = bytes_free([attempt], residents, self.limits.memory_bytes)[attempt.place]
        fits = free is None or attempt.need_bytes <= free
        if model.prepared.request.check_memory and not fits:
            return None
        return ENGINE_START_SECONDS + attempt.memory.weight_bytes / LOAD_BYTES_PER_SECOND

    # Unloading.

    async def unload(self, model: ServedModel, drain: bool = True) -> int:
        """Unload a model until an administrator loads it; return how many sequences it aborted."""
        model.on_demand = False
        if model.load is not None and self._cancel_load(model):
            await asyncio.wait([model.load])
        return await self._unload(model, "by request", "asked", drain)

    async def _unload(
        self, model: ServedModel, reason: str, metric_label: str, drain: bool = True
    ) -> int:
        """Stop a model's engines and return how many sequences that aborted. `reason`: for the log.
        `metric_label`: the reason in crossover_model_unloads."""
        if model.supervisor.state == EngineState.unloaded:
            model.supervisor.set_unavailable(EngineState.unloaded, reason)
            return 0
        aborted = await model.supervisor.stop(drain, self.limits.drain_seconds, unload=reason)
        model.metrics.unloads[metric_label] += 1
        return aborted

    async def _unload_idle_and_retry(self) -> None:
        """Unload models that have been idle for long enough, and load models again whose engines
        kept dying. Runs until it is canceled."""
        while True:
            models = list(self.models.values())
            limits = [model.prepared.model.idle_unload_seconds for model in models]
            # Once a second, or more often if a limit is so short that it would be missed by much.
            intervals = [limit / 5 for limit in limits if limit is not None]
            await asyncio.sleep(min([1.0, *intervals]))
            for model in models:
                has_served = model.metrics.loads["ready"] > 0
                if model.is_retry_due and has_served:
                    self.load_soon(model, may_evict=False)
                idle_limit = model.prepared.model.idle_unload_seconds
                if idle_limit is None or model.is_busy:
                    continue
                idle_seconds = time.monotonic() - model.last_used_at
                if model.supervisor.state == EngineState.ready and idle_seconds >= idle_limit:
                    await self._unload(model, f"idle for {idle_seconds:.0f} s", "idle")

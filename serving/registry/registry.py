"""The models of one server by name, and what a request waits for until its model serves.

    registry = Registry(metrics, machine, make_supervisor, RegistryLimits())
    registry.add_prepared(prepared)                   # each of them
    await registry.start()                            # loads in order, returns at once
    model = await registry.acquire("smollm2-135m")    # a request: load the model, keep it loaded
    model.release()                                   # the request has ended

Each model has one Supervisor. A model that was unloaded because it was idle, or for another model,
is loaded again by its next request. One that an administrator unloaded stays unloaded until an
administrator loads it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import partial

from crossover.serving.errors import EngineState, ModelNotServed, NoRoom, ServingError, Unavailable
from crossover.serving.metrics import Metrics, ServerMetrics
from crossover.serving.registry.model_loader import (
    UNLOADED_STATES,
    ModelLoader,
    RegistryLimits,
    load_cancelled,
)
from crossover.serving.registry.prepare_model import Host, Prepared
from crossover.serving.registry.served_model import ServedModel, in_text_thread, read_vocabulary
from crossover.serving.supervisor.engine_supervisor import RETRY_SECONDS, Supervisor


class Registry:
    """See the module's docstring."""

    def __init__(
        self,
        metrics: ServerMetrics,
        machine: Host,
        make_supervisor: Callable[[Prepared], Supervisor],
        limits: RegistryLimits,
    ) -> None:
        self.metrics = metrics
        self.limits = limits
        self.models: dict[str, ServedModel] = {}
        self.loader = ModelLoader(machine, limits, self.models)
        self._make_supervisor = make_supervisor

    # Lookups.

    @property
    def first(self) -> ServedModel:
        """Return the model for requests that name none."""
        return next(iter(self.models.values()))

    def named(self, name: str | None) -> ServedModel:
        """Return the model with this name. Raises ModelNotServed."""
        if name is None and len(self.models) == 1:
            return self.first
        if name in self.models:
            return self.models[name]
        served_names = ", ".join(map(repr, self.models))
        if name is None:
            raise ModelNotServed(f"model: This key is required, because {served_names} are served.")
        text = f"The model {name[:200]!r} does not exist. Served models: {served_names}"
        raise ModelNotServed(text)

    def states(self) -> dict[str, EngineState]:
        """Return the state of each model; one whose load is queued counts as loading."""
        return {name: model.state for name, model in self.models.items()}

    @property
    def in_flight(self) -> int:
        """Return the number of sequences of all models that are not finished."""
        return sum(model.supervisor.in_flight for model in self.models.values())

    # The life of the server.

    def add_prepared(self, prepared: Prepared) -> None:
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
            supervisor.estimate_load_seconds = partial(self.loader.estimate_load_seconds, model)
        self.add(model)

    def add(self, model: ServedModel) -> None:
        self.models[model.served_name] = model

    async def start(self) -> None:
        """Start loading the models with load = "start", in order; return immediately."""
        await in_text_thread(str)  # starts the thread now rather than in the first long request
        self.loader.start()

    async def stop(self, drain: bool = True, timeout_seconds: float = 30.0) -> int:
        """Stop every engine, as Supervisor.stop does; return how many sequences were aborted."""
        return await self.loader.stop(drain, timeout_seconds)

    async def load(self, name: str) -> None:
        """Load a model now, as ModelLoader.load does."""
        await self.loader.load(self.models[name])

    async def unload(self, name: str, drain: bool = True) -> int:
        """Unload a model until an administrator loads it; return how many sequences it aborted."""
        return await self.loader.unload(self.models[name], drain)

    # A request.

    async def acquire(self, name: str) -> ServedModel:
        """Wait until this model serves, loading it if allowed, and keep it loaded until it is
        released. Raises Unavailable."""
        model = self.models[name]
        deadline = time.monotonic() + self.limits.load_wait_seconds
        while not self.loader.is_stopping and self._needs_load(model):
            await self._wait_for_load(model, self.loader.load_soon(model), deadline)
        model.acquire()
        return model  # if it does not serve, engine_limits() raises the reason

    def _needs_load(self, model: ServedModel) -> bool:
        """Return whether a request has to wait until this model is loaded. Raises Unavailable if
        requests may not load it."""
        state = model.supervisor.state
        if state in (EngineState.ready, EngineState.restarting):
            return False
        is_first_load = not model.metrics.loads["ready"]
        if state == EngineState.loading and is_first_load and model.prepared.model.load == "start":
            return False  # while the server starts, requests are refused instead of kept waiting
        if model.load is not None:
            return True
        if state not in UNLOADED_STATES:
            return model.is_retry_due
        if not model.on_demand:
            text = f"The model {model.served_name!r} was unloaded by an administrator."
            raise Unavailable(text, 30.0, "unloaded")
        return True

    async def _wait_for_load(
        self, model: ServedModel, load: asyncio.Task[None], deadline: float
    ) -> None:
        """Wait until the load has ended. `deadline`: by time.monotonic(). Raises Unavailable if it
        failed or took too long."""
        seconds_left = max(0.0, deadline - time.monotonic())
        done, _ = await asyncio.wait({load}, timeout=seconds_left)
        name = f"the model {model.served_name!r}"
        if not done:
            limit = f"{self.limits.load_wait_seconds:g} s"
            text = f"{name} is being loaded and was not ready within {limit}"
            raise Unavailable(text, model.supervisor.retry_after_seconds(), "loading")
        if load.cancelled():
            raise load_cancelled(model)
        problem = load.exception()
        if isinstance(problem, Unavailable):
            raise problem
        if isinstance(problem, NoRoom):
            raise Unavailable(f"{name} cannot be loaded now: {problem}", 5.0, "no_room")
        if problem is not None:
            text = f"{name} cannot be loaded now: {problem}"
            raise Unavailable(text, RETRY_SECONDS, "load_failed")

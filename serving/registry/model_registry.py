"""Several models in one server: who is loaded, who makes room for whom, what a request waits for.

    registry = Registry(router, machine, make_supervisor, RegistryLimits(memory_bytes=24 << 30), {})
    registry.add(prepare(ModelOptions(source="135m"), machine))
    await registry.start()                            # loads in order, returns at once
    release = await registry.hold("smollm2-135m")     # a request: load it, keep it loaded

Each model has one Supervisor. One model loads at a time: only then is it known what memory there
is. When it is short, idle models are evicted, the least recently used first
(serving.registry.eviction); a model in use never is, and a request that would need that is told to
come back. A model that was unloaded for being idle, or for another one, is loaded again by the next
request; one that an administrator unloaded, by an administrator.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from models.errors import ModelError
from serving.errors import (
    EngineFailed,
    EngineState,
    LoadFailed,
    NoRoom,
    ServingError,
    Unavailable,
)
from serving.hardware.gpus import find_gpus
from serving.metrics import Metrics
from serving.placement.placement_policy import Placement
from serving.registry.engine_config import Machine, Prepared, place
from serving.registry.eviction import RegistryLimits, Resident, placement_in, room_for
from serving.registry.loaded_model import (
    TEXT_WORK,
    ModelRouter,
    ServedModel,
    Tenant,
    Vocabulary,
    read_vocabulary,
)
from serving.server_options import ServeOptions
from serving.supervisor.admission import QueueBounds
from serving.supervisor.restart_policy import RecoveryLimits
from serving.supervisor.return_to_gpu import has_room_again
from serving.supervisor.supervisor import Background, Event, Supervisor

MakeSupervisor = Callable[[Prepared, Callable[[], Placement]], Supervisor]


def supervisor_of(
    options: ServeOptions,
    prepared: Prepared,
    placed: Callable[[], Placement],
    on_event: Callable[[Event], None],
    on_output: Callable[[str], None],
) -> Supervisor:
    """Not started. `on_event` and `on_output` hear of its engines and what they print."""
    return Supervisor(
        prepared.configs,
        bounds=QueueBounds(
            waiting_requests=options.max_waiting,
            wait_seconds=options.max_wait_seconds,
            ttft_seconds=options.ttft_slo_seconds,
        ),
        limits=RecoveryLimits(health_timeout_seconds=options.health_timeout_seconds),
        standby=prepared.model.standby == "warm",
        preferred_usable=_preferred_usable(placed),
        on_event=on_event,
        on_output=on_output,
    )


def _preferred_usable(placed: Callable[[], Placement]) -> Callable[[], Awaitable[bool]]:
    """Asks the GPU's driver whether the first engine would fit now."""

    async def usable() -> bool:
        placement = placed()
        if placement.attempts[0].device != "gpu":
            return True
        found = await asyncio.to_thread(find_gpus)
        return has_room_again(placement, found.gpus)

    return usable


class Registry:
    """See the module's docstring. `make_supervisor` gives the supervisor of a model, not started.

    `shared`: the command line's options that every model has (serving.server_options.shared_of).
    """

    def __init__(
        self,
        router: ModelRouter,
        machine: Machine,
        make_supervisor: MakeSupervisor,
        limits: RegistryLimits,
        shared: Mapping[str, Any],
    ) -> None:
        self.limits = limits
        self.machine = machine
        self.shared = shared
        self.router = router
        self.tenants: dict[str, Tenant] = {}
        self._make_supervisor = make_supervisor
        self._turn = asyncio.Lock()
        # What a load raises is for its waiters.
        self._background = Background("the registry", expected=(ServingError,))
        self._stopping = False
        router.keeper = self

    # Models come and go.

    def add(self, prepared: Prepared, vocabulary: Vocabulary | None = None) -> Tenant:
        """One more model, not loaded yet. Raises ServingError for a name that is taken.

        `vocabulary`: read in a thread where requests are being answered; None: it is read here.
        """
        name = prepared.name
        if name in self.tenants:
            raise ServingError(f"two models are called {name!r}; give one of them another name")
        supervisor = self._make_supervisor(prepared, lambda: self.tenants[name].placement)
        metrics = Metrics(self.router.metrics, name, supervisor)
        vocabulary = vocabulary or read_vocabulary(prepared.tokenizer_path)
        served_model = ServedModel(
            supervisor, vocabulary, metrics, lambda: self.tenants[name].about()
        )
        tenant = Tenant(prepared, served_model, supervisor)
        if prepared.model.load == "demand":
            supervisor.shelve("it is loaded when it is first asked for")
        self.tenants[name] = tenant
        self.router.add(tenant.served_model)
        return tenant

    async def start(self) -> None:
        """Begin to load, in order, the models that load at the start; returns at once."""
        self._background.keep(self._watch())
        await TEXT_WORK.run(0, str)  # its thread is there from the start
        wanted = [one for one in self.tenants.values() if one.prepared.model.load == "start"]
        self._background.keep(self._load_all(wanted))

    async def _load_all(self, tenants: list[Tenant]) -> None:
        for tenant in tenants:
            # The supervisor's state tells what went wrong; the next model loads all the same.
            with contextlib.suppress(Exception, asyncio.CancelledError):
                await asyncio.shield(self._load_soon(tenant, evict=False))

    async def stop(self, drain: bool = True, timeout_seconds: float = 30.0) -> int:
        """End every engine, as Supervisor.stop does; returns how many sequences were cut off."""
        self._stopping = True
        for tenant in self.all():
            tenant.give_up_waiting()
        stops = (tenant.supervisor.stop(drain, timeout_seconds) for tenant in self.all())
        counts = await asyncio.gather(*stops)
        self._background.cancel()
        return sum(counts)

    @property
    def in_flight(self) -> int:
        """Sequences submitted and not finished, of all models."""
        return sum(tenant.supervisor.in_flight for tenant in self.all())

    def states(self) -> dict[str, EngineState]:
        """Name -> state; a model that is on its way counts as loading."""
        return {name: tenant.state for name, tenant in self.tenants.items()}

    def all(self) -> list[Tenant]:
        """Every model."""
        return list(self.tenants.values())

    # A request.

    async def hold(self, name: str) -> Callable[[], None]:
        """Wait until this model serves, loading it where that is allowed, and keep it loaded until
        the returned function is called. Raises Unavailable."""
        until = time.monotonic() + self.limits.load_wait_seconds
        tenant = self.tenants[name]
        while True:
            state = tenant.supervisor.state
            # A request does not wait for the load at the server's start.
            demanded = tenant.prepared.model.load == "demand" or tenant.used_unix is not None
            if state == EngineState.unloaded or (state == EngineState.failed and tenant.retry_at):
                tenant.check_may_load()
                await self._until_loaded(tenant, self._load_soon(tenant), until)
            elif state == EngineState.loading and tenant.load is not None and demanded:
                await self._until_loaded(tenant, tenant.load, until)
            elif state == EngineState.draining and not self._stopping:
                await self._until_drained(tenant, until)
            else:
                return tenant.hold()  # or it says why not

    async def _until_drained(self, tenant: Tenant, until: float) -> None:
        with contextlib.suppress(TimeoutError):
            left = max(0.0, until - time.monotonic())
            await asyncio.wait_for(tenant.supervisor.wait_change(), left)
        if time.monotonic() >= until:
            raise Unavailable(f"the model {tenant.name!r} is being unloaded", 5.0, "unloaded")

    async def _until_loaded(self, tenant: Tenant, load: asyncio.Task[None], until: float) -> None:
        tenant.used_unix = tenant.used_unix or time.time()
        done, _ = await asyncio.wait({load}, timeout=max(0.0, until - time.monotonic()))
        who = f"the model {tenant.name!r}"
        if not done:
            waited = f"was not ready within {self.limits.load_wait_seconds:g} s"
            text = f"{who} is being loaded and {waited}"
            raise Unavailable(text, tenant.supervisor.retry_after_seconds(), "loading")
        if load.cancelled():
            raise Unavailable(f"the load of {who} was given up", 5.0, "unloaded")
        problem = load.exception()
        if isinstance(problem, NoRoom):
            text = f"{who} cannot be loaded now: {problem}"
            raise Unavailable(text, self._next_room_seconds(), "no_room")
        if problem is not None:
            wait = max(1.0, tenant.retry_at - time.monotonic())
            raise Unavailable(f"{who} did not load: {problem}", wait, "load_failed")

    def _next_room_seconds(self) -> float:
        """Until a busy model may be idle: when the shortest queue is done, as far as is known."""
        busy = [tenant.supervisor for tenant in self.all() if tenant.busy]
        waits = [supervisor.predicted_wait_seconds() for supervisor in busy]
        return max(1.0, min((wait for wait in waits if wait), default=5.0))

    # Loading.

    async def load(self, name: str) -> None:
        """Load a model now, for an administrator. Raises NoRoom, NoPlacement, LoadFailed."""
        tenant = self.tenants[name]
        tenant.on_demand = True
        tenant.retry_at = 0.0
        await asyncio.shield(self._load_soon(tenant))

    def _load_soon(self, tenant: Tenant, evict: bool = True) -> asyncio.Task[None]:
        if tenant.load is None:
            tenant.load = self._background.keep(self._load(tenant, evict))
        return tenant.load

    async def _load(self, tenant: Tenant, evict: bool) -> None:
        supervisor = tenant.supervisor
        try:
            tenant.doing = "looks for room"
            if self._turn.locked():
                tenant.doing = "waits until another model is loaded"
            async with self._turn:
                if supervisor.state in (EngineState.ready, EngineState.restarting):
                    return
                tenant.doing = "looks for room"
                tenant.placement = await self._room_for(tenant, evict)
                if supervisor.state == EngineState.failed:
                    await supervisor.unload("it is loaded again")
                tenant.doing = None
                await self._start(tenant)
            tenant.loaded()
            tenant.served_model.metrics.loaded("ready")
        except NoRoom as problem:
            supervisor.shelve(str(problem))
            raise
        except Exception as problem:  # whatever it is, this model did not load
            said = str(problem)
            if not isinstance(problem, ServingError | ModelError):
                said = f"{type(problem).__name__}: {problem}"
            tenant.served_model.metrics.loaded("failed")
            tenant.failed(said)
            if supervisor.state == EngineState.loading:
                supervisor.give_up(said)
            raise
        finally:
            tenant.load = None
            tenant.doing = None

    async def _start(self, tenant: Tenant) -> None:
        """Start its engines and wait until one serves. Raises LoadFailed."""
        await tenant.supervisor.start(tenant.prepared.configs_of(tenant.placement))
        try:
            await tenant.supervisor.wait_ready()
        except EngineFailed as problem:
            raise LoadFailed(str(problem)) from problem

    # Room.

    async def _room_for(self, tenant: Tenant, evict: bool) -> Placement:
        """Where this model goes now, once others are evicted for it. Raises NoRoom, NoPlacement."""
        evicted: list[str] = []
        while True:
            facts = await asyncio.to_thread(self.machine.facts)
            wanted = await asyncio.to_thread(
                place, tenant.prepared, self.machine, facts, check_memory=False
            )
            residents, promised = self._residents(tenant)
            attempts, gone = room_for(tenant.prepared, wanted, residents, promised, self.limits)
            if not gone:
                return placement_in(attempts, wanted, evicted)
            if not evict:
                beside = ", ".join(one.name for one in residents)
                raise NoRoom(f"there is no room beside {beside}; it is loaded when it is asked for")
            for name in gone:
                victim = self.tenants[name]
                if victim.busy:  # in use again since: look anew
                    break
                evicted.append(name)
                await self._unload(victim, f"to make room for {tenant.name}", "evicted")

    def _residents(self, but: Tenant) -> tuple[list[Resident], int]:
        """Who is loaded, and the bytes of RAM they were promised and have not touched yet."""
        found = [one.as_resident() for one in self.all() if one is not but and one.supervisor.pids]
        return [resident for resident, _ in found], sum(promised for _, promised in found)

    # Unloading.

    async def unload(self, name: str, drain: bool = True) -> int:
        """Unload a model until an administrator loads it; returns the sequences cut off."""
        tenant = self.tenants[name]
        tenant.on_demand = False
        tenant.give_up_waiting()
        return await self._unload(tenant, "asked for", "asked", drain)

    async def _unload(self, tenant: Tenant, why: str, kind: str, drain: bool = True) -> int:
        if tenant.supervisor.state == EngineState.unloaded:
            tenant.supervisor.shelve(why)
            return 0
        cut_off = await tenant.supervisor.unload(why, drain, self.limits.drain_seconds)
        tenant.served_model.metrics.unloaded(kind)
        return cut_off

    async def _watch(self) -> None:
        """Unload idle models; after a pause, load those again whose engines kept dying."""
        while True:
            limits = [one.prepared.model.idle_unload_seconds for one in self.all()]
            await asyncio.sleep(min([1.0, *(one / 5 for one in limits if one is not None)]))
            for tenant in self.all():
                if tenant.given_up and tenant.loaded_at is not None:
                    if not tenant.retry_at:
                        tenant.failed(tenant.supervisor.reason or "no reason given")
                    elif time.monotonic() >= tenant.retry_at:
                        self._load_soon(tenant, evict=False)
                limit = tenant.prepared.model.idle_unload_seconds
                idle = time.monotonic() - tenant.used_at
                is_ready = tenant.supervisor.state == EngineState.ready
                if limit is not None and is_ready and not tenant.busy and idle >= limit:
                    await self._unload(tenant, f"idle for {idle:.0f} s", "idle")

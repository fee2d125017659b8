"""Several models in one server: who is loaded, who makes room for whom, what a request waits for.

    registry = Registry(router, machine, make_supervisor, RegistryLimits(memory_bytes=24 << 30), {})
    registry.add(prepare(ModelOptions(source="135m"), machine))
    await registry.start()                            # loads in order, returns at once
    release = await registry.hold("smollm2-135m", "ann")  # a request of hers: load, keep loaded
    await registry.swap("smollm2-135m", ModelOptions(source="360m"))

Each model has one Supervisor. One model loads at a time: only then is it known what memory there
is. When it is short, idle models are evicted, the least recently used first
(serving.registry.eviction); a model in use never is, and a request that would need that is told to
come back; nor is one that was just loaded and that others than the asker use, for which a request
waits. A model that was unloaded for being idle, or for another one, is loaded again by the next
request; one that an administrator unloaded, by an administrator. A swap loads the new model beside
the old one, which serves until the new one is ready: a swap that fails changes nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgspec

from models.errors import ModelError
from serving.errors import (
    Busy,
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
from serving.registry.engine_config import Machine, Prepared, place, prepare
from serving.registry.eviction import RegistryLimits, Resident, choose_room, placement_in
from serving.registry.loaded_model import (
    TEXT_WORK,
    ModelRouter,
    ServedModel,
    Tenant,
    Vocabulary,
    first_stay,
    idle_check_seconds,
    next_room_seconds,
    read_vocabulary,
)
from serving.server_options import ModelOptions, ServeOptions
from serving.supervisor.admission import QueueBounds
from serving.supervisor.restart_policy import RecoveryLimits
from serving.supervisor.return_to_gpu import has_room_again
from serving.supervisor.supervisor import Background, Event, Supervisor


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
    """Asks the GPU's driver, in a subprocess, whether the first engine would fit now."""

    async def usable() -> bool:
        placement = placed()
        if placement.device != "gpu":
            return True
        found = await asyncio.to_thread(find_gpus)
        return has_room_again(placement, found.gpus)

    return usable


MakeSupervisor = Callable[[Prepared, Callable[[], Placement]], Supervisor]


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
        self._retiring: set[Tenant] = set()  # swapped out, finishing what they have
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
        if prepared.name in self.tenants:
            raise ServingError(
                f"two models are called {prepared.name!r}; give one of them another name"
            )
        tenant = self._tenant(prepared, vocabulary or read_vocabulary(prepared.tokenizer_path))
        if prepared.model.load == "demand":
            tenant.supervisor.shelve("it is loaded when it is first asked for")
        self.tenants[prepared.name] = tenant
        self.router.add(tenant.served_model)
        return tenant

    def _tenant(
        self, prepared: Prepared, vocabulary: Vocabulary, metrics: Metrics | None = None
    ) -> Tenant:
        placed: list[Tenant] = []
        supervisor = self._make_supervisor(prepared, lambda: placed[0].placement)
        metrics = metrics or Metrics(self.router.metrics, prepared.name, supervisor)
        served_model = ServedModel(supervisor, vocabulary, metrics, lambda: placed[0].about())
        placed.append(Tenant(prepared, served_model, supervisor))
        return placed[0]

    async def start(self) -> None:
        """Begin to load, in order, the models that load at the start; returns at once."""
        self._background.keep(self._watch())
        await TEXT_WORK.run(0, str)  # its thread is there from the start
        self._background.keep(
            self._load_all([t for t in self.tenants.values() if t.prepared.model.load == "start"])
        )

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
        return sum(tenant.supervisor.in_flight for tenant in self.all())

    def all(self) -> list[Tenant]:
        """Every model that may have an engine: those swapped out or in included."""
        current = list(self.tenants.values())
        coming = [one.swapping_to for one in current if one.swapping_to is not None]
        return [*current, *self._retiring, *coming]

    def states(self) -> dict[str, EngineState]:
        """Name -> state; a model that is on its way counts as loading."""
        return {name: tenant.state for name, tenant in self.tenants.items()}

    # A request.

    async def hold(self, name: str, asker: str = "") -> Callable[[], None]:
        """Wait until this model serves, loading it where that is allowed, and keep it loaded until
        the returned function is called. `asker`: whose request it is. Raises Unavailable."""
        until = time.monotonic() + self.limits.load_wait_seconds
        while True:
            tenant = self.tenants.get(name)
            if tenant is None:
                raise Unavailable(f"the model {name!r} has just been removed", 30.0, "unloaded")
            state = tenant.supervisor.state
            # A request does not wait for the load at the server's start.
            demanded = tenant.prepared.model.load == "demand" or tenant.used_unix is not None
            if state == EngineState.unloaded or (state == EngineState.failed and tenant.retry_at):
                tenant.check_may_load()
                load = self._load_soon(tenant, asker=asker)
                await self._until_loaded(tenant, load, until, asker)
            elif state == EngineState.loading and tenant.load is not None and demanded:
                await self._until_loaded(tenant, tenant.load, until, asker)
            elif state == EngineState.draining and not self._stopping:
                await self._until_drained(tenant, until)
            else:
                return tenant.hold(asker)  # or it says why not

    async def _until_drained(self, tenant: Tenant, until: float) -> None:
        with contextlib.suppress(TimeoutError):
            left = max(0.0, until - time.monotonic())
            await asyncio.wait_for(tenant.supervisor.wait_change(), left)
        if time.monotonic() >= until:
            raise Unavailable(f"the model {tenant.name!r} is being unloaded", 5.0, "unloaded")

    async def _until_loaded(
        self, tenant: Tenant, load: asyncio.Task[None], until: float, asker: str
    ) -> None:
        tenant.asked_by(asker)
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
            others = self.tenants.values()
            stay = first_stay(others, asker, self.limits.residence_seconds)
            if stay is not None and time.monotonic() + stay < until:
                await asyncio.sleep(stay)
                return
            text = f"{who} cannot be loaded now: {problem}"
            raise Unavailable(text, stay or next_room_seconds(others), "no_room")
        if problem is not None:
            wait = max(1.0, tenant.retry_at - time.monotonic())
            raise Unavailable(f"{who} did not load: {problem}", wait, "load_failed")

    # Loading.

    async def load(self, name: str) -> None:
        """Load a model now, for an administrator. Raises NoRoom, NoPlacement, LoadFailed."""
        tenant = self.tenants[name]
        tenant.on_demand = True
        tenant.retry_at = 0.0
        await asyncio.shield(self._load_soon(tenant))

    def _load_soon(
        self, tenant: Tenant, evict: bool = True, asker: str | None = None
    ) -> asyncio.Task[None]:
        if tenant.load is None:
            tenant.load_begins(asker)
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
            tenant.load_failed(said)
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

    async def _room_for(
        self, tenant: Tenant, evict: bool = True, replaces: bool = False
    ) -> Placement:
        """Where this model goes now, once others are evicted for it. Raises NoRoom or NoPlacement.

        `replaces`: it takes the place of one that is loaded and goes afterwards.
        """
        limits = self.limits
        if limits.most_loaded is not None and replaces:
            limits = msgspec.structs.replace(limits, most_loaded=limits.most_loaded + 1)
        evicted: list[str] = []
        while True:
            facts = await asyncio.to_thread(self.machine.facts)
            wanted = await asyncio.to_thread(
                place, tenant.prepared, self.machine, facts, check_memory=False
            )
            residents, promised = self._residents(tenant)
            room = choose_room(tenant.prepared, wanted, residents, promised, limits)
            if not room.evict:
                return placement_in(room, wanted, evicted)
            if not evict:
                beside = ", ".join(one.name for one in residents)
                raise NoRoom(f"there is no room beside {beside}; it is loaded when it is asked for")
            evicted += await self._evict(room.evict, tenant.name)

    async def _evict(self, names: tuple[str, ...], reason: str) -> list[str]:
        """Unload these, until one is in use again; returns those that went."""
        gone: list[str] = []
        for name in names:
            victim = self.tenants[name]
            if victim.busy:
                break
            gone.append(name)
            await self._unload(victim, f"to make room for {reason}", "evicted")
        return gone

    def _residents(self, but: Tenant) -> tuple[list[Resident], int]:
        """Who is loaded, and the bytes of RAM they were promised and have not touched yet."""
        seconds = self.limits.residence_seconds
        found = [
            one.as_resident(
                self.tenants.get(one.name) is not one or one.stays_seconds(but.asker, seconds) > 0
            )
            for one in self.all()
            if one is not but and one.supervisor.pids
        ]
        return [resident for resident, _ in found], sum(promised for _, promised in found)

    # Unloading and swapping.

    async def unload(self, name: str, drain: bool = True) -> int:
        """Unload a model until an administrator loads it; returns the sequences cut off."""
        tenant = self.tenants[name]
        tenant.on_demand = False
        tenant.give_up_waiting()
        return await self._unload(tenant, "asked for", "asked", drain)

    async def remove(self, name: str, drain: bool = True) -> None:
        """Unload a model and forget it. Raises ServingError for the last one."""
        if len(self.tenants) == 1:
            raise ServingError(f"{name} is the only model; a server without any has nothing to say")
        await self.unload(name, drain)
        self.tenants.pop(name)
        self.router.remove(name)

    async def _unload(self, tenant: Tenant, why: str, kind: str, drain: bool = True) -> int:
        if tenant.supervisor.state == EngineState.unloaded:
            tenant.supervisor.shelve(why)
            return 0
        cut_off = await tenant.supervisor.unload(why, drain, self.limits.drain_seconds)
        tenant.served_model.metrics.unloaded(kind)
        return cut_off

    async def swap(self, name: str, model: ModelOptions) -> None:
        """Serve another model under this name; the old one serves until the new one is ready.

        Raises NoRoom, NoPlacement, LoadFailed, ModelError, ServingError, KeyError; then the old one
        stays.
        """
        old = self.tenants[name]
        if old.swapping_to is not None:
            raise Busy(f"{name} is being swapped already")
        old.doing = "getting the new model's files"
        new: Tenant | None = None
        try:
            prepared = await asyncio.to_thread(
                prepare, msgspec.structs.replace(model, name=name), self.machine
            )
            vocabulary = await asyncio.to_thread(read_vocabulary, prepared.tokenizer_path)
            new = self._tenant(prepared, vocabulary, old.served_model.metrics)
            old.swapping_to = new
            async with self._turn:
                old.doing = "looking for room for the new model beside the old one"
                new.placement = await self._room_for(new, replaces=bool(old.supervisor.pids))
                old.doing = "loading the new model"
                await self._start(new)
        except (ServingError, ModelError) as problem:
            old.problem = f"the swap to {model.source} failed: {problem}"
            old.served_model.metrics.loaded("failed")
            if new is not None and new.supervisor.events:  # it was started
                await new.supervisor.unload("it could not be swapped in", drain=False)
            raise
        finally:
            old.swapping_to = None
            old.doing = None
        self._put_in_place(old, new)

    def _put_in_place(self, old: Tenant, new: Tenant) -> None:
        """The new model serves under the old one's name; the old one finishes what it has."""
        old.problem = None
        new.used_at = old.used_at
        new.used_unix = old.used_unix
        self.tenants[new.name] = new
        new.served_model.metrics.serve(new.supervisor)
        self.router.add(new.served_model)
        new.served_model.metrics.loaded("ready")
        self._retiring.add(old)
        self._background.keep(self._retire(old))

    async def _retire(self, old: Tenant) -> None:
        until = time.monotonic() + self.limits.drain_seconds
        while old.holders and time.monotonic() < until:
            await asyncio.sleep(0.05)  # some of them have not submitted yet
        await self._unload(old, "another model was swapped in", "swapped", not old.holders)
        self._retiring.discard(old)

    async def _watch(self) -> None:
        """Unload idle models; after a pause, load those again whose engines kept dying."""
        while True:
            await asyncio.sleep(idle_check_seconds(self.tenants.values()))
            for tenant in list(self.tenants.values()):
                if tenant.given_up and tenant.may_load_again():
                    self._load_soon(tenant, evict=False)
                limit = tenant.prepared.model.idle_unload_seconds
                idle = time.monotonic() - tenant.used_at
                is_ready = tenant.supervisor.state == EngineState.ready
                if limit is not None and is_ready and not tenant.busy and idle >= limit:
                    await self._unload(tenant, f"idle for {idle:.0f} s", "idle")

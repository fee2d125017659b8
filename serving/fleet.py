"""Several models in one server: who is loaded, who makes room for whom, and what a request waits for.

    fleet = Fleet(desk, machine, make_supervisor, FleetLimits(memory_bytes=24 << 30))
    fleet.add(prepare(ModelOptions(source="135m"), machine))
    await fleet.start()                        # loads what is to be loaded at the start, one after the other
    release = await fleet.enter("smollm2-135m")    # what serving.service.Desk does for a request: load on demand, hold
    await fleet.swap("smollm2-135m", ModelOptions(source="360m"))

Each model has one Supervisor and, while it is loaded, at least one engine process. One model loads at a time: only then is it known what
memory there is. When it is short, idle models go, the least recently used one first (serving.residency decides); a model with a request in
flight is never evicted, and a request that would need that gets 503 with a Retry-After. A model that is unloaded for being idle, or for
another one, is loaded again by the next request for it; one that was unloaded by an administrator stays so until an administrator loads it.
A swap loads the new model beside the old one, which serves until the new one is ready: a swap that fails changes nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec

from models.errors import ModelError
from models.tokenizer import load_tokenizer
from serving.admin_wire import FleetState, ModelState, memory_of, state_of
from serving.background import Background
from serving.errors import EngineFailed, ServingError
from serving.metrics import Metrics
from serving.options import ModelOptions
from serving.placement import Attempt, NoPlacement, Placement, Reason, explain, narrowed
from serving.preparation import Machine, Prepared, place, prepare
from serving.protocol import scrubbed, try_again
from serving.residency import Resident, make_room
from serving.service import Desk, Service
from serving.supervisor import Supervisor

RETRY_FIRST_SECONDS, RETRY_LONGEST_SECONDS = 5.0, 300.0  # between loads of a model that does not load


class FleetLimits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`memory_bytes`: RAM that all engines together may take; None: what the machine has free. `drain_seconds`: for an unload or swap."""

    memory_bytes: int | None = None
    most_loaded: int | None = None
    load_wait_seconds: float = 60.0  # that a request waits for its model
    drain_seconds: float = 60.0


class Busy(ServingError):
    """The same is being done already. Becomes a 409."""


class NoRoom(ServingError):
    """What would have to go is busy. Becomes a 503 with a Retry-After."""


class LoadFailed(ServingError):
    """The model did not load; nothing else has changed."""


class Tenant:
    """One model of the server, loaded or not."""

    def __init__(self, prepared: Prepared, service: Service, supervisor: Supervisor) -> None:
        self.prepared, self.service, self.supervisor = prepared, service, supervisor
        self.placement: Placement = prepared.placement
        self.holders = 0  # requests that are being answered
        self.used_at = time.monotonic()
        self.used_unix: float | None = None
        self.on_demand = True  # a request may load it
        self.doing: str | None = None  # what a load or swap is at, where no engine says it
        self.swapping_to: Tenant | None = None
        self.load: asyncio.Task[None] | None = None
        self.failures = 0
        self.retry_at = 0.0
        self.problem: str | None = None  # why the last load or swap failed

    @property
    def name(self) -> str:
        return self.prepared.name

    @property
    def busy(self) -> bool:
        """True while it must not be evicted: requests are in flight, or it is loading."""
        return self.holders > 0 or self.supervisor.in_flight > 0 or self.load is not None or self.swapping_to is not None

    @property
    def given_up(self) -> bool:
        """True when it is not served, and no request changes that."""
        return self.supervisor.state == "failed" and self.load is None

    def touch(self) -> None:
        self.used_at, self.used_unix = time.monotonic(), time.time()

    def about(self) -> dict[str, Any]:
        """The decision where it runs, in numbers and in words, for /v1/placement."""
        return {**msgspec.to_builtins(self.placement), "lines": explain(self.placement)}

    def attempts(self) -> Iterator[Attempt]:
        """The placements of the engines that are loaded, or are to be: the one in use, and the one on standby."""
        configs = [self.supervisor.config]
        if self.prepared.model.standby == "warm":
            configs = [*self.supervisor.configs[:2]]
        for config in configs:
            yield from (a for a in self.placement.attempts[:2] if (a.backend, a.device) == (config.backend, config.device))


class Fleet:
    """See the module's docstring. `make_supervisor` gives the supervisor of a model, not started."""

    def __init__(
        self,
        desk: Desk,
        machine: Machine,
        make_supervisor: Callable[[Prepared, Callable[[], Placement]], Supervisor],
        limits: FleetLimits,
        shared: Mapping[str, Any],
    ) -> None:
        self.limits, self.machine = limits, machine
        self.shared = shared  # what the command line says for every model alike: serving.options.shared_of
        self.tenants: dict[str, Tenant] = {}
        self.desk, self._make_supervisor = desk, make_supervisor
        self._retiring: set[Tenant] = set()  # swapped out, finishing what they have
        self._turn = asyncio.Lock()
        self._background = Background("the fleet", expected=(ServingError,))  # what a load raises is for its waiters
        self._stopping = False
        desk.keeper = self

    # Models come and go.

    def add(self, prepared: Prepared) -> Tenant:
        """One more model, not loaded yet. Raises ServingError for a name that is taken."""
        if prepared.name in self.tenants:
            raise ServingError(f"two models are called {prepared.name!r}; give one of them another name")
        tenant = self._tenant(prepared)
        if prepared.model.load == "demand":
            tenant.supervisor.shelve("it is loaded when it is first asked for")
        self.tenants[prepared.name] = tenant
        self.desk.add(tenant.service)
        return tenant

    def _tenant(self, prepared: Prepared, metrics: Metrics | None = None) -> Tenant:
        placed: list[Tenant] = []
        supervisor = self._make_supervisor(prepared, lambda: placed[0].placement)
        tokenizer = load_tokenizer(prepared.tokenizer_path)
        metrics = metrics or Metrics(prepared.name, supervisor)
        service = Service(supervisor, tokenizer, prepared.name, self.desk.limits, metrics, lambda: placed[0].about())
        placed.append(Tenant(prepared, service, supervisor))
        return placed[0]

    async def start(self) -> None:
        """Begin to load, in the given order, what is to be loaded at the start; returns at once."""
        self._background.keep(self._watch_idle())
        self._background.keep(self._load_all([t for t in self.tenants.values() if t.prepared.model.load == "start"]))

    async def _load_all(self, tenants: list[Tenant]) -> None:
        for tenant in tenants:
            with contextlib.suppress(ServingError, asyncio.CancelledError):  # told by the supervisor's state
                await asyncio.shield(self._load_soon(tenant, evict=False))

    async def stop(self, drain: bool = True, timeout_seconds: float = 30.0) -> int:
        """End every engine, as Supervisor.stop does; returns how many sequences were cut off."""
        self._stopping = True
        for tenant in self.all():
            _give_up_waiting(tenant)
        counts = await asyncio.gather(*(tenant.supervisor.stop(drain, timeout_seconds) for tenant in self.all()))
        self._background.cancel()
        return sum(counts)

    @property
    def in_flight(self) -> int:
        return sum(tenant.supervisor.in_flight for tenant in self.all())

    def all(self) -> list[Tenant]:
        """Every model that has, or may have, an engine: those swapped out or in included."""
        found = [*self.tenants.values(), *self._retiring]
        return found + [tenant.swapping_to for tenant in self.tenants.values() if tenant.swapping_to is not None]

    # A request.

    async def enter(self, name: str) -> Callable[[], None]:
        """Wait until this model serves, loading it where that is allowed, and hold it. Raises ApiError 503."""
        until = time.monotonic() + self.limits.load_wait_seconds
        while True:
            tenant = self.tenants.get(name)
            if tenant is None:
                raise try_again(503, f"the model {name!r} has just been removed", "unloaded", 30.0)
            supervisor = tenant.supervisor
            demanded = tenant.prepared.model.load == "demand" or tenant.used_unix is not None  # not the load at the start
            match supervisor.state:
                case "unloaded":
                    self._may_load(tenant)
                    await self._until_loaded(tenant, self._load_soon(tenant), until)
                case "failed" if tenant.retry_at:
                    self._may_load(tenant)
                    await self._until_loaded(tenant, self._load_soon(tenant), until)
                case "loading" if tenant.load is not None and demanded:
                    await self._until_loaded(tenant, tenant.load, until)
                case "draining" if not self._stopping:
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(supervisor.wait_change(), max(0.0, until - time.monotonic()))
                    if time.monotonic() >= until:
                        raise try_again(503, f"the model {name!r} is being unloaded", "unloaded", 5.0)
                case _:
                    return self._hold(tenant)  # or the Service says why not

    def _hold(self, tenant: Tenant) -> Callable[[], None]:
        tenant.holders += 1
        tenant.touch()
        held = True

        def release() -> None:
            nonlocal held
            if held:
                held = False
                tenant.holders -= 1
                tenant.touch()

        return release

    def _may_load(self, tenant: Tenant) -> None:
        if not tenant.on_demand:
            raise try_again(503, f"the model {tenant.name!r} was unloaded by an administrator", "unloaded", 30.0)
        wait = tenant.retry_at - time.monotonic()
        if tenant.load is None and wait > 0:
            text = f"the model {tenant.name!r} did not load: {scrubbed(tenant.problem or 'no reason given')}"
            raise try_again(503, text, "load_failed", wait)

    async def _until_loaded(self, tenant: Tenant, load: asyncio.Task[None], until: float) -> None:
        tenant.used_unix = tenant.used_unix or time.time()
        done, _ = await asyncio.wait({load}, timeout=max(0.0, until - time.monotonic()))
        if not done:
            text = f"the model {tenant.name!r} is being loaded and was not ready within {self.limits.load_wait_seconds:g} s"
            raise try_again(503, text, "loading", tenant.supervisor.retry_after_seconds())
        if load.cancelled():
            raise try_again(503, f"the load of the model {tenant.name!r} was given up", "unloaded", 5.0)
        problem = load.exception()
        if isinstance(problem, NoRoom):
            raise try_again(503, f"the model {tenant.name!r} cannot be loaded now: {scrubbed(str(problem))}", "no_room", self._next_room())
        if problem is not None:
            text = f"the model {tenant.name!r} did not load: {scrubbed(str(problem))}"
            raise try_again(503, text, "load_failed", max(1.0, tenant.retry_at - time.monotonic()))

    def _next_room(self) -> float:
        """Seconds until a busy model may be idle: when the shortest queue has gone through, as far as that is known."""
        waits = [tenant.supervisor.predicted_wait_seconds() for tenant in self.tenants.values() if tenant.busy]
        return max(1.0, min((wait for wait in waits if wait), default=5.0))

    # Loading.

    async def load(self, name: str) -> None:
        """Load a model now (an administrator's wish). Raises NoRoom, NoPlacement, LoadFailed, KeyError."""
        tenant = self.tenants[name]
        tenant.on_demand, tenant.retry_at = True, 0.0
        await asyncio.shield(self._load_soon(tenant))

    def _load_soon(self, tenant: Tenant, evict: bool = True) -> asyncio.Task[None]:
        if tenant.load is None:
            tenant.load = self._background.keep(self._load(tenant, evict))
        return tenant.load

    async def _load(self, tenant: Tenant, evict: bool) -> None:
        supervisor = tenant.supervisor
        try:
            tenant.doing = "waits until another model is loaded" if self._turn.locked() else "looks for room"
            async with self._turn:
                if supervisor.state in ("ready", "restarting"):
                    return
                tenant.doing = "looks for room"
                tenant.placement = await self._room_for(tenant, evict)
                if supervisor.state == "failed":
                    await supervisor.unload("it is loaded anew")
                tenant.doing = None
                await supervisor.start(tenant.prepared.configs_of(tenant.placement))
                try:
                    await supervisor.wait_ready()
                except EngineFailed as problem:
                    raise LoadFailed(str(problem)) from problem
            tenant.failures, tenant.retry_at, tenant.problem = 0, 0.0, None
            tenant.service.metrics.loads["ready"] += 1
            tenant.used_at = time.monotonic()
        except NoRoom as problem:
            supervisor.shelve(str(problem))
            raise
        except ServingError as problem:
            tenant.service.metrics.loads["failed"] += 1
            pause = min(RETRY_LONGEST_SECONDS, RETRY_FIRST_SECONDS * 2.0**tenant.failures)
            tenant.failures, tenant.retry_at, tenant.problem = tenant.failures + 1, time.monotonic() + pause, str(problem)
            if supervisor.state == "loading":
                supervisor.give_up(str(problem))
            raise
        finally:
            tenant.load, tenant.doing = None, None

    async def _room_for(self, tenant: Tenant, evict: bool = True, replaces: bool = False) -> Placement:
        """Where this model goes now; whoever must go for it has gone (unless nobody may). Raises NoRoom or NoPlacement.

        `replaces`: it takes the place of one that is loaded, which will go afterwards: one more may be loaded meanwhile.
        """
        most_loaded = self.limits.most_loaded
        if most_loaded is not None and replaces:
            most_loaded += 1
        prepared = tenant.prepared
        evicted: list[str] = []
        while True:
            facts = await asyncio.to_thread(self.machine.facts)
            wanted = await asyncio.to_thread(
                place, prepared.model, prepared.spec, prepared.size_bytes, self.machine, facts, check_memory=False
            )
            known = {(config.backend, config.device) for config in prepared.configs}
            attempts = [a for a in wanted.attempts if (a.backend, a.device) in known]
            if not attempts:
                raise NoPlacement(f"{tenant.name} can run nowhere any more: {'; '.join(reason.text for reason in wanted.reasons)}")
            residents, promised = self._residents(tenant)
            free = self._free(attempts, promised, residents) if prepared.model.check_memory else {}
            verdict = make_room(self._needs(prepared, attempts), residents, free, most_loaded)
            if verdict.option is None:
                what = f"{tenant.name}: {verdict.text}"
                raise NoRoom(what) if verdict.may_change else NoPlacement(what)
            if not verdict.evict:
                break
            if not evict:
                raise NoRoom(f"there is no room beside {', '.join(one.name for one in residents)}; it is loaded when it is asked for")
            for name in verdict.evict:
                victim = self.tenants[name]
                if victim.busy:
                    break  # somebody has begun to use it meanwhile: look again
                evicted.append(name)
                await self._unload(victim, f"to make room for {tenant.name}", "evicted")
        chosen = attempts[verdict.option]
        later = [a for a in attempts[verdict.option + 1 :] if a.fits or not prepared.model.check_memory]
        reason = Reason(None, f"unloaded {', '.join(evicted)}, idle for longest, to make room") if evicted else None
        return narrowed(wanted, (chosen, *later), reason)

    def _needs(self, prepared: Prepared, attempts: list[Attempt]) -> list[dict[str, int]]:
        """Bytes by device for each way to run it, with the engine that stands by."""
        needs: list[dict[str, int]] = []
        for index, attempt in enumerate(attempts):
            need = {attempt.device: attempt.need_bytes}
            if prepared.model.standby == "warm" and index + 1 < len(attempts):
                other = attempts[index + 1]
                need[other.device] = need.get(other.device, 0) + other.need_bytes
            needs.append(need)
        return needs

    def _residents(self, but: Tenant) -> tuple[list[Resident], int]:
        """Who is loaded, and how many bytes of RAM they were promised and have not touched yet."""
        residents: list[Resident] = []
        promised = 0
        for tenant in self.all():
            if tenant is but or not tenant.supervisor.pids:
                continue
            takes: dict[str, int] = {}
            for attempt in tenant.attempts():
                takes[attempt.device] = takes.get(attempt.device, 0) + attempt.need_bytes
            resident = memory_of(tenant.supervisor.pids)
            if "cpu" in takes:
                promised += max(0, takes["cpu"] - resident)
                takes["cpu"] = max(takes["cpu"], resident)
            busy = tenant.busy or self.tenants.get(tenant.name) is not tenant
            residents.append(Resident(tenant.name, takes, tenant.used_at, busy))
        return residents, promised

    def _free(self, attempts: list[Attempt], promised: int, residents: list[Resident]) -> dict[str, int | None]:
        free: dict[str, int | None] = {}
        for attempt in attempts:
            there = attempt.free_bytes
            if attempt.device == "cpu":
                there = None if there is None else there - promised
                if self.limits.memory_bytes is not None:
                    left = self.limits.memory_bytes - sum(one.takes.get("cpu", 0) for one in residents)
                    there = left if there is None else min(there, left)
            free[attempt.device] = there
        return free

    # Unloading and swapping.

    async def unload(self, name: str, drain: bool = True) -> int:
        """Unload a model for good (an administrator's wish): what is in flight may finish. Returns how many sequences were cut off."""
        tenant = self.tenants[name]
        tenant.on_demand = False
        _give_up_waiting(tenant)
        return await self._unload(tenant, "asked for", "asked", drain)

    async def remove(self, name: str, drain: bool = True) -> None:
        """Unload a model and forget it. Raises ServingError for the last one."""
        if len(self.tenants) == 1:
            raise ServingError(f"{name} is the only model; a server without any has nothing to say")
        await self.unload(name, drain)
        self.tenants.pop(name)
        self.desk.remove(name)

    async def _unload(self, tenant: Tenant, why: str, kind: str, drain: bool = True) -> int:
        if tenant.supervisor.state == "unloaded":
            tenant.supervisor.shelve(why)
            return 0
        cut_off = await tenant.supervisor.unload(why, drain, self.limits.drain_seconds)
        tenant.service.metrics.unloads[kind] += 1
        return cut_off

    async def swap(self, name: str, model: ModelOptions) -> None:
        """Serve another model under this name. Until the new one is ready the old one serves; where it fails, the old one stays.

        Raises NoRoom, NoPlacement, LoadFailed, ModelError, ServingError, KeyError.
        """
        old = self.tenants[name]
        if old.swapping_to is not None:
            raise Busy(f"{name} is being swapped already")
        old.doing = "getting the new model's files"
        new: Tenant | None = None
        try:
            prepared = await asyncio.to_thread(prepare, msgspec.structs.replace(model, name=name), self.machine)
            new = old.swapping_to = self._tenant(prepared, old.service.metrics)
            async with self._turn:
                old.doing = "looking for room for the new model beside the old one"
                new.placement = await self._room_for(new, replaces=bool(old.supervisor.pids))
                old.doing = "loading the new model"
                await new.supervisor.start(prepared.configs_of(new.placement))
                await new.supervisor.wait_ready()
        except (ServingError, ModelError) as problem:
            old.problem = f"the swap to {model.source} failed: {problem}"
            old.service.metrics.loads["failed"] += 1
            if new is not None and new.supervisor.events:  # it was started
                await new.supervisor.unload("it could not be swapped in", drain=False)
            if isinstance(problem, EngineFailed):
                raise LoadFailed(str(problem)) from problem
            raise
        finally:
            old.swapping_to, old.doing = None, None
        old.problem = None
        new.used_at, new.used_unix = old.used_at, old.used_unix
        self.tenants[name] = new
        new.service.metrics.serve(new.supervisor)
        self.desk.add(new.service)
        new.service.metrics.loads["ready"] += 1
        self._retiring.add(old)
        self._background.keep(self._retire(old))

    async def _retire(self, old: Tenant) -> None:
        until = time.monotonic() + self.limits.drain_seconds
        while old.holders and not old.supervisor.in_flight and time.monotonic() < until:
            await asyncio.sleep(0.05)  # requests that hold it and have not submitted yet
        await self._unload(old, "another model was swapped in", "swapped")
        self._retiring.discard(old)

    async def _watch_idle(self) -> None:
        """Unload what nobody has asked for in a while."""
        while True:
            limits = [t.prepared.model.idle_unload_seconds for t in self.tenants.values()]
            await asyncio.sleep(min(1.0, *(limit / 5 for limit in limits if limit is not None), 1.0))
            for tenant in list(self.tenants.values()):
                limit = tenant.prepared.model.idle_unload_seconds
                idle = time.monotonic() - tenant.used_at
                if limit is not None and tenant.supervisor.state == "ready" and not tenant.busy and idle >= limit:
                    await self._unload(tenant, f"idle for {idle:.0f} s", "idle")

    # Telling.

    def states(self) -> dict[str, str]:
        """Name -> state; a model that is on its way counts as loading."""
        return {name: state_of(tenant.supervisor.state, tenant.load is not None) for name, tenant in self.tenants.items()}

    async def state(self) -> FleetState:
        """Everything that an administrator may want to know."""
        models = [self.state_of_model(name) for name in self.tenants]
        available = (await asyncio.to_thread(self.machine.facts)).usable_memory_bytes
        loaded = sum(one.memory.measured_bytes or one.memory.predicted_bytes for one in models if one.memory.loaded)
        return FleetState(models, loaded, available, self.limits.memory_bytes, self.limits.most_loaded)

    def state_of_model(self, name: str) -> ModelState:
        """One model's. Raises KeyError."""
        return ModelState.of(self.tenants[name])


def _give_up_waiting(tenant: Tenant) -> None:
    """End a load that has not begun; one whose engine runs ends with the engine."""
    if tenant.load is not None and tenant.doing is not None:
        tenant.load.cancel()

"""One model of the server, loaded or not: its files, its engines, who uses it, what it takes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import msgspec

from serving.errors import EngineState, Unavailable
from serving.hardware.memory import resident_bytes
from serving.placement.decision import Attempt, Placement
from serving.placement.plan import explain
from serving.registry.eviction import Resident
from serving.registry.model import ServedModel
from serving.registry.prepare import Prepared
from serving.supervisor.supervisor import Supervisor

RETRY_FIRST_SECONDS = 5.0  # between loads of a model that does not load
RETRY_LONGEST_SECONDS = 300.0
FUSE_FIRST_SECONDS = 300.0  # until a model whose engines kept dying is loaded again
FUSE_LONGEST_SECONDS = 3600.0  # also: after so long it begins with the shortest pause again


class Tenant:
    """One model of the server. Times are time.monotonic(), but `used_unix`."""

    def __init__(
        self, prepared: Prepared, served_model: ServedModel, supervisor: Supervisor
    ) -> None:
        self.prepared = prepared
        self.served_model = served_model
        self.supervisor = supervisor
        self.placement: Placement = prepared.placement
        self.holders = 0  # requests that are being answered
        self.used_at = self.loaded_at = time.monotonic()
        self.used_unix: float | None = None
        self.on_demand = True  # a request may load it
        self.asker: str | None = None  # whose request its last load is for; None: nobody's
        self._users: set[str] = set()  # who has asked for it since; two stand for any number
        self.doing: str | None = None  # what a load or swap is at, where no engine says it
        self.swapping_to: Tenant | None = None
        self.load: asyncio.Task[None] | None = None
        self.failures = 0
        self.retry_at = 0.0
        self.problem: str | None = None  # why the last load or swap failed
        self.fuses = 0  # how often its engines kept dying, lately

    @property
    def name(self) -> str:
        return self.prepared.name

    @property
    def state(self) -> EngineState:
        """The supervisor's state; loading, too, where an asked-for load has not begun."""
        state = self.supervisor.state
        waits = state in (EngineState.unloaded, EngineState.failed) and self.load is not None
        return EngineState.loading if waits else state

    @property
    def busy(self) -> bool:
        """True while it must not be evicted: requests are in flight, or it is loading."""
        in_use = self.holders > 0 or self.supervisor.in_flight > 0
        return in_use or self.load is not None or self.swapping_to is not None

    @property
    def given_up(self) -> bool:
        """True when it is not served, and no request changes that."""
        return self.supervisor.state == EngineState.failed and self.load is None

    def progress(self) -> tuple[str, float | None] | None:
        """What a load or swap is at, and its fraction 0..1 where it is known; None: nothing."""
        for one in (self.swapping_to, self):
            if one is not None and one.supervisor.state == EngineState.loading:
                loading = one.supervisor.loading
                if loading is not None:
                    return loading.what, loading.fraction
        return None if self.doing is None else (self.doing, None)

    def touch(self) -> None:
        self.used_at = time.monotonic()
        self.used_unix = time.time()

    def asked_by(self, owner: str) -> None:
        """A request of this owner uses it, or waits for it."""
        if len(self._users) < 2:
            self._users.add(owner)

    def stays_seconds(self, asker: str | None, residence_seconds: float) -> float:
        """How long it may not be evicted yet for a request of `asker` (None: an administrator's
        load): for a while from its load, where others use it."""
        if asker is None or self._users <= {asker} or self.supervisor.state != EngineState.ready:
            return 0.0
        return max(0.0, self.loaded_at + residence_seconds - time.monotonic())

    def hold(self, owner: str) -> Callable[[], None]:
        """A request uses it from now on, until the returned function is called."""
        self.asked_by(owner)
        self.holders += 1
        self.touch()
        held = True

        def release() -> None:
            nonlocal held
            if held:
                held = False
                self.holders -= 1
                self.touch()

        return release

    def check_may_load(self) -> None:
        """Raises Unavailable where a request may not load it."""
        if not self.on_demand:
            text = f"the model {self.name!r} was unloaded by an administrator"
            raise Unavailable(text, 30.0, "unloaded")
        wait = self.retry_at - time.monotonic()
        if self.load is None and wait > 0:
            text = f"the model {self.name!r} did not load: {self.problem or 'no reason given'}"
            raise Unavailable(text, wait, "load_failed")

    def load_begins(self, asker: str | None) -> None:
        """It is loaded for a request of `asker`, or for nobody's (None)."""
        self.asker = asker
        self._users.clear()

    def loaded(self) -> None:
        """A load has succeeded."""
        self.failures = 0
        self.retry_at = 0.0
        self.problem = None
        self.used_at = self.loaded_at = time.monotonic()

    def load_failed(self, problem: str) -> None:
        """A load has failed: the pause before the next one doubles."""
        pause = min(RETRY_LONGEST_SECONDS, RETRY_FIRST_SECONDS * 2.0**self.failures)
        self.failures += 1
        self.retry_at = time.monotonic() + pause
        self.problem = problem

    def may_load_again(self) -> bool:
        """Of a failed model: whether its pause is over, where its engines kept dying. The pause
        doubles each time."""
        now = time.monotonic()
        if self.retry_at:
            return bool(self.fuses) and now >= self.retry_at
        if now - self.loaded_at > FUSE_LONGEST_SECONDS:
            self.fuses = 0
        pause = min(FUSE_LONGEST_SECONDS, FUSE_FIRST_SECONDS * 2.0**self.fuses)
        self.fuses += 1
        self.retry_at = now + pause
        self.problem = self.supervisor.reason or "no reason given"
        return False

    def give_up_waiting(self) -> None:
        """End a load that has not begun; one whose engine runs ends with the engine."""
        if self.load is not None and self.doing is not None:
            self.load.cancel()

    def about(self) -> dict[str, Any]:
        """The decision where it runs, in numbers and in words, for /v1/placement."""
        return {**msgspec.to_builtins(self.placement), "lines": explain(self.placement)}

    def attempts(self) -> Iterator[Attempt]:
        """The placements of the engines that are or will be loaded: in use, and on standby."""
        warm = self.prepared.model.standby == "warm"
        configs = self.supervisor.configs[:2] if warm else (self.supervisor.config,)
        for config in configs:
            for attempt in self.placement.attempts[:2]:
                if (attempt.backend, attempt.device) == (config.backend, config.device):
                    yield attempt

    @property
    def measured_bytes(self) -> int:
        """RSS of its engine processes now."""
        return sum(resident_bytes(pid) or 0 for pid in self.supervisor.pids)

    def as_resident(self, stays: bool) -> tuple[Resident, int]:
        """What its end would free, and the bytes of RAM it was promised and has not touched yet.

        `stays`: it must not be evicted, busy or not."""
        takes: dict[str, int] = {}
        for attempt in self.attempts():
            takes[attempt.device] = takes.get(attempt.device, 0) + attempt.need_bytes
        promised = 0
        if "cpu" in takes:
            measured = self.measured_bytes
            promised = max(0, takes["cpu"] - measured)
            takes["cpu"] = max(takes["cpu"], measured)
        return Resident(self.name, takes, self.used_at, stays or self.busy), promised


def idle_check_seconds(tenants: Iterable[Tenant]) -> float:
    """How often to look for idle models: a fifth of the shortest limit, at most a second."""
    limits = (tenant.prepared.model.idle_unload_seconds for tenant in tenants)
    return min(1.0, *(limit / 5 for limit in limits if limit is not None), 1.0)


def next_room_seconds(tenants: Iterable[Tenant]) -> float:
    """Until a busy model may be idle: when the shortest queue is done, as far as is known."""
    busy = [tenant.supervisor for tenant in tenants if tenant.busy]
    waits = [supervisor.predicted_wait_seconds() for supervisor in busy]
    return max(1.0, min((wait for wait in waits if wait), default=5.0))


def first_stay(tenants: Iterable[Tenant], asker: str, residence_seconds: float) -> float | None:
    """Seconds until the first that stays may be evicted; None where none stays."""
    stays = (tenant.stays_seconds(asker, residence_seconds) for tenant in tenants)
    return min((seconds for seconds in stays if seconds), default=None)

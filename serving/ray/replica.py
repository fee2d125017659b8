"""One replica: our app in an actor of Ray Serve, with an engine and cores or a GPU of its own.

Ray starts it and looks after its health; the front (serving.ray.front) asks it at its door. What
the app does on a server of its own it does here: admission, the engine's restarts, the fallback.
"""

from __future__ import annotations

import asyncio
import os
import sys

import msgspec
import ray
from ray import serve
from ray.serve._private import replica as inner

from serving.errors import EngineFailed
from serving.hardware.own_cores import take_cores
from serving.http.app import app_of
from serving.http.limits import Limits
from serving.metrics import ServerMetrics
from serving.placement.plan import explain
from serving.ray.connection import LOOPBACK
from serving.ray.door import Door
from serving.ray.frames import Address
from serving.ray.scaling import IN_FLIGHT
from serving.registry.model import ModelRouter
from serving.registry.options import ServeOptions, models_of, shared_of
from serving.registry.prepare import Machine, prepare
from serving.registry.registry import Registry
from serving.registry.room import RegistryLimits
from serving.registry.supervised import supervisor_of
from serving.supervisor.status import Event


class Replica:
    """Ray Serve makes it in an actor; it is asked nothing before `__init__` has ended."""

    async def __init__(  # type: ignore[misc]  # Ray Serve awaits it
        self, options: ServeOptions, limits: Limits, cores: int
    ) -> None:
        """Returns when the engine serves. Raises ServingError, ModelError: the replica failed."""
        _close_inner_port()
        own = take_cores(cores)
        if own:
            os.sched_setaffinity(0, own)
        else:
            options = msgspec.structs.replace(options, threads=cores)
            _say(f"this node has no {cores} free cores: the engine shares those of others")
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        machine = Machine(options.cache, "", _say)
        (model,) = models_of(options)
        prepared = await asyncio.to_thread(prepare, model, machine)
        _say(*explain(prepared.placement), prepared.note)
        machine.is_serving = True
        self._registry = Registry(
            ModelRouter(ServerMetrics()),
            machine,
            lambda one, placed: supervisor_of(options, one, placed, _tell, _say),
            RegistryLimits(
                load_wait_seconds=options.load_wait_seconds, drain_seconds=options.drain_seconds
            ),
            shared_of(options),
        )
        self._tenant = self._registry.add(prepared)
        await self._registry.start()
        while self._tenant.supervisor.ready is None:
            self.check_health()
            await asyncio.wait({asyncio.ensure_future(self._tenant.supervisor.wait_change())})
        name = serve.get_replica_context().replica_id.unique_id
        self._door = Door(app_of(self._registry.router, limits), name.encode())
        self._address = name, await self._door.open(ray.util.get_node_ip_address())

    def check_health(self) -> None:
        """Ray Serve replaces the replica where this raises: its engines are given up."""
        if self._tenant.given_up:
            raise EngineFailed(self._tenant.supervisor.reason or "the engine failed")

    async def address(self, asked: str) -> tuple[str, Address]:
        """Who this is and where it is asked. `asked`: for the router, which sees the arguments."""
        return self._address

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Ray Serve asks for it; serving.ray.scaling reads it."""
        return {IN_FLIGHT: self._door.in_flight}

    async def __del__(self) -> None:
        """Ray Serve awaits it before it ends the replica: the front sends nothing more by now."""
        await self._door.drained()
        self._door.close()


def _close_inner_port() -> None:
    """Ray Serve opens a port of its own on all addresses, once the replica is there, for a way of
    calling that is not ours: on loopback alone."""
    listen = inner.add_port_to_grpc_server
    inner.add_port_to_grpc_server = lambda server, address: listen(
        server, address.replace("[::]", LOOPBACK)
    )


def _say(*lines: str) -> None:
    """Into the replica's log, which Ray keeps."""
    for line in lines:
        print(line, file=sys.stderr, flush=True)


def _tell(event: Event) -> None:
    _say(f"{event.engine} {event.kind}: {event.message}")

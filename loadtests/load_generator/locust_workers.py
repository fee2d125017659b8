"""Load from many machines, by Locust's own master and workers.

    crossover load URL --rate 800 --master --bind 10.0.0.7 --expect-workers 2      # one machine
    crossover load URL --join 10.0.0.7                                 # on each of the two others

To its runner the master is one load generator: it passes orders on to the workers and makes one
answer of theirs (Conductor). Each worker has its own clock and begins when the master's word
reaches it, so shares may start apart by the time that a message takes; all times of a request are
by its worker's clock. Whoever reaches the master's port may take part: the protocol knows no keys.
A worker sends to the URL of its own command alone, with its own key, and reads no files: whoever
answers at the master's address cannot point it elsewhere.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import gevent
import msgspec

from loadtests.errors import LoadError
from loadtests.load_generator.http_connection import clock
from loadtests.load_generator.load_plan import (
    Begin,
    Ended,
    Failed,
    LoadPlan,
    Order,
    Share,
    Stop,
    Wire,
    Workers,
)
from loadtests.load_generator.locust_process import LEAD_SECONDS, Conductor, locust_child
from loadtests.load_generator.openai_endpoint import Target
from loadtests.workload.arrivals import Trace

PORT = 5557  # Locust's own
TARGET_VARIABLE = "CROSSOVER_TARGET"  # of a worker's own command
WATCH_SECONDS = 1.0
_encode = msgspec.json.Encoder().encode


class MasterSide:
    """Takes orders for all workers, and tells their answers as one. `runner` is Locust's."""

    def __init__(self, runner: Any, tell: Callable[[Wire], None]) -> None:
        self._runner = runner
        self._tell = tell
        self._joined: set[str] = set()  # Locust's ids of those that listen
        self._conductor: Conductor | None = None  # of the level that runs
        runner.register_message("crossover_joined", self._on_joined)
        runner.register_message("crossover_told", self._on_told)
        gevent.spawn(self._watch)

    def obey(self, order: Order) -> None:
        if isinstance(order, Share):
            if not (workers := self._present()):
                self._tell(Failed("no worker is there"))
                return
            senders = {one: functools.partial(self._send, one) for one in workers}
            self._conductor = Conductor(senders, self._told)
        if self._conductor is not None:
            self._conductor.obey(order)

    def _present(self) -> list[str]:
        clients = self._runner.clients
        here = {client.id for client in [*clients.ready, *clients.spawning, *clients.running]}
        return sorted(here & self._joined)

    def _send(self, worker: str, order: Order) -> None:
        self._runner.send_message("crossover_order", _encode(order), client_id=worker)

    def _told(self, wire: Wire) -> None:
        if isinstance(wire, Ended | Failed) and self._conductor is not None:
            conductor, self._conductor = self._conductor, None
            if isinstance(wire, Failed):
                conductor.obey(Stop())
        self._tell(wire)

    def _on_joined(self, environment: Any, msg: Any, **_: Any) -> None:
        self._joined.add(msg.node_id)

    def _on_told(self, environment: Any, msg: Any, **_: Any) -> None:
        if self._conductor is not None:
            self._conductor.take(msg.node_id, msgspec.json.decode(msg.data, type=Wire))

    def _watch(self) -> None:
        """Say who is there; fail the level for a worker that is lost, before or within it."""
        at_work: set[str] = set()
        while True:
            here = self._present()
            if self._conductor is None:
                self._tell(Workers([one.rpartition("_")[0] for one in here]))
                at_work = set()
            else:
                if lost := at_work - set(here):
                    name = lost.pop().rpartition("_")[0]
                    self._told(Failed(f"the worker on {name} was lost within the level"))
                at_work = at_work or set(here)
            gevent.sleep(WATCH_SECONDS)


class WorkerSide:
    """Takes the master's orders, within its own command, and sends it the answers."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._own = msgspec.json.decode(os.environ[TARGET_VARIABLE], type=Target)

    def join(self, obey: Callable[[Order], None]) -> None:
        """`obey` carries orders out."""

        def on_order(environment: Any, msg: Any, **_: Any) -> None:
            order = msgspec.json.decode(msg.data, type=Order)
            if isinstance(order, Share):
                try:
                    order = msgspec.structs.replace(order, plan=allowed(order.plan, self._own))
                except LoadError as problem:
                    self.tell(Failed(f"{problem}"))
                    return
            elif isinstance(order, Begin):
                order = Begin(clock() + LEAD_SECONDS)  # the master's moment is on another clock
            obey(order)

        self._runner.register_message("crossover_order", on_order)
        self._runner.send_message("crossover_joined", None)

    def tell(self, wire: Wire) -> None:
        self._runner.send_message("crossover_told", _encode(wire))


def allowed(plan: LoadPlan, own: Target) -> LoadPlan:
    """The plan as a worker with a target of its own carries it out.

    Model, route and fields of the body are the master's. Raises LoadError for a plan that names
    files: they are the worker's, and nobody has said which.
    """
    workload = plan.workload
    if workload.file or workload.replay or isinstance(plan.arrivals, Trace):
        raise LoadError(
            "a worker that joined reads no trace on its machine: replay traces with --workers"
        )
    target = msgspec.structs.replace(
        plan.target, url=own.url, api_key_env=own.api_key_env, verify_tls=own.verify_tls
    )
    return msgspec.structs.replace(plan, target=target)


def run_worker(host: str, port: int, target: Target) -> None:
    """Be a worker of the master there until it ends. Raises LoadError where this ends before."""
    place = f"[{host}]" if ":" in host else host
    options = ("--worker", "--master-host", place, "--master-port", str(port))
    with locust_child(*options, variables={TARGET_VARIABLE: _encode(target).decode()}) as child:
        while (status := child.wait(1.0)) is None:
            pass
        if status != 0:
            how = child.how_it_ended()
            raise LoadError(f"the worker of {place}:{port} ended early ({how})")

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
import sys
from collections.abc import Callable
from typing import Any

import gevent
import msgspec

from loadtests.errors import LoadError
from loadtests.host.child_processes import Child
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
from loadtests.load_generator.locust_process import (
    FOLDER_VARIABLE,
    LEAD_SECONDS,
    LOCUST,
    Conductor,
    client_environment,
)
from loadtests.load_generator.openai_endpoint import Target
from loadtests.workload.arrivals import Trace
from models.isolated import PACKAGE_ROOT

PORT = 5557  # Locust's own
OWN_TARGET_VARIABLE = "CROSSOVER_OWN_TARGET"  # of a worker that joined from elsewhere
WATCH_SECONDS = 1.0
_encode = msgspec.json.Encoder().encode
_decode_order = msgspec.json.Decoder(Order).decode
_decode_wire = msgspec.json.Decoder(Wire).decode


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
            workers = self._present()
            if not workers:
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
            self._conductor.take(msg.node_id, _decode_wire(msg.data))

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

    obey: Callable[[Order], None]  # whoever carries them out

    def __init__(self, runner: Any, own: Target | None) -> None:
        self._runner = runner
        self._own = own

    def join(self) -> None:
        self._runner.register_message("crossover_order", self._on_order)
        self._runner.send_message("crossover_joined", None)

    def tell(self, wire: Wire) -> None:
        self._runner.send_message("crossover_told", _encode(wire))

    def _on_order(self, environment: Any, msg: Any, **_: Any) -> None:
        order = _decode_order(msg.data)
        if isinstance(order, Share):
            try:
                order = msgspec.structs.replace(order, plan=allowed(order.plan, self._own))
            except LoadError as problem:
                self.tell(Failed(f"{problem}"))
                return
        elif isinstance(order, Begin):
            order = Begin(clock() + LEAD_SECONDS)  # the master's moment is on another clock
        self.obey(order)


def allowed(plan: LoadPlan, own: Target | None) -> LoadPlan:
    """The plan as a worker with a target of its `own` carries it out; None: as it is.

    Model, route and fields of the body are the master's. Raises LoadError for a plan that names
    files: they are the worker's, and nobody has said which.
    """
    if own is None:
        return plan
    workload = plan.workload
    if workload.file or workload.replay or isinstance(plan.arrivals, Trace):
        raise LoadError(
            "a worker that joined reads no trace on its machine: replay traces with --workers"
        )
    target = msgspec.structs.replace(
        plan.target, url=own.url, api_key_env=own.api_key_env, verify_tls=own.verify_tls
    )
    return msgspec.structs.replace(plan, target=target)


def own_target() -> Target | None:
    """Of the worker that this process is; None: it was started by hand."""
    text = os.environ.get(OWN_TARGET_VARIABLE)
    return None if text is None else msgspec.json.decode(text, type=Target)


def run_worker(host: str, port: int, target: Target) -> None:
    """Be a worker of the master there until it ends. Raises LoadError where this ends before."""
    place = f"[{host}]" if ":" in host else host
    command = [sys.executable, *LOCUST, "--worker", "--master-host", place]
    variables = {
        OWN_TARGET_VARIABLE: msgspec.json.encode(target).decode(),
        FOLDER_VARIABLE: os.getcwd(),
    }
    with Child(
        [*command, "--master-port", str(port)],
        environment=client_environment() | variables,
        urgent=True,
        folder=PACKAGE_ROOT,
    ) as child:
        status = None
        while status is None:
            status = child.wait(1.0)
    if status != 0:
        raise LoadError(f"the worker of {place}:{port} ended early ({child.how_it_ended()})")

"""Load from several processes or machines, by Locust's own master and workers.

    crossover load URL --rate 800 --workers 4                              # of this machine
    crossover load URL --rate 800 --workers 2 --bind 10.0.0.7              # from elsewhere:
    crossover load URL --join 10.0.0.7                                     # on each of the two

To its runner the master is one load generator: it passes orders on to the workers and makes one
answer of theirs. A worker that joined from elsewhere has its own clock and begins when the master's
word reaches it, so shares may start apart by the time that a message takes. Whoever reaches the
master's port may take part: the protocol knows no keys. A worker that joined sends to the URL of
its own command alone, with its own key, and reads no files: whoever answers at the master's address
cannot point it elsewhere.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import gevent
import msgspec
import numpy as np

from loadtests.errors import LoadError
from loadtests.load_generator.http_connection import clock
from loadtests.load_generator.load_plan import (
    Begin,
    Ended,
    Failed,
    Order,
    Ready,
    Share,
    Wire,
    total,
)
from loadtests.load_generator.locust_process import LEAD_SECONDS, locust_child, url_host
from loadtests.load_generator.openai_endpoint import Target
from loadtests.workload.arrivals import Trace

PORT = 5557  # Locust's own
TARGET_VARIABLE = "CROSSOVER_TARGET"  # of the command of a worker that joined
WATCH_SECONDS = 0.5
VERSIONS = f"crossover {version('llm-crossover')}, numpy {np.__version__}"
_encode = msgspec.json.Encoder().encode


class Master:
    """Takes orders for all workers, and tells their answers as one. `runner` is Locust's."""

    def __init__(self, runner: Any, tell: Callable[[Wire], None]) -> None:
        self._runner = runner
        self._tell = tell
        self._joined: set[str] = set()  # Locust's ids of those that listen
        self._at_work: list[str] = []  # on the level that runs
        self._answers: dict[type, dict[str, Any]] = {}  # of which all of them give one
        runner.register_message("crossover_joined", self._on_joined)
        runner.register_message("crossover_told", self._on_told)

    def obey(self, order: Order) -> None:
        if isinstance(order, Share):
            gevent.spawn(self._deal, order)
            return
        for worker in self._at_work:
            self._send(order, worker)

    def _deal(self, order: Share) -> None:
        """A share to each worker, once all are there; fails the level when one is lost."""
        while len(here := self._present()) < order.shares:
            gevent.sleep(WATCH_SECONDS)
        at_work = self._at_work = here[: order.shares]
        self._answers = {Ready: {}, Ended: {}}
        for number, worker in enumerate(at_work):
            self._send(msgspec.structs.replace(order, share=number), worker)
        while self._at_work is at_work:
            if lost := set(at_work).difference(self._present()):
                name = lost.pop().rpartition("_")[0]
                self._tell(Failed(f"the worker on {name} was lost within the level"))
            gevent.sleep(WATCH_SECONDS)

    def _present(self) -> list[str]:
        clients = self._runner.clients
        here = {client.id for client in [*clients.ready, *clients.spawning, *clients.running]}
        return sorted(here & self._joined)

    def _send(self, order: Order, worker: str) -> None:
        self._runner.send_message("crossover_order", _encode(order), client_id=worker)

    def _on_joined(self, environment: Any, msg: Any, **_: Any) -> None:
        if msg.data == VERSIONS:
            self._joined.add(msg.node_id)
        else:  # it would draw other requests
            self._tell(Failed(f"a worker of {msg.data} wants to join {VERSIONS}"))

    def _on_told(self, environment: Any, msg: Any, **_: Any) -> None:
        wire = msgspec.json.decode(msg.data, type=Wire)
        if isinstance(wire, Ready | Ended):
            answered = self._answers[type(wire)]
            answered[msg.node_id] = wire
            if len(answered) < len(self._at_work):
                return
            if isinstance(wire, Ended):
                wire = total(list(answered.values()))
                self._at_work = []
        self._tell(wire)


class Worker:
    """Takes the master's orders, within its own command, and sends it the answers."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        own = os.environ.get(TARGET_VARIABLE)  # none: its master has started it
        self._own = None if own is None else msgspec.json.decode(own, type=Target)

    def join(self, obey: Callable[[Order], None]) -> None:
        """`obey` carries orders out."""

        def on_order(environment: Any, msg: Any, **_: Any) -> None:
            order = msgspec.json.decode(msg.data, type=Order)
            try:
                obey(order if self._own is None else within(order, self._own))
            except LoadError as problem:
                self.tell(Failed(f"{problem}"))

        self._runner.register_message("crossover_order", on_order)
        self._runner.send_message("crossover_joined", VERSIONS)

    def tell(self, wire: Wire) -> None:
        self._runner.send_message("crossover_told", _encode(wire))


def within(order: Order, own: Target) -> Order:
    """The order as a worker with a command of its own carries it out: to its own target.

    Raises LoadError for a plan that names files: they are the worker's, and nobody said which.
    """
    if isinstance(order, Begin):  # the master's moment is on another clock
        return Begin(clock() + LEAD_SECONDS)
    if isinstance(order, Share):
        workload = order.plan.workload
        if workload.file or workload.replay or isinstance(order.plan.arrivals, Trace):
            raise LoadError(
                "a worker that joined reads no trace on its machine: replay traces without --bind"
            )
        return msgspec.structs.replace(order, plan=msgspec.structs.replace(order.plan, target=own))
    return order


def run_worker(host: str, port: int, target: Target) -> None:
    """Be a worker of the master there until it ends. Raises LoadError where this ends before."""
    place = url_host(host)
    options = ("--worker", "--master-host", place, "--master-port", str(port))
    with locust_child(*options, variables={TARGET_VARIABLE: _encode(target).decode()}) as child:
        while (status := child.wait(1.0)) is None:
            pass
        if status != 0:
            how = child.how_it_ended()
            raise LoadError(f"the worker of {place}:{port} ended early ({how})")

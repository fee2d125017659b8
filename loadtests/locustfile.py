"""What runs inside Locust: a sender of shares, led over a pipe or by a master.

LoadGenerator starts it, and orders come over its pipe, one level after the other until it closes.
`import locust` patches the process: nothing but Locust may import this module.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import gevent
import gevent.event
import numpy as np
from locust import User, events, task
from locust.env import Environment
from locust.runners import MasterRunner, WorkerRunner

from loadtests.errors import LoadError
from loadtests.load_generator.dispatcher import Dispatcher
from loadtests.load_generator.load_plan import (
    Begin,
    Failed,
    Order,
    Ready,
    Settled,
    Share,
    Stop,
    Wire,
)
from loadtests.load_generator.locust_process import FOLDER_VARIABLE, PIPE_VARIABLE, Pipe
from loadtests.load_generator.locust_workers import MasterSide, WorkerSide
from models.errors import printable


class Traffic(User):  # type: ignore[misc]  # Locust is untyped
    """Idle: the dispatcher sends. Locust wants a user."""

    @task  # type: ignore[untyped-decorator]
    def live(self) -> None:
        gevent.event.Event().wait()


class Sender:
    """One process's share of one level after the other. `tell` takes its answers."""

    def __init__(self, tell: Callable[[Wire], None]) -> None:
        self._tell = tell
        self._dispatcher: Dispatcher | None = None
        self._level = 0

    def obey(self, order: Order) -> None:
        dispatcher = self._dispatcher
        match order:
            case Share():
                if dispatcher is not None:  # of a level that failed elsewhere
                    dispatcher.stop()
                self._dispatcher = None
                self._level += 1
                gevent.spawn(self._answer, self._level, lambda: self._prepare(order))
            case Begin(origin) if dispatcher is not None:
                gevent.spawn(self._answer, self._level, lambda: dispatcher.run(origin))
            case Stop() if dispatcher is not None:
                dispatcher.stop()
            case Settled() if dispatcher is not None:
                dispatcher.others_settled.set()

    def _prepare(self, order: Share) -> Ready:
        level = self._level
        made = Dispatcher(order.plan, order.share, order.shares, lambda w: self._told(level, w))
        self._dispatcher = made
        return Ready(f"crossover {version('llm-crossover')}, numpy {np.__version__}")

    def _answer(self, level: int, work: Callable[[], Wire]) -> None:
        try:
            self._told(level, work())
        except Exception as problem:  # in a greenlet: nobody else would hear of it
            is_known = isinstance(problem, LoadError | OSError)
            logging.error("%s", printable(str(problem)), exc_info=not is_known)
            self._told(level, Failed(f"{problem}"))

    def _told(self, level: int, wire: Wire) -> None:
        """Answers of a level that is over are nobody's any more."""
        if level == self._level:
            self._tell(wire)


@events.init.add_listener  # type: ignore[untyped-decorator]
def on_init(environment: Environment, **_: Any) -> None:
    runner = environment.runner
    if FOLDER_VARIABLE not in os.environ:
        raise SystemExit("`crossover load URL --rate 2` sends load; it starts Locust by itself")
    os.chdir(os.environ[FOLDER_VARIABLE])
    if isinstance(runner, WorkerRunner):
        side = WorkerSide(runner)
        side.join(Sender(side.tell).obey)
        return
    pipe: Pipe[Order] = Pipe(socket.socket(fileno=int(os.environ[PIPE_VARIABLE])), Order)
    kind = MasterSide(runner, pipe.send) if isinstance(runner, MasterRunner) else Sender(pipe.send)

    def obey_pipe() -> None:
        """The runner's orders, until it closes the pipe."""
        try:
            while True:
                for order in pipe.receive():
                    kind.obey(order)
        except EOFError:
            environment.process_exit_code = 0  # failed requests are results
            runner.quit()

    gevent.spawn(obey_pipe)

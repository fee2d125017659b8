"""What runs inside Locust: a sender of shares, led over a pipe, by a master, or by hand.

LoadGenerator starts it, and orders come over its pipe, one level after the other until it closes.
Or a person does: `locust -f loadtests/locustfile.py --host http://127.0.0.1:8000 --rate 2`.
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
import gevent.pool
import numpy as np
from locust import User, events, task
from locust.env import Environment
from locust.runners import LocalRunner, MasterRunner, WorkerRunner

from loadtests.errors import LoadError
from loadtests.load_generator.dispatcher import Dispatcher
from loadtests.load_generator.http_connection import clock
from loadtests.load_generator.load_options import add_options, plan_of_locust
from loadtests.load_generator.load_plan import (
    Begin,
    Failed,
    Order,
    Ready,
    Recorded,
    Settled,
    Share,
    Stop,
    Wire,
)
from loadtests.load_generator.locust_process import FOLDER_VARIABLE, PIPE_VARIABLE, Pipe
from loadtests.load_generator.locust_workers import MasterSide, WorkerSide
from models.errors import CrossoverError, printable


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


class ByHand:
    """Without LoadGenerator: Locust's start begins a level of its options, its stop ends it.

    A request is one entry of its statistics, as long as it took from the moment it was due.
    """

    def __init__(self, environment: Environment) -> None:
        options = environment.parsed_options
        if not isinstance(environment.runner, LocalRunner):
            raise SystemExit("load of several processes: `crossover load --workers`, or --master")
        if not options.host:
            raise SystemExit("say where to send to, for example --host http://127.0.0.1:8000")
        self._environment = environment
        self._end = environment.runner.quit if options.headless else environment.runner.stop
        self._own = dict(vars(options))
        if options.headless:  # Locust's clock would begin before the requests are made
            options.run_time = None
        self._dispatcher: Dispatcher | None = None
        self._level = gevent.pool.Group()
        environment.events.test_start.add_listener(self._start)
        environment.events.test_stopping.add_listener(self._stop)

    def _start(self, **_: Any) -> None:
        """In the greenlet that starts Locust's users after it."""
        given = vars(self._environment.parsed_options)
        try:
            plan = plan_of_locust(given, self._own, given["run_time"] or self._own["run_time"])
            self._dispatcher = Dispatcher(plan, 0, 1, self._tell)
        except (CrossoverError, OSError) as problem:
            logging.error("%s", printable(str(problem)))
            self._environment.process_exit_code = 2
            gevent.spawn(self._end)
            raise gevent.GreenletExit from problem  # no users are started
        logging.info("%s for %g s", plan.load_in_words, plan.window_seconds)
        self._level.spawn(self._run, self._dispatcher)

    def _run(self, dispatcher: Dispatcher) -> None:
        try:
            dispatcher.run(clock())
        finally:
            if self._dispatcher is dispatcher:  # else Locust stops already
                gevent.spawn(self._end)

    def _stop(self, **_: Any) -> None:
        """Nothing more is sent; Locust goes on once the answers on their way are there."""
        dispatcher, self._dispatcher = self._dispatcher, None
        if dispatcher is not None:
            dispatcher.send_no_more()
        self._level.join()

    def _tell(self, wire: Wire) -> None:
        if isinstance(wire, Recorded):
            record = wire.record
            error = LoadError(f"{record.error}: {record.error_message}") if record.error else None
            self._environment.events.request.fire(
                request_type="POST",
                name="answer, from due to end",
                response_time=((record.ended_seconds or 0.0) - record.due_seconds) * 1000,
                response_length=0,
                exception=error,
                context={},
            )


if FOLDER_VARIABLE not in os.environ:
    events.init_command_line_parser.add_listener(lambda parser, **_: add_options(parser))


@events.init.add_listener  # type: ignore[untyped-decorator]
def on_init(environment: Environment, **_: Any) -> None:
    runner = environment.runner
    if FOLDER_VARIABLE not in os.environ:
        ByHand(environment)
        return
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

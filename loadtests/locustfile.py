"""What runs inside Locust: a sender of levels, led over a pipe or by hand.

LoadGenerator starts it, and orders come over its pipe, one level after the other until it closes.
Or a person does: `locust -f loadtests/locustfile.py --host http://127.0.0.1:8000 --rate 2`, of
several processes and machines too: `--processes 4`; `--master` and `--worker`.
`import locust` patches the process: nothing but Locust may import this module.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable
from typing import Any

import gevent
import gevent.event
import gevent.pool
import msgspec
from locust import User, events, task
from locust.env import Environment
from locust.runners import MasterRunner, WorkerRunner

from loadtests.errors import LoadError
from loadtests.load_generator.dispatcher import Dispatcher
from loadtests.load_generator.http_connection import clock
from loadtests.load_generator.load_options import BY_HAND, LoadOptions, add_options, plan_of
from loadtests.load_generator.load_plan import (
    Begin,
    Failed,
    LoadPlan,
    Order,
    Prepare,
    Ready,
    Recorded,
    Wire,
)
from loadtests.load_generator.locust_process import FOLDER_VARIABLE, PIPE_VARIABLE, Pipe
from models.errors import CrossoverError, printable
from serving.bounds import converted


class Traffic(User):  # type: ignore[misc]  # Locust is untyped
    """Idle: the dispatcher sends. Locust wants a user."""

    @task  # type: ignore[untyped-decorator]
    def live(self) -> None:
        gevent.event.Event().wait()


class Sender:
    """One level after the other. `tell` takes its answers."""

    def __init__(self, tell: Callable[[Wire], None]) -> None:
        self._tell = tell
        self._dispatcher: Dispatcher | None = None

    def obey(self, order: Order) -> None:
        dispatcher = self._dispatcher
        if isinstance(order, Prepare):
            gevent.spawn(self._answer, lambda: self._prepare(order.plan))
        elif dispatcher is not None and isinstance(order, Begin):
            gevent.spawn(self._answer, lambda: dispatcher.run(order.origin))

    def _prepare(self, plan: LoadPlan) -> Ready:
        self._dispatcher = Dispatcher(plan, self._tell)
        return Ready()

    def _answer(self, work: Callable[[], Wire]) -> None:
        try:
            self._tell(work())
        except Exception as problem:  # in a greenlet: nobody else would hear of it
            is_known = isinstance(problem, LoadError | OSError)
            logging.error("%s", printable(str(problem)), exc_info=not is_known)
            self._tell(Failed(f"{problem}"))


class ByHand:
    """Without LoadGenerator: Locust's start begins a level of its options, its stop ends it.

    A request is one entry of its statistics, as long as it took from the moment it was due. Of
    several workers each sends its part of the rate, with arrivals of its own. A worker sends where
    its own command says, with its own key.
    """

    def __init__(self, environment: Environment) -> None:
        self._environment, self._runner = environment, environment.runner
        options = environment.parsed_options
        if not options.host:
            raise SystemExit("say where to send to, for example --host http://127.0.0.1:8000")
        self._own = {"url": options.host, "api_key_env": options.api_key_env}
        self._seconds = options.run_time or 30.0
        self._is_worker = isinstance(self._runner, WorkerRunner)
        self._end = self._runner.quit if options.headless else self._runner.stop
        if options.headless:  # Locust's clock would begin before the requests are made
            options.run_time = None
        self._left: set[str] = set()  # of a master: workers that have not ended
        self._is_done = False  # of a worker, until it has told so
        self._dispatcher: Dispatcher | None = None
        self._level = gevent.pool.Group()
        environment.events.test_start.add_listener(self._start)
        environment.events.test_stopping.add_listener(self._stop)
        if self._is_worker:  # its end comes with its last numbers
            environment.events.report_to_master.add_listener(self._report)
            return
        environment.events.worker_report.add_listener(self._take_report)
        try:
            self._plan()
        except CrossoverError as problem:
            raise SystemExit(printable(str(problem))) from None

    def _plan(self) -> LoadPlan:
        """Of Locust's options, which a worker has from its master. Raises CrossoverError."""
        options = self._environment.parsed_options
        known = {name: getattr(options, name) for name in BY_HAND} | self._own
        given = converted(known, LoadOptions, "", lambda name: f"--{name.replace('_', '-')}")
        if given.rate is None:
            raise LoadError("say how many requests a second, for example --rate 2")
        if self._is_worker:
            if given.arrivals.startswith("trace"):  # whoever is its master would name files
                raise LoadError("a worker reads no trace: replay it from one process")
            seed, rate = given.seed + self._runner.worker_index, given.rate / options.workers
            given = msgspec.structs.replace(given, seed=seed, rate=rate)
        return plan_of(given, window_seconds=getattr(options, "seconds", self._seconds))

    def _start(self, **_: Any) -> None:
        """In the greenlet that starts Locust's users after it; a master tells its workers then."""
        options = self._environment.parsed_options
        if not self._is_worker:
            options.seconds = options.run_time or self._seconds
        if isinstance(self._runner, MasterRunner):
            self._left = {client.id for client in self._runner.clients.ready}
            options.workers = len(self._left)
            return
        try:
            plan = self._plan()
            self._dispatcher = Dispatcher(plan, self._tell)
        except (CrossoverError, OSError) as problem:
            logging.error("%s", printable(str(problem)))
            self._environment.process_exit_code = 2
            self._done()
            raise gevent.GreenletExit from problem  # no users are started
        logging.info("%s for %g s", plan.load_in_words, plan.window_seconds)
        self._level.spawn(self._run, self._dispatcher)

    def _run(self, dispatcher: Dispatcher) -> None:
        try:
            dispatcher.run(clock())
        finally:
            if self._dispatcher is dispatcher:  # else Locust stops already
                self._done()

    def _done(self) -> None:
        self._is_done = True
        if not self._is_worker:
            gevent.spawn(self._end)

    def _report(self, data: dict[str, Any], **_: Any) -> None:
        data["crossover_done"], self._is_done = self._is_done, False

    def _take_report(self, client_id: str, data: dict[str, Any], **_: Any) -> None:
        if data.get("crossover_done"):
            self._left.discard(client_id)
            if not self._left:
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
    pipe = Pipe(socket.socket(fileno=int(os.environ[PIPE_VARIABLE])), Order)
    sender = Sender(pipe.send)

    def obey_pipe() -> None:
        """The runner's orders, until it closes the pipe."""
        try:
            while True:
                for order in pipe.receive():
                    sender.obey(order)
        except EOFError:
            environment.process_exit_code = 0  # failed requests are results
            runner.quit()

    gevent.spawn(obey_pipe)

"""What runs inside Locust: a sender of levels, led over a pipe or by hand.

LoadGenerator starts it, and plans come over its pipe, one level after the other until it closes.
Or a person does: `locust -f loadtests/locustfile.py --host http://127.0.0.1:8000 --rate 2`, of
several processes and machines too: `--processes 4`; `--master` and `--worker`.
`import locust` patches the process: nothing but Locust may import this module.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from typing import Any

import gevent
import gevent.event
import gevent.pool
import msgspec
from locust import User, events, task
from locust.env import Environment
from locust.runners import MasterRunner, WorkerRunner

from crossover.loadtests.errors import LoadError
from crossover.loadtests.load_generator.dispatcher import Dispatcher
from crossover.loadtests.load_generator.http_connection import clock
from crossover.loadtests.load_generator.level_messages import (
    Failed,
    LoadPlan,
    Recorded,
    Started,
    WireMessage,
)
from crossover.loadtests.load_generator.load_options import (
    BY_HAND,
    LoadOptions,
    add_options,
    plan_of,
)
from crossover.loadtests.load_generator.locust_process import FOLDER_VARIABLE, PIPE_VARIABLE
from crossover.loadtests.records.request_record import RequestRecord
from crossover.models.errors import CrossoverError, printable
from crossover.serving.option_help import converted

LEAD_SECONDS = 0.05  # between Started and t0: the runner has heard of it then
DONE = "crossover_done"  # a worker's message: its level has ended


class Traffic(User):  # type: ignore[misc]  # Locust is untyped
    """Idle: the dispatcher sends. Locust wants a user."""

    @task  # type: ignore[untyped-decorator]
    def live(self) -> None:
        gevent.event.Event().wait()


def obey(environment: Environment, pipe: socket.socket) -> None:
    """The runner's plans, one after the other, until it closes the pipe."""
    sending = threading.Lock()  # another greenlet may be in the middle of a message

    def tell(wire: WireMessage) -> None:
        with sending:
            pipe.sendall(msgspec.json.encode(wire) + b"\n")

    for line in pipe.makefile("rb"):
        try:
            plan = msgspec.json.decode(line, type=LoadPlan)
            dispatcher = Dispatcher(plan, lambda record: tell(Recorded(record)))
            tell(Started(time.time() + LEAD_SECONDS))
            tell(dispatcher.run(clock() + LEAD_SECONDS))
        except Exception as problem:  # in a greenlet: nobody else would hear of it
            is_known = isinstance(problem, LoadError | OSError)
            logging.error("%s", printable(str(problem)), exc_info=not is_known)
            tell(Failed(str(problem) or type(problem).__name__))
    environment.process_exit_code = 0  # failed requests are results
    environment.runner.quit()


class ByHand:
    """Without LoadGenerator: Locust's start begins a level of its options, its stop ends it.

    A request is one entry of its statistics, as long as it took from the moment it was due. Of
    several workers each sends its part of the rate, with arrivals of its own. A worker sends where
    its own command says, with its own key.
    """

    def __init__(self, environment: Environment) -> None:
        self._environment, self._runner = environment, environment.runner
        self._options = options = environment.parsed_options
        if not options.host:
            raise SystemExit("Give the endpoint, for example --host http://127.0.0.1:8000.")
        self._own = {"url": options.host, "api_key_env": options.api_key_env}
        self._seconds = options.run_time or 30.0
        self._is_worker = isinstance(self._runner, WorkerRunner)
        if options.headless:  # Locust's clock would begin before the requests are made
            options.run_time = None
        self._left = 1  # processes whose level has not ended
        self._dispatcher: Dispatcher | None = None
        self._level = gevent.pool.Group()
        environment.events.test_start.add_listener(self._start)
        environment.events.test_stopping.add_listener(self._stop)
        if not self._is_worker:
            self._runner.register_message(DONE, self._done)
            try:
                self._plan()
            except CrossoverError as problem:
                raise SystemExit(printable(str(problem))) from None

    def _plan(self) -> LoadPlan:
        """Of Locust's options, which a worker has from its master. Raises CrossoverError."""
        options = self._options
        known = {name: getattr(options, name) for name in BY_HAND} | self._own
        given = converted(known, LoadOptions, "", lambda name: f"--{name.replace('_', '-')}")
        if given.rate is None:
            raise LoadError("Give the requests per second, for example --rate 2")
        if self._is_worker:
            seed, rate = given.seed + self._runner.worker_index, given.rate / options.workers
            given = msgspec.structs.replace(given, seed=seed, rate=rate)
        return plan_of(given, window_seconds=getattr(options, "seconds", self._seconds))

    def _start(self, **_: Any) -> None:
        """In the greenlet that starts Locust's users after it; a master tells its workers then."""
        if not self._is_worker:
            self._options.seconds = self._options.run_time or self._seconds
        if isinstance(self._runner, MasterRunner):
            self._options.workers = self._left = len(self._runner.clients.ready)
            return
        try:
            self._dispatcher = Dispatcher(self._plan(), self._tell)
        except (CrossoverError, OSError) as problem:
            logging.error("%s", printable(str(problem)))
            self._environment.process_exit_code = 2
            self._runner.send_message(DONE)
            raise gevent.GreenletExit from problem  # no users are started
        self._level.spawn(self._run, self._dispatcher)

    def _run(self, dispatcher: Dispatcher) -> None:
        dispatcher.run(clock())
        if self._dispatcher is dispatcher:  # else Locust stops already
            self._runner.send_message(DONE)  # to the master; without one, to this process

    def _done(self, **_: Any) -> None:
        self._left -= 1
        if self._left <= 0:
            gevent.spawn(self._runner.quit if self._options.headless else self._runner.stop)

    def _stop(self, **_: Any) -> None:
        """Nothing more is sent; Locust goes on once the answers on their way are there."""
        dispatcher, self._dispatcher = self._dispatcher, None
        if dispatcher is not None:
            dispatcher.send_no_more()
        self._level.join()

    def _tell(self, record: RequestRecord) -> None:
        error = LoadError(f"{record.error}: {record.error_message}") if record.error else None
        self._environment.events.request.fire(
            request_type="POST",
            name="answer, from scheduled time to end",
            response_time=((record.ended_seconds or 0.0) - record.scheduled_seconds) * 1000,
            response_length=0,
            exception=error,
            context={},
        )


if FOLDER_VARIABLE not in os.environ:
    events.init_command_line_parser.add_listener(lambda parser, **_: add_options(parser))


@events.init.add_listener  # type: ignore[untyped-decorator]
def on_init(environment: Environment, **_: Any) -> None:
    if FOLDER_VARIABLE not in os.environ:
        ByHand(environment)
        return
    os.chdir(os.environ[FOLDER_VARIABLE])
    gevent.spawn(obey, environment, socket.socket(fileno=int(os.environ[PIPE_VARIABLE])))

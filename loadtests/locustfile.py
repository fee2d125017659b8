"""Sends levels from inside Locust, as a runner or a person asks for them.

LoadGenerator starts Locust with this file and sends plans over a pipe, one level after the other,
until it closes the pipe. A person starts it by hand, also on several processes (`--processes 4`) or
machines (`--master`, `--worker`):

    locust -f loadtests/locustfile.py --host http://127.0.0.1:8000 --rate 2

`import locust` patches the standard library, so nothing but Locust may import this module.
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
    plan_load,
)
from crossover.loadtests.load_generator.locust_process import FOLDER_VARIABLE, PIPE_VARIABLE
from crossover.loadtests.records.request_record import RequestRecord
from crossover.models.errors import CrossoverError, printable
from crossover.serving.faults import converted

LEAD_SECONDS = 0.05  # from Started to the level's start: time for the runner to get the message
LEVEL_ENDED = "crossover_done"  # a worker's message to its master


class IdleUser(User):  # type: ignore[misc]  # Locust is untyped
    """A user that does nothing. Locust needs one, but the dispatcher sends all requests."""

    @task  # type: ignore[untyped-decorator]
    def wait_forever(self) -> None:
        gevent.event.Event().wait()


def run_plans(environment: Environment, pipe: socket.socket) -> None:
    """Run the plans that the runner sends, one after the other, until it closes the pipe."""
    sending = threading.Lock()  # another greenlet may be in the middle of a message

    def send(message: WireMessage) -> None:
        with sending:
            pipe.sendall(msgspec.json.encode(message) + b"\n")

    for line in pipe.makefile("rb"):
        try:
            load = msgspec.json.decode(line, type=LoadPlan)
            dispatcher = Dispatcher(load, lambda record: send(Recorded(record)))
            send(Started(time.time() + LEAD_SECONDS))
            send(dispatcher.run(clock() + LEAD_SECONDS))
        except Exception as problem:  # otherwise it would be lost in this greenlet
            is_expected = isinstance(problem, LoadError | OSError)
            logging.error("%s", printable(str(problem)), exc_info=not is_expected)
            send(Failed(str(problem) or type(problem).__name__))
    environment.process_exit_code = 0  # failed requests are results
    environment.runner.quit()


class ManualLoad:
    """Runs levels for a person who started Locust by hand: Locust's start begins a level, by
    Locust's options, and its stop ends the level.

    Each request is an entry of Locust's statistics, with its time since it was scheduled. If there
    are several workers, each sends its part of the rate, with its own arrivals. A worker sends to
    the endpoint of its own command line, with its own API key.
    """

    def __init__(self, environment: Environment) -> None:
        self._environment, self._runner = environment, environment.runner
        self._options = options = environment.parsed_options
        if not options.host:
            raise SystemExit("Give the endpoint, for example --host http://127.0.0.1:8000.")
        # A master sends its options to its workers. These two stay those of each process.
        self._own_options = {"url": options.host, "api_key_env": options.api_key_env}
        self._default_seconds = options.run_time or 30.0
        self._is_worker = isinstance(self._runner, WorkerRunner)
        if options.headless:  # the time would count from before the requests are made
            options.run_time = None
        self._running_processes = 1  # processes whose level has not ended
        self._dispatcher: Dispatcher | None = None
        self._level = gevent.pool.Group()
        environment.events.test_start.add_listener(self._start)
        environment.events.test_stopping.add_listener(self._stop)
        if not self._is_worker:
            self._runner.register_message(LEVEL_ENDED, self._count_ended)
            try:
                self._plan_load()  # so that wrong options are reported at once
            except CrossoverError as problem:
                raise SystemExit(printable(str(problem))) from None

    def _plan_load(self) -> LoadPlan:
        """Return the level of Locust's options, which a worker gets from its master. Raises
        CrossoverError."""
        values = {name: getattr(self._options, name) for name in BY_HAND} | self._own_options
        options = converted(
            values, LoadOptions, LoadError, name_of=lambda name: f"--{name.replace('_', '-')}"
        )
        if options.rate is None:
            raise LoadError("Give the requests per second, for example --rate 2")
        if self._is_worker:
            options = msgspec.structs.replace(
                options,
                seed=options.seed + self._runner.worker_index,
                rate=options.rate / self._options.workers,
            )
        seconds = getattr(self._options, "seconds", self._default_seconds)
        return plan_load(options, seconds)

    def _start(self, **_: Any) -> None:
        """Begin a level. Locust calls this before it starts users, or before a master starts its
        workers, which then get `seconds` and `workers` with its options."""
        if not self._is_worker:
            self._options.seconds = self._options.run_time or self._default_seconds
        if isinstance(self._runner, MasterRunner):
            self._options.workers = self._running_processes = len(self._runner.clients.ready)
            return
        try:
            self._dispatcher = Dispatcher(self._plan_load(), self._report)
        except (CrossoverError, OSError) as problem:
            logging.error("%s", printable(str(problem)))
            self._environment.process_exit_code = 2
            self._runner.send_message(LEVEL_ENDED)
            raise gevent.GreenletExit from problem  # no users are started
        self._level.spawn(self._run, self._dispatcher)

    def _run(self, dispatcher: Dispatcher) -> None:
        """Run the level, and report its end unless Locust was stopped meanwhile."""
        try:
            dispatcher.run(clock())
        except LoadError as problem:
            logging.error("%s", printable(str(problem)))
            self._environment.process_exit_code = 2
        if self._dispatcher is dispatcher:
            self._runner.send_message(LEVEL_ENDED)  # to the master; without one, to this process

    def _count_ended(self, **_: Any) -> None:
        """Stop Locust when the level has ended in all processes."""
        self._running_processes -= 1
        if self._running_processes <= 0:
            gevent.spawn(self._runner.quit if self._options.headless else self._runner.stop)

    def _stop(self, **_: Any) -> None:
        """Stop sending, and return when the requests in flight have been answered."""
        dispatcher, self._dispatcher = self._dispatcher, None
        if dispatcher is not None:
            dispatcher.send_no_more()
        self._level.join()

    def _report(self, record: RequestRecord) -> None:
        """Add a request to Locust's statistics."""
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
    """Serve a person, or the runner that LoadGenerator belongs to."""
    if FOLDER_VARIABLE not in os.environ:
        ManualLoad(environment)
        return
    os.chdir(os.environ[FOLDER_VARIABLE])
    pipe = socket.socket(fileno=int(os.environ[PIPE_VARIABLE]))
    gevent.spawn(run_plans, environment, pipe)

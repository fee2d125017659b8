"""What runs inside Locust: a sender of shares, led over a pipe, by a master, or by hand.

Started by LoadGenerator, orders come over the pipe, one level after the other until it closes.
Started by hand (`locust -f loadtests/locustfile.py --host URL --rate 2`), the plan is made of
Locust's options and its web page. `import locust` patches the process: only the locustfile may
import this module.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import gevent
import gevent.event
import msgspec
import numpy as np
from locust import User, events, task
from locust.env import Environment
from locust.exception import StopUser
from locust.runners import MasterRunner, WorkerRunner

from loadtests.errors import LoadError
from loadtests.load_generator.dispatcher import Dispatcher
from loadtests.load_generator.http_connection import clock
from loadtests.load_generator.load_options import COMMAND_LINE_ONLY, add_options, plan_of_options
from loadtests.load_generator.load_plan import (
    Begin,
    Ended,
    Failed,
    Order,
    Ready,
    Recorded,
    Settled,
    Share,
    Stop,
    Wire,
)
from loadtests.load_generator.locust_page import guard
from loadtests.load_generator.locust_process import (
    FOLDER_VARIABLE,
    LEAD_SECONDS,
    PIPE_VARIABLE,
    Pipe,
)
from loadtests.load_generator.locust_workers import MasterSide, WorkerSide, own_target
from loadtests.records.request_record import RequestRecord
from models.errors import printable

log = logging.getLogger("crossover")


class Traffic(User):  # type: ignore[misc]  # Locust is untyped
    """Idle: the dispatcher sends. Locust wants a user."""

    @task  # type: ignore[untyped-decorator]
    def live(self) -> None:
        roles.level_over.wait()
        raise StopUser


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
                gevent.spawn(self._prepare, order, self._teller(self._level))
            case Begin():
                gevent.spawn(self._run, order.origin)
            case Stop() if dispatcher is not None:
                dispatcher.stop(order.is_decided)
            case Settled() if dispatcher is not None:
                dispatcher.others_settled.set()

    def _teller(self, level: int) -> Callable[[Wire], None]:
        """Answers of a level that is over are nobody's any more."""
        return lambda wire: self._tell(wire) if level == self._level else None

    def _prepare(self, order: Share, tell: Callable[[Wire], None]) -> None:
        try:
            self._dispatcher = Dispatcher(order.plan, order.share, order.shares, tell)
        except Exception as problem:  # in a greenlet: nobody else would hear of it
            _fail(problem, tell)
        else:
            tell(Ready(f"crossover {version('llm-crossover')}, numpy {np.__version__}"))

    def _run(self, origin: float) -> None:
        tell, dispatcher = self._teller(self._level), self._dispatcher
        assert dispatcher is not None
        try:
            account = dispatcher.run(origin)
        except Exception as problem:
            _fail(problem, tell)
        else:
            tell(account)


def _fail(problem: Exception, tell: Callable[[Wire], None]) -> None:
    is_known = isinstance(problem, LoadError | OSError)
    log.error("%s", printable(str(problem)), exc_info=not is_known)
    tell(Failed(f"{problem}"))


class Roles:
    """What this process is: a sender, the master of several, or one of a master's workers."""

    def __init__(self) -> None:
        self.level_over = gevent.event.Event()  # of a level that was started by hand
        self._is_led = PIPE_VARIABLE in os.environ
        self._environment: Any = None
        self._given: dict[str, Any] = {}  # the command line's options
        self._take_orders: Callable[[Order], None] = lambda order: None
        self._requests_file: Path | None = None

    def on_init(self, environment: Environment, **_: Any) -> None:
        runner = environment.runner
        self._environment = environment
        # As the command line has it: Locust's page overwrites parsed_options.
        self._given = dict(vars(environment.parsed_options))
        if FOLDER_VARIABLE in os.environ:
            os.chdir(os.environ[FOLDER_VARIABLE])
        if environment.web_ui is not None:
            guard(environment)
        if isinstance(runner, WorkerRunner):
            side = WorkerSide(runner, own_target())

            def tell_master(wire: Wire) -> None:
                self._count(wire)
                side.tell(wire)

            side.obey = Sender(tell_master).obey
            side.join()
            return
        tell: Callable[[Wire], None] = self._told_by_hand
        if self._is_led:
            pipe: Pipe[Order] = Pipe(socket.socket(fileno=int(os.environ[PIPE_VARIABLE])), Order)
            tell = pipe.send
            gevent.spawn(self._obey_pipe, pipe)
        if isinstance(runner, MasterRunner):
            self._take_orders = MasterSide(runner, tell).obey
        else:
            self._take_orders = Sender(tell).obey

    def _obey_pipe(self, pipe: Pipe[Order]) -> None:
        """The runner's orders, until it closes the pipe."""
        try:
            while True:
                for order in pipe.receive():
                    self._take_orders(order)
        except EOFError:
            self._environment.process_exit_code = 0  # failed requests are results
            self._environment.runner.quit()

    def on_test_start(self, environment: Environment, **_: Any) -> None:
        """By hand: a level of the command line's options, and the page's."""
        if self._is_led or isinstance(environment.runner, WorkerRunner | type(None)):
            return
        options = environment.parsed_options
        own = {name: self._given[name] for name in COMMAND_LINE_ONLY}
        given = {**vars(options), **own, "host": environment.host or options.host}
        self.level_over.clear()
        try:
            if given["api_key_env"] and given["host"] != self._given["host"]:
                raise LoadError(
                    f"the key in {given['api_key_env']} is for the --host of the command line, "
                    f"{self._given['host']!r}, and not sent to {given['host']!r}"
                )
            plan = plan_of_options(given, users=options.num_users or 1)
            self._requests_file = Path(given["requests_file"]) if given["requests_file"] else None
        except LoadError as problem:
            self._told_by_hand(Failed(f"{problem}"))
            return
        self._take_orders(Share(plan))

    def on_test_stop(self, **_: Any) -> None:
        """Locust's Stop: nothing more is sent; answers on their way are waited for."""
        if not self._is_led:
            self._take_orders(Stop(is_decided=False))

    def _told_by_hand(self, wire: Wire) -> None:
        match wire:
            case Ready():
                self._take_orders(Begin(clock() + LEAD_SECONDS))
            case Settled():
                self._take_orders(Settled())
            case Recorded(record):
                if not isinstance(self._environment.runner, MasterRunner):
                    self._count(wire)  # a worker has counted its own
                if self._requests_file is not None:
                    with open(self._requests_file, "ab") as file:
                        file.write(msgspec.json.encode(record) + b"\n")
            case Ended() | Failed():
                if isinstance(wire, Failed):
                    log.error("%s", printable(wire.problem))
                self._environment.process_exit_code = 2 if isinstance(wire, Failed) else 0
                self.level_over.set()
                is_watched = self._environment.web_ui is not None
                runner = self._environment.runner
                gevent.spawn(runner.stop if is_watched else runner.quit)

    def _count(self, wire: Wire) -> None:
        """For Locust's statistics: the answer is one entry, its TTFT another."""
        if not isinstance(wire, Recorded):
            return
        record: RequestRecord = wire.record
        failure = LoadError(f"{record.error}: {record.error_message}") if record.error else None
        due, first = record.due_seconds, record.first_content_seconds
        end = record.last_content_seconds or record.ended_seconds or due
        common = {"name": "answer", "response_length": 0, "context": {}}
        fire = self._environment.events.request.fire
        fire(request_type="POST", response_time=(end - due) * 1000, exception=failure, **common)
        if first is not None:
            ttft_ms = (first - due) * 1000
            fire(request_type="TTFT", response_time=ttft_ms, exception=None, **common)


roles = Roles()


def register() -> None:
    """Hook everything above into Locust; the locustfile calls it."""
    events.init.add_listener(roles.on_init)
    events.test_start.add_listener(roles.on_test_start)
    events.test_stop.add_listener(roles.on_test_stop)
    if PIPE_VARIABLE not in os.environ:
        events.init_command_line_parser.add_listener(lambda parser, **_: add_options(parser))

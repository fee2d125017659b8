"""The Locust side: what each process does, and the messages between processes.

    master, or the only process           each load generator (also the only process)
    test starts  -- prepare ------------> open connections, make the prompts, lay out due times
                 <----------- prepared --
    choose t0    -- begin --------------> send; all times count from t0
                 -- stop ---------------> the level is decided
                 <---------------- told -- messages for the runner
                 <------------- drained -- every request has ended
    tell the runner, quit Locust

Started by the runner, a LoadPlan comes over the pipe (messages.py), one after the other until the
pipe closes. Started by hand, the plan is made of Locust's options. `import locust` patches the
process: only what runs inside Locust may import this module.
"""

from __future__ import annotations

import gc
import logging
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gevent
import gevent.event
import msgspec
from locust import User, events, task
from locust.env import Environment
from locust.exception import StopUser
from locust.runners import LocalRunner, MasterRunner, WorkerRunner

from loadtests.errors import LoadError
from loadtests.generator.channel import Channel, encode
from loadtests.generator.connection import clock
from loadtests.generator.dispatcher import Dispatcher
from loadtests.generator.launcher import CHANNEL_VARIABLE, FOLDER_VARIABLE
from loadtests.generator.live_page import attach, guard
from loadtests.generator.live_stats import Live
from loadtests.generator.load_plan import LoadPlan
from loadtests.generator.messages import (
    Ended,
    Failed,
    Order,
    Recorded,
    Started,
    Told,
    total,
)
from loadtests.generator.option_values import plan_of_options
from loadtests.generator.options import COMMAND_LINE_ONLY, add_options
from loadtests.generator.request_factory import Share
from loadtests.metrics.slo import SLO_PRESETS
from loadtests.records.lines import Appender
from loadtests.records.schema import RequestRecord
from models.errors import printable

log = logging.getLogger("crossover")
LEAD_SECONDS = 0.2  # between "begin" and t0: the message must have reached every worker


class Traffic(User):  # type: ignore[misc]  # Locust is untyped
    """In a closed loop, one user; in an open loop, idle: Locust wants a user."""

    @task  # type: ignore[untyped-decorator]
    def live(self) -> None:
        roles.level_runs.wait()
        dispatcher = roles.dispatcher
        if dispatcher is None:
            return
        if not dispatcher.plan.is_open:
            self._closed_loop(dispatcher)
        dispatcher.finished.wait()
        if not roles.is_led:
            raise StopUser

    def _closed_loop(self, dispatcher: Dispatcher) -> None:
        dispatcher.began.wait()
        gevent.sleep(max(0.0, dispatcher.origin - clock()))
        while not dispatcher.over.is_set():
            for request in dispatcher.factory.next_session():
                if request.think_seconds > 0:
                    gevent.sleep(request.think_seconds)
                now = clock() - dispatcher.origin
                if not dispatcher.takes(now):
                    return
                dispatcher.send(request, now)


class Roles:
    """What this process is: the master, a worker, or both in one."""

    def __init__(self) -> None:
        self.dispatcher: Dispatcher | None = None
        self.level_runs = gevent.event.Event()  # a dispatcher is there
        self.channel: Channel[Order] | None = None  # None: started by hand, or a worker
        self.is_led = CHANNEL_VARIABLE in os.environ  # by a runner
        self._environment: Any = None
        self._given: dict[str, Any] = {}  # the command line's options
        self._plan: LoadPlan | None = None
        self._prepared = 0
        self._accounts: list[Ended] = []
        self._workers = 1
        self._live = Live(SLO_PRESETS["chat"])  # what the page shows, of all workers

    @property
    def _runner(self) -> Any:
        return self._environment.runner

    def on_init(self, environment: Environment, **_: Any) -> None:
        self._environment = environment
        # As the command line has it: Locust's page overwrites parsed_options.
        self._given = dict(vars(environment.parsed_options))
        if self.is_led:
            os.chdir(os.environ[FOLDER_VARIABLE])
        if environment.web_ui is not None:
            guard(environment)
            attach(environment, lambda: self._live, self._facts)
        messages: dict[str, Callable[[Any], None]] = {}
        if isinstance(self._runner, MasterRunner):
            messages = {
                "crossover_prepared": self._one_prepared,
                "crossover_failed": lambda problem: self._abort(LoadError(problem)),
                "crossover_told": self._pass_on,
                "crossover_drained": self._one_drained,
            }
        elif isinstance(self._runner, WorkerRunner):
            messages = {
                "crossover_prepare": self._prepare,
                "crossover_begin": self._begin,
                "crossover_stop": lambda data: self._stop(is_decided=True),
            }
            if self.is_led:
                os.close(int(os.environ[CHANNEL_VARIABLE]))  # the master's
        for name, act in messages.items():
            self._runner.register_message(
                name,
                lambda environment, msg, act=act, **kw: act(msg.data),
                concurrent=name in ("crossover_prepare", "crossover_begin"),
            )

    def on_test_start(self, environment: Environment, **_: Any) -> None:
        if isinstance(self._runner, WorkerRunner):
            return
        if self.is_led:
            end = socket.socket(fileno=int(os.environ[CHANNEL_VARIABLE]))
            self.channel = Channel(end, Order)
            gevent.spawn(self._obey, self.channel)
            return
        options = environment.parsed_options
        own = {name: self._given[name] for name in COMMAND_LINE_ONLY}
        given = {**vars(options), **own, "host": environment.host or options.host}
        try:
            if given["api_key_env"] and given["host"] != self._given["host"]:
                raise LoadError(
                    f"the key in {given['api_key_env']} is for the --host of the command line, "
                    f"{self._given['host']!r}, and not sent to {given['host']!r}"
                )
            self._start(plan_of_options(given, users=options.num_users or 1))
        except Exception as problem:
            self._abort(problem)

    def on_test_stop(self, environment: Environment, **_: Any) -> None:
        """Locust's Stop: nothing more is sent; answers on their way are waited for."""
        self._stop()

    def on_report(self, client_id: str, data: dict[str, Any], **_: Any) -> None:
        """A worker tells the master what has come since it last did."""
        if self.dispatcher is not None and self.dispatcher.live is not None:
            data["crossover_live"] = self.dispatcher.live.taken()

    def on_worker_report(self, client_id: str, data: dict[str, Any], **_: Any) -> None:
        if "crossover_live" in data:
            self._live.merge(data["crossover_live"])

    def _obey(self, channel: Channel[Order]) -> None:
        """The runner's orders, until it closes the pipe."""
        while True:
            try:
                orders = channel.receive()
            except EOFError:
                self._runner.quit()
                return
            for order in orders:
                if isinstance(order, LoadPlan):
                    self._start(order)
                elif isinstance(self._runner, MasterRunner):
                    self._runner.send_message("crossover_stop")
                else:
                    self._stop(is_decided=True)

    def _facts(self) -> dict[str, Any]:
        """What the page says above its charts."""
        plan = self._plan
        if plan is None:
            return {"what": "no level yet: start one on Locust's page"}
        load = plan.load_in_words
        if plan.is_open:
            load += f", {msgspec.to_builtins(plan.arrivals)['kind']}"
        workers = f", {self._workers} load generators" if self._workers > 1 else ""
        return {"what": f"{plan.target.url}: {load}, for {plan.duration_seconds:g} s{workers}"}

    def _start(self, plan: LoadPlan) -> None:
        self._plan = plan
        self._prepared = 0
        self._accounts = []
        self._live = Live(SLO_PRESETS[plan.slo])
        if isinstance(self._runner, MasterRunner):
            self._workers = self._runner.worker_count
            text = msgspec.json.encode(plan).decode()
            for index, client in enumerate(sorted(self._runner.clients)):
                data = {"plan": text, "index": index, "workers": self._workers}
                self._runner.send_message("crossover_prepare", data, client_id=client)
        elif isinstance(self._runner, LocalRunner):
            gevent.spawn(self._whole, plan)

    def _stop(self, is_decided: bool = False) -> None:
        if self.dispatcher is not None:
            self.dispatcher.stop(is_decided)

    def _dispatch_with(self, plan: LoadPlan, share: Share) -> Dispatcher:
        self.dispatcher = Dispatcher(plan, share, self._teller(plan), self._counter(plan))
        self.level_runs.set()
        return self.dispatcher

    def _teller(self, plan: LoadPlan) -> Callable[[Told], None]:
        """Where a load generator's messages go: to the runner, to a file, or nowhere."""
        if self.channel is not None:
            return self.channel.send
        if self.is_led:
            return lambda told: self._runner.send_message("crossover_told", encode(told))
        if plan.requests_file is None:
            return lambda told: None
        file: Appender[RequestRecord] = Appender(Path(plan.requests_file))
        return lambda told: file.append(told.record) if isinstance(told, Recorded) else None

    def _pass_on(self, line: bytes) -> None:
        """A worker's message, to the runner."""
        if self.channel is not None:
            self.channel.send_line(line)

    def _whole(self, plan: LoadPlan) -> None:
        """A level within a single process."""
        try:
            dispatcher = self._dispatch_with(plan, Share(0, 1))
            self._live = dispatcher.live or self._live
            started = time.time() + 0.01
            self._announce(started)
            account = dispatcher.run(started)
        except Exception as problem:  # in a greenlet: Locust would not hear of it and run on
            self._abort(problem)
            return
        self._finish([account])

    def _prepare(self, data: dict[str, Any]) -> None:
        try:
            plan = msgspec.json.decode(data["plan"], type=LoadPlan)
            self._dispatch_with(plan, Share(data["index"], data["workers"]))
        except Exception as problem:
            self._fail(problem)
            return
        self._runner.send_message("crossover_prepared")

    def _one_prepared(self, _: Any) -> None:
        self._prepared += 1
        if self._prepared == self._workers:
            started = time.time() + LEAD_SECONDS
            self._announce(started)
            self._runner.send_message("crossover_begin", {"started": started})

    def _begin(self, data: dict[str, Any]) -> None:
        assert self.dispatcher is not None
        try:
            account = self.dispatcher.run(data["started"])
        except Exception as problem:
            self._fail(problem)
            return
        self._forget()
        self._runner.send_message("crossover_drained", msgspec.to_builtins(account))

    def _fail(self, problem: Exception) -> None:
        """In a worker: the master must end the level for all."""
        log.error("%s", printable(str(problem)), exc_info=not isinstance(problem, LoadError))
        self._runner.send_message("crossover_failed", f"{problem}")

    def _one_drained(self, data: dict[str, Any]) -> None:
        self._accounts.append(msgspec.convert(data, Ended))
        if len(self._accounts) == self._workers:
            self._finish(self._accounts)

    def _announce(self, started_unix_seconds: float) -> None:
        if self.channel is not None:
            self.channel.send(Started(started_unix_seconds))

    def _forget(self) -> None:
        self.level_runs.clear()
        self.dispatcher = None
        gc.collect()

    def _finish(self, accounts: list[Ended]) -> None:
        whole = total(accounts)
        log.info(
            "%d requests were due, %d ended, %d given up", whole.due, whole.recorded, whole.gave_up
        )
        self._environment.process_exit_code = 0  # failed requests are results
        self._forget()
        if self.channel is not None:
            self.channel.send(whole)  # and wait for the next plan
        elif self._environment.web_ui is None:
            self._runner.quit()
        else:
            self._runner.stop()

    def _abort(self, problem: Exception) -> None:
        """End the level, and Locust with it where nobody watches its page."""
        log.error(
            "%s", printable(str(problem)), exc_info=not isinstance(problem, LoadError | OSError)
        )
        self._environment.process_exit_code = 2
        if self.channel is not None:
            self.channel.send(Failed(f"{problem}"))
        if self._environment.web_ui is None:
            gevent.spawn(self._runner.quit)  # not from here: quit() may wait for this listener
        else:
            self._runner.stop()

    def _counter(self, plan: LoadPlan) -> Callable[[RequestRecord], None]:
        """For Locust's statistics: the answer is one entry, its TTFT another if somebody looks."""
        fire = self._environment.events.request.fire
        common: dict[str, Any] = {
            "name": f"/v1/{plan.target.api}",
            "response_length": 0,
            "context": {},
        }

        def count(record: RequestRecord) -> None:
            failure = LoadError(f"{record.error}: {record.error_message}") if record.error else None
            due, first = record.due_seconds, record.first_content_seconds
            end = record.last_content_seconds or record.ended_seconds or due
            spent_ms = (end - due) * 1000
            fire(request_type="POST", response_time=spent_ms, exception=failure, **common)
            if not plan.quiet and first is not None:
                ttft_ms = (first - due) * 1000
                fire(request_type="TTFT", response_time=ttft_ms, exception=None, **common)

        return count


roles = Roles()


def register() -> None:
    """Hook everything above into Locust; the locustfile calls it."""
    events.init.add_listener(roles.on_init)
    events.test_start.add_listener(roles.on_test_start)
    events.test_stop.add_listener(roles.on_test_stop)
    events.report_to_master.add_listener(roles.on_report)
    events.worker_report.add_listener(roles.on_worker_report)
    if CHANNEL_VARIABLE not in os.environ:
        events.init_command_line_parser.add_listener(lambda parser, **_: add_options(parser))

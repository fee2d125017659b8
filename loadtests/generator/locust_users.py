"""The Locust side: what each process is, the master, a worker of one, or both in one.

Started by the runner, a LoadPlan comes over the pipe (messages.py), one after the other until the
pipe closes. Started by hand, the plan is made of Locust's options. What a master and its workers
say to each other: workers/master.py. `import locust` patches the process: only what runs inside
Locust may import this module.
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
import psutil
from locust import User, events, runners, task
from locust.env import Environment
from locust.exception import StopUser
from locust.rpc import Message
from locust.runners import LocalRunner, MasterRunner, WorkerRunner

from loadtests.errors import LoadError
from loadtests.generator.channel import Channel
from loadtests.generator.connection import clock
from loadtests.generator.dispatcher import Dispatcher
from loadtests.generator.launcher import CHANNEL_VARIABLE, FOLDER_VARIABLE, OWN_TARGET_VARIABLE
from loadtests.generator.live_page import attach, guard
from loadtests.generator.live_stats import Live
from loadtests.generator.load_plan import LoadPlan
from loadtests.generator.messages import Ended, Failed, Order, Recorded, Started, Told, total
from loadtests.generator.option_values import plan_of_options
from loadtests.generator.options import COMMAND_LINE_ONLY, add_options
from loadtests.generator.request_factory import Share
from loadtests.generator.workers.master import LOST_SECONDS, PATIENT_HEARTBEATS, Hooks, Master
from loadtests.generator.workers.member import Member
from loadtests.metrics.slo import SLO_PRESETS
from loadtests.records.lines import Appender
from loadtests.records.schema import RequestRecord
from models.errors import printable

log = logging.getLogger("crossover")
LEAD_SECONDS = 0.01  # before t0, within one process


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
        # By a runner, here or where the master is.
        self.is_led = CHANNEL_VARIABLE in os.environ or OWN_TARGET_VARIABLE in os.environ
        self._environment: Any = None
        self._given: dict[str, Any] = {}  # the command line's options
        self._plan: LoadPlan | None = None
        self._master: Master | None = None
        self._is_obeying = False
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
        if isinstance(self._runner, WorkerRunner):
            self._be_member()
            return
        if self.is_led:
            self.channel = Channel(socket.socket(fileno=int(os.environ[CHANNEL_VARIABLE])), Order)
        if isinstance(self._runner, MasterRunner):
            self._be_master()

    def _be_member(self) -> None:
        if CHANNEL_VARIABLE in os.environ:
            os.close(int(os.environ[CHANNEL_VARIABLE]))  # the master's
        elif OWN_TARGET_VARIABLE in os.environ:
            log.setLevel(logging.INFO)  # somebody watches it
        member = Member(self._runner, self._dispatch_with, self._forget, self.is_led)
        for name, act in member.listeners.items():
            self._runner.register_message(
                name,
                lambda environment, msg, act=act, **kw: act(msg.data),
                concurrent=name in ("crossover_prepare", "crossover_begin"),
            )

    def _be_master(self) -> None:
        hooks = Hooks(
            tell=self._tell,
            pass_on=self._pass_on,
            ended=self._finish,
            failed=self._level_failed,
            heartbeat=lambda client: Message("heartbeat", None, client).serialize(),
        )
        if self.is_led:
            runners.HEARTBEAT_LIVENESS = PATIENT_HEARTBEATS
        self._master = Master(self._runner, hooks, runners.HEARTBEAT_LIVENESS)
        for name, act in self._master.listeners.items():
            self._runner.register_message(
                name, lambda environment, msg, act=act, **kw: act(msg.node_id, msg.data)
            )
        if self.is_led:
            gevent.spawn(self._master.tell_who_is_there)
            forked = self._environment.parsed_options.processes or 0
            gevent.spawn(self._await_own, psutil.Process().children(), forked)

    def _await_own(self, children: list[psutil.Process], forked: int) -> None:
        """Locust waits for ever for a process of its own that has ended, or stands still (SIGSTOP),
        before it connects. `forked`: how many it has started; gevent reaps one that ends, which is
        no child any more."""
        if len(children) < forked:
            self._tell(Failed("a process of it ended before the beginning of the level"))
            return
        moved = dict.fromkeys(children, clock())
        while self._plan is None:
            for one in children:
                status = one.status() if one.is_running() else psutil.STATUS_ZOMBIE
                if status != psutil.STATUS_STOPPED:
                    moved[one] = clock()
                how = "ended" if status == psutil.STATUS_ZOMBIE else "stands still"
                if how == "ended" or clock() - moved[one] > LOST_SECONDS:
                    self._tell(Failed(f"a process of it {how} before the beginning of the level"))
                    return
            gevent.sleep(0.5)

    def on_test_start(self, environment: Environment, **_: Any) -> None:
        # None: a worker whose first users came with the answer to "ready", before its on_init. The
        # master sends them so to one that joins while others have users.
        if environment.runner is None or isinstance(environment.runner, WorkerRunner):
            return
        if self.channel is not None:
            if not self._is_obeying:
                self._is_obeying = True
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
                    try:
                        self._start(order)
                    except Exception as problem:  # in a greenlet, too
                        self._abort(problem)
                elif self._master is not None:
                    self._master.stop()
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
        count = self._master.workers if self._master is not None else 1
        workers = f", {count} load generators" if count > 1 else ""
        return {"what": f"{plan.target.url}: {load}, for {plan.duration_seconds:g} s{workers}"}

    def _start(self, plan: LoadPlan) -> None:
        self._plan = plan
        self._live = Live(SLO_PRESETS[plan.slo])
        if self._master is not None:
            self._master.start(plan)
        elif isinstance(self._runner, LocalRunner):
            gevent.spawn(self._whole, plan)

    def _stop(self, is_decided: bool = False) -> None:
        if self.dispatcher is not None:
            self.dispatcher.stop(is_decided)

    def _dispatch_with(
        self, plan: LoadPlan, share: Share, tell: Callable[[Told], None] | None = None
    ) -> Dispatcher:
        """`tell`: where a load generator's messages go; None: to the runner, a file or nowhere."""
        self.dispatcher = Dispatcher(plan, share, tell or self._teller(plan), self._counter(plan))
        self.level_runs.set()
        return self.dispatcher

    def _teller(self, plan: LoadPlan) -> Callable[[Told], None]:
        if self.channel is not None:
            return self.channel.send
        if plan.requests_file is None:
            return lambda told: None
        file: Appender[RequestRecord] = Appender(Path(plan.requests_file))
        return lambda told: file.append(told.record) if isinstance(told, Recorded) else None

    def _tell(self, told: Told) -> None:
        if self.channel is not None:
            self.channel.send(told)

    def _pass_on(self, line: bytes) -> None:
        """A worker's message, to the runner."""
        if self.channel is not None:
            self.channel.send_line(line)

    def _whole(self, plan: LoadPlan) -> None:
        """A level within a single process."""
        try:
            dispatcher = self._dispatch_with(plan, Share(0, 1))
            self._live = dispatcher.live or self._live
            self._tell(Started(time.time() + LEAD_SECONDS))
            account = dispatcher.run(clock() + LEAD_SECONDS)
        except Exception as problem:  # in a greenlet: Locust would not hear of it and run on
            self._abort(problem)
            return
        self._forget()
        self._finish(total([account]))

    def _level_failed(self, problem: str) -> None:
        """The runner may send the level again to those that are left."""
        if self.channel is not None:
            log.error("%s", printable(problem))
            self._tell(Failed(problem))
        else:
            self._abort(LoadError(problem))

    def _forget(self) -> None:
        self.level_runs.clear()
        self.dispatcher = None
        gc.collect()

    def _finish(self, whole: Ended) -> None:
        log.info(
            "%d requests were due, %d ended, %d given up", whole.due, whole.recorded, whole.gave_up
        )
        self._environment.process_exit_code = 0  # failed requests are results
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
        self._tell(Failed(f"{problem}"))
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

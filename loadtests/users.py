"""The Locust side: due times come from an arrival process, requests leave at them, records are written as they end.

Open loop: one dispatcher greenlet per load generator sends every request at its due time, whether or not earlier ones have come back;
Locust's users are only there because Locust wants one. Closed loop: each Locust user sends, waits for the end, thinks, and sends again.

    master, or the only process           each load generator (also the only process)
    test starts  -- prepare ------------> opens connections, makes the prompts, lays out the due times
                 <----------- prepared --
    chooses t0   -- begin --------------> sends; latencies count from due times, all relative to t0
                 <------------ drained -- every request has ended, or the drain time is over
    writes the outcome, ends Locust

What is to be done stands in a LoadPlan: JSON in the file that $CROSSOVER_LOAD names, or made of Locust's command line. `import locust`
patches the process, so only what runs inside Locust may import this module.
"""

from __future__ import annotations

import gc
import logging
import os
import time
from pathlib import Path
from typing import Any

import gevent
import gevent.event
import msgspec
from locust import User, events, task
from locust.env import Environment
from locust.exception import StopUser
from locust.runners import LocalRunner, MasterRunner, WorkerRunner

from loadtests.alarm import Alarm
from loadtests.errors import LoadError
from loadtests.live import Live
from loadtests.plan import PLAN_VARIABLE, LoadPlan, Outcome, Prompts, Request, Share, plan_of_options, read_plan, total
from loadtests.records import RequestRecord
from loadtests.slo import PROMISES
from loadtests.store import Spool, write_atomically
from loadtests.streaming import Answer, Ask, GaveUp, clock, stream
from loadtests.target import pool_for, probe

log = logging.getLogger("crossover")
LEAD_SECONDS = 0.2  # between "begin" and t0: the message must be everywhere by then
PLAN_SECONDS = 120.0  # that a load generator which was started ahead waits for what to do
WRITE_SECONDS = 0.05  # how often records go to the disk
YIELD_EVERY = 16  # requests that are late already leave in packs of so many: answers must be read between


class Generator:
    """One load generator at work on one level."""

    def __init__(self, environment: Environment, plan: LoadPlan, index: int, workers: int) -> None:
        self.environment = environment
        self.plan = plan
        self.share = Share(index, workers)
        self.pool = pool_for(plan.target)
        facts = plan.facts or probe(plan.target, self.pool)
        for note in facts.notes if plan.facts is None else ():
            log.warning("%s: %s", plan.target.url, note)
        self.prompts = Prompts(plan, facts, self.pool, self.share)
        self.scheduled = self.prompts.scheduled() if plan.is_open else []
        self.out: Spool[RequestRecord] | None = Spool(Path(plan.requests_file)) if plan.requests_file else None
        self.began = gevent.event.Event()
        self.running: set[Any] = set()
        self.waiting: dict[int, float] = {}  # index -> due seconds of requests without a first answer
        self.answers: dict[str, dict[int, str]] = {}  # session -> turn -> what the server answered
        self.live: Live | None = None if plan.quiet else Live(PROMISES[plan.promise])
        self.outcome = Outcome(worker=index)
        self.origin = 0.0
        self.over = False  # nothing more is sent
        self.drained = False  # nothing is on its way any more
        self._cpu_seconds = 0.0

    def run(self, started_unix_seconds: float) -> Outcome:
        """Sends everything that is due and waits for its end; `started_unix_seconds` is t0."""
        gc.collect()
        gc.freeze()
        gc.set_threshold(100_000, 50, 100)
        self.origin = clock() + (started_unix_seconds - time.time())
        self._cpu_seconds = time.process_time()
        self.outcome.started_unix_seconds = started_unix_seconds
        watcher, writer = gevent.spawn(self._stay_in_touch), gevent.spawn(self._write)
        self.began.set()
        if self.plan.is_open:
            self._dispatch()
        while not self.over and clock() < self.origin + self.plan.duration_seconds:
            gevent.sleep(0.02)
        self.over = True
        self._drain()
        watcher.kill()
        self.drained = True
        writer.join()  # not killed: its thread may be within a write
        gc.set_threshold(700, 10, 10)
        gc.unfreeze()
        self.outcome.cpu_seconds = time.process_time() - self._cpu_seconds
        self.outcome.wall_seconds = clock() - self.origin
        if self.out is not None:
            self.out.close()
        self.pool.close()
        return self.outcome

    def send(self, request: Request, due_seconds: float) -> None:
        """One request from now to its end, on record and in Locust's own statistics."""
        me = gevent.getcurrent()
        self.running.add(me)
        self.outcome.due += 1
        if self.live is not None:
            self.live.due(due_seconds)
        ask = Ask(
            cell=self.plan.cell, level=self.plan.level, index=request.index, due_seconds=due_seconds,
            asked_prompt_tokens=request.prompt_tokens, asked_output_tokens=request.output_tokens,
            session=request.session, turn=request.turn, worker=self.share.index,
        )  # fmt: skip
        self.waiting[request.index] = due_seconds

        def answered() -> None:
            self.waiting.pop(request.index, None)

        timeout = self.plan.target.timeout_seconds
        answer = Answer(answered, keep_text=request.session is not None)
        record = stream(self.pool, self._wire(request), ask, origin=self.origin, timeout_seconds=timeout, answer=answer)
        answered()
        self.running.discard(me)
        if request.session is not None and record.error is None:
            self.answers.setdefault(request.session, {})[request.turn or 0] = "".join(answer.text or ())
        if self.out is not None:
            self.out.append(record)
        self.outcome.recorded += 1
        if self.live is not None:
            self.live.add(record)
        _tell_locust(self.environment, self.plan, record)

    def _wire(self, request: Request) -> bytes:
        """The request's bytes; a later turn of a session goes on from what the server really answered, where all of that is here."""
        if not request.needs_answers:
            return request.wire
        seen = self.answers.get(request.session or "", {})
        before = [seen[turn] for turn in range(request.turn or 0) if turn in seen]
        if len(before) < (request.turn or 0):
            self.outcome.stand_ins += 1
            return request.wire
        return self.prompts.with_answers(request, before)

    def _dispatch(self) -> None:
        """Each request at its due time, whatever has come back. Waits on a kernel timer: gevent's own are a millisecond late."""
        hub, alarm = gevent.get_hub(), Alarm()
        rung = hub.loop.io(alarm.fd, 1)
        try:
            for position, request in enumerate(self.scheduled):
                moment = self.origin + request.due_seconds
                if moment > clock():
                    alarm.set(moment)
                    hub.wait(rung)
                elif position % YIELD_EVERY == 0:
                    gevent.sleep(0)
                if self.over:
                    return
                gevent.spawn(self.send, request, request.due_seconds)
        finally:
            rung.close()
            alarm.close()

    def _write(self) -> None:
        """Records to the disk, from a thread: a disk that is busy must not hold up what is due."""
        pool = gevent.get_hub().threadpool
        while self.out is not None and not self.drained:
            pool.apply(self.out.flush)
            gevent.sleep(WRITE_SECONDS)

    def _stay_in_touch(self) -> None:
        """With the runner, by files: who waits too long already, and whether the level is decided."""
        plan = self.plan
        while plan.stop_file or plan.late_file:
            if plan.stop_file and self.outcome.stopped_seconds is None and os.path.exists(plan.stop_file):
                self.outcome.stopped_seconds = clock() - self.origin
                self.over = True
            if plan.late_file and plan.late_seconds is not None:
                past = clock() - self.origin - plan.late_seconds
                part = f"{plan.late_file}.part"
                with open(part, "w") as file:
                    file.write(str([index for index, due in self.waiting.items() if due < past]))
                os.replace(part, plan.late_file)
            gevent.sleep(0.25)

    def _drain(self) -> None:
        """Waits for what is on its way; what is late by the drain time is ended, and on record as a timeout."""
        patience = self.plan.drain_seconds
        until = clock() + patience
        while self.running and clock() < until and self.outcome.stopped_seconds is None:
            gevent.sleep(0.02)
        late = list(self.running)
        if late:
            self.outcome.gave_up = len(late)
            why = "the level was decided" if self.outcome.stopped_seconds is not None else f"no end {patience:g} s after the last was due"
            gevent.killall(late, exception=GaveUp(why), block=True, timeout=10)


class Traffic(User):  # type: ignore[misc]  # Locust is untyped
    """In a closed loop, one user; in an open loop, a placeholder for the dispatcher."""

    @task  # type: ignore[untyped-decorator]
    def live(self) -> None:
        while (generator := roles.generator) is None:
            gevent.sleep(0.02)
        if not generator.plan.is_open:
            self._live_closed(generator)
        raise StopUser

    def _live_closed(self, generator: Generator) -> None:
        generator.began.wait()
        gevent.sleep(max(0.0, generator.origin - clock()))
        while not generator.over:
            for request in generator.prompts.next_session():
                if request.think_seconds > 0:
                    gevent.sleep(request.think_seconds)
                now = clock() - generator.origin
                if now >= generator.plan.duration_seconds or generator.over:
                    return
                generator.send(request, now)


class Roles:
    """What this process is in the run, and the messages between the processes."""

    def __init__(self) -> None:
        self.generator: Generator | None = None
        self._plan: LoadPlan | None = None
        self._prepared = 0
        self._outcomes: list[Outcome] = []
        self._workers = 1
        self._live = Live(PROMISES["chat"])  # what the page shows: this process's own, or all workers' together

    def on_init(self, environment: Environment, **_: Any) -> None:
        runner = environment.runner
        if environment.web_ui is not None:
            from loadtests.web import attach

            attach(environment, lambda: self._live, self._facts)
        if isinstance(runner, MasterRunner):
            runner.register_message("crossover_prepared", lambda environment, msg, **kw: self._one_prepared(environment))
            runner.register_message("crossover_failed", lambda environment, msg, **kw: _abort(environment, LoadError(msg.data["problem"])))
            runner.register_message("crossover_drained", lambda environment, msg, **kw: self._one_drained(environment, msg.data))
        elif isinstance(runner, WorkerRunner):
            runner.register_message(
                "crossover_prepare", lambda environment, msg, **kw: self._prepare(environment, msg.data), concurrent=True
            )
            runner.register_message("crossover_begin", lambda environment, msg, **kw: self._begin(environment, msg.data), concurrent=True)

    def on_test_start(self, environment: Environment, **_: Any) -> None:
        runner = environment.runner
        if isinstance(runner, WorkerRunner):
            return
        self._prepared, self._outcomes = 0, []
        try:
            plan = self._plan = _plan(environment)
            self._live = Live(PROMISES[plan.promise])
        except Exception as problem:
            _abort(environment, problem)
            return
        if isinstance(runner, MasterRunner):
            self._workers = runner.worker_count
            for index, client in enumerate(sorted(runner.clients)):
                data = {"plan": msgspec.json.encode(plan).decode(), "index": index, "workers": self._workers}
                runner.send_message("crossover_prepare", data, client_id=client)
        elif isinstance(runner, LocalRunner):
            gevent.spawn(self._whole, environment, plan)

    def on_test_stop(self, environment: Environment, **_: Any) -> None:
        """Somebody pressed Stop: nothing more is sent; what is on its way ends by itself."""
        if self.generator is not None and not isinstance(environment.runner, MasterRunner):
            self.generator.over = True

    def on_report(self, client_id: str, data: dict[str, Any], **_: Any) -> None:
        """A worker tells the master what has come since it last did."""
        if self.generator is not None and self.generator.live is not None:
            data["crossover_live"] = self.generator.live.taken()

    def on_worker_report(self, client_id: str, data: dict[str, Any], **_: Any) -> None:
        if "crossover_live" in data:
            self._live.merge(data["crossover_live"])

    def _facts(self) -> dict[str, Any]:
        """What the page says above its charts."""
        plan = self._plan
        if plan is None:
            return {"what": "no level yet: start one on Locust's page"}
        load = f"{plan.rate_per_second:g} requests/s, {_kind(plan)}" if plan.rate_per_second is not None else f"{plan.concurrency} users"
        workers = f", {self._workers} load generators" if self._workers > 1 else ""
        return {"what": f"{plan.target.url}: {load}, for {plan.duration_seconds:g} s{workers}"}

    def _whole(self, environment: Environment, plan: LoadPlan) -> None:
        """A run within a single process."""
        try:
            self.generator = Generator(environment, plan, 0, 1)
            self._live = self.generator.live or self._live
            started = time.time() + 0.01
            self._announce(plan, started)
            outcome = self.generator.run(started)
        except Exception as problem:  # in a greenlet: nobody else would hear of it, and Locust would run on for ever
            _abort(environment, problem)
            return
        self._finish(environment, [outcome])

    def _prepare(self, environment: Environment, data: dict[str, Any]) -> None:
        try:
            plan = msgspec.json.decode(data["plan"], type=LoadPlan)
            self.generator = Generator(environment, plan, data["index"], data["workers"])
        except Exception as problem:
            self._fail(environment, problem)
            return
        environment.runner.send_message("crossover_prepared")

    def _one_prepared(self, environment: Environment) -> None:
        self._prepared += 1
        if self._prepared == self._workers and self._plan is not None:
            started = time.time() + LEAD_SECONDS
            self._announce(self._plan, started)
            environment.runner.send_message("crossover_begin", {"started": started})

    def _begin(self, environment: Environment, data: dict[str, Any]) -> None:
        assert self.generator is not None
        try:
            outcome = self.generator.run(data["started"])
        except Exception as problem:
            self._fail(environment, problem)
            return
        environment.runner.send_message("crossover_drained", msgspec.to_builtins(outcome))

    def _fail(self, environment: Environment, problem: Exception) -> None:
        """In a worker: the level is lost, and the master must end it for all."""
        log.error("%s", problem, exc_info=not isinstance(problem, LoadError))
        environment.runner.send_message("crossover_failed", {"problem": f"{problem}"})

    def _one_drained(self, environment: Environment, data: dict[str, Any]) -> None:
        self._outcomes.append(msgspec.convert(data, Outcome))
        if len(self._outcomes) == self._workers:
            self._finish(environment, self._outcomes)

    def _announce(self, plan: LoadPlan, started_unix_seconds: float) -> None:
        if plan.started_file:
            write_atomically(Path(plan.started_file), msgspec.json.encode(Outcome(started_unix_seconds=started_unix_seconds)))

    def _finish(self, environment: Environment, outcomes: list[Outcome]) -> None:
        whole = total(outcomes)
        if self._plan is not None and self._plan.outcome_file:
            write_atomically(Path(self._plan.outcome_file), msgspec.json.encode(whole))
        log.info("%d requests were due, %d ended, %d given up", whole.due, whole.recorded, whole.gave_up)
        environment.process_exit_code = 0  # failed requests are results, not a failure of the run
        self.generator = None
        gc.collect()
        if environment.web_ui is None:
            environment.runner.quit()
        else:
            environment.runner.stop()


roles = Roles()


def _kind(plan: LoadPlan) -> str:
    return str(msgspec.to_builtins(plan.arrivals)["kind"])


def _plan(environment: Environment) -> LoadPlan:
    if os.environ.get(PLAN_VARIABLE):
        file, until = Path(os.environ[PLAN_VARIABLE]), clock() + PLAN_SECONDS
        while not file.exists() and clock() < until:  # started ahead of its plan: see loadtests/spare.py
            gevent.sleep(0.005)
        return read_plan(file)
    options = environment.parsed_options
    return plan_of_options({**vars(options), "host": environment.host or options.host}, users=options.num_users or 1)


def _abort(environment: Environment, problem: Exception) -> None:
    """Ends the level, and Locust with it where nobody watches its page."""
    log.error("%s", problem, exc_info=not isinstance(problem, LoadError | OSError))
    environment.process_exit_code = 2
    if environment.web_ui is None:
        gevent.spawn(environment.runner.quit)  # not from here: this may be a listener that quit() waits for
    else:
        environment.runner.stop()


def _tell_locust(environment: Environment, plan: LoadPlan, record: RequestRecord) -> None:
    """Locust's own page and statistics: the answer as one entry, TTFT as another where somebody is watching."""
    failure = LoadError(f"{record.error}: {record.error_message}") if record.error else None
    common: dict[str, Any] = {"response_length": 0, "context": {}, "exception": failure}
    end = record.last_content_seconds or record.ended_seconds or record.due_seconds
    name = "/v1/" + plan.target.api
    environment.events.request.fire(request_type="POST", name=name, response_time=(end - record.due_seconds) * 1000, **common)
    if not plan.quiet and record.first_content_seconds is not None:
        first = (record.first_content_seconds - record.due_seconds) * 1000
        environment.events.request.fire(request_type="TTFT", name=name, response_time=first, **{**common, "exception": None})


def register() -> None:
    """Hooks everything above into Locust; the locustfile calls it."""
    events.init.add_listener(roles.on_init)
    events.test_start.add_listener(roles.on_test_start)
    events.test_stop.add_listener(roles.on_test_stop)
    events.report_to_master.add_listener(roles.on_report)
    events.worker_report.add_listener(roles.on_worker_report)
    if not os.environ.get(PLAN_VARIABLE):
        from loadtests.plan import add_options

        events.init_command_line_parser.add_listener(lambda parser, **_: add_options(parser))

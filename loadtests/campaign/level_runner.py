"""Measures levels on the server of one cell and records them.

    with open_bench(state, progress) as bench:
        level = bench.measure(LevelAsk(name="cell#2.1", rate=2.0, window_seconds=60.0))
        level.judge(slo).verdict

A level is whole or it does not count: LevelInterrupted is raised when the engine was restarted
within it, or when the load generator ended early or lost requests. One that is decided before its
time is over is cut short, and its window with it: load goes on until every request that was due by
then is known to be good or bad, since requests on their way would count as bad and they are not
(0.923 good as served, 0.799 as recorded). The load goes on after the window, uncounted, until the
last counted request has its answer or is past its limits.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Protocol

import msgspec

from loadtests.analysis.disturbance import disturbance_of, in_words, is_lost, is_slight
from loadtests.analysis.good_share_interval import wilson
from loadtests.analysis.level import Level, LevelRows
from loadtests.analysis.level_validity import is_valid, level_warnings
from loadtests.analysis.slo import Slo
from loadtests.campaign.cell_selection import layout_of, policy_of
from loadtests.campaign.progress import Progress
from loadtests.campaign.run_state import CellState
from loadtests.campaign.server_launch import Command, Server, server_of
from loadtests.errors import EndpointRefuses, LevelInterrupted, LoadError, ServerLost
from loadtests.host.prometheus_scrape import EngineClock
from loadtests.host.resource_sampler import Sampler
from loadtests.load_generator.load_plan import Ended, Late, LoadPlan, Started, Told
from loadtests.load_generator.locust_process import LoadGenerator
from loadtests.load_generator.openai_endpoint import TargetFacts, probe
from loadtests.records.request_record import RequestRecord
from loadtests.records.resource_sample import CoresSample, ResourceSample
from loadtests.records.run_journal import EngineTime, LevelFinished, LevelPurpose, LevelStarted
from loadtests.simulation.batching_simulator import SchedulingPolicy
from loadtests.simulation.calibration_bursts import Burst
from loadtests.workload.arrivals import due_times
from loadtests.workload.request_lengths import Ask
from models import formatting
from serving.hardware.machine_facts import allowed_cores

START_SECONDS = 120.0  # that a load generator may take to make its prompts
RECOVERY_SECONDS = 300.0  # that a server of ours gets to bring its engine back
CHECK_SECONDS = 0.5
DEATH_SECONDS = 1.0  # between connections that close and the process that ends
LEAST_BAD = 5  # fewer may be a single unlucky meeting of requests
CLUMP = 3.0  # requests that tell as much as one, when a running level is judged
BROKEN_SHARE = 0.2  # of requests, whose transport failed: the level is measured once more
TRANSPORT = ("connection", "cut_off", "stream_error", "http_500", "http_502", "refused")
A_MOMENT_SECONDS = 1e-4  # more than times are rounded by


class LevelAsk(msgspec.Struct, frozen=True, kw_only=True):
    """A level to be measured: at a rate, one request at a time (`requests`), or a burst.

    What stands below `burst` is of one attempt at it.
    """

    window_seconds: float
    warmup_seconds: float = 0.0
    rate: float | None = None
    requests: int | None = None
    burst: Burst | None = None
    name: str = ""
    attempt: int = 1
    seed: int = 0
    counts_slight: bool = False  # it counts if it is slightly disturbed, whatever it shows

    @property
    def purpose(self) -> LevelPurpose:
        if self.burst is not None:
            return LevelPurpose.CALIBRATION
        return LevelPurpose.SEARCH if self.rate is not None else LevelPurpose.SINGLE_STREAM


class Bench(Protocol):
    """A server that is ready, and what measures on it."""

    @property
    def policy(self) -> SchedulingPolicy | None: ...  # None: the server's settings are not known

    def measure(self, asked: LevelAsk) -> Level:
        """Records events, requests and samples. Raises LevelInterrupted, ServerFailed."""

    def look(self) -> CoresSample | None:
        """The engine's cores in the last second or so; None: cannot be seen."""

    def rest(self, seconds: float) -> None:
        """Waits."""

    def recover(self) -> None:
        """Waits until the server serves again. Raises ServerLost, TargetUnusable."""


OpenBench = Callable[[CellState], AbstractContextManager[Bench]]


class ServerBench:
    """Measures on one server that is ready, by one load generator that stays."""

    sampler: Sampler  # set once it runs

    def __init__(
        self,
        state: CellState,
        server: Server,
        facts: TargetFacts,
        policy: SchedulingPolicy | None,
        generator: LoadGenerator,
        progress: Progress,
    ) -> None:
        self.policy = policy
        self._state, self._campaign, self._server = state, state.campaign, server
        self._facts, self._progress = facts, progress
        self._workload = self._campaign.workload_of(state.cell)
        self._clock: EngineClock | None = None
        if facts.backend is not None:  # a Crossover server
            key = os.environ.get(server.target.api_key_env or "")
            self._clock = EngineClock(server.target.url, key)
        self._samples: list[ResourceSample] = []  # of the level that runs now
        self._generator = generator

    def look(self) -> CoresSample | None:
        return self.sampler.latest

    def rest(self, seconds: float) -> None:
        time.sleep(seconds)

    def recover(self) -> None:
        wait_until_it_serves(self._server, self._progress)

    def keep_sample(self, sample: ResourceSample) -> None:
        """Called by the sampler's thread."""
        self._state.run.sample(sample)
        if sample.level is not None:
            self._samples.append(sample)

    def measure(self, asked: LevelAsk, plan: LoadPlan | None = None) -> Level:
        """`plan`: of one that is neither cut short nor measured again (`crossover load`)."""
        server = self._server
        self._state.run.check_room()
        is_given = plan is not None
        plan = plan or self._plan(asked)
        self._progress.tick(f"{asked.name}: starting the load generator")
        mark, began = server.mark(), time.monotonic()
        level = _Running(asked, plan, self._campaign.slo, is_given, server.engine_pids())
        try:
            for told in self._generator.run(plan):
                if isinstance(told, Started):
                    self._begin(level, told.unix_seconds)
                elif isinstance(told, RequestRecord):
                    self._state.run.request(told)
                if level.take(told) and self._moment(level):
                    self._generator.stop()
        finally:
            self.sampler.level, self.sampler.client = None, os.getpid()
        self._check_end(level, mark)
        return self._finish(level, time.monotonic() - began)

    def _plan(self, asked: LevelAsk) -> LoadPlan:
        slo, given = self._campaign.slo, dict[str, Any](rate=asked.rate)
        if asked.burst is not None:
            pairs = zip(asked.burst.prompt_tokens, asked.burst.output_tokens, strict=True)
            asks = tuple(Ask(i, prompt, output) for i, (prompt, output) in enumerate(pairs))
            given = {"asks": asks, "due": (0.0,) * len(asks)}
        elif asked.rate is None:
            given = {"concurrency": 1, "requests": asked.requests}
        drain = drain_seconds(slo, self._workload.most_output_tokens)
        return LoadPlan(
            target=self._server.target,
            workload=self._workload,
            arrivals=self._campaign.arrivals,
            warmup_seconds=asked.warmup_seconds,
            window_seconds=asked.window_seconds,
            drain_seconds=drain,
            follow_seconds=drain / 2 if asked.rate is not None else 0.0,
            late_seconds=slo.ttft_seconds,
            seed=asked.seed,
            cell=self._state.key,
            level=asked.name,
            facts=self._facts,
            **given,
        )

    def _begin(self, level: _Running, unix_seconds: float) -> None:
        """The level's clock starts: samples from now on are its own."""
        asked, plan = level.asked, level.plan
        level.t0 = time.monotonic() - (time.time() - unix_seconds)
        level.started = LevelStarted(
            cell=plan.cell,
            level=asked.name,
            purpose=LevelPurpose.LOAD if level.is_given else asked.purpose,
            rate_per_second=asked.rate,
            concurrency=plan.concurrency,
            arrivals=msgspec.to_builtins(plan.arrivals) if asked.rate is not None else {},
            warmup_seconds=asked.warmup_seconds,
            window_seconds=asked.window_seconds,
            seed=asked.seed,
            attempt=asked.attempt,
            start=None if self._server.pid is None else self._state.starts,
            started_unix_seconds=unix_seconds,
        )
        self._samples.clear()
        self.sampler.client, self.sampler.level = self._generator.pid, asked.name
        self._state.event(level.started)
        level.engine_time = self._clock.read() if self._clock is not None else None

    def _check(self) -> None:
        """Raise LevelInterrupted for a server in trouble."""
        if (trouble := self._server.trouble()) is not None:
            raise LevelInterrupted(trouble)
        if self.sampler.failure is not None:
            raise self.sampler.failure

    def _moment(self, level: _Running) -> bool:
        """Looks whether the level may go on; True: it is decided."""
        now, end = time.monotonic() - level.t0, level.plan.duration_seconds
        if now > level.limit_seconds:
            limit = f"{level.limit_seconds:.0f} s"
            raise LevelInterrupted(f"the load generator did not end within {limit}")
        if now - level.checked > CHECK_SECONDS:
            level.checked = now
            self._check()
            if self._server.engine_pids() != level.engines:
                raise LevelInterrupted("the engine was restarted")
        if level.started is None:
            return False
        phase = f"{formatting.duration(end - now)} left" if now < end else "the last answers"
        self._progress.tick(
            f"{level.plan.cell}, {level.plan.load_in_words}: "
            f"{level.counted - level.bad} of {level.counted} good, {phase}",
            fraction=min(1.0, now / end),
        )
        if level.end is not None or level.asked.rate is None or level.is_given:
            return False
        if level.plan.warmup_seconds < now < end:
            level.cut_short = self._lost(end - now, level.may_hold or level.asked.counts_slight)
            if level.cut_short is not None:
                level.end = now
                return True
        return level.is_decided(now)

    def _lost(self, left_seconds: float, may_hold: bool) -> str | None:
        """Who has disturbed the running level beyond repair, `left_seconds` before its end."""
        parts = self.sampler.cores
        is_watched = self._campaign.disturbance == "wait" and self._server.pid is not None
        if not is_watched or not parts or not is_lost(parts, left_seconds, may_hold):
            return None
        found = disturbance_of(parts)
        return None if found is None else in_words(found)

    def _check_end(self, level: _Running, mark: tuple[Any, ...]) -> None:
        """Raise LevelInterrupted where the server was lost, restarted, or broke most answers off.

        A process that dies closes its connections before it has ended.
        """
        until = time.monotonic() + (DEATH_SECONDS if level.broken else 0.0)
        while True:
            self._check()
            if self._server.mark() != mark:
                raise LevelInterrupted("the engine was restarted")
            if time.monotonic() >= until:
                break
            time.sleep(0.05)
        count = sum(level.broken.values())
        is_tried_again = level.asked.attempt == 1 and not level.is_given
        if is_tried_again and count > BROKEN_SHARE * level.answers:
            whys = formatting.listing([f"{n} {why}" for why, n in level.broken.items()])
            raise LevelInterrupted(f"{count} of {level.answers} requests failed ({whys})")

    def _finish(self, level: _Running, spent_seconds: float) -> Level:
        """The level with its event on record."""
        started, ended, engine_time = level.started, level.ended, None
        assert started is not None
        if self._clock is not None and level.engine_time is not None:
            now = self._clock.read()
            engine_time = None if now is None else now.since(level.engine_time)
        disturbance = None
        if self._server.pid is not None:  # an engine of ours: what was taken from it
            is_ignored = self._campaign.disturbance == "ignore"
            disturbance = disturbance_of(self.sampler.cores, counts=is_ignored)
        finished = LevelFinished(
            cell=started.cell,
            level=started.level,
            due=level.answers,
            window_seconds=round(level.window_seconds, 6),
            cut_short=level.cut_short,
            gave_up=ended.gave_up,
            spent_seconds=round(spent_seconds, 3),
            disturbance=disturbance,
            engine_time=engine_time,
            generator_busy_share=ended.busy_share,
        )
        measured, finished = judged(
            level.rows, started, finished, self._campaign.slo, level.asked, self._samples
        )
        self._state.finish(measured, finished)
        return measured


def judged(
    rows: LevelRows,
    started: LevelStarted,
    finished: LevelFinished,
    slo: Slo,
    asked: LevelAsk,
    samples: list[ResourceSample],
) -> tuple[Level, LevelFinished]:
    """A level that has ended, and its event with what the SLO says of it.

    A slightly disturbed level counts for what it is where it meets the SLO all the same.
    """
    level = rows.level(started, finished)
    found = level.judge(slo)
    taken = finished.disturbance
    if taken is not None and taken.is_disturbed and is_slight(taken):
        counts = taken.counts or asked.counts_slight or found.verdict == "holds"
        taken = msgspec.structs.replace(taken, counts=counts)
        finished = msgspec.structs.replace(finished, disturbance=taken)
        level = msgspec.structs.replace(level, finished=finished)
    warnings = level_warnings(level, slo, samples)
    finished = msgspec.structs.replace(
        finished,
        good=found.good,
        window_due=found.due,
        verdict=found.verdict,
        is_valid=is_valid(warnings),
        warnings=[one.code for one in warnings],
    )
    return msgspec.structs.replace(level, finished=finished), finished


class _Running:
    """A level while it runs: what came of it so far, and whether it is decided."""

    def __init__(
        self, asked: LevelAsk, plan: LoadPlan, slo: Slo, is_given: bool, engines: list[int]
    ) -> None:
        self.asked, self.plan, self.is_given, self.engines = asked, plan, is_given, engines
        self.started: LevelStarted | None = None
        self.ended = Ended()
        self.rows = LevelRows()
        self.engine_time: EngineTime | None = None  # when it began
        self.t0 = time.monotonic()
        self.checked = 0.0
        most = plan.duration_seconds + plan.drain_seconds + plan.target.timeout_seconds
        self.limit_seconds = most + START_SECONDS
        self.answers = 0
        self.broken: dict[str, int] = {}  # requests whose transport failed: why -> how many
        self.counted = self.bad = 0  # requests that have ended, and were due within the window
        self.cut_short: str | None = None
        self.end: float | None = None  # of the window, once it may be stopped
        self._slo = slo
        self._last_seconds = A_MOMENT_SECONDS  # when the last answer ended
        self._fresh: list[RequestRecord] = []
        self._due: dict[int, float] = {}  # of the requests that count and have not ended
        if plan.rate is not None:
            times = due_times(plan.arrivals, plan.rate, plan.duration_seconds, plan.seed).tolist()
            self._due = {i: at for i, at in enumerate(times) if at >= plan.warmup_seconds}
        self._most_bad = _most_bad(len(self._due), slo)
        self._late: set[int] = set()  # they have broken the limit of TTFT and still wait
        self._decided_seconds: float | None = None

    @property
    def may_hold(self) -> bool:
        """Of what has ended, as many are good as the SLO asks for."""
        return self.counted - self.bad >= self._slo.target * self.counted

    @property
    def window_seconds(self) -> float:
        end = self.plan.duration_seconds
        if self.asked.burst is not None or self.plan.requests is not None:
            end = self._last_seconds
        elif self.ended.stopped_seconds is not None and self.end is not None:
            end = min(end, self.end)
        return max(0.0, end - self.plan.warmup_seconds)

    def take(self, told: Told) -> bool:
        """What the load generator tells; True: a moment has passed."""
        match told:
            case RequestRecord():
                self.rows.add(told)
                self._fresh.append(told)
                self.answers += 1
                if told.error in TRANSPORT:
                    self.broken[told.error] = self.broken.get(told.error, 0) + 1
            case Late():
                self._late.update(index for index in told.indices if index in self._due)
            case Ended():
                self.ended = told
        if (told is None or isinstance(told, Ended)) and self._fresh and self.started is not None:
            window = (self.plan.warmup_seconds, self.plan.duration_seconds)
            level = Level.of(self._fresh, self.started, window=window)
            self.counted += int(level.counted.sum())
            self.bad += int((level.counted & ~level.good(self._slo)).sum())
            for record in self._fresh:
                self._last_seconds = max(self._last_seconds, record.ended_seconds or 0.0)
                self._due.pop(record.index, None)
            self._late &= self._due.keys()
            self._fresh = []
        return told is None

    def is_decided(self, now_seconds: float) -> bool:
        """The SLO cannot be met any more, and every request due until then is good or bad.

        Who takes longer than half of the drain time is not good.
        """
        bad = self.bad + len(self._late)
        if self._decided_seconds is None:
            if bad < self._most_bad:
                return False
            self._decided_seconds = now_seconds
        decided = self._decided_seconds
        is_patient = now_seconds - decided < self.plan.drain_seconds / 2
        if is_patient and any(at < decided and i not in self._late for i, at in self._due.items()):
            return False
        self.end = decided
        self.cut_short = f"{bad} requests are bad: the level cannot meet the SLO any more"
        return True


def _most_bad(planned: int, slo: Slo) -> float:
    """So many bad requests, and a level fails even if all others of those planned are good."""
    for bad in range(LEAST_BAD, planned + 1):
        if wilson((planned - bad) / CLUMP, planned / CLUMP, slo.confidence)[1] < slo.target:
            return bad
    return math.inf


def drain_seconds(slo: Slo, most_output_tokens: float) -> float:
    """How long after the last due time answers may come: twice what a good one may take."""
    if slo.ttft_seconds is None or slo.tpot_seconds is None:
        return 300.0
    most = 2 * (slo.ttft_seconds + slo.tpot_seconds * min(most_output_tokens, 1024.0))
    return max(10.0, min(300.0, most))


def level_text(level: Level, slo: Slo) -> str:
    """A level for people: load, counts, means, verdict."""
    start, found, end = level.started, level.judge(slo), level.finished
    if start.purpose is LevelPurpose.CALIBRATION:
        return f"a burst of {len(level.due)}"
    words: str = found.verdict
    if end is not None and not level.is_whole:
        words = f"does not count: {len(level.due)} of its {end.due} requests are in the records"
    elif end is not None and end.disturbance and end.disturbance.is_set_aside:
        words = "disturbed"
    elif end is not None and not end.is_valid:
        words = f"not valid ({', '.join(end.warnings)})"
    if end is not None and end.cut_short:
        words += ", cut short"
    share = "" if found.share is None else f" ({found.share:.0%})"
    ttft, tpot = (formatting.seconds(level.mean(one), 3, "-") for one in (level.ttft, level.tpot))
    failed = ", ".join(f"{count} {why}" for why, count in level.failures.items())
    return (
        f"{formatting.load(start.rate_per_second, start.concurrency, 3)}: "
        f"{found.good}{share} of {found.due} good, TTFT {ttft}, TPOT {tpot}"
        f"{failed and f', failed: {failed}'} -> {words}"
    )


@contextlib.contextmanager
def open_bench(state: CellState, progress: Progress) -> Iterator[ServerBench]:
    """Starts the server of a cell and stops it at the end. Raises LoadError."""
    campaign, logs = state.campaign, state.run.folder / "logs"
    layout = layout_of(state.cell, allowed_cores())
    server = server_of(state.cell, campaign, layout, logs)
    with contextlib.ExitStack() as stack:
        stack.callback(server.stop)
        began = time.monotonic()
        server.wait_ready(
            lambda what, fraction: progress.tick(f"{state.key}: {what}", fraction=fraction)
        )
        ready = server.ready(state.key)
        facts = wait_until_it_serves(server, progress)
        seconds = time.monotonic() - began
        progress.say(f"  ready after {seconds:.1f} s at {server.target.url}")
        policy = None  # the settings of another server are not known
        if ready.info.slots:
            seen = {"slots": ready.info.slots, "kv_tokens": ready.info.kv_tokens}
            policy = msgspec.structs.replace(policy_of(campaign.server), **seen)
        generator = stack.enter_context(
            LoadGenerator(
                log=logs / f"{state.key}.locust.log",
                cores=layout.client if layout is not None else (),
            )
        )
        bench = ServerBench(state, server, facts, policy, generator, progress)
        bench.sampler = Sampler(
            state.key,
            bench.keep_sample,
            server=server.pid,
            is_ours=not isinstance(server, Command),
            interval_seconds=campaign.sample_seconds,
        )
        stack.enter_context(bench.sampler)
        more = {"target": msgspec.to_builtins(facts)}
        state.event(msgspec.structs.replace(ready, unix_seconds=time.time(), **more))
        for note in facts.notes:
            progress.say(f"  note: {note}")
        yield bench


def wait_until_it_serves(server: Server, progress: Progress) -> TargetFacts:
    """What the endpoint can, once it serves: it gets time to bring its engine back.

    Raises ServerLost, EndpointRefuses, TargetUnusable.
    """
    most = RECOVERY_SECONDS if server.layout is not None else server.target.ready_seconds
    until = time.monotonic() + most
    while True:
        if (trouble := server.trouble()) is not None:
            raise ServerLost(trouble)
        try:
            return probe(server.target)
        except EndpointRefuses:
            raise
        except LoadError:
            if time.monotonic() > until:
                raise
        progress.tick(f"waiting until {server.target.url} serves")
        time.sleep(0.2)

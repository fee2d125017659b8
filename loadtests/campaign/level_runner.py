"""Measures levels on the server of one cell and records them.

    with open_bench(state, progress) as bench:
        level = bench.measure(LevelAsk(name="cell#2.1", rate=2.0, window_seconds=60.0, ...))
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
from loadtests.campaign.campaign_file import Campaign
from loadtests.campaign.cell_selection import layout_of, policy_of
from loadtests.campaign.progress import Progress
from loadtests.campaign.run_state import CellState
from loadtests.campaign.server_launch import Command, Server, server_of
from loadtests.errors import (
    EndpointRefuses,
    LevelInterrupted,
    LoadError,
    OverMemory,
    ServerLost,
)
from loadtests.host.prometheus_scrape import EngineClock
from loadtests.host.resource_sampler import Sampler
from loadtests.load_generator.load_plan import Ended, Late, LoadPlan, Started
from loadtests.load_generator.locust_process import LoadGenerator
from loadtests.load_generator.openai_endpoint import TargetFacts, probe
from loadtests.records.request_record import RequestRecord
from loadtests.records.resource_sample import CoresSample, ResourceSample
from loadtests.records.run_journal import (
    Disturbance,
    EngineInfo,
    EngineTime,
    LevelFinished,
    LevelPurpose,
    LevelStarted,
)
from loadtests.simulation.batching_simulator import SchedulingPolicy
from loadtests.simulation.calibration_bursts import Burst
from loadtests.workload.arrivals import due_times
from loadtests.workload.request_lengths import Ask
from models import formatting
from serving.hardware.machine_facts import allowed_cores

START_SECONDS = 120.0  # that a load generator may take to make its prompts
SETTLE_SECONDS = 300.0  # until a server is idle after requests that the client ended
RECOVERY_SECONDS = 300.0  # that a server of ours gets to bring its engine back
CHECK_SECONDS = 0.5
DEATH_SECONDS = 1.0  # between connections that close and the process that ends
LEAST_BAD = 5  # fewer may be a single unlucky meeting of requests
CLUMP = 3.0  # requests that tell as much as one, when a running level is judged
BROKEN_SHARE = 0.2  # of requests, whose transport failed: the level is measured once more
TRANSPORT = ("connection", "cut_off", "stream_error", "http_500", "http_502", "refused")
A_MOMENT_SECONDS = 1e-4  # more than times are rounded by


class LevelAsk(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt at a level: a rate, single streams (`requests`), or a burst."""

    name: str
    attempt: int
    seed: int
    purpose: LevelPurpose
    window_seconds: float
    warmup_seconds: float = 0.0
    rate: float | None = None
    requests: int | None = None
    burst: Burst | None = None
    counts_slight: bool = False  # it counts if it is slightly disturbed, whatever it shows


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

    def __init__(
        self,
        state: CellState,
        campaign: Campaign,
        server: Server,
        facts: TargetFacts,
        policy: SchedulingPolicy | None,
        generator: LoadGenerator,
        progress: Progress,
    ) -> None:
        self.policy = policy
        self._state, self._campaign, self._server = state, campaign, server
        self._facts, self._progress = facts, progress
        self._workload = campaign.workload_of(state.cell)
        self._clock: EngineClock | None = None
        if facts.backend is not None:  # a Crossover server
            key = os.environ.get(server.target.api_key_env or "")
            self._clock = EngineClock(server.target.url, key)
        self.sampler: Sampler  # set once it runs
        self._samples: list[ResourceSample] = []  # of the level that runs now
        self._over_memory: str | None = None
        self._generator = generator
        self._idle_seconds: float | None = None

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
        most = self._server.most_bytes
        used = sum(one.rss_bytes or 0 for one in (sample.engine, sample.api) if one is not None)
        if most is not None and used > most:
            self._over_memory = (
                f"server and engine used {formatting.size(used)}, "
                f"and the budget is {formatting.size(most)}"
            )

    def measure(self, asked: LevelAsk, plan: LoadPlan | None = None) -> Level:
        """`plan`: of one that is neither cut short nor measured again (`crossover load`)."""
        run, server = self._state.run, self._server
        run.check_room()
        is_given = plan is not None
        plan = plan or self._plan(asked)
        if self._idle_seconds is None and not is_given:
            self._idle_seconds = self._quick_seconds()
        self._progress.tick(f"{asked.name}: starting the load generator")
        mark, began = server.mark(), time.monotonic()
        with contextlib.closing(_Running(self, asked, plan)) as running:
            for told in self._generator.run(plan):
                if running.take(told):
                    self._generator.stop()
        self._check_server(mark, running)
        level = self._finish(running, time.monotonic() - began)
        if running.ended.gave_up and not is_given:
            self._settle()
        return level

    def _plan(self, asked: LevelAsk) -> LoadPlan:
        drain = drain_seconds(self._campaign, self._workload.limits[1])
        burst = asked.burst
        given: dict[str, Any] = {"rate": asked.rate}
        if burst is not None:
            pairs = zip(burst.prompt_tokens, burst.output_tokens, strict=True)
            asks = tuple(Ask(i, prompt, output) for i, (prompt, output) in enumerate(pairs))
            given = {"asks": asks, "due": (0.0,) * len(asks)}
        elif asked.rate is None:
            given = {"concurrency": 1, "requests": asked.requests}
        limits = [slo.ttft_seconds for slo in self._campaign.all_slos]
        late = None if None in limits else max(limit for limit in limits if limit is not None)
        return LoadPlan(
            target=self._server.target,
            workload=self._workload,
            arrivals=self._campaign.arrivals,
            warmup_seconds=asked.warmup_seconds,
            window_seconds=asked.window_seconds,
            drain_seconds=drain,
            follow_seconds=drain / 2 if asked.rate is not None else 0.0,
            late_seconds=late,
            seed=asked.seed,
            cell=self._state.key,
            level=asked.name,
            facts=self._facts,
            **given,
        )

    def begin(self, started: LevelStarted) -> EngineTime | None:
        """A level begins: samples from now on are its own."""
        self._samples.clear()
        self.sampler.client = self._generator.pids[0]
        self.sampler.level = started.level
        self._state.event(started)
        return self._clock.read() if self._clock is not None else None

    def check(self) -> None:
        """Raise OverMemory for a broken memory cap, LevelInterrupted for a server in trouble."""
        if self._over_memory is not None:
            raise OverMemory(self._over_memory)
        if (trouble := self._server.trouble()) is not None:
            raise LevelInterrupted(trouble)
        if self.sampler.failure is not None:
            raise self.sampler.failure

    def lost(self, left_seconds: float, may_hold: bool) -> str | None:
        """Who has disturbed the running level beyond repair, `left_seconds` before its end."""
        parts = self.sampler.cores
        is_watched = self._campaign.disturbance == "wait" and self._server.pid is not None
        if not is_watched or not parts or not is_lost(parts, left_seconds, may_hold):
            return None
        found = disturbance_of(parts)
        return None if found is None else in_words(found)

    def _check_server(self, mark: tuple[Any, ...], running: _Running) -> None:
        """Raise LevelInterrupted where the server was lost, restarted, or broke most answers off.

        A process that dies closes its connections before it has ended.
        """
        until = time.monotonic() + (DEATH_SECONDS if running.broken else 0.0)
        while True:
            self.check()
            if self._server.mark() != mark:
                raise LevelInterrupted("the engine was restarted")
            if time.monotonic() >= until:
                break
            time.sleep(0.05)
        count = sum(running.broken.values())
        is_tried_again = running.asked.attempt == 1 and not running.is_given
        if is_tried_again and count > BROKEN_SHARE * running.answers:
            whys = formatting.listing([f"{n} {why}" for why, n in running.broken.items()])
            raise LevelInterrupted(f"{count} of {running.answers} requests failed ({whys})")

    def _finish(self, running: _Running, spent_seconds: float) -> Level:
        """The level with its event on record."""
        started, ended = running.started, running.ended
        assert started is not None
        engine_time = None
        if self._clock is not None and running.engine_time is not None:
            now = self._clock.read()
            engine_time = None if now is None else now.since(running.engine_time)
        finished = LevelFinished(
            cell=started.cell,
            level=started.level,
            due=running.answers,
            window_seconds=round(running.window_seconds, 6),
            cut_short=running.cut_short,
            gave_up=ended.gave_up,
            spent_seconds=round(spent_seconds, 3),
            disturbance=self._disturbance(),
            engine_time=engine_time,
            generator_busy_share=ended.busy_share,
        )
        level, finished = judged(
            running.rows, started, finished, self._campaign, running.asked, self._samples
        )
        self._state.finish(level, finished)
        return level

    def _disturbance(self) -> Disturbance | None:
        """What was taken from an engine of ours since the level began."""
        if self._server.pid is None:
            return None
        return disturbance_of(self.sampler.cores, counts=self._campaign.disturbance == "ignore")

    def _quick_seconds(self) -> float | None:
        """How long a tiny request takes now; None when it failed."""
        plan = LoadPlan(
            target=self._server.target,
            asks=(Ask(0, 8, 2),),
            due=(0.0,),
            seed=time.monotonic_ns() & 0xFFFFFFFF,  # found in no cache
            drain_seconds=SETTLE_SECONDS,
            window_seconds=1.0,
            facts=self._facts,
        )
        told = [one for one in self._generator.run(plan) if isinstance(one, RequestRecord)]
        return told[0].ended_seconds if told and told[0].error is None else None

    def _settle(self) -> None:
        """Wait until the server is idle: some go on generating for clients that have gone.

        It is idle when a tiny request takes about as long as at first; not waited for ever.
        """
        until = time.monotonic() + SETTLE_SECONDS
        usual = self._idle_seconds or 0.0
        while (now := self._quick_seconds()) is None or now > 2 * usual + 0.05:
            if self._server.trouble() is not None or time.monotonic() > until:
                return
            self._progress.tick(f"{self._state.key}: waiting until the server is idle")
            time.sleep(0.1)


def judged(
    rows: LevelRows,
    started: LevelStarted,
    finished: LevelFinished,
    campaign: Campaign,
    asked: LevelAsk,
    samples: list[ResourceSample],
) -> tuple[Level, LevelFinished]:
    """A level that has ended, and its event with what the first SLO says of it.

    A slightly disturbed level counts for what it is where it meets an SLO all the same.
    """
    level = rows.level(started, finished)
    slo = campaign.all_slos[0]
    found = level.judge(slo)
    taken = finished.disturbance
    if taken is not None and taken.is_disturbed and is_slight(taken):
        holds = any(level.judge(one).verdict == "holds" for one in campaign.all_slos)
        counts = taken.counts or asked.counts_slight or holds
        finished = msgspec.structs.replace(
            finished, disturbance=msgspec.structs.replace(taken, counts=counts)
        )
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

    def __init__(self, bench: ServerBench, asked: LevelAsk, plan: LoadPlan) -> None:
        self.asked, self.plan = asked, plan
        self.is_given = asked.purpose is LevelPurpose.LOAD
        self.started: LevelStarted | None = None
        self.ended = Ended()
        self.rows = LevelRows()
        self.answers = 0
        self.broken: dict[str, int] = {}  # requests whose transport failed: why -> how many
        self.cut_short: str | None = None
        self.engine_time: EngineTime | None = None
        self._bench = bench
        self._t0 = time.monotonic()
        self._end: float | None = None  # of the window, once it may be stopped
        self._fresh: list[RequestRecord] = []
        self._checked = 0.0
        self._engines = bench._server.engine_pids()
        self._tally = LevelTally(plan, bench._campaign.all_slos)
        most = plan.duration_seconds + plan.drain_seconds + plan.target.timeout_seconds
        self._limit_seconds = most + START_SECONDS

    def close(self) -> None:
        if self.started is not None:
            self._bench.sampler.level = None
            self._bench.sampler.client = os.getpid()

    @property
    def window_seconds(self) -> float:
        end = self.plan.duration_seconds
        if self.asked.burst is not None or self.plan.requests is not None:
            end = max(self._tally.last_seconds, A_MOMENT_SECONDS)
        elif self.ended.stopped_seconds is not None and self._end is not None:
            end = min(end, self._end)
        return max(0.0, end - self.plan.warmup_seconds)

    def take(self, told: Any) -> bool:
        """What the load generator tells; True: stop it, the level is decided."""
        match told:
            case Started():
                self._begin(told.unix_seconds)
            case RequestRecord():
                self._bench._state.run.request(told)
                self.rows.add(told)
                self._fresh.append(told)
                self.answers += 1
                if told.error in TRANSPORT:
                    self.broken[told.error] = self.broken.get(told.error, 0) + 1
            case Late():
                self._tally.late(told.indices)
            case Ended():
                self.ended = told
                self._judge_fresh()
            case None:
                return self._moment()
        return False

    def _begin(self, unix_seconds: float) -> None:
        asked, plan, bench = self.asked, self.plan, self._bench
        self._t0 = time.monotonic() - (time.time() - unix_seconds)
        arrivals = msgspec.to_builtins(plan.arrivals) if asked.rate is not None else {}
        self.started = LevelStarted(
            cell=plan.cell,
            level=asked.name,
            purpose=asked.purpose,
            rate_per_second=asked.rate,
            concurrency=plan.concurrency,
            arrivals=arrivals,
            warmup_seconds=asked.warmup_seconds,
            window_seconds=asked.window_seconds,
            seed=asked.seed,
            attempt=asked.attempt,
            start=None if bench._server.pid is None else bench._state.starts,
            started_unix_seconds=unix_seconds,
        )
        self.engine_time = bench.begin(self.started)

    def _judge_fresh(self) -> None:
        if self._fresh and self.started is not None:
            self._tally.add(self._fresh, self.started)
            self._fresh = []

    def _moment(self) -> bool:
        """Looks whether the level may go on; True: it is decided."""
        bench, tally = self._bench, self._tally
        self._judge_fresh()
        now, end = time.monotonic() - self._t0, self.plan.duration_seconds
        if now > self._limit_seconds:
            limit = f"{self._limit_seconds:.0f} s"
            raise LevelInterrupted(f"the load generator did not end within {limit}")
        if now - self._checked > CHECK_SECONDS:
            self._checked = now
            bench.check()
            if bench._server.engine_pids() != self._engines:
                raise LevelInterrupted("the engine was restarted")
        if self.started is None:
            return False
        phase = f"{formatting.duration(end - now)} left" if now < end else "the last answers"
        bench._progress.tick(
            f"{self.plan.cell}, {self.plan.load_in_words}: "
            f"{tally.good} of {tally.counted} good, {phase}",
            fraction=min(1.0, now / end),
        )
        if self._end is not None or self.asked.rate is None or self.is_given:
            return False
        if self.plan.warmup_seconds < now < end:
            lost = bench.lost(end - now, tally.may_hold or self.asked.counts_slight)
            if lost is not None:
                self.cut_short, self._end = lost, now
                return True
        self._end = tally.decided(now, self.plan.drain_seconds / 2)
        if self._end is not None:
            self.cut_short = tally.reason
        return self._end is not None


class LevelTally:
    """Bad requests of a running level by SLO: whether it is decided. `good` is by the first SLO."""

    def __init__(self, plan: LoadPlan, slos: tuple[Slo, ...]) -> None:
        self.counted = 0  # ended, and due within the window
        self.reason = ""
        self.last_seconds = 0.0  # when the last answer ended
        self._slos = slos
        self._window = (plan.warmup_seconds, plan.duration_seconds)
        self._due: dict[int, float] = {}  # of the requests that count and have not ended
        if plan.rate is not None:
            times = due_times(plan.arrivals, plan.rate, plan.duration_seconds, plan.seed).tolist()
            self._due = {i: at for i, at in enumerate(times) if at >= plan.warmup_seconds}
        self._most_bad = [_most_bad(len(self._due), slo) for slo in slos]
        self._bad: list[set[int]] = [set() for _ in slos]
        self._late: set[int] = set()
        self._decided_seconds = 0.0

    @property
    def good(self) -> int:
        return self.counted - len(self._bad[0])

    @property
    def may_hold(self) -> bool:
        """Of what has ended, as many are good as an SLO asks for."""
        return any(
            self.counted - len(bad) >= slo.target * self.counted
            for slo, bad in zip(self._slos, self._bad, strict=True)
        )

    def add(self, records: list[RequestRecord], started: LevelStarted) -> None:
        """Requests have ended."""
        level = Level.of(records, started, window=self._window)
        goods = [level.good(slo) for slo in self._slos]
        # a Level is in order of due time
        for row, record in enumerate(sorted(records, key=lambda one: one.due_seconds)):
            self.last_seconds = max(self.last_seconds, record.ended_seconds or 0.0)
            self._due.pop(record.index, None)
            if not self._window[0] <= record.due_seconds < self._window[1]:
                continue
            self.counted += 1
            for bad, good in zip(self._bad, goods, strict=True):
                if not good[row]:
                    bad.add(record.index)

    def late(self, indices: list[int]) -> None:
        """These requests have broken the TTFT limit of every SLO and still wait."""
        self._late.update(index for index in indices if index in self._due)

    def decided(self, now_seconds: float, patience_seconds: float) -> float | None:
        """When the window ends, once every request due until the decision is good or bad.

        `patience_seconds`: who takes longer is not good by any SLO.
        """
        if not self.reason:
            bad = [len(its | self._late) for its in self._bad]
            if any(count < most for count, most in zip(bad, self._most_bad, strict=True)):
                return None
            self.reason = f"{min(bad)} requests are bad: the level cannot meet the SLO any more"
            self._decided_seconds = now_seconds
        waiting = [at for index, at in self._due.items() if index not in self._late]
        settled = min(now_seconds, min(waiting, default=math.inf) - A_MOMENT_SECONDS)
        is_patient = now_seconds - self._decided_seconds < patience_seconds
        if settled < self._decided_seconds and is_patient:
            return None
        return max(settled, self._decided_seconds)


def _most_bad(planned: int, slo: Slo) -> float:
    """So many bad requests, and a level fails even if all others of those planned are good."""
    for bad in range(LEAST_BAD, planned + 1):
        if wilson((planned - bad) / CLUMP, planned / CLUMP, slo.confidence)[1] < slo.target:
            return bad
    return math.inf


def drain_seconds(campaign: Campaign, most_output_tokens: float) -> float:
    """How long after the last due time answers may come: twice what a good one may take."""
    longest = min(most_output_tokens, 1024.0)
    waits = [
        300.0
        if slo.ttft_seconds is None or slo.tpot_seconds is None
        else 2 * (slo.ttft_seconds + slo.tpot_seconds * longest)
        for slo in campaign.all_slos
    ]
    return max(10.0, min(300.0, max(waits)))


def level_row(level: Level, slo: Slo) -> list[str]:
    """One level as table cells."""
    found, finished = level.judge(slo), level.finished
    start = level.started
    share = "" if found.share is None else f" ({found.share:.0%})"
    tokens = level.output_tokens_per_second
    words: str = found.verdict
    if finished is not None and finished.disturbance and finished.disturbance.is_set_aside:
        words = "disturbed"
    elif finished is not None and not finished.is_valid:
        words = "not valid"
    short = ", cut short" if finished is not None and finished.cut_short else ""
    return [
        formatting.load(start.rate_per_second, start.concurrency, 3),
        str(found.due),
        f"{found.good}{share}",
        formatting.seconds(level.mean(level.ttft), 3, "-"),
        formatting.seconds(level.mean(level.tpot), 3, "-"),
        "-" if tokens is None else f"{tokens:.1f}",
        words + short,
        ", ".join(finished.warnings) if finished is not None else "",
    ]


def level_text(level: Level, slo: Slo) -> str:
    """A level for people: load, counts, means, verdict."""
    if level.started.purpose is LevelPurpose.CALIBRATION:
        return f"a burst of {len(level.due)}"
    load, due, good, ttft, tpot, _, words, warnings = level_row(level, slo)
    failed = [f"{count} {why}" for why, count in level.failures.items()]
    told = f", failed: {', '.join(failed)}" if failed else ""
    why = f" ({warnings})" if words.startswith("not valid") else ""
    return f"{load}: {good} of {due} good, TTFT {ttft}, TPOT {tpot}{told} -> {words}{why}"


@contextlib.contextmanager
def open_bench(state: CellState, progress: Progress) -> Iterator[ServerBench]:
    """Starts the server of a cell and stops it at the end. Raises LoadError."""
    usable, campaign = allowed_cores(), state.campaign
    layout = layout_of(state.cell, usable, campaign.load.workers)
    server = server_of(state.cell, campaign, layout, state.run.folder / "logs")
    try:
        began = time.monotonic()
        server.wait_ready(
            lambda what, fraction: progress.tick(f"{state.key}: {what}", fraction=fraction)
        )
        ready = server.ready(state.key)
        seconds = time.monotonic() - began
        progress.say(f"  ready after {seconds:.1f} s at {server.target.url}")
        facts = wait_until_it_serves(server, progress)
        policy = _policy_of(ready.info, campaign)
        with contextlib.ExitStack() as stack:
            generator = stack.enter_context(
                LoadGenerator(
                    log=state.run.folder / "logs" / f"{state.key}.locust.log",
                    cores=layout.client if layout is not None else (),
                    processes=campaign.load.workers,
                )
            )
            bench = ServerBench(state, campaign, server, facts, policy, generator, progress)
            sampler = Sampler(
                state.key,
                bench.keep_sample,
                server=server.pid,
                is_ours=not isinstance(server, Command),
                interval_seconds=campaign.sample_seconds,
            )
            bench.sampler = stack.enter_context(sampler)
            seen = {"target": msgspec.to_builtins(facts), "sampling": bench.sampler.missing}
            state.event(msgspec.structs.replace(ready, unix_seconds=time.time(), **seen))
            for note in facts.notes:
                progress.say(f"  note: {note}")
            yield bench
    finally:
        server.stop()


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
        progress.tick("waiting until the server serves again")
        time.sleep(0.2)


def _policy_of(info: EngineInfo, campaign: Campaign) -> SchedulingPolicy | None:
    """The scheduler's settings of a server of ours; None for another one."""
    if not info.slots:
        return None
    return msgspec.structs.replace(
        policy_of(campaign.server), slots=info.slots, kv_tokens=info.kv_tokens
    )

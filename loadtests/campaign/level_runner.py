"""Measures levels on the server of one cell and records them.

    with open_bench(state, progress) as bench:
        level = bench.measure(LevelAsk(name="cell#2.1", rate=2.0, window_seconds=60.0))
        level.judge(slo).verdict

A level is whole or it does not count: LevelInterrupted is raised when the engine was restarted
within it, or when the load generator ended early or lost requests. One that cannot meet the SLO any
more is cut short, and its window with it: the window ends with the last request before which every
one is known to be good or bad, since requests on their way would count as bad and they are not
(0.923 good as served, 0.799 as recorded). The load of any other goes on after the window,
uncounted, until the last counted request has its answer or is past its limits.
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

from loadtests.analysis.disturbance import disturbance_of, in_words, is_slight
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
from loadtests.load_generator.load_plan import Ended, LoadPlan, Started
from loadtests.load_generator.locust_process import LoadGenerator
from loadtests.load_generator.openai_endpoint import TargetFacts, probe
from loadtests.records.request_record import RequestRecord
from loadtests.records.resource_sample import CoresSample, ResourceSample
from loadtests.records.run_journal import LevelFinished, LevelPurpose, LevelStarted
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
        self.state, self.server, self.facts, self.policy = state, server, facts, policy
        self.generator, self.progress = generator, progress
        self.workload = state.campaign.workload_of(state.cell)
        self.samples: list[ResourceSample] = []  # of the level that runs now
        self.clock: EngineClock | None = None
        if facts.backend is not None:  # a Crossover server
            key = os.environ.get(server.target.api_key_env or "")
            self.clock = EngineClock(server.target.url, key)

    def look(self) -> CoresSample | None:
        return self.sampler.latest

    def rest(self, seconds: float) -> None:
        time.sleep(seconds)

    def recover(self) -> None:
        wait_until_it_serves(self.server, self.progress)

    def keep_sample(self, sample: ResourceSample) -> None:
        """Called by the sampler's thread."""
        self.state.run.sample(sample)
        if sample.level is not None:
            self.samples.append(sample)

    def measure(self, asked: LevelAsk, plan: LoadPlan | None = None) -> Level:
        """`plan`: of one that is never cut short (`crossover load`)."""
        self.state.run.check_room()
        self.progress.tick(f"{asked.name}: starting the load generator")
        is_given = plan is not None
        return _Attempt(self, asked, plan or self._plan(asked), is_given).measured()

    def _plan(self, asked: LevelAsk) -> LoadPlan:
        slo, given = self.state.campaign.slo, dict[str, Any](rate=asked.rate)
        if asked.burst is not None:
            pairs = zip(asked.burst.prompt_tokens, asked.burst.output_tokens, strict=True)
            asks = tuple(Ask(i, prompt, output) for i, (prompt, output) in enumerate(pairs))
            given = {"asks": asks, "due": (0.0,) * len(asks)}
        elif asked.rate is None:
            given = {"concurrency": 1, "requests": asked.requests}
        drain = drain_seconds(slo, self.workload.most_output_tokens)
        return LoadPlan(
            target=self.server.target,
            workload=self.workload,
            arrivals=self.state.campaign.arrivals,
            warmup_seconds=asked.warmup_seconds,
            window_seconds=asked.window_seconds,
            drain_seconds=drain,
            follow_seconds=drain / 2 if asked.rate is not None else 0.0,
            seed=asked.seed,
            cell=self.state.key,
            level=asked.name,
            facts=self.facts,
            **given,
        )


class _Attempt:
    """A level from its first request to its last event."""

    started: LevelStarted  # once its clock runs

    def __init__(self, bench: ServerBench, asked: LevelAsk, plan: LoadPlan, is_given: bool) -> None:
        self.bench, self.asked, self.plan, self.is_given = bench, asked, plan, is_given
        self.slo = bench.state.campaign.slo
        is_ours = bench.server.pid is not None
        self.is_watched = is_ours and bench.state.campaign.disturbance == "wait"
        self.engines = bench.server.engine_pids()
        self.began = self.checked = time.monotonic()
        self.t0: float | None = None  # when its clock started
        self.rows, self.fresh = LevelRows(), list[RequestRecord]()
        self.ended = Ended()
        self.has_failures = False
        self.counted = 0  # requests that have ended, and were due within the window
        self.bad: list[float] = []  # when those of them were due that are not good
        self.last_seconds = A_MOMENT_SECONDS  # when the last answer ended
        self.end: float | None = None  # of the window, once it may be stopped
        self.cut_short: str | None = None
        self.due: dict[int, float] = {}  # of the requests that count and have not ended, in order
        if plan.rate is not None and not is_given:
            times = due_times(plan.arrivals, plan.rate, plan.duration_seconds, plan.seed).tolist()
            self.due = {i: at for i, at in enumerate(times) if at >= plan.warmup_seconds}
        self.most_bad = most_bad(len(self.due), self.slo)

    def measured(self) -> Level:
        """Raises LevelInterrupted, LoadError."""
        bench = self.bench
        engine_time = None
        try:
            for told in bench.generator.run(self.plan):
                match told:
                    case Started(unix_seconds):
                        self._begin(unix_seconds)
                        engine_time = bench.clock.read() if bench.clock is not None else None
                    case RequestRecord():
                        bench.state.run.request(told)
                        self.rows.add(told)
                        self.fresh.append(told)
                        self.has_failures |= told.error is not None
                    case Ended():
                        self.ended = told
                    case None:
                        self._moment(time.monotonic())
        finally:
            bench.sampler.level, bench.sampler.client = None, os.getpid()
        # A process that dies closes its connections before it has ended.
        until = time.monotonic() + (DEATH_SECONDS if self.has_failures else 0.0)
        while self._check() or time.monotonic() < until:
            time.sleep(0.05)
        if engine_time is not None and bench.clock is not None:
            now = bench.clock.read()
            engine_time = None if now is None else now.since(engine_time)
        disturbance = None
        if bench.server.pid is not None:  # an engine of ours: what was taken from it
            disturbance = disturbance_of(bench.sampler.cores, counts=not self.is_watched)
        self._count()
        finished = LevelFinished(
            cell=self.started.cell,
            level=self.started.level,
            due=self.rows.count,
            window_seconds=round(self._window_seconds(), 6),
            cut_short=self.cut_short,
            spent_seconds=round(time.monotonic() - self.began, 3),
            disturbance=disturbance,
            engine_time=engine_time,
            generator_busy_share=self.ended.busy_share,
        )
        level = self.rows.level(self.started, finished)
        level = judged(level, self.slo, bench.samples, self.asked.counts_slight)
        bench.state.finish(level)
        return level

    def _begin(self, unix_seconds: float) -> None:
        """The level's clock starts: samples from now on are its own."""
        asked, bench = self.asked, self.bench
        self.t0 = time.monotonic() - (time.time() - unix_seconds)
        self.started = LevelStarted(
            cell=self.plan.cell,
            level=asked.name,
            purpose=LevelPurpose.LOAD if self.is_given else asked.purpose,
            rate_per_second=asked.rate,
            concurrency=self.plan.concurrency,
            warmup_seconds=asked.warmup_seconds,
            window_seconds=asked.window_seconds,
            seed=asked.seed,
            start=None if bench.server.pid is None else bench.state.starts,
            started_unix_seconds=unix_seconds,
        )
        bench.samples.clear()
        bench.sampler.client, bench.sampler.level = bench.generator.pids[0], asked.name
        bench.state.event(self.started)

    def _check(self) -> None:
        """Raise LevelInterrupted for a server in trouble."""
        server, sampler = self.bench.server, self.bench.sampler
        if (trouble := server.trouble()) is not None:
            raise LevelInterrupted(trouble)
        if server.engine_pids() != self.engines:
            raise LevelInterrupted("the engine was restarted")
        if sampler.failure is not None:
            raise sampler.failure
        self.checked = time.monotonic()

    def _moment(self, at: float) -> None:
        """Looks whether the level may go on, and stops it where it is decided."""
        plan = self.plan
        most = plan.duration_seconds + plan.drain_seconds + plan.target.timeout_seconds
        if at - self.began > (most := most + START_SECONDS):
            raise LevelInterrupted(f"the load generator did not end within {most:.0f} s")
        if at - self.checked > CHECK_SECONDS:
            self._check()
        if self.t0 is None:
            return
        self._count()
        now = at - self.t0
        left = plan.duration_seconds - now
        phase = f"{formatting.duration(left)} left" if left > 0 else "the last answers"
        self.bench.progress.tick(
            f"{plan.cell}, {plan.load_in_words}: {self.counted - len(self.bad)} of {self.counted} "
            f"good, {phase}",
            fraction=min(1.0, now / plan.duration_seconds),
        )
        if self.due and self.end is None:
            self._decide(now, left)
            if self.end is not None:
                self.bench.generator.stop()

    def _decide(self, now: float, left: float) -> None:
        """Whether the level cannot meet the SLO any more, or is disturbed beyond repair."""
        known = min(now, next(iter(self.due.values())))  # what was due before has ended
        if (bad := sum(at < known for at in self.bad)) >= self.most_bad:
            self.end = known
            self.cut_short = f"{bad} requests are bad: the level cannot meet the SLO any more"
        elif self.plan.warmup_seconds < now and self.is_watched and left > 0:
            found = disturbance_of(self.bench.sampler.cores, quiet_seconds=left)
            if found is not None and found.is_disturbed and not is_slight(found):
                self.end, self.cut_short = now, in_words(found)

    def _count(self) -> None:
        """What has ended since the last time."""
        if not self.fresh:
            return
        window = (self.plan.warmup_seconds, self.plan.duration_seconds)
        level = Level.of(self.fresh, self.started, window=window)
        self.counted += int(level.counted.sum())
        self.bad += level.due[level.counted & ~level.good(self.slo)].tolist()
        for record in self.fresh:
            self.last_seconds = max(self.last_seconds, record.ended_seconds or 0.0)
            self.due.pop(record.index, None)
        self.fresh = []

    def _window_seconds(self) -> float:
        """As it came out."""
        end = self.plan.duration_seconds
        if self.asked.burst is not None or self.plan.requests is not None:
            end = self.last_seconds
        elif self.end is not None and self.ended.stopped_seconds is not None:
            end = min(end, self.end)
        return max(0.0, end - self.plan.warmup_seconds)


def judged(
    level: Level, slo: Slo, samples: list[ResourceSample], counts_slight: bool = False
) -> Level:
    """A level that has ended, with what the SLO says of it.

    A slightly disturbed level counts for what it is where it meets the SLO all the same.
    """
    replace, end = msgspec.structs.replace, level.finished
    assert end is not None
    taken = end.disturbance
    if taken is not None and taken.is_disturbed and is_slight(taken):
        is_met = (level.judge(slo).share or 0.0) >= slo.target
        taken = replace(taken, counts=taken.counts or counts_slight or is_met)
        end = replace(end, disturbance=taken)
    warnings = level_warnings(replace(level, finished=end), slo, samples)
    codes = [one.code for one in warnings]
    return replace(level, finished=replace(end, is_valid=is_valid(warnings), warnings=codes))


def most_bad(planned: int, slo: Slo) -> float:
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
    if end is not None:
        if not level.is_whole:
            words = f"does not count: {len(level.due)} of its {end.due} requests are in the records"
        elif level.is_set_aside:
            words = "disturbed"
        elif not end.is_valid:
            words = f"not valid ({', '.join(end.warnings)})"
        words += ", cut short" if end.cut_short else ""
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
    layout = layout_of(state.cell, allowed_cores(), campaign.load.workers)
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
                processes=campaign.load.workers,
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
        more = {"target": msgspec.to_builtins(facts), "sampling": bench.sampler.missing}
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

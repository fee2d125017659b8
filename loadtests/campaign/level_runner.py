"""Measures levels on the server of one cell and records them.

    with ServerBench(state, progress).open() as bench:
        level = bench.measure("cell#2.1", LevelPlan(rate=2.0, window_seconds=60.0))
        level.judge(slo).verdict

A level is whole or it does not count: LevelInterrupted is raised when the engine was restarted
within it, or when the load generator ended early or lost requests. The load goes on after the
window, uncounted, until the last counted request has its answer or is past its limits.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import msgspec

from crossover.loadtests.campaign.campaign_file import Campaign
from crossover.loadtests.campaign.progress import Progress
from crossover.loadtests.campaign.prometheus_scrape import EngineClock
from crossover.loadtests.campaign.resume_state import CellState
from crossover.loadtests.campaign.server_launch import CellServer
from crossover.loadtests.capacity.unloaded_check import unloaded_check_words
from crossover.loadtests.errors import EndpointRefuses, LevelInterrupted, LoadError, ServerLost
from crossover.loadtests.host.listening_process import listening_pid
from crossover.loadtests.host.resource_sampler import Sampler
from crossover.loadtests.levels.disturbance import disturbance_of
from crossover.loadtests.levels.level_columns import Judged, Level, LevelRows
from crossover.loadtests.levels.level_warnings import is_valid, level_warnings
from crossover.loadtests.load_generator.level_messages import LoadPlan
from crossover.loadtests.load_generator.locust_process import LoadGenerator
from crossover.loadtests.load_generator.openai_endpoint import probe_endpoint
from crossover.loadtests.load_generator.target import Target, TargetFacts, route_words
from crossover.loadtests.records.journal_events import EngineTime, LevelFinished, LevelStarted
from crossover.loadtests.records.level_plan import LevelPlan
from crossover.loadtests.records.resource_sample import ResourceSample
from crossover.models import formatting
from crossover.serving.capacity.scheduler_settings import SchedulerSettings
from crossover.serving.capacity.slo import Slo

MAX_DRAIN_SECONDS = 300.0  # to wait for answers after the last scheduled time
# A level waits for the answers of its last requests for twice the time that an answer within the
# SLO takes, with at most MAX_DRAIN_TOKENS tokens, and for at least MIN_DRAIN_SECONDS.
MIN_DRAIN_SECONDS = 10.0
MAX_DRAIN_TOKENS = 1024.0
CHECK_SECONDS = 0.5  # between two checks whether the server still runs
DEATH_SECONDS = 1.0  # a process that dies closes its connections so much before it has ended
ROUNDING_SECONDS = 1e-4  # more than recorded times are rounded by


class ServerBench:
    """Measures levels on one server, with one load generator. It starts and stops both."""

    def __init__(self, state: CellState, progress: Progress) -> None:
        self.state = state
        self.progress = progress
        self.policy: SchedulerSettings | None = None  # None: another server, which reports none
        self.slots: int | None = None  # None: the server does not report them
        self.kv_tokens: int | None = None  # in its KV cache; None: the server does not report them
        self._samples: list[ResourceSample] = []  # of the level that runs now

    @contextlib.contextmanager
    def open(self) -> Iterator[ServerBench]:
        """Start the server and the load generator, and stop both at the end. Raises LoadError."""
        state, progress = self.state, self.progress
        logs = state.run.folder / "logs"
        self.server = server = CellServer(state.cell, state.campaign, logs)
        with contextlib.ExitStack() as stack:
            stack.callback(server.stop)
            started_at = time.monotonic()
            server.wait_ready(
                lambda phase, fraction: progress.tick(f"{state.key}: {phase}", fraction)
            )
            ready = server.ready()
            self._facts = facts = wait_until_serving(server.target, progress, server.trouble)
            seconds = time.monotonic() - started_at
            progress.say(f"  ready after {seconds:.1f} s at {server.target.url}")
            self.slots, self.kv_tokens = ready.info.slots, ready.info.kv_tokens
            is_crossover = facts.backend is not None
            if ready.info.slots and (is_crossover or server.is_crossover):
                self.policy = ready.info.reported_settings
            self._clock = EngineClock(server.target) if is_crossover else None
            cores = server.layout.client if server.layout is not None else ()
            log = logs / f"{state.key}.locust.log"
            self._generator = stack.enter_context(LoadGenerator(log=log, cores=cores))
            # None: the endpoint runs on another machine.
            self._server_pid = server.pid or listening_pid(server.target.url)
            self._sampler = stack.enter_context(
                Sampler(
                    state.key,
                    self._record_sample,
                    server=self._server_pid,
                    is_crossover=server.is_crossover,
                )
            )
            target = msgspec.to_builtins(facts)
            state.record(msgspec.structs.replace(ready, unix_seconds=time.time(), target=target))
            for note in filter(None, (route_words(facts), *facts.notes)):
                progress.say(f"  note: {note}")
            yield self

    def wait(self, seconds: float) -> None:
        """Wait between two measurements."""
        time.sleep(seconds)

    def _record_sample(self, sample: ResourceSample) -> None:
        """Called by the sampler's thread."""
        self.state.run.append_sample(sample)
        if sample.level is not None:
            self._samples.append(sample)

    def measure(self, name: str, plan: LevelPlan, *, counts_disturbed: bool = False) -> Level:
        """Measure a level, record it and return it. Raises LevelInterrupted, LoadError.

        `name`: of this attempt. `counts_disturbed`: it counts, however much other processes took.
        """
        state, clock = self.state, self._clock
        load = self._load_plan(name, plan)
        self.progress.tick(f"{name}: starting the load generator")
        engine_pids = self.server.engine_pids()
        began = checked_at = time.monotonic()
        started: LevelStarted | None = None
        time_before: EngineTime | None = None

        def on_start(unix_seconds: float) -> None:
            nonlocal started, time_before
            started = self._record_start(load, unix_seconds)
            time_before = clock.read() if clock is not None else None

        def on_tick(rows: LevelRows) -> None:
            nonlocal checked_at
            if time.monotonic() - checked_at > CHECK_SECONDS:
                self._check(engine_pids)
                checked_at = time.monotonic()
            if started is not None:
                self._show_progress(load, started, rows.count)

        try:
            rows, ended = self._generator.level(
                load, on_start=on_start, on_record=state.run.append_request, on_tick=on_tick
            )
        finally:
            self._sampler.level = None
        assert started is not None
        self._check(engine_pids)
        until = time.monotonic() + (DEATH_SECONDS if rows.has_errors else 0.0)
        while time.monotonic() < until:
            time.sleep(0.05)
            self._check(engine_pids)
        engine_time = None
        if clock is not None and time_before is not None:
            time_after = clock.read()
            engine_time = time_after.since(time_before) if time_after is not None else None
        disturbance = None
        if self._server_pid is not None:
            is_ignored = state.campaign.disturbance == "ignore"
            disturbance = disturbance_of(self._sampler.cores, counts=is_ignored)
        # A closed loop, or a burst, is over with its last answer.
        end = plan.duration_seconds if plan.rate else rows.last_seconds + ROUNDING_SECONDS
        finished = LevelFinished(
            cell=load.cell,
            level=name,
            due=rows.count,
            window_seconds=round(max(0.0, end - plan.warmup_seconds), 6),
            spent_seconds=round(time.monotonic() - began, 3),
            disturbance=disturbance,
            engine_time=engine_time,
            generator_busy_share=ended.busy_share,
        )
        level = rows.level(started, finished)
        level = judge_level(level, state.campaign.slo, self._samples, counts_disturbed)
        state.finish_level(level)
        return level

    def _show_progress(self, load: LoadPlan, started: LevelStarted, answered: int) -> None:
        duration = load.plan.duration_seconds
        elapsed = time.time() - started.started_unix_seconds
        load_words = load.load_in_words(self.state.unit_rate)
        remaining = f"at most {formatting.duration(duration - elapsed)} left"
        if elapsed >= duration:
            remaining = "waiting for the last answers"
        elif load.plan.rate is not None:
            remaining = f"{formatting.duration(duration - elapsed)} left"
        self.progress.tick(
            f"{load.cell}, {load_words}: {answered} answered, {remaining}", elapsed / duration
        )

    def _record_start(self, load: LoadPlan, unix_seconds: float) -> LevelStarted:
        """Record that the level has started. From now on, samples are of this level."""
        started = LevelStarted(
            cell=load.cell,
            level=load.level,
            plan=load.plan,
            start=None if self.server.pid is None else self.state.starts,
            started_unix_seconds=unix_seconds,
        )
        self._samples.clear()
        self._sampler.level = load.level
        return self.state.record(started)

    def _check(self, engine_pids: list[int]) -> None:
        """Raise LevelInterrupted if the server has ended or its engine was restarted."""
        if (trouble := self.server.trouble()) is not None:
            raise LevelInterrupted(trouble)
        if self.server.engine_pids() != engine_pids:
            raise LevelInterrupted("the engine was restarted")
        if self._sampler.failure is not None:
            raise self._sampler.failure

    def _load_plan(self, name: str, plan: LevelPlan) -> LoadPlan:
        """Return what the load generator is to send."""
        campaign = self.state.campaign
        drain_seconds = _drain_seconds(campaign)
        return LoadPlan(
            target=self.server.target,
            plan=plan,
            workload=campaign.workload,
            arrivals=campaign.arrivals,
            drain_seconds=drain_seconds,
            follow_seconds=drain_seconds / 2 if plan.rate is not None else 0.0,
            cell=self.state.key,
            level=name,
            facts=self._facts,
        )


OpenBench = Callable[[CellState], AbstractContextManager[ServerBench]]


def _drain_seconds(campaign: Campaign) -> float:
    """Return how long a level waits for answers after its last scheduled time."""
    tokens = min(campaign.workload.most_output_tokens, MAX_DRAIN_TOKENS)
    answer_seconds = campaign.slo.longest_answer_seconds(tokens)
    if answer_seconds is None:
        return MAX_DRAIN_SECONDS
    return min(MAX_DRAIN_SECONDS, max(MIN_DRAIN_SECONDS, 2 * answer_seconds))


def judge_level(
    level: Level, slo: Slo, samples: list[ResourceSample], counts_disturbed: bool = False
) -> Level:
    """Return a level that has ended, with its warnings, and whether it counts and is valid.

    A disturbed level at a rate counts if it meets the target all the same, or with
    `counts_disturbed`. Requests one at a time always count, since Level.undisturbed is what they
    would have been without other processes.
    """
    replace, finished = msgspec.structs.replace, level.finished
    assert finished is not None
    disturbance = finished.disturbance
    if disturbance is not None and disturbance.is_disturbed:
        is_usable = level.concurrency == 1 or (level.judge(slo).share or 0.0) >= slo.target
        counts = disturbance.counts or counts_disturbed or is_usable
        finished = replace(finished, disturbance=replace(disturbance, counts=counts))
    warnings = level_warnings(replace(level, finished=finished), slo, samples)
    codes = [warning.code for warning in warnings]
    finished = replace(finished, is_valid=is_valid(warnings), warnings=codes)
    return replace(level, finished=finished)


def level_text(level: Level, slo: Slo, unit_rate: float | None = None) -> str:
    """Return a level as a line: its load, in the unit that suits `unit_rate`, then counts, medians
    and verdict."""
    if level.is_burst:
        return f"a burst of {len(level.due)}"
    if level.is_unloaded_check:
        return unloaded_check_words(level, slo)
    judged = level.judge(slo)
    verdict = _verdict_words(level, judged)
    share = "" if judged.share is None else f" ({judged.share:.0%})"
    ttft = formatting.seconds(level.quantile(level.ttft, 0.5), 3, "-")
    tpot = formatting.seconds(level.quantile(level.tpot, 0.5), 3, "-")
    failed = ", ".join(f"{count} {why}" for why, count in level.failures.items())
    load = formatting.load(level.rate, level.concurrency, 3, unit_rate)
    if level.rate:
        came = formatting.rate(level.offered_rate, 3, like=unit_rate or level.rate)
        load = f"{came} offered (nominal {load})"
    return (
        f"{load}: {judged.good}{share} of {judged.due} met the SLO, "
        f"median TTFT {ttft}, TPOT {tpot}"
        f"{failed and f', failed: {failed}'}{verdict and f' -> {verdict}'}"
    )


def _verdict_words(level: Level, judged: Judged) -> str:
    """Return the verdict, or why the level does not count; "": nothing is to be said."""
    finished = level.finished
    if finished is not None:
        if not level.is_whole:
            return f"does not count: only {len(level.due)} of {finished.due} requests are recorded"
        if level.is_set_aside:
            return "disturbed"
        if not finished.is_valid:
            return f"not valid ({', '.join(finished.warnings)})"
    if level.is_single_stream and judged.verdict == "unresolved":
        return ""  # always so: twenty requests are too few to prove an SLO attainment of 90 %
    return judged.verdict


def wait_until_serving(
    target: Target, progress: Progress, trouble: Callable[[], str | None] = lambda: None
) -> TargetFacts:
    """Return what the endpoint supports, once it serves. `trouble`: returns why it never will.

    Raises ServerLost, EndpointRefuses, TargetUnusable.
    """
    until = time.monotonic() + target.ready_seconds
    while True:
        if (why := trouble()) is not None:
            raise ServerLost(why)
        try:
            return probe_endpoint(target)
        except LoadError as problem:
            if isinstance(problem, EndpointRefuses) or time.monotonic() > until:
                raise
        progress.tick(f"waiting for {target.url}")
        time.sleep(0.2)

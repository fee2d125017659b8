"""Measures levels on the server of one cell and records them.

    with ServerBench(state, progress).open() as bench:
        level = bench.measure(LevelSpec(name="cell#2.1", rate=2.0, window_seconds=60.0))
        level.judge(slo).verdict

A level is whole or it does not count: LevelInterrupted is raised when the engine was restarted
within it, or when the load generator ended early or lost requests. The load goes on after the
window, uncounted, until the last counted request has its answer or is past its limits.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import msgspec

from crossover.loadtests.campaign.progress import Progress
from crossover.loadtests.campaign.prometheus_scrape import EngineClock
from crossover.loadtests.campaign.resume_state import CellState
from crossover.loadtests.campaign.server_launch import Server
from crossover.loadtests.capacity.calibration_bursts import Burst
from crossover.loadtests.errors import EndpointRefuses, LevelInterrupted, LoadError, ServerLost
from crossover.loadtests.host.listening_process import listening_pid
from crossover.loadtests.host.resource_sampler import Sampler
from crossover.loadtests.levels.disturbance import disturbance_of, is_slight
from crossover.loadtests.levels.level_columns import Level, LevelRows
from crossover.loadtests.levels.level_warnings import is_valid, level_warnings
from crossover.loadtests.load_generator.level_messages import Ended, LoadPlan, Started
from crossover.loadtests.load_generator.locust_process import LoadGenerator
from crossover.loadtests.load_generator.openai_endpoint import TargetFacts, probe, route_words
from crossover.loadtests.records.journal_events import LevelFinished, LevelStarted
from crossover.loadtests.records.request_record import RequestRecord
from crossover.loadtests.records.resource_sample import ResourceSample
from crossover.models import formatting
from crossover.serving.capacity.scheduler_settings import DEFAULT_SETTINGS, SchedulerSettings
from crossover.serving.capacity.slo import Slo
from crossover.serving.workload.conversations import mean_turns_of
from crossover.serving.workload.request_lengths import RequestSpec

MAX_DRAIN_SECONDS = 300.0  # after the last due time, for answers
CHECK_SECONDS = 0.5
DEATH_SECONDS = 1.0  # between connections that close and the process that ends
A_MOMENT_SECONDS = 1e-4  # more than times are rounded by


class LevelSpec(msgspec.Struct, frozen=True, kw_only=True):
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


class ServerBench:
    """Measures on one server, which it starts and stops, by one load generator that stays."""

    def __init__(self, state: CellState, progress: Progress) -> None:
        self.state, self.progress = state, progress
        self.policy: SchedulerSettings | None = None  # None: of another server, which says none
        self.slots: int | None = None  # as the server says; None: it does not
        self.kv_tokens: int | None = None  # in its KV cache; None: it does not say
        self._samples: list[ResourceSample] = []  # of the level that runs now

    @contextlib.contextmanager
    def open(self) -> Iterator[ServerBench]:
        """Raises LoadError."""
        state, progress = self.state, self.progress
        campaign, logs = state.campaign, state.run.folder / "logs"
        self.server = server = Server(state.cell, campaign, logs)
        with contextlib.ExitStack() as stack:
            stack.callback(server.stop)
            began = time.monotonic()
            server.wait_ready(lambda what, part: progress.tick(f"{state.key}: {what}", part))
            ready = server.ready(state.key)
            self._facts = facts = wait_until_it_serves(server, progress)
            seconds = time.monotonic() - began
            progress.say(f"  ready after {seconds:.1f} s at {server.target.url}")
            self.slots, self.kv_tokens = ready.info.slots, ready.info.kv_tokens
            key = os.environ.get(server.target.api_key_env or "")
            is_crossover = facts.backend is not None
            if ready.info.slots and (is_crossover or server.is_ours):
                default = DEFAULT_SETTINGS[ready.info.device or "cpu"]
                self.policy = ready.info.filled(default)
            self._clock = EngineClock(server.target.url, key) if is_crossover else None
            cores = server.layout.client if server.layout is not None else ()
            self._watched = server.pid or listening_pid(server.target.url)
            log = logs / f"{state.key}.locust.log"
            self._generator = stack.enter_context(LoadGenerator(log=log, cores=cores))
            self._sampler = stack.enter_context(
                Sampler(state.key, self._keep, server=self._watched, is_ours=server.is_ours)
            )
            target = msgspec.to_builtins(facts)
            state.event(msgspec.structs.replace(ready, unix_seconds=time.time(), target=target))
            for note in filter(None, (route_words(facts), *facts.notes)):
                progress.say(f"  note: {note}")
            yield self

    def rest(self, seconds: float) -> None:
        """Waits."""
        time.sleep(seconds)

    def _keep(self, sample: ResourceSample) -> None:
        """Called by the sampler's thread."""
        self.state.run.sample(sample)
        if sample.level is not None:
            self._samples.append(sample)

    def measure(self, asked: LevelSpec) -> Level:
        """Records events, requests and samples. Raises LevelInterrupted, LoadError."""
        state, clock, plan = self.state, self._clock, self._plan(asked)
        self.progress.tick(f"{asked.name}: starting the load generator")
        engines, began, rows = self.server.engine_pids(), time.monotonic(), LevelRows()
        started, ended, before, has_failures, checked = None, Ended(), None, False, began
        try:
            for told in self._generator.run(plan):
                match told:
                    case Started(unix_seconds):
                        started = self._begin(asked, plan, unix_seconds)
                        before = clock.read() if clock is not None else None
                    case RequestRecord():
                        state.run.request(told)
                        rows.add(told)
                        has_failures |= told.error is not None
                    case Ended():
                        ended = told
                    case None:
                        if time.monotonic() - checked > CHECK_SECONDS:
                            self._check(engines)
                            checked = time.monotonic()
                        if started is not None:
                            now = time.time() - started.started_unix_seconds
                            left = max(0.0, plan.duration_seconds - now)
                            self.progress.tick(
                                f"{plan.cell}, {plan.load_in_words}: {rows.count} answered, "
                                f"{formatting.duration(left)} left",
                                now / plan.duration_seconds,
                            )
        finally:
            self._sampler.level = None
        assert started is not None
        self._check(engines)
        # A process that dies closes its connections before it has ended.
        until = time.monotonic() + (DEATH_SECONDS if has_failures else 0.0)
        while time.monotonic() < until:
            time.sleep(0.05)
            self._check(engines)
        after = clock.read() if clock is not None and before is not None else None
        disturbance = None
        if self._watched is not None:  # an engine of this machine: what was taken from it
            is_ignored = state.campaign.disturbance == "ignore"
            disturbance = disturbance_of(self._sampler.cores, counts=is_ignored)
        # A closed loop, or a burst, is over with its last answer.
        end = plan.duration_seconds if asked.rate else rows.last_seconds + A_MOMENT_SECONDS
        finished = LevelFinished(
            cell=started.cell,
            level=started.level,
            due=rows.count,
            window_seconds=round(max(0.0, end - plan.warmup_seconds), 6),
            spent_seconds=round(time.monotonic() - began, 3),
            disturbance=disturbance,
            engine_time=after.since(before) if after is not None and before is not None else None,
            generator_busy_share=ended.busy_share,
        )
        level = rows.level(started, finished)
        level = judged(level, state.campaign.slo, self._samples, asked.counts_slight)
        state.finish(level)
        return level

    def _begin(self, asked: LevelSpec, plan: LoadPlan, unix_seconds: float) -> LevelStarted:
        """The level's clock starts: samples from now on are its own."""
        started = LevelStarted(
            cell=plan.cell,
            level=asked.name,
            rate_per_second=asked.rate,
            concurrency=plan.concurrency,
            warmup_seconds=asked.warmup_seconds,
            window_seconds=asked.window_seconds,
            seed=asked.seed,
            start=None if self.server.pid is None else self.state.starts,
            started_unix_seconds=unix_seconds,
        )
        self._samples.clear()
        self._sampler.level = asked.name
        return self.state.event(started)

    def _check(self, engines: list[int]) -> None:
        """Raise LevelInterrupted for a server in trouble."""
        if (trouble := self.server.trouble()) is not None:
            raise LevelInterrupted(trouble)
        if self.server.engine_pids() != engines:
            raise LevelInterrupted("the engine was restarted")
        if self._sampler.failure is not None:
            raise self._sampler.failure

    def _plan(self, asked: LevelSpec) -> LoadPlan:
        campaign, given = self.state.campaign, dict[str, Any](rate=None)
        if asked.rate is not None:  # of requests: conversations begin less often
            given["rate"] = asked.rate / mean_turns_of(campaign.workload)
        if asked.burst is not None:
            pairs = zip(asked.burst.prompt_tokens, asked.burst.output_tokens, strict=True)
            asks = tuple(RequestSpec(i, prompt, output) for i, (prompt, output) in enumerate(pairs))
            given = {"asks": asks, "due": (0.0,) * len(asks)}
        elif asked.rate is None:
            given = {"concurrency": 1, "requests": asked.requests}
        slo, drain = campaign.slo, MAX_DRAIN_SECONDS
        if slo.ttft_seconds is not None and slo.tpot_seconds is not None:
            # twice what a good answer may take
            tokens = min(campaign.workload.most_output_tokens, 1024.0)
            drain = min(drain, max(10.0, 2 * (slo.ttft_seconds + slo.tpot_seconds * tokens)))
        return LoadPlan(
            target=self.server.target,
            workload=campaign.workload,
            arrivals=campaign.arrivals,
            warmup_seconds=asked.warmup_seconds,
            window_seconds=asked.window_seconds,
            drain_seconds=drain,
            follow_seconds=drain / 2 if asked.rate is not None else 0.0,
            seed=asked.seed,
            cell=self.state.key,
            level=asked.name,
            facts=self._facts,
            **given,
        )


OpenBench = Callable[[CellState], AbstractContextManager[ServerBench]]


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


def level_text(level: Level, slo: Slo, like: float | None = None) -> str:
    """Return a level as a line: load in the unit of `like`, counts, medians, verdict."""
    start, found, end = level.started, level.judge(slo), level.finished
    if start.is_burst:
        return f"a burst of {len(level.due)}"
    words: str = found.verdict
    if level.is_single_stream and words == "unresolved":
        words = ""  # twenty requests prove no share of 90 %
    if end is not None:
        if not level.is_whole:
            words = f"does not count: only {len(level.due)} of {end.due} requests are recorded"
        elif level.is_set_aside:
            words = "disturbed"
        elif not end.is_valid:
            words = f"not valid ({', '.join(end.warnings)})"
    share = "" if found.share is None else f" ({found.share:.0%})"
    times = (level.ttft, level.tpot)
    ttft, tpot = (formatting.seconds(level.quantile(one, 0.5), 3, "-") for one in times)
    failed = ", ".join(f"{count} {why}" for why, count in level.failures.items())
    achieved = formatting.rate(level.achieved_rate, 3, like=like or level.rate)
    rates = f" offered, {achieved} achieved" if level.rate else ""
    return (
        f"{formatting.load(start.rate_per_second, start.concurrency, 3, like)}{rates}: "
        f"{found.good}{share} of {found.due} met the SLO, median TTFT {ttft}, TPOT {tpot}"
        f"{failed and f', failed: {failed}'}{words and f' -> {words}'}"
    )


def wait_until_it_serves(server: Server, progress: Progress) -> TargetFacts:
    """What the endpoint can, once it serves. Raises ServerLost, EndpointRefuses, TargetUnusable."""
    until = time.monotonic() + server.target.ready_seconds
    while True:
        if (trouble := server.trouble()) is not None:
            raise ServerLost(trouble)
        try:
            return probe(server.target)
        except LoadError as problem:
            if isinstance(problem, EndpointRefuses) or time.monotonic() > until:
                raise
        progress.tick(f"waiting for {server.target.url}")
        time.sleep(0.2)

"""Where the levels of one cell are measured: run folder, server, connections, sampler."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from loadtests.campaign.campaign_file import Campaign
from loadtests.campaign.cells import Cell
from loadtests.campaign.level_tally import LevelTally
from loadtests.campaign.progress import Progress
from loadtests.campaign.servers import Server
from loadtests.errors import LevelInterrupted, OverMemory
from loadtests.generator.channel import LoadGenerator
from loadtests.generator.connection import clock
from loadtests.generator.endpoint import Target, TargetFacts, body_of, path_of
from loadtests.generator.http_client import Pool, post_bytes
from loadtests.generator.launcher import GeneratorProcess
from loadtests.generator.load_plan import LoadPlan
from loadtests.generator.sse_request import Ask, stream
from loadtests.host.sampler import Sampler, Scraped
from loadtests.host.server_metrics import Remote
from loadtests.metrics.disturbance import disturbance_of, in_words, is_lost
from loadtests.records.old_run_folder import RunFolder
from loadtests.records.schema import Disturbance, EngineTime, Probe, ResourceSample
from models import formatting

SETTLE_SECONDS = 300.0
START_SECONDS = 120.0  # that a load generator may take to make its prompts
CHECK_SECONDS = 0.5


@dataclass
class Site:
    """Where levels of one cell are measured."""

    run: RunFolder
    cell: Cell
    campaign: Campaign
    server: Server
    facts: TargetFacts
    pool: Pool
    progress: Progress
    metrics: Remote | None = None  # of a Crossover server
    sampler: Sampler = field(init=False)  # set once it runs
    spare: GeneratorProcess | None = None  # running already, for the next level that wants one
    processes: int = 1  # that send a level
    master: LoadGenerator | None = None  # of workers elsewhere: it sends every level, and stays
    samples: list[ResourceSample] = field(default_factory=list)  # of the level that runs now
    start: int | None = None  # which start of the cell's server this is, from 1
    memory_bytes: int | None = None  # a cap on server and engine that only we hold
    over_memory: str | None = None  # how they broke it
    probe: Probe | None = None  # the one before the level
    is_patient: bool = True  # False: a slightly disturbed level counts
    engine_time: EngineTime | None = None  # when the level began
    _looked_at: int = 0  # readings of the cores

    @contextmanager
    def load_generator(self, users: int) -> Iterator[LoadGenerator]:
        """One for a level, with so many users where it is a closed loop."""
        if self.master is not None:
            try:
                yield self.master
            except LevelInterrupted:
                self.master.settle()
                raise
            return
        process = self.spare
        self.spare = None
        if process is None:
            process = GeneratorProcess(
                log=self.run.folder / "logs" / f"{self.cell.key}.locust.log",
                users=users,
                processes=self.processes,
                cores=self.server.layout.client if self.server.layout is not None else (),
            )
        with LoadGenerator(process) as generator:
            yield generator
            generator.close()

    def begin(self, level: str) -> None:
        """A level begins: samples and engine's time from now on are its own."""
        self.samples.clear()
        self.engine_time = self.metrics.engine_time() if self.metrics is not None else None
        self.sampler.level = level

    def engine_time_of_level(self) -> EngineTime | None:
        """Since the level began; None where the server does not say."""
        now = self.metrics.engine_time() if self.metrics is not None else None
        before = self.engine_time
        return now.since(before) if now is not None and before is not None else None

    def keep_sample(self, sample: ResourceSample) -> None:
        self.run.sample(sample)
        if sample.level is not None:
            self.samples.append(sample)
        groups = [group for group in (sample.engine, sample.api) if group is not None]
        used = sum(group.rss_bytes or 0 for group in groups)
        if self.memory_bytes is not None and used > self.memory_bytes:
            self.over_memory = (
                f"server and engine used {formatting.size(used)}, "
                f"and the budget is {self.memory_bytes / 2**30:g} GiB"
            )

    def disturbance(self) -> Disturbance | None:
        """What was taken from the engine, or from the load generator, since the level began."""
        return disturbance_of(
            self.sampler.cores,
            "load generator" if self.server.pid is None else "engine",
            probe=self.probe,
            counts=self.campaign.disturbance == "ignore",
            counts_slight=not self.is_patient,
        )

    def lost(self, left_seconds: float, may_hold: bool) -> str | None:
        """Who has disturbed the running level beyond repair, `left_seconds` before its end."""
        is_watched = self.campaign.disturbance == "wait" and self.server.pid is not None
        if not is_watched or self._looked_at == len(self.sampler.cores):
            return None
        self._looked_at = len(self.sampler.cores)
        if not is_lost(self.sampler.cores, left_seconds, may_hold or not self.is_patient):
            return None
        found = self.disturbance()
        return in_words(found) if found is not None else None

    def check(self) -> None:
        """Raise OverMemory for a broken memory cap, LevelInterrupted for a server in trouble."""
        if self.over_memory is not None:
            raise OverMemory(self.over_memory)
        if (trouble := self.server.trouble()) is not None:
            raise LevelInterrupted(trouble)
        if self.sampler.failure is not None:
            raise self.sampler.failure


def metrics_of(target: Target, facts: TargetFacts) -> Remote | None:
    """The reader of a Crossover server's /metrics; None for another server."""
    if facts.backend is None:
        return None
    key = os.environ.get(target.api_key_env) if target.api_key_env else None
    return Remote(target.url, api_key=key, verify_tls=target.verify_tls)


def scraped(target: Target) -> Scraped:
    """The endpoint as the sampler reads it."""
    return Scraped(target.url, target.api_key_env, target.verify_tls)


class Guard:
    """Looks now and then whether a level may go on, and says how far it is.

    `t0`: when the level began, on time.monotonic().
    """

    def __init__(self, site: Site, plan: LoadPlan, t0: float) -> None:
        self._site = site
        self._plan = plan
        self._t0 = t0
        self._engines = site.server.engine_pids()
        self._looked = 0.0
        self._limit_seconds = (
            plan.duration_seconds + plan.drain_seconds + plan.target.timeout_seconds + START_SECONDS
        )

    def check(self, tally: LevelTally) -> None:
        """Raises LevelInterrupted, or ServerFailed for a broken memory cap."""
        site, end = self._site, self._plan.duration_seconds
        now = time.monotonic() - self._t0
        if now > self._limit_seconds:
            limit = f"{self._limit_seconds:.0f} s"
            raise LevelInterrupted(f"the load generator did not end within {limit}")
        if now - self._looked > CHECK_SECONDS:
            self._looked = now
            site.check()
            if site.server.engine_pids() != self._engines:
                raise LevelInterrupted("the engine was restarted")
        phase = f"{formatting.duration(end - now)} left"
        if now < self._plan.warmup_seconds:
            phase = "warming up"
        elif now > end:
            phase = "draining"
        site.progress.tick(
            f"{site.cell.key}, {self._plan.load_in_words}: {tally.ended} answers, "
            f"{tally.good} of {tally.counted} good, {phase}",
            fraction=min(1.0, now / end),
        )

    def lost(self, tally: LevelTally) -> str | None:
        """Why the level will not count however quiet the rest of it is; None while it may.

        Not asked during warm-up: a level of no length says nothing.
        """
        now = time.monotonic() - self._t0
        end = self._plan.duration_seconds
        is_in_window = self._plan.warmup_seconds < now < end
        return self._site.lost(end - now, tally.may_hold) if is_in_window else None


def quick_seconds(site: Site, output_tokens: int = 2) -> float | None:
    """How long a tiny request takes now; None when it failed."""
    target = site.server.target
    body = body_of(target, site.facts, "Say yes.", output_tokens)
    wire = post_bytes(site.pool, path_of(target), body)
    ask = Ask(cell="", level="", index=0, due_seconds=0.0)
    record = stream(site.pool, wire, ask, origin=clock(), timeout_seconds=target.timeout_seconds)
    return record.ended_seconds if record.error is None else None


def settle(site: Site, idle_seconds: float | None) -> None:
    """Wait until the server is idle: some go on generating for clients that have disconnected.

    It is idle when a tiny request takes about `idle_seconds`. Raises LevelInterrupted.
    """
    until = time.monotonic() + SETTLE_SECONDS
    while (now := quick_seconds(site)) is None or (
        idle_seconds is not None and now > 2 * idle_seconds + 0.05
    ):
        if (trouble := site.server.trouble()) is not None:
            raise LevelInterrupted(trouble)
        if time.monotonic() > until:
            raise LevelInterrupted(
                f"the server was still busy {SETTLE_SECONDS:.0f} s after the level"
            )
        site.progress.tick(f"{site.cell.key}: waiting until the server is idle")
        time.sleep(0.1)

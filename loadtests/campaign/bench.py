"""What a cell is measured with: a bench, the level that it is asked for, and the real one: server,
connections, sampler and load generator of one cell.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Protocol

import msgspec

from loadtests.campaign.campaign_file import Campaign
from loadtests.campaign.cell_planning import layout_of
from loadtests.campaign.level import Measured, loaded_level, send_burst, single_stream_level
from loadtests.campaign.progress import Progress
from loadtests.campaign.run_state import CellState
from loadtests.campaign.servers import Capped, Command, External, Local, Server
from loadtests.campaign.site import Site, metrics_of, quick_seconds, scraped, settle
from loadtests.capacity.search import Measure
from loadtests.errors import EndpointRefuses, LevelInterrupted, LoadError, OverMemory, ServerLost
from loadtests.generator.endpoint import TargetFacts, pool_for, probe
from loadtests.generator.http_client import Pool
from loadtests.host.sampler import Sampler
from loadtests.metrics.disturbance import Probes
from loadtests.records.events import CellReady, EngineInfo
from loadtests.records.schema import CoresSample, Probe, RequestRecord
from loadtests.simulation.batching import Policy
from loadtests.simulation.calibration import Burst
from serving.backends.backend_interface import EngineConfig
from serving.hardware.machine_facts import allowed_cores

PROBE_TOKENS = 8
RECOVERY_SECONDS = 300.0  # that a server of ours gets to bring its engine back


class Level(msgspec.Struct, frozen=True):
    """One attempt at a level: what the bench is asked to measure."""

    step: Measure
    campaign: Campaign  # as it is for the cell and the SLO that is searched for
    name: str
    seed: int
    attempt: int
    is_patient: bool = True  # False: it counts if it is slightly disturbed


class Bench(Protocol):
    """A server that is ready, and what measures on it."""

    @property
    def policy(self) -> Policy | None: ...  # the scheduler's settings; None: not known

    def measure(self, level: Level) -> Measured:
        """Records events, requests and samples. Raises LevelInterrupted, ServerFailed."""

    def burst(self, burst: Burst, number: int, seed: int) -> list[RequestRecord]:
        """Raises BurstDisturbed, LevelInterrupted."""

    def settle(self) -> None:
        """Waits until the server is idle. Raises LevelInterrupted."""

    def look(self) -> CoresSample | None:
        """The engine's cores in the last second or so; None: cannot be seen."""

    def probe(self) -> Probe | None:
        """A short request on the idle server; None: not here. The next level has it on record."""

    def rest(self, seconds: float) -> None:
        """Waits."""

    def recover(self) -> None:
        """Waits until the server serves again. Raises ServerLost, TargetUnusable."""


OpenBench = Callable[[CellState], AbstractContextManager[Bench]]


class ServerBench:
    """Measures on one server that is ready."""

    def __init__(self, site: Site, policy: Policy | None) -> None:
        self._site = site
        self.policy = policy
        self._idle_seconds = quick_seconds(site)
        self._probes = Probes(lambda: quick_seconds(site, PROBE_TOKENS))

    def measure(self, level: Level) -> Measured:
        self._site.campaign = level.campaign
        self._site.is_patient = level.is_patient
        how = single_stream_level if level.step.rate is None else loaded_level
        try:
            return how(self._site, level.step, level.name, level.seed, level.attempt)
        except LevelInterrupted as problem:
            if (why := self._site.server.broke_cap()) is not None:
                raise OverMemory(why) from problem
            raise

    def look(self) -> CoresSample | None:
        return self._site.sampler.latest

    def probe(self) -> Probe | None:
        """Of an endpoint there is none."""
        self._site.probe = None
        if self._site.server.pid is not None:
            search = self._site.campaign.search
            shortest = min(search.level_seconds_min, *search.rate_seconds, math.inf)
            self._site.probe = self._probes.take(shortest)
        return self._site.probe

    def rest(self, seconds: float) -> None:
        time.sleep(seconds)

    def burst(self, burst: Burst, number: int, seed: int) -> list[RequestRecord]:
        return send_burst(self._site, burst, number, seed)

    def settle(self) -> None:
        settle(self._site, self._idle_seconds)

    def recover(self) -> None:
        wait_until_it_serves(self._site.server, self._site.pool, self._site.progress)


@contextlib.contextmanager
def open_bench(state: CellState, progress: Progress) -> Iterator[ServerBench]:
    """Starts the server of a cell and stops it at the end. Raises LoadError."""
    usable = allowed_cores()
    campaign = state.campaign.of(state.cell)
    layout = layout_of(state.cell, usable, campaign.load.workers)
    server: Server
    if campaign.target is not None:
        server = External(campaign.target)
    else:
        assert layout is not None
        kind = Command if state.cell.engine else Local
        server = kind(state.cell, campaign, layout, state.run.folder / "logs")
    try:
        began = time.monotonic()
        server.wait_ready(
            lambda what, fraction: progress.tick(f"{state.key}: {what}", fraction=fraction)
        )
        ready = server.ready(state.key)
        if layout is not None:
            os.sched_setaffinity(0, layout.client)  # this process sends single-stream requests
        seconds = time.monotonic() - began
        progress.say(f"  ready after {seconds:.1f} s at {server.target.url}")
        with _on(server, ready, state, campaign, progress) as bench:
            yield bench
    finally:
        server.stop()
        os.sched_setaffinity(0, usable)


@contextlib.contextmanager
def _on(
    server: Server, ready: CellReady, state: CellState, campaign: Campaign, progress: Progress
) -> Iterator[ServerBench]:
    """A bench on a server that is ready: probed, sampled, on record."""
    target = server.target
    with pool_for(target) as pool:
        facts = wait_until_it_serves(server, pool, progress)
        site = Site(state.run, state.cell, campaign, server, facts, pool, progress)
        site.metrics = metrics_of(target, facts)
        site.processes = campaign.load.workers
        site.memory_bytes = server.watched_bytes if isinstance(server, Capped) else None
        with Sampler(
            state.key,
            site.keep_sample,
            server=server.pid,
            is_ours=not isinstance(server, Command),
            interval_seconds=campaign.sample_seconds,
            metrics=None if isinstance(server, Local) else scraped(target),
        ) as sampler:
            site.sampler = sampler
            seen = {"target": msgspec.to_builtins(facts), "sampling": sampler.missing}
            state.run.event(msgspec.structs.replace(ready, unix_seconds=time.time(), **seen))
            site.start = None if server.pid is None else state.starts
            for note in facts.notes:
                progress.say(f"  note: {note}")
            yield ServerBench(site, policy_of(ready.info, campaign))


def wait_until_it_serves(server: Server, pool: Pool, progress: Progress) -> TargetFacts:
    """What the endpoint can, once it serves; a server of ours gets time to bring its engine back.

    Raises ServerLost, EndpointRefuses, TargetUnusable.
    """
    until = time.monotonic() + (RECOVERY_SECONDS if server.layout is not None else 0.0)
    while True:
        if (trouble := server.trouble()) is not None:
            raise ServerLost(trouble)
        try:
            return probe(server.target, pool)
        except EndpointRefuses:
            raise
        except LoadError:
            if time.monotonic() > until:
                raise
        progress.tick("waiting until the server serves again")
        time.sleep(0.2)


def policy_of(info: EngineInfo, campaign: Campaign) -> Policy | None:
    """The scheduler's settings of a server of ours; None for another one."""
    if not info.slots:
        return None
    defaults = EngineConfig(backend="", model_path="", model_name="")
    return Policy(
        slots=info.slots,
        prefill_tokens=campaign.server.prefill_tokens or defaults.prefill_tokens,
        kv_tokens=info.kv_tokens,
        step_seconds_target=campaign.server.step_seconds or defaults.step_seconds_target,
    )

"""Where the levels of one cell are measured: run folder, server, connections, sampler."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import msgspec

from loadtests.campaign.campaign_file import Campaign
from loadtests.campaign.cells import Cell
from loadtests.campaign.progress import Progress
from loadtests.campaign.servers import Server
from loadtests.errors import LevelInterrupted, OverMemory
from loadtests.generator.connection import clock
from loadtests.generator.endpoint import TargetFacts, body_of, path_of
from loadtests.generator.http_client import Pool, post_bytes
from loadtests.generator.launcher import GeneratorProcess
from loadtests.generator.sse_request import Ask, stream
from loadtests.host.sampler import Sampler
from loadtests.records.run_folder import RunFolder
from loadtests.records.schema import ResourceSample
from models import formatting

SETTLE_SECONDS = 300.0


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
    sampler: Sampler = field(init=False)  # set once it runs
    spare: GeneratorProcess | None = None  # running already, for the next level that wants one
    samples: list[ResourceSample] = field(default_factory=list)  # of the level that runs now
    memory_bytes: int | None = None  # a cap on server and engine that only we hold
    over_memory: str | None = None  # how they broke it

    def keep_sample(self, sample: ResourceSample) -> None:
        layout = self.server.layout
        if layout is not None and set(layout.api) & set(layout.client):
            sample = msgspec.structs.replace(sample, api_with_client=True)
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

    def check(self) -> None:
        """Raise OverMemory for a broken memory cap, LevelInterrupted for a server in trouble."""
        if self.over_memory is not None:
            raise OverMemory(self.over_memory)
        if (trouble := self.server.trouble()) is not None:
            raise LevelInterrupted(trouble)
        if self.sampler.failure is not None:
            raise self.sampler.failure


def quick_seconds(site: Site) -> float | None:
    """How long a tiny request takes now; None when it failed."""
    target = site.server.target
    wire = post_bytes(site.pool, path_of(target), body_of(target, site.facts, "Say yes.", 2))
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

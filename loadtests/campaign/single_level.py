"""One level of load against an endpoint: a run of one cell and one level."""

from __future__ import annotations

import contextlib
import tempfile
import time
from pathlib import Path

import msgspec

from loadtests.campaign.campaign_file import Campaign, Plan
from loadtests.campaign.campaign_keys import Load, Server
from loadtests.campaign.cells import Cell, seed_of
from loadtests.campaign.level import Measured, loaded_level
from loadtests.campaign.manifest import manifest_of, new_folder
from loadtests.campaign.progress import Progress
from loadtests.campaign.servers import External
from loadtests.campaign.site import Site, metrics_of, scraped
from loadtests.capacity.search import Measure
from loadtests.capacity.search_config import SearchConfig
from loadtests.errors import Incomplete, LevelInterrupted
from loadtests.generator.channel import LoadGenerator
from loadtests.generator.endpoint import TargetFacts, pool_for, probe
from loadtests.generator.http_client import Pool
from loadtests.generator.launcher import GeneratorProcess, Listening
from loadtests.generator.load_plan import LoadPlan
from loadtests.generator.messages import Workers
from loadtests.host.sampler import Sampler
from loadtests.metrics.slo import Slo
from loadtests.records.events import (
    CellFinished,
    CellReady,
    CellStarted,
    LevelAbandoned,
    LevelPurpose,
    RunFinished,
    RunStarted,
)
from loadtests.records.old_run_folder import RunFolder
from models import formatting
from serving.hardware.facts import hardware_facts

LEVEL = "load#1"
JOIN_SECONDS = 600.0  # that workers may take to join
BACK_SECONDS = 30.0  # that a lost one may take to be back


def single_level(
    plan: LoadPlan,
    slo: Slo,
    out: Path | None,
    progress: Progress,
    spare: GeneratorProcess,
) -> tuple[Measured, Path | None]:
    """Measure it; what came out, and the run's folder below `out` where that is given.

    `spare` is a load generator that is starting already. Raises LoadError.
    """
    with contextlib.ExitStack() as stack:
        pool = stack.enter_context(pool_for(plan.target))
        facts = _probe(plan, pool, progress)
        if out is not None:
            folder = new_folder(out, "load")
        else:
            kept_nowhere = tempfile.TemporaryDirectory(prefix="crossover-load-")
            folder = Path(stack.enter_context(kept_nowhere))
        settings = _campaign(plan, slo, spare.processes if spare.listening is None else 1)
        cell = Cell(
            key="load",
            model=facts.model,
            weight_format="",
            backend=facts.backend or "external",
            url=plan.target.url,
        )
        manifest = manifest_of(Plan(settings, [cell], ""), folder.name, hardware_facts(), ())
        run = stack.enter_context(RunFolder.create(folder, manifest))
        try:
            run.event(RunStarted(cells=1))
            run.event(CellStarted(cell=cell.key))
            told = msgspec.to_builtins(facts)
            run.event(CellReady(cell=cell.key, url=plan.target.url, target=told))
            site = Site(run, cell, settings, External(plan.target), facts, pool, progress)
            site.metrics = metrics_of(plan.target, facts)
            if spare.listening is not None:
                site.master = LoadGenerator(spare)
                stack.callback(site.master.close)
                _wait_for_workers(site.master, spare.listening, JOIN_SECONDS, progress)
            else:
                site.spare = spare
                site.processes = spare.processes
            sampler = Sampler(cell.key, site.keep_sample, metrics=scraped(plan.target))
            site.sampler = stack.enter_context(sampler)
            measured = _measure(site, plan)
        except KeyboardInterrupt:
            kept = f"; the records so far are in {folder}" if out is not None else ""
            raise Incomplete(f"stopped{kept}") from None
        run.event(CellFinished(cell=cell.key))
        run.event(RunFinished())
    return measured, folder if out is not None else None


def _measure(site: Site, plan: LoadPlan) -> Measured:
    """The level; once more where it was interrupted and several load generators send it."""
    listening = None if site.master is None else site.master.listening
    attempts = 1 if site.master is None and site.processes == 1 else 2
    for attempt in range(1, attempts + 1):
        name = f"{LEVEL}.{attempt}"
        try:
            return loaded_level(
                site,
                Measure(plan.rate_per_second, plan.window_seconds, "bracket"),
                name,
                seed_of(plan.seed, site.cell, f"{LEVEL}.1"),
                attempt,
                concurrency=plan.concurrency,
                purpose=LevelPurpose.LOAD,
            )
        except LevelInterrupted as problem:
            run, reason = site.run, str(problem)
            run.event(LevelAbandoned(cell=site.cell.key, level=name, reason=reason))
            if attempt == attempts:
                raise
            site.progress.say(f"{reason}; measuring it once more", style="yellow")
            if site.master is not None and listening is not None:
                _wait_for_workers(site.master, listening, BACK_SECONDS, site.progress, least=1)
    raise AssertionError("not reached")


def _wait_for_workers(
    master: LoadGenerator,
    listening: Listening,
    seconds: float,
    progress: Progress,
    least: int | None = None,
) -> None:
    """Until all have joined; `least` of them will do once `seconds` are over.

    Raises LevelInterrupted where fewer are there.
    """
    wanted, until = listening.workers, time.monotonic() + seconds
    names: list[str] = []
    told = "no worker is there"
    for message in master.told():
        if isinstance(message, Workers):
            names = message.names
            who = f" ({', '.join(names)})" if names else ""
            told = f"{len(names)} of {wanted} workers are there{who}"
            progress.tick(f"{told}; the others: crossover load URL --join {listening.place}")
            if len(names) >= wanted:
                progress.say(told)
                return
        if time.monotonic() > until:
            if least is None or len(names) < least:
                break
            progress.say(f"{told}: they send all of the load", style="yellow")
            return
    waited = formatting.duration(seconds)
    raise LevelInterrupted(f"{len(names)} of {wanted} workers joined within {waited}")


def _probe(plan: LoadPlan, pool: Pool, progress: Progress) -> TargetFacts:
    progress.tick(f"probing {plan.target.url}")
    facts = probe(plan.target, pool)
    backend = f" on {facts.backend}" if facts.backend else ""
    progress.say(f"{plan.target.url}: model {facts.model}{backend}")
    for note in facts.notes:
        progress.say(f"  note: {note}")
    return facts


def _campaign(plan: LoadPlan, slo: Slo, workers: int) -> Campaign:
    return Campaign(
        name="load",
        slo=slo,
        workload=plan.workload,
        arrivals=plan.arrivals,
        search=SearchConfig(),
        server=Server(),
        load=Load(workers=workers),
        target=plan.target,
        budget_seconds=None,
        seed=plan.seed,
        sample_seconds=1.0,
    )

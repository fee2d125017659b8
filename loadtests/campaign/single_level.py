"""One level of load against an endpoint: a run of one cell and one level."""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path

import msgspec

from loadtests.campaign.campaign_file import Campaign, Plan
from loadtests.campaign.campaign_keys import Server
from loadtests.campaign.cells import Cell, seed_of
from loadtests.campaign.level import loaded_level
from loadtests.campaign.manifest import manifest_of, new_folder
from loadtests.campaign.progress import Progress
from loadtests.campaign.servers import External
from loadtests.campaign.site import Site, metrics_of
from loadtests.capacity.search import Measure
from loadtests.capacity.search_config import SearchConfig
from loadtests.errors import Incomplete, LevelInterrupted
from loadtests.generator.endpoint import TargetFacts, pool_for, probe
from loadtests.generator.http_client import Pool
from loadtests.generator.launcher import GeneratorProcess
from loadtests.generator.load_plan import LoadPlan
from loadtests.host.sampler import Sampler
from loadtests.metrics.level_summary import Summary
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
from loadtests.records.run_folder import RunFolder
from serving.hardware.facts import hardware_facts

LEVEL = "load#1.1"


def single_level(
    plan: LoadPlan,
    slo: Slo,
    out: Path | None,
    progress: Progress,
    spare: GeneratorProcess | None = None,
) -> tuple[Summary, Path | None]:
    """Measure it; the summary, and the run's folder below `out` where that is given.

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
        settings = _campaign(plan, slo)
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
            site.spare = spare
            sampler = Sampler(
                cell.key,
                site.keep_sample,
                metrics_url=plan.target.url,
                api_key_env=plan.target.api_key_env,
                verify_tls=plan.target.verify_tls,
            )
            site.sampler = stack.enter_context(sampler)
            measured = loaded_level(
                site,
                Measure(plan.rate_per_second, plan.window_seconds, "bracket"),
                LEVEL,
                seed_of(plan.seed, cell, LEVEL),
                1,
                concurrency=plan.concurrency,
                purpose=LevelPurpose.LOAD,
            )
        except KeyboardInterrupt:
            kept = f"; the records so far are in {folder}" if out is not None else ""
            raise Incomplete(f"stopped{kept}") from None
        except LevelInterrupted as problem:
            run.event(LevelAbandoned(cell=cell.key, level=LEVEL, reason=str(problem)))
            raise
        run.event(CellFinished(cell=cell.key))
        run.event(RunFinished())
    return measured.summary, folder if out is not None else None


def _probe(plan: LoadPlan, pool: Pool, progress: Progress) -> TargetFacts:
    progress.tick(f"probing {plan.target.url}")
    facts = probe(plan.target, pool)
    backend = f" on {facts.backend}" if facts.backend else ""
    progress.say(f"{plan.target.url}: model {facts.model}{backend}")
    for note in facts.notes:
        progress.say(f"  note: {note}")
    return facts


def _campaign(plan: LoadPlan, slo: Slo) -> Campaign:
    return Campaign(
        name="load",
        slo=slo,
        workload=plan.workload,
        arrivals=plan.arrivals,
        search=SearchConfig(),
        server=Server(),
        target=plan.target,
        budget_seconds=None,
        seed=plan.seed,
        sample_seconds=1.0,
    )

"""One level of load against a URL: `crossover load`. A run of one cell and one level, kept only when it is asked for."""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path

import msgspec

from loadtests.campaign import Campaign, Cell, Plan, PromiseSpec, Server, promise_of
from loadtests.errors import Incomplete, LevelInterrupted, LoadError
from loadtests.generators import Spare
from loadtests.levels import Site, loaded_level
from loadtests.manifest import manifest_of, new_folder, seed_of
from loadtests.plan import parse_arrivals, parse_extra_body, parse_workload
from loadtests.progress import Progress
from loadtests.sampler import Sampler
from loadtests.search import Measure, SearchConfig
from loadtests.servers import External
from loadtests.show import show_level, wide_console
from loadtests.store import RunFolder
from loadtests.target import Target, pool_for, probe
from serving.hardware import hardware_facts


def one_level(
    url: str, *, rate: float | None, concurrency: int | None, seconds: float, workload: str, arrivals: str, promise: str,
    target: float | None, model: str | None, api: str, api_key_env: str | None, verify_tls: bool, extra_body: str | None, seed: int,
    out: Path | None, progress: Progress, spare: Spare | None = None,
) -> None:  # fmt: skip
    """Measures, prints, and keeps the records below `out` where it is given. Raises LoadError for whatever was in the way."""
    for name, value in (("--rate", rate), ("--duration", seconds)):
        if value is not None and not value > 0:
            raise LoadError(f"{name} must be above 0, got {value}")
    try:
        raw = {"url": url, "model": model, "api": api, "api_key_env": api_key_env, "verify_tls": verify_tls}
        endpoint = msgspec.convert(raw | {"extra_body": parse_extra_body(extra_body)}, Target)
    except msgspec.ValidationError as problem:
        raise LoadError(str(problem)) from problem
    settings = Campaign(
        name="load", promise=promise_of(PromiseSpec(preset=promise, target=target)), workload=parse_workload(workload),
        arrivals=parse_arrivals(arrivals), search=SearchConfig(), server=Server(), target=endpoint, budget_seconds=None, seed=seed,
        sample_seconds=1.0,
    )  # fmt: skip
    with contextlib.ExitStack() as stack:
        pool = stack.enter_context(pool_for(endpoint))
        progress.tick(f"probing {url}")
        facts = probe(endpoint, pool)
        progress.say(f"{url}: model {facts.model}" + (f" on {facts.backend}" if facts.backend else ""))
        for note in facts.notes:
            progress.say(f"  note: {note}")
        if out is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="crossover-load-")))
        else:
            folder = new_folder(out, "load")
        cell = Cell(key="load", model=facts.model, weight_format="", backend=facts.backend or "external", url=url)
        plan = Plan(settings, [cell], "")
        run = stack.enter_context(RunFolder.create(folder, manifest_of(plan, folder.name, hardware_facts(), ())))
        run.event("run_started", detail={"cells": 1})
        run.event("cell_started", cell=cell.key)
        run.event("cell_ready", cell=cell.key, detail={"url": url, "target": msgspec.to_builtins(facts)})
        site = Site(run, cell, settings, External(endpoint), facts, pool, progress)
        site.spare = spare
        site.sampler = stack.enter_context(
            Sampler(cell.key, site.keep_sample, metrics_url=url, api_key_env=api_key_env, verify_tls=verify_tls)
        )
        step = Measure(rate, seconds, "bracket")
        try:
            measured = loaded_level(site, step, "load#1.1", seed_of(seed, "load#1.1"), 1, concurrency=concurrency, purpose="load")
        except KeyboardInterrupt:
            raise Incomplete("stopped" + (f"; the records so far are in {folder}" if out is not None else "")) from None
        except LevelInterrupted as problem:
            run.event("level_abandoned", cell=cell.key, level="load#1.1", detail={"reason": str(problem)})
            raise
        run.event("cell_finished", cell=cell.key, detail={})
        run.event("run_finished")
        progress.quiet()
        console = wide_console()
        show_level(measured.summary, console)
        if out is not None:
            console.print(f"records: {folder}")

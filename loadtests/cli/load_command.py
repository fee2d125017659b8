"""The verb `load`: one level of load, sent to a URL. Options in, lines and an exit status out."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from loadtests.errors import Incomplete, LoadError
from loadtests.load_generator.load_options import LoadOptions, plan_of
from serving.bounds import Count, Positive, option
from serving.cli.parameters import command_of

if TYPE_CHECKING:
    from loadtests.analysis.level import Level
    from loadtests.analysis.slo import Slo
    from loadtests.campaign.progress import Progress
    from loadtests.load_generator.load_plan import LoadPlan
    from loadtests.load_generator.locust_process import LoadGenerator
    from loadtests.records.run_folder import RunRecords

CELL, LEVEL = "load", "load#1.1"


class CommandOptions(LoadOptions, frozen=True, kw_only=True):
    """The command line of `crossover load`."""

    concurrency: Annotated[
        Count | None,
        option("", "Users that each send the next request when the last one ends (closed loop)."),
    ] = None
    duration: Annotated[
        Positive, option("", "Seconds of load; all count. Then answers have 60 s more to end.")
    ] = 30.0
    slo: Annotated[
        str,
        option(
            "",
            "A preset: chat (TTFT 2 s, TPOT 0.1 s), interactive (0.5, 0.03), reading (5, 0.2), "
            "batch (none) ... Limits of your own: [slo] of a campaign.",
        ),
    ] = "chat"
    out: Annotated[
        Path | None,
        option("", "Keep the records in a new run folder in this one. Default: none kept."),
    ] = None


def _load(options: CommandOptions) -> None:
    """Send one level of load to a URL and say what came back: TTFT, TPOT, good requests, verdict.

    \b
    crossover load http://127.0.0.1:8000 --rate 2
    crossover load http://127.0.0.1:8000 --concurrency 8 --workload 256x64 --duration 60
    crossover load https://api.example.com/v1 --api chat --api-key-env KEY --rate 0.5
    """
    from loadtests.host.child_processes import signals_interrupt

    try:
        with signals_interrupt():
            _send(options)
    except KeyboardInterrupt:
        kept = "" if options.out is None else f"; the records so far are in {options.out}"
        raise Incomplete(f"stopped{kept}") from None


load = command_of(CommandOptions, _load)


def _send(options: CommandOptions) -> None:
    from loadtests.analysis.slo import SLO_PRESETS
    from loadtests.campaign.progress import Progress
    from loadtests.load_generator.locust_process import LoadGenerator

    if (options.rate is None) == (options.concurrency is None):
        raise LoadError("give either --rate (open loop) or --concurrency (closed loop)")
    if options.concurrency is not None and options.arrivals != "poisson":
        raise LoadError("--arrivals go with --rate: a closed loop sends as answers end")
    if options.slo not in SLO_PRESETS:
        raise LoadError(f"--slo {options.slo!r} is not one of {', '.join(SLO_PRESETS)}")
    slo = SLO_PRESETS[options.slo]
    plan = plan_of(
        options,
        concurrency=options.concurrency,
        window_seconds=options.duration,
        cell=CELL,
        level=LEVEL,
    )
    with (
        Progress() as progress,
        tempfile.TemporaryDirectory(prefix="crossover-load-") as nowhere,
        LoadGenerator(log=Path(nowhere) / "log") as generator,
    ):
        level, run = _measure(plan, slo, options.out or Path(nowhere), generator, progress)
    show_level(level, slo, run)
    if options.out is not None:
        typer.echo(f"records: {run.folder}")


def _measure(
    plan: LoadPlan, slo: Slo, out: Path, generator: LoadGenerator, progress: Progress
) -> tuple[Level, RunRecords]:
    """One level on record in a new run folder below `out`. Raises LoadError.

    On KeyboardInterrupt the records so far stay, and the level has not finished.
    """
    from loadtests.campaign.campaign_file import Campaign, Plan, cell_of_target
    from loadtests.campaign.level_runner import LevelAsk, ServerBench
    from loadtests.campaign.run_state import CellState, manifest_of, new_folder
    from loadtests.campaign.server_launch import Server
    from loadtests.host.resource_sampler import Sampler
    from loadtests.load_generator.openai_endpoint import probe
    from loadtests.records import run_journal as journal
    from loadtests.records.run_folder import RunFolder, read_records
    from serving.hardware.machine_facts import hardware_facts

    target = plan.target
    progress.tick(f"probing {target.url}")
    facts = probe(target)
    progress.say(f"{target.url}: model {facts.model}")
    for note in facts.notes:
        progress.say(f"  note: {note}")
    campaign = Campaign(
        name=CELL,
        slo=slo,
        workload=plan.workload,
        arrivals=plan.arrivals,
        target=target,
        seed=plan.seed,
    )
    cell = msgspec.structs.replace(cell_of_target(target), key=CELL, model=facts.model)
    folder = new_folder(out, CELL)
    manifest = manifest_of(Plan(campaign, [cell], ""), folder.name, hardware_facts(), sys.argv)
    with RunFolder.create(folder, manifest) as run:
        run.event(journal.RunStarted())
        run.event(journal.CellStarted(cell=CELL))
        told = msgspec.to_builtins(facts)
        run.event(journal.CellReady(cell=CELL, url=target.url, target=told))
        state = CellState(run, campaign, cell)
        bench = ServerBench(state, Server(target), facts, None, generator, progress)
        asked = LevelAsk(
            name=LEVEL,
            seed=plan.seed,
            rate=plan.rate,
            window_seconds=plan.window_seconds,
            is_given=True,
        )
        with Sampler(CELL, bench.keep_sample) as bench.sampler:
            level = bench.measure(asked, msgspec.structs.replace(plan, facts=facts))
        run.event(journal.CellFinished(cell=CELL))
        run.event(journal.RunFinished())
    return level, read_records(folder)


def show_level(level: Level, slo: Slo, run: RunRecords) -> None:
    """Print what one level showed."""
    from rich.console import Console
    from rich.table import Table

    from loadtests.analysis.level_validity import level_warnings
    from loadtests.analysis.percentiles import PERCENTILES, distribution
    from models import formatting

    console = Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else 120)
    judged, counted = level.judge(slo), level.counted
    asked = "" if level.rate is None else f"{formatting.requests(level.rate, 3)} asked, "
    console.print(
        f"{judged.due} requests in {formatting.duration(level.window_seconds)} "
        f"({asked}{formatting.requests(level.offered_rate, 3)} came out)"
    )
    if level.failures:
        failed = ", ".join(f"{count} {kind}" for kind, count in level.failures.items())
        console.print(f"failed: {failed}", style="red")
    table = Table("", "mean", *(name for name, _ in PERCENTILES), box=None, pad_edge=False)
    for title, values in (
        ("TTFT", level.ttft[counted]),
        ("TPOT", level.tpot[counted]),
        ("ITL", level.itl),
        ("E2E", level.e2e[counted]),
        ("send lag", level.send_lag[counted]),
    ):
        found = distribution(values)
        shown = (found.mean, *(getattr(found, name) for name, _ in PERCENTILES))
        table.add_row(title, *(formatting.seconds(value, 3, "-") for value in shown))
    console.print(table)
    if (tokens := level.output_tokens_per_second) is not None:
        in_flight = level.mean_in_flight(*level.window)
        console.print(f"{tokens:.1f} output tokens/s; {in_flight:.1f} requests in flight")
    share = "none" if judged.share is None else f"{judged.share:.1%}"
    console.print(
        f"SLO {slo.name}: {share} good ({judged.low:.1%}-{judged.high:.1%}): {judged.verdict}",
        style="bold",
    )
    for warning in level_warnings(level, slo, run.samples_of(level.name)):
        console.print(
            f"warning {warning.code}: {warning.text}; {warning.advice}",
            style="red" if warning.is_serious else "yellow",
            markup=False,
        )

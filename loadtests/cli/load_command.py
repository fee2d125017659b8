"""The verb `load`: one level of load, sent to a URL. Options in, lines and an exit status out."""

from __future__ import annotations

import contextlib
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import urlsplit

import msgspec
import typer

from loadtests.errors import Incomplete, LoadError
from loadtests.load_generator.load_options import LoadOptions, plan_of
from serving.bounds import Count, Positive, Share, flags_of, option
from serving.cli.parameters import command_of

if TYPE_CHECKING:
    from loadtests.analysis.level import Level
    from loadtests.analysis.slo import Slo
    from loadtests.campaign.progress import Progress
    from loadtests.load_generator.load_plan import LoadPlan
    from loadtests.load_generator.locust_process import LoadGenerator
    from loadtests.records.resource_sample import ResourceSample

JOIN_SECONDS = 600.0  # that workers may take to join
DRAIN_SECONDS = 60.0
CELL, LEVEL = "load", "load#1.1"


class CommandOptions(LoadOptions, frozen=True, kw_only=True):
    """The command line of `crossover load`."""

    url: Annotated[
        str,
        option("", "An OpenAI-compatible endpoint, e.g. http://127.0.0.1:8000", is_argument=True),
    ]
    concurrency: Annotated[
        Count | None,
        option(
            "",
            "Concurrent users; each sends its next request when the last one finishes "
            "(closed loop).",
        ),
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
    target: Annotated[
        Share | None,
        option("", "Share of requests that must be good. Default: the preset's, 0.99."),
    ] = None
    out: Annotated[
        Path | None,
        option("", "Keep the records in a new run folder in this one. Default: none kept."),
    ] = None
    workers: Annotated[
        Count | None, option("", "Processes of this machine that share the load. Default: one.")
    ] = None
    master: Annotated[
        bool,
        option(
            *("", "Share the load among workers that --join from elsewhere.", "master/--no-master")
        ),
    ] = False
    expect_workers: Annotated[
        Count | None, option("", "With --master: how many workers to wait for. Default: one.")
    ] = None
    bind: Annotated[
        str | None,
        option(
            "",
            "With --master: HOST[:PORT] to listen on. Default: 127.0.0.1:5557. Whoever reaches it "
            "may take part: the protocol knows no keys.",
        ),
    ] = None
    join: Annotated[
        str | None,
        option("", "Be a worker of the master at HOST[:PORT], for as long as it is there."),
    ] = None


def check_machines(options: CommandOptions) -> None:
    """Raises LoadError for options that contradict each other."""
    flags = flags_of(CommandOptions)
    if options.join is not None:
        own = ("url", "join", "api_key_env", "verify_tls")
        for field in msgspec.structs.fields(CommandOptions):
            if field.name not in own and getattr(options, field.name) != field.default:
                flag = flags[field.name]
                raise LoadError(f"--join takes no {flag}: the master's command says it")
        return
    if (options.rate is None) == (options.concurrency is None):
        raise LoadError("give either --rate (open loop) or --concurrency (closed loop)")
    if options.master and options.workers is not None:
        raise LoadError("--workers are of this machine and --master has others': give one of them")
    for name in ("expect_workers", "bind"):
        if getattr(options, name) is not None and not options.master:
            raise LoadError(f"{flags[name]} is of --master, which is not given")


def _load(options: CommandOptions) -> None:
    """Send one level of load to a URL and say what came back: TTFT, TPOT, good requests, verdict.

    \b
    crossover load http://127.0.0.1:8000 --rate 2
    crossover load http://127.0.0.1:8000 --concurrency 8 --workload 256x64 --duration 60
    crossover load https://api.example.com/v1 --api chat --api-key-env KEY --rate 0.5
    crossover load http://10.0.0.5:8000 --rate 800 --workers 4
    crossover load http://10.0.0.5:8000 --rate 800 --master --bind 10.0.0.7 --expect-workers 2
    crossover load http://10.0.0.5:8000 --join 10.0.0.7     # on each of the two
    """
    check_machines(options)
    from loadtests.host.child_processes import signals_interrupt

    try:
        with signals_interrupt():
            if options.join is None:
                _send(options)
            else:
                _join(options, options.join)
    except KeyboardInterrupt:
        kept = "" if options.out is None else f"; the records so far are in {options.out}"
        raise Incomplete(f"stopped{kept}") from None


load = command_of(CommandOptions, _load)


def _join(options: CommandOptions, master: str) -> None:
    from loadtests.load_generator.locust_workers import PORT, run_worker

    target = plan_of(options.url, options, concurrency=1).target
    host, port = parse_place("--join", master, PORT)
    typer.echo(f"joining {host}:{port}; sends to {target.url} and nowhere else", err=True)
    run_worker(host, port, target)
    typer.echo("the master has ended", err=True)


def parse_place(flag: str, text: str, port: int) -> tuple[str, int]:
    """ "HOST" or "HOST:PORT"; an IPv6 address with a port stands in brackets. Raises LoadError."""
    with contextlib.suppress(ValueError):  # its port is no port
        if text.count(":") > 1 and not text.startswith("["):
            text = f"[{text}]"
        parts = urlsplit(f"//{text}")
        if parts.hostname and parts.netloc == text and "@" not in text:
            return parts.hostname, port if parts.port is None else parts.port
    raise LoadError(f"{flag} must be HOST or HOST:PORT, got {text!r}")


def _send(options: CommandOptions) -> None:
    from loadtests.analysis.slo import SLO_PRESETS
    from loadtests.campaign.progress import Progress
    from loadtests.load_generator.locust_process import LoadGenerator
    from loadtests.load_generator.locust_workers import PORT

    if options.slo not in SLO_PRESETS:
        raise LoadError(f"--slo {options.slo!r} is not one of {', '.join(SLO_PRESETS)}")
    slo = SLO_PRESETS[options.slo]
    if options.target is not None:
        slo = msgspec.structs.replace(slo, target=options.target)
    plan = plan_of(
        options.url,
        options,
        concurrency=options.concurrency,
        window_seconds=options.duration,
        drain_seconds=DRAIN_SECONDS,
        cell=CELL,
        level=LEVEL,
    )
    listen = parse_place("--bind", options.bind or "127.0.0.1", PORT) if options.master else None
    with (
        Progress() as progress,
        tempfile.TemporaryDirectory(prefix="crossover-load-") as nowhere,
        LoadGenerator(
            log=Path(nowhere) / "log", processes=options.workers or 1, listen=listen
        ) as generator,
    ):
        out = options.out or Path(nowhere)
        workers = (options.expect_workers or 1) if options.master else 0
        level, samples, folder = _measure(plan, slo, out, generator, progress, workers)
    show_level(level, slo, samples)
    if options.out is not None:
        typer.echo(f"records: {folder}")


def _measure(
    plan: LoadPlan,
    slo: Slo,
    out: Path,
    generator: LoadGenerator,
    progress: Progress,
    workers: int,
) -> tuple[Level, list[ResourceSample], Path]:
    """One level on record in a new run folder below `out`, from so many workers of other machines
    (0: our own processes). Raises LoadError.

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
    if workers:
        generator.wait_for_workers(
            workers,
            JOIN_SECONDS,
            lambda names: progress.tick(f"{len(names)} workers are there: {', '.join(names)}"),
        )
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
    return level, read_records(folder).samples_of(LEVEL), folder


def show_level(level: Level, slo: Slo, samples: Sequence[ResourceSample]) -> None:
    """Print what one level showed."""
    from rich.console import Console
    from rich.table import Table

    from loadtests.analysis.level_validity import level_warnings
    from loadtests.analysis.percentiles import PERCENTILES, distribution
    from models import formatting

    console = Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else 120)
    judged = level.judge(slo)
    asked = "" if level.rate is None else f"{formatting.requests(level.rate, 3)} asked, "
    console.print(
        f"{judged.due} requests in {formatting.duration(level.window_seconds)} "
        f"({asked}{formatting.requests(level.offered_rate, 3)} came out)"
    )
    if level.failures:
        failed = ", ".join(f"{count} {kind}" for kind, count in level.failures.items())
        console.print(f"failed: {failed}", style="red")
    names = [name for name, _ in PERCENTILES]
    table = Table("", "mean", *names, box=None, pad_edge=False)
    columns: dict[str, Any] = {
        "TTFT": level.ttft[level.counted],
        "TPOT": level.tpot[level.counted],
        "ITL": level.itl,
        "E2E": level.e2e[level.counted],
        "send lag": level.send_lag[level.counted],
    }
    for title, values in columns.items():
        found = distribution(values)
        shown = [
            "never" if name in found.never else formatting.seconds(getattr(found, name), 3, "-")
            for name in names
        ]
        table.add_row(title, formatting.seconds(found.mean, 3, "-"), *shown)
    console.print(table)
    if (tokens := level.output_tokens_per_second) is not None:
        in_flight = level.mean_in_flight(*level.window)
        console.print(f"{tokens:.1f} output tokens/s; {in_flight:.1f} requests in flight")
    share = "none" if judged.share is None else f"{judged.share:.1%}"
    console.print(
        f"SLO {slo.name}: {share} good ({judged.low:.1%}-{judged.high:.1%}): {judged.verdict}",
        style="bold",
    )
    for warning in level_warnings(level, slo, samples):
        console.print(
            f"warning {warning.code}: {warning.text}; {warning.advice}",
            style="red" if warning.is_serious else "yellow",
            markup=False,
        )

"""The verb `load`: sends one level of load to a URL. Options in, lines and an exit status out."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated

import msgspec
from rich.table import Table

from crossover.loadtests.campaign.progress import Progress, console_of
from crossover.loadtests.errors import Incomplete, LoadError
from crossover.loadtests.host.child_processes import signals_interrupt
from crossover.loadtests.levels.level_columns import Level, LevelRows
from crossover.loadtests.levels.level_warnings import level_warnings
from crossover.loadtests.levels.percentiles import PERCENTILES, distribution
from crossover.loadtests.load_generator.level_messages import Ended
from crossover.loadtests.load_generator.load_options import LoadOptions, parse_workload, plan_of
from crossover.loadtests.load_generator.locust_process import LoadGenerator
from crossover.loadtests.load_generator.openai_endpoint import probe
from crossover.loadtests.records.journal_events import LevelFinished, LevelStarted
from crossover.loadtests.records.request_record import RequestRecord
from crossover.models import formatting
from crossover.serving.capacity.slo import Slo, parse_slo
from crossover.serving.cli.command_of_options import command_of
from crossover.serving.option_help import Count, Positive, option


class CommandOptions(LoadOptions, frozen=True, kw_only=True):
    """The command line of `crossover load`."""

    concurrency: Annotated[
        Count | None,
        option(
            "",
            "Number of users; each sends its next request when the last one has been answered "
            "(closed loop).",
        ),
    ] = None
    duration: Annotated[
        Positive,
        option("", "Seconds of load. Requests that are still running then get 60 s to finish."),
    ] = 30.0
    slo: Annotated[
        str,
        option(
            "",
            "SLO: a preset (chat: TTFT 2 s, TPOT 0.1 s; interactive: 0.5 s, 0.03 s; reading: 5 s, "
            "0.2 s; batch: no limits), or your own limits in seconds, all of which a request must "
            "meet: ttft=2,tpot=0.1,ttfa=10,e2e=60,target=0.95 (ttfa: time to the first token after "
            "reasoning; e2e: time of the complete answer).",
        ),
    ] = "chat"


def _load(options: CommandOptions) -> None:
    """Send one level of load to a URL and report TTFT, TPOT, SLO attainment and a verdict.

    To record every request, use a campaign with a [target] and search.rates.

    \b
    crossover load http://127.0.0.1:8000 --rate 2
    crossover load http://127.0.0.1:8000 --concurrency 8 --workload 256x64 --duration 60
    crossover load https://api.example.com/v1 --api chat --api-key-env KEY --rate 0.5
    """
    if (options.rate is None) == (options.concurrency is None):
        raise LoadError("Give either --rate (open loop) or --concurrency (closed loop)")
    if options.concurrency is not None and options.arrivals != "poisson":
        raise LoadError("--arrivals needs --rate: a closed loop sends when answers end")
    if options.concurrency is not None and parse_workload(options.workload).has_sessions:
        raise LoadError("Conversations need --rate (conversations/s) instead of --concurrency")
    try:
        slo = parse_slo(options.slo)
    except ValueError as problem:
        raise LoadError(f"--slo: {problem}") from None
    try:
        with signals_interrupt():
            level = measure(options)
    except KeyboardInterrupt:
        raise Incomplete("stopped") from None
    show_level(level, slo, has_sessions=parse_workload(options.workload).has_sessions)


load = command_of(CommandOptions, _load)


def measure(options: CommandOptions) -> Level:
    """Send the load and return the level when its last answer has arrived. Raises LoadError."""
    plan = plan_of(options, concurrency=options.concurrency, window_seconds=options.duration)
    with (
        Progress() as progress,
        tempfile.TemporaryDirectory(prefix="crossover-load-") as folder,
        # The log is for Locust's own tables, which nobody reads here.
        LoadGenerator(log=Path(folder) / "log") as generator,
    ):
        progress.tick(f"probing {options.url}")
        facts = probe(plan.target)
        plan = msgspec.structs.replace(plan, facts=facts)
        progress.say(f"{options.url}: model {facts.model}")
        for note in facts.notes:
            progress.say(f"  note: {note}")
        rows, busy_share = LevelRows(), None
        for message in generator.run(plan):
            match message:
                case RequestRecord():
                    rows.add(message)
                case Ended():
                    busy_share = message.busy_share
            progress.tick(f"{plan.load_in_words}: {rows.count} answers")
    started = LevelStarted(
        cell=plan.cell,
        level=plan.level,
        rate_per_second=plan.rate,
        concurrency=plan.concurrency,
        window_seconds=plan.window_seconds,
    )
    finished = LevelFinished(
        cell=plan.cell,
        level=plan.level,
        due=rows.count,
        window_seconds=plan.window_seconds,
        generator_busy_share=busy_share,
    )
    return rows.level(started, finished)


def show_level(level: Level, slo: Slo, *, has_sessions: bool = False) -> None:
    """Print the results of one level."""
    console, judged, counted = console_of(120), level.judge(slo), level.counted
    offered = "" if level.rate is None else f"{formatting.requests(level.rate, 3)} offered, "
    if has_sessions:  # the rate is of conversations
        offered = f"{level.rate:.3g} conversations/s started, "
    console.print(
        f"{judged.due} requests in {formatting.duration(level.window_seconds)} "
        f"({offered}{formatting.requests(level.achieved_rate, 3)} achieved)"
    )
    if level.failures:
        failed = ", ".join(f"{count} {kind}" for kind, count in level.failures.items())
        console.print(f"failed: {failed}", style="red")
    statistics = ["mean", *(name for name, _ in PERCENTILES)]  # fields of Distribution
    table = Table("", *statistics, box=None, pad_edge=False)
    for title, values in (
        ("TTFT", level.ttft[counted]),
        ("TTFA", level.ttfa[counted]),
        ("TPOT", level.tpot[counted]),
        ("ITL", level.itl),
        ("E2E", level.e2e[counted]),
        ("send delay", level.send_delay[counted]),
    ):
        times = distribution(values)
        cells = [formatting.seconds(getattr(times, name), 3, "-") for name in statistics]
        table.add_row(title, *cells)
    console.print(table)
    if (tokens := level.output_tokens_per_second) is not None:
        in_flight = level.mean_in_flight(*level.window)
        console.print(f"{tokens:.1f} output tokens/s; {in_flight:.1f} requests in flight")
    share = "none" if judged.share is None else f"{judged.share:.1%}"
    console.print(
        f"SLO {slo.name}: {share} SLO attainment ({judged.low:.1%}-{judged.high:.1%}): "
        f"{judged.verdict}",
        style="bold",
    )
    for warning in level_warnings(level, slo):
        style = "red" if warning.is_serious else "yellow"
        console.print(f"warning {warning.code}: {warning.text}; {warning.advice}", style=style)

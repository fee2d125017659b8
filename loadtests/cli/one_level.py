"""One level of load without a run folder, and its results on the terminal: `crossover load`."""

from __future__ import annotations

import tempfile
from pathlib import Path

import msgspec

from crossover.loadtests.campaign.progress import Progress, console_of
from crossover.loadtests.capacity.prefix_reuse import cached_share
from crossover.loadtests.levels.level_columns import Level
from crossover.loadtests.levels.level_warnings import level_warnings
from crossover.loadtests.levels.percentiles import PERCENTILES, distribution
from crossover.loadtests.load_generator.level_messages import LoadPlan
from crossover.loadtests.load_generator.locust_process import LoadGenerator
from crossover.loadtests.load_generator.openai_endpoint import probe_endpoint
from crossover.loadtests.records.journal_events import LevelFinished, LevelStarted
from crossover.models import formatting
from crossover.models.tables import Column, table_of, terminal_table
from crossover.models.temporary_folder import temporary_folder
from crossover.serving.capacity.slo import LIMITED_TIMES, Slo
from crossover.serving.workload.conversations import mean_turns_of
from crossover.serving.workload.request_lengths import Workload


def measure(load: LoadPlan) -> Level:
    """Send the load and return the level when its last answer has arrived. Raises LoadError."""
    url = load.target.url
    with (
        Progress() as progress,
        tempfile.TemporaryDirectory(prefix="crossover-load-", dir=temporary_folder()) as folder,
        # The log is for Locust's own tables, which nobody reads here.
        LoadGenerator(log=Path(folder) / "log") as generator,
    ):
        progress.tick(f"probing {url}")
        facts = probe_endpoint(load.target)
        load = msgspec.structs.replace(load, facts=facts)
        progress.say(f"{url}: model {facts.model}")
        for note in facts.notes:
            progress.say(f"  note: {note}")
        rows, ended = generator.level(
            load,
            on_tick=lambda rows: progress.tick(f"{load.load_in_words()}: {rows.count} answers"),
        )
    started = LevelStarted(cell=load.cell, level=load.level, plan=load.plan)
    finished = LevelFinished(
        cell=load.cell,
        level=load.level,
        due=rows.count,
        window_seconds=load.plan.window_seconds,
        generator_busy_share=ended.busy_share,
    )
    return rows.level(started, finished)


def show_level(level: Level, slo: Slo, workload: Workload) -> None:
    """Print the results of one level. `workload`: the requests that were sent."""
    console, judged, counted = console_of(120), level.judge(slo), level.counted
    nominal = "" if level.rate is None else f", nominal {formatting.requests(level.rate, 3)}"
    if workload.has_sessions and level.rate is not None:
        conversations = formatting.rate(level.rate / mean_turns_of(workload), 3, like=level.rate)
        nominal = f", nominal {formatting.of_requests(conversations, 'conversations')}"
    offered = formatting.requests(level.offered_rate, 3, like=level.rate)
    console.print(
        f"{judged.due} requests in {formatting.duration(level.window_seconds)} "
        f"({offered} offered{nominal})"
    )
    if level.failures:
        failed = ", ".join(f"{count} {kind}" for kind, count in level.failures.items())
        console.print(f"failed: {failed}", style="red")
    distributions = {
        **{name.upper(): distribution(getattr(level, name)[counted]) for name in LIMITED_TIMES},
        "ITL": distribution(level.itl),
        "send delay": distribution(level.send_delay[counted]),
    }

    def statistic(name: str) -> Column[str]:
        def text(metric: str) -> str:
            return formatting.seconds(getattr(distributions[metric], name), 3, "-")

        return Column(name, "number", text)

    statistics = ("mean", *(name for name, _ in PERCENTILES))  # fields of Distribution
    table = table_of(distributions, Column("", "text", str), *map(statistic, statistics))
    console.print(terminal_table(table))
    if (tokens := level.output_tokens_per_second) is not None:
        in_flight = level.mean_in_flight(*level.window)
        console.print(f"{tokens:.1f} output tokens/s; {in_flight:.1f} requests in flight")
    if workload.has_sessions and (found := cached_share([level])) is not None:
        console.print(f"{found:.1%} of the prompt tokens found in the server's cache")
    share = "none" if judged.share is None else f"{judged.share:.1%}"
    console.print(
        f"SLO {slo.name}: {share} SLO attainment ({judged.low:.1%}-{judged.high:.1%}): "
        f"{judged.verdict}",
        style="bold",
    )
    for warning in level_warnings(level, slo):
        style = "red" if warning.is_serious else "yellow"
        console.print(f"warning {warning.code}: {warning.text}; {warning.advice}", style=style)

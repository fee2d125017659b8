"""One level of load, printed."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from loadtests.metrics.distribution import Distribution
from loadtests.metrics.level_summary import Summary
from loadtests.records.schema import WorkerFacts
from loadtests.workload.goodness_of_fit import ArrivalCheck
from models import formatting

WORKERS = (
    *("load generator", "requests", "send lag p99", "CPU", "clock ahead", "clock moved"),
    "clock known to",
)
PERCENTILES = ("p50", "p90", "p95", "p99")


def wide_console() -> Console:
    """Standard output; where it is no terminal, as wide as the tables are."""
    return Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else 160)


def show_level(summary: Summary, console: Console) -> None:
    """Print what one level showed."""
    counts, throughput = summary.counts, summary.throughput
    asked = ""
    if summary.asked_rate is not None:
        asked = f"{formatting.requests(summary.asked_rate, 3)} asked, "
    console.print(
        f"{counts.due} requests in {formatting.duration(summary.window.seconds)} "
        f"({asked}{formatting.requests(throughput.offered_rate, 3)} came out)"
    )
    if counts.failed:
        failed = ", ".join(f"{count} {kind}" for kind, count in counts.failed.items())
        console.print(f"failed: {failed}", style="red")
    console.print(_latencies(summary))
    console.print("-: too few requests to say", style="dim")
    if throughput.output_tokens_per_second is not None:
        prompt = throughput.prompt_tokens_per_second
        console.print(
            f"{throughput.output_tokens_per_second:.1f} output tokens/s"
            + (f", {prompt:.1f} prompt tokens/s" if prompt is not None else "")
            + f"; {throughput.mean_in_flight:.1f} requests in flight on average"
        )
    if summary.arrivals is not None and summary.arrivals.cv is not None:
        console.print(_arrivals(summary.arrivals), markup=False)
    share = f"{counts.attainment:.1%}" if counts.attainment is not None else "none"
    console.print(
        f"SLO {summary.slo}: {share} good ({counts.attainment_low:.1%}-{counts.attainment_high:.1%}"
        f"), goodput {formatting.requests(throughput.goodput, 3)}: {summary.verdict}",
        style="bold",
    )
    for warning in summary.warnings:
        console.print(
            f"warning {warning.code}: {warning.text}; {warning.advice}",
            style="red" if warning.is_serious else "yellow",
            markup=False,
        )


def show_workers(workers: Sequence[WorkerFacts], console: Console) -> None:
    """Print the load generators of one level where there are several."""
    if not workers:
        return
    table = Table(*WORKERS, box=None, pad_edge=False)
    for one in workers:
        clock = [one.clock_offset_seconds, one.clock_moved_seconds, one.clock_uncertainty_seconds]
        table.add_row(
            f"{one.worker} on {one.name or 'this machine'}",
            str(one.due),
            formatting.seconds(one.send_lag_p99_seconds, 3, "-"),
            "-" if one.cpu_share is None else f"{one.cpu_share:.0%}",
            *("-" if seconds is None else f"{seconds * 1000:+.3f} ms" for seconds in clock[:2]),
            formatting.seconds(clock[2], 2, "-"),
        )
    console.print(table)


def _latencies(summary: Summary) -> Table:
    table = Table("", "mean", *PERCENTILES, box=None, pad_edge=False)
    found = summary.latencies
    rows = {"TTFT": found.ttft, "TPOT": found.tpot, "ITL": found.itl, "E2E": found.e2e}
    for name, times in (rows | {"send lag": found.send_lag}).items():
        parts = [
            "never" if p in times.never else formatting.seconds(getattr(times, p), 3, "-")
            for p in PERCENTILES
        ]
        table.add_row(name, formatting.seconds(times.mean, 3, "-"), *parts)
    return table


def _arrivals(found: ArrivalCheck) -> str:
    parts = [f"CV of gaps {found.cv:.2f}"]
    if found.lag1 is not None:
        parts.append(f"lag-1 {found.lag1:+.2f}")
    parts += [f"dispersion {d.index:.2f} in {d.window_seconds:g} s" for d in found.dispersion]
    word = {True: "as asked", False: "not as asked", None: "not tested"}[found.as_asked]
    return f"arrivals: {', '.join(parts)}: {word} ({found.against})"


def level_row(load: str, summary: Summary, cut_short: bool) -> list[str]:
    """One level as table cells."""
    counts, throughput = summary.counts, summary.throughput
    share = f" ({counts.attainment:.0%})" if counts.attainment is not None else ""
    tokens = throughput.output_tokens_per_second
    verdict = summary.verdict if summary.is_valid else "not valid"
    return [
        load,
        str(counts.due),
        f"{counts.good}{share}",
        typical(summary.latencies.ttft),
        typical(summary.latencies.tpot),
        f"{tokens:.1f}" if tokens is not None else "-",
        f"{throughput.mean_in_flight:.1f}",
        f"{verdict}, cut short" if cut_short else verdict,
        ", ".join(warning.code for warning in summary.warnings),
    ]


def typical(times: Distribution) -> str:
    """The median, or the mean of a few."""
    if "p50" in times.never:
        return "never"
    return formatting.seconds(times.p50 if times.p50 is not None else times.mean, 3, "-")

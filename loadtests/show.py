"""A run folder, a level or a comparison as tables for the terminal: values in, text out."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from rich.console import Console
from rich.table import Table

from loadtests.calibrate import error_in_words, error_of
from loadtests.levels import LevelFinished, judge
from loadtests.progress import duration
from loadtests.records import Event
from loadtests.search import Capacity
from loadtests.store import LevelStarted, completed_levels, read_events, read_manifest, read_requests, read_samples, started_levels
from loadtests.summary import Distribution, Summary
from loadtests.words import in_words

if TYPE_CHECKING:  # each only for what it names: a level on the terminal must not wait for the rest of the house
    from loadtests.compare import Comparison, Row
    from loadtests.selftest import Report


def show_run(folder: Path, console: Console | None = None) -> None:
    """Prints cells, levels, verdicts and capacities of a run, finished or not. Raises BadRunFolder."""
    from loadtests.standing import campaign_of

    console = console or wide_console()
    manifest = read_manifest(folder)
    campaign, cells = campaign_of(manifest)
    events, requests, samples = read_events(folder).records, read_requests(folder).records, read_samples(folder).records
    finished, started = completed_levels(events), started_levels(events)
    state = "complete" if any(event.kind == "run_finished" for event in events) else "not complete"
    interruptions = sum(event.kind == "interrupted" for event in events)
    abandoned = sum(event.kind == "level_abandoned" for event in events)
    console.print(f"run {manifest.run_id}: {state}, {len(finished)} levels, {len(requests)} requests, {interruptions} interruptions")
    if abandoned:
        console.print(f"{abandoned} levels were begun and abandoned; their requests are on record and count for nothing")
    for cell in cells:
        console.print(f"\n{cell.key}: {cell_state(cell.key, events)}", style="bold", markup=False)
        table = Table("load", "due", "good", "TTFT p50", "TPOT p50", "tokens/s", "in flight", "verdict", "doubts", box=None, pad_edge=False)
        for name, event in finished.items():
            if event.cell == cell.key:
                detail = msgspec.convert(event.detail, LevelFinished)
                start = msgspec.convert(started[name].detail, LevelStarted)
                of_level = [record for record in requests if record.level == name]
                summary, _ = judge(of_level, [s for s in samples if s.level == name], start, detail.window_seconds, campaign.promise)
                table.add_row(*level_row(load_in_words(start), summary, detail.cut_short is not None))
        if table.row_count:
            console.print(table)
        if (line := prediction_in_words(cell.key, campaign.promise.name, events)) is not None:
            console.print(line, style="dim", markup=False)


def wide_console() -> Console:
    """Standard output; where it is no terminal, as wide as the tables are."""
    return Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else 160)


def cell_state(key: str, events: list[Event]) -> str:
    """What became of a cell, for people."""
    own = [event for event in events if event.cell == key]
    for event in reversed(own):
        if event.kind == "cell_skipped":
            return f"skipped: {event.detail.get('reason')}"
        if event.kind == "cell_finished" and "capacity" not in event.detail:
            return "one level"
        if event.kind == "cell_finished" and "capacities" in event.detail:
            found = {name: msgspec.convert(one, Capacity) for name, one in event.detail["capacities"].items()}
            return "; ".join(f"{name}: {in_words(capacity)}" for name, capacity in found.items())
        if event.kind == "cell_finished":
            return in_words(msgspec.convert(event.detail["capacity"], Capacity))
    return "not finished" if own else "not begun"


def prediction_in_words(key: str, promise: str, events: list[Event]) -> str | None:
    """What calibration and simulation said before the search, and how far off it was; None where there was none."""
    from loadtests.standing import prediction_on_record

    made = prediction_on_record(events, key)
    if made is None:
        return None
    if made.law is None:
        return f"no prediction: {made.reason}"
    rate = made.rates.get(promise)
    fitted = f" (law fitted on {len(made.observations)} steps, median error {made.law.error:.0%})" if made.law.error is not None else ""
    if rate is None:
        return f"no prediction for the promise {promise}{fitted}"
    ended = next((event for event in reversed(events) if event.cell == key and event.kind == "cell_finished"), None)
    alone = ended.detail.get("measured_only") if ended is not None else None
    error = error_of(rate, msgspec.convert(alone, Capacity).estimate if alone is not None else None)
    return f"predicted {rate:.3g} requests/s{fitted}" + (f": {error_in_words(error)} by the levels alone" if error is not None else "")


def load_in_words(start: LevelStarted) -> str:
    if start.rate_per_second is not None:
        return f"{start.rate_per_second:.3g}/s"
    return "lone" if start.purpose == "lone" else f"{start.concurrency} users"


def level_row(load: str, summary: Summary, cut_short: bool) -> list[str]:
    """One level as table cells."""
    tokens = summary.output_tokens_per_second
    return [
        load,
        str(summary.due),
        f"{summary.good}" + (f" ({summary.attainment:.0%})" if summary.attainment is not None else ""),
        typical(summary.ttft),
        typical(summary.tpot),
        f"{tokens:.1f}" if tokens is not None else "-",
        f"{summary.mean_in_flight:.1f}",
        ("not valid" if not summary.is_valid else summary.verdict) + (", cut short" if cut_short else ""),
        ", ".join(doubt.code for doubt in summary.doubts),
    ]


def typical(times: Distribution) -> str:
    """The median, or the mean of a few."""
    value = times.p50 if times.p50 is not None else times.mean if "p50" not in times.never else None
    return "never" if "p50" in times.never else time_in_words(value)


def time_in_words(seconds: float | None) -> str:
    """0.0123 -> "12.3 ms"; None -> "-"."""
    if seconds is None:
        return "-"
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1000:.3g} ms"


def show_level(summary: Summary, console: Console) -> None:
    """Prints what one level showed."""
    asked = f"{summary.asked_rate:.3g} asked, " if summary.asked_rate is not None else ""
    console.print(f"{summary.due} requests in {duration(summary.window.seconds)} ({asked}{summary.offered_rate:.3g} requests/s came out)")
    if summary.failed:
        console.print("failed: " + ", ".join(f"{count} {kind}" for kind, count in summary.failed.items()), style="red")
    table = Table("", "mean", "p50", "p90", "p95", "p99", box=None, pad_edge=False)
    for name, times in (
        ("TTFT", summary.ttft),
        ("TPOT", summary.tpot),
        ("ITL", summary.itl),
        ("E2E", summary.e2e),
        ("send lag", summary.send_lag),
    ):
        parts = ["never" if p in times.never else time_in_words(getattr(times, p)) for p in ("p50", "p90", "p95", "p99")]
        table.add_row(name, time_in_words(times.mean), *parts)
    console.print(table)
    console.print("-: too few requests to say", style="dim")
    if summary.output_tokens_per_second is not None:
        prompt = f", {summary.prompt_tokens_per_second:.1f} prompt tokens/s" if summary.prompt_tokens_per_second is not None else ""
        console.print(
            f"{summary.output_tokens_per_second:.1f} output tokens/s{prompt}; {summary.mean_in_flight:.1f} requests in flight on average"
        )
    if summary.arrivals is not None and summary.arrivals.cv is not None:
        found = summary.arrivals
        parts = [f"CV of gaps {found.cv:.2f}"] + ([f"lag-1 {found.lag1:+.2f}"] if found.lag1 is not None else [])
        parts += [f"dispersion {d.index:.2f} in {d.window_seconds:g} s" for d in found.dispersion]
        word = {True: "as asked", False: "not as asked", None: "not tested"}[found.as_asked]
        console.print(f"arrivals: {', '.join(parts)}: {word} ({found.against})", markup=False)
    share = f"{summary.attainment:.1%}" if summary.attainment is not None else "none"
    low, high = summary.attainment_low, summary.attainment_high
    console.print(
        f"promise {summary.promise}: {share} good ({low:.1%}-{high:.1%}), goodput {summary.goodput:.3g} requests/s: {summary.verdict}",
        style="bold",
    )
    for doubt in summary.doubts:
        console.print(f"doubt {doubt.code}: {doubt.text}; {doubt.advice}", style="red" if doubt.invalidates else "yellow", markup=False)


def show_comparison(found: Comparison, console: Console) -> None:
    """Prints what two runs differ in."""
    console.print(f"{found.second} against {found.first}: {found.verdict}", style="bold", markup=False)
    for note in found.notes:
        console.print(note, style="dim", markup=False)
    table = Table("cell", "load", "metric", "first", "second", "difference", "95 % interval", "noise", "verdict", box=None, pad_edge=False)
    for row in found.rows:
        table.add_row(row.cell, comparison_load(row.load), row.metric, *_difference_cells(row), f"{row.verdict}{_why(row)}")
    console.print(table)
    assumed = any(row.noise_pairs == 0 for row in found.rows)
    if assumed:
        console.print(
            "noise marked ~ is assumed: repeat a run (crossover campaign repeat) and name it with --noise to measure it", style="dim"
        )


def comparison_load(load: float | None) -> str:
    if load is None:
        return "alone"
    return f"{load:.3g}/s" if load > 0 else f"{-load:.0f} users"


def _difference_cells(row: Row) -> list[str]:
    noise = f"{'~' if row.noise_pairs == 0 else ''}{row.noise:.1%}"
    if row.difference is None:
        return ["-", "-", "-", "-", noise]
    d = row.difference
    values = [f"{value:.3g}/s" if row.metric == "capacity" else time_in_words(value) for value in (d.first, d.second)]
    return [*values, f"{d.ratio - 1:+.1%}", f"{d.low - 1:+.1%} to {d.high - 1:+.1%}", noise]


def _why(row: Row) -> str:
    return f" ({row.reason})" if row.reason else ""


def show_selftest(report: Report, console: Console | None = None) -> None:
    """Prints the table of a self-test: what, truth, measured, error, limit, verdict."""
    console = console or wide_console()
    table = Table("what", "truth", "measured", "error", "limit", "verdict", box=None, pad_edge=False)
    for row in report.rows:
        verdict = "[green]pass[/green]" if row.passed else "[bold red]FAIL[/bold red]"
        limit = ("" if row.truth is not None else "at most ") + proof_value(row.limit, row.unit)
        what = row.what + (f" ({row.note})" if row.note else "")
        table.add_row(
            what, proof_value(row.truth, row.unit), proof_value(row.measured, row.unit), proof_value(row.error, row.unit), limit, verdict
        )
    console.print(table)
    failed = sum(not row.passed for row in report.rows)
    host = report.host
    console.print(f"{len(report.rows) - failed} of {len(report.rows)} pass, in {duration(report.seconds)}")
    shares = [f"{share:.1%} {words}" for share, words in ((host.steal, "stolen by the hypervisor"), (host.others, "used by other programs"))
              if share is not None]  # fmt: skip
    if shares:
        console.print(f"of the machine's CPU time, {' and '.join(shares)} meanwhile")
    if failed and host.is_busy:
        console.print("the machine was busy with other things: a time that fails may be its doing; repeat on a quiet machine", style="bold")


def proof_value(value: float | None, unit: str) -> str:
    """A value of the self-test's table."""
    if value is None:
        return "-"
    if unit == "seconds":
        sign = "-" if value < 0 else ""
        return sign + time_in_words(abs(value)) if value else "0 ms"
    return f"{value:.0f}" if unit == "count" else f"{value:.3g}" + (" /s" if unit == "requests/s" else "")

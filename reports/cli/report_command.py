"""crossover report RUN...: options in, headline and path out."""

from __future__ import annotations

import webbrowser
from functools import partial
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from loadtests.metrics.slo import SLO_PRESETS
from reports.errors import ReportError
from serving.bounds import option
from serving.cli.parameters import command_of

FORMATS = ("html", "md", "csv", "json", "parquet", "png", "svg")
USUAL = "html,md,csv"
PRESETS = ", ".join(SLO_PRESETS)


class ReportOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The command line of `crossover report`."""

    runs: Annotated[list[Path], option("", "Run folders: runs/<id>.", is_argument=True)]
    out: Annotated[
        Path | None,
        option("", "Where to write (default: `report` in the first run's folder)."),
    ] = None
    formats: Annotated[
        str | None,
        option(
            "",
            f"What to write, of {', '.join(FORMATS)} (default: {USUAL}; nothing with --json "
            "or --check).",
            "format",
        ),
    ] = None
    png: Annotated[bool, option("", "Write every chart as PNG too.")] = False
    rate: Annotated[
        float | None,
        option("", "The requests/s that you need: drawn into the map and judged in a sentence."),
    ] = None
    slo: Annotated[str | None, option("", f"Judge by another SLO than the run's: {PRESETS}.")] = (
        None
    )
    ttft: Annotated[float | None, option("", "Another limit of TTFT, in seconds.")] = None
    tpot: Annotated[float | None, option("", "Another limit of TPOT, in seconds.")] = None
    target: Annotated[
        float | None, option("", "Another share of requests that must be good, 0 to 1.")
    ] = None
    machine: Annotated[
        list[Path] | None,
        option(
            "", "A file of `crossover calibrate`: what that machine would hold; may be repeated."
        ),
    ] = None
    plan: Annotated[
        Path | None,
        option("", "A plan file: what would serve its forecast, with this machine in it."),
    ] = None
    reference: Annotated[
        bool, option("", "Put shipped results of the same models beside the run's.")
    ] = False
    separate: Annotated[
        bool, option("", "A report for each run: runs of machines that differ.")
    ] = False
    as_json: Annotated[
        bool, option("", "Print the report as JSON (docs/report.md), and nothing else.", "json")
    ] = False
    checks: Annotated[
        list[str] | None,
        option(
            "",
            "End with status 1 unless this is so, e.g. 'capacity(\"1b\") >= 0.5' "
            "(docs/report.md); may be repeated.",
            *("check", "CONDITION"),
        ),
    ] = None
    open_page: Annotated[bool, option("", "Open the page in a browser.", "open")] = False


def _report(options: ReportOptions) -> None:
    """Turn runs into one HTML page, Markdown, CSV and more, computed from their records.

    \b
    crossover report runs/ID                    # runs/ID/report/index.html
    crossover report runs/ID --rate 0.5         # and whether 0.5 requests/s are held
    crossover report runs/ID --check 'capacity("1b") >= 0.5'    # for CI: exit status 0 or 1
    """
    if options.rate is not None and not options.rate > 0:
        raise ReportError(f"--rate must be above 0 requests/s, got {options.rate}")
    if len({folder.resolve() for folder in options.runs}) < len(options.runs):
        raise ReportError("the same run is named twice")
    groups = [[folder] for folder in options.runs] if options.separate else [options.runs]
    if options.as_json and len(groups) > 1:
        raise ReportError("--json prints one report: leave --separate out")
    passed = [_one(group, options) for group in groups]
    if not all(passed):
        raise typer.Exit(1)


report = command_of(ReportOptions, _report)


def _one(group: list[Path], options: ReportOptions) -> bool:
    """A report; whether all that is to be checked is so."""
    from reports.charts.figure import draws, missing_charts
    from reports.write import Asked, as_json, checked, read, write

    formats = _formats(options)
    if options.formats is None and not options.png and "html" in formats and not draws():
        typer.echo(f"No page: {missing_charts('it needs')}", err=True)
        formats = tuple(name for name in formats if name != "html")
    asked = Asked(
        formats=formats,
        rate=options.rate,
        slo=options.slo,
        ttft_seconds=options.ttft,
        tpot_seconds=options.tpot,
        target=options.target,
        machines=tuple(options.machine or ()),
        say=partial(typer.echo, err=True),
        predicts=bool(formats) or options.as_json,
        plan=options.plan,
        reference=options.reference,
    )
    found = read(group, asked)
    checks = checked(found, options.checks or ())
    if options.as_json:
        typer.echo(as_json(found), nl=False)
    else:
        typer.echo(f"\n{found.headline}\n")
    if asked.formats:
        folder = options.out or group[0] / "report"
        if options.out is None and folder.is_symlink():  # a stranger's run would say where to
            raise ReportError(f"{folder} is a link; --out says where to write")
        if options.separate and options.out is not None:
            folder = options.out / group[0].resolve().name
        main = write(found, folder, asked)
        typer.echo(f"Report: {main}", err=options.as_json)
        if options.open_page and main.suffix == ".html":
            webbrowser.open(main.resolve().as_uri())
    for one in checks:
        state = {True: "passed", False: "FAILED", None: "NOT KNOWN, so not passed"}[one.passed]
        typer.echo(f"{state}: {one.text}  [{'; '.join(one.values)}]", err=options.as_json)
    return all(one.passed for one in checks)


def _formats(options: ReportOptions) -> tuple[str, ...]:
    usual = "" if options.as_json or options.checks else USUAL
    text = usual if options.formats is None else options.formats
    asked = [name.strip() for name in text.split(",") if name.strip()]
    if set(asked) - set(FORMATS) or (not asked and options.formats is not None):
        raise ReportError(f"--format {options.formats!r} is none of {', '.join(FORMATS)}")
    return tuple(dict.fromkeys([*asked, *(["png"] if options.png else [])]))

"""`crossover report RUN`: writes the page and files of a run and prints the answer."""

from __future__ import annotations

import webbrowser
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import typer

from crossover.reports.errors import MissingPackage, ReportError
from crossover.serving.cli.command_of_options import command_of

if TYPE_CHECKING:
    from crossover.reports.answers.model_answers import ModelAnswer
    from crossover.reports.report_data import ReportData

FORMATS = ("html", "md", "csv", "json", "png", "yaml")
DEFAULT_FORMATS = "html,md,csv,yaml"


class ReportOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The command line of `crossover report`."""

    run: Path
    out: Path | None = None
    formats: str | None = None
    png: bool = False
    slo: str | None = None
    cores_for: str | None = None
    checks: list[str] | None = None
    share: Path | None = None
    as_json: bool = False
    open_page: bool = False


def _report(options: ReportOptions) -> None:
    """Turn a run into an HTML page, Markdown and CSV, computed from its records.

    \b
    crossover report runs/ID --png     # runs/ID/report: index.html, report.png
    crossover report runs/ID --check "1b:capacity>=0.5"     # status 0 or 1
    """
    # Imported here, so that --help is quick.
    from crossover.loadtests.load_generator.load_options import parse_slo_option
    from crossover.reports.answers.check_conditions import check_condition
    from crossover.reports.answers.first_screen import first_screen_of
    from crossover.reports.answers.model_answers import answers_of
    from crossover.reports.render.json_and_csv import as_json
    from crossover.reports.report_data import read_report

    formats = _formats(options)
    if options.share is not None:
        from crossover.reports.render.export_run import export_machine, export_run

        _check_alone(options)
        export = export_machine if options.share.suffix == ".json" else export_run
        for line in export(options.run, options.share):
            typer.echo(line)
        return
    slo = None if options.slo is None else parse_slo_option(options.slo)
    data = read_report(options.run, slo)
    answers = answers_of(data)
    if options.as_json:
        typer.echo(as_json(data, answers).decode(), nl=False)
    else:
        screen = first_screen_of(data, answers)
        typer.echo(screen.headline)
        if screen.prefix_reuse:
            typer.echo(screen.prefix_reuse)
        typer.echo(screen.basis)
    if options.cores_for is not None:
        from crossover.reports.answers.cores_needed import cells_by_cores, least_cores, parse_rate

        rate, rows = parse_rate(options.cores_for), cells_by_cores(data)
        if not rows:
            raise ReportError(
                "--cores-for needs a run whose server.cores is a list, such as cores = [1, 2]."
            )
        for sentence in least_cores(rows, rate):
            typer.echo(sentence, err=options.as_json)
    checks = [check_condition(condition, answers) for condition in options.checks or ()]
    for check in checks:
        typer.echo(f"{'ok  ' if check.holds else 'FAIL'}  {check.text}", err=options.as_json)
    if not all(check.holds for check in checks):
        raise typer.Exit(1)
    asks_for_files = options.formats or options.png or options.out or options.open_page
    prints_only = options.as_json or (checks and not asks_for_files)
    if not prints_only:
        _write(options, data, answers, formats)


report = command_of(ReportOptions, _report)


def _write(
    options: ReportOptions, data: ReportData, answers: list[ModelAnswer], formats: list[str]
) -> None:
    """Write the files and print their paths; without the packages for charts, write no page."""
    from crossover.reports.render.report_files import write_report

    folder = options.out or options.run / "report"
    try:
        written = write_report(data, answers, folder, formats)
    except MissingPackage as problem:
        if options.formats is not None or options.png:
            raise
        typer.echo(f"No page: {problem}", err=True)
        written = write_report(data, answers, folder, ["md", "csv", "yaml"])
    for path in written:
        typer.echo(str(path))
    if options.open_page:
        webbrowser.open(written[0].resolve().as_uri())


def _check_alone(options: ReportOptions) -> None:
    """Raises ReportError for an option beside --share, which writes no report."""
    others = {
        "--out": options.out,
        "--format": options.formats,
        "--png": options.png,
        "--slo": options.slo,
        "--cores-for": options.cores_for,
        "--check": options.checks,
        "--json": options.as_json,
        "--open": options.open_page,
    }
    for name, value in others.items():
        if value:
            raise ReportError(f"{name} cannot be combined with --share, which writes no report")


def _formats(options: ReportOptions) -> list[str]:
    """Return the formats to write. Raises ReportError for an unknown one."""
    formats = [
        name.strip() for name in (options.formats or DEFAULT_FORMATS).split(",") if name.strip()
    ]
    unknown = [name for name in formats if name not in FORMATS]
    if unknown:
        raise ReportError(f"--format {unknown[0]!r} is not one of {', '.join(FORMATS)}")
    if options.png and "png" not in formats:
        formats.append("png")
    return formats

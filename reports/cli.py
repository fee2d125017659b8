"""crossover report RUN...: options in, headline and path out."""

from __future__ import annotations

import inspect
import webbrowser
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from loadtests.metrics.slo import SLO_PRESETS
from reports.errors import ReportError

FORMATS = ("html", "md", "csv", "png", "svg")
PRESETS = ", ".join(SLO_PRESETS)


def _limit(text: str) -> Any:
    return typer.Option(help=text, show_default=False)


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of `crossover report`."""

    runs: Annotated[list[Path], typer.Argument(help="Run folders: runs/<id>.", show_default=False)]
    out: Annotated[
        Path | None, _limit("Where to write (default: `report` in the first run's folder).")
    ] = None
    formats: Annotated[
        str, typer.Option("--format", help=f"What to write, of {', '.join(FORMATS)}.")
    ] = "html,md,csv"
    png: Annotated[bool, typer.Option("--png", help="Write every chart as PNG too.")] = False
    rate: Annotated[
        float | None, _limit("The requests/s that you need: drawn into the map and answered.")
    ] = None
    slo: Annotated[str | None, _limit(f"Judge by another SLO than the run's: {PRESETS}.")] = None
    ttft: Annotated[float | None, _limit("Another limit for the first token, in seconds.")] = None
    tpot: Annotated[float | None, _limit("Another limit for the time per token, in s.")] = None
    target: Annotated[float | None, _limit("Another share of good requests, 0 to 1.")] = None
    separate: Annotated[
        bool, typer.Option("--separate", help="A report for each run, for machines that differ.")
    ] = False
    open_page: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False


def report(**given: Any) -> None:
    """Turn runs into one HTML page, Markdown and CSV, computed from their records."""
    from reports.write import Asked, write_report

    options = Options(**given)
    if options.rate is not None and not options.rate > 0:
        raise ReportError(f"--rate must be above 0 requests/s, got {options.rate}")
    if len({folder.resolve() for folder in options.runs}) < len(options.runs):
        raise ReportError("the same run is named twice")
    asked = Asked(
        formats=_formats(options),
        rate=options.rate,
        slo=options.slo,
        ttft_seconds=options.ttft,
        tpot_seconds=options.tpot,
        target=options.target,
    )
    for group in [[folder] for folder in options.runs] if options.separate else [options.runs]:
        folder = options.out or group[0] / "report"
        if options.separate and options.out is not None:
            folder = options.out / group[0].resolve().name
        headline, main = write_report(group, folder, asked)
        typer.echo(f"\n{headline}\n\nReport: {main}")
        if options.open_page and main.suffix == ".html":
            webbrowser.open(main.resolve().as_uri())


def _formats(options: Options) -> tuple[str, ...]:
    asked = [name.strip() for name in options.formats.split(",") if name.strip()]
    if set(asked) - set(FORMATS) or not asked:
        raise ReportError(f"--format {options.formats!r} is none of {', '.join(FORMATS)}")
    return tuple(dict.fromkeys([*asked, *(["png"] if options.png else [])]))


def _parameters() -> list[inspect.Parameter]:
    hints = get_type_hints(Options, include_extras=True)
    return [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if field.name == "runs" else field.default,
            annotation=hints[field.name],
        )
        for field in fields(Options)
    ]


report.__signature__ = inspect.Signature(_parameters())  # type: ignore[attr-defined]

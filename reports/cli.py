"""crossover report RUN...: runs in, a page, Markdown, CSV and pictures out. Only this file writes."""

from __future__ import annotations

import webbrowser
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from loadtests.slo import PROMISES, Promise
from loadtests.store import write_atomically
from reports.errors import ReportError

FORMATS = ("html", "md", "csv", "png", "svg")
DEFAULT_FORMATS = "html,md,csv"


def report(
    runs: Annotated[list[Path], typer.Argument(help="Run folders: runs/<id>.", show_default=False)],
    out: Annotated[
        Path | None, typer.Option(help="Where to write; the first run's folder `report` by default.", show_default=False)
    ] = None,
    formats: Annotated[str, typer.Option("--format", help=f"What to write, of {', '.join(FORMATS)}.")] = DEFAULT_FORMATS,
    png: Annotated[bool, typer.Option("--png", help="Write every chart as PNG too.")] = False,
    rate: Annotated[
        float | None, typer.Option(help="The requests/s that you need: drawn into the map and answered.", show_default=False)
    ] = None,
    promise: Annotated[
        str | None, typer.Option(help=f"Judge by another promise than the run's: {', '.join(PROMISES)}.", show_default=False)
    ] = None,
    ttft: Annotated[float | None, typer.Option(help="Another limit for the first token, in seconds.", show_default=False)] = None,
    tpot: Annotated[float | None, typer.Option(help="Another limit for the time per token, in seconds.", show_default=False)] = None,
    target: Annotated[float | None, typer.Option(help="Another share of requests that must be good, 0 to 1.", show_default=False)] = None,
    separate: Annotated[bool, typer.Option("--separate", help="A report for each run, for machines that differ.")] = False,
    open_page: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
) -> None:
    """Turn runs into one HTML page, Markdown and CSV, computed from their records."""
    wanted = _formats(formats, png)
    if rate is not None and not rate > 0:
        raise ReportError(f"--rate must be above 0 requests/s, got {rate}")
    if len({folder.resolve() for folder in runs}) < len(runs):
        raise ReportError("the same run is named twice")
    groups = [[folder] for folder in runs] if separate else [list(runs)]
    for group in groups:
        folder = (out or group[0] / "report") if not separate or out is None else out / group[0].resolve().name
        headline, main = write_report(group, folder, wanted, rate=rate, changes=_Changes(promise, ttft, tpot, target))
        typer.echo(f"\n{headline}\n")
        typer.echo(f"Report: {main}")
        if open_page and main.suffix == ".html":
            webbrowser.open(main.resolve().as_uri())


class _Changes(msgspec.Struct, frozen=True):
    """What the command line changes in a run's promise; None: nothing."""

    preset: str | None = None
    ttft_seconds: float | None = None
    tpot_seconds: float | None = None
    target: float | None = None

    def apply(self, own: Promise) -> Promise:
        if self.preset is not None and self.preset not in PROMISES:
            raise ReportError(f"promise {self.preset!r} is not one of {', '.join(PROMISES)}")
        base = own if self.preset is None else PROMISES[self.preset]
        values = {name: getattr(self, name) for name in ("ttft_seconds", "tpot_seconds", "target") if getattr(self, name) is not None}
        if not values:
            return base
        renamed = {"name": f"{base.name} (changed)"} if values.keys() - {"target"} and not base.name.endswith("(changed)") else {}
        try:
            return msgspec.structs.replace(base, **values, **renamed)
        except ValueError as problem:
            raise ReportError(f"no such promise: {problem}") from problem


def write_report(
    folders: Sequence[Path], out: Path, formats: Sequence[str], *, rate: float | None = None, changes: _Changes | None = None
) -> tuple[str, Path]:
    """Reads the runs, writes the report into `out`; returns the headline and the main file. Raises ReportError."""
    from reports import markdown, page, tables
    from reports.capacity import promise_of, read_records, read_run
    from reports.crossover import crossover
    from reports.figures import figures
    from reports.merge import merged

    changes = changes or _Changes()
    run = merged([read_run(folder, changes.apply(promise_of(read_records(folder).manifest))) for folder in folders])
    found = crossover(run, rate)
    drawn = figures(run, found)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise ReportError(f"{out} cannot be made: {problem.strerror}") from problem
    files: dict[str, bytes] = {}
    if "html" in formats:
        files["index.html"] = page.page(run, found, drawn).encode()
    images = {figure.slug: f"{figure.slug}.{kind}" for kind in ("svg", "png") if kind in formats for figure in drawn}
    for figure in drawn:
        if "png" in formats:
            files[f"{figure.slug}.png"] = figure.png()
        if "svg" in formats:
            files[f"{figure.slug}.svg"] = figure.svg().encode()
    if "md" in formats:
        files["report.md"] = markdown.markdown(run, found, drawn, images).encode()
    if "csv" in formats:
        files |= {
            "cells.csv": tables.to_csv(tables.cell_records(run)).encode(),
            "levels.csv": tables.to_csv(tables.level_records(run)).encode(),
            "gpus.csv": tables.to_csv(tables.gpu_records(found)).encode(),
        }
    for name, data in files.items():
        try:
            write_atomically(out / name, data)
        except OSError as problem:
            raise ReportError(f"{out / name} cannot be written: {problem.strerror}") from problem
    main = next(name for name in ("index.html", "report.md", *files) if name in files)
    return found.headline, out / main


def _formats(text: str, png: bool) -> list[str]:
    asked = [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in asked if name not in FORMATS]
    if unknown or not asked:
        raise ReportError(f"--format {text!r} is none of {', '.join(FORMATS)}")
    return list(dict.fromkeys(asked + (["png"] if png else [])))

"""Runs in; page, Markdown, JSON, CSV, Parquet and pictures out. Only this file writes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from loadtests.calibrate.machine_file import BadMachineFile
from loadtests.metrics.slo import SLO_PRESETS, Slo
from models.manifest import write_atomically
from reports.charts.figure import Figure, draws, missing_charts
from reports.check import Checked, check
from reports.elsewhere import elsewhere, gpu_capacities
from reports.errors import ReportError
from reports.findings import Crossover, crossover
from reports.merge import merged
from reports.numbers import RunNumbers
from reports.plan.file import read_plan
from reports.plan.ranking import Plan
from reports.plan.sources import planned
from reports.planning.calibrated import CalibratedMachine, load_machine
from reports.reference.results import beside
from reports.render import document, markdown, parquet, tables
from reports.render.elsewhere import elsewhere_records
from reports.run import numbers_of, read_records, slo_of
from reports.sentences import headline

DRAWN = frozenset({"html", "png", "svg"})


class Asked(msgspec.Struct, frozen=True):
    """What to report and how; the limits change the run's SLO where they are given."""

    formats: tuple[str, ...]
    rate: float | None = None
    slo: str | None = None
    ttft_seconds: float | None = None
    tpot_seconds: float | None = None
    target: float | None = None
    machines: tuple[Path, ...] = ()  # files of `crossover calibrate`
    say: Callable[[str], None] = lambda text: None  # progress
    predicts: bool = True  # what GPUs would hold
    plan: Path | None = None  # a plan file; the runs are machines of it
    reference: bool = False  # shipped results beside the run's

    def apply(self, own: Slo) -> Slo:
        """The SLO to judge by. Raises ReportError."""
        if self.slo is not None and self.slo not in SLO_PRESETS:
            raise ReportError(f"SLO {self.slo!r} is not one of {', '.join(SLO_PRESETS)}")
        base = own if self.slo is None else SLO_PRESETS[self.slo]
        names = ("ttft_seconds", "tpot_seconds", "target")
        changed = {name: value for name in names if (value := getattr(self, name)) is not None}
        name = base.name
        if changed.keys() - {"target"} and not name.endswith("(changed)"):
            name = f"{name} (changed)"
        try:
            return msgspec.structs.replace(base, name=name, **changed)
        except ValueError as problem:
            raise ReportError(f"no such SLO: {problem}") from problem


class Found(msgspec.Struct, frozen=True):
    """The runs as numbers, and what they say."""

    folders: tuple[Path, ...]
    run: RunNumbers
    crossover: Crossover
    plan: Plan | None = None

    @property
    def headline(self) -> str:
        return headline(self.run, self.crossover)


def read(folders: Sequence[Path], asked: Asked) -> Found:
    """The runs, judged as asked. Raises ReportError, before any work where nothing can draw."""
    if DRAWN & set(asked.formats) and not draws():
        raise missing_charts("the page and its charts need")
    records = map(read_records, folders)
    run = merged([numbers_of(one, asked.apply(slo_of(one.manifest))) for one in records])
    machines = [_machine(path) for path in asked.machines]
    question = None
    if asked.plan is not None:
        own = [{"run": str(folder.resolve())} for folder in folders]
        own += [{"file": str(path.resolve())} for path in asked.machines]
        question = read_plan(asked.plan, {"machines": own})
    held = gpu_capacities(run, asked.say) if asked.predicts else {}
    found = crossover(run, asked.rate, held)
    if machines:
        found = msgspec.structs.replace(found, elsewhere=elsewhere(run, machines, asked.say))
    if asked.reference:
        found = msgspec.structs.replace(found, references=beside(run))
    plan = None
    if question is not None:
        asked.say("simulating the plan")
        plan = planned(question)
    return Found(tuple(folders), run, found, plan)


def _machine(path: Path) -> CalibratedMachine:
    try:
        return load_machine(path)
    except BadMachineFile as problem:
        raise ReportError(f"--machine {problem}") from problem


def write_report(folders: Sequence[Path], out: Path, asked: Asked) -> tuple[str, Path]:
    """Read the runs, write the report into `out`; headline and main file. Raises ReportError."""
    found = read(folders, asked)
    return found.headline, write(found, out, asked)


def checked(of: Found, conditions: Sequence[str]) -> list[Checked]:
    """Each condition, and whether it is so. Raises BadCheck."""
    return [check(text, of.run) for text in conditions]


def as_json(of: Found) -> bytes:
    """What the page says, as JSON."""
    return document.encoded(document.document(of.run, of.crossover, of.plan))


def write(of: Found, out: Path, asked: Asked) -> Path:
    """Write the report into `out`; its main file. Raises ReportError."""
    run, found = of.run, of.crossover
    drawn = _figures(of) if DRAWN & set(asked.formats) else ()
    files: dict[str, bytes] = {}
    if "html" in asked.formats:
        files["index.html"] = _page(of, drawn).encode()
    if "md" in asked.formats:
        kinds = [kind for kind in ("svg", "png") if kind in asked.formats]
        images = {one.slug: f"{one.slug}.{kind}" for kind in kinds for one in drawn}
        files["report.md"] = markdown.markdown(run, found, drawn, images, of.plan).encode()
    if "csv" in asked.formats:
        files["cells.csv"] = tables.to_csv(tables.cell_records(run)).encode()
        files["levels.csv"] = tables.to_csv(tables.level_records(run)).encode()
        files["gpus.csv"] = tables.to_csv(tables.gpu_records(found)).encode()
        if found.elsewhere:
            files["machines.csv"] = tables.to_csv(elsewhere_records(found)).encode()
    if "json" in asked.formats:
        files["report.json"] = as_json(of)
    if "parquet" in asked.formats:
        files |= _parquet(of)
    if "png" in asked.formats:
        files |= {f"{figure.slug}.png": figure.png() for figure in drawn}
    if "svg" in asked.formats:
        files |= {f"{figure.slug}.svg": figure.svg().encode() for figure in drawn}
    _write(out, files)
    return out / next(iter(files), "")


def _figures(of: Found) -> tuple[Figure, ...]:
    from reports.charts.figures import figures

    return figures(of.run, of.crossover)


def _page(of: Found, drawn: tuple[Figure, ...]) -> str:
    from reports.render.page import page

    return page(of.run, of.crossover, drawn, of.plan)


def _parquet(of: Found) -> dict[str, bytes]:
    return {
        "requests.parquet": parquet.requests_parquet(map(read_records, of.folders)),
        "cells.parquet": parquet.to_parquet(tables.cell_records(of.run)),
        "levels.parquet": parquet.to_parquet(tables.level_records(of.run)),
        "gpus.parquet": parquet.to_parquet(tables.gpu_records(of.crossover)),
    }


def _write(out: Path, files: dict[str, bytes]) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
        for name, data in files.items():
            write_atomically(out / name, data)
    except OSError as problem:
        raise ReportError(
            f"{problem.filename or out} cannot be written: {problem.strerror}"
        ) from problem

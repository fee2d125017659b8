"""Runs in; page, Markdown, CSV and pictures out. Only this file writes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from loadtests.metrics.slo import SLO_PRESETS, Slo
from models.manifest import write_atomically
from reports.charts.figures import figures
from reports.errors import ReportError
from reports.findings import crossover
from reports.merge import merged
from reports.render import markdown, page, tables
from reports.run import numbers_of, read_records, slo_of
from reports.sentences import headline


class Asked(msgspec.Struct, frozen=True):
    """What to report and how; the limits change the run's SLO where they are given."""

    formats: tuple[str, ...]
    rate: float | None = None
    slo: str | None = None
    ttft_seconds: float | None = None
    tpot_seconds: float | None = None
    target: float | None = None

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


def write_report(folders: Sequence[Path], out: Path, asked: Asked) -> tuple[str, Path]:
    """Read the runs, write the report into `out`; headline and main file. Raises ReportError."""
    records = map(read_records, folders)
    run = merged([numbers_of(one, asked.apply(slo_of(one.manifest))) for one in records])
    found = crossover(run, asked.rate)
    drawn = figures(run, found)
    files: dict[str, bytes] = {}
    if "html" in asked.formats:
        files["index.html"] = page.page(run, found, drawn).encode()
    if "md" in asked.formats:
        kinds = [kind for kind in ("svg", "png") if kind in asked.formats]
        images = {one.slug: f"{one.slug}.{kind}" for kind in kinds for one in drawn}
        files["report.md"] = markdown.markdown(run, found, drawn, images).encode()
    if "csv" in asked.formats:
        files["cells.csv"] = tables.to_csv(tables.cell_records(run)).encode()
        files["levels.csv"] = tables.to_csv(tables.level_records(run)).encode()
        files["gpus.csv"] = tables.to_csv(tables.gpu_records(found)).encode()
    if "png" in asked.formats:
        files |= {f"{figure.slug}.png": figure.png() for figure in drawn}
    if "svg" in asked.formats:
        files |= {f"{figure.slug}.svg": figure.svg().encode() for figure in drawn}
    _write(out, files)
    return headline(run, found), out / next(iter(files), "")


def _write(out: Path, files: dict[str, bytes]) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
        for name, data in files.items():
            write_atomically(out / name, data)
    except OSError as problem:
        raise ReportError(
            f"{problem.filename or out} cannot be written: {problem.strerror}"
        ) from problem

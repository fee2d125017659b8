"""The page: one offline HTML file with its charts drawn in.

html = page(data)               # str, up to 1.2 MB
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib import resources
from typing import Any

import jinja2
import msgspec
from markupsafe import Markup

from models import formatting
from reports.chart_style import dark_rules, svg
from reports.headline import Answer, basis, headline, machine_words
from reports.report_data import CellData, ReportData
from reports.report_warnings import alerts_of, warnings_of
from reports.sections.all_sections import SECTIONS
from reports.sections.crossover_map import crossover_map
from reports.sections.latency_curves import latency_curves
from reports.sections.section import Chart, Section
from reports.slo_sliders import lattice_of
from reports.tables import HEADS, answer_row, levels_table

KEYS = ("model", "alone", "holds", "limit", "engine", "over")
WIDE, HALF = 900, 430  # pixels of a drawn chart
FACTS = {
    "cpu_model": "CPU",
    "isa": "instruction sets",
    "allowed_cores": "usable cores",
    "logical_cores": "logical cores",
    "memory_total_bytes": "memory",
    "gpus": "GPUs",
    "virtualisation": "virtualisation",
    "system": "system",
}


def sections_of(data: ReportData, answers: Sequence[Answer]) -> list[Section]:
    """Every topic of which something is known."""
    return [section for make in SECTIONS if (section := make(data, answers)) is not None]


def page(data: ReportData, told: Sequence[Answer], sections: Sequence[Section]) -> str:
    """The whole page."""
    lattice = lattice_of(told, data.slo)
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    featured = featured_cell(told)
    curves = latency_curves(featured, data.slo) if featured is not None else ()
    view: dict[str, Any] = {
        "run": ", ".join(data.run_ids),
        "headline": headline(told, data),
        "basis": basis(data),
        "alerts": alerts_of(data),
        "heads": HEADS,
        "names": KEYS,
        "rows": [answer_row(one, data.slo) for one in told],
        "map": _drawn(crossover_map(told)),
        "curves": [_drawn(chart) for chart in curves],
        "featured": "" if featured is None else _title(featured, told),
        "sliders": lattice is not None,
        "levels": levels_table(data),
        "counts": f"{formatting.count(data.requests)} requests counted",
        "warnings": warnings_of(data),
        "machine": machine_words(data),
        "facts": facts_of(data),
        "folder": ", ".join(data.folders),
        "commands": commands_of(data),
        "campaign": data.manifest.campaign_text,
        "confidence": formatting.share(data.slo.confidence),
    }
    return environment.from_string(_asset("report.html")).render(
        page=view,
        sections=[_with_drawings(section) for section in sections],
        css=Markup(_asset("report.css") + dark_rules()),  # nosec: the project's own assets
        js=Markup(_asset("report.js")),  # nosec
        lattice=Markup(_json(lattice)),  # nosec: `<` is escaped
    )


def featured_cell(answers: Sequence[Answer]) -> CellData | None:
    """The largest model that the CPU serves, else the first that was measured."""
    served = [one.cell for one in answers if one.is_served and one.cell.loaded]
    served = served or [one.cell for one in answers if one.is_served]
    measured = [one.cell for one in answers if one.cell.loaded]
    return served[-1] if served else next(iter(measured), None)


def facts_of(data: ReportData) -> list[tuple[str, str]]:
    """Of the machine and the software, in words."""
    found = []
    for key, name in FACTS.items():
        value: Any = data.facts.get(key)
        if value in (None, [], "", ()):
            continue
        if key.endswith("_bytes"):
            value = formatting.size(value)
        if key == "gpus":
            value = [one.get("name") for one in value]
        said = ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
        found.append((name, said))
    found += [(name, version) for name, version in data.manifest.versions.items()]
    commit = data.manifest.git_commit or "not known"
    return [*found, ("crossover", f"{data.manifest.crossover_version}, commit {commit}")]


def commands_of(data: ReportData) -> str:
    """What makes such a run, and this page of it."""
    runs = " ".join(data.folders)
    return f"{' '.join(data.manifest.command)}\ncrossover report {runs}"


def _title(cell: CellData, answers: Sequence[Answer]) -> str:
    return next(one.title for one in answers if one.cell is cell)


class _Drawn(msgspec.Struct, frozen=True):
    """A chart with its SVG."""

    label: str
    half: bool
    drawn: Markup


def _drawn(chart: Chart | None) -> _Drawn | None:
    if chart is None:
        return None
    text = chart.svg or svg(chart.spec or {}, HALF if chart.half else WIDE)
    body = f'<div id="{chart.slug}">{text}</div>' if chart.svg else text
    return _Drawn(chart.label, chart.half, Markup(body))  # nosec: drawn by us, names escaped


def _with_drawings(section: Section) -> dict[str, Any]:
    charts = [_drawn(chart) for chart in section.charts]
    return {**msgspec.structs.asdict(section), "charts": charts}


def _asset(name: str) -> str:
    return resources.files("reports").joinpath("assets", name).read_text("utf-8")


def _json(value: Any) -> str:
    """For a script element: no `<` ends it early."""
    return json.dumps(msgspec.to_builtins(value), separators=(",", ":")).replace("<", "\\u003c")

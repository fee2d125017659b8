"""The page: one offline HTML file with its charts drawn in.

html = page(data, answers, sections_of(data, answers))               # str, up to 1.2 MB
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from importlib import resources
from typing import Any

import jinja2
import msgspec
from markupsafe import Markup, escape

from crossover.models import formatting
from crossover.reports.answer_tables import answer_row, columns_of, levels_table, side_heads
from crossover.reports.chart_style import dark_rules, svg
from crossover.reports.first_screen_lines import first_screen_lines
from crossover.reports.headline import Answer, basis, headline, whole_machine_words
from crossover.reports.report_data import CPU, GPU, SIDES, CellData, ReportData
from crossover.reports.report_warnings import alerts_of, warnings_of
from crossover.reports.sections.all_sections import SECTIONS
from crossover.reports.sections.crossover_map import crossover_map
from crossover.reports.sections.latency_curves import latency_curves
from crossover.reports.sections.section import Chart, Section
from crossover.reports.slo_sliders import lattice_of

MAP_TITLES = {
    (): "Which rates this machine serves",
    (CPU,): "Which rates the CPU serves, and where a GPU takes over",
    (GPU,): "Which rates this machine's GPU serves",
    (CPU, GPU): "Which rates the CPU serves, and where this machine's GPU takes over",
}
WIDE, HALF = 520, 430  # pixels of a drawn chart; on a phone its text can still be read
FACTS = {
    "cpu_model": "CPU",
    "isa": "ISA extensions",
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
    lattice = lattice_of(told, data)
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"code": _code, "unbroken": _unbroken}
    featured = [cell for side in SIDES if (cell := _featured(told, side)) is not None]
    the_map, on_phone = crossover_map(told, data), crossover_map(told, data, is_narrow=True)
    if the_map and on_phone:  # CSS shows one of them
        the_map = msgspec.structs.replace(the_map, svg=the_map.svg + on_phone.svg)
    columns = columns_of(data)
    view: dict[str, Any] = {
        "run": data.manifest.run_id,
        "headline": headline(told, data),
        "basis": basis(data),
        "alerts": alerts_of(data),
        "sides": side_heads(data),
        "columns": columns,
        "rows": [answer_row(one, data) for one in told],
        "lines": first_screen_lines(data, told),
        "map": None if the_map is None else _drawn(the_map),
        "map_title": MAP_TITLES[data.sides],
        "devices": data.sides,
        "has_forecast": the_map is not None and 'data-bar="forecast"' in the_map.svg,
        "curves": [
            {"title": f"{cell.name} ({cell.engine_words})", "charts": list(map(_drawn, charts))}
            for cell in featured
            if (charts := latency_curves(cell, data.slo))
        ],
        "sliders": lattice is not None,
        "levels": levels_table(data),
        "counts": f"{formatting.count(data.requests)} requests counted",
        "warnings": warnings_of(data),
        "machine": whole_machine_words(data),
        "facts": _facts(data),
        "folder": data.folder,
        "commands": f"{' '.join(data.manifest.command)}\ncrossover report {data.folder}",
        "campaign": data.manifest.campaign_text,
        "confidence": formatting.share(data.slo.confidence),
    }
    return environment.from_string(_asset("report.html")).render(
        page=view,
        sections=[
            {**msgspec.structs.asdict(one), "charts": [_drawn(chart) for chart in one.charts]}
            for one in sections
        ],
        css=Markup(_asset("report.css") + dark_rules()),  # noqa: S704  # our own file
        js=Markup(_asset("report.js")),  # noqa: S704  # our own file
        lattice=Markup(_json(lattice)),  # noqa: S704  # `<` is escaped
    )


def _code(text: str) -> Markup:
    """What stands between backticks as code."""
    code = re.sub(r"`(.+?)`", r"<code>\1</code>", str(escape(text)))
    return Markup(code)  # noqa: S704  # the text is escaped


def _unbroken(text: str) -> Markup:
    """No line ends within an interval."""
    unbroken = re.sub(r"(\S+–\S+)", r'<span class="nb">\1</span>', str(escape(text)))
    return Markup(unbroken)  # noqa: S704  # the text is escaped


def _featured(answers: Sequence[Answer], side: str) -> CellData | None:
    """On a device: the largest model that it serves, one with load levels first; else one that was
    measured under load."""
    cells = [cell for one in answers if (cell := one.side(side)) is not None]
    served = [cell for cell in cells if cell.is_served]
    loaded = [cell for cell in cells if cell.loaded]
    both = [cell for cell in served if cell in loaded]
    return both[-1] if both else served[-1] if served else next(iter(loaded), None)


def _facts(data: ReportData) -> list[tuple[str, str]]:
    """Of the machine and the software, in words."""
    found = []
    for key, name in FACTS.items():
        value: Any = data.facts.get(key)
        if value in (None, [], "", ()):
            continue
        if key.endswith("_bytes"):
            value = formatting.size(value)
        if key == "gpus":
            value = [_gpu_in_words(one) for one in value]
        said = ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
        found.append((name, said))
    version = data.manifest.crossover_version
    return [*found, *data.manifest.versions.items(), ("crossover", version)]


def _gpu_in_words(gpu: dict[str, Any]) -> str:
    """`NVIDIA H200 (140 GiB, power limit 700 W)`."""
    watts = gpu.get("power_limit_watts")
    known = [
        formatting.size(gpu["total_bytes"]) if gpu.get("total_bytes") else "",
        f"power limit {watts:.0f} W" if watts else "",
    ]
    more = ", ".join(filter(None, known))
    return f"{gpu.get('name')} ({more})" if more else str(gpu.get("name"))


def _drawn(chart: Chart) -> dict[str, Any]:
    """A chart with its SVG."""
    if chart.spec is None:
        body = f'<div id="{chart.slug}">{chart.svg}</div>'
    else:
        body = svg(chart.spec, HALF if chart.half else WIDE)
    drawn = Markup(body)  # noqa: S704  # drawn by us
    return {"label": chart.label, "half": chart.half, "drawn": drawn}


def _asset(name: str) -> str:
    return resources.files("crossover.reports").joinpath("assets", name).read_text("utf-8")


def _json(value: Any) -> str:
    """For a script element: no `<` ends it early."""
    return json.dumps(msgspec.to_builtins(value), separators=(",", ":")).replace("<", "\\u003c")

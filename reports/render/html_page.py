"""The page: one offline HTML file with its charts drawn in.

html = page(data, answers, sections_of(data, answers))      # str, up to 1.2 MB
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
from crossover.reports.answers.first_screen import first_screen_of
from crossover.reports.answers.headline import whole_machine_words
from crossover.reports.answers.model_answers import ModelAnswer
from crossover.reports.answers.report_warnings import warnings_of
from crossover.reports.answers.slo_sliders import lattice_of
from crossover.reports.chart_style import dark_rules, svg
from crossover.reports.report_data import ReportData
from crossover.reports.sections.all_sections import pictures_of
from crossover.reports.sections.levels_table import levels_table
from crossover.reports.sections.section import Chart, Section

WIDE, HALF = 460, 430  # pixels of a drawn chart; on a phone its text can still be read
_UNBROKEN = re.compile(
    r"\S+–\S+"
    r"|[\d.,]*\d (?:%|[mµ]?s|J|W|[KMG]i?B)(?![\w/])"
    r"|(?<!\S)(?=\S{1,20}(?:\s|$))[^\s<>\"]*-\d[^\s<>\"]*"  # a short name such as llama-3.2-1b
)
FACTS = {
    "cpu_model": "CPU",
    "isa": "ISA extensions",
    "allowed_cores": "usable cores",
    "logical_cores": "logical cores",
    "memory_total_bytes": "memory",
    "gpus": "GPUs",
    "virtualisation": "virtualization",
    "system": "system",
}


def page(data: ReportData, answers: Sequence[ModelAnswer], sections: Sequence[Section]) -> str:
    lattice = lattice_of(answers, data)
    view: dict[str, Any] = {
        "run": data.manifest.run_id,
        "screen": first_screen_of(data, answers),
        "pictures": pictures_of(data, answers),
        "sliders": lattice is not None,
        "levels": levels_table(data),
        "counts": f"{formatting.count(data.request_count)} requests counted",
        "warnings": warnings_of(data),
        "machine": whole_machine_words(data),
        "facts": _facts(data),
        "folder": data.folder,
        "commands": f"{' '.join(data.manifest.command)}\ncrossover report {data.folder}",
        "campaign": data.manifest.campaign_text,
        "confidence": formatting.share(data.slo.confidence),
    }
    return render_template(
        "report.html",
        page=view,
        sections=sections,
        js=Markup(_asset("report.js")),  # noqa: S704  # our own file
        lattice=Markup(_json(lattice)),  # noqa: S704  # `<` is escaped
    )


def render_template(template: str, **values: object) -> str:
    """Return a page: a Jinja template of assets/, filled with `values` and the style of all
    pages."""
    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(_asset),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"code": _code, "unbroken": _unbroken, "drawn": _drawn}
    css = Markup(_asset("report.css") + dark_rules())  # noqa: S704  # our own file
    return environment.get_template(template).render(css=css, **values)


def _code(text: str) -> Markup:
    """Return the text with what stands between backticks as code."""
    code = re.sub(r"`(.+?)`", r"<code>\1</code>", str(escape(text)))
    return Markup(code)  # noqa: S704  # the text is escaped


def _unbroken(text: str) -> Markup:
    """Return the text so that no line breaks within an interval or the short name of a model, or
    between a number and its unit."""
    unbroken = re.sub(_UNBROKEN, r'<span class="nb">\g<0></span>', str(escape(text)))
    return Markup(unbroken)  # noqa: S704  # the text is escaped


def _facts(data: ReportData) -> list[tuple[str, str]]:
    """Return the names and values of what is known about the machine and the software."""
    facts = []
    for key, name in FACTS.items():
        value: Any = data.facts.get(key)
        if value in (None, [], "", ()):
            continue
        if key == "gpus":
            text = ", ".join(_gpu_in_words(gpu) for gpu in value)
        elif key.endswith("_bytes"):
            text = formatting.size(value)
        elif isinstance(value, list | tuple):
            text = ", ".join(map(str, value))
        else:
            text = str(value)
        facts.append((name, text))
    version = data.manifest.crossover_version
    return [*facts, *data.manifest.versions.items(), ("crossover", version)]


def _gpu_in_words(gpu: dict[str, Any]) -> str:
    """Return `NVIDIA H200 (140 GiB, power limit 700 W)`."""
    watts = gpu.get("power_limit_watts")
    details = [
        formatting.size(gpu["total_bytes"]) if gpu.get("total_bytes") else "",
        f"power limit {watts:.0f} W" if watts else "",
    ]
    in_brackets = ", ".join(filter(None, details))
    return f"{gpu.get('name')} ({in_brackets})" if in_brackets else str(gpu.get("name"))


def _drawn(chart: Chart) -> Markup:
    if chart.spec is None:
        drawing = f'<div id="{chart.slug}">{chart.svg}</div>'
    else:
        drawing = svg(chart.spec, HALF if chart.half else WIDE)
    return Markup(drawing)  # noqa: S704  # drawn by us


def _asset(name: str) -> str:
    return resources.files(__package__).joinpath("assets", name).read_text("utf-8")


def _json(value: Any) -> str:
    """Return JSON for a script element, which no `<` in it ends early."""
    return json.dumps(msgspec.to_builtins(value), separators=(",", ":")).replace("<", "\\u003c")

"""The report as one HTML file that needs no network.

    Path("index.html").write_text(page(run, found, figures(run, found)))

Every chart is in the page twice: drawn already (SVG, for print and for readers without JavaScript),
and as a Vega-Lite specification that the inlined Vega draws with tooltips. The capacities at other
limits travel along, computed here, so that the SLO can be moved.
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Iterator, Sequence
from importlib import resources
from typing import Any

import msgspec
from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from loadtests.capacity.words import in_short, in_words
from loadtests.records.events import CapacityStatus
from loadtests.simulation.prediction_words import ratio_words
from models import formatting
from models.formatting import model_title
from reports import sentences as words
from reports.accelerator.batching import batching_of
from reports.accelerator.costs import comparisons_of
from reports.charts.figure import Figure, vl_convert
from reports.charts.style import dark_rules
from reports.findings import Crossover, Takeover
from reports.numbers import RunNumbers
from reports.plan.ranking import Plan
from reports.render import engines, facts, lattice, references, tables
from reports.render.accelerator.batch_lattice import batch_lattice
from reports.render.accelerator.cost_lattice import cost_lattice
from reports.render.accelerator.sections import sections_of
from reports.render.elsewhere import (
    GPU_WORDS,
    WORDS,
    elsewhere_table,
    gpu_errors,
    gpu_rates_table,
)
from reports.render.plan_section import plan_section
from reports.run import search_config

GROUPS = (
    *("crossover", "alone", "latency", "throughput", "attainment", "memory"),
    *("phases", "batch", "formats", "energy", "cost", "fallback"),
)
# Group of figures -> the table with the numbers behind them.
TABLES_OF = {group: group for group in GROUPS} | {
    "crossover": "capacity",
    **dict.fromkeys(("alone", "latency", "throughput", "attainment"), "levels"),
}
CONTENTS = {
    "crossover": "Crossover",
    "latency": "Latency",
    "throughput": "Throughput",
    "memory": "Memory",
    "accelerator": "Accelerator",
    "gpu": "GPU",
    "elsewhere": "Other machines",
    "references": "Shipped results",
    "plan": "Plan",
    "levels": "Levels",
    "warnings": "Warnings",
    "repeat": "How to repeat",
}


class Card(msgspec.Struct, frozen=True):
    """One key figure."""

    name: str
    value: str
    note: str
    source: str = "measured here"


def page(
    run: RunNumbers, found: Crossover, drawn: Sequence[Figure], plan: Plan | None = None
) -> str:
    """The whole page."""
    live = bool(run.levels) and any(figure.group == "crossover" for figure in drawn)
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    specs = {figure.slug: figure.chart for figure in drawn}
    text = environment.from_string(_asset("page.html")).render(
        run=run,
        found=found,
        headline=words.headline(run, found),
        sentences=words.sentences(run, found),
        page=_values(run, found, drawn) | {"live": live},
        plan=None if plan is None else plan_section(plan),
        groups={name: [one for one in drawn if one.group == name] for name in GROUPS},
        svgs={figure.slug: Markup(_still(figure)) for figure in drawn},
        tables={
            "capacity": tables.capacity_table(run, found),
            "engines": engines.engine_table(run),
            "beside": engines.side_table(run),
            "levels": tables.level_table(run),
            "memory": tables.memory_table(found),
            "gpu": tables.gpu_table(found),
            "sources": tables.source_table(),
            "elsewhere": elsewhere_table(found),
            "references": (
                None
                if found.references is None
                else references.reference_table(run, found.references)
            ),
            "rates": gpu_rates_table(found),
        },
        sections=sections_of(run, found),
        specs=specs,
        specs_json=Markup(_json(specs)),
        lattice_json=Markup(_json(_lattice(run, found, drawn) if live else {})),
        bundle=Markup(_bundle(_asset("page.js"))) if specs else "",
        css=Markup(_asset("page.css") + dark_rules()),
        missing=formatting.NOT_MEASURED,
    )
    return text + "\n"


def _lattice(run: RunNumbers, found: Crossover, drawn: Sequence[Figure]) -> dict[str, Any]:
    """All that the sliders look up."""
    looked_up = lattice.lattice(run, found)
    held = {
        cell["key"]: [one["held"] for one in cell["found"]["values"] if one["held"]]
        for cell in looked_up["cells"]
    }
    return looked_up | {
        "batch": batch_lattice(batching_of(run), lattice.axes(run).tpot),
        "cost": cost_lattice(comparisons_of(run, found.capacities), held),
        "charts": {
            kind: {one.cell: one.slug for one in drawn if one.slug.startswith(f"{kind}-")}
            for kind in ("batch", "cost", "joules")
        },
    }


def cards(run: RunNumbers, found: Crossover) -> Iterator[Card]:
    """The key figures: largest model, the rate it holds, the next that does not, the GPU."""
    yield from _largest(run, found)
    yield _next(run, found)
    if found.takeover is not None:
        yield _gpu_card(found.takeover)


def _largest(run: RunNumbers, found: Crossover) -> Iterator[Card]:
    name = "Largest model with a confirmed rate"
    cell = found.largest
    if cell is None or cell.capacity is None:
        yield Card(name, "none", "of those that were measured")
        return
    others = sum(bool(other.held) for other in run.cells) - 1
    known = {0: "no other model has one", 1: "another model has one too"}
    note = known.get(others, f"{others} other models have one too")
    yield Card(name, model_title(cell.model), f"{cell.weight_format} with {cell.backend}; {note}")
    short = in_short(cell.capacity).removeprefix("holds ").capitalize()
    rest = in_words(cell.capacity).partition("(")[2].removesuffix(")")
    yield Card("It holds", short, f"{rest[:1].upper()}{rest[1:]}")
    if cell.predicted is not None:
        ratio = ratio_words(cell.predicted, cell.capacity)
        ends = formatting.rate_interval(cell.predicted.low, cell.predicted.high)
        note = "; ".join(part for part in (f"interval {ends}", ratio) if part)
        rate = formatting.requests(cell.predicted.rate)
        yield Card("It was predicted to hold", rate, note, "predicted")


def _next(run: RunNumbers, found: Crossover) -> Card:
    """The smallest model above that has no confirmed rate."""
    cell = next((one for one in (*found.between, found.first_not) if one is not None), None)
    if cell is None:
        return Card("Next larger model", "none", "the crossover lies beyond the models measured")
    name = model_title(cell.model)
    if cell.state == "skipped":
        return Card("Does not run here", name, cell.reason, "predicted")
    short = in_short(cell.capacity)
    if cell.status is CapacityStatus.NONE:
        why = words.why_at_no_rate(cell, run.slo)
        return Card(f"Holds {short}", name, f"{why[:1].upper()}{why[1:]}")
    why = in_words(cell.capacity).removeprefix(f"{short}: ")
    return Card(short.capitalize(), name, f"{why[:1].upper()}{why[1:]}")


def _gpu_card(found: Takeover) -> Card:
    """Memory, and the cheapest GPU that nothing rules out."""
    need = f"{formatting.size(found.need.total_bytes)} for {words.title(found.cell)}"
    judged = formatting.listing(words.judged_by(found))
    sure, best = found.surest, found.cheapest
    if sure is not None:
        price = formatting.dollars_per_hour(sure.dollars_per_hour)
        held = formatting.rate_with_interval(sure.estimate, sure.low, sure.high)
        note = f"{words.title(found.cell)}: {held} at {price}; the cheapest that is likely to"
        return Card("GPU that takes over", sure.name, note, "predicted")
    if best is None:
        return Card("GPU that may take over", "not known", f"{need}; by {judged}", "predicted")
    price = formatting.dollars_per_hour(best.device.dollars_per_hour)
    note = f"{need}; from {price}; the cheapest that nothing rules out by {judged}; not measured"
    return Card("GPU that may take over", best.device.name, note, "predicted")


# ---------------------------------------------------------------- what the template shows


def _values(run: RunNumbers, found: Crossover, drawn: Sequence[Figure]) -> dict[str, Any]:
    manifest, slo = run.manifest, run.slo
    names = words.names_of(run.cells)
    latency = [one for one in drawn if one.group == "latency"]
    pairs = {key: [one for one in latency if one.cell == key] for key in names}
    elsewhere = manifest.client_facts.get("hostname") != run.facts.get("hostname")
    campaign = msgspec.json.format(msgspec.json.encode(manifest.campaign), indent=2).decode()
    shown = {
        "gpu": bool(found.takeovers),
        "elsewhere": bool(found.elsewhere),
        "references": found.references is not None,
    }
    beside = found.references
    return {
        "version": manifest.crossover_version,
        "run_id": run.name,
        "created": facts.day(manifest.created),
        "slo_name": slo.name,
        "slo_source": words.slo_source(slo),
        "engines": engines.ENGINE_WORDS,
        "beside": engines.SIDE_WORDS,
        "quality": facts.quality_words(run),
        "confidence": formatting.share(search_config(manifest).confidence),
        "contents": [one for one in CONTENTS.items() if shown.get(one[0], True)],
        "tables_of": TABLES_OF,
        "cards": list(cards(run, found)),
        "serious": [warning for warning in run.warnings if warning.is_serious],
        "waited": _waited(run),
        "share": formatting.share(slo.target),
        "latency": [(names[key], pair) for key, pair in pairs.items() if pair],
        "elsewhere": WORDS,
        "references": references.WORDS,
        "others": "" if beside is None else references.others_in_words(beside),
        "rates": GPU_WORDS,
        "errors": gpu_errors(found),
        "takeovers": [_takeover(takeover) for takeover in found.takeovers],
        "counts": facts.counts_words(run),
        "folder": run.folder,
        "commands": facts.commands(run, found),
        "machine": facts.machine_facts(run.facts),
        "client_machine": facts.machine_facts(manifest.client_facts) if elsewhere else [],
        "software": facts.software(run),
        "campaign_text": manifest.campaign_text.strip() or campaign,
    }


def _waited(run: RunNumbers) -> str:
    """Why the sliders end; "" where every answer was waited for."""
    ends = lattice.axes(run)
    parts = [
        f"{formatting.seconds(limit)} {what}"
        for limit, what in ((ends.waited_ttft, "for a first token"), (ends.waited_tpot, "a token"))
        if limit is not None
    ]
    if not parts:
        return ""
    return f" Answers were waited for up to {formatting.listing(parts)}: the sliders end there."


def _takeover(found: Any) -> dict[str, str]:
    need, size = found.need, formatting.size
    parts = (
        f"weights {size(need.weight_bytes)}, KV cache {size(need.kv_bytes)}, "
        f"overhead {size(need.overhead_bytes)}; "
        f"with 16-bit weights {size(found.need_16bit.total_bytes)} in all"
    )
    return {"title": words.title(found.cell), "need": size(need.total_bytes), "parts": parts}


# ---------------------------------------------------------------- pieces


def _asset(name: str) -> str:
    return resources.files("reports.render").joinpath("assets", name).read_text("utf-8")


def _json(value: Any) -> str:
    """JSON that may stand inside a script element: no `<` begins anything there."""
    text = json.dumps(_rounded(value), separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    for letter in ("<", "\u2028", "\u2029"):
        text = text.replace(letter, f"\\u{ord(letter):04x}")
    return text


def _rounded(value: Any) -> Any:
    """Nine digits: enough for a page, and far below what moves a verdict."""
    if isinstance(value, float) and math.isfinite(value):
        return float(f"{value:.9g}")
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(item) for item in value]
    return value


@functools.cache
def _bundle(script: str) -> str:
    """Vega, Vega-Lite, vega-embed and our script as one piece of JavaScript."""
    bundle = str(vl_convert().javascript_bundle(script))
    return re.sub(r"</(script)", r"<\\/\1", bundle, flags=re.IGNORECASE)


def _still(figure: Figure) -> str:
    """The SVG, its ids made unique in the page, without an XML head."""
    svg = re.sub(r"^\s*<\?xml[^>]*>\s*", "", figure.svg())
    svg = svg.replace("<svg ", '<svg aria-hidden="true" ', 1)  # the element around it has its label
    return re.sub(r'(id="|url\(#|href="#)([\w-]+)', rf"\g<1>{figure.slug}-\g<2>", svg)

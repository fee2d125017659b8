"""The report as one HTML file that needs no network.

    Path("index.html").write_text(page(run, found, figures(run, found)))

Every chart is in the page twice: drawn already (SVG, for print and for readers without JavaScript),
and as a Vega-Lite specification that the inlined Vega draws with tooltips. The requests of every
level travel along as (TTFT, TPOT), so that the SLO can be moved.
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Iterator, Sequence
from importlib import resources
from statistics import NormalDist
from typing import Any

import msgspec
from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from models import formatting
from models.formatting import model_title
from reports import sentences as words
from reports.charts.crossover_map import column_label, map_rows
from reports.charts.figures import Figure, vl_convert
from reports.findings import Crossover
from reports.numbers import CellNumbers, RunNumbers
from reports.render import facts, tables
from reports.run import search_config

GROUPS = ("crossover", "alone", "latency", "throughput", "attainment", "memory")
CONTENTS = {
    "crossover": "Crossover",
    "latency": "Latency",
    "throughput": "Throughput",
    "memory": "Memory",
    "gpu": "GPU",
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


def page(run: RunNumbers, found: Crossover, drawn: Sequence[Figure]) -> str:
    """The whole page."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    specs = {figure.slug: figure.chart for figure in drawn}
    text = environment.from_string(_asset("page.html")).render(
        run=run,
        found=found,
        headline=words.headline(run, found),
        sentences=words.sentences(run, found),
        page=_values(run, found, drawn),
        groups={name: [one for one in drawn if one.group == name] for name in GROUPS},
        svgs={figure.slug: Markup(_still(figure)) for figure in drawn},
        tables={
            "capacity": tables.capacity_table(run, found),
            "levels": tables.level_table(run),
            "memory": tables.memory_table(found),
            "gpu": tables.gpu_table(found),
            "sources": tables.source_table(),
        },
        specs=specs,
        specs_json=Markup(_json(specs)),
        answers_json=Markup(_json(answers(run, found))),
        bundle=Markup(_bundle(_asset("capacity.js") + _asset("page.js"))) if specs else "",
        css=Markup(_asset("page.css")),
        missing=formatting.NOT_MEASURED,
    )
    return text + "\n"


def cards(run: RunNumbers, found: Crossover) -> Iterator[Card]:
    """The key figures: largest model, its capacity, the first that fails, the GPU's memory."""
    yield from _largest(run, found)
    yield _first_not(run, found)
    takeover = found.takeover
    if takeover is not None:
        cheapest = takeover.cheapest
        price = ""
        if cheapest is not None:
            price = formatting.dollars_per_hour(cheapest.device.dollars_per_hour)
            price = f"; such cards from {price}"
        need = formatting.size(takeover.need.total_bytes)
        note = f"for {words.title(takeover.cell)}{price}"
        yield Card("GPU memory that takes over", need, note, "predicted")


def _largest(run: RunNumbers, found: Crossover) -> Iterator[Card]:
    name = "Largest model that meets the SLO"
    cell = found.largest
    if cell is None:
        yield Card(name, "none", "of those that were measured")
        return
    others = sum(other.capacity.low is not None for other in run.cells) - 1
    smaller = f"{others} smaller models meet it too" if others else "no other measured model does"
    if others == 1:
        smaller = "a smaller model meets it too"
    note = f"{cell.weight_format} with {cell.backend}; {smaller}"
    yield Card(name, model_title(cell.model), note)
    capacity = cell.capacity
    if capacity.estimate is None:
        yield Card("Its capacity", f"≥ {formatting.rate(capacity.low)}", "no rate was too much")
    else:
        interval = formatting.interval(capacity.low, capacity.high)
        note = f"requests per second; interval {interval}"
        yield Card("Its capacity", formatting.rate(capacity.estimate), note)


def _first_not(run: RunNumbers, found: Crossover) -> Card:
    cell = found.first_not
    if cell is None:
        beyond = "the crossover lies beyond the models measured"
        return Card("Meets the SLO at no rate", "none found", beyond)
    name = model_title(cell.model)
    if cell.state == "skipped":
        return Card("Does not run here", name, cell.reason, "predicted")
    why = words.why_at_no_rate(cell, run.slo)
    return Card("Meets the SLO at no rate", name, why[:1].upper() + why[1:])


# ---------------------------------------------------------------- what the page computes with


def answers(run: RunNumbers, found: Crossover) -> dict[str, Any]:
    """Every request of every finished level, and the capacities under the run's own SLO."""
    names = words.names_of(run.cells)
    ends = map_rows(run.cells, asked_rate=found.asked_rate)
    slo = run.slo
    return {
        "slo": {
            "ttft": slo.ttft_seconds,
            "tpot": slo.tpot_seconds,
            "target": slo.target,
            "z": NormalDist().inv_cdf(slo.confidence),
        },
        "missing": formatting.NOT_MEASURED,
        "asked": found.asked_rate,
        "bottom": ends.bottom,
        "top": ends.top,
        "cells": [_cell_answers(cell, names[cell.key]) for cell in run.cells],
    }


def _cell_answers(cell: CellNumbers, name: str) -> dict[str, Any]:
    capacity = cell.capacity
    measured = cell.state == "measured"
    levels = [level for level in cell.levels if level.rate_per_second or level.is_single_stream]
    return {
        "key": cell.key,
        "name": name,
        "size": cell.parameters or 0,
        "state": cell.state,
        "words": words.capacity_words(capacity) if measured else tables.state_words(cell),
        "label": column_label(cell),
        "found": {key: getattr(capacity, key) for key in ("state", "low", "estimate", "high")},
        "levels": [
            {
                "rate": level.rate_per_second,
                "valid": level.summary.is_valid,
                "answers": level.answers,
            }
            for level in levels
        ],
    }


# ---------------------------------------------------------------- what the template shows


def _values(run: RunNumbers, found: Crossover, drawn: Sequence[Figure]) -> dict[str, Any]:
    manifest, slo = run.manifest, run.slo
    names = words.names_of(run.cells)
    pairs = {key: [one for one in drawn if one.cell == key] for key in names}
    elsewhere = manifest.client_facts.get("hostname") != run.facts.get("hostname")
    campaign = msgspec.json.format(msgspec.json.encode(manifest.campaign), indent=2).decode()
    return {
        "version": manifest.crossover_version,
        "run_id": run.name,
        "created": facts.day(manifest.created),
        "slo_name": slo.name,
        "slo_source": words.slo_source(slo),
        "quality": tables.QUALITY_WORDS if has_quality(run) else "",
        "confidence": formatting.share(search_config(manifest).confidence),
        "contents": [one for one in CONTENTS.items() if one[0] != "gpu" or found.takeovers],
        "cards": list(cards(run, found)),
        "serious": [warning for warning in run.warnings if warning.is_serious],
        "live": bool(run.levels) and any(figure.group == "crossover" for figure in drawn),
        "answers": formatting.count(sum(len(level.answers) for level in run.levels)),
        "latency": [(names[key], pair) for key, pair in pairs.items() if pair],
        "takeovers": [_takeover(takeover) for takeover in found.takeovers],
        "counts": facts.counts_words(run),
        "folder": run.folder,
        "commands": facts.commands(run, found),
        "machine": facts.machine_facts(run.facts),
        "client_machine": facts.machine_facts(manifest.client_facts) if elsewhere else [],
        "software": facts.software(run),
        "campaign_text": manifest.campaign_text.strip() or campaign,
    }


def has_quality(run: RunNumbers) -> bool:
    """Whether a format's quality is known."""
    return any(cell.quality_kl_nats is not None for cell in run.cells)


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
    return re.sub(r'(id="|url\(#|href="#)([\w-]+)', rf"\g<1>{figure.slug}-\g<2>", svg)

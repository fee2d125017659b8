"""The report as one HTML file that works with no network: text, tables, still charts, and the code that makes them move.

    Path("index.html").write_text(page(run, found, figures(run, found)))

Every chart is in the page twice: drawn already (SVG, for print and for readers without JavaScript) and as a Vega-Lite specification that
the inlined Vega draws anew with tooltips. The requests of every level travel along as (TTFT, TPOT), so that the promise can be moved.
"""

from __future__ import annotations

import functools
import json
import math
import re
import shlex
from collections.abc import Mapping, Sequence
from datetime import datetime
from importlib import resources
from pathlib import Path
from statistics import NormalDist
from typing import Any

import msgspec
from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from reports import charts, crossover_map, formatting, tables
from reports.capacity import search_config
from reports.crossover import Crossover, capacity_words, machine_words, promise_source, promise_words, title, why_at_no_rate
from reports.figures import Figure
from reports.formatting import model_title
from reports.numbers import CellNumbers, RunNumbers

CONTENTS = (
    ("crossover", "Crossover"), ("latency", "Latency"), ("throughput", "Throughput"), ("memory", "Memory"), ("gpu", "GPU"),
    ("levels", "Levels"), ("doubts", "Doubts"), ("repeat", "How to repeat"),
)  # fmt: skip


class Card(msgspec.Struct, frozen=True):
    """One key figure."""

    name: str
    value: str
    note: str
    source: str


def page(run: RunNumbers, found: Crossover, drawn: Sequence[Figure]) -> str:
    """The whole page."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    groups: dict[str, list[Figure]] = {name: [] for name in ("crossover", "alone", "latency", "throughput", "attainment", "memory")}
    for figure in drawn:
        groups[figure.group].append(figure)
    specs = {figure.slug: figure.chart for figure in drawn}
    text = environment.from_string(_asset("page.html")).render(
        run=run,
        found=found,
        page=_values(run, found, groups),
        groups=groups,
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
        bundle=Markup(_bundle(_asset("page.js"))) if specs else "",
        css=Markup(_asset("page.css")),
        missing=formatting.NOT_MEASURED,
    )
    return text + "\n"


def cards(run: RunNumbers, found: Crossover) -> list[Card]:
    """The four key figures: the largest model that holds, its capacity, the first that does not, the memory of the GPU that takes over."""
    out = []
    if found.largest is not None:
        cell = found.largest
        others = len([other for other in run.cells if other.capacity.low is not None]) - 1
        smaller = f"and {others} smaller one{'' if others == 1 else 's'}" if others else "and no smaller one that was measured"
        out.append(
            Card(
                "Largest model that holds", model_title(cell.model), f"{cell.weight_format} with {cell.backend}, {smaller}", "measured here"
            )
        )
        capacity = cell.capacity
        value = formatting.rate(capacity.estimate) if capacity.estimate is not None else f"≥ {formatting.rate(capacity.low)}"
        interval = (
            f"requests per second; interval {formatting.interval(capacity.low, capacity.high)}"
            if capacity.high is not None
            else "no rate was seen to be too much"
        )
        out.append(Card("Its capacity", value, interval, "measured here"))
    else:
        out.append(Card("Largest model that holds", "none", "of those that were measured", "measured here"))
    if found.first_not is not None and found.first_not.state != "skipped":
        why = why_at_no_rate(found.first_not, run.promise).removeprefix(f"a lone request to {model_title(found.first_not.model)} already ")
        out.append(
            Card(
                "Holds at no rate",
                model_title(found.first_not.model),
                f"a request alone {why}" if found.first_not.lone else why,
                "measured here",
            )
        )
    elif found.first_not is not None:
        out.append(Card("Does not run here", model_title(found.first_not.model), found.first_not.reason, "predicted"))
    else:
        out.append(Card("Holds at no rate", "none found", "the crossover lies beyond the models measured", "measured here"))
    takeover = next((one for one in found.takeovers if one.cell is (found.first_not or found.largest)), None)
    if takeover is not None:
        priced = [option.device.dollars_per_hour for option in takeover.options if option.device.dollars_per_hour is not None]
        price = f"; such cards from {formatting.dollars_per_hour(min(priced))}" if priced else ""
        out.append(
            Card(
                "GPU memory that takes over", formatting.size(takeover.need.total_bytes), f"for {title(takeover.cell)}{price}", "predicted"
            )
        )
    return out


def answers(run: RunNumbers, found: Crossover) -> dict[str, Any]:
    """What the page computes with: every request of every finished level, and the capacities under the run's own promise."""
    names = charts.names_of(run.cells)
    _, _, ends = crossover_map.map_rows(run.cells, {}, found.asked_rate)
    promise = run.promise
    return {
        "promise": {
            "ttft": promise.ttft_seconds, "tpot": promise.tpot_seconds, "target": promise.target,
            "z": NormalDist().inv_cdf(promise.confidence),
        },
        "missing": formatting.NOT_MEASURED,
        "asked": found.asked_rate,
        "bottom": ends["bottom"],
        "top": ends["top"],
        "cells": [_cell_answers(cell, names[cell.key]) for cell in run.cells],
    }  # fmt: skip


def _cell_answers(cell: CellNumbers, name: str) -> dict[str, Any]:
    return {
        "key": cell.key,
        "name": name,
        "size": cell.parameters or 0,
        "state": cell.state,
        "words": tables.state_words(cell) if cell.state != "measured" else capacity_words(cell.capacity),
        "label": crossover_map.column_label(cell),
        "found": {"state": cell.capacity.state, "low": cell.capacity.low, "estimate": cell.capacity.estimate, "high": cell.capacity.high},
        "levels": [
            {"rate": level.rate_per_second, "valid": level.summary.is_valid, "answers": level.answers}
            for level in cell.levels
            if level.rate_per_second or level.is_lone
        ],
    }


# ---------------------------------------------------------------- what the template shows


def _values(run: RunNumbers, found: Crossover, groups: Mapping[str, list[Figure]]) -> dict[str, Any]:
    manifest, promise = run.manifest, run.promise
    names = charts.names_of(run.cells)
    latency = []
    for cell in run.cells:
        pair = [figure for figure in groups["latency"] if figure.title.startswith(f"{names[cell.key]}: ")]
        if pair:
            latency.append((names[cell.key], pair))
    return {
        "version": manifest.crossover_version,
        "run_id": run.name,
        "created": _day(manifest.created),
        "promise_name": promise.name,
        "promise_words": promise_words(promise),
        "promise_source": promise_source(promise),
        "quality": tables.QUALITY_WORDS if any(cell.quality_kl_nats is not None for cell in run.cells) else "",
        "confidence": formatting.share(search_config(manifest).confidence),
        "contents": [item for item in CONTENTS if item[0] != "gpu" or found.takeovers],
        "cards": cards(run, found),
        "serious": [doubt for doubt in run.doubts if doubt.severity == "serious"],
        "live": any(cell.levels for cell in run.cells) and bool(groups["crossover"]),
        "answers": formatting.count(sum(len(level.answers) for cell in run.cells for level in cell.levels)),
        "latency": latency,
        "takeovers": [
            {
                "title": title(takeover.cell),
                "need": formatting.size(takeover.need.total_bytes),
                "parts": f"weights {formatting.size(takeover.need.weight_bytes)}, KV cache {formatting.size(takeover.need.kv_bytes)}, "
                f"overhead {formatting.size(takeover.need.overhead_bytes)}; "
                f"with 16-bit weights {formatting.size(takeover.need_16bit.total_bytes)} together",
            }
            for takeover in found.takeovers
        ],
        "counts": counts_words(run),
        "folder": run.folder,
        "commands": commands(run, found),
        "machine": machine_facts(run.facts),
        "client_machine": machine_facts(manifest.client_facts)
        if manifest.client_facts.get("hostname") != run.facts.get("hostname")
        else [],
        "software": software(run),
        "campaign_text": manifest.campaign_text.strip() or msgspec.json.format(msgspec.json.encode(manifest.campaign), indent=2).decode(),
    }


def counts_words(run: RunNumbers) -> str:
    """How much was measured."""
    levels = sum(len(cell.levels) for cell in run.cells)
    counted = f"{formatting.count(run.requests_counted)} of them due in the window of {levels} finished levels"
    text = f"{formatting.count(run.requests)} requests on record, {counted}"
    return f"{text}; the run took {formatting.seconds(run.measured_seconds)}." if run.measured_seconds else f"{text}."


def commands(run: RunNumbers, found: Crossover) -> str:
    """What to type to measure again, to go on, and to make this page again."""
    asked = f" --rate {found.asked_rate:g}" if found.asked_rate is not None else ""
    lines = [
        "# measure again: the campaign below, saved as campaign.toml",
        command_words(run.manifest.command),
    ]
    lines += ["", "# make this report again from the records", f"crossover report {run.folder}{asked}"]
    return "\n".join(lines)


def command_words(command: Sequence[str]) -> str:
    """The command line as one would type it, whatever way the program was started."""
    if not command:
        return "crossover campaign run campaign.toml"
    program = "crossover" if Path(command[0]).name in ("crossover", "crossover.py", "__main__.py") else command[0]
    return shlex.join([program, *command[1:]])


def machine_facts(facts: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Name and value of what is known of a machine; what is not known is left out."""
    allowed = facts.get("allowed_cores")
    gpus = [f"{gpu.get('name')} ({formatting.size(gpu.get('total_bytes'))})" for gpu in facts.get("gpus") or []]
    rows: list[tuple[str, str | None]] = [
        ("Machine", machine_words(facts)),
        (
            "Cores",
            f"{len(allowed)} usable of {facts.get('logical_cores')} logical, {facts.get('physical_cores') or 'unknown'} physical"
            if allowed
            else None,
        ),
        ("Instruction sets", ", ".join(facts.get("isa") or [])),
        (
            "Memory",
            f"{formatting.size(facts['memory_total_bytes'])}, {formatting.size(facts.get('memory_available_bytes'))} free at the start"
            if facts.get("memory_total_bytes")
            else None,
        ),
        (
            "Memory bandwidth",
            f"{formatting.bandwidth(facts['bandwidth_bytes_per_second'])} read" if facts.get("bandwidth_bytes_per_second") else None,
        ),
        ("Swap in use", formatting.size(facts["swap_used_bytes"]) if facts.get("swap_total_bytes") else None),
        ("GPU", ", ".join(gpus) or f"none ({facts.get('gpu_note') or facts.get('gpu_cause') or 'none found'})"),
        ("System", ", ".join(str(facts[name]) for name in ("system", "kernel", "virtualisation") if facts.get(name))),
    ]
    return [(name, str(value)) for name, value in rows if value]


def software(run: RunNumbers) -> list[tuple[str, str]]:
    """Versions and seed."""
    manifest = run.manifest
    rows = [("Crossover", f"{manifest.crossover_version}{f', commit {manifest.git_commit[:12]}' if manifest.git_commit else ''}")]
    rows += [(name, version) for name, version in sorted(manifest.versions.items()) if name != "crossover"]
    return [*rows, ("Seed", str(manifest.seed)), ("Run format", str(manifest.format_version))]


def _day(stamp: str) -> str:
    try:
        return f"{datetime.fromisoformat(stamp):%d %B %Y, %H:%M} UTC".lstrip("0")
    except ValueError:
        return stamp


# ---------------------------------------------------------------- pieces


def _asset(name: str) -> str:
    return resources.files("reports").joinpath("assets", name).read_text(encoding="utf-8")


def _json(value: Any) -> str:
    """JSON that may stand inside a script element: no `<` begins anything there."""
    return (
        json.dumps(_rounded(value), separators=(",", ":"), ensure_ascii=False, allow_nan=False)
        .replace("<", "\\u003c")
        .replace("\u2028", "\\u2028")
        .replace("\u2029", "\\u2029")
    )


def _rounded(value: Any) -> Any:
    """Nine digits are enough for a page, and far below what moves a verdict."""
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
    from reports.figures import vl_convert

    return re.sub(r"</(script)", r"<\\/\1", str(vl_convert().javascript_bundle(script)), flags=re.IGNORECASE)


def _still(figure: Figure) -> str:
    """The SVG, its ids made unique in the page, without an XML head."""
    svg = re.sub(r"^\s*<\?xml[^>]*>\s*", "", figure.svg())
    return re.sub(r'(id="|url\(#|href="#)([\w-]+)', rf"\g<1>{figure.slug}-\g<2>", svg)

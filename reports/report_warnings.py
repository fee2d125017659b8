"""Warnings about a run, with advice: those of its levels by code, and those of the whole run.

warnings_of(data)       # serious ones first
alerts_of(data)         # what must be shown on the first screen
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator

import msgspec

from crossover.loadtests.capacity.capacity_text import reuse_words, speed_words, users_words
from crossover.loadtests.levels.level_warnings import NamedWarning, Seriousness
from crossover.loadtests.load_generator.openai_endpoint import TargetFacts, route_words
from crossover.loadtests.records.journal_events import (
    CellReady,
    Interrupted,
    LevelAbandoned,
    RunFinished,
    of_kind,
)
from crossover.models import formatting
from crossover.reports.report_data import CellData, ReportData

NOTE, WARNING, SERIOUS = Seriousness.NOTE, Seriousness.WARNING, Seriousness.SERIOUS
FAST_MOVE = 0.1  # of the machine's speed, above which the first screen says so


def warnings_of(data: ReportData) -> list[NamedWarning]:
    """Return all warnings about a run, serious ones first."""
    found = [*_of_levels(data), *_of_cells(data), *_of_engines(data), *_of_run(data)]
    return sorted(found, key=lambda warning: warning.seriousness.rank)


def alerts_of(data: ReportData) -> list[str]:
    """Return what a reader of the first screen must not miss: at most three sentences."""
    busy = {cell.busy: _named(cell, data) for cell in data.cells if cell.busy}
    found = [
        f"The machine was never idle while {model} was measured: {reason}."
        for reason, model in busy.items()
    ]
    for cell in data.cells:
        if cell.capacity is not None and (cell.capacity.speed_moved or 0) > FAST_MOVE:
            found.append(f"{_named(cell, data)}: {speed_words(cell.capacity)}.")
    if not _is_finished(data):
        found.append("The run is not complete: its rows show what is missing.")
    return found[:3]


def _where(cell: CellData, data: ReportData) -> str:
    """Return ` on the GPU` for a run with both devices, else ""."""
    return f" on the {cell.device_words}" if len(data.sides) > 1 and cell.device else ""


def _named(cell: CellData, data: ReportData) -> str:
    return f"{cell.model}{_where(cell, data)}"


def _is_finished(data: ReportData) -> bool:
    return bool(of_kind(data.events, RunFinished))


def _of_levels(data: ReportData) -> Iterator[NamedWarning]:
    """Yield a warning for each code, about its worst level, with the number of the other levels."""
    by_code: dict[str, list[tuple[str, NamedWarning]]] = {}
    for cell in data.cells:
        for one in cell.levels:
            for warning in one.warnings:
                # a level far above the capacity is always unsteady
                if one.judged.verdict != "misses" or warning.code != "Unsteady":
                    load = one.load(cell.like)
                    own = _named(cell, data)
                    name = f"{own} {f'at {load}' if one.level.rate is not None else f'({load})'}"
                    by_code.setdefault(warning.code, []).append((name, warning))
    for code, found in by_code.items():
        name, worst = min(found, key=lambda pair: pair[1].seriousness.rank)
        others = len(found) - 1
        more = f" {others} more {'level has' if others == 1 else 'levels have'} it."
        more = more if others else ""
        text = f"{name}: {_sentence(worst.text)}{more}"
        yield NamedWarning(code, worst.seriousness, text, _sentence(worst.advice))


def _of_cells(data: ReportData) -> Iterator[NamedWarning]:
    for cell in data.cells:
        title = _named(cell, data)
        if cell.reason and cell.state != "not_started":
            yield NamedWarning(
                "CellNotFinished" if cell.levels else "CellNotMeasured",
                WARNING,
                f"{cell.model} {cell.weight_format}{_where(cell, data)}: {_sentence(cell.reason)}",
                "Values that were not measured are shown as such.",
            )
        if cell.capacity is not None and (text := speed_words(cell.capacity)):
            advice = "The interval covers both speeds. Measure again at another time."
            yield NamedWarning("SpeedMoved", WARNING, f"{title}: {text}.", advice)
        if cell.capacity is not None and (text := reuse_words(cell.capacity, cell.like)):
            users = users_words(cell.capacity)
            serves = f" It serves {users}." if users else ""
            advice = "Slots hold histories: with fewer of them than users, histories are evicted."
            yield NamedWarning("PrefixReuse", NOTE, f"{title}: {text}{serves}", advice)
        if cell.capacity is not None and cell.capacity.advice:
            advice = (
                "Choose another target or limit if it serves you as well; the capacity is then "
                "known as precisely as the step times."
            )
            yield NamedWarning("SteepSlo", NOTE, f"{title}: {cell.capacity.advice}", advice)


def _of_engines(data: ReportData) -> Iterator[NamedWarning]:
    """Engines of one model on one side whose capacities a run does not tell apart."""
    for first, second in itertools.combinations(data.cells, 2):
        if (first.model, first.side) != (second.model, second.side):
            continue
        if (one := first.capacity) is None or (other := second.capacity) is None:
            continue
        if one.low is None or one.high is None or other.low is None or other.high is None:
            continue
        if one.low <= other.high and other.low <= one.high:
            like = first.like
            intervals = " and ".join(
                f"{_engine(cell)} ({formatting.rate_interval(found.low, found.high, like)})"
                for cell, found in ((first, one), (second, other))
            )
            yield NamedWarning(
                "NoDifferenceShown",
                NOTE,
                f"{_named(first, data)}: no difference shown between the capacities of "
                f"{intervals}: their intervals overlap.",
                "Confirm more rates, or measure longer, to tell them apart.",
            )


def _engine(cell: CellData) -> str:
    return f"{cell.engine or cell.backend} {cell.weight_format}".strip()


def _of_run(data: ReportData) -> Iterator[NamedWarning]:
    lost = of_kind(data.events, LevelAbandoned)
    if of_kind(data.events, Interrupted) or lost:
        reasons = list(dict.fromkeys(event.reason for event in lost))[:3]
        why = f": {', '.join(reasons)}" if reasons else ""
        levels = (
            "1 unfinished level does" if len(lost) == 1 else f"{len(lost)} unfinished levels do"
        )
        not_counted = f"; {levels} not count{why}" if lost else ""
        text = f"The run was interrupted{not_counted}."
        advice = "The machine may have changed between the parts of the run."
        yield NamedWarning("Interrupted", NOTE, text, advice)
    if not _is_finished(data):
        text = "The run is not complete: configurations or load levels are missing."
        advice = f"Continue it with `crossover campaign resume {data.folder}`."
        yield NamedWarning("NotFinished", WARNING, text, advice)
    torn = any(not one.level.is_whole for cell in data.cells for one in cell.levels)
    if data.damage or torn:
        left_out = [*data.damage] or ["requests whose lines are missing from the file"]
        text = f"These parts of the run cannot be read: {', '.join(left_out)}."
        advice = "The run was killed, or the disk was full; what it was about to write is lost."
        if torn:
            advice = "Measure these cells again: the file was damaged after it was written."
        yield NamedWarning("LinesLeftOut", SERIOUS if torn else NOTE, text, advice)
    ready = of_kind(data.events, CellReady)
    if found := dict.fromkeys(text for one in ready for text in one.shared_cores):
        advice = "Use more cores, or run the load generator on another machine."
        yield NamedWarning("SharedCores", WARNING, _sentence("; ".join(found)), advice)
    if found := dict.fromkeys(text for one in ready for text in one.endpoint_notes):
        advice = "Values that the endpoint does not report are shown as not measured."
        yield NamedWarning("EndpointLacks", NOTE, _sentence("; ".join(found)), advice)
    if any(cell.ready is not None and cell.ready.synthetic for cell in data.cells):
        text = (
            "The weights are seeded random numbers in the published shape: speed and memory are "
            "those of the model, but its answers are noise."
        )
        advice = "Use the real weights before judging quality."
        yield NamedWarning("RandomWeights", NOTE, text, advice)
    if unknown := dict.fromkeys(cell.model for cell in data.cells if cell.spec is None):
        text = (
            f"The shape of {', '.join(unknown)} is unknown, so the size of the model, the takeover "
            "GPU and the capacity of other machines are missing."
        )
        advice = "Give the model's file, folder or hub id in the campaign, so that it can be read."
        yield NamedWarning("ShapeUnknown", NOTE, text, advice)
    if found := dict.fromkeys(filter(None, map(_route, ready))):
        advice = "The campaign's keys api and ignore_eos choose the route."
        yield NamedWarning("Route", NOTE, _sentence("; ".join(found)), advice)
    host = data.facts.get("hostname")
    if host is not None and host == data.manifest.client_facts.get("hostname"):
        text = "Load generator and server ran on the same machine."
        advice = "Run the load generator on another machine to leave all cores to the server."
        yield NamedWarning("OneMachine", NOTE, text, advice)
    if kind := data.facts.get("virtualisation"):
        text = f"This is a {kind}: its neighbors may take CPU time without being visible here."
        advice = "Repeat the run at another time and compare."
        yield NamedWarning("Virtualised", NOTE, text, advice)


def _route(ready: CellReady) -> str:
    """Return the route of requests and the end of answers, unless both are the default; ""."""
    with contextlib.suppress(msgspec.ValidationError):
        return route_words(msgspec.convert(ready.target, TargetFacts))
    return ""  # an endpoint that was not probed, or an exported run


def _sentence(text: str) -> str:
    text = text.strip()
    return f"{text[:1].upper()}{text[1:]}{'' if text.endswith('.') else '.'}"

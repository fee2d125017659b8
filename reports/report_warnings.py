"""Warnings about a run, with advice: those of its levels by code, and those of the whole.

warnings_of(data)       # serious ones first
alerts_of(data)         # what must stand on the first screen
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator

import msgspec

from loadtests.analysis.capacity_text import reuse_words, speed_words, users_words
from loadtests.analysis.level_warnings import NamedWarning, Seriousness
from loadtests.load_generator.openai_endpoint import TargetFacts, route_words
from loadtests.records.journal_events import (
    CellReady,
    Interrupted,
    LevelAbandoned,
    RunFinished,
    of_kind,
)
from models import formatting
from reports.report_data import CellData, ReportData

NOTE, WARNING, SERIOUS = Seriousness.NOTE, Seriousness.WARNING, Seriousness.SERIOUS
FAST_MOVE = 0.1  # of the machine's speed, above which the first screen says so


def warnings_of(data: ReportData) -> list[NamedWarning]:
    """All warnings about a run, serious ones first."""
    found = [*_of_levels(data), *_of_cells(data), *_of_engines(data), *_of_run(data)]
    return sorted(found, key=lambda warning: warning.seriousness.rank)


def alerts_of(data: ReportData) -> list[str]:
    """What a reader of the first screen must not miss: one sentence each, at most three."""
    busy = {cell.busy: _named(cell, data) for cell in data.cells if cell.busy}
    found = [
        f"The machine was never quiet while {model} was measured: {reason}."
        for reason, model in busy.items()
    ]
    for cell in data.cells:
        if cell.capacity is not None and (cell.capacity.speed_moved or 0) > FAST_MOVE:
            found.append(f"{_named(cell, data)}: {speed_words(cell.capacity)}.")
    if not _is_finished(data):
        found.append("The run has not finished: what is missing is said in its row.")
    return found[:3]


def _where(cell: CellData, data: ReportData) -> str:
    """` on the GPU`, where a run has both."""
    return f" on the {cell.device_words}" if len(data.sides) > 1 and cell.device else ""


def _named(cell: CellData, data: ReportData) -> str:
    return f"{cell.model}{_where(cell, data)}"


def _is_finished(data: ReportData) -> bool:
    return bool(of_kind(data.events, RunFinished))


def _of_levels(data: ReportData) -> Iterator[NamedWarning]:
    """One a code, of the worst level; how many more have it is said."""
    by_code: dict[str, list[tuple[str, NamedWarning]]] = {}
    for cell in data.cells:
        for one in cell.levels:
            for warning in one.warnings:
                # a level that fails by far is unsteady by nature
                if one.judged.verdict != "misses" or warning.code != "Unsteady":
                    load = one.load(cell.like)
                    own = _named(cell, data)
                    name = f"{own} {load if load == 'alone' else f'at {load}'}"
                    by_code.setdefault(warning.code, []).append((name, warning))
    for code, found in by_code.items():
        name, worst = min(found, key=lambda pair: pair[1].seriousness.rank)
        more = "" if len(found) == 1 else f" {len(found) - 1} more levels have it."
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
                "What is not measured is shown as such.",
            )
        if cell.capacity is not None and (text := speed_words(cell.capacity)):
            advice = "The interval holds both speeds; measure again at another hour."
            yield NamedWarning("SpeedMoved", WARNING, f"{title}: {text}.", advice)
        if cell.capacity is not None and (text := reuse_words(cell.capacity, cell.like)):
            users = users_words(cell.capacity)
            serves = f" It serves {users}." if users else ""
            advice = "Slots hold histories: with fewer of them than users, histories are evicted."
            yield NamedWarning("PrefixReuse", NOTE, f"{title}: {text}{serves}", advice)
        if cell.capacity is not None and cell.capacity.advice:
            advice = (
                "Choose the SLO that you mean; the capacity is then known as well as step times."
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
        text = f"The run was interrupted; {len(lost)} levels were begun and do not count{why}."
        advice = "The machine may have changed between its parts."
        yield NamedWarning("Interrupted", NOTE, text, advice)
    if not _is_finished(data):
        text = "The run has not finished: cells or levels are missing."
        advice = f"Go on with `crossover campaign resume {data.folder}`."
        yield NamedWarning("NotFinished", WARNING, text, advice)
    torn = any(not one.level.is_whole for cell in data.cells for one in cell.levels)
    if data.damage or torn:
        left_out = [*data.damage] or ["requests whose lines are missing from the file"]
        text = f"Left out: {', '.join(left_out)}."
        advice = "A writer was killed, or the disk was full; what it was about to write is lost."
        if torn:
            advice = "Measure these cells again: the file was damaged after it was written."
        yield NamedWarning("LinesLeftOut", SERIOUS if torn else NOTE, text, advice)
    ready = of_kind(data.events, CellReady)
    if found := dict.fromkeys(text for one in ready for text in one.shared_cores):
        advice = "Use more cores, or a load generator on another machine."
        yield NamedWarning("SharedCores", WARNING, _sentence("; ".join(found)), advice)
    if found := dict.fromkeys(text for one in ready for text in one.endpoint_notes):
        advice = "What an endpoint does not tell is shown as not measured."
        yield NamedWarning("EndpointLacks", NOTE, _sentence("; ".join(found)), advice)
    if any(cell.ready is not None and cell.ready.synthetic for cell in data.cells):
        text = (
            "Weights are seeded random numbers in the published shape: speed and memory are those "
            "of the model, answers are noise."
        )
        advice = "Use the real weights before judging quality."
        yield NamedWarning("RandomWeights", NOTE, text, advice)
    if unknown := dict.fromkeys(cell.model for cell in data.cells if cell.spec is None):
        text = (
            f"The shape of {', '.join(unknown)} is not known: the size of the model, the GPU that "
            "takes over, and what other machines would serve are missing."
        )
        advice = "Name the model's file, folder or hub id in the campaign, where it can be read."
        yield NamedWarning("ShapeUnknown", NOTE, text, advice)
    if found := dict.fromkeys(filter(None, map(_route, ready))):
        advice = "api and ignore_eos of the campaign choose it."
        yield NamedWarning("Route", NOTE, _sentence("; ".join(found)), advice)
    host = data.facts.get("hostname")
    if host is not None and host == data.manifest.client_facts.get("hostname"):
        text = "Load generator and server ran on one machine."
        advice = "A machine of its own for the load generator leaves all cores to the server."
        yield NamedWarning("OneMachine", NOTE, text, advice)
    if kind := data.facts.get("virtualisation"):
        text = f"The machine is virtual ({kind}): neighbours may take CPU time unseen from inside."
        advice = "Repeat the run at another hour and compare."
        yield NamedWarning("Virtualised", NOTE, text, advice)


def _route(ready: CellReady) -> str:
    """By which route requests went and how answers ended, where that is not the usual way."""
    with contextlib.suppress(msgspec.ValidationError):
        return route_words(msgspec.convert(ready.target, TargetFacts))
    return ""  # an endpoint that was not asked, or a run that was given away


def _sentence(text: str) -> str:
    text = text.strip()
    return f"{text[:1].upper()}{text[1:]}{'' if text.endswith('.') else '.'}"

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
MIN_ALERT_SHARE = 0.1  # change of the machine's speed from which the first screen names it


def warnings_of(data: ReportData) -> list[NamedWarning]:
    """Return all warnings about a run, serious ones first."""
    warnings = [*_of_levels(data), *_of_cells(data), *_of_engines(data), *_of_run(data)]
    return sorted(warnings, key=lambda warning: warning.seriousness.rank)


def alerts_of(data: ReportData) -> list[str]:
    """Return what a reader of the first screen must not miss: at most three sentences."""
    models_by_reason = {cell.busy: _name(cell, data) for cell in data.cells if cell.busy}
    alerts = [
        f"The machine was never idle while {model} was measured: {reason}."
        for reason, model in models_by_reason.items()
    ]
    for cell in data.cells:
        if cell.capacity is not None and (cell.capacity.speed_moved or 0) > MIN_ALERT_SHARE:
            alerts.append(f"{_name(cell, data)}: {speed_words(cell.capacity)}.")
    if not _is_finished(data):
        alerts.append("The run is not complete: its rows show what is missing.")
    return alerts[:3]


def _where(cell: CellData, data: ReportData) -> str:
    """Return ` on the GPU` for a run with both devices, else ""."""
    return f" on the {cell.device_words}" if len(data.sides) > 1 and cell.device else ""


def _name(cell: CellData, data: ReportData) -> str:
    """Return the model, with its device for a run with both devices."""
    return f"{cell.model}{_where(cell, data)}"


def _is_finished(data: ReportData) -> bool:
    return bool(of_kind(data.events, RunFinished))


def _of_levels(data: ReportData) -> Iterator[NamedWarning]:
    """Yield a warning for each code, about its worst level, with the number of the other levels."""
    by_code: dict[str, list[tuple[str, NamedWarning]]] = {}  # code -> (name of a level, warning)
    for cell in data.cells:
        for measured in cell.levels:
            load = measured.load(cell.like)
            load = f"at {load}" if measured.level.rate is not None else f"({load})"
            for warning in measured.warnings:
                # A level far above the capacity is always unsteady, so that is no news.
                if measured.judged.verdict != "misses" or warning.code != "Unsteady":
                    named = f"{_name(cell, data)} {load}", warning
                    by_code.setdefault(warning.code, []).append(named)
    for code, warnings in by_code.items():
        name, worst = min(warnings, key=lambda named: named[1].seriousness.rank)
        others = len(warnings) - 1
        more = f" {others} more {'level has' if others == 1 else 'levels have'} it."
        text = f"{name}: {_sentence(worst.text)}{more if others else ''}"
        yield NamedWarning(code, worst.seriousness, text, _sentence(worst.advice))


def _of_cells(data: ReportData) -> Iterator[NamedWarning]:
    for cell in data.cells:
        title = _name(cell, data)
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
            serves = f" The estimated capacity serves {users}." if users else ""
            advice = "Slots hold histories: with fewer of them than users, histories are evicted."
            yield NamedWarning("PrefixReuse", NOTE, f"{title}: {text}{serves}", advice)
        if cell.capacity is not None and cell.capacity.advice:
            advice = (
                "Choose another target or limit if it serves you as well; the capacity is then "
                "known as precisely as the step times."
            )
            yield NamedWarning("SteepSlo", NOTE, f"{title}: {cell.capacity.advice}", advice)


def _of_engines(data: ReportData) -> Iterator[NamedWarning]:
    """Yield a warning for each pair of engines of one model on one side whose capacities the run
    does not tell apart: their 90 % intervals overlap."""
    for first, second in itertools.combinations(data.cells, 2):
        if (first.model, first.side) != (second.model, second.side):
            continue
        if (first_interval := _interval(first)) is None or (
            second_interval := _interval(second)
        ) is None:
            continue
        if first_interval[0] <= second_interval[1] and second_interval[0] <= first_interval[1]:
            intervals = " and ".join(
                f"{_engine(cell)} ({formatting.rate_interval(*interval, first.like)})"
                for cell, interval in ((first, first_interval), (second, second_interval))
            )
            yield NamedWarning(
                "NoDifferenceShown",
                NOTE,
                f"{_name(first, data)}: no difference shown between the capacities of "
                f"{intervals}: their intervals overlap.",
                "Confirm more rates, or measure longer, to tell them apart.",
            )


def _interval(cell: CellData) -> tuple[float, float] | None:
    """Return the 90 % interval of the capacity, requests/s; None: one of its ends is not known."""
    capacity = cell.capacity
    if capacity is None or capacity.low is None or capacity.high is None:
        return None
    return capacity.low, capacity.high


def _engine(cell: CellData) -> str:
    return f"{cell.engine or cell.backend} {cell.weight_format}".strip()


def _of_run(data: ReportData) -> Iterator[NamedWarning]:
    abandoned = of_kind(data.events, LevelAbandoned)
    if of_kind(data.events, Interrupted) or abandoned:
        reasons = list(dict.fromkeys(event.reason for event in abandoned))[:3]
        why = f": {', '.join(reasons)}" if reasons else ""
        levels = (
            "1 unfinished level does"
            if len(abandoned) == 1
            else f"{len(abandoned)} unfinished levels do"
        )
        not_counted = f"; {levels} not count{why}" if abandoned else ""
        text = f"The run was interrupted{not_counted}."
        advice = "The machine may have changed between the parts of the run."
        yield NamedWarning("Interrupted", NOTE, text, advice)
    if not _is_finished(data):
        text = "The run is not complete: configurations or load levels are missing."
        advice = f"Continue it with `crossover campaign resume {data.folder}`."
        yield NamedWarning("NotFinished", WARNING, text, advice)
    lacks_requests = any(
        not measured.level.is_whole for cell in data.cells for measured in cell.levels
    )
    if data.damage or lacks_requests:
        left_out = [*data.damage] or ["requests whose lines are missing from the file"]
        text = f"These parts of the run cannot be read: {', '.join(left_out)}."
        advice = "The run was killed, or the disk was full; what it was about to write is lost."
        if lacks_requests:
            advice = "Measure these cells again: the file was damaged after it was written."
        yield NamedWarning("LinesLeftOut", SERIOUS if lacks_requests else NOTE, text, advice)
    ready_events = of_kind(data.events, CellReady)
    if texts := dict.fromkeys(text for event in ready_events for text in event.shared_cores):
        advice = "Use more cores, or run the load generator on another machine."
        yield NamedWarning("SharedCores", WARNING, _sentence("; ".join(texts)), advice)
    if texts := dict.fromkeys(text for event in ready_events for text in event.endpoint_notes):
        advice = "Values that the endpoint does not report are shown as not measured."
        yield NamedWarning("EndpointLacks", NOTE, _sentence("; ".join(texts)), advice)
    if any(cell.ready is not None and cell.ready.synthetic for cell in data.cells):
        text = (
            "The weights are seeded random numbers in the published shape: speed and memory are "
            "those of the model, but its answers are noise."
        )
        advice = "Use the real weights before judging quality."
        yield NamedWarning("RandomWeights", NOTE, text, advice)
    if models := dict.fromkeys(cell.model for cell in data.cells if cell.spec is None):
        text = (
            f"The shape of {', '.join(models)} is unknown, so the size of the model, the takeover "
            "GPU and the capacity of other machines are missing."
        )
        advice = "Give the model's file, folder or hub id in the campaign, so that it can be read."
        yield NamedWarning("ShapeUnknown", NOTE, text, advice)
    if texts := dict.fromkeys(filter(None, map(_route, ready_events))):
        advice = "The campaign's keys api and ignore_eos choose the route."
        yield NamedWarning("Route", NOTE, _sentence("; ".join(texts)), advice)
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
    """Return the route of requests and how answers end; "": both are the default."""
    with contextlib.suppress(msgspec.ValidationError):
        return route_words(msgspec.convert(ready.target, TargetFacts))
    return ""  # an endpoint that was not probed, or an exported run


def _sentence(text: str) -> str:
    """Return the text with a capital at its beginning and a full stop at its end."""
    text = text.strip()
    return f"{text[:1].upper()}{text[1:]}{'' if text.endswith('.') else '.'}"

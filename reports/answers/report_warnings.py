"""Warnings about a run, with advice: those of its levels by code, and those of the whole run.

warnings_of(data)       # serious ones first
alerts_of(data)         # what must be shown on the first screen
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec

from crossover.loadtests.capacity.capacity_text import (
    check_words,
    contradiction_words,
    disturbance_words,
    reuse_words,
    speed_words,
    users_words,
)
from crossover.loadtests.levels.level_warnings import NamedWarning, Seriousness
from crossover.loadtests.load_generator.target import UNCHECKED, TargetFacts, route_words
from crossover.loadtests.records.journal_events import (
    CellReady,
    Interrupted,
    LevelAbandoned,
    RunFinished,
    of_kind,
)
from crossover.models import formatting
from crossover.reports.answers.binding_limits import may_miss_because_of_others
from crossover.reports.report_data import CellData, RateInterval, ReportData
from crossover.serving.hardware.numa import MISPLACED_ADVICE, misplaced_words

NOTE, WARNING, SERIOUS = Seriousness.NOTE, Seriousness.WARNING, Seriousness.SERIOUS
MIN_ALERT_SHARE = 0.1  # change of the machine's speed from which the first screen names it
MAX_ALERTS = 3
MAX_LISTED = 3  # configurations that a sentence names


def warnings_of(data: ReportData) -> list[NamedWarning]:
    """Return all warnings about a run, serious ones first."""
    warnings = [*_of_levels(data), *_of_cells(data), *_of_engines(data)]
    warnings += [*_of_ending(data), *_of_servers(data)]
    return sorted(warnings, key=lambda warning: warning.seriousness.rank)


def alerts_of(data: ReportData) -> list[str]:
    """Return what a reader of the first screen must not miss: at most three sentences."""
    names_by_reason = {
        cell.never_idle_reason: _name(cell, data) for cell in data.cells if cell.never_idle_reason
    }
    alerts = [
        f"The machine was never idle while {name} was measured: {reason}."
        for reason, name in names_by_reason.items()
    ]
    for cell in data.cells:
        if cell.capacity is not None and (cell.capacity.speed_moved or 0) > MIN_ALERT_SHARE:
            alerts.append(f"{_name(cell, data)}: {speed_words(cell.capacity)}.")
    without_capacity = [cell for cell in _interrupted_cells(data) if cell.capacity is None]
    if without_capacity:
        missing = _listed_configurations(without_capacity, data)
        alerts.append(f"The run is not complete. It has no capacity of {missing}.")
    for cell in data.cells:
        capacity = cell.capacity
        if capacity is not None and (words := disturbance_words(capacity, cell.unit_rate)):
            alerts.append(f"{_name(cell, data)}: {words}")
    return alerts[:MAX_ALERTS]


def _where(cell: CellData, data: ReportData) -> str:
    """Return ` on the GPU` for a run with both devices, else ""."""
    return f" on the {cell.device_words}" if len(data.sides) > 1 and cell.device else ""


def _name(cell: CellData, data: ReportData) -> str:
    """Return the model, with its device for a run with both devices."""
    return f"{cell.model}{_where(cell, data)}"


def _interrupted_cells(data: ReportData) -> list[CellData]:
    """Return the configurations that an unfinished run did not measure to their end."""
    if of_kind(data.events, RunFinished):
        return []
    return [cell for cell in data.cells if cell.reason and cell.state != "skipped"]


def _listed_configurations(cells: Sequence[CellData], data: ReportData) -> str:
    """Return `llama-3.2-1b int8 on the CPU and llama-3.1-8b int8 on the CPU`; of more than
    MAX_LISTED the first ones, and the number of the others."""
    names = [f"{cell.model} {cell.weight_format}".strip() + _where(cell, data) for cell in cells]
    others = len(names) - MAX_LISTED
    if others > 0:
        names = [*names[:MAX_LISTED], f"{others} more"]
    if len(names) == 1:
        return names[0]
    return f"{', '.join(names[:-1])} and {names[-1]}"


class _LevelWarning(NamedTuple):
    """A warning about a level."""

    level_name: str  # `llama-3.2-1b at 1.8/s`
    warning: NamedWarning


def _of_levels(data: ReportData) -> Iterator[NamedWarning]:
    """Yield one warning for each code: that of its worst level, with the number of other levels
    that have it."""
    by_code: dict[str, list[_LevelWarning]] = {}
    for cell in data.cells:
        for measured in cell.levels:
            load = measured.load_words(cell.unit_rate)
            load = f"at {load}" if measured.level.rate is not None else f"({load})"
            level_name = f"{_name(cell, data)} {load}"
            for warning in measured.warnings:
                # A level that misses the SLO is above the capacity, so its queue grows: no news.
                if warning.code == "Unsteady" and measured.judged.verdict == "misses":
                    continue
                by_code.setdefault(warning.code, []).append(_LevelWarning(level_name, warning))
    for code, level_warnings in by_code.items():
        level_name, worst = min(level_warnings, key=lambda entry: entry.warning.seriousness.rank)
        text = f"{level_name}: {_sentence(worst.text)}"
        other_levels = len(level_warnings) - 1
        if other_levels == 1:
            text += " 1 more level has it."
        elif other_levels:
            text += f" {other_levels} more levels have it."
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
        capacity = cell.capacity
        if capacity is None:
            continue
        if text := disturbance_words(capacity, cell.unit_rate):
            advice = "End other programs and measure again to see the machine alone under load."
            if capacity.is_none and not may_miss_because_of_others(cell, data.slo):
                advice = "Without them single requests miss the SLO too."
            yield NamedWarning("OtherProcesses", WARNING, f"{title}: {text}", advice)
        if text := contradiction_words(capacity, cell.unit_rate):
            advice = "Measure again if the difference matters."
            yield NamedWarning("EstimateRaised", NOTE, f"{title}: {text}", advice)
        if text := check_words(capacity):
            advice = "Long prompts are near the limit: a level at the estimated rate tells more."
            yield NamedWarning("UnloadedCheck", NOTE, f"{title}: {text}", advice)
        if text := speed_words(capacity):
            advice = "The interval covers both speeds. Measure again at another time."
            yield NamedWarning("SpeedMoved", WARNING, f"{title}: {text}.", advice)
        if text := reuse_words(capacity, cell.unit_rate):
            users = users_words(capacity)
            serves = f" The estimated capacity serves {users}." if users else ""
            advice = (
                "Histories that neither slots nor prompt cache have room for are computed again."
            )
            yield NamedWarning("PrefixReuse", NOTE, f"{title}: {text}{serves}", advice)
        if capacity.advice and not capacity.is_none:  # the first screen has that
            advice = (
                "Choose another target or limit if it serves you as well; the capacity is then "
                "known as precisely as the step times."
            )
            yield NamedWarning("SteepSlo", NOTE, f"{title}: {capacity.advice}", advice)


def _of_engines(data: ReportData) -> Iterator[NamedWarning]:
    """Yield a warning for each pair of engines of one model on one side whose capacities the run
    does not tell apart: their 90 % intervals overlap."""
    for first, second in itertools.combinations(data.cells, 2):
        if (first.model, first.side) != (second.model, second.side):
            continue
        first_interval, second_interval = first.capacity_interval, second.capacity_interval
        if first_interval is None or second_interval is None:
            continue
        if first_interval.overlaps(second_interval):
            yield NamedWarning(
                "NoDifferenceShown",
                NOTE,
                f"{_name(first, data)}: no difference shown between the capacities of "
                f"{_with_interval(first, first_interval)} and "
                f"{_with_interval(second, second_interval)}: their intervals overlap.",
                "Confirm more rates, or measure longer, to tell them apart.",
            )


def _with_interval(cell: CellData, interval: RateInterval) -> str:
    """Return `onnx int8 (1.3–1.9/s)`."""
    words = formatting.rate_interval(interval.low, interval.high, cell.unit_rate)
    return f"{cell.engine_words} ({words})"


def _of_ending(data: ReportData) -> Iterator[NamedWarning]:
    """Yield the warnings about a run that was interrupted, or whose files are damaged."""
    abandoned = of_kind(data.events, LevelAbandoned)
    if of_kind(data.events, Interrupted) or abandoned:
        text = "The run was interrupted"
        if abandoned:
            reasons = list(dict.fromkeys(event.reason for event in abandoned))[:3]
            is_one = len(abandoned) == 1
            levels = "level does" if is_one else "levels do"
            text += f"; {len(abandoned)} unfinished {levels} not count: {', '.join(reasons)}"
        advice = "The machine may have changed between the parts of the run."
        yield NamedWarning("Interrupted", NOTE, f"{text}.", advice)
    if interrupted_cells := _interrupted_cells(data):
        missing = _listed_configurations(interrupted_cells, data)
        text = f"The run is not complete: it did not measure {missing} to the end."
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


def _of_servers(data: ReportData) -> Iterator[NamedWarning]:
    """Yield the warnings about the servers, their models and the machine."""
    ready_events = of_kind(data.events, CellReady)
    if texts := dict.fromkeys(text for event in ready_events for text in event.shared_cores):
        advice = "Use more cores, or run the load generator on another machine."
        yield NamedWarning("SharedCores", WARNING, _sentence("; ".join(texts)), advice)
    for cell in data.cells:
        share = None if cell.ready is None else cell.ready.info.memory_share_on_nodes
        if text := misplaced_words(share):
            advice = _sentence(f"{MISPLACED_ADVICE}; then measure again")
            text = _sentence(f"{_name(cell, data)}: {text}")
            yield NamedWarning("MemoryMisplaced", WARNING, text, advice)
    notes = dict.fromkeys(text for event in ready_events for text in event.endpoint_notes)
    if UNCHECKED in notes:
        advice = (
            "Name the file of its certificate authority with --ca-file (ca_file in a campaign)."
        )
        yield NamedWarning("CertificateNotChecked", WARNING, _sentence(UNCHECKED), advice)
    if lacks := [note for note in notes if note != UNCHECKED]:
        advice = "Values that the endpoint does not report are shown as not measured."
        yield NamedWarning("EndpointLacks", NOTE, _sentence("; ".join(lacks)), advice)
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
    """Return the route of requests and how answers end; "": both are the default, or not known, as
    of an endpoint that was not probed and in an exported run."""
    try:
        target = msgspec.convert(ready.target, TargetFacts)
    except msgspec.ValidationError:
        return ""
    return route_words(target)


def _sentence(text: str) -> str:
    """Return the text with a capital at its beginning and a full stop at its end."""
    text = text.strip()
    return f"{text[:1].upper()}{text[1:]}{'' if text.endswith('.') else '.'}"

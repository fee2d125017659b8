"""Warnings about a run, with advice: those of its levels by code, and those of the whole.

warnings_of(data)       # serious ones first
alerts_of(data)         # what must stand on the first screen
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from loadtests.analysis.capacity_text import speed_words
from loadtests.analysis.level_validity import NamedWarning, Seriousness
from loadtests.records.run_journal import (
    CellReady,
    Interrupted,
    LevelAbandoned,
    RunFinished,
    of_kind,
)
from models import formatting
from models.formatting import model_title
from reports.report_data import ReportData

NOTE, WARNING, SERIOUS = Seriousness.NOTE, Seriousness.WARNING, Seriousness.SERIOUS
T = TypeVar("T")


def warnings_of(data: ReportData) -> list[NamedWarning]:
    """All warnings about a run, serious ones first."""
    found = [warning for rule in RULES for warning in rule(data)]
    return sorted(found, key=lambda warning: warning.seriousness.rank)


def alerts_of(data: ReportData) -> list[str]:
    """What a reader of the first screen must not miss: one sentence each, at most three."""
    found = []
    busy = {cell.busy: model_title(cell.model) for cell in data.cells if cell.busy}
    for reason, model in busy.items():
        found.append(f"The machine was never quiet while {model} was measured: {reason}.")
    for cell in data.cells:
        if cell.capacity is not None and (cell.capacity.speed_moved or 0) > 0.1:
            found.append(f"{model_title(cell.model)}: {speed_words(cell.capacity)}.")
    if len(of_kind(data.events, RunFinished)) < len(data.run_ids):
        found.append("The run has not finished: what is missing is said in its row.")
    return found[:3]


def _of_levels(data: ReportData) -> Iterator[NamedWarning]:
    """One a code, of the worst level; how many more have it is said."""
    by_code: dict[str, list[tuple[str, NamedWarning]]] = {}
    for cell in data.cells:
        for one in cell.levels:
            load = formatting.load(one.level.rate, one.level.started.concurrency)
            for warning in one.warnings:
                # a level that fails by far is unsteady by nature
                if one.judged.verdict == "fails" and warning.code == "Unsteady":
                    continue
                name = f"{model_title(cell.model)} at {load}"
                by_code.setdefault(warning.code, []).append((name, warning))
    for code, found in by_code.items():
        name, worst = min(found, key=lambda pair: pair[1].seriousness.rank)
        more = "" if len(found) == 1 else f" {len(found) - 1} more levels have it."
        yield NamedWarning(
            code, worst.seriousness, f"{name}: {_sentence(worst.text)}{more}", worst.advice
        )


def _interrupted(data: ReportData) -> Iterator[NamedWarning]:
    lost = of_kind(data.events, LevelAbandoned)
    if of_kind(data.events, Interrupted) or lost:
        reasons = list(dict.fromkeys(event.reason for event in lost))[:3]
        why = f": {formatting.listing(reasons)}" if reasons else ""
        text = f"The run was interrupted; {len(lost)} levels were begun and do not count{why}."
        yield NamedWarning(
            "Interrupted", NOTE, text, "The machine may have changed between its parts."
        )


def _not_finished(data: ReportData) -> Iterator[NamedWarning]:
    if len(of_kind(data.events, RunFinished)) < len(data.run_ids):
        yield NamedWarning(
            "NotFinished",
            WARNING,
            "The run has not finished: cells or levels are missing.",
            f"Go on with `crossover campaign resume {data.folders[0]}`.",
        )


def _lines_left_out(data: ReportData) -> Iterator[NamedWarning]:
    if data.damage:
        torn = [c for c in data.cells if any(not one.level.is_whole for one in c.levels)]
        yield NamedWarning(
            "LinesLeftOut",
            SERIOUS if torn else NOTE,
            f"Left out: {formatting.listing(list(data.damage))}.",
            "Measure these cells again: the file was damaged after it was written."
            if torn
            else "A writer was killed, or the disk was full; what it was about to write is lost.",
            tuple(cell.key for cell in torn),
        )


def _shared_cores(data: ReportData) -> Iterator[NamedWarning]:
    found = _unique(text for one in of_kind(data.events, CellReady) for text in one.shared_cores)
    if found:
        advice = "Use more cores, or a load generator on another machine."
        yield NamedWarning("SharedCores", WARNING, _sentence("; ".join(found)), advice)


def _endpoint_lacks(data: ReportData) -> Iterator[NamedWarning]:
    found = _unique(text for one in of_kind(data.events, CellReady) for text in one.endpoint_notes)
    if found:
        advice = "What an endpoint does not tell is shown as not measured."
        yield NamedWarning("EndpointLacks", NOTE, _sentence("; ".join(found)), advice)


def _unfinished_cells(data: ReportData) -> Iterator[NamedWarning]:
    for cell in data.cells:
        if cell.reason and cell.state != "not_started":
            yield NamedWarning(
                "CellNotMeasured" if not cell.levels else "CellNotFinished",
                WARNING,
                f"{model_title(cell.model)} {cell.weight_format}: {_sentence(cell.reason)}",
                "What is not measured is shown as such.",
                (cell.key,),
            )


def _speed_moved(data: ReportData) -> Iterator[NamedWarning]:
    for cell in data.cells:
        if cell.capacity is not None and (text := speed_words(cell.capacity)):
            yield NamedWarning(
                "SpeedMoved",
                WARNING,
                f"{model_title(cell.model)}: {text}.",
                "The interval holds both speeds; measure again at another hour.",
                (cell.key,),
            )


def _random_weights(data: ReportData) -> Iterator[NamedWarning]:
    made_up = tuple(c.key for c in data.cells if c.ready is not None and c.ready.synthetic)
    if made_up:
        yield NamedWarning(
            "RandomWeights",
            NOTE,
            "Weights are seeded random numbers in the published shape: speed and memory are those "
            "of the model, answers are noise.",
            "Use the real weights before judging quality.",
            made_up,
        )


def _one_machine(data: ReportData) -> Iterator[NamedWarning]:
    host = data.facts.get("hostname")
    if host is not None and host == data.manifest.client_facts.get("hostname"):
        yield NamedWarning(
            "OneMachine",
            NOTE,
            "Load generator and server ran on one machine.",
            "A machine of its own for the load generator leaves all cores to the server.",
        )


def _virtualised(data: ReportData) -> Iterator[NamedWarning]:
    if kind := data.facts.get("virtualisation"):
        text = f"The machine is virtual ({kind}): neighbours may take CPU time unseen from inside."
        advice = "Repeat the run at another hour and compare."
        yield NamedWarning("Virtualised", NOTE, text, advice)


RULES: tuple[Callable[[ReportData], Iterator[NamedWarning]], ...] = (
    _of_levels,
    _interrupted,
    _not_finished,
    _lines_left_out,
    _shared_cores,
    _endpoint_lacks,
    _unfinished_cells,
    _speed_moved,
    _random_weights,
    _one_machine,
    _virtualised,
)


def _unique(values: Iterable[T]) -> list[T]:
    return list(dict.fromkeys(values))


def _sentence(text: str) -> str:
    text = text.strip()
    return f"{text[:1].upper()}{text[1:]}{'' if text.endswith('.') else '.'}"

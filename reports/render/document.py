"""The report as JSON: `crossover report RUN --json`. docs/report.md says what it promises.

    document(run, found).cells[0].capacity.held

Missing is null. Times are seconds, sizes bytes, rates requests per second, by the name of a key or
by the words of its object in docs/report.schema.json, which is made from these structs.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from loadtests.metrics.energy import Energy
from loadtests.metrics.level_summary import Summary
from loadtests.metrics.named_warning import NamedWarning
from loadtests.metrics.slo import Slo, Verdict
from loadtests.records.events import Capacity, PredictedRate
from loadtests.records.schema import EngineTime
from reports.findings import Crossover, Stop, breaks_first
from reports.numbers import CellNumbers, CellState, LevelNumbers, MemoryNumbers, RunNumbers
from reports.plan.output import in_words
from reports.plan.ranking import Plan
from reports.render import tables
from reports.render.elsewhere import elsewhere_records, predicted_records
from reports.sentences import headline, sentences
from serving.backends.backend_interface import GpuLoad

# A new key leaves it as it is; a key that goes, or that means something else, raises it.
VERSION = 1


class Level(msgspec.Struct, frozen=True, kw_only=True):
    """A finished level of load; closed loops have a `concurrency`, others a rate."""

    level: str
    purpose: str
    rate_per_second: float | None
    concurrency: int | None
    start: int | None
    verdict: Verdict
    counts: bool
    confirms: bool
    cut_short: str | None
    summary: Summary
    engine_time: EngineTime | None  # of the whole level
    energy: Energy | None  # of its window, as measured


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """A model in a format on an engine; `capacity_words` says what `capacity` says."""

    key: str
    run: str
    model: str
    parameters: int | None
    weight_format: str
    backend: str
    command: str | None  # of an engine of others, as it was run; null: ours, or an endpoint
    engine_version: str | None
    device: str | None
    slots: int | None
    context_tokens: int | None
    state: CellState
    reason: str
    capacity: Capacity | None
    capacity_words: str
    predicted: PredictedRate | None
    breaks_first: str | None
    memory: MemoryNumbers
    gpu: GpuLoad | None  # of its last load
    load_seconds: float | None
    quality_kl_nats: float | None
    levels: tuple[Level, ...]


class Document(msgspec.Struct, frozen=True, kw_only=True):
    """A report. `gpus` are the rows of gpus.csv, `machines` of machines.csv.

    `predicted_machines`: what each GPU of the list, with a price, would hold of each cell's
    requests, or why it holds none. `plan`: as `crossover plan --json` prints it, unrounded; null
    without `--plan`. `facts` are those of the machine that served.
    """

    kind: Literal["crossover-report"] = "crossover-report"
    version: int = VERSION
    crossover_version: str
    runs: tuple[str, ...]
    headline: str
    sentences: tuple[str, ...]
    slo: Slo
    asked_rate_per_second: float | None
    largest: str | None
    first_not: str | None
    stops: tuple[Stop, ...]
    cells: tuple[Cell, ...]
    gpus: tuple[dict[str, Any], ...]
    machines: tuple[dict[str, Any], ...]  # of `--machine`
    predicted_machines: tuple[dict[str, Any], ...]
    plan: Plan | None
    warnings: tuple[NamedWarning, ...]
    facts: dict[str, Any]
    requests: int
    requests_counted: int
    measured_seconds: float | None


def document(run: RunNumbers, found: Crossover, plan: Plan | None = None) -> Document:
    """What the page says, as numbers; `crossover_version` is the one that measured."""
    return Document(
        crossover_version=run.manifest.crossover_version,
        runs=(run.manifest.run_id, *run.also),
        headline=headline(run, found),
        sentences=tuple(sentences(run, found)),
        slo=run.slo,
        asked_rate_per_second=found.asked_rate,
        largest=found.largest.key if found.largest is not None else None,
        first_not=found.first_not.key if found.first_not is not None else None,
        stops=found.stops,
        cells=tuple(_cell(cell, run) for cell in run.cells),
        gpus=tuple(tables.gpu_records(found)),
        machines=tuple(elsewhere_records(found)),
        predicted_machines=tuple(predicted_records(run, found)),
        plan=None if plan is None else in_words(plan),
        warnings=run.warnings,
        facts=run.facts,
        requests=run.requests,
        requests_counted=run.requests_counted,
        measured_seconds=run.measured_seconds,
    )


def encoded(made: Document) -> bytes:
    """JSON in lines; infinite and missing numbers are null."""
    return msgspec.json.format(msgspec.json.encode(made), indent=1) + b"\n"


def _cell(cell: CellNumbers, run: RunNumbers) -> Cell:
    names = (
        *("key", "model", "parameters", "weight_format", "backend", "device", "slots"),
        *("context_tokens", "state", "reason", "capacity", "predicted", "memory", "gpu"),
        *("load_seconds", "quality_kl_nats", "command", "engine_version"),
    )
    return Cell(
        **{name: getattr(cell, name) for name in names},
        run=cell.run_id,
        capacity_words=tables.state_words(cell),
        breaks_first=breaks_first(cell, run.slo),
        levels=tuple(map(_level, cell.levels)),
    )


def _level(level: LevelNumbers) -> Level:
    return Level(**{name: getattr(level, name) for name in Level.__struct_fields__})

"""Where the CPU stops, why, and what GPU would take over: numbers, no sentences.

A CPU stops by **latency** (a single-stream request misses the SLO, so no rate meets it),
by **throughput** (the asked rate is above the capacity) or by **memory** (the model does not fit).
Capacities are measured; memory is predicted from the model's shape.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import msgspec

from loadtests.metrics.slo import Slo
from loadtests.records.events import SkipCause
from models.ladder import LADDER
from models.spec import ModelSpec
from reports.numbers import CellNumbers, MemoryNumbers, RunNumbers
from reports.planning import hardware, predict


class GpuOption(msgspec.Struct, frozen=True):
    """One GPU whose memory suffices: its price is published, its floor predicted."""

    device: hardware.Device
    tpot_floor_seconds: float
    within_slo: bool | None  # the floor is not above the SLO's TPOT; None: the SLO has none


class Takeover(msgspec.Struct, frozen=True):
    """What a GPU needs to serve one model with the CPU's format, slots and context."""

    cell: CellNumbers
    need: predict.Need
    need_16bit: predict.Need
    options: tuple[GpuOption, ...]  # smallest memory first

    @property
    def cheapest(self) -> GpuOption | None:
        """The option of the lowest published price, of those that may meet the SLO."""
        fit = [one for one in self.options if one.within_slo is not False]
        priced = [one for one in fit if one.device.dollars_per_hour is not None]
        return min(priced, key=lambda one: one.device.dollars_per_hour or math.inf, default=None)


class Stop(msgspec.Struct, frozen=True):
    """What stops the CPU from serving one model of the ladder."""

    model: str
    by: Literal["memory", "latency", "throughput"]


class Rung(msgspec.Struct, frozen=True):
    """A model of the ladder with its memory; `cell` where it was part of the campaign."""

    spec: ModelSpec
    memory: MemoryNumbers
    fits: bool | None  # in the memory that may be used; None: not known
    cell: CellNumbers | None


class Crossover(msgspec.Struct, frozen=True):
    """Where the CPU stops."""

    largest: CellNumbers | None  # the largest model that meets the SLO at some rate
    first_not: CellNumbers | None  # the smallest larger one that meets it at none
    stops: tuple[Stop, ...]
    takeovers: tuple[Takeover, ...]
    rungs: tuple[Rung, ...]
    asked_rate: float | None = None

    @property
    def takeover(self) -> Takeover | None:
        """The takeover of the first model that the CPU does not serve, else of the largest."""
        wanted = self.first_not or self.largest
        return next((one for one in self.takeovers if one.cell is wanted), None)


def crossover(run: RunNumbers, asked_rate: float | None = None) -> Crossover:
    """The findings of one run. `asked_rate`: the requests/s that are needed, where known."""
    holding = [cell for cell in run.cells if cell.state == "measured" and cell.capacity.is_known]
    largest = max(holding, key=size_of, default=None)
    lost = [cell for cell in run.cells if cell.capacity.state == "none" or does_not_fit(cell)]
    larger = [cell for cell in lost if largest is None or size_of(cell) > size_of(largest)]
    wanting = [cell for cell in run.cells if cell in lost or _too_slow(cell, asked_rate)]
    if not any(cell.spec for cell in wanting):
        wanting = [largest] if largest else []
    rungs = tuple(ladder(run))
    return Crossover(
        largest=largest,
        first_not=min(larger, key=size_of, default=None),
        stops=tuple(_stops(rungs, asked_rate)),
        takeovers=tuple(one for cell in wanting if (one := takeover(cell, run.slo)) is not None),
        rungs=rungs,
        asked_rate=asked_rate,
    )


def machines(cell: CellNumbers, asked_rate: float) -> int | None:
    """Machines like this that serve `asked_rate`, by the low end of the capacity; None: unknown."""
    if not cell.capacity.is_known or not cell.capacity.low:
        return None
    return math.ceil(asked_rate / cell.capacity.low - 1e-9)


def ladder(run: RunNumbers) -> Iterator[Rung]:
    """The campaign's models, and the ladder's beyond the largest measured, with their memory."""
    by_model = {cell.spec.name: cell for cell in reversed(run.cells) if cell.spec is not None}
    if not by_model:
        return
    usual = max(by_model.values(), key=size_of)
    usable = usable_bytes(run.facts) if usual.url is None else None
    smallest = min(map(size_of, by_model.values()))
    biggest = max((size_of(cell) for cell in run.cells if cell.levels), default=0)
    beyond = [entry.spec for entry in LADDER if entry.spec.parameters > max(biggest, smallest - 1)]
    specs = {spec.name: spec for spec in beyond}
    specs |= {cell.spec.name: cell.spec for cell in by_model.values() if cell.spec is not None}
    for spec in sorted(specs.values(), key=lambda spec: spec.parameters):
        cell = by_model.get(spec.name)
        memory = cell.memory if cell is not None else predict.memory_here(spec, usual)
        total = memory.predicted_bytes
        fits = None if total is None or usable is None else total <= usable
        if cell is not None or total is not None:
            ran = cell is not None and cell.state == "measured"
            yield Rung(spec, memory, True if ran else fits, cell)


def usable_bytes(facts: Mapping[str, Any]) -> int | None:
    """Memory that was free when the run began, cut down by the control group."""
    names = ("memory_available_bytes", "cgroup_memory_bytes")
    return min((int(facts[name]) for name in names if facts.get(name)), default=None)


def does_not_fit(cell: CellNumbers) -> bool:
    """Whether a cell was skipped because memory ran out."""
    return cell.skip_cause is SkipCause.MEMORY


def takeover(cell: CellNumbers, slo: Slo) -> Takeover | None:
    """The memory that a GPU needs for this cell and the GPUs that have it; None: not known."""
    need = predict.need_of(cell)
    if cell.spec is None or cell.kv_tokens is None or need is None:
        return None
    context = typical_context_tokens(cell)
    read_bytes = predict.token_bytes(cell.spec, cell.weight_format, context, cell.kv_dtype)
    options = []
    for device in hardware.sufficient(hardware.gpus(), need.total_bytes):
        floor = predict.tpot_floor_seconds(device, read_bytes)
        within = None if slo.tpot_seconds is None else floor <= slo.tpot_seconds
        options.append(GpuOption(device, floor, within))
    need_16bit = predict.gpu_need(cell.spec, "bf16", cell.kv_tokens)
    return Takeover(cell, need, need_16bit, tuple(options))


def typical_context_tokens(cell: CellNumbers) -> int:
    """Mean tokens before the one being made, in the cell's last level; 0 where not on record."""
    every = [level.summary.throughput for level in cell.levels]
    known = [one for one in every if one.mean_prompt_tokens is not None]
    if not known:
        return 0
    last = known[-1]
    return round(last.mean_prompt_tokens or 0) + round((last.mean_output_tokens or 0) / 2)


def breaks_first(cell: CellNumbers, slo: Slo) -> str | None:
    """What most bad requests miss at the lowest failing rate; None: nothing failed."""
    failing = [level for level in cell.loaded if level.verdict == "fails"]
    if not failing and cell.capacity.state == "none" and cell.single_stream is not None:
        failing = [cell.single_stream]
    if not failing:
        return None
    answers = failing[0].answers
    late = sum(_above(ttft, slo.ttft_seconds) for ttft, _ in answers)
    slow = sum(_above(tpot, slo.tpot_seconds) for _, tpot in answers)
    lost = sum(ttft is None for ttft, _ in answers)
    most = max(late, slow, lost)
    if most == 0:
        return None
    if lost == most:
        return "errors"
    return " and ".join(name for name, count in (("TTFT", late), ("TPOT", slow)) if count == most)


def _above(seconds: float | None, limit_seconds: float | None) -> bool:
    return seconds is not None and limit_seconds is not None and seconds > limit_seconds


def _stops(rungs: Sequence[Rung], asked_rate: float | None) -> Iterator[Stop]:
    for rung in rungs:
        if rung.cell is not None and rung.cell.capacity.state == "none":
            yield Stop(rung.spec.name, "latency")
        elif rung.fits is False:
            yield Stop(rung.spec.name, "memory")
        elif rung.cell is not None and _too_slow(rung.cell, asked_rate):
            yield Stop(rung.spec.name, "throughput")


def _too_slow(cell: CellNumbers, asked_rate: float | None) -> bool:
    high = cell.capacity.high
    return asked_rate is not None and high is not None and asked_rate >= high


def size_of(cell: CellNumbers) -> int:
    return cell.parameters or 0

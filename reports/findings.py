"""Where the CPU stops, why, and what a GPU would need to take over: numbers, no sentences.

A CPU stops by **latency** (a single-stream request misses the SLO, so no rate meets it),
by **throughput** (the asked rate is above the capacity) or by **memory** (the model does not fit).
Capacities are measured and confirmed; memory and what a GPU cannot beat are predicted.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import msgspec

from loadtests.metrics.slo import Slo
from loadtests.records.events import CapacityStatus, SkipCause
from models.ladder import LADDER
from models.spec import ModelSpec
from reports.elsewhere import Capacities, ElsewhereNumbers
from reports.numbers import CellNumbers, MemoryNumbers, RunNumbers
from reports.planning import hardware, predict
from reports.planning.machine_capacity import MachineCapacity
from reports.reference.results import References


class GpuOption(msgspec.Struct, frozen=True):
    """One GPU whose memory suffices: its price is published, what it cannot beat is predicted."""

    device: hardware.Device
    roofline: predict.Roofline
    misses: tuple[str, ...] = ()  # of TTFT, TPOT and rate: what it cannot meet, even at its peaks
    unknown: tuple[str, ...] = ()  # ... and what cannot be told

    @property
    def may_suffice(self) -> bool | None:
        """Nothing rules it out. None: not known."""
        if self.misses:
            return False
        return None if self.unknown else True


class Takeover(msgspec.Struct, frozen=True):
    """What a GPU needs to serve one model with the CPU's format, slots and context."""

    cell: CellNumbers
    need: predict.Need
    need_16bit: predict.Need
    options: tuple[GpuOption, ...]  # smallest memory first
    rate_per_second: float | None = None  # that it must serve: as asked, else what the CPU holds
    rates: tuple[MachineCapacity, ...] = ()  # what each GPU of the list is predicted to hold

    def rate_of(self, device: str) -> MachineCapacity | None:
        """What one such device is predicted to hold; None: not predicted, or only of several."""
        own = (one for one in self.rates if one.device == device and one.devices == 1)
        return next(own, None)

    @property
    def surest(self) -> MachineCapacity | None:
        """The cheapest that is predicted to hold the rate (any, where none is) in nine of ten."""
        wanted = self.rate_per_second or 0.0
        fit = [one for one in self.rates if one.dollars_per_hour and (one.low or 0.0) > 0.0]
        sure = [one for one in fit if (one.low or 0.0) >= wanted]
        return min(sure, key=lambda one: one.dollars_per_hour or math.inf, default=None)

    @property
    def cheapest(self) -> GpuOption | None:
        """The lowest published price of those that nothing rules out: memory, TTFT, TPOT, rate."""
        fit = [one for one in self.options if one.may_suffice]
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

    largest: CellNumbers | None  # the largest model with a confirmed rate
    first_not: CellNumbers | None  # the smallest larger one that holds at no rate, or does not fit
    between: tuple[CellNumbers, ...]  # larger than `largest`, below `first_not`: none confirmed
    stops: tuple[Stop, ...]
    takeovers: tuple[Takeover, ...]
    rungs: tuple[Rung, ...]
    asked_rate: float | None = None
    elsewhere: tuple[ElsewhereNumbers, ...] = ()  # the run's models on calibrated machines
    capacities: Capacities = {}  # of GPUs, predicted, by cell
    references: References | None = None  # shipped results of the same; None: not asked for

    @property
    def takeover(self) -> Takeover | None:
        """The takeover of the first model that the CPU does not serve, else of the largest."""
        wanted = self.first_not or self.largest
        same = [one for one in self.takeovers if one.cell is wanted]
        if wanted is not None and wanted.command is not None:  # of such an engine no memory is told
            same = [one for one in self.takeovers if one.cell.model == wanted.model]
        return next(iter(same), None)


def crossover(
    run: RunNumbers, asked_rate: float | None = None, capacities: Capacities | None = None
) -> Crossover:
    """The findings of one run.

    `asked_rate`: the requests/s that are needed, where known. `capacities`: what GPUs would hold
    (reports.elsewhere.gpu_capacities); None: not predicted.
    """
    stand = standing(run.cells)
    wanting = [cell for cell in run.cells if _is_lost(cell) or _too_slow(cell, asked_rate)]
    if not any(cell.spec for cell in wanting):
        wanting = [_ours(stand.largest, run.cells)] if stand.largest else []
    rungs = tuple(ladder(run))
    held = capacities or {}
    takeovers = (takeover(cell, run, asked_rate, held) for cell in wanting)
    return Crossover(
        largest=stand.largest,
        first_not=stand.first_not,
        between=stand.between,
        stops=tuple(_stops(rungs, asked_rate)),
        takeovers=tuple(one for one in takeovers if one is not None),
        rungs=rungs,
        asked_rate=asked_rate,
        capacities=held,
    )


def _ours(cell: CellNumbers, cells: Sequence[CellNumbers]) -> CellNumbers:
    """A cell of the same model on an engine of ours, whose memory is known; else the cell."""
    own = (one for one in cells if one.model == cell.model and one.command is None)
    return cell if cell.command is None else next(own, cell)


class Standing(msgspec.Struct, frozen=True):
    """The largest model with a confirmed rate, and those above it."""

    largest: CellNumbers | None
    between: tuple[CellNumbers, ...]  # below `first_not`: nothing confirmed, nothing ruled out
    first_not: CellNumbers | None  # the smallest that holds at no rate, or does not fit


def standing(cells: Sequence[CellNumbers]) -> Standing:
    """How far the ladder is confirmed."""
    held = (cell for cell in cells if cell.held)
    largest = max(held, key=lambda cell: (size_of(cell), cell.held or 0.0), default=None)
    above = [cell for cell in cells if largest is None or size_of(cell) > size_of(largest)]
    first_not = min((cell for cell in above if _is_lost(cell)), key=size_of, default=None)
    between = tuple(
        cell
        for cell in above
        if cell.capacity is not None
        and not _is_lost(cell)
        and (first_not is None or size_of(cell) < size_of(first_not))
    )
    return Standing(largest, between, first_not)


def _is_lost(cell: CellNumbers) -> bool:
    return cell.status is CapacityStatus.NONE or does_not_fit(cell)


def machines(cell: CellNumbers, asked_rate: float) -> int | None:
    """Machines like this that serve `asked_rate`, by the confirmed rate; None: not known."""
    return math.ceil(asked_rate / cell.held - 1e-9) if cell.held else None


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
        memory = cell.memory if cell is not None else predict.memory_here(spec, usual, run.facts)
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


def takeover(
    cell: CellNumbers, run: RunNumbers, asked_rate: float | None, capacities: Capacities
) -> Takeover | None:
    """The memory that a GPU needs for this cell and the GPUs that have it; None: not known.

    Requests are as long as those that were measured, of this cell or else of another of the run.
    """
    need = predict.need_of(cell)
    if not is_on_cpu(cell) or cell.spec is None or cell.kv_tokens is None or need is None:
        return None
    wanted = asked_rate or cell.held
    lengths = next((found for one in (cell, *run.cells) if (found := mean_lengths(one))), None)
    options = []
    for device in hardware.sufficient(hardware.gpus(), need.total_bytes):
        line = predict.roofline(device, cell, lengths)
        if line is not None:
            options.append(_judged(device, line, run.slo, wanted))
    need_16bit = predict.gpu_need(cell.spec, "bf16", cell.kv_tokens)
    rates = capacities.get(cell.key, ())
    return Takeover(cell, need, need_16bit, tuple(options), wanted, rates)


def is_on_cpu(cell: CellNumbers) -> bool:
    """Whether a CPU serves it, as far as is known: of an endpoint only where it says so."""
    return cell.device == "cpu" or (cell.device is None and cell.url is None)


def _judged(
    device: hardware.Device, found: predict.Roofline, slo: Slo, wanted: float | None
) -> GpuOption:
    """The one filter of GPUs beside memory and price: a bound that is missed rules a GPU out."""
    misses, unknown = [], []
    for name, floor, limit in (
        ("TTFT", found.ttft_seconds, slo.ttft_seconds),
        ("TPOT", found.tpot_seconds, slo.tpot_seconds),
        ("rate", _inverse(found.rate_per_second), _inverse(wanted)),
    ):
        if limit is None:
            continue
        if floor is not None and floor > limit:
            misses.append(name)
        elif floor is None or (not found.has_arithmetic and name != "TPOT"):
            unknown.append(name)
    return GpuOption(device, found, tuple(misses), tuple(unknown))


def _inverse(rate: float | None) -> float | None:
    return 1 / rate if rate else None


def mean_lengths(cell: CellNumbers) -> tuple[int, int] | None:
    """Mean prompt and output tokens of the cell's levels; None where they are not on record."""
    levels = [level.summary for level in cell.levels if level.summary.counts.due]
    known = [
        (one.counts.due, one.throughput.mean_prompt_tokens, one.throughput.mean_output_tokens)
        for one in levels
    ]
    pairs = [(due, p, o) for due, p, o in known if p is not None and o is not None]
    count = sum(due for due, _, _ in pairs)
    if not count:
        return None
    prompt = sum(due * p for due, p, _ in pairs) / count
    return round(prompt), round(sum(due * o for due, _, o in pairs) / count)


def breaks_first(cell: CellNumbers, slo: Slo) -> str | None:
    """What most bad requests miss at the lowest failing rate; None: nothing failed."""
    failing = [level for level in cell.loaded if level.verdict == "fails"]
    if not failing and cell.status is CapacityStatus.NONE and cell.single_stream is not None:
        failing = [cell.single_stream]
    if not failing:
        return None
    answers = failing[0].answers
    late = sum(_above(one.ttft_seconds, slo.ttft_seconds) for one in answers)
    slow = sum(_above(one.tpot_seconds, slo.tpot_seconds) for one in answers)
    lost = sum(one.ttft_seconds is None for one in answers)
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
        if rung.cell is not None and rung.cell.status is CapacityStatus.NONE:
            yield Stop(rung.spec.name, "latency")
        elif rung.fits is False:
            yield Stop(rung.spec.name, "memory")
        elif rung.cell is not None and _too_slow(rung.cell, asked_rate):
            yield Stop(rung.spec.name, "throughput")


def _too_slow(cell: CellNumbers, asked_rate: float | None) -> bool:
    high = cell.capacity.high if cell.capacity is not None else None
    return asked_rate is not None and high is not None and asked_rate >= high


def size_of(cell: CellNumbers) -> int:
    return cell.parameters or 0

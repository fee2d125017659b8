"""Which limit binds each configuration of a run. Page, Markdown, plan and `quick` all ask here.

binding = binding_of(cell, data.slo)       # BindingLimit, or None where it is not known
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import msgspec

from crossover.loadtests.levels.disturbance import MAX_SLIGHT_SHARE
from crossover.reports.answers.model_answers import ModelAnswer
from crossover.reports.report_data import CPU, GPU, CellData, ReportData
from crossover.serving.backends.backend_table import BACKENDS
from crossover.serving.capacity.binding_limit import (
    MIN_TAKEN,
    BindingLimit,
    binding_limit,
    by_other_processes,
    missed_unloaded,
)
from crossover.serving.capacity.scheduler_settings import MAX_CPU_SLOTS, MAX_GPU_SLOTS
from crossover.serving.capacity.slo import Slo

# How endpoints of other projects are told their slots, by their software.
SLOTS_OPTIONS = {
    "llama-server": "`llama-server --parallel {slots}`, whose context (-c) all slots share",
    "ollama": "the variable OLLAMA_NUM_PARALLEL={slots} of the Ollama server",
    "vllm": "`vllm serve --max-num-seqs {slots}`",
}


@lru_cache(maxsize=64)
def binding_of(cell: CellData, slo: Slo) -> BindingLimit | None:
    """Return what limits a configuration. None where its step times or its capacity are not known,
    or where the SLO has no limit."""
    binding = _binding_on_any_device(cell, slo)
    return None if binding is None else with_remedies_for(cell, binding)


def with_remedies_for(cell: CellData, binding: BindingLimit) -> BindingLimit:
    """Return the limit with the remedies that help the device and weight format of a
    configuration."""
    return msgspec.structs.replace(
        binding, is_on_gpu=cell.side == GPU, is_int8=cell.weight_format == "int8"
    )


def _binding_on_any_device(cell: CellData, slo: Slo) -> BindingLimit | None:
    if not slo.limits or cell.capacity is None:
        return None
    taken_share = taken_share_of(cell)
    server = cell.simulated()
    if server is None:
        # Without step times it is not known whether the SLO would be met without them.
        if taken_share is not None and taken_share >= MIN_TAKEN and cell.estimated_rate:
            return by_other_processes(cell.estimated_rate, taken_share)
        return _missed_unloaded(cell, slo) if cell.estimated_rate == 0.0 else None
    is_of_busy_machine = cell.capacity.busy_rate in (None, cell.estimated_rate)
    if not is_of_busy_machine:  # the estimate is of the machine without other processes
        taken_share = None
    if cell.estimated_rate is None:
        return None
    binding = binding_limit(
        server,
        slo,
        cell.estimated_rate,
        taken_share=taken_share,
        max_slots=_max_slots(cell),
        doubling_cost=_doubling_cost(cell),
    )
    return msgspec.structs.replace(binding, slots_option=_slots_option(cell))


def _max_slots(cell: CellData) -> int:
    """Return the most slots to consider. Slots that the campaign has chosen are the best ones that
    memory has room for."""
    if cell.slots_choice is not None:
        return cell.slots_choice.slots
    return MAX_CPU_SLOTS if cell.device == CPU else MAX_GPU_SLOTS


def _doubling_cost(cell: CellData) -> float:
    """Return by which share steps take longer with twice as many slots."""
    backend = BACKENDS.get("llama_cpp" if cell.backend == "llama-server" else cell.backend)
    return backend.slot_doubling_cost if backend is not None and cell.device != GPU else 0.0


def _slots_option(cell: CellData) -> str:
    """Return how the server is told its slots; "": not known."""
    if cell.engine:  # whose command has the number if it takes one
        return "`slots = {slots}` in [server] of the campaign" if cell.are_slots_set else ""
    if not cell.is_endpoint:
        return "`slots = {slots}` in [server] of the campaign, or leave it out to have them chosen"
    if cell.backend in BACKENDS:
        return "`crossover serve --slots {slots}`"
    return SLOTS_OPTIONS.get(cell.backend, "")


def _missed_unloaded(cell: CellData, slo: Slo) -> BindingLimit | None:
    """Return the limit that most of the measured single requests miss; None: they miss none, or
    none was measured."""
    streams = [level for level in cell.single_stream_levels if level.counts]
    if all(slo.met_by(times).all() for times in streams):
        return None
    return missed_unloaded(streams, slo)


def taken_share_of(cell: CellData) -> float | None:
    """Return the share of its CPU time that the engine lost to other processes, as the mean of the
    levels that count; None: it was not measured."""
    disturbances = [
        measured.level.finished.disturbance
        for measured in cell.levels
        if measured.level.counts and measured.level.finished is not None
    ]
    shares = [
        disturbance.lost_share
        for disturbance in disturbances
        if disturbance is not None and disturbance.lost_share is not None
    ]
    return sum(shares) / len(shares) if shares else None


def may_miss_because_of_others(cell: CellData, slo: Slo) -> bool:
    """Return whether other processes took so much CPU time that requests may have missed the SLO
    because of them, not because of the machine.

    False if single requests miss it without what was taken from them: then more time on the cores
    would not have helped.
    """
    if not cell.never_idle_reason and (taken_share_of(cell) or 0.0) <= MAX_SLIGHT_SHARE:
        return False
    streams = [level for level in cell.single_stream_levels if level.counts]
    is_none = cell.capacity is not None and cell.capacity.is_none
    if is_none and not any(level.has_accepted_disturbance for level in streams):
        return False  # it was judged by the times without other processes
    judged = [level.without_other_processes.judge(slo) for level in streams]
    due = sum(one.due for one in judged)
    return not due or sum(one.good for one in judged) >= slo.target * due


def bindings_of(
    data: ReportData, answers: Sequence[ModelAnswer]
) -> list[tuple[CellData, BindingLimit]]:
    """Return the configurations of the first table whose limit is known, with that limit."""
    cells = [cell for answer in answers for cell in answer.cells]
    bindings = [(cell, binding_of(cell, data.slo)) for cell in cells]
    return [(cell, binding) for cell, binding in bindings if binding is not None]


def featured_binding(
    bindings: Sequence[tuple[CellData, BindingLimit]],
) -> tuple[CellData, BindingLimit]:
    """Return the pair that the first screen shows: that of the largest model that is served, or the
    last one if none is."""
    return next((pair for pair in reversed(bindings) if pair[0].is_served), bindings[-1])

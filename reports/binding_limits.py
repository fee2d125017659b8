"""Which limit binds each configuration of a run: page, Markdown, plan and `quick` ask here.

binding = binding_of(cell, data.slo)       # BindingLimit, or None where it is not known
"""

from __future__ import annotations

from functools import lru_cache
from math import inf

import msgspec

from crossover.reports.report_data import CellData
from crossover.serving.capacity.binding_limit import (
    MIN_TAKEN,
    BindingLimit,
    binding_limit,
    by_other_processes,
)
from crossover.serving.capacity.simulated_capacity import QUICK_REQUESTS, Server
from crossover.serving.capacity.slo import Slo


@lru_cache(maxsize=64)
def binding_of(cell: CellData, slo: Slo) -> BindingLimit | None:
    """Return what limits a configuration; None where its step times or its capacity are not known,
    or where the SLO has no limit."""
    found = _binding(cell, slo)
    if found is None or cell.side != "gpu":
        return found
    return msgspec.structs.replace(found, is_on_gpu=True)


def _binding(cell: CellData, slo: Slo) -> BindingLimit | None:
    if slo.ttft_seconds is None and slo.tpot_seconds is None:
        return None
    if cell.capacity is None:
        return None
    traffic, taken_share = cell.traffic, taken_share_of(cell)
    if taken_share is not None and taken_share >= MIN_TAKEN:
        return by_other_processes(cell.estimated_rate or 0.0, taken_share)
    if cell.estimated_rate is None:
        return None
    if cell.step_times is None or cell.policy is None or traffic is None:
        return _unloaded(cell, slo) if cell.estimated_rate == 0.0 else None
    server = Server(
        cell.step_times, cell.policy, traffic.lengths, traffic.arrivals, count=QUICK_REQUESTS
    )
    return binding_limit(server, slo, cell.estimated_rate, taken_share=taken_share)


def _unloaded(cell: CellData, slo: Slo) -> BindingLimit | None:
    """Return which limit single requests miss more often, as measured; None: none was measured."""
    late = {"unloaded_ttft": 0, "unloaded_tpot": 0}
    for one in cell.levels:
        level = one.level
        if level.is_single_stream and level.counts:
            counted = level.counted
            late["unloaded_ttft"] += int((level.ttft[counted] > (slo.ttft_seconds or inf)).sum())
            late["unloaded_tpot"] += int((level.tpot[counted] > (slo.tpot_seconds or inf)).sum())
    if not any(late.values()):
        return None
    is_ttft = late["unloaded_ttft"] >= late["unloaded_tpot"]
    return BindingLimit(kind="unloaded_ttft" if is_ttft else "unloaded_tpot", rate=0.0)


def taken_share_of(cell: CellData) -> float | None:
    """Return the part of the time that other processes took from the engine, on average over the
    levels that count; None: it was not watched."""
    shares = [
        level.level.finished.disturbance.lost_share
        for level in cell.levels
        if level.level.counts
        and level.level.finished is not None
        and level.level.finished.disturbance is not None
        and level.level.finished.disturbance.lost_share is not None
    ]
    return sum(shares) / len(shares) if shares else None

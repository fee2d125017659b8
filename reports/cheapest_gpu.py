"""Where a GPU takes over, and which: the one rule that page, map and sentence follow.

    takes_over(cell, data.slo)         # TakeOver(rate=..., gpu=DeviceCapacity(...))

**The rule: the cheapest in the catalogue whose low end (90 %, one-sided) holds the rate.** The rate
is what a CPU's limit asks for: a little more than it holds; where a model is not even good alone,
the smallest rate that anybody would ask for. A plan chooses by the same rule (plan_costs.py).
"""

from __future__ import annotations

import math

import msgspec

from crossover.models.model_spec import ModelSpec
from crossover.reports.devices.device_capacity import (
    SLOW,
    TOGETHER,
    DeviceCapacity,
    Service,
    Traffic,
    capacity_of,
    holds,
    machine_of,
    simulated,
)
from crossover.reports.devices.device_catalog import priced_gpus
from crossover.reports.errors import ReportError
from crossover.reports.report_data import GPU, CellData, ReportData
from crossover.serving.capacity.slo import Slo

ABOVE = 1.1  # times the CPU's limit: what a GPU that takes over holds at least
MIN_RATE = 1 / 3600  # requests/s: one an hour, where the CPU holds nothing
GPU_FORMAT = "bf16"  # what a GPU is taken to serve in: 16 bits


class TakeOver(msgspec.Struct, frozen=True, kw_only=True):
    """The GPU that takes over from a cell's CPU: predicted. None of `gpu`: `reason` says why."""

    rate: float  # requests/s that were asked of it
    gpu: DeviceCapacity | None
    reason: str = ""


def takes_over(cell: CellData, slo: Slo) -> TakeOver | None:
    """For a configuration on a CPU, whatever GPU the machine has; None where its shape, its
    requests or its limit is not known, and for a configuration on a GPU."""
    spec, traffic = cell.spec, cell.traffic
    if spec is None or traffic is None or cell.estimated_rate is None or cell.side == GPU:
        return None
    asked = max(cell.estimated_rate * ABOVE, MIN_RATE)
    offers = [
        ((one.dollars_per_hour or math.inf) * count, count, one)
        for one in priced_gpus()
        for count in TOGETHER
    ]
    for _, count, device in sorted(offers, key=lambda offer: offer[:2]):
        service = Service(machine_of(device), spec, GPU_FORMAT, traffic, count)
        try:
            if holds(service, slo, asked) == "yes":
                return TakeOver(rate=asked, gpu=capacity_of(service, slo))
        except ReportError:  # its memory does not suffice, or its peak is not known
            continue
    return TakeOver(
        rate=asked, gpu=None, reason="no GPU of the catalog serves it with 90 % confidence"
    )


def fitting(spec: ModelSpec, traffic: Traffic, most: int) -> list[Service]:
    """The cheapest GPUs that the model fits on, whatever they hold."""
    found: list[Service] = []
    for device in priced_gpus():
        service = Service(machine_of(device), spec, GPU_FORMAT, traffic)
        try:
            simulated(service, SLOW)
        except ReportError:
            continue
        found.append(service)
        if len(found) == most:
            break
    return found


def best_cells(data: ReportData) -> dict[str, dict[str, CellData]]:
    """Model, fewest active parameters first -> side -> its configuration with the highest confirmed
    rate, then limit. Configurations on a CPU and on a GPU are never ranked against each other."""

    def rank(cell: CellData) -> tuple[float, float]:
        return cell.confirmed_rate or 0.0, cell.estimated_rate or 0.0

    best: dict[str, dict[str, CellData]] = {}
    for cell in data.cells:
        sides = best.setdefault(cell.model, {})
        now = sides.get(cell.side)
        if now is None or rank(cell) > rank(now):
            sides[cell.side] = cell
    return best

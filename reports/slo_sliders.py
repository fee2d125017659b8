"""What the page's sliders show: each model on each device, under other limits and another target.

A lattice of TTFT x TPOT x target, of the SLO attainments that the same step times simulate; what is
confirmed is judged anew from the measured levels. One simulation a rate serves all limits.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import product
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from crossover.loadtests.capacity.capacity_estimate import confirmed_rate
from crossover.models import formatting
from crossover.reports.answer_tables import alone_words
from crossover.reports.cheapest_gpu import ABOVE, MIN_RATE, fitting
from crossover.reports.devices.device_capacity import SLOW, simulated
from crossover.reports.headline import Answer
from crossover.reports.report_data import CellData, ReportData
from crossover.serving.capacity.simulated_capacity import Server
from crossover.serving.capacity.slo import Slo

TTFT = (0.2, 0.5, 1.0, 2.0, 3.0, 5.0, 10.0, 30.0)
TPOT = (0.03, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0)
TARGET = (0.8, 0.9, 0.95, 0.99)
RATES = 10  # from far below to above what saturates the server
OVERLOAD = 1.1  # times what saturates the server: what holds there has no limit
REQUESTS = 1_200
GPUS = 2  # the cheapest that a model fits on, whose low ends are told too

Array = npt.NDArray[Any]
Grid = Sequence[tuple[float, ...]]  # (TTFT, TPOT, target), the last quickest


class Lattice(msgspec.Struct, frozen=True, kw_only=True):
    """The axes, where the run's SLO is on them, and the answers of each configuration of the first
    table at every point."""

    ttft: tuple[float, ...]
    tpot: tuple[float, ...]
    target: tuple[float, ...]
    run: dict[str, int]
    sides: tuple[str, ...]  # the devices that were measured
    # One for each model and device that has a step-time model; of others nothing is known under
    # other SLOs.
    entries: tuple[dict[str, Any], ...]


def lattice_of(answers: Sequence[Answer], data: ReportData) -> Lattice | None:
    """None where no configuration has a step-time model, or the SLO has not both limits."""
    slo = data.slo
    if slo.ttft_seconds is None or slo.tpot_seconds is None:
        return None
    own = (slo.ttft_seconds, slo.tpot_seconds, slo.target)
    ttft, tpot, target = axes = [
        tuple(sorted({*usual, value}))
        for usual, value in zip((TTFT, TPOT, TARGET), own, strict=True)
    ]
    grid = list(product(*axes))
    entries = [
        entry | {"model": place, "side": cell.side}
        for place, answer in enumerate(answers)
        for cell in answer.cells
        if (entry := _entry(cell, answer, grid, grid.index(own))) is not None
    ]
    if not entries:
        return None
    places = (axis.index(value) for axis, value in zip(axes, own, strict=True))
    run = dict(zip(("ttft", "tpot", "target"), places, strict=True))
    return Lattice(
        ttft=ttft, tpot=tpot, target=target, run=run, sides=data.sides, entries=tuple(entries)
    )


def _entry(cell: CellData, answer: Answer, grid: Grid, own: int) -> dict[str, Any] | None:
    slo = answer.slo
    if cell.step_times is None or cell.policy is None or cell.traffic is None:
        return None
    lengths, arrivals = cell.traffic.lengths, cell.traffic.arrivals
    alone, limits = _limits(
        Server(cell.step_times, cell.policy, lengths, arrivals, count=REQUESTS), grid
    )
    if (
        cell.estimated_rate and limits[own] > 0
    ):  # so that it says what the table says under the run's SLO
        limits *= cell.estimated_rate / limits[own]
    held = np.array(_held(cell, grid, slo, limits))
    gpus: list[dict[str, str]] = []
    over = np.full(len(grid), -1)
    if cell.spec is not None and answer.gpu is None:
        wanted = np.maximum(limits * ABOVE, MIN_RATE)
        for service in fitting(cell.spec, cell.traffic, GPUS):
            slow, machine = simulated(service, SLOW), service.machine
            over = np.where((over < 0) & (_limits(slow, grid)[1] >= wanted), len(gpus), over)
            price = formatting.dollars_per_hour(machine.dollars_per_hour)
            gpus.append({"name": machine.name, "price": price})
    return {
        "title": answer.title,
        "unit": formatting.rate_unit(cell.like),  # its seconds, and its name
        "alone": alone_words(cell),
        "gpus": gpus,
        "answers": {
            "alone": alone.tolist(),
            "limit": [float(f"{one:.3g}") for one in limits],
            "held": [float(f"{one:.3g}") for one in held],
            "gpu": over.tolist(),
        },
    }


def _limits(server: Server, grid: Grid) -> tuple[Array, Array]:
    """Whether one at a time is good, and the capacity, at every point."""
    rates = server.saturated_rate() * np.geomspace(0.03, OVERLOAD, RATES)
    played = [server.play(float(rate)) for rate in rates]
    single = server.alone()

    @cache
    def shares(ttft: float, tpot: float) -> tuple[float, Array]:
        each = np.array([one.good(ttft, tpot).mean() for one in played])
        return float(single.good(ttft, tpot).mean()), each

    alone = np.array([shares(ttft, tpot)[0] >= target for ttft, tpot, target in grid])
    found = [_crossing(rates, shares(ttft, tpot)[1], target) for ttft, tpot, target in grid]
    return alone, np.where(alone, found, 0.0)


def _crossing(rates: Array, shares: Array, target: float) -> float:
    """Straight in ln(rate) between the last rate that reaches the target and the next; at most the
    rate that saturates the server."""
    good = np.flatnonzero(shares >= target)
    if not len(good):
        return 0.0
    last, saturated = int(good.max()), float(rates[-1]) / OVERLOAD
    if last + 1 == len(rates):
        return saturated
    part = (shares[last] - target) / max(shares[last] - shares[last + 1], 1e-9)
    return min(saturated, float(rates[last] * (rates[last + 1] / rates[last]) ** min(part, 1.0)))


def _held(cell: CellData, grid: Grid, slo: Slo, limits: Array) -> list[float]:
    """The rate that is confirmed, at every point; 0.0: none."""
    found, levels = [], [one.level for one in cell.levels]
    for (ttft, tpot, target), limit in zip(grid, limits, strict=True):
        asked = msgspec.structs.replace(slo, ttft_seconds=ttft, tpot_seconds=tpot, target=target)
        found.append(confirmed_rate(levels, asked, limit, cell.least_seconds) or 0.0)
    return found

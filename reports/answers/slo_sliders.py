"""What the page's sliders show: each model on each device, under other limits and another target.

The lattice has a point for each combination of TTFT, TPOT and target. Capacities come from
simulations with the run's step times: one simulation for each rate serves all limits. Confirmed
rates are judged again from the measured levels.
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
from crossover.reports.answers.answer_table import single_stream_words
from crossover.reports.answers.cheapest_gpu import MIN_GAIN, MIN_RATE, gpus_that_fit
from crossover.reports.answers.model_answers import ModelAnswer
from crossover.reports.devices.device_capacity import SLOW, simulation_of
from crossover.reports.report_data import CellData, ReportData
from crossover.serving.capacity.simulated_capacity import Server
from crossover.serving.capacity.slo import Slo

TTFT_SECONDS = (0.2, 0.5, 1.0, 2.0, 3.0, 5.0, 10.0, 30.0)
TPOT_SECONDS = (0.03, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0)
TARGETS = (0.8, 0.9, 0.95, 0.99)
RATES = 10  # simulated rates, from far below to above the rate that saturates the server
MIN_LOAD, MAX_LOAD = 0.03, 1.1  # their ends, as multiples of the rate that saturates the server
REQUESTS = 1_200  # of each simulation
GPUS = 2  # candidates for the takeover: the cheapest GPUs that the model fits

Array = npt.NDArray[Any]
Grid = Sequence[tuple[float, ...]]  # (TTFT, TPOT, target), of which the last changes fastest


class Lattice(msgspec.Struct, frozen=True, kw_only=True):
    """The axes, the place of the run's SLO on them, and the answers of each configuration of the
    first table at every point."""

    ttft: tuple[float, ...]
    tpot: tuple[float, ...]
    target: tuple[float, ...]
    run: dict[str, int]
    sides: tuple[str, ...]  # the devices that were measured
    # One entry for each model and device with a step-time model. Nothing is known about the other
    # configurations under another SLO.
    entries: tuple[dict[str, Any], ...]


def lattice_of(answers: Sequence[ModelAnswer], data: ReportData) -> Lattice | None:
    """Return the lattice; None where no configuration has a step-time model, or the SLO lacks one
    of the two limits."""
    slo = data.slo
    if slo.ttft_seconds is None or slo.tpot_seconds is None:
        return None
    run_slo = (slo.ttft_seconds, slo.tpot_seconds, slo.target)
    ttft, tpot, target = axes = [
        tuple(sorted({*defaults, value}))
        for defaults, value in zip((TTFT_SECONDS, TPOT_SECONDS, TARGETS), run_slo, strict=True)
    ]
    grid = list(product(*axes))
    entries = [
        entry | {"model": model_index, "side": cell.side}
        for model_index, answer in enumerate(answers)
        for cell in answer.cells
        if (entry := _entry(cell, answer, grid, grid.index(run_slo))) is not None
    ]
    if not entries:
        return None
    places = (axis.index(value) for axis, value in zip(axes, run_slo, strict=True))
    run = dict(zip(("ttft", "tpot", "target"), places, strict=True))
    return Lattice(
        ttft=ttft, tpot=tpot, target=target, run=run, sides=data.sides, entries=tuple(entries)
    )


def _entry(
    cell: CellData, answer: ModelAnswer, grid: Grid, run_point: int
) -> dict[str, Any] | None:
    """Return the answers of one configuration at every point of the grid; None: it has no step-time
    model. `run_point` is the index of the run's own SLO in the grid."""
    if cell.step_times is None or cell.policy is None or cell.traffic is None:
        return None
    lengths, arrivals = cell.traffic.lengths, cell.traffic.arrivals
    server = Server(cell.step_times, cell.policy, lengths, arrivals, count=REQUESTS)
    meets_unloaded, capacities = _capacities(server, grid)
    if cell.estimated_rate and capacities[run_point] > 0:
        # Under the run's SLO the sliders must show the capacity that the table shows.
        capacities *= cell.estimated_rate / capacities[run_point]
    confirmed = _confirmed_rates(cell, grid, answer.slo, capacities)
    gpus: list[dict[str, str]] = []
    takeover = np.full(len(grid), -1)  # index of the GPU that takes over; -1: none of `gpus`
    if cell.spec is not None and answer.gpu is None:
        wanted_rates = np.maximum(capacities * MIN_GAIN, MIN_RATE)
        for service in gpus_that_fit(cell.spec, cell.traffic, GPUS):
            _, low_ends = _capacities(simulation_of(service, SLOW), grid)
            is_first_to_serve = (takeover < 0) & (low_ends >= wanted_rates)
            takeover = np.where(is_first_to_serve, len(gpus), takeover)
            price = formatting.dollars_per_hour(service.machine.dollars_per_hour)
            gpus.append({"name": service.machine.name, "price": price})
    return {
        "title": answer.model,
        "unit": formatting.rate_unit(cell.like),  # its seconds, and its name
        "alone": single_stream_words(cell),
        "gpus": gpus,
        "answers": {
            "alone": meets_unloaded.tolist(),
            "limit": [float(f"{rate:.3g}") for rate in capacities],
            "held": [float(f"{rate:.3g}") for rate in confirmed],
            "gpu": takeover.tolist(),
        },
    }


def _capacities(server: Server, grid: Grid) -> tuple[Array, Array]:
    """Return, for every point, whether single requests meet the SLO, and the capacity (requests/s;
    0: they do not)."""
    rates = server.saturated_rate() * np.geomspace(MIN_LOAD, MAX_LOAD, RATES)
    simulations = [server.play(float(rate)) for rate in rates]
    single_stream = server.alone()

    @cache
    def attainments(ttft: float, tpot: float) -> tuple[float, Array]:
        """The SLO attainment of single requests, and at each of the rates."""
        at_rates = np.array([simulated.good(ttft, tpot).mean() for simulated in simulations])
        return float(single_stream.good(ttft, tpot).mean()), at_rates

    meets_unloaded = np.array([attainments(ttft, tpot)[0] >= target for ttft, tpot, target in grid])
    crossings = [
        _crossing(rates, attainments(ttft, tpot)[1], target) for ttft, tpot, target in grid
    ]
    return meets_unloaded, np.where(meets_unloaded, crossings, 0.0)


def _crossing(rates: Array, attainments: Array, target: float) -> float:
    """Return the rate at which the SLO attainment falls to the target, at most the rate that
    saturates the server; 0.0: no rate reaches the target.

    Between the last rate that reaches the target and the next, attainment is taken to be a straight
    line in ln(rate).
    """
    reaching = np.flatnonzero(attainments >= target)
    if not len(reaching):
        return 0.0
    last, saturated_rate = int(reaching.max()), float(rates[-1]) / MAX_LOAD
    if last + 1 == len(rates):
        return saturated_rate
    drop = max(attainments[last] - attainments[last + 1], 1e-9)
    part = min((attainments[last] - target) / drop, 1.0)
    return min(saturated_rate, float(rates[last] * (rates[last + 1] / rates[last]) ** part))


def _confirmed_rates(cell: CellData, grid: Grid, slo: Slo, capacities: Array) -> list[float]:
    """Return the confirmed rate at every point; 0.0: none."""
    rates, levels = [], [measured.level for measured in cell.levels]
    for (ttft, tpot, target), capacity in zip(grid, capacities, strict=True):
        moved = msgspec.structs.replace(slo, ttft_seconds=ttft, tpot_seconds=tpot, target=target)
        rates.append(confirmed_rate(levels, moved, capacity, cell.least_seconds) or 0.0)
    return rates

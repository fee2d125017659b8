"""What the page's sliders show: each model on each device, under other limits and another target.

The lattice has a point for each combination of TTFT, TPOT and target. Capacities come from
simulations with the run's step times: one simulation for each rate serves all limits. Confirmed
rates are judged again from the measured levels.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import product
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from crossover.loadtests.capacity.capacity_estimate import confirmed_rate
from crossover.models import formatting
from crossover.reports.answers.answer_table import single_stream_times
from crossover.reports.answers.cheapest_gpu import MIN_GAIN, MIN_RATE, gpus_that_fit
from crossover.reports.answers.model_answers import ModelAnswer
from crossover.reports.devices.device_capacity import SLOW_STEPS, simulation_of
from crossover.reports.report_data import CellData, ReportData
from crossover.serving.capacity.simulated_capacity import Server
from crossover.serving.capacity.slo import Slo

TTFT_SECONDS = (0.2, 0.5, 1.0, 2.0, 3.0, 5.0, 10.0, 30.0)
TPOT_SECONDS = (0.03, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0)
TARGETS = (0.8, 0.9, 0.95, 0.99)
RATES = 10  # simulated rates, on a logarithmic scale between the two loads below
MIN_LOAD, MAX_LOAD = 0.03, 1.1  # as multiples of the rate that saturates the server
REQUESTS = 1_200  # of each simulation
MAX_GPUS = 2  # candidates for the takeover: the cheapest GPUs that the model fits

Array = npt.NDArray[Any]


class GridPoint(NamedTuple):
    """One position of the three sliders."""

    ttft_seconds: float
    tpot_seconds: float
    target: float


Grid = Sequence[GridPoint]  # all positions; the target changes fastest, then TPOT


class GridAnswers(msgspec.Struct, frozen=True, kw_only=True):
    """The answers of one configuration: a value for each point of the grid."""

    meets_unloaded: list[bool]  # whether single requests meet the SLO
    estimated: list[float]  # estimated capacity, requests/s; 0.0: even single requests miss the SLO
    confirmed: list[float]  # confirmed rate, requests/s; 0.0: none
    takeover: list[int]  # index of the GPU that takes over; -1: none of the entry's `gpus`


class OfferedGpu(msgspec.Struct, frozen=True):
    """A GPU that may take over, as the page names it."""

    name: str
    price: str


class LatticeEntry(msgspec.Struct, frozen=True, kw_only=True):
    """What the page knows of one configuration under every SLO."""

    model: int  # its row of the first table, from 0
    side: str
    title: str
    unit: tuple[float, str]  # of its rates: seconds, and their name
    single_stream: str  # median times of single requests, which no SLO changes
    gpus: list[OfferedGpu]
    answers: GridAnswers


class Lattice(msgspec.Struct, frozen=True, kw_only=True):
    """The positions of the sliders, and the answers of each configuration of the first table at
    every combination of them."""

    ttft: tuple[float, ...]
    tpot: tuple[float, ...]
    target: tuple[float, ...]
    run: dict[str, int]  # "ttft", "tpot", "target" -> index of the run's own SLO on that axis
    sides: tuple[str, ...]  # the devices that were measured
    # One entry for each model and device with a step-time model. Nothing is known about the other
    # configurations under another SLO.
    entries: tuple[LatticeEntry, ...]


def lattice_of(answers: Sequence[ModelAnswer], data: ReportData) -> Lattice | None:
    """Return the lattice; None where no configuration has a step-time model, or where the SLO has
    no limit on TTFT or none on TPOT."""
    slo = data.slo
    if slo.ttft_seconds is None or slo.tpot_seconds is None:
        return None
    run_point = GridPoint(slo.ttft_seconds, slo.tpot_seconds, slo.target)
    ttft = _axis(TTFT_SECONDS, run_point.ttft_seconds)
    tpot = _axis(TPOT_SECONDS, run_point.tpot_seconds)
    target = _axis(TARGETS, run_point.target)
    grid = [GridPoint(*limits) for limits in product(ttft, tpot, target)]
    entries = []
    for model_row, answer in enumerate(answers):
        for cell in answer.cells:
            entry = _entry(model_row, cell, answer, grid, grid.index(run_point))
            if entry is not None:
                entries.append(entry)
    if not entries:
        return None
    return Lattice(
        ttft=ttft,
        tpot=tpot,
        target=target,
        run={
            "ttft": ttft.index(run_point.ttft_seconds),
            "tpot": tpot.index(run_point.tpot_seconds),
            "target": target.index(run_point.target),
        },
        sides=data.sides,
        entries=tuple(entries),
    )


def _axis(defaults: Sequence[float], value_of_run: float) -> tuple[float, ...]:
    """Return the positions of a slider, in order: the defaults, and the value of the run."""
    return tuple(sorted({*defaults, value_of_run}))


def _entry(
    model_row: int, cell: CellData, answer: ModelAnswer, grid: Grid, run_index: int
) -> LatticeEntry | None:
    """Return the answers of one configuration; None: it has no step-time model.

    `model_row` is the model's row of the first table, from 0; `run_index` is the index of the run's
    own SLO in the grid.
    """
    server = cell.simulated(REQUESTS)
    if server is None:
        return None
    meets_unloaded, capacities = _capacities(server, answer.slo, grid)
    if cell.estimated_rate and capacities[run_index] > 0:
        # Under the run's SLO the sliders must show the capacity that the table shows.
        capacities *= cell.estimated_rate / capacities[run_index]
    confirmed = _confirmed_rates(cell, grid, answer.slo, capacities)
    gpus: list[OfferedGpu] = []
    takeover = np.full(len(grid), -1)
    if cell.spec is not None and cell.traffic is not None and answer.gpu is None:
        required_rates = np.maximum(capacities * MIN_GAIN, MIN_RATE)
        for service in gpus_that_fit(cell.spec, cell.traffic, MAX_GPUS):
            _, low_ends = _capacities(simulation_of(service, SLOW_STEPS), answer.slo, grid)
            is_first_to_serve = (takeover < 0) & (low_ends >= required_rates)
            takeover = np.where(is_first_to_serve, len(gpus), takeover)
            price = formatting.dollars_per_hour(service.machine.dollars_per_hour)
            gpus.append(OfferedGpu(service.machine.name, price))
    return LatticeEntry(
        model=model_row,
        side=cell.side,
        title=answer.model,
        unit=formatting.rate_unit(cell.unit_rate),
        single_stream=single_stream_times(cell).words,
        gpus=gpus,
        answers=GridAnswers(
            meets_unloaded=meets_unloaded.tolist(),
            estimated=[float(f"{rate:.3g}") for rate in capacities],
            confirmed=[float(f"{rate:.3g}") for rate in confirmed],
            takeover=takeover.tolist(),
        ),
    )


def _capacities(server: Server, slo: Slo, grid: Grid) -> tuple[Array, Array]:
    """Return two arrays with a value for every point of the grid: whether single requests meet the
    SLO with its limits and target, and the capacity in requests/s (0.0 where they do not)."""
    rates = server.saturated_rate * np.geomspace(MIN_LOAD, MAX_LOAD, RATES)
    simulations = [server.play(float(rate)) for rate in rates]
    single_stream = server.unloaded()

    @cache
    def attainments(ttft: float, tpot: float) -> tuple[float, Array]:
        """Return the SLO attainment of single requests, and that at each of the rates."""
        slo_at_point = slo.with_limits(ttft=ttft, tpot=tpot)
        at_rates = np.array([slo_at_point.met_by(simulated).mean() for simulated in simulations])
        return float(slo_at_point.met_by(single_stream).mean()), at_rates

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
    reaching_target = np.flatnonzero(attainments >= target)
    if not len(reaching_target):
        return 0.0
    last = int(reaching_target.max())
    saturated_rate = float(rates[-1]) / MAX_LOAD
    if last + 1 == len(rates):
        return saturated_rate
    drop = max(attainments[last] - attainments[last + 1], 1e-9)  # never divide by zero
    fraction = min((attainments[last] - target) / drop, 1.0)
    crossing = float(rates[last] * (rates[last + 1] / rates[last]) ** fraction)
    return min(saturated_rate, crossing)


def _confirmed_rates(cell: CellData, grid: Grid, slo: Slo, capacities: Array) -> list[float]:
    """Return the confirmed rate at every point; 0.0: none."""
    levels = [measured.level for measured in cell.levels]
    rates = []
    for point, capacity in zip(grid, capacities, strict=True):
        slo_at_point = msgspec.structs.replace(slo, **point._asdict())
        rate = confirmed_rate(levels, slo_at_point, capacity, cell.min_level_seconds)
        rates.append(rate or 0.0)
    return rates

"""What the page's sliders show: each model under other limits and another target.

A lattice of TTFT x TPOT x target, of the simulated shares of good requests of the same law; what is
confirmed is judged anew from the measured levels. One simulation a rate serves all limits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from loadtests.analysis.slo import Slo
from loadtests.simulation.simulated_capacity import Server
from models import formatting
from reports.crossover_point import ABOVE, GPU_FORMAT, LEAST_RATE, fitting
from reports.devices.device_capacity import slow_server
from reports.headline import Answer
from reports.report_data import CellData

TTFT = (0.2, 0.5, 1.0, 2.0, 3.0, 5.0, 10.0, 30.0)
TPOT = (0.03, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0)
TARGET = (0.8, 0.9, 0.95, 0.99)
RATES = 12  # from far below to above what saturates the server
OVERLOAD = 1.1  # times what saturates the server: what holds there has no limit
REQUESTS = 1_200
GPUS = 2  # the cheapest that a model fits on, whose low ends are told too

Array = npt.NDArray[Any]


class Lattice(msgspec.Struct, frozen=True, kw_only=True):
    """The axes, where the run's SLO is on them, and the answers of each model."""

    ttft: tuple[float, ...]
    tpot: tuple[float, ...]
    target: tuple[float, ...]
    run: dict[str, int]
    models: tuple[dict[str, Any] | None, ...]  # None: no law, so nothing is told of other SLOs


def lattice_of(answers: Sequence[Answer], slo: Slo) -> Lattice | None:
    """None where no model has a law, or the SLO has not both limits."""
    if slo.ttft_seconds is None or slo.tpot_seconds is None:
        return None
    axes = (
        tuple(sorted({*TTFT, slo.ttft_seconds})),
        tuple(sorted({*TPOT, slo.tpot_seconds})),
        tuple(sorted({*TARGET, slo.target})),
    )
    models = tuple(_model(one, axes, slo) for one in answers)
    if not any(models):
        return None
    ttft, tpot, target = axes
    run = {
        "ttft": ttft.index(slo.ttft_seconds),
        "tpot": tpot.index(slo.tpot_seconds),
        "target": target.index(slo.target),
    }
    return Lattice(ttft=ttft, tpot=tpot, target=target, run=run, models=models)


Axes = tuple[tuple[float, ...], tuple[float, ...], tuple[float, ...]]


def _model(answer: Answer, axes: Axes, slo: Slo) -> dict[str, Any] | None:
    cell = answer.cell
    if cell.law is None or cell.policy is None or cell.traffic is None:
        return None
    server = Server(
        cell.law, cell.policy, cell.traffic.lengths, cell.traffic.arrivals, count=REQUESTS
    )
    alone, limits = _limits(server, axes)
    limits *= _to_the_table(cell, limits, axes, slo)
    held = np.where(alone, _held(cell, axes, slo), 0.0)
    limits = np.maximum(limits, held)
    gpus: list[dict[str, str]] = []
    over = np.full(limits.shape, -1)
    if cell.spec is not None and cell.device != "gpu":
        wanted = np.maximum(limits * ABOVE, LEAST_RATE)
        for machine in fitting(cell.spec, GPU_FORMAT, cell.traffic, GPUS):
            slow = slow_server(machine, cell.spec, GPU_FORMAT, cell.traffic)
            suffices = _limits(slow, axes)[1] >= wanted
            over = np.where((over < 0) & suffices, len(gpus), over)
            price = formatting.dollars_per_hour(machine.dollars_per_hour)
            gpus.append({"name": machine.name, "price": price})
    measured = cell.alone
    ttft = None if measured is None else measured.ttft_seconds
    tpot = None if measured is None else measured.tpot_seconds
    each = "" if tpot is None else f", {formatting.seconds(tpot)}/token"
    return {
        "title": answer.title,
        "alone": f"{formatting.seconds(ttft)}{each}",
        "gpus": gpus,
        "answers": {
            "alone": alone.ravel().tolist(),
            "limit": [_short(one) for one in limits.ravel()],
            "held": [_short(one) for one in held.ravel()],
            "gpu": over.ravel().tolist(),
        },
    }


def _to_the_table(cell: CellData, limits: Array, axes: Axes, slo: Slo) -> float:
    """By what the lattice is scaled, so that it says what the table says under the run's SLO."""
    assert slo.ttft_seconds is not None and slo.tpot_seconds is not None
    own = (
        axes[0].index(slo.ttft_seconds),
        axes[1].index(slo.tpot_seconds),
        axes[2].index(slo.target),
    )
    return cell.limit / float(limits[own]) if cell.limit and limits[own] > 0 else 1.0


def _short(value: float) -> float:
    return float(f"{value:.3g}")


def _limits(server: Server, axes: Axes) -> tuple[Array, Array]:
    """Whether one at a time is good, and the capacity, both [ttft, tpot, target]."""
    rates = server.saturated_rate() * np.geomspace(0.03, OVERLOAD, RATES)
    played = [server.play(float(rate)) for rate in rates]
    alone = server.alone()
    shape = tuple(len(axis) for axis in axes)
    is_good, found = np.zeros(shape, dtype=bool), np.zeros(shape)
    for i, ttft in enumerate(axes[0]):
        for j, tpot in enumerate(axes[1]):
            shares = np.array([one.good(ttft, tpot).mean() for one in played])
            single = float(alone.good(ttft, tpot).mean())
            for k, target in enumerate(axes[2]):
                is_good[i, j, k] = single >= target
                if is_good[i, j, k]:
                    found[i, j, k] = _crossing(rates, shares, target)
    return is_good, found


def _crossing(rates: Array, shares: Array, target: float) -> float:
    """Straight in ln(rate) between the last rate that reaches the target and the next; at most the
    rate that saturates the server."""
    good = shares >= target
    if not good.any():
        return 0.0
    last = int(np.flatnonzero(good).max())
    saturated = float(rates[-1]) / OVERLOAD
    if last + 1 == len(rates):
        return saturated
    part = (shares[last] - target) / max(shares[last] - shares[last + 1], 1e-9)
    return min(saturated, float(rates[last] * (rates[last + 1] / rates[last]) ** min(part, 1.0)))


def _held(cell: CellData, axes: Axes, slo: Slo) -> Array:
    """The highest rate whose level holds: [ttft, tpot, target]; 0.0: none."""
    found = np.zeros(tuple(len(axis) for axis in axes))
    levels = [one for one in cell.loaded if one.counts and not _is_cut(one.level.finished)]
    for i, ttft in enumerate(axes[0]):
        for j, tpot in enumerate(axes[1]):
            for k, target in enumerate(axes[2]):
                asked = msgspec.structs.replace(
                    slo, ttft_seconds=ttft, tpot_seconds=tpot, target=target
                )
                rates = [
                    min(one.level.rate or 0.0, one.level.offered_rate)  # as a capacity: what came
                    for one in levels
                    if one.level.judge(asked).verdict == "holds"
                ]
                found[i, j, k] = max(rates, default=0.0)
    return found


def _is_cut(finished: Any) -> bool:
    return finished is None or finished.cut_short is not None

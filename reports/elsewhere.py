"""What other machines would hold of a run's requests: GPUs of the list, and calibrated machines.

`crossover report --machine FILE` names the latter.

Their step laws in the simulation that measured cells are predicted with: the run's lengths,
arrivals and SLO. Everything in here is **predicted**.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import msgspec
import numpy as np

from loadtests.errors import LoadError
from loadtests.metrics.slo import Slo
from loadtests.simulation.batching import Pairs
from loadtests.workload.arrivals import Arrivals, Poisson, Trace, process_of
from loadtests.workload.request_lengths import Workload, draw
from models.formats import GGUF_FORMATS
from models.formatting import model_title
from models.spec import ModelSpec
from reports.numbers import CellNumbers, RunNumbers
from reports.planning.calibrated import CalibratedMachine
from reports.planning.hardware import Device, gpus
from reports.planning.machine_capacity import MachineCapacity, Serving, capacity_of
from reports.planning.machines import machine_of
from serving.backends.base import EngineConfig

REQUESTS = 5_000  # lengths that are drawn
TOGETHER = (1, 2, 4, 8)  # GPUs that share each step
SETTINGS = EngineConfig(backend="", model_path="", model_name="")  # of a server by default


class Traffic(msgspec.Struct, frozen=True):
    """What is asked, and when."""

    workload: Workload
    arrivals: Arrivals

    def pairs(self) -> Pairs:
        """(prompt, output) tokens: [REQUESTS, 2]. Raises LoadError."""
        asks = draw(self.workload, REQUESTS, 1)
        return np.array([(ask.prompt_tokens, ask.output_tokens) for ask in asks], dtype=np.int64)


Capacities = Mapping[str, tuple[MachineCapacity, ...]]  # of GPUs, by cell


class ElsewhereNumbers(msgspec.Struct, frozen=True, kw_only=True):
    """One model of the run on another machine."""

    cell: CellNumbers  # the first one with this model and these requests
    weight_format: str  # the cell's, or that which the machine was calibrated with
    capacity: MachineCapacity


def elsewhere(
    run: RunNumbers, machines: Sequence[CalibratedMachine], say: Callable[[str], None]
) -> tuple[ElsewhereNumbers, ...]:
    """Every model of the run on every machine. Models of no known shape are left out.

    `say` is told of each simulation, which takes seconds.
    """
    found: dict[tuple[str, str, str, str], ElsewhereNumbers] = {}
    for cell in run.cells:
        for machine in machines:
            if cell.spec is None:
                continue
            weight_format = cell.weight_format
            if weight_format not in GGUF_FORMATS:
                weight_format = machine.file.engines[0].weight_format
            key = (cell.spec.name, _workload_name(run, cell), weight_format, machine.name)
            if key not in found:
                say(f"simulating {model_title(cell.model)} {weight_format} on {machine.name}")
                capacity = _capacity(run, cell, cell.spec, machine, weight_format)
                found[key] = ElsewhereNumbers(
                    cell=cell, weight_format=weight_format, capacity=capacity
                )
    return tuple(found.values())


def _capacity(
    run: RunNumbers,
    cell: CellNumbers,
    spec: ModelSpec,
    machine: CalibratedMachine,
    weight_format: str,
) -> MachineCapacity:
    try:
        traffic = _traffic(run, cell)
        pairs = traffic.pairs()
    except (KeyError, LoadError, msgspec.ValidationError) as problem:
        why = f"the run does not say what was asked: {problem}"
        return MachineCapacity(device=machine.name, kind=machine.kind, reason=why)
    serving = Serving(
        slots=cell.slots or SETTINGS.slots,
        prefill_tokens=SETTINGS.prefill_tokens,
        kv_dtype=machine.file.engines[0].kv_dtype,
    )
    return capacity_of(machine, spec, weight_format, pairs, traffic.arrivals, run.slo, serving)


def gpu_capacities(
    run: RunNumbers,
    say: Callable[[str], None] = lambda _: None,
    devices: Sequence[Device] | None = None,
) -> Capacities:
    """What each device would hold of each cell's requests, the cheapest first; None: the list's.

    A model, format and workload are simulated once. Cells of no known shape, and those of which the
    run does not say what was asked, are left out.
    """
    asked = sorted(
        gpus() if devices is None else devices, key=lambda one: one.dollars_per_hour or math.inf
    )
    out: dict[str, tuple[MachineCapacity, ...]] = {}
    for cell in run.cells:
        if cell.spec is None:
            continue
        try:
            traffic = _traffic(run, cell)
            name = f"{model_title(cell.model)} {cell.weight_format}".strip()
            say(f"{name}: what {len(asked)} GPUs would hold")
            out[cell.key] = _held(tuple(asked), cell.spec, cell.weight_format, traffic, run.slo)
        except (KeyError, LoadError, msgspec.ValidationError):
            continue  # the page's sentences say what is wrong with it
    return out


@lru_cache(maxsize=256)
def _held(
    devices: tuple[Device, ...], spec: ModelSpec, weight_format: str, traffic: Traffic, slo: Slo
) -> tuple[MachineCapacity, ...]:
    pairs = traffic.pairs()

    def held(device: Device) -> MachineCapacity:
        """Of the fewest that hold any rate; of one, where none do."""
        asked = (machine_of(device), spec, weight_format, pairs, traffic.arrivals, slo)
        tried = (capacity_of(*asked, Serving(devices=count)) for count in TOGETHER)
        return next((one for one in tried if one.estimate), None) or capacity_of(*asked)

    return tuple(held(device) for device in devices)


def _traffic(run: RunNumbers, cell: CellNumbers) -> Traffic:
    """What the cell was asked; a closed loop's and a trace's arrivals are Poisson.

    Raises KeyError, LoadError, ValidationError.
    """
    campaign = run.manifest.campaign
    name = _workload_name(run, cell)
    workload = campaign["workloads"][name] if name else campaign["workload"]
    arrivals = process_of(campaign.get("arrivals") or {"kind": "poisson"})
    if arrivals is None or isinstance(arrivals, Trace):
        arrivals = Poisson()
    return Traffic(msgspec.convert(workload, Workload), arrivals)


def _workload_name(run: RunNumbers, cell: CellNumbers) -> str:
    """ "" where there is one workload."""
    return str(_of_manifest(run, cell).get("workload") or "")


def _of_manifest(run: RunNumbers, cell: CellNumbers) -> dict[str, Any]:
    return next((one for one in run.manifest.cells if one.get("key") == cell.key), {})

"""The machines of a plan: those of runs, of machine.json files, and devices of the catalogue.

    candidates = candidates_of(asked, say)

A run of the same model, requests and SLO brings its measured capacity: what it holds is confirmed.
Under other requests or another SLO its step law is simulated: estimated. A machine.json and a
device are predicted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from loadtests.records.run_journal import Capacity
from loadtests.simulation.simulated_capacity import SD_CALIBRATED, SD_LEVEL
from models.formatting import model_title
from models.ladder import is_rung, rung
from reports.crossover_point import best_cells
from reports.devices.calibrated_machines import calibrated_machine
from reports.devices.device_capacity import (
    ONE_SIDED,
    DeviceCapacity,
    Machine,
    capacity_of,
    machine_of,
)
from reports.devices.device_catalog import device_named, priced_gpus
from reports.errors import ReportError
from reports.plan.plan_file import BadPlan, MachineKeys, Question, question
from reports.plan.plan_options import Candidate
from reports.report_data import CellData, ReportData, read_report

YOURS = "2000-01-01"  # the date of a price that the plan file says


def asked_of(raw: dict[str, object], folder: Path) -> Question:
    """The question of a plan's tables; a run that it names gives the workload and SLO left out."""
    tables = dict(raw)
    machines = tables.get("machines")
    for machine in machines if isinstance(machines, list) else []:
        if isinstance(machine, dict) and isinstance(machine.get("run"), str):
            data = read_report([folder / machine["run"]])
            cell = _cell_of(data, str(tables.get("model", "")))
            if cell is None:
                continue
            of_run = data.workloads[cell.workload]
            tables.setdefault("workload", msgspec.to_builtins(of_run))
            tables.setdefault("format", cell.weight_format or None)
            slo = data.slo
            tables.setdefault(
                "slo",
                {
                    "name": slo.name,
                    "ttft_seconds": slo.ttft_seconds,
                    "tpot_seconds": slo.tpot_seconds,
                    "target": slo.target,
                    "confidence": slo.confidence,
                },
            )
            break
    return question(tables, folder)


def candidates_of(asked: Question, say: Callable[[str], None] = lambda _: None) -> list[Candidate]:
    """All machines of a plan, each with what one of it holds. Raises BadPlan, BadRun."""
    found = [_own(asked, keys, number, say) for number, keys in enumerate(asked.keys.machines)]
    names = asked.keys.devices
    try:
        rented = priced_gpus() if names is None else [device_named(name) for name in names]
        priced = {device_named(name).name: price for name, price in asked.keys.prices.items()}
    except ReportError as problem:
        raise BadPlan(f"devices or prices: {problem}") from problem
    for device in rented:
        if device.name in priced:
            price = priced[device.name]
            device = msgspec.structs.replace(
                device, dollars_per_hour=price, price_source="yours", price_date=YOURS
            )
        say(device.name)
        found.append(_candidate(asked, machine_of(device), is_calibrated=not device.is_cpu))
    return found


def _own(asked: Question, keys: MachineKeys, number: int, say: Callable[[str], None]) -> Candidate:
    """A machine of the file."""
    try:
        if keys.run is not None:
            say(keys.run)
            found = _of_run(asked, read_report([asked.folder / keys.run]))
        elif keys.file is not None:
            say(keys.file)
            found = _candidate(asked, calibrated_machine(asked.folder / keys.file))
        else:
            say(str(keys.device))
            device = device_named(str(keys.device))
            found = _candidate(asked, machine_of(device), is_calibrated=not device.is_cpu)
    except ReportError as problem:
        raise BadPlan(f"machines[{number}]: {problem}") from problem
    capacity = found.capacity
    if keys.name is not None:
        capacity = msgspec.structs.replace(capacity, device=keys.name)
    return msgspec.structs.replace(
        found,
        capacity=capacity,
        owned=keys.owned,
        dollars_per_hour=keys.dollars_per_hour or found.dollars_per_hour,
        watts=keys.watts or found.watts,
    )


def _candidate(asked: Question, machine: Machine, *, is_calibrated: bool = True) -> Candidate:
    """A machine that is not measured by a run."""
    is_gpu = machine.kind == "predicted" and not machine.is_cpu
    weight_format = asked.keys.gpu_format if is_gpu else asked.weight_format
    found = capacity_of(machine, asked.spec, weight_format, asked.traffic, asked.slo)
    return Candidate(
        capacity=found,
        known_by="predicted",
        is_calibrated=is_calibrated,
        dollars_per_hour=found.dollars_per_hour,
        watts=found.watts,
        price_date=machine.price_date if machine.price_date != YOURS else "",
    )


def _cell_of(data: ReportData, model: str) -> CellData | None:
    """The best cell of a model in a run."""
    wanted = rung(model).spec.name if is_rung(model) else model
    return next((one for one in best_cells(data) if one.spec and one.spec.name == wanted), None)


def _of_run(asked: Question, data: ReportData) -> Candidate:
    cell = _cell_of(data, asked.spec.name)
    if cell is None or cell.capacity is None:
        known = ", ".join(model_title(one.model) for one in data.cells if one.capacity) or "none"
        raise BadPlan(f"run {data.run_ids[0]} measured {known}, not {model_title(asked.spec.name)}")
    name = _machine_name(data)
    same = _same_question(asked, data, cell)
    watts = _watts(cell)
    if same:
        return Candidate(
            capacity=_measured(name, cell.capacity),
            known_by="confirmed" if cell.held else "estimated",
            watts=watts,
        )
    if cell.law is None or cell.policy is None:
        raise BadPlan(
            f"run {data.run_ids[0]} has no step law of {model_title(cell.model)}, so it says "
            "nothing of other requests or another SLO"
        )
    law, sd = cell.law, SD_LEVEL if cell.capacity.factor else SD_CALIBRATED
    machine = Machine(
        name=name,
        kind="measured",
        law=lambda spec, weight_format, slots, devices: (law, 1.645 * sd),
        slots=cell.policy.slots,
        policy=cell.policy,
        is_cpu=True,
    )
    found = capacity_of(machine, asked.spec, cell.weight_format, asked.traffic, asked.slo, 1)
    return Candidate(capacity=found, known_by="estimated", watts=watts)


def _measured(name: str, capacity: Capacity) -> DeviceCapacity:
    """The journal's capacity with one-sided ends; what is confirmed is surely held."""
    limit, low, high = capacity.limit, capacity.low, capacity.high
    sure = low
    if limit and low:
        sure = limit * (low / limit) ** ONE_SIDED
    if limit and high:
        high = limit * (high / limit) ** ONE_SIDED
    if capacity.held:
        sure = max(capacity.held, sure or 0.0)
    return DeviceCapacity(
        device=name,
        kind="measured",
        low=sure,
        rate=limit if limit is not None else capacity.held,
        high=high,
        reason="misses the SLO alone" if capacity.state == "not_even_alone" else "",
    )


def _same_question(asked: Question, data: ReportData, cell: CellData) -> bool:
    """The same lengths, arrivals and limits as the run measured."""
    if cell.traffic is None:
        return False
    mine, its = asked.traffic.lengths, cell.traffic.lengths
    keys = ("ttft_seconds", "tpot_seconds", "target")
    return (
        asked.traffic.arrivals == cell.traffic.arrivals
        and len(mine.prompt) == len(its.prompt)
        and bool((mine.prompt == its.prompt).all() and (mine.output == its.output).all())
        and all(getattr(asked.slo, key) == getattr(data.slo, key) for key in keys)
    )


def _machine_name(data: ReportData) -> str:
    cores = data.facts.get("allowed_cores") or data.facts.get("logical_cores")
    model = data.facts.get("cpu_model") or data.facts.get("url") or "this machine"
    return f"{cores} cores of {model}" if cores else str(model)


def _watts(cell: CellData) -> float | None:
    """Under load, of the level with most of it; None: not measured."""
    known: Iterator[float] = (
        one.energy.watts
        for one in reversed(cell.loaded)
        if one.energy is not None and one.energy.watts is not None
    )
    return next(known, None)

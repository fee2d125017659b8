"""The machines of a plan: those of runs, of machine.json files, and devices of the catalogue.

    candidates = candidates_of(asked, say)

A run of the same model, requests and SLO brings its measured capacity: what it holds is confirmed.
Under other requests or another SLO its step-time model is simulated: estimated. A machine.json and
a device are predicted.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import msgspec

from crossover.loadtests.campaign.campaign_file import SloSpec
from crossover.loadtests.records.journal_events import Capacity
from crossover.models.identify_model import name_of
from crossover.models.weights_manifest import with_home
from crossover.reports.answers.binding_limits import binding_of
from crossover.reports.answers.cheapest_gpu import best_cells
from crossover.reports.answers.headline import machine_words
from crossover.reports.devices.calibrated_machines import calibrated_machine
from crossover.reports.devices.device_capacity import (
    ONE_SIDED,
    TOGETHER,
    DeviceCapacity,
    Machine,
    Service,
    capacity_of,
    machine_of,
)
from crossover.reports.devices.device_catalog import device_named, priced_gpus
from crossover.reports.errors import ReportError
from crossover.reports.plan.plan_costs import Candidate
from crossover.reports.plan.plan_file import BadPlan, MachineKeys, Question, question
from crossover.reports.report_data import CPU, SIDES, CellData, ReportData, read_report
from crossover.serving.capacity.binding_limit import binding_limit
from crossover.serving.capacity.simulated_capacity import Server, sd_of


def asked_of(raw: dict[str, object], folder: Path) -> Question:
    """The question of a plan's tables; a run that it names gives the workload and SLO left out."""
    tables, measured = dict(raw), None
    machines = tables.get("machines")
    for machine in machines if isinstance(machines, list) else []:
        if isinstance(machine, dict) and isinstance(machine.get("run"), str):
            data = _run(folder / machine["run"])
            cells = _cells_of(data, str(tables.get("model", "")))
            if not cells:
                continue
            measured = measured or next(iter(cells.values())).spec
            tables.setdefault("workload", msgspec.to_builtins(data.workload))
            if CPU in cells:
                tables.setdefault("format", cells[CPU].weight_format or None)
            asks: dict[str, object] = msgspec.to_builtins(data.slo)
            slo = {name: value for name, value in asks.items() if name in SloSpec.__struct_fields__}
            tables.setdefault("slo", slo)
            break
    return question(tables, folder, measured)


@lru_cache(maxsize=8)  # asked for its workload, then for its capacity
def _run(folder: Path) -> ReportData:
    return read_report(folder)


def candidates_of(asked: Question, say: Callable[[str], None] = lambda _: None) -> list[Candidate]:
    """All machines of a plan, each with what one of it holds. Raises BadPlan, BadRun."""
    found = [
        one
        for number, keys in enumerate(asked.keys.machines)
        for one in _own(asked, keys, number, say)
    ]
    names = asked.keys.devices
    try:
        yours = {device_named(name).name: price for name, price in asked.keys.prices.items()}
        if names is None:
            names = [*dict.fromkeys([*(one.name for one in priced_gpus()), *yours])]
        rented = [device_named(name) for name in names]
    except ReportError as problem:
        raise BadPlan(f"devices or prices: {problem}") from problem
    for device in rented:
        say(device.name)
        machine = machine_of(device)
        if device.name in yours:
            price = yours[device.name]
            machine = msgspec.structs.replace(machine, dollars_per_hour=price, price_date="")
        found.append(_predicted(asked, machine, asked.keys.gpu_format))
    return found


def _own(
    asked: Question, keys: MachineKeys, number: int, say: Callable[[str], None]
) -> list[Candidate]:
    """A machine of the file: one candidate, or one for each way in which its devices serve."""
    say(str(keys.run or keys.file or keys.device))
    try:
        if keys.run is not None:
            found = _of_run(asked, _run(asked.folder / keys.run), keys)
        elif keys.file is not None:
            machine = calibrated_machine(asked.folder / keys.file)
            found = [_predicted(asked, machine, asked.weight_format)]
        else:
            machine = machine_of(device_named(str(keys.device)))
            found = [_predicted(asked, machine, asked.keys.gpu_format)]
    except ReportError as problem:
        raise BadPlan(f"machines[{number}]: {problem}") from problem
    is_whole = len(found) == 1  # a name and watts are of the machine, not of one of its devices
    return [
        msgspec.structs.replace(
            one,
            device=(keys.name if is_whole else None) or one.device,
            owned=keys.owned,
            dollars_per_hour=keys.dollars_per_hour or one.dollars_per_hour,
            watts=(keys.watts if is_whole else None) or one.watts,
        )
        for one in found
    ]


def _candidate(found: DeviceCapacity, price_date: str = "") -> Candidate:
    return Candidate(**msgspec.structs.asdict(found), price_date=price_date)


def _predicted(asked: Question, machine: Machine, weight_format: str) -> Candidate:
    """A machine that no run measured: of the fewest that share a step and hold any rate."""
    first: DeviceCapacity | None = None
    for count in TOGETHER:
        service = Service(machine, asked.spec, weight_format, asked.traffic, count)
        found = capacity_of(service, asked.slo)
        if found.rate:
            return _candidate(found, machine.price_date)
        first = first or found
    assert first is not None
    return _candidate(first, machine.price_date)


def _cells_of(data: ReportData, model: str) -> dict[str, CellData]:
    """Side -> the best configuration of a model in a run, by the name that it has there or
    by what it was run from."""
    names = {model, name_of(model)}
    sources = {model, str(with_home(model).absolute())}
    found = list(best_cells(data).values())
    named = [sides for sides in found if any(cell.model in names for cell in sides.values())]
    same = [sides for sides in found if any(cell.source in sources for cell in sides.values())]
    return next(iter([*named, *same]), {})


def _of_run(asked: Question, data: ReportData, keys: MachineKeys) -> list[Candidate]:
    """What a measured machine offers: its CPU, its GPU, or where both were measured each by itself,
    and the CPU with the GPU above it."""
    cells = _cells_of(data, asked.keys.model) or _cells_of(data, asked.spec.name)
    cells = {side: cell for side, cell in cells.items() if cell.capacity is not None}
    if not cells:
        known = list(dict.fromkeys(one.model for one in data.cells if one.capacity))
        if not known:
            raise BadPlan(
                f"Run {data.manifest.run_id} has no capacity of any model yet. Continue it with "
                f"`crossover campaign resume {data.folder}`, or remove the run from the plan"
            )
        raise BadPlan(
            f"Run {data.manifest.run_id} measured {', '.join(known)}, not {asked.spec.name}. "
            "Use a model that it measured, or remove the run from the plan"
        )
    found = [_of_cell(asked, data, cells[side]) for side in SIDES if side in cells]
    if len(found) == 1:
        return [_priced(asked, data, keys, found[0])]
    cpu, gpu = found
    named = [
        msgspec.structs.replace(cpu, label=f"{_whose(asked, keys)} CPU alone"),
        msgspec.structs.replace(gpu, label=f"{_whose(asked, keys)} GPU"),
    ]
    if cpu.low and gpu.low:
        named.append(_together(cpu, gpu, f"{_whose(asked, keys)} CPU, GPU above it"))
    if len(asked.keys.machines) > 1 and keys.name is None:
        named = [msgspec.structs.replace(one, label="") for one in named]
    return [_priced(asked, data, keys, one) for one in named]


def _whose(asked: Question, keys: MachineKeys) -> str:
    return "your" if keys.name is None else f"{keys.name}'s"


def _together(cpu: Candidate, gpu: Candidate, label: str) -> Candidate:
    """A CPU that takes load first, and a GPU above it: each was measured while the other was idle,
    so that what both serve together is estimated."""

    def both(name: str) -> float | None:
        each = [getattr(one, name) for one in (cpu, gpu)]
        return None if None in each else sum(each)

    return Candidate(
        device=f"{cpu.device} + {gpu.device}",
        kind="estimated",
        low=both("low"),
        rate=both("rate"),
        high=both("high"),
        parts=(cpu, gpu),
        label=label,
    )


def _priced(asked: Question, data: ReportData, keys: MachineKeys, found: Candidate) -> Candidate:
    """With what the whole machine costs, whichever of its devices serve: a machine with a GPU is
    rented, at the list price of its GPUs, until somebody says otherwise."""
    gpu = data.gpu
    is_paid = gpu is None if keys.is_paid is None else keys.is_paid
    price = keys.dollars_per_hour
    is_list_price = price is None and not is_paid and gpu is not None
    price_date = ""
    if gpu is not None and is_list_price:
        yours = {device_named(name).name: one for name, one in asked.keys.prices.items()}
        each = gpu.dollars_per_hour
        if gpu.device is not None:
            each = yours.get(gpu.device.name, each)
            price_date = gpu.device.price_date or ""
        price = None if each is None else each * gpu.count
    return msgspec.structs.replace(
        found,
        dollars_per_hour=price,
        price_date=price_date,
        is_paid=is_paid,
        is_list_price=is_list_price and price is not None,
        gpu_name="" if gpu is None else gpu.name,
    )


def _of_cell(asked: Question, data: ReportData, cell: CellData) -> Candidate:
    """One device of a measured machine."""
    assert cell.capacity is not None
    name = machine_words(data, cell.side)
    # of the GPU's host too, where it was measured; of a CPU without a GPU that idles beside it
    watts = [one.watts if cell.side == CPU else one.machine_watts for one in reversed(cell.loaded)]
    known = next((one for one in watts if one is not None), None)
    if _same_question(asked, data, cell):
        found = _measured(name, cell.capacity, known)
        return msgspec.structs.replace(found, binding=binding_of(cell, asked.slo))
    if cell.step_times is None or cell.policy is None:
        raise BadPlan(
            f"Run {data.manifest.run_id} has no step-time model of {cell.name}, so nothing is "
            "known for other requests or another SLO"
        )
    # Of a machine of two speeds the step-time model is of one of them.
    is_known = cell.capacity.factor and not cell.capacity.speed_moved
    step_times, sd = cell.step_times, sd_of(1 if is_known else 0)
    machine = Machine(
        name=name,
        step_times=lambda spec, weight_format, slots, devices: (step_times, 1.645 * sd),
        slots=cell.policy.slots,
        grade="estimated",
        policy=cell.policy,
        watts=known,
    )
    service = Service(machine, asked.spec, cell.weight_format, asked.traffic)
    found = _candidate(capacity_of(service, asked.slo))
    server = Server(step_times, cell.policy, asked.traffic.lengths, asked.traffic.arrivals)
    binding = binding_limit(server, asked.slo, found.rate or 0.0)
    if binding is not None and cell.side != CPU:
        binding = msgspec.structs.replace(binding, is_on_gpu=True)
    return msgspec.structs.replace(found, binding=binding)


def _measured(name: str, capacity: Capacity, watts: float | None) -> Candidate:
    """The journal's capacity: what is confirmed is surely served, as the report says, and no more;
    where nothing is, the one-sided ends of the estimate."""
    limit, low, high = capacity.estimated_rate, capacity.low, capacity.high
    if limit and low:
        low = limit * (low / limit) ** ONE_SIDED
    if limit and high:
        high = limit * (high / limit) ** ONE_SIDED
    return Candidate(
        device=name,
        kind="confirmed" if capacity.confirmed_rate else "estimated",
        low=capacity.confirmed_rate or low,
        rate=limit if limit is not None else capacity.confirmed_rate,
        high=high,
        reason="misses the SLO unloaded" if capacity.state == "misses_slo_unloaded" else "",
        watts=watts,
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

"""The machines of a plan, from run folders, machine.json files and the device catalog.

    question = question_of_tables(tables, folder)
    candidates = candidates_of(question, report_progress)

A run of the same model with the same requests gives the capacity that its report states under the
SLO of the plan, which may be confirmed. For other requests, the step-time model of the run is
simulated, and the capacity is estimated. The capacity of a machine.json file or a catalog device is
predicted, and so is that of a model that the run did not measure.
"""

from __future__ import annotations

import signal
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import NamedTuple

import msgspec
import numpy as np

from crossover.loadtests.campaign.campaign_file import SloSpec
from crossover.loadtests.campaign.machine_of_run import machine_of_run
from crossover.loadtests.errors import LoadError
from crossover.loadtests.records.journal_events import Capacity
from crossover.loadtests.records.run_folder import read_records
from crossover.models import formatting
from crossover.models.identity.identify_model import name_of
from crossover.models.weights.weights_manifest import expand_home
from crossover.reports.answers.binding_limits import binding_of, with_remedies_for
from crossover.reports.answers.cheapest_gpu import best_cells
from crossover.reports.answers.headline import machine_words
from crossover.reports.devices.calibrated_machines import (
    MeasuredMachine,
    machines_of_file,
    measured_devices,
)
from crossover.reports.devices.device_capacity import (
    ONE_SIDED,
    TENSOR_PARALLEL_SIZES,
    DeviceCapacity,
    Machine,
    Service,
    Traffic,
    capacity_of,
    machine_of,
)
from crossover.reports.devices.device_catalog import Device, device_named, priced_gpus
from crossover.reports.devices.mix_capacity import MixPart, mix_capacity_of
from crossover.reports.devices.predicted_steps import PredictedSteps
from crossover.reports.errors import ReportError
from crossover.reports.plan.plan_file import BadPlan, MachineKeys, Question, read_mix, read_question
from crossover.reports.plan.plan_options import Candidate, Purchase
from crossover.reports.report_data import CPU, SIDES, CellData, ReportData, read_report
from crossover.serving.capacity.binding_limit import binding_limit
from crossover.serving.capacity.simulated_capacity import Z_90, sd_of
from crossover.serving.capacity.slo import Slo
from crossover.serving.hardware.machine_facts import allowed_cores


def question_of_tables(raw: dict[str, object], folder: Path) -> Question:
    """Return the question of a plan file's tables. Workload, SLO and weight format that the file
    leaves out are those of the first of its runs that measured the model.

    Paths in the file are relative to `folder`. Raises BadPlan, BadRun.
    """
    if raw.get("models"):
        return read_mix(raw, partial(question_of_tables, folder=folder))
    tables = dict(raw)
    forecast = tables.get("forecast")
    has_trace = isinstance(forecast, dict) and "trace" in forecast
    for run in _runs_in(tables):
        data = _read_run(folder / run)
        cells = _cells_of(data, str(tables.get("model", "")))
        if not cells:
            continue
        if not has_trace:  # a trace has lengths of its own
            tables.setdefault("workload", msgspec.to_builtins(data.workload))
        if CPU in cells:
            tables.setdefault("format", cells[CPU].weight_format or None)
        slo: dict[str, object] = msgspec.to_builtins(data.slo)
        slo_keys = SloSpec.__struct_fields__
        tables.setdefault("slo", {key: slo[key] for key in slo if key in slo_keys})
        measured_spec = next(iter(cells.values())).spec
        return read_question(tables, folder, measured_spec)
    return read_question(tables, folder, measured_spec=None)


def _runs_in(tables: dict[str, object]) -> list[str]:
    """Return the run folders of the [[machines]] of a plan file that is not yet validated."""
    machines = tables.get("machines")
    if not isinstance(machines, list):
        return []
    runs = [machine.get("run") for machine in machines if isinstance(machine, dict)]
    return [run for run in runs if isinstance(run, str)]


@lru_cache(maxsize=8)  # a plan reads a run for its workload, and again for its capacity
def _read_run(folder: Path, slo: Slo | None = None) -> ReportData:
    """Return the report of a run, by its own SLO or by that of the plan."""
    return read_report(folder, slo)


def _report_of(question: Question, run: str) -> ReportData:
    """Return the report of a run under the SLO of the plan, so that plan and report agree. If the
    run did not send the plan's requests, only its step times are used, which need no other SLO."""
    folder = question.folder / run
    own = _read_run(folder)
    if own.slo.is_same_promise(question.slo):
        return own
    if not any(_has_measured_requests(cell, question) for cell in own.cells):
        return own
    return _read_run(folder, question.slo)


def candidates_of(
    question: Question, report_progress: Callable[[str, float], None] = lambda name, done: None
) -> list[Candidate]:
    """Return all machines of a plan, each with the capacity of one of it: yours first, then those
    to rent. `report_progress` is called with the name of each before it is simulated, and with the
    share of the machines that are done, from 0 to 1.

    Raises BadPlan, BadRun.
    """
    machines, names = question.keys.machines, question.keys.devices
    try:
        your_prices = _prices_by_device(question)
        if names is None:
            listed_names = [device.name for device in priced_gpus()]
            names = list(dict.fromkeys([*listed_names, *your_prices]))
        # A machine of the file that you do not have yet replaces the device of its name.
        in_file = {
            device_named(keys.device).name
            for keys in machines
            if keys.device is not None and not keys.owned
        }
        named = dict.fromkeys(device_named(name) for name in names)
        devices = [device for device in named if device.name not in in_file]
    except ReportError as problem:
        raise BadPlan(f"devices or prices: {problem}") from problem
    _check_given_once(question)
    machine_count = len(machines) + len(devices)
    candidates: list[tuple[Candidate, str]] = []  # with the run or file that it comes from
    for number, keys in enumerate(machines):
        report_progress(
            Path(keys.run or keys.file or str(keys.device)).name, number / machine_count
        )
        source = _source_name(question.folder, keys)
        candidates += [(machine, source) for machine in _own_machine(question, keys, number)]
    rented = partial(_catalog_candidate, question, your_prices)
    with _processes(len(devices)) as map_in_processes:
        simulated = iter(map_in_processes(rented, devices))
        for number, device in enumerate(devices, len(machines)):
            report_progress(device.name, number / machine_count)
            candidates.append((next(simulated), ""))
    return _with_distinct_names(candidates)


def _check_given_once(question: Question) -> None:
    """Raise BadPlan for a run, file or device that is there twice without a name of its own."""
    first_by_source: dict[Path | str, int] = {}
    for number, keys in enumerate(question.keys.machines):
        source = keys.run or keys.file
        if keys.name is not None:
            continue
        key: Path | str
        if source is None:
            source = str(keys.device)
            try:
                key = device_named(source).name
            except ReportError as problem:
                raise BadPlan(f"machines[{number}]: {problem}") from problem
        else:
            key = (question.folder / source).resolve()
        first = first_by_source.setdefault(key, number)
        if first != number:
            raise BadPlan(
                f"machines[{number}] is {Path(source).name}, as machines[{first}] is. Leave one of "
                "them out (--run and --machine add machines to those of the file), give it a "
                "`name`, or set `owned` to the number of such machines"
            )


def _source_name(folder: Path, keys: MachineKeys) -> str:
    """Return the name of the run or of the file of a machine; "": it has neither."""
    if keys.run is not None:
        return (folder / keys.run).resolve().name
    return "" if keys.file is None else Path(keys.file).stem


def _with_distinct_names(candidates: Sequence[tuple[Candidate, str]]) -> list[Candidate]:
    """Return machines of which no two have the same name, since options and costs go by name.

    Runs and files of the same kind of machine give the same name. Each then has the name of its run
    or file in brackets, and a number if that is the same too.
    """
    counts = Counter(candidate.name for candidate, _ in candidates)
    taken_names: set[str] = set()
    machines: list[Candidate] = []
    for candidate, source in candidates:
        if counts[candidate.name] > 1 and source:
            number = 1
            named = _renamed(candidate, source)
            while named.name in taken_names:
                number += 1
                named = _renamed(candidate, f"{source}, {number}")
            candidate = named
        taken_names.add(candidate.name)
        machines.append(candidate)
    return machines


def _renamed(candidate: Candidate, suffix: str) -> Candidate:
    """Return a machine, and the devices in it, with a suffix to their names."""
    return msgspec.structs.replace(
        candidate,
        device=f"{candidate.device} ({suffix})",
        parts=tuple(_renamed(part, suffix) for part in candidate.parts),
    )


@contextmanager
def _processes(count: int) -> Iterator[Callable[..., Iterable[Candidate]]]:
    """Inside, a `map` that computes up to `count` values at a time, in processes of their own.

    They are killed at the end, so that an interruption does not wait for them.
    """
    workers = min(count, len(allowed_cores()))
    if workers < 2:
        yield map
        return
    with warnings.catch_warnings():
        # Python 3.12 warns of a fork beside threads, which may hold locks. These processes compute
        # and take none. Ctrl-C interrupts this process only, which then kills them.
        warnings.simplefilter("ignore", DeprecationWarning)
        pool = get_context("fork").Pool(workers, signal.signal, (signal.SIGINT, signal.SIG_IGN))
    with pool:
        yield pool.imap


def _catalog_candidate(
    question: Question, your_prices: Mapping[str, float], device: Device
) -> Candidate:
    """Return a device of the catalog, at your price or its list price."""
    machine = machine_of(device)
    if device.name in your_prices:
        price = your_prices[device.name]
        machine = msgspec.structs.replace(machine, dollars_per_hour=price, price_date="")
    if question.parts:
        return _mix_candidate(
            question, [ServedAs(machine, question.gpu_format)] * len(question.parts)
        )
    return _predicted_candidate(question, machine, question.gpu_format)


def candidate_of_group(question: Question, device: Device, count: int) -> Candidate:
    """Return a device to rent, of which `count` share each step."""
    return _candidate_of_count(question, machine_of(device), question.gpu_format, count)


def _prices_by_device(question: Question) -> dict[str, float]:
    """Return the name of a device in the catalog -> the price that the plan file gives for it.

    Raises ReportError for a name that the catalog does not have, and for a second price.
    """
    prices = dict[str, float]()
    for name, price in question.keys.prices.items():
        device = device_named(name).name
        if prices.setdefault(device, price) != price:
            raise ReportError(
                f"prices.{name} = {price:g} contradicts {prices[device]:g}, which is given for "
                f"{device} too"
            )
    return prices


def _own_machine(question: Question, keys: MachineKeys, number: int) -> list[Candidate]:
    """Return a machine of the file as one candidate, or as one for each of its devices and one for
    both together. `number`: its index in [[machines]], for errors. Raises BadPlan."""
    try:
        if keys.run is not None:
            candidates = _candidates_of_run(question, _report_of(question, keys.run), keys)
        elif keys.file is not None:
            files = machines_of_file(question.folder / keys.file)
            candidates = [_candidate_of_file(question, measured) for measured in files]
        else:
            device = device_named(str(keys.device))
            your_prices = _prices_by_device(question)
            own_price = keys.dollars_per_hour
            if own_price is not None and your_prices.get(device.name, own_price) != own_price:
                raise ReportError(
                    f"dollars_per_hour = {own_price:g} contradicts prices.{device.name} = "
                    f"{your_prices[device.name]:g}"
                )
            candidates = [_catalog_candidate(question, your_prices, device)]
    except ReportError as problem:
        raise BadPlan(f"machines[{number}]: {problem}") from problem
    if keys.run is None and keys.is_paid is not None:
        candidates = [
            msgspec.structs.replace(candidate, is_paid=keys.is_paid) for candidate in candidates
        ]
    # The file's name and watts describe the machine, not one of its devices.
    is_whole_machine = len(candidates) == 1
    return [
        msgspec.structs.replace(
            _with_prices(question, keys, candidate, f"machines[{number}]"),
            device=(keys.name if is_whole_machine else None) or candidate.device,
            owned=keys.owned,
            watts=_times(keys.watts if is_whole_machine else None, candidate) or candidate.watts,
            idle_watts=_times(keys.idle_watts if is_whole_machine else None, candidate),
        )
        for candidate in candidates
    ]


def _times(value: float | None, candidate: Candidate) -> float | None:
    """Return what a candidate has or costs of which one of its devices has `value`."""
    return None if value is None else value * candidate.devices


def _with_prices(
    question: Question, keys: MachineKeys, candidate: Candidate, where: str
) -> Candidate:
    """Return a candidate with the prices of its machine in the file. Raises BadPlan for a price
    that contradicts its list price."""
    rent = _times(keys.dollars_per_hour, candidate) or candidate.dollars_per_hour
    reserved = _times(keys.reserved_dollars_per_hour, candidate)
    spot = _times(keys.spot_dollars_per_hour, candidate)
    for name, price in (("reserved", reserved), ("spot", spot)):
        if price is not None and rent is not None and price >= rent:
            raise BadPlan(
                f"{where}.{name}_dollars_per_hour: {formatting.dollars_per_hour(price)} must be "
                f"below the price by the hour, {formatting.dollars_per_hour(rent)}"
            )
    purchase = None
    dollars = _times(keys.purchase_dollars, candidate)
    if dollars is not None and question.keys.years is not None:
        purchase = Purchase(
            dollars=dollars,
            years=question.keys.years,
            residual_share=question.keys.residual_share,
            hosting_dollars_per_month=_times(keys.hosting_dollars_per_month, candidate),
        )
    return msgspec.structs.replace(
        candidate,
        dollars_per_hour=rent,
        price_date=candidate.price_date if keys.dollars_per_hour is None else "",
        reserved_dollars_per_hour=reserved,
        spot_dollars_per_hour=spot,
        purchase=purchase,
    )


def _candidate(capacity: DeviceCapacity, price_date: str = "") -> Candidate:
    return Candidate(**msgspec.structs.asdict(capacity), price_date=price_date)


def _predicted_candidate(question: Question, machine: Machine, weight_format: str) -> Candidate:
    """Return a machine that no run measured, with the smallest number of devices that share a step
    and have a capacity above 0. If no number of them has, return one device, with the reason."""

    for count in TENSOR_PARALLEL_SIZES:
        candidate = _candidate_of_count(question, machine, weight_format, count)
        if candidate.rate:
            return candidate
    return _candidate_of_count(question, machine, weight_format, 1)


def _candidate_of_count(
    question: Question, machine: Machine, weight_format: str, count: int
) -> Candidate:
    """Return a machine that no run measured, of whose devices `count` share each step."""
    service = Service(machine, question.spec, weight_format, Traffic(question.demand), count)
    return _candidate(capacity_of(service, question.slo), machine.price_date)


class ServedAs(NamedTuple):
    """How a machine serves a model."""

    machine: Machine  # with the engine's step times and settings
    weight_format: str


def _mix_candidate(question: Question, served: Sequence[ServedAs]) -> Candidate:
    """Return a machine that serves all models of a question, each as the one in `served`; with the
    smallest number of devices that share a step and have a capacity above 0, as for one model."""

    def parts_on(count: int) -> list[MixPart]:
        return [
            MixPart(
                service=Service(
                    machine,
                    part.question.spec,
                    weight_format,
                    Traffic(part.question.demand),
                    count,
                ),
                slo=part.question.slo,
                share=part.share,
            )
            for (machine, weight_format), part in zip(served, question.parts, strict=True)
        ]

    by_count: list[Candidate] = []
    unshared: dict[int, DeviceCapacity] = {}  # by the index of the part, with the fewest devices
    for count in TENSOR_PARALLEL_SIZES:
        parts = parts_on(count)
        capacities = [capacity_of(part.service, part.slo) for part in parts]
        for index, capacity in enumerate(capacities):
            if index not in unshared or not unshared[index].rate:
                unshared[index] = capacity
        mix = mix_capacity_of(parts, capacities)
        by_count.append(_candidate(mix, served[0].machine.price_date))
        if mix.rate:
            break
    chosen = by_count[-1] if by_count[-1].rate else by_count[0]
    ordered = tuple(unshared[index] for index in range(len(served)))
    return msgspec.structs.replace(chosen, unshared=ordered)


def _candidate_of_file(question: Question, measured: MeasuredMachine) -> Candidate:
    """Return one device of a machine file: estimated with the best of the engines on which it
    measured the model, else predicted from the models that it measured."""
    if question.parts:
        served = [_best_of_file(part.question, measured) for part in question.parts]
        return _mix_candidate(question, served)
    return _predicted_candidate(question, *_best_of_file(question, measured))


def _best_of_file(question: Question, measured: MeasuredMachine) -> ServedAs:
    """Return how a device of a machine file serves a model best.

    A plan that names no format for CPUs takes the formats that a CPU was measured in.
    """
    weight_format = question.weight_format if measured.device == CPU else question.gpu_format
    is_any_format = measured.device == CPU and question.keys.format is None
    of_model = [steps for steps in measured.models if steps.model.name == question.spec.name]
    in_format = [steps for steps in of_model if steps.weight_format == weight_format]
    estimated = [
        ServedAs(measured.serving(steps), steps.weight_format)
        for steps in in_format or (of_model if is_any_format else [])
    ]
    if estimated:
        return max(
            estimated, key=lambda served: _predicted_candidate(question, *served).rate or 0.0
        )
    measured_formats = [steps.weight_format for steps in measured.models]
    if is_any_format and weight_format not in measured_formats:
        weight_format = measured_formats[0]
    return ServedAs(measured.machine, weight_format)


def _cells_of(data: ReportData, model: str) -> dict[str, CellData]:
    """Return the best configuration of a model on each side ("cpu", "gpu") that a run measured.

    `model` is the name of the model in the run, or the file or folder that it was loaded from.
    """
    names = {model, name_of(model)}
    sources = {model, str(expand_home(model).absolute())}
    cells_of_models = best_cells(data).values()
    for cells in cells_of_models:
        if any(cell.model in names for cell in cells.values()):
            return cells
    for cells in cells_of_models:
        if any(cell.source in sources for cell in cells.values()):
            return cells
    return {}


def _candidates_of_run(question: Question, data: ReportData, keys: MachineKeys) -> list[Candidate]:
    """Return the candidates of a measured machine: its CPU or its GPU; or, if both were measured,
    each of them and the CPU with the GPU above it. Raises BadPlan."""
    if question.parts:
        if mixes := _predicted_from_run(question, data):
            return [_priced(question, data, keys, candidate) for candidate in mixes]
        raise BadPlan(
            f"Run {data.manifest.run_id} has no step times, which a plan with [[models]] needs"
        )
    cells = _cells_of(data, question.keys.model or "") or _cells_of(data, question.spec.name)
    measured = [
        (cells[side], capacity)
        for side in SIDES
        if side in cells and (capacity := cells[side].capacity) is not None
    ]
    if not measured:
        measured_models = list(dict.fromkeys(cell.model for cell in data.cells if cell.capacity))
        if not measured_models:
            raise BadPlan(
                f"Run {data.manifest.run_id} has no capacity of any model yet. Continue it with "
                f"`crossover campaign resume {data.folder}`, or remove the run from the plan"
            )
        if predicted := _predicted_from_run(question, data):
            return [_priced(question, data, keys, candidate) for candidate in predicted]
        raise BadPlan(
            f"Run {data.manifest.run_id} measured {', '.join(measured_models)}, not "
            f"{question.spec.name}, and has no step times from which it could be predicted. Use a "
            "model that it measured, or remove the run from the plan"
        )
    devices = [_candidate_of_cell(question, data, cell, capacity) for cell, capacity in measured]
    if len(devices) == 1:
        return [_priced(question, data, keys, devices[0])]
    cpu, gpu = devices
    owner = "your" if keys.name is None else f"{keys.name}'s"
    candidates = [
        msgspec.structs.replace(cpu, label=f"{owner} CPU alone"),
        msgspec.structs.replace(gpu, label=f"{owner} GPU"),
    ]
    if cpu.low and gpu.low:
        candidates.append(_cpu_and_gpu(cpu, gpu, f"{owner} CPU, GPU above it"))
    # Among several machines, "your CPU" could be that of any: then their names stand in the rows.
    if len(question.keys.machines) > 1 and keys.name is None:
        candidates = [msgspec.structs.replace(candidate, label="") for candidate in candidates]
    return [_priced(question, data, keys, candidate) for candidate in candidates]


def _predicted_from_run(question: Question, data: ReportData) -> list[Candidate]:
    """Return the devices of a run that did not measure the model, predicted from the models that it
    measured, as those of a machine file; []: it has no step times."""
    folder = Path(data.folder)
    try:
        file, _ = machine_of_run(read_records(folder))
    except LoadError:
        return []
    return [
        msgspec.structs.replace(
            _candidate_of_file(question, measured), device=machine_words(data, measured.device)
        )
        for measured in measured_devices(folder, file)
    ]


def _cpu_and_gpu(cpu: Candidate, gpu: Candidate, label: str) -> Candidate:
    """Return a CPU that takes load first, with a GPU for the load above its low end.

    Each was measured while the other was idle, so the sum of their capacities is an estimate.
    """

    def total(cpu_rate: float | None, gpu_rate: float | None) -> float | None:
        return None if cpu_rate is None or gpu_rate is None else cpu_rate + gpu_rate

    return Candidate(
        device=f"{cpu.device} + {gpu.device}",
        grade="estimated",
        low=total(cpu.low, gpu.low),
        rate=total(cpu.rate, gpu.rate),
        high=total(cpu.high, gpu.high),
        parts=(cpu, gpu),
        label=label,
    )


def _priced(
    question: Question, data: ReportData, keys: MachineKeys, candidate: Candidate
) -> Candidate:
    """Return a candidate with the price of its whole machine, whichever of its devices serve.

    Unless the file says otherwise, a machine with a GPU is rented at the list price of its GPUs.
    """
    gpu = data.gpu
    is_paid = keys.is_paid
    if is_paid is None:
        is_paid = gpu is None
    price = keys.dollars_per_hour
    is_list_price = price is None and not is_paid and gpu is not None
    price_date = ""
    if gpu is not None and is_list_price:
        gpu_price = gpu.dollars_per_hour
        if gpu.device is not None:
            gpu_price = _prices_by_device(question).get(gpu.device.name, gpu_price)
            price_date = gpu.device.price_date or ""
        price = None if gpu_price is None else gpu_price * gpu.count
    return msgspec.structs.replace(
        candidate,
        dollars_per_hour=price,
        price_date=price_date,
        is_paid=is_paid,
        is_list_price=is_list_price and price is not None,
        gpu_name="" if gpu is None else gpu.name,
    )


def _candidate_of_cell(
    question: Question, data: ReportData, cell: CellData, capacity: Capacity
) -> Candidate:
    """Return one device of a measured machine, with its measured capacity if the run sent the
    plan's requests, else with a simulated one; if the run has no step-time model of the model, with
    one that is predicted from its other models. Raises BadPlan if it has none of these either."""
    name = machine_words(data, cell.side)
    watts = _loaded_watts(cell)
    load_seconds = median(cell.load_seconds) if cell.load_seconds else None
    if _has_measured_requests(cell, question):
        candidate = _measured_candidate(name, capacity, watts)
        return msgspec.structs.replace(
            candidate,
            binding=binding_of(cell, question.slo),
            answer_seconds=cell.answer_seconds,
            load_seconds=load_seconds,
        )
    if cell.server is None:
        for predicted in _predicted_from_run(question, data):
            if predicted.device == name:
                return predicted
        raise BadPlan(
            f"Run {data.manifest.run_id} has no step-time model of {cell.name}, so nothing is "
            "known for other requests"
        )
    # Load levels show by which factor steps are slower than the model says. If the machine's speed
    # changed during the run, that factor is known for only one of its speeds, so it does not count.
    is_factor_known = bool(capacity.factor) and not capacity.speed_moved
    server = cell.server
    sd = sd_of(1 if is_factor_known else 0)
    machine = Machine(
        name=name,
        step_times=lambda spec, weight_format, slots, devices: PredictedSteps(
            server.step_times, Z_90 * sd
        ),
        slots=server.settings.slots,
        grade="estimated",
        policy=server.settings,
        watts=watts,
    )
    service = Service(machine, question.spec, cell.weight_format, Traffic(question.demand, server))
    candidate = msgspec.structs.replace(
        _candidate(capacity_of(service, question.slo)), load_seconds=load_seconds
    )
    if candidate.rate is None or not question.slo.limits:
        return candidate
    simulated = server.simulated(question.demand)
    binding = with_remedies_for(cell, binding_limit(simulated, question.slo, candidate.rate))
    return msgspec.structs.replace(candidate, binding=binding)


def _loaded_watts(cell: CellData) -> float | None:
    """Return the power under the highest measured load; None: it was not measured.

    For a GPU this includes its host. For a CPU it excludes a GPU that idles beside it.
    """
    for level in reversed(cell.levels_under_load):
        watts = level.watts if cell.side == CPU else level.machine_watts
        if watts is not None:
            return watts
    return None


def _measured_candidate(name: str, capacity: Capacity, watts: float | None) -> Candidate:
    """Return a machine with the capacity that the journal has.

    The low end is the confirmed rate, as in the report. Without one it is the one-sided lower end
    of the estimate. The high end is one-sided too.
    """
    rate, low, high = capacity.estimated_rate, capacity.low, capacity.high
    if rate and low:
        low = rate * (low / rate) ** ONE_SIDED
    if rate and high:
        high = rate * (high / rate) ** ONE_SIDED
    return Candidate(
        device=name,
        grade="confirmed" if capacity.confirmed_rate else "estimated",
        low=capacity.confirmed_rate or low,
        rate=capacity.confirmed_rate if rate is None else rate,
        high=high,
        reason="misses the SLO unloaded" if capacity.is_none else "",
        notes=(capacity.advice.rstrip("."),) if capacity.is_none and capacity.advice else (),
        watts=watts,
    )


def _has_measured_requests(cell: CellData, question: Question) -> bool:
    """Return whether the run measured requests of the plan's lengths and arrivals."""
    if cell.traffic is None:
        return False
    planned, measured = question.demand.lengths(), cell.traffic.demand.lengths()
    has_same_lengths = np.array_equal(planned.prompt, measured.prompt) and np.array_equal(
        planned.output, measured.output
    )
    has_same_arrivals = question.demand.arrivals == cell.traffic.demand.arrivals
    return has_same_lengths and has_same_arrivals

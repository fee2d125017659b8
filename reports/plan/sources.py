"""Where the machines of a plan come from: runs, files of calibrated machines, the hardware list."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import numpy as np

from loadtests.errors import LoadError
from loadtests.metrics.slo import Slo, is_as_strict
from loadtests.records.events import Calibrated, of_kind
from loadtests.records.old_run_folder import RunRecords
from loadtests.records.schema import RunManifest
from loadtests.simulation.batching import Policy
from loadtests.simulation.prediction_error import error_scale, packaged_pairs
from loadtests.simulation.step_time import StepLaw
from loadtests.workload.requests import Workload, draw
from models import formatting
from models.errors import CrossoverError
from reports.numbers import CellNumbers, RunNumbers
from reports.plan.candidates import Candidate, Cost
from reports.plan.file import TRACE_ROWS, BadPlan, MachineKeys, PlanFile, Price, Question
from reports.plan.forecast import Arrivals, Shape
from reports.plan.ranking import Offer, Plan, make_plan
from reports.plan.sizing import Errors, Server
from reports.planning.calibrated import load_machine
from reports.planning.hardware import Device, device_named, devices
from reports.planning.machine_capacity import Serving, policy_of
from reports.planning.machines import Machine, machine_of, step_law
from reports.reference.archive import opened
from reports.run import numbers_of, read_records

# Half width of the 90 % band of ln(capacity) by simulation: the standard deviation over seeds is
# 0.03 where 90 % of requests must be good and 0.07 to 0.15 where 99 % must, with 3,000 requests.
SIMULATION = 0.15
OF_REQUESTS = 3_000
NORMAL_90 = 1.645  # standard deviations, half a 90 % interval
# On-demand prices of other clouds over the list price: H100 0.43, H200 0.44, B200 0.39, MI300X
# 0.40, A100 0.46, L40S 0.83, EPYC 9654 0.78 (RunPod, Nebius, DigitalOcean and Azure; 2026).
LOWEST_PRICE_SHARE = 0.43
TENSOR_PARALLEL = (1, 2, 4, 8)  # devices of one replica, where the plan does not say


def planned(asked: Question, step: Callable[[str], None] = lambda _: None) -> Plan:
    """The plan of what is asked, on its machines. `step` is told what is simulated."""
    asked = with_format(asked)
    return make_plan(asked, candidates_of(asked), offers_of(asked), step)


def with_format(asked: Question) -> Question:
    """Where no format is given, that of the model in the first run that measured it."""
    if asked.keys.format is not None:
        return asked
    for machine in asked.keys.machines:
        for cell in _run(machine.run, asked).cells if machine.run is not None else ():
            if cell.spec is not None and cell.spec.name == asked.spec.name:
                keys = msgspec.structs.replace(asked.keys, format=cell.weight_format)
                return msgspec.structs.replace(asked, keys=keys)
    return asked


def _run(path: str, asked: Question) -> RunNumbers:
    try:
        return numbers_of(_records(asked.folder / path))
    except CrossoverError as problem:
        places = [number for number, one in enumerate(asked.keys.machines) if one.run == path]
        raise BadPlan(f"{problem} - at `$.machines[{places[0]}]`") from problem


def _records(path: Path) -> RunRecords:
    """Of a run folder, or of the archive of a run."""
    if not path.is_file():
        return read_records(path)
    with opened(path) as folder:
        return read_records(folder)


def candidates_of(asked: Question) -> list[Candidate]:
    """The machines of the file, then the devices to consider, with their servers simulated.

    A machine that cannot serve the model has no server, and a reason. Raises CrossoverError for a
    run, file or device that is not there.
    """
    _check_prices(asked.keys)
    found: list[Candidate] = []
    for number, keys in enumerate(asked.keys.machines):
        try:
            made = list(_of_machine(keys, asked))
            found += _renamed(made, {one.name for one in found})
        except CrossoverError as problem:
            raise BadPlan(f"{problem} - at `$.machines[{number}]`") from problem
    known = {one.name for one in found}
    for device in considered(asked.keys):
        if device.name not in known:
            found += _of_device(device, MachineKeys(device=device.name), asked)
    return found


def _renamed(made: list[Candidate], taken: set[str]) -> list[Candidate]:
    """`laptop (2)` for a second machine of one name."""
    first = made[0].name
    name, number = first, 1
    while name in taken:
        number += 1
        name = f"{first} ({number})"
    return [msgspec.structs.replace(one, name=name) for one in made]


def _check_prices(keys: PlanFile) -> None:
    """Every price is of a device that is known by just that name. Raises BadPlan."""
    names = {one.name for one in devices()}
    for name in keys.prices:
        if name not in names:
            try:
                hint = f"; it is called {device_named(name).name!r}"
            except CrossoverError:
                hint = ""
            raise BadPlan(f"a price of {name!r}, which is no device{hint} - at `$.prices`")


def considered(keys: PlanFile) -> list[Device]:
    """The devices of the file, else all that have a price."""
    if keys.devices is None:
        return [one for one in devices() if one.dollars_per_hour or one.name in keys.prices]
    try:
        found = [device_named(name) for name in keys.devices]
        return list({one.name: one for one in found}.values())
    except CrossoverError as problem:
        raise BadPlan(f"{problem} - at `$.devices`") from problem


def offers_of(asked: Question) -> list[Offer]:
    """What a dollar an hour rents of memory bandwidth, of the devices with a price."""
    return [
        Offer(
            machine=one.name,
            is_cpu=one.kind == "cpu",
            gb_per_second_per_dollar_hour=one.bandwidth_gb_per_second / price.estimate,
        )
        for one in considered(asked.keys)
        if (price := _price_of(one, None, asked.keys)) is not None
    ]


def _price_of(device: Device, given: Price | None, keys: PlanFile) -> Cost | None:
    """As the file says; else from what other clouds take up to the list price."""
    said = given if given is not None else keys.prices.get(device.name)
    if said is not None:
        return Cost.of(said)
    listed = device.dollars_per_hour
    if listed is None:
        return None
    return Cost(estimate=listed, low=LOWEST_PRICE_SHARE * listed, high=listed)


def _of_machine(keys: MachineKeys, asked: Question) -> Iterator[Candidate]:
    if keys.run is not None:
        yield _of_run(keys, asked)
    elif keys.file is not None:
        machine = load_machine(asked.folder / keys.file)
        engine = machine.file.engines[0]
        how = Serving(
            slots=engine.slots,
            prefill_tokens=Policy().prefill_tokens,
            kv_dtype=engine.kv_dtype,
            seed=asked.keys.seed,
        )
        owned = int(machine.owned) if keys.owned is None else keys.owned
        rent = keys.dollars_per_hour or machine.dollars_per_hour
        yield _candidate(
            *(machine, how, asked, keys),
            is_cpu=True,
            owned=owned,
            price=None if rent is None else Cost.of(rent),
        )
    else:
        yield from _of_device(device_named(keys.device or ""), keys, asked)


def _of_device(device: Device, keys: MachineKeys, asked: Question) -> Iterator[Candidate]:
    """One candidate for each number of devices that share a replica."""
    is_cpu = device.kind == "cpu"
    machine = machine_of(device)
    asked_for = asked.keys.tensor_parallel
    tried = sorted(set(asked_for or TENSOR_PARALLEL)) if device.memory_type != "apple" else [1]
    found = [
        _candidate(
            *(
                machine,
                Serving(slots=asked.keys.slots, devices=number),
                asked,
                keys,
            ),
            is_cpu=is_cpu,
            owned=keys.owned or 0,
            price=_price_of(device, keys.dollars_per_hour, asked.keys),
        )
        for number in (tried if not is_cpu else [1])
    ]
    able = [one for one in found if one.server is not None]
    # The smallest that suffices has the least to say to each other; the next may be quick enough.
    yield from able[: None if asked_for else 2] or found[-1:]


def _candidate(
    machine: Machine,
    how: Serving,
    asked: Question,
    keys: MachineKeys,
    *,
    is_cpu: bool,
    owned: int,
    price: Cost | None,
) -> Candidate:
    weight_format = asked.weight_format(not is_cpu)
    plain = Candidate(
        name=keys.name or machine.name,
        kind=machine.kind,
        is_cpu=is_cpu,
        devices=how.devices,
        owned=owned // how.devices,
        dollars_per_hour=price,
        dollars=None if keys.dollars is None else Cost.of(keys.dollars),
        lifetime_months=keys.lifetime_months,
        watts=keys.watts or machine.watts,
        price_source=_source(machine, keys, asked.keys),
    )
    try:
        policy = policy_of(machine, asked.spec, weight_format, asked.pairs, how)
        law, band = step_law(machine, asked.spec, weight_format, policy.slots, how.devices)
    except CrossoverError as problem:
        return msgspec.structs.replace(plain, reason=str(problem))
    server = Server(
        *(law, policy, asked.pairs, asked.forecast.shape),
        seed=asked.keys.seed,
        requests=asked.keys.requests,
    )
    errors = Errors(step=band, rate=_simulation(asked.keys.requests))
    return msgspec.structs.replace(plain, server=server, errors=errors)


def _simulation(requests: int) -> float:
    """Half width of the 90 % band that simulating so many requests gives."""
    return SIMULATION * math.sqrt(OF_REQUESTS / requests)


def _source(machine: Machine, keys: MachineKeys, plan: PlanFile) -> str:
    if keys.dollars_per_hour is not None or machine.name in plan.prices:
        return "this plan"
    return ", ".join(part for part in (machine.price_source, machine.price_date) if part)


def _of_run(keys: MachineKeys, asked: Question) -> Candidate:
    """A machine whose capacity was measured: its own step law, anchored at what was measured.

    Measured over simulated, under the run's own SLO and workload, multiplies the simulated capacity
    under the plan's; where both are the same, the plan's is the measured one.
    """
    assert keys.run is not None
    records = _records(asked.folder / keys.run)
    run = numbers_of(records)
    wanted = asked.weight_format(is_gpu=False)
    cells = [
        (cell, law, policy)
        for cell in run.cells
        if cell.spec is not None
        and (cell.spec.name, cell.weight_format) == (asked.spec.name, wanted)
        for event in of_kind(records.events, Calibrated, cell.key)[:1]
        if event.law is not None and event.policy is not None
        for law, policy in [
            (msgspec.convert(event.law, StepLaw), msgspec.convert(event.policy, Policy))
        ]
    ]
    name = keys.name or str(run.facts.get("cpu_model") or run.name)
    plain = Candidate(
        name=name,
        kind="measured",
        is_cpu=True,
        owned=1 if keys.owned is None else keys.owned,
        dollars_per_hour=None if keys.dollars_per_hour is None else Cost.of(keys.dollars_per_hour),
        dollars=None if keys.dollars is None else Cost.of(keys.dollars),
        lifetime_months=keys.lifetime_months,
        watts=keys.watts,
        price_source="this plan",
    )
    if not cells:
        measured = formatting.listing([f"{cell.model} {cell.weight_format}" for cell in run.cells])
        reason = f"no step law of {asked.spec.name} in {wanted} was measured on it, but {measured}"
        return msgspec.structs.replace(plain, reason=reason)
    cell, law, policy = max(cells, key=lambda one: _estimate(one[0]))
    plain = msgspec.structs.replace(plain, is_cpu=cell.device != "gpu")
    held_none = cell.capacity is not None and cell.capacity.status == "none"
    if held_none and is_as_strict(asked.slo, run.slo):
        reason = f"by {keys.run} it meets the SLO {run.slo.name} at no rate"
        return msgspec.structs.replace(plain, reason=reason)
    server = Server(
        *(law, policy, asked.pairs, asked.forecast.shape),
        seed=asked.keys.seed,
        requests=asked.keys.requests,
    )
    if held_none:
        reason = (
            f"by {keys.run} it meets the SLO {run.slo.name} at no rate, which says nothing of "
            f"{asked.slo.name}: that is simulated by its step law, and measured by "
            "`crossover campaign run` under the SLO of this plan"
        )
        return msgspec.structs.replace(
            plain, kind="calibrated", server=server, errors=_own_law_errors(), reason=reason
        )
    factor, errors, reason = _anchor(cell, server, run.manifest, run.slo, asked)
    return msgspec.structs.replace(
        plain, server=server, factor=factor, errors=errors, reason=reason
    )


def _own_law_errors() -> Errors:
    """Of capacities that were simulated by a measured step law, as the project's own were off."""
    return Errors(rate=NORMAL_90 * error_scale(packaged_pairs()))


def _estimate(cell: CellNumbers) -> float:
    return (cell.capacity.estimate or 0.0) if cell.capacity is not None else 0.0


def _anchor(
    cell: CellNumbers, server: Server, manifest: RunManifest, slo: Slo, asked: Question
) -> tuple[float, Errors, str]:
    """Measured over simulated capacity of a cell, its errors, and why it is not known.

    1 with the error of the project's own predictions, where it is not. Simulated as the plan
    simulates, so that it is exact where the plan asks for what was measured; there the slow end is
    the low end of the measured interval. Elsewhere the error of simulation joins.
    """
    guess = _own_law_errors()
    found = cell.capacity
    if found is None or not (found.estimate and found.low and found.high):
        return 1.0, guess, "no interval of its capacity was measured; it is simulated"
    keys = asked.keys
    try:
        workload = msgspec.convert(manifest.campaign.get("workload"), Workload)
        arrivals: Arrivals = msgspec.convert(manifest.campaign.get("arrivals"), Arrivals)
        asks = draw(workload, min(keys.requests, TRACE_ROWS), keys.seed)
    except msgspec.ValidationError:  # several workloads, or arrivals that no hour of a plan has
        return 1.0, guess, "its run's workload or arrivals cannot be simulated; capacity is"
    except LoadError as problem:
        return 1.0, guess, f"its run's workload is not here, so capacity is simulated: {problem}"
    pairs = np.array([(ask.prompt_tokens, ask.output_tokens) for ask in asks], dtype=np.int64)
    own = server.like(pairs, Shape(arrivals))
    simulated = own.capacity(slo)
    if simulated == 0:
        return 1.0, guess, "its run's capacity cannot be simulated"
    limits = [(one.ttft_seconds, one.tpot_seconds, one.target) for one in (slo, asked.slo)]
    is_same = limits[0] == limits[1] and np.array_equal(pairs, asked.pairs)
    shape = asked.forecast.shape
    is_same = is_same and type(shape) is Shape and arrivals == shape.arrivals
    beside = 0.0 if is_same else _simulation(keys.requests)
    low, high = math.log(found.estimate / found.low), math.log(found.high / found.estimate)
    errors = Errors(rate=math.hypot(high, beside), slow_rate=math.hypot(low, beside))
    return found.estimate / simulated, errors, ""

"""Which cells this machine can measure, on which device, engine and cores, and for how long.

on_this_machine(plan, machine, facts, progress)     # the devices that are here, models for "auto"
why_not(cell, campaign, facts)           # None, or the reason with its arithmetic
fastest_engine(cell, campaign, facts, progress)     # of the CPU's, where the cell asks for it
shares(cells, confirmed, 600.0, campaign)           # {cell key: seconds}
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence

import msgspec

from crossover.loadtests.campaign.campaign_file import (
    AUTO,
    DEVICES,
    Campaign,
    Cell,
    Device,
    Plan,
    Server,
    backends_on,
    can_measure,
    cells_of,
    nothing_on,
)
from crossover.loadtests.campaign.progress import Progress
from crossover.loadtests.capacity.capacity_estimate import shortest_level
from crossover.loadtests.errors import BadCampaign
from crossover.loadtests.host.cpu_pinning import Layout, divide_cores
from crossover.loadtests.records.journal_events import EngineChosen
from crossover.models import formatting
from crossover.models.identify_model import identify
from crossover.models.machine_limits import cgroup_cores
from crossover.models.model_ladder import ladder_model
from crossover.models.model_spec import ModelSpec
from crossover.models.resolve_model import resolve
from crossover.models.weight_formats import weight_bytes
from crossover.models.weights_manifest import cache_dir
from crossover.serving.backends.backend_table import (
    BACKENDS,
    DEFAULTS,
    format_of,
    missing_backends,
    spec_of,
    weights_of,
)
from crossover.serving.backends.model_engines import Engine, engines_on, usual_engines
from crossover.serving.capacity.scheduler_settings import DEFAULT_SETTINGS, SchedulerSettings
from crossover.serving.capacity.simulated_capacity import SimulatedCapacity, capacity
from crossover.serving.capacity.step_time_model import StepTimeModel
from crossover.serving.errors import ServingError
from crossover.serving.hardware.machine_facts import HardwareFacts, allowed_cores
from crossover.serving.placement.fastest_backend import (
    BEST,
    USUAL,
    EngineCandidate,
    EngineQuestion,
    fastest_backend,
    known_times,
    step_times_of_timings,
)
from crossover.serving.placement.placement_policy import PlacementRequest, plan
from crossover.serving.registry.prepare_model import Machine
from crossover.serving.server_options import Policy

CELL_SECONDS = 600.0  # measuring time of a cell if the campaign sets no budget
ESTIMATE_SECONDS = 60.0  # single streams of 20 s, bursts of 10 to 30 s: a cell without levels
# On a GPU, measured on an H200 (64 slots, 1B and 8B): bursts 2 to 3 s, a level 7 to 8 s longer than
# its window.
GPU_CALIBRATION_SECONDS, GPU_LEVEL_MARGIN_SECONDS = 5.0, 10.0

# Each two to three times the one before.
STEPS = (
    *("smollm2-135m", "smollm2-360m", "llama-3.2-1b", "llama-3.2-3b", "llama-3.1-8b"),
    *("qwen2.5-14b", "qwen2.5-32b", "llama-3.3-70b"),
)
MEASURED = "llama-3.2-1b"
BACKEND, FORMAT = USUAL[0]  # its weights are made in seconds
MAX_LADDER_MODELS = (
    4  # at most: the largest that meet the SLO unloaded, and the first that does not
)
RUNGS_BESIDE_GPU = 3  # for the CPU if the GPU takes its part of the same budget
DISK_SHARE = 0.9  # of the free disk space, for the weights of a model


def why_not(cell: Cell, campaign: Campaign, facts: HardwareFacts) -> str | None:
    """Return why a cell cannot run here, with the arithmetic; None: it can, or a trial decides."""
    known = BACKENDS.get(cell.backend)
    if cell.spec is None or known is None or not known.has_weights:
        return None
    asked = _placement(campaign, cell, cell.spec, placement_policy_of(cell, campaign))
    named = {"backend": cell.backend, "weight_format": cell.weight_format or None}
    try:
        plan(msgspec.structs.replace(asked, **named), facts)
    except (ServingError, ValueError, KeyError) as problem:
        return str(problem)
    return None


def _placement(campaign: Campaign, cell: Cell, spec: ModelSpec, policy: Policy) -> PlacementRequest:
    return PlacementRequest(
        model=spec,
        policy=policy,
        settings=campaign.server.settings_on("gpu" if policy is Policy.gpu_only else "cpu"),
        weight_bytes=None if cell.identity is None else cell.identity.weight_bytes,
        check_memory=campaign.server.check_memory,
    )


def placement_policy_of(cell: Cell, campaign: Campaign) -> Policy:
    """Return the policy that a cell's server is started with: its device and no other, so that the
    device measured is the one that the cell names."""
    if cell.device is None:  # of a run that was written before cells named one
        return campaign.server.policy
    return Policy.gpu_only if cell.device == "gpu" else Policy.cpu_only


def cpu_settings(server: Server) -> SchedulerSettings:
    """The settings of an engine on the CPU of a server of ours that is started so."""
    return server.filled(DEFAULT_SETTINGS["cpu"])


def layout_of(cell: Cell, campaign: Campaign, usable: tuple[int, ...] = ()) -> Layout | None:
    """The cores of a cell, of the usable ones (none: all that this process may use); None for an
    endpoint. Raises BadCampaign for more than there are.
    """
    if cell.url is not None:
        return None
    try:
        return divide_cores(usable or allowed_cores(), campaign.server.cores, cgroup_cores())
    except ValueError as problem:
        raise BadCampaign(f"server.cores: {problem}") from problem


# The fastest engine.


def fastest_engine(
    cell: Cell, campaign: Campaign, facts: HardwareFacts, progress: Progress
) -> EngineChosen:
    """The engine of the CPU with the most capacity under the cell's workload and SLO, by the rule
    of crossover.serving.placement.fastest_backend. Raises CrossoverError where no engine can run
    the cell.
    """

    def say(line: str) -> None:
        progress.say(f"  {line}")

    choice = fastest_backend(question_of(cell, campaign), facts, say, progress.tick)
    name = f"{choice.backend} {choice.weight_format}".strip()
    progress.say(f"{cell.key}: engine {name}: {choice.reason}")
    return EngineChosen(
        cell=cell.key,
        backend=choice.backend,
        weight_format=choice.weight_format,
        threads=choice.threads,
        reason=choice.reason,
    )


def _capacity_on_cpu(step_times: StepTimeModel, campaign: Campaign) -> SimulatedCapacity:
    return capacity(step_times, cpu_settings(campaign.server), campaign.workload, campaign.slo)


def question_of(cell: Cell, campaign: Campaign) -> EngineQuestion:
    """What the cell's engines are timed with."""
    server, layout = campaign.server, layout_of(cell, campaign)
    assert layout is not None
    spec = cell.spec
    engines: tuple[Engine, ...] = ()
    if cell.identity is not None:
        if spec is None:  # of the hub: it is fetched now
            kind, _ = weights_of(usual_engines(cell.identity)[0].backend)
            spec = resolve(cell.source, kind=kind, cache=server.cache).spec
        engines = _engines_to_compare(cell, campaign)
    assert spec is not None
    return EngineQuestion(
        source=cell.source,
        request=_placement(campaign, cell, spec, Policy.cpu_only),
        threads=server.threads or layout.engine_threads,
        cores=layout.engine,
        are_threads_open=server.threads is None,
        may_measure_reference=True,
        formats=tuple(campaign.formats),
        engines=engines,
        workload=campaign.workload,
        slo=campaign.slo,
        cache=server.cache,
    )


def _engines_to_compare(cell: Cell, campaign: Campaign) -> tuple[Engine, ...]:
    """The CPU's engines that can run a model that the ladder does not have."""
    model = identify(cell.source)
    names = [one.backend for one in usual_engines(model) if "cpu" in BACKENDS[one.backend].devices]
    return tuple(one for name in names for one in engines_on(model, name, campaign.formats))


# The budget.


def to_confirm(campaign: Campaign, cells: Sequence[Cell]) -> set[str]:
    """Return the keys of the cells to confirm: all, or of each device those of so many models.

    On the CPU they are the smallest, which take the least time; on the GPU the largest, since it is
    there for what the CPU does not serve. Mixtures of experts go by their active parameters.

    A model whose shape is not known goes last.
    """
    sizes = {
        cell.model: float("inf") if cell.spec is None else cell.spec.active_parameters
        for cell in cells
    }
    count, keys = campaign.search.confirm, set[str]()
    for device in dict.fromkeys(cell.device for cell in cells):
        own = [cell for cell in cells if cell.device == device]
        models = sorted(
            dict.fromkeys(cell.model for cell in own),
            key=lambda model: sizes[model],
            reverse=device == "gpu",
        )
        keys |= {cell.key for cell in own if cell.model in models[:count]}
    return keys


def budget_of(campaign: Campaign, cells: int) -> float:
    """Seconds of measuring, of so many cells together."""
    return campaign.budget_seconds or CELL_SECONDS * cells


def shares(
    cells: Sequence[Cell], confirmed: set[str], seconds: float, campaign: Campaign
) -> dict[str, float]:
    """Return the seconds of measuring for each cell that is to come, of those that are left.

    A cell that is only estimated needs little, and so does one on a GPU: it gets the time of its
    single streams, bursts and one level. The other cells share the rest evenly.
    """
    even = seconds / max(1, len(cells))
    is_shared = {cell.key: cell.key in confirmed and cell.device != "gpu" for cell in cells}
    if not any(is_shared.values()):  # GPUs alone: nobody else has a use for the rest
        is_shared = {cell.key: cell.key in confirmed for cell in cells}
    needs = {
        cell.key: min(even, _needed_seconds(cell, cell.key in confirmed, campaign))
        for cell in cells
        if not is_shared[cell.key]
    }
    rest = (seconds - sum(needs.values())) / max(1, len(cells) - len(needs))
    return {cell.key: needs.get(cell.key, rest) for cell in cells}


def _needed_seconds(cell: Cell, is_confirmed: bool, campaign: Campaign) -> float:
    """Return the seconds of measuring that an estimate takes, or on a GPU the level after it too:
    some 40 s, 75 s where a TTFT limit of 2 s makes the level a minute long."""
    if cell.device != "gpu":
        return ESTIMATE_SECONDS
    estimate = campaign.search.single_stream_seconds_on("gpu") + GPU_CALIBRATION_SECONDS
    if not is_confirmed:
        return estimate
    least = campaign.search.level_seconds_on("gpu")
    return estimate + GPU_LEVEL_MARGIN_SECONDS + shortest_level(campaign.slo, None, least)


# What this machine has to measure: its devices, and the models in place of "auto".


def on_this_machine(
    asked: Plan, machine: Machine, facts: HardwareFacts, progress: Progress
) -> Plan:
    """Return the plan with the devices that are here, and with models in place of "auto".

    A campaign that names no devices measures the CPU, and the GPU where a backend here can use it.
    Raises BadCampaign for a device that is not here, with those that are; for "auto" without
    llama_cpp; CrossoverError where a measurement fails.
    """
    campaign = asked.campaign
    if campaign.target is not None or campaign.backends == []:
        return asked
    drivers = gpu_drivers(campaign, machine, facts, progress)
    devices = [one for one in campaign.devices or DEVICES if drivers or one == "cpu"]
    if not campaign.devices and drivers and not can_measure("cpu", campaign, drivers):
        progress.say(nothing_on("cpu", campaign, drivers), style="yellow")
        devices.remove("cpu")
    campaign = msgspec.structs.replace(campaign, devices=devices)
    if AUTO in campaign.models:
        models = _models_of(campaign, drivers, facts, progress)
        names = sorted({name for some in models.values() for name in some}, key=STEPS.index)
        campaign = msgspec.structs.replace(campaign, models=names)
    elif asked.campaign.devices == ["cpu"]:
        return asked  # its file says all
    else:
        models = dict.fromkeys(devices, campaign.models)
    return Plan(campaign, cells_of(campaign, models, drivers), asked.text)


def gpu_drivers(
    campaign: Campaign, machine: Machine, facts: HardwareFacts, progress: Progress
) -> list[str]:
    """Return the backends that can use this machine's GPU and that the campaign measures there, the
    preferred one first; [] where the CPU alone is measured.

    Raises BadCampaign where the campaign names the GPU and there is none of them.
    """
    if campaign.devices and "gpu" not in campaign.devices:
        return []
    named = [
        one for one in campaign.backends or () if one != BEST and "gpu" in spec_of(one).devices
    ]
    names = list(dict.fromkeys([*DEFAULTS["gpu"], *named]))
    missing = missing_backends()
    if not facts.gpus:
        why = {"": facts.gpu_note or "no GPU was found"}
    else:
        troubles = machine.gpu_troubles([name for name in names if name not in missing], facts)
        why = {name: text for name, (_, text) in troubles.items()}
        why = {name: missing.get(name) or why.get(name, "") for name in names}
    able = [name for name in names if facts.gpus and not why[name]]
    drivers = able if can_measure("gpu", campaign, able) else []
    if drivers or not (facts.gpus or campaign.devices):
        return drivers
    told = "; ".join(f"{name}: {text}" if name else text for name, text in why.items() if text)
    if able:
        told = nothing_on("gpu", campaign, able).removeprefix("devices: ")
    if campaign.devices:
        raise BadCampaign(f"devices: The GPU cannot be measured here: {told}. Use ['cpu']")
    progress.say(f"the GPU ({facts.gpus[0].name}) is not measured: {told}", style="yellow")
    return []


def _models_of(
    campaign: Campaign, drivers: Sequence[str], facts: HardwareFacts, progress: Progress
) -> dict[Device | None, list[str]]:
    """Return the models in place of "auto", by device.

    The CPU measures those around its limit. The GPU measures the same as far as they fit, so that
    both stand beside each other, and the largest that fits; without a CPU, those before it too.
    """
    models: dict[Device | None, list[str]] = {}
    for device in campaign.devices:
        if device == "cpu":
            count = MAX_LADDER_MODELS if len(campaign.devices) == 1 else RUNGS_BESIDE_GPU
            models[device] = _around_the_cpus_limit(campaign, count, facts, progress)
        else:
            fitting = fitting_on_gpu(campaign, drivers, facts)
            beside = models.get("cpu")
            if not fitting:
                progress.say(
                    "no model is measured on the GPU: no ladder model fits", style="yellow"
                )
            chosen = fitting[-MAX_LADDER_MODELS:]
            if beside is not None:
                chosen = [name for name in fitting if name in (*beside, fitting[-1])]
            models[device] = chosen
            told = f"models auto, GPU: {', '.join(chosen)}"
            progress.say(f"{told}; {chosen[-1]} is the largest that fits" if chosen else told)
    return models


def fitting_on_gpu(campaign: Campaign, drivers: Sequence[str], facts: HardwareFacts) -> list[str]:
    """Return the ladder models that fit in the memory of the GPU, and whose weights fit on the
    disk."""
    backend = backends_on("gpu", campaign, drivers, identify(MEASURED))[0]
    taken = [one for one in campaign.formats if one in spec_of(backend).formats]
    weight_format = format_of(backend, taken[0] if taken else None)
    server = msgspec.structs.replace(campaign.server, check_memory=True)
    asked = msgspec.structs.replace(campaign, server=server)
    free_bytes = free_disk_bytes(campaign.server.cache)
    found = []
    for name in STEPS:
        cell = Cell(
            key=name, model=name, weight_format=weight_format, backend=backend, device="gpu"
        )
        if why_not(cell, asked, facts) is None:
            if weight_bytes(ladder_model(name).spec, weight_format) < DISK_SHARE * free_bytes:
                found.append(name)
    return found


def free_disk_bytes(cache: str | None) -> int:
    """Return the bytes that are free where weights are made."""
    folder = cache_dir(cache)
    return shutil.disk_usage(next(one for one in (folder, *folder.parents) if one.exists())).free


def _around_the_cpus_limit(
    campaign: Campaign, count: int, facts: HardwareFacts, progress: Progress
) -> list[str]:
    """Return the ladder models around the CPU's limit, by the step times of MEASURED."""
    if BACKEND in (missing := missing_backends()):
        raise BadCampaign(f"models = ['auto'] needs {BACKEND}: {missing[BACKEND]}")
    cell = Cell(key=MEASURED, model=MEASURED, weight_format="", backend=BEST, device="cpu")
    engine = EngineCandidate(backend=BACKEND, weight_format=FORMAT)
    question = question_of(cell, campaign)
    times = known_times(question, engine, facts, progress.say, progress.tick)
    assert times is not None  # they were measured
    chosen = around_the_limit(step_times_of_timings(times), campaign, facts, count)
    progress.say(f"models auto: {len(chosen)} models, chosen by the step times of {MEASURED}")
    like = min(filter(None, (found.rate for found in chosen.values())), default=None)
    for name, found in chosen.items():
        rate = formatting.of_requests(formatting.rate(found.rate, like=like))
        alone = f"{formatting.share(found.alone_share)} SLO attainment unloaded"
        progress.say(f"  {name}: capacity {rate if found.rate else 'none'} (predicted), {alone}")
    return list(chosen)


def around_the_limit(
    step_times: StepTimeModel,
    campaign: Campaign,
    facts: HardwareFacts,
    count: int = MAX_LADDER_MODELS,
) -> dict[str, SimulatedCapacity]:
    """Of the ladder models that fit in the CPU's memory: the first that fails alone, and those
    before it, `count` at most.

    `step_times`: of MEASURED; another ladder model's steps take longer as it multiplies with more
    parameters.
    """
    server = msgspec.structs.replace(campaign.server, check_memory=True)
    on_cpu = msgspec.structs.replace(campaign, server=server)
    found: dict[str, SimulatedCapacity] = {}
    for name in STEPS:
        cell = Cell(key=name, model=name, weight_format=FORMAT, backend=BACKEND, device="cpu")
        if why_not(cell, on_cpu, facts) is None:
            parts = (ladder_model(one).spec.matrix_parameters for one in (name, MEASURED))
            found[name] = _capacity_on_cpu(step_times.slower(next(parts) / next(parts)), on_cpu)
            if not found[name].rate:
                break
    return dict(list(found.items())[-count:])

"""Decides which cells this machine can measure, on which device, engine and cores, and how long.

on_this_machine(plan, machine, facts, progress)     # the machine's devices, models for "auto"
why_not(cell, campaign, facts)                      # None, or why it cannot run here
fastest_engine(cell, campaign, facts, progress)     # the engine of a cell whose backend is "best"
share_budget(cells, to_confirm, 600.0, campaign)    # {cell key: seconds}
"""

from __future__ import annotations

import itertools
import re
import shlex
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
    ServerSettings,
    ThirdPartyEngine,
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
from crossover.models.identity.identify_model import identify
from crossover.models.identity.model_ladder import ladder_model
from crossover.models.identity.resolve_model import resolve
from crossover.models.machine_limits import cgroup_cores
from crossover.models.shape.model_spec import ModelSpec
from crossover.models.weights.weight_formats import weight_bytes
from crossover.models.weights.weights_manifest import cache_dir
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
from crossover.serving.capacity.simulated_capacity import Demand, ServerModel, SimulatedCapacity
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
from crossover.serving.placement.placement_policy import PlacementRequest
from crossover.serving.placement.placement_policy import plan as plan_placement
from crossover.serving.registry.prepare_model import Machine
from crossover.serving.server_options import Policy

CELL_SECONDS = 600.0  # measuring time of a cell if the campaign sets no budget
ESTIMATE_SECONDS = 60.0  # single streams of 20 s, bursts of 10 to 30 s: a cell without levels
# On a GPU, measured on an H200 (64 slots, 1B and 8B): bursts took 2 to 3 s, a level 7 to 8 s more
# than its window.
GPU_CALIBRATION_SECONDS = 5.0
GPU_LEVEL_MARGIN_SECONDS = 10.0

# The models in place of "auto", each two to three times as large as the one before.
LADDER_MODELS = (
    "smollm2-135m",
    "smollm2-360m",
    "llama-3.2-1b",
    "llama-3.2-3b",
    "llama-3.1-8b",
    "qwen2.5-14b",
    "qwen2.5-32b",
    "llama-3.3-70b",
)
REFERENCE_MODEL = "llama-3.2-1b"  # its step times are measured, those of the others are predicted
BACKEND, FORMAT = USUAL[0]  # its weights are made in seconds
MAX_LADDER_MODELS = 4  # the largest that meet the SLO unloaded, and the first that does not
MAX_LADDER_MODELS_BESIDE_GPU = 3  # on the CPU if the GPU uses a part of the same budget
MAX_DISK_SHARE = 0.9  # of the free disk space, for the weights of a model


def why_not(cell: Cell, campaign: Campaign, facts: HardwareFacts) -> str | None:
    """Return why a cell cannot run here: the program that is not installed, or the sum of the
    memory that it needs.

    None: it can run, or it is not known before its server is started.
    """
    engine = campaign.engine_of(cell)
    if engine is not None:
        return why_not_installed(engine)
    backend = BACKENDS.get(cell.backend)
    if cell.spec is None or backend is None or not backend.has_weights:
        return None
    request = msgspec.structs.replace(
        _placement_request(campaign, cell, cell.spec, placement_policy_of(cell, campaign)),
        backend=cell.backend,
        weight_format=cell.weight_format or None,
    )
    try:
        plan_placement(request, facts)
    except (ServingError, ValueError, KeyError) as problem:
        return str(problem)
    return None


def why_not_installed(engine: ThirdPartyEngine) -> str | None:
    """Return which program of another project's engine is missing, and how to install it; None: it
    is there, or its command does not show which program it starts."""
    program = program_of(engine.command)
    if program is None or shutil.which(program) is not None:
        return None
    how = f" Install it: {engine.install}" if engine.install else ""
    return f"{engine.name} needs the program {program!r}, not found.{how}"


def program_of(command: str) -> str | None:
    """Return the program that a command starts: `vllm` of `env A=1 vllm serve`. None: `env` has
    options, which may change where and how the program is found."""
    words = shlex.split(command)
    if words[0] == "env":
        words = [word for word in words[1:] if not re.match(r"\w+=", word)] or ["env"]
        if words[0].startswith("-"):
            return None
    return words[0]


def _placement_request(
    campaign: Campaign, cell: Cell, spec: ModelSpec, policy: Policy
) -> PlacementRequest:
    return PlacementRequest(
        model=spec,
        policy=policy,
        settings=campaign.server.settings_on("gpu" if policy is Policy.gpu_only else "cpu"),
        weight_bytes=None if cell.identity is None else cell.identity.weight_bytes,
        check_memory=campaign.server.check_memory,
    )


def placement_policy_of(cell: Cell, campaign: Campaign) -> Policy:
    """Return the policy that a cell's server is started with. It allows only the cell's device, so
    that no other device is measured in its name."""
    if cell.device is None:  # the campaign names none
        return Policy.auto
    return Policy.gpu_only if cell.device == "gpu" else Policy.cpu_only


def cpu_settings(server: ServerSettings) -> SchedulerSettings:
    """Return the scheduler settings on the CPU, with defaults for those that are not set."""
    return server.filled(DEFAULT_SETTINGS["cpu"])


def layout_of(cell: Cell, campaign: Campaign, usable: tuple[int, ...] = ()) -> Layout | None:
    """Return how engine, API and load generator share the cores; None for an endpoint.

    `usable`: logical CPUs; (): all that this process may use. Raises BadCampaign if the campaign
    wants more cores than there are.
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
    """Return the CPU engine with the highest capacity under the campaign's workload and SLO, chosen
    by crossover.serving.placement.fastest_backend.

    Raises CrossoverError if no engine can run the cell.
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


def question_of(cell: Cell, campaign: Campaign) -> EngineQuestion:
    """Return the question which CPU engine serves the cell best. A model of the hub is fetched."""
    server, layout = campaign.server, layout_of(cell, campaign)
    assert layout is not None
    spec = cell.spec
    engines: tuple[Engine, ...] = ()
    if cell.identity is not None:
        if spec is None:  # a model of the hub
            kind, _ = weights_of(usual_engines(cell.identity)[0].backend)
            spec = resolve(cell.source, kind=kind, cache=server.cache).spec
        engines = _engines_to_compare(cell, campaign)
    assert spec is not None
    return EngineQuestion(
        source=cell.source,
        request=_placement_request(campaign, cell, spec, Policy.cpu_only),
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
    """Return the CPU engines that can run a model that is not of the ladder."""
    model = identify(cell.source)
    engines: list[Engine] = []
    for usual_engine in usual_engines(model):
        if "cpu" in BACKENDS[usual_engine.backend].devices:
            engines += engines_on(model, usual_engine.backend, campaign.formats)
    return tuple(engines)


# The budget.


def cells_to_confirm(campaign: Campaign, cells: Sequence[Cell]) -> set[str]:
    """Return the keys of the cells to confirm: on each device those of `search.confirm` models, or
    all.

    On the CPU these are the smallest models, which take the least time; on the GPU the largest,
    since it is there for what the CPU does not serve. The size of a mixture of experts is its
    active parameters. A model whose shape is not known counts as the largest.
    """
    sizes = {
        cell.model: float("inf") if cell.spec is None else cell.spec.active_parameters
        for cell in cells
    }
    keys: set[str] = set()
    for device in dict.fromkeys(cell.device for cell in cells):
        device_cells = [cell for cell in cells if cell.device == device]
        by_size = sorted(
            dict.fromkeys(cell.model for cell in device_cells),
            key=lambda model: sizes[model],
            reverse=device == "gpu",
        )
        models = by_size[: campaign.search.confirm]  # None: all
        keys |= {cell.key for cell in device_cells if cell.model in models}
    return keys


def budget_of(campaign: Campaign, cells: int) -> float:
    """Return the measuring time of all cells together, in seconds. `cells`: their number."""
    return campaign.budget_seconds or CELL_SECONDS * cells


def share_budget(
    cells: Sequence[Cell], to_confirm: set[str], seconds: float, campaign: Campaign
) -> dict[str, float]:
    """Return the seconds of measuring for each cell: cell key -> its part of `seconds`.

    A cell that is only estimated gets the time that an estimate takes, and a cell on a GPU the time
    that an estimate and one level take, since a GPU answers many requests in little time. The other
    cells share the rest evenly. `to_confirm`: keys of the cells that are not only estimated.
    """
    even_seconds = seconds / max(1, len(cells))
    shares_rest = {cell.key for cell in cells if cell.key in to_confirm and cell.device != "gpu"}
    if not shares_rest:  # then the GPU's cells share the rest
        shares_rest = {cell.key for cell in cells if cell.key in to_confirm}
    needed = {
        cell.key: min(even_seconds, _needed_seconds(cell, cell.key in to_confirm, campaign))
        for cell in cells
        if cell.key not in shares_rest
    }
    rest_seconds = (seconds - sum(needed.values())) / max(1, len(cells) - len(needed))
    return {cell.key: needed.get(cell.key, rest_seconds) for cell in cells}


def estimate_seconds(cell: Cell, cells: int, campaign: Campaign) -> float:
    """Return the seconds of measuring that an estimate of a cell takes, at most its even part of
    the budget. `cells`: number of cells that are measured."""
    even_seconds = budget_of(campaign, cells) / max(1, cells)
    return min(even_seconds, _needed_seconds(cell, False, campaign))


def _needed_seconds(cell: Cell, is_confirmed: bool, campaign: Campaign) -> float:
    """Return the seconds of measuring that an estimate takes and, on a GPU, the level that confirms
    it. On a GPU that is some 40 s, or 75 s if a TTFT limit of 2 s makes the level a minute long."""
    if cell.device != "gpu":
        return ESTIMATE_SECONDS
    estimate_seconds = campaign.search.single_stream_seconds_on("gpu") + GPU_CALIBRATION_SECONDS
    if not is_confirmed:
        return estimate_seconds
    min_level_seconds = campaign.search.level_seconds_on("gpu")
    level_seconds = shortest_level(campaign.slo, None, min_level_seconds)
    return estimate_seconds + GPU_LEVEL_MARGIN_SECONDS + level_seconds


# What this machine has to measure: its devices, and the models in place of "auto".


def on_this_machine(
    requested: Plan, machine: Machine, facts: HardwareFacts, progress: Progress
) -> Plan:
    """Return the plan with the devices of this machine, and with models in place of "auto".

    A campaign that names no devices measures the CPU, and the GPU if a backend here can use it.
    Raises BadCampaign for a device that this machine does not have, and for "auto" without
    llama_cpp; CrossoverError if the measurement for "auto" fails.
    """
    campaign = requested.campaign
    if campaign.target is not None or campaign.backends == []:
        return requested
    gpu_backends = usable_gpu_backends(campaign, machine, facts, progress)
    devices = [device for device in campaign.devices or DEVICES if gpu_backends or device == "cpu"]
    if not campaign.devices and gpu_backends and not can_measure("cpu", campaign, gpu_backends):
        progress.say(nothing_on("cpu", campaign, gpu_backends), style="yellow")
        devices.remove("cpu")
    campaign = msgspec.structs.replace(campaign, devices=devices)
    if AUTO in campaign.models:
        models = _auto_models(campaign, gpu_backends, facts, progress)
        names = set(itertools.chain.from_iterable(models.values()))
        by_size = sorted(names, key=LADDER_MODELS.index)
        campaign = msgspec.structs.replace(campaign, models=by_size)
    elif requested.campaign.devices == ["cpu"]:
        return requested  # its cells are complete
    else:
        models = dict.fromkeys(devices, campaign.models)
    return Plan(campaign, cells_of(campaign, models, gpu_backends), requested.text)


def usable_gpu_backends(
    campaign: Campaign, machine: Machine, facts: HardwareFacts, progress: Progress
) -> list[str]:
    """Return the backends that can use this machine's GPU and that the campaign measures there, the
    preferred one first; [] if only the CPU is measured.

    Raises BadCampaign if the campaign names the GPU and none of its backends can use it.
    """
    if campaign.devices and "gpu" not in campaign.devices:
        return []
    names = list(DEFAULTS["gpu"])
    for name in campaign.backends or ():
        if name != BEST and name not in names and "gpu" in spec_of(name).devices:
            names.append(name)
    obstacles = _gpu_obstacles(names, machine, facts)
    able = [name for name in names if facts.gpus and not obstacles[name]]
    if can_measure("gpu", campaign, able):
        return able
    if not facts.gpus and not campaign.devices:
        return []
    if able:
        why = nothing_on("gpu", campaign, able).removeprefix("devices: ")
    elif facts.gpus:
        why = "; ".join(f"{name}: {text}" for name, text in obstacles.items())
    else:
        why = facts.gpu_note or "no GPU was found"
    if campaign.devices:
        raise BadCampaign(f"devices: The GPU cannot be measured here: {why}. Use ['cpu']")
    progress.say(f"the GPU ({facts.gpus[0].name}) is not measured: {why}", style="yellow")
    return []


def _gpu_obstacles(
    backends: Sequence[str], machine: Machine, facts: HardwareFacts
) -> dict[str, str]:
    """Return why each backend cannot use this machine's GPU: backend -> reason; "": it can."""
    if not facts.gpus:
        return {}
    missing = missing_backends()  # backend -> how to install it
    installed = [name for name in backends if name not in missing]
    troubles = machine.gpu_troubles(installed, facts)  # backend -> (cause, words)
    return {name: missing.get(name) or troubles.get(name, ("", ""))[1] for name in backends}


def _auto_models(
    campaign: Campaign, gpu_backends: Sequence[str], facts: HardwareFacts, progress: Progress
) -> dict[Device | None, list[str]]:
    """Return the models in place of "auto": device -> ladder models.

    The CPU measures those around its limit. The GPU measures the same ones as far as they fit in
    its memory, so that both devices can be compared, and the largest that fits. If the CPU is not
    measured, the GPU measures the largest ones that fit.
    """
    models: dict[Device | None, list[str]] = {}
    for device in sorted(campaign.devices, key=DEVICES.index):  # the CPU's models come first
        if device == "cpu":
            is_only = len(campaign.devices) == 1
            count = MAX_LADDER_MODELS if is_only else MAX_LADDER_MODELS_BESIDE_GPU
            models["cpu"] = _models_around_cpu_limit(campaign, count, facts, progress)
            continue
        fitting = models_fitting_on_gpu(campaign, gpu_backends, facts)
        if not fitting:
            progress.say("no model is measured on the GPU: no ladder model fits", style="yellow")
        if "cpu" in models and fitting:
            largest = fitting[-1]
            chosen = [name for name in fitting if name in models["cpu"] or name == largest]
        else:
            chosen = fitting[-MAX_LADDER_MODELS:]
        models["gpu"] = chosen
        words = f"models auto, GPU: {', '.join(chosen)}"
        progress.say(f"{words}; {chosen[-1]} is the largest that fits" if chosen else words)
    return models


def models_fitting_on_gpu(
    campaign: Campaign, gpu_backends: Sequence[str], facts: HardwareFacts
) -> list[str]:
    """Return the ladder models that fit in the memory of the GPU, and whose weights fit on the
    disk."""
    backend = backends_on("gpu", campaign, gpu_backends, identify(REFERENCE_MODEL))[0]
    formats = [name for name in campaign.formats if name in spec_of(backend).formats]
    weight_format = format_of(backend, formats[0] if formats else None)
    checked = _with_memory_check(campaign)
    max_bytes = MAX_DISK_SHARE * free_disk_bytes(campaign.server.cache)
    fitting = []
    for name in LADDER_MODELS:
        cell = Cell(
            key=name, model=name, weight_format=weight_format, backend=backend, device="gpu"
        )
        fits_in_memory = why_not(cell, checked, facts) is None
        if fits_in_memory and weight_bytes(ladder_model(name).spec, weight_format) < max_bytes:
            fitting.append(name)
    return fitting


def _with_memory_check(campaign: Campaign) -> Campaign:
    """Return the campaign with `server.check_memory`, whether or not its file sets that."""
    server = msgspec.structs.replace(campaign.server, check_memory=True)
    return msgspec.structs.replace(campaign, server=server)


def free_disk_bytes(cache: str | None) -> int:
    """Return the bytes that are free in the cache, or in the folder where it will be created."""
    folder = cache_dir(cache)
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free


def _models_around_cpu_limit(
    campaign: Campaign, count: int, facts: HardwareFacts, progress: Progress
) -> list[str]:
    """Return the ladder models around the CPU's limit, by the step times of REFERENCE_MODEL, which
    are measured now or were saved earlier."""
    if BACKEND in (missing := missing_backends()):
        raise BadCampaign(f"models = ['auto'] needs {BACKEND}: {missing[BACKEND]}")
    cell = Cell(
        key=REFERENCE_MODEL, model=REFERENCE_MODEL, weight_format="", backend=BEST, device="cpu"
    )
    engine = EngineCandidate(backend=BACKEND, weight_format=FORMAT)
    question = question_of(cell, campaign)
    times = known_times(question, engine, facts, progress.say, progress.tick)
    assert times is not None  # a question without may_measure=False measures them
    chosen = models_around_limit(step_times_of_timings(times), campaign, facts, count)
    progress.say(
        f"models auto: {len(chosen)} models, chosen by the step times of {REFERENCE_MODEL}"
    )
    rates = [predicted.rate for predicted in chosen.values() if predicted.rate]
    unit_rate = min(rates, default=None)
    for name, predicted in chosen.items():
        rate = formatting.of_requests(formatting.rate(predicted.rate, like=unit_rate))
        unloaded = f"{formatting.share(predicted.unloaded_attainment)} SLO attainment unloaded"
        progress.say(
            f"  {name}: capacity {rate if predicted.rate else 'none'} (predicted), {unloaded}"
        )
    return list(chosen)


def models_around_limit(
    step_times: StepTimeModel,
    campaign: Campaign,
    facts: HardwareFacts,
    count: int = MAX_LADDER_MODELS,
) -> dict[str, SimulatedCapacity]:
    """Return the ladder models around the CPU's limit, with their predicted capacities: the
    smallest model that misses the SLO unloaded and those before it, `count` at most. Models that do
    not fit in memory are left out.

    `step_times`: of REFERENCE_MODEL. The steps of another model are predicted to take longer in
    proportion to the parameters that a token is multiplied with.
    """
    checked = _with_memory_check(campaign)
    settings, slo = cpu_settings(campaign.server), campaign.slo
    demand = Demand(campaign.workload)
    reference_parameters = ladder_model(REFERENCE_MODEL).spec.matrix_parameters
    servers: dict[str, ServerModel] = {}  # of the ladder models up to the limit
    for name in LADDER_MODELS:
        cell = Cell(key=name, model=name, weight_format=FORMAT, backend=BACKEND, device="cpu")
        if why_not(cell, checked, facts) is not None:
            continue
        factor = ladder_model(name).spec.matrix_parameters / reference_parameters
        servers[name] = ServerModel(step_times.slower(factor), settings)
        unloaded = servers[name].simulated(demand).unloaded()
        if slo.met_by(unloaded).mean() < slo.target:
            break
    return {name: servers[name].capacity(demand, slo) for name in list(servers)[-count:]}

"""The models in place of "auto": ladder models around the limit of this machine.

The step times of one model are measured, or were saved earlier; those of the others are predicted.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence

from crossover.loadtests.campaign.campaign_file import Campaign, Cell
from crossover.loadtests.campaign.cell_selection import fits_in_memory, question_of
from crossover.loadtests.campaign.progress import Progress
from crossover.loadtests.errors import BadCampaign
from crossover.models import formatting
from crossover.models.identity.identify_model import identify
from crossover.models.identity.model_ladder import ladder_model
from crossover.models.weights.weight_formats import weight_bytes
from crossover.models.weights.weights_manifest import cache_dir
from crossover.serving.backends.backend_table import DEFAULTS, format_of, missing_backends
from crossover.serving.capacity.scheduler_settings import DEFAULT_SETTINGS
from crossover.serving.capacity.simulated_capacity import Demand, ServerModel, SimulatedCapacity
from crossover.serving.capacity.step_time_model import StepTimeModel
from crossover.serving.hardware.machine_facts import HardwareFacts
from crossover.serving.placement.engine_times import step_times_of_timings
from crossover.serving.placement.engines import Device, Engine
from crossover.serving.placement.fastest_backend import BEST, EngineCandidate, known_times

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
BACKEND = DEFAULTS["cpu"][0]  # its weights are made in seconds
FORMAT = format_of(BACKEND, None)
MAX_LADDER_MODELS = 4  # the largest that meet the SLO unloaded, and the first that does not
MAX_LADDER_MODELS_BESIDE_GPU = 3  # on the CPU if the GPU uses a part of the same budget
MAX_DISK_SHARE = 0.9  # of the free disk space, for the weights of a model


def auto_models(
    campaign: Campaign, on_gpu: Sequence[Engine], facts: HardwareFacts, progress: Progress
) -> dict[Device, list[str]]:
    """Return the models in place of "auto": device -> ladder models, smallest first. `on_gpu`: the
    engines that the campaign measures on the GPU.

    The CPU measures those around its limit. The GPU measures the same ones as far as they fit in
    its memory, so that both devices can be compared, and the largest that fits. If the CPU is not
    measured, the GPU measures the largest ones that fit.
    """
    models: dict[Device, list[str]] = {}
    for device in sorted(campaign.devices):  # the CPU's models come first
        if device == "cpu":
            is_only = len(campaign.devices) == 1
            count = MAX_LADDER_MODELS if is_only else MAX_LADDER_MODELS_BESIDE_GPU
            models["cpu"] = _models_around_cpu_limit(campaign, count, facts, progress)
            continue
        fitting = models_fitting_on_gpu(campaign, on_gpu[0], facts)
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


def models_fitting_on_gpu(campaign: Campaign, engine: Engine, facts: HardwareFacts) -> list[str]:
    """Return the ladder models that fit in the memory of the GPU on this engine, and whose weights
    fit on the disk."""
    max_bytes = MAX_DISK_SHARE * free_disk_bytes(campaign.server.cache)
    return [
        name
        for name in LADDER_MODELS
        if fits_in_memory(identify(name), engine, campaign, facts)
        and weight_bytes(ladder_model(name).spec, engine.weight_format) < max_bytes
    ]


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
    rates = [predicted.rate for predicted in chosen.values()]
    unit_rate = progress.rate_units.keep("cpu", rates)
    for name, predicted in chosen.items():
        rate = formatting.requests(predicted.rate, like=unit_rate)
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
    settings, slo = campaign.server.filled(DEFAULT_SETTINGS["cpu"]), campaign.slo
    demand = Demand(campaign.workload)
    reference_parameters = ladder_model(REFERENCE_MODEL).spec.matrix_parameters
    servers: dict[str, ServerModel] = {}  # of the ladder models up to the limit
    for name in LADDER_MODELS:
        if not fits_in_memory(identify(name), Engine(BACKEND, FORMAT, "cpu"), campaign, facts):
            continue
        factor = ladder_model(name).spec.matrix_parameters / reference_parameters
        servers[name] = ServerModel(step_times.slower(factor), settings)
        unloaded = servers[name].simulated(demand).unloaded()
        if slo.met_by(unloaded).mean() < slo.target:
            break
    return {name: servers[name].capacity(demand, slo) for name in list(servers)[-count:]}

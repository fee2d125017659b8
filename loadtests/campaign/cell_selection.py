"""Decides of the cells of a campaign whether they can run, and on which engine and cores.

why_not(cell, campaign, facts)                      # None, or why it cannot run here
fastest_engine(cell, campaign, facts, progress)     # the engine of a cell whose backend is "best"
"""

from __future__ import annotations

import re
import shlex
import shutil

import msgspec

from crossover.loadtests.campaign.campaign_file import (
    Campaign,
    Cell,
    ThirdPartyEngine,
)
from crossover.loadtests.campaign.progress import Progress
from crossover.loadtests.errors import BadCampaign
from crossover.loadtests.host.cpu_pinning import Layout, divide_cores
from crossover.loadtests.records.journal_events import EngineChosen
from crossover.models.identity.identify_model import ModelIdentity
from crossover.models.identity.resolve_model import find_files
from crossover.models.machine_limits import cgroup_cores
from crossover.serving.backends.backend_table import BACKENDS, missing_backends
from crossover.serving.capacity.scheduler_settings import (
    DEFAULT_SETTINGS,
    RequestedSettings,
)
from crossover.serving.errors import ServingError
from crossover.serving.hardware.cpu_topology import (
    Arrangement,
    CoreSplit,
    arrangements,
    read_topology,
    split_cores,
)
from crossover.serving.hardware.machine_facts import HardwareFacts, allowed_cores
from crossover.serving.placement.engines import Device, Engine, Obstacles, Wanted
from crossover.serving.placement.fastest_backend import BEST, EngineQuestion, fastest_backend
from crossover.serving.placement.node_splits import SplitOf, fitting_splits
from crossover.serving.placement.placement_policy import (
    PlacementRequest,
    max_slots,
    with_settings,
)
from crossover.serving.placement.placement_policy import plan as plan_placement
from crossover.serving.server_options import Policy

POLICIES: dict[Device, Policy] = {"cpu": Policy.cpu_only, "gpu": Policy.gpu_only}


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
    wanted = _only(placement_policy_of(cell), cell.backend, cell.weight_format)
    settings = settings_of(cell, campaign)
    request = _placement_request(campaign, cell.model_identity, wanted, settings)
    return _why_not_placed(request, facts)


def fits_in_memory(
    model: ModelIdentity, engine: Engine, campaign: Campaign, facts: HardwareFacts
) -> bool:
    """Return whether a model can run on an engine here and fits in its memory, also where the
    campaign does not check the memory."""
    wanted = _only(POLICIES[engine.device], engine.backend, engine.weight_format)
    settings = campaign.server.settings_on(engine.device)
    request = _placement_request(campaign, model, wanted, settings)
    return _why_not_placed(msgspec.structs.replace(request, check_memory=True), facts) is None


def _only(policy: Policy, backend: str, weight_format: str) -> Wanted:
    return Wanted(policy, (backend,), (weight_format,) if weight_format else ())


def _why_not_placed(request: PlacementRequest, facts: HardwareFacts) -> str | None:
    try:
        plan_placement(request, facts, Obstacles(missing_backends()))
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
    campaign: Campaign, model: ModelIdentity, wanted: Wanted, settings: RequestedSettings
) -> PlacementRequest:
    return PlacementRequest(
        model=model,
        wanted=wanted,
        settings=settings,
        weight_bytes=model.weight_bytes,
        prefix_reuse=campaign.server.prefix_reuse,
        prompt_cache_bytes=campaign.server.prompt_cache_bytes,
        check_memory=campaign.server.check_memory,
    )


def placement_policy_of(cell: Cell) -> Policy:
    """Return the policy that a cell's server is started with. It allows only the cell's device, if
    the campaign names one, so that no other device is measured in its name."""
    return Policy.auto if cell.device is None else POLICIES[cell.device]


def settings_of(cell: Cell, campaign: Campaign) -> RequestedSettings:
    """Return the scheduler settings of a cell's server as far as they are set: by the campaign, and
    the number of engines, if the campaign sets none, as it was chosen."""
    settings = campaign.server.settings_on(cell.device)
    return msgspec.structs.replace(settings, engines=settings.engines or cell.engines)


def layout_of(cell: Cell, campaign: Campaign, usable: tuple[int, ...] = ()) -> Layout:
    """Return how engine, API and load generator share the cores, where the campaign starts the
    server.

    `usable`: logical CPUs; (): all that this process may use. Raises BadCampaign if the campaign
    wants more cores than there are.
    """
    try:
        return divide_cores(
            usable or allowed_cores(),
            campaign.server.cores_of(cell.cores),
            cgroup_cores(),
            arrangement=Arrangement(settings_of(cell, campaign).engines or 1, cell.nodes),
        )
    except ValueError as problem:
        raise BadCampaign(f"server.cores: {problem}") from problem


def split_of(cell: Cell, campaign: Campaign, layout: Layout, memory_bytes: int = 0) -> CoreSplit:
    """Return how a layout's cores are divided among the engines of a cell's server, as `serve` does
    it. `memory_bytes`: of all engines; 0: not known."""
    return split_cores(
        tuple(sorted({*layout.engine, *layout.api})),
        layout.engine,
        layout.api,
        campaign.server.threads or cell.threads,
        quota=cgroup_cores(),
        memory_bytes=memory_bytes,
        engines=settings_of(cell, campaign).engines or 1,
    )


# Engines on NUMA nodes.


def _arrangements(campaign: Campaign) -> tuple[Arrangement, ...]:
    """Return how the engines of a cell may be spread over NUMA nodes: all ways, or as the campaign
    sets it."""
    if campaign.server.are_engines_open and campaign.server.cores is None:
        return arrangements(read_topology(allowed_cores()), cgroup_cores())
    return (Arrangement(campaign.server.engines or 1),)


def _arranged(cell: Cell, arrangement: Arrangement) -> Cell:
    engines, nodes = arrangement
    return msgspec.structs.replace(cell, engines=engines, nodes=nodes)


def _split_of(cell: Cell, campaign: Campaign) -> SplitOf:
    """Return the function that divides the cores for an arrangement of a cell's engines."""

    def split(arrangement: Arrangement, memory_bytes: int) -> CoreSplit:
        arranged = _arranged(cell, arrangement)
        return split_of(arranged, campaign, layout_of(arranged, campaign), memory_bytes)

    return split


def with_engines(cell: Cell, campaign: Campaign, facts: HardwareFacts) -> Cell:
    """Return a cell of Crossover's own engines on the CPU with the number of engines that `serve`
    chooses where no step times are known."""
    ways = _arrangements(campaign)
    if len(ways) == 1 or cell.spec is None or cell.backend == BEST:
        return cell
    request = _request_with_context(cell, campaign)
    engine = Engine(cell.backend, cell.weight_format, "cpu")
    splits = fitting_splits(request, facts, engine, ways, _split_of(cell, campaign))
    return _arranged(cell, splits[0].arrangement) if splits else cell


# The number of slots.


def are_slots_open(cell: Cell, campaign: Campaign) -> bool:
    """Return whether the slots of a cell are chosen: those of Crossover's own engines on the CPU,
    unless the campaign sets them. On a GPU they follow from the memory."""
    return cell.device == "cpu" and campaign.server.slots is None


def max_slots_of(cell: Cell, campaign: Campaign, facts: HardwareFacts) -> int | None:
    """Return the most slots that the memory has room for; None: the slots are not chosen."""
    if not are_slots_open(cell, campaign):
        return None
    if cell.spec is None:  # a model of the hub, whose memory is not known here
        return DEFAULT_SETTINGS["cpu"].slots
    request = _request_with_context(cell, campaign)
    return max_slots(request, facts, Engine(cell.backend, cell.weight_format, "cpu"))


def _request_with_context(cell: Cell, campaign: Campaign) -> PlacementRequest:
    """Return the request to place a cell on the CPU, with its context set."""
    wanted = Wanted(Policy.cpu_only, (cell.backend,))
    request = _placement_request(campaign, cell.model_identity, wanted, settings_of(cell, campaign))
    context_tokens = min(campaign.server.context_tokens, request.spec.context)
    return with_settings(request, context_tokens=context_tokens)


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

    choice = fastest_backend(
        question_of(cell, campaign),
        facts,
        say,
        progress.tick,
        unit_rate_of=lambda rates: progress.rate_units.keep("cpu", rates),
    )
    name = f"{choice.backend} {choice.weight_format}".strip()
    progress.say(f"{cell.key}: engine {name}: {choice.reason}")
    return EngineChosen(
        cell=cell.key,
        backend=choice.backend,
        weight_format=choice.weight_format,
        threads=choice.threads,
        slots=choice.slots,
        engines=choice.split.arrangement.engines,
        nodes=choice.split.arrangement.nodes,
        reason=choice.reason,
    )


def question_of(cell: Cell, campaign: Campaign) -> EngineQuestion:
    """Return the question which CPU engine serves the cell best. A model of the hub is fetched."""
    server = campaign.server
    model = cell.model_identity
    if model.spec is None:  # a model of the hub
        kind = "gguf" if model.kind == "gguf" else "onnx"
        fetched = find_files(model, kind=kind, cache=server.cache)
        model = msgspec.structs.replace(model, spec=fetched.spec)
    wanted = Wanted(Policy.cpu_only, formats=tuple(campaign.formats))
    return EngineQuestion(
        request=_placement_request(campaign, model, wanted, settings_of(cell, campaign)),
        split_of=_split_of(cell, campaign),
        arrangements=_arrangements(campaign),
        are_threads_open=server.threads is None,
        may_measure_reference=True,
        workload=campaign.workload,
        slo=campaign.slo,
        cache=server.cache,
    )

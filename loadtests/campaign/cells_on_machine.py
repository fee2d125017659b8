"""The cells of a campaign on this machine: its devices, and on each the engines of each model.

    plan = on_this_machine(read_campaign(path), machine, facts, progress)

Each model is identified once. crossover.serving.placement.engines lists the engines that can run it
here; the campaign's keys select among them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import chain

import msgspec

from crossover.loadtests.campaign.auto_models import (
    LADDER_MODELS,
    REFERENCE_MODEL,
    auto_models,
)
from crossover.loadtests.campaign.campaign_file import (
    AUTO,
    Campaign,
    Cell,
    Plan,
    ServerSettings,
    ThirdPartyEngine,
    file_name,
)
from crossover.loadtests.campaign.cell_selection import layout_of, with_engines
from crossover.loadtests.campaign.progress import Progress
from crossover.loadtests.errors import BadCampaign
from crossover.loadtests.load_generator.target import Target
from crossover.models.errors import ModelError, printable
from crossover.models.identity.identify_model import (
    ModelIdentity,
    identify,
    short_model_id,
    unique_names,
)
from crossover.models.weights.weight_formats import DEFAULT_FORMATS
from crossover.serving.backends.backend_table import DEFAULTS
from crossover.serving.capacity.scheduler_settings import DEFAULT_SETTINGS
from crossover.serving.errors import ServingError
from crossover.serving.hardware.machine_facts import HardwareFacts
from crossover.serving.placement.engines import (
    Device,
    Engine,
    Wanted,
    alternatives,
    engines,
)
from crossover.serving.placement.fastest_backend import BEST
from crossover.serving.registry.prepare_model import Host
from crossover.serving.server_options import Policy

DEVICES: tuple[Device, ...] = ("cpu", "gpu")  # in the order in which they are measured
# On a CPU torch serves only as a reference; in a campaign with a GPU, the CPU runs the other
# backends.
GPU_BACKEND = DEFAULTS["gpu"][0]


def on_this_machine(
    requested: Plan, machine: Host, facts: HardwareFacts, progress: Progress
) -> Plan:
    """Return the plan with its cells: the endpoint that it measures, or the devices of this
    machine, on each the engines of each model, and then the engines of other projects.

    A campaign that names no devices measures the CPU, and the GPU if a backend here can use it.
    Raises BadCampaign for a model or a device on which nothing can be measured, and for "auto"
    without llama_cpp; CrossoverError if the measurement for "auto" fails.
    """
    campaign = requested.campaign
    if requested.cells:
        return requested
    if campaign.target is not None:
        return Plan(campaign, [cell_of_target(campaign.target)], requested.text)
    cells: list[Cell] = []
    try:
        if campaign.backends == []:
            models = identities_of(campaign.models)
        else:
            campaign, models, cells = _own_cells(campaign, machine, facts, progress)
    except (ModelError, ServingError) as problem:
        raise BadCampaign(f"{problem}") from problem
    for engine in campaign.engines:
        cells += [
            _cell_of_engine(model, engine, campaign.server, cores)
            for model in models
            for cores in campaign.server.core_counts
        ]
    key, times = Counter(cell.key for cell in cells).most_common(1)[0]
    if times > 1:
        raise BadCampaign(f"The campaign has the cell {key} twice. Models and formats must differ.")
    if isinstance(campaign.server.cores, list):
        for cell in cells:
            layout_of(cell, campaign)  # refuses more cores than there are, before anything runs
    return Plan(campaign, cells, requested.text)


def identities_of(names: Sequence[str]) -> list[ModelIdentity]:
    """Return the models of a campaign, with unique names. Raises ModelError, BadCampaign."""
    identities = unique_names(identify(name) for name in names)
    if len(identities) < len(names):
        raise BadCampaign(f"models = {', '.join(names)} names the same model twice")
    return identities


def _own_cells(
    campaign: Campaign, machine: Host, facts: HardwareFacts, progress: Progress
) -> tuple[Campaign, list[ModelIdentity], list[Cell]]:
    """Return the cells on Crossover's own engines, their models, and the campaign with these models
    and devices."""
    is_auto = AUTO in campaign.models
    models = identities_of([REFERENCE_MODEL] if is_auto else campaign.models)
    selection = EngineSelection(campaign, machine, facts)
    devices = selection.devices(models, progress)
    campaign = msgspec.structs.replace(campaign, devices=devices)
    names_on: Mapping[Device, Sequence[str]] = {}
    if is_auto:
        on_gpu = selection.engines_on("gpu", models[0], devices) if "gpu" in devices else []
        names_on = auto_models(campaign, on_gpu, facts, progress)
        names = set(chain.from_iterable(names_on.values()))
        by_size = sorted(names, key=LADDER_MODELS.index)
        models = identities_of(by_size)
        campaign = msgspec.structs.replace(campaign, models=by_size)
    cells: list[Cell] = []
    for model in models:
        own_devices = [
            device for device in devices if not is_auto or model.name in names_on[device]
        ]
        own_cells = [
            _cell_of_own_engine(model, engine, campaign, cores, facts)
            for device in own_devices
            for engine in selection.engines_on(device, model, devices)
            for cores in (campaign.server.core_counts if device == "cpu" else [None])
        ]
        if not own_cells and (campaign.backends is not None or not campaign.engines):
            raise BadCampaign(selection.why_nothing_runs(model, devices))
        cells += own_cells
    return campaign, models, cells


class EngineSelection:
    """The engines that a campaign measures on this machine."""

    def __init__(self, campaign: Campaign, machine: Host, facts: HardwareFacts) -> None:
        self._campaign = campaign
        self._facts = facts
        self._named = tuple(name for name in campaign.backends or () if name != BEST)
        self._policy = Policy.cpu_only if campaign.devices == ["cpu"] else Policy.auto
        to_probe = dict.fromkeys((*DEFAULTS["gpu"], *self._named))
        self._obstacles = machine.obstacles(Wanted(self._policy, tuple(to_probe)), facts)

    def engines_on(
        self, device: Device, model: ModelIdentity, devices: Sequence[Device]
    ) -> list[Engine]:
        """Return the engines to measure with a model on a device, in order, if `devices` are
        measured: those of the backends that the campaign names, else those of the first backend
        that can run the model. `best` is one engine, whose backend is chosen later."""
        usual = [
            engine
            for engine in self._engines(model, ())
            if engine.device == device and engine.why_not is None
        ]
        is_beside_gpu = device == "cpu" and "gpu" in devices
        if is_beside_gpu:
            usual = [engine for engine in usual if engine.backend != GPU_BACKEND]
        first_backend = [engine for engine in usual if engine.backend == usual[0].backend]
        if self._campaign.backends is None:
            return first_backend
        # A backend of the CPU that is not installed is kept, so that the run shows why it is
        # skipped.
        missing = self._obstacles.missing if device == "cpu" else {}
        named = [
            engine
            for engine in (self._engines(model, self._named) if self._named else ())
            if engine.device == device and (engine.why_not is None or engine.backend in missing)
        ]
        selected: list[Engine] = []
        for name in self._campaign.backends:
            if name != BEST:
                selected += [engine for engine in named if engine.backend == name]
            elif device == "gpu":
                selected += first_backend
            elif usual:
                selected.append(Engine(BEST, "", device))
        if is_beside_gpu:
            without_reference = [one for one in selected if one.backend != GPU_BACKEND]
            selected = without_reference or selected
        return list(dict.fromkeys(selected))

    def _engines(self, model: ModelIdentity, backends: tuple[str, ...]) -> list[Engine]:
        wanted = Wanted(self._policy, backends, tuple(self._campaign.formats))
        return engines(model, self._facts, self._obstacles, wanted)

    def devices(self, models: Sequence[ModelIdentity], progress: Progress) -> list[Device]:
        """Return the devices to measure: those that the campaign names, else those of this machine
        on which something can be measured; [] if only engines of other projects are.

        Raises BadCampaign if nothing can be measured on a device that it names.
        """
        campaign = self._campaign
        requested = list(campaign.devices or DEVICES)
        devices: list[Device] = []
        for device in sorted(requested, key=DEVICES.index, reverse=True):  # the GPU first
            if any(self.engines_on(device, model, [*devices, device]) for model in models):
                devices.append(device)
                continue
            why = self._why_nothing_on(device, models[0])
            if campaign.devices:
                advice = ". Use ['cpu']" if device == "gpu" else ""
                raise BadCampaign(
                    f"devices: The {device.upper()} cannot be measured here{why}{advice}"
                )
            if device == "gpu" and self._facts.gpus:
                name = self._facts.gpus[0].name
                progress.say(f"the GPU ({name}) is not measured{why}", style="yellow")
            elif device == "cpu" and devices:
                progress.say(f"the CPU is not measured{why}", style="yellow")
        if not devices and (campaign.backends is not None or not campaign.engines):
            raise BadCampaign(self.why_nothing_runs(models[0], ["cpu"]))
        return sorted(devices, key=requested.index)

    def why_nothing_runs(self, model: ModelIdentity, devices: Sequence[Device]) -> str:
        """Return why no engine of these devices can run a model as the campaign wants it."""
        texts = [self._why_nothing_on(device, model) for device in devices]
        return f"{model.name} cannot be measured here{'; '.join(dict.fromkeys(texts))}"

    def _why_nothing_on(self, device: Device, model: ModelIdentity) -> str:
        """Return " with backends = ...: ", the reasons of the engines of a device, and what could
        be measured on it."""
        keys = {"backends": self._campaign.backends, "formats": self._campaign.formats}
        given = " and ".join(f"{key} = {', '.join(names)}" for key, names in keys.items() if names)
        on_device = [
            engine for engine in self._engines(model, self._named) if engine.device == device
        ]
        reasons = [engine.why_not.text for engine in on_device if engine.why_not is not None]
        if any(engine.why_not is None for engine in on_device):
            reasons.append(
                f"{GPU_BACKEND} runs it there, but beside a GPU only if backends names it alone"
            )
        text = "; ".join(dict.fromkeys(reasons))
        can = alternatives(model, device, self._facts, self._obstacles)
        hint = can if given and can not in text else ""
        return f"{f' with {given}' if given else ''}: {text}{hint}"


# The cells.


def cell_of_target(target: Target) -> Cell:
    """Return the cell of an endpoint that is already running."""
    # The id is untrusted: it may contain line feeds and control characters.
    model = printable(" ".join(short_model_id(target.model or "").split())) or "default"
    key = file_name(f"{model}@{target.url.split('://')[-1]}")
    return Cell(key=key, model=model, weight_format="", backend="external", url=target.url)


def _cell_of_own_engine(
    model: ModelIdentity,
    engine: Engine,
    campaign: Campaign,
    cores: int | None,
    facts: HardwareFacts,
) -> Cell:
    shown_device = engine.device if len(campaign.devices) > 1 else None
    cell = Cell(
        key=_key(model, engine.weight_format, engine.backend, shown_device, cores=cores),
        model=model.name,
        weight_format=engine.weight_format,
        backend=engine.backend,
        slots=campaign.server.settings_on(engine.device).slots,
        cores=cores,
        device=engine.device,
        is_best=engine.backend == BEST,
        identity=_identity(model),
    )
    return with_engines(cell, campaign, facts) if engine.device == "cpu" else cell


def _cell_of_engine(
    model: ModelIdentity, engine: ThirdPartyEngine, server: ServerSettings, cores: int | None
) -> Cell:
    """Return the cell of a model on another project's engine."""
    weight_format = engine.format or DEFAULT_FORMATS.get(engine.weights, "")
    if engine.weights == model.kind and not engine.format:
        weight_format = model.weight_format or weight_format
    settings = server.filled(DEFAULT_SETTINGS["cpu"])
    return Cell(
        key=_key(model, weight_format, engine.name, cores=cores),
        model=model.name,
        weight_format=weight_format,
        backend=engine.name,
        slots=settings.slots if "{slots}" in engine.command else None,
        cores=cores,
        engine=engine.name,
        identity=_identity(model),
    )


def _key(model: ModelIdentity, weight_format: str, *parts: str | None, cores: int | None) -> str:
    """Return the model's name and what distinguishes a cell from the model's other cells."""
    names_format = model.name.lower().endswith(weight_format.lower())  # x-Q4_K_M.gguf
    shown_format = None if names_format else weight_format
    shown_cores = None if cores is None else f"{cores}-cores"
    return file_name("-".join(filter(None, (model.name, shown_format, *parts, shown_cores))))


def _identity(model: ModelIdentity) -> ModelIdentity | None:
    """Return what a cell keeps of its model; None: the ladder has it."""
    return None if model.kind == "ladder" else model

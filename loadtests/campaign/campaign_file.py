"""The campaign file: what to measure and how. TOML -> Campaign -> cells.

    name = "ladder"
    models = ["135m", "1b", "3b"]            # x devices x backends x formats = cells
    budget_seconds = 600                     # measuring time for all cells together

    [slo]
    preset = "chat"                          # or ttft_seconds and tpot_seconds
    target = 0.95

    [workload]
    preset = "chat"
    max_prompt_tokens = 512

Each key is a field of a struct: its type defines the values that it may have, and `crossover
campaign init` and docs/campaign.md show its text in loadtests/options.toml. All faults of a file
are reported at once, with key and value. Reading a campaign starts nothing and does not look at the
machine.
"""

from __future__ import annotations

import itertools
import re
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from crossover.loadtests.capacity.capacity_estimate import MIN_SECONDS
from crossover.loadtests.errors import BadCampaign, LoadError
from crossover.loadtests.load_generator.openai_endpoint import Target, check_target
from crossover.models.errors import ModelError, UnsupportedModel, printable
from crossover.models.identity.identify_model import (
    ModelIdentity,
    identify,
    short_model_id,
    unique_names,
)
from crossover.models.identity.model_ladder import find_ladder_model
from crossover.models.shape.model_spec import ModelSpec
from crossover.models.weights.weight_formats import DEFAULT_FORMATS, known_format
from crossover.serving.backends.backend_table import BACKENDS, DEFAULTS, spec_of
from crossover.serving.backends.model_engines import engines_on, refusal, usual_engines
from crossover.serving.capacity.scheduler_settings import DEFAULT_SETTINGS, RequestedSettings
from crossover.serving.capacity.slo import SLO_PRESETS, Limits, Slo
from crossover.serving.errors import BackendUnavailable, ServingError, WorkloadError
from crossover.serving.faults import converted
from crossover.serving.option_help import Count, Positive, Seconds, Share
from crossover.serving.placement.fastest_backend import BEST
from crossover.serving.server_options import EngineOptions
from crossover.serving.toml_files import Table, parse_toml, read_toml
from crossover.serving.workload.arrivals import Arrivals, Poisson, Trace
from crossover.serving.workload.conversations import draw_sessions
from crossover.serving.workload.request_lengths import DEFAULT_WORKLOAD, Workload
from crossover.serving.workload.trace_file import load_trace

DEMO = Path(__file__).parents[1] / "demo.toml"
RECIPES = Path(__file__).parents[1] / "engines"  # shipped third-party engines, one a file
# What the command of an engine may have in braces.
PLACEHOLDERS = ("model", "port", "host", "slots", "context", "kv_tokens", "threads", "cores")
AUTO = "auto"  # in place of models: the ladder models around this machine's capacity
SINGLE_STREAM_SECONDS = 20.0
# A GPU answers dozens of requests a second, so less time gives as much evidence.
GPU_SINGLE_STREAM_SECONDS = 8.0
GPU_LEVEL_SECONDS = 20.0
# Measured on the CPU if the campaign names no backend; for models outside the ladder it is the
# first engine that can run them.
CPU_BACKEND = DEFAULTS["cpu"][0]
# On a CPU torch serves only as a reference; in a campaign with a GPU, the CPU runs the other
# backends.
GPU_BACKEND = DEFAULTS["gpu"][0]
OTHER_ENGINES = "List other engines as [[engines]] tables: docs/measure-any-endpoint.md."
CHECKED_SESSIONS = 2_000  # conversations that are drawn to check whether they fit in the context
# Largest part of a server's context that a conversation may take by the workload's token counts.
# The rest is for what they leave out: the marks of the chat template, and answers that become more
# tokens when they are sent back.
MAX_CONTEXT_SHARE = 0.85
ANY_LADDER_MODEL = "135m"  # all ladder models run on the same engines
Device = Literal["cpu", "gpu"]
DEVICES: tuple[Device, ...] = ("cpu", "gpu")


class GpuSettings(RequestedSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Scheduler settings of a server on a GPU."""


class ServerSettings(EngineOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the server of each cell is started: options of `crossover serve` with the same names."""

    context_tokens: Count = 2048
    cores: Count | None = None
    cache: str | None = None
    ready_seconds: Positive = 1800.0
    gpu: GpuSettings | None = None

    def settings_on(self, device: str | None) -> RequestedSettings:
        """Return the scheduler settings of a server on a device, as far as the campaign sets them.

        The settings in `gpu` replace all others, so that slots set for the CPU do not limit the
        GPU. Only the context is that of the CPU if `gpu` does not set one.
        """
        if device != "gpu" or self.gpu is None:
            return self.scheduler
        context_tokens = self.gpu.context_tokens or self.context_tokens
        return msgspec.structs.replace(self.gpu.scheduler, context_tokens=context_tokens)


class SloSpec(Table, Limits, frozen=True):
    """A preset, possibly with changes, or your own SLO."""

    preset: str | None = None
    name: str | None = None
    target: Share | None = None


class Search(Table, frozen=True):
    """How the capacity of a cell is measured."""

    starts: Count = 1
    confirm: Annotated[int, Meta(ge=0)] | None = None
    single_stream_requests: Count = 20
    single_stream_seconds: Positive | None = None
    level_seconds: Positive | None = None
    rates: list[Positive] = []

    def single_stream_seconds_on(self, device: str | None) -> float:
        """Return the maximum time for the single-stream requests on a device."""
        default = GPU_SINGLE_STREAM_SECONDS if device == "gpu" else SINGLE_STREAM_SECONDS
        return self.single_stream_seconds or default

    def level_seconds_on(self, device: str | None) -> float:
        """Return the length of the shortest level that confirms a rate on a device."""
        default = GPU_LEVEL_SECONDS if device == "gpu" else MIN_SECONDS
        return self.level_seconds or default


class ThirdPartyEngine(Table, frozen=True):
    """Another project's engine, started by a command for each of its cells."""

    name: Annotated[str, Meta(pattern=r"^[A-Za-z0-9][\w.-]*$")]
    command: str
    ready: Annotated[str, Meta(pattern="^/")] = "/health"
    weights: Literal["gguf", "hf", "none"] = "hf"
    format: str | None = None
    api_path: Annotated[str, Meta(pattern="^/")] | None = None
    install: str | None = None


class CampaignFile(Table, frozen=True):
    """The file as it is written."""

    name: str
    models: list[str] = []
    formats: list[str] = []
    devices: list[Device] = []
    backends: list[str] | None = None
    engines: list[ThirdPartyEngine] = []
    recipes: list[str] = []
    target: Target | None = None
    server: ServerSettings = ServerSettings()
    workload: Workload = DEFAULT_WORKLOAD
    api: Literal["auto", "completions", "chat"] = "auto"
    ignore_eos: bool = True
    arrivals: Arrivals = Poisson()
    slo: str | SloSpec = "chat"
    search: Search = Search()
    budget_seconds: Positive | None = None
    seed: int = 1
    disturbance: Literal["wait", "ignore"] = "wait"
    wait_seconds: Seconds = 300.0


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """One configuration to measure: model, format and backend on a device, or an endpoint."""

    key: str
    model: str  # the model's name: short, and unique in the run
    weight_format: str  # "": not known, or not chosen yet
    backend: str  # BEST until the fastest engine is chosen
    slots: int | None = None
    url: str | None = None  # the endpoint, if the runner does not start a server
    engine: str = ""  # the name of one of the campaign's `engines`
    threads: int | None = None  # chosen with the fastest engine; None: those of the layout
    is_best: bool = False  # the engine is the fastest on the CPU, chosen when the cell starts
    # None for an endpoint or another project's engine, which reports its device; and before a run
    # has begun, if the campaign names no devices.
    device: Device | None = None
    identity: ModelIdentity | None = None  # None: a ladder model

    @property
    def source(self) -> str:
        """Return the model's name for `crossover serve` and `resolve`."""
        return self.model if self.identity is None else self.identity.source

    @property
    def spec(self) -> ModelSpec | None:
        """Return the model's shape; None: not known."""
        if self.identity is not None:
            return self.identity.spec
        published = find_ladder_model(self.model) if self.url is None else None
        return None if published is None else published.spec

    @property
    def model_identity(self) -> ModelIdentity:
        """Return what the model is, also for a ladder model."""
        return self.identity or identify(self.model)


class Campaign(CampaignFile, frozen=True, kw_only=True, forbid_unknown_fields=False):
    """The file with its SLO resolved, as the manifest keeps it."""

    slo: Slo  # type: ignore[assignment]

    def engine_of(self, cell: Cell) -> ThirdPartyEngine | None:
        """Return the other project's engine that serves a cell; None: it is one of Crossover's."""
        return next((engine for engine in self.engines if engine.name == cell.engine), None)


class Plan(msgspec.Struct, frozen=True):
    """A campaign, its cells in order, and the text of its file."""

    campaign: Campaign
    cells: list[Cell]  # empty until the machine has chosen the models of "auto"
    text: str


def read_campaign(path: Path) -> Plan:
    """Return the campaign of a TOML file. Raises BadCampaign with the file and all its faults."""
    return parse_campaign(read_toml(path, BadCampaign)[1], where=f"{path}: ")


def campaign_of_models(models: Sequence[str]) -> Plan:
    """Return the demo campaign with these models, named after the first. Raises BadCampaign."""
    try:
        first = identify(models[0]).name.rpartition("/")[2]
    except ModelError as problem:
        raise BadCampaign(f"{problem}") from problem
    more = f"-and-{len(models) - 1}-more" if len(models) > 1 else ""
    demo_text = DEMO.read_text(encoding="utf-8")
    text = demo_text.replace('\nname = "demo"', f'\nname = "{file_name(first + more)}"', 1)
    return parse_campaign(text, models=models)


def parse_campaign(text: str, *, models: Sequence[str] = (), where: str = "") -> Plan:
    """Return the campaign of a TOML text; `models` replace "auto". Raises BadCampaign."""
    try:
        file = converted(parse_toml(text, BadCampaign), CampaignFile, BadCampaign)
        engines = [*file.engines, *map(read_recipe, dict.fromkeys(file.recipes))]
        file = msgspec.structs.replace(file, engines=engines)
        if faults := list(_faults(file)):
            raise BadCampaign("; ".join(faults))
        if models and AUTO in file.models:
            file = msgspec.structs.replace(file, models=list(models))
        fields = msgspec.structs.asdict(file)
        fields["slo"] = slo_of(file.slo)
        fields["workload"] = with_context_limit(file)
        cells = [] if AUTO in file.models else _cells_of_file(file)
        return Plan(Campaign(**fields), cells, text)
    except BadCampaign as problem:
        raise BadCampaign(f"{where}{problem}") from problem


def recipe_names() -> list[str]:
    """Return the names of the third-party engines that are shipped with Crossover."""
    return sorted(file.stem for file in RECIPES.glob("*.toml"))


def read_recipe(name: str) -> ThirdPartyEngine:
    """Return a shipped third-party engine. Raises BadCampaign for a name that is not shipped."""
    if name not in recipe_names():
        available = ", ".join(recipe_names())
        raise BadCampaign(f"recipes: there is no recipe {name!r}. Available recipes: {available}.")
    tables, _ = read_toml(RECIPES / f"{name}.toml", BadCampaign)
    return converted(tables, ThirdPartyEngine, BadCampaign)


def slo_of(spec: str | SloSpec) -> Slo:
    """Return the SLO of a preset, with its changes, or of your own limits. Raises BadCampaign."""
    if isinstance(spec, str):
        spec = SloSpec(preset=spec)
    if spec.preset is not None and spec.preset not in SLO_PRESETS:
        available = ", ".join(SLO_PRESETS)
        raise BadCampaign(
            f"SLO preset {spec.preset!r} does not exist. Available presets: {available}"
        )
    fields = msgspec.structs.asdict(spec)
    del fields["preset"]
    changes = {name: value for name, value in fields.items() if value is not None}
    if spec.preset is None:
        return Slo(**{"name": "own", **changes})
    if changes.keys() & set(Limits.__struct_fields__):
        changes.setdefault("name", f"{spec.preset} (changed)")
    return msgspec.structs.replace(SLO_PRESETS[spec.preset], **changes)


def check_trust(plan: Plan) -> None:
    """Raise BadCampaign if the campaign uses something that only a trusted campaign may use.

    That is a command, code (module:Class), or an environment variable whose value is sent to the
    endpoint as its key. A campaign file may come from anybody.
    """
    target = plan.campaign.target
    needs_trust = [engine.command for engine in plan.campaign.engines]
    needs_trust += [f"the code of {cell.backend}" for cell in plan.cells if ":" in cell.backend]
    if target is not None and target.api_key_env is not None:
        needs_trust.append(
            f"the variable {target.api_key_env}, whose value is sent to {target.url}"
        )
    if needs_trust:
        raise BadCampaign(
            f"The campaign uses {'; '.join(map(printable, needs_trust))}. "
            "If you trust all of this, add --trust."
        )


def _cells_of_file(file: CampaignFile) -> list[Cell]:
    """Return the cells as far as the file defines them; on_this_machine() adds the devices.

    Raises BadCampaign for a combination that cannot be measured on any machine.
    """
    gpu_backends = list(DEFAULTS["gpu"])
    for name in file.backends or ():
        if name != BEST and name not in gpu_backends and "gpu" in _devices_of(name):
            gpu_backends.append(name)
    devices: list[Device | None] = [*file.devices] or [None]
    return cells_of(file, dict.fromkeys(devices, file.models), gpu_backends)


def cells_of(
    file: CampaignFile, models: Mapping[Device | None, Sequence[str]], gpu_backends: Sequence[str]
) -> list[Cell]:
    """Return the cells of a campaign: for each model and device the backends that run there, each
    in the formats that it has; then the engines of other projects.

    `models`: those to measure on each device, in order; the device None stands for whatever the
    machine turns out to have. `gpu_backends`: the backends that can use the GPU, the preferred one
    first. Raises BadCampaign for a combination that cannot be measured, and for a device on which
    nothing would be measured.
    """
    if file.target is not None:
        return [cell_of_target(file.target)]
    names = list(dict.fromkeys(itertools.chain.from_iterable(models.values())))
    cells: list[Cell] = []
    try:
        identities = identities_of(names)
        for name, model in zip(names, identities, strict=True):
            own_devices = [device for device in models if name in models[device]]
            model_cells = _cells_of_model(model, own_devices, file, gpu_backends, len(models) == 1)
            # Otherwise the fault is reported by device, or another project's engine runs the model.
            needs_own_engine = not file.devices and (file.backends or not file.engines)
            if not model_cells and needs_own_engine:
                raise BadCampaign(refusal(model, file.backends, file.formats))
            cells += model_cells
    except (ModelError, ServingError) as problem:
        raise BadCampaign(f"{problem}") from problem
    for device in file.devices if file.models else ():
        if not any(cell.device == device for cell in cells):
            raise BadCampaign(nothing_on(device, file, gpu_backends))
    for engine in file.engines:
        cells += [_cell_of_engine(model, engine, file.server) for model in identities]
    if not cells:
        raise BadCampaign("There is nothing to measure: backends is empty. Name a backend.")
    key, times = Counter(cell.key for cell in cells).most_common(1)[0]
    if times > 1:
        raise BadCampaign(f"The campaign has the cell {key} twice. Models and formats must differ.")
    return cells


def identities_of(names: Sequence[str]) -> list[ModelIdentity]:
    """Return the models of a campaign, with unique names. Raises ModelError, BadCampaign."""
    identities = unique_names(identify(name) for name in names)
    if len(identities) < len(names):
        raise BadCampaign(f"models = {', '.join(names)} names the same model twice")
    return identities


def backends_on(
    device: Device | None,
    file: CampaignFile,
    gpu_backends: Sequence[str],
    model: ModelIdentity,
    *,
    is_only: bool = True,
) -> list[str]:
    """Return the backends that a campaign measures with a model on a device, in order.

    On the GPU: those that the campaign names, as far as they are among `gpu_backends`; where it
    names none, or BEST, the first of these that runs the model in one of the campaign's formats.

    On the CPU, and where the device is not known yet (None): those that it names, otherwise the
    usual ones. If the GPU is measured too (`is_only` is False), torch is left out on the CPU unless
    it is the only backend, since on a CPU it serves only as a reference.
    """
    if device == "gpu":
        return _backends_on_gpu(file, gpu_backends, model)
    names = file.backends
    if names is None:
        names = _usual_cpu_backends(model, file.formats)
    if device is None:
        if file.backends is not None or any(engines_on(model, n, file.formats) for n in names):
            return names
        return _backends_on_gpu(file, gpu_backends, model)
    on_cpu = [name for name in names if name == BEST or "cpu" in _devices_of(name)]
    without_torch = [name for name in on_cpu if name != GPU_BACKEND]
    return on_cpu if is_only or not without_torch else without_torch


def _backends_on_gpu(
    file: CampaignFile, gpu_backends: Sequence[str], model: ModelIdentity
) -> list[str]:
    able = [name for name in gpu_backends if engines_on(model, name, file.formats)]
    preferred = able[:1]
    if file.backends is None:
        return preferred
    backends: list[str] = []
    for name in file.backends:
        if name == BEST:
            backends += preferred
        elif name in gpu_backends:
            backends.append(name)
    return list(dict.fromkeys(backends))


def _usual_cpu_backends(model: ModelIdentity, formats: Sequence[str]) -> list[str]:
    """Return the backend that a model is measured with on the CPU where the campaign names none.

    The list is empty where no backend runs the model in one of the formats.
    """
    if model.kind == "ladder":
        return [CPU_BACKEND]
    for engine in usual_engines(model):
        is_on_cpu = "cpu" in _devices_of(engine.backend)
        if is_on_cpu and engines_on(model, engine.backend, formats):
            return [engine.backend]
    return []


def can_measure(device: Device, file: CampaignFile, gpu_backends: Sequence[str]) -> bool:
    """Return whether a campaign's backends and formats leave anything to measure on a device."""
    names = [name for name in file.models if name != AUTO] or [ANY_LADDER_MODEL]
    try:
        for model in map(identify, names):
            for backend in backends_on(device, file, gpu_backends, model, is_only=False):
                if backend == BEST or engines_on(model, backend, file.formats):
                    return True
        return False
    except ModelError as problem:
        raise BadCampaign(f"{problem}") from problem


def nothing_on(device: str, file: CampaignFile, gpu_backends: Sequence[str]) -> str:
    """Return the sentence that says why a campaign has no cell on a device."""
    keys = {"backends": file.backends, "formats": file.formats}
    given = " and ".join(f"{key} = {', '.join(names)}" for key, names in keys.items() if names)
    able = (
        gpu_backends if device == "gpu" else [n for n in BACKENDS if "cpu" in BACKENDS[n].devices]
    )
    formats = {name: BACKENDS[name].formats if name in BACKENDS else () for name in able}
    backends = [f"{name} ({', '.join(formats[name]) or 'any format'})" for name in able]
    return (
        f"devices: Nothing can be measured on the {device.upper()} with {given or 'these keys'}. "
        f"Backends of this device: {', '.join(backends)}"
    )


def _devices_of(backend: str) -> tuple[str, ...]:
    """Return the devices that a backend runs on. Raises BadCampaign for an unknown backend."""
    try:
        return spec_of(backend).devices
    except BackendUnavailable as problem:
        raise BadCampaign(f"{problem}. {OTHER_ENGINES}") from problem


def _cells_of_model(
    model: ModelIdentity,
    devices: Sequence[Device | None],
    file: CampaignFile,
    gpu_backends: Sequence[str],
    is_only_device: bool,
) -> list[Cell]:
    """Return the cells of one model, by device, backend and format.

    `is_only_device`: the campaign has one device, so that a cell's key need not name it.
    """
    cells: list[Cell] = []
    for device in devices:
        shown_device = None if is_only_device else device
        for backend in backends_on(device, file, gpu_backends, model, is_only=is_only_device):
            cells += _cells_of_backend(model, backend, file, device, shown_device)
    return cells


def _cells_of_backend(
    model: ModelIdentity,
    backend: str,
    file: CampaignFile,
    device: Device | None,
    shown_device: str | None,
) -> Iterator[Cell]:
    """Yield a cell for each format. The best engine has one cell for all formats, among which it is
    chosen."""
    fields: dict[str, Any] = {
        "slots": file.server.settings_on(device).slots,
        "device": device,
        "shown_device": shown_device,
    }
    try:
        if backend == BEST:
            candidates = [engine.backend for engine in usual_engines(model)]
            if any(engines_on(model, candidate, file.formats) for candidate in candidates):
                yield _cell(model, "", BEST, is_best=True, **fields)
            return
        for engine in engines_on(model, backend, file.formats):
            yield _cell(model, engine.weight_format, backend, **fields)
    except BackendUnavailable as problem:
        raise BadCampaign(f"{problem}. {OTHER_ENGINES}") from problem


def _cell_of_engine(model: ModelIdentity, engine: ThirdPartyEngine, server: ServerSettings) -> Cell:
    """Return the cell of a model on another project's engine."""
    weight_format = engine.format or DEFAULT_FORMATS.get(engine.weights, "")
    if engine.weights == model.kind and not engine.format:
        weight_format = model.weight_format or weight_format
    settings = server.filled(DEFAULT_SETTINGS["cpu"])
    slots = settings.slots if "{slots}" in engine.command else None
    return _cell(model, weight_format, engine.name, slots=slots, engine=engine.name)


def _cell(
    model: ModelIdentity,
    weight_format: str,
    backend: str,
    shown_device: str | None = None,
    **fields: Any,
) -> Cell:
    """Return a cell whose key has the model's name and what distinguishes it from other cells."""
    names_format = model.name.lower().endswith(weight_format.lower())  # x-Q4_K_M.gguf
    shown_format = None if names_format else weight_format
    key_parts = filter(None, (model.name, shown_format, backend, shown_device))
    return Cell(
        key=file_name("-".join(key_parts)),
        model=model.name,
        weight_format=weight_format,
        backend=backend,
        identity=None if model.kind == "ladder" else model,
        **fields,
    )


def cell_of_target(target: Target) -> Cell:
    """Return the cell of an endpoint that is already running."""
    # The id is untrusted: it may contain line feeds and control characters.
    model = printable(" ".join(short_model_id(target.model or "").split())) or "default"
    key = file_name(f"{model}@{target.url.split('://')[-1]}")
    return Cell(key=key, model=model, weight_format="", backend="external", url=target.url)


def file_name(text: str) -> str:
    """Return the text as a file name."""
    return "".join(c if c.isalnum() or c in "._-@" else "-" for c in text).strip("-")


# Impossible combinations of keys. Each function yields the faults that it finds, in words.


def _faults(file: CampaignFile) -> Iterator[str]:
    try:
        slo_of(file.slo)
    except BadCampaign as problem:
        yield str(problem)
    if file.target is not None:
        yield from _target_faults(file, file.target)
    elif not file.models:
        yield "there is nothing to measure: give models, or a target with a url"
    if file.search.starts > 1 and (file.search.rates or file.target is not None):
        yield (
            f"search.starts = {file.search.starts} is possible only for a search on servers that "
            "the campaign starts: remove search.rates and target"
        )
    yield from _choice_faults(file)
    yield from _session_faults(file)
    yield from _length_faults(file)
    for position, engine in enumerate(file.engines):
        yield from (f"engines[{position}].{fault}" for fault in _engine_faults(engine))


def _target_faults(file: CampaignFile, target: Target) -> Iterator[str]:
    unset = CampaignFile(name="")
    keys_of_started_servers = (
        "models",
        "engines",
        "recipes",
        "formats",
        "devices",
        "backends",
        "server",
        "api",
        "ignore_eos",
    )
    for name in keys_of_started_servers:
        if getattr(file, name) != getattr(unset, name):
            yield f"target is an endpoint that is already running, so {name} must not be set"
    try:
        check_target(target)
    except LoadError as problem:
        yield f"target: {problem}"


def _choice_faults(file: CampaignFile) -> Iterator[str]:
    """Yield the faults of models, devices, backends and formats."""
    if len(set(file.devices)) < len(file.devices):
        yield f"devices names a device twice: {', '.join(file.devices)}"
    if file.devices and file.backends == []:
        yield (
            "devices apply only to Crossover's own engines; an engine of [[engines]] runs on the "
            "device that its command chooses"
        )
    if AUTO in file.models and (len(file.models) > 1 or file.engines):
        yield "models = ['auto'] cannot be combined with other models or with engines"
    if BEST in (file.backends or ()) and file.server.options:
        yield f"{BEST!r} chooses among several engines, so server.options must not be set"
    for weight_format in file.formats:
        try:
            known_format(weight_format)
        except UnsupportedModel as problem:
            yield f"formats: {problem}"


def _session_faults(file: CampaignFile) -> Iterator[str]:
    """Yield the faults of a workload of conversations, and of its keys in one without."""
    workload = file.workload
    try:
        if not workload.has_sessions:
            for name in ("turns", "think_seconds", "turn_tokens", "context_tokens"):
                if getattr(workload, name) is not None:
                    yield (
                        f"workload.{name} is of conversations: set workload.turns, or take a "
                        "preset or a file that has them"
                    )
            return
        sessions = draw_sessions(workload, CHECKED_SESSIONS, file.seed)
    except WorkloadError:
        return  # _length_faults reports the unreadable file
    api = "api" if file.target is None else "target.api"
    if "completions" in (file.api, None if file.target is None else file.target.api):
        yield f'{api} = "completions": conversations are chats; set {api} = "chat"'
    if isinstance(file.arrivals, Trace):
        yield 'arrivals.kind = "trace": conversations begin by poisson, constant or gamma arrivals'
    if file.target is not None:
        return
    longest = max(
        session.prefix_tokens + turn.prompt_tokens + turn.output_tokens
        for session in sessions
        for turn in session.turns
    )
    for name, context in _contexts(file.server).items():
        if workload.context_tokens is not None and workload.context_tokens > context:
            yield (
                f"workload.context_tokens = {workload.context_tokens} is more than {name} = "
                f"{context}: lower it, or raise {name}"
            )
        if longest > context * MAX_CONTEXT_SHARE:
            yield (
                f"workload: a turn of up to {longest} tokens, prompt and answer, does not fit in "
                f"{name} = {context} with room for the chat template: raise it, or set "
                "workload.max_prompt_tokens and max_output_tokens"
            )


def _length_faults(file: CampaignFile) -> Iterator[str]:
    """Yield the files of traces that cannot be read, and lengths that do not fit in a context."""
    workload = file.workload
    files = {
        "arrivals.path": file.arrivals.path if isinstance(file.arrivals, Trace) else None,
        "workload.file": workload.file,
        "workload.replay": workload.replay,
    }
    for name, path in files.items():
        try:
            if path is not None:
                load_trace(path)
        except WorkloadError as problem:
            yield f"{name}: {problem}"
    prompt = workload.max_prompt_tokens or workload.prompt_tokens
    output = workload.max_output_tokens or workload.output_tokens
    if file.target is not None or not prompt or not output:
        return
    for name, context in _contexts(file.server).items():
        if prompt + output > context:
            yield (
                f"workload: prompts of {prompt} and outputs of {output} tokens do not fit in "
                f"{name} = {context}. Raise it, or lower the maximum lengths"
            )


def _engine_faults(engine: ThirdPartyEngine) -> Iterator[str]:
    if engine.name in (*BACKENDS, BEST, "external"):
        yield f"name {engine.name!r} is the name of a built-in engine; choose another one"
    try:
        shlex.split(engine.command)
    except ValueError as problem:
        yield f"command cannot be split into words: {str(problem).lower()}"
    placeholders = re.findall(r"\{([A-Za-z_]+)\}", engine.command)
    if "port" not in placeholders:
        yield "command has no {port}, which the runner replaces by a free port"
    allowed = ", ".join(f"{{{name}}}" for name in PLACEHOLDERS)
    for name in placeholders:
        if name not in PLACEHOLDERS:
            yield f"command: {{{name}}} is not one of {allowed}"


def _contexts(server: ServerSettings) -> dict[str, int]:
    """Return the context of each server that the campaign starts, in tokens, by its key."""
    contexts = {"server.context_tokens": server.context_tokens}
    if server.gpu is not None and server.gpu.context_tokens is not None:
        contexts["server.gpu.context_tokens"] = server.gpu.context_tokens
    return contexts


def with_context_limit(file: CampaignFile) -> Workload:
    """Return the campaign's workload. Conversations without a length limit of their own get one
    that fits in the context of every server that the campaign starts."""
    workload = file.workload
    if file.target is not None or workload.context_tokens or not workload.has_sessions:
        return workload
    shortest = min(_contexts(file.server).values())
    return msgspec.structs.replace(workload, context_tokens=int(MAX_CONTEXT_SHARE * shortest))

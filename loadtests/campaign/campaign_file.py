"""The campaign file: what to measure and how. TOML -> Campaign.

    name = "ladder"
    models = ["135m", "1b", "3b"]            # x devices x backends x formats = cells
    budget_seconds = 600                     # at most, for all cells together

    [slo]
    preset = "chat"                          # or ttft_seconds and tpot_seconds
    target = 0.95

    [workload]
    preset = "chat"
    max_prompt_tokens = 512

Each key is a field of a struct: its type defines the values that it may have, and `crossover
campaign init` and docs/campaign.md show its text in loadtests/options.toml. All faults of a file
are reported at once, with key and value. Reading a campaign starts nothing, runs no code that it
names and looks neither at its models nor at the machine.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from crossover.loadtests.capacity.capacity_estimate import MIN_SECONDS
from crossover.loadtests.errors import BadCampaign, LoadError
from crossover.loadtests.load_generator.endpoint_access import literal_faults, variables_of
from crossover.loadtests.load_generator.target import Target, check_target
from crossover.models.errors import UnsupportedModel, printable
from crossover.models.identity.identify_model import ModelIdentity, identify, name_of
from crossover.models.identity.model_ladder import find_ladder_model
from crossover.models.shape.model_spec import ModelSpec
from crossover.models.weights.weight_formats import known_format
from crossover.serving.backends.backend_table import BACKENDS, spec_of
from crossover.serving.capacity.scheduler_settings import RequestedSettings
from crossover.serving.capacity.slo import SLO_PRESETS, Limits, Slo
from crossover.serving.errors import BackendUnavailable, WorkloadError
from crossover.serving.faults import converted
from crossover.serving.option_help import Count, Positive, Seconds, Share
from crossover.serving.placement.engines import Device
from crossover.serving.placement.fastest_backend import BEST
from crossover.serving.server_options import EngineOptions
from crossover.serving.toml_files import TomlTable, parse_toml, read_toml
from crossover.serving.workload.arrivals import Arrivals, Poisson, Trace
from crossover.serving.workload.conversations import draw_sessions
from crossover.serving.workload.request_lengths import DEFAULT_WORKLOAD, Workload
from crossover.serving.workload.trace_file import load_trace

DEMO = Path(__file__).parents[1] / "demo.toml"
RECIPES = Path(__file__).parents[1] / "engines"  # shipped third-party engines, one a file
# What the command of an engine may have in braces.
PLACEHOLDERS = ("model", "port", "host", "slots", "context", "kv_tokens", "threads", "cores")
MAX_FILE_NAME_BYTES = 120  # a run's folder has date and time in front
AUTO = "auto"  # in place of models: the ladder models around this machine's capacity
SINGLE_STREAM_SECONDS = 20.0
# A GPU answers dozens of requests a second, so less time gives as much evidence.
GPU_SINGLE_STREAM_SECONDS = 8.0
GPU_LEVEL_SECONDS = 20.0
OTHER_ENGINES = "List other engines as [[engines]] tables: docs/measure-any-endpoint.md."
CHECKED_SESSIONS = 2_000  # conversations that are drawn to check whether they fit in the context
# Largest part of a server's context that a conversation may take by the workload's token counts.
# The rest is for what they leave out: the marks of the chat template, and answers that become more
# tokens when they are sent back.
MAX_CONTEXT_SHARE = 0.85


class GpuSettings(RequestedSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Scheduler settings of a server on a GPU."""


class ServerSettings(EngineOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the server of each cell is started: options of `crossover serve` with the same names."""

    context_tokens: Count = 2048
    cores: Count | list[Count] | None = None
    cache: str | None = None
    ready_seconds: Positive = 1800.0
    gpu: GpuSettings | None = None

    @property
    def core_counts(self) -> list[int | None]:
        """The numbers of cores to measure each configuration on the CPU with; [None]: one, which
        `cores` sets."""
        return [*self.cores] if isinstance(self.cores, list) else [None]

    def cores_of(self, cell_cores: int | None) -> int | None:
        """Return the engine's cores in a cell; None: as many as possible."""
        return cell_cores if isinstance(self.cores, list) else self.cores

    def settings_on(self, device: str | None) -> RequestedSettings:
        """Return the scheduler settings of a server on a device, as far as the campaign sets them.

        The settings in `gpu` replace all others, so that slots set for the CPU do not limit the
        GPU. Only the context is that of the CPU if `gpu` does not set one.
        """
        if device != "gpu":
            return self.scheduler
        if self.gpu is None:  # several engines are of the CPU
            return msgspec.structs.replace(self.scheduler, engines=None)
        context_tokens = self.gpu.context_tokens or self.context_tokens
        return msgspec.structs.replace(self.gpu.scheduler, context_tokens=context_tokens)


class SloSpec(TomlTable, Limits, frozen=True):
    """A preset, possibly with changes, or your own SLO."""

    preset: str | None = None
    name: str | None = None
    target: Share | None = None


class Search(TomlTable, frozen=True):
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


class ThirdPartyEngine(TomlTable, frozen=True):
    """Another project's engine, started by a command for each of its cells."""

    name: Annotated[str, Meta(pattern=r"^[A-Za-z0-9][\w.-]*$")]
    command: str
    ready: Annotated[str, Meta(pattern="^/")] = "/health"
    weights: Literal["gguf", "hf", "none"] = "hf"
    format: str | None = None
    api_path: Annotated[str, Meta(pattern="^/")] | None = None
    install: str | None = None


class CampaignFile(TomlTable, frozen=True):
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
    wait_seconds: Seconds = 10.0


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """One configuration to measure: model, format and backend on a device, or an endpoint."""

    key: str
    model: str  # the model's name: short, and unique in the run
    weight_format: str  # "": not known, or not chosen yet
    backend: str  # BEST until the fastest engine is chosen
    slots: int | None = None  # to start its server with; None: those that `serve` chooses
    cores: int | None = None  # of the engine, if server.cores is a list; None: as server.cores says
    url: str | None = None  # the endpoint, if the runner does not start a server
    engine: str = ""  # the name of one of the campaign's `engines`
    threads: int | None = None  # chosen with the fastest engine; None: those of the layout
    # Chosen on a machine with several NUMA nodes: engines that serve from one queue, and the nodes
    # that they run on together. None: as server.engines says, one node for each.
    engines: int | None = None
    nodes: int | None = None
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
    cells: list[Cell]  # []: those that on_this_machine() finds
    text: str


def read_campaign(path: Path) -> Plan:
    """Return the campaign of a TOML file. Raises BadCampaign with the file and all its faults."""
    return parse_campaign(read_toml(path, BadCampaign)[1], where=f"{path}: ")


def campaign_of_models(models: Sequence[str]) -> Plan:
    """Return the demo campaign with these models, named after the first. Raises BadCampaign."""
    first = name_of(models[0]).rpartition("/")[2]
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
        return Plan(Campaign(**fields), [], text)
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


def check_trust(campaign: Campaign) -> None:
    """Raise BadCampaign if the campaign uses something that only a trusted campaign may use.

    That is a command, code (module:Class), an environment variable whose value is sent to the
    endpoint, or a client certificate. A campaign file may come from anybody.
    """
    target = campaign.target
    needs_trust = [engine.command for engine in campaign.engines]
    needs_trust += [f"the code of {name}" for name in campaign.backends or () if ":" in name]
    if target is not None:
        needs_trust += [
            f"the variable {variable}, whose value is sent to {target.url}"
            for variable in variables_of(target)
        ]
        if target.client_cert is not None:
            needs_trust.append(
                f"the certificate {target.client_cert}, which is shown to {target.url}"
            )
    if needs_trust:
        raise BadCampaign(
            f"The campaign uses {'; '.join(map(printable, needs_trust))}. "
            "If you trust all of this, add --trust."
        )


def file_name(text: str) -> str:
    """Return the text as a file name."""
    name = "".join(c if c.isalnum() or c in "._-@" else "-" for c in text).strip("-")
    return name.encode()[:MAX_FILE_NAME_BYTES].decode(errors="ignore")


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
    if file.server.cores == []:
        yield "server.cores = [] names no number: write, for example, [1, 2], or leave it out"
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
    if private := literal_faults(target, target.url):
        yield from (f"target: {fault}" for fault in private)
        return
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
    if (file.server.engines or 1) > 1 and file.engines:
        yield (
            f"server.engines = {file.server.engines} is of Crossover's own engines: measure those "
            "of [[engines]] in a campaign of their own"
        )
    if file.server.gpu is not None and (file.server.gpu.engines or 1) > 1:
        yield "server.gpu.engines: a GPU runs one engine. Remove the key"
    if BEST in (file.backends or ()) and file.server.options:
        yield f"{BEST!r} chooses among several engines, so server.options must not be set"
    if file.backends == [] and not file.engines and file.target is None:
        yield "backends is empty, so there is nothing to measure: name a backend"
    for name in file.backends or ():
        try:
            if name != BEST and ":" not in name:  # a class is not imported before it is trusted
                spec_of(name)
        except BackendUnavailable as problem:
            yield f"backends: {problem}. {OTHER_ENGINES}"
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

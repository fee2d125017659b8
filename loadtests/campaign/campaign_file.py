"""The campaign file: what to measure, and how. TOML -> Campaign -> cells.

    name = "ladder"
    models = ["135m", "1b", "3b"]            # x formats x backends x hardware x workloads = cells
    budget_seconds = 600                     # of measuring, for all cells together

    [slo]
    preset = "chat"                          # or ttft_seconds and tpot_seconds
    target = 0.95

    [workload]
    preset = "chat"
    max_prompt_tokens = 512

A key is a field of a struct here (or of one that a struct here holds): its type says what its value
may be, its description what `crossover campaign init` and docs/campaign.md say of it. A file that
says something impossible is refused with one sentence a fault, all of them at once, each with key
and value. Reading a campaign starts nothing and looks at no machine.
"""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from loadtests.analysis.slo import SLO_PRESETS, Slo
from loadtests.checked_files import Table, converted, key, parse_toml, read_toml
from loadtests.errors import BadCampaign, LoadError, TargetUnusable
from loadtests.load_generator.load_plan import DEFAULT_WORKLOAD
from loadtests.load_generator.openai_endpoint import Target, check_target
from loadtests.workload.arrivals import Arrivals, Poisson, Trace
from loadtests.workload.request_lengths import Workload
from loadtests.workload.traces import load_trace
from models.errors import CrossoverError, printable
from models.formats import DEFAULT_FORMATS, FORMATS, HF_FORMATS
from models.ladder import is_rung, rung
from serving.backends.backend_table import BACKENDS, weights_of
from serving.bounds import Count, Positive, Seconds, Share
from serving.errors import BackendUnavailable
from serving.placement.fastest_backend import BEST
from serving.server_options import SharedOptions

DEMO = Path(__file__).parents[1] / "demo.toml"
FILLED = ("model", "port", "host", "slots", "context", "kv_tokens", "threads")
_PLACE = re.compile(r"\{([A-Za-z_]+)\}")
AUTO = "auto"  # in place of models: the rungs around this machine's limit


class Server(SharedOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the server of each cell is started: options of `crossover serve` of the same names."""

    context_tokens: Annotated[Count, key("most tokens of one request, prompt and answer")] = 2048
    cache: Annotated[str | None, key("folder of made and downloaded weights")] = None
    ready_seconds: Annotated[
        Positive, key("most that loading may take, making the weights included")
    ] = 1800.0


# Options of `serve` that a campaign says elsewhere: of a cell, of its hardware, or not at all.
NOT_OF_SERVER = (
    *("backend", "weight_format", "calibration", "threads", "cores", "idle_unload_seconds"),
)


class Hardware(Table, frozen=True):
    """One hardware budget: how much of this machine a cell may use."""

    name: Annotated[str, key("needed where there is more than one")] = ""
    cores: Annotated[
        Count | None,
        key("physical cores of the engine; none: all where there are up to 8, else but 1 or 2"),
    ] = None
    threads: Annotated[Count | None, key("threads of the engine; none: one for each core")] = None


class SloSpec(Table, frozen=True):
    """A preset with changes, or an SLO of one's own."""

    preset: Annotated[
        str | None, key("chat, interactive, reading, batch, ...; none: the limits below")
    ] = None
    name: Annotated[str | None, key("what reports call it")] = None
    ttft_seconds: Annotated[Positive | None, key("limit of the time to first token")] = None
    tpot_seconds: Annotated[Positive | None, key("limit of the time per output token")] = None
    target: Annotated[Share | None, key("share of requests that must be good, 0..1")] = None
    confidence: Annotated[
        Annotated[float, Meta(gt=0.5, lt=1)] | None, key("confidence of a verdict, 0.5..1")
    ] = None


class Search(Table, frozen=True):
    """How a cell's capacity is found."""

    starts: Annotated[
        Count, key("server starts that must confirm; 2 for a machine that is to be put to work")
    ] = 1
    confirm: Annotated[
        Annotated[int, Meta(ge=0)] | None,
        key("confirm only so many models, the smallest; the others are estimated; none: all"),
    ] = None
    single_stream_requests: Annotated[Count, key("requests one at a time, before any load")] = 20
    single_stream_seconds: Annotated[Positive, key("most that they take")] = 20.0
    level_seconds: Annotated[
        Positive, key("shortest level that confirms; below 3 requests/s it is twice as long")
    ] = 60.0
    rates: Annotated[
        list[Positive], key("measure levels at these rates (requests/s) in place of a search")
    ] = []


class Engine(Table, frozen=True):
    """An engine of others, started by a command for each of its cells."""

    name: Annotated[str, key("the engine's, in keys and reports")]
    command: Annotated[
        str, key("words as a shell splits them; {model} {port} {host} {slots} {context} ... filled")
    ]
    ready: Annotated[str, key("path that answers 200 once it serves")] = "/health"
    weights: Annotated[
        Literal["gguf", "hf", "none"],
        key("{model}: a GGUF file, a folder of safetensors (hf), or the name in models (none)"),
    ] = "hf"
    format: Annotated[str | None, key("their format; none: Q4_0 or bf16")] = None
    api: Annotated[Literal["completions", "chat"], key("the route that is measured")] = (
        "completions"
    )


class OneCell(Table, frozen=True):
    """One combination, given by hand beside (or instead of) the product."""

    model: Annotated[str, key("a size of the ladder, a GGUF file, a folder or a hub id")]
    format: Annotated[str | None, key("none: the backend's default")] = None
    backend: Annotated[str, key("the engine")] = "llama_cpp"


class CampaignFile(Table, frozen=True):
    """The file as it is written."""

    name: Annotated[str, key("name of the run folder")]
    models: Annotated[
        list[str], key("sizes of the ladder, files, folders, hub ids; auto: four around the limit")
    ] = []
    formats: Annotated[
        list[str], key("each model in each of them; empty: the default of each backend")
    ] = []
    backends: Annotated[
        list[str],
        key("llama_cpp, onnx, torch; best: tries them for seconds, takes the one that serves most"),
    ] = msgspec.field(default_factory=lambda: ["llama_cpp"])
    hardware: Annotated[
        list[Hardware], key("budgets: how much of this machine a cell may use"), Meta(min_length=1)
    ] = msgspec.field(default_factory=lambda: [Hardware()])
    cells: Annotated[list[OneCell], key("combinations, beside models x formats x backends")] = []
    engines: Annotated[
        list[Engine], key("engines of others, beside backends; only with --trust")
    ] = []
    target: Annotated[Target | None, key("an endpoint that runs already, in place of models")] = (
        None
    )
    server: Annotated[Server, key("how the server of each cell is started")] = Server()
    workload: Annotated[
        Workload | None, key("lengths of prompts and answers; none: the preset chat")
    ] = None
    workloads: Annotated[dict[str, Workload], key("several, by name, in place of workload")] = {}
    arrivals: Annotated[Arrivals, key("when requests are due")] = Poisson()
    slo: Annotated[
        str | SloSpec | None, key("limits that a good request keeps; none: the preset chat")
    ] = None
    search: Annotated[Search, key("how a capacity is found")] = Search()
    budget_seconds: Annotated[
        Positive | None,
        key("measuring time of all cells together; none: 600 for each"),
    ] = None
    seed: Annotated[int, key("seed of prompts and arrivals")] = 1
    disturbance: Annotated[
        Literal["wait", "ignore"],
        key("disturbed levels are measured again on the quiet machine; ignore: they count"),
    ] = "wait"
    wait_seconds: Annotated[
        Seconds, key("most that a cell waits for quiet, besides its budget; 0: none")
    ] = 300.0


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """What is measured: a model, format, backend and hardware budget, or an endpoint."""

    key: str
    model: str
    weight_format: str  # of a best engine: the one that it is chosen in; "": any
    backend: str
    hardware: Hardware = Hardware()
    slots: int | None = None
    synthetic: bool | None = None  # random weights; None: not known
    url: str | None = None  # the endpoint, where the runner starts none
    workload: str = ""  # its name, where the campaign has several
    engine: str = ""  # its name, where it is one of others (`engines` of the campaign)
    is_best: bool = False  # the engine is the CPU's best, chosen when the cell starts


class Campaign(CampaignFile, frozen=True, kw_only=True, forbid_unknown_fields=False):
    """The file with its SLO and lengths looked up, as the manifest keeps it."""

    slo: Slo  # type: ignore[assignment]
    workload: Workload  # the first, where there are several
    engines: dict[str, Engine] = {}  # type: ignore[assignment]  # by name

    def workload_of(self, cell: Cell) -> Workload:
        return self.workloads[cell.workload] if cell.workload else self.workload


class Plan(msgspec.Struct, frozen=True):
    """A campaign, its cells in order, and the text they came from."""

    campaign: Campaign
    cells: list[Cell]  # none yet where the machine chooses the models
    text: str

    @property
    def is_auto(self) -> bool:
        return not self.cells


def read_campaign(path: Path) -> Plan:
    """The campaign in a TOML file. Raises BadCampaign: the file, and every fault in it."""
    raw, text = read_toml(path, BadCampaign)
    try:
        return _plan_of(raw, text)
    except BadCampaign as problem:
        raise BadCampaign(f"{path}: {problem}") from problem


def parse_campaign(text: str, *, models: Sequence[str] = ()) -> Plan:
    """The campaign in a TOML text; `models` take the place of "auto". Raises BadCampaign."""
    return _plan_of(parse_toml(text, BadCampaign), text, models)


def _plan_of(raw: dict[str, Any], text: str, models: Sequence[str] = ()) -> Plan:
    file = converted(raw, CampaignFile, BadCampaign)
    faults = list(_faults(file))
    try:
        slo = slo_of(file.slo or "chat")
    except BadCampaign as problem:
        faults.append(str(problem))
    if faults:
        raise BadCampaign("; ".join(faults))
    if models and AUTO in file.models:
        file = msgspec.structs.replace(file, models=list(models))
    changes = {
        "slo": slo,
        "workload": next(iter(file.workloads.values()), file.workload or DEFAULT_WORKLOAD),
        "engines": {engine.name: engine for engine in file.engines},
    }
    campaign = Campaign(**(msgspec.structs.asdict(file) | changes))
    return Plan(campaign, [] if AUTO in file.models else cells_of(file), text)


def slo_of(spec: str | SloSpec) -> Slo:
    """The SLO of a preset, changed or not, or of own limits. Raises BadCampaign."""
    if isinstance(spec, str):
        spec = SloSpec(preset=spec)
    if spec.preset is not None and spec.preset not in SLO_PRESETS:
        known = ", ".join(SLO_PRESETS)
        raise BadCampaign(f"slo.preset must be one of {known}, got {spec.preset!r}")
    given = msgspec.structs.asdict(spec)
    del given["preset"]
    changes = {name: value for name, value in given.items() if value is not None}
    if spec.preset is None:
        return Slo(**{"ttft_seconds": None, "tpot_seconds": None, "name": "own", **changes})
    if changes.keys() & {"ttft_seconds", "tpot_seconds"}:
        changes.setdefault("name", f"{spec.preset} (changed)")
    return msgspec.structs.replace(SLO_PRESETS[spec.preset], **changes)


def check_trust(plan: Plan) -> None:
    """A campaign, or its run folder, may be a stranger's: only the command line trusts it.

    Raises BadCampaign where it names a command, code (module:Class) or the variable of a key.
    """
    target = plan.campaign.target
    named = [engine.command for engine in plan.campaign.engines.values()]
    named += [f"the code of {cell.backend}" for cell in plan.cells if ":" in cell.backend]
    if target is not None and target.api_key_env is not None:
        named.append(f"the variable {target.api_key_env}, which {target.url} is sent")
    if named:
        raise BadCampaign(
            f"the campaign uses {'; '.join(map(printable, named))}; "
            "if you trust each of them, say so: --trust"
        )


# Cells of a file.


def cells_of(file: CampaignFile) -> list[Cell]:
    """The product, then the cells given by hand, then those of engines of others.

    Raises BadCampaign for a combination that is none.
    """
    names = list(file.workloads) or [""]
    if file.target is not None:
        return [cell_of_target(file.target, name) for name in names]
    formats: list[str | None] = [*file.formats] or [None]
    wanted = [
        OneCell(model=model, format=weight_format, backend=backend)
        for model in file.models
        for weight_format in formats
        for backend in file.backends
        if backend != BEST
    ]
    # The best engine is one cell for all formats: they limit what it is chosen from.
    wanted += [OneCell(model=model, backend=BEST) for model in file.models if BEST in file.backends]
    made = [_cell(one, file) for one in wanted + file.cells]
    made += [
        _cell_of_engine(engine, model, file) for engine in file.engines for model in file.models
    ]
    cells = [
        msgspec.structs.replace(
            cell,
            key=plain("-".join(part for part in (cell.key, hardware.name, name) if part)),
            hardware=hardware,
            workload=name,
        )
        for cell in made
        for hardware in file.hardware
        for name in names
    ]
    if not cells:
        raise BadCampaign("nothing to measure: backends is empty")
    key, times = Counter(cell.key for cell in cells).most_common(1)[0]
    if times > 1:
        raise BadCampaign(
            f"cell {key} is there twice; hardware budgets need names, "
            "models and formats must differ"
        )
    return cells


def cell_of_target(target: Target, workload: str = "") -> Cell:
    """The cell of an endpoint that is there already, under one of its workloads."""
    model = target.model or "default"
    key = plain(f"{model}@{target.url.split('://')[-1]}" + (f"-{workload}" if workload else ""))
    return Cell(
        key=key,
        model=model,
        weight_format="",
        backend="external",
        url=target.url,
        workload=workload,
    )


def _cell_of_engine(engine: Engine, model: str, file: CampaignFile) -> Cell:
    weight_format = engine.format or DEFAULT_FORMATS.get(engine.weights, "")
    name = rung(model).spec.name if is_rung(model) else model
    return Cell(
        key="-".join(part for part in (name, weight_format, engine.name) if part),
        model=name,
        weight_format=weight_format,
        backend=engine.name,
        slots=file.server.slots if "{slots}" in engine.command else None,
        synthetic=True if engine.weights != "none" and is_rung(model) else None,
        engine=engine.name,
    )


def _cell(one: OneCell, file: CampaignFile) -> Cell:
    is_best = one.backend == BEST
    try:
        known = is_rung(one.model)
        # A file, a folder or a hub id.
        is_elsewhere = any(mark in one.model for mark in ("/", ".gguf"))
        model = one.model if is_elsewhere and not known else rung(one.model).spec.name
        kind, weight_format = "none", one.format or ""
        if not is_best:
            kind, weight_format = weights_of(one.backend, one.format)
    except BackendUnavailable as problem:
        others = "other engines are [[engines]] tables: docs/measure-any-endpoint.md"
        raise BadCampaign(f"{problem}; {others}") from problem
    except CrossoverError as problem:
        raise BadCampaign(f"{problem}") from problem
    shown = "" if is_best else weight_format or DEFAULT_FORMATS.get(kind, "")
    return Cell(
        key="-".join(part for part in (model, shown, one.backend) if part),
        model=model,
        weight_format=weight_format,
        backend=one.backend,
        slots=file.server.slots,
        synthetic=True if known else None,
        is_best=is_best,
    )


def plain(text: str) -> str:
    """As a file name."""
    return "".join(c if c.isalnum() or c in "._-@" else "-" for c in text).strip("-")


def _faults(file: CampaignFile) -> Iterator[str]:
    """What no single value says: combinations that cannot be."""
    has_models = bool(file.models or file.cells)
    if file.target is not None:
        bare = CampaignFile(name="")
        for name in ("models", "cells", "engines", "formats", "backends", "hardware", "server"):
            if getattr(file, name) != getattr(bare, name):
                yield f"target is an endpoint that is there already: it goes without {name}"
    if file.search.starts > 1 and (file.search.rates or file.target is not None):
        yield f"search.starts = {file.search.starts} is of a search on servers started here"
    if file.target is None and not has_models:
        yield "nothing to measure: give models, cells, or a target with a url"
    if file.engines and not file.models:
        yield "engines are measured on models, and there are none"
    for name in NOT_OF_SERVER:
        if (value := getattr(file.server, name)) != getattr(Server(), name):
            yield f"server.{name} = {value!r} is not said here, but of cells and hardware"
    is_beside = len(file.models) > 1 or bool(file.cells or file.engines or file.target)
    if AUTO in file.models and (is_beside or not {*file.backends} <= {*BACKENDS, BEST}):
        yield (
            "models 'auto' are rungs that a measurement chooses: they go without other models, "
            "cells, engines, a target, and with backends of this product alone"
        )
    if file.workload is not None and file.workloads:
        yield "workload and workloads: give one of them"
    if BEST in (*file.backends, *(cell.backend for cell in file.cells)):
        if file.server.policy == "gpu-only":
            yield f"server.policy is 'gpu-only', and {BEST!r} chooses among the CPU's engines"
        if file.server.options:
            yield f"server.options are of one engine, and {BEST!r} chooses among several"
    try:
        if file.target is not None:
            check_target(file.target)
    except TargetUnusable as problem:
        yield f"target: {problem}"
    if isinstance(file.arrivals, Trace):
        yield from _unread("arrivals.path", file.arrivals.path)
    context = file.server.context_tokens
    for name, one in (file.workloads or {"workload": file.workload or DEFAULT_WORKLOAD}).items():
        place = f"workloads.{name}" if file.workloads else name
        yield from _unread(f"{place}.file", one.file)
        yield from _unread(f"{place}.replay", one.replay)
        prompt = one.max_prompt_tokens or one.prompt_tokens or 0
        output = one.max_output_tokens or one.output_tokens or 0
        if prompt and output and prompt + output > context and file.target is None:
            yield (
                f"{name}: prompts of {prompt} and outputs of {output} tokens do not fit in "
                f"server.context_tokens = {context}: raise it or lower the workload's caps"
            )
    taken = {*BACKENDS, BEST, "external"}
    for position, engine in enumerate(file.engines):
        if re.fullmatch(r"[A-Za-z0-9][\w.-]*", engine.name) is None or engine.name in taken:
            yield (
                f"engines[{position}].name must be a file's name, and of no other engine, "
                f"got {engine.name!r}"
            )
        taken.add(engine.name)
        yield from (f"engines[{position}].{name}: {what}" for name, what in _wrong(engine))


def _wrong(engine: Engine) -> Iterator[tuple[str, str]]:
    """What cannot be: the key, and what is wrong with it."""
    try:
        if not shlex.split(engine.command):
            yield "command", "it is empty"
    except ValueError as problem:
        yield "command", f"it cannot be split into words: {str(problem).lower()}"
    if "port" not in set(_PLACE.findall(engine.command)):
        yield "command", "it has no {port}: the runner chooses a free one"
    for name in sorted(set(_PLACE.findall(engine.command)) - {*FILLED}):
        known = ", ".join(f"{{{one}}}" for one in FILLED)
        yield "command", f"{{{name}}} is not one of {known}"
    if not engine.ready.startswith("/"):
        yield "ready", f"it must be a path such as /health, got {engine.ready!r}"
    formats = HF_FORMATS if engine.weights == "hf" else FORMATS["gguf"]
    if engine.format is not None and engine.weights != "none" and engine.format not in formats:
        yield "format", f"{engine.format!r} is not one of {', '.join(formats)}"


def _unread(name: str, path: str | None) -> Iterator[str]:
    """Why the trace that a key names cannot be used."""
    try:
        if path is not None:
            load_trace(path)
    except LoadError as problem:
        yield f"{name}: {problem}"

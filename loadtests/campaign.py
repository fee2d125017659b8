"""The campaign file: what to measure, and how. TOML -> Campaign -> cells.

    name = "ladder"
    models = ["135m", "1b", "3b"]            # x formats x backends x hardware x workloads = cells
    formats = ["Q4_0"]
    budget_seconds = 600                     # of measuring, for all cells together

    [promise]
    preset = "chat"                          # or ttft_seconds and tpot_seconds
    target = 0.95

    [workload]
    preset = "chat"
    max_prompt_tokens = 512

Several kinds of traffic are `[workloads.NAME]` tables in place of `[workload]`. Several promises are `promises = ["chat", "reading"]` in
place of `promise`: they cost little more than one, since every level is judged by each of them. `search.rates` measures given rates
instead of searching. For an endpoint that is there already, `[target]` with `url = "http://..."` in place of models. All keys: the
structs below; an unknown one is refused with its path and the ones there are. Reading a campaign starts nothing and looks at no machine.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import msgspec

from loadtests.arrivals import Arrivals, Poisson
from loadtests.errors import BadCampaign
from loadtests.plan import DEFAULT_WORKLOAD
from loadtests.search import SearchConfig
from loadtests.slo import PROMISES, Promise
from loadtests.target import Target
from loadtests.workload import Workload
from models.errors import ModelError
from models.ladder import is_rung, rung

DEMO = Path(__file__).with_name("demo.toml")


class Server(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How the runner starts the server of every cell; the options of `crossover serve` of the same names."""

    policy: str = "auto"
    slots: int = 16
    context_tokens: int = 2048
    kv_tokens: int | None = None
    kv_dtype: str = "fp16"
    prefill_tokens: int | None = None
    step_seconds: float | None = None
    prefix_reuse: bool = True
    cache: str | None = None
    options: dict[str, str | int | float | bool] = {}  # of the backend
    ready_seconds: float = 1800.0  # how long loading may take, making the weights included


class Hardware(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One hardware budget: how much of this machine a cell may use."""

    name: str = ""  # needed where there is more than one
    cores: int | None = None  # physical cores of the engine; None: all but those of the API and the client
    threads: int | None = None  # None: one for each of the cores
    memory_gib: float | None = None  # of server and engine together: a cell that needs more is skipped, before or after it has shown it


class PromiseSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A preset with changes, or a promise of one's own."""

    preset: str | None = None
    name: str | None = None
    ttft_seconds: float | None = None
    tpot_seconds: float | None = None
    target: float | None = None
    confidence: float | None = None


class OneCell(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One combination, given by hand beside (or instead of) the product."""

    model: str
    format: str | None = None
    backend: str = "llama_cpp"


class CampaignFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The file as it is written."""

    name: str
    models: list[str] = []
    formats: list[str] = []  # empty: what each backend has by default
    backends: list[str] = msgspec.field(default_factory=lambda: ["llama_cpp"])
    hardware: list[Hardware] = msgspec.field(default_factory=lambda: [Hardware()])
    cells: list[OneCell] = []
    target: Target | None = None
    server: Server = Server()
    workload: Workload | None = None
    workloads: dict[str, Workload] = {}
    arrivals: Arrivals = Poisson()
    promise: str | PromiseSpec | None = None  # "chat" where nothing is said
    promises: list[str | PromiseSpec] = []
    search: SearchConfig = SearchConfig()
    budget_seconds: float | None = None
    seed: int = 1
    sample_seconds: float = 1.0


class Campaign(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The file with everything filled in; what a run's manifest keeps. `promise` and `workload` are the first where there are several."""

    name: str
    promise: Promise
    workload: Workload
    arrivals: Arrivals
    search: SearchConfig
    server: Server
    target: Target | None
    budget_seconds: float | None  # of measuring, all cells together; None: `search.budget_seconds` for each
    seed: int
    sample_seconds: float
    promises: tuple[Promise, ...] = ()  # all of them where there are several
    workloads: dict[str, Workload] = {}  # by name where there are several
    repeats: str | None = None  # the run whose levels are measured again
    cell_levels: dict[str, tuple[tuple[float, float], ...]] = {}  # of a repeat: per cell the (rate, seconds) of each of its levels

    @property
    def all_promises(self) -> tuple[Promise, ...]:
        return self.promises or (self.promise,)

    def of(self, cell: Cell, promise: Promise | None = None) -> Campaign:
        """The campaign as it is for one cell: its workload, its rates, and the promise that is searched for now."""
        search = self.search
        if self.repeats is not None:
            levels = self.cell_levels.get(cell.key, ())
            search = msgspec.structs.replace(search, rates=tuple(r for r, _ in levels), rate_seconds=tuple(s for _, s in levels))
        workload = self.workloads[cell.workload] if cell.workload else self.workload
        return msgspec.structs.replace(self, workload=workload, search=search, promise=promise or self.promise)


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that is measured: a model in a format on a backend with a hardware budget, or an endpoint that is there already."""

    key: str
    model: str
    weight_format: str
    backend: str
    hardware: Hardware = Hardware()
    slots: int | None = None
    context_tokens: int | None = None
    kv_tokens: int | None = None
    kv_dtype: str | None = None
    synthetic: bool | None = None  # random weights; None: not known
    url: str | None = None  # the endpoint, where the runner starts none
    workload: str = ""  # its name, where the campaign has several


class Plan(msgspec.Struct, frozen=True):
    """A campaign, its cells in order, and the text they came from."""

    campaign: Campaign
    cells: list[Cell]
    text: str


def read_campaign(path: Path, *, budget_seconds: float | None = None) -> Plan:
    """The campaign in a TOML file; `budget_seconds` takes the place of the file's.

    Raises BadCampaign: file, path inside it, what is wrong.
    """
    try:
        text = path.read_text()
    except OSError as problem:
        raise BadCampaign(f"{path} cannot be read: {problem.strerror}") from problem
    except UnicodeDecodeError as problem:
        raise BadCampaign(f"{path} is no text: {problem.reason} at byte {problem.start}") from problem
    try:
        return parse_campaign(text, budget_seconds=budget_seconds)
    except BadCampaign as problem:
        raise BadCampaign(f"{path}: {problem}") from problem


def parse_campaign(text: str, *, budget_seconds: float | None = None) -> Plan:
    """The campaign in a TOML text. Raises BadCampaign."""
    try:
        raw = tomllib.loads(text)
    except tomllib.TOMLDecodeError as problem:
        raise BadCampaign(f"no TOML: {problem}") from problem
    if budget_seconds is not None:
        raw["budget_seconds"] = budget_seconds
    try:
        file = msgspec.convert(raw, CampaignFile)
    except msgspec.ValidationError as problem:
        raise BadCampaign(explain(problem)) from problem
    _check(file)
    promises = tuple(promise_of(spec) for spec in (file.promises or [file.promise or "chat"]))
    twice = next((p.name for i, p in enumerate(promises) if p.name in [other.name for other in promises[:i]]), None)
    if twice is not None:
        raise BadCampaign(f"promise {twice!r} is there twice: give each a name of its own - at `$.promises`")
    campaign = Campaign(
        name=file.name,
        promise=promises[0],
        promises=promises if len(promises) > 1 else (),
        workload=next(iter(file.workloads.values()), file.workload or DEFAULT_WORKLOAD),
        workloads=file.workloads,
        arrivals=file.arrivals,
        search=file.search,
        server=file.server,
        target=file.target,
        budget_seconds=file.budget_seconds,
        seed=file.seed,
        sample_seconds=file.sample_seconds,
    )
    return Plan(campaign, cells_of(file), text)


def promise_of(spec: str | PromiseSpec) -> Promise:
    """The promise of a preset's name, a preset with changes, or limits of one's own. Raises BadCampaign."""
    if isinstance(spec, str):
        spec = PromiseSpec(preset=spec)
    changes = {name: value for name in PromiseSpec.__struct_fields__ if name != "preset" and (value := getattr(spec, name)) is not None}
    if spec.preset is not None and spec.preset not in PROMISES:
        raise BadCampaign(f"promise {spec.preset!r} is not one of {', '.join(PROMISES)} - at `$.promise.preset`")
    try:
        if spec.preset is None:
            return Promise(**{"ttft_seconds": None, "tpot_seconds": None, "name": "own", **changes})
        if changes.keys() & {"ttft_seconds", "tpot_seconds"}:
            changes.setdefault("name", f"{spec.preset} (changed)")
        return msgspec.structs.replace(PROMISES[spec.preset], **changes)
    except ValueError as problem:
        raise BadCampaign(f"{problem} - at `$.promise`") from problem


def cells_of(file: CampaignFile) -> list[Cell]:
    """models x formats x backends x hardware x workloads, then the cells given by hand, in this order.

    Raises BadCampaign for a combination that is none.
    """
    names = list(file.workloads) or [""]
    if file.target is not None:
        return [cell_of_target(file.target, name) for name in names]
    wanted = [
        OneCell(model=model, format=weight_format, backend=backend)
        for model in file.models
        for weight_format in (*file.formats, *(() if file.formats else (None,)))
        for backend in file.backends
    ] + file.cells
    cells = [_cell(one, hardware, file, name) for one in wanted for hardware in file.hardware for name in names]
    twice = next((cell.key for index, cell in enumerate(cells) if cell.key in {other.key for other in cells[:index]}), None)
    if twice is not None:
        raise BadCampaign(f"cell {twice} is there twice; hardware budgets need names, models and formats must differ")
    return cells


def cell_of_target(target: Target, workload: str = "") -> Cell:
    """The cell of an endpoint that is there already, under one of its workloads."""
    model = target.model or "default"
    key = _plain(f"{model}@{target.url.split('://')[-1]}" + (f"-{workload}" if workload else ""))
    return Cell(key=key, model=model, weight_format="", backend="external", url=target.url, workload=workload)


def explain(problem: msgspec.ValidationError) -> str:
    """msgspec's message, with the keys there are where an unknown one was met."""
    text = str(problem)
    if "unknown field" not in text:
        return text
    place = text.partition("at `")[2].rstrip("`") or "$"
    known = _keys_at(re.sub(r"\[\d+\]", "[...]", place.removeprefix("$").strip(".")))
    return f"{text}; known here: {', '.join(known)}" if known else text


def _keys_at(place: str) -> list[str]:
    kinds: dict[str, Any] = {
        "": CampaignFile,
        "server": Server,
        "workload": Workload,
        "workloads[...]": Workload,
        "promises[...]": PromiseSpec,
        "promise": PromiseSpec,
        "search": SearchConfig,
        "target": Target,
        "hardware[...]": Hardware,
        "cells[...]": OneCell,
    }
    kind = kinds.get(place)
    return list(kind.__struct_fields__) if kind is not None else []


def _check(file: CampaignFile) -> None:
    if file.target is not None and (file.models or file.cells):
        raise BadCampaign("`target` is an endpoint that is there already: it goes without models and cells - at `$.target`")
    if file.target is None and not file.models and not file.cells:
        raise BadCampaign("nothing to measure: give models, cells, or a target with a url - at `$`")
    if file.workload is not None and file.workloads:
        raise BadCampaign("`workload` and `workloads`: give one of them - at `$.workloads`")
    if file.promise is not None and file.promises:
        raise BadCampaign("`promise` and `promises`: give one of them - at `$.promises`")
    for hardware in file.hardware:
        for name in ("cores", "threads", "memory_gib"):
            value = getattr(hardware, name)
            if value is not None and not value > 0:
                raise BadCampaign(f"{name} must be above 0, got {value} - at `$.hardware`")
    for name in ("budget_seconds", "sample_seconds"):
        value = getattr(file, name)
        if value is not None and not value > 0:
            raise BadCampaign(f"{name} must be above 0, got {value} - at `$.{name}`")
    for name in ("slots", "context_tokens"):
        if getattr(file.server, name) < 1:
            raise BadCampaign(f"{name} must be at least 1, got {getattr(file.server, name)} - at `$.server.{name}`")
    if file.server.policy not in ("auto", "gpu-only", "cpu-only"):
        raise BadCampaign(f"policy must be auto, gpu-only or cpu-only, got {file.server.policy!r} - at `$.server.policy`")
    if not file.hardware:
        raise BadCampaign("hardware is empty: leave it out, or give at least one budget - at `$.hardware`")
    if len(file.hardware) > 1 and not all(hardware.name for hardware in file.hardware):
        raise BadCampaign("each of several hardware budgets needs a name - at `$.hardware`")
    for place, workload in [("workload", file.workload or DEFAULT_WORKLOAD)] if not file.workloads else file.workloads.items():
        prompt, output = workload.max_prompt_tokens or workload.prompt_tokens, workload.max_output_tokens or workload.output_tokens
        if file.target is None and prompt and output and prompt + output > file.server.context_tokens:
            raise BadCampaign(
                f"{place}: prompts of {prompt} and outputs of {output} tokens do not fit in a context of {file.server.context_tokens}: "
                "raise server.context_tokens or lower the workload's caps - at `$.server.context_tokens`"
            )


def _cell(one: OneCell, hardware: Hardware, file: CampaignFile, workload: str) -> Cell:
    from models.hub import DEFAULT_FORMATS, weight_kind  # brings gguf and the makers of weights: not for who only loads a URL

    try:
        known = is_rung(one.model)
        is_elsewhere = any(mark in one.model for mark in ("/", ".gguf"))  # a file, a folder or a hub id
        model = one.model if is_elsewhere and not known else rung(one.model).spec.name
        kind, weight_format = weight_kind(one.backend, one.format)
    except ModelError as problem:
        raise BadCampaign(f"{problem} - at `$.models`, `$.formats` or `$.backends`") from problem
    name = f"{model}-{weight_format or DEFAULT_FORMATS.get(kind, '')}-{one.backend}".replace("--", "-")
    key = _plain("-".join(part for part in (name, hardware.name, workload) if part))
    server = file.server
    return Cell(
        key=key, model=model, weight_format=weight_format, backend=one.backend, hardware=hardware, slots=server.slots,
        context_tokens=server.context_tokens, kv_tokens=server.kv_tokens, kv_dtype=server.kv_dtype, synthetic=True if known else None,
        workload=workload,
    )  # fmt: skip


def _plain(text: str) -> str:
    """As a file name."""
    return "".join(c if c.isalnum() or c in "._-@" else "-" for c in text).strip("-")

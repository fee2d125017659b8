"""The keys of a campaign file, their defaults and what their values may be.

A key is a field of a struct here (or of a struct that one here holds); the comment behind a field
is what `crossover campaign init` and docs/campaign.md say of it.
"""

from __future__ import annotations

import re
from typing import Any, Literal

import msgspec

from loadtests.capacity.search_config import SearchConfig
from loadtests.engines.command import Engine, wrong
from loadtests.errors import BadCampaign
from loadtests.generator.endpoint import Target
from loadtests.generator.load_plan import DEFAULT_WORKLOAD
from loadtests.workload.arrivals import Arrivals, Poisson
from loadtests.workload.requests import Workload
from serving.backends import BACKENDS
from serving.placement.fastest_backend import BEST
from serving.registry.options import Standby

OnDisturbance = Literal["wait", "ignore"]
AUTO = "auto"  # in place of models: the rungs around this machine's limit
POLICIES = ("auto", "gpu-only", "cpu-only")


class Server(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How the server of each cell is started: options of `crossover serve` of the same names."""

    policy: str = "auto"  # auto, gpu-only or cpu-only
    slots: int = 16  # sequences that run at the same time
    context_tokens: int = 2048  # most tokens of one request, prompt and answer
    kv_tokens: int | None = None  # KV cache of all requests together; none: slots x context_tokens
    kv_dtype: str = "auto"  # number type of the KV cache; auto: the backend's own
    prefill_tokens: int | None = None  # most prompt tokens of a step; none: that of `serve`, 256
    step_seconds: float | None = None  # target of a step with prompt tokens; none: 0.3
    prefix_reuse: bool = True  # keep the KV cache of prompts that begin alike
    check_memory: bool = True  # refuse what does not fit
    standby: Standby = "cold"  # warm: the fallback engine is kept loaded beside the one that serves
    cache: str | None = None  # folder of made and downloaded weights
    options: dict[str, str | int | float | bool] = {}  # options of the backend
    ready_seconds: float = 1800.0  # most that loading may take, making the weights included


class Load(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Who sends the load."""

    workers: int = 1  # processes of this machine that share the load


class Hardware(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One hardware budget: how much of this machine a cell may use."""

    name: str = ""  # needed where there is more than one
    cores: int | None = (
        None  # physical cores of the engine; none: all where there are up to 8, else all but 1 or 2
    )
    threads: int | None = None  # threads of the engine; none: one for each core
    memory_gib: float | None = None  # limit of server and engine; a cell that needs more is skipped
    accelerator: str | None = None  # GPU of the machine by Ray's name, e.g. L4; only with --on ray


class SloSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A preset with changes, or an SLO of one's own."""

    preset: str | None = None  # chat, interactive, reading, batch, ...; none: the limits below
    name: str | None = None  # needed where two would have the same
    ttft_seconds: float | None = None  # limit of the time to first token
    tpot_seconds: float | None = None  # limit of the time per output token
    target: float | None = None  # share of requests that must be good, 0..1
    confidence: float | None = None  # confidence of a verdict, 0.5..1


class OneCell(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One combination, given by hand beside (or instead of) the product."""

    model: str  # a rung, a GGUF file, a folder or a hub id
    format: str | None = None  # none: the backend's default
    backend: str = "llama_cpp"  # the engine


class CampaignFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The file as it is written."""

    name: str  # name of the run folder
    models: list[str] = []  # rungs, files, folders, hub ids; auto: four rungs around the limit
    formats: list[str] = []  # each model in each of them; empty: the default of each backend
    backends: list[str] = msgspec.field(
        default_factory=lambda: ["llama_cpp"]
    )  # llama_cpp, onnx, torch; best: tries them for seconds, takes the one that serves most
    hardware: list[Hardware] = msgspec.field(
        default_factory=lambda: [Hardware()]
    )  # budgets: how much of this machine a cell may use
    cells: list[OneCell] = []  # single combinations, beside models x formats x backends
    engines: list[Engine] = []  # engines of others, beside backends; only with --allow-commands
    target: Target | None = None  # an endpoint that runs already, in place of models
    server: Server = Server()  # how the server of each cell is started
    load: Load = Load()  # who sends the load
    workload: Workload | None = None  # lengths of prompts and answers; none: the preset chat
    workloads: dict[str, Workload] = {}  # several, by name, in place of workload
    arrivals: Arrivals = Poisson()  # when requests are due
    slo: str | SloSpec | None = None  # limits that a good request keeps; none: the preset chat
    slos: list[str | SloSpec] = []  # several, in place of slo: each level is judged by all
    search: SearchConfig = SearchConfig()  # the search for the capacity
    budget_seconds: float | None = (
        None  # measuring time of all cells together; none: search.budget_seconds for each
    )
    seed: int = 1  # seed of prompts and arrivals
    sample_seconds: float = 1.0  # time between two samples of CPU and memory
    disturbance: OnDisturbance = (
        "wait"  # disturbed levels are repeated on the quiet machine; ignore: they count
    )
    wait_seconds: float = 300.0  # most that a cell waits for quiet, besides its budget; 0: none


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
        "load": Load,
        "workload": Workload,
        "workloads[...]": Workload,
        "slos[...]": SloSpec,
        "slo": SloSpec,
        "search": SearchConfig,
        "target": Target,
        "hardware[...]": Hardware,
        "cells[...]": OneCell,
        "engines[...]": Engine,
    }
    kind = kinds.get(place)
    return list(kind.__struct_fields__) if kind is not None else []


def check(file: CampaignFile) -> None:
    """Raises BadCampaign for the first thing that cannot be, with its place in the file."""
    rules = (*_combinations(file), *_values(file), *_lengths(file), *_engines(file))
    for is_wrong, place, what in rules:
        if is_wrong:
            raise BadCampaign(f"{what} - at `{place}`")


Rule = tuple[bool, str, str]  # whether it is broken, where, what is wrong


def _combinations(file: CampaignFile) -> list[Rule]:
    has_models = bool(file.models or file.cells)
    names = [hardware.name for hardware in file.hardware]
    several = "each of several hardware budgets needs a name"
    return [
        (
            file.target is not None and (has_models or bool(file.engines)),
            "$.target",
            "`target` is an endpoint that is there already: it goes without models and cells, and "
            "without engines",
        ),
        (
            file.target is None and not has_models,
            "$",
            "nothing to measure: give models, cells, or a target with a url",
        ),
        (
            bool(file.engines) and not file.models,
            "$.engines",
            "engines are measured on `models`, and there are none",
        ),
        (
            AUTO in file.models and _is_not_of_auto(file),
            "$.models",
            "models 'auto' are rungs that a measurement chooses: they go without other models, "
            "cells, engines, a target, and with backends of this product alone",
        ),
        (
            file.workload is not None and bool(file.workloads),
            "$.workloads",
            "`workload` and `workloads`: give one of them",
        ),
        (
            file.slo is not None and bool(file.slos),
            "$.slos",
            "`slo` and `slos`: give one of them",
        ),
        (not names, "$.hardware", "hardware is empty: leave it out, or give at least one budget"),
        (len(names) > 1 and not all(names), "$.hardware", several),
    ]


def _is_not_of_auto(file: CampaignFile) -> bool:
    is_beside = len(file.models) > 1 or bool(file.cells or file.engines or file.target)
    return is_beside or not {*file.backends} <= {*BACKENDS, BEST}


def _values(file: CampaignFile) -> list[Rule]:
    policy = f"policy must be auto, gpu-only or cpu-only, got {file.server.policy!r}"
    return [
        *[
            _above_zero(name, getattr(hardware, name), "$.hardware")
            for hardware in file.hardware
            for name in ("cores", "threads", "memory_gib")
        ],
        *[
            _above_zero(name, getattr(file, name), f"$.{name}")
            for name in ("budget_seconds", "sample_seconds")
        ],
        (
            not file.wait_seconds >= 0,
            "$.wait_seconds",
            f"wait_seconds must be 0 or more, got {file.wait_seconds}",
        ),
        *[
            (value < 1, f"$.server.{name}", f"{name} must be at least 1, got {value}")
            for name in ("slots", "context_tokens")
            for value in [getattr(file.server, name)]
        ],
        _above_zero("workers", file.load.workers, "$.load.workers"),
        (file.server.policy not in POLICIES, "$.server.policy", policy),
        *_of_best(file),
    ]


def _of_best(file: CampaignFile) -> list[Rule]:
    """The best engine is one of the CPU's, and options are of one engine."""
    is_wanted = BEST in (*file.backends, *(cell.backend for cell in file.cells))
    server = file.server
    return [
        (
            is_wanted and server.policy == "gpu-only",
            "$.server.policy",
            f"backend {BEST!r} chooses among the CPU's engines, and the policy is 'gpu-only'",
        ),
        (
            is_wanted and bool(server.options),
            "$.server.options",
            f"options are of one engine, and backend {BEST!r} chooses among several",
        ),
    ]


def _engines(file: CampaignFile) -> list[Rule]:
    """Names of engines of others are names of files and of nothing else."""
    rules: list[Rule] = []
    taken = {*BACKENDS, BEST, "external"}
    for position, engine in enumerate(file.engines):
        place, name = f"$.engines[{position}]", engine.name
        is_plain = re.fullmatch(r"[A-Za-z0-9][\w.-]*", name) is not None
        rules.append((not is_plain, f"{place}.name", f"name {name!r} is no name of a file"))
        what = f"name {name!r} is that of another engine: give it one of its own"
        rules.append((name in taken, f"{place}.name", what))
        taken.add(name)
        rules += [(True, f"{place}.{key}", f"{key}: {what}") for key, what in wrong(engine)]
    return rules


def _above_zero(name: str, value: float | None, place: str) -> Rule:
    is_wrong = value is not None and not value > 0
    return is_wrong, place, f"{name} must be above 0, got {value}"


def _lengths(file: CampaignFile) -> list[Rule]:
    """Prompt and output must fit in the context of a server of ours."""
    context = file.server.context_tokens
    workloads = file.workloads or {"workload": file.workload or DEFAULT_WORKLOAD}
    rules = []
    for name, workload in workloads.items():
        prompt = workload.max_prompt_tokens or workload.prompt_tokens or 0
        output = workload.max_output_tokens or workload.output_tokens or 0
        is_wrong = bool(prompt and output and prompt + output > context and file.target is None)
        what = (
            f"{name}: prompts of {prompt} and outputs of {output} tokens do not fit in a context "
            f"of {context}: raise server.context_tokens or lower the workload's caps"
        )
        rules.append((is_wrong, "$.server.context_tokens", what))
    return rules

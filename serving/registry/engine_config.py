"""Before a model is served: what it is, where it will run, and the files of every engine of it.

prepared = prepare(ModelOptions(source="135m"), Machine())
prepared.placement, prepared.configs, prepared.tokenizer_path
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import cache as once
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec

from models.isolated import run_aside
from models.ladder import is_rung, rung
from models.manifest import Progress, read_manifest
from models.onnx_files import graphs
from models.resolve import ResolvedModel, resolve
from serving.backends.backend_interface import EngineConfig
from serving.backends.backend_table import (
    BACKENDS,
    DEFAULTS,
    backend_for,
    missing_backends,
    probe_backend,
    spec_of,
    weights_of,
)
from serving.backends.onnx.graph import weight_bytes
from serving.errors import Cause, Unsupported
from serving.hardware.cpu_topology import CoreSplit, parse_cores, physical_of, split_cores
from serving.hardware.gpus import GpuFacts, render_nodes
from serving.hardware.machine_facts import HardwareFacts, allowed_cores, hardware_facts
from serving.placement.fastest_backend import (
    EngineChoice,
    Question,
    choice_lines,
    fastest_backend,
)
from serving.placement.placement_policy import (
    Attempt,
    NoPlacement,
    Obstacles,
    Placement,
    PlacementRequest,
    Reason,
    narrowed,
    plan,
)
from serving.server_options import ModelOptions, Policy

# Nobody says what a server will be asked: the mean lengths of the workload chat, all slots busy.
USUAL_PROMPT_TOKENS, USUAL_OUTPUT_TOKENS = 1166.0, 214.0
# Options that a placement and an engine's configuration take as they are.
_PLACED = ("policy", "slots", "context_tokens", "kv_tokens", "kv_dtype", "check_memory")
_CONFIGURED = (
    *("kv_tokens", "kv_dtype", "prefill_tokens", "step_seconds_target", "prefix_reuse"),
    "check_memory",
)


class Prepared(msgspec.Struct, frozen=True, kw_only=True):
    """A model that can be loaded: the files of every engine that may run it are there.

    `request`: with backend, format and context decided, so that it is placed again as it was.
    """

    name: str
    model: ModelOptions
    request: PlacementRequest
    placement: Placement
    split: CoreSplit
    files: dict[str, ResolvedModel]  # by backend
    options: dict[str, dict[str, Any]]  # by backend

    @property
    def tokenizer_path(self) -> str:
        return next((one.tokenizer_path for one in self.files.values() if one.tokenizer_path), "")

    @property
    def configs(self) -> tuple[EngineConfig, ...]:
        """One for each attempt of its placement."""
        return self.configs_of(self.placement)

    def configs_of(self, placement: Placement) -> tuple[EngineConfig, ...]:
        """The engines of a placement of its backends, perhaps a later one on another GPU."""
        return tuple(
            EngineConfig(
                backend=one.backend,
                model_path=self.files[one.backend].path,
                model_name=self.name,
                weight_format=self.files[one.backend].weight_format,
                tokenizer_path=self.files[one.backend].tokenizer_path,
                device=one.device,
                device_id=one.device_id,
                device_vendor=one.vendor,
                slots=one.slots or self.model.slots,
                context_tokens=placement.context_tokens,
                threads=self.split.threads,
                cores=self.split.engine,
                nice=self.split.nice if one.device == "cpu" else 0,  # a GPU waits for its host
                quality_kl_nats=self.files[one.backend].quality_kl_nats,
                options=self.options[one.backend],
                **{name: getattr(self.model, name) for name in _CONFIGURED},
            )
            for one in placement.attempts
        )


class Machine:
    """What placing a model needs of this machine. `say` and `progress` tell a person."""

    def __init__(
        self,
        cache: str | None = None,
        api_cores: str = "",
        say: Callable[[str], None] = lambda line: None,
        progress: Progress = lambda what, fraction: None,
    ) -> None:
        self.cache = cache
        self.say = say
        self.progress = progress
        self.is_serving = False  # measuring engines would then disturb requests, and be disturbed
        self._api_cores = api_cores
        self._allowed = allowed_cores()
        self._probed = once(probe_backend)  # it takes seconds
        self.vendors: dict[str, str] = {}  # of the GPUs that a backend's build drives

    def facts(self) -> HardwareFacts:
        """As they are now: free memory changes. Cores are those from before this process took its
        share of them. Without an NVIDIA GPU, the one that a backend's build drives is listed."""
        facts = msgspec.structs.replace(hardware_facts(), allowed_cores=self._allowed)
        if facts.gpus or facts.gpu_cause != Cause.no_device or not render_nodes():
            return facts
        gpus = []
        for name in DEFAULTS["gpu"]:
            if name != "torch" or "rocm" in version("torch"):  # else it cannot, and takes seconds
                answer = self._probed(name)
                if answer.gpu and answer.gpu_vendor is not None:
                    gpus.append(GpuFacts(answer.gpu_note or "a GPU", answer.gpu_vendor))
        return msgspec.structs.replace(facts, gpus=tuple(gpus)) if gpus else facts

    def split(self, cores: str, threads: int | None) -> CoreSplit:
        """Cores of an engine with these options and of the HTTP process."""
        return split_cores(
            self._allowed,
            parse_cores(cores, "--cores"),
            parse_cores(self._api_cores, "--api-cores"),
            threads,
            physical_of(self._allowed),
        )

    def gpu_trouble(
        self, facts: HardwareFacts, policy: Policy, backend: str | None
    ) -> dict[str, tuple[Cause, str]]:
        """Backends that may be asked to use the GPU and cannot, by their probes in subprocesses."""
        troubles: dict[str, tuple[Cause, str]] = {}
        if not facts.gpus or policy is Policy.cpu_only:
            return troubles
        for name in DEFAULTS["gpu"] if backend is None else (backend,):
            if spec_of(name).probe is None:
                continue
            answer = self._probed(name)
            if answer.gpu_vendor is not None:
                self.vendors[name] = answer.gpu_vendor
            if not answer.gpu:
                cause = Cause(answer.gpu_cause) if answer.gpu_cause else Cause.backend_missing
                why = answer.gpu_note or answer.problem or "it does not say why"
                troubles[name] = cause, why
        return troubles


def prepare(model: ModelOptions, machine: Machine, facts: HardwareFacts | None = None) -> Prepared:
    """Find the model, decide where it runs, get its weights for every engine. May take minutes.

    Raises ModelError for a model that cannot be had, NoPlacement where it can run nowhere,
    ServingError for options that cannot be.
    """
    request = find_model(model, machine)
    facts = facts or machine.facts()
    placement = place(request, machine, facts)
    request = msgspec.structs.replace(request, context_tokens=placement.context_tokens)
    split = machine.split(model.cores, model.threads)
    if placement.device == "cpu":
        choice = best_for(model, request, split, machine, facts)
        if choice is not None:
            request = msgspec.structs.replace(
                request, backend=choice.backend, weight_format=choice.weight_format
            )
            placement = place(request, machine, facts)
            reason = Reason(None, "; ".join(line.strip() for line in choice_lines(choice)))
            placement = narrowed(placement, placement.attempts, reason)
    backends = [one.backend for one in placement.attempts]
    prepared = Prepared(
        name=model.name or request.model.name,
        model=model,
        request=request,
        placement=placement,
        split=split,
        options=options_by_backend(model.options, backends),  # before weights are made
        files={one.backend: _files_of(model, one, machine) for one in placement.attempts},
    )
    for backend, files in prepared.files.items():
        if not files.path:
            prepared.options[backend].setdefault("vocabulary", request.model.vocabulary)
    path = Path(prepared.tokenizer_path)
    is_ours = any(read_manifest(place) is not None for place in (path, path.parent))
    if not is_ours and request.model.name != "fake":
        # A stranger's tokenizer is tried in another process before it is loaded in this one.
        run_aside("models.tokenizer:rehearse", None, str(path))
    if any(one.synthetic and one.path for one in prepared.files.values()):
        machine.say(
            f"{request.model.name} has random weights: "
            "times and memory are those of the real model, the text is noise"
        )
    return prepared


def _files_of(model: ModelOptions, attempt: Attempt, machine: Machine) -> ResolvedModel:
    """The weights of an engine, made or fetched where they are not there."""
    kind, weight_format = weights_of(attempt.backend, attempt.weight_format)
    return resolve(
        model.source,
        kind=kind,
        weight_format=weight_format or None,
        cache=machine.cache,
        progress=machine.progress,
    )


def find_model(model: ModelOptions, machine: Machine) -> PlacementRequest:
    """What is to be placed: the model's shape and size, and the backend and format that follow from
    what it is. A rung's are decided when it is placed."""
    asked = {name: getattr(model, name) for name in _PLACED}
    if is_rung(model.source):
        spec = rung(model.source).spec
        return PlacementRequest(
            model=spec, backend=model.backend, weight_format=model.weight_format, **asked
        )
    backend, named = model.backend, BACKENDS.get(model.source)
    if backend is None and named is not None and not named.has_weights:
        backend = model.source
    backend = backend or backend_of_path(Path(model.source)) or DEFAULTS["cpu"][0]
    kind, weight_format = weights_of(backend, model.weight_format)
    files = resolve(
        model.source,
        kind=kind,
        weight_format=weight_format if model.weight_format else None,
        cache=machine.cache,
        progress=machine.progress,
    )
    path, size_bytes = Path(files.path), None
    if path.suffix == ".onnx":
        size_bytes = weight_bytes(path)
    elif files.path and path.is_file():
        size_bytes = path.stat().st_size
    return PlacementRequest(
        model=files.spec,
        backend=backend,
        weight_format=files.weight_format or None,
        weight_bytes=size_bytes,
        **asked,
    )


def backend_of_path(path: Path) -> str | None:
    """The backend that reads a local GGUF file or folder; None for anything else."""
    if path.suffix == ".gguf":
        return backend_for("gguf")
    if path.is_dir() and graphs(path):
        return backend_for("onnx")
    return backend_for("hf") if path.is_dir() and any(path.glob("*.safetensors")) else None


def place(request: PlacementRequest, machine: Machine, facts: HardwareFacts) -> Placement:
    """Where the model runs on this machine. Raises NoPlacement."""
    gpu = machine.gpu_trouble(facts, request.policy, request.backend)
    return plan(request, facts, Obstacles(missing_backends(), gpu, machine.vendors))


def best_for(
    model: ModelOptions,
    request: PlacementRequest,
    split: CoreSplit,
    machine: Machine,
    facts: HardwareFacts,
) -> EngineChoice | None:
    """The CPU's best engine for a rung whose backend is not named; None: it is not asked for."""
    is_open = model.backend is None and not model.options and is_rung(model.source)
    if not (model.calibration and is_open):
        return None
    question = Question(
        source=model.source,
        request=request,
        prompt_tokens=USUAL_PROMPT_TOKENS,
        output_tokens=USUAL_OUTPUT_TOKENS,
        threads=split.threads,
        cores=split.engine,
        formats=(model.weight_format,) if model.weight_format else (),
        cache=machine.cache,
        may_measure=not machine.is_serving,
    )
    try:
        return fastest_backend(question, facts, machine.say, machine.progress)
    except NoPlacement as problem:
        machine.say(f"no best engine, so the usual one: {problem}")
        return None


def options_by_backend(
    given: Mapping[str, Any], backends: Collection[str]
) -> dict[str, dict[str, Any]]:
    """Which of the options each engine gets: `torch.graphs` is torch's alone, `prefill_chunk` is of
    every engine that has one. Raises Unsupported for one that none has: an engine that is fallen
    back to must not find it out."""
    found: dict[str, dict[str, Any]] = {name: {} for name in backends}
    for key, value in given.items():
        owner, _, name = key.rpartition(".")
        known = {one: spec_of(one).options for one in found}
        takers = [
            one
            for one, names in known.items()
            if owner in ("", one) and (names is None or name in names)
        ]
        # A named owner that serves nowhere here is no mistake: its engine may on another machine.
        if not takers and not (owner in BACKENDS and owner not in found):
            told = "; ".join(f"{one} has {', '.join(names or ())}" for one, names in known.items())
            raise Unsupported(f"no engine here has the option {key!r}: {told}", key)
        for one in takers:
            found[one][name] = value
    return found

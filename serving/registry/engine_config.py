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

from models.ladder import is_rung, rung
from models.manifest import Progress, read_manifest
from models.resolve import ResolvedModel, is_gguf, resolve
from models.tokenizer import try_tokenizer
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
                model_path=files.path,
                model_name=self.name,
                weight_format=files.weight_format,
                tokenizer_path=files.tokenizer_path,
                device=one.device,
                device_id=one.device_id,
                device_vendor=one.vendor,
                slots=one.slots or self.model.slots,
                context_tokens=placement.context_tokens,
                threads=self.split.threads,
                cores=self.split.engine,
                nice=self.split.nice if one.device == "cpu" else 0,  # a GPU waits for its host
                quality_kl_nats=files.quality_kl_nats,
                options=self.options[one.backend],
                **{name: getattr(self.model, name) for name in _CONFIGURED},
            )
            for one in placement.attempts
            for files in (self.files[one.backend],)
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
        asked = parse_cores(cores, "--cores"), parse_cores(self._api_cores, "--api-cores")
        return split_cores(self._allowed, *asked, threads, physical_of(self._allowed))

    def obstacles(self, request: PlacementRequest, facts: HardwareFacts) -> Obstacles:
        """Backends that cannot run, or cannot use the GPU, by their probes in subprocesses."""
        troubles: dict[str, tuple[Cause, str]] = {}
        vendors: dict[str, str] = {}
        names = DEFAULTS["gpu"] if request.backend is None else (request.backend,)
        if not facts.gpus or request.policy is Policy.cpu_only:
            names = ()
        for name in names:
            if spec_of(name).probe is None:
                continue
            answer = self._probed(name)
            if answer.gpu_vendor is not None:
                vendors[name] = answer.gpu_vendor
            if not answer.gpu:
                cause = Cause(answer.gpu_cause) if answer.gpu_cause else Cause.backend_missing
                why = answer.gpu_note or answer.problem or "it does not say why"
                troubles[name] = cause, why
        return Obstacles(missing_backends(), troubles, vendors)

    def place(self, request: PlacementRequest, facts: HardwareFacts) -> Placement:
        """Where a model runs on this machine. Raises NoPlacement."""
        return plan(request, facts, self.obstacles(request, facts))

    def files_of(self, source: str, backend: str, weight_format: str | None) -> ResolvedModel:
        """A model's files for a backend, made or fetched where they are not there."""
        kind, spelt = weights_of(backend, weight_format)
        return resolve(
            source,
            kind=kind,
            weight_format=(spelt or None) if weight_format else None,
            cache=self.cache,
            progress=self.progress,
        )


def prepare(model: ModelOptions, machine: Machine, facts: HardwareFacts | None = None) -> Prepared:
    """Find the model, decide where it runs, get its weights for every engine. May take minutes.

    Raises ModelError for a model that cannot be had, NoPlacement where it can run nowhere,
    ServingError for options that cannot be.
    """
    request = find_model(model, machine)
    facts = facts or machine.facts()
    placement = machine.place(request, facts)
    request = msgspec.structs.replace(request, context_tokens=placement.context_tokens)
    split = machine.split(model.cores, model.threads)
    choice = best_for(model, request, split, machine, facts) if placement.device == "cpu" else None
    if choice is not None:
        request = msgspec.structs.replace(
            request, backend=choice.backend, weight_format=choice.weight_format
        )
        placement = machine.place(request, facts)
        reason = Reason(None, "; ".join(line.strip() for line in choice_lines(choice)))
        placement = narrowed(placement, placement.attempts, reason)
    options = options_by_backend(model.options, [one.backend for one in placement.attempts])
    prepared = Prepared(
        name=model.name or request.model.name,
        model=model,
        request=request,
        placement=placement,
        split=split,
        options=options,  # checked before weights are made
        files={
            one.backend: machine.files_of(model.source, one.backend, one.weight_format)
            for one in placement.attempts
        },
    )
    for backend, files in prepared.files.items():
        if not files.path:
            options[backend].setdefault("vocabulary", request.model.vocabulary)
    path = Path(prepared.tokenizer_path)
    is_ours = any(read_manifest(place) is not None for place in (path, path.parent))
    if not is_ours and request.model.name != "fake":
        # A stranger's tokenizer is tried in another process before it is loaded in this one.
        try_tokenizer(path)
    if any(one.synthetic and one.path for one in prepared.files.values()):
        machine.say(
            f"{request.model.name} has random weights: "
            "times and memory are those of the real model, the text is noise"
        )
    return prepared


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
    backend = backend or _usual_backend(model, machine)
    files = machine.files_of(model.source, backend, model.weight_format)
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


def _usual_backend(model: ModelOptions, machine: Machine) -> str:
    """The backend of a model's files: of those on the hub what a GPU, or this CPU, does best."""
    if is_gguf(model.source):
        return backend_for("gguf")
    found = backend_of_path(Path(model.source))
    if found is None:
        is_gpu = model.policy is not Policy.cpu_only and machine.facts().gpus
        found = backend_for("hf" if is_gpu else "onnx")
    return found


def backend_of_path(path: Path) -> str | None:
    """The backend that reads a local GGUF file or folder; None for anything else."""
    if path.suffix == ".gguf":
        return backend_for("gguf")
    if (path / "model.onnx").is_file():
        return backend_for("onnx")
    return backend_for("hf") if path.is_dir() and any(path.glob("*.safetensors")) else None


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
    """Which of the options each engine gets: those that it has. Raises Unsupported for one that
    none has: an engine that is fallen back to must not find it out."""
    known = {name: spec_of(name).options for name in backends}
    found = {
        backend: {key: value for key, value in given.items() if names is None or key in names}
        for backend, names in known.items()
    }
    for key in given:
        if not any(key in options for options in found.values()):
            told = "; ".join(
                f"{one} has {', '.join(names or ('none',))}" for one, names in known.items()
            )
            raise Unsupported(f"no engine here has the option {key!r}: {told}", key)
    return found

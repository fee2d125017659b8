"""Before a model is served: what it is, where it will run, and the files of every engine of it.

prepared = prepare(ModelOptions(source="135m"), Machine())
prepared.placement, prepared.configs, prepared.tokenizer_path
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec

from models.isolated import run_aside
from models.ladder import is_rung, rung
from models.manifest import Progress, read_manifest
from models.onnx_files import graphs
from models.resolve import resolve
from models.spec import ModelSpec
from serving.backends.backend_interface import EngineConfig
from serving.backends.backend_table import (
    BACKENDS,
    DEFAULTS,
    BackendProbe,
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
# Options that an engine's configuration takes as they are.
_OF_AN_ENGINE = (
    *("kv_tokens", "kv_dtype", "prefill_tokens", "step_seconds_target", "prefix_reuse"),
    "check_memory",
)


class FoundModel(msgspec.Struct, frozen=True, kw_only=True):
    """A model that exists: options with backend and format decided, shape, and file size in bytes.

    `size_bytes` is None where the weights are not one file yet.
    """

    model: ModelOptions
    spec: ModelSpec
    size_bytes: int | None
    file: str = ""  # the GGUF file, where it is one

    def with_engine(self, backend: str, weight_format: str) -> FoundModel:
        """The model with its engine decided."""
        model = msgspec.structs.replace(self.model, backend=backend, weight_format=weight_format)
        return msgspec.structs.replace(self, model=model)


class Prepared(FoundModel, frozen=True, kw_only=True):
    """A model that can be loaded: its files are there. `configs`: one for each attempt."""

    name: str
    placement: Placement
    configs: tuple[EngineConfig, ...]
    tokenizer_path: str
    note: str

    def configs_of(self, placement: Placement) -> tuple[EngineConfig, ...]:
        """The configurations of a later placement, whose GPU may be another one; attempts that had
        none are left out."""
        known = {(config.backend, config.device): config for config in self.configs}
        found = ((known.get((one.backend, one.device)), one) for one in placement.attempts)
        return tuple(
            msgspec.structs.replace(
                config,
                device_id=attempt.device_id,
                device_vendor=attempt.vendor,
                slots=attempt.slots or self.model.slots,
            )
            for config, attempt in found
            if config is not None
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
        self._probes: dict[str, BackendProbe] = {}
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
        if not facts.gpus or policy is Policy.cpu_only:
            return {}
        troubles: dict[str, tuple[Cause, str]] = {}
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

    def _probed(self, name: str) -> BackendProbe:
        """What the backend's library says, asked once: it takes seconds."""
        if name not in self._probes:
            self._probes[name] = probe_backend(name)
        return self._probes[name]


def prepare(model: ModelOptions, machine: Machine, facts: HardwareFacts | None = None) -> Prepared:
    """Find the model, decide where it runs, get its weights for every engine. May take minutes.

    Raises ModelError for a model that cannot be had, NoPlacement where it can run nowhere,
    ServingError for options that cannot be.
    """
    found = find_model(model, machine)
    spec = found.spec
    facts = facts or machine.facts()
    placement = place(found, machine, facts)
    # Placed again, it keeps the context that it has now.
    model = msgspec.structs.replace(found.model, context_tokens=placement.context_tokens)
    found = msgspec.structs.replace(found, model=model)
    split = machine.split(model.cores, model.threads)
    choice = best_for(found, placement, split, machine, facts)
    if choice is not None:
        found = found.with_engine(choice.backend, choice.weight_format)
        reason = Reason(None, "; ".join(line.strip() for line in choice_lines(choice)))
        placement = place(found, machine, facts)
        placement = narrowed(placement, placement.attempts, reason)
    configs = _configs(found, placement, split, machine)
    tokenizer_path = next((one.tokenizer_path for one in configs if one.tokenizer_path), "")
    if spec.name != "fake" and not _made_here(Path(tokenizer_path)):
        # A stranger's tokenizer is tried in another process before it is loaded in this one.
        run_aside("models.tokenizer:rehearse", None, tokenizer_path)
    return Prepared(
        name=found.model.name or spec.name,
        model=found.model,
        spec=spec,
        size_bytes=found.size_bytes,
        file=found.file,
        placement=placement,
        configs=configs,
        tokenizer_path=tokenizer_path,
        note=split.note,
    )


def best_for(
    found: FoundModel,
    placement: Placement,
    split: CoreSplit,
    machine: Machine,
    facts: HardwareFacts,
) -> EngineChoice | None:
    """The CPU's best engine for a rung whose backend is not named; None: it is not asked for."""
    model = found.model
    is_open = model.backend is None and not model.options and is_rung(model.source)
    if not (model.calibration and is_open and placement.device == "cpu"):
        return None
    question = Question(
        source=model.source,
        request=_request(found),
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


def _configs(
    found: FoundModel, placement: Placement, split: CoreSplit, machine: Machine
) -> tuple[EngineConfig, ...]:
    """The configuration of each engine that may run the model, its weights made or fetched."""
    model, spec = found.model, found.spec
    configs: list[EngineConfig] = []
    options = options_by_backend(model.options, [one.backend for one in placement.attempts])
    for attempt in placement.attempts:
        kind, weight_format = weights_of(attempt.backend, attempt.weight_format)
        files = resolve(
            model.source,
            kind=kind,
            weight_format=weight_format or None,
            cache=machine.cache,
            progress=machine.progress,
        )
        known = {"vocabulary": spec.vocabulary} if kind == "none" else {}
        configs.append(
            EngineConfig(
                backend=attempt.backend,
                model_path=files.path,
                model_name=model.name or spec.name,
                weight_format=files.weight_format,
                tokenizer_path=files.tokenizer_path,
                device=attempt.device,
                device_id=attempt.device_id,
                device_vendor=attempt.vendor,
                slots=attempt.slots or model.slots,
                context_tokens=placement.context_tokens,
                threads=split.threads,
                cores=split.engine,
                nice=split.nice if attempt.device == "cpu" else 0,  # a GPU waits for its host
                quality_kl_nats=files.quality_kl_nats,
                options=known | options[attempt.backend],
                **{name: getattr(model, name) for name in _OF_AN_ENGINE},
            )
        )
        if files.synthetic and kind != "none":
            machine.say(
                f"{spec.name} has random weights: "
                "times and memory are those of the real model, the text is noise"
            )
    return tuple(configs)


def options_by_backend(
    given: Mapping[str, Any], backends: Collection[str]
) -> dict[str, dict[str, Any]]:
    """Which of the options each engine gets: `torch.margin` is torch's alone, `prefill_chunk` is of
    every engine that has one. Raises Unsupported for one that none has: an engine that is fallen
    back to must not find it out."""
    found: dict[str, dict[str, Any]] = {name: {} for name in backends}
    for key, value in given.items():
        owner, _, name = key.rpartition(".")
        takers = [
            one
            for one in found
            if owner in ("", one) and ((known := spec_of(one).options) is None or name in known)
        ]
        # A named owner that serves nowhere here is no mistake: its engine may on another machine.
        if not takers and not (owner in BACKENDS and owner not in found):
            known_to = {one: ", ".join(spec_of(one).options or ()) for one in found}
            told = "; ".join(f"{one} has {names}" for one, names in known_to.items())
            raise Unsupported(f"no engine here has the option {key!r}: {told}", key)
        for one in takers:
            found[one][name] = value
    return found


def _made_here(path: Path) -> bool:
    """Whether this project wrote the file or folder, so that its tokenizer is ours."""
    return any(read_manifest(place) is not None for place in (path, path.parent))


def place(
    found: FoundModel, machine: Machine, facts: HardwareFacts, check_memory: bool | None = None
) -> Placement:
    """Where the model runs. `check_memory`: None as its options say. Raises NoPlacement."""
    model = found.model
    request = _request(found)
    if check_memory is not None:
        request = msgspec.structs.replace(request, check_memory=check_memory)
    gpu = machine.gpu_trouble(facts, model.policy, model.backend)
    return plan(request, facts, Obstacles(missing_backends(), gpu, machine.vendors))


def _request(found: FoundModel) -> PlacementRequest:
    model = found.model
    return PlacementRequest(
        model=found.spec,
        policy=model.policy,
        backend=model.backend,
        weight_format=model.weight_format,
        slots=model.slots,
        context_tokens=model.context_tokens,
        kv_tokens=model.kv_tokens,
        kv_dtype=model.kv_dtype,
        weight_bytes=found.size_bytes,
        file=found.file,
        check_memory=model.check_memory,
    )


def find_model(model: ModelOptions, machine: Machine) -> FoundModel:
    """Shape and size of a model, and the backend and format that follow from what it is."""
    if is_rung(model.source):
        return FoundModel(model=model, spec=rung(model.source).spec, size_bytes=None)
    backend = model.backend or _backend_of(model.source)
    kind, weight_format = weights_of(backend, model.weight_format)
    files = resolve(
        model.source,
        kind=kind,
        weight_format=weight_format if model.weight_format else None,
        cache=machine.cache,
        progress=machine.progress,
    )
    path = Path(files.path)
    size = None
    if path.suffix == ".onnx":
        size = weight_bytes(path)
    elif files.path and path.is_file():
        size = path.stat().st_size
    decided = msgspec.structs.replace(
        model, backend=backend, weight_format=files.weight_format or None
    )
    file = files.path if path.suffix == ".gguf" else ""
    return FoundModel(model=decided, spec=files.spec, size_bytes=size, file=file)


def _backend_of(source: str) -> str:
    """The backend that a model's name asks for where the user names none."""
    named = BACKENDS.get(source)
    if named is not None and not named.has_weights:
        return source
    return backend_of_path(Path(source)) or DEFAULTS["cpu"][0]


def backend_of_path(path: Path) -> str | None:
    """The backend that reads a local GGUF file or folder; None for anything else."""
    if path.suffix == ".gguf":
        return backend_for("gguf")
    if path.is_dir():
        if graphs(path):
            return backend_for("onnx")
        if any(path.glob("*.safetensors")):
            return backend_for("hf")
    return None

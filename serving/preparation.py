"""Before a model is served: what was asked for, where it will run, and the files that every engine that may run it needs.

prepared = prepare(ModelOptions(source="135m"), Machine.look(options))
prepared.placement, prepared.configs, prepared.tokenizer_path
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from models.aside import run_aside
from models.hub import resolve
from models.ladder import is_rung, rung
from models.manifest import read_manifest
from models.onnx_files import graphs
from models.spec import ModelSpec
from serving.backends.base import EngineConfig
from serving.backends.onnx_graph import weight_bytes
from serving.cores import CoreSplit, parse_cores, physical_of, split_cores
from serving.hardware import HardwareFacts, allowed_cores, hardware_facts
from serving.narrator import Narrator
from serving.options import ModelOptions
from serving.placement import Cause, Placement, Policy, plan
from serving.probe import BACKEND_PACKAGES, probe_backend


class Prepared(msgspec.Struct, frozen=True, kw_only=True):
    """A model that can be loaded: its files are there. `configs` are in the order of the placement's attempts."""

    name: str
    model: ModelOptions
    spec: ModelSpec
    size_bytes: int | None
    placement: Placement
    configs: tuple[EngineConfig, ...]
    tokenizer_path: str
    note: str

    def configs_of(self, placement: Placement) -> tuple[EngineConfig, ...]:
        """The configurations for a later placement of the same model; attempts that had none at the start are left out."""
        known = {(config.backend, config.device): config for config in self.configs}
        return tuple(known[a.backend, a.device] for a in placement.attempts if (a.backend, a.device) in known)


class Machine:
    """What placing a model needs to know of this machine and process; asked anew where it changes."""

    def __init__(self, cache: str | None, api_cores: str, narrator: Narrator) -> None:
        self.cache, self.narrator = cache, narrator
        self._api_cores = api_cores
        self._allowed = allowed_cores()
        self._trouble: dict[str, tuple[Cause, str] | None] = {}  # backend -> why it cannot use the GPU: asked once, since it takes seconds

    def facts(self) -> HardwareFacts:
        """As they are now: free memory changes."""
        return hardware_facts()

    def split(self, model: ModelOptions) -> CoreSplit:
        """Cores of this model's engine and of the HTTP process."""
        return split_cores(self._allowed, parse_cores(model.cores), parse_cores(self._api_cores), model.threads, physical_of(self._allowed))

    def gpu_trouble(self, facts: HardwareFacts, policy: Policy, backend: str | None) -> dict[str, tuple[Cause, str]]:
        """Ask the backends that may drive the GPU, in subprocesses, whether they can; empty where there is none to drive."""
        if not facts.gpus or policy is Policy.cpu_only:
            return {}
        names = [name for name in (("torch", "llama_cpp") if backend is None else (backend,)) if name in BACKEND_PACKAGES]
        for name in names:
            if name not in self._trouble:
                answer = probe_backend(name)
                cause = Cause(answer.gpu_cause) if answer.gpu_cause else Cause.backend_missing
                why = answer.gpu_note or answer.problem or "it does not say why"
                self._trouble[name] = None if answer.gpu else (cause, why)
        return {name: found for name in names if (found := self._trouble[name]) is not None}


def prepare(model: ModelOptions, machine: Machine, facts: HardwareFacts | None = None) -> Prepared:
    """Find the model, decide where it runs, and get its weights for every engine that may run it. May take minutes.

    Raises ModelError for a model that cannot be had, NoPlacement where it can run nowhere, ServingError for options that cannot be.
    """
    narrator, cache = machine.narrator, machine.cache
    spec, size, backend, weight_format = _look_at(model, machine)
    model = msgspec.structs.replace(model, backend=backend, weight_format=weight_format)
    placement = place(model, spec, size, machine, facts or machine.facts())
    split = machine.split(model)
    name = model.name or spec.name
    configs: list[EngineConfig] = []
    tokenizer_path = ""
    for attempt in placement.attempts:
        wanted = None if attempt.backend == "fake" else attempt.weight_format
        found = resolve(model.source, backend=attempt.backend, weight_format=wanted, cache=cache, progress=narrator.progress)
        extra = {"vocabulary": spec.vocabulary, **model.options} if attempt.backend == "fake" else model.options
        tokenizer_path = tokenizer_path or found.tokenizer_path
        configs.append(
            EngineConfig(
                backend=attempt.backend,
                model_path=found.path,
                model_name=name,
                weight_format=found.weight_format,
                tokenizer_path=found.tokenizer_path,
                device=attempt.device,
                slots=model.slots,
                context_tokens=placement.context_tokens,
                kv_tokens=model.kv_tokens,
                kv_dtype=model.kv_dtype,
                threads=split.threads,
                cores=split.engine,
                prefill_tokens=model.prefill_tokens,
                step_seconds_target=model.step_seconds_target,
                prefix_reuse=model.prefix_reuse,
                quality_kl_nats=found.quality_kl_nats,
                options=extra,
            )
        )
        if found.synthetic and attempt.backend != "fake":
            narrator.say(f"{spec.name} has random weights: times and memory are those of the real model, the text is noise")
    if spec.name != "fake" and not _made_here(Path(tokenizer_path)):
        run_aside("models.tokenizer:rehearse", None, tokenizer_path)  # here, in the server's own process, it is loaded after this
    return Prepared(
        name=name,
        model=model,
        spec=spec,
        size_bytes=size,
        placement=placement,
        configs=tuple(configs),
        tokenizer_path=tokenizer_path,
        note=split.note,
    )


def _made_here(path: Path) -> bool:
    """Whether this project wrote the file or folder, so that its tokenizer is ours and not a stranger's."""
    return any(read_manifest(place) is not None for place in (path, path.parent))


def place(
    model: ModelOptions, spec: ModelSpec, size_bytes: int | None, machine: Machine, facts: HardwareFacts, check_memory: bool | None = None
) -> Placement:
    """serving.placement.plan for these options. `check_memory`: None as the options say. Raises NoPlacement."""
    return plan(
        spec,
        facts,
        model.policy,
        backend=model.backend,
        weight_format=model.weight_format,
        slots=model.slots,
        context_tokens=model.context_tokens,
        kv_tokens=model.kv_tokens,
        kv_dtype=model.kv_dtype,
        weight_bytes=size_bytes,
        missing=missing_backends(),
        gpu_trouble=machine.gpu_trouble(facts, model.policy, model.backend),
        check_memory=model.check_memory if check_memory is None else check_memory,
    )


def _look_at(options: ModelOptions, machine: Machine) -> tuple[ModelSpec, int | None, str | None, str | None]:
    """The model's shape, its file's size where there is one file, and the backend and format that follow from what it is."""
    if is_rung(options.source):
        return rung(options.source).spec, None, options.backend, options.weight_format
    backend = options.backend or ("fake" if options.source == "fake" else backend_of_path(Path(options.source)) or "llama_cpp")
    found = resolve(
        options.source, backend=backend, weight_format=options.weight_format, cache=machine.cache, progress=machine.narrator.progress
    )
    path = Path(found.path)
    size = weight_bytes(path) if path.suffix == ".onnx" else path.stat().st_size if found.path and path.is_file() else None
    return found.spec, size, backend, found.weight_format or None


def backend_of_path(path: Path) -> str | None:
    """The backend that a local model asks for: llama_cpp for a GGUF file, onnx or torch for a folder; None for anything else."""
    if path.suffix == ".gguf":
        return "llama_cpp"
    if path.is_dir():
        if graphs(path):
            return "onnx"
        if any(path.glob("*.safetensors")):
            return "torch"
    return None


def missing_backends() -> dict[str, str]:
    """Backends whose package is not installed -> what to do; found without importing any."""
    from importlib.util import find_spec

    return {
        name: f"its package {package} is not installed (pip install 'llm-crossover[{name.replace('_', '-')}]')"
        for name, package in BACKEND_PACKAGES.items()
        if find_spec(package) is None
    }

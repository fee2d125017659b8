"""Before a model is served: what was asked for, where it will run, and the files that every engine that may run it needs."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import msgspec

from models.hub import resolve
from models.ladder import is_rung, rung
from models.spec import ModelSpec
from serving.backends.base import EngineConfig
from serving.cores import CoreSplit
from serving.errors import ServingError
from serving.hardware import HardwareFacts
from serving.narrator import Narrator
from serving.placement import Cause, Placement, Policy, plan
from serving.probe import BACKEND_PACKAGES, probe_backend


class ServeOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What `crossover serve` was asked for; its help says what each option means."""

    model: str
    backend: str | None = None
    weight_format: str | None = None
    policy: Policy = Policy.auto
    host: str = "127.0.0.1"
    port: int = 8000
    threads: int | None = None
    cores: str = ""
    api_cores: str = ""
    slots: int = 16
    context_tokens: int = 2048
    kv_tokens: int | None = None
    kv_dtype: str = "fp16"
    prefill_tokens: int = 256
    prefix_reuse: bool = True
    cache: str | None = None
    served_name: str | None = None
    api_key_env: str | None = None
    api_key_file: str | None = None
    options: tuple[str, ...] = ()
    most_waiting: int = 256
    longest_wait_seconds: float = 30.0
    health_timeout_seconds: float = 30.0
    drain_seconds: float = 60.0
    ready_file: str | None = None
    check_memory: bool = True
    tls_certificate: str | None = None
    tls_key: str | None = None
    log_json: bool = False
    log_requests: bool = False


def prepare(
    options: ServeOptions, engine_options: dict[str, Any], facts: HardwareFacts, split: CoreSplit, narrator: Narrator
) -> tuple[Placement, list[EngineConfig], str]:
    """Find the model, decide where it runs, and get its weights for every engine that may run it. Returns the tokenizer's path last."""
    spec, size, backend, weight_format = _look_at(options, narrator)
    placement = plan(
        spec,
        facts,
        options.policy,
        backend=backend,
        weight_format=weight_format,
        slots=options.slots,
        context_tokens=options.context_tokens,
        kv_tokens=options.kv_tokens,
        kv_dtype=options.kv_dtype,
        weight_bytes=size,
        missing=missing_backends(),
        gpu_trouble=_gpu_trouble(facts, options, backend),
        check_memory=options.check_memory,
    )
    configs: list[EngineConfig] = []
    tokenizer_path = ""
    for attempt in placement.attempts:
        wanted = None if attempt.backend == "fake" else attempt.weight_format
        found = resolve(options.model, backend=attempt.backend, weight_format=wanted, cache=options.cache, progress=narrator.progress)
        extra = {"vocabulary": spec.vocabulary, **engine_options} if attempt.backend == "fake" else engine_options
        tokenizer_path = tokenizer_path or found.tokenizer_path
        configs.append(
            EngineConfig(
                backend=attempt.backend,
                model_path=found.path,
                model_name=options.served_name or spec.name,
                weight_format=found.weight_format,
                tokenizer_path=found.tokenizer_path,
                device=attempt.device,
                slots=options.slots,
                context_tokens=placement.context_tokens,
                kv_tokens=options.kv_tokens,
                kv_dtype=options.kv_dtype,
                threads=split.threads,
                cores=split.engine,
                prefill_tokens=options.prefill_tokens,
                prefix_reuse=options.prefix_reuse,
                options=extra,
            )
        )
        if found.synthetic and attempt.backend != "fake":
            narrator.say(f"{spec.name} has random weights: times and memory are those of the real model, the text is noise")
    return placement, configs, tokenizer_path


def _look_at(options: ServeOptions, narrator: Narrator) -> tuple[ModelSpec, int | None, str | None, str | None]:
    """The model's shape, its file's size where there is one file, and the backend and format that follow from what it is."""
    if is_rung(options.model):
        return rung(options.model).spec, None, options.backend, options.weight_format
    backend = options.backend or ("fake" if options.model == "fake" else backend_of_path(Path(options.model)) or "llama_cpp")
    found = resolve(options.model, backend=backend, weight_format=options.weight_format, cache=options.cache, progress=narrator.progress)
    path = Path(found.path)
    size = path.stat().st_size if found.path and path.is_file() else None
    return found.spec, size, backend, found.weight_format or None


def backend_of_path(path: Path) -> str | None:
    """The backend that a local model asks for: llama_cpp for a GGUF file, onnx or torch for a folder; None for anything else."""
    if path.suffix == ".gguf":
        return "llama_cpp"
    if path.is_dir():
        if any(path.glob("*.onnx")):
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


def _gpu_trouble(facts: HardwareFacts, options: ServeOptions, backend: str | None) -> dict[str, tuple[Cause, str]]:
    """Ask the backends that may drive the GPU, in subprocesses, whether they can; empty where there is none to drive."""
    if not facts.gpus or options.policy is Policy.cpu_only:
        return {}
    trouble: dict[str, tuple[Cause, str]] = {}
    for name in ("torch", "llama_cpp") if backend is None else (backend,):
        if name not in BACKEND_PACKAGES:
            continue
        answer = probe_backend(name)
        if not answer.gpu:
            cause = Cause(answer.gpu_cause) if answer.gpu_cause else Cause.backend_missing
            trouble[name] = (cause, answer.gpu_note or answer.problem or "it does not say why")
    return trouble


def check_files(options: ServeOptions) -> None:
    """Find out now, not after a load, that a file cannot be read or written. Raises ServingError."""
    if (options.tls_certificate is None) != (options.tls_key is None):
        raise ServingError("--tls-certificate and --tls-key belong together; one of them is missing")
    for name, file in (("--tls-certificate", options.tls_certificate), ("--tls-key", options.tls_key)):
        if file is not None and not os.access(file, os.R_OK):
            raise ServingError(f"{name} {file}: there is no such file, or it cannot be read")
    if options.ready_file is not None:
        folder = Path(options.ready_file).absolute().parent
        if not os.access(folder, os.W_OK):
            raise ServingError(f"--ready-file {options.ready_file}: its folder does not exist or cannot be written to")


def parse_options(pairs: tuple[str, ...]) -> dict[str, Any]:
    """("step_seconds=0.01", "mlock=true") -> {"step_seconds": 0.01, "mlock": True}: values are JSON where they can be, else text."""
    options: dict[str, Any] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key.strip():
            raise ServingError(f"--option {pair!r} is not of the form key=value")
        if key in options:
            raise ServingError(f"--option {key} is given twice")
        try:
            options[key] = json.loads(value)
        except ValueError:
            options[key] = value
    return options


def read_api_key(variable: str | None, file: str | None) -> str | None:
    """The key from an environment variable or a file, never from the command line, which every process can read."""
    if variable and file:
        raise ServingError("--api-key-env and --api-key-file exclude each other")
    if variable:
        key = os.environ.get(variable, "").strip()
        if not key:
            raise ServingError(f"--api-key-env names {variable}, which is not set or empty")
        return key
    if file:
        try:
            key = Path(file).read_text().strip()
        except (OSError, UnicodeDecodeError) as problem:
            raise ServingError(f"--api-key-file {file}: {getattr(problem, 'strerror', None) or problem}") from problem
        if not key:
            raise ServingError(f"--api-key-file {file} is empty")
        return key
    return None

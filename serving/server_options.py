"""Options of a server and of its models: the only place that names and bounds them.

Three things are generated from these structs and their texts in serving/options.toml: the command
line of `crossover serve`, the models file (`serve --models-file`), and the keys of a campaign's
[server] table.

    [[model]]
    source = "135m"               # a ladder model, a GGUF file, a folder or a hub id
    name = "small"                # the name that requests use
    policy = "cpu-only"
    load = "demand"               # load on the first request, not when the server starts

An entry that leaves out a key uses the value from the command line.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from crossover.serving.capacity.scheduler_settings import DEFAULT_SETTINGS, RequestedSettings
from crossover.serving.errors import ServingError
from crossover.serving.faults import converted
from crossover.serving.option_help import (
    Count,
    Port,
    Positive,
    Seconds,
    flags_of,
    parse_bytes,
)
from crossover.serving.toml_files import read_toml

NO_PROMPT_CACHE = "0"


class Policy(StrEnum):
    """Which devices may run a model: the GPU with the CPU as fallback, or only one of the two."""

    auto = "auto"
    gpu_only = "gpu-only"
    cpu_only = "cpu-only"


class EngineOptions(RequestedSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the engine of a model runs, whether a user or a campaign starts it."""

    threads: Count | None = None
    prefix_reuse: bool = True
    prompt_cache: str | None = None
    options: dict[str, Any] = {}
    check_memory: bool = True
    standby: Literal["cold", "warm"] = "cold"

    @property
    def are_engines_open(self) -> bool:
        """Whether the number of engines is chosen. A number of threads is set for one engine, and
        several have no standby."""
        return self.engines is None and self.threads is None and self.standby == "cold"

    @property
    def prompt_cache_bytes(self) -> int | None:
        """The size of the prompt cache; 0: there is none; None: placement decides. Raises
        ServingError."""
        if self.prompt_cache is None:
            return None
        if self.prompt_cache == NO_PROMPT_CACHE:
            return 0
        return parse_bytes(self.prompt_cache, "--prompt-cache")


class SharedOptions(EngineOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a model runs. On the command line for all models, in a models file for one of them."""

    backend: str | None = None
    weight_format: str | None = None
    calibration: bool = True
    policy: Policy = Policy.auto
    cores: str = ""
    bridge: bool = True
    idle_unload_seconds: Positive | None = None
    sampling_defaults: Literal["model", "openai"] = "model"


class ModelOptions(SharedOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One model: a MODEL argument of the command line, or a [[model]] table of a models file."""

    source: Annotated[str, Meta(min_length=1)]
    # The name that requests use; None: the model's own name.
    name: Annotated[str, Meta(min_length=1, max_length=200)] | None = None
    load: Literal["start", "demand"] = "start"


class ServeOptions(SharedOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The command line of `crossover serve`."""

    models: tuple[str, ...] = ()
    models_file: str | None = None
    on: Literal["ray"] | None = None
    replicas: Count = 1
    memory_limit: str | None = None
    admin_key_env: str | None = None
    host: str = "127.0.0.1"
    port: Port = 8000
    served_name: str | None = None
    api_key_env: str | None = None
    open_metrics: bool = False
    require_cache_salt: bool = False
    cors_origin: tuple[str, ...] = ()
    ready_file: str | None = None
    api_cores: str = ""
    cache: str | None = None
    max_waiting: Count = 256
    max_wait_seconds: Seconds = 30.0
    ttft_slo_seconds: Positive | None = None
    drain_seconds: Seconds = 60.0


def arguments(values: Mapping[str, Any]) -> list[str]:
    """Return the command line for these fields of ServeOptions; None means the default."""
    flags = flags_of(ServeOptions)
    command_line: list[str] = []
    for name, value in values.items():
        flag = flags[name]
        if isinstance(value, bool):
            command_line.append(flag if value else flag.replace("--", "--no-", 1))
        elif isinstance(value, dict):
            for key, item in value.items():
                command_line += [flag, f"{key}={json.dumps(item)}"]
        elif isinstance(value, tuple):
            for item in value:
                command_line += [flag, str(item)]
        elif value is not None:
            command_line += [flag, str(value)]
    return command_line


def models_of(options: ServeOptions) -> tuple[ModelOptions, ...]:
    """Return the models of a server: those of the command line, then those of the models file.

    Raises ServingError.
    """
    shared = {name: getattr(options, name) for name in SharedOptions.__struct_fields__}
    models = [model_options({"source": source}, shared, "MODEL") for source in options.models]
    if options.models_file is not None:
        where = f"--models-file {options.models_file}"
        for number, entry in enumerate(_entries(options.models_file, where), 1):
            models.append(model_options(entry, shared, f"{where}, model {number}"))
    if not models:
        raise ServingError(
            "There is no model to serve. Name one (135m, ./model.gguf, ...) or give --models-file."
        )
    if options.served_name is not None:
        if len(models) > 1:
            raise ServingError(
                f"--served-name can name only one model, but {len(models)} are served. "
                "Name each of them in a --models-file instead."
            )
        own_options = msgspec.structs.asdict(models[0])
        models = [model_options({"name": options.served_name}, own_options, "--served-name")]
    if len(models) > 1:
        # On a GPU, the default is as many slots as fit, so that the first model would take all of
        # its memory. Several models share it, so each gets the CPU's default.
        slots = DEFAULT_SETTINGS["cpu"].slots
        models = [msgspec.structs.replace(model, slots=model.slots or slots) for model in models]
    if len(models) > 1 or options.memory_limit is not None:
        # A prompt cache or a second engine that nobody asked for must not displace another model.
        models = [
            msgspec.structs.replace(
                model,
                prompt_cache=model.prompt_cache or NO_PROMPT_CACHE,
                engines=model.engines or 1,
            )
            for model in models
        ]
    return tuple(models)


def _entries(file: str, where: str) -> list[dict[str, Any]]:
    """Return the [[model]] tables of a models file. Raises ServingError, which begins with
    `where`."""
    try:
        tables, _ = read_toml(Path(file), ServingError)
    except ServingError as problem:
        raise ServingError(f"--models-file {problem}") from problem
    return converted(tables, _ModelsFile, ServingError, f"{where}: ").model


class _ModelsFile(msgspec.Struct, forbid_unknown_fields=True):
    model: Annotated[list[dict[str, Any]], Meta(min_length=1)]


def model_options(own: Mapping[str, Any], shared: Mapping[str, Any], where: str) -> ModelOptions:
    """Return one model's options: the shared ones, overridden by its own. Raises ServingError,
    which begins with `where`."""
    return converted({**shared, **own}, ModelOptions, ServingError, f"{where}: ")

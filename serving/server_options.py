"""Options of a server and of its models: the only place that names, bounds and explains them.

Three things are generated from these structs: the command line of `crossover serve`, the models
file (`serve --models-file`), and the keys of a campaign's [server] table.

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
    ENGINE,
    Count,
    Port,
    Positive,
    Seconds,
    flags_of,
    option,
)
from crossover.serving.toml_files import read_toml

# Panels of the help page.
QUEUE, HTTP = "Queue and faults", "HTTP"
MACHINE, SEVERAL = "Machine", "Several models"


class Policy(StrEnum):
    """Which devices may run a model: the GPU with the CPU as fallback, or only one of the two."""

    auto = "auto"
    gpu_only = "gpu-only"
    cpu_only = "cpu-only"


class SharedOptions(RequestedSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a model runs. On the command line for all models, in a models file for one of them."""

    backend: Annotated[
        str | None,
        option(
            ENGINE,
            "Engine that runs the model: llama_cpp, onnx, torch or module:Class. Default: the one "
            "that suits the device.",
        ),
    ] = None
    weight_format: Annotated[
        str | None,
        option(
            ENGINE,
            "Weight format, such as Q4_0, Q8_0, int4 or bf16. Default: the engine's own default.",
            "format",
        ),
    ] = None
    calibration: Annotated[
        bool,
        option(
            ENGINE,
            "If no --backend is given, choose the fastest engine on this CPU. It is measured once, "
            "which takes seconds.",
        ),
    ] = True
    policy: Annotated[
        Policy,
        option(
            MACHINE,
            "Devices that may run the model. auto uses the GPU if the model fits there, else the "
            "CPU.",
        ),
    ] = Policy.auto
    threads: Annotated[
        Count | None,
        option(MACHINE, "Threads of the engine. Default: one per physical core of --cores."),
    ] = None
    cores: Annotated[
        str,
        option(
            MACHINE,
            "CPU cores for the engine, such as 0-3. Default: all cores; on more than 8 cores, all "
            "but the one kept for HTTP.",
        ),
    ] = ""
    prefix_reuse: Annotated[
        bool,
        option(
            ENGINE,
            "Keep the KV cache of finished sequences and reuse it for prompts with the same "
            "prefix.",
        ),
    ] = True
    options: Annotated[
        dict[str, Any],
        option(
            ENGINE,
            "Option of the backend, such as mlock=true. Repeat for several.",
            "option",
            "KEY=VALUE",
        ),
    ] = {}
    check_memory: Annotated[
        bool,
        option(MACHINE, "Refuse a model that is predicted not to fit in memory.", "memory-check"),
    ] = True
    standby: Annotated[
        Literal["cold", "warm"],
        option(
            MACHINE,
            "warm keeps the fallback engine loaded, so that a failover is immediate; this costs "
            "its memory.",
        ),
    ] = "cold"
    bridge: Annotated[
        bool,
        option(MACHINE, "While a GPU's engine restarts, the CPU answers if it is ready sooner."),
    ] = True
    idle_unload_seconds: Annotated[
        Positive | None,
        option(
            SEVERAL,
            "Unload a model after this many seconds without requests. Default: never.",
            "idle-unload",
            "SECONDS",
        ),
    ] = None


class ModelOptions(SharedOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One model: a MODEL argument of the command line, or a [[model]] table of a models file."""

    source: Annotated[str, Meta(min_length=1)]
    # The name that requests use; None: the model's own name.
    name: Annotated[str, Meta(min_length=1, max_length=200)] | None = None
    load: Literal["start", "demand"] = "start"


class ServeOptions(SharedOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The command line of `crossover serve`."""

    models: Annotated[
        tuple[str, ...],
        option(
            "",
            "Models to serve: ladder models (135m, 1b, ...), GGUF files, folders or hub ids.",
            "",
            "MODEL...",
            True,
        ),
    ] = ()
    models_file: Annotated[
        str | None,
        option(
            SEVERAL,
            "TOML file with a [[model]] table for each model and its options.",
            "",
            "FILE",
        ),
    ] = None
    on: Annotated[
        Literal["ray"] | None,
        option(
            SEVERAL,
            "ray runs replicas on the Ray cluster at $RAY_ADDRESS, or on a new one on this "
            "machine. Default: serve without Ray.",
        ),
    ] = None
    replicas: Annotated[
        Count,
        option(
            SEVERAL,
            "Number of engines with --on ray; each takes --threads cores or one GPU.",
        ),
    ] = 1
    memory_limit: Annotated[
        str | None,
        option(
            SEVERAL,
            "RAM that all engines may use together, such as 24GiB. Default: the free memory.",
            "",
            "SIZE",
        ),
    ] = None
    admin_key_env: Annotated[
        str | None,
        option(
            SEVERAL,
            "Environment variable that holds the key of the /admin/ routes. Without it there are "
            "no admin routes.",
            "",
            "NAME",
        ),
    ] = None
    host: Annotated[
        str,
        option(
            HTTP,
            "Address to listen on. 0.0.0.0 makes the server reachable from the network; set "
            "--api-key-env then.",
        ),
    ] = "127.0.0.1"
    port: Annotated[Port, option(HTTP, "Port to listen on. 0 takes a free port and prints it.")] = (
        8000
    )
    served_name: Annotated[
        str | None, option(HTTP, "Model name that requests use. Default: the model's own name.")
    ] = None
    api_key_env: Annotated[
        str | None,
        option(
            HTTP,
            "Environment variable that holds the API key. Default: no key is required.",
            "",
            "NAME",
        ),
    ] = None
    ready_file: Annotated[
        str | None,
        option(
            HTTP,
            "JSON file (url, pid, ...) that is written when an engine is ready.",
            "",
            "FILE",
        ),
    ] = None
    api_cores: Annotated[
        str,
        option(
            MACHINE,
            "CPU cores for HTTP. Default: the cores that the engine leaves free, or else the "
            "engine's cores.",
        ),
    ] = ""
    cache: Annotated[
        str | None,
        option(
            MACHINE,
            "Folder for weights. Default: $CROSSOVER_CACHE, or ~/.cache/crossover.",
        ),
    ] = None
    max_waiting: Annotated[
        Count,
        option(
            QUEUE,
            "Maximum requests that wait for a slot; requests beyond it are rejected with 429.",
        ),
    ] = 256
    max_wait_seconds: Annotated[
        Seconds,
        option(
            QUEUE,
            "Maximum predicted queue wait in seconds; requests beyond it are rejected with 429.",
            "max-wait",
        ),
    ] = 30.0
    ttft_slo_seconds: Annotated[
        Positive | None,
        option(
            QUEUE,
            "TTFT limit in seconds; requests predicted to miss it are rejected with 429. Default: "
            "no limit.",
            "ttft-slo",
        ),
    ] = None
    drain_seconds: Annotated[
        Seconds,
        option(
            QUEUE,
            "Seconds that running requests get to finish after SIGTERM.",
            "drain-timeout",
        ),
    ] = 60.0


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

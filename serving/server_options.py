"""Options of a server and of a model: the only place that names, bounds and explains them.

Made from these structs: the command line, the models file (`serve --models-file`), and the flags of
a campaign's [server] table.

    [[model]]
    source = "135m"               # a rung, a GGUF file, a folder, a hub name
    name = "small"                # the name in requests
    policy = "cpu-only"
    load = "demand"               # load on the first request, not at the start

A key that an entry leaves out has the command line's value.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from serving.errors import ServingError
from serving.option_help import (
    ENGINE,
    Count,
    Port,
    Positive,
    Seconds,
    converted,
    flags_of,
    option,
)
from serving.performance.scheduler_settings import DEFAULT_SETTINGS, RequestedSettings

# Panels of the help page.
QUEUE, HTTP = "Queue and faults", "HTTP"
MACHINE, SEVERAL = "Machine", "Several models"


class Policy(StrEnum):
    """Which devices may be used: the GPU first and the CPU after it, or one of the two only."""

    auto = "auto"
    gpu_only = "gpu-only"
    cpu_only = "cpu-only"


class SharedOptions(RequestedSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a model runs: the command line speaks for all models, a models file for one."""

    backend: Annotated[
        str | None, option(ENGINE, "llama_cpp, onnx, torch, module:Class. Default: by device.")
    ] = None
    weight_format: Annotated[
        str | None, option(ENGINE, "Q4_0, Q8_0, int4, bf16, ... Default: by backend.", "format")
    ] = None
    calibration: Annotated[
        bool, option(ENGINE, "Without --backend: the CPU's quickest, measured once in seconds.")
    ] = True
    policy: Annotated[
        Policy, option(MACHINE, "auto: the GPU where the model fits, else the CPU.")
    ] = Policy.auto
    threads: Annotated[
        Count | None, option(MACHINE, "Engine threads. Default: one per physical core of --cores.")
    ] = None
    cores: Annotated[
        str, option(MACHINE, "Engine's cores, e.g. 0-3. Default: all; of over 8 all but 1-2.")
    ] = ""
    prefix_reuse: Annotated[
        bool, option(ENGINE, "Keep the KV of finished sequences for prompts that begin alike.")
    ] = True
    options: Annotated[
        dict[str, Any],
        option(ENGINE, "An option that a backend here has: mlock=true.", "option", "KEY=VALUE"),
    ] = {}
    check_memory: Annotated[
        bool, option(MACHINE, "Refuse what is predicted not to fit.", "memory-check")
    ] = True
    standby: Annotated[
        Literal["cold", "warm"],
        option(MACHINE, "warm: keep the fallback engine loaded (costs its memory)."),
    ] = "cold"
    idle_unload_seconds: Annotated[
        Positive | None,
        option(SEVERAL, "Unload a model without requests for so long.", "idle-unload", "SECONDS"),
    ] = None


class ModelOptions(SharedOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One model: a MODEL of the command line, or a [[model]] of a models file."""

    source: Annotated[str, Meta(min_length=1)]
    # In requests; None: the model's own.
    name: Annotated[str, Meta(min_length=1, max_length=200)] | None = None
    load: Literal["start", "demand"] = "start"


class ServeOptions(SharedOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The command line of `crossover serve`."""

    models: Annotated[
        tuple[str, ...],
        option("", "Sizes (135m, 1b, ...), GGUF files, folders, hub ids.", "", "MODEL...", True),
    ] = ()
    models_file: Annotated[
        str | None,
        option(SEVERAL, "TOML with a [[model]] for each model and its options.", "", "FILE"),
    ] = None
    on: Annotated[
        Literal["ray"] | None,
        option(SEVERAL, "ray: replicas on the cluster of $RAY_ADDRESS, or on one of this machine."),
    ] = None
    replicas: Annotated[
        Count, option(SEVERAL, "With --on ray: engines, each with --threads cores or a GPU.")
    ] = 1
    memory_limit: Annotated[
        str | None, option(SEVERAL, "RAM for all engines together, e.g. 24GiB.", "", "SIZE")
    ] = None
    admin_key_env: Annotated[
        str | None, option(SEVERAL, "Variable with the key of the /admin/ routes.", "", "NAME")
    ] = None
    host: Annotated[
        str, option(HTTP, "Address to listen on. 0.0.0.0 opens it to the network: set a key.")
    ] = "127.0.0.1"
    port: Annotated[Port, option(HTTP, "Port; 0 takes a free one and prints it.")] = 8000
    served_name: Annotated[
        str | None, option(HTTP, "The model's name in requests. Default: its own.")
    ] = None
    api_key_env: Annotated[
        str | None, option(HTTP, "Environment variable that holds the API key.", "", "NAME")
    ] = None
    ready_file: Annotated[
        str | None,
        option(HTTP, "Written (JSON: url, pid, ...) when an engine is ready.", "", "FILE"),
    ] = None
    api_cores: Annotated[
        str, option(MACHINE, "Cores of HTTP. Default: those left; without any, the engine's.")
    ] = ""
    cache: Annotated[
        str | None, option(MACHINE, "Weights. Default: $CROSSOVER_CACHE or ~/.cache/crossover.")
    ] = None
    max_waiting: Annotated[
        Count, option(QUEUE, "Requests that may wait for a slot; more get 429.")
    ] = 256
    max_wait_seconds: Annotated[
        Seconds, option(QUEUE, "Longest predicted wait in seconds; beyond it 429.", "max-wait")
    ] = 30.0
    ttft_slo_seconds: Annotated[
        Positive | None,
        option(QUEUE, "TTFT limit in seconds: who is predicted to miss it gets 429.", "ttft-slo"),
    ] = None
    drain_seconds: Annotated[
        Seconds,
        option(QUEUE, "Seconds that requests get to end in after SIGTERM.", "drain-timeout"),
    ] = 60.0


def arguments(values: Mapping[str, Any]) -> list[str]:
    """The command line for these fields of ServeOptions; None means the default."""
    flags = flags_of(ServeOptions)
    words: list[str] = []
    for name, value in values.items():
        flag = flags[name]
        if isinstance(value, bool):
            words.append(flag if value else flag.replace("--", "--no-", 1))
        elif isinstance(value, dict):
            for key, item in value.items():
                words += [flag, f"{key}={json.dumps(item)}"]
        elif value is not None:
            words += [flag, str(value)]
    return words


def models_of(options: ServeOptions) -> tuple[ModelOptions, ...]:
    """The models of a server: the command line's, then the models file's. Raises ServingError."""
    shared = {name: getattr(options, name) for name in SharedOptions.__struct_fields__}
    found = [model_options({"source": source}, shared, "MODEL") for source in options.models]
    if options.models_file is not None:
        where = f"--models-file {options.models_file}"
        for number, entry in enumerate(_entries(options.models_file, where), 1):
            found.append(model_options(entry, shared, f"{where}, model {number}"))
    if not found:
        raise ServingError(
            "no model to serve; name one (135m, ./model.gguf, ...) or give --models-file"
        )
    if options.served_name is not None:
        if len(found) > 1:
            raise ServingError(
                f"--served-name names one model, and {len(found)} are served; "
                "give each its name in a --models-file"
            )
        given = msgspec.structs.asdict(found[0])
        found = [model_options({"name": options.served_name}, given, "--served-name")]
    if len(found) > 1:  # the first one's slots would take the whole memory of a GPU
        slots = DEFAULT_SETTINGS["cpu"].slots
        found = [msgspec.structs.replace(one, slots=one.slots or slots) for one in found]
    return tuple(found)


def _entries(file: str, where: str) -> list[dict[str, Any]]:
    """The [[model]] tables of a models file. Raises ServingError."""
    try:
        text = Path(file).read_bytes().removeprefix(b"\xef\xbb\xbf")  # a byte order mark
        return msgspec.toml.decode(text, type=_ModelsFile).model
    except OSError as problem:
        raise ServingError(f"{where}: {problem.strerror}") from problem
    except (msgspec.DecodeError, ValueError, RecursionError) as problem:
        raise ServingError(f"{where}: {problem}") from problem


class _ModelsFile(msgspec.Struct, forbid_unknown_fields=True):
    model: Annotated[list[dict[str, Any]], Meta(min_length=1)]


def model_options(given: Mapping[str, Any], shared: Mapping[str, Any], where: str) -> ModelOptions:
    """One model's options: its entry over the shared ones. Raises ServingError."""
    return converted({**shared, **given}, ModelOptions, f"{where}: ")

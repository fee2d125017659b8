"""What `crossover serve` was asked for, checked: the process's options, each model's, and the files that they name.

A server may hold several models. What holds for the process is in ServeOptions, what holds for one model in ModelOptions; a models file
(TOML) lists the latter, and what an entry does not say is taken from the command line:

    [[model]]
    source = "135m"               # a rung, a GGUF file, a folder, a hub name
    name = "small"                # what requests call it
    policy = "cpu-only"
    load = "demand"               # not at the start but when the first request comes
    idle_unload_seconds = 600
"""

from __future__ import annotations

import json
import os
import re
import ssl
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from serving.errors import ServingError
from serving.placement import Policy

Standby = Literal["cold", "warm"]
LogFormat = Literal["text", "json"]


class SharedOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a model is run: what the command line says for every model alike, and an entry of a models file may say otherwise."""

    backend: str | None = None
    weight_format: str | None = None
    policy: Policy = Policy.auto
    threads: int | None = None
    cores: str = ""
    slots: int = 16
    context_tokens: int = 2048
    kv_tokens: int | None = None
    kv_dtype: str = "fp16"
    prefill_tokens: int = 256
    step_seconds_target: float = 0.3
    prefix_reuse: bool = True
    check_memory: bool = True
    standby: Standby = "cold"
    idle_unload_seconds: float | None = None


class ModelOptions(SharedOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is asked for one model: a line of `crossover serve MODEL...`, a [[model]] of a models file, or the body of an admin request."""

    source: str
    name: str | None = None  # in requests; None: the model's own
    options: dict[str, Any] = {}
    load: Literal["start", "demand"] = "start"

    def __post_init__(self) -> None:
        for key in ("slots", "context_tokens", "kv_tokens", "prefill_tokens", "threads"):
            value = getattr(self, key)
            if value is not None and value < 1:
                raise ValueError(f"{key} must be at least 1, got {value}")
        if not 0 < self.step_seconds_target < float("inf"):
            raise ValueError(f"step_seconds_target must be above 0 and finite, got {self.step_seconds_target:g}")
        if self.idle_unload_seconds is not None and self.idle_unload_seconds <= 0:
            raise ValueError(f"idle_unload_seconds must be above 0, got {self.idle_unload_seconds:g}")
        if not self.source or "\0" in self.source:
            raise ValueError("source must name a model")
        if self.name is not None and not re.fullmatch(r"[^\s\x00-\x1f/][^\x00-\x1f]{0,199}", self.name):
            raise ValueError(f"name {self.name[:50]!r} is no name: 1 to 200 characters, no control characters, no slash or blank first")


class ServeOptions(SharedOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What `crossover serve` was asked for; its help says what each option means."""

    models: tuple[str, ...]
    models_file: str | None = None
    host: str = "127.0.0.1"
    port: int = 8000
    api_cores: str = ""
    cache: str | None = None
    served_name: str | None = None
    api_key_env: str | None = None
    api_key_file: str | None = None
    admin_key_env: str | None = None
    admin_key_file: str | None = None
    admin_port: int | None = None
    options: tuple[str, ...] = ()
    memory_limit: str | None = None
    max_loaded_models: int | None = None
    load_wait_seconds: float = 60.0
    most_waiting: int = 256
    longest_wait_seconds: float = 30.0
    ttft_promise_seconds: float | None = None
    health_timeout_seconds: float = 30.0
    drain_seconds: float = 60.0
    ready_file: str | None = None
    tls_certificate: str | None = None
    tls_key: str | None = None
    otlp_endpoint: str | None = None
    log_format: LogFormat = "text"
    log_requests: bool = False


def models_of(options: ServeOptions) -> tuple[ModelOptions, ...]:
    """The models of a server: those named on the command line, then those of the models file. Raises ServingError."""
    shared = shared_of(options)
    found = [model_options({"source": source}, shared, "MODEL") for source in options.models]
    if options.models_file is not None:
        where = f"--models-file {options.models_file}"
        try:
            with open(options.models_file, "rb") as file:
                content = tomllib.load(file)
        except OSError as problem:
            raise ServingError(f"{where}: {problem.strerror}") from problem
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as problem:
            raise ServingError(f"{where} is no TOML: {problem}") from problem
        entries = content.pop("model", [])
        if content:
            raise ServingError(f"{where}: unknown key {next(iter(content))!r}; [[model]] sections are known")
        if not isinstance(entries, list) or not entries or not all(isinstance(entry, dict) for entry in entries):
            raise ServingError(f"{where} has no [[model]] section")
        found += [model_options(entry, shared, f"{where}, model {number}") for number, entry in enumerate(entries, 1)]
    if not found:
        raise ServingError("no model to serve; name one (135m, ./model.gguf, ...) or give --models-file")
    if options.served_name is not None:
        if len(found) > 1:
            raise ServingError(f"--served-name names one model, and {len(found)} are served; give each its name in a --models-file")
        found = [msgspec.structs.replace(found[0], name=options.served_name)]
    return tuple(found)


def shared_of(options: ServeOptions) -> dict[str, Any]:
    """What the command line says for every model alike. Raises ServingError."""
    shared: dict[str, Any] = {name: getattr(options, name) for name in SharedOptions.__struct_fields__}
    return {**shared, "options": parse_options(options.options)}


def model_options(given: Mapping[str, Any], shared: Mapping[str, Any], where: str) -> ModelOptions:
    """One model's options: what its entry says, over what all share. Raises ServingError that names the key."""
    try:
        return msgspec.convert({**shared, **given}, ModelOptions)
    except msgspec.ValidationError as problem:
        raise ServingError(f"{where}: {problem}") from problem


def check_files(options: ServeOptions) -> None:
    """Find out now, not after a load, that a file cannot be read or written. Raises ServingError."""
    if (options.tls_certificate is None) != (options.tls_key is None):
        raise ServingError("--tls-certificate and --tls-key belong together; one of them is missing")
    for name, file in (("--tls-certificate", options.tls_certificate), ("--tls-key", options.tls_key)):
        if file is not None and not os.access(file, os.R_OK):
            raise ServingError(f"{name} {file}: there is no such file, or it cannot be read")
    if options.tls_certificate is not None:
        try:
            ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(options.tls_certificate, options.tls_key, password="")
        except (ssl.SSLError, OSError, ValueError) as problem:
            files = f"--tls-certificate {options.tls_certificate}, --tls-key {options.tls_key}"
            raise ServingError(f"{files}: not a certificate and its unencrypted key in PEM form: {problem}") from problem
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


def read_api_key(variable: str | None, file: str | None, option: str = "--api-key") -> str | None:
    """The key from an environment variable or a file, never from the command line, which every process can read."""
    if variable and file:
        raise ServingError(f"{option}-env and {option}-file exclude each other")
    if variable:
        key = os.environ.get(variable, "").strip()
        if not key:
            raise ServingError(f"{option}-env names {variable}, which is not set or empty")
        return key
    if file:
        try:
            key = Path(file).read_text().strip()
        except (OSError, UnicodeDecodeError) as problem:
            raise ServingError(f"{option}-file {file}: {getattr(problem, 'strerror', None) or problem}") from problem
        if not key:
            raise ServingError(f"{option}-file {file} is empty")
        return key
    return None

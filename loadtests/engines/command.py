"""An engine of others, as a campaign names it: its command, its weights, what it may see.

    engine = Engine(name="vllm", command="vllm serve {model} --port {port}")
    argv(engine.command, {"model": "/weights", "port": 8000})    # ["vllm", "serve", "/weights", ..]

Nothing here starts anything. A command is a stranger's code: `crossover campaign run` starts one
only with --allow-commands, and its words never see a shell.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from typing import Literal

import msgspec

from loadtests.generator.endpoint import SECRET_NAME, SECRET_TEXT
from models.formats import DEFAULT_FORMATS, FORMATS, HF_FORMATS

HOST = "127.0.0.1"
FILLED = ("model", "port", "host", "slots", "context", "kv_tokens", "threads")
_PLACE = re.compile(r"\{([A-Za-z_]+)\}")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# Of the runner's variables, those without which programs, libraries and devices are not found.
INHERITED = (
    *("PATH", "HOME", "USER", "LOGNAME", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "TMPDIR"),
    *("LD_LIBRARY_PATH", "VIRTUAL_ENV", "CONDA_PREFIX", "XDG_CACHE_HOME"),
    *("HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "CUDA_HOME", "CUDA_PATH", "ROCM_PATH"),
    *("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"),
    *("ROCR_VISIBLE_DEVICES", "GGML_VK_VISIBLE_DEVICES", "VK_DRIVER_FILES", "VK_ICD_FILENAMES"),
)


class Engine(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """An engine of others, started by a command for each of its cells."""

    name: str  # the engine's, in keys and reports
    command: str  # words as a shell splits them; {model} {port} {host} {slots} {context} ... filled
    ready: str = "/health"  # path that answers 200 once it serves
    weights: Literal["gguf", "hf", "none"] = (
        "hf"  # {model} is a GGUF file, a folder of safetensors (hf), or the name in models (none)
    )
    format: str | None = None  # their format; none: the campaign's formats, else Q4_0 or bf16
    names: dict[str, str] = {}  # what {model} is for a model, in place of its weights
    api: Literal["completions", "chat"] = "completions"  # or chat: the route that is measured
    device: Literal["cpu", "gpu"] | None = None  # what serves; none: gpu where it has one open
    environment: dict[str, str] = {}  # variables set for it, beside PATH, HOME and their like
    variables: list[str] = []  # variables of this shell that it sees too; --trust names each
    version: str | None = None  # command that prints it; none: what it says over HTTP


def formats_of(engine: Engine, asked: list[str]) -> list[str]:
    """The formats of the engine's cells: its own, else those of the campaign that its files have.

    "" where its weights are its own business.
    """
    if engine.format is not None or engine.weights == "none":
        return [engine.format or ""]
    spelt = {one.lower(): one for one in _files_formats(engine)}  # BF16 in GGUF, bf16 elsewhere
    found = [spelt[one.lower()] for one in asked if one.lower() in spelt]
    return found or [DEFAULT_FORMATS[engine.weights]]


def _files_formats(engine: Engine) -> tuple[str, ...]:
    return HF_FORMATS if engine.weights == "hf" else FORMATS[engine.weights]


def argv(command: str, values: Mapping[str, object]) -> list[str]:
    """The words of a command, its places filled; one that has no value stays as it is."""

    def fill(place: re.Match[str]) -> str:
        return str(values.get(place[1], place[0]))

    return [_PLACE.sub(fill, word) for word in shlex.split(command)]


def places(command: str) -> set[str]:
    """The names in braces."""
    return set(_PLACE.findall(command))


def commands_of(engine: Engine, values: Mapping[str, object] | None = None) -> list[str]:
    """All that is run for it, whole, with the variables that are set for it."""
    shown = [f"{name}={shlex.quote(value)}" for name, value in engine.environment.items()]
    texts = [engine.command, *([engine.version] if engine.version else [])]
    return [" ".join([*shown, shlex.join(argv(text, values or {}))]) for text in texts]


def wrong(engine: Engine) -> Iterator[tuple[str, str]]:
    """What cannot be: the key, and what is wrong with it."""
    for key in ("command", "version"):
        text = getattr(engine, key)
        if text is not None:
            yield from ((key, what) for what in _wrong_words(text))
    if "port" not in places(engine.command):
        yield "command", "it has no {port}: the runner chooses a free one"
    for name in sorted(places(engine.command) - {*FILLED}):
        known = ", ".join(f"{{{one}}}" for one in FILLED)
        yield "command", f"{{{name}}} is not one of {known}"
    if places(engine.version or ""):
        yield "version", "nothing is filled in here: it runs without a model"
    if not engine.ready.startswith("/"):
        yield "ready", f"it must be a path such as /health, got {engine.ready!r}"
    if engine.format is not None and engine.weights != "none":
        formats = _files_formats(engine)
        if engine.format not in formats:
            yield "format", f"{engine.format!r} is not one of {', '.join(formats)}"
    for name, value in engine.environment.items():
        if not _VARIABLE.fullmatch(name) or not value.isprintable():
            yield "environment", f"{name!r} = {value!r} is no variable"
        if SECRET_NAME.search(name) or SECRET_TEXT.match(value):
            yield "environment", f"{name} {_SECRET}"
    for name in engine.variables:
        if not _VARIABLE.fullmatch(name):
            yield "variables", f"{name!r} is no name of a variable"
    for name, value in engine.names.items():
        if not value or value.startswith("-") or not value.isprintable():
            yield "names", f"{name} = {value!r} is no model"


_SECRET = (
    "looks like a secret, and a run folder would keep it: "
    "name the variable that holds it in `variables`"
)


def _wrong_words(text: str) -> Iterator[str]:
    try:
        words = shlex.split(text)
    except ValueError as problem:
        yield f"it cannot be split into words: {str(problem).lower()}"
        return
    if not words:
        yield "it is empty"
    for word in words:
        if not word.isprintable():
            yield f"{word!r} holds characters that a terminal would not show"
    for word, after in zip(words, [*words, ""][1:], strict=True):
        name, has_value, value = word.lstrip("-").partition("=")
        is_option = word.startswith("-")
        value = value if has_value else after
        named = is_option and SECRET_NAME.search(name) and value and not value.startswith("-")
        if named or SECRET_TEXT.match(word) or SECRET_TEXT.match(value):
            yield f"{name if is_option else 'a word of it'} {_SECRET}"

"""An engine of others, started by a command that a campaign names: `[[engines]]`.

    engine = Engine(name="vllm", command="vllm serve {model} --port {port}")
    argv(engine.command, {"model": "/weights", "port": 8000})

A command is a stranger's code: `crossover campaign run` starts one only with --trust, and its words
never see a shell. server_launch.py starts it.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from typing import Annotated, Literal

from loadtests.checked_files import Table, key
from models.formats import DEFAULT_FORMATS, FORMATS, HF_FORMATS

HOST = "127.0.0.1"
FILLED = ("model", "port", "host", "slots", "context", "kv_tokens", "threads")
_PLACE = re.compile(r"\{([A-Za-z_]+)\}")


class Engine(Table, frozen=True):
    """An engine of others, started by a command for each of its cells."""

    name: Annotated[str, key("the engine's, in keys and reports")]
    command: Annotated[
        str, key("words as a shell splits them; {model} {port} {host} {slots} {context} ... filled")
    ]
    ready: Annotated[str, key("path that answers 200 once it serves")] = "/health"
    weights: Annotated[
        Literal["gguf", "hf", "none"],
        key("{model}: a GGUF file, a folder of safetensors (hf), or the name in models (none)"),
    ] = "hf"
    format: Annotated[str | None, key("their format; none: the campaign's, else Q4_0 or bf16")] = (
        None
    )
    api: Annotated[Literal["completions", "chat"], key("the route that is measured")] = (
        "completions"
    )


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


def wrong(engine: Engine) -> Iterator[tuple[str, str]]:
    """What cannot be: the key, and what is wrong with it."""
    try:
        if not shlex.split(engine.command):
            yield "command", "it is empty"
    except ValueError as problem:
        yield "command", f"it cannot be split into words: {str(problem).lower()}"
    if "port" not in places(engine.command):
        yield "command", "it has no {port}: the runner chooses a free one"
    for name in sorted(places(engine.command) - {*FILLED}):
        known = ", ".join(f"{{{one}}}" for one in FILLED)
        yield "command", f"{{{name}}} is not one of {known}"
    if not engine.ready.startswith("/"):
        yield "ready", f"it must be a path such as /health, got {engine.ready!r}"
    formats = _files_formats(engine)
    if engine.format is not None and engine.weights != "none" and engine.format not in formats:
        yield "format", f"{engine.format!r} is not one of {', '.join(formats)}"

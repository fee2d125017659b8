"""A campaign file with every key, its default and a comment: what `crossover campaign init` prints.

The keys are the fields of the structs, the comments those that stand behind the fields.
"""

from __future__ import annotations

import ast
import inspect
import io
import json
import textwrap
import tokenize
from typing import Any, get_args

import msgspec

from loadtests.campaign.campaign_keys import (
    CampaignFile,
    Hardware,
    Load,
    OneCell,
    Server,
    SloSpec,
)
from loadtests.capacity.search_config import SearchConfig
from loadtests.engines.command import Engine
from loadtests.generator.endpoint import Target
from loadtests.metrics.slo import SLO_PRESETS
from loadtests.workload.arrivals import Arrivals
from loadtests.workload.requests import Workload

# Table of the file -> its struct, and the keys that init sets in it.
SECTIONS: dict[str, tuple[type[msgspec.Struct], dict[str, Any]]] = {
    "slo": (SloSpec, {"preset": next(iter(SLO_PRESETS))}),
    "workload": (Workload, {"preset": "chat", "max_prompt_tokens": 512, "max_output_tokens": 256}),
    "server": (Server, {}),
    "load": (Load, {}),
    "search": (SearchConfig, {}),
    "hardware": (Hardware, {}),
    "target": (Target, {}),
    "cells": (OneCell, {}),
    "engines": (Engine, {"name": "vllm", "command": "vllm serve {model} --port {port}"}),
}
LISTS = ("hardware", "cells", "engines")  # [[...]]
ABSENT = ("target", "cells", "engines")  # a file has them only where it wants them
STARTED = {"name": "my-campaign", "models": ["smollm2-135m"], "budget_seconds": 600.0}


class Key(msgspec.Struct, frozen=True):
    """One key of the file."""

    name: str
    type: str  # as the code writes it
    default: Any  # None: it has none, or is None
    is_required: bool
    what: str


def keys_of(kind: type[msgspec.Struct]) -> list[Key]:
    """The keys of a table of the file, in the order of the struct."""
    types, comments = _source(kind)
    keys = []
    for one in msgspec.structs.fields(kind):
        default = one.default
        if one.default_factory is not msgspec.NODEFAULT:
            default = one.default_factory()
        required = one.required
        value = None if required else msgspec.to_builtins(default)
        keys.append(Key(one.name, types[one.name], value, required, comments.get(one.name, "")))
    return keys


def _source(kind: type[msgspec.Struct]) -> tuple[dict[str, str], dict[str, str]]:
    """Annotation and comment of each field, from the struct's source."""
    source = textwrap.dedent(inspect.getsource(kind))
    (struct,) = ast.parse(source).body
    assert isinstance(struct, ast.ClassDef)
    words: dict[int, str] = {
        token.start[0]: token.string.lstrip("# ")
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    }
    types: dict[str, str] = {}
    comments: dict[str, str] = {}
    for node in struct.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            lines = range(node.lineno, (node.end_lineno or node.lineno) + 1)
            types[node.target.id] = ast.unparse(node.annotation)
            comments[node.target.id] = " ".join(words[line] for line in lines if line in words)
    return types, comments


def campaign_template() -> str:
    """The file. It parses; a key without a value is commented out."""
    tables = (*SECTIONS, "arrivals", "workloads")
    top = [key for key in keys_of(CampaignFile) if key.name not in tables]
    out = ["# A campaign: crossover campaign run FILE. Every key; name, models, budget_seconds"]
    out += ["# and the caps of [workload] are examples, the other values are the defaults."]
    out += [_line(key, STARTED, is_off=key.name == "slos") for key in top]
    kinds = ", ".join(arrival_kinds())
    out += ["", "[arrivals]  # when requests are due", f'kind = "poisson"  # {kinds}']
    what = {key.name: key.what for key in keys_of(CampaignFile)}
    for name, (kind, values) in SECTIONS.items():
        is_off = name in ABSENT
        header = f"[[{name}]]" if name in LISTS else f"[{name}]"
        out += ["", f"{'# ' if is_off else ''}{header}  # {what[name]}"]
        out += [_line(key, values, is_off) for key in keys_of(kind)]
    return "\n".join(out) + "\n"


def arrival_kinds() -> list[str]:
    """The values of `arrivals.kind`."""
    return [str(kind.__struct_config__.tag) for kind in get_args(Arrivals)]


def _line(key: Key, values: dict[str, Any], is_off: bool) -> str:
    value = values.get(key.name, key.default)
    text = "" if value is None else toml_value(value)
    off = "# " if is_off or value is None else ""
    comment = f"  # {key.what}" if key.what else ""
    return f"{off}{key.name} = {text}{comment}".rstrip()


def toml_value(value: Any) -> str:
    """A value as TOML: strings, numbers, booleans, lists and empty tables."""
    if isinstance(value, list | tuple):
        return "[" + ", ".join(toml_value(one) for one in value) + "]"
    return json.dumps(value)

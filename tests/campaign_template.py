"""loadtests/campaign.toml, which `crossover campaign init` prints, made from the structs that read
such a file: every key, its default and what it is.
"""

from __future__ import annotations

import json
import textwrap
from typing import Any, get_args, get_type_hints

import msgspec

from crossover.loadtests.campaign.campaign_file import (
    CampaignFile,
    Search,
    ServerSettings,
    SloSpec,
    ThirdPartyEngine,
)
from crossover.loadtests.load_generator.target import Target
from crossover.serving.option_help import texts_of
from crossover.serving.workload.arrivals import Arrivals
from crossover.serving.workload.request_lengths import Workload

# Table of the file -> its struct, and the keys that init sets in it.
SECTIONS: dict[str, tuple[type[msgspec.Struct], dict[str, Any]]] = {
    "slo": (SloSpec, {"preset": "chat"}),
    "workload": (Workload, {"preset": "chat", "max_prompt_tokens": 512, "max_output_tokens": 256}),
    "server": (ServerSettings, {}),
    "search": (Search, {}),
    "target": (Target, {}),
    "engines": (ThirdPartyEngine, {"name": "vllm", "command": "vllm serve {model} --port {port}"}),
}
LISTS = ("engines",)  # [[...]]
ABSENT = ("target", "engines")  # a file has them only where it wants them
COLUMNS = 100
STARTED = {"name": "my-campaign", "models": ["smollm2-135m"], "budget_seconds": 600.0}


class Key(msgspec.Struct, frozen=True):
    """One key of the file."""

    name: str
    type: Any  # of its values
    default: Any  # None: it has none, or is None
    is_required: bool
    what: str


def keys_of(kind: type[msgspec.Struct]) -> list[Key]:
    """The keys of a table of the file, in the order of the struct."""
    types, texts = get_type_hints(kind), texts_of(kind)
    keys = []
    for one in msgspec.structs.fields(kind):
        default = None if one.default is msgspec.NODEFAULT else one.default
        if one.default_factory is not msgspec.NODEFAULT:
            default = one.default_factory()
        what = texts[one.name].text
        keys.append(
            Key(one.name, types[one.name], msgspec.to_builtins(default), one.required, what)
        )
    return keys


def campaign_template() -> str:
    """The file. It parses; a key without a value is commented out."""
    keys = keys_of(CampaignFile)
    tables = (*SECTIONS, "arrivals")
    lines = ["# A campaign file with every key. Run it with: crossover campaign run FILE"]
    lines += ["#"]
    lines += ["# name, models, budget_seconds and the maximum lengths in [workload] are examples;"]
    lines += ["# all other values are the defaults."]
    for key in keys:
        if key.name not in tables:
            lines += _lines(key, STARTED)
    kinds = ", ".join(str(kind.__struct_config__.tag) for kind in get_args(Arrivals))
    what = {key.name: key.what for key in keys}
    lines += ["", f"[arrivals]  # {what['arrivals']}", f'kind = "poisson"  # {kinds}']
    for name, (kind, values) in SECTIONS.items():
        is_off = name in ABSENT
        header = f"[[{name}]]" if name in LISTS else f"[{name}]"
        lines += ["", f"{'# ' if is_off else ''}{header}  # {what[name]}"]
        for key in keys_of(kind):
            lines += _lines(key, values, is_off)
    return "\n".join(lines) + "\n"


def _lines(key: Key, values: dict[str, Any], is_off: bool = False) -> list[str]:
    """The key with its comment beside it, or above it where that would make a long line."""
    value = values.get(key.name, key.default)
    off = "# " if is_off or value is None else ""
    text = f"{off}{key.name} = {'' if value is None else toml_value(value)}"
    if len(text) + len(key.what) + 4 <= COLUMNS:
        return [f"{text}  # {key.what}"]
    comment = textwrap.wrap(key.what, COLUMNS, initial_indent="# ", subsequent_indent="#   ")
    return [*comment, text.rstrip()]


def toml_value(value: Any) -> str:
    """A value as TOML: strings, numbers, booleans, lists and empty tables are as in JSON."""
    return json.dumps(value)

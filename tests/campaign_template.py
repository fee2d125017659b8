"""loadtests/campaign.toml, which `crossover campaign init` prints, made from the structs that read
such a file: every key, its default and what it is.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from loadtests.campaign.campaign_file import (
    NOT_OF_SERVER,
    CampaignFile,
    Engine,
    Search,
    Server,
    SloSpec,
)
from loadtests.load_generator.openai_endpoint import Target
from loadtests.workload.arrivals import Arrivals
from loadtests.workload.request_lengths import Workload

# Table of the file -> its struct, and the keys that init sets in it.
SECTIONS: dict[str, tuple[type[msgspec.Struct], dict[str, Any]]] = {
    "slo": (SloSpec, {"preset": "chat"}),
    "workload": (Workload, {"preset": "chat", "max_prompt_tokens": 512, "max_output_tokens": 256}),
    "server": (Server, {}),
    "search": (Search, {}),
    "target": (Target, {}),
    "engines": (Engine, {"name": "vllm", "command": "vllm serve {model} --port {port}"}),
}
LISTS = ("engines",)  # [[...]]
ABSENT = ("target", "engines")  # a file has them only where it wants them
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
    types = get_type_hints(kind, include_extras=True)
    keys = []
    for one in msgspec.structs.fields(kind):
        if kind is Server and one.name in NOT_OF_SERVER:
            continue
        default = None if one.default is msgspec.NODEFAULT else one.default
        if one.default_factory is not msgspec.NODEFAULT:
            default = one.default_factory()
        hint, what = types[one.name], ""
        if get_origin(hint) is Annotated:
            metas = [meta.description for meta in hint.__metadata__ if isinstance(meta, Meta)]
            what = next(filter(None, metas), "")
        plain = get_type_hints(kind)[one.name]
        keys.append(Key(one.name, plain, msgspec.to_builtins(default), one.required, what))
    return keys


def campaign_template() -> str:
    """The file. It parses; a key without a value is commented out."""
    keys = keys_of(CampaignFile)
    tables = (*SECTIONS, "arrivals")
    out = ["# A campaign: crossover campaign run FILE. Every key; name, models, budget_seconds"]
    out += ["# and the caps of [workload] are examples, the other values are the defaults."]
    out += [_line(key, STARTED) for key in keys if key.name not in tables]
    kinds = ", ".join(str(kind.__struct_config__.tag) for kind in get_args(Arrivals))
    out += ["", "[arrivals]  # when requests are due", f'kind = "poisson"  # {kinds}']
    what = {key.name: key.what for key in keys}
    for name, (kind, values) in SECTIONS.items():
        is_off = name in ABSENT
        header = f"[[{name}]]" if name in LISTS else f"[{name}]"
        out += ["", f"{'# ' if is_off else ''}{header}  # {what[name]}"]
        out += [_line(key, values, is_off) for key in keys_of(kind)]
    return "\n".join(out) + "\n"


def _line(key: Key, values: dict[str, Any], is_off: bool = False) -> str:
    value = values.get(key.name, key.default)
    off = "# " if is_off or value is None else ""
    text = "" if value is None else toml_value(value)
    return f"{off}{key.name} = {text}  # {key.what}"


def toml_value(value: Any) -> str:
    """A value as TOML: strings, numbers, booleans, lists and empty tables are as in JSON."""
    return json.dumps(value)

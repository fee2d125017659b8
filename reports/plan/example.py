"""A plan file with every key, its default and a comment: what `crossover plan --example` prints."""

from __future__ import annotations

from typing import Any

import msgspec

from loadtests.campaign.campaign_keys import SloSpec
from loadtests.terminal.template import Key, keys_of, toml_value
from loadtests.workload.requests import Workload
from reports.plan.file import ForecastKeys, MachineKeys, PlanFile

# Table of the file -> its struct, and the keys that the example sets in it.
SECTIONS: dict[str, tuple[type[msgspec.Struct], dict[str, Any]]] = {
    "forecast": (ForecastKeys, {"peak_rate": 0.5, "day": "people"}),
    "workload": (Workload, {"preset": "chat"}),
    "slo": (SloSpec, {"preset": "chat", "target": 0.95}),
    "machines": (MachineKeys, {"file": "machine.json", "owned": 1, "watts": 65.0}),
}
OFF = ("machines",)  # it names a file
STARTED = {"name": "chat", "model": "8b"}
TABLES = (*SECTIONS, "arrivals", "prices")


def example() -> str:
    """The file. It parses; a key without a value is commented out."""
    top = [key for key in keys_of(PlanFile) if key.name not in TABLES]
    out = ["# A plan: crossover plan FILE. Every key; name, model, [forecast], slo.target and"]
    out += ["# [[machines]] are examples, the other values are the defaults."]
    out += [_line(key, STARTED) for key in top]
    what = {key.name: key.what for key in keys_of(PlanFile)}
    for name, (kind, values) in SECTIONS.items():
        off = "# " if name in OFF else ""
        header = f"[[{name}]]" if name == "machines" else f"[{name}]"
        out += ["", f"{off}{header}  # {what[name]}"]
        out += [_line(key, values, name in OFF) for key in keys_of(kind) if key.name not in TABLES]
        if name == "forecast":
            out += ['arrivals = { kind = "poisson" }  # inside an hour; constant, gamma, on_off']
    out += ["", f"[prices]  # {what['prices']}", '# "NVIDIA L4" = 0.60']
    return "\n".join(out) + "\n"


def _line(key: Key, values: dict[str, Any], is_off: bool = False) -> str:
    value = values.get(key.name, key.default)
    text = "" if value is None else toml_value(value)
    off = "# " if is_off or value is None else ""
    return f"{off}{key.name} = {text}  # {key.what}".replace("=   #", "=  #")

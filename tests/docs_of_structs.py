"""What docs/ says of structs: the keys of campaign and plan files as tables, and JSON Schemas."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Collection
from typing import Any, get_args

import msgspec

from loadtests.campaign.campaign_keys import CampaignFile, OnDisturbance
from loadtests.metrics.slo import SLO_PRESETS
from loadtests.terminal.template import LISTS, SECTIONS, keys_of, toml_value
from loadtests.workload.arrivals import Arrivals
from loadtests.workload.length_tables import PRESETS
from reports.plan import example
from reports.plan.file import PlanFile
from serving.server_options import Standby

# A type as the code writes it -> as the documentation does.
TOML_TYPES = {
    "str": "string",
    "int": "integer",
    "float": "number",
    "bool": "boolean",
    "Price": "number or array of number",
}


def campaign_keys() -> list[str]:
    """For docs/campaign.md."""
    out = _table("Top of the file", CampaignFile, (*SECTIONS, "arrivals"))
    for name, (kind, _) in SECTIONS.items():
        out += ["", *_table(f"[[{name}]]" if name in LISTS else f"[{name}]", kind)]
    out += ["", "### [arrivals]", "", "| kind | what | keys |", "|---|---|---|"]
    for one in get_args(Arrivals):
        keys = "; ".join(f"`{key.name}`: {key.what}" for key in keys_of(one)) or "none"
        what = inspect.cleandoc(one.__doc__ or "").split("\n")[0]
        out.append(f"| `{one.__struct_config__.tag}` | {what} | {keys} |")
    out += ["", "### Presets", "", "| SLO | TTFT, s | TPOT, s | target |", "|---|---|---|---|"]
    for slo in SLO_PRESETS.values():
        limits = [value or "none" for value in (slo.ttft_seconds, slo.tpot_seconds)]
        out.append(f"| `{slo.name}` | {limits[0]} | {limits[1]} | {slo.target} |")
    return [*out, "", f"Workloads: {', '.join(f'`{name}`' for name in PRESETS)}."]


def plan_keys() -> list[str]:
    """For docs/plan.md."""
    out = _table("Top of the file", PlanFile, example.TABLES)
    for name in ("forecast", "machines"):
        title = f"[[{name}]]" if name == "machines" else f"[{name}]"
        out += ["", *_table(title, example.SECTIONS[name][0], example.TABLES)]
    return out


def _table(title: str, kind: type[msgspec.Struct], elsewhere: Collection[str] = ()) -> list[str]:
    """`elsewhere`: keys that have a table of their own."""
    out = [f"### {title}", "", "| key | type | default | what |", "|---|---|---|---|"]
    for key in keys_of(kind):
        default = "" if key.default is None else f"`{toml_value(key.default)}`"
        if key.name in elsewhere:
            default = "see below"
        elif key.is_required:
            default = "required"
        out.append(f"| `{key.name}` | {toml_type(key.type)} | {default} | {key.what} |")
    return out


def toml_type(annotation: str) -> str:
    """`list[str | SloSpec]` -> `array of string or table`; what is optional is left out."""
    return _toml_type(ast.parse(annotation, mode="eval").body)


def _toml_type(node: ast.expr) -> str:
    match node:
        case ast.BinOp(left=left, right=ast.Constant(value=None)):
            return _toml_type(left)
        case ast.BinOp(left=left, right=right):
            return f"{_toml_type(left)} or {_toml_type(right)}"
        case ast.Subscript(value=ast.Name(id="Literal"), slice=ast.Tuple(elts=values)):
            return " or ".join(f"`{toml_value(ast.literal_eval(value))}`" for value in values)
        case ast.Subscript(value=ast.Name(id="list"), slice=inner):
            return f"array of {_toml_type(inner)}"
        case ast.Subscript(value=ast.Name(id="tuple"), slice=ast.Tuple(elts=[inner, _])):
            return f"array of {_toml_type(inner)}"
        case ast.Name(id="Standby" | "OnDisturbance" as name):
            choices = get_args(Standby if name == "Standby" else OnDisturbance)
            return " or ".join(f"`{toml_value(value)}`" for value in choices)
        case ast.Name(id=name):
            return TOML_TYPES.get(name, "table")
    return "table"


def schema_of(kind: type[msgspec.Struct]) -> dict[str, Any]:
    """JSON Schema (2020-12) of a struct of this version."""
    draft = {"$schema": "https://json-schema.org/draft/2020-12/schema"}
    return draft | msgspec.json.schema(kind)

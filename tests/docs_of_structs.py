"""What docs/ says of structs: the keys of campaign and plan files as tables."""

from __future__ import annotations

import inspect
from collections.abc import Collection
from enum import StrEnum
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

import msgspec

from crossover.loadtests.campaign.campaign_file import CampaignFile
from crossover.reports.plan.plan_file import (
    ApiKeys,
    ColdStartKeys,
    ForecastKeys,
    MachineKeys,
    ModelKeys,
    PlanFile,
)
from crossover.serving.capacity.slo import SLO_PRESETS
from crossover.serving.workload.arrivals import Arrivals
from crossover.serving.workload.request_lengths import PRESETS, SESSION_PRESETS
from tests.campaign_template import LISTS, SECTIONS, keys_of, toml_value

TOML_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean"}


def campaign_keys() -> list[str]:
    """For docs/campaign.md."""
    out = _table("Top of the file", CampaignFile, (*SECTIONS, "arrivals"))
    for name, (kind, _) in SECTIONS.items():
        out += ["", *_table(f"[[{name}]]" if name in LISTS else f"[{name}]", kind)]
    out += ["", "### [arrivals]", "", "| kind | what | keys |", "|---|---|---|"]
    for one in get_args(Arrivals):
        keys = "; ".join(f"`{key.name}`: {key.what}" for key in keys_of(one)) or "none"
        what = " ".join(inspect.cleandoc(one.__doc__ or "").partition("\n\n")[0].split())
        out.append(f"| `{one.__struct_config__.tag}` | {what} | {keys} |")
    out += ["", "### Presets", "", "| SLO | TTFT, s | TPOT, s | target |", "|---|---|---|---|"]
    for slo in SLO_PRESETS.values():
        limits = [value or "none" for value in (slo.ttft_seconds, slo.tpot_seconds)]
        out.append(f"| `{slo.name}` | {limits[0]} | {limits[1]} | {slo.target} |")
    workloads = ", ".join(f"`{name}`" for name in (*PRESETS, *SESSION_PRESETS))
    return [*out, "", f"Workloads: {workloads}."]


def plan_keys() -> list[str]:
    """For docs/plan.md."""
    tables = ("forecast", "models", "machines", "workload", "slo", "api", "cold_start")
    out = _table("Top of the file", PlanFile, tables)
    out += ["", *_table("[forecast]", ForecastKeys)]
    out += ["", *_table("[[models]]", ModelKeys)]
    out += ["", *_table("[[machines]]", MachineKeys)]
    out += ["", *_table("[api]", ApiKeys)]
    return [*out, "", *_table("[cold_start]", ColdStartKeys)]


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


def toml_type(kind: Any) -> str:
    """`list[str | SloSpec]` -> `array of string or table`; what is optional is left out."""
    if hasattr(kind, "__metadata__"):
        return toml_type(kind.__origin__)
    parts = get_args(kind)
    origin = get_origin(kind)
    if origin in (Union, UnionType):
        words = [toml_type(part) for part in parts if part is not NoneType]
        return " or ".join(dict.fromkeys(words))
    if origin is Literal:
        return " or ".join(f"`{toml_value(value)}`" for value in parts)
    if origin in (list, tuple):
        return f"array of {toml_type(parts[0])}"
    if isinstance(kind, type) and issubclass(kind, StrEnum):
        return " or ".join(f"`{toml_value(one.value)}`" for one in kind)
    return TOML_TYPES.get(kind, "table")

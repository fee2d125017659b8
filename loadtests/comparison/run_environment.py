"""Finds the facts in which two runs differ, and which must be equal to compare their numbers.

    for difference in differences(one_manifest, other_manifest):
        difference.fact, difference.first, difference.second

There are facts of the machine, the campaign, the server and the cell. Versions of software are not
among them, since they are what people compare.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from crossover.loadtests.records.run_folder import RunManifest
from crossover.models import formatting

# Facts of the machine: name in HardwareFacts -> what people call it.
MACHINE: dict[str, str] = {
    "cpu_model": "CPU",
    "architecture": "architecture",
    "isa": "instruction sets",
    "logical_cores": "logical cores",
    "allowed_cores": "usable cores",
    "cgroup_cores": "CPU quota",
    "memory_total_bytes": "memory",
    "gpus": "GPUs",
}
CAMPAIGN: tuple[str, ...] = (
    "workload",
    "arrivals",
    "slo",
    "engines",
    "seed",
    "api",
    "ignore_eos",
)
SERVER = "server"  # the campaign's table, which has no effect if all cells are endpoints
CELL: tuple[str, ...] = ("model", "format", "backend", "device", "url")  # facts of each cell
FACTS: tuple[str, ...] = (*MACHINE, *CAMPAIGN, SERVER, *CELL)
# Fact -> the function that shortens its value for people.
SHORTENED: dict[str, Callable[[Any], Any]] = {
    "memory_total_bytes": formatting.size,
    "allowed_cores": len,
    "isa": lambda names: " ".join(sorted(names)) or "none",
    "gpus": lambda gpus: ", ".join(str(gpu.get("name")) for gpu in gpus) or "none",
}
MEMORY_TOLERANCE = 0.02  # relative; a kernel update changes MemTotal by less


class FactDifference(msgspec.Struct, frozen=True):
    """One fact in which two runs differ, with both values as people read them."""

    fact: str
    name: str
    first: str
    second: str


def differences(one: RunManifest, other: RunManifest) -> list[FactDifference]:
    """Return the facts of machine, campaign and server in which two runs differ, in a fixed
    order."""
    found = _differences_of_machines(_serving_machine(one), _serving_machine(other))
    for fact in CAMPAIGN:
        found += _difference(fact, fact, one.campaign.get(fact), other.campaign.get(fact))
    if any(cell.get("url") is None for cell in (*one.cells, *other.cells)):
        found += _difference(SERVER, SERVER, _server_settings(one), _server_settings(other))
    return found


def machine_differences(run: RunManifest, facts: Mapping[str, Any]) -> list[FactDifference]:
    """Return the facts in which the machine that started a run differs from one with these
    facts."""
    return _differences_of_machines(run.client_facts, facts)


def _serving_machine(run: RunManifest) -> Mapping[str, Any]:
    """Return the facts of the machine that serves or, if only its URL is known, of the one that
    sends the load."""
    return run.server_facts if "cpu_model" in run.server_facts else run.client_facts


def _server_settings(run: RunManifest) -> dict[str, Any]:
    """Return the campaign's table of the server, without what has no effect on speed."""
    return {**(run.campaign.get(SERVER) or {}), "cache": None, "ready_seconds": None}


def _differences_of_machines(
    first: Mapping[str, Any], second: Mapping[str, Any]
) -> list[FactDifference]:
    found = []
    for fact, name in MACHINE.items():
        one, other = first.get(fact), second.get(fact)
        if fact == "memory_total_bytes" and one and other:
            if abs(one - other) <= MEMORY_TOLERANCE * max(one, other):
                continue
        found += _difference(fact, name, _shown(fact, one), _shown(fact, other))
    return found


def _shown(fact: str, value: Any) -> str:
    return "not known" if value is None else str(SHORTENED.get(fact, str)(value))


def _difference(fact: str, name: str, one: Any, other: Any) -> list[FactDifference]:
    """Return [] if both values are equal, otherwise one difference. Of two tables it shows only the
    keys in which they differ. A value that is missing equals one that is empty."""
    if (one or None) == (other or None):
        return []
    if isinstance(one, dict) and isinstance(other, dict):
        keys = [key for key in {**one, **other} if one.get(key) != other.get(key)]
        one_text = ", ".join(f"{key} {one.get(key)!r}" for key in keys)
        other_text = ", ".join(f"{key} {other.get(key)!r}" for key in keys)
        return [FactDifference(fact, name, one_text, other_text)]
    return [FactDifference(fact, name, str(one), str(other))]

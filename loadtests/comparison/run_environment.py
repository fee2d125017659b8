"""The facts in which two runs differ: what must be equal before their numbers are compared.

    for difference in differences(one_manifest, other_manifest):
        difference.fact, difference.first, difference.second

Facts are of the machine, the campaign, the server and the cell. Versions of software are none:
they are what one compares.
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
SERVER = "server"  # the campaign's table; of no meaning where all cells are endpoints
# Matched cell by cell, not run by run.
CELL: tuple[str, ...] = ("model", "format", "backend", "device", "url")
FACTS: tuple[str, ...] = (*MACHINE, *CAMPAIGN, SERVER, *CELL)
SHOWN: dict[str, Callable[[Any], Any]] = {
    "memory_total_bytes": formatting.size,
    "allowed_cores": len,
    "isa": lambda names: " ".join(sorted(names)) or "none",
    "gpus": lambda gpus: ", ".join(str(gpu.get("name")) for gpu in gpus) or "none",
}
SAME_MEMORY = 0.02  # a kernel update moves MemTotal by less


class FactDifference(msgspec.Struct, frozen=True):
    """One fact in which two runs differ, with both values as people read them."""

    fact: str
    name: str
    first: str
    second: str


def differences(one: RunManifest, other: RunManifest) -> list[FactDifference]:
    """Facts of machine, campaign and server in which two runs differ, in a fixed order."""
    # The machine that serves, where it is ours; else the one that sends the load.
    machines = [
        run.server_facts if "cpu_model" in run.server_facts else run.client_facts
        for run in (one, other)
    ]
    found = _of_machines(*machines)
    for fact in CAMPAIGN:
        found += _apart(fact, fact, one.campaign.get(fact), other.campaign.get(fact))
    if any(cell.get("url") is None for run in (one, other) for cell in run.cells):
        servers = [
            {**(run.campaign.get(SERVER) or {}), "cache": None, "ready_seconds": None}
            for run in (one, other)
        ]
        found += _apart(SERVER, SERVER, *servers)
    return found


def machine_differences(run: RunManifest, facts: Mapping[str, Any]) -> list[FactDifference]:
    """Facts in which the machine that began a run differs from one with these facts."""
    return _of_machines(run.client_facts, facts)


def _of_machines(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[FactDifference]:
    found = []
    for fact, name in MACHINE.items():
        one, other = mine.get(fact), theirs.get(fact)
        if fact == "memory_total_bytes" and one and other:
            if abs(one - other) <= SAME_MEMORY * max(one, other):
                continue
        both = ("not known" if v is None else str(SHOWN.get(fact, str)(v)) for v in (one, other))
        found += _apart(fact, name, *both)
    return found


def _apart(fact: str, name: str, mine: Any, theirs: Any) -> list[FactDifference]:
    """[] where there is none; of two tables the keys in which they differ. Missing is empty."""
    if (mine or None) == (theirs or None):
        return []
    if isinstance(mine, dict) and isinstance(theirs, dict):
        keys = [key for key in {**mine, **theirs} if mine.get(key) != theirs.get(key)]
        mine, theirs = (", ".join(f"{k} {t.get(k)!r}" for k in keys) for t in (mine, theirs))
    return [FactDifference(fact, name, str(mine), str(theirs))]

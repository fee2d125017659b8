"""The facts in which two runs differ: what must be equal before their numbers are compared.

    for difference in differences(one_manifest, other_manifest):
        difference.fact, difference.first, difference.second

Facts are of the machine, the campaign, the server and the cell. Versions of software are none:
they are what one compares, and `versions_apart` lists them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec

from loadtests.records.run_folder import RunManifest
from models import formatting

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
CAMPAIGN: tuple[str, ...] = ("workload", "arrivals", "slo", "engines", "seed")
SERVER: tuple[str, ...] = (
    *("slots", "context_tokens", "kv_tokens", "kv_dtype", "policy", "prefill_tokens"),
    *("step_seconds_target", "prefix_reuse", "options", "cores", "threads"),
)
# Matched cell by cell, not run by run.
CELL: tuple[str, ...] = ("model", "format", "backend", "url")
FACTS: tuple[str, ...] = (*MACHINE, *CAMPAIGN, *SERVER, *CELL)
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


def differences(one: RunManifest, other: RunManifest) -> Iterator[FactDifference]:
    """Facts of machine, campaign and server settings in which two runs differ, in a fixed order."""
    yield from _of_machines(_machine(one), _machine(other))
    for fact in CAMPAIGN:
        yield from _apart(fact, fact, one.campaign.get(fact), other.campaign.get(fact))
    if any(cell.get("url") is None for manifest in (one, other) for cell in manifest.cells):
        mine, theirs = (manifest.campaign.get("server") or {} for manifest in (one, other))
        for fact in SERVER:
            yield from _apart(fact, f"server.{fact}", mine.get(fact), theirs.get(fact))


def machine_differences(run: RunManifest, facts: Mapping[str, Any]) -> list[FactDifference]:
    """Facts in which the machine that began a run differs from one with these facts."""
    return list(_of_machines(run.client_facts, facts))


def versions_apart(one: RunManifest, other: RunManifest) -> list[str]:
    """ "llama-cpp-python 0.3.35 and 0.3.36" ...: what software changed between two runs."""
    mine, theirs = ({"crossover": run.crossover_version, **run.versions} for run in (one, other))
    return [
        f"{name} {(mine.get(name) or 'none')[:12]} and {(theirs.get(name) or 'none')[:12]}"
        for name in dict.fromkeys([*mine, *theirs])
        if mine.get(name) != theirs.get(name)
    ]


def _machine(manifest: RunManifest) -> dict[str, Any]:
    """The machine that serves, where it is ours; else the one that sends the load."""
    served = manifest.server_facts
    return served if "cpu_model" in served else manifest.client_facts


def _of_machines(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> Iterator[FactDifference]:
    for fact, name in MACHINE.items():
        one, other = mine.get(fact), theirs.get(fact)
        if fact == "memory_total_bytes" and one and other:
            if abs(one - other) <= SAME_MEMORY * max(one, other):
                continue
        yield from _apart(fact, name, _shown(fact, one), _shown(fact, other))


def _shown(fact: str, value: Any) -> str:
    """A machine's fact as people read it."""
    return "not known" if value is None else str(SHOWN.get(fact, str)(value))


def _apart(fact: str, name: str, mine: Any, theirs: Any) -> Iterator[FactDifference]:
    """A difference where there is one; of two tables it shows the keys in which they differ.

    A key that an older format did not have is the same as an empty one.
    """
    if (mine or None) == (theirs or None):
        return
    if isinstance(mine, dict) and isinstance(theirs, dict):
        keys = [key for key in dict.fromkeys([*mine, *theirs]) if mine.get(key) != theirs.get(key)]
        mine, theirs = (", ".join(f"{k} {t.get(k)!r}" for k in keys) for t in (mine, theirs))
    yield FactDifference(fact, name, str(mine), str(theirs))

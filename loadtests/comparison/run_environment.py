"""The facts in which two runs differ: what must be equal before their numbers are compared.

    for difference in differences(one_manifest, other_manifest):
        difference.fact, difference.first, difference.second

Facts are of the machine, the campaign, the server and the cell. Versions of software are none:
they are what one compares, and `versions_apart` lists them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
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
CAMPAIGN: tuple[str, ...] = ("workload", "workloads", "arrivals", "slo")
ENGINES = "engines"  # of others: their commands, where both runs have them
SERVER: tuple[str, ...] = (
    "slots",
    "context_tokens",
    "kv_tokens",
    "kv_dtype",
    "policy",
    "prefill_tokens",
    "step_seconds",
    "prefix_reuse",
    "options",
)
# Matched cell by cell, not run by run.
CELL: tuple[str, ...] = ("model", "format", "backend", "hardware", "url")
FACTS: tuple[str, ...] = (*MACHINE, *CAMPAIGN, ENGINES, *SERVER, *CELL)
SAME_MEMORY = 0.02  # a kernel update moves MemTotal by less


class FactDifference(msgspec.Struct, frozen=True):
    """One fact in which two runs differ, with both values as people read them."""

    fact: str
    name: str
    first: str
    second: str


def differences(one: RunManifest, other: RunManifest) -> Iterator[FactDifference]:
    """Facts of machine, campaign and server settings in which two runs differ, in a fixed order."""
    for fact, name in MACHINE.items():
        mine = _machine(one).get(fact)
        theirs = _machine(other).get(fact)
        if not same(fact, mine, theirs):
            yield FactDifference(fact, name, show(fact, mine), show(fact, theirs))
    for fact in CAMPAIGN:
        # A key that an older format did not have is the same as an empty one.
        mine, theirs = one.campaign.get(fact) or None, other.campaign.get(fact) or None
        if mine != theirs:
            yield FactDifference(fact, fact, *_apart(mine, theirs))
    mine, theirs = one.campaign.get(ENGINES) or {}, other.campaign.get(ENGINES) or {}
    for name in mine.keys() & theirs.keys():
        if mine[name] != theirs[name]:
            yield FactDifference(ENGINES, f"engine {name}", *_apart(mine[name], theirs[name]))
    servers = [manifest.campaign.get("server") or {} for manifest in (one, other)]
    if any(cell.get("url") is None for manifest in (one, other) for cell in manifest.cells):
        for fact in SERVER:
            if servers[0].get(fact) != servers[1].get(fact):
                yield FactDifference(
                    fact, f"server.{fact}", str(servers[0].get(fact)), str(servers[1].get(fact))
                )


def machine_differences(run: RunManifest, facts: Mapping[str, Any]) -> list[FactDifference]:
    """Facts in which the machine that began a run differs from one with these facts."""
    then = run.client_facts
    return [
        FactDifference(fact, name, show(fact, then.get(fact)), show(fact, facts.get(fact)))
        for fact, name in MACHINE.items()
        if not same(fact, then.get(fact), facts.get(fact))
    ]


def versions_apart(one: RunManifest, other: RunManifest) -> list[str]:
    """ "llama-cpp-python 0.3.35 and 0.3.36" ...: what software changed between two runs."""
    pairs = {
        "crossover": (one.crossover_version, other.crossover_version),
        "commit": (one.git_commit, other.git_commit),
    }
    names = dict.fromkeys([*one.versions, *other.versions])
    pairs |= {name: (one.versions.get(name), other.versions.get(name)) for name in names}
    return [f"{name} {_version(a)} and {_version(b)}" for name, (a, b) in pairs.items() if a != b]


def same(fact: str, mine: Any, theirs: Any) -> bool:
    """Whether two values of a machine's fact are one to us."""
    if fact == "memory_total_bytes" and mine and theirs:
        return bool(abs(mine - theirs) <= SAME_MEMORY * max(mine, theirs))
    if fact == "gpus":
        return gpu_names(mine) == gpu_names(theirs)
    if fact == "isa":
        return {*(mine or ())} == {*(theirs or ())}
    if fact == "allowed_cores":
        return len(mine or ()) == len(theirs or ())
    return bool(mine == theirs)


def gpu_names(gpus: Sequence[Mapping[str, Any]] | None) -> list[str]:
    return [str(gpu.get("name")) for gpu in gpus or []]


def show(fact: str, value: Any) -> str:
    """A machine's fact as people read it."""
    if value is None:
        return "not known"
    if fact == "memory_total_bytes":
        return formatting.size(value)
    if fact == "allowed_cores":
        return str(len(value))
    if fact == "isa":
        return " ".join(value) or "none"
    if fact == "gpus":
        return ", ".join(gpu_names(value)) or "none"
    return str(value)


def server_machine(manifest: RunManifest) -> dict[str, Any] | None:
    """Facts of the machine that serves; None where it is not ours."""
    return manifest.server_facts if "cpu_model" in manifest.server_facts else None


def usable_cores(facts: Mapping[str, Any]) -> float | None:
    """Of a machine's processes, or their CPU quota where that is less; None: not known."""
    allowed, quota = facts.get("allowed_cores"), facts.get("cgroup_cores")
    cores = len(allowed) if allowed else facts.get("logical_cores")
    if not cores:
        return None
    return float(min(cores, quota) if quota else cores)


def _machine(manifest: RunManifest) -> dict[str, Any]:
    """The machine that serves, where it is ours; else the one that sends the load."""
    return server_machine(manifest) or manifest.client_facts


def _version(text: str | None) -> str:
    return "none" if text is None else text[:12]


def _apart(mine: Any, theirs: Any) -> tuple[str, str]:
    """Two values, or of two tables the keys in which they differ."""
    if not isinstance(mine, dict) or not isinstance(theirs, dict):
        return str(mine), str(theirs)
    keys = [key for key in dict.fromkeys([*mine, *theirs]) if mine.get(key) != theirs.get(key)]
    return ", ".join(f"{key} {mine.get(key)!r}" for key in keys), ", ".join(
        f"{key} {theirs.get(key)!r}" for key in keys
    )

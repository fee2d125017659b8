"""What page and Markdown say of how a run was made: machine, software, commands, counts."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from models import formatting
from reports.findings import Crossover
from reports.numbers import RunNumbers
from reports.sentences import machine_words

Facts = list[tuple[str, str]]  # name, value
QUALITY_WORDS = (
    "A format's KL is the mean divergence of its next-token probabilities from those of the float "
    "model, measured when the weights were converted. For random weights it shows that the "
    "conversion is right, not how good a trained model would be."
)


def quality_words(run: RunNumbers) -> str:
    """What KL is; "" where no format's quality is known."""
    known = any(cell.quality_kl_nats is not None for cell in run.cells)
    return QUALITY_WORDS if known else ""


def counts_words(run: RunNumbers) -> str:
    """How much was measured."""
    text = (
        f"{formatting.count(run.requests)} requests on record, "
        f"{formatting.count(run.requests_counted)} of them due in the window of "
        f"{len(run.levels)} finished levels"
    )
    took = formatting.seconds(run.measured_seconds) if run.measured_seconds else ""
    return f"{text}; the run took {took}." if took else f"{text}."


def commands(run: RunNumbers, found: Crossover) -> str:
    """What to type to measure again, and to make this report again."""
    asked = f" --rate {found.asked_rate:g}" if found.asked_rate is not None else ""
    return (
        "# measure again: the campaign below, saved as campaign.toml\n"
        f"{command_words(run.manifest.command)}\n\n"
        "# make this report again from the records\n"
        f"crossover report {run.folder}{asked}"
    )


def command_words(command: Sequence[str]) -> str:
    """The command line as one would type it, whatever way the program was started."""
    if not command:
        return "crossover campaign run campaign.toml"
    ours = Path(command[0]).name in ("crossover", "crossover.py", "__main__.py")
    return shlex.join(["crossover" if ours else command[0], *command[1:]])


def machine_facts(facts: Mapping[str, Any]) -> Facts:
    """What is known of a machine."""
    rows = [
        ("Machine", machine_words(facts)),
        ("Cores", _cores(facts)),
        ("Instruction sets", ", ".join(facts.get("isa") or [])),
        ("Memory", _memory(facts)),
        ("Memory bandwidth", _bandwidth(facts)),
        ("Arithmetic", _arithmetic(facts)),
        ("Swap in use", _swap(facts)),
        ("GPU", _gpus(facts)),
        ("System", ", ".join(_known(facts, "system", "kernel", "virtualisation"))),
    ]
    return [(name, value) for name, value in rows if value]


def _cores(facts: Mapping[str, Any]) -> str:
    allowed = facts.get("allowed_cores")
    if not allowed:
        return ""
    physical = facts.get("physical_cores") or "unknown"
    return f"{len(allowed)} usable of {facts.get('logical_cores')} logical, {physical} physical"


def _memory(facts: Mapping[str, Any]) -> str:
    if not facts.get("memory_total_bytes"):
        return ""
    free = formatting.size(facts.get("memory_available_bytes"))
    return f"{formatting.size(facts['memory_total_bytes'])}, {free} free at the start"


def _bandwidth(facts: Mapping[str, Any]) -> str:
    found = facts.get("bandwidth_bytes_per_second")
    return f"{formatting.bandwidth(found)} read" if found else ""


def _arithmetic(facts: Mapping[str, Any]) -> str:
    found = facts.get("gemm_flops_per_second")
    return f"{formatting.operations(found)} in float32 products" if found else ""


def _swap(facts: Mapping[str, Any]) -> str:
    return formatting.size(facts["swap_used_bytes"]) if facts.get("swap_total_bytes") else ""


def _gpus(facts: Mapping[str, Any]) -> str:
    gpus = [
        f"{gpu.get('name')} ({formatting.size(gpu.get('total_bytes'))})"
        for gpu in facts.get("gpus") or []
    ]
    why = [*_known(facts, "gpu_note", "gpu_cause"), "none found"][0]
    return ", ".join(gpus) or f"none ({why})"


def _known(facts: Mapping[str, Any], *names: str) -> list[str]:
    return [str(facts[name]) for name in names if facts.get(name)]


def software(run: RunNumbers) -> Facts:
    """Versions and seed."""
    manifest = run.manifest
    commit = f", commit {manifest.git_commit[:12]}" if manifest.git_commit else ""
    versions = [pair for pair in sorted(manifest.versions.items()) if pair[0] != "crossover"]
    return [
        ("Crossover", f"{manifest.crossover_version}{commit}"),
        *versions,
        ("Seed", str(manifest.seed)),
        ("Run format", str(manifest.format_version)),
    ]


def day(stamp: str) -> str:
    """`28 May 2026, 12:00 UTC`; another text as it is."""
    try:
        return f"{datetime.fromisoformat(stamp):%d %B %Y, %H:%M} UTC".lstrip("0")
    except ValueError:
        return stamp

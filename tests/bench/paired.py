"""What side-by-side benchmarks have in common: a parser, the ratios of pairs, and the facts of the
machine they ran on.

The speed of a machine changes from minute to minute. So contestants take turns within one run, and
the reported figures are the median over rounds, and the median of the ratios round by round: a slow
minute falls on both sides of a pair. Figures are plain numbers by name; None where a run could not
measure one.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from crossover.serving.hardware.machine_facts import hardware_facts

Figures = dict[str, float | None]


def parser_of(text: str | None) -> argparse.ArgumentParser:
    """Return a benchmark's argument parser, whose help is this text as it stands."""
    kind = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(description=text, formatter_class=kind)


def ratios(ours: Sequence[Figures], theirs: Sequence[Figures], key: str) -> list[float]:
    """Return ours / theirs for each round that measured both."""
    pairs = ((a.get(key), b.get(key)) for a, b in zip(ours, theirs, strict=True))
    return [a / b for a, b in pairs if a is not None and b]


def machine(*packages: str) -> dict[str, Any]:
    """Return facts of this machine and versions of `packages`."""
    facts = hardware_facts()
    load = Path("/proc/loadavg")
    return {
        "cpu": facts.cpu_model,
        "isa": ", ".join(facts.isa),
        "cores": facts.logical_cores,
        "memory_bytes": facts.memory_total_bytes,
        "virtualisation": facts.virtualisation,
        "system": facts.system,
        "kernel": facts.kernel,
        "python": facts.python,
        "load_average": load.read_text(encoding="ascii").split()[0] if load.exists() else None,
        "day": time.strftime("%Y-%m-%d"),
        **{name: importlib.metadata.version(name) for name in packages},
    }


def machine_line(facts: Mapping[str, Any]) -> str:
    """Return the facts as one line."""
    return "; ".join(f"{key} {value}" for key, value in facts.items() if value not in (None, ""))

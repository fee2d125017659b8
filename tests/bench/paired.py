"""Contestants that take turns, and what comes of it: medians, the ratio of each pair, the machine's
facts, every run kept.

    runs = take_turns({"crossover": once, "peer": other}, rounds=5)
    print(table(runs, "crossover", (Line("output_tokens_per_second", "tokens/s"),)))

A machine that others use drifts by 5 to 10 % within minutes. So each round runs every contestant
once, the next round in the opposite order, and a ratio is the median of the rounds' own ratios,
never a ratio of medians. Figures are plain numbers by name; None where a run could not measure one.
"""

from __future__ import annotations

import importlib.metadata
import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from serving.hardware.machine_facts import hardware_facts

Figures = dict[str, float | None]
Runs = dict[str, list[Figures]]  # by contestant, one entry a round


class Line(NamedTuple):
    """One figure of a table: its key, the unit to print, and what to multiply by."""

    key: str
    unit: str
    scale: float = 1.0


def take_turns(
    contestants: Mapping[str, Callable[[int], Figures]],
    rounds: int,
    said: Callable[[str], None] | None = None,
    first: int = 0,
) -> Runs:
    """Every contestant once a round, in turns, given the round's number; those with an odd number
    go the other way.
    """
    runs: Runs = {name: [] for name in contestants}
    for number in range(first, first + rounds):
        for name in reversed(list(contestants)) if number % 2 else contestants:
            runs[name].append(contestants[name](number))
            if said is not None:
                shown = next(
                    f"{key} {value:.4g}"
                    for key, value in runs[name][-1].items()
                    if value is not None
                )
                said(f"  round {number + 1}: {name:32} {shown}")
    return runs


def median(runs: Sequence[Figures], key: str) -> float | None:
    """The middle of what the runs measured; None where none did."""
    found = [value for run in runs if (value := run.get(key)) is not None]
    return statistics.median(found) if found else None


def ratios(ours: Sequence[Figures], theirs: Sequence[Figures], key: str) -> list[float]:
    """ours / theirs of each round that measured both."""
    pairs = ((a.get(key), b.get(key)) for a, b in zip(ours, theirs, strict=True))
    return [a / b for a, b in pairs if a is not None and b]


def table(runs: Runs, ours: str, lines: Sequence[Line]) -> str:
    """Medians of all contestants, and beside each other one the median (least to greatest) of ours
    / theirs.
    """
    out = []
    for line in lines:
        ours_median = median(runs[ours], line.key)
        if ours_median is None:
            continue
        out.append(f"  {line.key:28} {ours_median * line.scale:9.1f} {line.unit:9} {ours}")
        for name in runs:
            theirs = median(runs[name], line.key)
            if name == ours or theirs is None:
                continue
            pairs = ratios(runs[ours], runs[name], line.key)
            span = (
                f"ratio {statistics.median(pairs):.2f} ({min(pairs):.2f}-{max(pairs):.2f}, "
                f"{len(pairs)} pairs)"
                if pairs
                else ""
            )
            out.append(f"  {'':28} {theirs * line.scale:9.1f} {line.unit:9} {name:32} {span}")
    return "\n".join(out)


def machine(*packages: str) -> dict[str, Any]:
    """Facts of this machine and versions of `packages`, for the head of a table and for the file of
    runs.
    """
    facts = hardware_facts()
    versions = {name: importlib.metadata.version(name) for name in packages}
    return {
        "cpu": facts.cpu_model,
        "isa": ", ".join(facts.isa),
        "cores": facts.logical_cores,
        "memory_bytes": facts.memory_total_bytes,
        "virtualisation": facts.virtualisation,
        "system": facts.system,
        "kernel": facts.kernel,
        "python": facts.python,
        "load_average": Path("/proc/loadavg").read_text(encoding="ascii").split()[0]
        if Path("/proc/loadavg").exists()
        else None,
        "day": time.strftime("%Y-%m-%d"),
        **versions,
    }


def machine_line(facts: Mapping[str, Any]) -> str:
    """The facts as one line."""
    return "; ".join(f"{key} {value}" for key, value in facts.items() if value not in (None, ""))


class Series(msgspec.Struct):
    """A file of runs.

    One that is there already is resumed, so that a long comparison can be taken in several
    sittings.
    """

    settings: dict[str, Any]
    machines: list[dict[str, Any]]
    runs: dict[str, Runs]  # by workload

    @classmethod
    def opened(cls, path: Path | None, settings: dict[str, Any], facts: dict[str, Any]) -> Series:
        """A new series, or the one in `path` with this sitting's machine added.

        Raises ValueError where its settings are others.
        """
        plain = json.loads(json.dumps(settings))
        if path is None or not path.exists():
            return cls(plain, [facts], {})
        found = msgspec.json.decode(path.read_bytes(), type=cls)
        if found.settings != plain:
            different = sorted(
                key
                for key in {*plain, *found.settings}
                if plain.get(key) != found.settings.get(key)
            )
            raise ValueError(
                f"{path} was taken with other settings ({', '.join(different)}); name another file"
            )
        found.machines.append(facts)
        return found

    def add(self, workload: str, runs: Runs) -> Runs:
        """Add a sitting's runs; returns all there are of this workload."""
        kept = self.runs.setdefault(workload, {name: [] for name in runs})
        for name, figures in runs.items():
            kept.setdefault(name, []).extend(figures)
        return kept

    def save(self, path: Path | None) -> None:
        if path is not None:
            path.write_bytes(msgspec.json.format(msgspec.json.encode(self)) + b"\n")

"""Energy per token: measured by RAPL or a GPU's driver; from TDP an estimate, and called so."""

from __future__ import annotations

import re

import msgspec

from loadtests.metrics.energy import Energy
from reports.numbers import CellNumbers, LevelNumbers, RunNumbers
from reports.planning import hardware


class LevelEnergy(msgspec.Struct, frozen=True, kw_only=True):
    """Of one level."""

    cell: CellNumbers
    level: LevelNumbers
    energy: Energy

    @property
    def watts(self) -> float | None:
        return self.energy.watts

    @property
    def joules_per_token(self) -> float | None:
        """Of output tokens that arrived in the window; None where none did."""
        speed = self.level.summary.throughput.output_tokens_per_second
        return self.watts / speed if self.watts is not None and speed else None


def energies_of(run: RunNumbers) -> list[LevelEnergy]:
    """Of the levels where energy was measured."""
    return [
        LevelEnergy(cell=cell, level=level, energy=level.energy)
        for cell in run.cells
        for level in cell.levels
        if level.energy is not None
    ]


class TdpEstimate(msgspec.Struct, frozen=True, kw_only=True):
    """What a level would take if this machine's part of the CPU drew its thermal design power."""

    cell: CellNumbers
    level: LevelNumbers
    watts: float
    source: str

    @property
    def joules_per_token(self) -> float | None:
        speed = self.level.summary.throughput.output_tokens_per_second
        return self.watts / speed if speed else None


def estimates_of(run: RunNumbers) -> list[TdpEstimate]:
    """Of the levels without measured energy; none where the list does not have this CPU."""
    device = _listed_cpu(run)
    cores = len(run.facts.get("allowed_cores") or ())
    if device is None or not device.watts or not device.cores or not cores:
        return []
    threads = device.cores * device.threads_per_core
    share = min(1.0, cores / threads)
    source = f"TDP of {device.name}, {cores} of {threads:g} threads"
    return [
        TdpEstimate(cell=cell, level=level, watts=device.watts * share, source=source)
        for cell in run.cells
        if cell.url is None and cell.device != "gpu"
        for level in cell.levels
        if level.energy is None
    ]


def _listed_cpu(run: RunNumbers) -> hardware.Device | None:
    """The device whose model number this machine's CPU names."""
    words = set(str(run.facts.get("cpu_model") or "").split())
    for device in hardware.devices():
        numbers = set(re.findall(r"[\w+]*\d{4}[\w+]*", device.name))
        if device.kind == "cpu" and numbers & words:
            return device
    return None


def why_not_measured(run: RunNumbers) -> str:
    """What stood in the way, as the sampler said it; "" where nothing is on record."""
    told = [one.not_sampled for one in run.cells]
    reasons = [one[key] for one in told for key in ("cpu_watts", "gpu") if key in one]
    return "; ".join(dict.fromkeys(reasons))

"""Servers of known speed, whose speed differs from run to run, as a comparison sees their runs.

bench = Servers(sd=0.04, seed=7)
bench.arm("a", runs=3), bench.arm("b", runs=3, slower=1.2)
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from crossover.loadtests.comparison.compare_runs import RunValues
from crossover.loadtests.records.journal_events import FORMAT_VERSION
from crossover.loadtests.records.run_folder import RunManifest

# Latencies answer to speed as those of a queue do: far more than in proportion near the capacity.
STEEPNESS = {"TTFT p50": 1.0, "TTFT p95": 3.0, "TPOT p50": 1.2, "E2E p50": 1.5, "E2E p95": 2.0}
MACHINE: dict[str, Any] = {
    "cpu_model": "EPYC",
    "architecture": "x86_64",
    "logical_cores": 2,
    "allowed_cores": [0, 1],
    "memory_total_bytes": 24 << 30,
}
CAMPAIGN: dict[str, Any] = {
    "slo": {"name": "chat", "ttft_seconds": 2.0, "tpot_seconds": 0.1, "target": 0.9},
    "workload": {"preset": "chat"},
    "arrivals": {"kind": "poisson"},
    "server": {"slots": 8, "context_tokens": 256},
}
CELL = ("smollm2-135m", "Q4_0", "llama_cpp", "cpu", "")


def manifest(
    name: str,
    machine: dict[str, Any] = MACHINE,
    campaign: dict[str, Any] = CAMPAIGN,
    at: int = 0,
    **versions: str,
) -> RunManifest:
    return RunManifest(
        format_version=FORMAT_VERSION,
        run_id=name,
        created=f"2026-05-28T10:{at // 60:02}:{at % 60:02}Z",
        crossover_version="0.1.0",
        command=[],
        campaign=campaign,
        campaign_text="",
        cells=[{"key": "c", "url": None}],
        server_facts=machine,
        client_facts=machine,
        versions=versions,
    )


class Servers:
    """Runs of servers whose speed has the standard deviation `sd` from run to run."""

    def __init__(self, sd: float, seed: int) -> None:
        self._sd = sd
        self._rng = np.random.default_rng(seed)

    def arm(self, name: str, runs: int, slower: float = 1.0) -> list[RunValues]:
        """Begun in turns with the other arm; each run with noise of its own."""
        found = []
        for i in range(runs):
            rng, scale = self._rng, slower * math.exp(self._sd * self._rng.normal())
            values = {
                (load, metric): scale**steepness * math.exp(0.03 * rng.normal())
                for load in ("1.5/s", "2.2/s")
                for metric, steepness in STEEPNESS.items()
            }
            for load in ("1.5/s", "2.2/s"):
                values[load, "output tokens/s"] = 30.0 * math.exp(0.03 * rng.normal())
            values["single stream", "TPOT mean"] = scale * 0.023
            values["single stream", "TTFT mean"] = scale * 0.1
            values["", "estimated capacity"] = 3.0 / scale * math.exp(0.03 * rng.normal())
            run = manifest(f"{name}{i}", at=2 * i + (name > "a"))
            found.append(RunValues(run, {CELL: values}))
        return found

"""Servers of known speed, whose speed differs from run to run, as a comparison sees their runs.

    bench = Servers(sd=0.04, seed=7)
    bench.arm("a", runs=3), bench.arm("b", runs=3, slower=1.2)

A level is continuous batching simulated at the run's speed, so latencies answer to speed as
those of a queue do: far more than in proportion near the capacity.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np

from loadtests.comparison.compare_runs import CellValues, RunValues
from loadtests.records.run_folder import RunManifest
from loadtests.records.run_journal import FORMAT_VERSION
from loadtests.simulation.batching_simulator import SchedulingPolicy, simulate
from loadtests.simulation.step_law import StepLaw
from loadtests.workload.arrivals import Poisson, due_times

LAW = StepLaw(
    base_seconds=0.02, row_seconds=0.003, prompt_token_seconds=0.0005, context_token_seconds=2e-7
)
SEEDS = 16  # arrivals and lengths to choose from
STEP = 0.01  # speeds are rounded to this, so that each is simulated once
REQUESTS = 150
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
CELL = dict.fromkeys(("model", "format", "backend", "url"), "")
CELL |= {"model": "smollm2-135m", "format": "Q4_0", "backend": "llama_cpp"}


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
        cells=[{"key": "c", **CELL, "url": None}],
        server_facts=machine,
        client_facts=machine,
        versions=versions,
    )


@functools.cache
def level(rate: float, slowness: int, seed: int) -> dict[str, float]:
    """The metrics of a level on a server that takes `slowness` x STEP of the law's times."""
    rng = np.random.default_rng(seed)
    pairs = np.column_stack([rng.integers(20, 300, REQUESTS), rng.integers(8, 40, REQUESTS)])
    due = due_times(Poisson(), rate, 2 * REQUESTS / rate, seed)[:REQUESTS]
    prompts, outputs = pairs.T
    played = simulate(LAW.slower(slowness * STEP), SchedulingPolicy(slots=8), due, prompts, outputs)
    decoded = np.where(outputs > 1, played.tpot * (outputs - 1), 0.0)
    times = {"TTFT": played.ttft, "TPOT": played.tpot, "E2E": played.ttft + decoded}
    tokens = outputs.sum() / ((due + times["E2E"]).max() - due[0])
    return {
        f"{name} p{percentile}": float(np.nanpercentile(values, percentile))
        for name, values in times.items()
        for percentile in (50, 95)
    } | {"output tokens/s": float(tokens)}


class Servers:
    """Runs of servers whose speed has the standard deviation `sd` from run to run."""

    def __init__(self, sd: float, seed: int) -> None:
        self._sd = sd
        self._rng = np.random.default_rng(seed)

    def arm(self, name: str, runs: int, slower: float = 1.0) -> list[RunValues]:
        """Begun in turns with the other arm; each run with arrivals and lengths of its own."""
        found = []
        for i in range(runs):
            rng, scale = self._rng, slower * math.exp(self._sd * self._rng.normal())
            seed = int(rng.integers(SEEDS))
            values = {f"{rate}/s": level(rate, round(scale / STEP), seed) for rate in (1.5, 2.2)}
            values["alone"] = {"TPOT mean": scale * 0.023, "TTFT mean": scale * 0.1}
            values[""] = {"limit": 3.0 / scale * math.exp(0.03 * rng.normal())}
            cell = CellValues("c", CELL, values)
            found.append(RunValues(manifest(f"{name}{i}", at=2 * i + (name > "a")), [cell]))
        return found

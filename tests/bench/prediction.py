"""Predicted over true capacity, on servers whose step times are known, calibrated as the product
calibrates.

    python -m tests.bench.prediction                      # this checkout
    python -m tests.bench.prediction --old /path/to/another/checkout --runs 10

A world is a step law (base + row + prompt token, ms), a staircase of row costs, and beside the
typical time of a step 3 % of spread and a stall of four steps in one step of a hundred. Its true
capacity is the rate at which 90 % of 60,000 simulated requests are good. It is calibrated from its
single-stream requests and bursts within `--seconds` on the simulated clock, each run with another
seed. `--old` does the same with another checkout's calibration, law and simulation.

Printed for each world: median of predicted / true, its tenth and ninetieth percentile over runs,
how often p10..p90 holds the truth (asked: 80 %), seconds of CPU a prediction takes.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).resolve()
SLOTS = 16
SINGLE_STREAM = 8  # requests
TRUTH_REQUESTS = 60_000
TARGET = 0.9


@dataclass(frozen=True)
class World:
    """Milliseconds of a step, and the SLO's limits in seconds."""

    name: str
    base: float
    row: float
    prompt: float
    ttft: float
    tpot: float
    fours: bool = False  # 5 to 8 rows cost what 8 do; else only 3 cost what 4 do, and 7 what 8 do

    def rows(self, rows: int) -> int:
        if self.fours and rows > 2:
            return -(-rows // 4) * 4
        return rows + 1 if rows % 4 == 3 else rows

    def seconds(self, rows: int, prompt_tokens: int) -> float:
        return (self.base + self.row * self.rows(rows) + self.prompt * prompt_tokens) / 1e3


WORLDS = [
    World("3.5 + 6.3 + 3.3", 3.5, 6.3, 3.3, 2.0, 0.1),
    World("7 + 13 + 9", 7, 13, 9, 2.0, 0.1),
    World("30 + 32 + 24", 30, 32, 24, 2.0, 0.1),
    World("120 + 130 + 95", 120, 130, 95, 30.0, 0.5),
    World("300 + 310 + 240", 300, 310, 240, 30.0, 1.0),
    World("3.5 + 6.3 + 3.3, by fours", 3.5, 6.3, 3.3, 2.0, 0.1, True),
    World("7 + 13 + 9, by fours", 7, 13, 9, 2.0, 0.1, True),
    World("120 + 130 + 95, by fours", 120, 130, 95, 30.0, 0.7, True),
]


def server_module() -> Any:
    """tests/loadtests/simulation/simulated_server.py of this checkout, whatever `tests` is."""
    path = HERE.parents[1] / "loadtests" / "simulation" / "simulated_server.py"
    spec = importlib.util.spec_from_file_location("simulated_server", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def workload() -> Any:
    from loadtests.workload.request_lengths import Workload

    return Workload(preset="chat", max_prompt_tokens=40, max_output_tokens=16)


def slo_of(world: World) -> Any:
    from loadtests.metrics.slo import Slo

    return Slo("chat", world.ttft, world.tpot, target=TARGET)


def policy() -> Any:
    from loadtests.simulation.batching import Policy

    return Policy(slots=SLOTS, step_seconds_target=0.1)


def truth(world: World) -> float:
    """Requests/s, by bisection with common random numbers; steps are drawn one by one."""
    from loadtests.simulation.batching import simulate
    from loadtests.simulation.step_replay import ReplayedSteps, Residuals
    from loadtests.simulation.step_time import StepLaw
    from loadtests.workload.request_lengths import draw

    law = StepLaw(
        base_seconds=world.base / 1e3,
        rows=tuple((n, world.row * world.rows(n) / 1e3) for n in range(1, SLOTS + 1)),
        prompt_token_seconds=world.prompt / 1e3,
    )
    skewed = server_module().Skewed(99)
    ratios = tuple(skewed() for _ in range(50_000))
    residuals = Residuals(ratios, ratios, ratios)
    asks = draw(workload(), TRUTH_REQUESTS, 1)
    pairs = np.array([(ask.prompt_tokens, ask.output_tokens) for ask in asks])
    gaps = np.random.default_rng(5).exponential(1.0, TRUTH_REQUESTS).cumsum()
    low, high = 1e-4, 20.0
    while high / low > 1.005:
        middle = (low * high) ** 0.5
        steps = ReplayedSteps(law, residuals, 1)
        good = simulate(steps, policy(), gaps / middle, pairs).good(slo_of(world))
        low, high = (middle, high) if good[2000:].mean() >= TARGET else (low, middle)
    return low


def predicted(world: World, seed: int, seconds: float) -> dict[str, float | None]:
    """One calibration and prediction by the product, whichever checkout is imported."""
    from loadtests.simulation import calibration
    from loadtests.simulation.step_observations import observations_of
    from loadtests.workload.arrivals import Poisson
    from loadtests.workload.request_lengths import draw

    module = server_module()
    skewed = module.Skewed(seed)

    def step_seconds(rows: int, prompt_tokens: int, context: int, passes: int = 1) -> float:
        return float(world.seconds(rows, prompt_tokens) * skewed())

    server = module.Server(step_seconds, SLOTS)

    def ask(burst: Any) -> Any:
        tokens = burst.output_tokens
        each = (tokens,) * burst.streams if isinstance(tokens, int) else tokens
        return server.answer(burst.prompt_tokens, each)

    asks = draw(workload(), SINGLE_STREAM, seed)
    alone = [server.answer(one.prompt_tokens, (one.output_tokens,))[0] for one in asks]
    seen, _ = calibration.calibrate(ask, alone, workload(), SLOTS, seconds, lambda: server.now)
    began = time.process_time()
    made = calibration.prediction(
        [*observations_of(alone), *seen], policy(), workload(), Poisson(), [slo_of(world)], seed
    )
    cpu = time.process_time() - began
    rate: Any = made.rates["chat"]
    if isinstance(rate, float):  # before predictions had an interval
        return {"rate": rate, "low": None, "high": None, "cpu": cpu}
    return {"rate": rate.rate, "low": rate.low, "high": rate.high, "cpu": cpu}


def all_of(checkout: Path, seeds: int, seconds: float) -> dict[str, list[dict[str, Any]]]:
    """Predictions of every world by a checkout, in a process of its own."""
    command = [sys.executable, str(HERE), "--worlds", "--runs", str(seeds)]
    command += ["--seconds", str(seconds)]
    environment = os.environ | {"PYTHONPATH": str(checkout)}
    said = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    found: dict[str, list[dict[str, Any]]] = json.loads(said.stdout)
    return found


def line(name: str, rate: float, found: list[dict[str, Any]]) -> str:
    ratios = np.array([one["rate"] for one in found]) / rate
    covered = "   -"
    if found[0]["low"] is not None:
        covered = f"{np.mean([one['low'] <= rate <= one['high'] for one in found]):4.0%}"
    low, middle, high = np.quantile(ratios, (0.1, 0.5, 0.9))
    cpu = float(np.median([one["cpu"] for one in found]))
    return f"{name:34} {rate:8.4f} {middle:6.2f} ({low:.2f}-{high:.2f}) {covered:>8} {cpu:6.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=30.0, help="of a calibration")
    parser.add_argument("--old", type=Path, help="another checkout")
    parser.add_argument("--worlds", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worlds:
        runs = range(1, arguments.runs + 1)
        seconds = arguments.seconds
        found = {w.name: [predicted(w, seed, seconds) for seed in runs] for w in WORLDS}
        print(json.dumps(found))
        return
    checkouts = {"this": HERE.parents[2]} | ({"old": arguments.old} if arguments.old else {})
    made = {
        name: all_of(path, arguments.runs, arguments.seconds) for name, path in checkouts.items()
    }
    print(f"{'world (ms)':34} {'truth/s':>8} {'predicted / true':>18} {'covers':>8} {'CPU, s':>6}")
    for world in WORLDS:
        rate = truth(world)
        for name, by_world in made.items():
            print(line(f"{world.name}, {name}", rate, by_world[world.name]), flush=True)


if __name__ == "__main__":
    main()

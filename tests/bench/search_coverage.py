"""How often the search's interval covers the capacity, on servers whose capacity is known, on a simulated clock.

    python -m tests.bench.search_coverage --runs 100

Two servers: four slots of 0.51 s (M/D/4; good is who waits no more than 0.5 s), and continuous batching with a known step law (chat lengths,
TTFT 2 s and TPOT 100 ms), whose search starts at the prediction. Printed for each budget: runs whose interval covers the truth, the median
of estimate / truth, the median width of the interval over the estimate, levels and simulated seconds a search took.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import numpy as np

from loadtests.search import SearchConfig
from loadtests.simulate import Policy, predict
from loadtests.slo import Promise
from loadtests.steptime import StepLaw
from loadtests.workload import Workload, draw
from tests.loadtests.known_worlds import World, batching, capacity, md4, search

NINE = Promise("nine", 0.5, None, target=0.9)
BOTH = Promise("both", 2.0, 0.1, target=0.9)
LAW = StepLaw(base_seconds=0.02, row_seconds=0.003, prompt_token_seconds=0.0005, kv_token_seconds=2e-7)


def worlds() -> Iterator[tuple[str, World, Promise, float, float, SearchConfig]]:
    """Name, server, promise, its capacity in requests/s, seconds of a lone request, and how it is searched."""
    yield "4 slots of 0.51 s", md4(0.5), NINE, capacity(md4(0.5), 0.9, 5.0, 7.5), 0.51, SearchConfig()
    asks = draw(Workload(preset="chat", max_prompt_tokens=512, max_output_tokens=64), 3000, 1)
    pairs = np.array([(ask.prompt_tokens, ask.output_tokens) for ask in asks])
    world = batching(LAW, Policy(slots=16), pairs, BOTH)
    hint = predict(LAW, Policy(slots=16), pairs, BOTH, seed=5).rate
    yield "continuous batching", world, BOTH, capacity(world, 0.9, 0.5, 3.0, n=40_000), 2.5, SearchConfig(start_rate=hint)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--budgets", type=float, nargs="+", default=[300.0, 900.0])
    arguments = parser.parse_args()
    print(f"{'server':22} {'truth':>6} {'budget':>7} {'covers':>9} {'estimate/truth':>15} {'width':>7} {'levels':>7} {'seconds':>8}")
    for name, world, promise, truth, lone_seconds, config in worlds():
        for budget in arguments.budgets:
            covered, ratios, widths, counts, spent = 0, [], [], [], []
            for seed in range(arguments.runs):
                step, levels, seconds = search(world, _with_budget(config, budget), promise, seed, lone_seconds)
                found = step.capacity
                covered += found.low <= truth and (found.high is None or truth <= found.high)
                counts.append(len(levels))
                spent.append(seconds)
                if found.estimate and found.high:
                    ratios.append(found.estimate / truth)
                    widths.append((found.high - found.low) / found.estimate)
            print(
                f"{name:22} {truth:6.2f} {budget:7.0f} {covered:4d}/{arguments.runs:<4d} {np.median(ratios):15.3f} {np.median(widths):7.1%} "
                f"{np.median(counts):7.0f} {np.median(spent):8.0f}",
                flush=True,
            )


def _with_budget(config: SearchConfig, budget: float) -> SearchConfig:
    import msgspec

    return msgspec.structs.replace(config, budget_seconds=budget)


if __name__ == "__main__":
    main()

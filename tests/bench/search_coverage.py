"""How often the search's interval covers the capacity, on servers whose capacity is known, on a
simulated clock.

    python -m tests.bench.search_coverage --runs 100

Two servers: four slots of 0.51 s (M/D/4; good is who waits no more than 0.5 s), and continuous
batching with a known step law (chat lengths, TTFT 2 s and TPOT 100 ms). Each is searched by
measuring alone, and with a prediction that is off by 15 % (standard deviation), by 30 % and by 80 %
too high, and by 30 % too low. Printed for each budget: runs whose interval covers the truth, the
median of estimate / truth and of its error's size, the median width of the interval over the
estimate, levels and simulated seconds a search took.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import numpy as np

from loadtests.capacity.search_config import SearchConfig
from loadtests.metrics.slo import Slo
from loadtests.simulation.batching import Policy
from loadtests.simulation.step_time import StepLaw
from loadtests.workload.arrivals import OnOff
from loadtests.workload.requests import Workload, draw
from tests.loadtests.capacity.known_worlds import World, batching, capacity, md4, search

NINE = Slo("nine", 0.5, None, target=0.9)
BOTH = Slo("both", 2.0, 0.1, target=0.9)
LAW = StepLaw(
    base_seconds=0.02, row_seconds=0.003, prompt_token_seconds=0.0005, kv_token_seconds=2e-7
)


PREDICTIONS: dict[str, tuple[float, float]] = {  # factor, standard deviation of its logarithm
    "none": (0.0, 0.0),
    "off by 15 %": (1.0, 0.15),
    "30 % too high": (1.3, 0.0),
    "30 % too low": (0.7, 0.0),
    "80 % too high": (1.8, 0.0),
}


def worlds() -> Iterator[tuple[str, World, Slo, float, float]]:
    """Name, server, SLO, its capacity in requests/s, seconds of a single-stream request."""
    yield "4 slots of 0.51 s", md4(0.5), NINE, capacity(md4(0.5), 0.9, 5.0, 7.5), 0.51
    asks = draw(Workload(preset="chat", max_prompt_tokens=512, max_output_tokens=64), 3000, 1)
    pairs = np.array([(ask.prompt_tokens, ask.output_tokens) for ask in asks])
    world = batching(LAW, Policy(slots=16), pairs, BOTH)
    yield "continuous batching", world, BOTH, capacity(world, 0.9, 0.5, 3.0, n=40_000), 2.5
    # Held out: the estimator's constants were not chosen on these.
    is_long = np.random.default_rng(3).random(3000) < 0.15
    bimodal = np.column_stack([np.where(is_long, 480, 40), np.where(is_long, 60, 16)])
    world = batching(LAW, Policy(slots=16), bimodal, BOTH)
    yield "bimodal lengths", world, BOTH, capacity(world, 0.9, 0.5, 12.0, n=20_000), 2.5
    world = batching(LAW, Policy(slots=16), pairs, BOTH, OnOff(4.0, 8.0))
    yield "on/off arrivals", world, BOTH, capacity(world, 0.9, 0.2, 3.0, n=20_000), 2.5


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--budgets", type=float, nargs="+", default=[300.0, 900.0])
    parser.add_argument(
        "--predictions", nargs="+", choices=list(PREDICTIONS), default=list(PREDICTIONS)
    )
    arguments = parser.parse_args()
    heads = ("covers", "estimate/truth", "error", "width", "levels", "seconds")
    print(
        f"{'server':20} {'truth':>5} {'budget':>6} {'prediction':>14}"
        + "".join(f"{head:>15}" for head in heads)
    )
    for name, world, slo, truth, single_stream_seconds in worlds():
        for budget in arguments.budgets:
            for label in arguments.predictions:
                figures = trial(
                    world,
                    slo,
                    truth,
                    single_stream_seconds,
                    budget,
                    PREDICTIONS[label],
                    arguments.runs,
                )
                print(
                    f"{name:20} {truth:5.2f} {budget:6.0f} {label:>14}"
                    + "".join(f"{figure:>15}" for figure in figures),
                    flush=True,
                )


def trial(
    world: World,
    slo: Slo,
    truth: float,
    single_stream_seconds: float,
    budget: float,
    prediction: tuple[float, float],
    runs: int,
) -> list[str]:
    """Many searches of one server; the figures of a line as text."""
    covered, ratios, widths, counts, spent = 0, [], [], [], []
    factor, spread = prediction
    for seed in range(runs):
        rate = (
            truth * factor * float(np.exp(spread * np.random.default_rng(10_000 + seed).normal()))
            or None
        )
        config = SearchConfig(budget_seconds=budget, start_rate=rate, predicted_rate=rate)
        step, levels, seconds = search(world, config, slo, seed, single_stream_seconds)
        found = step.capacity
        covered += found.low <= truth and (found.high is None or truth <= found.high)
        counts.append(len(levels))
        spent.append(seconds)
        if found.estimate and found.high:
            ratios.append(found.estimate / truth)
            widths.append((found.high - found.low) / found.estimate)
    errors = np.abs(np.array(ratios) - 1)
    return [
        f"{covered}/{runs}",
        f"{np.median(ratios):.3f}",
        f"{np.median(errors):.1%}",
        f"{np.median(widths):.1%}",
        f"{np.median(counts):.0f}",
        f"{np.median(spent):.0f}",
    ]


if __name__ == "__main__":
    main()

"""What replicas on Ray are worth and what they cost: `python -m tests.bench.ray_scale`.

    make scale-test                                    # installs ray into .venv-scale
    .venv-scale/bin/python -m tests.bench.ray_scale --repeats 3

Engines are fake: they sleep through their steps, so that replicas need no cores of their own, and
what is measured is the way of a request. Two tables:

  scaling    1, 2 and 4 replicas, each with as many streams as it has slots, all the time; the rate
             of output tokens, and its part of the rate of one replica times their number
  overhead   one stream at a time, on `crossover serve` and on one replica behind the front, in
             turns: seconds to the first token, and seconds a token, of an engine whose steps take
             no time
"""

from __future__ import annotations

import argparse
import signal
import statistics
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import numpy as np

from tests.bench.closed_loop import Result, run
from tests.scale.test_serve_on_ray import Endpoint
from tests.serving.cli.test_serve import Server
from tests.tools.waiting import wait_for

SLOTS = 8
STEP_SECONDS = 0.05
TOKENS = 64
ROUNDS = 6  # requests of each stream
REPLICAS = (1, 2, 4)
LONG_TOKENS = 1000
ALONE = 60  # requests one after the other


DRAW = np.random.default_rng(1)


def prompts(count: int) -> list[str]:
    """Prompts that have nothing in common with any before them, so that load alone decides."""
    return [" ".join(map(str, DRAW.integers(0, 10**6, 16))) for _ in range(count)]


@contextmanager
def cluster(cpus: int) -> Iterator[str]:
    """The address of a node that says it has so many CPUs."""
    from ray.cluster_utils import Cluster  # tests.scale.conftest has made its environment

    head = {"num_cpus": cpus, "node_ip_address": "127.0.0.1"}
    made = Cluster(initialize_head=True, head_node_args=head)
    yield made.address
    made.shutdown()


@contextmanager
def on_ray(address: str, replicas: int, step_seconds: float) -> Iterator[str]:
    """The URL of a server with so many replicas."""
    with tempfile.TemporaryDirectory() as name:
        options = ("--slots", str(SLOTS), "--option", f"step_seconds={step_seconds}")
        made = Endpoint(Path(name), "--replicas", str(replicas), *options, address=address)
        wait_for(lambda: len(made.replicas()) == replicas, 120)
        yield made.url
        made.server.process.send_signal(signal.SIGTERM)
        made.server.process.wait(60)


@contextmanager
def alone(step_seconds: float) -> Iterator[str]:
    """The URL of a server without Ray."""
    with tempfile.TemporaryDirectory() as name:
        options = ("--slots", str(SLOTS), "--option", f"step_seconds={step_seconds}")
        made = Server(Path(name), *options)
        yield made.wait_ready()["url"]
        made.process.send_signal(signal.SIGTERM)
        made.process.wait(60)


def checked(result: Result) -> Result:
    assert result.failed == result.cut == 0, result
    return result


def scaling(address: str, repeats: int) -> None:
    print("replicas  output tokens/s  of one replica times their number  ITL p99 ms")
    rates: dict[int, float] = {}
    for replicas in REPLICAS:
        streams = replicas * SLOTS
        with on_ray(address, replicas, STEP_SECONDS) as url:
            asked = [prompts(ROUNDS * streams) for _ in range(repeats)]
            found = [checked(run(url, each, TOKENS, streams, "fake")) for each in asked]
        rates[replicas] = statistics.median(one.output_tokens_per_second for one in found)
        share = rates[replicas] / (replicas * rates[1])
        gap = 1e3 * statistics.median(one.itl_p99 for one in found)
        print(f"{replicas:8}  {rates[replicas]:15.1f}  {share:33.3f}  {gap:10.1f}")


def of_one(url: str) -> tuple[float, float]:
    """Seconds to the first token (the median), and seconds a token of long answers."""
    short = checked(run(url, prompts(ALONE), 2, 1, "fake"))
    long = checked(run(url, prompts(3), LONG_TOKENS, 1, "fake"))
    return short.ttft_p50, 1 / long.output_tokens_per_second


def overhead(address: str, repeats: int) -> None:
    ways: dict[str, Callable[[], AbstractContextManager[str]]] = {
        "crossover serve": lambda: alone(0.0),
        "front, one replica": lambda: on_ray(address, 1, 0.0),
    }
    print("\nserver              first token, ms  a token, us")
    for _ in range(repeats):
        for name, way in ways.items():
            with way() as url:
                request, token = of_one(url)
            print(f"{name:18}  {1e3 * request:15.2f}  {1e6 * token:11.1f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3)
    asked = parser.parse_args()
    with cluster(max(REPLICAS)) as address:
        scaling(address, asked.repeats)
        overhead(address, asked.repeats)


if __name__ == "__main__":
    main()

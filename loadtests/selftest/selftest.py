"""`crossover selftest`: does this load generator measure right on this machine?

A server with known truth (reference_server.py) is loaded as any endpoint would be, and the records
are compared with what the server says it did.

    times    one and four tokens a chunk, a third of the answers with a stall: TTFT, TPOT, E2E, gaps
    counts   answers that are cut off, and 429s of a full queue
    pace     Poisson arrivals as the server saw them, send lag, the client's CPU
    limit    a server that batches by a known step law: bursts, a law, a level, as a campaign does
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from loadtests.analysis.capacity_estimate import CONFIRMING_SHARE, estimate
from loadtests.analysis.level import Level
from loadtests.analysis.slo import Slo
from loadtests.campaign.progress import Progress
from loadtests.errors import LoadError
from loadtests.host.child_processes import Child
from loadtests.host.cpu_pinning import divide_cores
from loadtests.load_generator.http_connection import connect, fetch, get_bytes
from loadtests.load_generator.load_plan import Ended, LoadPlan
from loadtests.load_generator.locust_process import LoadGenerator
from loadtests.load_generator.openai_endpoint import Target, probe
from loadtests.records.request_record import RequestRecord
from loadtests.selftest.selftest_checks import (
    Row,
    arrival_row,
    capacity_rows,
    failure_rows,
    lag_row,
    level_of,
    times_rows,
)
from loadtests.simulation.batching_simulator import SchedulingPolicy
from loadtests.simulation.calibration_bursts import Burst, calibrate
from loadtests.simulation.simulated_capacity import capacity
from loadtests.simulation.step_law import StepLaw
from loadtests.workload.request_lengths import Ask, Workload
from serving.hardware.machine_facts import allowed_cores

TOKENS, GAP_SECONDS, STALL_SECONDS = 48, 0.008, 1.2
RATE, PACE_SECONDS = 600.0, 3.0
# An engine some ten times as fast as a small model's on a CPU, so that a short level sees enough.
LAW = StepLaw(
    base_seconds=0.005,
    row_seconds=0.0008,
    prompt_token_seconds=0.0001,
    context_token_seconds=5e-7,
    pass_seconds=0.001,
)
SLOTS = 8
WORKLOAD = Workload(preset="sharegpt", scale=0.15, max_prompt_tokens=256, max_output_tokens=64)
SLO = Slo("selftest", ttft_seconds=0.25, tpot_seconds=0.02, target=0.9)
ALONE = 10  # requests one at a time
LIMIT_SECONDS = 8.0  # of the level that confirms


Loaded = tuple[list[RequestRecord], Ended, dict[str, Any]]  # what both ends wrote down


class Bench:
    """Where the parts run: a folder, one load generator, and cores for the servers."""

    def __init__(self, folder: Path, generator: LoadGenerator, cores: tuple[int, ...]) -> None:
        self._folder, self._generator, self._cores = folder, generator, cores
        self._servers = 0

    @contextmanager
    def server(self, **truth: Any) -> Iterator[str]:
        """A reference server's URL."""
        self._servers += 1
        log = self._folder / f"server-{self._servers}.log"
        settings = json.dumps(msgspec.to_builtins(truth))
        command = [sys.executable, "-m", "loadtests.selftest.reference_server", settings]
        with Child(command, cores=self._cores, log=log, urgent=True) as child:
            until = time.monotonic() + 30
            while not (text := log.read_text()).endswith("\n"):
                if child.poll() is not None or time.monotonic() > until:
                    raise LoadError(f"the reference server did not start ({child.how_it_ended()})")
                time.sleep(0.01)
            yield f"http://127.0.0.1:{int(text)}"

    def send(self, url: str, **load: Any) -> Loaded:
        """One level, as the runner has it sent; `load`: of a LoadPlan."""
        target = Target(url=url)
        plan = LoadPlan(target=target, drain_seconds=20.0, facts=probe(target), **load)
        with connect(url) as pool:
            before = msgspec.json.decode(fetch(pool, get_bytes(pool, "/truth"))[2])
            told = list(self._generator.run(plan))
            after = msgspec.json.decode(fetch(pool, get_bytes(pool, "/truth"))[2])
        records = [one for one in told if isinstance(one, RequestRecord)]
        (account,) = [one for one in told if isinstance(one, Ended)]
        log = {name: entry for name, entry in after.items() if name not in before}
        return records, account, log

    def load(self, rate: float, seconds: float, tokens: int, **truth: Any) -> Loaded:
        """One level of requests with so many tokens on a server of its own."""
        workload = Workload(prompt_tokens=16, output_tokens=tokens)
        with self.server(**truth) as url:
            return self.send(url, rate=rate, window_seconds=seconds, workload=workload)


@contextmanager
def open_bench() -> Iterator[Bench]:
    """A bench in a folder that goes with it."""
    layout = divide_cores(allowed_cores())
    with tempfile.TemporaryDirectory(prefix="crossover-selftest-") as name:
        folder = Path(name)
        with LoadGenerator(log=folder / "locust.log", cores=layout.client) as generator:
            yield Bench(folder, generator, layout.engine[:1])


def times(bench: Bench) -> list[Row]:
    """Chunks of one and of four tokens; a third of the answers stall."""
    rows: list[Row] = []
    stalls = {"stall": STALL_SECONDS, "stall_at": 6, "stall_every": 3}
    for chunk in (1, 4):
        truth = {"ttft": 0.06, "gap": GAP_SECONDS * chunk, "chunk_tokens": chunk, **stalls}
        records, _, log = bench.load(50.0, 2.0, TOKENS, **truth)
        world = "one token a chunk" if chunk == 1 else f"{chunk} tokens a chunk"
        rows += [*times_rows(world, records, log), lag_row(world, records, 0.001)]
    return rows


def counts(bench: Bench) -> list[Row]:
    """Failures of every kind at once, on a server that is too slow."""
    truth = {"ttft": 0.03, "gap": 0.004, "slots": 2, "waiting": 4, "cut_every": 5}
    records, _, log = bench.load(60.0, 2.0, 8, **truth)
    return failure_rows("failures and refusals", records, log)


def pace(bench: Bench) -> list[Row]:
    """Poisson arrivals at a rate that one core should sustain with room to spare."""
    records, account, log = bench.load(RATE, PACE_SECONDS, 1, ttft=0.01)
    arrived = np.sort(np.array([entry["arrived"] for entry in log.values()]))
    world = f"Poisson, {RATE:.0f} requests/s"
    ok = sum(record.error is None for record in records)
    cpu = account.cpu_seconds / PACE_SECONDS
    return [
        Row(world, "answers", len(log), ok, 0, "count"),
        lag_row(world, records, 0.002),
        Row(world, "client CPU of one core", None, cpu, 0.5, "number"),
        arrival_row(world, arrived, RATE),
    ]


def limit(bench: Bench) -> list[Row]:
    """The limit of a server that batches by a law."""
    policy = SchedulingPolicy(slots=SLOTS)
    truth = capacity(LAW, policy, WORKLOAD, SLO).rate
    with bench.server(law=LAW, slots=SLOTS) as url:

        def ask(burst: Burst) -> Level:
            pairs = zip(burst.prompt_tokens, burst.output_tokens, strict=True)
            asks = tuple(Ask(i, *pair) for i, pair in enumerate(pairs))
            return level_of(bench.send(url, asks=asks, due=(0.0,) * len(asks))[0])

        records, _, _ = bench.send(url, workload=WORKLOAD, concurrency=1, requests=ALONE)
        alone = level_of(records, concurrency=1)
        made = calibrate(ask, WORKLOAD, SLOTS, 20.0, [alone])
        known: dict[str, Any] = {"law": made.law, "policy": policy, "workload": WORKLOAD}
        known["least_seconds"] = LIMIT_SECONDS
        found = estimate([alone], SLO, **known)
        if found.limit:
            rate = CONFIRMING_SHARE * found.limit
            lasts = {"window_seconds": LIMIT_SECONDS, "warmup_seconds": 1.0}
            records, _, _ = bench.send(url, workload=WORKLOAD, rate=rate, **lasts)
            level = level_of(records, rate_per_second=rate, **lasts)
            found = estimate([alone, level], SLO, **known)
    return capacity_rows("known step law", found, truth)


def run_selftest(progress: Progress) -> list[Row]:
    """All parts. Raises LoadError where one cannot run at all."""
    parts = (times, counts, pace, limit)
    rows: list[Row] = []
    with open_bench() as bench:
        for number, part in enumerate(parts):
            progress.tick((part.__doc__ or "").split("\n")[0], fraction=number / len(parts))
            rows += part(bench)
    return rows

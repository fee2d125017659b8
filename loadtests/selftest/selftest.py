"""`crossover selftest`: does this load generator measure right on this machine?

A server with known truth (reference_server.py) is loaded as any endpoint would be, and the records
are compared with what the server says it did.

    times    one and four tokens a chunk, with and without stalls of 2 s: TTFT, TPOT, E2E, gaps
    counts   answers that are cut off, and 429s of a full queue
    arrivals Poisson as the server saw it, from one process and from four
    lateness send lag, the client's CPU, and a rate that one core should sustain
    worlds   campaigns on servers that batch by a known step law: is the limit found?

A machine that is busy with other things makes times late.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from loadtests.analysis.slo import Slo
from loadtests.campaign.progress import Progress
from loadtests.errors import LoadError
from loadtests.host.child_processes import Child, last_line
from loadtests.host.cpu_pinning import divide_cores
from loadtests.load_generator.http_connection import connect, fetch, get_bytes
from loadtests.load_generator.load_plan import Ended, LoadPlan
from loadtests.load_generator.locust_process import LoadGenerator
from loadtests.load_generator.openai_endpoint import Target, probe
from loadtests.records.request_record import RequestRecord
from loadtests.records.run_folder import read_records
from loadtests.records.run_journal import CellFinished, of_kind
from loadtests.selftest.selftest_checks import (
    Row,
    arrival_rows,
    below,
    capacity_rows,
    failure_rows,
    lag_row,
    near,
    times_rows,
)
from loadtests.simulation.batching_simulator import SchedulingPolicy
from loadtests.simulation.simulated_capacity import capacity
from loadtests.simulation.step_law import StepLaw
from loadtests.workload.arrivals import Constant
from loadtests.workload.request_lengths import Workload
from serving.hardware.machine_facts import allowed_cores

TOKENS, GAP_SECONDS, STALL_SECONDS = 48, 0.008, 2.0
ARRIVAL_RATE, ARRIVAL_SECONDS = 600.0, 3.0
SUSTAINED_RATE = 1000.0
# An engine some 20 times as fast as a small model's on a CPU, so that a short level sees enough.
LAW = StepLaw(
    base_seconds=0.0025,
    row_seconds=0.0004,
    prompt_token_seconds=0.00005,
    context_token_seconds=2.5e-7,
    pass_seconds=0.0005,
)
SLOTS = 8
LENGTHS = {"preset": "sharegpt", "scale": 0.15, "max_prompt_tokens": 256, "max_output_tokens": 64}
SLO = Slo("selftest", ttft_seconds=0.15, tpot_seconds=0.01, target=0.9)
FAST_SECONDS, SLOW = 3.5, 1.25  # each of the two speeds lasts so long; factor of the second
PAUSE_EVERY, PAUSE = 1.0, 0.05
CAMPAIGN_SECONDS = 240.0  # after which one is given up

CAMPAIGN = f"""
name = "selftest"
budget_seconds = 45
target = {{ url = "URL" }}
workload = {{ {", ".join(f"{name} = {json.dumps(value)}" for name, value in LENGTHS.items())} }}
[slo]
ttft_seconds = {SLO.ttft_seconds}
tpot_seconds = {SLO.tpot_seconds}
target = {SLO.target}
[search]
level_seconds = 10
single_stream_seconds = 2
"""


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """The whole self-test."""

    rows: list[Row]
    seconds: float

    @property
    def passed(self) -> bool:
        return all(row.passed for row in self.rows)


class Loaded(NamedTuple):
    """A level as it came out: what the client wrote down, and what the server did."""

    records: list[RequestRecord]
    account: Ended
    log: dict[str, Any]


class Bench:
    """Where the parts run: a folder, and cores for the server and for the client."""

    def __init__(self, folder: Path, progress: Progress) -> None:
        self.folder = folder
        self.progress = progress
        layout = divide_cores(allowed_cores())
        self.server_cores = layout.engine[:1]
        self.client_cores = layout.client
        self._files = 0

    @contextmanager
    def server(self, **truth: Any) -> Iterator[str]:
        """A reference server's URL."""
        log = self.file("server.log")
        settings = json.dumps(msgspec.to_builtins(truth))
        command = [sys.executable, "-m", "loadtests.selftest.reference_server", settings]
        cores = self.server_cores
        with Child(command, cores=cores, log=log, urgent=True) as child:
            until = time.monotonic() + 30
            while not (text := log.read_text()).endswith("\n"):
                if child.poll() is not None or time.monotonic() > until:
                    raise LoadError(f"the reference server did not start ({child.how_it_ended()})")
                time.sleep(0.01)
            yield f"http://127.0.0.1:{int(text)}"

    def file(self, name: str) -> Path:
        """A path that is not taken."""
        self._files += 1
        return self.folder / f"{self._files}-{name}"

    @contextmanager
    def generator(self, processes: int = 1) -> Iterator[LoadGenerator]:
        with LoadGenerator(
            log=self.file("locust.log"), processes=processes, cores=self.client_cores
        ) as generator:
            yield generator

    def load(
        self,
        generator: LoadGenerator,
        url: str,
        rate: float,
        seconds: float,
        tokens: int = TOKENS,
        **changes: Any,
    ) -> Loaded:
        """One level, as the runner has it sent."""
        target = Target(url=url)
        plan = LoadPlan(
            target=target,
            workload=Workload(prompt_tokens=16, output_tokens=tokens),
            rate=rate,
            window_seconds=seconds,
            drain_seconds=20.0,
            facts=probe(target),
            **changes,
        )
        before = _truth(url).keys()
        records: list[RequestRecord] = []
        account = Ended()
        for told in generator.run(plan):
            if isinstance(told, RequestRecord):
                records.append(told)
            elif isinstance(told, Ended):
                account = told
        log = {name: entry for name, entry in _truth(url).items() if name not in before}
        return Loaded(records, account, log)


def _truth(url: str) -> dict[str, Any]:
    with connect(url) as pool:
        found: dict[str, Any] = msgspec.json.decode(fetch(pool, get_bytes(pool, "/truth"))[2])
    return found


def times(bench: Bench) -> list[Row]:
    """Four worlds of chunks and stalls."""
    rows: list[Row] = []
    with bench.generator() as generator:
        for chunk in (1, 4):
            for stall in (0.0, STALL_SECONDS):
                with bench.server(
                    ttft=0.06,
                    gap=GAP_SECONDS * chunk,
                    chunk_tokens=chunk,
                    stall=stall,
                    stall_at=6,
                    stall_every=3,
                ) as url:
                    loaded = bench.load(generator, url, 50.0, 2.5)
                world = "one token a chunk" if chunk == 1 else f"{chunk} tokens a chunk"
                world += f", stalls of {stall:g} s" if stall else ""
                rows += times_rows(world, loaded.records, loaded.log)
                rows += [] if stall else [lag_row(world, loaded.records, 0.001)]
    return rows


def counts(bench: Bench) -> list[Row]:
    """Failures of every kind at once, on a server that is too slow."""
    with (
        bench.server(ttft=0.03, gap=0.004, slots=2, waiting=4, fail="cut", fail_every=5) as url,
        bench.generator() as generator,
    ):
        loaded = bench.load(generator, url, 60.0, 3.0, tokens=8)
    return failure_rows("failures and refusals", loaded.records, loaded.log)


def arrivals(bench: Bench) -> list[Row]:
    """The same process from one load generator process and from four."""
    rows: list[Row] = []
    for processes in (1, 4):
        with bench.server(ttft=0.01) as url, bench.generator(processes) as generator:
            loaded = bench.load(generator, url, ARRIVAL_RATE, ARRIVAL_SECONDS, tokens=1)
        arrived = np.sort(np.array([entry["arrived"] for entry in loaded.log.values()]))
        world = f"Poisson from {'one process' if processes == 1 else f'{processes} processes'}"
        rows.append(lag_row(world, loaded.records, 0.002))
        rows += arrival_rows(world, arrived, ARRIVAL_RATE)
    return rows


def lateness(bench: Bench) -> list[Row]:
    """A rate that one core should sustain with room to spare."""
    with bench.server(ttft=0.01) as url, bench.generator() as generator:
        loaded = bench.load(generator, url, SUSTAINED_RATE, 4.0, tokens=1, arrivals=Constant())
    world = f"{SUSTAINED_RATE:.0f} requests/s"
    ok = sum(record.error is None for record in loaded.records)
    cpu = loaded.account.cpu_seconds / 4.0
    return [
        near(world, "answers", len(loaded.log), ok, 0, "count"),
        lag_row(world, loaded.records, 0.010),
        below(world, "client CPU of one core", cpu, 0.8, "number"),
    ]


def worlds(bench: Bench) -> list[Row]:
    """Campaigns on four servers that batch by one law, all at once: they mostly wait."""
    workload = msgspec.convert(LENGTHS, Workload)

    def true(factor: float = 1.0, whole_prompts: bool = False) -> float:
        policy = SchedulingPolicy(slots=SLOTS, whole_prompts=whole_prompts)
        return capacity(LAW.slower(factor), policy, workload, SLO).rate

    fast, slow = true(), true(SLOW)
    settings: dict[str, tuple[dict[str, Any], float, float | None, float | None]] = {
        "limit, steady": ({}, fast, None, None),
        "limit, two speeds": (
            {"speeds": [[FAST_SECONDS, 1.0], [FAST_SECONDS, SLOW]]},
            *(true((1 + SLOW) / 2), slow, fast),
        ),
        "limit, with pauses": (
            {"pause_every": PAUSE_EVERY, "pause": PAUSE},
            *(true(1 + PAUSE / PAUSE_EVERY), None, None),
        ),
        "limit, whole prompts first": (
            {"whole_prompts": True},
            *(true(whole_prompts=True), None, None),
        ),
    }
    rows: list[Row] = []
    with ExitStack() as stack:
        running: dict[str, tuple[Child, Path]] = {}
        for world, (truth, *_) in settings.items():
            url = stack.enter_context(bench.server(law=LAW, slots=SLOTS, **truth))
            file = bench.file("campaign.toml")
            file.write_text(CAMPAIGN.replace("URL", url))
            out, log = bench.file("runs"), bench.file("campaign.log")
            run = ("campaign", "run", str(file), "--out", str(out), "--beside-others")
            child = Child([sys.executable, "-m", "crossover", *run], log=log)
            running[world] = stack.enter_context(child), out
        until = time.monotonic() + CAMPAIGN_SECONDS
        for world, (child, out) in running.items():
            if child.wait(max(0.0, until - time.monotonic())) != 0:
                said = last_line(child.log) if child.log is not None else ""
                raise LoadError(f"the campaign of {world!r} failed: {said}")
            folder = next(out.iterdir())
            found = of_kind(read_records(folder).events, CellFinished)[-1].capacities
            _, middle, low, high = settings[world]
            rows += capacity_rows(world, middle, next(iter(found.values())), low, high)
    return rows


PARTS: dict[str, tuple[Callable[[Bench], list[Row]], str]] = {
    "times": (times, "times, with and without stalls"),
    "counts": (counts, "failures and refusals"),
    "arrivals": (arrivals, "Poisson arrivals from one process and from four"),
    "lateness": (lateness, f"{SUSTAINED_RATE:.0f} requests/s"),
    "worlds": (worlds, "four campaigns on servers whose limit is known"),
}


def run_selftest(progress: Progress, parts: list[str] | None = None) -> Report:
    """All parts, or those named. Raises LoadError where a part cannot run at all."""
    began = time.monotonic()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="crossover-selftest-") as folder:
        bench = Bench(Path(folder), progress)
        for number, name in enumerate(parts or PARTS):
            part, words = PARTS[name]
            progress.tick(words, fraction=number / len(parts or PARTS))
            rows += part(bench)
    return Report(rows=rows, seconds=time.monotonic() - began)

"""`crossover selftest`: does this load generator measure right on this machine?

A server with known truth (reference_server.py) is loaded as any endpoint would be, and the records
are compared with what the server says it did.

    times    one and four tokens a chunk, with and without stalls of 2 s: TTFT, TPOT, E2E, gaps
    counts   answers that are cut off, and 429s of a full queue
    pace     Poisson arrivals as the server saw them, send lag, the client's CPU
    worlds   campaigns on servers that batch by a known step law: is the limit found?
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

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
from loadtests.records.run_folder import read_records
from loadtests.records.run_journal import CellFinished, of_kind
from loadtests.selftest.selftest_checks import (
    Row,
    arrival_rows,
    capacity_rows,
    failure_rows,
    lag_row,
    times_rows,
)
from loadtests.simulation.batching_simulator import SchedulingPolicy
from loadtests.simulation.simulated_capacity import capacity
from loadtests.simulation.step_law import StepLaw
from loadtests.workload.request_lengths import Workload
from serving.hardware.machine_facts import allowed_cores

TOKENS, GAP_SECONDS, STALL_SECONDS = 48, 0.008, 2.0
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
LENGTHS = {"preset": "sharegpt", "scale": 0.15, "max_prompt_tokens": 256, "max_output_tokens": 64}
SLO = Slo("selftest", ttft_seconds=0.3, tpot_seconds=0.02, target=0.9)
FAST_SECONDS, SLOW = 7.0, 1.25  # each of the two speeds lasts so long; factor of the second
PAUSE_EVERY, PAUSE = 2.0, 0.1
CAMPAIGN_SECONDS = 240.0  # after which one is given up

CAMPAIGN = f"""
name = "selftest"
budget_seconds = 90
target = {{ url = "URL" }}
workload = {{ {", ".join(f"{name} = {json.dumps(value)}" for name, value in LENGTHS.items())} }}
[slo]
ttft_seconds = {SLO.ttft_seconds}
tpot_seconds = {SLO.tpot_seconds}
target = {SLO.target}
[search]
level_seconds = 20
single_stream_seconds = 4
"""


class Loaded(NamedTuple):
    """A level as it came out: what the client wrote down, and what the server did."""

    records: list[RequestRecord]
    account: Ended
    log: dict[str, Any]


class Bench:
    """Where the parts run: a folder, and cores for the server and for the client."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._layout = divide_cores(allowed_cores())
        self._files = 0

    @contextmanager
    def server(self, **truth: Any) -> Iterator[str]:
        """A reference server's URL."""
        log = self.file("server.log")
        settings = json.dumps(msgspec.to_builtins(truth))
        command = [sys.executable, "-m", "loadtests.selftest.reference_server", settings]
        with Child(command, cores=self._layout.engine[:1], log=log, urgent=True) as child:
            until = time.monotonic() + 30
            while not (text := log.read_text()).endswith("\n"):
                if child.poll() is not None or time.monotonic() > until:
                    raise LoadError(f"the reference server did not start ({child.how_it_ended()})")
                time.sleep(0.01)
            yield f"http://127.0.0.1:{int(text)}"

    def file(self, name: str) -> Path:
        """A path that is not taken."""
        self._files += 1
        return self._folder / f"{self._files}-{name}"

    def load(self, rate: float, seconds: float, tokens: int, **truth: Any) -> Loaded:
        """One level on a server of its own, as the runner has it sent."""
        generator = LoadGenerator(log=self.file("locust.log"), cores=self._layout.client)
        with generator, self.server(**truth) as url:
            target = Target(url=url)
            plan = LoadPlan(
                target=target,
                workload=Workload(prompt_tokens=16, output_tokens=tokens),
                rate=rate,
                window_seconds=seconds,
                drain_seconds=20.0,
                facts=probe(target),
            )
            before = _truth(url).keys()
            told = list(generator.run(plan))
            log = {name: entry for name, entry in _truth(url).items() if name not in before}
        records = [one for one in told if isinstance(one, RequestRecord)]
        (account,) = [one for one in told if isinstance(one, Ended)]
        return Loaded(records, account, log)


def _truth(url: str) -> dict[str, Any]:
    with connect(url) as pool:
        found: dict[str, Any] = msgspec.json.decode(fetch(pool, get_bytes(pool, "/truth"))[2])
    return found


def times(bench: Bench) -> list[Row]:
    """Chunks of one and of four tokens; a third of the answers stall."""
    rows: list[Row] = []
    stalls = {"stall": STALL_SECONDS, "stall_at": 6, "stall_every": 3}
    for chunk in (1, 4):
        gap = GAP_SECONDS * chunk
        truth = {"ttft": 0.06, "gap": gap, "chunk_tokens": chunk, **stalls}
        records, _, log = bench.load(50.0, 2.5, TOKENS, **truth)
        smooth = {
            name: entry
            for name, entry in log.items()
            if np.diff(entry["chunks"]).max(initial=0.0) < STALL_SECONDS / 2
        }
        world = "one token a chunk" if chunk == 1 else f"{chunk} tokens a chunk"
        even = [one for one in records if one.request_id in smooth]
        rows += times_rows(world, even, smooth)
        rows += times_rows(f"{world}, stalls of {STALL_SECONDS:g} s", records, log)
        rows.append(lag_row(world, records, 0.001))
    return rows


def counts(bench: Bench) -> list[Row]:
    """Failures of every kind at once, on a server that is too slow."""
    truth = {"ttft": 0.03, "gap": 0.004, "slots": 2, "waiting": 4, "fail": "cut", "fail_every": 5}
    loaded = bench.load(60.0, 2.0, 8, **truth)
    return failure_rows("failures and refusals", loaded.records, loaded.log)


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
        *arrival_rows(world, arrived, RATE),
    ]


class World(NamedTuple):
    """A server of known limit: how it differs, its limit, and those of its slow and fast times."""

    truth: dict[str, Any]
    limit: float
    low: float | None = None
    high: float | None = None


def worlds(bench: Bench) -> list[Row]:
    """Campaigns on four servers that batch by one law, all at once: they mostly wait."""
    workload = msgspec.convert(LENGTHS, Workload)

    def true(factor: float = 1.0, whole_prompts: bool = False) -> float:
        policy = SchedulingPolicy(slots=SLOTS, whole_prompts=whole_prompts)
        return capacity(LAW.slower(factor), policy, workload, SLO).rate

    fast, slow = true(), true(SLOW)
    speeds = [[FAST_SECONDS, 1.0], [FAST_SECONDS, SLOW]]
    pauses = {"pause_every": PAUSE_EVERY, "pause": PAUSE}
    settings = {
        "limit, steady": World({}, fast),
        "limit, two speeds": World({"speeds": speeds}, true((1 + SLOW) / 2), slow, fast),
        "limit, with pauses": World(pauses, true(1 + PAUSE / PAUSE_EVERY)),
        "limit, whole prompts first": World({"whole_prompts": True}, true(whole_prompts=True)),
    }
    rows: list[Row] = []
    with ExitStack() as stack:
        running: dict[str, tuple[Child, Path]] = {}
        for name, world in settings.items():
            url = stack.enter_context(bench.server(law=LAW, slots=SLOTS, **world.truth))
            file, out = bench.file("campaign.toml"), bench.file("runs")
            file.write_text(CAMPAIGN.replace("URL", url))
            run = ("campaign", "run", str(file), "--out", str(out))
            alone = f"XDG_RUNTIME_DIR={file.parent}"  # where each has its own lock of the machine
            command = ["env", alone, sys.executable, "-m", "crossover", *run]
            child = Child(command, log=bench.file("campaign.log"))
            running[name] = stack.enter_context(child), out
        until = time.monotonic() + CAMPAIGN_SECONDS
        for name, (child, out) in running.items():
            if child.wait(max(0.0, until - time.monotonic())) != 0:
                raise LoadError(f"the campaign of {name!r} failed: {child.how_it_ended()}")
            (folder,) = out.iterdir()
            (finished,) = of_kind(read_records(folder).events, CellFinished)
            rows += capacity_rows(name, finished.capacity, *settings[name][1:])
    return rows


def run_selftest(progress: Progress) -> list[Row]:
    """All parts. Raises LoadError where one cannot run at all."""
    parts = (times, counts, pace, worlds)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="crossover-selftest-") as folder:
        bench = Bench(Path(folder))
        for number, part in enumerate(parts):
            progress.tick((part.__doc__ or "").split("\n")[0], fraction=number / len(parts))
            rows += part(bench)
    return rows

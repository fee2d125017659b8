"""`crossover selftest`: does this load generator measure right on this machine?

A server with known truth (reference_server.py) is loaded as any endpoint would be, and the records
are compared with what the server says it did.

    worlds   one and four tokens a chunk, with and without stalls of 2 s: TTFT, TPOT, E2E, gaps
    counts   answers that are cut off, and 429s of a full queue
    arrivals Poisson as the server saw it, from one load generator and from four
    lateness send lag, the client's CPU, and a rate that one core should sustain
    capacity a campaign measures the capacity of four slots, known from queueing theory

The table says how busy the machine was, since that makes times late.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import psutil

from loadtests.campaign.campaign_file import parse_campaign
from loadtests.campaign.progress import Progress
from loadtests.campaign.runner import run
from loadtests.errors import LoadError
from loadtests.generator.channel import LoadGenerator
from loadtests.generator.endpoint import Target, probe
from loadtests.generator.http_client import connect, fetch, get_bytes
from loadtests.generator.launcher import GeneratorProcess, client_environment
from loadtests.generator.load_plan import LoadPlan
from loadtests.generator.messages import Ended, Recorded
from loadtests.host.processes import Child, divide_cores
from loadtests.records.events import CellFinished, of_kind
from loadtests.records.old_run_folder import read_events
from loadtests.records.schema import RequestRecord
from loadtests.selftest.checks import (
    Row,
    arrival_rows,
    below,
    capacity_of_slots,
    capacity_row,
    failure_rows,
    lag_row,
    near,
    times_rows,
)
from loadtests.workload.arrivals import Constant, Poisson
from loadtests.workload.requests import Workload
from serving.hardware.facts import allowed_cores

TOKENS, GAP_SECONDS, STALL_SECONDS = 48, 0.008, 2.0
ARRIVAL_RATE, ARRIVAL_SECONDS = 150.0, 12.0
SUSTAINED_RATE = 1000.0
SLOTS, SLOT_TOKENS, TOKEN_SECONDS, WAIT_SECONDS, SHARE = 4, 51, 0.010, 0.5, 0.9
# Of the capacity: given, not searched, so that each self-test sends the same requests.
CAPACITY_RATES, CAPACITY_RATE_SECONDS = (0.8, 0.95, 1.1, 1.3), 24.0
BUSY_STEAL, BUSY_OTHERS = 0.01, 0.25  # of the machine: more than this is named beside a failed row

CAMPAIGN = f"""
name = "selftest"
budget_seconds = 300
[target]
url = "{{url}}"
[workload]
prompt_tokens = 16
output_tokens = {SLOT_TOKENS}
[slo]
ttft_seconds = {WAIT_SECONDS + TOKEN_SECONDS}
target = {SHARE}
[search]
rates = {{rates}}
rate_seconds = {[CAPACITY_RATE_SECONDS] * len(CAPACITY_RATES)}
single_stream_requests = 2
"""


class Host(msgspec.Struct, frozen=True, kw_only=True):
    """Other load on the machine, as shares of all its cores; None: unknown."""

    steal: float | None
    others: float | None

    @property
    def is_busy(self) -> bool:
        return (self.steal or 0.0) > BUSY_STEAL or (self.others or 0.0) > BUSY_OTHERS


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """The whole self-test."""

    rows: list[Row]
    host: Host
    seconds: float

    @property
    def passed(self) -> bool:
        return all(row.passed for row in self.rows)


class Bench:
    """Where the worlds run: a folder, and cores for the server and for the client."""

    def __init__(self, folder: Path, progress: Progress) -> None:
        self.folder = folder
        self.progress = progress
        layout = divide_cores(allowed_cores())
        self.server_cores = layout.engine[:1]
        self.client_cores = layout.client
        self.servers = 0
        self.worlds = 0

    @contextmanager
    def server(self, **truth: Any) -> Iterator[str]:
        """A truth server's URL."""
        self.servers += 1
        log = self.folder / f"server-{self.servers}.log"
        command = [sys.executable, "-m", "loadtests.selftest.reference_server", json.dumps(truth)]
        with Child(
            command, cores=self.server_cores, log=log, environment=client_environment(), urgent=True
        ) as child:
            until = time.monotonic() + 30
            while not (text := log.read_text()).endswith("\n"):
                if child.poll() is not None or time.monotonic() > until:
                    raise LoadError(f"the truth server did not start ({child.how_it_ended()})")
                time.sleep(0.01)
            yield f"http://127.0.0.1:{int(text)}"

    def load(
        self,
        url: str,
        rate: float,
        seconds: float,
        *,
        processes: int = 1,
        tokens: int = TOKENS,
        **changes: Any,
    ) -> Loaded:
        """One level by Locust, as the runner does it."""
        self.worlds += 1
        plan = LoadPlan(
            target=Target(url=url),
            workload=Workload(prompt_tokens=16, output_tokens=tokens),
            rate_per_second=rate,
            window_seconds=seconds,
            drain_seconds=20.0,
            quiet=True,
            facts=probe(Target(url=url)),
            level=f"world-{self.worlds}",
        )
        before = self._truth(url).keys()
        log = self.folder / f"{self.worlds}.log"
        records: list[RequestRecord] = []
        process = GeneratorProcess(log=log, processes=processes, cores=self.client_cores)
        with LoadGenerator(process) as generator:
            generator.channel.send(msgspec.structs.replace(plan, **changes))
            until = time.monotonic() + seconds + 90
            for message in generator.told():
                if isinstance(message, Recorded):
                    records.append(message.record)
                if isinstance(message, Ended):
                    account = message
                    break
                if time.monotonic() > until:
                    raise LoadError(f"the load generator did not end in {seconds + 90:g} s")
            generator.close()
        log_now = self._truth(url)
        new = {name: entry for name, entry in log_now.items() if name not in before}
        return Loaded(records, account, new, seconds)

    def _truth(self, url: str) -> dict[str, Any]:
        with connect(url) as pool:
            found: dict[str, Any] = msgspec.json.decode(
                fetch(pool, get_bytes(pool, "/truth"), 30)[2]
            )
        return found


class Loaded(msgspec.Struct, frozen=True):
    """A world as it came out: what the client wrote down, and what the server did."""

    records: list[RequestRecord]
    account: Ended
    log: dict[str, Any]
    seconds: float


def times(bench: Bench) -> list[Row]:
    """Four worlds of chunks and stalls."""
    rows: list[Row] = []
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
                loaded = bench.load(url, 50.0, 3.0)
            world = f"{chunk} token{'s' if chunk > 1 else ''} a chunk" + (
                f", {stall:g} s stalls" if stall else ""
            )
            rows += times_rows(world, loaded.records, loaded.log)
            if not stall:
                rows.append(lag_row(world, loaded.records, 0.001))
    return rows


def counts(bench: Bench) -> list[Row]:
    """Failures of every kind at once, on a server that is too slow."""
    with bench.server(ttft=0.03, gap=0.004, slots=2, waiting=4, fail="cut", fail_every=5) as url:
        loaded = bench.load(url, 60.0, 3.0, tokens=8)
    return failure_rows(loaded.records, loaded.log)


def arrivals(bench: Bench) -> list[Row]:
    """The same process from one load generator and from four."""
    rows: list[Row] = []
    for processes in (1, 4):
        with bench.server(ttft=0.01) as url:
            loaded = bench.load(
                url,
                ARRIVAL_RATE,
                ARRIVAL_SECONDS,
                processes=processes,
                tokens=1,
                arrivals=Poisson(),
            )
        arrived = np.sort(np.array([entry["arrived"] for entry in loaded.log.values()]))
        world = f"Poisson, {processes} load generator{'s' if processes > 1 else ''}"
        rows.append(lag_row(world, loaded.records, 0.002))
        rows += arrival_rows(world, arrived, ARRIVAL_RATE, ARRIVAL_SECONDS)
    return rows


def lateness(bench: Bench) -> list[Row]:
    """A rate that one core should sustain with room to spare."""
    with bench.server(ttft=0.01) as url:
        loaded = bench.load(url, SUSTAINED_RATE, 4.0, tokens=1, arrivals=Constant())
    world = f"{SUSTAINED_RATE:.0f} requests/s"
    ok = sum(record.error is None for record in loaded.records)
    return [
        near(f"{world}: answers", len(loaded.log), ok, 0, "count"),
        lag_row(world, loaded.records, 0.010),
        below(
            f"{world}: client CPU of one core",
            loaded.account.cpu_seconds / loaded.seconds,
            0.8,
            "number",
        ),
    ]


def capacity(bench: Bench) -> list[Row]:
    """A campaign on four slots."""
    service = SLOT_TOKENS * TOKEN_SECONDS
    true = capacity_of_slots(SLOTS, service, WAIT_SECONDS, SHARE)
    with bench.server(ttft=TOKEN_SECONDS, gap=TOKEN_SECONDS, slots=SLOTS) as url:
        rates = [round(share * true, 3) for share in CAPACITY_RATES]
        text = CAMPAIGN.format(url=url, rates=rates)
        with open(os.devnull, "w") as nowhere:
            folder = run(parse_campaign(text), bench.folder / "runs", Progress(nowhere))
    found = of_kind(read_events(folder).records, CellFinished)[-1].capacity
    assert found is not None
    what = f"capacity of {SLOTS} slots of {service:g} s"
    return [capacity_row(what, true, found)]


PARTS: dict[str, tuple[Callable[[Bench], list[Row]], str]] = {
    "times": (times, "times, with and without stalls"),
    "counts": (counts, "failures and refusals"),
    "arrivals": (arrivals, "Poisson arrivals from one and from four load generators"),
    "lateness": (lateness, f"{SUSTAINED_RATE:.0f} requests/s"),
    "capacity": (capacity, "the capacity of four slots"),
}


def run_selftest(progress: Progress, parts: list[str] | None = None) -> Report:
    """All parts, or those named. Raises LoadError where a part cannot run at all."""
    began = time.monotonic()
    before, mine = _machine_seconds(), _own_seconds()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="crossover-selftest-") as folder:
        bench = Bench(Path(folder), progress)
        for name in parts or list(PARTS):
            part, words = PARTS[name]
            progress.say(words)
            found = part(bench)
            failed = sum(not row.passed for row in found)
            progress.say(
                f"  {len(found) - failed} of {len(found)} pass", style=None if not failed else "red"
            )
            rows += found
    return Report(rows=rows, host=_host(before, mine), seconds=time.monotonic() - began)


def _host(before: tuple[float, float, float], mine: float) -> Host:
    now = _machine_seconds()
    whole = now[0] - before[0]
    if whole <= 0:
        return Host(steal=None, others=None)
    return Host(
        steal=(now[2] - before[2]) / whole,
        others=max(0.0, (now[1] - before[1]) - (_own_seconds() - mine)) / whole,
    )


def _machine_seconds() -> tuple[float, float, float]:
    """All, busy and stolen time of all cores since the machine started."""
    found = psutil.cpu_times()
    busy = found.user + found.nice + found.system + found.irq + found.softirq
    return busy + found.idle + found.iowait + found.steal, busy, found.steal


def _own_seconds() -> float:
    times_ = os.times()
    return times_.user + times_.system + times_.children_user + times_.children_system

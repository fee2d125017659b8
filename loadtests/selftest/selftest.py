"""`crossover selftest`: does this load generator measure right on this machine?

A server with known truth (reference_server.py) is loaded as any endpoint would be, and the records
are compared with what the server says it did.

    times    one and four tokens a chunk, a third of the answers with a stall: TTFT, TPOT, E2E, gaps
    talk     conversations that send their histories again, to a server that thinks first
    counts   answers that are cut off, and 429s of a full queue
    pace     Poisson arrivals as the server saw them, send delay, the client's CPU
    limit    servers that batch by known step times (steady, of two speeds, with pauses): bursts,
             a step-time model and a level, as in a campaign

Times may differ by 1 % or 1 ms (0.1 ms for a TPOT), whichever is more; counts not at all.
"""

from __future__ import annotations

import json
import math
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from crossover.loadtests.campaign.progress import Progress
from crossover.loadtests.capacity.calibration_bursts import Burst, calibrate
from crossover.loadtests.capacity.capacity_estimate import CONFIRMING_SHARE, estimate
from crossover.loadtests.errors import LoadError
from crossover.loadtests.host.child_processes import Child
from crossover.loadtests.host.cpu_pinning import divide_cores
from crossover.loadtests.levels.level_columns import Level, failure_of
from crossover.loadtests.levels.level_warnings import send_delay_p99
from crossover.loadtests.load_generator.http_connection import connect, fetch, get_bytes
from crossover.loadtests.load_generator.level_messages import Ended, LoadPlan
from crossover.loadtests.load_generator.locust_process import LoadGenerator
from crossover.loadtests.load_generator.openai_endpoint import Target, probe
from crossover.loadtests.records.journal_events import Capacity, LevelFinished, LevelStarted
from crossover.loadtests.records.request_record import RequestRecord
from crossover.models.machine_limits import cgroup_cores
from crossover.serving.capacity.scheduler_settings import SchedulerSettings
from crossover.serving.capacity.simulated_capacity import capacity
from crossover.serving.capacity.slo import Slo
from crossover.serving.capacity.step_time_model import StepTimeModel
from crossover.serving.hardware.machine_facts import allowed_cores
from crossover.serving.workload.conversations import draw_sessions
from crossover.serving.workload.request_lengths import RequestSpec, Spread, Workload

RATE, PACE_SECONDS = 600.0, 3.0
WARM_UP_SECONDS = 1.0  # of requests whose times do not count: they open connections
# An engine some ten times as fast as a small model's on a CPU, so that a short level sees enough.
STEP_TIMES = StepTimeModel(
    base_seconds=0.005,
    row_seconds=0.0008,
    prompt_token_seconds=0.0001,
    context_token_seconds=5e-7,
    pass_seconds=0.001,
)
SLOTS = 8
# As the reference server schedules: no target for a step's time.
SETTINGS = SchedulerSettings(slots=SLOTS, step_tokens=2048, step_seconds_target=None)
WORKLOAD = Workload(preset="sharegpt", scale=0.15, max_prompt_tokens=256, max_output_tokens=64)
SLO = Slo("selftest", ttft_seconds=0.25, tpot_seconds=0.02, target=0.9)
ALONE = 10  # requests one at a time
LIMIT_SECONDS = 14.0  # of the level that confirms
READY_SECONDS = 30.0  # that one of WORLDS waits for the others
WORLD_SECONDS = 120.0  # that one of WORLDS may take
# What the server does beside its step times, and their factors: mean, minimum, maximum.
WORLDS: dict[str, tuple[dict[str, float], tuple[float, float, float]]] = {
    "known step times": ({}, (1.0, 1.0, 1.0)),
    "step times of two speeds": ({"slower": 1.25}, (1.125, 1.0, 1.25)),
    "step times with pauses": ({"pause": 0.1}, (1.05, 1.05, 1.05)),  # every 2 s
}

# Request id -> what the server did (crossover.loadtests.selftest.reference_server).
Log = Mapping[str, Mapping[str, Any]]
QUANTILES = (0.50, 0.95, 0.99)
SHARE = 0.01  # of a time: what it may be off by, or so many seconds where that is more
FLOOR_SECONDS = {"TTFT": 0.001, "TPOT": 0.0001, "E2E": 0.001, "TTFA": 0.002}  # a TPOT is a mean
DISPERSION_SIGMA = 3.3  # standard deviations: about 1 in 1,000 right processes has more
CAPACITY_SHARE = 0.15
CONFIRMED_SHARE = 0.05  # that a confirmed rate may be above the truth: a minute may be lucky
Loaded = tuple[list[RequestRecord], Ended, Log]  # what both ends wrote down


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
        command = [sys.executable, "-m", "crossover.loadtests.selftest.reference_server", settings]
        with Child(command, cores=self._cores, log=log, urgent=True) as child:
            until = time.monotonic() + 30
            while not (text := log.read_text()).endswith("\n"):
                if child.poll() is not None or time.monotonic() > until:
                    raise LoadError(f"The reference server did not start ({child.how_it_ended()})")
                time.sleep(0.01)
            yield f"http://127.0.0.1:{int(text)}"

    @contextmanager
    def world(self, name: str) -> Iterator[tuple[Child, Path]]:
        """A process that finds the limit of one of WORLDS, and the file whose last line it is."""
        log, ready = self._folder / f"{name}.log", self._folder / "ready"
        ready.mkdir(exist_ok=True)
        (ready / name).unlink(missing_ok=True)  # of an earlier time
        command = [sys.executable, "-m", "crossover.loadtests.selftest.selftest", name, str(ready)]
        with Child(command, log=log) as child:
            yield child, log

    def send(self, url: str, *, is_chat: bool = False, **load: Any) -> Loaded:
        """One level, as the runner has it sent; `load`: of a LoadPlan."""
        target = Target(url=url, api="chat" if is_chat else "completions")
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
    layout = divide_cores(allowed_cores(), quota=cgroup_cores())
    with tempfile.TemporaryDirectory(prefix="crossover-selftest-") as name:
        folder = Path(name)
        with LoadGenerator(log=folder / "locust.log", cores=layout.client) as generator:
            yield Bench(folder, generator, layout.engine[:1])


def times(bench: Bench) -> list[Row]:
    """Chunks of one and of four tokens; a third of the answers stall."""
    rows: list[Row] = []
    for chunk in (1, 4):
        truth = {"ttft": 0.06, "gap": 0.008 * chunk, "chunk_tokens": chunk, "stall": 0.6}
        records, _, log = bench.load(50.0, WARM_UP_SECONDS + 3.0, 48, **truth)
        world = "one token a chunk" if chunk == 1 else f"{chunk} tokens a chunk"
        rows += [*times_rows(world, records, log), lag_row(world, records, 0.001)]
    return rows


def counts(bench: Bench) -> list[Row]:
    """Failures of every kind at once, on a server that is too slow."""
    truth = {"ttft": 0.03, "gap": 0.004, "slots": 2, "waiting": 4, "cut_every": 5}
    records, _, log = bench.load(60.0, 2.0, 8, **truth)
    return failure_rows("failures and refusals", records, log)


def conversations(bench: Bench) -> list[Row]:
    """Turns whose histories are sent again to a server that thinks first, and that cuts off some
    answers: these sessions end, and their missing turns are failures.
    """
    workload = Workload(
        prompt_tokens=24,
        output_tokens=16,
        shared_prefix_tokens=8,
        turns=Spread(mean=4, sd=1, min=2, max=6),
        think_seconds=Spread(mean=0.15, sd=0.05, min=0.05, max=0.4),
        turn_tokens=12,
    )
    truth = {"ttft": 0.03, "gap": 0.004, "reasoning_share": 0.5, "cut_every": 13}
    with bench.server(**truth) as url:
        records, _, log = bench.send(
            url, is_chat=True, rate=12.0, window_seconds=3.0, workload=workload
        )
    return conversation_rows("conversations", records, log, workload)


def pace(bench: Bench) -> list[Row]:
    """Poisson arrivals at a rate that one core should sustain with room to spare."""
    records, account, log = bench.load(RATE, PACE_SECONDS, 1, ttft=0.01)
    arrived = np.sort(np.array([entry["arrived"] for entry in log.values()]))
    world = f"Poisson, {RATE:.0f} requests/s"
    ok = sum(record.error is None for record in records)
    cpu = account.cpu_seconds / PACE_SECONDS
    return [
        Row(world, "answers", len(log), ok, 0),
        lag_row(world, records, 0.002),
        Row(world, "client CPU of one core", None, cpu, 0.5),
        arrival_row(world, arrived, RATE),
    ]


def limit(bench: Bench) -> list[Row]:
    """The limits of servers that batch by a step-time model, all at once: they mostly wait."""
    rows: list[Row] = []
    with ExitStack() as stack:
        running = [(name, *stack.enter_context(bench.world(name))) for name in WORLDS]
        for name, child, log in running:
            if child.wait(WORLD_SECONDS) != 0:
                raise LoadError(f"{name}: no limit was found ({child.how_it_ended()})")
            rows += msgspec.json.decode(log.read_bytes().splitlines()[-1], type=list[Row])
    return rows


def _rows_of(name: str, ready: Path) -> list[Row]:
    """One of WORLDS, with a load generator of its own. It begins when all have a file in `ready`: a
    load generator that imports Locust keeps the others from their core.
    """
    (more, factors), policy = WORLDS[name], SETTINGS
    true = [capacity(STEP_TIMES.slower(one), policy, WORKLOAD, SLO).rate for one in factors]
    with open_bench() as bench, bench.server(step_times=STEP_TIMES, slots=SLOTS, **more) as url:

        def ask(burst: Burst) -> Level:
            pairs = zip(burst.prompt_tokens, burst.output_tokens, strict=True)
            asks = tuple(RequestSpec(i, *pair) for i, pair in enumerate(pairs))
            return level_of(bench.send(url, asks=asks, due=(0.0,) * len(asks))[0])

        alone_load: dict[str, Any] = {"workload": WORKLOAD, "concurrency": 1}
        bench.send(url, **alone_load, requests=1)
        (ready / name).touch()
        until = time.monotonic() + READY_SECONDS
        while len(list(ready.iterdir())) < len(WORLDS) and time.monotonic() < until:
            time.sleep(0.01)
        records, _, _ = bench.send(url, **alone_load, requests=ALONE)
        alone = level_of(records, concurrency=1)
        made = calibrate(ask, WORKLOAD, SLOTS, 20.0, [alone])
        known: dict[str, Any] = {
            "step_times": made.step_times,
            "policy": policy,
            "workload": WORKLOAD,
        }
        known["least_seconds"] = LIMIT_SECONDS
        found = estimate([alone], SLO, **known)
        found = msgspec.structs.replace(found, reason=made.reason or found.reason)
        if found.estimated_rate:
            rate = CONFIRMING_SHARE * found.estimated_rate
            lasts: dict[str, Any] = {"window_seconds": LIMIT_SECONDS, "warmup_seconds": 1.0}
            records, _, _ = bench.send(url, workload=WORKLOAD, rate=rate, **lasts)
            level = level_of(records, rate_per_second=rate, **lasts)
            found = estimate([alone, level], SLO, **known)
    return capacity_rows(name, found, *true)


def run_selftest(progress: Progress) -> list[Row]:
    """All parts; one with times that are off is run once more, since a machine's hiccup does not
    come back. Counts must be right at once. Raises LoadError where a part cannot run at all.
    """
    parts = (times, counts, conversations, pace, limit)
    rows: list[Row] = []
    with open_bench() as bench:
        for number, part in enumerate(parts):
            what = (part.__doc__ or "").partition(".")[0]
            progress.tick(what, number / len(parts))
            found = part(bench)
            missed = [row for row in found if not row.passed]
            if missed and all(row.limit for row in missed):
                progress.say(f"repeating {missed[0].world}: {missed[0].what} is off")
                found = part(bench)
            rows += found
    return rows


# Whether the client measured what happened. Pure.


class Row(msgspec.Struct, frozen=True):
    """One line of the table. `truth` None: `limit` is an upper bound."""

    world: str
    what: str
    truth: float | None
    measured: float | None
    limit: float
    note: str = ""

    @property
    def passed(self) -> bool:
        """The measured value is within `limit` of the truth, or at most `limit`."""
        if self.measured is None or self.note.startswith("wrong"):
            return False
        return abs(self.measured - (self.truth or 0.0)) <= self.limit * (1 + 1e-9)


def times_rows(world: str, records: Sequence[RequestRecord], log: Log) -> list[Row]:
    """TTFT, TPOT, E2E at three quantiles, and the longest gap between chunks, of one world.

    True are the moments at which the server had read the request and wrote each chunk, so the
    client's delays of sending and receiving count as error.
    """
    answered = [one for one in records if log.get(one.request_id or "", {}).get("chunks")]
    rows = [Row(world, "answers", len(log), len(answered), 0)]
    timed = [one for one in answered if one.scheduled_seconds >= WARM_UP_SECONDS]
    if not timed:
        return [*rows, Row(world, "times", None, None, 0)]
    entries, level = [log[one.request_id or ""] for one in timed], level_of(timed)
    first = np.array([entry["chunks"][0] for entry in entries])
    last = np.array([entry["chunks"][-1] for entry in entries])
    arrived = np.array([entry["arrived"] for entry in entries])
    later = np.array([entry["tokens"] - entry["first_tokens"] for entry in entries])
    pairs = {
        "TTFT": (first - arrived, level.ttft),
        "TPOT": ((last - first)[later > 0] / later[later > 0], level.tpot[~np.isnan(level.tpot)]),
        "E2E": (last - arrived, level.e2e),
    }
    for name, (values, seen) in pairs.items():
        for share in QUANTILES:
            truth, measured = (
                float(np.quantile(one, share, method="inverted_cdf")) for one in (values, seen)
            )
            limit = max(SHARE * truth, FLOOR_SECONDS[name])
            rows.append(Row(world, f"{name} p{share * 100:g}, s", truth, measured, limit))
    gaps = np.concatenate([np.diff(entry["chunks"]) for entry in entries])
    truth, most = float(gaps.max()), float(level.itl.max(initial=0.0))
    rows.append(Row(world, "longest gap, s", truth, most, max(SHARE * truth, 0.001)))
    return rows


def failure_rows(world: str, records: Sequence[RequestRecord], log: Log) -> list[Row]:
    """Whole, refused and cut-off answers, each as often as the server says."""
    true = Counter(
        "refused (429)" if one["status"] == 429 else "whole" if one.get("whole") else "cut off"
        for one in log.values()
    )
    names = {None: "whole", "refused": "refused (429)", "cut_off": "cut off"}
    kinds = [failure_of(record) for record in records]
    seen = Counter(names.get(kind, kind or "") for kind in kinds)
    return [Row(world, name, true[name], seen[name], 0) for name in sorted(true | seen)]


def conversation_rows(
    world: str, records: Sequence[RequestRecord], log: Log, workload: Workload
) -> list[Row]:
    """Every turn of every session, sent or missing; what was reused; when each turn came, and when
    the first token of each answer behind the reasoning."""
    sent = [one for one in records if one.request_id in log]
    missing = [one for one in records if one.error == "session_ended"]
    sessions = {one.session: 0 for one in records if one.session is not None}
    drawn = draw_sessions(workload, max(sessions, default=-1) + 1, 1)
    turns = {(one.session, one.turn): one for one in records}
    ended = {one.session for one in records if one.error is not None}
    lost = sum(len(drawn[one].turns) for one in ended if one is not None)
    kept = sum(one.session in ended for one in records)
    cached = sum(int(log[one.request_id or ""]["cached"]) for one in sent if one.error is None)
    seen = sum(one.cached_tokens or 0 for one in sent if one.error is None)
    late = []
    for one in sent:
        before = turns.get((one.session, (one.turn or 0) - 1))
        if before is not None and before.ended_seconds is not None and one.session is not None:
            think = drawn[one.session].turns[one.turn or 0].think_seconds
            late.append((one.sent_seconds or 0.0) - before.ended_seconds - think)
    answered = [one for one in sent if one.error is None]
    entries = [log[one.request_id or ""] for one in answered]
    true = np.array([entry["first_answer"] - entry["arrived"] for entry in entries])
    told = level_of(answered).ttfa
    rows = [
        Row(world, "turns on the wire", len(log), len(sent), 0),
        Row(world, "turns of sessions that ended early", lost, kept, 0),
        Row(world, "turns that never came", None, len(missing), len(records)),
        Row(world, "tokens found in the cache", cached, seen, 0),
    ]
    if not late or not len(true):
        return [*rows, Row(world, "times", None, None, 0)]
    rows.append(Row(world, "turn behind its think time, s", None, max(late), 0.01))
    for share in (0.5, 0.95):
        values = (float(np.quantile(one, share, method="inverted_cdf")) for one in (true, told))
        truth, measured = values
        limit = max(SHARE * truth, FLOOR_SECONDS["TTFA"])
        rows.append(Row(world, f"TTFA p{share * 100:g}, s", truth, measured, limit))
    return rows


def arrival_row(world: str, arrived: npt.NDArray[np.float64], rate: float) -> Row:
    """The server's arrivals (ascending, seconds) against Poisson.

    The index of dispersion of their counts in short windows (variance / mean) is 1 for Poisson,
    less where they come evenly, more where they come in clumps.
    """
    windows = int((arrived[-1] - arrived[0]) * rate / 2)  # of two mean gaps each
    counts, _ = np.histogram(arrived, bins=windows)
    spread = float(counts.var(ddof=1) / counts.mean())
    several = DISPERSION_SIGMA * math.sqrt(2 / windows)
    return Row(world, "index of dispersion", 1.0, spread, several)


def lag_row(world: str, records: Sequence[RequestRecord], limit_seconds: float) -> Row:
    """How late the requests left, p99."""
    lag = send_delay_p99(level_of(records))
    return Row(world, "send delay p99, s", None, lag, limit_seconds)


def capacity_rows(
    world: str, found: Capacity, truth: float, most: float, least: float
) -> list[Row]:
    """The estimate within CAPACITY_SHARE, inside an interval that holds the truth; what is
    confirmed is no more than the truth. `most`, `least`: at the speeds of a server that has two.
    """
    note = f"wrong: {found.reason}"
    if found.low is not None and found.high is not None:
        holds = found.low <= most and least <= found.high
        note = f"{'' if holds else 'wrong '}interval {found.low:.3g} to {found.high:.3g}"
    share = max(CAPACITY_SHARE * truth, most * (1 + CAPACITY_SHARE) - truth)
    return [
        Row(world, "capacity, requests/s", truth, found.estimated_rate, share, note),
        Row(
            world, "confirmed, requests/s", None, found.confirmed_rate, most * (1 + CONFIRMED_SHARE)
        ),
    ]


def level_of(records: Sequence[RequestRecord], **asked: Any) -> Level:
    """A finished level; `asked`: of its LevelStarted; without a window all of them are in it."""
    last = max((record.scheduled_seconds for record in records), default=0.0)
    same = {"cell": "", "level": "", "window_seconds": asked.pop("window_seconds", last + 1)}
    started = LevelStarted(**same, **asked)
    return Level.of(records, started, LevelFinished(due=len(records), **same))


if __name__ == "__main__":
    print(msgspec.json.encode(_rows_of(sys.argv[1], Path(sys.argv[2]))).decode())

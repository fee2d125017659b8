"""`crossover selftest`: does the load generator measure correctly on this machine?

The self-test loads a reference server (reference_server.py) like any endpoint and compares its
records with the server's own log.

    times           one and four tokens per chunk, a third of the answers with a stall: TTFT, TPOT,
                    E2E and gaps between chunks
    counts          answers that are cut off, and 429 responses of a full queue
    conversations   turns that send their histories again, to a server that reasons first
    pace            Poisson arrivals as the server saw them, send delay, the client's CPU time
    limit           capacity of servers that batch with known step times (at one speed, at two, and
                    with pauses), from bursts, a step-time model and a level, as in a campaign

Times may differ by 1 % or 1 ms (0.1 ms for a TPOT), whichever is more. Counts must be equal.
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
from crossover.loadtests.capacity.calibration_bursts import calibrate
from crossover.loadtests.capacity.capacity_estimate import CONFIRMING_SHARE, estimate
from crossover.loadtests.errors import LoadError
from crossover.loadtests.host.child_processes import Child
from crossover.loadtests.host.cpu_pinning import divide_cores
from crossover.loadtests.levels.level_columns import Level, failure_of
from crossover.loadtests.levels.level_warnings import send_delay_p99
from crossover.loadtests.load_generator.http_connection import connect, fetch, get_bytes
from crossover.loadtests.load_generator.level_messages import Ended, LoadPlan
from crossover.loadtests.load_generator.locust_process import LoadGenerator
from crossover.loadtests.load_generator.openai_endpoint import probe_endpoint
from crossover.loadtests.load_generator.target import Target
from crossover.loadtests.records.journal_events import Capacity, LevelFinished, LevelStarted
from crossover.loadtests.records.level_plan import Burst, LevelPlan
from crossover.loadtests.records.request_record import RequestRecord
from crossover.models.machine_limits import cgroup_cores
from crossover.models.temporary_folder import temporary_folder
from crossover.serving.capacity.scheduler_settings import SchedulerSettings
from crossover.serving.capacity.simulated_capacity import Demand, ServerModel
from crossover.serving.capacity.slo import Slo
from crossover.serving.capacity.step_time_model import StepTimeModel
from crossover.serving.hardware.machine_facts import allowed_cores
from crossover.serving.workload.conversations import draw_sessions, mean_turns_of
from crossover.serving.workload.request_lengths import Spread, Workload

RATE, PACE_SECONDS = 600.0, 3.0
SESSION_RATE = 12.0  # conversations/s
WARM_UP_SECONDS = 1.0  # the times of requests due before do not count: they open connections
# About ten times as fast as a small model on a CPU, so that a short level has enough requests.
STEP_TIMES = StepTimeModel(
    base_seconds=0.005,
    row_seconds=0.0008,
    prompt_token_seconds=0.0001,
    context_token_seconds=5e-7,
    pass_seconds=0.001,
)
SLOTS = 8
# Those of the reference server, which has no target for the time of a step.
SETTINGS = SchedulerSettings(slots=SLOTS, step_tokens=2048, step_seconds_target=None)
WORKLOAD = Workload(preset="sharegpt", scale=0.15, max_prompt_tokens=256, max_output_tokens=64)
SLO = Slo("selftest", ttft_seconds=0.25, tpot_seconds=0.02, target=0.9)
SINGLE_STREAM_REQUESTS = 10
MAX_UNLOADED_SECONDS = 30.0  # of these requests
LIMIT_SECONDS = 14.0  # window of the level that confirms a rate
READY_SECONDS = 30.0  # how long one of WORLDS waits until the others are ready
WORLD_SECONDS = 120.0  # maximum time of one of WORLDS
# World -> options of its server, and the mean, minimum and maximum factor of its step times.
WORLDS: dict[str, tuple[dict[str, float], tuple[float, float, float]]] = {
    "known step times": ({}, (1.0, 1.0, 1.0)),
    "step times of two speeds": ({"slower": 1.25}, (1.125, 1.0, 1.25)),
    "step times with pauses": ({"pause": 0.1}, (1.05, 1.05, 1.05)),  # every 2 s
}

# Request ID -> what the server did (crossover.loadtests.selftest.reference_server).
Log = Mapping[str, Mapping[str, Any]]
QUANTILES = (0.50, 0.95, 0.99)
# A time may be off by this share of it, or by its floor if that is more.
MAX_TIME_ERROR = 0.01
FLOOR_SECONDS = {"TTFT": 0.001, "TPOT": 0.0001, "E2E": 0.001, "TTFA": 0.002}  # a TPOT is a mean
DISPERSION_SIGMA = 3.3  # standard deviations: about 1 in 1,000 Poisson processes exceeds this
MAX_CAPACITY_ERROR = 0.15
MAX_CONFIRMED_EXCESS = 0.05  # a confirmed rate may be this far above the truth, by luck
LoadResult = tuple[list[RequestRecord], Ended, Log]  # the client's records and the server's log


class Bench:
    """What the parts of the self-test share: a folder, one load generator, and the cores on which
    their servers run."""

    def __init__(self, folder: Path, generator: LoadGenerator, cores: tuple[int, ...]) -> None:
        self._folder, self._generator, self._cores = folder, generator, cores
        self._servers = 0

    @contextmanager
    def server(self, **truth: Any) -> Iterator[str]:
        """Start a reference server and yield its URL. `truth`: fields of its Truth.

        Raises LoadError if it does not start within 30 s.
        """
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
        """Start a process that estimates the capacity in one of WORLDS. Yield the process and its
        log, whose last line will be its rows as JSON."""
        log, ready_folder = self._folder / f"{name}.log", self._folder / "ready"
        ready_folder.mkdir(exist_ok=True)
        (ready_folder / name).unlink(missing_ok=True)  # left by an earlier run of this part
        module = "crossover.loadtests.selftest.selftest"
        command = [sys.executable, "-m", module, name, str(ready_folder)]
        with Child(command, log=log) as child:
            yield child, log

    def send(
        self, url: str, plan: LevelPlan, workload: Workload, *, is_chat: bool = False
    ) -> LoadResult:
        """Run one level on the server at `url`, as a campaign does."""
        target = Target(url=url, api="chat" if is_chat else "completions")
        load = LoadPlan(
            target=target,
            plan=plan,
            workload=workload,
            drain_seconds=20.0,
            facts=probe_endpoint(target),
        )
        records: list[RequestRecord] = []
        with connect(url) as pool:
            before = msgspec.json.decode(fetch(pool, get_bytes(pool, "/truth"))[2])
            _, ended = self._generator.level(load, on_record=records.append)
            after = msgspec.json.decode(fetch(pool, get_bytes(pool, "/truth"))[2])
        log = {name: entry for name, entry in after.items() if name not in before}
        return records, ended, log

    def load(self, rate: float, seconds: float, tokens: int, **truth: Any) -> LoadResult:
        """Run one level at `rate` requests/s with `tokens` output tokens per request, on a new
        reference server. `truth`: fields of the server's Truth."""
        workload = Workload(prompt_tokens=16, output_tokens=tokens)
        with self.server(**truth) as url:
            return self.send(url, LevelPlan(rate=rate, window_seconds=seconds), workload)


@contextmanager
def open_bench() -> Iterator[Bench]:
    layout = divide_cores(allowed_cores(), quota=cgroup_cores())
    with tempfile.TemporaryDirectory(prefix="crossover-selftest-", dir=temporary_folder()) as name:
        folder = Path(name)
        with LoadGenerator(log=folder / "locust.log", cores=layout.client) as generator:
            yield Bench(folder, generator, layout.engine[:1])


def times(bench: Bench) -> list[Check]:
    """Times of chunks of one and of four tokens. A third of the answers stall."""
    rows: list[Check] = []
    for chunk in (1, 4):
        truth = {"ttft": 0.06, "gap": 0.008 * chunk, "chunk_tokens": chunk, "stall": 0.6}
        records, _, log = bench.load(50.0, WARM_UP_SECONDS + 3.0, 48, **truth)
        world = "one token a chunk" if chunk == 1 else f"{chunk} tokens a chunk"
        rows += [*times_rows(world, records, log), send_delay_row(world, records, 0.001)]
    return rows


def counts(bench: Bench) -> list[Check]:
    """Failures of every kind in one level, on a server that is too slow for its load."""
    truth = {"ttft": 0.03, "gap": 0.004, "slots": 2, "waiting": 4, "cut_every": 5}
    records, _, log = bench.load(60.0, 2.0, 8, **truth)
    return failure_rows("failures and refusals", records, log)


def conversations(bench: Bench) -> list[Check]:
    """Turns that send their histories again, to a server that reasons before it answers. It cuts
    off some answers; these sessions end there, and their missing turns are failures.
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
    plan = LevelPlan(rate=SESSION_RATE * mean_turns_of(workload), window_seconds=3.0)
    with bench.server(**truth) as url:
        records, _, log = bench.send(url, plan, workload, is_chat=True)
    return conversation_rows("conversations", records, log, workload)


def pace(bench: Bench) -> list[Check]:
    """Poisson arrivals at a rate that one core should sustain easily."""
    records, account, log = bench.load(RATE, PACE_SECONDS, 1, ttft=0.01)
    arrivals = np.sort(np.array([entry["arrived"] for entry in log.values()]))
    world = f"Poisson, {RATE:.0f} requests/s"
    answered_count = sum(record.error is None for record in records)
    cpu_share = account.cpu_seconds / PACE_SECONDS
    return [
        Check(world, "answers", len(log), answered_count, 0),
        send_delay_row(world, records, 0.002),
        Check(world, "client CPU of one core", None, cpu_share, 0.5),
        arrival_row(world, arrivals, RATE),
    ]


def limit(bench: Bench) -> list[Check]:
    """Capacity of servers that batch by a step-time model. All WORLDS run at the same time, since
    their servers mostly sleep."""
    rows: list[Check] = []
    with ExitStack() as stack:
        processes = [(name, *stack.enter_context(bench.world(name))) for name in WORLDS]
        for name, child, log in processes:
            if child.wait(WORLD_SECONDS) != 0:
                raise LoadError(f"{name}: no limit was found ({child.how_it_ended()})")
            rows += msgspec.json.decode(log.read_bytes().splitlines()[-1], type=list[Check])
    return rows


def _rows_of_world(name: str, ready_folder: Path) -> list[Check]:
    """Measure the capacity in one of WORLDS, with a load generator of its own.

    Each world creates a file in `ready_folder` when its load generator has started, and measures
    when all have: a load generator that imports Locust takes CPU time from the others.
    """
    server_options, factors = WORLDS[name]
    server_model, demand = ServerModel(STEP_TIMES, SETTINGS), Demand(WORKLOAD)
    true_rates = [server_model.slower(factor).capacity(demand, SLO).rate for factor in factors]
    with (
        open_bench() as bench,
        bench.server(step_times=STEP_TIMES, slots=SLOTS, **server_options) as url,
    ):

        def measure(plan: LevelPlan) -> Level:
            return level_of(bench.send(url, plan, WORKLOAD)[0], plan)

        def send_burst(burst: Burst) -> Level:
            return measure(LevelPlan(burst=burst, window_seconds=MAX_UNLOADED_SECONDS))

        single_stream = LevelPlan(
            concurrency=1, requests=SINGLE_STREAM_REQUESTS, window_seconds=MAX_UNLOADED_SECONDS
        )
        measure(msgspec.structs.replace(single_stream, requests=1))
        (ready_folder / name).touch()
        deadline = time.monotonic() + READY_SECONDS
        while len(list(ready_folder.iterdir())) < len(WORLDS) and time.monotonic() < deadline:
            time.sleep(0.01)
        unloaded = measure(single_stream)
        calibration = calibrate(send_burst, WORKLOAD, SLOTS, 20.0, [unloaded])
        calibrated: ServerModel | None = None
        if calibration.step_times is not None:
            calibrated = ServerModel(calibration.step_times, SETTINGS)

        def estimated(levels: Sequence[Level]) -> Capacity:
            return estimate(levels, SLO, calibrated, demand, min_level_seconds=LIMIT_SECONDS)

        result = estimated([unloaded])
        result = msgspec.structs.replace(result, reason=calibration.reason or result.reason)
        if result.estimated_rate:
            rate = CONFIRMING_SHARE * result.estimated_rate
            plan = LevelPlan(rate=rate, warmup_seconds=1.0, window_seconds=LIMIT_SECONDS)
            result = estimated([unloaded, measure(plan)])
    return capacity_rows(name, result, *true_rates)


def run_selftest(progress: Progress) -> list[Check]:
    """Run all parts and return their rows.

    A part in which only times are off is run once more, since a hiccup of the machine does not come
    back. Counts must be right the first time. Raises LoadError if a part cannot run.
    """
    parts = (times, counts, conversations, pace, limit)
    rows: list[Check] = []
    with open_bench() as bench:
        for number, part in enumerate(parts):
            title = (part.__doc__ or "").partition(".")[0]
            progress.tick(title, number / len(parts))
            part_rows = part(bench)
            failed_rows = [row for row in part_rows if not row.passed]
            if failed_rows and all(row.limit for row in failed_rows):
                progress.say(f"repeating {failed_rows[0].world}: {failed_rows[0].what} is off")
                part_rows = part(bench)
            rows += part_rows
    return rows


# What follows compares the client's records with the server's log. It has no side effects.


class Check(msgspec.Struct, frozen=True):
    """One comparison: a line of the table that the self-test prints."""

    world: str  # the server and its load
    what: str  # the quantity and its unit
    truth: float | None  # None: `limit` is an upper bound
    measured: float | None
    limit: float  # maximum difference from the truth
    note: str = ""

    @property
    def passed(self) -> bool:
        """Whether the measured value is within `limit` of the truth, or is at most `limit`."""
        if self.measured is None or self.note.startswith("wrong"):
            return False
        return abs(self.measured - (self.truth or 0.0)) <= self.limit * (1 + 1e-9)


def times_rows(world: str, records: Sequence[RequestRecord], log: Log) -> list[Check]:
    """Compare TTFT, TPOT and E2E at three quantiles, and the longest gap between chunks.

    The truth is when the server had received the request and when it wrote each chunk, so that the
    client's delays in sending and receiving count as errors.
    """
    answered = [record for record in records if log.get(record.request_id or "", {}).get("chunks")]
    rows = [Check(world, "answers", len(log), len(answered), 0)]
    timed = [record for record in answered if record.scheduled_seconds >= WARM_UP_SECONDS]
    if not timed:
        return [*rows, Check(world, "times", None, None, 0)]
    entries, level = [log[record.request_id or ""] for record in timed], level_of(timed)
    arrivals = np.array([entry["arrived"] for entry in entries])
    first_chunks = np.array([entry["chunks"][0] for entry in entries])
    last_chunks = np.array([entry["chunks"][-1] for entry in entries])
    later_tokens = np.array([entry["tokens"] - entry["first_tokens"] for entry in entries])
    has_later = later_tokens > 0
    true_tpot = (last_chunks - first_chunks)[has_later] / later_tokens[has_later]
    times_of_metrics = {
        "TTFT": (first_chunks - arrivals, level.ttft),
        "TPOT": (true_tpot, level.tpot[~np.isnan(level.tpot)]),
        "E2E": (last_chunks - arrivals, level.e2e),
    }
    for name, (true_times, measured_times) in times_of_metrics.items():
        rows += _quantile_rows(world, name, true_times, measured_times, QUANTILES)
    gaps = np.concatenate([np.diff(entry["chunks"]) for entry in entries])
    longest_gap, measured_gap = float(gaps.max()), float(level.itl.max(initial=0.0))
    limit = max(MAX_TIME_ERROR * longest_gap, 0.001)
    rows.append(Check(world, "longest gap, s", longest_gap, measured_gap, limit))
    return rows


def _quantile_rows(
    world: str,
    name: str,
    true_times: npt.NDArray[np.float64],
    measured_times: npt.NDArray[np.float64],
    quantiles: Sequence[float],
) -> list[Check]:
    """Compare two arrays of times in seconds, each [requests], at some of their quantiles."""
    rows: list[Check] = []
    for q in quantiles:
        truth = float(np.quantile(true_times, q, method="inverted_cdf"))
        measured = float(np.quantile(measured_times, q, method="inverted_cdf"))
        limit = max(MAX_TIME_ERROR * truth, FLOOR_SECONDS[name])
        rows.append(Check(world, f"{name} p{q * 100:g}, s", truth, measured, limit))
    return rows


def failure_rows(world: str, records: Sequence[RequestRecord], log: Log) -> list[Check]:
    """Compare the numbers of whole, refused and cut-off answers with the server's."""

    def true_outcome(entry: Mapping[str, Any]) -> str:
        if entry["status"] == 429:
            return "refused (429)"
        return "whole" if entry.get("whole") else "cut off"

    names = {None: "whole", "refused": "refused (429)", "cut_off": "cut off"}
    failures = [failure_of(record) for record in records]
    true_counts = Counter(true_outcome(entry) for entry in log.values())
    measured_counts = Counter(names.get(failure, failure or "") for failure in failures)
    return [
        Check(world, name, true_counts[name], measured_counts[name], 0)
        for name in sorted(true_counts | measured_counts)
    ]


def conversation_rows(
    world: str, records: Sequence[RequestRecord], log: Log, workload: Workload
) -> list[Check]:
    """Compare the turns of all sessions, sent or missing; the tokens found in the server's cache;
    how long after its think time each turn was sent; and TTFA, behind the reasoning."""
    sent = [record for record in records if record.request_id in log]
    answered = [record for record in sent if record.error is None]
    missing = [record for record in records if record.error == "session_ended"]
    session_indices = {record.session for record in records if record.session is not None}
    sessions = draw_sessions(workload, max(session_indices, default=-1) + 1, 1)
    records_by_turn = {(record.session, record.turn): record for record in records}
    # A session ends with its first failed turn, and its later turns are recorded as missing.
    ended_early = {record.session for record in records if record.error is not None}
    drawn_turns = sum(len(sessions[index].turns) for index in ended_early if index is not None)
    recorded_turns = sum(record.session in ended_early for record in records)
    entries = [log[record.request_id or ""] for record in answered]
    true_cached_tokens = sum(int(entry["cached"]) for entry in entries)
    cached_tokens = sum(record.cached_tokens or 0 for record in answered)
    delays = []
    for record in sent:
        previous = records_by_turn.get((record.session, (record.turn or 0) - 1))
        if (
            previous is not None
            and previous.ended_seconds is not None
            and record.session is not None
        ):
            think_seconds = sessions[record.session].turns[record.turn or 0].think_seconds
            delays.append((record.sent_seconds or 0.0) - previous.ended_seconds - think_seconds)
    rows = [
        Check(world, "turns on the wire", len(log), len(sent), 0),
        Check(world, "turns of sessions that ended early", drawn_turns, recorded_turns, 0),
        Check(world, "turns that never came", None, len(missing), len(records)),
        Check(world, "tokens found in the cache", true_cached_tokens, cached_tokens, 0),
    ]
    if not delays or not answered:
        return [*rows, Check(world, "times", None, None, 0)]
    rows.append(Check(world, "turn behind its think time, s", None, max(delays), 0.01))
    true_ttfa = np.array([entry["first_answer"] - entry["arrived"] for entry in entries])
    rows += _quantile_rows(world, "TTFA", true_ttfa, level_of(answered).ttfa, (0.5, 0.95))
    return rows


def arrival_row(world: str, arrivals: npt.NDArray[np.float64], rate: float) -> Check:
    """Compare arrivals at the server (ascending, seconds) with a Poisson process of `rate`
    requests/s.

    The index of dispersion, variance over mean of the counts in short windows, is 1 for a Poisson
    process, lower for even arrivals and higher for bursts. Its standard deviation over n windows is
    sqrt(2 / n).
    """
    windows = int((arrivals[-1] - arrivals[0]) * rate / 2)  # two mean gaps each
    counts, _ = np.histogram(arrivals, bins=windows)
    dispersion = float(counts.var(ddof=1) / counts.mean())
    max_difference = DISPERSION_SIGMA * math.sqrt(2 / windows)
    return Check(world, "index of dispersion", 1.0, dispersion, max_difference)


def send_delay_row(world: str, records: Sequence[RequestRecord], limit_seconds: float) -> Check:
    """Compare the 99th percentile of the send delay with its limit."""
    delay = send_delay_p99(level_of(records))
    return Check(world, "send delay p99, s", None, delay, limit_seconds)


def capacity_rows(
    world: str, result: Capacity, true_rate: float, max_rate: float, min_rate: float
) -> list[Check]:
    """Compare a measured capacity with the true one, requests/s.

    The estimate must be within MAX_CAPACITY_ERROR of the truth, its interval must contain the
    truth, and the confirmed rate must not exceed the truth by more than MAX_CONFIRMED_EXCESS.
    `max_rate` and `min_rate`: true capacity at either speed of a server that has two.
    """
    note = f"wrong: {result.reason}"
    if result.low is not None and result.high is not None:
        contains_truth = result.low <= max_rate and min_rate <= result.high
        note = f"{'' if contains_truth else 'wrong '}interval {result.low:.3g} to {result.high:.3g}"
    max_error = max(MAX_CAPACITY_ERROR * true_rate, max_rate * (1 + MAX_CAPACITY_ERROR) - true_rate)
    max_confirmed = max_rate * (1 + MAX_CONFIRMED_EXCESS)
    return [
        Check(world, "capacity, requests/s", true_rate, result.estimated_rate, max_error, note),
        Check(world, "confirmed, requests/s", None, result.confirmed_rate, max_confirmed),
    ]


def level_of(records: Sequence[RequestRecord], plan: LevelPlan | None = None) -> Level:
    """Return a finished level of these records. All of them count, except at a rate, where those
    do that were due in the window of the plan."""
    last = max((record.scheduled_seconds for record in records), default=0.0)
    window_seconds = last + 1 if plan is None or plan.rate is None else plan.window_seconds
    return Level.of(
        records,
        LevelStarted(cell="", level="", plan=plan or LevelPlan(window_seconds=window_seconds)),
        LevelFinished(cell="", level="", due=len(records), window_seconds=window_seconds),
    )


if __name__ == "__main__":
    print(msgspec.json.encode(_rows_of_world(sys.argv[1], Path(sys.argv[2]))).decode())

"""One level of load, measured and on record: a Locust child for a rate or a concurrency, this process for lone requests.

    measured = loaded_level(site, Measure(2.0, 30.0, "bracket"), name="cell#2.1", seed=7, attempt=1)
    measured.summary.verdict, measured.level

A level is whole or it does not count: when the engine was restarted within it, when the load generator ended early or its account and the
records on disk differ, LevelInterrupted is raised and the level is the caller's to abandon and measure again. A level whose verdict is
sure before its time is over (slo.is_hopeless) is cut short, and its window with it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec

from loadtests.arrivals import ArrivalCheck, due_times, process_of
from loadtests.calibrate import Wave
from loadtests.campaign import Campaign, Cell
from loadtests.children import Child, wait_for_file
from loadtests.errors import LevelInterrupted, ServerFailed
from loadtests.generators import Spare, load_generator
from loadtests.plan import LoadPlan, Outcome, Prompts, Share
from loadtests.progress import Progress
from loadtests.records import RequestRecord, ResourceSample
from loadtests.sampler import Sampler
from loadtests.search import Level, Measure, level_of
from loadtests.servers import Server
from loadtests.slo import Promise, is_hopeless
from loadtests.store import REQUESTS, LevelStarted, RunFolder
from loadtests.streaming import Ask, Pool, clock, post_bytes, stream
from loadtests.summary import Summary, Window, summarise
from loadtests.target import TargetFacts, body_of, path_of
from loadtests.timings import is_good
from loadtests.workload import Workload

START_SECONDS = 120.0  # that a load generator may take to make its prompts
POLL_SECONDS = 0.1
SETTLE_SECONDS = 300.0
LEAST_BAD = 5  # fewer may be a single unlucky meeting of requests
LEAST_WARMUP_SECONDS = 1.0


class LevelFinished(msgspec.Struct, frozen=True, kw_only=True):
    """The `detail` of a level_finished event: counts, and how the window came out."""

    due: int  # requests on record, those of the warm-up included
    good: int  # within the window
    failed: int
    window_due: int
    window_seconds: float  # as it came out: shorter than asked where the level was cut short
    cut_short: str | None  # why
    gave_up: int  # requests that were ended at the end of the drain time
    spent_seconds: float  # of the budget: start of the load generator, warm-up, window and drain
    verdict: str
    is_valid: bool
    doubts: list[str]
    arrivals: ArrivalCheck | None = None  # how requests left, held against the process that was asked; None: closed loop


@dataclass
class Site:
    """Where levels of one cell are measured."""

    run: RunFolder
    cell: Cell
    campaign: Campaign
    server: Server
    facts: TargetFacts
    pool: Pool
    progress: Progress
    sampler: Sampler = field(init=False)  # set once it runs
    spare: Spare | None = None  # a load generator that is started already, for the next level that wants one
    samples: list[ResourceSample] = field(default_factory=list)  # of the level that runs now
    memory_bytes: int | None = None  # a cap that nobody but we hold: server and engine together
    over_memory: str | None = None  # how they broke it

    def keep_sample(self, sample: ResourceSample) -> None:
        self.run.sample(sample)
        if sample.level is not None:
            self.samples.append(sample)
        used = sum(group.rss_bytes or 0 for group in (sample.engine, sample.api) if group is not None)
        if self.memory_bytes is not None and used > self.memory_bytes:
            self.over_memory = f"server and engine used {used / 2**30:.2f} GiB, and the budget is {self.memory_bytes / 2**30:g} GiB"

    def check(self) -> None:
        """Raises ServerFailed where the cell's memory cap was broken, LevelInterrupted where the server is in trouble."""
        if self.over_memory is not None:
            raise ServerFailed(self.over_memory)
        if (trouble := self.server.trouble()) is not None:
            raise LevelInterrupted(trouble)
        if self.sampler.failure is not None:
            raise self.sampler.failure


@dataclass
class Measured:
    """A level as it came out."""

    name: str
    summary: Summary
    level: Level
    cut_short: str | None = None
    gave_up: int = 0  # requests that the client ended: the server may be at work on them still


def judge(
    records: Sequence[RequestRecord], samples: Sequence[ResourceSample], started: LevelStarted, window_seconds: float, promise: Promise
) -> tuple[Summary, Level]:
    """The numbers of a level and what the search makes of it: the same from memory and from disk."""
    window = Window(started.warmup_seconds, started.warmup_seconds + max(window_seconds, 1e-9))
    summary = summarise(
        records, samples, window, promise, rate=started.rate_per_second, started_unix_seconds=started.started_unix_seconds,
        client_processes=max(1, len({r.worker for r in records if r.worker is not None})), arrivals=process_of(started.arrivals),
    )  # fmt: skip
    return summary, level_of(summary)


def lone_level(site: Site, step: Measure, name: str, seed: int, attempt: int) -> Measured:
    """One request at a time on an idle server, from this process: what the engine does when nobody else wants anything."""
    began = time.monotonic()
    plan = _plan(site, step, name, seed)
    prompts = Prompts(plan, site.facts, site.pool, Share(0, 1))
    mark = site.server.mark()
    started = _started(site, plan, "lone", attempt, time.time())
    origin = clock()
    site.samples.clear()
    site.sampler.level = name
    site.run.event("level_started", cell=site.cell.key, level=name, detail=started)
    try:
        records, cut_short = _ask_alone(site, step, plan, prompts, origin)
    finally:
        site.sampler.level = None
    if site.server.mark() != mark:
        raise LevelInterrupted("the engine was restarted")
    return _finish(site, name, records, started, clock() - origin, cut_short, 0, time.monotonic() - began)


def _ask_alone(site: Site, step: Measure, plan: LoadPlan, prompts: Prompts, origin: float) -> tuple[list[RequestRecord], str | None]:
    """The records of lone requests, and why there are fewer than were wanted."""
    records: list[RequestRecord] = []
    wanted, cut_short, bad = step.requests or 1, None, 0
    while len(records) < wanted and clock() - origin < step.duration_seconds and cut_short is None:
        request = prompts.fresh()
        ask = Ask(
            cell=plan.cell, level=plan.level, index=len(records), due_seconds=clock() - origin, asked_prompt_tokens=request.prompt_tokens,
            asked_output_tokens=request.output_tokens, session=request.session, turn=request.turn, worker=0,
        )  # fmt: skip
        timeout = min(plan.target.timeout_seconds, max(60.0, 2 * step.duration_seconds))
        record = stream(site.pool, request.wire, ask, origin=origin, timeout_seconds=timeout)
        site.run.request(record)
        records.append(record)
        bad += not is_good(record, site.campaign.promise)
        site.check()
        if len(site.campaign.all_promises) == 1 and is_hopeless(bad, wanted, site.campaign.promise):
            cut_short = f"{bad} of {wanted} requests are bad: no more are needed to know"
        site.progress.tick(f"{plan.cell}: lone requests, {len(records)} of {wanted}", fraction=len(records) / wanted)
    return records, cut_short


def loaded_level(
    site: Site, step: Measure, name: str, seed: int, attempt: int, *, concurrency: int | None = None, purpose: str = "search"
) -> Measured:
    """A rate (or, with `concurrency`, so many users in a closed loop) from a Locust child on the client's cores."""
    began = time.monotonic()
    plan = _plan(site, step, name, seed, concurrency=concurrency)
    folder = site.run.folder / "levels"
    plan_file, started_file, outcome_file, stop_file, late_file = (
        (folder / f"{name}.{part}.json").absolute() for part in ("plan", "started", "outcome", "stop", "late")
    )
    plan = msgspec.structs.replace(
        plan, requests_file=str((site.run.folder / REQUESTS).absolute()), started_file=str(started_file), outcome_file=str(outcome_file),
        stop_file=str(stop_file), late_file=str(late_file), late_seconds=_patience(site.campaign),
    )  # fmt: skip
    plan_file.write_bytes(msgspec.json.encode(plan))
    mark = site.server.mark()
    tail = Tail(site.run.folder / REQUESTS, name)
    cores = site.server.layout.client if site.server.layout is not None else ()
    log = site.run.folder / "logs" / f"{site.cell.key}.locust.log"
    site.progress.tick(f"{name}: starting the load generator")
    spare, site.spare = site.spare, None
    generator = spare.take(plan_file.read_bytes()) if spare else load_generator(plan_file, log=log, users=concurrency or 1, cores=cores)
    with generator as child:
        if not wait_for_file(started_file, child, START_SECONDS):
            raise LevelInterrupted(f"the load generator did not start ({child.how_it_ended()}); all it said is in logs/{log.name}")
        announced = msgspec.json.decode(started_file.read_bytes(), type=Outcome)
        started = _started(site, plan, purpose, attempt, announced.started_unix_seconds)
        site.samples.clear()
        site.sampler.client = child.pid
        site.sampler.level = name
        site.run.event("level_started", cell=site.cell.key, level=name, detail=started)
        try:
            cut_short = _watch(site, plan, started, child, tail)
        finally:
            site.sampler.level = None
            site.sampler.client = os.getpid()
        outcome = msgspec.json.decode(outcome_file.read_bytes(), type=Outcome)
        child.wait(15)
    records = tail.read()
    if not len(records) == outcome.recorded == outcome.due == len({record.index for record in records}):
        counts = f"{outcome.due} were due, {outcome.recorded} ended, {len(records)} are on record"
        raise LevelInterrupted(f"the load generator's account does not match the records: {counts}")
    if site.server.mark() != mark:
        raise LevelInterrupted("the engine was restarted")
    end = outcome.stopped_seconds if outcome.stopped_seconds is not None else plan.duration_seconds
    window = max(0.0, min(end, plan.duration_seconds) - plan.warmup_seconds)
    if outcome.stopped_seconds is None:
        cut_short = None
    return _finish(site, name, records, started, window, cut_short, outcome.gave_up, time.monotonic() - began)


def _watch(site: Site, plan: LoadPlan, started: LevelStarted, child: Child, tail: Tail) -> str | None:
    """Stays with a level until its outcome is there. Returns why it was cut short, None when it was not. Raises LevelInterrupted."""
    promises = site.campaign.all_promises  # a level is cut short only where none of them can be kept any more
    start, end = plan.warmup_seconds, plan.duration_seconds
    counting: set[int] = set()  # indices of the requests that are due in the window
    if plan.rate_per_second is not None:
        due = due_times(plan.arrivals, plan.rate_per_second, plan.duration_seconds, plan.seed)
        counting = {index for index, at in enumerate(due.tolist()) if start <= at < end}
    outcome_file, late_file = Path(plan.outcome_file or ""), Path(plan.late_file or "")
    engines = site.server.engine_pids()
    cut_short: str | None = None
    over = end + plan.drain_seconds + plan.target.timeout_seconds + START_SECONDS
    looked = 0.0
    read = counted = 0  # records so far, and those due in the window; each is judged once, however often this looks
    bads: list[set[int]] = [set() for _ in promises]
    bad: set[int] = set() if len(promises) > 1 else bads[0]  # by the campaign's first promise
    while not outcome_file.exists():
        if child.poll() is not None and not outcome_file.exists():
            raise LevelInterrupted(f"the load generator ended early ({child.how_it_ended()})")
        now = time.time() - started.started_unix_seconds
        if now > over:
            raise LevelInterrupted(f"the load generator did not end within {over:.0f} s")
        if now - looked > 0.5:
            looked = now
            site.check()
            if site.server.engine_pids() != engines:
                raise LevelInterrupted("the engine was restarted")
        for record in tail.read()[read:]:
            read += 1
            if start <= record.due_seconds < end:
                counted += 1
                for promise, its_bad in ((site.campaign.promise, bad), *zip(promises, bads, strict=True)):
                    if not is_good(record, promise):
                        its_bad.add(record.index)
        late = set(msgspec.json.decode(late_file.read_bytes())) if late_file.exists() else set()
        hopeless = min(len(its_bad | (late & counting)) for its_bad in bads)
        lost = all(is_hopeless(len(its | (late & counting)), len(counting), p) for its, p in zip(bads, promises, strict=True))
        if cut_short is None and hopeless >= LEAST_BAD and lost:
            cut_short = f"{hopeless} requests were bad, too many for the {len(counting)} of the level to keep the promise"
            Path(plan.stop_file or "").touch()
        words = _words(site, plan, now, read, counted - len(bad), counted)
        site.progress.tick(words, fraction=min(1.0, now / end))
        time.sleep(POLL_SECONDS)
    return cut_short


def _words(site: Site, plan: LoadPlan, now: float, ended: int, good: int, counted: int) -> str:
    load = f"{plan.rate_per_second:.3g} requests/s" if plan.rate_per_second is not None else f"{plan.concurrency} users"
    if now > plan.duration_seconds:
        phase = "draining"
    else:
        phase = "warming up" if now < plan.warmup_seconds else f"{plan.duration_seconds - now:.0f} s left"
    return f"{site.cell.key} at {load}: {ended} answers, {good} of {counted} good, {phase}"


def _finish(
    site: Site,
    name: str,
    records: list[RequestRecord],
    started: LevelStarted,
    window_seconds: float,
    cut_short: str | None,
    gave_up: int,
    spent: float,
) -> Measured:
    samples = list(site.samples)
    summary, level = judge(records, samples, started, window_seconds, site.campaign.promise)
    shown = summary
    # What goes on record is by the campaign's own promise, whichever of several this level was measured for.
    first = site.campaign.all_promises[0]
    if first != site.campaign.promise:
        summary, _ = judge(records, samples, started, window_seconds, first)
    detail = LevelFinished(
        due=len(records), good=summary.good, failed=sum(summary.failed.values()), window_due=summary.due,
        window_seconds=round(window_seconds, 6),
        cut_short=cut_short, gave_up=gave_up, spent_seconds=round(spent, 3), verdict=summary.verdict, is_valid=summary.is_valid,
        doubts=[doubt.code for doubt in summary.doubts], arrivals=summary.arrivals,
    )  # fmt: skip
    site.run.event("level_finished", cell=site.cell.key, level=name, detail=detail)
    return Measured(name, shown, level, cut_short, gave_up)


def _plan(site: Site, step: Measure, name: str, seed: int, *, concurrency: int | None = None) -> LoadPlan:
    campaign = site.campaign
    if step.rate is None and concurrency is None:
        warmup, drain = 0.0, 0.0
    else:
        warmup = max(LEAST_WARMUP_SECONDS, min(10.0, 0.1 * step.duration_seconds))
        drain = drain_seconds(campaign)
    return LoadPlan(
        target=site.server.target,
        workload=campaign.workload,
        arrivals=campaign.arrivals,
        rate_per_second=step.rate,
        concurrency=concurrency if step.rate is None else None,
        warmup_seconds=warmup,
        window_seconds=step.duration_seconds,
        drain_seconds=drain,
        seed=seed,
        cell=site.cell.key,
        level=name,
        facts=site.facts,
        quiet=True,
    )


def drain_seconds(campaign: Campaign) -> float:
    """How long after the last due time answers may come: twice what a good one may take, since later ones are bad whatever they bring."""
    longest = campaign.workload.max_output_tokens or campaign.workload.output_tokens or 256
    limits = [(p.ttft_seconds, p.tpot_seconds) for p in campaign.all_promises]
    waits = [300.0 if ttft is None or tpot is None else 2 * (ttft + tpot * longest) for ttft, tpot in limits]
    return max(10.0, min(300.0, max(waits)))


def _patience(campaign: Campaign) -> float | None:
    """After how many seconds without a first token a request has broken every promise; None where one has no such limit."""
    limits = [promise.ttft_seconds for promise in campaign.all_promises]
    return None if None in limits else max(limit for limit in limits if limit is not None)


def send_wave(site: Site, wave: Wave, number: int, seed: int) -> list[RequestRecord]:
    """Streams of one shape sent at one moment by this process, for calibration; returns their records once all have ended.

    They are on record under a level that is never finished, so no number but the prediction's is made of them.
    """
    import gevent

    name = f"{site.cell.key}#calibration"
    campaign = msgspec.structs.replace(site.campaign, workload=Workload(prompt_tokens=wave.prompt_tokens, output_tokens=wave.output_tokens))
    shaped = replace(site, campaign=campaign)
    plan = _plan(shaped, Measure(None, 60.0, "lone"), name, seed)
    prompts = Prompts(plan, site.facts, site.pool, Share(0, 1))
    requests = [prompts.fresh() for _ in range(wave.streams)]
    timeout = min(plan.target.timeout_seconds, 60.0)
    origin = clock()

    def send(position: int, wire: bytes) -> RequestRecord:
        ask = Ask(
            cell=plan.cell, level=name, index=1000 * number + position, due_seconds=0.0, asked_prompt_tokens=wave.prompt_tokens,
            asked_output_tokens=wave.output_tokens, worker=0,
        )  # fmt: skip
        return stream(site.pool, wire, ask, origin=origin, timeout_seconds=timeout)

    tasks = [gevent.spawn(send, position, request.wire) for position, request in enumerate(requests)]
    gevent.joinall(tasks, raise_error=True)
    records = [task.value for task in tasks]
    for record in records:
        site.run.request(record)
    site.check()
    return records


def _started(site: Site, plan: LoadPlan, purpose: str, attempt: int, unix_seconds: float) -> LevelStarted:
    return LevelStarted(
        purpose=purpose,
        rate_per_second=plan.rate_per_second,
        concurrency=1 if purpose == "lone" else plan.concurrency,
        arrivals=msgspec.to_builtins(plan.arrivals) if plan.is_open else {"kind": "closed"},
        warmup_seconds=plan.warmup_seconds,
        window_seconds=plan.window_seconds,
        seed=plan.seed,
        attempt=attempt,
        started_unix_seconds=unix_seconds,
        target=site.campaign.promise.target,
    )


def quick_seconds(site: Site) -> float | None:
    """How long a tiny request takes now; None when it failed."""
    wire = post_bytes(site.pool, path_of(site.server.target), body_of(site.server.target, site.facts, "Say yes.", 2))
    timeout = site.server.target.timeout_seconds
    record = stream(site.pool, wire, Ask(cell="", level="", index=0, due_seconds=0.0), origin=clock(), timeout_seconds=timeout)
    return record.ended_seconds if record.error is None else None


def settle(site: Site, alone_seconds: float | None) -> None:
    """Waits until the server has left behind what the last level gave up: not every server stops when its client has gone.

    Idle is when a tiny request takes about as long as it did alone. Raises LevelInterrupted when that does not come.
    """
    until = time.monotonic() + SETTLE_SECONDS
    while (now := quick_seconds(site)) is None or (alone_seconds is not None and now > 2 * alone_seconds + 0.05):
        if (trouble := site.server.trouble()) is not None:
            raise LevelInterrupted(trouble)
        if time.monotonic() > until:
            raise LevelInterrupted(f"the server was still busy {SETTLE_SECONDS:.0f} s after the level")
        site.progress.tick(f"{site.cell.key}: waiting until the server is idle")
        time.sleep(0.1)


class Tail:
    """The records of one level, as they are appended to a file that other processes write."""

    def __init__(self, path: Path, level: str) -> None:
        self.records: list[RequestRecord] = []
        self._level = level
        self._path = path
        self._position = path.stat().st_size
        self._decoder = msgspec.json.Decoder(RequestRecord)

    def read(self) -> list[RequestRecord]:
        """All of them so far."""
        with open(self._path, "rb") as file:
            file.seek(self._position)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._position += len(whole)
        for line in whole.splitlines():
            record = self._decoder.decode(line)
            if record.level == self._level:
                self.records.append(record)
        return self.records

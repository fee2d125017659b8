"""Measures one level of load and records it.

    measured = loaded_level(site, Measure(2.0, 30.0, "bracket"), name="cell#2.1", seed=7, attempt=1)
    measured.summary.verdict, measured.level

A rate or a concurrency is sent by a Locust child, single-stream requests by this process. A level
is whole or it does not count: LevelInterrupted is raised when the engine was restarted within it,
or when the load generator ended early or lost requests. A level that is decided before its time
is over (level_tally.py) is cut short, and its window with it. The load goes on after the window,
uncounted, until the last counted request has its answer or is past its limits.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field, replace
from typing import Any

import gevent
import msgspec

from loadtests.campaign.campaign_file import Campaign
from loadtests.campaign.level_tally import Cut, LevelTally
from loadtests.campaign.site import START_SECONDS, Guard, Site
from loadtests.capacity.levels import Ending, Level, holds_disturbed, judge
from loadtests.capacity.search import Measure
from loadtests.errors import BurstDisturbed, LevelInterrupted
from loadtests.generator.channel import LoadGenerator
from loadtests.generator.connection import clock
from loadtests.generator.load_plan import LoadPlan
from loadtests.generator.messages import Ended, Late, Recorded, Started, Stop, WorkerClock
from loadtests.generator.request_factory import Request, RequestFactory, Share
from loadtests.generator.sse_request import stream
from loadtests.generator.workers.facts import on_masters_clock, workers_of
from loadtests.metrics.disturbance import in_words
from loadtests.metrics.level_summary import Summary
from loadtests.records.events import LevelFinished, LevelPurpose, LevelStarted
from loadtests.records.old_run_folder import LevelRecords
from loadtests.records.schema import Disturbance, RequestRecord, WorkerFacts
from loadtests.simulation.calibration import Burst
from loadtests.workload.requests import Ask, Workload
from models import formatting

MOST_SINGLE_STREAM_SECONDS = 60.0
DEATH_SECONDS = 1.0


@dataclass
class Measured:
    """A level as it came out."""

    name: str
    summary: Summary
    level: Level
    cut_short: str | None = None
    gave_up: int = 0  # requests that the client ended: the server may still be at work on them
    disturbance: Disturbance | None = None
    workers: list[WorkerFacts] = field(default_factory=list)

    @property
    def in_words(self) -> str:
        """For people."""
        summary, rate = self.summary, self.level.rate
        load = "single-stream requests" if rate is None else formatting.requests(rate, 3)
        typical = summary.latencies.ttft.median_or_mean
        ttft = f", TTFT {formatting.seconds(typical)}" if typical is not None else ""
        each = summary.latencies.tpot.median_or_mean
        tpot = f", TPOT {formatting.seconds(each, 3)}" if each is not None else ""
        warnings = ", ".join(warning.code for warning in summary.warnings if warning.is_serious)
        word = f"not valid: {warnings}" if warnings else summary.verdict
        short = ", cut short" if self.cut_short else ""
        counts = f"{summary.counts.good} of {summary.counts.due} good"
        return f"{load}: {counts}{ttft}{tpot} -> {word}{short}"


@dataclass(frozen=True)
class _Records:
    """What was recorded of a level, and the window that it covers."""

    records: list[RequestRecord]
    window_seconds: float
    cut_short: str | None
    gave_up: int = 0
    workers: list[WorkerFacts] = field(default_factory=list)


def single_stream_level(site: Site, step: Measure, name: str, seed: int, attempt: int) -> Measured:
    """One request at a time on an idle server, from this process."""
    site.run.check_room()
    began = time.monotonic()
    plan = _plan(site, step, name, seed)
    factory = RequestFactory(plan, site.facts, site.pool, Share(0, 1))
    mark = site.server.mark()
    started = _started(site, plan, LevelPurpose.SINGLE_STREAM, attempt, time.time())
    _begin(site, started)
    try:
        found = _ask_one_by_one(site, step, plan, factory)
    finally:
        site.sampler.level = None
    _check_server(site, mark, found)
    return _finish(site, started, found, time.monotonic() - began)


def _ask_one_by_one(site: Site, step: Measure, plan: LoadPlan, factory: RequestFactory) -> _Records:
    origin = clock()
    wanted = step.requests or 1
    timeout = max(MOST_SINGLE_STREAM_SECONDS, 2 * step.duration_seconds)
    # With several SLOs no request is spared: each wants its own verdict.
    planned = range(wanted) if len(site.campaign.all_slos) == 1 else None
    tally = LevelTally([site.campaign.slo], planned, least_bad=1)
    records: list[RequestRecord] = []
    cut_short: str | None = None
    while len(records) < wanted and clock() - origin < step.duration_seconds and cut_short is None:
        request = msgspec.structs.replace(factory.fresh(), index=len(records))
        record = stream(
            site.pool,
            request.wire,
            request.ask(plan, clock() - origin),
            origin=origin,
            timeout_seconds=min(plan.target.timeout_seconds, timeout),
        )
        site.run.request(record)
        records.append(record)
        tally.add(record)
        site.check()
        lasted = clock() - origin
        left = min(step.duration_seconds - lasted, lasted / len(records) * (wanted - len(records)))
        cut_short = tally.verdict() or site.lost(left, tally.may_hold)
        site.progress.tick(
            f"{plan.cell}: single-stream requests, {len(records)} of {wanted}",
            fraction=len(records) / wanted,
        )
    return _Records(records, clock() - origin, cut_short)


def loaded_level(
    site: Site,
    step: Measure,
    name: str,
    seed: int,
    attempt: int,
    *,
    concurrency: int | None = None,
    purpose: LevelPurpose = LevelPurpose.SEARCH,
) -> Measured:
    """A rate, or `concurrency` users in a closed loop, from Locust on the client's cores."""
    site.run.check_room()
    began = time.monotonic()
    plan = _plan(site, step, name, seed, concurrency=concurrency)
    mark = site.server.mark()
    site.progress.tick(f"{name}: starting the load generator")
    with site.load_generator(concurrency or 1) as generator:
        generator.tell(plan)
        started = _started(site, plan, purpose, attempt, _start_of(generator))
        site.sampler.client = generator.child.pid
        _begin(site, started)
        try:
            found = _watch(site, plan, started.started_unix_seconds, generator)
        finally:
            site.sampler.level = None
            site.sampler.client = os.getpid()
    _check_server(site, mark, found)
    return _finish(site, started, found, time.monotonic() - began)


def _start_of(generator: LoadGenerator) -> float:
    """Wait for the level to start; its t0 in Unix seconds."""
    until = time.monotonic() + START_SECONDS
    for message in generator.told():
        if isinstance(message, Started):
            return message.unix_seconds
        if time.monotonic() > until:
            break
    raise LevelInterrupted(f"the load generator did not start within {START_SECONDS:.0f} s")


def _watch(site: Site, plan: LoadPlan, t0: float, generator: LoadGenerator) -> _Records:
    """Record what the load generator tells until its level has ended; stop it once decided.

    `t0` in Unix seconds. A step of the wall clock ends no level.
    """
    t0 += time.monotonic() - time.time()
    tally = LevelTally.of(plan, (site.campaign.slo, *site.campaign.all_slos))
    cut = Cut(tally, plan.drain_seconds / 2)
    guard = Guard(site, plan, t0)
    records: list[RequestRecord] = []
    clocks: dict[int, WorkerClock] = {}
    for message in generator.told():
        match message:
            case WorkerClock():
                clocks[message.worker] = message
            case Recorded(record):
                record = on_masters_clock(record, clocks)
                site.run.request(record)
                records.append(record)
                tally.add(record)
            case Late(indices):
                tally.late(indices)
            case Ended():
                found = _whole(plan, records, message, cut)
                return replace(found, workers=workers_of(message, records, clocks))
            case None:
                guard.check(tally)
        now = time.monotonic() - t0
        if cut.may_stop(now) or cut.stop(guard.lost(tally), now):
            generator.tell(Stop())
    raise AssertionError("told() ends by an exception")


def _whole(plan: LoadPlan, records: list[RequestRecord], ended: Ended, cut: Cut) -> _Records:
    """The level's records. Raises LevelInterrupted where requests are missing."""
    indices = {record.index for record in records}
    if not len(records) == ended.recorded == ended.due == len(indices):
        raise LevelInterrupted(
            f"the load generator lost requests: {ended.due} were due, {ended.recorded} ended, "
            f"{len(records)} are on record"
        )
    end = plan.duration_seconds
    cut_short: str | None = None
    if ended.stopped_seconds is not None and cut.end_seconds is not None:
        cut_short = cut.reason
        end = min(end, cut.end_seconds)
    return _Records(records, max(0.0, end - plan.warmup_seconds), cut_short, ended.gave_up)


def _check_server(site: Site, mark: tuple[Any, ...], found: _Records) -> None:
    """Raise LevelInterrupted where the server was lost or restarted within the level.

    A process that dies closes its connections before it has ended.
    """
    is_cut = any(record.error in ("connection", "cut_off") for record in found.records)
    until = clock() + (DEATH_SECONDS if is_cut else 0.0)
    while True:
        site.check()
        if site.server.mark() != mark:
            raise LevelInterrupted("the engine was restarted")
        if clock() >= until:
            return
        time.sleep(0.05)


def _begin(site: Site, started: LevelStarted) -> None:
    site.begin(started.level)
    site.run.event(started)


def _finish(site: Site, started: LevelStarted, found: _Records, spent_seconds: float) -> Measured:
    """The level's event, by the campaign's first SLO, and its numbers by the SLO searched for."""
    samples = list(site.samples)
    seconds = found.window_seconds
    taken = site.disturbance()
    ending = Ending(
        window_seconds=seconds,
        cut_short=found.cut_short,
        disturbance=taken,
        workers=found.workers,
    )
    shown, level = judge(found.records, samples, started, site.campaign.slo, ending)
    summary = shown
    first = site.campaign.all_slos[0]
    if first != site.campaign.slo:
        summary, _ = judge(found.records, samples, started, first, ending)
    finished = LevelFinished(
        cell=site.cell.key,
        level=started.level,
        due=len(found.records),
        good=summary.counts.good,
        failed=sum(summary.counts.failed.values()),
        window_due=summary.counts.due,
        window_seconds=round(seconds, 6),
        cut_short=found.cut_short,
        gave_up=found.gave_up,
        spent_seconds=round(spent_seconds, 3),
        verdict=summary.verdict,
        is_valid=summary.is_valid,
        warnings=[warning.code for warning in summary.warnings],
        arrivals=None if summary.arrivals is None else msgspec.to_builtins(summary.arrivals),
        disturbance=taken,
        engine_time=site.engine_time_of_level(),
        workers=found.workers,
        held=holds_disturbed(found.records, samples, started, site.campaign.all_slos, ending),
    )
    site.run.finish(LevelRecords(started, finished, list(found.records), samples))
    return Measured(
        *(started.level, shown, level, found.cut_short, found.gave_up, taken, found.workers)
    )


def _plan(
    site: Site, step: Measure, name: str, seed: int, *, concurrency: int | None = None
) -> LoadPlan:
    """Of `step`: a rate, `concurrency` users, or else single-stream requests."""
    campaign = site.campaign
    is_single_stream = step.rate is None and concurrency is None
    drain = 0.0 if is_single_stream else drain_seconds(campaign)
    return LoadPlan(
        target=site.server.target,
        workload=campaign.workload,
        arrivals=campaign.arrivals,
        rate_per_second=step.rate,
        concurrency=(concurrency or 1) if step.rate is None else None,
        warmup_seconds=step.warmup_seconds,
        window_seconds=step.duration_seconds,
        drain_seconds=drain,
        follow_seconds=drain / 2,
        seed=seed,
        cell=site.cell.key,
        level=name,
        facts=site.facts,
        late_seconds=_longest_ttft_seconds(campaign),
        quiet=True,
    )


def drain_seconds(campaign: Campaign) -> float:
    """How long after the last due time answers may come: twice what a good one may take."""
    longest = campaign.workload.max_output_tokens or campaign.workload.output_tokens or 256
    waits = [
        300.0
        if slo.ttft_seconds is None or slo.tpot_seconds is None
        else 2 * (slo.ttft_seconds + slo.tpot_seconds * longest)
        for slo in campaign.all_slos
    ]
    return max(10.0, min(300.0, max(waits)))


def _longest_ttft_seconds(campaign: Campaign) -> float | None:
    """The TTFT after which a request is bad by every SLO; None where one has no such limit."""
    limits = [slo.ttft_seconds for slo in campaign.all_slos]
    return None if None in limits else max(limit for limit in limits if limit is not None)


def send_burst(site: Site, burst: Burst, number: int, seed: int) -> list[RequestRecord]:
    """Send the streams of a burst at one moment; their records once all have ended.

    They are on record under a level that never finishes, so only the prediction uses them.
    Raises BurstDisturbed.
    """
    workload = Workload(prompt_tokens=burst.prompt_tokens, output_tokens=max(burst.output_tokens))
    shaped = replace(site, campaign=msgspec.structs.replace(site.campaign, workload=workload))
    plan = _plan(shaped, Measure(None, 60.0, "single_stream"), f"{site.cell.key}#calibration", seed)
    factory = RequestFactory(plan, site.facts, site.pool, Share(0, 1))
    requests = [
        factory.of(Ask(1000 * number + position, burst.prompt_tokens, tokens))
        for position, tokens in enumerate(burst.output_tokens)
    ]
    timeout = min(plan.target.timeout_seconds, 60.0)
    origin = clock()

    def send(request: Request) -> RequestRecord:
        ask = request.ask(plan, 0.0)
        return stream(site.pool, request.wire, ask, origin=origin, timeout_seconds=timeout)

    site.probe = None  # the one on record was before another level
    site.sampler.level = plan.level
    try:
        tasks = [gevent.spawn(send, request) for request in requests]
        gevent.joinall(tasks, raise_error=True)
    finally:
        site.sampler.level = None
    records: list[RequestRecord] = [task.value for task in tasks]
    for record in records:
        site.run.request(record)
    site.check()
    found = site.disturbance()
    if found is not None and found.is_disturbed and not found.counts:
        raise BurstDisturbed(in_words(found))
    return records


def _started(
    site: Site, plan: LoadPlan, purpose: LevelPurpose, attempt: int, unix_seconds: float
) -> LevelStarted:
    return LevelStarted(
        cell=plan.cell,
        level=plan.level,
        purpose=purpose,
        rate_per_second=plan.rate_per_second,
        concurrency=plan.concurrency,
        arrivals=msgspec.to_builtins(plan.arrivals) if plan.is_open else {"kind": "closed"},
        warmup_seconds=plan.warmup_seconds,
        window_seconds=plan.window_seconds,
        seed=plan.seed,
        attempt=attempt,
        start=site.start,
        started_unix_seconds=unix_seconds,
        target=site.campaign.slo.target,
        probe_seconds=site.probe.seconds if site.probe is not None else None,
    )

"""A simulated server and clock for the runner: a campaign with all its logic in milliseconds, and
kills at any append.

    world = Simulated(slots=4)
    folder = world.run(plan, tmp_path)

Requests come as the level's arrival process and wait for one of `slots`; each is served in
`service_seconds`. What a level would take is added to the clock.
"""

from __future__ import annotations

import contextlib
import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path

import msgspec
import pytest

from loadtests.campaign.bench import Level
from loadtests.campaign.campaign_file import Plan
from loadtests.campaign.level import Measured
from loadtests.campaign.progress import Progress
from loadtests.campaign.run_state import CellState
from loadtests.campaign.runner import World, resume, run
from loadtests.capacity.levels import Ending, holds_disturbed, judge
from loadtests.errors import BurstDisturbed, LevelInterrupted
from loadtests.metrics.disturbance import disturbance_of, in_words
from loadtests.records.events import CellReady, Event, LevelFinished, LevelPurpose, LevelStarted
from loadtests.records.old_run_folder import LevelRecords, RunFolder
from loadtests.records.schema import CoresSample, Probe, RequestRecord, Stranger
from loadtests.simulation.batching import Policy
from loadtests.simulation.calibration import Burst
from loadtests.workload.arrivals import due_times
from serving.hardware.facts import HardwareFacts, hardware_facts

FACTS = hardware_facts()
TOKENS = 8
FIRST_SECONDS = 0.05


class Killed(BaseException):
    """The runner's process is gone: it writes nothing any more."""


@dataclass
class Simulated:
    """The server of every cell. What befalls it is asked before each level: `fate` may raise."""

    slots: int = 2
    service_seconds: float = 0.1
    policy: Policy | None = None
    facts: HardwareFacts = FACTS
    fate: Callable[[CellState, Level], None] = lambda state, level: None
    opening: Callable[[CellState], None] = lambda state: None  # may raise, as a server does
    recovering: Callable[[CellState], None] = lambda state: None
    # From when to when a process has `hog_share` of the engine's core, and how long a probe takes.
    hog: tuple[float, float] = (0.0, 0.0)
    hog_share: float = 0.5
    probing: Callable[[float], Probe | None] = lambda now: None
    now: float = 0.0
    opened: list[str] = field(default_factory=list)  # keys of cells
    settled: int = 0
    rested: float = 0.0
    bursts: int = 0
    said: StringIO = field(default_factory=StringIO)

    @property
    def world(self) -> World:
        return World(lambda: self.facts, self.open, lambda: self.now)

    def run(self, plan: Plan, out: Path) -> Path:
        progress = Progress(self.said)
        return run(plan, out, progress, command=["test"], beside_others=True, world=self.world)

    def resume(self, folder: Path) -> Path:
        return resume(folder, Progress(self.said), beside_others=True, world=self.world)

    @contextlib.contextmanager
    def open(self, state: CellState) -> Iterator[Bench]:
        self.opened.append(state.key)
        self.opening(state)
        self.now += 5.0
        state.run.event(CellReady(cell=state.key, url="simulated"))
        yield Bench(self, state)

    def cores(self, start: float, end: float) -> CoresSample:
        """The engine's core from `start` to `end`."""
        lost = self.hog_share * max(0.0, min(end, self.hog[1]) - max(start, self.hog[0]))
        return CoresSample(
            seconds=end - start,
            busy_seconds=end - start - lost,
            work_seconds=end - start - lost,
            stalled_seconds=lost,
            ours_seconds=0.0,
            strangers_seconds=lost,
            strangers=[Stranger("hog", 7, lost)] if lost else [],
        )

    def serve(self, dues: list[float], name: str, cell: str) -> list[RequestRecord]:
        """First come, first served."""
        free = [0.0] * self.slots
        records = []
        for index, due in enumerate(dues):
            begin = max(due, heapq.heappop(free))
            end = begin + self.service_seconds
            heapq.heappush(free, end)
            first = begin + FIRST_SECONDS
            gap = (end - first) / (TOKENS - 1)
            moments = [first + gap * token for token in range(TOKENS)]
            records.append(
                RequestRecord(
                    cell=cell,
                    level=name,
                    index=index,
                    due_seconds=due,
                    sent_seconds=due,
                    first_content_seconds=moments[0],
                    last_content_seconds=moments[-1],
                    ended_seconds=moments[-1],
                    content_seconds=moments,
                    first_chunk_tokens=1,
                    prompt_tokens=16,
                    output_tokens=TOKENS,
                    status=200,
                    finish_reason="length",
                    worker=0,
                )
            )
        return records


@dataclass
class Bench:
    server: Simulated
    state: CellState

    @property
    def policy(self) -> Policy | None:
        return self.server.policy

    def measure(self, level: Level) -> Measured:
        server, run, step = self.server, self.state.run, level.step
        is_alone = step.rate is None
        warmup = 0.0 if is_alone else 1.0
        started = LevelStarted(
            cell=self.state.key,
            level=level.name,
            purpose=LevelPurpose.SINGLE_STREAM if is_alone else LevelPurpose.SEARCH,
            start=self.state.starts,
            rate_per_second=step.rate,
            concurrency=1 if is_alone else None,
            arrivals={"kind": "closed"} if is_alone else {"kind": "poisson"},
            warmup_seconds=warmup,
            window_seconds=step.duration_seconds,
            seed=level.seed,
            attempt=level.attempt,
            started_unix_seconds=1e9 + server.now,
        )
        run.event(started)
        seconds = warmup + step.duration_seconds
        if step.rate is None:
            dues = [index * server.service_seconds for index in range(step.requests or 1)]
            seconds = len(dues) * server.service_seconds
        else:
            dues = due_times(level.campaign.arrivals, step.rate, seconds, level.seed).tolist()
        records = server.serve(dues, level.name, self.state.key)
        for record in records[: len(records) // 2]:
            run.request(record)
        server.now += seconds
        server.fate(self.state, level)  # half of the requests are on record
        for record in records[len(records) // 2 :]:
            run.request(record)
        window = seconds if is_alone else step.duration_seconds
        part = server.cores(server.now - seconds, server.now)
        counts = level.campaign.disturbance == "ignore"
        found = disturbance_of([part], "engine", counts=counts, counts_slight=not level.is_patient)
        ending = Ending(window_seconds=window, disturbance=found)
        shown, seen = judge(records, [], started, level.campaign.slo, ending)
        summary, _ = judge(records, [], started, level.campaign.all_slos[0], ending)
        finished = LevelFinished(
            cell=self.state.key,
            level=level.name,
            due=len(records),
            good=summary.counts.good,
            failed=0,
            window_due=summary.counts.due,
            window_seconds=window,
            spent_seconds=round(seconds, 3),
            verdict=summary.verdict,
            is_valid=summary.is_valid,
            warnings=[warning.code for warning in summary.warnings],
            disturbance=found,
            held=holds_disturbed(records, [], started, level.campaign.all_slos, ending),
        )
        run.finish(LevelRecords(started, finished, records, []))
        late = sum((record.ended_seconds or 0.0) > seconds for record in records)
        return Measured(level.name, shown, seen, gave_up=late, disturbance=found)

    def burst(self, burst: Burst, number: int, seed: int) -> list[RequestRecord]:
        self.server.bursts += 1
        name = f"{self.state.key}#calibration"
        records = self.server.serve([0.0] * burst.streams, name, self.state.key)
        moved = [
            msgspec.structs.replace(record, index=1000 * number + record.index)
            for record in records
        ]
        for record in moved:
            self.state.run.request(record)
        began = self.server.now
        self.server.now += max(record.ended_seconds or 0.0 for record in moved)
        found = disturbance_of([self.server.cores(began, self.server.now)], "engine")
        if found is not None and found.is_disturbed:
            raise BurstDisturbed(in_words(found))
        return moved

    def look(self) -> CoresSample | None:
        return self.server.cores(self.server.now - 1.0, self.server.now)

    def probe(self) -> Probe | None:
        return self.server.probing(self.server.now)

    def rest(self, seconds: float) -> None:
        self.server.now += seconds
        self.server.rested += seconds

    def settle(self) -> None:
        self.server.settled += 1

    def recover(self) -> None:
        self.server.recovering(self.state)


def fails_once(name: str, error: Callable[[], Exception]) -> Callable[[CellState, Level], None]:
    """A fate: the first attempt at the level that ends in `name` fails."""

    def fate(state: CellState, level: Level) -> None:
        if level.name.endswith(name):
            raise error()

    return fate


def interrupted() -> LevelInterrupted:
    return LevelInterrupted("the engine was restarted")


@contextlib.contextmanager
def killed_after(monkeypatch: pytest.MonkeyPatch, appends: int) -> Iterator[None]:
    """Kills the runner after so many appended events; whatever it would write then is lost."""
    left = appends
    write = RunFolder.event

    def event(self: RunFolder, one: Event) -> Event:
        nonlocal left
        if left <= 0:
            raise Killed
        left -= 1
        return write(self, one)

    with monkeypatch.context() as patched, contextlib.suppress(Killed):
        patched.setattr(RunFolder, "event", event)
        yield

"""A simulated server and clock for the runner: a campaign with all its logic in milliseconds, and
kills at any append.

    world = Simulated()
    folder = world.run(plan, tmp_path)

The server batches continuously by known step times (known_server.py). What a level would take is
added to the clock.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path
from typing import Protocol

import msgspec
import numpy as np
import pytest

from crossover.loadtests.campaign.campaign_file import Plan, parse_campaign
from crossover.loadtests.campaign.campaign_runner import Dependencies, resume, run
from crossover.loadtests.campaign.cell_selection import are_slots_open
from crossover.loadtests.campaign.cells_on_machine import on_this_machine
from crossover.loadtests.campaign.level_runner import ServerBench, judge_level
from crossover.loadtests.campaign.progress import Progress
from crossover.loadtests.campaign.resume_state import CellState
from crossover.loadtests.errors import LevelInterrupted
from crossover.loadtests.levels.disturbance import disturbance_of
from crossover.loadtests.levels.level_columns import Level, LevelRows
from crossover.loadtests.records.journal_events import CellReady, Event, LevelFinished, LevelStarted
from crossover.loadtests.records.level_plan import LevelPlan
from crossover.loadtests.records.request_record import RequestRecord
from crossover.loadtests.records.resource_sample import CoresSample, OtherProcess
from crossover.loadtests.records.run_folder import RunFolder
from crossover.models.shape.model_spec import ModelSpec
from crossover.serving.capacity.scheduler_settings import SchedulerSettings
from crossover.serving.errors import Cause
from crossover.serving.hardware.machine_facts import HardwareFacts, hardware_facts
from crossover.serving.workload.arrivals import due_times
from crossover.serving.workload.conversations import draw_sessions, mean_turns_of
from crossover.serving.workload.request_lengths import draw
from tests.loadtests.capacity.known_server import KnownServer
from tests.tools.made_up_machines import MadeUp

# On a CPU that multiplies bf16 torch would be measured, for real, where the best engine is chosen.
FACTS = msgspec.structs.replace(hardware_facts(), isa=("avx2",))
OVERHEAD_SECONDS = 0.5  # of each level

CAMPAIGN = """
name = "simulated"
models = {models}
backends = ["fake"]
budget_seconds = {budget}
{slots}
workload = {{ preset = "chat", max_prompt_tokens = {tokens[0]}, max_output_tokens = {tokens[1]} }}
{more}
[slo]
ttft_seconds = {ttft}
tpot_seconds = 0.2
target = 0.9
[search]
starts = {starts}
{search}
"""


def campaign(
    budget: float = 600,
    *,
    models: str = '["135m"]',
    starts: int = 1,
    ttft: float = 1.0,
    search: str = "",
    more: str = "",
    most_tokens: tuple[int, int] = (128, 32),
    slots: int | None = 8,
) -> Plan:
    """A small campaign of the simulated server. `slots` None: they are chosen."""
    given = {"budget": budget, "models": models, "starts": starts, "ttft": ttft}
    given["slots"] = "" if slots is None else f"server.slots = {slots}"
    given["tokens"] = most_tokens
    return parse_campaign(CAMPAIGN.format(**given, search=search, more=more))


def on_machine(
    plan: Plan | str,
    facts: HardwareFacts = FACTS,
    trouble: dict[str, tuple[Cause, str]] | None = None,
    output: StringIO | None = None,
) -> Plan:
    """The plan of a campaign, or of its text, with its cells on a made-up machine."""
    plan = parse_campaign(plan) if isinstance(plan, str) else plan
    progress = Progress(output or StringIO())
    return on_this_machine(plan, MadeUp(facts, trouble), facts, progress)


def with_experts(plan: Plan, spec: ModelSpec) -> Plan:
    """The plan of one cell, of a mixture of experts in place of its model."""
    plan = on_machine(plan)
    (cell,) = plan.cells
    identity = msgspec.structs.replace(cell.model_identity, name=spec.name, kind="gguf", spec=spec)
    cell = msgspec.structs.replace(cell, model=spec.name, identity=identity)
    return Plan(plan.campaign, [cell], plan.text)


class Serves(Protocol):
    """A server: lengths and due times in, records out."""

    def records(
        self,
        due: Sequence[float],
        prompt_tokens: Sequence[int],
        output_tokens: Sequence[int],
        cached_tokens: Sequence[int] | None = None,
        cell: str = "c",
        level: str = "l",
    ) -> list[RequestRecord]: ...


class Killed(BaseException):
    """The runner's process is gone: it writes nothing any more."""


def rate_units_in(text: str) -> set[str]:
    """Return the units of all rates in a text, such as `/s` of `1.8 requests/s`."""
    return set(re.findall(r"\d(?: requests| conversations)?(/s| a minute| an hour)\b", text))


@dataclass
class Simulated:
    """The server of every cell. What befalls it is asked in each level: `fate` may raise."""

    base: float = 0.02  # seconds of a step, and more for a row and a prompt token
    row: float = 0.005
    prompt: float = 0.001
    slots: int = 8
    chunk: int = 1  # tokens of a chunk
    speed: Callable[[float], float] = lambda now: 1.0  # by which steps are quicker at a moment
    noise: float = 0.02
    policy: SchedulerSettings | None = SchedulerSettings(
        slots=8, step_tokens=2048, step_seconds_target=None
    )
    default_slots: int = 16  # of a server that is started without a number
    reported_slots: int | None = None  # by a server that says its slots and nothing else
    facts: HardwareFacts = FACTS
    trouble: dict[str, tuple[Cause, str]] = field(default_factory=dict)  # of backends with its GPU
    fate: Callable[[CellState, str], None] = lambda state, level: None
    opening: Callable[[CellState], None] = lambda state: None  # may raise, as a server does
    # From when to when a process has `hog_share` of the engine's core.
    hog: tuple[float, float] = (0.0, 0.0)
    hog_share: float = 0.5
    # What serves, by seed, moment and number of the start, in place of the server by step times.
    serving: Callable[[int, float, int], Serves] | None = None
    taken: Callable[[float, float], float] | None = None  # seconds between two moments, as hog
    now: float = 0.0
    opened: list[str] = field(default_factory=list)  # keys of cells
    output: StringIO = field(default_factory=StringIO)

    @property
    def world(self) -> Dependencies:
        return Dependencies(MadeUp(self.facts, self.trouble), self.open, lambda: self.now)

    def run(self, plan: Plan, out: Path) -> Path:
        progress = Progress(self.output)
        return run(plan, out, progress, command=["test"], dependencies=self.world)

    def resume(self, folder: Path, *, confirm: bool = False, trust: bool = False) -> Path:
        progress = Progress(self.output)
        return resume(folder, progress, confirm=confirm, trust=trust, dependencies=self.world)

    @contextlib.contextmanager
    def open(self, state: CellState) -> Iterator[Bench]:
        self.opened.append(state.key)
        self.opening(state)
        self.now += 5.0
        state.record(CellReady(cell=state.key, url="simulated", load_seconds=5.0))
        yield Bench(self, state)

    def chosen_slots(self, state: CellState) -> int | None:
        """The slots of a cell's server; None: the campaign does not choose."""
        if not are_slots_open(state.cell, state.campaign):
            return None
        return state.cell.slots or self.default_slots

    def server(self, seed: int, start: int = 1, slots: int | None = None) -> Serves:
        if self.serving is not None:
            return self.serving(seed, self.now, start)
        rng = np.random.default_rng(seed)

        def steps(rows: int, tokens: int, context: int, passes: int) -> float:
            plain = self.base + self.row * rows + self.prompt * tokens
            at = self.now + server.now
            speed = self.speed(at) * (1 - self.hog_share * (self.hog[0] <= at < self.hog[1]))
            return plain * float(np.exp(self.noise * rng.normal())) / speed

        server = KnownServer(steps, slots=slots or self.slots, chunk=self.chunk)
        return server

    def cores(self, start: float, end: float) -> CoresSample:
        """The engine's core from `start` to `end`."""
        lost = self.hog_share * max(0.0, min(end, self.hog[1]) - max(start, self.hog[0]))
        if self.taken is not None:
            lost = self.taken(start, end)
        return CoresSample(
            seconds=end - start,
            busy_seconds=end - start - lost,
            work_seconds=end - start - lost,
            stalled_seconds=lost,
            ours_seconds=0.0,
            other_processes_seconds=lost,
            other_processes=[OtherProcess("hog", 7, lost)] if lost else [],
        )


class Bench(ServerBench):
    def __init__(self, world: Simulated, state: CellState) -> None:
        super().__init__(state, Progress(world.output))
        self.world, self.policy, self.slots = world, world.policy, world.reported_slots
        slots = world.chosen_slots(state)
        if self.policy is not None and slots is not None:
            self.policy = msgspec.structs.replace(self.policy, slots=slots)

    def measure(self, name: str, plan: LevelPlan, *, counts_disturbed: bool = False) -> Level:
        world, state = self.world, self.state
        started = LevelStarted(
            cell=state.key,
            level=name,
            plan=plan,
            start=state.starts,
            started_unix_seconds=1e9 + world.now,
        )
        state.record(started)
        records = self._records(name, plan)
        last = max([0.0, *(one.ended_seconds or 0.0 for one in records)])
        seconds, window = plan.duration_seconds, plan.window_seconds
        if plan.rate is None:
            seconds = window = max(last, 1e-3)
        for record in records[: len(records) // 2]:
            state.run.append_request(record)
        began, world.now = world.now, world.now + max(seconds, last) + OVERHEAD_SECONDS
        world.fate(state, name)  # half of the requests are on record
        rows = LevelRows()
        for index, record in enumerate(records):
            rows.add(record)
            if index >= len(records) // 2:
                state.run.append_request(record)
        is_ignored = state.campaign.disturbance == "ignore"
        finished = LevelFinished(
            cell=state.key,
            level=name,
            due=len(records),
            window_seconds=window,
            spent_seconds=round(world.now - began, 3),
            disturbance=disturbance_of([world.cores(began, world.now)], counts=is_ignored),
        )
        level = rows.level(started, finished)
        level = judge_level(level, state.campaign.slo, [], counts_disturbed)
        state.finish_level(level)
        return level

    def _records(self, name: str, plan: LevelPlan) -> list[RequestRecord]:
        state = self.state
        server = self.world.server(plan.seed, state.starts, self.world.chosen_slots(state))
        workload = state.campaign.workload
        named = (state.key, name)
        if plan.is_unloaded_check:
            return self._one_by_one(server, name, plan)
        if plan.burst is not None:
            burst = plan.burst
            due = [0.0] * burst.streams
            return server.records(due, burst.prompt_tokens, burst.output_tokens, None, *named)
        if workload.has_sessions:
            return self._conversations(server, name, plan)
        if plan.rate is None:
            return self._one_by_one(server, name, plan)
        seconds = plan.duration_seconds
        due = due_times(state.campaign.arrivals, plan.rate, seconds, plan.seed).tolist()
        requests = draw(workload, len(due), plan.seed)
        prompts = [request.prompt_tokens for request in requests]
        return server.records(
            due, prompts, [request.output_tokens for request in requests], None, *named
        )

    def _conversations(self, server: Serves, name: str, plan: LevelPlan) -> list[RequestRecord]:
        """As the load generator has them: at a rate, or one after the other without thinking."""
        campaign = self.state.campaign
        assert isinstance(server, KnownServer)
        seconds = plan.duration_seconds
        if plan.rate is None:
            sessions = draw_sessions(campaign.workload, plan.requests or 1, plan.seed)
            return server.converse(
                [],
                sessions,
                thinks=False,
                most=plan.requests,
                until=seconds,
                cell=self.state.key,
                level=name,
            )
        rate = plan.rate / mean_turns_of(campaign.workload)
        begins = due_times(campaign.arrivals, rate, seconds, plan.seed).tolist()
        sessions = draw_sessions(campaign.workload, len(begins), plan.seed)
        return server.converse(begins, sessions, until=seconds, cell=self.state.key, level=name)

    def _one_by_one(self, server: Serves, name: str, plan: LevelPlan) -> list[RequestRecord]:
        state, at, records = self.state, 0.0, []
        requests = draw(state.campaign.workload, plan.requests or 1, plan.seed)
        lengths = [(request.prompt_tokens, request.output_tokens) for request in requests]
        if plan.burst is not None:
            lengths = list(zip(plan.burst.prompt_tokens, plan.burst.output_tokens, strict=True))
        for index, (prompt, output) in enumerate(lengths):
            if at >= plan.window_seconds:
                break
            (one,) = server.records([at], [prompt], [output], cell=state.key, level=name)
            records.append(msgspec.structs.replace(one, index=index))
            at = one.ended_seconds or at
        return records

    def wait(self, seconds: float) -> None:
        self.world.now += seconds


def fails_once(name: str, error: Callable[[], BaseException]) -> Callable[[CellState, str], None]:
    """A fate: the first attempt at the level that ends in `name` fails."""

    def fate(state: CellState, level: str) -> None:
        if level.endswith(name):
            raise error()

    return fate


def interrupted() -> LevelInterrupted:
    return LevelInterrupted("the engine was restarted")


@contextlib.contextmanager
def killed_after(monkeypatch: pytest.MonkeyPatch, appends: int) -> Iterator[None]:
    """Kills the runner after so many appended events; whatever it would write then is lost."""
    left = appends
    write = RunFolder.append_event

    def event(self: RunFolder, one: Event) -> Event:
        nonlocal left
        if left <= 0:
            raise Killed
        left -= 1
        return write(self, one)

    with monkeypatch.context() as patched, contextlib.suppress(Killed):
        patched.setattr(RunFolder, "append_event", event)
        yield

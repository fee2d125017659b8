"""Servers whose capacity is known, on a simulated clock. Campaigns are measured against them.

    world = worlds()["135M on a CPU"]
    world.capacity()                      # requests/s, by the long-run SLO attainment

Sixteen of them existed when the order of measurements in a cell was chosen; nothing was tuned on
the last four.
"""

from __future__ import annotations

import functools
import math
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from crossover.loadtests.levels.level_columns import Level
from crossover.loadtests.records.journal_events import LevelStarted
from crossover.loadtests.records.level_plan import LevelPlan
from crossover.loadtests.records.request_record import RequestRecord
from crossover.models.identity.model_ladder import ladder_model
from crossover.models.shape.model_spec import ModelSpec, Routing
from crossover.serving.capacity.scheduler_settings import SchedulerSettings
from crossover.serving.capacity.slo import Slo
from crossover.serving.capacity.step_time_model import StepTimeModel
from crossover.serving.workload.arrivals import Arrivals, Gamma, Poisson, due_times
from crossover.serving.workload.conversations import draw_sessions, mean_turns_of
from crossover.serving.workload.request_lengths import Spread, Workload, draw
from tests.loadtests.campaign.simulated import Serves
from tests.loadtests.capacity.known_server import KnownServer

NOISE = 0.03  # standard deviation of a step's ln(seconds)
STARTS = 3
Steps = Callable[[int, int, int, int], float]  # rows, prompt tokens, context, passes -> seconds
Speed = Callable[[float], float]  # by which steps are quicker at a moment


@dataclass(frozen=True)
class World:
    """A server with its load. The capacity lies between the rates `low` and `high`."""

    name: str
    slo: Slo
    workload: Workload
    serving: Callable[[int, float, int], Serves]  # seed, moment, start
    low: float
    high: float
    arrivals: Arrivals = Poisson()
    policy: SchedulerSettings | None = SchedulerSettings(
        slots=8, step_tokens=2048, step_seconds_target=None
    )
    budget: float = 900.0
    has_capacity: bool = True
    long_run: int = 8_000  # requests that tell the long-run share
    taken: Callable[[float, float], float] | None = None  # where a disturbance is seen
    quiet: Callable[[int, float, int], Serves] | None = None  # then the truth is of this
    start_spread: float = 0.0  # sd of ln(speed) from start to start
    is_stationary: bool = True
    speed: Speed | None = None  # of a machine that wanders, under SLOW360
    spec: ModelSpec | None = None  # of a mixture of experts; None: of a dense model

    def share(self, rate: float, start: int = 1) -> float:
        """Return the long-run SLO attainment at a rate."""
        if self.workload.has_sessions:
            return self._share_of_turns(rate, start)
        due = due_times(self.arrivals, rate, self.long_run / rate, 99)
        requests = draw(self.workload, len(due), 99)
        server = (self.quiet or self.serving)(99, 0.0, start)
        records = server.records(
            due.tolist(), [a.prompt_tokens for a in requests], [a.output_tokens for a in requests]
        )
        level = Level.of(
            records,
            LevelStarted(cell="c", level="l", plan=LevelPlan(window_seconds=float(due[-1]))),
        )
        good = self.slo.met_by(level)
        return float(good[len(good) // 50 :].mean())

    def _share_of_turns(self, rate: float, start: int) -> float:
        """Return the long-run SLO attainment of turns of conversations, after a warm-up."""
        seconds = self.long_run / rate
        begins = due_times(self.arrivals, rate / mean_turns_of(self.workload), seconds, 99).tolist()
        sessions = draw_sessions(self.workload, len(begins), 99)
        server = (self.quiet or self.serving)(99, 0.0, start)
        assert isinstance(server, KnownServer)
        records = server.converse(begins, sessions, until=seconds)
        level = Level.of(
            records, LevelStarted(cell="c", level="l", plan=LevelPlan(window_seconds=seconds))
        )
        return float(self.slo.met_by(level)[level.due > 0.1 * seconds].mean())

    @functools.cache  # noqa: B019
    def capacity(self, start: int = 1) -> float:
        """Return the rate at which the long-run SLO attainment equals the target, by bisection."""
        low, high = self.low, self.high
        for _ in range(9):
            middle = math.sqrt(low * high)
            up = self.share(middle, start) >= self.slo.target
            low, high = (middle, high) if up else (low, middle)
        return math.sqrt(low * high)

    def met(self, begin: float, end: float, start: int) -> float:
        """Return the capacity that the world would have if the machine, as it was started, went
        through these moments again and again. A campaign can know no more than that."""
        if (speed := self.speed) is None:
            return self.capacity(start if self.start_spread else 1)
        serving = batching(SLOW360, speed=lambda at: speed(begin + at % (end - begin)))
        return replace(self, serving=serving).capacity()


def step_times(base: float, row: float, prompt: float, context: float = 0.0) -> Steps:
    """Return a step-time model from its coefficients in milliseconds."""
    return lambda rows, tokens, cached, passes: (
        (base + row * rows + prompt * tokens + context * cached) / 1e3
    )


def staircase(base: float, row: float, prompt: float) -> Steps:
    """Return step times in which rows cost in pairs: 3 rows cost as much as 4."""
    return lambda rows, tokens, cached, passes: (
        (base + row * (rows if rows <= 2 else 2 * math.ceil(rows / 2)) + prompt * tokens) / 1e3
    )


SLOW360 = staircase(7, 13, 9)
# Measured steps of a mixture whose weights, in float32, two cores read more slowly than they
# multiply: 4.2, 6.8, 10.9, 19.6 and 30.5 ms for 1, 2, 4, 8 and 16 rows.
MIXTURE = StepTimeModel(
    base_seconds=0.002,
    row_seconds=0.00104,
    prompt_token_seconds=0.00034,
    expert_seconds=0.0183,
    experts=Routing(128, 8),
)


def batching(
    steps: Steps, slots: int = 8, speed: Speed | None = None, spread: float = 0.0, **more: object
) -> Callable[[int, float, int], Serves]:
    """Continuous batching with known step times; each start has its own speed."""

    def serving(seed: int, at: float, start: int) -> Serves:
        rng = np.random.default_rng(seed)
        factor = math.exp(spread * np.random.default_rng([7, start]).normal()) if spread else 1.0

        def seconds(rows: int, tokens: int, context: int, passes: int) -> float:
            plain = steps(rows, tokens, context, passes) * math.exp(NOISE * rng.normal()) * factor
            return plain / (speed(at + server.now) if speed is not None else 1.0)

        server = KnownServer(seconds, slots=slots, **more)  # type: ignore[arg-type]
        return server

    return serving


class Queue:
    """A D/c queue, first come first served: each request takes `service` of one of `servers`."""

    def __init__(self, servers: int, service: float) -> None:
        self.servers, self.service = servers, service

    def records(
        self,
        due: Sequence[float],
        prompt_tokens: Sequence[int],
        output_tokens: Sequence[int],
        cached_tokens: Sequence[int] | None = None,
        cell: str = "c",
        level: str = "l",
    ) -> list[RequestRecord]:
        free = [-1.0] * self.servers
        found = []
        for index, at in enumerate(due):
            begin = max(at, free[index % self.servers])
            free[index % self.servers] = begin + self.service
            stamps = np.linspace(begin + 1e-3, begin + self.service, output_tokens[index]).tolist()
            found.append(
                RequestRecord(
                    cell=cell,
                    level=level,
                    index=index,
                    scheduled_seconds=float(at),
                    sent_seconds=float(at),
                    first_content_seconds=stamps[0],
                    last_content_seconds=stamps[-1],
                    ended_seconds=stamps[-1],
                    content_seconds=stamps,
                    first_chunk_tokens=1,
                    prompt_tokens=prompt_tokens[index],
                    output_tokens=output_tokens[index],
                    status=200,
                )
            )
        return found


class Flawed:
    """Some requests fail whatever the load."""

    def __init__(self, server: Serves, seed: int, bad_share: float) -> None:
        self._server, self._bad = server, bad_share
        self._rng = np.random.default_rng([seed, 1])

    def records(self, *args: object, **kwargs: object) -> list[RequestRecord]:
        found = self._server.records(*args, **kwargs)  # type: ignore[arg-type]
        bad = self._rng.random(len(found)) < self._bad
        return [
            msgspec.structs.replace(one, status=500, error="http_500") if is_bad else one
            for one, is_bad in zip(found, bad, strict=True)
        ]


def breathing(period: float = 900.0, depth: float = 0.2) -> Speed:
    """Return a speed that goes up and down."""
    return lambda at: 1.0 + depth * math.sin(2 * math.pi * at / period)


def halting(share: float = 0.1, each: float = 60.0, slowed: float = 0.5, seed: int = 5) -> Speed:
    """Return a speed that is slow for `share` of the time, in stretches of `each` seconds that
    begin at random moments."""
    rng = np.random.default_rng(seed)
    starts = np.cumsum(rng.exponential(each * (1 - share) / share, 60_000) + each) - each

    def speed(at: float) -> float:
        place = int(np.searchsorted(starts, at, "right")) - 1
        return slowed if place >= 0 and at < starts[place] + each else 1.0

    return speed


def hog(share: float, in_caches: float = 0.0) -> Speed:
    """Return the speed beside a process that takes this share of the engine's CPU time, and slows
    the rest through caches and memory, which no counter shows."""
    return lambda at: (1 - share) * (1 - in_caches)


def lost(speed: Speed) -> Callable[[float, float], float]:
    """Return the seconds that a slower machine lost between two moments."""
    return lambda start, end: (
        (end - start) * (1 - float(np.mean([speed(at) for at in np.linspace(start, end, 60)])))
    )


def bimodal() -> Workload:
    """15 % long prompts and answers among short ones."""
    path = Path(tempfile.gettempdir()) / "crossover-bimodal.jsonl"
    rows = [(480, 60)] * 15 + [(40, 16)] * 85
    text = "".join(f'{{"prompt_tokens": {p}, "output_tokens": {o}}}\n' for p, o in rows)
    path.write_text(text)
    return Workload(file=str(path))


def chat(prompt: int, output: int) -> Workload:
    return Workload(preset="chat", max_prompt_tokens=prompt, max_output_tokens=output)


NINE = Slo("nine", ttft_seconds=0.5, target=0.9)
CHAT = Slo("chat, 90 %", ttft_seconds=2.0, tpot_seconds=0.1, target=0.9)
PATIENT = Slo("patient", ttft_seconds=30.0, target=0.9)
SLOW = Slo("slow", ttft_seconds=10.0, tpot_seconds=1.0, target=0.9)
SLOWER = Slo("slower", ttft_seconds=30.0, tpot_seconds=2.0, target=0.9)
ANSWER = Slo("answer", tpot_seconds=0.15, target=0.9, ttfa_seconds=3.0)
READING = Slo("reading", ttft_seconds=5.0, tpot_seconds=0.2, target=0.9)
TIGHT = Slo(
    "tight", ttft_seconds=2.0, tpot_seconds=0.0126, target=0.9
)  # three times the step of one row of MIXTURE


TALK = Workload(
    prompt_tokens=200,
    output_tokens=40,
    turns=Spread(mean=4, sd=2, min=1, max=8),
    think_seconds=Spread(mean=8, sd=5, min=1, max=30),
    turn_tokens=Spread(mean=40, sd=20, min=20, max=120),
)


@functools.cache
def worlds() -> dict[str, World]:
    """Return the worlds by name, in the order of the table."""
    short, middle = chat(40, 16), chat(512, 64)
    sixteen = SchedulerSettings(slots=16, step_tokens=2048, step_seconds_target=None)
    batched = step_times(20, 3, 0.5, 2e-4)
    queue = lambda seed, at, start: Queue(4, 0.51)  # noqa: E731
    fixed = Workload(prompt_tokens=16, output_tokens=8)
    found = [
        World("4 slots of 0.51 s", NINE, fixed, queue, 5.0, 7.6, policy=None),
        World(
            *("continuous batching", CHAT, middle, batching(batched, 16), 0.5, 6.0),
            policy=sixteen,
        ),
    ]
    for name, steps, slo, low, high, budget in (
        ("135M", staircase(3.5, 6.3, 3.3), CHAT, 0.3, 12.0, 900.0),
        ("360M", staircase(7, 13, 9), CHAT, 0.1, 6.0, 1800.0),
        ("1B", staircase(30, 32, 24), CHAT, 0.01, 3.0, 7200.0),
        ("3B", staircase(120, 130, 95), SLOW, 0.005, 1.0, 14400.0),
        ("8B", staircase(300, 310, 240), SLOWER, 0.001, 0.5, 28800.0),
    ):
        found.append(
            World(f"{name} on a CPU", slo, short, batching(steps), low, high, budget=budget)
        )
    found += [
        World(
            *("whole ShareGPT lengths", PATIENT, chat(2048, 1024)),
            *(batching(staircase(3.5, 6.3, 0.5), 16), 0.05, 2.0),
            policy=sixteen,
            budget=3600.0,
            long_run=4_000,
        ),
        World(
            *("bimodal lengths", CHAT, bimodal(), batching(batched, 16), 0.5, 14.0),
            policy=sixteen,
        ),
        World(
            *("arrivals in bursts", CHAT, middle, batching(batched, 16), 0.2, 6.0),
            arrivals=Gamma(cv=3.0),
            policy=sixteen,
        ),
    ]
    for name, speed, is_seen in (
        ("speed +-20 % in 15 min", breathing(), False),
        ("half speed 10 % of the time", halting(), False),
        ("half speed at times, seen", halting(), True),
        ("6 % taken in turns, seen", halting(0.4, 20.0, 0.85), True),
        ("hog: 10 % all the time", hog(0.10), True),
        ("hog: 25 % all the time", hog(0.25), True),
        ("hog: 50 % all the time", hog(0.50), True),
        ("hog: 25 % in bursts of 10 s", halting(0.5, 10.0, 0.5), True),
        ("hog: 50 % in bursts of a minute", halting(0.6, 60.0, 1 / 6), True),
        ("hog: 25 %, and 8 % in caches", hog(0.25, 0.08), "only the CPU time"),
    ):
        more: dict[str, Any] = {"speed": speed, "is_stationary": False}
        if is_seen:
            seen = hog(0.25) if is_seen == "only the CPU time" else speed
            more = {"taken": lost(seen), "quiet": batching(SLOW360)}
        wandering = batching(SLOW360, speed=speed)
        found.append(World(name, CHAT, short, wandering, 0.05, 6.0, **more))
    found += [
        World("TTFT limit 30 s", PATIENT, short, batching(SLOW360), 0.3, 9.0, budget=3600.0),
        World(
            *("speed differs by start, sd 10 %", CHAT, short),
            *(batching(SLOW360, spread=0.1), 0.1, 6.0),
            start_spread=0.1,
            is_stationary=False,
        ),
        World(
            *("13 % bad alone", NINE, fixed),
            lambda seed, at, start: Flawed(Queue(4, 0.51), seed, 0.13),
            *(5.0, 7.6),
            policy=None,
            has_capacity=False,
        ),
        World(
            *("new: long prompts", READING, chat(2048, 64), batching(step_times(15, 2, 0.8, 1e-4))),
            *(0.05, 6.0),
            budget=1800.0,
        ),
        World(
            *("new: 4 tokens a chunk", CHAT, middle, batching(batched, chunk=4), 0.3, 6.0),
            policy=None,
            budget=1800.0,
        ),
        World(
            *("new: whole prompts first", READING, chat(512, 128)),
            *(batching(step_times(18, 4, 1.2), whole_prompts=True), 0.1, 6.0),
            policy=None,
            budget=1800.0,
        ),
        World(
            *("conversations, reused", CHAT, TALK, batching(step_times(20, 4, 2.0, 2e-4), 16)),
            *(0.1, 4.0),
            policy=sixteen,
            budget=1800.0,
            long_run=4_000,
        ),
        World(
            *("conversations, few slots", CHAT, TALK, batching(step_times(20, 4, 2.0, 2e-4), 3)),
            *(0.05, 4.0),
            policy=SchedulerSettings(slots=3, step_tokens=2048, step_seconds_target=None),
            budget=1800.0,
            long_run=4_000,
        ),
        World(
            *("thinks first", ANSWER, middle, batching(batched, 16, reasoning_share=0.6)),
            *(0.3, 6.0),
            policy=sixteen,
        ),
        World(
            *("new: 8 of 128 experts", TIGHT, chat(128, 256), batching(MIXTURE.seconds, 16)),
            *(0.1, 4.0),
            policy=sixteen,
            spec=ladder_model("qwen3-30b-a3b").spec,
        ),
    ]
    return {world.name: world for world in found}

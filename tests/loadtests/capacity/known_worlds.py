"""Servers whose capacity is known exactly or to the third digit, on a simulated clock: what a
search (searched.py) is held against.

    world = slow_cpu(120, 130, 95)
    truth = world.capacity()
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache

import numpy as np
import numpy.typing as npt

from loadtests.metrics.disturbance import MOST_TAKEN_SHARE
from loadtests.metrics.slo import Slo
from loadtests.simulation.batching import Policy, simulate
from loadtests.simulation.step_time import StepLaw
from loadtests.workload.arrivals import Arrivals, OnOff, Poisson, due_times
from loadtests.workload.requests import Workload, draw

Array = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

STARTS = 3  # of the server in a search, where starts differ


@dataclass(frozen=True)
class Played:
    """What became of requests, in order of due time; seconds on the level's clock."""

    due: Array
    ttft: Array
    ends: Array
    good: Bools


Play = Callable[[Array, np.random.Generator, float], Played]  # due, rng, clock at the level's start


@dataclass(frozen=True)
class World:
    """A server with its load: `play` has all of it on board."""

    name: str
    slo: Slo
    play: Play
    low: float  # rates between which the capacity is
    high: float
    arrivals: Arrivals = field(default_factory=Poisson)
    has_capacity: bool = True  # False: no rate meets the SLO
    long_run: int = 40_000  # requests that tell the long-run share
    saturation: float | None = None  # requests/s, where known
    at_speed: Callable[[float], Play] | None = None  # each start of the server has its own speed
    start_spread: float = 0.0  # sd of ln(speed) from start to start
    disturbed: Play | None = None  # what levels find at times; the truth is that of `play`
    work: Callable[[Array], Array] | None = None  # by a moment, where disturbance is seen

    def disturbed_at(
        self, start: float, end: float, most_share: float = MOST_TAKEN_SHARE
    ) -> float | None:
        """When a level between two moments is seen to be disturbed; None: it is not."""
        if self.work is None:
            return None
        moments = np.linspace(start, end, 200)
        lost = moments - start - (self.work(moments) - self.work(moments[:1]))
        seen = np.flatnonzero(lost > most_share * (end - start))
        return float(moments[seen[0]]) if len(seen) else None

    def due(self, rate: float, seconds: float, seed: int) -> Array:
        return np.asarray(due_times(self.arrivals, rate, seconds, seed), dtype=np.float64)

    def share(self, rate: float, seed: int = 99) -> float:
        """The long-run share of good requests."""
        due = self.due(rate, self.long_run / rate, seed)
        good = self.play(due, np.random.default_rng(seed), 0.0).good
        return float(good[len(good) // 50 :].mean())

    def capacity(self) -> float:
        """The rate at which the long-run share of good requests is the target, by bisection."""
        return _capacity_by_name(self.name)

    def of_start(self, start: int, seed: int) -> World:
        """The server as this start of it turns out."""
        if self.at_speed is None:
            return self
        speed = math.exp(self.start_spread * np.random.default_rng([seed, start]).normal())
        low, high = self.low * speed, self.high * speed
        return replace(self, play=self.at_speed(speed), low=low, high=high)

    def truth(self, seed: int) -> float:
        """The capacity of the start after the last one that a search with this seed has seen."""
        return self.capacity() if self.at_speed is None else _capacity(self.of_start(STARTS, seed))


@cache
def _capacity_by_name(name: str) -> float:
    return _capacity(next(one for one in worlds() if one.name == name))


def _capacity(world: World) -> float:
    low, high = world.low, world.high
    for _ in range(10):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if world.share(middle) >= world.slo.target else (low, middle)
    return math.sqrt(low * high)


# Servers


def waits_md_c(due: Array, servers: int, service_seconds: float) -> Array:
    """Waiting times of a D/c queue, first come first served, from empty (each server takes every
    c-th: Kiefer-Wolfowitz).
    """
    free_at = deque([-1.0] * servers)
    waits = []
    for t in due.tolist():
        start = max(t, free_at.popleft())
        waits.append(start - t)
        free_at.append(start + service_seconds)
    return np.array(waits)


def slots(limit_seconds: float = 0.5, servers: int = 4, service_seconds: float = 0.51) -> Play:
    """Good is who waits no longer than the limit."""

    def play(due: Array, rng: np.random.Generator, at: float) -> Played:
        waits = waits_md_c(due, servers, service_seconds)
        return Played(due, waits, due + waits + service_seconds, waits <= limit_seconds)

    return play


def staircase(base: float, row: float, prompt: float, most: int = 32) -> StepLaw:
    """A step law in milliseconds whose rows cost in pairs: 3 rows cost what 4 do."""
    cost = {rows: row * (rows if rows <= 2 else 2 * math.ceil(rows / 2)) for rows in range(1, most)}
    return StepLaw(
        base_seconds=base / 1000,
        row_seconds=row / 1000,
        rows=tuple((float(rows), each / 1000) for rows, each in cost.items()),
        prompt_token_seconds=prompt / 1000,
    )


def lengths(kind: str) -> npt.NDArray[np.int64]:
    """(prompt tokens, output tokens) of 3,000 requests."""
    if kind == "bimodal":
        is_long = np.random.default_rng(3).random(3000) < 0.15
        return np.column_stack([np.where(is_long, 480, 40), np.where(is_long, 60, 16)])
    limits = {"short": (40, 16), "middle": (512, 64), "whole": (2048, 1024)}[kind]
    workload = Workload(preset="chat", max_prompt_tokens=limits[0], max_output_tokens=limits[1])
    asks = draw(workload, 3000, 1)
    return np.array([(ask.prompt_tokens, ask.output_tokens) for ask in asks])


def batching(
    law: StepLaw,
    slo: Slo,
    pairs: npt.NDArray[np.int64],
    warp: Callable[[Array], Array] | None = None,
    count: int = 8,
) -> Play:
    """Continuous batching with a known step law; each request draws its lengths from `pairs`.

    `warp` maps seconds on the wall to seconds of work at full speed.
    """

    def play(due: Array, rng: np.random.Generator, at: float) -> Played:
        asked = pairs[rng.integers(len(pairs), size=len(due))]
        if warp is None:
            done = simulate(law, Policy(slots=count), due, asked)
            return Played(due, done.ttft_seconds, done.last_token, done.good(slo))
        work = warp(due + at)
        begun = work[0] if len(work) else 0.0
        done = simulate(law, Policy(slots=count), work - begun, asked)
        first = unwarp(warp, done.first_token + begun, at, due) - at
        last = unwarp(warp, done.last_token + begun, at, due) - at
        ttft = first - due
        later = np.where(asked[:, 1] > 1, asked[:, 1] - 1.0, np.nan)
        good = ~((last - first) / later > (slo.tpot_seconds or math.inf))
        return Played(due, ttft, last, good & (ttft <= (slo.ttft_seconds or math.inf)))

    return play


def unwarp(warp: Callable[[Array], Array], work: Array, at: float, due: Array) -> Array:
    """The moments on the wall at which so much work is done."""
    end = at + (float(due[-1]) if len(due) else 0.0) + 4 * float(np.ptp(work)) + 600.0
    wall = np.linspace(at, end, int((end - at) * 4) + 2)
    return np.interp(work, warp(wall), wall)


def breathing(period_seconds: float = 900.0, depth: float = 0.2) -> Callable[[Array], Array]:
    """A machine whose speed goes up and down by `depth`: work done by a moment."""
    turn = 2 * math.pi / period_seconds

    def warp(wall: Array) -> Array:
        return np.asarray(wall - depth / turn * (np.cos(turn * wall) - 1.0))

    return warp


def halting(
    seed: int = 5, share: float = 0.1, each_seconds: float = 60.0, slowed: float = 0.5
) -> Callable[[Array], Array]:
    """Slowed down for `share` of the time, `each_seconds` at a time, at random moments."""
    rng = np.random.default_rng(seed)
    gaps = rng.exponential(each_seconds * (1 - share) / share, 20_000)
    starts = np.cumsum(gaps + each_seconds) - each_seconds
    edges = np.concatenate([[0.0], np.column_stack([starts, starts + each_seconds]).ravel()])
    speed = np.tile([1.0, slowed], len(starts))
    work = np.concatenate([[0.0], np.cumsum(np.diff(edges) * speed)])

    def warp(wall: Array) -> Array:
        return np.interp(wall, edges, work)

    return warp


def flawed(play: Play, bad_share: float) -> Play:
    """Some requests miss the SLO whatever the load."""

    def flaw(due: Array, rng: np.random.Generator, at: float) -> Played:
        done = play(due, rng, at)
        return Played(
            done.due, done.ttft, done.ends, done.good & (rng.random(len(due)) > bad_share)
        )

    return flaw


NINE = Slo("nine", 0.5, None, target=0.9)
CHAT = Slo("chat, 90 %", 2.0, 0.1, target=0.9)
PATIENT = Slo("patient", 30.0, None, target=0.9)
SLOW = Slo("slow", 10.0, 1.0, target=0.9)
SLOWER = Slo("slower", 30.0, 2.0, target=0.9)
LAW = StepLaw(
    base_seconds=0.02, row_seconds=0.003, prompt_token_seconds=0.0005, kv_token_seconds=2e-7
)


def worlds() -> Iterator[World]:
    """The worlds of the coverage table."""
    yield World("4 slots of 0.51 s", NINE, slots(), 5.0, 7.6, saturation=4 / 0.51)
    middle, short = lengths("middle"), lengths("short")
    yield World("continuous batching", CHAT, batching(LAW, CHAT, middle, count=16), 0.5, 6.0)
    for name, law, slo, low, high in (
        ("135M", staircase(3.5, 6.3, 3.3), CHAT, 0.3, 12.0),
        ("360M", staircase(7, 13, 9), CHAT, 0.1, 6.0),
        ("1B", staircase(30, 32, 24), CHAT, 0.01, 3.0),
        ("3B", staircase(120, 130, 95), SLOW, 0.005, 1.0),
        ("8B", staircase(300, 310, 240), SLOWER, 0.001, 0.5),
    ):
        yield World(f"{name} on a CPU", slo, batching(law, slo, short), low, high, long_run=15_000)
    law = staircase(3.5, 6.3, 0.5)
    whole = batching(law, PATIENT, lengths("whole"), count=16)
    yield World("whole ShareGPT lengths", PATIENT, whole, 0.05, 2.0, long_run=15_000)
    play = batching(LAW, CHAT, lengths("bimodal"), count=16)
    yield World("bimodal lengths", CHAT, play, 0.5, 14.0, long_run=20_000)
    play = batching(LAW, CHAT, middle, count=16)
    yield World("on/off arrivals", CHAT, play, 0.2, 6.0, OnOff(4.0, 8.0), long_run=20_000)
    law = staircase(7, 13, 9)
    play = batching(law, CHAT, short, breathing())
    yield World("speed +-20 % in 15 min", CHAT, play, 0.1, 6.0, long_run=15_000)
    play = batching(law, CHAT, short, halting())
    yield World("half speed 10 % of the time", CHAT, play, 0.05, 6.0, long_run=15_000)
    quiet = World("half speed at times, seen", CHAT, batching(law, CHAT, short), 0.1, 6.0)
    yield replace(quiet, long_run=15_000, disturbed=play, work=halting())
    taking = halting(share=0.4, each_seconds=20.0, slowed=0.85)
    play = batching(law, CHAT, short, taking)
    quiet = World("6 % taken in turns, seen", CHAT, batching(law, CHAT, short), 0.1, 6.0)
    yield replace(quiet, long_run=15_000, disturbed=play, work=taking)
    play = batching(law, PATIENT, short)
    yield World("TTFT limit 30 s", PATIENT, play, 0.3, 9.0, long_run=15_000)
    at_speed = lambda speed: slots(service_seconds=0.51 / speed)  # noqa: E731
    name = "speed differs by start, sd 10 %"
    yield World(name, NINE, slots(), 4.5, 8.0, at_speed=at_speed, start_spread=0.1)
    play = flawed(slots(), 0.13)
    yield World("13 % bad alone", NINE, play, 5.0, 7.6, has_capacity=False)

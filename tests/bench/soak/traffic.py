"""The soak's normal traffic, and what the server's processes hold meanwhile."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field
from typing import Literal

import psutil

from tests.bench.pressure.wire import Client, Held, Outcome, Server, held, post, until_idle

PROMPT_WORDS, OUTPUT_TOKENS = 20, 32  # a word of three digits is three tokens or fewer
MOST_OPEN = 500  # a server that has stopped answering shall not fill this process's memory
TASKS = "crossover_event_loop_tasks"
Phase = Literal["warm-up", "alone", "polite", "attacked"]


@dataclass(frozen=True)
class Request:
    """A normal request. Times in seconds, `due` since the soak began; `lost` says why, or ""."""

    phase: Phase
    due: float
    ttft: float | None
    send_lag: float | None
    lost: str


@dataclass(frozen=True)
class Tree:
    """A process with those that it started. Sizes in bytes, CPU in seconds since the start."""

    rss_bytes: int
    descriptors: int
    threads: int
    cpu_seconds: float


@dataclass(frozen=True)
class Sample:
    seconds: float
    phase: Phase
    api: Tree
    engine: Tree
    attackers_cpu_seconds: float


@dataclass
class Soak:
    """One server, its load and its samples."""

    server: Server
    capacity: float | None = None
    began: float = 0.0
    requests: list[Request] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    attacks: dict[str, dict[str, int]] = field(default_factory=dict)
    attackers: int | None = None  # their process
    before: tuple[Held, Held, float | None] | None = None
    after: tuple[Held, Held, float | None] | None = None
    is_engine_gone: bool = False
    phase: Phase = "warm-up"
    draw: random.Random = field(default_factory=lambda: random.Random(7))

    def __post_init__(self) -> None:
        self._client: Client | None = None
        self._open: set[asyncio.Task[None]] = set()

    @property
    def client(self) -> Client:
        if self._client is None:
            self._client = Client(self.server.port)
        return self._client

    def body(self) -> bytes:
        """A prompt that nobody has sent before."""
        words = " ".join(str(self.draw.randint(100, 999)) for _ in range(PROMPT_WORDS))
        return post(prompt=words, max_tokens=OUTPUT_TOKENS, stream=True, ignore_eos=True)

    async def closed_loop(self, streams: int, seconds: float) -> float:
        """Requests finished per second, the first third of the time not counted."""
        loop = asyncio.get_running_loop()
        start, ends = loop.time(), list[float]()

        async def user() -> None:
            while loop.time() < start + seconds:
                outcome = await self.client.ask(self.body())
                if outcome.status != 200 or outcome.last is None:
                    raise RuntimeError(f"closed loop: {outcome.status} {outcome.body[:200]!r}")
                ends.append(outcome.last - start)

        await asyncio.gather(*(user() for _ in range(streams)))
        return sum(seconds / 3 <= end < seconds for end in ends) / (seconds * 2 / 3)

    async def first_grammar(self) -> None:
        """A request with a grammar: the engine compiles the first one in a thread that it keeps.

        A backend without grammars refuses it.
        """
        outcome = await self.client.ask(post(prompt="x", max_tokens=1, grammar='root ::= "x"'))
        if outcome.status not in (200, 400):
            raise RuntimeError(f"a grammar: {outcome.status} {outcome.body[:200]!r}")

    def add_attacks(self, seen: dict[str, dict[str, int]]) -> None:
        """What became of the attacks of one turn."""
        for name, counts in seen.items():
            known = self.attacks.setdefault(name, {})
            for what, count in counts.items():
                known[what] = known.get(what, 0) + count

    async def traffic(self, phase: Phase, rate: float, seconds: float) -> None:
        """Poisson arrivals for so long; those under way go on into what follows."""
        loop = asyncio.get_running_loop()
        self.phase = phase
        due = loop.time()
        end = due + seconds
        while (due := due + self.draw.expovariate(rate)) < end:
            await asyncio.sleep(max(0.0, due - loop.time()))
            if len(self._open) >= MOST_OPEN:
                problem = f"not sent: {MOST_OPEN} are open"
                self.requests.append(Request(phase, due - self.began, None, None, problem))
                continue
            task = asyncio.create_task(self._one(phase, due))
            self._open.add(task)
            task.add_done_callback(self._open.discard)
        await asyncio.sleep(max(0.0, end - loop.time()))

    async def _one(self, phase: Phase, due: float) -> None:
        try:
            outcome = await self.client.ask(self.body(), due)
        except OSError as problem:
            outcome = Outcome(due, body=repr(problem).encode())
        lost = ""
        if outcome.status != 200 or not outcome.complete:
            said = outcome.body[:120].decode(errors="replace")
            lost = f"status {outcome.status}{'' if outcome.complete else ', cut off'} {said}"
        lag = None if outcome.sent is None else outcome.sent - due
        self.requests.append(Request(phase, due - self.began, outcome.ttft, lag, lost))

    async def at_rest(self) -> tuple[Held, Held, float | None]:
        """What is held with nothing in flight and one connection."""
        if self._open:
            await asyncio.wait(self._open, timeout=120)
        self.client.close()
        await asyncio.sleep(2.0)
        numbers = await until_idle(self.client, 120)
        return held(self.server.api), held(self.server.engine), numbers.get(TASKS)

    async def watch(self, every: float) -> None:
        """A sample every so many seconds; a line a minute."""
        loop, told = asyncio.get_running_loop(), 0
        while True:
            try:
                self.samples.append(self._sample(loop.time() - self.began))
            except psutil.NoSuchProcess:
                self.is_engine_gone = True
            minute = int((loop.time() - self.began) / 60)
            if minute > told:
                told = minute
                lost = sum(bool(one.lost) for one in self.requests)
                print(
                    f"  minute {minute}, {self.phase}: {len(self.requests)} requests, {lost} lost",
                    flush=True,
                )
            await asyncio.sleep(every)

    def _sample(self, seconds: float) -> Sample:
        engine = _family(self.server.engine)
        inside = {one.pid for one in engine}
        api = [one for one in _family(self.server.api) if one.pid not in inside]
        attackers = 0.0
        if self.attackers is not None:
            attackers = _tree(_family(self.attackers)).cpu_seconds
        return Sample(seconds, self.phase, _tree(api), _tree(engine), attackers)


def _family(pid: int) -> list[psutil.Process]:
    """The process and those that it started. Raises psutil.NoSuchProcess where it is gone."""
    first = psutil.Process(pid)
    return [first, *first.children(recursive=True)]


def _tree(family: list[psutil.Process]) -> Tree:
    rss = descriptors = threads = 0
    cpu = 0.0
    for number, process in enumerate(family):
        try:
            with process.oneshot():
                times = process.cpu_times()
                rss += process.memory_info().rss
                descriptors += process.num_fds()
                threads += process.num_threads()
                cpu += times.user + times.system
        except psutil.NoSuchProcess:
            if number == 0:
                raise
    return Tree(rss, descriptors, threads, cpu)

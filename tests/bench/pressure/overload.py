"""Overload: does the endpoint still do its work, and meet its SLO, when many times what it can do
is asked of it?

    python -m tests.bench.pressure.overload [--backend fake|llama_cpp] [--seconds 25]
    [--out FILE]

Engine on core 0; HTTP side and this client on core 1, so what a rejection costs is paid by whoever
serves the others. In turn:

  capacity     a closed loop of more streams than slots: the requests that are finished per second
  1 2 5 10 x   Poisson arrivals at that multiple, whoever is refused goes away. Goodput: answers per
               second that are complete and whose first token came in time, counted from the moment
               the request was due, in the window after the queue has filled
  comeback     5 x for a few seconds, whoever is refused comes back after Retry-After until it is
               let in. Needed: when its turn would have come had the refused been served in the
               order of asking at the capacity above; given: what the first refusal said
  a 429        the HTTP side's CPU time for one refusal, on a server whose only place is taken

Verdicts: goodput at 10 x is at least 90 % of the highest; the 99th percentile of TTFT of those let
in meets the SLO; memory stays.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from loadtests.workload.arrivals import Poisson, due_times
from tests.bench.pressure.wire import (
    Client,
    Outcome,
    Server,
    held,
    mib,
    on_cores,
    post,
    run,
    serving,
    until_idle,
)

FACTORS = (1.0, 2.0, 5.0, 10.0)
MOST_COMEBACKS = 20


@dataclass(frozen=True)
class Setup:
    """A server and what is asked of it. Lengths in tokens."""

    model: str
    arguments: tuple[str, ...]
    slo_seconds: float
    output_tokens: int
    prompt_words: int
    slots: int = 16


SETUPS = {
    "fake": Setup(
        "fake",
        (
            "--option",
            "step_seconds=0.004",
            "--option",
            "row_seconds=0.0002",
            "--option",
            "prompt_token_seconds=0.0001",
        ),
        slo_seconds=1.0,
        output_tokens=16,
        prompt_words=12,
    ),
    "llama_cpp": Setup("smollm2-135m", ("--backend", "llama_cpp", "--format", "Q4_0"), 2.0, 16, 12),
}


@dataclass(frozen=True)
class Level:
    """One open-loop level. Rates per second, times in seconds, sizes in bytes."""

    factor: float
    seconds: float
    offered: int
    accepted: int
    refused: int
    failed: int  # neither answered nor refused
    good: int
    goodput: float
    ttft_p50: float
    ttft_p99: float
    retry_after_mean: float | None
    send_lag_p99: float  # of this client: what it lost itself is in TTFT too
    api_cpu_share: float
    client_cpu_share: float
    api_rss: tuple[int, int]  # before, after
    engine_rss: tuple[int, int]


@dataclass(frozen=True)
class Comeback:
    refused: int
    let_in_at_first_return: int
    let_in: int
    given_mean: float
    needed_mean: float
    returns_mean: float


class Asker:
    """Requests of one setup, every prompt different."""

    def __init__(self, setup: Setup, client: Client, seed: int) -> None:
        self.setup, self.client = setup, client
        self._words = np.random.default_rng(seed)

    def body(self) -> bytes:
        prompt = " ".join(
            str(number) for number in self._words.integers(100, 999, self.setup.prompt_words)
        )
        return post(
            prompt=prompt,
            max_tokens=self.setup.output_tokens,
            ignore_eos=True,
            stream=True,
            temperature=0,
        )

    async def closed_loop(self, streams: int, seconds: float) -> float:
        """Requests finished per second, a first third not counted."""
        loop = asyncio.get_running_loop()
        start, ends = loop.time(), list[float]()

        async def user() -> None:
            while loop.time() < start + seconds:
                outcome = await self.client.ask(self.body())
                if outcome.complete and outcome.status == 200 and outcome.last is not None:
                    ends.append(outcome.last - start)
                else:
                    left = start + seconds - loop.time()
                    await asyncio.sleep(max(0.0, min(outcome.retry_after or 0.1, left)))

        await asyncio.gather(*(user() for _ in range(streams)))
        return sum(seconds / 3 <= end < seconds for end in ends) / (seconds * 2 / 3)

    async def open_loop(
        self, rate: float, seconds: float, seed: int, comeback: bool = False
    ) -> list[list[Outcome]]:
        """Requests at Poisson times, each as the list of its tries; all of them ended."""
        loop = asyncio.get_running_loop()
        dues = due_times(Poisson(), rate, seconds, seed)
        bodies = [self.body() for _ in dues]
        start = loop.time() + 0.1
        tasks: list[asyncio.Task[list[Outcome]]] = []
        for due, data in zip(dues, bodies, strict=True):
            wait = start + due - loop.time()
            if wait > 0:
                await asyncio.sleep(wait)
            tasks.append(asyncio.create_task(self._tries(data, start + due, comeback)))
        return await asyncio.gather(*tasks)

    async def _tries(self, data: bytes, due: float, comeback: bool) -> list[Outcome]:
        tries = [await self.client.ask(data, due)]
        while comeback and tries[-1].status == 429 and len(tries) < MOST_COMEBACKS:
            await asyncio.sleep(tries[-1].retry_after or 1.0)
            tries.append(await self.client.ask(data))
        return tries


async def level(
    server: Server, asker: Asker, capacity: float, factor: float, seconds: float
) -> Level:
    """Offer `factor` times the capacity for so long."""
    slo = asker.setup.slo_seconds
    await until_idle(asker.client)
    api, engine, mine = held(server.api), held(server.engine), held(os.getpid())
    before = asyncio.get_running_loop().time()
    tries = await asker.open_loop(capacity * factor, seconds, int(factor * 10))
    outcomes = [one[0] for one in tries]
    elapsed = asyncio.get_running_loop().time() - before
    api_after, engine_after, mine_after = held(server.api), held(server.engine), held(os.getpid())
    start = before + 0.1
    # While the queue fills, more is let in than can be done; what is counted is what is finished
    # after that.
    filled = min(2 * slo, seconds / 3)
    accepted = [one for one in outcomes if one.status == 200]
    refused = [one for one in outcomes if one.status == 429]
    good = [one for one in accepted if one.complete and one.ttft is not None and one.ttft <= slo]
    within = sum(start + filled <= (one.last or 0.0) < start + seconds for one in good)
    ttft = np.array([one.ttft if one.ttft is not None else np.inf for one in accepted] or [np.inf])
    given = [one.retry_after for one in refused if one.retry_after is not None]
    return Level(
        factor=factor,
        seconds=seconds,
        offered=len(outcomes),
        accepted=len(accepted),
        refused=len(refused),
        failed=len(outcomes)
        - len(accepted)
        - len(refused)
        + sum(not one.complete for one in accepted),
        good=len(good),
        goodput=within / (seconds - filled),
        ttft_p50=float(np.percentile(ttft, 50)),
        ttft_p99=float(np.percentile(ttft, 99, method="higher")),
        retry_after_mean=float(np.mean(given)) if given else None,
        send_lag_p99=float(
            np.percentile([one.sent - one.due for one in outcomes if one.sent is not None], 99)
        ),
        api_cpu_share=(api_after.cpu_seconds - api.cpu_seconds) / elapsed,
        client_cpu_share=(mine_after.cpu_seconds - mine.cpu_seconds) / elapsed,
        api_rss=(api.rss_bytes, api_after.rss_bytes),
        engine_rss=(engine.rss_bytes, engine_after.rss_bytes),
    )


async def comeback(
    asker: Asker, capacity: float, seconds: float, factor: float = 5.0
) -> Comeback | None:
    """A burst whose refused come back when they are told to; None where nobody was refused."""
    await until_idle(asker.client)
    tries = await asker.open_loop(capacity * factor, seconds, 7, comeback=True)
    refused = sorted(
        (one for one in tries if one[0].status == 429), key=lambda one: one[0].last or 0.0
    )
    if not refused:
        return None
    full_at = refused[0][0].last or 0.0
    straight_in = sum(one[0].status == 200 and one[0].due > full_at for one in tries)
    needed, given = [], []
    for place, one in enumerate(refused):
        told = one[0].last or 0.0
        turn = full_at + (straight_in + place + 1) / capacity
        needed.append(max(0.0, turn - told))
        given.append(one[0].retry_after or 0.0)
    return Comeback(
        refused=len(refused),
        let_in_at_first_return=sum(len(one) == 2 and one[1].status == 200 for one in refused),
        let_in=sum(one[-1].status == 200 for one in refused),
        given_mean=float(np.mean(given)),
        needed_mean=float(np.mean(needed)),
        returns_mean=float(np.mean([len(one) - 1 for one in refused])),
    )


async def refusal_cpu(server: Server, asker: Asker, requests: int) -> float:
    """The HTTP side's CPU seconds for one 429.

    Keeps the server full with long answers meanwhile.
    """
    await until_idle(asker.client)
    holders = [
        asyncio.create_task(
            asker.client.ask(
                post(prompt="x", max_tokens=500, ignore_eos=True, stream=True, temperature=0)
            )
        )
        for _ in range(2)
    ]
    while (await asker.client.ask(asker.body())).status != 429:
        await asyncio.sleep(0.05)
    bodies = [asker.body() for _ in range(requests)]
    before = held(server.api).cpu_seconds

    async def user(mine: list[bytes]) -> int:
        return sum([(await asker.client.ask(data)).status == 429 for data in mine])

    refused = sum(await asyncio.gather(*(user(bodies[part::8]) for part in range(8))))
    used = held(server.api).cpu_seconds - before
    for task in holders:
        task.cancel()
    await asyncio.gather(*holders, return_exceptions=True)
    if refused < 0.99 * requests:
        raise RuntimeError(f"only {refused} of {requests} were refused")
    return used / refused


def measure(
    backend: str,
    seconds: float,
    factors: tuple[float, ...] = FACTORS,
    cores: tuple[str, str] = ("0", "1"),
    refusals: int = 4000,
) -> dict[str, object]:
    """All of it, on servers of its own."""
    setup = SETUPS[backend]
    common = ("--cores", cores[0], "--api-cores", cores[1], "--threads", "1", "--context", "1024")

    async def levels(server: Server) -> tuple[float, list[Level], Comeback | None]:
        asker = Asker(setup, Client(server.port), seed=1)
        capacity = await asker.closed_loop(int(1.5 * setup.slots), max(3.0, seconds / 2))
        print(f"capacity: {capacity:.1f} requests/s in a closed loop", flush=True)
        found = []
        for factor in factors:
            found.append(await level(server, asker, capacity, factor, seconds))
            print(line(found[-1]), flush=True)
        back = await comeback(asker, capacity, min(5.0, seconds / 5))
        asker.client.close()
        return capacity, found, back

    async def refusal(server: Server) -> float:
        asker = Asker(setup, Client(server.port), seed=2)
        cost = await refusal_cpu(server, asker, refusals)
        asker.client.close()
        return cost

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        arguments = (
            *common,
            *setup.arguments,
            "--slots",
            str(setup.slots),
            "--ttft-slo",
            str(setup.slo_seconds),
        )
        with serving(setup.model, *arguments, folder=folder) as server, on_cores(cores[1]):
            capacity, found, back = run(levels(server))
        arguments = (*common, "--slots", "1", "--max-waiting", "1", "--option", "step_seconds=0.2")
        with serving("fake", *arguments, folder=folder) as server, on_cores(cores[1]):
            cost = run(refusal(server))
    if back is not None:
        print(
            f"comeback: {back.refused} refused, {back.let_in_at_first_return} let in at the first "
            f"return, {back.let_in} in the end "
            f"({back.returns_mean:.2f} returns each); Retry-After {back.given_mean:.2f} s on "
            f"average, needed {back.needed_mean:.2f} s"
        )
    print(f"a 429 costs the HTTP side {cost * 1e6:.0f} us of CPU")
    peak = max(one.goodput for one in found)
    verdicts = {
        "goodput at the highest load / peak >= 0.9": found[-1].goodput >= 0.9 * peak,
        "TTFT p99 of those let in <= SLO": all(one.ttft_p99 <= setup.slo_seconds for one in found),
        "this client kept up (send lag p99 under 50 ms)": all(
            one.send_lag_p99 < 0.05 for one in found
        ),
        "nothing failed": not any(one.failed for one in found),
    }
    for text, kept in verdicts.items():
        print(f"{'kept' if kept else 'MISSED'}: {text}")
    print(f"goodput at {found[-1].factor:g} x is {found[-1].goodput / peak:.1%} of the peak")
    return {
        "backend": backend,
        "setup": asdict(setup),
        "capacity": capacity,
        "levels": [asdict(one) for one in found],
        "comeback": None if back is None else asdict(back),
        "refusal_cpu_seconds": cost,
        "verdicts": verdicts,
    }


def line(one: Level) -> str:
    given = "-" if one.retry_after_mean is None else f"{one.retry_after_mean:.1f} s"
    return (
        f"{one.factor:4g} x: offered {one.offered}, let in {one.accepted}, refused {one.refused}, "
        f"failed {one.failed}, good {one.good}; "
        f"goodput {one.goodput:.1f}/s; TTFT p50 {one.ttft_p50 * 1000:.0f} ms, p99 "
        f"{one.ttft_p99 * 1000:.0f} ms; Retry-After {given}; "
        f"send lag p99 {one.send_lag_p99 * 1000:.0f} ms; "
        f"CPU of HTTP side {one.api_cpu_share:.0%}, client {one.client_cpu_share:.0%}; "
        f"RSS of HTTP side {mib(one.api_rss[0])} -> {mib(one.api_rss[1])}, engine "
        f"{mib(one.engine_rss[0])} -> {mib(one.engine_rss[1])}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--backend", choices=list(SETUPS), default="fake")
    parser.add_argument("--seconds", type=float, default=25.0, help="of each level")
    parser.add_argument("--engine-cores", default="0")
    parser.add_argument("--api-cores", default="1")
    parser.add_argument("--out", type=Path, help="the numbers as JSON")
    given = parser.parse_args()
    found = measure(given.backend, given.seconds, cores=(given.engine_cores, given.api_cores))
    if given.out:
        given.out.write_text(json.dumps(found, indent=1))
    verdicts = found["verdicts"]
    assert isinstance(verdicts, dict)
    return 0 if all(verdicts.values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())

"""The end of a server under load: who is served to the end, who is turned away, and how long it
takes.

    python -m tests.bench.pressure.drain [--backend fake|llama_cpp] [--out FILE]

  drain   SIGTERM while as much is in flight as there are slots, streams and whole answers, and 50
          kept connections lie idle. What was let in before must be complete; what is asked after
          must be a 503 with the code "draining", on new connections and kept ones; the exit status
          is 0 within the limit
  limit   the same with answers longer than --drain-timeout: they are cut off with an error event,
          exit status 1 soon after the limit
  twice   a second SIGTERM during the drain: everything is cut off now, exit status 1

A connection that is closed between the client's decision to use it and its first byte is nobody's
fault; it is told apart ("too late").
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from tests.bench.pressure.wire import Client, Outcome, Server, on_cores, post, run, serving

Found = dict[str, Any]


def long_answer(tokens: int, number: int) -> bytes:
    return post(
        prompt=f"hello {number}", max_tokens=tokens, stream=number % 3 != 0, ignore_eos=True
    )


async def scenario(
    server: Server,
    tokens: int,
    limit_seconds: float,
    twice: bool,
    in_flight: int = 16,
    kept: int = 50,
) -> Found:
    """Fill the server, then SIGTERM; a second one half a second later where `twice`.

    Everything that happened, counted.
    """
    loop = asyncio.get_running_loop()
    client = Client(server.port)
    idle = await asyncio.gather(*(client.ask(post(prompt="x", max_tokens=1)) for _ in range(kept)))
    assert all(one.status == 200 for one in idle), [one.status for one in idle]
    tasks = [
        asyncio.create_task(client.ask(long_answer(tokens, number))) for number in range(in_flight)
    ]
    await asyncio.sleep(1.0)
    os.kill(server.api, signal.SIGTERM)
    told = loop.time()
    late: list[asyncio.Task[Outcome]] = []

    async def come_late() -> None:
        """Requests after the signal, from kept connections and new ones in turn, until nobody
        listens any more.
        """
        while server.child.poll() is None:
            await asyncio.sleep(0.1)
            chosen = client if len(late) % 2 else Client(server.port)
            late.append(asyncio.create_task(chosen.ask(post(prompt="late", max_tokens=1))))

    coming = asyncio.create_task(come_late())
    if twice:
        await asyncio.sleep(0.5)
        os.kill(server.api, signal.SIGTERM)
    outcomes = await asyncio.gather(*tasks)
    last = max(one.last or told for one in outcomes)
    while server.child.poll() is None and loop.time() < told + limit_seconds + 30:
        await asyncio.sleep(0.01)
    ended = loop.time()
    coming.cancel()
    await asyncio.gather(coming, return_exceptions=True)
    answers = Counter(map(_kind, await asyncio.gather(*late, return_exceptions=True)))
    client.close()
    return {
        "in flight": in_flight,
        "complete": sum(one.status == 200 and one.complete for one in outcomes),
        "cut off": sum(not one.complete or one.status != 200 for one in outcomes),
        "exit status": server.child.poll(),
        "seconds from the signal to the end": ended - told,
        "seconds from the last answer to the end": ended - last,
        "asked after the signal": dict(answers),
    }


def _kind(outcome: Outcome | BaseException) -> str:
    if isinstance(outcome, BaseException) or outcome.status is None:
        return "too late"
    code = json.loads(outcome.body).get("error", {}).get("code", "") if outcome.body else ""
    return f"{outcome.status} {code}".strip()


def judge(found: Found, limit_seconds: float, what: str) -> bool:
    """Did that end as it should?"""
    seconds = found["seconds from the signal to the end"]
    turned_away = set(found["asked after the signal"]) <= {
        "503 draining",
        "503 stopped",
        "too late",
    }
    if what == "drain":
        refused = found["asked after the signal"].get("503 draining", 0) > 0
        return bool(
            found["cut off"] == 0
            and found["exit status"] == 0
            and seconds < limit_seconds
            and turned_away
            and refused
        )
    if what == "limit":
        return bool(
            found["exit status"] == 1
            and limit_seconds <= seconds < limit_seconds + 5
            and turned_away
        )
    return bool(found["exit status"] == 1 and seconds < 5 and turned_away)


def measure(
    what: str,
    backend: str = "fake",
    cores: tuple[str, str] = ("0", "1"),
    tokens: int = 150,
    limit_seconds: float = 60.0,
) -> Found:
    """One ending of a server of its own, told on standard output.

    `tokens` of each answer: some seconds of work.
    """
    limit = 2.0 if what == "limit" else limit_seconds
    tokens = tokens if what == "drain" else 900
    common = [
        "--cores",
        cores[0],
        "--api-cores",
        cores[1],
        "--threads",
        "1",
        "--slots",
        "16",
        "--context",
        "1024",
    ]
    common += ["--drain-timeout", str(limit)]
    chosen = (
        ["fake", "--option", "step_seconds=0.02"]
        if backend == "fake"
        else ["smollm2-135m", "--backend", backend, "--format", "Q4_0"]
    )
    with (
        tempfile.TemporaryDirectory() as folder,
        serving(chosen[0], *chosen[1:], *common, folder=Path(folder)) as server,
        on_cores(cores[1]),
    ):
        found = run(scenario(server, tokens, limit, what == "twice"))
        found["server said"] = server.log().splitlines()[-3:]
    found["kept"] = judge(found, limit, what)
    print(f"{backend}, {what}: {'kept' if found['kept'] else 'MISSED'}")
    for name, value in found.items():
        print(
            f"  {name}: {value:.2f}" if isinstance(value, float) else f"  {name}: {value}",
            flush=True,
        )
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--backend", choices=["fake", "llama_cpp"], default="fake")
    parser.add_argument("--engine-cores", default="0")
    parser.add_argument("--api-cores", default="1")
    parser.add_argument("--out", type=Path, help="the numbers as JSON")
    given = parser.parse_args()
    cores = (given.engine_cores, given.api_cores)
    found = {what: measure(what, given.backend, cores) for what in ("drain", "limit", "twice")}
    if given.out:
        given.out.write_text(json.dumps(found, indent=1))
    return 0 if all(one["kept"] for one in found.values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())

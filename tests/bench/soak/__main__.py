"""Soak under attack: normal traffic alone, beside polite clients, beside attackers, in turns.

    python -m tests.bench.soak --alone-minutes 10 --minutes 30 --out soak.json
    python -m tests.bench.soak --backend fake --alone-minutes 0.5 --polite-minutes 0 --minutes 0.5
    python -m tests.bench.soak --alone-minutes 2 --minutes 2 --only grammars   # one attack

Normal traffic are streamed completions with Poisson arrivals at half of the capacity, which is
that of a closed loop over all slots, or `--rate` gives the rate. TTFT counts from the moment a
request was due. The attackers (tests.bench.soak.attackers states what they do and how often) are
one process at nice 19. Polite phases have clients that behave and ask the model for as much as
the attackers: what is worse beside attackers than beside those is the attack. Turns tell attackers
from a machine that changes its speed. Kept is:

  TTFT     p99 beside attackers / p99 alone at most 2
  lost     none of the normal requests, in either phase: each is a 200 that ends as it should
  memory   RSS of the HTTP process and of the engine, helpers counted with whom started them, the
           least of each minute (a body of megabytes is held while it is read), after the first
           sixth of the attack: the upper end of the 95 % interval of the slope
           (tests.bench.pressure.trend), times the time, at most MOST_GROWTH_BYTES
  at rest  descriptors, threads and event-loop tasks afterwards are no more than before
  engine   the same process from beginning to end

Ctrl-C ends it, and what was measured is printed and written all the same.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from loadtests.host.child_processes import Child
from models.isolated import python_path
from tests.bench.pressure.wire import Server, run, serving
from tests.bench.soak.attackers import TOKENS_PER_SECOND
from tests.bench.soak.report import printed, verdicts
from tests.bench.soak.traffic import OUTPUT_TOKENS, Phase, Soak

SERVERS = {
    "fake": ("fake", "--option", "step_seconds=0.02", "--option", "row_seconds=0.001"),
    "llama_cpp": ("smollm2-135m", "--backend", "llama_cpp", "--format", "Q4_0"),
}
SLOTS = 16
WARM_UP_SECONDS = 10.0


async def phases(soak: Soak, server: Server, options: argparse.Namespace, folder: Path) -> None:
    """Everything in its order, into `soak`."""
    await soak.closed_loop(SLOTS, min(5.0, options.search_seconds))  # what is made once is made
    await soak.first_grammar()
    soak.capacity = options.rate and 2 * options.rate
    if soak.capacity is None:
        soak.capacity = await soak.closed_loop(SLOTS, options.search_seconds)
    if not soak.capacity > 0:
        raise RuntimeError(
            f"no request ended in {options.search_seconds:g} s of the closed loop: the machine is "
            "too busy, or --search-seconds too short"
        )
    rate = options.share * soak.capacity
    print(
        f"capacity {soak.capacity:.2f} requests/s of {OUTPUT_TOKENS} tokens; normal traffic "
        f"{rate:.2f}/s; attackers cause about {TOKENS_PER_SECOND:.0f} tokens/s of "
        f"{soak.capacity * OUTPUT_TOKENS:.0f}",
        flush=True,
    )
    soak.before = await soak.at_rest()
    soak.began = asyncio.get_running_loop().time()
    watching = asyncio.create_task(soak.watch(options.every))
    await soak.traffic("warm-up", rate, min(WARM_UP_SECONDS, 6 * options.alone_minutes))
    beside: list[tuple[Phase, str, float]] = [
        ("alone", "", options.alone_minutes),
        ("polite", "polite", options.polite_minutes),
        ("attacked", options.only, options.minutes),
    ]
    try:
        for turn in range(options.turns):
            for phase, name, minutes in beside:
                seconds = 60 * minutes / options.turns
                if phase == "alone":
                    await soak.traffic(phase, rate, seconds)
                elif seconds > 0:
                    log = folder / f"{phase}-{turn}.log"
                    await beside_others(soak, phase, rate, seconds, name, log)
    finally:
        watching.cancel()
    soak.after = await soak.at_rest()


async def beside_others(
    soak: Soak, phase: Phase, rate: float, seconds: float, name: str, log: Path
) -> None:
    """Normal traffic while another process attacks, or asks politely."""
    command = [sys.executable, "-m", "tests.bench.soak.attackers", str(soak.server.port), name]
    with Child(command, log=log, environment={"PYTHONPATH": python_path()}) as others:
        soak.attackers = others.pid
        try:
            await soak.traffic(phase, rate, seconds)
        finally:
            soak.attackers = None
            others.stop()
            if phase == "attacked":
                soak.add_attacks(read_attacks(log))


def read_attacks(log: Path) -> dict[str, dict[str, int]]:
    """What the attackers printed in the end. Raises RuntimeError where they died before it."""
    lines = log.read_text().splitlines()
    try:
        found: dict[str, dict[str, int]] = json.loads(lines[-1])
    except (IndexError, ValueError):
        raise RuntimeError(f"the attackers failed: {lines[-1:]}") from None
    return found


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--backend", choices=list(SERVERS), default="llama_cpp")
    parser.add_argument("--alone-minutes", type=float, default=10.0)
    parser.add_argument("--minutes", type=float, default=30.0, help="with attackers beside")
    parser.add_argument("--polite-minutes", type=float, default=10.0)
    parser.add_argument("--turns", type=int, default=3, help="of alone and attacked")
    parser.add_argument("--only", default="", help="attacks whose name has this")
    parser.add_argument("--rate", type=float, help="requests/s; without it half the capacity")
    parser.add_argument("--share", type=float, default=0.5, help="of the capacity")
    parser.add_argument("--search-seconds", type=float, default=60.0, help="of the closed loop")
    parser.add_argument("--every", type=float, default=5.0, help="seconds between samples")
    parser.add_argument("--out", type=Path, help="everything as JSON")
    options = parser.parse_args()
    if options.rate is not None:
        options.share = 0.5
    return options


def main() -> int:
    options = parsed()
    model, *arguments = SERVERS[options.backend]
    with (
        tempfile.TemporaryDirectory() as name,
        serving(model, "--slots", str(SLOTS), *arguments, folder=Path(name)) as server,
    ):
        soak = Soak(server)
        try:
            run(phases(soak, server, options, Path(name)))
        except KeyboardInterrupt:
            print("interrupted; what was measured until then:")
        finally:
            print(printed(soak))
            kept = verdicts(soak)
            for text, is_kept in kept.items():
                print(f"{'kept' if is_kept else 'MISSED'}: {text}", flush=True)
            if options.out:
                found = {
                    "capacity": soak.capacity,
                    "requests": [asdict(one) for one in soak.requests],
                    "samples": [asdict(one) for one in soak.samples],
                    "attacks": soak.attacks,
                    "server_log": server.log()[-20_000:],
                }
                options.out.write_text(json.dumps(found))
    return 0 if kept and all(kept.values()) else 1


if __name__ == "__main__":
    sys.exit(main())

"""One comparison: players that take turns at the same workload, a new set of prompts each round,
every run kept.

A player is a function from a job to its figures: a child process that was asked (`in_process`), or
a server that was sent the requests (tests.bench.peers.crossover_http).

Workloads, for n at once:
  once       n requests at the same moment: the best case of an engine with static batches
  staggered  2 n requests, the next one after a 1/n of the time that a request takes alone: they
  join while others decode, and a static
             batch makes them wait for its end
  uneven     as staggered, with answers of a quarter to seven quarters of --output: a static batch
             goes on until its longest is whole
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from tests.bench.paired import Figures, Line, Series, machine, machine_line, table, take_turns
from tests.bench.peers.jobs import Child, Job, figures, make_job

Player = Callable[[Job], Figures]
LINES = (
    Line("output_tokens_per_second", "tokens/s"),
    Line("decode_tokens_per_second", "tokens/s"),
    Line("ttft_p50_seconds", "ms", 1e3),
    Line("ttft_max_seconds", "ms", 1e3),
    Line("itl_p50_seconds", "ms", 1e3),
    Line("itl_p99_seconds", "ms", 1e3),
)


KINDS = ("once", "staggered", "uneven")


class Workload(NamedTuple):
    """How many at once, and how they come: one of KINDS."""

    kind: str
    batch: int

    def longest(self, output_tokens: int) -> int:
        """Tokens of the longest answer."""
        return round(output_tokens * (1 + self.spread))

    @property
    def spread(self) -> float:
        return 0.75 if self.kind == "uneven" else 0.0

    @property
    def requests(self) -> int:
        return self.batch if self.kind == "once" else 2 * self.batch

    def __str__(self) -> str:
        return f"{self.batch} {self.kind}"


def workload(text: str) -> Workload:
    """From "8" or "8:staggered"."""
    batch, _, kind = text.partition(":")
    if kind not in ("", *KINDS) or not batch.isdigit() or int(batch) < 1:
        raise argparse.ArgumentTypeError(
            f"a workload is N or N:KIND with a KIND of {', '.join(KINDS)}, got {text!r}"
        )
    return Workload(kind or "once", int(batch))


def add_options(parser: argparse.ArgumentParser, workloads: list[str], packages: str) -> None:
    """The options that all comparisons have."""
    parser.add_argument(
        "--workloads",
        type=workload,
        nargs="+",
        default=[workload(one) for one in workloads],
        metavar="N[:KIND]",
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompt", type=int, default=256, help="tokens of a prompt")
    parser.add_argument("--output", type=int, default=64, help="tokens of an answer")
    parser.add_argument(
        "--cores", type=int, nargs="+", default=[0], help="of every engine, one thread each"
    )
    parser.add_argument(
        "--json", type=Path, help="keeps every run; one that is there is gone on with"
    )
    parser.set_defaults(packages=packages.split())


def room(arguments: argparse.Namespace) -> tuple[int, int]:
    """Slots, and the context tokens of each, that hold every workload."""
    longest = max(one.longest(arguments.output) for one in arguments.workloads)
    return max(one.batch for one in arguments.workloads), -(
        -(arguments.prompt + longest) // 64
    ) * 64


def in_process(child: Child) -> Player:
    """A player in a child process."""
    return lambda job: figures(job, child.ask(job))


def compete(
    players: Mapping[str, Player],
    ours: str,
    vocabulary: int,
    arguments: argparse.Namespace,
    settings: dict[str, Any],
) -> None:
    """All workloads, `arguments.rounds` rounds each; prints a table per workload and keeps the
    runs.
    """
    facts = machine(*arguments.packages)
    print(machine_line(facts), flush=True)
    shape = {"prompt": arguments.prompt, "output": arguments.output, "cores": arguments.cores}
    series = Series.opened(arguments.json, {**settings, **shape}, facts)
    alone: float | None = None
    for one in arguments.workloads:
        done = len(next(iter(series.runs.get(str(one), {"": []}).values())))

        def job(gap: float, count: int, seed: int, one: Workload = one) -> Job:
            spread = one.spread if count > 1 else 0.0
            return make_job(
                count, arguments.prompt, arguments.output, one.batch, gap, vocabulary, seed, spread
            )

        for player in players.values():  # first touches, and how long a request takes alone
            found = player(job(0.0, 1, 10**6 + done))["seconds"]
            alone = found if alone is None or player is players[ours] else alone
        assert alone is not None
        gap = 0.0 if one.kind == "once" else alone / one.batch

        def turn(player: Player, number: int, one: Workload = one, gap: float = gap) -> Figures:
            return {
                **player(job(gap, one.requests, number)),
                "gap_seconds": gap,
            }  # the same prompts for all players of a round

        turns = {name: partial(turn, player) for name, player in players.items()}
        for number in range(
            done, done + arguments.rounds
        ):  # kept round by round: what is cut off is not lost
            runs = series.add(
                str(one), take_turns(turns, 1, lambda text: print(text, flush=True), number)
            )
            series.save(arguments.json)
        rounds = len(runs[ours])
        print(
            f"{one}, prompts of {arguments.prompt}, outputs of {arguments.output}, {rounds} rounds "
            f"(medians; ratio = {ours} / the other):"
        )
        print(table(runs, ours, LINES), flush=True)

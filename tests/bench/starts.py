"""How long the commands take to start: this checkout and another one, in turns, in one environment.

    python -m tests.bench.starts --before CHECKOUT --pairs 15

For each command the median of its runs with quartiles, in seconds of wall clock and of CPU (of all
its processes), and the median of the pairs' ratios. "until ready" ends when the ready file is
there; `load` sends 2 s of 5 requests/s to one `serve fake` of this checkout. A first run of each
command is not counted: it compiles files.

Where the two checkouts pin a package differently, this one's is installed by `pip install --no-deps
--target FOLDER`, and STARTS_PACKAGES=FOLDER puts it before the environment's for this checkout.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import psutil

from tests.bench.paired import Figures, Runs, machine, machine_line, ratios, take_turns

HERE = Path(__file__).resolve().parents[2]
ENTRY = ("-c", "import crossover; crossover.main()")
PAGES = {"crossover --help": ["--help"]} | {
    f"crossover {verb} --help": [verb, "--help"] for verb in ("serve", "load", "campaign", "report")
}
WALL, CPU = "wall_seconds", "cpu_seconds"
READY_PATIENCE_SECONDS = 60.0
PACKAGES_VARIABLE = "STARTS_PACKAGES"


def started(checkout: Path, words: list[str], folder: str) -> subprocess.Popen[bytes]:
    """`crossover WORDS` of a checkout, in `folder`, its output dropped."""
    path = [str(checkout)]
    if checkout == HERE and (packages := os.environ.get(PACKAGES_VARIABLE)):
        path.append(packages)
    return subprocess.Popen(
        [sys.executable, *ENTRY, *words],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(path)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def whole(checkout: Path, words: list[str]) -> Figures:
    """`crossover WORDS` from start to exit. Raises ChildProcessError for a failure."""
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        _, status, used = os.wait4(started(checkout, words, folder).pid, 0)
        took = time.perf_counter() - began
    if status != 0:
        raise ChildProcessError(f"{' '.join(words)} of {checkout} ended with status {status}")
    return {WALL: took, CPU: used.ru_utime + used.ru_stime}


@contextlib.contextmanager
def serving(checkout: Path) -> Iterator[tuple[str, Figures]]:
    """A `serve fake`: its URL, and its figures from its start to its ready file."""
    with tempfile.TemporaryDirectory() as folder:
        ready = Path(folder) / "ready.json"
        words = ["serve", "fake", "--port", "0", "--ready-file", str(ready)]
        began = time.perf_counter()
        server = started(checkout, words, folder)
        try:
            while not ready.exists():
                if (
                    server.poll() is not None
                    or time.perf_counter() - began > READY_PATIENCE_SECONDS
                ):
                    raise ChildProcessError(f"serve fake of {checkout} did not become ready")
                time.sleep(0.002)
            took = time.perf_counter() - began
            parent = psutil.Process(server.pid)
            used = [one.cpu_times() for one in (parent, *parent.children(recursive=True))]
            cpu = sum(sum(times[:4]) for times in used)  # user and system, own and reaped children
            yield msgspec.json.decode(ready.read_bytes())["url"], {WALL: took, CPU: cpu}
        finally:
            server.terminate()
            server.wait()


def until_ready(checkout: Path) -> Figures:
    """`serve fake` from its start to its ready file."""
    with serving(checkout) as (_, figures):
        return figures


def measured(checkouts: dict[str, Path], pairs: int, only: str) -> dict[str, Runs]:
    """The runs of every command whose name contains `only`, by command and checkout."""
    found: dict[str, Runs] = {}
    with serving(HERE) as (url, _):
        level = ["load", url, "--rate", "5", "--duration", "2"]
        commands: dict[str, Callable[[Path], Figures]] = {
            name: lambda checkout, words=words: whole(checkout, words)
            for name, words in PAGES.items()
        }
        commands["serve fake until ready"] = until_ready
        commands["load, 2 s at 5/s, whole"] = lambda checkout: whole(checkout, level)
        for name, run in commands.items():
            if only not in name:
                continue
            for checkout in checkouts.values():
                run(checkout)
            contestants = {
                label: lambda _, checkout=checkout, run=run: run(checkout)
                for label, checkout in checkouts.items()
            }
            found[name] = take_turns(contestants, pairs)
            print(row(name, found[name]), flush=True)
    return found


def row(name: str, runs: Runs) -> str:
    """One row: of each checkout, then the ratios of the pairs; wall clock, then CPU."""
    cells = []
    for key in (WALL, CPU):
        series = [
            [value for one in figures if (value := one[key]) is not None]
            for figures in runs.values()
        ]
        if len(runs) == 2:
            before, now = runs.values()
            series.append(ratios(now, before, key))
        for values in series:
            low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
            cells.append(f"{middle:.2f} ({low:.2f}-{high:.2f})")
    return f"| {name} | {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--before", type=Path, help="another checkout; without it only this one")
    parser.add_argument("--pairs", type=int, default=15, help="runs of each command; at least 2")
    parser.add_argument("--only", default="", help="commands whose name contains this")
    asked = parser.parse_args()
    checkouts = {} if asked.before is None else {"before": asked.before.resolve()}
    checkouts["now"] = HERE
    print(machine_line(machine()))
    figures = [*checkouts, *(["now / before"] if len(checkouts) == 2 else [])]
    columns = [f"{kind}: {figure}" for kind in ("wall", "CPU") for figure in figures]
    print(f"| command, s | {' | '.join(columns)} |")
    print("|---" * (1 + len(columns)) + "|")
    measured(checkouts, asked.pairs, asked.only)


if __name__ == "__main__":
    main()

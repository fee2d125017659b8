"""How long the commands take to start: this checkout and another one, in turns, in one environment.

    python -m tests.bench.starts --before CHECKOUT --pairs 15

For each command the median of its runs with quartiles, in seconds of wall clock and of CPU (of all
its processes), and the median of the pairs' ratios. "until ready" ends when the ready file is
there; `load` sends 2 s of 5 requests/s to a `serve fake` of this checkout. A first run of each
command is not counted: it compiles files.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from tests.bench.paired import Figures, machine, machine_line, ratios

HERE = Path(__file__).resolve().parents[2]
PATIENCE_SECONDS = 60.0
READY = "serve fake until ready"
WALL, CPU = "wall_seconds", "cpu_seconds"


def started(checkout: Path, words: list[str], folder: str) -> subprocess.Popen[bytes]:
    """`crossover WORDS` of a checkout, in `folder`, its output dropped."""
    return subprocess.Popen(
        [sys.executable, "-m", "crossover", *words],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(checkout)},
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
                if server.poll() is not None or time.perf_counter() - began > PATIENCE_SECONDS:
                    raise ChildProcessError(f"serve fake of {checkout} did not become ready")
                time.sleep(0.002)
            took = time.perf_counter() - began
            parent = psutil.Process(server.pid)
            used = [one.cpu_times() for one in (parent, *parent.children(recursive=True))]
            cpu = sum(sum(times[:4]) for times in used)  # user and system, own and reaped children
            yield json.loads(ready.read_bytes())["url"], {WALL: took, CPU: cpu}
        finally:
            server.terminate()
            server.wait()


def row(name: str, runs: dict[Path, list[Figures]]) -> str:
    """One row: of each checkout, then the ratios of the pairs; wall clock, then CPU."""
    cells = []
    for key in (WALL, CPU):
        series = [[one[key] or 0.0 for one in figures] for figures in runs.values()]
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
    options = parser.parse_args()
    checkouts = [*([options.before.resolve()] if options.before else []), HERE]
    print(machine_line(machine()))
    figures = ["before", "now", "now / before"] if options.before else ["now"]
    columns = [f"{kind}: {figure}" for kind in ("wall", "CPU") for figure in figures]
    print(f"| command, s | {' | '.join(columns)} |")
    print("|---" * (1 + len(columns)) + "|")
    verbs = ("", "serve", "load", "campaign", "report")
    commands = {" ".join(["crossover", v, "--help"]): [*v.split(), "--help"] for v in verbs}
    with serving(HERE) as (url, _):
        commands[READY] = [READY]
        commands["load, 2 s at 5/s, whole"] = ["load", url, "--rate", "5", "--duration", "2"]
        for name, words in commands.items():
            if options.only not in name:
                continue
            runs: dict[Path, list[Figures]] = {checkout: [] for checkout in checkouts}
            for number in range(options.pairs + 1):
                for checkout in reversed(checkouts) if number % 2 else checkouts:
                    if words == [READY]:
                        with serving(checkout) as (_, found):
                            pass
                    else:
                        found = whole(checkout, words)
                    if number:
                        runs[checkout].append(found)
            print(row(name, runs), flush=True)


if __name__ == "__main__":
    main()

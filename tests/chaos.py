"""Kills at random moments of short campaigns: nothing is orphaned, lost, or found to be different.

    python -m tests.chaos --seed 7                  # one campaign, a minute
    python -m tests.chaos --minutes 60              # one after the other: `make soak`

A campaign of two fixed rates on the fake engine runs as a user's command. Every few seconds one of
its processes, chosen by the seed, gets SIGKILL: the command itself, the server's API, its engine,
or the load generator. A command that ended is continued by `crossover campaign resume`. After the
last kill it has time to end well. Then the folder must be whole (each level measured once, every
request on record), each rate must have the verdict of a campaign that nobody disturbed, and no
process of it may be left.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter
from pathlib import Path

import psutil

from crossover.loadtests.host.resource_sampler import family
from crossover.loadtests.levels.level_columns import levels_of
from crossover.loadtests.records.journal_events import RunFinished
from crossover.loadtests.records.run_folder import read_records
from crossover.serving.capacity.slo import Slo
from tests.loadtests.campaign.checks import check_folder
from tests.tools.waiting import wait_for

ROOT = Path(__file__).resolve().parents[1]
# At 4 requests/s the fake engine of two slots answers at once, at 40 it has an endless queue.
CAMPAIGN = """
name = "chaos"
disturbance = "ignore"
models = ["135m"]
backends = ["fake"]
workload = { prompt_tokens = 24, output_tokens = 8 }
slo = { ttft_seconds = 0.8, target = 0.7 }
[server]
slots = 2
context_tokens = 128
options = { step_seconds = 0.02 }
[search]
rates = [4.0, 40.0]
level_seconds = 2.5
single_stream_requests = 3
"""
SLO = Slo("chaos", ttft_seconds=0.8, target=0.7)
VERDICTS = {4.0: True, 40.0: False}
KILLS = 4
MAX_STARTS = 4 * KILLS  # of the command: each kill may end it, and cost a cell one more start


class Chaos:
    """One campaign, and what happened to it."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder, self.random = folder, random.Random(seed)
        self.mark = uuid.uuid4().hex  # in the environment of all of its processes
        self.killed: Counter[str] = Counter()
        self.starts = 0

    def run(self) -> Path:
        """Run the campaign to its end through all kills; return its run folder."""
        file = self.folder / "chaos.toml"
        file.write_text(CAMPAIGN)
        runs = self.folder / "runs"
        command = ["run", str(file), "--out", str(runs)]
        while self.starts < MAX_STARTS:
            self.starts += 1
            runner = self._start(command)
            try:
                status = self._kill_until_it_ends(runner)
            finally:
                runner.kill()
                runner.wait()
            found = list(runs.glob("*/events.jsonl"))
            if found:
                command = ["resume", str(found[0].parent)]
            if status == 0 and sum(self.killed.values()) >= KILLS:
                return found[0].parent
            if status == 0:  # it ended before the last kill: the next one has a run of its own
                command = ["run", str(file), "--out", str(runs := self.folder / str(self.starts))]
        raise AssertionError(f"not complete after {self.starts} starts: {self.log.read_text()}")

    @property
    def log(self) -> Path:
        return self.folder / "log"

    def _start(self, words: list[str]) -> subprocess.Popen[bytes]:
        with open(self.log, "ab") as output:
            return subprocess.Popen(
                [sys.executable, "-m", "crossover", "campaign", *words],
                cwd=ROOT,
                env=os.environ | {"CROSSOVER_CHAOS": self.mark},
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
            )

    def _kill_until_it_ends(self, runner: subprocess.Popen[bytes]) -> int:
        """Kill one process of the command every few seconds; return the command's status."""
        while sum(self.killed.values()) < KILLS:
            try:
                return runner.wait(self.random.uniform(1.0, 6.0))
            except subprocess.TimeoutExpired:
                self._kill_one(runner.pid)
        return runner.wait(300)

    def _kill_one(self, runner: int) -> None:
        by_kind: dict[str, list[psutil.Process]] = {}
        for pid in family(runner):
            try:
                process = psutil.Process(pid)
                by_kind.setdefault(kind_of(process), []).append(process)
            except psutil.Error:  # it has just ended
                continue
        kind = self.random.choice(sorted(by_kind))
        process = self.random.choice(sorted(by_kind[kind], key=lambda process: process.pid))
        try:
            process.send_signal(signal.SIGKILL)
        except psutil.NoSuchProcess:
            return
        self.killed[kind] += 1

    def processes(self) -> list[psutil.Process]:
        """Return the processes of the campaign that still run."""
        return [process for process in psutil.process_iter() if self._is_ours(process)]

    def _is_ours(self, process: psutil.Process) -> bool:
        try:
            is_running = process.status() != psutil.STATUS_ZOMBIE
            return is_running and process.environ().get("CROSSOVER_CHAOS") == self.mark
        except psutil.Error:
            return False

    def check(self, folder: Path) -> None:
        """Raise AssertionError unless everything holds that the module promises."""
        wait_for(lambda: not self.processes(), 10)
        check_folder(folder)
        records = read_records(folder)
        assert isinstance(records.events[-1], RunFinished)
        levels = [level for level in levels_of(records) if level.name in records.finished_levels]
        shares = {level.started.plan.rate: level.judge(SLO).share for level in levels}
        for rate, meets in VERDICTS.items():
            share = shares[rate]
            assert share is not None and (share >= SLO.target) == meets, (rate, share)


def kind_of(process: psutil.Process) -> str:
    """Return what a process is by its command: "engine", "load generator", "API", "command" or
    "other"."""
    words = " ".join(process.cmdline())
    kinds = {
        "crossover.serving.engine": "engine",
        "locustfile.py": "load generator",
        "crossover serve": "API",
        "crossover campaign": "command",
    }
    return next((kind for text, kind in kinds.items() if text in words), "other")


def main() -> int:
    """Run campaigns until the time is over, and print what each went through."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--seed", type=int, default=0, help="of the first campaign")
    options.add_argument("--minutes", type=float, default=0.0, help="0: one campaign")
    arguments = options.parse_args()
    began, seed, killed = time.monotonic(), arguments.seed, Counter[str]()
    while True:
        with tempfile.TemporaryDirectory() as folder:
            chaos = Chaos(Path(folder), seed)
            chaos.check(chaos.run())
        killed += chaos.killed
        minutes = (time.monotonic() - began) / 60
        kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(killed.items()))
        print(f"{minutes:5.1f} min: seed {seed} holds after {chaos.starts} starts; killed {kinds}")
        seed += 1
        if minutes >= arguments.minutes:
            return 0


if __name__ == "__main__":
    sys.exit(main())

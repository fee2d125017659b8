"""A contestant in a process of its own, driven by lines of JSON: load once, then one job after the
other, on cores of its own.

    with Child([sys.executable, "-m", "tests.bench.peers.bandwidth"], settings, cores=[0]) as child:
        answer = child.ask(job)
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
Job = dict[str, Any]


def answer_jobs(
    load: Callable[[dict[str, Any]], tuple[dict[str, Any], Callable[[Job], Any]]],
) -> None:
    """The child's side: `load(settings)` gives facts and a function from a job to its
    answer.

    The protocol has the real standard output; whatever libraries print goes to standard error.
    """
    wire = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    facts, run = load(json.loads(sys.argv[1]))
    for answer in itertools.chain([facts], (run(json.loads(line)) for line in sys.stdin)):
        wire.write(json.dumps(answer) + "\n")
        wire.flush()


class Child:
    """The parent's side: the process for as long as the block runs.

    `facts`: what it said of itself once it had loaded.
    """

    def __init__(
        self,
        command: Sequence[str],
        settings: Mapping[str, Any],
        cores: Sequence[int],
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._log = tempfile.TemporaryFile("w+")
        threads = str(len(cores))
        self._process = subprocess.Popen(
            ["taskset", "-c", ",".join(map(str, cores)), *command, json.dumps(settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            cwd=ROOT,
            env={
                **os.environ,
                "OMP_NUM_THREADS": threads,
                "MKL_NUM_THREADS": threads,
                "HF_HUB_OFFLINE": "1",
                **(environment or {}),
            },
        )
        try:
            self.facts: dict[str, Any] = self._read()
        except BaseException:
            self.__exit__()
            raise

    def ask(self, job: Mapping[str, Any]) -> Any:
        """The child's answer to one job.

        Raises RuntimeError with the end of its log where it died.
        """
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(job) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # what it died of is in its log
        return self._read()

    def _read(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._process.wait()
            self._log.seek(0)
            raise RuntimeError(
                f"{self._process.args!r} ended with status "
                f"{self._process.returncode}:\n{self._log.read()[-3000:]}"
            )
        return json.loads(line)

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._log):
            if stream is not None:
                try:
                    stream.close()
                except BrokenPipeError:
                    pass

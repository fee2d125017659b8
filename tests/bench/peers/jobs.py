"""A contestant in a process of its own, driven by lines of JSON: load once, then one job after the
other, on cores of its own.

    with Child([sys.executable, "-m", "tests.bench.peers.engine_steps"], {"folder": ...},
    cores=[0]) as child:
        answer = child.ask(job)

A job is a list of requests (`Job`): when each arrives, what its prompt is, how many tokens it
wants. The answer is when each of its tokens was there, on the child's clock from the start of the
job. What follows from these times (`figures`) is computed once, for all contestants alike. Only the
standard library is imported here, so that peers in other environments can.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
# Of each request arrivals (seconds), prompts (token ids), outputs (tokens); batch: most at once.
Job = dict[str, Any]
Times = list[
    list[float]
]  # by request: when each token was there, seconds from the start of the job
RunBatch = Callable[[list[list[int]], int, Callable[[], float]], list[float]]


def make_job(
    count: int,
    prompt_tokens: int,
    output_tokens: int,
    batch: int,
    gap_seconds: float,
    vocabulary: int,
    seed: int,
    spread: float = 0.0,
) -> Job:
    """`count` requests with prompts of random tokens, `gap_seconds` apart; 0: all at once.

    `spread`: 0 for answers of `output_tokens`, else evenly from (1 - spread) to (1 + spread) times
    that, in a random order.
    """
    draw = random.Random(seed)
    outputs = [
        round(output_tokens * (1 + spread * (2 * (index + 0.5) / count - 1)))
        for index in range(count)
    ]
    draw.shuffle(outputs)
    return {
        "arrivals": [index * gap_seconds for index in range(count)],
        "prompts": [
            [draw.randrange(3, vocabulary) for _ in range(prompt_tokens)] for _ in range(count)
        ],
        "outputs": outputs,
        "batch": batch,
    }


def figures(job: Job, times: Times) -> dict[str, float | None]:
    """What a job's times say. Rates in tokens per second, times in seconds.

    output_tokens_per_second: all tokens over the time from the first arrival to the last token.
    decode_tokens_per_second: tokens made while every request of the job was decoding (after the
    last first token, before the first end), over that time; None where that never was so.
    """
    if [len(each) for each in times] != job["outputs"]:
        raise RuntimeError(
            f"{[len(each) for each in times]} tokens came back, {job['outputs']} were asked for"
        )
    first = [each[0] - arrival for each, arrival in zip(times, job["arrivals"], strict=True)]
    gaps = sorted(b - a for each in times for a, b in zip(each, each[1:], strict=False))
    begin, end = max(each[0] for each in times), min(each[-1] for each in times)
    inside = sum(begin < at <= end for each in times for at in each)
    last = max(each[-1] for each in times)
    return {
        "output_tokens_per_second": sum(map(len, times)) / (last - job["arrivals"][0]),
        "decode_tokens_per_second": inside / (end - begin) if inside >= 4 * len(times) else None,
        "ttft_p50_seconds": statistics.median(first),
        "ttft_max_seconds": max(first),
        "itl_p50_seconds": statistics.median(gaps),
        "itl_p99_seconds": gaps[min(len(gaps) - 1, int(0.99 * len(gaps)))],
        "seconds": last,
    }


def static_batches(job: Job, run_batch: RunBatch) -> Times:
    """Serve a job as an engine without continuous batching must: whoever is there when the last
    batch has ended, at most `batch` of them.

    `run_batch(prompts, output_tokens, clock)` gives the times of a batch's steps, one token for
    everybody each. It goes on until the longest answer is whole; what the others make beyond theirs
    is not counted.
    """
    started = time.perf_counter()

    def clock() -> float:
        return time.perf_counter() - started

    times: Times = []
    arrivals = job["arrivals"]
    while len(times) < len(arrivals):
        wait_until(arrivals[len(times)], clock)
        now = clock()
        most = min(len(arrivals), len(times) + job["batch"])
        due = max(len(times) + 1, sum(at <= now for at in arrivals[:most]))
        outputs = job["outputs"][len(times) : due]
        steps = run_batch(job["prompts"][len(times) : due], max(outputs), clock)
        times += [steps[:wanted] for wanted in outputs]
    return times


def wait_until(due: float, clock: Callable[[], float]) -> None:
    """Sleep until the job's clock has come to `due`."""
    left = due - clock()
    if left > 0:
        time.sleep(left)


def answer_jobs(
    load: Callable[[dict[str, Any]], tuple[dict[str, Any], Callable[[Job], Any]]],
) -> None:
    """The child's side: `load(settings)` gives facts and a function from a job to its times (or any
    other answer).

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

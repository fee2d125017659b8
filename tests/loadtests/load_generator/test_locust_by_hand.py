"""Locust as people start it, from a folder that holds none of our packages."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from crossover import loadtests
from crossover.serving.workload.arrivals import Poisson, due_times

LOCUSTFILE = Path(loadtests.__file__).parent / "locustfile.py"


def locust(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "locust", "-f", LOCUSTFILE, "--headless", "--json", *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(LOCUSTFILE.parents[2])},
        capture_output=True,
        text=True,
        timeout=90,
    )


def test_headless_locust_sends_when_due_and_counts_each_request_once(
    truth_server: Callable[..., str], tmp_path: Path
) -> None:
    """Those on their way at the end of --run-time too; failures are failures."""
    url = truth_server(ttft=0.3, gap=0.01, fail="status:500", fail_every=4, case="by hand")
    done = locust(tmp_path, "--host", url, *"--rate 20 --run-time 2 --workload 16x4".split())
    assert done.returncode == 1, done.stderr[-2000:]  # Locust's own, where requests failed
    (seen,) = json.loads(done.stdout)
    assert seen["name"] == "answer, from scheduled time to end"
    assert seen["num_requests"] == len(due_times(Poisson(), 20.0, 2.0, 1))
    assert 0 < seen["num_failures"] < seen["num_requests"] / 2
    assert 330 <= seen["max_response_time"] < 5000


@pytest.mark.clock  # workers that start late send less
def test_workers_share_the_rate_and_send_to_the_host_of_their_command(
    truth_server: Callable[..., str], tmp_path: Path
) -> None:
    url = truth_server(ttft=0.05, case="workers")
    words = "--rate 30 --run-time 2 --workload 16x4 --processes 2".split()
    done = locust(tmp_path, "--host", url, *words)
    assert done.returncode == 0, done.stderr[-2000:]
    (seen,) = json.loads(done.stdout[done.stdout.index("[\n") :])  # behind those of the workers
    each = [len(due_times(Poisson(), 15.0, 2.0, seed)) for seed in (1, 2)]
    assert seen["num_requests"] == sum(each) and not seen["num_failures"]


def test_options_by_hand_are_checked(tmp_path: Path) -> None:
    for words, message in (
        ([], "Give the requests per second"),
        (["--rate", "1", "--workload", "tea"], "'tea' is not one of"),
    ):
        done = locust(tmp_path, "--host", "x", *words)
        assert done.returncode != 0 and message in done.stderr

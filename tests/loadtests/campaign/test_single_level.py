"""`crossover load`: one level from the command line."""

from __future__ import annotations

import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from loadtests.cli.load_command import load
from loadtests.generator.endpoint import Target, check_target
from loadtests.records.events import LevelPurpose, LevelStarted, of_kind
from loadtests.records.old_run_folder import read_events
from models.errors import CrossoverError
from tests.loadtests.campaign.checks import check_folder

Start = Callable[..., str]
ROOT = Path(__file__).parents[3]


def test_one_level_from_the_command_line(
    truth_server: Start, tmp_path: Path, crossover: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    """`crossover load`: a table for people, a run folder where one is asked for, and clear words
    for what cannot be.
    """
    url = truth_server(ttft=0.02, case="load")

    def from_shell(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "crossover", "load", url, "--workload", "16x8", *arguments]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)

    done = from_shell("--rate", "40", "--duration", "2", "--target", "0.8", "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    for part in ("TTFT", "TPOT", "send lag", "output tokens/s", "SLO chat: 100.0% good", ": holds"):
        assert part in done.stdout, part
    (folder,) = tmp_path.glob("*")
    check_folder(folder)
    (started,) = of_kind(read_events(folder).records, LevelStarted)
    assert started.purpose is LevelPurpose.LOAD and started.rate_per_second == 40.0
    closed = crossover("load", url, *"--workload 16x8 --concurrency 2 --duration 1".split())
    assert closed.returncode == 0
    in_flight = re.search(r"(\S+) requests in flight", closed.stdout)
    assert in_flight is not None and 1.5 < float(in_flight[1]) <= 2.0
    assert not list(Path.cwd().glob("load-*")) and len(list(tmp_path.glob("*"))) == 1, (
        "nothing is kept that was not asked for"
    )
    refused = crossover("load", url, "--rate", "1", "--slo", "tea")
    assert refused.returncode == 2 and "'tea' is not one of chat" in refused.stderr
    assert "Traceback" not in refused.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "give either --rate"),
        ({"rate": 1.0, "concurrency": 1}, "give either --rate"),
        ({"rate": -1.0}, "--rate must be above 0, got -1.0"),
        ({"rate": math.nan}, "--rate must be finite, got nan"),
        ({"concurrency": 0}, "--concurrency must be at least 1, got 0"),
        ({"concurrency": 1, "target": 1.5}, "--target must be below 1, got 1.5"),
        ({"rate": 1.0, "arrivals": "tea"}, "--arrivals 'tea' is not one of constant, poisson"),
        ({"rate": 1.0, "duration": math.inf}, "--duration must be finite, got inf"),
        ({"rate": 1.0, "slo": "tea"}, "^--slo 'tea' is not one of chat"),
        ({"rate": 1.0, "duration": 0.0}, "--duration must be above 0, got 0.0"),
        ({"rate": 1.0, "api": "soap"}, "--api must be completions or chat, got 'soap'"),
        ({"rate": 1.0, "workload": "tea"}, "'tea' is not one of chat"),
        ({"rate": 1.0, "api_key_env": "NO_SUCH_KEY"}, "'NO_SUCH_KEY'.*not set"),
        ({"rate": 1.0, "url": "http://bob:hunter2@h"}, "^the url holds a user or a password"),
        ({"rate": 1.0, "extra_body": '{"api_key": "x"}'}, r"^extra_body\['api_key'\] looks like"),
        (
            {"rate": 1.0, "extra_body": '{"user": "sk-in-body"}'},
            r"^extra_body\['user'\] looks like",
        ),
        (
            {"rate": 1.0, "extra_body": '{"a": [{"auth-token": "x"}]}'},
            r"^extra_body\['a'\]\[0\]\['auth-token'\] looks like a secret",
        ),
    ],
)
def test_a_level_that_cannot_be_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(CrossoverError, match=message):
        load(**{"url": "http://127.0.0.1:9", **arguments})


def test_what_is_no_secret_may_be_in_the_body() -> None:
    check_target(
        Target(
            url="http://h:1/v1",
            extra_body={"max_tokens": 1, "stop_token_ids": [2], "prompt_cache_key": "x", "n": None},
        )
    )


@pytest.mark.clock
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_ends_a_level_in_order_and_with_one_sentence(
    truth_server: Start, tmp_path: Path, number: signal.Signals
) -> None:
    url = truth_server(ttft=0.02, case="load")
    words = [url, *"--workload 16x8 --rate 15 --duration 60 --out".split(), str(tmp_path / "runs")]
    (tmp_path / "tmp").mkdir()
    with subprocess.Popen(
        [sys.executable, "-m", "crossover", "load", *words],
        cwd=ROOT,
        env=os.environ | {"TMPDIR": str(tmp_path / "tmp")},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as level:
        until = time.monotonic() + 90
        while not list(tmp_path.glob("runs/*/requests.jsonl")):
            assert time.monotonic() < until and level.poll() is None
            time.sleep(0.05)
        time.sleep(0.5)
        level.send_signal(number)
        level.send_signal(number)  # as `timeout` does; it must not break off what the first began
        said = level.communicate(timeout=90)[1]
    (folder,) = tmp_path.glob("runs/*")
    assert level.returncode == 2 and "Traceback" not in said, said
    assert said.splitlines()[-1] == f"crossover: stopped; the records so far are in {folder}"
    assert not list((tmp_path / "tmp").iterdir())

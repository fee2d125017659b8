"""A real engine measured beside a real process that burns half of its core in bursts, against the
same engine alone, both by the campaign's own means.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from io import StringIO
from pathlib import Path

import psutil
import pytest

from crossover.loadtests.campaign import next_measurement
from crossover.loadtests.campaign.campaign_file import parse_campaign
from crossover.loadtests.campaign.campaign_runner import run
from crossover.loadtests.campaign.progress import Progress
from crossover.loadtests.host.cpu_pinning import divide_cores
from crossover.loadtests.records.journal_events import (
    Calibrated,
    CellFinished,
    LevelFinished,
    of_kind,
)
from crossover.loadtests.records.run_folder import read_records
from crossover.serving.capacity.step_time_model import StepTimeModel
from crossover.serving.hardware.machine_facts import allowed_cores
from tests.loadtests.campaign.checks import check_folder

pytestmark = pytest.mark.quiet_machine
# Corrected step times beside the hog, divided by those alone, are at most this far from 1: what is
# left is contention for caches, and what two calibrations differ by.
MAX_MOVED = 0.25
CAMPAIGN = """
name = "hog"
models = ["smollm2-135m-instruct"]
backends = ["llama_cpp"]
devices = ["cpu"]
budget_seconds = 60
wait_seconds = 0
workload = {{ prompt_tokens = 48, output_tokens = 16 }}
slo = {{ ttft_seconds = 1.0, tpot_seconds = 0.2, target = 0.7 }}
[server]
slots = 4
cores = 1
context_tokens = 256
[search]
confirm = {confirm}
level_seconds = 12
single_stream_requests = 5
single_stream_seconds = 5
"""
# Burns 0.1 s of CPU time, rests for 0.1 s, and so on: half of a core that it has for itself.
BURSTS = """
import os, sys, time
os.sched_setaffinity(0, map(int, sys.argv[1:]))
while True:
    until = time.process_time() + 0.1
    while time.process_time() < until:
        pass
    time.sleep(0.1)
"""


@pytest.fixture(autouse=True)
def levels_are_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer of this model takes half a second."""
    monkeypatch.setattr(next_measurement, "MIN_WARMUP_SECONDS", 1.0)


@pytest.fixture
def quiet_cores() -> None:
    """Skips the test where the cores do not become idle within 10 s."""
    busy_percent = 100.0
    for _ in range(10):
        busy_percent = max(psutil.cpu_percent(interval=1.0, percpu=True))
        if busy_percent < 20:
            return
    pytest.skip(f"not a quiet machine: other processes use {busy_percent:.0f} % of a core")


@pytest.fixture
def hog() -> Iterator[int]:
    """The id of a process on the engine's core that is no child of ours: such are not counted."""
    cores = map(str, divide_cores(allowed_cores(), 1).engine)
    command = shlex.join([sys.executable, "-c", BURSTS, *cores])
    pid = int(subprocess.check_output(["sh", "-c", f"{command} >/dev/null 2>&1 & echo $!"]))
    yield pid
    os.kill(pid, signal.SIGKILL)


def measure(out: Path, *, confirm: int) -> tuple[Path, str]:
    printed = StringIO()
    with Progress(printed) as progress:
        folder = run(parse_campaign(CAMPAIGN.format(confirm=confirm)), out, progress)
    check_folder(folder)
    return folder, printed.getvalue()


def step_times_of(folder: Path) -> StepTimeModel:
    (calibrated,) = of_kind(read_records(folder).events, Calibrated)
    assert calibrated.server is not None, calibrated.reason
    return calibrated.server.step_times


@pytest.mark.usefixtures("quiet_cores")
@pytest.mark.timeout(240)
def test_beside_a_hog_an_engine_has_its_own_step_times_and_a_rate_that_met_the_slo_is_confirmed(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    alone, _ = measure(tmp_path / "alone", confirm=0)
    hog_pid = request.getfixturevalue("hog")
    beside, output = measure(tmp_path / "beside", confirm=1)

    run_beside = read_records(beside)
    named = {
        process.pid
        for sample in run_beside.samples
        if sample.cores is not None
        for process in sample.cores.other_processes
    }
    assert hog_pid in named and f"(pid {hog_pid}) took " in output, output
    (ended,) = of_kind(run_beside.events, CellFinished)
    capacity = ended.capacity
    assert capacity.taken_share is not None and 0.1 < capacity.taken_share < 0.6
    last = of_kind(run_beside.events, LevelFinished)[-1]
    assert last.disturbance is not None and last.disturbance.is_disturbed
    assert capacity.confirmed_rate and "is of this machine alone. As busy as it was" in output
    own, corrected = step_times_of(alone), step_times_of(beside)
    for rows, prompt_tokens in ((1, 0), (4, 0), (0, 48), (3, 48)):
        seconds = [one.seconds(rows, prompt_tokens, 64 * rows) for one in (own, corrected)]
        assert seconds[1] == pytest.approx(seconds[0], rel=MAX_MOVED), (rows, prompt_tokens)

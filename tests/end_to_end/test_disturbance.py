"""Real campaigns on a machine that is not quiet: a busy process on the engine's core, for a while,
for good, and in bursts.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from io import StringIO
from pathlib import Path

import psutil
import pytest
from typer.testing import CliRunner

from crossover import cli
from crossover.loadtests.campaign import next_measurement
from crossover.loadtests.campaign.campaign_file import parse_campaign
from crossover.loadtests.campaign.campaign_runner import run
from crossover.loadtests.campaign.progress import Progress
from crossover.loadtests.host.cpu_pinning import divide_cores
from crossover.loadtests.levels import disturbance
from crossover.loadtests.records.journal_events import (
    Calibrated,
    CellFinished,
    LevelFinished,
    LevelStarted,
    Waited,
    of_kind,
)
from crossover.loadtests.records.run_folder import read_records
from crossover.reports.answers.report_warnings import alerts_of
from crossover.reports.cli import quick_command
from crossover.reports.report_data import read_report
from crossover.serving.hardware.machine_facts import allowed_cores
from tests.loadtests.campaign.checks import check_folder

pytestmark = pytest.mark.quiet_machine
CAMPAIGN = """
name = "not quiet"
models = ["135m"]
backends = ["fake"]
wait_seconds = {wait}
disturbance = "wait"
workload = {{ prompt_tokens = 24, output_tokens = 8 }}
[slo]
preset = "chat"
ttft_seconds = 1.0
target = 0.7
[server]
slots = 2
{hardware}
context_tokens = 128
options = {{ step_seconds = 0.01, is_busy = true }}
[search]
rates = [5.0]
level_seconds = 1.5
single_stream_requests = 5
"""


# Of a real engine. Single streams, bursts and one level fit into its time.
REAL_CAMPAIGN = """
name = "beside a hog"
models = ["smollm2-135m-instruct"]
backends = ["llama_cpp"]
devices = ["cpu"]
budget_seconds = 60
wait_seconds = 0
workload = { prompt_tokens = 48, output_tokens = 16 }
slo = { ttft_seconds = 1.0, tpot_seconds = 0.2, target = 0.7 }
[server]
slots = 4
cores = 1
context_tokens = 256
[search]
level_seconds = 12
single_stream_requests = 5
single_stream_seconds = 5
"""
BURST_SECONDS = 0.1  # of CPU time, and as long at rest


@pytest.fixture(autouse=True)
def steal_of_a_shared_host_is_no_hog(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hog takes a third to a half; a neighbour of a virtual machine now and then 5 %."""
    monkeypatch.setattr(disturbance, "MAX_TAKEN_SHARE", 0.2)


@pytest.fixture(autouse=True)
def levels_warm_up_for_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    """In place of five: an answer of this engine takes a tenth of a second."""
    monkeypatch.setattr(next_measurement, "MIN_WARMUP_SECONDS", 1.0)


@pytest.fixture
def quiet_cores() -> None:
    """Skips the test where the cores do not become idle within 10 s: it would wait for that too."""
    busy_percent = 100.0
    for _ in range(10):
        busy_percent = max(psutil.cpu_percent(interval=1.0, percpu=True))
        if busy_percent < 20:
            return
    pytest.skip(f"not a quiet machine: other processes use {busy_percent:.0f} % of a core")


DISTURBER = r"`.+` \(pid \d+\) took \d+% of the CPU time that the engine needed"
ONE_CORE = "cores = 1"  # the engine is alone on it: half of it is left beside a hog


def hog(cores: int | None = None) -> int:
    """A process that never rests, on all of the engine's cores, and no child of ours."""
    mine = list(divide_cores(allowed_cores(), cores).engine)
    code = (
        f"import hashlib, os, threading; os.sched_setaffinity(0, {mine})\n"
        "work = lambda: hashlib.pbkdf2_hmac('sha256', b'', b'', 2**31 - 1)\n"  # without the GIL
        f"[threading.Thread(target=work).start() for _ in {mine}]"
    )
    return in_background(code)


def hog_in_bursts() -> int:
    """A process that runs and rests in turns on the core of an engine, and no child of ours: half
    of a core that it has for itself."""
    (core,) = divide_cores(allowed_cores(), 1).engine
    code = f"""import os, time; os.sched_setaffinity(0, [{core}])
while True:
    until = time.process_time() + {BURST_SECONDS}
    while time.process_time() < until: pass
    time.sleep({BURST_SECONDS})"""
    return in_background(code)


def in_background(code: str) -> int:
    """The id of a process that runs this code."""
    command = f"{shlex.quote(sys.executable)} -c {shlex.quote(code)} >/dev/null 2>&1 & echo $!"
    return int(subprocess.check_output(["sh", "-c", command]))


def measure(out: Path, wait_seconds: float, hardware: str = "") -> tuple[Path, str]:
    return measured(CAMPAIGN.format(wait=wait_seconds, hardware=hardware), out)


def measured(text: str, out: Path) -> tuple[Path, str]:
    """The folder of a campaign's run, and what it printed."""
    printed = StringIO()
    with Progress(printed, log_interval_seconds=0.5) as progress:
        return run(parse_campaign(text), out, progress), printed.getvalue()


def wait_for_level(out: Path, number: int) -> None:
    until = time.monotonic() + 60
    while time.monotonic() < until:
        for folder in out.glob("*/"):
            levels = of_kind(read_records(folder).events, LevelStarted)
            if len(levels) >= number:
                return
        time.sleep(0.1)


# A server that computes 50 ms for each token, on the core that its first argument names.
SLOW_SERVER = """
import json, os, sys, time
from http.server import BaseHTTPRequestHandler, HTTPServer

os.sched_setaffinity(0, {int(sys.argv[1])})


class Handler(BaseHTTPRequestHandler):
    def answer(self, kind):
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.end_headers()

    def do_GET(self):
        self.answer("application/json")
        self.wfile.write(b'{"data": [{"id": "m"}]}')

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.answer("text/event-stream")
        for _ in range(body["max_tokens"]):
            until = time.process_time() + 0.05
            while time.process_time() < until:
                pass
            self.wfile.write(b'data: {"choices": [{"index": 0, "text": "a"}]}\\n\\n')
        self.wfile.write(b"data: [DONE]\\n\\n")


server = HTTPServer(("127.0.0.1", 0), Handler)
print(server.server_port, flush=True)
server.serve_forever()
"""


@pytest.mark.usefixtures("quiet_cores")
def test_quick_names_the_program_beside_which_a_server_was_too_slow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quick_command, "MIN_SECONDS", 0.0)
    core = divide_cores(allowed_cores(), 1).engine[0]
    command = [sys.executable, "-c", SLOW_SERVER, str(core)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as server:
        busy = hog(1)
        try:
            assert server.stdout is not None
            words = ["quick", server.stdout.readline().strip(), "--seconds", "12"]
            result = CliRunner().invoke(cli.app, [*words, "--out", str(tmp_path)])
        finally:
            os.kill(busy, signal.SIGKILL)
            server.kill()
    text = str(result.exception)
    assert result.exit_code != 0 and "too slow to be estimated within 12 s: " in text
    assert re.search(DISTURBER, text) and f"(pid {busy})" in text
    assert "ending other programs" in text and "--seconds 48" in text


def processes_beside(folder: Path) -> set[int]:
    """Process ids that the run folder has of others on the engine's cores."""
    return {
        process.pid
        for sample in read_records(folder).samples
        if sample.cores is not None
        for process in sample.cores.other_processes
    }


def check_counted_beside(folder: Path, output: str, busy: int, levels: int) -> None:
    """The last levels met the SLO beside another process: they count, are measured once, and the
    process is named."""
    check_folder(folder)
    events = read_records(folder).events
    disturbed = [
        level
        for level in of_kind(events, LevelFinished)
        if level.disturbance and level.disturbance.is_disturbed
    ]
    assert len(disturbed) == levels and all("Disturbed" in one.warnings for one in disturbed)
    for level in disturbed:
        assert level.disturbance is not None
        assert level.disturbance.counts and level.disturbance.is_corrected
        # Which process is named depends on what else runs: the one that took the most.
        assert busy in processes_beside(folder)
    assert re.search(DISTURBER, output), output
    rates = [level.plan.rate for level in of_kind(events, LevelStarted)]
    assert rates == [None, 5.0] and not of_kind(events, Waited)
    (ended,) = of_kind(events, CellFinished)
    assert "12 of 12 requests met the SLO, but a level of 2 s is too short" in ended.capacity.reason


@pytest.mark.usefixtures("quiet_cores")
def test_a_level_that_meets_the_slo_beside_a_process_for_a_while_counts(tmp_path: Path) -> None:
    busy: list[int] = []

    def disturb() -> None:
        wait_for_level(tmp_path, 2)
        busy.append(hog())
        time.sleep(3.0)
        os.kill(busy[0], signal.SIGKILL)

    disturber = threading.Thread(target=disturb)
    disturber.start()
    folder, output = measure(tmp_path, 60)
    disturber.join()
    check_counted_beside(folder, output, busy[0], levels=1)


def test_levels_that_meet_the_slo_on_a_machine_that_is_never_quiet_count(tmp_path: Path) -> None:
    busy = hog(1)
    try:
        folder, output = measure(tmp_path, 3, ONE_CORE)
    finally:
        os.kill(busy, signal.SIGKILL)
    check_counted_beside(folder, output, busy, levels=2)


@pytest.mark.slow  # a minute and a quarter
@pytest.mark.timeout(180)
def test_a_real_engine_beside_a_process_in_bursts_has_step_times_and_says_of_which_machine(
    tmp_path: Path,
) -> None:
    busy = hog_in_bursts()
    try:
        folder, output = measured(REAL_CAMPAIGN, tmp_path)
    finally:
        os.kill(busy, signal.SIGKILL)
    check_folder(folder)
    assert busy in processes_beside(folder)
    assert re.search(DISTURBER, output), output
    events = read_records(folder).events
    (calibrated,) = of_kind(events, Calibrated)
    assert calibrated.server is not None, calibrated.reason
    (ended,) = of_kind(events, CellFinished)
    capacity = ended.capacity
    assert capacity.taken_share is not None and 0.1 < capacity.taken_share < 0.6
    assert capacity.busy_rate and capacity.estimated_rate
    assert capacity.busy_rate < capacity.estimated_rate
    took = f"other processes took {capacity.taken_share:.0%}"
    words = f"is of this machine alone. As busy as it was ({took} "
    assert words in output
    assert any(words in alert for alert in alerts_of(read_report(folder)))

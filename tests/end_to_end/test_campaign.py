"""The whole way: campaign file, real server with its engine child (fake backend), Locust, run folder.

And all of it again while things are killed.
"""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from loadtests.resources import engine_pids, family
from loadtests.store import completed_levels, read_events, read_requests, read_samples
from tests.loadtests.test_runner import check_folder, kinds, only_folder, wait_for

ROOT = Path(__file__).parents[2]
CAMPAIGN = """
name = "fake ladder"
models = ["135m", "360m"]
backends = ["fake"]
budget_seconds = 14
sample_seconds = 0.5
workload = { prompt_tokens = 24, output_tokens = 8 }
[promise]
preset = "chat"
ttft_seconds = 0.5
target = 0.7
[server]
slots = 2
context_tokens = 128
options = { step_seconds = 0.02 }
[search]
level_seconds_min = 1.5
level_seconds_max = 2.5
level_requests_min = 10
lone_requests = 3
"""
pytestmark = pytest.mark.slow


def start(arguments: list[str], log: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "crossover", "campaign", *arguments]
    with open(log, "ab") as output:
        return subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)


def command_of(pid: int) -> str:
    try:
        return " ".join(psutil.Process(pid).cmdline())
    except psutil.Error:
        return ""


def engines(runner: int) -> list[int]:
    return engine_pids(runner)


def locusts(runner: int) -> list[int]:
    return [pid for pid in family(runner)[1:] if "locustfile.py" in command_of(pid)]


def servers(runner: int) -> list[int]:
    return [pid for pid in family(runner)[1:] if " serve " in command_of(pid) and "tether" not in command_of(pid)]


@pytest.fixture
def campaign(tmp_path: Path) -> Path:
    file = tmp_path / "campaign.toml"
    file.write_text(CAMPAIGN)
    return file


def test_killed_at_random_moments_and_complete_in_the_end(campaign: Path, tmp_path: Path) -> None:
    """SIGKILL of the engine, of Locust, of the server and twice of the runner, at moments that nobody chose; then it runs through."""
    chance = random.Random(time.time_ns())
    log = tmp_path / "log"
    victims: list[tuple[str, Callable[[int], list[int]]]] = [
        ("engine", engines),
        ("locust", locusts),
        ("runner", lambda runner: [runner]),
        ("server", servers),
        ("runner", lambda runner: [runner]),
    ]
    runner = start(["run", str(campaign), "--out", str(tmp_path / "runs")], log)
    folder: Path = wait_for(lambda: only_folder(tmp_path / "runs"))
    killed: list[str] = []
    kept: set[str] = set()
    for name, find in victims:
        time.sleep(chance.uniform(0.0, 1.5))
        target = wait_for(partial(_found, find, runner))
        if target is True:
            break  # it was quicker than we were
        whole = family(runner.pid)
        psutil.Process(target[0]).send_signal(signal.SIGKILL)
        killed.append(name)
        if name == "runner":
            runner.wait(10)
            wait_for(lambda whole=whole: not [pid for pid in whole if _lives(pid)], 10)
            kept |= set(completed_levels(read_events(folder).records))
            runner = start(["resume", str(folder)], log)
            wait_for(partial(_goes_on, folder, len(kinds(folder)), runner))
    assert runner.wait(120) == 0, log.read_text()[-4000:]
    assert killed.count("runner") == 2 or runner.returncode == 0
    check_folder(folder)
    events = read_events(folder).records
    assert sorted(event.cell or "" for event in events if event.kind == "cell_finished") == ["smollm2-135m-fake", "smollm2-360m-fake"]
    assert kept <= set(completed_levels(events)), "what was finished before a kill is still finished after it"
    assert [event.kind for event in events].count("run_resumed") == killed.count("runner")
    reasons = [str(event.detail["reason"]) for event in events if event.kind == "interrupted"]
    assert sum("runner was killed" in reason for reason in reasons) == killed.count("runner"), reasons
    if "engine" in killed or "locust" in killed:
        assert len(reasons) >= killed.count("runner"), reasons
    abandoned = {event.level for event in events if event.kind == "level_abandoned"}
    assert not abandoned & set(completed_levels(events))


def _found(find: Callable[[int], list[int]], runner: subprocess.Popen[bytes]) -> list[int] | bool:
    return find(runner.pid) or runner.poll() is not None


def _goes_on(folder: Path, events: int, runner: subprocess.Popen[bytes]) -> bool:
    return len(kinds(folder)) > events or runner.poll() is not None


def _lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def test_what_a_run_knows_of_the_machine_and_the_engine(campaign: Path, tmp_path: Path) -> None:
    """An engine killed in the middle of a level: that level is abandoned for this reason, and measured again with one engine."""
    file = campaign.read_text().replace('"135m", "360m"', '"135m"').replace("budget_seconds = 14", "budget_seconds = 7")
    campaign.write_text(file)
    log = tmp_path / "log"
    runner = start(["run", str(campaign), "--out", str(tmp_path / "runs")], log)
    folder: Path = wait_for(lambda: only_folder(tmp_path / "runs"))
    wait_for(lambda: any(record.level.endswith("#2.1") for record in read_requests(folder).records))
    (engine,) = engines(runner.pid)
    psutil.Process(engine).kill()
    assert runner.wait(90) == 0, log.read_text()[-4000:]
    check_folder(folder)
    events = read_events(folder).records
    (abandoned,) = [event for event in events if event.kind == "level_abandoned"]
    assert abandoned.detail["reason"] == "the engine was restarted" and str(abandoned.level).endswith("#2.1")
    assert any(str(name).endswith("#2.2") for name in completed_levels(events))
    ready: Any = next(event for event in events if event.kind == "cell_ready").detail
    assert ready["info"]["name"] == "fake" and ready["info"]["slots"] == 2 and ready["load_seconds"] > 0
    assert ready["layout"]["engine"] and ready["target"]["ignore_eos"] and ready["target"]["tokenizer"] == "vllm"
    finished = set(completed_levels(events))
    records = [record for record in read_requests(folder).records if record.level in finished]
    assert {record.backend for record in records if record.status is not None} == {"fake/cpu"}
    assert {record.prompt_tokens for record in records if record.error is None} == {24}
    assert {record.output_tokens for record in records if record.error is None} == {8}
    samples = [sample for sample in read_samples(folder).records if sample.level in finished]
    assert all(sample.engine is not None and sample.engine.rss_bytes for sample in samples)
    assert any(sample.api is not None and sample.api.cpu_share is not None for sample in samples)
    shown = subprocess.run(
        [sys.executable, "-m", "crossover", "campaign", "show", str(folder)], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert shown.returncode == 0 and "smollm2-135m-fake" in shown.stdout and "complete" in shown.stdout and "lone" in shown.stdout

"""Whole campaigns with real servers and real load generators, and again while the runner, Locust or
the engine is killed.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any

import psutil
import pytest

from crossover.loadtests.campaign import cell_runner
from crossover.loadtests.campaign.campaign_file import Plan, parse_campaign
from crossover.loadtests.campaign.campaign_runner import resume, run
from crossover.loadtests.campaign.progress import Progress
from crossover.loadtests.errors import BadRunFolder, Incomplete
from crossover.loadtests.host.resource_sampler import engine_pids, family
from crossover.loadtests.records.journal_events import (
    CellFinished,
    CellReady,
    CellSkipped,
    Interrupted,
    LevelAbandoned,
    LevelStarted,
    of_kind,
)
from crossover.loadtests.records.run_folder import read_records
from crossover.serving.capacity.simulated_capacity import Demand, ServerModel
from crossover.serving.capacity.step_time_model import StepTimeModel
from tests.loadtests.campaign.checks import check_folder
from tests.loadtests.capacity.known_server import SETTINGS
from tests.tools.waiting import wait_for

pytestmark = pytest.mark.usefixtures("capacities_of_few_requests", "short_warmup")
FEW_REQUESTS = 500  # a rate: beside a real engine

Start = Callable[..., str]
ROOT = Path(__file__).parents[2]
STEP_TIMES: dict[str, Any] = {
    "base_seconds": 0.002,
    "row_seconds": 0.0005,
    "prompt_token_seconds": 0.0001,
}
KNOWN = """
name = "known truth"
disturbance = "ignore"
budget_seconds = {budget}
workload = {{ prompt_tokens = 32, output_tokens = 20 }}
slo = {{ ttft_seconds = 0.1, tpot_seconds = 0.025, target = 0.8 }}
[target]
url = "{url}"
[search]
level_seconds = {level}
single_stream_requests = 10
single_stream_seconds = 3
{more}
"""
FAKE = """
name = "fake ladder"
disturbance = "ignore"
models = ["135m"]
backends = ["fake"]
workload = { prompt_tokens = 24, output_tokens = 8 }
[slo]
preset = "chat"
ttft_seconds = 0.5
target = 0.7
[server]
slots = 2
context_tokens = 128
options = { step_seconds = 0.02 }
[search]
rates = [4.0]
level_seconds = 2.5
single_stream_requests = 3
"""


def only_folder(out: Path) -> Path | None:
    found = [path for path in out.glob("*") if (path / "events.jsonl").exists()]
    return found[0] if found else None


def start(arguments: list[str], log: Path) -> subprocess.Popen[bytes]:
    """A runner that hears Ctrl-C, also where these tests run in the background of a shell, which
    then ignores it for all its children.
    """
    with open(log, "ab") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "tests.end_to_end.short_campaign", "campaign", *arguments],
            cwd=ROOT,
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )


def is_within_level(folder: Path, count: int) -> bool:
    """So many levels were begun, and the last has requests on record."""
    records = read_records(folder)
    levels = of_kind(records.events, LevelStarted)
    if len(levels) < count:
        return False
    return any(record.level == levels[-1].level for record in records.requests())


def known(url: str, budget: float, level: float, more: str = "") -> Plan:
    return parse_campaign(KNOWN.format(url=url, budget=budget, level=level, more=more))


@pytest.mark.clock
def test_a_whole_campaign_finds_the_capacity_of_a_known_step_time_model(
    truth_server: Start, tmp_path: Path
) -> None:
    """The slots of the endpoint are found, since it does not say them."""
    out = StringIO()
    plan = known(truth_server(slots=8, step_times=STEP_TIMES, case="law"), budget=22, level=2.0)
    with Progress(out, log_interval_seconds=1.0) as progress:
        folder = run(plan, tmp_path, progress, command=["test"])
    check_folder(folder)
    records = read_records(folder)
    (ended,) = of_kind(records.events, CellFinished)
    found, settings = ended.capacity, plan.campaign
    if found.method == "step_times":
        policy = SETTINGS
        truth = (
            ServerModel(StepTimeModel(**STEP_TIMES), policy)
            .capacity(Demand(settings.workload), settings.slo)
            .rate
        )
        assert found.estimated_rate == pytest.approx(truth, rel=0.3)
        assert found.confirmed_rate is None or found.confirmed_rate < 1.1 * truth
    manifest = records.manifest
    assert manifest.cells[0]["model"] == "true-model", "the name that the endpoint gives"
    assert "url" in manifest.server_facts and manifest.command == ["test"]
    (ready,) = of_kind(records.events, CellReady)
    assert ready.target is not None and ready.target["continuous_usage"]
    assert any(sample.level for sample in records.samples)
    # The endpoint listens on this machine, so its process is watched.
    assert any(sample.engine is not None for sample in records.samples if sample.level)
    for part in ("cell 1 of 1", "calibrated in", "left", "complete:"):
        assert part in out.getvalue(), part


def test_an_endpoint_that_fails_midway_costs_only_that_level_and_is_reported(
    truth_server: Start, tmp_path: Path
) -> None:
    url = truth_server(slots=8, fail="status:500", fail_every=3, fail_after=12, case="fails")
    out = StringIO()
    with Progress(out) as progress:
        plan = known(url, 60, level=2.0, more="rates = [8.0]")
        folder = run(plan, tmp_path, progress)
    check_folder(folder)
    assert "requests failed" in out.getvalue() or ", failed: " in out.getvalue()
    (ended,) = of_kind(read_records(folder).events, CellFinished)
    assert not ended.capacity.is_confirmed


def test_a_killed_load_generator_costs_one_attempt(truth_server: Start, tmp_path: Path) -> None:
    """SIGKILL of Locust within a level: it is abandoned, on record, and measured again."""
    killed: list[int] = []

    def kill() -> None:
        until = time.monotonic() + 60
        while not killed and time.monotonic() < until:
            folder = only_folder(tmp_path)
            if folder is not None and is_within_level(folder, 2):
                for process in psutil.Process().children(recursive=True):
                    if any(part.endswith("locustfile.py") for part in process.cmdline()):
                        killed.append(process.pid)
                        process.kill()
                        return
            time.sleep(0.05)

    killer = threading.Thread(target=kill)
    killer.start()
    plan = known(truth_server(slots=4, case="killed"), 60, 3.0, "rates = [5.0]")
    folder = run(plan, tmp_path, Progress(StringIO()))
    killer.join()
    check_folder(folder)
    (abandoned,) = of_kind(read_records(folder).events, LevelAbandoned)
    assert killed and "load generator" in abandoned.reason and "SIGKILL" in abandoned.reason


def test_a_stopped_runner_leaves_no_child_and_resume_ends_well(
    truth_server: Start, tmp_path: Path
) -> None:
    """Ctrl-C, then SIGKILL, each within a level; then it runs through."""
    file = tmp_path / "c.toml"
    url = truth_server(slots=4, case="resume")
    more = "rates = [4.0, 5.0]"
    file.write_text(KNOWN.format(url=url, budget=60, level=3.0, more=more))
    log = tmp_path / "log"
    arguments = ["run", str(file), "--out", str(tmp_path / "runs")]
    kept: list[str] = []
    for number, how in enumerate((signal.SIGINT, signal.SIGKILL), 1):
        runner = start(arguments, log)
        folder: Path = wait_for(lambda: only_folder(tmp_path / "runs"))
        arguments = ["resume", str(folder)]
        wait_for(partial(is_within_level, folder, number + 1))
        children = [psutil.Process(pid) for pid in family(runner.pid)[1:]]
        assert any("locust" in " ".join(child.cmdline()) for child in children)
        with pytest.raises(BadRunFolder, match=f"in use by process {runner.pid}"):
            resume(folder, Progress(StringIO()))
        runner.send_signal(how)
        assert runner.wait(30) == (-9 if how == signal.SIGKILL else 2)
        _, alive = psutil.wait_procs(children, timeout=5)
        alive = [child for child in alive if child.status() != psutil.STATUS_ZOMBIE]
        assert not alive, "its children end with it"
        kept = list(read_records(folder).finished_levels)
    output = log.read_text().replace("\n", " ")
    assert f"crossover campaign resume {folder}" in output, "it says how to go on"
    with open(folder / "requests.jsonl", "ab") as file_:
        file_.write(b'{"cell":"cut of')  # what a power cut leaves
    resume(folder, Progress(StringIO()))
    check_folder(folder)
    run_ = read_records(folder)
    assert list(run_.finished_levels)[: len(kept)] == kept, "what was finished is kept"
    stopped = [event.reason for event in of_kind(run_.events, Interrupted)]
    assert stopped == ["stopped by the user", "the runner was killed"]
    assert len(of_kind(run_.events, LevelAbandoned)) == 2


def test_what_a_run_knows_of_the_machine_and_the_engine(
    tmp_path: Path, crossover: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    """An engine killed in the middle of a level: that level is abandoned for this reason, and
    measured again with one engine.
    """
    file = tmp_path / "campaign.toml"
    file.write_text(FAKE)
    log = tmp_path / "log"
    runner = start(["run", str(file), "--out", str(tmp_path / "runs")], log)
    folder: Path = wait_for(lambda: only_folder(tmp_path / "runs"))
    wait_for(lambda: any(r.level.endswith("#2.1") for r in read_records(folder).requests()))
    (engine,) = engine_pids(runner.pid)
    psutil.Process(engine).kill()
    assert runner.wait(90) == 0, log.read_text()[-4000:]
    check_folder(folder)
    records = read_records(folder)
    (abandoned,) = of_kind(records.events, LevelAbandoned)
    assert abandoned.reason == "the engine was restarted" and abandoned.level.endswith("#2.1")
    finished = records.finished_levels
    assert any(name.endswith("#2.2") for name in finished)
    ready = of_kind(records.events, CellReady)[0]
    assert ready.info.name == "fake" and ready.info.slots == 2 and ready.load_seconds
    assert ready.layout is not None and ready.target is not None and ready.layout["engine"]
    for level in finished.values():
        shares = level.engine_time
        assert shares is not None and shares.steps > 0 and 0 < (shares.host_share or 0) < 0.5
    requests = [one for one in records.requests() if one.level in finished]
    assert {one.backend for one in requests if one.status is not None} == {"fake/cpu"}
    assert {one.prompt_tokens for one in requests if one.error is None} == {24}
    samples = [sample for sample in records.samples if sample.level in finished]
    assert all(sample.engine is not None and sample.engine.rss_bytes for sample in samples)
    shown = crossover("campaign", "show", str(folder))
    assert shown.returncode == 0 and "smollm2-135m-fake" in shown.stdout
    assert "complete" in shown.stdout and "\n  single stream: " in shown.stdout


OTHERS = """
[[engines]]
name = "scripted"
command = "{python} -I -S {script} {{port}} {faults}"
weights = "none"
format = "ab"
"""
SCRIPT = ROOT / "tests" / "loadtests" / "campaign" / "scripted_server.py"


def with_engine(faults: str = "", **changes: str) -> Plan:
    text = FAKE
    for old, new in changes.items():
        text = text.replace(f'{old} = ["fake"]', f"{old} = {new}")
    text = text.replace("options = { step_seconds = 0.02 }", "ready_seconds = 60")
    text = text.replace("[4.0]", "[2.0]")
    engine = OTHERS.format(python=sys.executable, script=SCRIPT, faults=faults)
    return parse_campaign(text + engine)


def test_another_projects_engine_gets_the_same_requests_as_ours(tmp_path: Path) -> None:
    with Progress(StringIO()) as progress:
        folder = run(with_engine(), tmp_path, progress)
    check_folder(folder)
    records = read_records(folder)
    ready = of_kind(records.events, CellReady, "smollm2-135m-ab-scripted")[-1]
    assert "scripted_server" in (ready.info.command or "")
    samples = [one for one in records.samples if one.cell.endswith("-scripted")]
    assert any(one.engine is not None and one.engine.rss_bytes for one in samples)
    assert any(one.cores is not None for one in samples), "disturbance is seen too"
    seeds = {
        one.level.rpartition("#")[2]: one.plan.seed
        for one in of_kind(records.events, LevelStarted, "smollm2-135m-fake")
    }
    for one in of_kind(records.events, LevelStarted, "smollm2-135m-ab-scripted"):
        assert seeds.get(one.level.rpartition("#")[2], one.plan.seed) == one.plan.seed


def test_an_engine_that_dies_under_load_is_started_again_and_then_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cell_runner, "MAX_SERVER_STARTS", 2)
    with Progress(StringIO()) as progress:
        plan = with_engine("dies-after=3", backends="[]")
        with pytest.raises(Incomplete, match="Nothing was measured"):
            run(plan, tmp_path, progress)
    (folder,) = tmp_path.iterdir()
    events = read_records(folder).events
    died = "scripted ended (exit status 7: out of luck)"
    assert any(died in event.reason for event in of_kind(events, Interrupted))
    (skipped,) = of_kind(events, CellSkipped)
    assert died in skipped.reason and "interrupted 2 times" in skipped.reason

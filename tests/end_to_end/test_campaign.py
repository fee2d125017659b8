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

import msgspec
import numpy as np
import psutil
import pytest

from loadtests.campaign.campaign_file import Plan, parse_campaign
from loadtests.campaign.progress import Progress
from loadtests.campaign.run_state import prediction_on_record
from loadtests.campaign.runner import resume, run
from loadtests.errors import BadRunFolder
from loadtests.host.resource_sampler import engine_pids, family
from loadtests.records.events import (
    CapacityStatus,
    CellFinished,
    CellReady,
    CellSkipped,
    Interrupted,
    LevelAbandoned,
    LevelPurpose,
    LevelStarted,
    RunResumed,
    completed_levels,
    of_kind,
)
from loadtests.records.old_run_folder import (
    read_events,
    read_manifest,
    read_records,
    read_requests,
    read_samples,
)
from loadtests.terminal.level import wide_console
from loadtests.terminal.run import prediction_in_words, show_run
from loadtests.workload.goodness_of_fit import ArrivalCheck
from reports.engines import side_by_side
from reports.run import read_run
from reports.write import Asked, write_report
from tests.loadtests.analysis.made import waits_md_c
from tests.loadtests.campaign.checks import check_folder
from tests.tools.waiting import wait_for

pytestmark = pytest.mark.slow
Start = Callable[..., str]
ROOT = Path(__file__).parents[2]
# Four slots of 0.03 + 19 x 0.01 = 0.22 s: 18.2 requests/s at the very most, and less where a share
# may not wait long (M/D/4).
SERVICE_SECONDS = 0.03 + 19 * 0.01
TTFT_SECONDS = {"quick": 0.2, "patient": 0.8}
KNOWN = """
name = "known truth"
budget_seconds = {budget}
workload = {{ prompt_tokens = 16, output_tokens = 20 }}
slos = [
  {{ name = "quick", ttft_seconds = 0.2, target = 0.8 }},
  {{ name = "patient", ttft_seconds = 0.8, target = 0.8 }},
]
[target]
url = "{url}"
[search]
level_seconds_min = 2
level_seconds_max = 4
level_requests_min = 20
single_stream_requests = 3
precision = 0.5
calibration_seconds = 3
"""
FAKE = """
name = "fake ladder"
disturbance = "ignore"
models = ["135m"]
backends = ["fake"]
budget_seconds = 5
sample_seconds = 0.5
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
level_seconds_min = 1.5
level_seconds_max = 2.5
level_requests_min = 10
single_stream_requests = 3
calibration_seconds = 0
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
            [sys.executable, "-m", "crossover", "campaign", *arguments],
            cwd=ROOT,
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )


def is_within_level(folder: Path, count: int) -> bool:
    """So many levels were begun, and the last has requests on record."""
    levels = of_kind(read_events(folder).records, LevelStarted)
    if len(levels) < count:
        return False
    return any(record.level == levels[-1].level for record in read_requests(folder).records)


def known(url: str, budget: float) -> Plan:
    return parse_campaign(KNOWN.format(url=url, budget=budget))


@pytest.fixture(scope="module")
def measured(truth_server: Start, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """One finished campaign with two SLOs, and what it said."""
    out = StringIO()
    plan = known(truth_server(slots=4, ttft=0.03, gap=0.01, case="predicted"), budget=18)
    folder = tmp_path_factory.mktemp("runs")
    with Progress(out, plain_every_seconds=1.0) as progress:
        return run(plan, folder, progress, command=["test"], beside_others=True), out.getvalue()


@pytest.fixture(scope="module")
def truth() -> dict[str, float]:
    """SLO -> requests/s at which 80 % wait no longer than it allows."""

    def share(rate: float, ttft_seconds: float) -> float:
        due = np.cumsum(np.random.default_rng(99).exponential(1 / rate, 30_000))
        return float((waits_md_c(due, 4, SERVICE_SECONDS) + 0.03 <= ttft_seconds).mean())

    def capacity(ttft_seconds: float) -> float:
        low, high = 5.0, 18.1
        for _ in range(11):
            middle = (low + high) / 2
            low, high = (middle, high) if share(middle, ttft_seconds) >= 0.8 else (low, middle)
        return (low + high) / 2

    return {name: capacity(seconds) for name, seconds in TTFT_SECONDS.items()}


@pytest.mark.clock
def test_a_whole_campaign(measured: tuple[Path, str], truth: dict[str, float]) -> None:
    """Single-stream requests, calibration, then a search per SLO that brackets the server's true
    capacity.
    """
    folder, said = measured
    check_folder(folder)
    events = read_events(folder).records
    (ended,) = of_kind(events, CellFinished)
    assert list(ended.capacities) == ["quick", "patient"]
    for name, found in ended.capacities.items():
        assert found.held is None, "18 s are too few for a level that confirms"
        assert found.status in (CapacityStatus.ALONE_ONLY, CapacityStatus.UNRESOLVED)
        assert (found.low or 0.0) * 0.9 < truth[name]
        assert found.high is None or truth[name] < found.high * 1.1
    levels = of_kind(events, LevelStarted)
    assert levels[0].purpose is LevelPurpose.SINGLE_STREAM and len(levels) >= 3
    made = prediction_on_record(events, ended.cell)
    assert made is not None and made.law is not None and made.slots == 4
    assert made.rates["quick"].rate < made.rates["patient"].rate
    assert levels[1].rate_per_second == pytest.approx(made.rates["quick"].rate)
    for name, predicted in made.rates.items():
        assert 0.5 < predicted.rate / truth[name] < 1.3, (
            "its slots are not the step law's: a quarter too low"
        )
    for part in ("cell 1 of 1", "calibrated in", "predicted", "left", "complete:"):
        assert part in said, part
    words = prediction_in_words(ended.cell, "quick", events)
    assert words is not None and words.startswith("predicted ")
    assert prediction_in_words("other", "quick", events) is None
    console = wide_console()
    with console.capture() as shown:
        show_run(folder, console)
    for part in (words, "quick: ", "patient: "):
        assert part in shown.get()


@pytest.mark.clock
def test_what_a_campaign_keeps(measured: tuple[Path, str]) -> None:
    folder, _ = measured
    manifest = read_manifest(folder)
    assert manifest.cells[0]["model"] == "true-model", "the name that the endpoint gives"
    assert manifest.campaign["slo"]["ttft_seconds"] == 0.2
    assert "url" in manifest.server_facts and manifest.client_facts["cpu_model"]
    assert "locust" in manifest.versions and manifest.command == ["test"]
    events = read_events(folder).records
    (ready,) = of_kind(events, CellReady)
    assert ready.target is not None
    assert (ready.target["model"], ready.target["tokenizer"]) == ("true-model", "vllm")
    samples = read_samples(folder).records
    assert any(sample.level for sample in samples)
    assert all(sample.engine is None for sample in samples)
    assert any(s.client is not None and s.client.cpu_share is not None for s in samples)
    said: list[bool | None] = []
    for level in read_records(folder).levels():
        kept = level.finished.arrivals
        if level.started.rate_per_second is None:
            assert kept is None
            continue
        found = msgspec.convert(kept, ArrivalCheck)
        assert found.count >= level.finished.window_due and found.against == "exponential"
        said.append(found.as_asked)
        for number in (found.cv, found.lag1, found.ks_p, found.as_asked):
            assert (number is None) == (found.count < 20), "too few say nothing"
    assert True in said


def test_a_killed_load_generator_costs_one_attempt(truth_server: Start, tmp_path: Path) -> None:
    """SIGKILL of Locust, twice: both levels are abandoned, on record, and measured again."""
    killed: list[int] = []

    def kill() -> None:
        until = time.monotonic() + 60
        while len(killed) < 2 and time.monotonic() < until:
            for process in psutil.Process().children(recursive=True):
                try:
                    mine = process.pid not in killed and any(
                        part.endswith("locustfile.py") for part in process.cmdline()
                    )
                except psutil.Error:
                    continue
                if mine and not killed:
                    killed.append(process.pid)  # while it makes its prompts, or even earlier
                    process.kill()
                elif mine and len(killed) == 1 and time.time() - process.create_time() > 3.0:
                    killed.append(process.pid)  # within the level
                    process.kill()
            time.sleep(0.05)

    threading.Thread(target=kill, daemon=True).start()
    plan = known(truth_server(slots=4, case="killed"), budget=7.0)
    search = msgspec.structs.replace(
        plan.campaign.search,
        level_seconds_min=3.0,
        level_seconds_max=3.0,
        calibration_seconds=0,
        rates=(5.0, 6.0),
    )
    settings = msgspec.structs.replace(plan.campaign, search=search)
    plan = Plan(settings, plan.cells, plan.text)
    folder = run(plan, tmp_path, Progress(StringIO()), beside_others=True)
    assert len(killed) == 2
    check_folder(folder)
    reasons = [event.reason for event in of_kind(read_events(folder).records, Interrupted)]
    assert len(reasons) == 2 and all(
        "load generator" in reason and "SIGKILL" in reason for reason in reasons
    ), reasons
    attempts = [event.attempt for event in of_kind(read_events(folder).records, LevelStarted)]
    assert max(attempts) >= 2, "the repetition says which attempt it is"


def test_a_stopped_runner_leaves_no_child_and_resume_ends_well(
    truth_server: Start, tmp_path: Path
) -> None:
    """Ctrl-C, then SIGKILL, each within a level; then it runs through."""
    file = tmp_path / "c.toml"
    url = truth_server(slots=4, case="resume")
    file.write_text(KNOWN.format(url=url, budget=8).replace("_seconds = 3\n", "_seconds = 0\n"))
    log = tmp_path / "log"
    arguments = ["run", str(file), "--out", str(tmp_path / "runs"), "--beside-others"]
    kept: list[str] = []
    for number, how in enumerate((signal.SIGINT, signal.SIGKILL), 1):
        runner = start(arguments, log)
        folder = wait_for(lambda: only_folder(tmp_path / "runs"))
        arguments = ["resume", str(folder), "--beside-others"]
        wait_for(partial(is_within_level, folder, number + 1))
        children = [psutil.Process(pid) for pid in family(runner.pid)[1:]]
        assert any("locust" in " ".join(child.cmdline()) for child in children)
        with pytest.raises(BadRunFolder, match=f"in use by process {runner.pid}"):
            resume(folder, Progress(StringIO()), beside_others=True)
        runner.send_signal(how)
        assert runner.wait(30) == (-9 if how == signal.SIGKILL else 2)
        _, alive = psutil.wait_procs(children, timeout=5)
        alive = [child for child in alive if child.status() != psutil.STATUS_ZOMBIE]
        assert not alive, "its children end with it"
        kept = list(completed_levels(read_events(folder).records))
    said = log.read_text().replace("\n", " ")
    assert f"crossover campaign resume {folder}" in said, "it says how to go on"
    with open(folder / "requests.jsonl", "ab") as file_:
        file_.write(b'{"cell":"cut of')  # what a power cut leaves
    resume(folder, Progress(StringIO()), beside_others=True)
    check_folder(folder)
    events = read_events(folder).records
    assert list(completed_levels(events))[: len(kept)] == kept, "what was finished is kept"
    resumed = of_kind(events, RunResumed)
    assert [one.dropped_bytes for one in resumed] == [{}, {"requests.jsonl": 15}]
    stopped = [event.reason for event in of_kind(events, Interrupted)]
    assert stopped == ["stopped by the user", "the runner was killed"]
    assert len(of_kind(events, LevelAbandoned)) == 2


def test_what_a_run_knows_of_the_machine_and_the_engine(tmp_path: Path) -> None:
    """An engine killed in the middle of a level: that level is abandoned for this reason, and
    measured again with one engine.
    """
    file = tmp_path / "campaign.toml"
    file.write_text(FAKE)
    log = tmp_path / "log"
    runner = start(["run", str(file), "--out", str(tmp_path / "runs"), "--beside-others"], log)
    folder: Path = wait_for(lambda: only_folder(tmp_path / "runs"))
    wait_for(lambda: any(record.level.endswith("#2.1") for record in read_requests(folder).records))
    (engine,) = engine_pids(runner.pid)
    psutil.Process(engine).kill()
    assert runner.wait(90) == 0, log.read_text()[-4000:]
    check_folder(folder)
    events = read_events(folder).records
    (abandoned,) = of_kind(events, LevelAbandoned)
    assert abandoned.reason == "the engine was restarted" and str(abandoned.level).endswith("#2.1")
    assert any(str(name).endswith("#2.2") for name in completed_levels(events))
    ready = of_kind(events, CellReady)[0]
    assert (
        ready.info.name == "fake"
        and ready.info.slots == 2
        and ready.load_seconds is not None
        and ready.load_seconds > 0
    )
    assert ready.layout is not None and ready.target is not None
    assert (
        ready.layout["engine"]
        and ready.target["ignore_eos"]
        and ready.target["tokenizer"] == "vllm"
    )
    finished = set(completed_levels(events))
    for level in completed_levels(events).values():
        shares = level.engine_time
        assert shares is not None and shares.steps > 0 and 0 < (shares.host_share or 0) < 0.5
    records = [record for record in read_requests(folder).records if record.level in finished]
    assert {record.backend for record in records if record.status is not None} == {"fake/cpu"}
    assert {record.prompt_tokens for record in records if record.error is None} == {24}
    assert {record.output_tokens for record in records if record.error is None} == {8}
    samples = [sample for sample in read_samples(folder).records if sample.level in finished]
    assert all(sample.engine is not None and sample.engine.rss_bytes for sample in samples)
    assert any(sample.api is not None and sample.api.cpu_share is not None for sample in samples)
    is_shared = bool(set(ready.layout["engine"]) & set(ready.layout["api"]))
    assert ready.info.cores == ready.layout["engine"] and bool(ready.info.nice) == is_shared
    shown = subprocess.run(
        [sys.executable, "-m", "crossover", "campaign", "show", str(folder)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (
        shown.returncode == 0
        and "smollm2-135m-fake" in shown.stdout
        and "complete" in shown.stdout
        and "\nalone " in shown.stdout
    )


OTHERS = """
[[engines]]
name = "scripted"
command = "{python} -I -S {script} {{port}} {faults}"
weights = "none"
format = "ab"
"""
SCRIPT = ROOT / "tests" / "loadtests" / "engines" / "scripted_server.py"


def with_engine(faults: str = "", **changes: str) -> Plan:
    text = FAKE
    for old, new in changes.items():
        text = text.replace(f'{old} = ["fake"]', f"{old} = {new}")
    text = text.replace("options = { step_seconds = 0.02 }", "ready_seconds = 60")
    text = text.replace("[search]", "[search]\nrates = [2.0]\nrate_seconds = [2.0]")
    engine = OTHERS.format(python=sys.executable, script=SCRIPT, faults=faults)
    return parse_campaign(text + engine)


def test_an_engine_of_others_beside_ours_makes_one_report(tmp_path: Path) -> None:
    with Progress(StringIO()) as progress:
        folder = run(with_engine(), tmp_path, progress)
    check_folder(folder)
    events = read_events(folder).records
    ready = of_kind(events, CellReady, "smollm2-135m-ab-scripted")[-1]
    assert ready.info.details is not None and ready.info.details["version"] == "0.0.7 (scripted)"
    assert "remote" not in ready.sampling
    samples = [one for one in read_samples(folder).records if one.cell.endswith("-scripted")]
    assert any(one.engine is not None and one.engine.rss_bytes for one in samples)
    assert any(one.remote is not None and one.remote.kind == "vllm" for one in samples)
    assert any(one.cores is not None for one in samples), "disturbance is seen too"
    assert not any(one.api for one in samples)
    seeds = {
        (event.level or "").rpartition("#")[2]: event.seed
        for event in of_kind(events, LevelStarted)
        if (event.level or "").startswith("smollm2-135m-fake#")
    }
    for event in of_kind(events, LevelStarted, "smollm2-135m-ab-scripted"):
        assert seeds.get((event.level or "").rpartition("#")[2], event.seed) == event.seed
    numbers = read_run(folder)
    (group,) = side_by_side(numbers)
    assert [row.cell.backend for row in group.rows] == ["fake", "scripted"]
    written = write_report([folder], tmp_path / "report", Asked(("html", "md")))
    assert written
    page = (tmp_path / "report" / "report.md").read_text()
    assert "### Engines side by side (measured here)" in page and "0.0.7 (scripted)" in page
    assert "Engines side by side" in (tmp_path / "report" / "index.html").read_text()


def test_an_engine_that_dies_under_load_is_started_again_and_then_given_up(tmp_path: Path) -> None:
    with Progress(StringIO()) as progress:
        folder = run(with_engine("dies-after=4", backends="[]"), tmp_path, progress)
    events = read_events(folder).records
    died = "scripted ended (exit status 7: out of luck)"
    assert len(of_kind(events, CellReady)) == 3, "three servers in one sitting"
    assert any(died in event.reason for event in of_kind(events, Interrupted))
    (skipped,) = of_kind(events, CellSkipped)
    assert skipped.cause == "server" and died in skipped.reason

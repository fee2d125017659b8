"""A campaign against a server that knows the truth: levels, cuts, interruptions, resume, and what is on record of them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from loadtests.campaign import Plan, parse_campaign
from loadtests.children import Child, last_line, wait_for_file
from loadtests.cli import load
from loadtests.errors import BadRunFolder, Incomplete, LoadError, TargetUnusable
from loadtests.levels import LevelFinished, judge
from loadtests.progress import Progress, duration
from loadtests.resources import api_pids, engine_pids, family
from loadtests.runner import resume, run
from loadtests.search import Capacity
from loadtests.standing import campaign_of
from loadtests.store import (
    LevelStarted,
    completed_levels,
    measured_records,
    read_events,
    read_manifest,
    read_requests,
    read_samples,
    started_levels,
)

Start = Callable[..., str]

CAMPAIGN = """
name = "known truth"
budget_seconds = {budget}
workload = {{ prompt_tokens = 16, output_tokens = 20 }}
[promise]
preset = "chat"
ttft_seconds = {ttft}
target = 0.8
[target]
url = "{url}"
[search]
level_seconds_min = 2
level_seconds_max = 3
level_requests_min = 10
lone_requests = 3
"""


def campaign(url: str, budget: float = 12.0, ttft: float = 0.3) -> Plan:
    return parse_campaign(CAMPAIGN.format(url=url, budget=budget, ttft=ttft))


def quiet() -> Progress:
    return Progress(StringIO())


def check_folder(folder: Path) -> None:
    """What must be true of every complete run, however it came about."""
    events, requests = read_events(folder).records, read_requests(folder).records
    finished, started = completed_levels(events), started_levels(events)
    assert [event.kind for event in events].count("run_finished") == 1 and events[-1].kind == "run_finished"
    names = [event.level for event in events if event.kind == "level_started"]
    assert len(names) == len(set(names)), "no name is used twice"
    closed = [event.level for event in events if event.kind in ("level_finished", "level_abandoned")]
    assert len(closed) == len(set(closed)) and set(closed) >= set(names), "every level that was begun was finished or abandoned, once"
    numbers = [name.rpartition(".")[0] for name in finished]
    assert len(numbers) == len(set(numbers)), "no level was measured twice"
    for name, event in finished.items():
        detail = msgspec.convert(event.detail, LevelFinished)
        own = [record for record in requests if record.level == name]
        assert len(own) == detail.due == len({record.index for record in own}), "nothing twice, nothing lost"
        start = msgspec.convert(started[name].detail, LevelStarted)
        of_level = [sample for sample in read_samples(folder).records if sample.level == name]
        summary, _ = judge(own, of_level, start, detail.window_seconds, _promise(folder))
        assert (summary.good, summary.due, summary.verdict) == (detail.good, detail.window_due, detail.verdict), (
            "numbers follow from the records"
        )
    assert len(measured_records(requests, events)) == sum(event.detail["due"] for event in finished.values())


def _promise(folder: Path) -> Any:
    return campaign_of(read_manifest(folder))[0].promise


def test_a_campaign_finds_the_capacity_of_a_known_server(truth_server: Start, tmp_path: Path) -> None:
    """Four slots and 0.13 s of service: 30/s at the very most. The search must end below that, with levels on both sides."""
    out = StringIO()
    url = truth_server(slots=4, ttft=0.03, gap=0.005, case="capacity")
    with Progress(out, plain_every_seconds=1.0) as progress:
        folder = run(campaign(url, budget=8.0), tmp_path, progress, command=["test"])
    check_folder(folder)
    events = read_events(folder).records
    capacity = msgspec.convert(next(e for e in events if e.kind == "cell_finished").detail["capacity"], Capacity)
    assert capacity.holds_at_any_rate is not False
    assert capacity.high is None or capacity.high > 10
    rates = [event.detail["rate_per_second"] for event in events if event.kind == "level_started"]
    assert rates[0] is None and len(rates) >= 3, "lone requests first, then levels of load"
    assert read_manifest(folder).cells[0]["model"] == "true-model", "the cell is called by the model that the endpoint serves"
    ready = next(event for event in events if event.kind == "cell_ready")
    assert ready.detail["target"]["model"] == "true-model" and ready.detail["target"]["tokenizer"] == "vllm"
    manifest = read_manifest(folder)
    assert manifest.campaign["promise"]["ttft_seconds"] == 0.3 and manifest.server_facts == {"url": url}
    assert manifest.client_facts["cpu_model"] and "locust" in manifest.versions and manifest.command == ["test"]
    samples = read_samples(folder).records
    assert any(sample.level for sample in samples) and all(sample.engine is None for sample in samples)
    assert any(sample.client is not None and sample.client.cpu_share is not None for sample in samples)
    said = out.getvalue()
    for part in ("cell 1 of 1", "lone requests: 3 of 3 good", "requests/s:", "left", "complete:"):
        assert part in said, part
    before = (folder / "events.jsonl").read_bytes()
    resume(folder, quiet())
    assert (folder / "events.jsonl").read_bytes() == before, "a complete run is left as it is"


def test_a_promise_that_a_lone_request_breaks_holds_at_no_rate(truth_server: Start, tmp_path: Path) -> None:
    folder = run(campaign(truth_server(ttft=0.2, case="never"), ttft=0.05), tmp_path, quiet())
    check_folder(folder)
    events = read_events(folder).records
    (finished,) = completed_levels(events).values()
    assert finished.detail["verdict"] == "fails" and finished.detail["cut_short"]
    capacity = next(e for e in events if e.kind == "cell_finished").detail["capacity"]
    assert (capacity["status"], capacity["holds_at_any_rate"]) == ("none", False)


def test_a_hopeless_level_is_cut_short_and_the_next_waits_for_an_idle_server(truth_server: Start, tmp_path: Path) -> None:
    """This server goes on with what its client has given up; the level after it must not be billed for that."""
    url = truth_server(slots=1, ttft=0.15, gap=0.0, cancels=False, case="hopeless")
    plan = campaign(url, ttft=0.3)
    search = msgspec.structs.replace(plan.campaign.search, rates=(15.0, 2.0), rate_seconds=(2.5, 1.0))
    folder = run(msgspec.structs.replace(plan, campaign=msgspec.structs.replace(plan.campaign, search=search)), tmp_path, quiet())
    check_folder(folder)
    events = read_events(folder).records
    loaded = [event for event in events if event.kind == "level_finished"][1:]
    assert loaded[0].detail["cut_short"] and loaded[0].detail["window_seconds"] < 2.5 and loaded[0].detail["verdict"] == "fails"
    assert len(loaded) >= 2
    second = [record for record in read_requests(folder).records if record.level == loaded[1].level]
    first = min(second, key=lambda record: record.due_seconds)
    assert first.first_content_seconds is not None and first.first_content_seconds - first.due_seconds < 0.4


def test_a_killed_load_generator_costs_one_attempt(truth_server: Start, tmp_path: Path) -> None:
    """SIGKILL of Locust, twice: both levels are abandoned, on record, and measured again."""
    killed: list[int] = []

    def kill() -> None:
        until = time.monotonic() + 60
        while len(killed) < 2 and time.monotonic() < until:
            for process in psutil.Process().children(recursive=True):
                try:
                    mine = process.pid not in killed and any(part.endswith("locustfile.py") for part in process.cmdline())
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
    plan = campaign(truth_server(slots=4, case="killed"), budget=7.0)
    search = msgspec.structs.replace(plan.campaign.search, level_seconds_min=3.0, level_seconds_max=3.0)
    folder = run(msgspec.structs.replace(plan, campaign=msgspec.structs.replace(plan.campaign, search=search)), tmp_path, quiet())
    assert len(killed) == 2
    check_folder(folder)
    reasons = [event.detail["reason"] for event in read_events(folder).records if event.kind == "interrupted"]
    assert len(reasons) == 2 and all("load generator" in reason and "SIGKILL" in reason for reason in reasons), reasons
    attempts = [event.detail["attempt"] for event in read_events(folder).records if event.kind == "level_started"]
    assert max(attempts) >= 2, "the repetition says which attempt it is"


RUNNER = [sys.executable, "-m", "crossover", "campaign"]
ROOT = Path(__file__).parents[2]


def start(arguments: list[str], log: Path) -> subprocess.Popen[bytes]:
    """A runner that hears Ctrl-C, also where these tests run in the background of a shell, which then ignores it for all its children."""
    with open(log, "ab") as output:
        return subprocess.Popen(
            [*RUNNER, *arguments],
            cwd=ROOT,
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )


def wait_for(what: Callable[[], Any], seconds: float = 60.0) -> Any:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        found = what()
        if found:
            return found
        time.sleep(0.02)
    raise AssertionError("it did not come")


def kinds(folder: Path) -> list[str]:
    return [event.kind for event in read_events(folder).records]


def only_folder(out: Path) -> Path | None:
    found = [path for path in out.glob("*") if (path / "events.jsonl").exists()]
    return found[0] if found else None


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_a_stopped_runner_leaves_no_child_and_resume_ends_well(truth_server: Start, tmp_path: Path, how: signal.Signals) -> None:
    file = tmp_path / "c.toml"
    file.write_text(CAMPAIGN.format(url=truth_server(slots=4, case=f"resume{how}"), budget=6, ttft=0.3))
    runner = start(["run", str(file), "--out", str(tmp_path / "runs")], tmp_path / "log")
    folder = wait_for(lambda: only_folder(tmp_path / "runs"))
    wait_for(lambda: kinds(folder).count("level_started") >= 2)
    wait_for(lambda: any(record.level.endswith("#2.1") for record in read_requests(folder).records))
    children = [psutil.Process(pid) for pid in family(runner.pid)[1:]]
    assert any("locust" in " ".join(child.cmdline()) for child in children)
    with pytest.raises(BadRunFolder, match=f"in use by process {runner.pid}"):
        resume(folder, quiet())
    runner.send_signal(how)
    assert runner.wait(30) == (-9 if how == signal.SIGKILL else 2)
    psutil.wait_procs(children, timeout=5)
    assert not [child for child in children if child.is_running() and child.status() != psutil.STATUS_ZOMBIE], "its children end with it"
    if how == signal.SIGINT:
        assert f"crossover campaign resume {folder}" in (tmp_path / "log").read_text().replace("\n", " "), "it says how to go on"
    with open(folder / "requests.jsonl", "ab") as file_:
        file_.write(b'{"cell":"cut of')  # what a power cut leaves
    before = completed_levels(read_events(folder).records)
    resume(folder, quiet())
    check_folder(folder)
    events = read_events(folder).records
    assert list(completed_levels(events))[: len(before)] == list(before), "what was finished is kept"
    assert [e.kind for e in events].count("run_resumed") == 1 and "interrupted" in [e.kind for e in events]
    resumed = next(event for event in events if event.kind == "run_resumed")
    assert resumed.detail["dropped_bytes"] == {"requests.jsonl": 15}
    abandoned = [event for event in events if event.kind == "level_abandoned"]
    assert [str(event.level)[-4:] for event in abandoned] == ["#2.1"[-4:]] and "true-model" in str(abandoned[0].cell or "")
    assert any(str(event.level).endswith("#2.2") for event in events if event.kind == "level_finished")


def test_an_endpoint_that_is_not_there(tmp_path: Path) -> None:
    plan = parse_campaign('name = "x"\n[target]\nurl = "http://127.0.0.1:9"\nready_seconds = 0.5')
    with pytest.raises(TargetUnusable, match="127.0.0.1:9 cannot be reached"):
        run(plan, tmp_path, quiet())
    assert not list(tmp_path.glob("*")), "nothing was begun"


def test_a_model_that_cannot_be_loaded_is_skipped_and_the_next_is_measured(tmp_path: Path) -> None:
    """The fake backend told to run out of memory: the cell is skipped with the server's own words."""
    plan = parse_campaign(
        'name = "x"\nmodels = ["135m"]\nbackends = ["fake"]\nbudget_seconds = 5\n[server]\ncontext_tokens = 4096\n'
        '[server.options]\nfail_cause = "load_failed"\n[workload]\nprompt_tokens = 8\noutput_tokens = 4'
    )
    folder = run(plan, tmp_path, quiet())
    (skipped,) = [event for event in read_events(folder).records if event.kind == "cell_skipped"]
    assert "did not start" in skipped.detail["reason"] and kinds(folder)[-1] == "run_finished"


def test_one_level_from_the_command_line(truth_server: Start, tmp_path: Path) -> None:
    """`crossover load`: a table for people, a run folder where one is asked for, and clear words for what cannot be."""
    url = truth_server(ttft=0.02, case="load")

    def from_shell(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "crossover", "load", url, "--workload", "16x8", *arguments]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)

    done = from_shell("--rate", "15", "--duration", "2", "--target", "0.8", "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    for part in ("TTFT", "TPOT", "send lag", "output tokens/s", "promise chat: 100.0% good", ": holds"):
        assert part in done.stdout, part
    (folder,) = tmp_path.glob("*")
    check_folder(folder)
    (started,) = started_levels(read_events(folder).records).values()
    assert started.detail["purpose"] == "load" and started.detail["rate_per_second"] == 15.0
    closed = from_shell("--concurrency", "2", "--duration", "1")
    assert closed.returncode == 0 and "2.0 requests in flight" in closed.stdout
    assert not list(Path.cwd().glob("load-*")) and len(list(tmp_path.glob("*"))) == 1, "nothing is kept that was not asked for"
    refused = from_shell("--rate", "1", "--promise", "tea")
    assert refused.returncode == 2 and "'tea' is not one of chat" in refused.stderr and "Traceback" not in refused.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "give either --rate"),
        ({"rate": 1.0, "concurrency": 1}, "give either --rate"),
        ({"rate": -1.0}, "--rate must be above 0, got -1.0"),
        ({"rate": 1.0, "seconds": 0.0}, "--duration must be above 0, got 0.0"),
        ({"rate": 1.0, "api": "soap"}, "Invalid enum value 'soap'"),
        ({"rate": 1.0, "workload": "tea"}, "'tea' is not one of chat"),
        ({"rate": 1.0, "api_key_env": "NO_SUCH_KEY"}, "'NO_SUCH_KEY'.*not set"),
    ],
)
def test_a_level_that_cannot_be_is_refused(arguments: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {
        "rate": None,
        "concurrency": None,
        "seconds": 30.0,
        "workload": "chat",
        "arrivals": "poisson",
        "promise": "chat",
    }
    given |= {"target": None, "model": None, "api": "completions", "api_key_env": None, "verify_tls": True, "seed": 1, "out": None}
    with pytest.raises(LoadError, match=message):
        load("http://127.0.0.1:9", **(given | arguments))


def test_a_dry_run_says_what_it_would_do_and_does_nothing(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text('name = "x"\nmodels = ["135m", "70b"]\nbudget_seconds = 90\nhardware = [{ memory_gib = 4.0 }]')
    command = [*RUNNER, "run", str(file), "--dry-run", "--out", str(tmp_path / "runs")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert (
        "smollm2-135m-Q4_0-llama_cpp: at most 1 min 30 s; engine on" in done.stdout
        and "skipped, needs" in done.stdout
        and "the budget is 4 GiB" in done.stdout
    )
    assert "1 min 30 s of measuring" in done.stdout and not (tmp_path / "runs").exists()


# The parts.


def test_a_child_ends_with_the_process_that_started_it(tmp_path: Path) -> None:
    script = (
        "import os, sys, time; from pathlib import Path; from loadtests.children import Child\n"
        f"child = Child(['sleep', '60'], log=Path({str(tmp_path / 'log')!r})); print(child.pid, flush=True); time.sleep(60)"
    )
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert parent.stdout is not None
    child = psutil.Process(int(parent.stdout.readline()))
    wait_for(lambda: child.name() == "sleep")
    parent.kill()
    parent.communicate()
    wait_for(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE, 5)


def test_a_child_runs_on_its_cores_and_says_how_it_ended(tmp_path: Path) -> None:
    core = min(os.sched_getaffinity(0))
    with Child([sys.executable, "-c", "import os; print(os.sched_getaffinity(0))"], cores=(core,), log=tmp_path / "log") as child:
        assert child.wait(20) == 0
    assert last_line(tmp_path / "log") == f"{{{core}}}"
    with Child([sys.executable, "-c", "import sys; sys.exit('broken')"], log=tmp_path / "log2") as child:
        child.wait(20)
        assert child.how_it_ended() == "exit status 1: broken"
        assert not wait_for_file(tmp_path / "never", child, 5.0)
    with Child(["/no/such/program"], log=tmp_path / "log3") as child:
        child.wait(20)
        assert "cannot be run" in child.how_it_ended()


def test_leaving_a_child_ends_its_whole_group(tmp_path: Path) -> None:
    with Child(["sh", "-c", "trap '' TERM; sleep 60 & sleep 60"], log=tmp_path / "log") as child:
        wait_for(lambda: len(family(child.pid)) == 3)
        whole = [psutil.Process(pid) for pid in family(child.pid)]
        child.stop(timeout_seconds=0.3)
    _, alive = psutil.wait_procs(whole, timeout=5)
    assert not [one for one in alive if one.status() != psutil.STATUS_ZOMBIE]


def test_processes_of_a_server_are_told_apart(tmp_path: Path) -> None:
    script = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(60)', 'serving.engine'])"
    with Child([sys.executable, "-c", script], log=tmp_path / "log") as child:
        engine = wait_for(lambda: engine_pids(child.pid))
        assert len(engine) == 1 and api_pids(child.pid) == [child.pid]
    assert family(child.pid) == []


def test_durations_for_people() -> None:
    assert [duration(seconds) for seconds in (0, 0.4, 59, 60, 95, 660, 7300)] == [
        "0 s",
        "1 s",
        "59 s",
        "1 min",
        "1 min 35 s",
        "11 min",
        "2 h 1 min",
    ]


def test_progress_is_lines_where_there_is_no_terminal() -> None:
    out = StringIO()
    with Progress(out, plain_every_seconds=0.0) as progress:
        progress.say("a [b] c")
        progress.tick("level", fraction=0.5, left_seconds=90)
    lines = out.getvalue().splitlines()
    assert lines[0].endswith("a [b] c") and lines[1].endswith("... level, 50%, about 1 min 30 s left")


def test_incomplete_is_an_error_of_ours() -> None:
    assert Incomplete.__module__ == "loadtests.errors", "so that the command line shows one sentence"

"""Children of ours: they end with us, run on their cores, and say how they ended."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil

from crossover.loadtests.host.child_processes import Child, last_line
from crossover.loadtests.host.resource_sampler import engine_pids, family
from tests.tools.waiting import wait_for

ROOT = Path(__file__).parents[3]


def test_a_child_ends_with_the_process_that_started_it(tmp_path: Path) -> None:
    script = (
        "import os, sys, time; from pathlib import Path; "
        "from crossover.loadtests.host.child_processes import "
        "Child\n"
        f"child = Child(['sleep', '60'], log=Path({str(tmp_path / 'log')!r})); print(child.pid, "
        "flush=True); time.sleep(60)"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    assert parent.stdout is not None
    child = psutil.Process(int(parent.stdout.readline()))
    wait_for(lambda: child.name() == "sleep")
    parent.kill()
    parent.communicate()
    wait_for(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE, 5)


def test_a_child_runs_on_its_cores_and_reports_how_it_ended(tmp_path: Path) -> None:
    core = min(os.sched_getaffinity(0))
    with Child(
        [sys.executable, "-c", "import os; print(os.sched_getaffinity(0))"],
        cores=(core,),
        log=tmp_path / "log",
    ) as child:
        assert child.wait(20) == 0
    assert last_line(tmp_path / "log") == f"{{{core}}}"
    with Child(
        [sys.executable, "-c", "import sys; sys.exit('broken')"], log=tmp_path / "log2"
    ) as child:
        child.wait(20)
        assert child.how_it_ended() == "exit status 1: broken"
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


def test_processes_of_a_server_are_distinguished(tmp_path: Path) -> None:
    sleeper = (
        "[sys.executable, '-c', 'import time; time.sleep(60)', "
        "'crossover.serving.engine.engine_loop']"
    )
    script = f"import subprocess, sys; subprocess.run({sleeper})"
    with Child([sys.executable, "-c", script], log=tmp_path / "log") as child:
        engine = wait_for(lambda: engine_pids(child.pid))
        assert engine == family(child.pid)[1:]
    assert family(child.pid) == []

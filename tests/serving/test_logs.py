"""Where nobody takes what the server says, it serves, recovers, says how it is, and ends."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from crossover.serving.logs import ConsoleLog
from tests.serving.cli.test_serve import ROOT
from tests.serving.fakes import ask, complete, wait_until


@pytest.mark.parametrize("kind", ["a broken pipe", pytest.param("closed", marks=pytest.mark.slow)])
def test_a_server_whose_log_nobody_takes_stays_true(tmp_path: Path, kind: str) -> None:
    ready_file = tmp_path / "folder" / "ready.json"
    ready_file.parent.mkdir()
    serve = f"exec {sys.executable} -m crossover serve fake --port 0"
    command = f"{serve} --ready-file {ready_file} {'>&- 2>&-' if kind == 'closed' else ''}"
    end, out = os.pipe()
    os.close(end)
    child = subprocess.Popen(["bash", "-c", command], cwd=ROOT, stdout=out, stderr=out)
    os.close(out)
    try:
        wait_until(lambda: ready_file.exists() or child.poll() is not None)
        about = json.loads(ready_file.read_text())
        port = int(about["url"].rsplit(":", 1)[1])
        shutil.rmtree(ready_file.parent)  # it cannot be written again
        ready_file.parent.touch()
        os.kill(about["engine_pid"], 9)
        wait_until(lambda: ask(port, "GET", "/ready").status == 503)
        wait_until(lambda: ask(port, "GET", "/ready").status == 200)
        assert complete(port, max_tokens=2).status == 200
        child.terminate()
        assert child.wait(20) == 0
    finally:
        child.kill()
        child.wait(10)


def test_a_full_disk_raises_nothing() -> None:
    with open("/dev/full", "wb", buffering=0) as full:
        out = io.TextIOWrapper(full, write_through=True)
        ConsoleLog(out).say("one", "two")
        out.detach()


def test_the_end_of_a_progress_is_printed_once() -> None:
    out = io.StringIO()
    log = ConsoleLog(out)
    for fraction in (0.0, 0.4, 1.0, 1.0, 1.0):
        log.progress("weights", fraction)
    assert out.getvalue().split("\n") == ["weights: 0%", "weights: 100%", ""]

"""`crossover selftest` as people run it: one of its parts, really."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

from loadtests.campaign.progress import Progress
from loadtests.generator.http_client import connect, fetch, get_bytes
from loadtests.selftest.selftest import Bench


def test_the_self_test_passes_its_counts_and_fails_a_wrong_part_by_name() -> None:
    command = [sys.executable, "-m", "crossover", "selftest"]
    root = Path(__file__).parents[3]
    done = subprocess.run(
        [*command, "--only", "counts", "--json"],
        cwd=root,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    rows = {row["what"]: row for row in report["rows"]}
    assert set(rows) == {"failures: cut off", "failures: refused (429)", "failures: whole"}
    assert all(row["truth"] == row["measured"] > 0 for row in rows.values()) and report["passed"]
    done = subprocess.run(
        [*command, "--only", "tea"], cwd=root, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2 and "'tea' is not one of times, counts" in done.stderr


def test_a_server_started_after_another_is_asked_at_its_own_port(tmp_path: Path) -> None:
    bench = Bench(tmp_path, Progress(io.StringIO()))
    for _ in range(2):
        with bench.server() as url, connect(url) as pool:
            assert fetch(pool, get_bytes(pool, "/truth"))[0] == 200

"""One campaign at a time on one machine."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from crossover.loadtests.errors import MachineBusy
from crossover.loadtests.host.machine_lock import machine_lock

ROOT = Path(__file__).parents[3]


def test_a_second_campaign_is_refused_and_the_first_is_named(tmp_path: Path) -> None:
    file = tmp_path / "lock"
    holder = (
        "import sys; from pathlib import Path; from crossover.loadtests.host.machine_lock import "
        "machine_lock\n"
        f"with machine_lock('runs/a', file=Path({str(file)!r})):\n print('held', flush=True); "
        "sys.stdin.read()"
    )
    first = subprocess.Popen(
        [sys.executable, "-c", holder],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=ROOT,
        text=True,
    )
    assert first.stdout is not None and first.stdout.readline() == "held\n"
    with (
        pytest.raises(
            MachineBusy,
            match=rf"runs/a \(process {first.pid}, `-c`, started 2\S+ .*\).*Wait until it ends",
        ),
        machine_lock("b", file=file),
    ):
        pass
    first.kill()
    first.communicate()
    with machine_lock("b", file=file):
        assert f"b (process {os.getpid()}, `" in file.read_text(), (
            "a lock ends with its process, however that ended"
        )


def test_a_lock_that_cannot_be_opened_is_an_error(tmp_path: Path) -> None:
    with (
        pytest.raises(MachineBusy, match="cannot be opened"),
        machine_lock("x", file=tmp_path / "no" / "folder"),
    ):
        pass

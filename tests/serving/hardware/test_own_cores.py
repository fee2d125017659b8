"""Cores that processes take from each other's reach."""

import subprocess
import sys
from pathlib import Path

from serving.hardware.machine_facts import allowed_cores
from serving.hardware.own_cores import take_cores

HOLDER = """
import sys
from pathlib import Path
from serving.hardware.own_cores import take_cores
print(*take_cores(int(sys.argv[1]), Path(sys.argv[2])), flush=True)
sys.stdin.read()
"""


def test_cores_are_one_process_s_until_it_is_killed(tmp_path: Path) -> None:
    every = allowed_cores()
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(len(every)), str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with holder:
        assert holder.stdout is not None
        assert holder.stdout.readline().split() == [str(core) for core in every]
        assert take_cores(1, tmp_path) == ()
        holder.kill()
    assert take_cores(len(every) + 1, tmp_path) == ()  # all or none
    assert take_cores(1, tmp_path) == every[:1]

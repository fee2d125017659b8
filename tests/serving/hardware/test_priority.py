"""A process with a lower priority beside one of another session, on one core."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from loadtests.host.core_watch import processes
from models.isolated import run_python, start_python

CORE = max(os.sched_getaffinity(0))
BUSY = f"import os; os.sched_setaffinity(0, [{CORE}])\nwhile True: pass"
LOWERED = (
    f"from serving.hardware.machine_facts import lower_priority\nprint(lower_priority(10))\n{BUSY}"
)


def test_a_session_with_a_lower_priority_gets_little_beside_another() -> None:
    """Nice alone leaves it half the core, where the kernel groups tasks by session."""
    found = [
        start_python("-u", "-c", code, stdout=subprocess.PIPE, stderr=sys.stderr)
        for code in (LOWERED, f"print()\n{BUSY}")
    ]
    try:
        said = [one.stdout.readline() for one in found if one.stdout is not None]
        before = {pid: one.cpu_seconds for pid, one in processes(pids=[p.pid for p in found])}
        time.sleep(1.0)
        after = {pid: one.cpu_seconds for pid, one in processes(pids=[p.pid for p in found])}
    finally:
        for one in found:
            one.kill()
            one.communicate()
    lowered, other = (after[one.pid] - before[one.pid] for one in found)
    assert said[0] == b"None\n" and 0 <= lowered < 0.25 * other


def test_a_session_that_cannot_be_lowered_is_said(tmp_path: Path) -> None:
    code = (
        "import os, sys; from pathlib import Path\n"
        "from serving.hardware.machine_facts import lower_priority\n"
        "for name in sys.argv[1:]: print(lower_priority(7, Path(name)), os.nice(0))"
    )
    ran = run_python("-c", code, str(tmp_path), str(tmp_path / "no" / "file"))
    refused, absent = ran.output.decode().splitlines()
    assert refused.startswith("the priority of the engine's session cannot be lowered: ")
    assert refused.endswith(" 7") and absent == "None 14"

"""The plugin that measures the time of each test file, in runs of their own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.time_per_file import read_times, table

BUSY = """import subprocess, sys, time
SPIN = "import time; end = time.process_time() + 0.3\\nwhile time.process_time() < end: pass"
def test_of_this_process(): exec(SPIN)
def test_of_a_child(): subprocess.run([sys.executable, "-S", "-c", SPIN], check=True)
"""


def test_cpu_time_of_a_file_includes_its_children_and_is_the_sum_of_all_runs(
    tmp_path: Path,
) -> None:
    times = tmp_path / "times.json"
    (tmp_path / "test_idle.py").write_text("def test_nothing(): pass\n")
    (tmp_path / "test_busy.py").write_text(BUSY)
    root = Path(__file__).parent.parent
    for number, with_workers in enumerate(([], ["-p", "xdist", "-n", "1"]), 1):
        plugin = ["-p", "tests.time_per_file", "--times", times]
        subprocess.run(
            [sys.executable, "-m", "pytest", "-q", *plugin, *with_workers, tmp_path],
            cwd=tmp_path,
            env={"PYTHONPATH": str(root), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
            check=True,
        )
        wall, cpu = read_times(times)["test_busy.py"]
        assert min(wall, cpu) >= 0.55 * number  # of 0.6, in ticks of 0.01 s
    assert read_times(times, times)["test_busy.py"][1] == 2 * cpu
    rows = [line.split(" | ")[0] for line in table(read_times(times)).splitlines()]
    assert rows[2:] == ["| test_busy.py", "| test_idle.py", "| all 2 files"]

"""Wall and CPU seconds of each test file: a plugin of pytest, and the table of what it measured.

    python -m pytest -p tests.time_per_file --times times.json ...     # adds this run to the file
    python -m tests.time_per_file times.json ...                       # prints the table of all

CPU seconds are those of the process that runs the tests and of all children that it has waited for.
The time of a fixture counts for the file of the test that made it or ended it, and that of a child
when it is waited for: a server of a whole session (tests.tools.forks) counts for the file that the
worker ran last. Collection and imports of the test files are left out.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Generator
from pathlib import Path

import pytest

MAX_ROWS = 25  # files of the table; all others are one row
Times = dict[str, tuple[float, float]]  # by file: wall and CPU seconds


class TimePerFile:
    """Measures in each worker; the controller of pytest-xdist, or the only process, adds up."""

    def __init__(self, path: Path, is_worker: bool) -> None:
        self.path = path
        self.is_worker = is_worker
        self.times: Times = {}
        self.counted_cpu_seconds = cpu_seconds()

    def pytest_collection_finish(self) -> None:
        self.counted_cpu_seconds = cpu_seconds()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Add to each report of a phase (setup, call, teardown) the CPU time since the last one."""
        report = yield
        now = cpu_seconds()
        report.user_properties.append(("cpu_seconds", now - self.counted_cpu_seconds))
        self.counted_cpu_seconds = now
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        cpu = sum(value for name, value in report.user_properties if name == "cpu_seconds")
        _add(self.times, report.nodeid.partition("::")[0], report.duration, cpu)

    def pytest_sessionfinish(self) -> None:
        if self.is_worker:
            return
        all_runs = read_times(self.path)
        for file, (wall, cpu) in self.times.items():
            _add(all_runs, file, wall, cpu)
        self.path.write_text(json.dumps(all_runs))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--times", type=Path, required=True, help="JSON file that the times go to")


def pytest_configure(config: pytest.Config) -> None:
    is_worker = hasattr(config, "workerinput")
    config.pluginmanager.register(TimePerFile(config.getoption("times"), is_worker))


def cpu_seconds() -> float:
    """Return the CPU time of this process and of the children that it has waited for."""
    return sum(os.times()[:4])


def read_times(*paths: Path) -> Times:
    """Return the times of all these files together; those that do not exist count as empty."""
    times: Times = {}
    for path in paths:
        if path.exists():
            for file, (wall, cpu) in json.loads(path.read_text()).items():
                _add(times, file, wall, cpu)
    return times


def table(times: Times) -> str:
    """Return a table in Markdown: the files that take the most CPU time, all others, the sum."""
    by_cpu = sorted(times, key=lambda file: times[file][1], reverse=True)
    rows = {file: times[file] for file in by_cpu[:MAX_ROWS]}
    if others := by_cpu[MAX_ROWS:]:
        rows[f"{len(others)} other files"] = _sum_of(times, others)
    rows[f"all {len(by_cpu)} files"] = _sum_of(times, by_cpu)
    lines = ["| file | CPU s | wall s |", "|---|---:|---:|"]
    lines += [f"| {name} | {cpu:.1f} | {wall:.1f} |" for name, (wall, cpu) in rows.items()]
    return "\n".join(lines)


def _add(times: Times, file: str, wall: float, cpu: float) -> None:
    wall_before, cpu_before = times.get(file, (0.0, 0.0))
    times[file] = (wall_before + wall, cpu_before + cpu)


def _sum_of(times: Times, files: list[str]) -> tuple[float, float]:
    return sum(times[file][0] for file in files), sum(times[file][1] for file in files)


if __name__ == "__main__":
    print(table(read_times(*map(Path, sys.argv[1:]))))

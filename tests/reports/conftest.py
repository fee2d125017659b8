"""One example run for all tests of reports that only read it."""

from __future__ import annotations

from pathlib import Path

import pytest

from reports.findings import Crossover, crossover
from reports.numbers import RunNumbers
from reports.run import read_run
from reports.write import Asked, write_report
from tests.reports.example_run import write_example_run

SKIPPED = {"qwen2.5-14b": "qwen2.5-14b in Q4_0 needs 14 GiB on the CPU, 7.0 GiB may be used"}


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_example_run(tmp_path_factory.mktemp("runs") / "example", skipped=SKIPPED)


@pytest.fixture(scope="session")
def run(folder: Path) -> RunNumbers:
    return read_run(folder)


@pytest.fixture(scope="session")
def found(run: RunNumbers) -> Crossover:
    return crossover(run)


@pytest.fixture(scope="session")
def written(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The whole report of the example run, in every format but pictures."""
    out = tmp_path_factory.mktemp("report")
    write_report([folder], out, Asked(("html", "md", "csv"), rate=0.5))
    return out

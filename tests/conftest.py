"""Fixtures that more than one package's tests need, and the rule that a test for a GPU is skipped
visibly where there is none.
"""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


def has_gpu() -> bool:
    try:
        return subprocess.run(["nvidia-smi", "-L"], capture_output=True, timeout=20).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked and not has_gpu():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="no GPU on this machine"))


@pytest.fixture(scope="session", autouse=True)
def measuring_lock_of_its_own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Campaigns of tests are no measurements: they may run beside a real one, and beside another
    run of the tests.
    """
    before = os.environ.get("XDG_RUNTIME_DIR")
    os.environ["XDG_RUNTIME_DIR"] = str(tmp_path_factory.mktemp("runtime"))
    yield
    if before is None:
        del os.environ["XDG_RUNTIME_DIR"]
    else:
        os.environ["XDG_RUNTIME_DIR"] = before


@pytest.fixture(scope="session")
def shipped_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Path of the tokenizer that the project ships, as the fake backend is served with."""
    from models.resolve import resolve

    return str(
        Path(resolve("fake", kind="none", cache=tmp_path_factory.mktemp("cache")).tokenizer_path)
    )

"""Fixtures that more than one package's tests need, and the rule that a test for a GPU is skipped visibly where there is none."""

import subprocess
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


@pytest.fixture(scope="session")
def shipped_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Path of the tokenizer that the project ships, as the fake backend is served with."""
    from models.hub import resolve

    return str(Path(resolve("fake", backend="fake", cache=tmp_path_factory.mktemp("cache")).tokenizer_path))

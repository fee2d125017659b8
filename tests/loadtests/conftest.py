import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def truth_server() -> Iterator[Callable[..., str]]:
    """Starts truth servers: `url = truth_server(slots=4)`; those with the same settings are shared
    within a module.
    """
    running: dict[str, tuple[subprocess.Popen[str], str]] = {}

    def start(**settings: object) -> str:
        key = json.dumps(settings, sort_keys=True)
        if key not in running:
            command = [sys.executable, "-m", "tests.loadtests.faulty_server", key]
            child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
            assert child.stdout is not None
            running[key] = child, f"http://127.0.0.1:{int(child.stdout.readline())}"
        return running[key][1]

    yield start
    for child, _ in running.values():
        child.kill()
        child.wait()
        if child.stdout is not None:
            child.stdout.close()

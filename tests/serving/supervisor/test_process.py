"""What an engine process is given that has nothing to do with its messages."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

from models.isolated import start_python
from serving.backends import BACKENDS
from serving.backends.base import EngineConfig
from serving.supervisor.process import SHORT_SPINS, EngineProcess, allocator, environment

GRANTED = Path("/sys/kernel/mm/transparent_hugepage/enabled")
HOLD = """
held = bytearray(b"x") * (64 << 20)  # numpy would ask for huge pages by itself
lines = open("/proc/self/smaps_rollup").read().splitlines()
print(next(int(line.split()[1]) for line in lines if line.startswith("AnonHugePages")))
"""


def huge_kib(environment: dict[str, str]) -> int:
    plain = {key: value for key, value in os.environ.items() if key != "GLIBC_TUNABLES"}
    done = subprocess.run(
        [sys.executable, "-c", HOLD],
        env=plain | environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return int(done.stdout)


@pytest.mark.skipif(
    not GRANTED.is_file() or "[madvise]" not in GRANTED.read_text(),
    reason="huge pages are not granted on request here",
)
def test_large_allocations_of_an_engine_are_on_huge_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    assert huge_kib({}) < 8 << 10 < 32 << 10 < huge_kib(allocator("llama_cpp"))
    assert allocator("llama_cpp") == allocator("onnx") != {}


def test_what_the_user_said_to_the_allocator_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.arena_max=2")
    assert allocator("onnx") == {
        "GLIBC_TUNABLES": "glibc.malloc.arena_max=2:glibc.malloc.hugetlb=1"
    }
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.hugetlb=0")
    assert [allocator(name) for name, spec in BACKENDS.items() if spec.huge_pages] == [{}, {}]


def test_torch_keeps_the_allocator_that_it_was_measured_with() -> None:
    assert allocator("torch") == {}


def test_an_engine_that_shares_cores_spins_briefly_unless_the_user_says_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    alone = EngineConfig(backend="fake", model_path="", model_name="fake")
    shares = msgspec.structs.replace(alone, nice=3)
    assert "GOMP_SPINCOUNT" not in environment(alone, 3)
    assert environment(shares, 3)["GOMP_SPINCOUNT"] == SHORT_SPINS
    monkeypatch.setenv("GOMP_SPINCOUNT", "7")
    assert environment(shares, 3)["GOMP_SPINCOUNT"] == "7"


def test_an_engines_number_is_its_own_until_its_end_is_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else `kill` could hit who got the number next."""
    monkeypatch.setattr("serving.supervisor.process.start_python", start_python)  # no fork

    async def scenario() -> None:
        ended = asyncio.Event()
        engine = EngineProcess(0, EngineConfig("fake", "", "m"), lambda line: None)
        await engine.start(lambda engine, message: None, lambda engine: ended.set())
        assert engine.pid is not None
        os.kill(engine.pid, signal.SIGKILL)
        time.sleep(1.0)  # the loop cannot hear of it
        assert engine.alive and Path(f"/proc/{engine.pid}").exists()
        await asyncio.wait_for(ended.wait(), 20)
        assert engine.returncode == -signal.SIGKILL and not Path(f"/proc/{engine.pid}").exists()

    asyncio.run(scenario())

"""What an engine process is given that has nothing to do with its messages."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from serving.backends import BACKENDS
from serving.backends.base import EngineConfig
from serving.supervisor.process import SHORT_SPINS, allocator, environment

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

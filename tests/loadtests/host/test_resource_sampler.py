"""What is sampled beside the load, and by whom: kernel counters, NVML, RAPL."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from crossover.loadtests.errors import LoadError
from crossover.loadtests.host.resource_sampler import Gpu, Rapl, Sampler
from crossover.loadtests.records.resource_sample import ResourceSample
from tests.tools.waiting import wait_for


def test_samples_carry_the_level_that_runs() -> None:
    seen: list[ResourceSample] = []
    with Sampler("c", seen.append, interval_seconds=0.2) as sampler:
        wait_for(lambda: seen)
        sampler.level = "l"
        wait_for(lambda: sum(sample.level == "l" for sample in seen) >= 4)
        sampler.level = None
        of_level = [sample for sample in seen if sample.level == "l"]
        time.sleep(0.5)
        assert [sample for sample in seen if sample.level == "l"] == of_level, (
            "all of a level's samples are here when it ends"
        )
    assert sampler.failure is None
    for sample in seen:  # of an engine that is not ours
        unseen = (sample.engine, sample.cores, sample.gpu_memory_bytes)
        assert unseen == (None, None, None), "nobody there is None, not 0"


def test_a_sink_that_fails_is_reported() -> None:
    seen: list[ResourceSample] = []

    def full(sample: ResourceSample) -> None:
        seen.append(sample)
        if len(seen) > 1:
            raise LoadError("the disk is full")

    with Sampler("c", full, interval_seconds=0.2) as sampler:
        wait_for(lambda: sampler.failure)
        sampler.level = "l"
        sampler.level = None
    assert "the disk is full" in str(sampler.failure)


def test_a_server_is_seen_as_engine_and_api() -> None:
    script = (
        "import subprocess, sys; engine = subprocess.Popen([sys.executable, '-c', 'while True: "
        "pass', 'crossover.serving.engine.engine_loop'])\n"
        "try: sys.stdin.read()\nfinally: engine.kill()"
    )
    server = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE)
    seen: list[ResourceSample] = []
    with Sampler("c", seen.append, server=server.pid, interval_seconds=0.2):
        wait_for(lambda: [s for s in seen if s.cores is not None and s.cores.busy_seconds])
    server.communicate(b"")
    last = seen[-1]
    assert last.engine is not None and last.engine.rss_bytes


def fake_nvml(**changes: Any) -> Any:
    """Like the pynvml module, in NVML's own functions and units: one GPU."""
    bits = 0x1 | 0x4 | 0x40  # idle (which is no throttling), power cap, hardware thermal
    answers = {
        "Init": None,
        "DeviceGetCount": 1,
        "DeviceGetHandleByIndex": "gpu0",
        "DeviceGetMemoryInfo": SimpleNamespace(total=80 << 30, used=20 << 30),
        "DeviceGetPowerUsage": 412_500,  # milliwatts
        "DeviceGetCurrentClocksEventReasons": bits,
    }
    functions = {f"nvml{name}": lambda *_, it=it: it for name, it in answers.items()} | changes
    return SimpleNamespace(**functions)


def test_gpu_readings_are_in_our_units_and_missing_ones_are_none() -> None:
    found = Gpu(fake_nvml()).read([7])
    assert found["gpu_memory_bytes"] == 20 << 30
    assert found["gpu_watts"] == 412.5 and found["gpu_energy_joules"] is None
    assert found["gpu_throttled"] == ["power cap", "thermal"]


def test_a_driver_that_does_not_start_gives_no_readings() -> None:
    def unloaded() -> None:
        raise RuntimeError("Driver Not Loaded")

    assert Gpu(fake_nvml(nvmlInit=unloaded)).read() == {}


def test_watts_come_from_the_energy_counters(tmp_path: Path) -> None:
    for name, what in (("intel-rapl:0", "package-0"), ("intel-rapl:1", "psys")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "name").write_text(what)
        (tmp_path / name / "energy_uj").write_text("900000")
    (tmp_path / "intel-rapl:0:0").mkdir()  # a part of the package: must not be counted twice
    counter = tmp_path / "intel-rapl:0" / "energy_uj"
    now = iter((100.0, 100.1, 100.2, 100.3))
    rapl = Rapl(tmp_path, clock=lambda: next(now))
    assert rapl.read() is None
    counter.write_text("1100000")  # 0.2 J
    assert rapl.read() == pytest.approx(2.0, rel=0.01)
    counter.write_text("20000")
    assert rapl.read() is None, "it was set back, or wrapped around"
    counter.write_text("70000")
    assert rapl.read() == pytest.approx(0.5, rel=0.01)
    counter.write_text("nonsense")
    assert rapl.read() is None
    assert Rapl(tmp_path / "nothing").read() is None

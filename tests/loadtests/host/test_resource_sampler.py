"""What is sampled beside the load, and by whom: kernel counters, NVML, RAPL, hwmon."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from crossover.loadtests.errors import LoadError
from crossover.loadtests.host.resource_sampler import CpuPower, GpuMeter, Sampler
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
    found = GpuMeter(fake_nvml()).read([7])
    assert found["gpu_memory_bytes"] == 20 << 30
    assert found["gpu_watts"] == 412.5 and found["gpu_energy_joules"] is None
    assert found["gpu_throttled"] == ["power cap", "thermal"]


def test_a_driver_that_does_not_start_gives_no_readings() -> None:
    def unloaded() -> None:
        raise RuntimeError("Driver Not Loaded")

    assert GpuMeter(fake_nvml(nvmlInit=unloaded)).read() == {}


def test_watts_come_from_the_energy_counters(tmp_path: Path) -> None:
    folder = tmp_path / "sys/class/powercap"
    for name, what in (("intel-rapl:0", "package-0"), ("intel-rapl:1", "psys")):
        (folder / name).mkdir(parents=True)
        (folder / name / "name").write_text(what)
        (folder / name / "energy_uj").write_text("900000")
    (folder / "intel-rapl:0:0").mkdir()  # a part of the package: must not be counted twice
    counter = folder / "intel-rapl:0" / "energy_uj"
    now = iter((100.0, 100.1, 100.2, 100.3))
    power = CpuPower(tmp_path, clock=lambda: next(now))
    assert power.read() is None
    counter.write_text("1100000")  # 0.2 J
    assert power.read() == pytest.approx(2.0, rel=0.01)
    counter.write_text("20000")
    assert power.read() is None, "it was set back, or wrapped around"
    counter.write_text("70000")
    assert power.read() == pytest.approx(0.5, rel=0.01)
    counter.write_text("nonsense")
    assert power.read() is None
    assert CpuPower(tmp_path / "nothing").read() is None


@pytest.mark.parametrize(
    ("sensors", "watts"),
    [
        (  # Grace: a folder for each power meter of ACPI
            {
                "hwmon0/power1_average": "120000000",
                "hwmon0/device/power1_oem_info": "Grace Power Socket 0",
                "hwmon1/power1_average": "80000000",
                "hwmon1/device/power1_oem_info": "CPU Power Socket 0",
                "hwmon2/power1_average": "85000000",
                "hwmon2/device/power1_oem_info": "CPU Power Socket 1",
                "hwmon3/power1_average": "30000000",
                "hwmon3/device/power1_oem_info": "SysIO Power Socket 0",
            },
            165.0,
        ),
        (  # Altra
            {
                "hwmon0/power1_input": "90000000",
                "hwmon0/power1_label": "power1 CORE VRD",
                "hwmon0/power2_input": "20000000",
                "hwmon0/power2_label": "power2 SoC",
                "hwmon0/power3_input": "7000000",
                "hwmon0/power3_label": "power3 DIMM VRD1",
            },
            110.0,
        ),
        ({"hwmon0/power1_input": "5000000", "hwmon0/power1_label": "USB-C"}, None),
        ({"hwmon0/power1_input": "5000000"}, None),  # of an unknown part
    ],
)
def test_watts_of_servers_without_counters_come_from_their_sensors(
    tmp_path: Path, sensors: dict[str, str], watts: float | None
) -> None:
    for name, text in sensors.items():
        file = tmp_path / "sys/class/hwmon" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")
    assert CpuPower(tmp_path).read() == watts

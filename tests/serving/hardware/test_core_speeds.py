"""Measured speeds of CPUs that work at the same time: their structure, and what follows from it."""

from pathlib import Path

import pytest

from crossover.serving.hardware.core_speeds import (
    CoreSpeeds,
    last_cache_bytes,
    measure_core_speeds,
    thread_counts,
)
from crossover.serving.hardware.machine_facts import allowed_cores


@pytest.mark.parametrize(
    ("cpus", "counts"),
    [(1, [1]), (2, [1, 2]), (3, [1, 2, 3]), (8, [1, 2, 4, 8]), (15, [1, 2, 4, 8, 15])],
)
def test_threads_are_one_two_four_and_all(cpus: int, counts: list[int]) -> None:
    assert thread_counts(cpus) == counts


@pytest.mark.parametrize(
    ("cpus", "all_of_them", "half", "cores"),
    [
        (16, 15.2, 7.9, 16),  # cores
        (16, 11.5, 6.6, 16),  # cores whose clock falls as more of them work
        (16, 9.8, 7.8, 8),  # two threads of each core
        (2, 1.1, 1.0, 1),
        (2, 2.0, 1.0, 2),
        (1, 1.0, None, 1),
    ],
)
def test_cpus_that_add_little_to_half_of_them_count_as_half(
    cpus: int, all_of_them: float, half: float | None, cores: int
) -> None:
    speeds = CoreSpeeds(
        cpus=cpus,
        read_gigabytes_per_second={},
        compute={1: 1.0, cpus: all_of_them},
        half_compute=half,
    )
    assert speeds.equivalent_cores == cores


def test_this_machine_is_measured_and_the_process_may_run_where_it_could_before() -> None:
    cpus = allowed_cores()
    speeds = measure_core_speeds(cpus, memory_bytes=8 << 20)
    assert speeds.cpus == len(cpus) and speeds.compute[1] == 1.0
    assert [*speeds.read_gigabytes_per_second] == [*speeds.compute] == thread_counts(len(cpus))
    assert all(rate > 0 for rate in speeds.read_gigabytes_per_second.values())
    assert (speeds.half_compute is None) == (len(cpus) == 1)
    assert allowed_cores() == cpus


def test_the_largest_cache_is_read_from_the_kernel(tmp_path: Path) -> None:
    for index, size in (("0", "32K"), ("3", "32768K")):
        file = tmp_path / f"sys/devices/system/cpu/cpu0/cache/index{index}/size"
        file.parent.mkdir(parents=True)
        file.write_text(f"{size}\n")
    assert last_cache_bytes([0], tmp_path) == 32 << 20
    assert last_cache_bytes([0], tmp_path / "nothing") == 0

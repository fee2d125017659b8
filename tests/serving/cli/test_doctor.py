"""What doctor makes of facts: warnings with advice, and how to get what is missing."""

from importlib.metadata import version
from typing import Any

import msgspec
import pytest

from serving.backends.backend_table import BackendProbe
from serving.cli.doctor_command import (
    BackendReport,
    Diagnosis,
    advice,
    machine_rows,
    show,
    warnings_of,
)
from serving.hardware.gpus import GpuFacts
from tests.serving.placement.test_plan import GIB, machine

WORKS = BackendProbe("llama_cpp", True, "1.0", details={"system_info": "AVX2 = 1 [x]"})


def names(**changes: Any) -> list[str]:
    return [
        warning.name
        for warning in warnings_of(
            msgspec.structs.replace(machine(), **changes), [WORKS], 100 * GIB
        )
    ]


def test_a_healthy_machine_gets_no_warning() -> None:
    assert names() == []
    assert names(governor="performance", cgroup_cores=4.0, swap_total_bytes=GIB, numa_nodes=1) == []


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"allowed_cores": (0,)}, "one_core"),
        ({"cgroup_cores": 2.5}, "cpu_quota"),
        ({"governor": "powersave"}, "governor"),
        ({"swap_total_bytes": GIB, "swap_used_bytes": GIB}, "swap_used"),
        ({"cgroup_memory_bytes": 3 * GIB}, "memory_limit"),
        ({"memory_available_bytes": GIB}, "little_memory"),
        ({"isa": ("sse4_2",)}, "no_avx2"),
        ({"numa_nodes": 2}, "numa"),
    ],
)
def test_each_warning_about_the_machine_has_its_name(changes: dict[str, Any], name: str) -> None:
    assert names(**changes) == [name]


def test_a_full_disk_and_no_backend_are_warnings_too() -> None:
    broken = BackendProbe("llama_cpp", False, problem="broken")
    assert [warning.name for warning in warnings_of(machine(), [broken], GIB)] == [
        "little_disk",
        "no_backend",
    ]


def test_advice_names_the_extra_and_the_compiler_where_it_is_missing() -> None:
    missing = BackendProbe("llama_cpp", False, problem="the package llama_cpp is not installed")
    debian = msgspec.structs.replace(machine(), system="Debian GNU/Linux 12")
    assert "apt-get install g++" in (advice(missing, debian, None) or "") and "[llama-cpp]" in (
        advice(missing, debian, None) or ""
    )
    assert advice(missing, debian, "g++") == "pip install 'llm-crossover[llama-cpp]'"
    broken = advice(BackendProbe("llama_cpp", False, problem="ended by SIGILL"), debian, "g++")
    assert broken == (
        "reinstall it: pip install --force-reinstall --no-cache-dir --no-deps "
        f"llama-cpp-python=={version('llama-cpp-python')}"
    )
    assert advice(WORKS, debian, "g++") is None


def test_the_page_for_people_says_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    facts = machine(
        gpus=(GpuFacts("Test GPU", "nvidia", 80 * GIB, 70 * GIB, "550.1", "9.0"),),
        bandwidth_bytes_per_second=2.05e10,
        gemm_flops_per_second=1.9e11,
        cgroup_cores=1.5,
    )
    broken = BackendProbe("torch", False, problem="it [bold]broke")
    reports = (BackendReport(WORKS), BackendReport(broken, "pip install 'llm-crossover[torch]'"))
    diagnosis = Diagnosis(
        facts, reports, None, "/cache", 9 * GIB, tuple(warnings_of(facts, [WORKS], 9 * GIB))
    )
    rows = dict(machine_rows(diagnosis))
    assert rows["bandwidth"] == "20.5 GB/s read" and rows["GPU 0"].startswith(
        "Test GPU, 80 GiB, 70 GiB free, driver 550.1"
    )
    assert rows["arithmetic"] == "190 GFLOP/s in float32 products"
    assert "1.5 cores' time" in rows["cores"] and rows["C++ compiler"].startswith("none:")
    show(diagnosis)
    page = capsys.readouterr().out
    for text in (
        "it [bold]broke",
        "pip install 'llm-crossover[torch]'",
        "cpu_quota",
        "Test CPU",
        "AVX2 = 1 [x]",
    ):
        assert text in page

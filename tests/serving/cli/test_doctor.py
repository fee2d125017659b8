"""What doctor makes of facts: warnings with advice, and how to get what is missing."""

import pwd
from importlib.metadata import version
from typing import Any

import msgspec
import pytest

from crossover.serving.backends.backend_probe import BackendProbe
from crossover.serving.cli import doctor_command
from crossover.serving.cli.doctor_command import (
    Diagnosis,
    amx_text,
    backend_advice,
    diagnosis_lines,
    instructions_of_build,
    machine_warnings,
    speed_rows,
    warnings_of_builds,
    warnings_of_cores,
)
from crossover.serving.hardware.core_speeds import CoreSpeeds
from crossover.serving.hardware.gpus import GpuFacts
from tests.serving.placement.test_plan import GIB, machine

WORKS = BackendProbe("llama_cpp", True, "1.0", details={"system_info": "AVX2 = 1 [x]"})


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({}, []),
        ({"cgroup_cores": 4.0}, []),
        ({"cgroup_cores": 2.5}, ["cpu_quota"]),
        ({"memory_available_bytes": GIB}, ["little_memory"]),
        ({"isa": ("sse4_2",)}, ["no_avx2"]),
        ({"architecture": "aarch64", "isa": ("asimd",)}, ["no_dot_product"]),
        ({"architecture": "aarch64", "isa": ("asimd", "asimddp")}, []),
    ],
)
def test_each_warning_about_the_machine_has_its_name(
    changes: dict[str, Any], names: list[str]
) -> None:
    facts = msgspec.structs.replace(machine(), **changes)
    assert [*dict(machine_warnings(facts, True, 100 * GIB))] == names
    assert [*dict(machine_warnings(facts, False, GIB))] == [*names, "little_disk", "no_backend"]


def test_advice_names_the_extra_and_the_compiler_where_it_is_missing() -> None:
    missing = BackendProbe("llama_cpp", False, problem="its package llama_cpp is not installed")
    advised = backend_advice(missing, has_compiler=False, has_gpu=False) or ""
    assert "apt-get install g++" in advised and "[llama-cpp]" in advised
    assert backend_advice(missing, True, False) == "pip install 'llm-crossover[llama-cpp]'"
    flagged = backend_advice(missing, True, False, "-DFLAG=1")
    assert flagged == "CMAKE_ARGS=\"-DFLAG=1\" pip install 'llm-crossover[llama-cpp]'"
    broken = BackendProbe("llama_cpp", False, problem="ended by SIGILL")
    assert backend_advice(broken, True, False) == (
        "reinstall it: pip install --force-reinstall --no-cache-dir --no-deps "
        f"llama-cpp-python=={version('llama-cpp-python')}"
    )
    assert backend_advice(WORKS, True, has_gpu=False) is None
    assert "GGML_VULKAN" in (backend_advice(WORKS, True, has_gpu=True) or "")


def test_the_page_for_people_lists_what_is_installed() -> None:
    facts = machine(
        gpus=(GpuFacts("Test GPU", "nvidia", 80 * GIB, 70 * GIB, "550.1"),),
        cgroup_cores=1.5,
    )
    broken = BackendProbe("torch", False, problem="it [bold]broke")
    advised = {"torch": "pip install 'llm-crossover[torch]'"}
    warnings = dict(machine_warnings(facts, True, 9 * GIB))
    shown = "\n".join(
        diagnosis_lines(Diagnosis(facts, (WORKS, broken), advised, "/cache", 9 * GIB, warnings))
    )
    for text in (
        *("Test CPU", "CPU quota 1.5 cores"),
        *("Test GPU, 80 GiB, 70 GiB free, driver 550.1"),
        *("it [bold]broke", "-> pip install 'llm-crossover[torch]'", "cpu_quota", "AVX2 = 1 [x]"),
    ):
        assert text in shown


def test_a_user_without_a_home_sees_everything_else(monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody(_: int) -> None:
        raise KeyError("uid not found")

    for name in ("HOME", "CROSSOVER_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", nobody)
    cache, free_bytes = doctor_command._cache()
    warnings = dict(machine_warnings(machine(), True, free_bytes))
    shown = "\n".join(
        diagnosis_lines(Diagnosis(machine(), (WORKS,), {}, cache, free_bytes, warnings))
    )
    assert "Test CPU" in shown and "CROSSOVER_CACHE" in shown and "little_disk" not in shown


HYPERTHREADS = CoreSpeeds(
    cpus=16,
    read_gigabytes_per_second={1: 12.0, 8: 59.0, 16: 62.0},
    compute={1: 1.0, 8: 7.4, 16: 8.1},
    half_compute=7.6,
)


def test_hyperthreads_are_shown_as_fewer_cores() -> None:
    shown = dict(speed_rows(HYPERTHREADS))
    assert shown["memory reads"] == "1: 12, 8: 59, 16: 62 GB/s by threads"
    assert shown["together"].startswith("16 CPUs behave like 8 cores")
    warned = dict(warnings_of_cores(16, HYPERTHREADS))
    assert "--threads 8" in warned["hyperthreads"]
    # Where the kernel shows the siblings, an engine has a thread for each core anyway.
    assert not dict(warnings_of_cores(8, HYPERTHREADS))


def test_cpus_that_are_cores_need_no_warning() -> None:
    cores = msgspec.structs.replace(HYPERTHREADS, compute={1: 1.0, 8: 7.4, 16: 13.9})
    assert dict(speed_rows(cores))["together"].startswith("16 CPUs behave like 16 cores")
    assert not dict(warnings_of_cores(16, cores)) and not dict(warnings_of_cores(16, None))


@pytest.mark.parametrize(
    ("isa", "system_info", "unused", "amx"),
    [
        (("avx2", "amx_int8"), "AVX2 = 1 | AMX_INT8 = 1 | REPACK = 1", [], "active"),
        (("avx2", "amx_int8"), "AVX2 = 1 | REPACK = 1", ["AMX_INT8"], "not in this build"),
        (("avx2",), "AVX2 = 1", [], "not on this CPU"),
        (("avx2", "avx512_vnni"), "AVX2 = 1 | FMA = 1", ["AVX512_VNNI"], "not on this CPU"),
    ],
)
def test_doctor_lists_the_instructions_that_llama_cpp_leaves_unused(
    isa: tuple[str, ...], system_info: str, unused: list[str], amx: str
) -> None:
    assert instructions_of_build(isa, system_info).unused == unused
    assert amx_text(isa, system_info) == amx
    facts = machine(isa=isa)
    probe = msgspec.structs.replace(WORKS, details={"system_info": system_info})
    warned = dict(warnings_of_builds(facts, (probe,)))
    assert list(warned) == (["slow_build"] if unused else [])
    assert f"AMX: {amx}" in "\n".join(
        diagnosis_lines(Diagnosis(facts, (probe,), {}, "/cache", None, warned))
    )


@pytest.mark.parametrize(
    ("isa", "system_info", "lacking"),
    [
        (("asimd",), "NEON = 1 | DOTPROD = 1", ["DOTPROD"]),
        (("avx2",), "AVX2 = 1 | AVX512 = 1 | AVX512_VNNI = 1", ["AVX512", "AVX512_VNNI"]),
        (("avx2",), "AVX2 = 1", []),
        ((), "AVX2 = 1", []),  # the kernel does not report instructions
    ],
)
def test_doctor_warns_of_a_build_with_instructions_that_the_cpu_lacks(
    isa: tuple[str, ...], system_info: str, lacking: list[str]
) -> None:
    probe = msgspec.structs.replace(WORKS, details={"system_info": system_info})
    warned = dict(warnings_of_builds(machine(isa=isa), (probe,), "-DFLAG=1"))
    assert ("foreign_build" in warned) == bool(lacking)
    if lacking:
        assert f"uses {', '.join(lacking)}, which this CPU does not have" in warned["foreign_build"]
        assert 'CMAKE_ARGS="-DFLAG=1" pip install' in warned["foreign_build"]


def test_arm_is_not_asked_for_amx() -> None:
    facts = machine(architecture="aarch64", isa=("asimd", "asimddp"))
    shown = "\n".join(diagnosis_lines(Diagnosis(facts, (WORKS,), {}, "/cache", None, {})))
    assert "system_info" in shown and "AMX" not in shown

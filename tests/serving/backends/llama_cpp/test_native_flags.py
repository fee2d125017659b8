"""Compile flags of llama.cpp for CPUs that the compiler does not know."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from crossover.serving.backends.llama_cpp import native_flags as module
from crossover.serving.backends.llama_cpp.native_flags import native_flags

CPUINFO = Path(__file__).parents[3] / "models/cpuinfo"
KNOWN = ' cc1plus -E -v -mcpu=neoverse-v1 "-mlittle-endian"'
UNKNOWN = " cc1plus -E -v -march=armv8-a+dotprod+i8mm+bf16 -mlittle-endian"


def features_of(name: str) -> str:
    match = re.search(r"^Features\s*:(.*)", (CPUINFO / name).read_text(), re.MULTILINE)
    assert match is not None
    return match[1]


@pytest.mark.parametrize(
    ("name", "march"),
    [
        ("apple_vm", "armv8.6-a+dotprod+fp16+i8mm"),
        ("graviton3", "armv8.6-a+dotprod+fp16+i8mm"),
        ("graviton2", "armv8.2-a+dotprod+fp16"),
        ("graviton1", "armv8-a"),
    ],
)
def test_a_cpu_that_the_compiler_does_not_know_gets_its_architecture_by_name(
    name: str, march: str
) -> None:
    flags = native_flags("aarch64", UNKNOWN, features_of(name))
    assert flags == f"-DGGML_NATIVE=OFF -DGGML_CPU_ARM_ARCH={march}"
    assert native_flags("aarch64", KNOWN, features_of(name)) == ""
    assert native_flags("x86_64", UNKNOWN, features_of(name)) == ""


def test_the_compiler_of_the_machine_is_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = tmp_path / "c++"
    compiler.write_text(f"#!/bin/sh\necho '{UNKNOWN}' >&2\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setattr(module, "CPUINFO", CPUINFO / "apple_vm")
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    assert "armv8.6-a" in module.native_flags_here()
    monkeypatch.setenv("CXX", str(tmp_path / "missing"))
    assert module.native_flags_here() == ""


def test_the_makefile_can_run_it_before_anything_is_installed(tmp_path: Path) -> None:
    # -I: neither the project's packages nor installed ones can be imported from a variable.
    command = [sys.executable, "-I", "-S", str(Path(module.__file__))]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)
    assert done.stdout.strip() == module.native_flags_here()

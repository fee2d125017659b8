"""docker/amx.h: a configuration of AMX's tiles reaches ldtilecfg whole, whatever the compiler."""

import platform
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LOADS = """
#include <immintrin.h>
void load() {
    alignas(64) unsigned char config[64] = {1};
    config[48] = 91;
    _tile_loadconfig(config);
}
"""


@pytest.mark.skipif(platform.machine() != "x86_64", reason="AMX is of x86-64")
@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")
def test_no_byte_of_a_tile_configuration_is_dropped() -> None:
    made = subprocess.run(
        ["g++", "-x", "c++", "-O3", "-mamx-tile", "-include", ROOT / "docker" / "amx.h", "-S"]
        + ["-o", "-", "-"],
        input=LOADS,
        capture_output=True,
        text=True,
        check=True,
    )
    assert "$91" in made.stdout and "ldtilecfg" in made.stdout


def test_the_makefile_compiles_llama_cpp_with_it() -> None:
    commands = [
        line
        for line in (ROOT / "Makefile").read_text().splitlines()
        if "$(BIN)/pip install" in line and ("[dev]" in line or "llama-cpp-python" in line)
    ]
    assert len(commands) == 2 and all("$(LLAMA_BUILD)" in line for line in commands)
    assert '-include "$(CURDIR)/docker/amx.h"' in (ROOT / "Makefile").read_text()

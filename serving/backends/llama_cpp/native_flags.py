"""CMake flags for llama.cpp on an ARM CPU that is newer than the compiler. Standard library only.

    python serving/backends/llama_cpp/native_flags.py     # for CMAKE_ARGS; prints nothing elsewhere

llama.cpp is compiled with -mcpu=native. GCC that does not know the CPU replaces that by
-march=armv8-a with single extensions, such as GCC 12 on an Apple CPU in a virtual machine. Its
arm_neon.h then refuses llama.cpp's own functions ("target specific option mismatch"). The Makefile
runs this file before anything is installed; `crossover doctor` advises the same flags.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from pathlib import Path

GENERIC_ARCHITECTURE = "-march=armv8-a+"  # what GCC makes of a CPU that it does not know
CPUINFO = Path("/proc/cpuinfo")


def native_flags(architecture: str, compiler_output: str, features: str) -> str:
    """Return the flags, or "" where -mcpu=native serves.

    `compiler_output`: what `c++ -mcpu=native -E -v` prints. `features`: the instruction sets of the
    CPU as /proc/cpuinfo names them.
    """
    if architecture != "aarch64" or GENERIC_ARCHITECTURE not in compiler_output:
        return ""
    if "asimddp" not in features.split():
        return "-DGGML_NATIVE=OFF -DGGML_CPU_ARM_ARCH=armv8-a"
    has_i8mm = "i8mm" in features.split()
    march = "armv8.6-a+dotprod+fp16+i8mm" if has_i8mm else "armv8.2-a+dotprod+fp16"
    return f"-DGGML_NATIVE=OFF -DGGML_CPU_ARM_ARCH={march}"


def native_flags_here() -> str:
    """Return the flags for this machine and its C++ compiler. Takes milliseconds."""
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
    if platform.machine() != "aarch64" or not compiler:
        return ""
    # Without a shell, since CXX may contain anything, and without variables, which may be secrets.
    path = {"PATH": os.environ.get("PATH", os.defpath)}
    words = [*compiler.split(), "-mcpu=native", "-x", "c++", "-E", "-v", os.devnull]
    try:
        output = subprocess.run(words, capture_output=True, text=True, env=path).stderr
        features = re.search(r"^Features\s*:(.*)", CPUINFO.read_text(), re.MULTILINE)
    except OSError:
        return ""
    return native_flags("aarch64", output, features[1] if features else "")


if __name__ == "__main__":
    print(native_flags_here())

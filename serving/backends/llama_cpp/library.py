"""llama.cpp as a library: loading it, its log, and its build.

The log of the process goes to one LogTail, so that an error message can end with llama.cpp's words.
"""

from __future__ import annotations

import collections
import ctypes
import importlib.metadata
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from crossover.serving.backends.backend_probe import BackendProbe
from crossover.serving.errors import BackendUnavailable, Cause
from crossover.serving.hardware.gpus import VULKAN

PACKAGE = "llama-cpp-python"

_LOG_WARN, _LOG_ERROR, _LOG_CONTINUED = 3, 4, 5

# GGML's name of a backend for GPUs -> the vendor whose GPUs it drives.
VENDORS: dict[str, str] = {"CUDA": "nvidia", "ROCm": "amd", "Vulkan": VULKAN}
_DEVICE = re.compile(
    r"using device \S+ \((.*?)\)(?: \((?:[0-9a-fA-F:.]+|unknown id)\))? - \d+ MiB free"
)

_FUNCTION = re.compile(r"^\w+: (?:error loading model: )?")  # at the beginning of a line


class LogTail:
    """llama.cpp's log: the last errors for messages, and the GPU that a load uses."""

    def __init__(self) -> None:
        self.errors: collections.deque[str] = collections.deque(maxlen=8)
        self.gpu: str | None = None  # its name, without what differs at every load
        self.on_line: Callable[[str], None] | None = None  # called with every line
        self._level = 0
        self._callback = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)(
            self._take
        )
        self._last_word = ctypes.CFUNCTYPE(None, ctypes.c_char_p)(self._abort)

    def install(self, llama: Any) -> None:
        """Make this the log of the process, which has only one."""
        llama.llama_log_set(self._callback, ctypes.c_void_p(0))
        llama.llama_cpp._lib.ggml_set_abort_callback(self._last_word)

    def reason(self) -> str:
        """Return the last errors of the log in one line, without folders and function names."""
        lines = [_FUNCTION.sub("", line) for line in self.errors]
        # The last line of a failed load says only that it failed.
        informative = [line for line in lines if line != "failed to load model"] or lines
        return _without_folders("; ".join(informative) or "no reason given")

    def _take(self, level: int, text: bytes, _: Any) -> None:
        self._level = level = self._level if level == _LOG_CONTINUED else level
        line = text.decode("utf-8", "replace").strip()
        if self.on_line is not None:
            self.on_line(line)
        if level in (_LOG_WARN, _LOG_ERROR) and line:
            self.errors.append(line)
        if level == _LOG_ERROR and line:
            # Printed too, because llama.cpp ends the process after some errors, such as CUDA's.
            print(f"llama.cpp: {line}", file=sys.stderr, flush=True)
        if device := _DEVICE.search(line):
            self.gpu = self.gpu or device[1]

    def _abort(self, message: bytes) -> None:
        """Print the reason in place of a backtrace; llama.cpp ends the process after it."""
        line = _without_folders(message.decode("utf-8", "replace").strip())
        print(f"llama.cpp: {line}", file=sys.stderr, flush=True)


def _without_folders(text: str) -> str:
    return re.sub(r"(?:/[^/\s'\"]+)+/", "", text)


LOG = LogTail()


def library() -> Any:
    """Return the llama_cpp module with its log in LOG. Raises BackendUnavailable."""
    try:
        import llama_cpp
    except (ImportError, OSError, RuntimeError) as problem:  # RuntimeError: of its shared library
        raise BackendUnavailable(
            f"{PACKAGE} cannot be imported: {problem}. Install it: pip install "
            "'llm-crossover[llama-cpp]'"
        ) from problem
    LOG.install(llama_cpp)
    _load_devices(llama_cpp)
    llama_cpp.llama_backend_init()
    return llama_cpp


def _load_devices(llama: Any) -> None:
    """Load the GGML backends that are separate files next to the library, the best one for this
    CPU among them.

    A build for many CPUs (GGML_BACKEND_DL) contains no backends, and llama.cpp does not look for
    any. They are loaded through libllama, because a wheel contains libggml.so and libggml.so.0 as
    two files: opening one by its path could load a second GGML, whose backends llama.cpp would not
    see.
    """
    ggml = llama.llama_cpp._lib
    ggml.ggml_backend_reg_count.restype = ctypes.c_size_t
    if ggml.ggml_backend_reg_count() == 0:
        folder = Path(llama.__file__).parent / "lib"
        ggml.ggml_backend_load_all_from_path(os.fsencode(folder))


def probe() -> BackendProbe:
    """Return what this build of llama.cpp supports. Runs in a child process."""
    llama = library()
    find_backend = llama.llama_cpp._lib.ggml_backend_reg_by_name
    find_backend.argtypes, find_backend.restype = [ctypes.c_char_p], ctypes.c_void_p
    build = next((name for name in VENDORS if find_backend(name.encode())), "")
    gpu, cause = bool(llama.llama_supports_gpu_offload()), Cause.no_device
    note = f"built with {build}" if gpu else f"built with {build}, which finds no device here"
    if not build:
        note, cause = "this build of llama.cpp is for the CPU only", Cause.backend_missing
    return BackendProbe(
        "llama_cpp",
        works=True,
        version=llama.__version__,
        gpu=gpu,
        gpu_note=note,
        gpu_cause=None if gpu else cause,
        gpu_vendor=VENDORS.get(build),
        details=build_details(llama),
    )


def build_details(llama: Any) -> dict[str, str]:
    """Return the versions of library and package, and llama.cpp's description of the build with
    the CPU instruction sets that it uses."""
    return {
        "llama_cpp": llama.llama_version().decode(),
        "package": f"{PACKAGE} {importlib.metadata.version(PACKAGE)}",
        "system_info": llama.llama_print_system_info().decode(errors="replace").strip(" |\n"),
    }


def is_memory(reason: str) -> bool:
    """Return whether llama.cpp's error says that memory ran out."""
    pattern = r"out of memory|bad_alloc|(failed to|unable to|cannot) allocate"
    return re.search(pattern, reason, re.IGNORECASE) is not None

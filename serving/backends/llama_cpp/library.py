"""llama.cpp as a library: loading it, its log, and its build.

llama.cpp has one log for the whole process. LOG keeps its last errors, so that our error messages
can give llama.cpp's reason.
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

_LOG_WARN, _LOG_ERROR, _LOG_CONTINUED = 3, 4, 5  # enum ggml_log_level

# GGML's name of a backend for GPUs -> the vendor whose GPUs it drives.
VENDORS: dict[str, str] = {"CUDA": "nvidia", "ROCm": "amd", "Vulkan": VULKAN}
# "using device CUDA0 (NVIDIA H200) (0000:18:00.0) - 142000 MiB free"; the group is the GPU's name.
_DEVICE = re.compile(
    r"using device \S+ \((.*?)\)(?: \((?:[0-9a-fA-F:.]+|unknown id)\))? - \d+ MiB free"
)
# The function's name at the beginning of an error: "llama_model_load: error loading model: ..."
_FUNCTION = re.compile(r"^\w+: (?:error loading model: )?")


class LogTail:
    """The last warnings and errors of llama.cpp's log, and the GPU that a load uses."""

    def __init__(self) -> None:
        self.errors: collections.deque[str] = collections.deque(maxlen=8)
        self.gpu: str | None = None  # the GPU's name; None: no model was loaded on a GPU
        self.on_line: Callable[[str], None] | None = None  # called with every line
        self._level = 0  # of the line before
        # As attributes, because ctypes does not keep the callbacks that it gives to C alive.
        self._log_callback = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)(
            self.add
        )
        self._abort_callback = ctypes.CFUNCTYPE(None, ctypes.c_char_p)(self._print_abort)

    def install(self, llama: Any) -> None:
        """Make llama.cpp write its log here."""
        llama.llama_log_set(self._log_callback, ctypes.c_void_p(0))
        llama.llama_cpp._lib.ggml_set_abort_callback(self._abort_callback)

    def reason(self) -> str:
        """Return the last errors of the log in one line, without folders and function names."""
        lines = [_FUNCTION.sub("", line) for line in self.errors]
        # The last line of a failed load says only that it failed.
        informative = [line for line in lines if line != "failed to load model"] or lines
        return _without_folders("; ".join(informative) or "no reason given")

    def add(self, level: int, text: bytes, _: Any) -> None:
        """Take one line from llama.cpp. A continued line has the level of the line before it."""
        if level == _LOG_CONTINUED:
            level = self._level
        self._level = level
        line = text.decode("utf-8", "replace").strip()
        if self.on_line is not None:
            self.on_line(line)
        if level in (_LOG_WARN, _LOG_ERROR) and line:
            self.errors.append(line)
        if level == _LOG_ERROR and line:
            # Printed too, because llama.cpp ends the process after some errors, such as CUDA's.
            print(f"llama.cpp: {line}", file=sys.stderr, flush=True)
        if self.gpu is None and (device := _DEVICE.search(line)):
            self.gpu = device[1]

    def _print_abort(self, message: bytes) -> None:
        """Print why llama.cpp is about to abort the process, instead of its backtrace."""
        line = _without_folders(message.decode("utf-8", "replace").strip())
        print(f"llama.cpp: {line}", file=sys.stderr, flush=True)


def _without_folders(text: str) -> str:
    """Return the text with each absolute path shortened to its last part."""
    return re.sub(r"(?:/[^/\s'\"]+)+/", "", text)


LOG = LogTail()


def library() -> Any:
    """Return the llama_cpp module, which logs to LOG. Raises BackendUnavailable."""
    try:
        import llama_cpp
    except (ImportError, OSError, RuntimeError) as problem:
        # llama_cpp raises RuntimeError if its shared library cannot be loaded.
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
    find_backend.argtypes = [ctypes.c_char_p]
    find_backend.restype = ctypes.c_void_p
    gpu_backends = [name for name in VENDORS if find_backend(name.encode())]
    gpu_backend = gpu_backends[0] if gpu_backends else None
    has_gpu = bool(llama.llama_supports_gpu_offload())
    cause: Cause | None = None
    if gpu_backend is None:
        note = "this build of llama.cpp is for the CPU only"
        if not has_gpu:  # some builds offload to a backend that VENDORS does not have, such as SYCL
            cause = Cause.backend_missing
    elif has_gpu:
        note = f"built with {gpu_backend}"
    else:
        note = f"built with {gpu_backend}, which finds no device here"
        cause = Cause.no_device
    return BackendProbe(
        "llama_cpp",
        works=True,
        version=llama.__version__,
        gpu=has_gpu,
        gpu_note=note,
        gpu_cause=cause,
        gpu_vendor=None if gpu_backend is None else VENDORS[gpu_backend],
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


def is_out_of_memory(reason: str) -> bool:
    """Return whether llama.cpp's error says that memory ran out."""
    pattern = r"out of memory|bad_alloc|(failed to|unable to|cannot) allocate"
    return re.search(pattern, reason, re.IGNORECASE) is not None

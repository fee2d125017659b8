"""llama.cpp as a library: loading it, its log, its build, and what it says of its memory.

`library()` imports llama_cpp late: libgomp reads its environment once, when it is loaded. The log
of the process goes to one LogTail, so that an error message can end with llama.cpp's own words.
"""

from __future__ import annotations

import collections
import ctypes
import importlib.metadata
import os
import re
import sys
from pathlib import Path
from typing import Any

import msgspec

from models.machine import cpu_flags
from serving.backends.backend_interface import MemoryParts
from serving.errors import BackendUnavailable, Unsupported
from serving.hardware.gpus import VULKAN

PACKAGE = "llama-cpp-python"

# ggml's numbers for KV types (enum ggml_type), llama.cpp's for flash attention.
KV_TYPES: dict[str, int] = {"fp32": 0, "fp16": 1, "q4_0": 2, "q8_0": 8, "bf16": 30}
FLASH_ATTENTION: dict[str, int] = {"auto": -1, "off": 0, "on": 1}
_LOG_DEBUG, _LOG_WARN, _LOG_ERROR, _LOG_CONTINUED = 1, 3, 4, 5

# What /proc/cpuinfo calls an instruction set -> what llama_print_system_info calls it.
ISA: dict[str, str] = {
    "avx2": "AVX2",
    "fma": "FMA",
    "f16c": "F16C",
    "avx512f": "AVX512",
    "avx512_vnni": "AVX512_VNNI",
    "avx_vnni": "AVX_VNNI",
    "avx512_bf16": "AVX512_BF16",
    "amx_int8": "AMX_INT8",
    "asimddp": "DOTPROD",
    "i8mm": "MATMUL_INT8",
    "sve": "SVE",
}


# GGML's name of a backend for GPUs -> the vendor whose GPUs it drives.
VENDORS: dict[str, str] = {"CUDA": "nvidia", "ROCm": "amd", "Vulkan": VULKAN}


class LogTail:
    """llama.cpp's log: the last errors for messages, and the lines of a load for `memory_parts`."""

    def __init__(self) -> None:
        self.errors: collections.deque[str] = collections.deque(maxlen=8)
        self.lines: list[str] = []
        self.recording = False
        self._level = _LOG_DEBUG
        self._callback = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)(
            self._take
        )
        self._last_word = ctypes.CFUNCTYPE(None, ctypes.c_char_p)(self._abort)

    def install(self, llama: Any) -> None:
        """Make this the log of the process, which has only one."""
        llama.llama_log_set(self._callback, ctypes.c_void_p(0))
        llama.llama_cpp._lib.ggml_set_abort_callback(self._last_word)

    def record(self) -> None:
        self.lines = []
        self.recording = True
        self.errors.clear()

    def stop(self) -> list[str]:
        """The lines of a load that has worked; its warnings are no reasons of later failures."""
        self.recording = False
        self.errors.clear()
        return self.lines

    def reason(self, fallback: str) -> str:
        """The last errors in llama.cpp's words, without paths; `fallback` where it said nothing."""
        return _without_folders("; ".join(self.errors) or fallback)

    def _take(self, level: int, text: bytes, _: Any) -> None:
        if level == _LOG_CONTINUED:
            level = self._level
        self._level = level
        if level == _LOG_DEBUG:
            return
        line = text.decode("utf-8", "replace").strip()
        if level in (_LOG_WARN, _LOG_ERROR) and line:
            self.errors.append(line)
        if level == _LOG_ERROR and line:
            # It may be the last word: llama.cpp ends the process on a CUDA error.
            print(f"llama.cpp: {line}", file=sys.stderr, flush=True)
        if self.recording:
            self.lines.append(line)

    def _abort(self, message: bytes) -> None:
        """Before llama.cpp ends the process: the reason, in place of a backtrace."""
        line = _without_folders(message.decode("utf-8", "replace").strip())
        if "pre-allocated tensor (cache_" in line:
            line = (
                "the device cannot work on a layer's KV cache of this size (its largest buffer) or "
                f"type; fewer slots or a shorter context need less: {line}"
            )
        print(f"llama.cpp: {line}", file=sys.stderr, flush=True)


def _without_folders(text: str) -> str:
    return re.sub(r"(?:/[^/\s'\"]+)+/", "", text)


LOG = LogTail()


def library(wait_policy: str = "default") -> Any:
    """The llama_cpp module with its log in LOG.

    Raises BackendUnavailable where it cannot be imported, Unsupported where it is loaded already
    with another `wait_policy`.
    """
    if wait_policy != "default":
        if "llama_cpp" in sys.modules and os.environ.get("OMP_WAIT_POLICY") != wait_policy:
            raise Unsupported(
                f"option wait_policy = {wait_policy!r} comes too late: llama.cpp is loaded in "
                "this process already",
                "wait_policy",
            )
        os.environ["OMP_WAIT_POLICY"] = wait_policy
        os.environ.pop("GOMP_SPINCOUNT", None)  # it would win
    try:
        import llama_cpp
    except (ImportError, OSError, RuntimeError) as problem:  # RuntimeError: of its shared library
        raise BackendUnavailable(
            f"{PACKAGE} cannot be imported: {problem}; pip install 'llm-crossover[llama-cpp]'"
        ) from problem
    LOG.install(llama_cpp)
    _load_devices(llama_cpp)
    llama_cpp.llama_backend_init()
    return llama_cpp


def _load_devices(llama: Any) -> None:
    """Load GGML's backends that are files beside the library, the best for this CPU.

    A build for many CPUs (GGML_BACKEND_DL) has none inside, and llama.cpp alone looks for none.
    Asked through libllama: a wheel has libggml.so and libggml.so.0 as two files, so that opening
    one by its path may load a second GGML, whose backends llama.cpp does not see.
    """
    ggml = llama.llama_cpp._lib
    ggml.ggml_backend_reg_count.restype = ctypes.c_size_t
    if ggml.ggml_backend_reg_count() == 0:
        folder = Path(llama.__file__).parent / "lib"
        ggml.ggml_backend_load_all_from_path(os.fsencode(folder))


def gpu_build(llama: Any) -> str | None:
    """GGML's name of the backend for GPUs that is built in; None: a build for the CPU only."""
    ggml = llama.llama_cpp._lib
    ggml.ggml_backend_reg_get.argtypes = [ctypes.c_size_t]
    ggml.ggml_backend_reg_get.restype = ctypes.c_void_p
    ggml.ggml_backend_reg_name.argtypes = [ctypes.c_void_p]
    ggml.ggml_backend_reg_name.restype = ctypes.c_char_p
    ggml.ggml_backend_reg_count.restype = ctypes.c_size_t
    built = {
        ggml.ggml_backend_reg_name(ggml.ggml_backend_reg_get(index)).decode()
        for index in range(ggml.ggml_backend_reg_count())
    }
    return next((name for name in VENDORS if name in built), None)


def device_named(llama: Any, name: str) -> Any:
    """A list of GGML with one device ("Vulkan0"). Raises BackendUnavailable where it is gone."""
    ggml = llama.llama_cpp._lib
    ggml.ggml_backend_dev_by_name.argtypes = [ctypes.c_char_p]
    ggml.ggml_backend_dev_by_name.restype = ctypes.c_void_p
    device = ggml.ggml_backend_dev_by_name(name.encode())
    if device is None:
        raise BackendUnavailable(f"llama.cpp sees no device {name}")
    return (ctypes.c_void_p * 2)(device, None)


def build_details(llama: Any) -> dict[str, str]:
    """Which build this is. `isa_unused`: what the CPU has and the build does not use."""
    system = llama.llama_print_system_info().decode().strip(" |\n")
    details = {
        "llama_cpp": llama.llama_version().decode(),
        "package": f"{PACKAGE} {importlib.metadata.version(PACKAGE)}",
        "wheel": _wheel_origin(),
        "system_info": system,
    }
    missing = missing_isa(system, cpu_flags())
    if missing:
        details["isa_unused"] = ", ".join(missing)
    return details


def missing_isa(system_info: str, cpu_flags: frozenset[str]) -> list[str]:
    """Instruction sets of the CPU that the build was not compiled for, in llama.cpp's names."""
    built = {
        name.strip().split(": ")[-1] for name in re.findall(r"([\w: ]+?)\s*=\s*1", system_info)
    }
    return [name for flag, name in ISA.items() if flag in cpu_flags and name not in built]


def _wheel_origin() -> str:
    """Tag and origin of the installed wheel. PyPI has sources only: pip builds the wheel here."""
    distribution = importlib.metadata.distribution(PACKAGE)
    tag = re.search(r"^Tag: (.*)$", distribution.read_text("WHEEL") or "", re.MULTILINE)
    parts = [tag.group(1) if tag else "unknown tag"]
    origin = distribution.read_text("direct_url.json")
    if origin:
        url = str(msgspec.json.decode(origin).get("url", ""))
        parts.append("from a file" if url.startswith("file:") else f"from {url}")
    elif tag and "manylinux" in tag.group(1):
        parts.append("prebuilt")
    else:
        parts.append("built from source where it was installed")
    return ", ".join(parts)


_BUFFER = re.compile(r"(\S+)\s+(model|KV|compute|output|RS) buffer size\s*=\s*([\d.]+) MiB")
_KV_SIZE = re.compile(r"llama_kv_cache\w*: size =\s*([\d.]+) MiB")
_DEVICE = re.compile(
    r"using device \S+ \((.*?)\)(?: \((?:[0-9a-fA-F:.]+|unknown id)\))? - (\d+) MiB free"
)
_HOST_BUFFERS = ("CPU", "AMX", "BLAS")  # how names of buffers in RAM begin; ..._Host is too


def memory_parts(lines: list[str], device: str = "cpu") -> MemoryParts:
    """What a load allocated by llama.cpp's log (rounded to 0.01 MiB a line): for device gpu in the
    GPUs' memory alone, else everywhere."""
    sums: dict[str, float] = {}
    for line in lines:
        found = _BUFFER.search(line)
        if found and (device != "gpu" or _is_on_gpu(found.group(1))):
            sums[found.group(2)] = sums.get(found.group(2), 0.0) + float(found.group(3))

    def together(*kinds: str) -> int | None:
        known = [sums[kind] for kind in kinds if kind in sums]
        return round(sum(known) * 2**20) if known else None

    return MemoryParts(together("model"), together("KV", "RS"), together("compute", "output"))


def model_buffers(lines: list[str]) -> set[str]:
    """Names of the buffers that hold weights, after a load or a dry run."""
    found = (match for line in lines if (match := _BUFFER.search(line)))
    return {match.group(1) for match in found if match.group(2) == "model"}


def _is_on_gpu(buffer: str) -> bool:
    return not buffer.startswith(_HOST_BUFFERS) and not buffer.endswith("_Host")


def dry_run_parts(lines: list[str], weight_bytes: int, device: str = "cpu") -> MemoryParts:
    """The same from a dry run, whose weight and KV buffers are empty: other lines tell these."""
    kv = [float(found.group(1)) for line in lines if (found := _KV_SIZE.search(line))]
    return MemoryParts(
        weight_bytes,
        round(sum(kv) * 2**20) if kv else None,
        memory_parts(lines, device).compute_bytes,
    )


def devices_said(lines: list[str]) -> list[tuple[str, int]]:
    """Name and free bytes of each GPU that a load uses, without what differs at every load."""
    found = (match for line in lines if (match := _DEVICE.search(line)))
    return [(match.group(1), int(match.group(2)) << 20) for match in found]


def flash_attention_said(lines: list[str], asked: str) -> str:
    """What became of "auto", in llama.cpp's words."""
    mark = "Flash Attention "
    said = [line.rpartition(mark)[2].strip() for line in lines if mark in line]
    return said[-1] if said and asked == "auto" else asked

"""llama.cpp as a library: loading it, its log, its build, its options, and what it says of its memory.

`library()` imports llama_cpp late, because libgomp reads its environment once, when it is loaded. The log of the whole process goes to
one LogTail, so that an error message can end with llama.cpp's own words.
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

from serving.backends.base import MemoryParts
from serving.errors import BackendUnavailable, Unsupported

PACKAGE = "llama-cpp-python"

# ggml's numbers for the types a KV cache may have (enum ggml_type), and llama.cpp's for flash attention (enum llama_flash_attn_type).
KV_TYPES: dict[str, int] = {"fp32": 0, "fp16": 1, "q4_0": 2, "q8_0": 8, "bf16": 30}
FLASH_ATTENTION: dict[str, int] = {"auto": -1, "off": 0, "on": 1}
QUANTISED_KV = ("q8_0", "q4_0")  # these need flash attention
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


class LlamaOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """EngineConfig.options of the llama_cpp backend. The defaults are the quickest of those measured (tests/bench/llama_cpp_steps.py)."""

    # Attention in one piece. auto: on a CPU off (its kernel is slower there, and sums in half precision, so that a row's logits depend on
    # its batch mates) unless kv_dtype needs it; on a GPU as llama.cpp decides.
    flash_attention: str = "auto"
    # One KV pool for all slots (every row's attention then walks over all rows' tokens), or a part for each slot (slots that are no
    # neighbours then take a pass over the weights each). None, "auto": a part for each, unless kv_tokens is less than that takes.
    kv_unified: bool | None = None
    # Map the file, whose pages can be dropped and are shared with whoever else maps it, or read it into memory of the process's own. None,
    # "auto": mapped on a GPU; read on the CPU, where it is quicker to compute from (135M Q4_0: one row 5 %, four 2 %), and where weights
    # that are rearranged (`repack`) are then there once and not twice (135M 90 instead of 150 MB).
    mmap: bool | None = None
    mlock: bool = False  # keep the weights from being swapped out
    repack: bool = True  # rearrange quantised weights for this CPU's instructions while loading (with `mmap` a copy of them)
    step_tokens: int = 512  # most tokens of one step (llama.cpp's n_batch)
    ubatch_tokens: int = 512  # most tokens of one pass over the weights (n_ubatch); a bigger step takes several
    prefill_threads: int | None = None  # threads for steps of more than one token; None: as many as for decoding
    # How threads wait for each other: default (spin for a while, then sleep), active (spin), passive (sleep at once). auto: passive
    # where the engine was given no cores of its own and uses all: spinning threads then starve each other and everyone else on the machine.
    wait_policy: str = "auto"
    gpu_layers: int = -1  # layers on the GPU when device is "gpu"; -1: all
    dry_run: bool = True  # have llama.cpp lay out its memory first, without weights, and refuse what cannot fit
    warm_up: bool = True  # one step while loading, so that the first request does not pay for page faults


def parse_options(options: dict[str, Any]) -> LlamaOptions:
    """The options as a record. Raises Unsupported that names an unknown key, or the key whose value is wrong. Values may be text."""
    known = LlamaOptions.__struct_fields__
    for key in options:
        if key not in known:
            raise Unsupported(f"the llama_cpp backend has no option {key!r}; it has {', '.join(known)}", key)
    words: dict[str, str | None] = {"on": "true", "off": "false", "yes": "true", "no": "false"}
    plain = {
        key: words.get(value, value) if key not in ("flash_attention", "wait_policy") and isinstance(value, str) else value
        for key, value in options.items()
    }
    for key in ("kv_unified", "mmap"):
        if plain.get(key) == "auto":
            plain[key] = None
    try:
        parsed = msgspec.convert(plain, LlamaOptions, strict=False)
    except msgspec.ValidationError as problem:
        key = str(problem).rpartition("$.")[2].rstrip("`")
        raise Unsupported(f"option {key} of the llama_cpp backend: {problem}", key) from problem
    _one_of("flash_attention", parsed.flash_attention, tuple(FLASH_ATTENTION))
    _one_of("wait_policy", parsed.wait_policy, ("auto", "default", "active", "passive"))
    for key, value, least in (
        ("step_tokens", parsed.step_tokens, 1),
        ("ubatch_tokens", parsed.ubatch_tokens, 1),
        ("prefill_threads", parsed.prefill_threads, 1),
        ("gpu_layers", parsed.gpu_layers, -1),
    ):
        if value is not None and value < least:
            raise Unsupported(f"option {key} of the llama_cpp backend must be at least {least}, got {value}", key)
    return parsed


def _one_of(key: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise Unsupported(f"option {key} of the llama_cpp backend must be one of {', '.join(known)}, got {value!r}", key)


# --- the library and its log --------------------------------------------------------------------------------------------


class LogTail:
    """Takes llama.cpp's log: the last errors for exception messages, and the lines of a load for `memory_parts`."""

    def __init__(self) -> None:
        self.errors: collections.deque[str] = collections.deque(maxlen=8)
        self.lines: list[str] = []
        self.recording = False
        self._level = _LOG_DEBUG
        self._callback = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)(self._take)

    def install(self, llama: Any) -> None:
        """Make this the log of the process, which has only one: whoever used llama.cpp in between may have set its own."""
        llama.llama_log_set(self._callback, ctypes.c_void_p(0))

    def record(self) -> None:
        self.lines, self.recording = [], True
        self.errors.clear()

    def stop(self) -> list[str]:
        self.recording = False
        return self.lines

    def reason(self, fallback: str) -> str:
        """The last errors in llama.cpp's words, without paths; `fallback` where it said nothing."""
        text = "; ".join(self.errors) or fallback
        return re.sub(r"(?:/[^/\s'\"]+)+/", "", text)

    def _take(self, level: int, text: bytes, _: Any) -> None:
        if level == _LOG_CONTINUED:
            level = self._level
        self._level = level
        if level == _LOG_DEBUG:
            return
        line = text.decode("utf-8", "replace").strip()
        if level in (_LOG_WARN, _LOG_ERROR) and line:
            self.errors.append(line)
        if self.recording:
            self.lines.append(line)


LOG = LogTail()


def library(wait_policy: str = "default", must: bool = True) -> Any:
    """The llama_cpp module with its log in LOG. Raises BackendUnavailable where it is not installed or cannot be loaded, Unsupported
    where `wait_policy` can no longer be had and `must` be."""
    if wait_policy != "default" and "llama_cpp" in sys.modules and not must:
        wait_policy = "default"
    if wait_policy != "default":
        if "llama_cpp" in sys.modules and os.environ.get("OMP_WAIT_POLICY") != wait_policy:
            raise Unsupported(
                f"option wait_policy = {wait_policy!r} comes too late: llama.cpp is loaded in this process already", "wait_policy"
            )
        os.environ["OMP_WAIT_POLICY"] = wait_policy
    try:
        import llama_cpp
    except (ImportError, OSError, RuntimeError) as problem:  # RuntimeError: it found its shared library and could not load it
        raise BackendUnavailable(f"{PACKAGE} cannot be imported: {problem}; pip install 'llm-crossover[llama-cpp]'") from problem
    LOG.install(llama_cpp)
    llama_cpp.llama_backend_init()
    return llama_cpp


def build_details(llama: Any) -> dict[str, str]:
    """Which build this is and what it can use of the CPU. `isa_unused` is a reason to doubt every number taken with it."""
    system = llama.llama_print_system_info().decode().strip(" |\n")
    details = {
        "llama_cpp": llama.llama_version().decode(),
        "package": f"{PACKAGE} {importlib.metadata.version(PACKAGE)}",
        "wheel": _wheel_origin(),
        "system_info": system,
    }
    missing = missing_isa(system, _cpu_flags())
    if missing:
        details["isa_unused"] = ", ".join(missing)
    return details


def missing_isa(system_info: str, cpu_flags: frozenset[str]) -> list[str]:
    """Instruction sets that the CPU has and the build was not compiled for, in llama.cpp's names."""
    built = {name.strip().split(": ")[-1] for name in re.findall(r"([\w: ]+?)\s*=\s*1", system_info)}
    return [name for flag, name in ISA.items() if flag in cpu_flags and name not in built]


def _cpu_flags() -> frozenset[str]:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return frozenset()
    found = re.search(r"^(?:flags|Features)\s*:\s*(.*)$", text, re.MULTILINE)
    return frozenset(found.group(1).split()) if found else frozenset()


def cpu_name() -> str:
    try:
        found = re.search(r"^(?:model name|Model)\s*:\s*(.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        found = None
    return found.group(1).strip() if found else "CPU"


def _wheel_origin() -> str:
    """Tag and provenance of the installed wheel. PyPI holds a source distribution only, so a plain install is a local build."""
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


# --- memory -------------------------------------------------------------------------------------------------------------

_BUFFER = re.compile(r"(model|KV|compute|output|RS) buffer size\s*=\s*([\d.]+) MiB")
_KV_SIZE = re.compile(r"llama_kv_cache\w*: size =\s*([\d.]+) MiB")


def memory_parts(lines: list[str]) -> MemoryParts:
    """What a load allocated, added up from llama.cpp's log lines (each rounded to 0.01 MiB) over all devices."""
    sums: dict[str, float] = {}
    for line in lines:
        found = _BUFFER.search(line)
        if found:
            sums[found.group(1)] = sums.get(found.group(1), 0.0) + float(found.group(2))

    def together(*kinds: str) -> int | None:
        known = [sums[kind] for kind in kinds if kind in sums]
        return round(sum(known) * 2**20) if known else None

    return MemoryParts(together("model"), together("KV", "RS"), together("compute", "output"))


def dry_run_parts(lines: list[str], weight_bytes: int) -> MemoryParts:
    """The same from a dry run, which lays out the graph but makes empty weight and KV buffers: sizes of these are told elsewhere."""
    kv = [float(found.group(1)) for line in lines if (found := _KV_SIZE.search(line))]
    return MemoryParts(weight_bytes, round(sum(kv) * 2**20) if kv else None, memory_parts(lines).compute_bytes)

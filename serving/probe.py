"""Asks a GPU's driver, or a backend, in a subprocess with a time limit: a hanging driver or a mismatched library must not take the server.

    find_gpus()                        # what NVML or the amdgpu driver list; no driver files: no subprocess, microseconds
    probe_backend("torch")             # does it import, which version, can it use the GPU

`python -m serving.probe nvml|torch|llama_cpp|onnx` prints one JSON object; the functions above run it and judge the outcome.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from serving.hardware import GpuFacts

BACKEND_PACKAGES = {"llama_cpp": "llama_cpp", "onnx": "onnxruntime", "torch": "torch"}  # the module that each of our backends needs
PACKAGE_ROOT = Path(__file__).resolve().parent.parent
_NVIDIA_FILES = ("proc/driver/nvidia/version", "dev/nvidiactl", "dev/dxg")


class FoundGpus(msgspec.Struct, frozen=True):
    """The GPUs, or the cause (a value of serving.placement.Cause) and a sentence why there is none."""

    gpus: tuple[GpuFacts, ...] = ()
    cause: str | None = None
    note: str | None = None


class BackendProbe(msgspec.Struct, frozen=True):
    """What one backend said in its subprocess. `works`: it can serve on the CPU. `gpu`: it can use a GPU here."""

    backend: str
    works: bool
    version: str | None = None
    gpu: bool = False
    gpu_note: str | None = None  # why not, or which device
    gpu_cause: str | None = None
    problem: str | None = None
    details: dict[str, str] = {}
    seconds: float | None = None


def find_gpus(*, root: Path = Path("/"), timeout_seconds: float = 10.0) -> FoundGpus:
    """The GPUs of this machine. Never raises and never takes longer than the limit."""
    amd = _amd_gpus(root)
    if amd:
        return FoundGpus(amd)
    if not any((root / file).exists() for file in _NVIDIA_FILES):
        card = _nvidia_card_without_driver(root)
        if card:
            return FoundGpus((), "no_driver", "an NVIDIA card is there, but its driver is not loaded")
        return FoundGpus((), "no_device", "this machine has no GPU")
    code, output, error = run_probe("nvml", timeout_seconds)
    if code is None:
        return FoundGpus((), "health_timeout", f"the NVIDIA driver did not answer within {timeout_seconds:g} s")
    if code != 0:
        return FoundGpus((), "driver_mismatch", f"asking the NVIDIA driver failed: {_last_line(error) or _exit_text(code)}")
    return _judge_nvml(output)


def probe_backend(backend: str, timeout_seconds: float = 60.0) -> BackendProbe:
    """Import a backend's library in a subprocess and ask it what it can do here. Never raises."""
    started = time.perf_counter()
    code, output, error = run_probe(backend, timeout_seconds)
    if code is None:
        return BackendProbe(backend, False, problem=f"importing it did not end within {timeout_seconds:g} s")
    if code != 0:
        return BackendProbe(backend, False, problem=_last_line(error) or _exit_text(code))
    try:
        answer = msgspec.json.decode(output, type=BackendProbe)
        return msgspec.structs.replace(answer, seconds=round(time.perf_counter() - started, 3))
    except msgspec.DecodeError as problem:
        return BackendProbe(backend, False, problem=f"the probe answered nonsense: {problem}")


def run_probe(what: str, timeout_seconds: float) -> tuple[int | None, bytes, str]:
    """Exit status (None: out of time, and killed with all its children), standard output, standard error."""
    environment = dict(os.environ, PYTHONSAFEPATH="1", PYTHONPATH=python_path())
    child = subprocess.Popen(
        [sys.executable, "-m", "serving.probe", what],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
        start_new_session=True,
    )
    try:
        output, error = child.communicate(timeout=timeout_seconds)
        return child.returncode, output, error.decode(errors="replace")
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):  # a process stuck in a driver call cannot be killed; leave it
            child.communicate(timeout=1.0)
        return None, b"", ""


def python_path() -> str:
    """PYTHONPATH with which a child finds these packages, whatever the current folder holds."""
    return os.pathsep.join([str(PACKAGE_ROOT), *(p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p)])


def _judge_nvml(output: bytes) -> FoundGpus:
    try:
        return msgspec.json.decode(output, type=FoundGpus)
    except msgspec.DecodeError as problem:
        return FoundGpus((), "driver_mismatch", f"the NVIDIA probe answered nonsense: {problem}")


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""


def _exit_text(code: int) -> str:
    return f"ended by {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"


def _amd_gpus(root: Path) -> tuple[GpuFacts, ...]:
    """AMD GPUs with a compute node (/dev/kfd), from sysfs."""
    if not (root / "dev/kfd").exists():
        return ()
    found = []
    for index, folder in enumerate(sorted((root / "sys/class/drm").glob("card[0-9]*/device/mem_info_vram_total"))):
        try:
            total = int(folder.read_text())
            used = int((folder.parent / "mem_info_vram_used").read_text())
        except (OSError, ValueError):
            continue
        name_file = folder.parent / "product_name"
        name = name_file.read_text().strip() if name_file.exists() else "AMD GPU"
        found.append(GpuFacts(name or "AMD GPU", "amd", total, total - used, None, None, index))
    return tuple(found)


def _nvidia_card_without_driver(root: Path) -> bool:
    """True when the PCI bus shows an NVIDIA display or 3D controller."""
    for device in (root / "sys/bus/pci/devices").glob("*"):
        try:
            if (device / "vendor").read_text().strip() == "0x10de" and (device / "class").read_text().startswith("0x03"):
                return True
        except OSError:
            continue
    return False


# What follows runs in the subprocess.


def _nvml() -> FoundGpus:
    try:
        import pynvml
    except ImportError as problem:
        return FoundGpus((), "backend_missing", f"nvidia-ml-py is not installed: {problem}")
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as problem:
        return FoundGpus((), _nvml_cause(str(problem)), f"NVML: {problem}")
    driver = pynvml.nvmlSystemGetDriverVersion()
    gpus = []
    for index in range(pynvml.nvmlDeviceGetCount()):
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
        major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(handle)
        name = pynvml.nvmlDeviceGetName(handle)
        gpus.append(GpuFacts(str(name), "nvidia", int(memory.total), int(memory.free), str(driver), f"{major}.{minor}", index))
    pynvml.nvmlShutdown()
    if not gpus:
        return FoundGpus((), "no_device", "the NVIDIA driver is there and lists no GPU")
    return FoundGpus(tuple(gpus))


def _nvml_cause(text: str) -> str:
    lowered = text.lower()
    if "mismatch" in lowered:
        return "driver_mismatch"
    return "no_device" if "no device" in lowered or "not found" in lowered and "shared library" not in lowered else "no_driver"


def _torch() -> BackendProbe:
    import torch

    version = str(torch.__version__)
    details = {"threads": str(torch.get_num_threads()), "cpu_capability": torch.backends.cpu.get_cpu_capability()}
    for name in ("transformers",):
        details[name] = importlib.metadata.version(name)
    built_for = torch.version.cuda or getattr(torch.version, "hip", None)
    if not built_for:
        return BackendProbe("torch", True, version, False, "this build of torch is for the CPU only", "backend_missing", None, details)
    details["built_for"] = built_for
    if not torch.cuda.is_available():
        return BackendProbe("torch", True, version, False, "torch sees no GPU", "no_device", None, details)
    capability = "sm_{}{}".format(*torch.cuda.get_device_capability(0))
    try:
        total = float((torch.ones(256, 256, device="cuda") @ torch.ones(256, 256, device="cuda")).sum().cpu())
    except RuntimeError as problem:
        text = str(problem).splitlines()[0]
        cause = "arch_unsupported" if "kernel image" in text else "insufficient_vram" if "memory" in text else "driver_mismatch"
        return BackendProbe("torch", True, version, False, f"{text} ({capability})", cause, None, details)
    if total != 256.0**3:
        return BackendProbe(
            "torch", True, version, False, f"a product on the GPU came out wrong: {total}", "driver_mismatch", None, details
        )
    details["capability"] = capability
    return BackendProbe("torch", True, version, True, torch.cuda.get_device_name(0), None, None, details)


def _llama_cpp() -> BackendProbe:
    import llama_cpp

    llama_cpp.llama_backend_init()
    info = llama_cpp.llama_print_system_info().decode(errors="replace").strip()
    details = {"system_info": info}
    gpu = bool(llama_cpp.llama_supports_gpu_offload())
    note = "built with GPU support" if gpu else "this build of llama.cpp is for the CPU only"
    return BackendProbe("llama_cpp", True, llama_cpp.__version__, gpu, note, None if gpu else "backend_missing", None, details)


def _onnx() -> BackendProbe:
    import onnxruntime

    providers = onnxruntime.get_available_providers()
    details = {"providers": ", ".join(providers)}
    for name in ("onnxruntime-genai", "onnx", "optimum"):
        try:
            details[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            details[name] = "not installed"
    return BackendProbe(
        "onnx", True, onnxruntime.__version__, False, "this backend serves on the CPU only", "backend_missing", None, details
    )


PROBES: dict[str, Callable[[], FoundGpus | BackendProbe]] = {"nvml": _nvml, "torch": _torch, "llama_cpp": _llama_cpp, "onnx": _onnx}


def main(arguments: list[str]) -> int:
    """`python -m serving.probe NAME`: one JSON object on standard output; library chatter goes to standard error."""
    if len(arguments) != 1 or arguments[0] not in PROBES:
        print(f"usage: python -m serving.probe {'|'.join(PROBES)}", file=sys.stderr)
        return 2
    answer_to = os.dup(1)
    os.dup2(2, 1)
    answer = msgspec.json.encode(PROBES[arguments[0]]())
    with os.fdopen(answer_to, "wb") as out:
        out.write(answer)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

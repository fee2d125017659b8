"""GPUs of this machine. NVIDIA's driver is asked by NVML, in one child: it may hang or abort.

    find_gpus()        # no driver files: no child, microseconds; later calls ask the same child

`python -m serving.hardware.gpus module:function` calls the function and prints its result as JSON;
run_probe runs it. With `each` it is called for every line of standard input. Drivers differ in what
they tell: a value that one does not tell is None, and a GPU that cannot be read is left out with
its reason. GPUs of other makers are known by what a backend's probe says of them.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import select
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from models.isolated import Ran, run_python, start_python
from models.machine import ROOT
from serving.errors import Cause

VULKAN = "vulkan"  # the vendor of what a build of llama.cpp drives by Vulkan, whoever made it
DRIVER_FILES = ("proc/driver/nvidia/version", "dev/nvidiactl", "dev/dxg")  # it has one of these


class GpuFacts(msgspec.Struct, frozen=True):
    """One GPU, or one part of a divided one, as its driver describes it. Not told is None."""

    name: str
    vendor: str  # "nvidia", "amd" or VULKAN
    total_bytes: int | None = None
    free_bytes: int | None = None
    driver: str | None = None
    compute_capability: str | None = None  # "9.0"; NVIDIA only
    index: int = 0  # in the driver's order, which is not that of CUDA
    uuid: str | None = None  # by which an engine is given this one and no other

    @property
    def used_bytes(self) -> int | None:
        """Memory in use, by whomever."""
        if self.total_bytes is None or self.free_bytes is None:
            return None
        return self.total_bytes - self.free_bytes


class FoundGpus(msgspec.Struct, frozen=True):
    """The GPUs, or the cause why there is none; `note`: why, or which GPU cannot be read."""

    gpus: tuple[GpuFacts, ...] = ()
    cause: Cause | None = None
    note: str | None = None


class NvmlChild:
    """The child that asks NVML; started at the first question, again after it has died or hung."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self, timeout_seconds: float) -> FoundGpus:
        """What NVML lists now. Never raises, never takes longer than the limit and a start."""
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                self._process = start_python(
                    *("-m", "serving.hardware.gpus", "serving.hardware.gpus:list_gpus", "each"),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                )
            process = self._process
            assert process.stdin is not None and process.stdout is not None
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(b"\n")
                process.stdin.flush()
            if not select.select([process.stdout], [], [], timeout_seconds)[0]:
                self.close()
                note = f"the NVIDIA driver did not answer within {timeout_seconds:g} s"
                return FoundGpus((), Cause.health_timeout, note)
            try:
                return msgspec.json.decode(process.stdout.readline(), type=FoundGpus)
            except msgspec.DecodeError:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(1.0)
                self.close()
                note = f"asking the NVIDIA driver failed: {Ran(process.returncode, b'', '').reason}"
                return FoundGpus((), Cause.driver_mismatch, note)

    def close(self) -> None:
        """End the child; one that is stuck in the driver is left behind."""
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(1.0)
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            with contextlib.suppress(OSError):
                pipe.close()


_CHILD = NvmlChild()


def find_gpus(
    *, root: Path = ROOT, timeout_seconds: float = 10.0, child: NvmlChild = _CHILD
) -> FoundGpus:
    """The NVIDIA GPUs of this machine that this process may use. Never raises."""
    if not any((root / file).exists() for file in DRIVER_FILES):
        if _has_nvidia_card(root):
            note = "an NVIDIA card is there, but its driver is not loaded"
            return FoundGpus((), Cause.no_driver, note)
        return FoundGpus((), Cause.no_device, "this machine has no NVIDIA GPU")
    try:
        found = child.ask(timeout_seconds)
    except OSError as problem:
        return FoundGpus((), Cause.driver_mismatch, f"asking the driver failed: {problem}")
    shown = visible(found.gpus, os.environ)
    if found.gpus and not shown:
        hidden = "CUDA_VISIBLE_DEVICES hides every NVIDIA GPU"
        return FoundGpus((), Cause.no_device, hidden)
    return msgspec.structs.replace(found, gpus=shown)


def render_nodes(root: Path = ROOT) -> list[Path]:
    """Files of GPUs of any maker that draw or compute: where there is one and no driver of NVIDIA,
    only a backend's probe can say what it is good for."""
    return sorted((root / "dev/dri").glob("renderD*"))


def visible(gpus: tuple[GpuFacts, ...], environment: Mapping[str, str]) -> tuple[GpuFacts, ...]:
    """Those that CUDA_VISIBLE_DEVICES leaves: engines are given one of them by its UUID.

    Numbers are taken in the driver's order (CUDA_DEVICE_ORDER=PCI_BUS_ID); as CUDA does, a list
    ends at the first entry that means nothing.
    """
    told = environment.get("CUDA_VISIBLE_DEVICES")
    if told is None:
        return gpus
    found: list[GpuFacts] = []
    for entry in map(str.strip, told.split(",")):
        named = [one for one in gpus if entry and (one.uuid or "").startswith(entry)]
        named += [one for one in gpus if entry == str(one.index)]
        if not named:
            break
        found += named
    return tuple(found)


def run_probe(function: str, timeout_seconds: float) -> Ran:
    """Call "module:function" in a child that may crash or hang; its result is JSON in `output`."""
    return run_python("-m", "serving.hardware.gpus", function, timeout_seconds=timeout_seconds)


def _has_nvidia_card(root: Path) -> bool:
    """True when the PCI bus shows an NVIDIA display or 3D controller."""
    for device in (root / "sys/bus/pci/devices").glob("*"):
        with contextlib.suppress(OSError):
            vendor = (device / "vendor").read_text().strip()
            if vendor == "0x10de" and (device / "class").read_text().startswith("0x03"):
                return True
    return False


# NVML, in whatever process may be lost to it.


def tell(ask: Callable[..., Any], *what: Any, **more: Any) -> Any:
    """What the driver says; None where it does not, whatever it raises: NVMLError, or an error of
    nvidia-ml-py's own where the driver is older than the package."""
    try:
        return ask(*what, **more)
    except Exception:
        return None


def memory_of(nvml: Any, handle: Any) -> Any:
    """total, used, free and, of newer drivers, reserved, which is then not in used."""
    newer = tell(lambda: nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2))
    return newer or nvml.nvmlDeviceGetMemoryInfo(handle)


def uuid_of(nvml: Any, handle: Any) -> str | None:
    """What CUDA_VISIBLE_DEVICES takes: "GPU-..." or, of a part of one, "MIG-..."."""
    found = tell(lambda: nvml.nvmlDeviceGetUUID(handle))
    return None if found is None else str(found)


def list_gpus() -> FoundGpus:
    """What NVML lists, asked in this process."""
    try:
        import pynvml
    except ImportError as problem:
        note = f"nvidia-ml-py is not installed: {problem}"
        return FoundGpus((), Cause.backend_missing, note)
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as problem:
        return FoundGpus((), cause_of(str(problem)), f"NVML: {problem}")
    gpus: list[GpuFacts] = []
    trouble: list[str] = []
    for index in range(pynvml.nvmlDeviceGetCount()):
        try:
            gpus += _parts(pynvml, index)
        except Exception as problem:
            trouble.append(f"GPU {index} cannot be read: {problem}")
    tell(pynvml.nvmlShutdown)
    told = "; ".join(trouble)
    if not gpus:
        cause = cause_of(told) if told else Cause.no_device
        return FoundGpus((), cause, told or "the NVIDIA driver is there and lists no GPU")
    return FoundGpus(tuple(gpus), None, told or None)


def _parts(nvml: Any, index: int) -> Iterator[GpuFacts]:
    """The GPU, or its parts where it is divided (MIG): CUDA cannot use such a GPU as a whole."""
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    name, driver = nvml.nvmlDeviceGetName(handle), tell(nvml.nvmlSystemGetDriverVersion)
    capability = tell(lambda: nvml.nvmlDeviceGetCudaComputeCapability(handle))
    handles = [handle]
    if tell(lambda: nvml.nvmlDeviceGetMigMode(handle)[0]):
        count = tell(lambda: int(nvml.nvmlDeviceGetMaxMigDeviceCount(handle))) or 0
        parts = [tell(nvml.nvmlDeviceGetMigDeviceHandleByIndex, handle, n) for n in range(count)]
        handles = [one for one in parts if one is not None]
    for one in handles:
        memory = memory_of(nvml, one)
        yield GpuFacts(
            name=str(tell(nvml.nvmlDeviceGetName, one) or name),
            vendor="nvidia",
            total_bytes=int(memory.total),
            free_bytes=int(memory.free),
            driver=None if driver is None else str(driver),
            compute_capability=None if capability is None else "{}.{}".format(*capability),
            index=index,
            uuid=uuid_of(nvml, one),
        )


def cause_of(text: str) -> Cause:
    """The cause in NVML's words. "GPU is lost" is of a driver that is there."""
    lowered = text.lower()
    if "mismatch" in lowered:
        return Cause.driver_mismatch
    if "shared library" in lowered:
        return Cause.no_driver
    gone = ("lost", "reset", "no device", "not found")
    return Cause.no_device if any(word in lowered for word in gone) else Cause.no_driver


def main(arguments: list[str]) -> int:
    """Print the function's result as JSON; what libraries print goes to standard error."""
    if not arguments or ":" not in arguments[0]:
        print("usage: python -m serving.hardware.gpus module:function [each]", file=sys.stderr)
        return 2
    answer_to = os.dup(1)
    os.dup2(2, 1)
    module_name, _, name = arguments[0].partition(":")
    function = getattr(importlib.import_module(module_name), name)
    with os.fdopen(answer_to, "wb") as out:
        for _ in sys.stdin.buffer if arguments[1:] == ["each"] else [b""]:
            out.write(msgspec.json.encode(function()) + b"\n")
            out.flush()
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

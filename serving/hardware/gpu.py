"""GPUs of this machine, asked of the driver in a child: a driver may hang or abort.

    find_gpus()    # no driver files: no child, microseconds

`python -m serving.hardware.gpu module:function` calls the function and prints its result as JSON;
run_probe runs it. AMD's GPUs are read from sysfs (amd.py), NVIDIA's by NVML (nvml.py). Where
llama.cpp is built with Vulkan, what it drives is listed too (vulkan.py), after those: a card may be
there by both, under the vendor whose engines it is for.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Mapping
from pathlib import Path

import msgspec

from models.isolated import Ran, run_python
from models.machine import ROOT
from serving.errors import Cause
from serving.hardware import amd, nvml, vulkan
from serving.hardware.gpu_facts import FoundGpus, GpuFacts, GpuMemory

_VISIBLE = {
    "nvidia": ("CUDA_VISIBLE_DEVICES",),
    "amd": ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"),
}


def find_gpus(*, root: Path = ROOT, timeout_seconds: float = 10.0) -> FoundGpus:
    """The GPUs of this machine that this process may use, of all makers. Never raises; each driver
    has this limit to answer in."""
    found = _find_by_driver(root, timeout_seconds)
    if vulkan.library() is None:
        return found
    more = _answer("serving.hardware.vulkan:list_gpus", "Vulkan", timeout_seconds)
    if more.gpus:
        return FoundGpus((*found.gpus, *more.gpus), None, found.note if found.gpus else None)
    is_bare = not found.gpus and found.cause is Cause.no_device
    return more if is_bare else found


def render_nodes(root: Path = ROOT) -> list[Path]:
    """Files of GPUs of any maker that draw or compute, whose driver this product may not read."""
    return sorted((root / "dev/dri").glob("renderD*"))


def _find_by_driver(root: Path, timeout_seconds: float) -> FoundGpus:
    amd_gpus = visible(amd.list_gpus(root), os.environ)
    found = _find_nvidia(root, timeout_seconds)
    shown = visible(found.gpus, os.environ)
    if found.gpus and not shown:
        hidden = "CUDA_VISIBLE_DEVICES hides every NVIDIA GPU"
        found = FoundGpus((), Cause.no_device, hidden)
    found = msgspec.structs.replace(found, gpus=shown)
    if amd_gpus:
        note = found.note if found.cause not in (None, Cause.no_device) else None
        return FoundGpus((*found.gpus, *amd_gpus), None, note)
    if found.cause is Cause.no_device and amd.cards(root):
        small = "the AMD GPU has too little memory of its own for a model"
        return FoundGpus((), Cause.no_device, small)
    return found


def visible(gpus: tuple[GpuFacts, ...], environment: Mapping[str, str]) -> tuple[GpuFacts, ...]:
    """Those that the variables of CUDA and ROCm leave: engines are given one of them by its UUID.

    Numbers are taken in the driver's order (CUDA_DEVICE_ORDER=PCI_BUS_ID); as CUDA does, a list
    ends at the first entry that means nothing.
    """
    found: list[GpuFacts] = []
    for vendor, names in _VISIBLE.items():
        mine = [gpu for gpu in gpus if gpu.vendor == vendor]
        told = next((environment[name] for name in names if name in environment), None)
        if told is None or (vendor == "amd" and not told):  # HIP takes an empty list as none
            found += mine
            continue
        for entry in told.split(","):
            named = [gpu for gpu in mine if _is_named(gpu, entry.strip())]
            if not named:
                break
            found += named
    return tuple(found)


def _is_named(gpu: GpuFacts, entry: str) -> bool:
    if entry.isdigit():
        return gpu.index == int(entry)
    return bool(entry) and (gpu.uuid or "").startswith(entry)


def _find_nvidia(root: Path, timeout_seconds: float) -> FoundGpus:
    if not any((root / file).exists() for file in nvml.FILES):
        if _has_nvidia_card(root):
            note = "an NVIDIA card is there, but its driver is not loaded"
            return FoundGpus((), Cause.no_driver, note)
        return FoundGpus((), Cause.no_device, "this machine has no GPU")
    return _answer("serving.hardware.nvml:list_gpus", "the NVIDIA driver", timeout_seconds)


def _answer(function: str, asked: str, timeout_seconds: float) -> FoundGpus:
    ran = run_probe(function, timeout_seconds)
    if ran.status is None:
        note = f"{asked} did not answer within {timeout_seconds:g} s"
        return FoundGpus((), Cause.health_timeout, note)
    if ran.status != 0:
        note = f"asking {asked} failed: {ran.reason}"
        return FoundGpus((), Cause.driver_mismatch, note)
    try:
        return msgspec.json.decode(ran.output, type=FoundGpus)
    except msgspec.DecodeError as problem:
        note = f"{asked} answered nonsense: {problem}"
        return FoundGpus((), Cause.driver_mismatch, note)


def run_probe(function: str, timeout_seconds: float) -> Ran:
    """Call "module:function" in a child that may crash or hang; its result is JSON in `output`."""
    return run_python("-m", "serving.hardware.gpu", function, timeout_seconds=timeout_seconds)


def gpu_memory() -> list[GpuMemory]:
    """Every GPU's memory now; [] where no driver is loaded or none answers."""
    return [*nvml.memory_now(), *amd.memory_now()]


def _has_nvidia_card(root: Path) -> bool:
    """True when the PCI bus shows an NVIDIA display or 3D controller."""
    for device in (root / "sys/bus/pci/devices").glob("*"):
        with contextlib.suppress(OSError):
            vendor = (device / "vendor").read_text().strip()
            if vendor == "0x10de" and (device / "class").read_text().startswith("0x03"):
                return True
    return False


def main(arguments: list[str]) -> int:
    """Print the function's result as JSON; what libraries print goes to standard error."""
    if len(arguments) != 1 or ":" not in arguments[0]:
        print("usage: python -m serving.hardware.gpu module:function", file=sys.stderr)
        return 2
    answer_to = os.dup(1)
    os.dup2(2, 1)
    module_name, _, name = arguments[0].partition(":")
    answer = getattr(importlib.import_module(module_name), name)()
    with os.fdopen(answer_to, "wb") as out:
        out.write(msgspec.json.encode(answer))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

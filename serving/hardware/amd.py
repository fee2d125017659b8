"""AMD GPUs by the files of their driver (sysfs). Values that a driver does not tell are None."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

from models.machine import ROOT, read_text
from serving.hardware.gpu_facts import GpuFacts, GpuMemory

# Less is the part of the RAM that a CPU's own graphics is given: no place for a model.
LEAST_BYTES = 2 << 30


class AmdReading(msgspec.Struct, frozen=True):
    """One AMD GPU at one moment."""

    used_bytes: int | None = None
    total_bytes: int | None = None
    utilisation: float | None = None  # 0..1: the share of time in which some kernel ran
    watts: float | None = None
    core_hertz: float | None = None
    energy_joules: float | None = None  # a counter


def cards(root: Path = ROOT) -> list[Path]:
    """Folders of the GPUs that compute (/dev/kfd), in the kernel's order."""
    if not (root / "dev/kfd").exists():
        return []
    found = (root / "sys/class/drm").glob("card[0-9]*/device/mem_info_vram_total")
    return [file.parent for file in sorted(found, key=lambda file: _card_number(file.parent))]


def list_gpus(root: Path = ROOT) -> tuple[GpuFacts, ...]:
    """AMD GPUs with a compute node and memory of their own."""
    found = []
    for index, card in enumerate(cards(root)):
        total, used = _number(card / "mem_info_vram_total"), _number(card / "mem_info_vram_used")
        if total is None or used is None or total < LEAST_BYTES:
            continue
        name, unique = (read_text(card / file).strip() for file in ("product_name", "unique_id"))
        found.append(
            GpuFacts(
                *(name or "AMD GPU", "amd", total, total - used),
                index=index,
                uuid=f"GPU-{unique}" if unique else None,
                power_limit_watts=_scaled(_first(card, "power1_cap"), 1e-6),
            )
        )
    return tuple(found)


def memory_now(root: Path = ROOT) -> list[GpuMemory]:
    """Memory of every GPU that `list_gpus` lists."""
    return [
        GpuMemory(gpu.index, gpu.name, gpu.total_bytes - gpu.free_bytes, gpu.total_bytes, gpu.uuid)
        for gpu in list_gpus(root)
        if gpu.total_bytes is not None and gpu.free_bytes is not None
    ]


def read(card: Path) -> AmdReading:
    """What the driver says of one card now (amdgpu's documentation of sysfs and hwmon)."""
    return AmdReading(
        used_bytes=_number(card / "mem_info_vram_used"),
        total_bytes=_number(card / "mem_info_vram_total"),
        utilisation=_scaled(_number(card / "gpu_busy_percent"), 0.01),
        watts=_scaled(_first(card, "power1_average", "power1_input"), 1e-6),
        core_hertz=_first(card, "freq1_input"),
        energy_joules=_scaled(_first(card, "energy1_input"), 1e-6),
    )


def _first(card: Path, *names: str) -> int | None:
    """The first of a sensor's files that there is."""
    return next(_numbers(card, names), None)


def _numbers(card: Path, names: tuple[str, ...]) -> Iterator[int]:
    for folder in sorted((card / "hwmon").glob("hwmon*")):
        for name in names:
            value = _number(folder / name)
            if value is not None:
                yield value


def _number(file: Path) -> int | None:
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return None


def _scaled(value: int | None, factor: float) -> float | None:
    return None if value is None else value * factor


def _card_number(folder: Path) -> int:
    digits = folder.parent.name.removeprefix("card")
    return int(digits) if digits.isdigit() else 1 << 30

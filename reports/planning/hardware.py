"""GPUs that one can buy or rent: hardware.toml as records. Facts and prices are **published**.

>>> [device.name for device in sufficient(gpus(), need_bytes=20 * 2**30)][:2]
['NVIDIA L4', 'NVIDIA A10G']
"""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Iterable
from importlib import resources

import msgspec

from models.formatting import GIB
from reports.errors import ReportError

# What the driver leaves of the memory on the label, at least:
# L4 23034 of 24576 MiB, L40S 46068 of 49152, T4 15360 of 16384 (nvidia-smi).
USABLE_SHARE = 0.937
CARD_SIZES_GIB = (8, 16, 24, 48, 80)  # the lines of the memory chart


class Device(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One entry of hardware.toml. Missing is None: not known, or not for rent."""

    name: str
    bandwidth_gb_per_second: float
    source: str
    confidence: str
    memory_gib: float | None = None
    dense_tflops: float | None = None
    watts: float | None = None
    dollars_per_hour: float | None = None
    price_basis: str | None = None
    price_source: str | None = None
    price_date: str | None = None

    @property
    def usable_bytes(self) -> float | None:
        return None if self.memory_gib is None else self.memory_gib * GIB * USABLE_SHARE


class _Catalogue(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    gpu: list[Device]


@functools.cache
def gpus() -> tuple[Device, ...]:
    """The GPUs of hardware.toml, smallest memory first."""
    text = resources.files("reports.planning").joinpath("hardware.toml").read_text("utf-8")
    try:
        found = msgspec.convert(tomllib.loads(text), _Catalogue).gpu
    except (msgspec.ValidationError, tomllib.TOMLDecodeError) as problem:
        raise ReportError(f"reports/planning/hardware.toml is broken: {problem}") from problem
    return tuple(sorted(found, key=lambda one: (one.memory_gib or 0, one.dollars_per_hour or 1e9)))


def sufficient(devices: Iterable[Device], need_bytes: float) -> list[Device]:
    """Those whose memory suffices, in the order given."""
    return [device for device in devices if (device.usable_bytes or 0) >= need_bytes]

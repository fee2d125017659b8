"""Devices that one can buy, rent or own: device_catalog.toml as records. All of it is published.

>>> device_named("NVIDIA L4").usable_bytes > 20 * 2**30
True

A user's own devices stand in `$XDG_CONFIG_HOME/crossover/devices.toml`, in the same form; of two of
one name the user's counts. `crossover plan --devices` lists all.
"""

from __future__ import annotations

import math
import os
import re
import tomllib
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from crossover.models.formatting import GIB
from crossover.models.weights_manifest import with_home
from crossover.reports.errors import ReportError
from crossover.serving.option_help import Positive

# What the driver leaves of the memory on the label, at least: L4 23034 of 24576 MiB, L40S 46068 of
# 49152, T4 15360 of 16384 (nvidia-smi); of HBM A100 and H100 79.1 of 80 GiB (the total in vLLM's
# log); of memory that the GPU shares with its CPU, what macOS gives it unasked.
USABLE_SHARES = {"gddr": 0.937, "hbm": 0.989, "apple": 0.75, "uma": 0.75, "ddr": 0.937}

# A driver's total over the label, whose GB are 2^30 or 10^9 bytes, and less what it keeps.
MIN_OF_LABEL, MAX_OF_LABEL = 0.88, 1.05

DeviceKind = Literal["gpu", "apple", "cpu", "tpu", "accelerator"]
MemoryType = Literal["gddr", "hbm", "apple", "uma", "ddr"]
Day = Annotated[str, msgspec.Meta(pattern=r"^20\d\d-\d\d-\d\d$")]


class Tflops(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Dense peaks by number format. fp16: what matrix units reach, bf16 alike."""

    fp16: Positive | None = None
    fp8: Positive | None = None
    int8: Positive | None = None
    fp4: Positive | None = None


class Device(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One entry of the catalogue. Missing is None: not known, or not for rent."""

    name: str
    kind: DeviceKind
    bandwidth_gb_per_second: Positive
    source: str
    source_date: Day
    confidence: Literal["high", "medium", "low"]
    maker: str = ""
    memory_type: MemoryType
    memory_gib: Positive | None = None
    tflops: Tflops = Tflops()
    link_gb_per_second: Positive | None = None
    watts: Positive | None = None
    dollars_per_hour: Positive | None = None
    price_basis: str | None = None
    price_source: str | None = None
    price_date: Day | None = None

    def __post_init__(self) -> None:
        for key, value in msgspec.structs.asdict(self).items():
            if isinstance(value, float) and not math.isfinite(value):
                raise ValueError(f"{key} = {value} is no finite number")
            if isinstance(value, str) and not value.isprintable():
                raise ValueError(f"{key} = {value!r} has a control character")
        if (self.kind == "cpu") != (self.memory_type == "ddr"):
            raise ValueError(f"memory_type {self.memory_type!r} does not go with {self.kind!r}")
        if self.dollars_per_hour is not None and not (self.price_source and self.price_date):
            raise ValueError("dollars_per_hour needs price_source and price_date")

    @property
    def is_cpu(self) -> bool:
        return self.memory_type == "ddr"

    @property
    def is_served_by_vllm(self) -> bool:
        """GPUs and their like are taken to serve with vLLM, others with llama.cpp."""
        return self.memory_type in ("gddr", "hbm")

    @property
    def usable_bytes(self) -> float | None:
        """What an engine can use of the memory on the label."""
        if self.memory_gib is None:
            return None
        return self.memory_gib * GIB * USABLE_SHARES[self.memory_type]


class _Catalogue(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    device: list[Device] = []


def user_file() -> Path:
    """The user's own devices; it may not be there."""
    home = os.environ.get("XDG_CONFIG_HOME") or with_home("~/.config")
    return Path(home) / "crossover" / "devices.toml"


def read_devices(text: str, what: str) -> list[Device]:
    """Devices of a TOML text. Raises ReportError, which names key and value."""
    try:
        return msgspec.convert(tomllib.loads(text), _Catalogue).device
    except (ValueError, RecursionError) as problem:  # msgspec's and tomllib's are ValueErrors
        raise ReportError(f"{what} is broken: {problem}") from problem


@cache
def shipped() -> tuple[Device, ...]:
    """Those of device_catalog.toml."""
    name = "device_catalog.toml"
    return tuple(read_devices(resources.files(__package__).joinpath(name).read_text("utf-8"), name))


def devices() -> tuple[Device, ...]:
    """Shipped ones and the user's, which replace those of their name. Smallest memory first.

    Raises ReportError where the user's file is broken.
    """
    path = user_file()
    try:
        own = read_devices(path.read_text("utf-8-sig"), str(path))
    except FileNotFoundError:
        own = []
    except (OSError, UnicodeDecodeError) as problem:
        raise ReportError(f"{path} cannot be read: {problem}") from problem
    found = {one.name.casefold(): one for one in (*shipped(), *own)}
    return tuple(
        sorted(found.values(), key=lambda one: (one.memory_gib or 0, one.dollars_per_hour or 1e9))
    )


def priced_gpus() -> tuple[Device, ...]:
    """GPUs that have a price, the cheapest first."""
    found = [one for one in devices() if one.kind == "gpu" and one.dollars_per_hour is not None]
    return tuple(sorted(found, key=lambda one: one.dollars_per_hour or math.inf))


def device_of_driver_name(name: str, memory_bytes: float | None = None) -> Device | None:
    """The device that a driver calls `NVIDIA H200`, `NVIDIA A100-SXM4-80GB` or `Tesla T4`.

    A driver names a board by more or fewer words than the catalogue: the entry is the one with most
    words that are all in the driver's name, or in what its memory implies. NVIDIA's SXM boards are
    often named without `SXM`. None where no entry, or more than one, is as near.
    """
    said = _words(name.replace("SXM4", "SXM").replace("SXM5", "SXM").replace("HBM3", "SXM"))
    found: list[tuple[int, bool, Device]] = []
    for device in devices():
        # `Azure NC H100 v5` stands in brackets behind the name
        words = _words(device.name.partition("(")[0])
        optional = {"SXM", *(word for word in words if re.fullmatch(r"\d+GB", word))}
        board = {word for word in ("PCIE", "NVL", "SXM") if word in said}
        if not words - optional <= said or board - words:
            continue
        if memory_bytes and device.memory_gib:
            share = memory_bytes / (device.memory_gib * GIB)
            if not MIN_OF_LABEL <= share <= MAX_OF_LABEL:
                continue
        found.append((len(words - optional), "SXM" in words, device))
    best = max((one[:2] for one in found), default=None)
    alike = [device for *rank, device in found if tuple(rank) == best]
    return alike[0] if len(alike) == 1 else None


def _words(name: str) -> set[str]:
    """`NVIDIA GeForce RTX 4090 Laptop GPU`: what tells one device from another."""
    words = set(re.split(r"[\s\-_]+", name.upper().replace("TESLA", "NVIDIA")))
    return words - {"GEFORCE", "GPU", "GENERATION", "EDITION", ""}


def device_named(name: str) -> Device:
    """By its name, or by words that are in the names of one device only. Raises ReportError."""
    wanted = name.casefold()
    exact = [one for one in devices() if one.name.casefold() == wanted]
    alike = exact or [
        one for one in devices() if all(word in one.name.casefold() for word in wanted.split())
    ]
    if len(alike) == 1:
        return alike[0]
    if not alike:
        raise ReportError(
            f"The device {name!r} is unknown. `crossover plan --devices` lists all devices."
        )
    matches = ", ".join(device.name for device in alike[:6])
    raise ReportError(f"The device {name!r} is ambiguous. Give one of: {matches}")

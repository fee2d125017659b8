"""Devices that one can buy, rent or own: the published facts of device_catalog.toml as records.

>>> device_named("NVIDIA L4").usable_bytes > 20 * 2**30
True

Users list their own devices in `$XDG_CONFIG_HOME/crossover/devices.toml`, in the same form. An
entry there replaces the shipped one of its name. `crossover plan --devices` lists all devices.
"""

from __future__ import annotations

import difflib
import math
import os
import re
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from crossover.models.formatting import GIB
from crossover.models.weights.weights_manifest import expand_home
from crossover.reports.errors import ReportError
from crossover.serving.faults import converted
from crossover.serving.option_help import Positive
from crossover.serving.toml_files import parse_toml

# The share of the memory on the label that the driver leaves for use. GDDR with ECC: L4 23034 of
# 24576 MiB, L40S 46068 of 49152, T4 15360 of 16384 (nvidia-smi). HBM: A100 and H100 79.1 of 80 GiB
# (the total in vLLM's log). Memory that the GPU shares with its CPU: what macOS gives it by
# default.
USABLE_SHARES = {"gddr": 0.937, "hbm": 0.989, "apple": 0.75, "uma": 0.75, "ddr": 0.937}

# Bounds of the memory that a driver reports over that on the label, whose GB may be 2^30 or 10^9
# bytes, and of which the driver keeps a part.
MIN_OF_LABEL, MAX_OF_LABEL = 0.88, 1.05

DeviceKind = Literal["gpu", "apple", "cpu", "tpu", "accelerator"]
MemoryType = Literal["gddr", "hbm", "apple", "uma", "ddr"]
Share = Annotated[float, msgspec.Meta(gt=0, le=1)]
Day = Annotated[str, msgspec.Meta(pattern=r"^20\d\d-\d\d-\d\d$")]


class Tflops(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Dense peak TFLOP/s of matrix units by number format. fp16 is bf16's too, and adds in 32
    bits."""

    fp16: Positive | None = None
    fp8: Positive | None = None
    int8: Positive | None = None
    fp4: Positive | None = None


class Device(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One entry of the catalog. None: not known, or not for rent."""

    name: str
    kind: DeviceKind
    bandwidth_gb_per_second: Positive
    source: str
    source_date: Day
    confidence: Literal["high", "medium", "low"]
    maker: str = ""
    memory_type: MemoryType
    memory_gib: Positive | None = None
    usable_share: Share | None = None  # of memory_gib; None: that of the memory type
    tflops: Tflops = Tflops()
    reached_peak_share: Share = 1.0  # of the peaks that its power limit lets it reach
    has_peer_copies: bool = True  # whether such devices copy to each other directly
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
        """GPUs and the like are assumed to serve with vLLM, other devices with llama.cpp."""
        return self.memory_type in ("gddr", "hbm")

    @property
    def usable_bytes(self) -> float | None:
        """The part of the memory on the label that an engine can use."""
        if self.memory_gib is None:
            return None
        share = self.usable_share or USABLE_SHARES[self.memory_type]
        return self.memory_gib * GIB * share


class _CatalogFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    device: list[Device] = []


def user_file() -> Path:
    """Return the path of the user's own devices; the file may not exist."""
    home = os.environ.get("XDG_CONFIG_HOME") or expand_home("~/.config")
    return Path(home) / "crossover" / "devices.toml"


def read_devices(text: str, what: str) -> list[Device]:
    """Return the devices of a TOML text; `what` names it in errors. Raises ReportError, which names
    key and value."""
    where = f"{what}: "
    return converted(parse_toml(text, ReportError, where), _CatalogFile, ReportError, where).device


@cache
def shipped_devices() -> tuple[Device, ...]:
    """Return the devices of device_catalog.toml."""
    name = "device_catalog.toml"
    return tuple(read_devices(resources.files(__package__).joinpath(name).read_text("utf-8"), name))


def devices() -> tuple[Device, ...]:
    """Return the shipped devices and the user's, those with the smallest memory first. A device of
    the user replaces the shipped one of its name.

    Raises ReportError if the user's file is broken.
    """
    path = user_file()
    try:
        user_devices = read_devices(path.read_text("utf-8-sig"), str(path))
    except FileNotFoundError:
        user_devices = []
    except (OSError, UnicodeDecodeError) as problem:
        raise ReportError(f"{path} cannot be read: {problem}") from problem
    by_name = {device.name.casefold(): device for device in (*shipped_devices(), *user_devices)}

    def memory_and_price(device: Device) -> tuple[float, float]:
        return device.memory_gib or 0, device.dollars_per_hour or math.inf

    return tuple(sorted(by_name.values(), key=memory_and_price))


def priced_gpus() -> tuple[Device, ...]:
    """Return the GPUs that have a price, the cheapest first."""
    gpus = [
        device
        for device in devices()
        if device.kind == "gpu" and device.dollars_per_hour is not None
    ]
    return tuple(sorted(gpus, key=lambda gpu: gpu.dollars_per_hour or math.inf))


def device_of_driver_name(name: str, memory_bytes: float | None = None) -> Device | None:
    """Return the device that a driver calls `NVIDIA H200`, `NVIDIA A100-SXM4-80GB` or `Tesla T4`.

    `memory_bytes` is what the driver reports. All words of the entry's name must be in the driver's
    name, except two: "80GB", since the memory says so, and "SXM", which NVIDIA's drivers often
    leave out. Of several such entries the one with the most words is returned; None where there is
    none, or where two have as many.
    """
    driver_words = _words(name.replace("SXM4", "SXM").replace("SXM5", "SXM").replace("HBM3", "SXM"))
    candidates: list[tuple[tuple[int, bool], Device]] = []  # (matching words, is SXM), device
    for device in devices():
        # The name of a cloud's machine stands in brackets behind it: `Azure NC H100 v5`.
        words = _words(device.name.partition("(")[0])
        optional = {"SXM", *(word for word in words if re.fullmatch(r"\d+GB", word))}
        board_words = {word for word in ("PCIE", "NVL", "SXM") if word in driver_words}
        if not words - optional <= driver_words or board_words - words:
            continue
        if memory_bytes and device.memory_gib:
            share = memory_bytes / (device.memory_gib * GIB)
            if not MIN_OF_LABEL <= share <= MAX_OF_LABEL:
                continue
        candidates.append(((len(words - optional), "SXM" in words), device))
    best_rank = max((rank for rank, _ in candidates), default=None)
    best = [device for rank, device in candidates if rank == best_rank]
    return best[0] if len(best) == 1 else None


def _words(name: str) -> set[str]:
    """Return the words of `NVIDIA GeForce RTX 4090 Laptop GPU` that tell devices apart."""
    words = set(re.split(r"[\s\-_]+", name.upper().replace("TESLA", "NVIDIA")))
    return words - {"GEFORCE", "GPU", "GENERATION", "EDITION", ""}


def find_device(name: str) -> Device | None:
    """Return the device with exactly this name; None: the catalog does not have it."""
    return next((device for device in devices() if device.name == name), None)


def device_named(name: str) -> Device:
    """Return the device with this name, or the only one whose name has all these words.

    Raises ReportError where there is none, or more than one.
    """
    folded_name = name.casefold()
    matches = [device for device in devices() if device.name.casefold() == folded_name]
    if not matches:
        words = folded_name.split()
        matches = [
            device for device in devices() if all(word in device.name.casefold() for word in words)
        ]
    if len(matches) == 1:
        return matches[0]
    if not matches:
        by_name = {device.name.casefold(): device.name for device in devices()}
        near = [by_name[match] for match in difflib.get_close_matches(folded_name, by_name, 3)]
        hint = f"Did you mean {' or '.join(near)}? " if near else ""
        raise ReportError(
            f"The device {name!r} is unknown. {hint}`crossover plan --devices` lists all devices."
        )
    names = ", ".join(device.name for device in matches[:6])
    raise ReportError(f"The device {name!r} is ambiguous. Give one of: {names}")

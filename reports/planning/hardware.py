"""Devices that one can buy, rent or own: hardware.toml as records. All of it is **published**.

>>> [device.name for device in sufficient(gpus(), need_bytes=20 * 2**30)][:2]
['NVIDIA L4', 'NVIDIA A10G']

A user's own devices stand beside the shipped ones: `crossover hardware add` writes them to
`$XDG_CONFIG_HOME/crossover/hardware.toml`; of two of one name the user's counts.
"""

from __future__ import annotations

import math
import os
import tomllib
from collections.abc import Iterable, Mapping
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from models.formatting import GIB
from reports.errors import ReportError
from reports.prediction.facts import Chip

# What the driver leaves of the memory on the label, at least:
# L4 23034 of 24576 MiB, L40S 46068 of 49152, T4 15360 of 16384 (nvidia-smi).
USABLE_SHARE = 0.937
# ... and of HBM: A100 and H100 79.1 of 80 GiB (the total in vLLM's log).
HBM_USABLE_SHARE = 0.989
# Of memory that the GPU shares with its CPU: what macOS gives it unasked.
SHARED_USABLE_SHARE = 0.75
CARD_SIZES_GIB = (8, 16, 24, 48, 80)  # the lines of the memory chart

DeviceKind = Literal["gpu", "apple", "cpu", "tpu", "accelerator"]
MemoryType = Literal["gddr", "hbm", "apple", "uma", "ddr"]
Positive = Annotated[float, msgspec.Meta(gt=0)]
Count = Annotated[float, msgspec.Meta(ge=1)]
Day = Annotated[str, msgspec.Meta(pattern=r"^20\d\d-\d\d-\d\d$")]


class Tflops(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Dense peaks by number format. fp16: what matrix units reach, bf16 alike."""

    fp16: Positive | None = None
    fp8: Positive | None = None
    int8: Positive | None = None
    fp4: Positive | None = None


class Device(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One entry of hardware.toml. Missing is None: not known, or not for rent."""

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
    gpu_cores: Count | None = None
    cores: Count | None = None  # of a CPU, from here on
    clock_ghz: Positive | None = None
    threads_per_core: Count = 1.0
    vector_lanes: Count | None = None
    int8_lanes: Count | None = None
    channels: Count | None = None
    isa: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _check_values(msgspec.structs.asdict(self))
        _check_values({f"tflops_{k}": v for k, v in msgspec.structs.asdict(self.tflops).items()})
        if (self.kind == "cpu") != (self.memory_type == "ddr"):
            raise ValueError(f"memory_type {self.memory_type!r} does not go with {self.kind!r}")
        if self.kind == "cpu":
            for key in ("cores", "clock_ghz", "vector_lanes"):
                if getattr(self, key) is None:
                    raise ValueError(f"{key} is missing: a CPU needs it")
        if self.dollars_per_hour is not None and not (self.price_source and self.price_date):
            raise ValueError("dollars_per_hour needs price_source and price_date")

    @property
    def dense_tflops(self) -> float | None:
        """At 16 bit."""
        return self.tflops.fp16

    @property
    def usable_bytes(self) -> float | None:
        if self.memory_gib is None:
            return None
        shares = {
            "apple": SHARED_USABLE_SHARE,
            "uma": SHARED_USABLE_SHARE,
            "hbm": HBM_USABLE_SHARE,
        }
        return self.memory_gib * GIB * shares.get(self.memory_type, USABLE_SHARE)

    @property
    def chip(self) -> Chip:
        """As the predictor takes it."""
        return Chip(
            name=self.name,
            memory=self.memory_type,
            chip=self.maker,
            gbs=self.bandwidth_gb_per_second,
            gib=self.memory_gib or 0.0,
            tflops16=self.tflops.fp16 or 0.0,
            link_gbs=self.link_gb_per_second or 25.0,
            cores=self.cores or 1.0,
            ghz=self.clock_ghz or 0.0,
            smt=self.threads_per_core,
            lanes=self.vector_lanes or 0.0,
            int8_lanes=self.int8_lanes or 0.0,
        )


def _check_values(values: dict[str, Any]) -> None:
    """Raises ValueError for a number that is not finite and for control characters."""
    for key, value in values.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{key} = {value} is no finite number")
        for text in value if isinstance(value, tuple) else (value,):
            if isinstance(text, str) and not text.isprintable():
                raise ValueError(f"{key} = {text!r} has a control character")


class _Catalogue(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    device: list[Device] = []


def user_file() -> Path:
    """The user's own devices; it may not be there."""
    home = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return Path(home) / "crossover" / "hardware.toml"


def read_devices(text: str, what: str) -> list[Device]:
    """Devices of a TOML text. Raises ReportError, which names key and value."""
    try:
        return msgspec.convert(tomllib.loads(text), _Catalogue).device
    except (msgspec.ValidationError, tomllib.TOMLDecodeError) as problem:
        raise ReportError(f"{what} is broken: {problem}") from problem


@cache
def shipped() -> tuple[Device, ...]:
    """Those of hardware.toml."""
    text = resources.files("reports.planning").joinpath("hardware.toml").read_text("utf-8")
    return tuple(read_devices(text, "reports/planning/hardware.toml"))


def users() -> tuple[Device, ...]:
    """The user's own. Raises ReportError where the file is broken."""
    path = user_file()
    try:
        text = path.read_text("utf-8")
    except FileNotFoundError:
        return ()
    except (OSError, UnicodeDecodeError) as problem:
        raise ReportError(f"{path} cannot be read: {problem}") from problem
    return tuple(read_devices(text, str(path)))


def devices() -> tuple[Device, ...]:
    """Shipped ones and the user's, which replace those of their name in any case.

    Smallest memory first.
    """
    own = users()
    theirs = {device.name.casefold() for device in own}
    kept = [device for device in shipped() if device.name.casefold() not in theirs]
    found = {device.name: device for device in (*kept, *own)}
    by_size = sorted(
        found.values(), key=lambda one: (one.memory_gib or 0, one.dollars_per_hour or 1e9)
    )
    return tuple(by_size)


def gpus() -> tuple[Device, ...]:
    """GPUs for the report's list: those that have a price, or are a user's own; else too many."""
    own = {device.name for device in users()}
    return tuple(
        device
        for device in devices()
        if device.kind == "gpu" and (device.dollars_per_hour is not None or device.name in own)
    )


def gpu_of(facts: Mapping[str, Any]) -> Device | None:
    """The first GPU of a machine, as the list has it; None where it is not in it."""
    names = [str(gpu.get("name")) for gpu in facts.get("gpus") or []]
    return next((one for one in gpus() if one.name in names[:1]), None)


def device_named(name: str) -> Device:
    """By its name, or by words that are in the names of one device only. Raises ReportError."""
    wanted = name.casefold()
    for same in (lambda one: one.name == name, lambda one: one.name.casefold() == wanted):
        if (found := next(filter(same, devices()), None)) is not None:
            return found
    alike = [one for one in devices() if all(w in one.name.casefold() for w in wanted.split())]
    if len(alike) == 1:
        return alike[0]
    which = ", ".join(one.name for one in alike[:6]) if alike else "none"
    raise ReportError(f"device {name!r}: {which} of `crossover hardware list` match; name one")


def sufficient(devices: Iterable[Device], need_bytes: float) -> list[Device]:
    """Those whose memory suffices, in the order given."""
    return [device for device in devices if (device.usable_bytes or 0) >= need_bytes]

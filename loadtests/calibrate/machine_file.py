"""machine.json: what `crossover calibrate` measured of a machine, and what may be read back.

    write_machine_file(Path("machine.json"), found)
    found = read_machine_file(Path("machine.json"))   # BadMachineFile names key and value

Facts of the hardware and of software versions; nothing that names a person, host, user, path or
serial number. Sizes are bytes, times seconds, missing is None. Unknown keys are refused.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from loadtests.errors import LoadError
from loadtests.simulation.step_time import Knots, StepLaw, StepObservation
from models.manifest import write_atomically
from models.spec import KV_ELEMENT_BYTES, ModelSpec
from serving.bounds import Count, Positive, Seconds, bound

VERSION = 1

Part = Annotated[float, Meta(ge=0, le=1)]
MOST_CHARACTERS = 200
Text = Annotated[str, Meta(max_length=MOST_CHARACTERS)]
MOST_OF_A_MODEL = {  # of sizes that a model may have: a typing error, not a limit of the law
    "layers": 1_000,
    "hidden": 1 << 20,
    "heads": 1 << 14,
    "kv_heads": 1 << 14,
    "head_dim": 1 << 14,
    "intermediate": 1 << 22,
    "vocabulary": 1 << 24,
    "context": 1 << 32,
}


class BadMachineFile(LoadError):
    """A machine file that cannot be read, of another version, or with a wrong key or value."""


class Law(StepLaw, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The step law of one model, checked when it is read: each step takes time, more no less."""

    def __post_init__(self) -> None:
        costs = {
            name: getattr(self, name)
            for name in self.__struct_fields__
            if name.endswith("_seconds")
        }
        for name, seconds in costs.items():
            if not 0 <= seconds < math.inf:
                raise ValueError(f"{name} must be at least 0 s, got {seconds}")
        if self.form != "sum" or self.weights_seconds:
            had = f"{self.form!r} with weights_seconds {self.weights_seconds}"
            raise ValueError(f"form must be 'sum' with weights_seconds 0, got {had}")
        if not self.rows:
            raise ValueError("rows must have at least one entry, got none")
        _check_knots("rows", self.rows)
        if self.base_seconds + self.rows[0][1] <= 0:
            raise ValueError("base_seconds + rows[0] must be above 0 s, got 0")


def _check_knots(name: str, knots: Knots) -> None:
    for index, (count, seconds) in enumerate(knots):
        if not 0 < count < math.inf:
            raise ValueError(f"{name}[{index}] must be of more than 0 rows, got {count}")
        if not 0 <= seconds < math.inf:
            raise ValueError(f"{name}[{index}] must be at least 0 s, got {seconds}")
    counts = [count for count, _ in knots]
    if counts != sorted(set(counts)):
        raise ValueError(f"{name} must ascend, got {counts}")
    costs = [seconds for _, seconds in knots]
    if costs != sorted(costs):
        raise ValueError(f"{name} must not fall in seconds, got {costs}")


class Step(StepObservation, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """One kind of step and the lower quartile of its times."""

    def __post_init__(self) -> None:
        if not 0 < self.seconds < math.inf:
            raise ValueError(f"seconds must be above 0, got {self.seconds}")


class Hardware(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The machine, as far as its kernel says."""

    cpu_model: Text
    architecture: Text
    isa: tuple[Text, ...]
    logical_cores: Count
    physical_cores: Count | None = None
    usable_cores: Positive  # by affinity and CPU quota
    numa_nodes: Count | None = None
    memory_channels: Count | None = None  # where the kernel's memory controller driver names them
    l2_bytes: Count | None = None
    l3_bytes: Count | None = None
    max_hertz: Positive | None = None
    governor: Text | None = None
    memory_bytes: Count  # of the machine, or of its container
    virtualisation: Text | None = None
    system: Text
    kernel: Text
    python: Text
    packages: dict[Text, Text]


class Bandwidth(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What so many threads read from memory together."""

    threads: Count
    bytes_per_second: Positive


class MatrixRate(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Matrix products: multiplications and additions per second."""

    numbers: Literal["fp32", "int8"]
    threads: Count
    operations_per_second: Positive
    by: Text


class EngineSteps(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The step times of one engine with one model."""

    backend: Text
    version: Text
    model: ModelSpec
    weight_format: Text
    weight_bytes: Count
    kv_dtype: Text
    threads: Count
    slots: Count
    steps: tuple[Step, ...]
    head: Knots  # (rows, seconds): what logits and draws of so many rows take, within the law's
    law: Law
    waited_share: Part  # of the time, by the engine's thread that waited most for a core

    def __post_init__(self) -> None:
        _check_knots("head", self.head)
        if self.kv_dtype not in KV_ELEMENT_BYTES:
            known = ", ".join(KV_ELEMENT_BYTES)
            raise ValueError(f"kv_dtype must be one of {known}, got {self.kv_dtype!r}")
        for name, most in MOST_OF_A_MODEL.items():
            if not 1 <= (size := getattr(self.model, name)) <= most:
                raise ValueError(f"model.{name} must be 1 to {most}, got {size}")


class Disturbed(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What others took of the CPU time that the engine wanted. None: the kernel does not tell."""

    share: Part | None
    steal_share: Part | None  # by the hypervisor
    is_quiet: bool


class MachineFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The file."""

    version: Literal[1] = 1
    crossover: Text
    measured_on: Annotated[str, Meta(pattern=r"^\d{4}-\d\d-\d\d$")]
    name: Text
    hardware: Hardware
    bandwidth: Annotated[tuple[Bandwidth, ...], Meta(min_length=1)]
    matrix_rates: tuple[MatrixRate, ...]
    engines: Annotated[tuple[EngineSteps, ...], Meta(min_length=1)]
    disturbance: Disturbed
    spent_seconds: Seconds
    watts: Positive | None = None  # under load, as its owner says
    dollars_per_hour: Seconds | None = None
    price_source: Text = ""
    price_date: Text = ""
    owned: bool = True


def read_machine_file(path: Path) -> MachineFile:
    """The file, checked. Raises BadMachineFile with file, key and value."""
    try:
        raw = msgspec.json.decode(path.read_bytes())
    except OSError as problem:
        raise BadMachineFile(f"{path} cannot be read: {problem.strerror}") from problem
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as problem:
        raise BadMachineFile(f"{path} is no JSON: {problem}") from problem
    version = raw.get("version") if isinstance(raw, dict) else None
    if version != VERSION:
        raise BadMachineFile(
            f"{path} is no machine file of version {VERSION}: version is {version!r}; "
            "`crossover calibrate` writes one"
        )
    try:
        return msgspec.convert(raw, MachineFile)
    except msgspec.ValidationError as problem:
        raise BadMachineFile(f"{path}: {_explained(str(problem), raw)}") from problem


def write_machine_file(path: Path, found: MachineFile) -> None:
    """The whole file or none of it."""
    write_atomically(path, msgspec.json.format(msgspec.json.encode(found), indent=1) + b"\n")


def _explained(problem: str, raw: Any) -> str:
    """`engines[0].threads must be at least 1, got 0`, from msgspec's sentence."""
    found = re.fullmatch(r"(.*) - at `\$\.?(.*)`", problem)
    if found is None or "[...]" in found[2]:
        return problem
    value = raw
    for key, index in re.findall(r"(\w+)|\[(\d+)\]", found[2]):
        try:
            value = value[int(index)] if index else value[key]
        except (KeyError, IndexError, TypeError):
            return problem
    limits = bound(found[1])
    told = f"must be {limits}" if limits else f"is wrong: {found[1]}"
    shown = "" if isinstance(value, dict | list) else f", got {value!r}"
    return f"{found[2] or 'the file'} {told}{shown}"

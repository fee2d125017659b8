"""machine.json: the step-time models that were measured on a machine, for use elsewhere. `crossover
calibrate` measures and writes them; `crossover report --share FILE.json` takes them from a run.

    write_machine_file(Path("machine.json"), machine_file)
    machine_file = read_machine_file(Path("machine.json"))   # BadMachineFile names key and value

The file has facts about hardware and software versions, and nothing that names a person, host,
user, path or serial number. Sizes are in bytes, times in seconds. Unknown keys are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from crossover.loadtests.errors import LoadError
from crossover.models.shape.model_spec import ModelSpec
from crossover.models.weights.weights_manifest import write_atomically
from crossover.serving.capacity.simulated_capacity import ServerModel
from crossover.serving.faults import converted
from crossover.serving.option_help import Count, Positive, Seconds

VERSION: Literal[5] = 5

MAX_CHARACTERS = 200
CONTEXT_TOKENS = 256.0  # of each stream, where a speed in tokens/s is given
Text = Annotated[str, Meta(max_length=MAX_CHARACTERS)]
PartOfOne = Annotated[float, Meta(ge=0, le=1)]


class BadMachineFile(LoadError):
    """A machine file that cannot be read, of another version, or with a wrong key or value."""


class Gpu(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A GPU of the machine, as its driver reports it."""

    name: Text
    memory_bytes: Annotated[int, Meta(ge=1)] | None = None


class Hardware(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The machine, as its kernel reports it."""

    cpu_model: Text
    architecture: Text
    isa: tuple[Text, ...]
    logical_cores: Count
    physical_cores: Count | None = None
    usable_cores: Positive  # by affinity and CPU quota
    memory_bytes: Annotated[int, Meta(ge=1)]  # of the machine, or of its container
    virtualisation: Text | None = None
    system: Text
    gpus: tuple[Gpu, ...] = ()


class ModelSteps(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The step-time model of one model in one format on one engine."""

    device: Literal["cpu", "gpu"] = "cpu"
    backend: Text  # or the name of another project's engine
    version: Text = ""  # of the engine's library
    model: ModelSpec
    weight_format: Text
    threads: Count | None = None
    server: ServerModel  # as it was calibrated, without load
    # Factor by which steps took longer under load, as load levels showed; None: no level did.
    load_factor: Positive | None = None
    spent_seconds: Seconds = 0.0

    def decode_tokens_per_second(self, streams: int) -> float:
        """Return the output tokens per second of so many requests together, without prompts."""
        return streams / self.server.step_times.seconds(streams, 0, streams * CONTEXT_TOKENS)


class MachineFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The contents of machine.json."""

    version: Literal[5] = VERSION
    crossover: Text  # version of Crossover that wrote it
    measured_on: Annotated[str, Meta(pattern=r"^\d{4}-\d\d-\d\d$")]
    name: Text  # of the machine, for people
    hardware: Hardware
    models: Annotated[tuple[ModelSteps, ...], Meta(min_length=1)]
    # Share of the CPU time that the engine wanted, which other processes took; None: not known.
    taken_share: PartOfOne | None = None
    dollars_per_hour: Positive | None = None  # rent of the whole machine on that day


def read_machine_file(path: Path) -> MachineFile:
    """Return the contents of a machine file. Raises BadMachineFile with file, key and value."""
    try:
        raw = msgspec.json.decode(path.read_bytes())
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as problem:
        raise BadMachineFile(f"{path} cannot be read: {problem}") from problem
    version = raw.get("version") if isinstance(raw, dict) else None
    if version != VERSION:
        raise BadMachineFile(
            f"{path} is not a machine file of version {VERSION}: its version is {version!r}. Run "
            "`crossover calibrate` again on that machine."
        )
    try:
        return converted(raw, MachineFile, BadMachineFile)
    except BadMachineFile as problem:
        raise BadMachineFile(f"{path}: {problem}") from problem


def write_machine_file(path: Path, machine_file: MachineFile) -> None:
    """Write the file atomically."""
    text = msgspec.json.format(msgspec.json.encode(machine_file), indent=1)
    write_atomically(path, text + b"\n")


def hardware_of(facts: Mapping[str, Any], memory_bytes: int) -> Hardware:
    """Return what a machine file may say about a machine: without the name of the host, and nothing
    about its kernel. `facts`: the HardwareFacts of a run, or what a shared run keeps of them."""
    allowed_cores = len(facts["allowed_cores"])
    return Hardware(
        cpu_model=facts["cpu_model"],
        architecture=facts["architecture"],
        isa=tuple(facts["isa"]),
        logical_cores=facts["logical_cores"],
        physical_cores=facts.get("physical_cores"),
        usable_cores=min(allowed_cores, facts.get("cgroup_cores") or allowed_cores),
        memory_bytes=memory_bytes,
        virtualisation=facts.get("virtualisation"),
        system=facts["system"],
        gpus=tuple(
            Gpu(name=gpu["name"], memory_bytes=gpu.get("total_bytes"))
            for gpu in facts.get("gpus") or ()
        ),
    )

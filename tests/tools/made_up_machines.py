"""Eleven machines that are not there, and where an 8B model must go on each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import msgspec

from crossover.models.identity.model_ladder import ladder_model
from crossover.serving.errors import Cause
from crossover.serving.hardware.gpus import GpuFacts
from crossover.serving.hardware.machine_facts import HardwareFacts
from crossover.serving.placement.engines import Obstacles
from crossover.serving.placement.placement_policy import NoPlacement, plan
from crossover.serving.registry.prepare_model import Host
from crossover.serving.server_options import Policy
from tests.tools.with_settings import placement_request

GIB = 1 << 30
NO_BUILD = {"llama_cpp": (Cause.backend_missing, "this build of llama.cpp is for the CPU only")}
FACTS = HardwareFacts(
    cpu_model="Made-up CPU",
    architecture="x86_64",
    isa=("avx2",),
    logical_cores=8,
    physical_cores=4,
    allowed_cores=(0, 1, 2, 3),
    memory_total_bytes=64 * GIB,
    memory_available_bytes=64 * GIB,
    system="Linux",
    kernel="6",
    python="3.11",
)


class MadeUp(Host):
    """A machine with these facts, whose backends have this trouble with its GPU."""

    def __init__(
        self, facts: HardwareFacts, trouble: Mapping[str, tuple[Cause, str]] | None = None
    ) -> None:
        super().__init__()
        self._facts, self._trouble = facts, dict(trouble or {})

    def facts(self) -> HardwareFacts:
        return self._facts

    def gpu_troubles(
        self, names: Iterable[str], facts: HardwareFacts
    ) -> dict[str, tuple[Cause, str]]:
        return self._trouble


class MadeUpMachine(NamedTuple):
    """`expected`: device, backend and the GPU's UUID; None: it must be refused."""

    name: str
    gpus: tuple[GpuFacts, ...]
    expected: tuple[str, str, str] | None
    obstacles: Obstacles = Obstacles()
    policy: Policy = Policy.auto
    cause: Cause | None = None  # why there is no GPU


def card(name: str, total: float, free: float, uuid: str, vendor: str = "nvidia") -> GpuFacts:
    sizes = int(total * GIB), int(free * GIB)
    return GpuFacts(name, vendor, *sizes, uuid=uuid)


def made_up_machines() -> Iterator[MadeUpMachine]:
    """The machines, in the order of the table."""
    h100, rtx = card("H100", 80, 79, "GPU-h"), card("RTX 4090", 24, 23.5, "GPU-r")
    on_cpu = "cpu", "llama_cpp", ""
    mi300 = card("MI300X", 192, 190, "GPU-m", "amd")
    yield MadeUpMachine("no GPU", (), on_cpu)
    yield MadeUpMachine("one H100", (h100,), ("gpu", "torch", "GPU-h"))
    yield MadeUpMachine("one RTX 4090", (rtx,), ("gpu", "torch", "GPU-r"))
    small = card("RTX 4070", 12, 11.6, "GPU-s")
    yield MadeUpMachine("a card too small for bf16", (small,), ("gpu", "llama_cpp", "GPU-s"))
    busy = card("H100", 80, 2, "GPU-1"), card("H100", 80, 78, "GPU-2")
    yield MadeUpMachine("two cards, the first in use", busy, ("gpu", "torch", "GPU-2"))
    yield MadeUpMachine("one card, in use", (busy[0],), on_cpu)
    yield MadeUpMachine("an MI300X, torch for ROCm", (mi300,), ("gpu", "torch", "GPU-m"))
    wrong = Obstacles(gpu={**NO_BUILD, "torch": (Cause.no_device, "it is built for CUDA")})
    yield MadeUpMachine("an MI300X, torch for CUDA", (mi300,), on_cpu, wrong)
    ill = Cause.driver_mismatch
    yield MadeUpMachine("a driver that does not fit", (), on_cpu, cause=ill)
    yield MadeUpMachine("no GPU, and one is asked for", (), None, policy=Policy.gpu_only)


def placed_on(machine: MadeUpMachine) -> tuple[str, str, str] | None:
    """Where the model goes: as `expected`."""
    facts = msgspec.structs.replace(
        FACTS, gpus=machine.gpus, gpu_cause=machine.cause, gpu_note=machine.cause
    )
    request = placement_request(
        ladder_model("8b").spec, policy=machine.policy, context_tokens=2048, slots=8
    )
    try:
        first = plan(request, facts, machine.obstacles).attempts[0]
    except NoPlacement:
        return None
    return first.device, first.backend, first.device_id

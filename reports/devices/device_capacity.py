"""What a machine that serves elsewhere would hold: a step-time model in the one simulation.

    gpu = machine_of(device_named("NVIDIA T4"))
    service = Service(gpu, ladder_model("8b").spec, "bf16", traffic)
    certainty_of(service, slo, rate=0.5)         # "yes", "perhaps" or "no"
    capacity_of(service, slo).low         # requests/s

A machine's step-time model is measured (this run), calibrated (machine.json) or predicted (a
datasheet). Its interval covers machines whose steps all take the modeled time multiplied or divided
by exp(half width): the capacity is above `low` in nine of ten cases, and above `high` in one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Literal

import msgspec
import numpy as np

from crossover.models.formatting import GIB
from crossover.models.model_spec import ModelSpec
from crossover.models.weight_formats import weight_bytes
from crossover.reports.devices.device_catalog import Device
from crossover.reports.devices.device_step_times import default_slots, predicted_step_times
from crossover.reports.errors import ReportError
from crossover.serving.capacity.scheduler_settings import SchedulerSettings
from crossover.serving.capacity.simulated_capacity import (
    QUICK_REQUESTS,
    Lengths,
    PrefixReuse,
    Server,
    lengths_of,
)
from crossover.serving.capacity.slo import Slo
from crossover.serving.capacity.step_time_model import StepTimeModel
from crossover.serving.workload.arrivals import Arrivals, Poisson
from crossover.serving.workload.request_lengths import Workload

# Of the half width of a two-sided 90 % band: the quantile of 90 % over that of 95 %.
ONE_SIDED = 1.2816 / 1.6449
# vLLM: its KV cache is gpu_memory_utilization x memory, less weights, less what its profiling run
# takes at its peak, less what is outside torch (docs.vllm.ai, "Conserving Memory"; its worker's
# log says the four). The peak is of sampling: for dense models 1.19 GiB with 256 sequences of
# Llama-3.1-8B (its log on 80 GB), 4.8 with 1,024 and 5.6 with 1,024 of 152k tokens (llm-d, H100):
# 39 bytes a sequence and token of the vocabulary, each. Outside torch 0.13-0.6 GiB (llm-d).
VLLM_MEMORY_SHARE = 0.9
VLLM_LOGIT_BYTES = 39
VLLM_OUTSIDE_BYTES = 0.6 * GIB
# llama.cpp beside weights and KV: CUDA context about 0.5 GiB, 0.13-0.6 GiB outside the allocator,
# buffers of a step (llm-d's measurements).
GPU_FIXED_BYTES = 1 * GIB
GPU_WEIGHT_SHARE = 0.05
PREFILL_TOKENS = 2048  # of a step while someone decodes: vLLM's default for a server
TOGETHER = (1, 2, 4, 8)  # devices that share each step, the fewest first
TURNS = 1_000  # of conversations for a rate: each is simulated more slowly than a request
SLOW, MIDDLE, QUICK = 1, 0, -1  # steps of the low end, of the estimate, of the high end

Grade = Literal["confirmed", "estimated", "predicted"]
Answer = Literal["yes", "perhaps", "no"]  # at the low end, at the high end only, at neither
StepTimesOf = Callable[[ModelSpec, str, int, int], tuple[StepTimeModel, float]]


class Traffic(msgspec.Struct, frozen=True, eq=False):
    """What is asked, and when. Compared by identity: one object a workload."""

    lengths: Lengths
    arrivals: Arrivals = Poisson()
    workload: Workload | None = None  # that the lengths are drawn from; None: not known

    def served_with(self, reuse: PrefixReuse | None, reasoning_share: float) -> Traffic:
        """The same traffic, of a server that saves so much of histories and whose model reasons so
        long."""
        if self.workload is None or (reuse is None and not reasoning_share):
            return self
        lengths = lengths_of(
            self.workload,
            len(self.lengths.prompt),
            seed=1,
            reuse=reuse,
            reasoning_share=reasoning_share,
        )
        return msgspec.structs.replace(self, lengths=lengths)

    @property
    def mean_prompt(self) -> float:
        """Tokens."""
        return float(np.mean(self.lengths.prompt))

    @property
    def mean_output(self) -> float:
        """Tokens."""
        return float(np.mean(self.lengths.output))

    @property
    def longest(self) -> float:
        """Tokens of the longest request."""
        return float((self.lengths.prompt + self.lengths.output).max())


class Machine(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """One device, or one CPU machine. Missing is None: not known, or not for rent.

    `step_times` gives the step-time model of (model, format, slots, devices that share a step) and
    half the 90 % band of ln(step time); it raises ReportError where none is known.
    """

    name: str
    step_times: StepTimesOf
    slots: int
    grade: Grade = "predicted"
    policy: SchedulerSettings | None = None  # of its scheduler; None: as such engines are given
    memory_bytes: float | None = None  # that an engine can use
    is_served_by_vllm: bool = False  # else by llama.cpp
    watts: float | None = None  # under load
    dollars_per_hour: float | None = None
    price_date: str = ""


class Service(msgspec.Struct, frozen=True):
    """A model in a format, asked so, on so many of a machine that share each step."""

    machine: Machine
    spec: ModelSpec
    weight_format: str
    traffic: Traffic
    devices: int = 1

    def needed_bytes(self, kv_tokens: float, states: int = 1) -> float:
        """Memory of all devices that serving takes with so much KV and so many requests' recurrent
        states: with all weights, whichever experts a token uses."""
        weights = weight_bytes(self.spec, self.weight_format)
        held = weights + kv_tokens * self.spec.kv_bytes_per_token("fp16")
        held += states * self.spec.state_bytes_per_slot
        if self.machine.is_served_by_vllm:
            logits = VLLM_LOGIT_BYTES * self.machine.slots * self.spec.vocabulary
            return (held + self.devices * (logits + VLLM_OUTSIDE_BYTES)) / VLLM_MEMORY_SHARE
        return held + self.devices * GPU_FIXED_BYTES + GPU_WEIGHT_SHARE * weights

    def policy(self) -> SchedulerSettings:
        """With the KV cache that its memory leaves room for, and as many slots as there is room for
        their recurrent states. Raises ReportError where it is too small for the longest request."""
        machine = self.machine
        if machine.policy is not None:
            return machine.policy
        kv_tokens, slots = None, machine.slots
        if machine.memory_bytes is not None:
            least = self.needed_bytes(self.traffic.longest)
            whole = machine.memory_bytes * self.devices
            if least > whole:
                raise ReportError(
                    f"needs {least / GIB:.1f} GiB, {machine.name} has {whole / GIB:.1f} GiB"
                )
            share = VLLM_MEMORY_SHARE if machine.is_served_by_vllm else 1.0
            free = (whole - self.needed_bytes(0, states=0)) * share
            token_bytes = self.spec.kv_bytes_per_token("fp16")
            state_bytes = self.spec.state_bytes_per_slot
            if state_bytes:
                fitting = free / (state_bytes + self.traffic.longest * token_bytes)
                slots = min(slots, max(1, int(fitting)))
            left = free - slots * state_bytes
            kv_tokens = int(left / token_bytes) if token_bytes else None  # None: nothing attends
        return SchedulerSettings(
            slots=slots,
            context_tokens=int(self.traffic.longest),
            prefill_tokens=PREFILL_TOKENS,
            step_tokens=PREFILL_TOKENS,
            kv_tokens=kv_tokens,
            step_seconds_target=None,
        )


class DeviceCapacity(msgspec.Struct, frozen=True, kw_only=True):
    """What a machine holds under an SLO, requests/s. None: `reason` says why."""

    device: str
    kind: Grade
    devices: int = 1  # that share each step
    low: float | None = None  # held in nine of ten cases
    rate: float | None = None
    high: float | None = None
    reason: str = ""
    ttft_seconds: float | None = None  # medians at `rate`
    tpot_seconds: float | None = None
    memory_bytes: float | None = None  # that serving takes, of all devices
    dollars_per_hour: float | None = None  # of all its devices
    watts: float | None = None

    @property
    def name(self) -> str:
        """`NVIDIA L4`, `2 x NVIDIA L4`."""
        return self.device if self.devices == 1 else f"{self.devices} x {self.device}"


@lru_cache(maxsize=512)
def machine_of(device: Device) -> Machine:
    """A device of the catalogue, which nobody has measured; the same object for the same device."""
    return Machine(
        name=device.name,
        step_times=lambda spec, weight_format, slots, devices: predicted_step_times(
            device, spec, weight_format, slots, devices
        ),
        slots=default_slots(device),
        memory_bytes=device.usable_bytes,
        is_served_by_vllm=device.is_served_by_vllm,
        watts=device.watts,
        dollars_per_hour=device.dollars_per_hour,
        price_date=device.price_date or "",
    )


@lru_cache(maxsize=1024)
def simulation_of(service: Service, speed: int) -> Server:
    """A service in the simulation, its steps SLOW, MIDDLE or QUICK.

    Raises ReportError where the memory does not suffice or no step-time model is known.
    """
    machine, traffic = service.machine, service.traffic
    step_times, half_width = machine.step_times(
        service.spec, service.weight_format, machine.slots, service.devices
    )
    slower = step_times.slower(math.exp(speed * ONE_SIDED * half_width))
    policy = service.policy()
    count = QUICK_REQUESTS if traffic.lengths.turns is None else TURNS
    return Server(slower, policy, traffic.lengths, traffic.arrivals, count=count)


def certainty_of(service: Service, slo: Slo, rate: float) -> Answer:
    """Whether it holds a rate: by one or two simulations, none of a search.

    Raises ReportError where the memory does not suffice or no step-time model is known.
    """

    def suffices(server: Server) -> bool:
        return _is_good_alone(server, slo) and server.share(rate, slo) >= slo.target

    if suffices(simulation_of(service, SLOW)):
        return "yes"
    return "perhaps" if suffices(simulation_of(service, QUICK)) else "no"


def capacity_of(service: Service, slo: Slo) -> DeviceCapacity:
    """Its capacity. Never raises for a machine that cannot serve the model: `reason` says why."""
    machine, count = service.machine, service.devices
    found = DeviceCapacity(
        device=machine.name,
        kind=machine.grade,
        devices=count,
        dollars_per_hour=machine.dollars_per_hour and machine.dollars_per_hour * count,
        watts=machine.watts and machine.watts * count,
    )
    try:
        low, rate, high = (
            _crossing(simulation_of(service, speed), slo) for speed in (SLOW, MIDDLE, QUICK)
        )
    except ReportError as problem:
        return msgspec.structs.replace(found, reason=str(problem))
    memory = None
    if machine.policy is None:
        memory = service.needed_bytes(service.traffic.longest)
    found = msgspec.structs.replace(found, low=low, rate=rate, high=high, memory_bytes=memory)
    if not rate:
        limits = "with one request at a time" if high == 0.0 else "by the middle of its interval"
        return msgspec.structs.replace(found, reason=f"misses the SLO {slo.name} {limits}")
    played = simulation_of(service, MIDDLE).play(rate)
    tpot = played.tpot[~np.isnan(played.tpot)]
    return msgspec.structs.replace(
        found,
        ttft_seconds=float(np.median(played.ttft)),
        tpot_seconds=float(np.median(tpot)) if len(tpot) else None,
    )


def _is_good_alone(server: Server, slo: Slo) -> bool:
    alone = server.alone().meets(slo)
    return bool(alone.mean() >= slo.target)


def _crossing(server: Server, slo: Slo) -> float:
    """The capacity; 0.0: not even alone."""
    return server.crossing(slo) if _is_good_alone(server, slo) else 0.0

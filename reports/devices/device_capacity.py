"""The capacity of a machine that did not run: its step-time model in the simulation.

    gpu = machine_of(device_named("NVIDIA T4"))
    service = Service(gpu, ladder_model("8b").spec, "bf16", traffic)
    certainty_of(service, slo, rate=0.5)  # "yes", "perhaps" or "no"
    capacity_of(service, slo).low  # requests/s

A machine's step-time model is measured (by a run), calibrated (machine.json) or predicted (from a
datasheet). The interval of the capacity comes from two further simulations, with all steps slower
or faster by the factor exp(half width), where the half width is that of the 90 % band of ln(step
time), reduced to one side. The capacity is above `low` in nine of ten cases, and above `high` in
one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Literal

import msgspec
import numpy as np

from crossover.loadtests.capacity.sharper_slo import what_gives_a_capacity
from crossover.models.formatting import GIB
from crossover.models.shape.model_spec import ModelSpec
from crossover.models.weights.weight_formats import weight_bytes
from crossover.reports.devices.device_catalog import Device
from crossover.reports.devices.device_step_times import default_slots, predicted_step_times
from crossover.reports.devices.predicted_steps import PredictedSteps
from crossover.reports.errors import ReportError
from crossover.serving.capacity.scheduler_settings import SchedulerSettings
from crossover.serving.capacity.simulated_capacity import (
    QUICK_REQUESTS,
    SHOWN_SEED,
    Demand,
    Lengths,
    Server,
    ServerModel,
)
from crossover.serving.capacity.slo import Slo
from crossover.serving.capacity.step_time_model import StepTimeModel

# From the half width of a two-sided 90 % band to a one-sided bound of 90 %: the normal
# distribution's quantile of 90 % over that of 95 %.
ONE_SIDED = 1.2816 / 1.6449
# vLLM's KV cache has gpu_memory_utilization x memory, less the weights, less the peak of a
# profiling run, less what is outside torch (docs.vllm.ai, "Conserving Memory"; the log of its
# worker states the four). Sampling causes the peak. For dense models it was 1.19 GiB with 256
# sequences of Llama-3.1-8B (vLLM's log, 80 GB), 4.8 GiB with 1,024 sequences, and 5.6 GiB with
# 1,024 sequences and 152k tokens of vocabulary (llm-d, H100): 39 bytes for each sequence and
# token of the vocabulary. Outside torch there were 0.13-0.6 GiB (llm-d).
VLLM_MEMORY_SHARE = 0.9
VLLM_LOGIT_BYTES = 39
VLLM_OUTSIDE_BYTES = 0.6 * GIB
# llama.cpp beside weights and KV cache: about 0.5 GiB of CUDA context, 0.13-0.6 GiB outside the
# allocator, and the buffers of a step (measured by llm-d).
GPU_FIXED_BYTES = 1 * GIB
GPU_WEIGHT_SHARE = 0.05
PREFILL_TOKENS = 2048  # of a step while other requests decode: vLLM's default for a server
TENSOR_PARALLEL_SIZES = (1, 2, 4, 8)  # numbers of devices that may share each step
CONVERSATION_TURNS = 4_000  # simulated at each rate, or more if there are many users
# These are only a few hundred conversations of the preset `agent`, so its capacities vary with the
# draw of conversations and arrivals. This is the standard deviation of ln(capacity) over five draws
# (16 % on 4 x H100 and 12 % on 8 x A100 with 8B, 9 % on 8 x L40S with 1B). Four times as many turns
# would halve it, and take four times as long.
CONVERSATION_SD = 0.13
# By how many half widths of its band ln(step time) is moved: steps are slow for the low end of a
# capacity, as expected for the estimate, and fast for the high end.
SLOW_STEPS, EXPECTED_STEPS, FAST_STEPS = 1, 0, -1

CapacityGrade = Literal["confirmed", "estimated", "predicted"]
# Whether a rate meets the SLO: with 90 % confidence; with 10 to 90 %; with less.
Certainty = Literal["yes", "perhaps", "no"]
# (model, weight format, slots, devices that share a step) -> step-time model and its uncertainty.
StepTimesOf = Callable[[ModelSpec, str, int, int], PredictedSteps]


class Traffic(msgspec.Struct, frozen=True):
    """The requests, and the server that was measured with them."""

    demand: Demand
    # Devices that were not measured are assumed to find as much of prompts in their cache, to spend
    # as much on reasoning and, unless their own is known, to need as much time outside the engine.
    # None: not measured.
    server: ServerModel | None = None

    @property
    def lengths(self) -> Lengths:
        """The lengths of the requests, as that server gets them."""
        if self.server is None:
            return self.demand.lengths()
        return self.server.lengths(self.demand.workload, QUICK_REQUESTS, SHOWN_SEED)

    def server_with(self, step_times: StepTimeModel, settings: SchedulerSettings) -> ServerModel:
        """Return a device that serves these requests."""
        if self.server is None:
            return ServerModel(step_times, settings)
        if step_times.request_seconds is None:
            outside_seconds = self.server.step_times.request_seconds
            step_times = msgspec.structs.replace(step_times, request_seconds=outside_seconds)
        return msgspec.structs.replace(self.server, step_times=step_times, settings=settings)

    @property
    def mean_prompt(self) -> float:
        return float(np.mean(self.lengths.prompt))

    @property
    def mean_output(self) -> float:
        return float(np.mean(self.lengths.output))

    @property
    def longest(self) -> float:
        """Prompt and output tokens of the longest request."""
        return float((self.lengths.prompt + self.lengths.output).max())


class Machine(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """One device, or one CPU machine. None: not known, or not for rent.

    `step_times` raises ReportError where no step-time model is known.
    """

    name: str
    step_times: StepTimesOf
    slots: int
    grade: CapacityGrade = "predicted"
    policy: SchedulerSettings | None = None  # None: the default settings of its engine
    # The model that was served with `policy`; None: the one that is asked about.
    policy_model: ModelSpec | None = None
    memory_bytes: float | None = None  # usable by an engine
    use: float = 1.0  # part of it that the steps of one engine keep at work (shared_processor.py)
    is_served_by_vllm: bool = False  # otherwise llama.cpp serves
    watts: float | None = None  # under load
    dollars_per_hour: float | None = None
    price_date: str = ""


class Service(msgspec.Struct, frozen=True):
    """A model in a weight format under some traffic, on devices that share each step."""

    machine: Machine
    spec: ModelSpec
    weight_format: str
    traffic: Traffic
    devices: int = 1

    def predicted_steps(self) -> PredictedSteps:
        """Return the step times. Raises ReportError where they are not known."""
        machine = self.machine
        return machine.step_times(self.spec, self.weight_format, machine.slots, self.devices)

    def step_factor(self, speed: int) -> float:
        """Return the factor of all step times with SLOW_STEPS, EXPECTED_STEPS or FAST_STEPS.
        Raises ReportError where they are not known."""
        return math.exp(speed * ONE_SIDED * self.predicted_steps().half_width)

    def needed_bytes(self, kv_tokens: float, states: int = 1) -> float:
        """Return the memory that serving takes on all devices together, with a KV cache of so many
        tokens and the recurrent states of so many requests. All experts are in memory."""
        weights = weight_bytes(self.spec, self.weight_format)
        content = weights + kv_tokens * self.spec.kv_bytes_per_token("fp16")
        content += states * self.spec.state_bytes_per_slot
        if self.machine.is_served_by_vllm:
            logits = VLLM_LOGIT_BYTES * self.machine.slots * self.spec.vocabulary
            return (content + self.devices * (logits + VLLM_OUTSIDE_BYTES)) / VLLM_MEMORY_SHARE
        engine_bytes = content + self.devices * GPU_FIXED_BYTES + GPU_WEIGHT_SHARE * weights
        engines = 1 if self.machine.policy is None else self.machine.policy.engines
        return engine_bytes * engines

    def policy(self) -> SchedulerSettings:
        """Return the machine's settings, or those with the KV cache and the slots that fit its
        memory. Raises ReportError if the memory is too small for the longest request."""
        machine = self.machine
        memory_bytes = machine.memory_bytes
        if memory_bytes is not None:
            memory_bytes *= self.devices
            self._check_longest_request(memory_bytes)
        if machine.policy is not None:
            return self._with_cache_of_this_model(machine.policy)
        kv_tokens, slots = None, machine.slots
        if memory_bytes is not None:
            kv_tokens, slots = self._fitting_cache(memory_bytes)
        return SchedulerSettings(
            slots=slots,
            context_tokens=int(self.traffic.longest),
            prefill_tokens=PREFILL_TOKENS,
            step_tokens=PREFILL_TOKENS,
            kv_tokens=kv_tokens,
            step_seconds_target=None,
        )

    def _with_cache_of_this_model(self, policy: SchedulerSettings) -> SchedulerSettings:
        """Return settings in which the prompt cache has as many bytes as with the model that was
        served: it has room for more tokens of a model whose KV cache is smaller."""
        served, own_bytes = self.machine.policy_model, self.spec.kv_bytes_per_token()
        if served is None or served == self.spec or not policy.stored_tokens:
            return policy
        if not own_bytes or not served.kv_bytes_per_token():
            return msgspec.structs.replace(policy, stored_tokens=0)
        ratio = own_bytes / served.kv_bytes_per_token()
        states_bytes = 2 * self.spec.state_bytes_per_slot  # at its end and in its checkpoint
        return msgspec.structs.replace(
            policy,
            stored_tokens=int(policy.stored_tokens / ratio),
            stored_sequence_tokens=int(states_bytes / own_bytes),
            copy_token_seconds=policy.copy_token_seconds * ratio,
        )

    def _check_longest_request(self, memory_bytes: float) -> None:
        """Raise ReportError if the memory is too small for the longest request."""
        min_bytes = self.needed_bytes(self.traffic.longest)
        if min_bytes > memory_bytes:
            raise ReportError(
                f"needs {min_bytes / GIB:.1f} GiB, {self.machine.name} has "
                f"{memory_bytes / GIB:.1f} GiB"
            )

    def _fitting_cache(self, memory_bytes: float) -> tuple[int | None, int]:
        """Return the tokens of the KV cache (None: no layer has one) and the slots for which there
        is memory, which suffices for the longest request."""
        usable_share = VLLM_MEMORY_SHARE if self.machine.is_served_by_vllm else 1.0
        free_bytes = (memory_bytes - self.needed_bytes(0, states=0)) * usable_share
        token_bytes = self.spec.kv_bytes_per_token("fp16")
        state_bytes = self.spec.state_bytes_per_slot
        slots = self.machine.slots
        if state_bytes:  # each slot has a recurrent state, whatever the length of its sequence
            slot_bytes = state_bytes + self.traffic.longest * token_bytes
            slots = min(slots, max(1, int(free_bytes / slot_bytes)))
        kv_bytes = free_bytes - slots * state_bytes
        return int(kv_bytes / token_bytes) if token_bytes else None, slots


class MixedModel(msgspec.Struct, frozen=True, kw_only=True):
    """One of several models on a machine, at their capacity. None: they have none together."""

    model: str
    weight_format: str
    share: float  # of all requests
    unshared_rate: float | None  # its capacity with the machine to itself, requests/s
    rate: float | None = None  # its part of the capacity of all models
    kept_share: float | None = None  # `rate` divided by `unshared_rate`
    slowdown: float | None = None  # by which factor its steps take longer beside the others


class DeviceCapacity(msgspec.Struct, frozen=True, kw_only=True):
    """The capacity of a machine under an SLO, requests/s. Where it is None, `reason` says why."""

    device: str
    grade: CapacityGrade
    devices: int = 1  # which share each step
    low: float | None = None  # the low end: the capacity is above it in nine of ten cases
    rate: float | None = None
    high: float | None = None
    reason: str = ""
    notes: tuple[str, ...] = ()  # what a reader must know of a prediction, as phrases
    ttft_seconds: float | None = None  # medians at `rate`
    tpot_seconds: float | None = None
    answer_seconds: float | None = None  # mean time of a whole answer at `rate`
    memory_bytes: float | None = None  # that serving takes on all devices together
    dollars_per_hour: float | None = None  # of all devices
    watts: float | None = None
    models: tuple[MixedModel, ...] = ()  # (): it serves one model

    @property
    def name(self) -> str:
        """`NVIDIA L4`, `2 x NVIDIA L4`."""
        return self.device if self.devices == 1 else f"{self.devices} x {self.device}"


@lru_cache(maxsize=512)
def machine_of(device: Device) -> Machine:
    """Return a device of the catalog as a machine; the same object for the same device."""
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


def simulation_of(service: Service, speed: int) -> Server:
    """Return a service as the simulation runs it, with SLOW_STEPS, EXPECTED_STEPS or FAST_STEPS.

    Raises ReportError where the memory does not suffice or no step-time model is known.
    """
    traffic = service.traffic
    step_times = service.predicted_steps().step_times.slower(service.step_factor(speed))
    count = QUICK_REQUESTS if traffic.lengths.turns is None else CONVERSATION_TURNS
    return traffic.server_with(step_times, service.policy()).simulated(traffic.demand, count)


def certainty_of(service: Service, slo: Slo, rate: float) -> Certainty:
    """Return with which certainty a service meets the SLO at a rate.

    It simulates this rate with slow steps and, if needed, with fast ones; that is quicker than a
    search for the capacity.

    Raises ReportError where the memory does not suffice or no step-time model is known.
    """

    def meets_slo(server: Server) -> bool:
        return server.meets_unloaded(slo) and server.meets(rate, slo)

    if meets_slo(simulation_of(service, SLOW_STEPS)):
        return "yes"
    return "perhaps" if meets_slo(simulation_of(service, FAST_STEPS)) else "no"


def capacity_of(service: Service, slo: Slo) -> DeviceCapacity:
    """Return the capacity of a service. For a machine that cannot serve the model, its `reason`
    says why; nothing is raised."""
    machine, count = service.machine, service.devices
    price, watts = machine.dollars_per_hour, machine.watts
    capacity = DeviceCapacity(
        device=machine.name,
        grade=machine.grade,
        devices=count,
        dollars_per_hour=None if price is None else price * count,
        watts=None if watts is None else watts * count,
    )
    try:
        notes = service.predicted_steps().notes
        expected = simulation_of(service, EXPECTED_STEPS)
        low, rate, high = (
            expected.rate_if_slower(slo, service.step_factor(speed))
            for speed in (SLOW_STEPS, EXPECTED_STEPS, FAST_STEPS)
        )
    except ReportError as problem:
        return msgspec.structs.replace(capacity, reason=str(problem))
    memory_bytes = None
    if machine.policy is None:  # the memory of a calibrated machine's engine is not predicted
        memory_bytes = service.needed_bytes(service.traffic.longest)
    capacity = msgspec.structs.replace(
        capacity,
        low=low,
        rate=rate,
        high=high,
        notes=notes,
        memory_bytes=memory_bytes,
    )
    if not rate:
        reason = "misses the SLO unloaded"
        if high:
            reason += ", except at the high end of its interval"
        if machine.policy is not None and (advice := what_gives_a_capacity(expected, slo)):
            capacity = msgspec.structs.replace(capacity, notes=(*notes, advice.rstrip(".")))
        return msgspec.structs.replace(capacity, reason=reason)
    requests = expected.play(rate)
    tpot = requests.tpot[~np.isnan(requests.tpot)]
    return msgspec.structs.replace(
        capacity,
        ttft_seconds=float(np.median(requests.ttft)),
        tpot_seconds=float(np.median(tpot)) if len(tpot) else None,
        answer_seconds=float(requests.e2e.mean()),
    )

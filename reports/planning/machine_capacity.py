"""The capacity of a machine that is not measured: the rate that it would hold under the SLO.

    found = capacity_of(machine, rung("8b").spec, "Q4_K_M", pairs, Poisson(), SLO_PRESETS["chat"])
    found.low, found.estimate, found.high      # requests/s; 90 %

By the simulation that measured cells are predicted with: same lengths, arrivals, SLO and
definition. The interval is that of machines whose steps all take the law's time times or over
exp(half width of its band).
"""

from __future__ import annotations

import math

import msgspec
import numpy as np

from loadtests.errors import LoadError
from loadtests.metrics.slo import Slo
from loadtests.simulation.batching import Pairs, Policy, Simulated
from loadtests.simulation.capacity_band import capacity_band
from loadtests.workload.arrivals import Arrivals
from models import formatting
from models.formats import weight_bytes
from models.formatting import GIB
from models.spec import ModelSpec
from reports.errors import ReportError
from reports.planning.machines import Kind, Machine, runs_vllm, slots_of, step_law
from reports.planning.predict import GPU_FIXED_BYTES, GPU_WEIGHT_SHARE

# vLLM: its KV cache is gpu_memory_utilization x memory, less weights, less what its profiling run
# takes at its peak, less what is outside torch (docs.vllm.ai, "Conserving Memory"; its worker's
# log says the four). The peak is of sampling: for dense models 1.19 GiB with 256 sequences of
# Llama-3.1-8B (its log on 80 GB), 4.8 with 1,024 and 5.6 with 1,024 of 152k tokens (llm-d, H100):
# 39 bytes a sequence and token of the vocabulary, each. Outside torch 0.13-0.6 GiB (llm-d).
VLLM_MEMORY_SHARE = 0.9
VLLM_LOGIT_BYTES = 39
VLLM_OUTSIDE_BYTES = 0.6 * GIB


class Serving(msgspec.Struct, frozen=True, kw_only=True):
    """How a machine serves: the engine's settings, devices that share each step, and the seed."""

    slots: int | None = None  # None: what its engine is commonly given
    devices: int = 1
    prefill_tokens: int = 2048  # most prompt tokens of a step while someone decodes
    step_tokens: int = 2048
    kv_dtype: str = "fp16"
    seed: int = 1


class MachineCapacity(msgspec.Struct, frozen=True, kw_only=True):
    """What a machine holds under an SLO, and at what cost. Missing is None; `reason` says why."""

    device: str
    kind: Kind
    devices: int = 1  # tensor parallel
    low: float | None = None  # requests/s under the SLO; low to high: 90 %
    estimate: float | None = None
    high: float | None = None
    reason: str = ""  # why there is no rate
    ttft_seconds: float | None = None  # medians at the estimate
    tpot_seconds: float | None = None
    memory_bytes_low: float | None = None  # llama.cpp to vLLM, the lower one; of all devices
    memory_bytes_high: float | None = None
    joules_per_token: float | None = None  # output tokens, at the estimate and `watts` throughout
    dollars_per_million_tokens: float | None = None  # output tokens, at the estimate
    dollars_per_hour: float | None = None  # of all its devices
    price_source: str = ""
    half_width: float | None = None  # of the 90 % band of ln(step time)

    @property
    def name(self) -> str:
        """`NVIDIA L4`, `2 x NVIDIA L4`."""
        return self.device if self.devices == 1 else f"{self.devices} x {self.device}"


def capacity_of(
    machine: Machine,
    spec: ModelSpec,
    weight_format: str,
    pairs: Pairs,
    arrivals: Arrivals,
    slo: Slo,
    serving: Serving | None = None,
) -> MachineCapacity:
    """The capacity of a machine for requests of these (prompt, output) tokens, in their order.

    At least 50 pairs. No rate, and the reason, where the memory does not suffice, no law is known
    or single-stream requests fail the SLO.
    """
    how = serving or Serving()
    price = machine.dollars_per_hour
    found = MachineCapacity(
        device=machine.name,
        kind=machine.kind,
        devices=how.devices,
        dollars_per_hour=price * how.devices if price is not None else None,
        price_source=machine.price_source,
    )
    slots = how.slots or slots_of(machine)
    longest = float(pairs.sum(axis=1).max())
    try:
        law, half_width = step_law(machine, spec, weight_format, slots, how.devices)
        needs = _Memory.of(machine, spec, weight_format, how)
        found = msgspec.structs.replace(found, half_width=half_width)
        found = _with_memory(found, needs, longest)
        policy = policy_of(machine, spec, weight_format, pairs, how)
    except (ReportError, KeyError) as problem:
        return msgspec.structs.replace(found, reason=str(problem))
    try:
        band = capacity_band(law, policy, pairs, slo, math.exp(half_width), arrivals, how.seed)
    except LoadError as problem:
        return msgspec.structs.replace(found, reason=str(problem))
    found = msgspec.structs.replace(found, low=band.low, estimate=band.estimate, high=band.high)
    if band.played is None or band.pairs is None:
        return msgspec.structs.replace(found, reason=f"it meets the SLO {slo.name} at no rate")
    held = max(_kv_held(band.played, band.pairs, band.estimate), longest)
    return _with_costs(_with_memory(found, needs, held), band.played, pairs, machine)


def policy_of(
    machine: Machine, spec: ModelSpec, weight_format: str, pairs: Pairs, how: Serving
) -> Policy:
    """The scheduler's settings, with the KV cache that the machine's memory leaves room for.

    Raises ReportError where there is no room for the longest request, KeyError for an unknown
    format.
    """
    needs = _Memory.of(machine, spec, weight_format, how)
    longest = float(pairs.sum(axis=1).max())
    room = needs.kv_room(machine.memory_bytes, how.devices)
    if room is not None and room < longest:
        least = formatting.size(needs.needed(longest)[1])
        engine = "llama.cpp" if needs.vllm is None else "vLLM"
        raise ReportError(f"its memory does not suffice: {least} needed by {engine}")
    return Policy(
        slots=how.slots or slots_of(machine),
        prefill_tokens=how.prefill_tokens,
        step_tokens=how.step_tokens,
        kv_tokens=None if room is None else int(room),
    )


class _Memory(msgspec.Struct, frozen=True):
    """Bytes of all devices together; of the engines, beside weights and KV."""

    weights: float
    kv_token: float
    llama_cpp: float
    vllm: float | None = None  # None: it is served by llama.cpp

    @classmethod
    def of(cls, machine: Machine, spec: ModelSpec, weight_format: str, how: Serving) -> _Memory:
        weights = weight_bytes(spec, weight_format)
        logits = (how.slots or slots_of(machine)) * spec.vocabulary
        each = VLLM_LOGIT_BYTES * logits + VLLM_OUTSIDE_BYTES
        return cls(
            weights=weights,
            kv_token=spec.kv_bytes_per_token(how.kv_dtype),
            llama_cpp=how.devices * GPU_FIXED_BYTES + GPU_WEIGHT_SHARE * weights,
            vllm=how.devices * each if runs_vllm(machine) else None,
        )

    def kv_room(self, memory_bytes: float | None, devices: int) -> float | None:
        """Tokens of KV cache that its engine has room for; None: the memory is not known."""
        if memory_bytes is None:
            return None
        whole = memory_bytes * devices
        free = whole - self.llama_cpp
        if self.vllm is not None:
            free = VLLM_MEMORY_SHARE * whole - self.vllm
        return (free - self.weights) / self.kv_token

    def needed(self, kv_tokens: float) -> tuple[float, float]:
        """Memory with so much KV: under llama.cpp, and under its own engine."""
        held = self.weights + kv_tokens * self.kv_token
        own = held + self.llama_cpp
        if self.vllm is not None:
            own = (held + self.vllm) / VLLM_MEMORY_SHARE
        return held + self.llama_cpp, own


def _with_memory(found: MachineCapacity, needs: _Memory, kv_tokens: float) -> MachineCapacity:
    low, high = sorted(needs.needed(kv_tokens))
    return msgspec.structs.replace(found, memory_bytes_low=low, memory_bytes_high=high)


def _kv_held(played: Simulated, pairs: Pairs, rate: float) -> float:
    """Tokens in the KV cache on average, by Little's law."""
    seconds = played.last_token - played.first_token
    return rate * float((seconds * (pairs[:, 0] + pairs[:, 1] / 2)).mean())


def _with_costs(
    found: MachineCapacity, played: Simulated, pairs: Pairs, machine: Machine
) -> MachineCapacity:
    """Medians, and joules and dollars an output token; all of its devices' time is paid for."""
    tokens_per_second = (found.estimate or 0.0) * float(pairs[:, 1].mean())
    tpot = played.tpot_seconds
    watts, dollars = machine.watts, machine.dollars_per_hour
    each = found.devices / tokens_per_second
    return msgspec.structs.replace(
        found,
        ttft_seconds=float(np.median(played.ttft_seconds)),
        tpot_seconds=None if np.isnan(tpot).all() else float(np.nanmedian(tpot)),
        joules_per_token=None if watts is None else watts * each,
        dollars_per_million_tokens=None if dollars is None else dollars / 3600 * each * 1e6,
    )

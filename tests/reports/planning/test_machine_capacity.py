"""Capacity of a machine by its step law: interval, memory, costs, and why there is none."""

import math
import re

import msgspec
import numpy as np
import pytest

from loadtests.metrics.slo import SLO_PRESETS
from loadtests.simulation.batching import Pairs, Policy
from loadtests.simulation.old_simulated_capacity import predict
from loadtests.simulation.step_time import StepLaw
from loadtests.workload.arrivals import Poisson
from loadtests.workload.requests import Workload, draw
from models.formats import weight_bytes
from models.formatting import GIB
from models.ladder import rung
from reports.planning.hardware import device_named
from reports.planning.machine_capacity import (
    MachineCapacity,
    Serving,
    capacity_of,
    policy_of,
)
from reports.planning.machines import KnownLaw, Machine, machine_of

SPEC = rung("1b").spec
CHAT = SLO_PRESETS["chat"]
LAW = StepLaw(base_seconds=0.01, row_seconds=0.002, prompt_token_seconds=2e-4)
SERVING = Serving(slots=8)


@pytest.fixture(scope="module")
def pairs() -> Pairs:
    asks = draw(Workload(preset="chat", scale=0.25), 400, 1)
    return np.array([(ask.prompt_tokens, ask.output_tokens) for ask in asks], dtype=np.int64)


def machine(memory_bytes: float | None = 16 * GIB, law: StepLaw = LAW) -> Machine:
    known = KnownLaw(model=SPEC.name, weight_format="Q4_0", slots=8, law=law, half_width=0.2)
    return Machine(
        name="a machine",
        kind="calibrated",
        memory_bytes=memory_bytes,
        watts=100.0,
        dollars_per_hour=3.6,
        laws=(known,),
    )


def asked(one: Machine, pairs: Pairs, weight_format: str = "Q4_0") -> MachineCapacity:
    return capacity_of(one, SPEC, weight_format, pairs, Poisson(), CHAT, SERVING)


def test_rate_interval_and_costs_are_those_of_the_simulation(pairs: Pairs) -> None:
    found = asked(machine(), pairs)
    again = predict(LAW, Policy(slots=8, prefill_tokens=2048), pairs, CHAT, seed=1)
    assert found.estimate == pytest.approx(again.rate, rel=0.15)
    assert found.low is not None and found.estimate is not None and found.high is not None
    assert 0 < found.low < found.estimate < found.high
    assert found.ttft_seconds is not None and found.ttft_seconds < 2.0
    assert found.tpot_seconds is not None and 0.012 <= found.tpot_seconds < 0.1
    tokens_per_second = found.estimate * pairs[:, 1].mean()
    assert found.joules_per_token == pytest.approx(100 / tokens_per_second, rel=0.1)
    joules, dollars = found.joules_per_token, found.dollars_per_million_tokens
    assert joules is not None
    assert dollars == pytest.approx(joules / 100 * 3.6 / 3600 * 1e6)
    assert found.memory_bytes_low is not None and found.memory_bytes_high is not None
    assert weight_bytes(SPEC, "Q4_0") < found.memory_bytes_low <= found.memory_bytes_high


def test_why_a_machine_holds_no_rate_is_said(pairs: Pairs) -> None:
    small = asked(machine(memory_bytes=1 * GIB), pairs)
    assert small.estimate is None and "memory does not suffice" in small.reason
    slow = asked(machine(law=LAW.slower(20.0)), pairs)
    assert slow.estimate == 0.0 and "at no rate" in slow.reason
    unknown = asked(machine(), pairs, "Q8_0")
    assert unknown.estimate is None and "no step times" in unknown.reason


def test_a_gpu_of_the_list_is_predicted_with_its_band_memory_and_costs(pairs: Pairs) -> None:
    card = machine_of(device_named("NVIDIA H100 SXM"))
    one = capacity_of(card, SPEC, "Q4_0", pairs, Poisson(), CHAT)
    two = capacity_of(card, SPEC, "Q4_0", pairs, Poisson(), CHAT, Serving(devices=2))
    assert one.low is not None and one.estimate is not None and one.high is not None
    assert one.low < one.estimate < one.high and one.half_width
    assert two.estimate is not None and two.estimate > one.estimate
    assert one.memory_bytes_low is not None and one.memory_bytes_high is not None
    assert one.memory_bytes_high - one.memory_bytes_low > 1 * GIB  # vLLM's activations
    assert one.joules_per_token and one.dollars_per_million_tokens and one.price_source
    assert math.log(one.estimate / one.low) == pytest.approx(one.half_width, abs=0.35)


def test_another_cpu_is_a_wide_band(pairs: Pairs) -> None:
    found = asked(machine_of(device_named("EPYC 9654")), pairs)
    assert found.half_width == pytest.approx(math.log(3))
    assert found.high is not None and found.low is not None and found.high > 6 * found.low


def test_vllms_kv_cache_is_nine_tenths_less_weights_and_activations(pairs: Pairs) -> None:
    """As its log says on 79.14 GiB: 14.99 of weights, 1.19 at the peak, 54.93 GiB of KV cache."""
    spec = rung("llama-3.1-8b").spec
    card = machine_of(device_named("NVIDIA H100 SXM"))
    card = msgspec.structs.replace(card, memory_bytes=79.14 * GIB)
    found = policy_of(card, spec, "bf16", pairs, Serving(slots=256)).kv_tokens
    assert found is not None
    assert found * spec.kv_bytes_per_token("fp16") == pytest.approx(54.93 * GIB, rel=0.02)
    small = msgspec.structs.replace(card, memory_bytes=17.5 * GIB)  # llama.cpp has room
    said = capacity_of(small, spec, "bf16", pairs, Poisson(), CHAT).reason
    assert re.search(r"does not suffice: 18\.\d+ GiB needed by vLLM", said), said

"""A machine that is not here, in the one simulation."""

import time

import numpy as np
import pytest

from loadtests.analysis.slo import Slo
from loadtests.simulation.simulated_capacity import Lengths
from models.ladder import rung
from reports.devices.device_capacity import Traffic, capacity_of, holds, machine_of, needed_bytes
from reports.devices.device_catalog import device_named, priced_gpus

CHAT = Slo("chat", 2.0, 0.2, 0.9)
DRAW = np.random.default_rng(1)
TRAFFIC = Traffic(
    Lengths(
        DRAW.integers(20, 500, 2000), DRAW.integers(20, 250, 2000), np.zeros(2000, dtype=np.int64)
    )
)
T4 = machine_of(device_named("NVIDIA T4"))
H100 = machine_of(device_named("NVIDIA H100 SXM"))


def test_a_bigger_gpu_holds_more_of_a_model_and_its_interval_holds_the_estimate() -> None:
    small = capacity_of(T4, rung("1b").spec, "bf16", TRAFFIC, CHAT)
    big = capacity_of(H100, rung("1b").spec, "bf16", TRAFFIC, CHAT)
    for found in (small, big):
        assert found.low and found.rate and found.high
        assert found.low < found.rate < found.high
    assert big.low is not None and small.high is not None and big.low > small.high / 2
    assert small.ttft_seconds and small.ttft_seconds < 2.0


def test_holds_agrees_with_the_capacity_without_searching_for_it() -> None:
    spec = rung("1b").spec
    found = capacity_of(T4, spec, "bf16", TRAFFIC, CHAT)
    assert found.low and found.high
    assert holds(T4, spec, "bf16", TRAFFIC, CHAT, found.low * 0.9) == "yes"
    assert holds(T4, spec, "bf16", TRAFFIC, CHAT, (found.low * found.high) ** 0.5) == "perhaps"
    assert holds(T4, spec, "bf16", TRAFFIC, CHAT, found.high * 1.2) == "no"


def test_a_model_that_does_not_fit_one_gpu_is_shared_by_several_and_none_says_why() -> None:
    spec = rung("70b").spec
    shared = capacity_of(H100, spec, "bf16", TRAFFIC, CHAT)
    assert shared.devices in (2, 4) and shared.rate and shared.name.endswith("x NVIDIA H100 SXM")
    alone = capacity_of(T4, spec, "bf16", TRAFFIC, CHAT, devices=1)
    assert alone.rate is None and "GiB, NVIDIA T4 has 15.0 GiB" in alone.reason


def test_a_machine_that_is_too_slow_alone_holds_no_rate() -> None:
    strict = Slo("strict", 0.001, 0.0001, 0.9)
    found = capacity_of(T4, rung("1b").spec, "bf16", TRAFFIC, strict, devices=1)
    assert found.rate == 0.0 and "with one request at a time" in found.reason
    assert holds(T4, rung("1b").spec, "bf16", TRAFFIC, strict, 0.01) == "no"


@pytest.mark.parametrize("gpu", priced_gpus()[:3])
def test_memory_grows_with_what_the_kv_cache_holds(gpu) -> None:  # type: ignore[no-untyped-def]
    machine, spec = machine_of(gpu), rung("8b").spec
    empty, full = (needed_bytes(machine, spec, "bf16", tokens) for tokens in (0, 10_000))
    assert full - empty == pytest.approx(10_000 * spec.kv_bytes_per_token("fp16") / 0.9)
    assert empty > spec.weight_bytes("bf16")


def test_asking_the_whole_list_takes_seconds() -> None:
    began = time.monotonic()
    for gpu in priced_gpus():
        try:
            holds(machine_of(gpu), rung("8b").spec, "bf16", TRAFFIC, CHAT, 0.5)
        except Exception as problem:  # does not fit: said in one sentence
            assert "GiB" in str(problem)
    assert time.monotonic() - began < 20

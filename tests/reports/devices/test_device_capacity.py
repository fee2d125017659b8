"""A machine that is not here, in the one simulation."""

import time

import numpy as np
import pytest

from loadtests.analysis.slo import Slo
from loadtests.simulation.simulated_capacity import Lengths
from models.model_ladder import rung
from models.weight_formats import weight_bytes
from reports.devices.device_capacity import (
    Machine,
    Service,
    Traffic,
    capacity_of,
    holds,
    machine_of,
)
from reports.devices.device_catalog import device_named, priced_gpus

CHAT = Slo("chat", 2.0, 0.2, 0.9)
DRAW = np.random.default_rng(1)
TRAFFIC = Traffic(
    Lengths(
        DRAW.integers(20, 500, 2000), DRAW.integers(20, 250, 2000), np.zeros(2000, dtype=np.int64)
    )
)


def served(machine: Machine, model: str = "1b", devices: int = 1) -> Service:
    return Service(machine, rung(model).spec, "bf16", TRAFFIC, devices)


T4 = machine_of(device_named("NVIDIA T4"))
H100 = machine_of(device_named("NVIDIA H100 SXM"))


def test_a_bigger_gpu_holds_more_of_a_model_and_its_interval_holds_the_estimate() -> None:
    small = capacity_of(served(T4), CHAT)
    big = capacity_of(served(H100), CHAT)
    for found in (small, big):
        assert found.low and found.rate and found.high
        assert found.low < found.rate < found.high
    assert big.low is not None and small.high is not None and big.low > small.high / 2
    assert small.ttft_seconds and small.ttft_seconds < 2.0


def test_holds_agrees_with_the_capacity_without_searching_for_it() -> None:
    found = capacity_of(served(T4), CHAT)
    assert found.low and found.high
    assert holds(served(T4), CHAT, found.low * 0.9) == "yes"
    assert holds(served(T4), CHAT, (found.low * found.high) ** 0.5) == "perhaps"
    assert holds(served(T4), CHAT, found.high * 1.2) == "no"


def test_a_model_that_does_not_fit_one_gpu_is_shared_by_several_and_none_says_why() -> None:
    shared = capacity_of(served(H100, "70b", 4), CHAT)
    assert shared.rate and shared.name == "4 x NVIDIA H100 SXM"
    alone = capacity_of(served(T4, "70b"), CHAT)
    assert alone.rate is None and "GiB, NVIDIA T4 has 15.0 GiB" in alone.reason


def test_a_machine_that_is_too_slow_alone_holds_no_rate() -> None:
    strict = Slo("strict", 0.001, 0.0001, 0.9)
    found = capacity_of(served(T4), strict)
    assert found.rate == 0.0 and "with one request at a time" in found.reason
    assert holds(served(T4), strict, 0.01) == "no"


@pytest.mark.parametrize("gpu", priced_gpus()[:3])
def test_memory_grows_with_what_the_kv_cache_holds(gpu) -> None:  # type: ignore[no-untyped-def]
    service = served(machine_of(gpu), "8b")
    empty, full = (service.needed_bytes(tokens) for tokens in (0, 10_000))
    assert full - empty == pytest.approx(10_000 * service.spec.kv_bytes_per_token("fp16") / 0.9)
    assert empty > weight_bytes(service.spec, "bf16")


def test_asking_the_whole_list_takes_seconds() -> None:
    began = time.monotonic()
    for gpu in priced_gpus():
        try:
            holds(served(machine_of(gpu), "8b"), CHAT, 0.5)
        except Exception as problem:  # does not fit: said in one sentence
            assert "GiB" in str(problem)
    assert time.monotonic() - began < 20

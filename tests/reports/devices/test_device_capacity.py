"""A machine that is not here, in the one simulation."""

import time

import pytest

from crossover.models.identity.model_ladder import ladder_model
from crossover.models.weights.weight_formats import weight_bytes
from crossover.reports.devices.device_capacity import (
    EXPECTED_STEPS,
    Machine,
    Service,
    Traffic,
    capacity_of,
    certainty_of,
    machine_of,
    simulation_of,
)
from crossover.reports.devices.device_catalog import device_named, priced_gpus
from crossover.serving.capacity.simulated_capacity import Demand
from crossover.serving.capacity.slo import SLO_PRESETS, Slo
from crossover.serving.workload.request_lengths import Workload

CHAT = Slo("chat", ttft_seconds=2.0, tpot_seconds=0.2, target=0.9)
TRAFFIC = Traffic(Demand(Workload(preset="sharegpt", max_prompt_tokens=500, max_output_tokens=250)))


def served(machine: Machine, model: str = "1b", devices: int = 1) -> Service:
    return Service(machine, ladder_model(model).spec, "bf16", TRAFFIC, devices)


T4 = machine_of(device_named("NVIDIA T4"))
H100 = machine_of(device_named("NVIDIA H100 SXM"))


def test_a_bigger_gpu_has_a_higher_capacity_and_its_interval_contains_the_estimate() -> None:
    small = capacity_of(served(T4), CHAT)
    big = capacity_of(served(H100), CHAT)
    for found in (small, big):
        assert found.low and found.rate and found.high
        assert found.low < found.rate < found.high
    assert big.low is not None and small.high is not None and big.low > small.high / 2
    assert small.ttft_seconds and small.ttft_seconds < 2.0


def test_meeting_the_slo_at_a_rate_agrees_with_the_searched_capacity() -> None:
    found = capacity_of(served(T4), CHAT)
    assert found.low and found.high
    assert certainty_of(served(T4), CHAT, found.low * 0.9) == "yes"
    assert certainty_of(served(T4), CHAT, (found.low * found.high) ** 0.5) == "perhaps"
    assert certainty_of(served(T4), CHAT, found.high * 1.2) == "no"


def test_a_model_too_big_for_one_gpu_is_split_or_refused_with_the_reason() -> None:
    shared = capacity_of(served(H100, "70b", 4), CHAT)
    assert shared.rate and shared.name == "4 x NVIDIA H100 SXM"
    one_gpu = capacity_of(served(T4, "70b"), CHAT)
    assert one_gpu.rate is None and "GiB, NVIDIA T4 has 15.0 GiB" in one_gpu.reason


def test_a_machine_that_misses_the_slo_unloaded_has_no_capacity() -> None:
    strict = Slo("strict", ttft_seconds=0.001, tpot_seconds=0.0001, target=0.9)
    found = capacity_of(served(T4), strict)
    assert found.rate == 0.0 and found.reason == "misses the SLO unloaded"
    assert certainty_of(served(T4), strict, 0.01) == "no"


@pytest.mark.parametrize("gpu", priced_gpus()[:3])
def test_memory_grows_with_the_tokens_in_the_kv_cache(gpu) -> None:  # type: ignore[no-untyped-def]
    service = served(machine_of(gpu), "8b")
    empty, full = (service.needed_bytes(tokens) for tokens in (0, 10_000))
    assert full - empty == pytest.approx(10_000 * service.spec.kv_bytes_per_token("fp16") / 0.9)
    assert empty > weight_bytes(service.spec, "bf16")


def test_asking_the_whole_list_takes_seconds() -> None:
    began = time.process_time()
    for gpu in priced_gpus():
        try:
            certainty_of(served(machine_of(gpu), "8b"), CHAT, 0.5)
        except Exception as problem:  # does not fit: said in one sentence
            assert "GiB" in str(problem)
    assert time.process_time() - began < 20


def listed(name: str, machine: Machine, weight_format: str = "Q4_0") -> Service:
    return Service(machine, ladder_model(name).spec, weight_format, TRAFFIC)


def test_a_mixture_needs_a_gpu_for_all_experts_and_is_as_fast_as_the_active_ones() -> None:
    """Qwen3-30B-A3B: memory by 30.5 billion parameters, speed by 3.0 billion."""
    refused = capacity_of(listed("qwen3-30b-a3b", T4), CHAT)
    assert refused.rate is None and "GiB, NVIDIA T4 has 15.0 GiB" in refused.reason
    big = machine_of(device_named("NVIDIA L40S"))
    dense = Service(big, ladder_model("qwen2.5-32b").spec, "Q4_0", TRAFFIC)
    mixture = listed("qwen3-30b-a3b", big)
    assert mixture.needed_bytes(0) == pytest.approx(dense.needed_bytes(0), rel=0.1)
    single_stream = [
        float(step_times.seconds(1, 0, 0))
        for step_times, _, _ in (
            big.step_times(one.spec, "Q4_0", 16, 1)
            for one in (mixture, dense, Service(big, ladder_model("3b").spec, "Q4_0", TRAFFIC))
        )
    ]
    assert single_stream[0] < single_stream[1] / 3 and single_stream[0] < 2.5 * single_stream[2]


def test_a_hybrid_has_the_slots_whose_states_fit_beside_its_weights_and_kv_cache() -> None:
    hybrid = listed("qwen3.5-4b", T4, "bf16")
    state, token = hybrid.spec.state_bytes_per_slot, 8 * 2 * 1024 * 2
    (policy, roomy) = (hybrid.policy(), listed("qwen3.5-4b", H100, "bf16").policy())
    assert roomy.slots == H100.slots and 1 < policy.slots < T4.slots
    assert T4.memory_bytes is not None
    needed = hybrid.needed_bytes(policy.pool_tokens, states=policy.slots)
    assert 0.9 * T4.memory_bytes < needed <= T4.memory_bytes
    assert hybrid.needed_bytes(0, states=2) - hybrid.needed_bytes(0) == pytest.approx(
        state, rel=0.12
    )  # within vLLM's share of the memory
    assert hybrid.needed_bytes(1000) - hybrid.needed_bytes(0) == pytest.approx(
        1000 * token, rel=0.12
    )


def test_the_capacity_for_conversations_is_that_of_the_steady_state() -> None:
    """With 30,000 turns at each rate it is 2.17/s. With 1,000 it was 2.51/s: the queue had not
    grown yet."""
    service = Service(
        machine_of(device_named("NVIDIA L4")),
        ladder_model("1b").spec,
        "bf16",
        Traffic(Demand(Workload(preset="conversation"))),
    )
    server = simulation_of(service, EXPECTED_STEPS)
    assert server.crossing(SLO_PRESETS["chat"]) == pytest.approx(2.17, rel=0.05)

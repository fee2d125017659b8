"""Seconds of a step of a GPU server that is not here: products, attention, launches, the host."""

import math

import msgspec
import pytest

from crossover.models.identity.model_ladder import ladder_model
from crossover.models.weights.weight_formats import weight_bytes
from crossover.reports.devices.device_catalog import Device, Tflops, device_named
from crossover.reports.devices.device_step_times import predicted_step_times
from crossover.reports.devices.server_step_times import multiplies_in, server_step_times
from crossover.serving.capacity.batching_simulator import simulate
from crossover.serving.capacity.scheduler_settings import SchedulerSettings
from crossover.serving.capacity.step_time_model import StepTimeModel

SPEC = ladder_model("8b").spec  # untied: embedding and head are two matrices
MIXTURE = ladder_model("qwen3-30b-a3b").spec
# 1 TB/s and 100 TFLOP/s in 16 bits, and what a half of them is.
CARD = Device(
    name="Round",
    kind="gpu",
    maker="nvidia",
    memory_type="gddr",
    memory_gib=80,
    bandwidth_gb_per_second=1000,
    tflops=Tflops(fp16=100, fp8=200),
    link_gb_per_second=400,
    source="none",
    source_date="2026-11-28",
    confidence="low",
)
HEAD = SPEC.vocabulary * SPEC.hidden


def model(device: Device = CARD, weight_format: str = "bf16", devices: int = 1) -> StepTimeModel:
    return server_step_times(device, SPEC, weight_format, devices).step_times


def test_a_step_has_products_attention_and_launches() -> None:
    step_times, tokens = model(), 64 + 500
    weights = 2 * (SPEC.parameters - HEAD) / 0.862e12
    multiplied = 2 * (SPEC.parameters - HEAD) * tokens / 63.4e12
    context = 64 * 800 * SPEC.kv_bytes_per_token("fp16") / 0.862e12
    pairs = 4 * SPEC.layers * SPEC.heads * SPEC.head_dim * (500 * 500 / 2) / 69.8e12
    expected = math.hypot(weights, multiplied) + SPEC.layers * 41.7e-6 + context + pairs
    assert step_times.seconds(64, 500, 64 * 800) == pytest.approx(expected)
    assert step_times.request_seconds == 9.3e-3


def test_all_hbm_and_gddr_cards_have_the_same_constants() -> None:
    hbm = msgspec.structs.replace(CARD, memory_type="hbm")
    assert model(hbm) == model()


def test_a_format_takes_its_bytes_and_is_multiplied_in_only_if_the_card_can() -> None:
    fp8, int8, stored = model(weight_format="fp8"), model(weight_format="w8a8"), model()
    body = SPEC.parameters - 2 * HEAD
    assert fp8.weights_seconds == pytest.approx((body + 2 * HEAD) / 0.862e12)
    assert int8.weights_seconds == model(weight_format="w8a16").weights_seconds
    assert weight_bytes(SPEC, "fp8") == body + 4 * HEAD
    assert fp8.product_token_seconds == pytest.approx(
        stored.product_token_seconds * 63.4 / (2 * 67.4)
    )
    assert int8.product_token_seconds == stored.product_token_seconds  # CARD has no int8 peak
    four_bits = msgspec.structs.replace(CARD, tflops=Tflops(fp16=100, fp4=400))
    assert model(four_bits, "fp4").product_token_seconds == pytest.approx(
        stored.product_token_seconds * 63.4 / (4 * 41.8)
    )
    assert model(weight_format="fp4").product_token_seconds == stored.product_token_seconds
    assert model(weight_format="w4a16").weights_seconds < fp8.weights_seconds * 0.62


def test_a_peak_below_that_of_16_bits_is_not_used() -> None:
    b300 = device_named("NVIDIA B300 SXM")  # 8-bit integers at 7 % of its 16-bit peak
    assert multiplies_in(b300.tflops, "fp8") and not multiplies_in(b300.tflops, "w8a8")


def test_two_gpus_are_faster_than_one_and_more_so_by_nvlink() -> None:
    def step(device: Device, devices: int) -> float:
        return model(device, devices=devices).seconds(64, 0, 64 * 500)

    by_pcie = msgspec.structs.replace(CARD, link_gb_per_second=25.0)
    assert step(CARD, 2) < step(CARD, 1)
    assert step(CARD, 8) < step(by_pcie, 8)
    assert step(CARD, 16) > step(CARD, 8)  # between nodes
    hops = 2 * SPEC.layers * math.log2(4) * 10.1e-6
    assert model(by_pcie, devices=4).base_seconds == pytest.approx(SPEC.layers * 41.7e-6 + hops)


def test_a_mixture_reads_the_experts_that_its_tokens_use() -> None:
    step_times = server_step_times(CARD, MIXTURE, "fp8").step_times
    assert MIXTURE.experts is not None
    for tokens in (1, 16, 300):
        read = step_times.weights_seconds
        read += MIXTURE.experts.parameters / 0.862e12 * MIXTURE.experts.expected_share(tokens)
        multiplied = 2 * MIXTURE.active_parameters * tokens / (2 * 67.4e12)
        expected = math.hypot(read, multiplied) + MIXTURE.layers * 41.7e-6
        assert step_times.seconds(tokens, 0, 0) == pytest.approx(expected)


def test_attention_makes_a_long_prompt_more_than_14_times_as_long() -> None:
    """By simulation, in pieces of 2,048 tokens: 28,000 tokens are 14 times 2,000."""
    for name in ("NVIDIA L4", "NVIDIA RTX 4090", "NVIDIA A100 80GB SXM", "NVIDIA H100 SXM"):
        step_times = predicted_step_times(device_named(name), SPEC, "bf16", 8).step_times
        settings = SchedulerSettings(slots=8, prefill_tokens=2048, step_tokens=2048)
        settings = msgspec.structs.replace(settings, context_tokens=40_000)
        short, long = simulate(step_times, settings, [0, 1e3], [2_000, 28_000], [2, 2]).ttft
        outside = step_times.request_seconds or 0.0
        assert 16 < (long - outside) / (short - outside) < 40


def test_a_geforce_and_a_workstation_card_of_a_chip_differ_by_their_peaks() -> None:
    """GeForce cards add in 32 bits at half the rate. The power limit halves what Ada's other cards
    reach."""

    def peak(name: str) -> float:
        device = device_named(name)
        return (device.tflops.fp16 or 0) * device.reached_peak_share

    assert peak("NVIDIA RTX A6000") / peak("NVIDIA RTX 3090") == pytest.approx(154.8 / 71)
    assert peak("NVIDIA RTX 6000 Ada") / peak("NVIDIA RTX 4090") == pytest.approx(182 / 165)
    assert peak("NVIDIA RTX PRO 6000 Blackwell Server") / peak("NVIDIA RTX 5090") == pytest.approx(
        467.8 / 209.5
    )


def test_a_card_without_ecc_leaves_more_memory() -> None:
    def share(name: str) -> float:
        device = device_named(name)
        assert device.usable_bytes is not None and device.memory_gib is not None
        return device.usable_bytes / device.memory_gib / 2**30

    for name in ("NVIDIA RTX 4090", "NVIDIA RTX A6000"):
        assert share(name) == pytest.approx(0.985)
    for name in ("NVIDIA L4", "NVIDIA L40S", "NVIDIA T4"):
        assert share(name) == pytest.approx(0.937)


def test_the_band_is_a_factor_of_three_where_no_measured_server_is_like_it_and_says_why() -> None:
    """One NVIDIA GPU with 3B and more has the measured band."""
    geforce = device_named("NVIDIA RTX 4090")
    assert server_step_times(geforce, SPEC, "bf16")[1:] == (0.35, ())
    assert server_step_times(CARD, SPEC, "bf16", 8)[1:] == (0.35, ())
    for device, spec, devices, reason in (
        (geforce, SPEC, 2, "cannot copy to each other"),
        (CARD, ladder_model("1b").spec, 1, "below 2B parameters"),
        (device_named("AMD MI300X"), SPEC, 1, "of its maker"),
    ):
        predicted = server_step_times(device, spec, "bf16", devices)
        assert predicted.half_width == pytest.approx(math.log(3)) and reason in " ".join(
            predicted.notes
        )

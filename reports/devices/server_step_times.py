"""Seconds of a step of a GPU server (vLLM, SGLang, TensorRT-LLM), predicted from a datasheet.

    gpu, shape = device_named("NVIDIA L4"), ladder_model("8b").spec
    predicted = server_step_times(gpu, shape, "fp8")
    predicted.step_times.seconds(rows=64, prompt_tokens=0, context_tokens=64 * 500)

For a step with `tokens` tokens (decode rows and prompt tokens) on `p` devices that share it:

    token     = 2 * active parameters / peak + 4 * layers * (p - 1) / p * hidden * 2 bytes / link
    products  = sqrt((weights read / bandwidth)^2 + (token * tokens)^2)
    launches  = layers * (layer + 2 * hop * log2 p)
    attention = KV bytes of the decoding rows / bandwidth
              + 4 * attention layers * heads * head width * token pairs / attention peak
    step      = max(products + launches, host + host row * rows) + attention

Bandwidth, peak and link are the datasheet's times a share; bandwidth and peak are those of `p`
devices together. Weights are read and multiplied by one kernel, so their times are combined;
attention is another kernel, so its time is added. A token pair is a prompt token and a token before
it. Each layer has two all-reduces of `hop` for each doubling of devices. A request needs a further
time outside the steps.

One set of constants serves cards with HBM and with GDDR memory. It is fitted to open-loop and
closed-loop measurements of servers (tests/bench/device_fit). Embedding and head are in 16 bits in
every weight format. A device multiplies in a format if the catalog has a peak of that format above
the 16-bit peak. Otherwise the weights take the format's bytes, and the products are those of 16
bits.
"""

from __future__ import annotations

import math

import msgspec

from crossover.models.shape.model_spec import ModelSpec
from crossover.models.weights.weight_formats import bytes_of_pass
from crossover.reports.devices.device_catalog import Device, Tflops
from crossover.reports.devices.predicted_steps import PredictedSteps
from crossover.serving.capacity.step_time_model import StepTimeModel

NODE_DEVICES = 8  # maximum number that NVLink or the like connects; more are on several nodes
NODE_LINK_GBS = 50.0  # between nodes: 400 Gbit/s for each device
DEFAULT_LINK_GBS = 25.0  # between devices of a node, in one direction
FAST_LINK_GBS = 100.0  # at least this is NVLink or the like, less is PCIe

# Half widths of the 90 % band of ln(step time): of one NVIDIA GPU, and of what no measured server
# is like.
HALF_WIDTH = 0.35
WIDE_HALF_WIDTH = math.log(3)
# With current engines, three hosts needed 1.8, 1.9 and 5.1 ms for a step of a 0.5B model that takes
# the device 0.6 ms.
HOST_BOUND_PARAMETERS = 2e9


class ServerConstants(msgspec.Struct, frozen=True, kw_only=True):
    """The fitted constants: shares of what the datasheet says, and seconds."""

    bandwidth_share: float = 0.862
    peak_share: float = 0.634  # of the 16-bit peak
    peak_share_8: float = 0.674  # of twice the 16-bit peak, in 8-bit formats
    peak_share_4: float = 0.418  # of four times the 16-bit peak, in 4-bit formats
    attention_peak_share: float = 0.698  # of the 16-bit peak
    layer_seconds: float = 41.7e-6
    host_seconds: float = 1.79e-3
    host_row_seconds: float = 31.1e-6
    pcie_hop_seconds: float = 10.1e-6  # of an all-reduce, for each doubling of devices
    nvlink_hop_seconds: float = 7.0e-6
    link_share: float = 0.491
    request_seconds: float = 9.3e-3


CONSTANTS = ServerConstants()


class Products(msgspec.Struct, frozen=True):
    """The units that multiply in a weight format."""

    peak: str  # field of Tflops; a device without it multiplies in 16 bits
    multiple: float  # of the 16-bit peak
    share: str  # field of Constants


PRODUCTS_OF_16_BITS = Products("fp16", 1, "peak_share")
PRODUCTS_BY_FORMAT = {
    "fp8": Products("fp8", 2, "peak_share_8"),
    "w8a8": Products("int8", 2, "peak_share_8"),
    "fp4": Products("fp4", 4, "peak_share_4"),
}


def multiplies_in(tflops: Tflops, weight_format: str) -> bool:
    """Return whether a device with these peaks multiplies in the format, rather than only stores
    weights in it and multiplies in 16 bits."""
    products = PRODUCTS_BY_FORMAT.get(weight_format)
    return products is not None and (getattr(tflops, products.peak) or 0) > (tflops.fp16 or 0)


def server_step_times(
    device: Device,
    spec: ModelSpec,
    weight_format: str,
    devices: int = 1,
    constants: ServerConstants = CONSTANTS,
) -> PredictedSteps:
    """Return the step-time model of a server on `devices` that share each step.

    The device has a 16-bit peak. Raises KeyError for an unknown format.
    """
    assert device.tflops.fp16 is not None
    shared_bytes, expert_bytes = bytes_of_pass(spec, weight_format)
    bandwidth = constants.bandwidth_share * device.bandwidth_gb_per_second * 1e9 * devices
    peak = device.tflops.fp16 * 1e12 * device.reached_peak_share * devices
    products = PRODUCTS_OF_16_BITS
    if multiplies_in(device.tflops, weight_format):
        products = PRODUCTS_BY_FORMAT[weight_format]
    operations_per_second = getattr(constants, products.share) * products.multiple * peak
    attention_width = sum(group.layers for group in spec.cache_groups) * spec.heads * spec.head_dim
    reduce_seconds, reduce_token_seconds = _all_reduces(device, spec, devices, constants)
    step_times = StepTimeModel(
        base_seconds=spec.layers * constants.layer_seconds + reduce_seconds,
        context_token_seconds=spec.kv_bytes_per_token("fp16") / bandwidth,
        expert_seconds=expert_bytes / bandwidth,
        weights_seconds=shared_bytes / bandwidth,
        product_token_seconds=2 * spec.active_parameters / operations_per_second
        + reduce_token_seconds,
        token_pair_seconds=4 * attention_width / (constants.attention_peak_share * peak),
        host_seconds=constants.host_seconds,
        host_row_seconds=constants.host_row_seconds,
        experts=None if spec.experts is None else spec.experts.routing,
        shares_pass=spec.experts is not None,
        request_seconds=constants.request_seconds,
    )
    notes = []
    reason = _wide_because(device, spec, devices)
    if reason:
        notes.append(f"{reason}, so the interval is a factor of 3 to either side")
    if weight_format in PRODUCTS_BY_FORMAT and products is PRODUCTS_OF_16_BITS:
        notes.append(f"it does not multiply in {weight_format}, and computes in 16 bits")
    return PredictedSteps(step_times, WIDE_HALF_WIDTH if reason else HALF_WIDTH, notes=tuple(notes))


def _all_reduces(
    device: Device, spec: ModelSpec, devices: int, constants: ServerConstants
) -> tuple[float, float]:
    """Return the seconds of the all-reduces of a step, and those for each of its tokens."""
    if devices == 1:
        return 0.0, 0.0
    link = device.link_gb_per_second or DEFAULT_LINK_GBS
    if devices > NODE_DEVICES:
        link = min(link, NODE_LINK_GBS)
    is_fast = link >= FAST_LINK_GBS
    hop_seconds = constants.nvlink_hop_seconds if is_fast else constants.pcie_hop_seconds
    moved_bytes = 2 * (devices - 1) / devices * spec.hidden * 2
    token_seconds = moved_bytes / (constants.link_share * link * 1e9)
    reduces = 2 * spec.layers
    return reduces * hop_seconds * math.log2(devices), reduces * token_seconds


def _wide_because(device: Device, spec: ModelSpec, devices: int) -> str:
    """Return why the band is a factor of 3, as a phrase; "": it is not."""
    if device.maker != "nvidia":
        return "no server of its maker was measured"
    if spec.active_parameters < HOST_BOUND_PARAMETERS:
        return "the host's CPU limits the speed of models below 2B parameters"
    if devices > 1 and not device.has_peer_copies:
        return "such cards cannot copy to each other directly"
    return ""

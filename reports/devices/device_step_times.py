"""Seconds of a step on a device that was not measured, predicted from its datasheet.

    gpu, shape = device_named("NVIDIA L4"), ladder_model("8b").spec
    step_times, half_width = predicted_step_times(gpu, shape, "bf16", slots=64)

For a decode step of `b` sequences with mean context `c`, and for a prompt, on `p` devices that
share each step:

    memory  = (weights read + kv * KV bytes * b * c) / (bandwidth share * bandwidth * p)
    compute = 2 * multiply-adds * b / (peak share * peak of the format * p)
    step    = sqrt(memory^2 + compute^2) + layers * layer + b * row + all-reduces
    prompt  = sqrt(work^2 + weights^2) + layers * prompt layer + all-reduces

`work` is the compute time of the prompt's tokens with attention, `weights` the time to read the
weights. There are two all-reduces in each layer; each takes hop * log2 p + bytes / link, and a ring
moves 2 (p - 1) / p of the bytes.

The constants (shares, layer, row, hop) and the error belong to a class of devices. They are fitted
to published measurements: `python -m tests.bench.device_fit.fit` writes step_time_constants.json.
CPUs are not predicted, because published speeds of one class of CPUs differ by a factor of three,
and `crossover calibrate` takes minutes.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib import resources

import msgspec
import numpy as np
import numpy.typing as npt

from crossover.models.shape.model_spec import ModelSpec, Routing
from crossover.models.weights.weight_formats import weight_bytes
from crossover.reports.devices.device_catalog import Device
from crossover.reports.errors import ReportError
from crossover.serving.capacity.step_time_model import StepTimeModel

Array = npt.NDArray[np.float64]

LINK_SHARE = 0.7  # of its peak bandwidth that a link reaches
NOT_CALIBRATED = "perhaps: calibrate it"  # the reason of a CPU that was not measured
NODE_DEVICES = 8  # maximum number that NVLink or the like connects; more are on several nodes
NODE_LINK_GBS = 50.0  # between nodes: 400 Gbit/s for each device
DEFAULT_LINK_GBS = 25.0  # between devices of a node, in one direction
FAST_LINK_GBS = 100.0  # at least this is NVLink or the like, less is PCIe
VLLM_SLOTS, LLAMA_CPP_SLOTS = 256, 16  # vLLM's default; a common setting of llama-server
# The steps to which a step-time model is fitted: decoding sequences (up to the slots) and their
# contexts in tokens, and prompts in tokens.
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
CONTEXTS = (256.0, 1024.0, 2048.0)
PROMPTS = (32.0, 128.0, 512.0, 2048.0)


class Constants(msgspec.Struct, frozen=True, kw_only=True):
    """The fitted constants of a class of devices (memory type and maker), and their error."""

    bandwidth_share: float  # of the datasheet's bandwidth
    peak_share: dict[str, float]  # of the datasheet's peak in decode steps, by class of format
    prompt_peak_share: dict[str, float]  # the same for prompts
    kv: float  # time to read a byte of the KV cache over that of a byte of weights
    attention: float  # time of an operation of attention over that of a matrix product
    layer_seconds: float  # of a layer in a decode step
    prompt_layer_seconds: float  # of a layer in a prompt
    row_seconds: float  # of a sequence in a step, on the host
    hop_seconds: tuple[float, float]  # for each doubling of devices: by PCIe, by NVLink
    half_width: float  # of the 90 % band of ln(seconds)


@cache
def _constants_by_class() -> Mapping[str, Constants]:
    """Return `hbm|NVIDIA` -> the constants of that memory type and maker."""
    file = resources.files(__package__).joinpath("step_time_constants.json")
    return msgspec.json.decode(file.read_bytes(), type=dict[str, Constants])


def constants_of(device: Device) -> Constants:
    """Return the constants of a device's class; makers without published measurements share the
    class `other`."""
    of_maker = _constants_by_class().get(f"{device.memory_type}|{device.maker}")
    return of_maker or _constants_by_class()[f"{device.memory_type}|other"]


def format_class(weight_format: str) -> str:
    """Return the class of a weight format: 16, 8, fp4, q0 (simple 4- and 5-bit blocks), kq and k23
    (K-quants), or iq (codebooks)."""
    name = weight_format.upper()
    if name in ("F16", "FP16", "BF16", "BFLOAT16", "NAN", "F32", "FP32"):
        return "16"
    if name == "FP4":
        return "fp4"
    if name.startswith("IQ") and not name.startswith("IQ4"):
        return "iq"
    if "8" in name:
        return "8"
    if name.startswith(("Q2_K", "Q3_K")):
        return "k23"
    return "kq" if "_K" in name or name == "IQ4_XS" else "q0"


def default_slots(device: Device) -> int:
    """Return the slots of the server that a device is assumed to run."""
    return VLLM_SLOTS if device.is_served_by_vllm else LLAMA_CPP_SLOTS


def predicted_step_times(
    device: Device, spec: ModelSpec, weight_format: str, slots: int, devices: int = 1
) -> tuple[StepTimeModel, float]:
    """Return the step-time model of steps that `devices` share, and half the 90 % band of ln(step
    time).

    Raises ReportError for an unknown format, for a CPU, for a device without its 16-bit peak, and
    for several Apple machines: llama.cpp does not share a step between them.
    """
    if device.is_cpu:
        raise ReportError(NOT_CALIBRATED)
    if devices > 1 and not device.is_served_by_vllm:
        raise ReportError(f"{device.name}: several machines cannot share a step. Use replicas")
    if not device.tflops.fp16:
        raise ReportError(f"{device.name}: its 16-bit peak is unknown (tflops.fp16)")
    try:
        file_bytes = weight_bytes(spec, weight_format)
    except KeyError as problem:
        raise ReportError(str(problem.args[0])) from problem
    constants = constants_of(device)
    # vLLM computes with 16 bits from weights of 4 and 8 bits.
    compute_class = "16" if device.is_served_by_vllm else format_class(weight_format)
    peak16 = device.tflops.fp16 * 1e12 * devices
    # As in the fit: the peak is twice the 16-bit one for the other formats, four times for fp4.
    peak = peak16 * {"16": 1, "fp4": 4}.get(compute_class, 2)
    bandwidth = constants.bandwidth_share * device.bandwidth_gb_per_second * 1e9 * devices
    token_operations = 2 * spec.active_parameters  # without attention
    cached_layers = sum(group.layers for group in spec.cache_groups)
    attention_layers = cached_layers if spec.is_recurrent else spec.layers

    def read_bytes(tokens: Array) -> Array:
        """Return the bytes of weights that passes of so many tokens read."""
        return np.array([spec.step_weight_bytes(float(count), file_bytes) for count in tokens])

    def decode(rows: Array, context: Array) -> Array:
        """Return the seconds of decode steps of so many sequences with this mean context."""
        kv_bytes = spec.kv_bytes_per_token("fp16") * rows * context
        memory = (read_bytes(rows) + constants.kv * kv_bytes) / bandwidth
        compute = token_operations * rows / (constants.peak_share[compute_class] * peak)
        host = spec.layers * constants.layer_seconds + constants.row_seconds * rows
        seconds: Array = np.hypot(memory, compute) + host
        return seconds + _all_reduces(device, spec, devices, rows)

    def prefill(tokens: Array) -> Array:
        """Return the seconds of prompts of so many tokens."""
        share = constants.prompt_peak_share[compute_class]
        attention = 2 * attention_layers * spec.heads * spec.head_dim * tokens**2
        work = token_operations * tokens / (share * peak)
        work += constants.attention * attention / (share * peak16)
        seconds: Array = np.hypot(work, read_bytes(tokens) / bandwidth)
        seconds += spec.layers * constants.prompt_layer_seconds
        return seconds + _all_reduces(device, spec, devices, tokens)

    counts = [float(count) for count in ROWS if count < slots] + [float(slots)]
    rows, context = (grid.ravel() for grid in np.meshgrid(counts, CONTEXTS))
    prompts = np.array(PROMPTS)
    seconds = np.concatenate([decode(rows, context), prefill(prompts)])
    experts = None if spec.experts is None else spec.experts.routing
    step_times = _nearest_step_times(rows, rows * context, prompts, seconds, experts)
    return step_times, constants.half_width


def _all_reduces(device: Device, spec: ModelSpec, devices: int, tokens: Array) -> Array:
    """Return the seconds of all-reduces in steps of so many tokens that `devices` share."""
    if devices == 1:
        return np.zeros_like(tokens)
    link = device.link_gb_per_second or DEFAULT_LINK_GBS
    if devices > NODE_DEVICES:
        link = min(link, NODE_LINK_GBS)
    pcie_hop_seconds, nvlink_hop_seconds = constants_of(device).hop_seconds
    hop_seconds = nvlink_hop_seconds if link >= FAST_LINK_GBS else pcie_hop_seconds
    moved_bytes = 2 * (devices - 1) / devices * tokens * spec.hidden * 2
    transfer = moved_bytes / (LINK_SHARE * link * 1e9)
    seconds: Array = 2 * spec.layers * (hop_seconds * np.log2(devices) + transfer)
    return seconds


def _nearest_step_times(
    rows: Array, context: Array, prompts: Array, seconds: Array, experts: Routing | None
) -> StepTimeModel:
    """Return the step-time model nearest to these seconds, by least squares of relative errors.

    `seconds` has a value for each decode step, then one for each prompt. A decode step has so many
    `rows` and, in all of them together, tokens of `context`; a prompt has so many tokens.
    """
    from scipy.optimize import nnls

    none_in_prompts = np.zeros_like(prompts)
    none_in_decode_steps = np.zeros_like(rows)
    columns = [
        np.ones(len(seconds)),
        np.concatenate([rows, none_in_prompts]),
        np.concatenate([none_in_decode_steps, prompts]),
        np.concatenate([context, none_in_prompts]),
    ]
    if experts is not None:  # the share of the experts that a step reads
        columns.append(1.0 - experts.skip_probability ** np.concatenate([rows, prompts]))
    table = np.column_stack(columns) / seconds[:, None]
    scale = table.max(axis=0)
    scaled_coefficients, _ = nnls(table / scale, np.ones(len(seconds)))
    coefficients = scaled_coefficients / scale
    base, row, prompt_token, context_token = coefficients[:4]
    return StepTimeModel(
        base_seconds=float(base),
        row_seconds=float(row),
        prompt_token_seconds=float(prompt_token),
        context_token_seconds=float(context_token),
        pass_seconds=0.0,
        expert_seconds=0.0 if experts is None else float(coefficients[4]),
        experts=experts,
        shares_pass=experts is not None,
    )

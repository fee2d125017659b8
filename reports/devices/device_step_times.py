"""Seconds of a step on a device that was not measured, predicted from its datasheet.

    gpu, shape = device_named("Apple M4 Pro"), ladder_model("8b").spec
    step_times, half_width, _ = predicted_step_times(gpu, shape, "Q4_0", slots=16)

GPUs and the like run a server (server_step_times.py). Devices whose memory is shared with their CPU
run llama.cpp. For a decode step of `b` sequences with mean context `c` there, and for a prompt:

    memory  = (weights read + kv * KV bytes * b * c) / (bandwidth share * bandwidth)
    compute = 2 * multiply-adds * b / (peak share * peak of the format)
    step    = sqrt(memory^2 + compute^2) + layers * layer
    prompt  = sqrt(work^2 + weights^2) + layers * prompt layer

`work` is the compute time of the prompt's tokens with attention, `weights` the time to read the
weights.

The constants (shares, layer) and the error belong to a class of devices. They are fitted to
published measurements: `python -m tests.bench.device_fit.fit` writes step_time_constants.json.
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
from crossover.models.weights.weight_formats import GPU_FORMATS, weight_bytes
from crossover.reports.devices.device_catalog import Device
from crossover.reports.devices.predicted_steps import PredictedSteps
from crossover.reports.devices.server_step_times import server_step_times
from crossover.reports.errors import ReportError
from crossover.serving.capacity.step_time_model import StepTimeModel

Array = npt.NDArray[np.float64]

NOT_CALIBRATED = "perhaps: calibrate it"  # the reason of a CPU that was not measured
VLLM_SLOTS, LLAMA_CPP_SLOTS = 256, 16  # vLLM's default; a common setting of llama-server
# The steps to which a step-time model is fitted: decoding sequences (up to the slots) and their
# contexts in tokens, and prompts in tokens.
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
CONTEXTS = (256.0, 1024.0, 2048.0)
PROMPTS = (32.0, 128.0, 512.0, 2048.0)


class DeviceConstants(msgspec.Struct, frozen=True, kw_only=True):
    """The fitted constants of a class of devices (memory type and maker) under llama.cpp, and their
    error."""

    bandwidth_share: float  # of the datasheet's bandwidth
    peak_share: dict[str, float]  # of the datasheet's peak in decode steps, by class of format
    prompt_peak_share: dict[str, float]  # the same for prompts
    kv: float  # time to read a byte of the KV cache over that of a byte of weights
    attention: float  # time of an operation of attention over that of a matrix product
    layer_seconds: float  # of a layer in a decode step
    prompt_layer_seconds: float  # of a layer in a prompt
    half_width: float  # of the 90 % band of ln(seconds)


@cache
def _constants_by_class() -> Mapping[str, DeviceConstants]:
    """Return `apple|nvidia` -> the constants of that memory type and maker."""
    file = resources.files(__package__).joinpath("step_time_constants.json")
    return msgspec.json.decode(file.read_bytes(), type=dict[str, DeviceConstants])


def constants_of(device: Device) -> DeviceConstants:
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
) -> PredictedSteps:
    """Return the step-time model of steps that `devices` share, with its uncertainty.

    Raises ReportError for an unknown format and one that the device's engine does not have, for a
    CPU, for a device without its 16-bit peak, and for several Apple machines: llama.cpp does not
    share a step between them.
    """
    if device.is_cpu:
        raise ReportError(NOT_CALIBRATED)
    if not device.tflops.fp16:
        raise ReportError(f"{device.name}: its 16-bit peak is unknown (tflops.fp16)")
    try:
        if device.is_served_by_vllm:
            return server_step_times(device, spec, weight_format, devices)
        file_bytes = weight_bytes(spec, weight_format)
    except KeyError as problem:
        raise ReportError(str(problem.args[0])) from problem
    if devices > 1:
        raise ReportError(f"{device.name}: several machines cannot share a step. Use replicas")
    if weight_format in GPU_FORMATS and weight_format != "bf16":
        raise ReportError(
            f"{device.name} runs llama.cpp, which does not have the format {weight_format}. Use a "
            "format of GGUF files, such as Q8_0 or Q4_K_M"
        )
    constants = constants_of(device)
    compute_class = format_class(weight_format)
    peak16 = device.tflops.fp16 * 1e12
    # As in the fit: the peak is twice the 16-bit one for the other formats, four times for fp4.
    peak = peak16 * {"16": 1, "fp4": 4}.get(compute_class, 2)
    bandwidth = constants.bandwidth_share * device.bandwidth_gb_per_second * 1e9
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
        seconds: Array = np.hypot(memory, compute) + spec.layers * constants.layer_seconds
        return seconds

    def prefill(tokens: Array) -> Array:
        """Return the seconds of prompts of so many tokens."""
        share = constants.prompt_peak_share[compute_class]
        attention = 2 * attention_layers * spec.heads * spec.head_dim * tokens**2
        work = token_operations * tokens / (share * peak)
        work += constants.attention * attention / (share * peak16)
        seconds: Array = np.hypot(work, read_bytes(tokens) / bandwidth)
        return seconds + spec.layers * constants.prompt_layer_seconds

    counts = [float(count) for count in ROWS if count < slots] + [float(slots)]
    rows, context = (grid.ravel() for grid in np.meshgrid(counts, CONTEXTS))
    prompts = np.array(PROMPTS)
    seconds = np.concatenate([decode(rows, context), prefill(prompts)])
    experts = None if spec.experts is None else spec.experts.routing
    step_times = _nearest_step_times(rows, rows * context, prompts, seconds, experts)
    return PredictedSteps(step_times, constants.half_width)


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

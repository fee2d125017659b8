"""Seconds of a step on a device that nobody measured: from its datasheet, with a published error.

    gpu, shape = device_named("NVIDIA L4"), ladder_model("8b").spec
    step_times, half_width = predicted_step_times(gpu, shape, "bf16", slots=64)

One decode step of `b` sequences with mean context `c`, over `p` accelerators:

    memory  = (weights read + kv * KV bytes * b * c) / (bandwidth share * bandwidth * p)
    compute = 2 * multiply-adds * b / (peak share * peak of the format * p)
    step    = sqrt(memory^2 + compute^2) + layers * layer + b * row + all-reduces
    prompt  = sqrt(work^2 + weights^2) + layers * prompt layer + all-reduces

An all-reduce takes hop * log2 p + bytes / link, twice a layer (ring: 2 (p - 1) / p of the bytes).
The constants of a class are fitted to published measurements (`python -m
tests.bench.device_fit.fit` writes step_time_constants.json), and so is the error. Of a CPU nothing
is predicted: published speeds of one class are a factor of three apart, and `crossover calibrate`
takes minutes there.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib import resources

import msgspec
import numpy as np
import numpy.typing as npt

from crossover.models.model_spec import ModelSpec, Routing
from crossover.models.weight_formats import weight_bytes
from crossover.reports.devices.device_catalog import Device
from crossover.reports.errors import ReportError
from crossover.serving.capacity.step_time_model import StepTimeModel

Array = npt.NDArray[np.float64]

LINK_SHARE = 0.7  # of its peak that a link reaches
NOT_CALIBRATED = "perhaps: calibrate it"  # what is known of a CPU that nobody measured
NODE_DEVICES = 8  # that NVLink or its like connects; more are on several nodes
NODE_LINK_GBS = 50.0  # 400 Gbit/s a device
DEFAULT_LINK_GBS = 25.0  # to its neighbours, one direction
FAST_LINK_GBS = 100.0  # from here on NVLink or its like, else PCIe
VLLM_SLOTS, LLAMA_CPP_SLOTS = 256, 16  # the first is its default, the second common
# Where the numbers of a step-time model are told from: rows up to the slots, contexts, prompts in
# tokens.
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
CONTEXTS = (256.0, 1024.0, 2048.0)
PROMPTS = (32.0, 128.0, 512.0, 2048.0)


class Constants(msgspec.Struct, frozen=True, kw_only=True):
    """Of a class of devices (memory type and maker), and the error of what they predict."""

    bandwidth_share: float
    peak_share: dict[str, float]  # by class of format
    prompt_peak_share: dict[str, float]
    kv: float  # reading KV against reading weights
    attention: float  # its operations against matrix products'
    layer_seconds: float
    prompt_layer_seconds: float
    row_seconds: float  # a sequence in a step, on the host
    hop_seconds: tuple[float, float]  # a doubling of devices, by PCIe and by NVLink
    half_width: float  # of the 90 % band of ln(seconds)


@cache
def _shipped() -> Mapping[str, Constants]:
    file = resources.files(__package__).joinpath("step_time_constants.json")
    return msgspec.json.decode(file.read_bytes(), type=dict[str, Constants])


def constants_of(device: Device) -> Constants:
    """Those of its class; makers of whose devices nothing was published are in one, `other`."""
    own = _shipped().get(f"{device.memory_type}|{device.maker}")
    return own or _shipped()[f"{device.memory_type}|other"]


def format_class(weight_format: str) -> str:
    """16, 8, fp4, q0 (simple 4- and 5-bit blocks), kq and k23 (K-quants), iq (codebooks)."""
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
    """Requests at once where nobody says."""
    return VLLM_SLOTS if device.is_served_by_vllm else LLAMA_CPP_SLOTS


def predicted_step_times(
    device: Device, spec: ModelSpec, weight_format: str, slots: int, devices: int = 1
) -> tuple[StepTimeModel, float]:
    """The step-time model of a step that `devices` share, and half the 90 % band of ln(step time).

    Raises ReportError for an unknown format, for a CPU, for a device without its 16-bit peak, and
    for several Apple machines: llama.cpp does not share a step between them.
    """
    served = device.is_served_by_vllm
    if device.is_cpu:
        raise ReportError(NOT_CALIBRATED)
    if devices > 1 and not served:
        raise ReportError(f"{device.name}: several machines cannot share a step. Use replicas")
    if not device.tflops.fp16:
        raise ReportError(f"{device.name}: its 16-bit peak is unknown (tflops.fp16)")
    try:
        file_bytes = weight_bytes(spec, weight_format)
    except KeyError as problem:
        raise ReportError(str(problem.args[0])) from problem
    by = constants_of(device)
    # of a server's weights of 4 and 8 bits the products are of 16
    kind = "16" if served else format_class(weight_format)
    peak16 = device.tflops.fp16 * 1e12 * devices
    peak = peak16 * {"16": 1, "fp4": 4}.get(kind, 2)
    bandwidth = by.bandwidth_share * device.bandwidth_gb_per_second * 1e9 * devices
    products = 2 * spec.active_parameters  # of a token, without attention
    cached = sum(group.layers for group in spec.cache_groups)
    attending = cached if spec.is_recurrent else spec.layers

    def read(tokens: Array) -> Array:
        """Bytes of weights that a pass of so many tokens reads."""
        return np.array([spec.step_weight_bytes(float(one), file_bytes) for one in tokens])

    def decode(rows: Array, context: Array) -> Array:
        memory = (read(rows) + by.kv * spec.kv_bytes_per_token("fp16") * rows * context) / bandwidth
        own = np.hypot(memory, products * rows / (by.peak_share[kind] * peak))
        seconds: Array = own + spec.layers * by.layer_seconds + by.row_seconds * rows
        return seconds + _all_reduces(device, spec, devices, rows)

    def prefill(tokens: Array) -> Array:
        reach = by.prompt_peak_share[kind]
        attention = by.attention * 2 * attending * spec.heads * spec.head_dim * tokens**2
        work = products * tokens / (reach * peak) + attention / (reach * peak16)
        seconds: Array = (
            np.hypot(work, read(tokens) / bandwidth) + spec.layers * by.prompt_layer_seconds
        )
        return seconds + _all_reduces(device, spec, devices, tokens)

    counts = [float(count) for count in ROWS if count < slots] + [float(slots)]
    rows, context = (grid.ravel() for grid in np.meshgrid(counts, CONTEXTS))
    prompts = np.array(PROMPTS)
    seconds = np.concatenate([decode(rows, context), prefill(prompts)])
    experts = None if spec.experts is None else spec.experts.routing
    return _nearest_step_times(rows, rows * context, prompts, seconds, experts), by.half_width


def _all_reduces(device: Device, spec: ModelSpec, devices: int, tokens: Array) -> Array:
    """Seconds of them in a step of so many tokens, by as many devices as share it."""
    if devices == 1:
        return np.zeros_like(tokens)
    link = device.link_gb_per_second or DEFAULT_LINK_GBS
    if devices > NODE_DEVICES:
        link = min(link, NODE_LINK_GBS)
    hop = constants_of(device).hop_seconds[link >= FAST_LINK_GBS]
    moved = 2 * (devices - 1) / devices * tokens * spec.hidden * 2 / (LINK_SHARE * link * 1e9)
    seconds: Array = 2 * spec.layers * (hop * np.log2(devices) + moved)
    return seconds


def _nearest_step_times(
    rows: Array, context: Array, prompts: Array, seconds: Array, experts: Routing | None
) -> StepTimeModel:
    """Least squares of relative errors: of decode steps, then of prompts."""
    from scipy.optimize import nnls

    none = np.zeros_like(prompts)
    columns = [
        np.ones(len(seconds)),
        np.concatenate([rows, none]),
        np.concatenate([np.zeros_like(rows), prompts]),
        np.concatenate([context, none]),
    ]
    if experts is not None:
        columns.append(1.0 - experts.skip_probability ** np.concatenate([rows, prompts]))
    table = np.column_stack(columns) / seconds[:, None]
    scale = table.max(axis=0)
    found = nnls(table / scale, np.ones(len(seconds)))[0] / scale
    base, row, prompt_token, context_token = found[:4]
    return StepTimeModel(
        base_seconds=float(base),
        row_seconds=float(row),
        prompt_token_seconds=float(prompt_token),
        context_token_seconds=float(context_token),
        pass_seconds=0.0,
        expert_seconds=0.0 if experts is None else float(found[4]),
        experts=experts,
        shares_pass=experts is not None,
    )

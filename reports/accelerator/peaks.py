"""What a machine could do at most: the rates that prefill and decode are shares of."""

from __future__ import annotations

import msgspec

from models.formats import weight_bytes
from models.spec import ModelSpec
from reports.numbers import CellNumbers, RunNumbers
from reports.planning import hardware


class Peaks(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes/s of memory and operations/s of arithmetic; None: not known."""

    bytes_per_second: float | None = None
    flops_per_second: float | None = None
    source: str = "measured here"


def peaks_of(run: RunNumbers, cell: CellNumbers) -> Peaks:
    """A CPU's as the campaign measured them when it began, a GPU's by its datasheet.

    Nothing is known of an endpoint's machine.
    """
    if cell.url is not None:
        return Peaks()
    if cell.device != "gpu":
        bandwidth = run.facts.get("bandwidth_bytes_per_second")
        return Peaks(
            bytes_per_second=bandwidth, flops_per_second=run.facts.get("gemm_flops_per_second")
        )
    device = hardware.gpu_of(run.facts)
    if device is None:
        return Peaks(source="published")
    return Peaks(
        bytes_per_second=device.bandwidth_gb_per_second * 1e9,
        flops_per_second=device.dense_tflops * 1e12 if device.dense_tflops else None,
        source="published",
    )


class Work(msgspec.Struct, frozen=True):
    """What one step has to do at least."""

    flops: float
    bytes: float

    def least_seconds(self, peaks: Peaks) -> float | None:
        """By the peak that binds; None where the bandwidth is not known."""
        if not peaks.bytes_per_second:
            return None
        arithmetic = self.flops / peaks.flops_per_second if peaks.flops_per_second else 0.0
        return max(self.bytes / peaks.bytes_per_second, arithmetic)


def work_of(
    cell: CellNumbers, decode_rows: float, prompt_tokens: float, kv_tokens: float
) -> Work | None:
    """Of a step: `kv_tokens` are the context of all decoding rows together.

    Two operations a weight and token, the head's for tokens that are drawn only; attention as
    ModelSpec.flops_per_token. All weights are read once, the embedding left out, and the KV of
    each row. None where shape or format is not known.
    """
    spec = cell.spec
    if spec is None:
        return None
    try:
        weights = weight_bytes(spec, cell.weight_format) * _read_share(spec)
        kv_bytes = spec.kv_bytes_per_token(cell.kv_held or cell.kv_dtype)
    except KeyError:
        return None
    drawn = decode_rows + (1 if prompt_tokens else 0)
    head = spec.vocabulary * spec.hidden
    body = spec.matrix_parameters - head
    seen = kv_tokens + prompt_tokens * prompt_tokens / 2
    flops = 2 * body * (decode_rows + prompt_tokens) + 2 * head * drawn + attention(spec) * seen
    return Work(flops, weights + kv_tokens * kv_bytes)


def _read_share(spec: ModelSpec) -> float:
    """Of the weights: an embedding that is not the head as well is looked up, not read."""
    return 1.0 if spec.tied else 1 - spec.vocabulary * spec.hidden / spec.parameters


def attention(spec: ModelSpec) -> float:
    """Operations of one token for each token of its context."""
    return spec.flops_per_token(1) - spec.flops_per_token(0)

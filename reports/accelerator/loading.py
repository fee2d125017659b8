"""Loading a model: how long it takes here, the least that moving it to a GPU takes, and how many
requests pay for either.
"""

from __future__ import annotations

import math

import msgspec
import numpy as np

from reports.findings import mean_lengths
from reports.numbers import CellNumbers, RunNumbers, middle
from reports.planning import hardware, predict

# PCIe 4.0 x16: 16 GT/s x 16 lanes x 128/130 / 8 bits (PCI-SIG); no copy is quicker.
LINK = "PCIe 4.0 x16"
LINK_BYTES_PER_SECOND = 16e9 * 16 * 128 / 130 / 8
TENTH = 0.1


class OnGpu(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds for one GPU, at the peaks of its datasheet and of the link: predicted."""

    device: str
    transfer_seconds: float  # at least
    request_seconds: float  # alone, at least
    pays_from: int | None  # requests, at the earliest; None: the GPU is no quicker


class Loading(msgspec.Struct, frozen=True, kw_only=True):
    """One cell's loads. Seconds; None: not measured, or not known."""

    cell: CellNumbers
    seconds: float | None  # the median of its loads, until the engine was ready
    low: float | None
    high: float | None
    weight_bytes: int | None
    request_seconds: float | None  # alone, from due to last token
    on_gpu: OnGpu | None

    @property
    def bytes_per_second(self) -> float | None:
        if not self.seconds or self.weight_bytes is None:
            return None
        return self.weight_bytes / self.seconds

    @property
    def requests_for_a_tenth(self) -> int | None:
        """One after the other, until loading is a tenth of the time that they all took."""
        if self.seconds is None or not self.request_seconds:
            return None
        return math.ceil(self.seconds * (1 - TENTH) / TENTH / self.request_seconds - 1e-9)


def loadings_of(run: RunNumbers) -> list[Loading]:
    """Of all cells that were loaded here."""
    return [_loading(cell) for cell in run.cells if cell.loads]


def _loading(cell: CellNumbers) -> Loading:
    alone = cell.single_stream
    request = None if alone is None else middle(alone.summary.latencies.e2e)
    weights = predict.known_weight_bytes(cell.spec, cell.weight_format)
    return Loading(
        cell=cell,
        seconds=float(np.median(cell.loads)),
        low=min(cell.loads),
        high=max(cell.loads),
        weight_bytes=weights,
        request_seconds=request,
        on_gpu=_on_gpu(cell, weights, request),
    )


def _on_gpu(cell: CellNumbers, weights: int | None, request: float | None) -> OnGpu | None:
    """The cheapest GPU of the list with memory enough; None on a GPU, or where it is not known."""
    need = predict.need_of(cell)
    lengths = mean_lengths(cell)
    if cell.device == "gpu" or weights is None or need is None or lengths is None:
        return None
    devices = hardware.sufficient(hardware.gpus(), need.total_bytes)
    priced = [one for one in devices if one.dollars_per_hour is not None]
    device = min(priced, key=lambda one: one.dollars_per_hour or 0.0, default=None)
    line = None if device is None else predict.roofline(device, cell, lengths)
    if device is None or line is None or line.ttft_seconds is None:
        return None
    transfer = weights / LINK_BYTES_PER_SECOND
    there = line.ttft_seconds + max(lengths[1] - 1, 0) * line.tpot_seconds
    gain = None if request is None else request - there
    return OnGpu(
        device=device.name,
        transfer_seconds=transfer,
        request_seconds=there,
        pays_from=math.ceil(transfer / gain) if gain is not None and gain > 0 else None,
    )

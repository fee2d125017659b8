"""Where a GPU takes over, and which: the one rule that page, map and sentence follow.

    choose_takeover(cell, data.slo)         # Takeover(rate=..., gpu=DeviceCapacity(...))

**The rule: the cheapest GPU of the catalog whose low end (90 %, one-sided) serves the rate.** The
rate is a little more than the CPU's estimated capacity. Where a model misses the SLO even unloaded,
it is the smallest rate that anybody would ask for. A plan chooses by the same rule
(plan_costs.py).

    predicted_here(cell, data)              # what it predicts of the GPU that a run measured

Beside the measurement this shows how far to trust the predictions of other GPUs.
"""

from __future__ import annotations

import itertools
import math

import msgspec

from crossover.models import formatting
from crossover.models.shape.model_spec import ModelSpec
from crossover.reports.devices.device_capacity import (
    SLOW_STEPS,
    TENSOR_PARALLEL_SIZES,
    DeviceCapacity,
    Service,
    Traffic,
    capacity_of,
    certainty_of,
    machine_of,
    simulation_of,
)
from crossover.reports.devices.device_catalog import Device, priced_gpus
from crossover.reports.errors import ReportError
from crossover.reports.report_data import GPU, CellData, ReportData
from crossover.serving.capacity.slo import Slo

MIN_GAIN = 1.1  # times the CPU's estimated capacity, which a takeover GPU serves at least
MIN_RATE = 1 / 3600  # requests/s that it serves at least: one an hour
GPU_FORMAT = "bf16"  # the weight format in which a GPU is assumed to serve
NARROW_FORMAT = "fp8"  # the one beside it: CPUs usually serve in 8 or 4 bits


class Offer(msgspec.Struct, frozen=True):
    """A GPU, or several that share each step, and its price."""

    name: str
    dollars_per_hour: float | None


class Takeover(msgspec.Struct, frozen=True, kw_only=True):
    """The GPU that takes over from the CPU of a configuration: predicted. Where `gpu` is None,
    `reason` says why."""

    rate: float  # requests/s that the GPU must serve
    gpu: DeviceCapacity | None
    weight_format: str = GPU_FORMAT
    narrow_gpu: Offer | None = None  # the GPU that takes over in NARROW_FORMAT; None: no GPU
    narrow_format: str = NARROW_FORMAT
    reason: str = ""

    @property
    def price_words(self) -> str:
        """Return `NVIDIA L40S ($1.86/h in bf16; fp8: NVIDIA L4, $0.80/h)`."""
        if self.gpu is None:
            return ""
        narrow, price = self.narrow_gpu, formatting.dollars_per_hour(self.gpu.dollars_per_hour)
        if narrow is None:
            return f"{self.gpu.name} ({price} in {self.weight_format})"
        if narrow.name == self.gpu.name:
            return f"{self.gpu.name} ({price} in {self.weight_format} or {self.narrow_format})"
        narrow_price = formatting.dollars_per_hour(narrow.dollars_per_hour)
        beside = f"{self.narrow_format}: {narrow.name}, {narrow_price}"
        return f"{self.gpu.name} ({price} in {self.weight_format}; {beside})"


def choose_takeover(cell: CellData, slo: Slo) -> Takeover | None:
    """Return the GPU that takes over from a configuration on a CPU, whatever GPU the machine has.

    None for a configuration on a GPU, and where the model's shape, its requests or its capacity
    are not known.
    """
    spec, traffic = cell.spec, cell.traffic
    if spec is None or traffic is None or cell.estimated_rate is None or cell.side == GPU:
        return None
    required_rate = max(cell.estimated_rate * MIN_GAIN, MIN_RATE)
    # NARROW_FORMAT is nowhere slower than GPU_FORMAT, so its offer is found first.
    narrow_gpu: Offer | None = None
    for device, count in _offers():
        if narrow_gpu is None:
            narrow = Service(machine_of(device), spec, NARROW_FORMAT, traffic, count)
            if not _serves(narrow, slo, required_rate):
                continue
            name = device.name if count == 1 else f"{count} x {device.name}"
            price = device.dollars_per_hour
            narrow_gpu = Offer(name, None if price is None else price * count)
        service = Service(machine_of(device), spec, GPU_FORMAT, traffic, count)
        if _serves(service, slo, required_rate):
            gpu = capacity_of(service, slo)
            return Takeover(rate=required_rate, gpu=gpu, narrow_gpu=narrow_gpu)
    reason = f"no GPU of the catalog serves it in {GPU_FORMAT} with 90 % confidence"
    if narrow_gpu is not None:
        reason += f"; in {NARROW_FORMAT} {narrow_gpu.name} does"
    return Takeover(rate=required_rate, gpu=None, narrow_gpu=narrow_gpu, reason=reason)


def _serves(service: Service, slo: Slo, rate: float) -> bool:
    """Return whether a service meets the SLO at this rate with 90 % confidence."""
    try:
        return certainty_of(service, slo, rate) == "yes"
    except ReportError:  # its memory does not suffice, or its peak is not known
        return False


def _offers() -> list[tuple[Device, int]]:
    """Return each GPU of the catalog with each number of them that can share a step, the cheapest
    offer first; at the same price fewer GPUs come first."""

    def price_and_count(offer: tuple[Device, int]) -> tuple[float, int]:
        device, count = offer
        return (device.dollars_per_hour or math.inf) * count, count

    return sorted(itertools.product(priced_gpus(), TENSOR_PARALLEL_SIZES), key=price_and_count)


def gpus_that_fit(spec: ModelSpec, traffic: Traffic, max_count: int) -> list[Service]:
    """Return a service for each of the `max_count` cheapest GPUs that have enough memory for the
    model, whatever rate they serve."""
    services: list[Service] = []
    for device in priced_gpus():
        service = Service(machine_of(device), spec, GPU_FORMAT, traffic)
        try:
            simulation_of(service, SLOW_STEPS)
        except ReportError:  # its memory does not suffice, or its peak is not known
            continue
        services.append(service)
        if len(services) == max_count:
            break
    return services


def predicted_here(cell: CellData | None, data: ReportData) -> DeviceCapacity | None:
    """Return the prediction for a configuration that was measured on the machine's own GPU.

    None where the GPU cannot be identified in the catalog with certainty, or the catalog cannot
    predict the model, its weight format or its requests.
    """
    if cell is None or cell.side != GPU or cell.capacity is None or not cell.slots:
        return None
    if cell.spec is None or cell.traffic is None or data.gpu is None or data.gpu.device is None:
        return None
    machine = msgspec.structs.replace(machine_of(data.gpu.device), slots=cell.slots)
    service = Service(machine, cell.spec, cell.weight_format, cell.traffic)
    predicted = capacity_of(service, data.slo)
    return predicted if predicted.rate else None


def best_cells(data: ReportData) -> dict[str, dict[str, CellData]]:
    """Return model -> side -> its configuration with the highest confirmed rate, then capacity.

    The model with the fewest active parameters comes first. Configurations on a CPU and on a GPU
    are never ranked against each other.
    """

    def rank(cell: CellData) -> tuple[float, float]:
        return cell.confirmed_rate or 0.0, cell.estimated_rate or 0.0

    best: dict[str, dict[str, CellData]] = {}
    for cell in data.cells:
        cells_by_side = best.setdefault(cell.model, {})
        best_so_far = cells_by_side.get(cell.side)
        if best_so_far is None or rank(cell) > rank(best_so_far):
            cells_by_side[cell.side] = cell
    return best

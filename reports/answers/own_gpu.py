"""What the catalog would have predicted of the GPU that a run measured, with the same slots.

    predicted_here(cell, data)      # DeviceCapacity(low=22.0, rate=32.4, high=47.6, ...)

Beside the measurement it shows how far to trust the predictions of other GPUs.
"""

from __future__ import annotations

import msgspec

from crossover.reports.devices.device_capacity import (
    DeviceCapacity,
    Service,
    capacity_of,
    machine_of,
)
from crossover.reports.report_data import GPU, CellData, ReportData


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

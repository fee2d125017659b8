"""Seconds to load a model that nobody loaded on a device: its process starts, then weights are read
and copied.

    predicted_load_seconds(device_named("NVIDIA L4"), ladder_model("8b").spec, "bf16")
"""

from __future__ import annotations

from crossover.models.shape.model_spec import ModelSpec
from crossover.models.weights.weight_formats import weight_bytes
from crossover.reports.devices.device_catalog import Device

# Measured on an H200 (docs/results/h200), from the page cache: bf16 weights of 1B (2.47 GB) in
# 6.6 s and of 8B (16.1 GB) in 7.9 s. The line through both: a process with CUDA and torch takes
# 6.3 s to start, and weights are copied at 10.5 GB/s.
START_SECONDS = 6.3
COPY_GB_PER_SECOND = 10.5
TRANSFER_SHARE = 0.7  # of the link's peak that copies reach, where that is less


def predicted_load_seconds(
    device: Device,
    spec: ModelSpec,
    weight_format: str,
    devices: int = 1,
    disk_gb_per_second: float | None = None,
) -> float | None:
    """Return the seconds to start a process and to copy the weights to `devices` such devices,
    which copy at the same time; None: their link is not known.

    `disk_gb_per_second`: how fast the weights are read, if they are not in memory (the page cache).
    """
    if device.link_gb_per_second is None:
        return None
    link_gb_per_second = TRANSFER_SHARE * device.link_gb_per_second
    gb_per_second = min(link_gb_per_second, COPY_GB_PER_SECOND) * devices
    if disk_gb_per_second is not None:
        gb_per_second = min(gb_per_second, disk_gb_per_second)
    return START_SECONDS + weight_bytes(spec, weight_format) / (gb_per_second * 1e9)

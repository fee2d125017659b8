"""Which devices a model may run on."""

from __future__ import annotations

from enum import StrEnum


class Policy(StrEnum):
    """Which devices may be used: the GPU first and the CPU after it, or one of the two only."""

    auto = "auto"
    gpu_only = "gpu-only"
    cpu_only = "cpu-only"

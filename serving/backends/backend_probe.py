"""What a backend's library says of itself, in a process of its own."""

from __future__ import annotations

import msgspec


class BackendProbe(msgspec.Struct, frozen=True):
    """What a backend's library says of itself. `works`: it can serve on the CPU."""

    backend: str
    works: bool
    version: str | None = None
    gpu: bool = False  # it can use a GPU here
    gpu_note: str | None = None  # which device, or why not
    gpu_cause: str | None = None  # a crossover.serving.errors.Cause
    gpu_vendor: str | None = None  # of the GPUs that this build drives; None: of all
    problem: str | None = None
    details: dict[str, str] = {}

"""The result of a backend's probe, which imports its library in a child process."""

from __future__ import annotations

import msgspec


class BackendProbe(msgspec.Struct, frozen=True):
    """What the installed library of a backend can do on this machine."""

    backend: str
    works: bool  # it can serve on the CPU
    version: str | None = None
    gpu: bool = False  # it can use a GPU here
    gpu_note: str | None = None  # the name of the GPU, or why it cannot use one
    gpu_cause: str | None = None  # a crossover.serving.errors.Cause, if it cannot use a GPU
    gpu_vendor: str | None = None  # whose GPUs this build supports; None: those of all vendors
    problem: str | None = None  # why the probe failed; None: it did not
    details: dict[str, str] = {}

"""Asks a backend's library, in a child, what it can do on this machine."""

from __future__ import annotations

import time

import msgspec

from serving.backends import spec_of
from serving.backends.spec import BackendProbe
from serving.hardware.gpu import run_probe


def probe_backend(name: str, timeout_seconds: float = 60.0) -> BackendProbe:
    """Import the library in a child and ask it. Never raises, never takes longer than the limit."""
    function = spec_of(name).probe
    if function is None:
        return BackendProbe(name, True)
    started = time.perf_counter()
    ran = run_probe(function, timeout_seconds)
    if ran.status is None:
        problem = f"importing it did not end within {timeout_seconds:g} s"
        return BackendProbe(name, False, problem=problem)
    if ran.status != 0:
        return BackendProbe(name, False, problem=ran.reason)
    try:
        answer = msgspec.json.decode(ran.output, type=BackendProbe)
    except msgspec.DecodeError as problem:
        return BackendProbe(name, False, problem=f"the probe answered nonsense: {problem}")
    return msgspec.structs.replace(answer, seconds=round(time.perf_counter() - started, 3))

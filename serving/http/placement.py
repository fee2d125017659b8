"""What /v1/placement says: where the model runs and why, what became of it, and its memory."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from serving.backends.base import GpuLoad, MemoryParts
from serving.engine.messages import Ready
from serving.errors import EngineState
from serving.http.wire.errors import scrubbed
from serving.registry.model import EngineLike

# Of an EngineConfig: no paths of the server's machine.
_SHOWN = (
    *("backend", "device", "weight_format", "quality_kl_nats", "slots", "context_tokens"),
    *("kv_tokens", "kv_dtype", "threads", "cores", "nice"),
    *("prefix_reuse", "prefill_tokens", "step_seconds_target"),
)
_OF_ENGINE = ("weight_format", "slots", "context_tokens", "kv_tokens")  # as the engine has them


class Memory(msgspec.Struct, frozen=True):
    """In bytes; None where it is not known."""

    predicted: MemoryParts | None
    measured: MemoryParts | None
    rss_bytes: int  # of the engine's process, right after the load
    peak_rss_bytes: int
    gpu: GpuLoad | None = None  # where the device's memory and the load's time went


class Happening(msgspec.Struct, frozen=True):
    """Something that befell the engines, and how long ago."""

    seconds_ago: float
    kind: str
    engine: str
    message: str
    cause: str | None


class PlacementView(msgspec.Struct, frozen=True, kw_only=True):
    """`explanation`: the decision as it was made at the start; the rest is as it is now."""

    model: str
    state: EngineState
    reason: str | None
    engine: dict[str, Any]
    device_name: str | None
    load_seconds: float | None
    memory: Memory | None
    restarts: int
    fallbacks: int
    returns: int
    events: list[Happening]
    explanation: dict[str, Any] | None
    details: dict[str, str]
    models: dict[str, EngineState] | UnsetType = UNSET  # name -> state, where there are several


def view(served: EngineLike, model: str, explanation: Any) -> PlacementView:
    """The supervisor's state as a value to encode, without paths and addresses.

    `explanation`: a dictionary or struct, None, or a function that gives one of these.
    """
    ready = served.ready
    engine = {key: getattr(served.config, key) for key in _SHOWN}
    if ready is not None:
        engine |= {key: getattr(ready.info, key) for key in _OF_ENGINE}
        engine["kv_dtype"] = ready.info.details.get("kv_dtype", engine["kv_dtype"])
        engine["capabilities"] = sorted(ready.info.capabilities)
    said = msgspec.to_builtins(explanation() if callable(explanation) else explanation)
    return PlacementView(
        model=model,
        state=served.state,
        reason=scrubbed(served.reason) if served.reason else None,
        engine=engine,
        device_name=ready.info.device_name if ready else None,
        load_seconds=ready.load_seconds if ready else None,
        memory=_memory(ready) if ready else None,
        restarts=served.restarts,
        fallbacks=served.fallbacks,
        returns=served.returns,
        events=_happenings(served.events),
        explanation=_clean(said),
        details=_clean(ready.info.details) if ready else {},
    )


def _memory(ready: Ready) -> Memory:
    info = ready.info
    resident = ready.rss_bytes, ready.peak_rss_bytes
    return Memory(info.predicted, info.measured, *resident, info.gpu)


def _happenings(events: Iterable[Any]) -> list[Happening]:
    now = time.time()
    return [
        Happening(round(now - e.unix_seconds, 3), e.kind, e.engine, scrubbed(e.message), e.cause)
        for e in events
    ]


def _clean(value: Any) -> Any:
    if isinstance(value, str):
        return scrubbed(value)
    if isinstance(value, Mapping):
        return {key: _clean(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_clean(item) for item in value]
    return value

"""What /v1/placement says: where the model runs and why, what became of it since, and what its memory was said and found to be."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import msgspec
from msgspec import UNSET, UnsetType

from serving.backends.base import EngineConfig, MemoryParts
from serving.messages import Ready
from serving.protocol import scrubbed

# Of an EngineConfig; paths of the server's machine are nobody's business.
_SHOWN = (
    "backend",
    "device",
    "weight_format",
    "quality_kl_nats",
    "slots",
    "context_tokens",
    "kv_tokens",
    "kv_dtype",
    "threads",
    "prefix_reuse",
    "prefill_tokens",
    "step_seconds_target",
)


class Memory(msgspec.Struct, frozen=True):
    """In bytes; None where it is not known."""

    predicted: MemoryParts | None
    measured: MemoryParts | None
    rss_bytes: int  # of the engine's process, right after the load
    peak_rss_bytes: int


class Happening(msgspec.Struct, frozen=True):
    """Something that befell the engines, and how long ago."""

    seconds_ago: float
    kind: str
    engine: str
    message: str
    cause: str | None


class PlacementView(msgspec.Struct, frozen=True, kw_only=True):
    """`explanation` is the decision as it was made when the server started; the rest is how things are now."""

    model: str
    state: str
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
    models: dict[str, str] | UnsetType = UNSET  # name -> state, where there are several; ?model=NAME shows another one


class Placed(Protocol):
    """What is read from the supervisor."""

    state: str
    reason: str | None
    restarts: int
    fallbacks: int

    @property
    def ready(self) -> Ready | None: ...

    @property
    def config(self) -> EngineConfig: ...


def view(served: Placed, model: str, explanation: Any) -> PlacementView:
    """The supervisor's state as a value to encode. Paths and addresses are taken out of every text.

    `explanation`: a dictionary or struct, None, or a function that gives one of these.
    """
    ready, config = served.ready, served.config
    engine = {key: getattr(config, key) for key in _SHOWN}
    if ready is not None:
        info = ready.info
        engine |= {
            "weight_format": info.weight_format,
            "slots": info.slots,
            "context_tokens": info.context_tokens,
            "kv_tokens": info.kv_tokens,
        }
        engine["capabilities"] = sorted(info.capabilities)
    said = msgspec.to_builtins(explanation() if callable(explanation) else explanation)
    events: Iterable[Any] = getattr(served, "events", ())
    return PlacementView(
        model=model,
        state=served.state,
        reason=scrubbed(served.reason) if served.reason else None,
        engine=engine,
        device_name=ready.info.device_name if ready else None,
        load_seconds=ready.load_seconds if ready else None,
        memory=Memory(ready.info.predicted, ready.info.measured, ready.rss_bytes, ready.peak_rss_bytes) if ready else None,
        restarts=served.restarts,
        fallbacks=served.fallbacks,
        returns=getattr(served, "returns", 0),
        events=[Happening(round(time.time() - e.unix_seconds, 3), e.kind, e.engine, scrubbed(e.message), e.cause) for e in events],
        explanation=None if said is None else _clean(said),
        details={key: scrubbed(value) for key, value in ready.info.details.items()} if ready else {},
    )


def _clean(value: Any) -> Any:
    if isinstance(value, str):
        return scrubbed(value)
    if isinstance(value, Mapping):
        return {key: _clean(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_clean(item) for item in value]
    return value

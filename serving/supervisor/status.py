"""The state of one served model, why it is so, and what happened to its engines."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from enum import StrEnum

import msgspec

from serving.errors import Cause, EngineState

KEPT_EVENTS = 200


class EventKind(StrEnum):
    """What happened to an engine."""

    started = "started"
    ready = "ready"
    standby = "standby"
    died = "died"
    restarting = "restarting"
    fell_back = "fell_back"
    returning = "returning"
    returned = "returned"
    failed = "failed"
    draining = "draining"
    stopped = "stopped"
    unloaded = "unloaded"


class Event(msgspec.Struct, frozen=True):
    """Something that happened to an engine."""

    unix_seconds: float
    kind: EventKind
    engine: str  # "llama_cpp/cpu"
    message: str
    cause: Cause | None = None
    model: str = ""


class Status:
    """State, reason and events of a model; coroutines wait for a change of them."""

    def __init__(self, on_event: Callable[[Event], None] | None) -> None:
        self.state = EngineState.loading
        self.reason: str | None = "starting"
        self.events: deque[Event] = deque(maxlen=KEPT_EVENTS)
        self._on_event = on_event
        self._changed = asyncio.Event()

    async def wait_change(self) -> None:
        """Wait until the state, or how far the load is, changes."""
        await self._changed.wait()

    def _become(self, state: EngineState, reason: str | None) -> None:
        self.state = state
        self.reason = reason
        self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _record(self, event: Event) -> None:
        self.events.append(event)
        if self._on_event is None:
            return
        try:
            self._on_event(event)
        except Exception as problem:  # whoever listens must not keep an engine from its successor
            context = {"message": "a listener to engines' events failed", "exception": problem}
            asyncio.get_running_loop().call_exception_handler(context)

"""Tells a person at the terminal, or a log collector, what the server is doing: lines, progress, and the engines' events."""

from __future__ import annotations

import json
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from serving.supervisor import Event

_QUIET = frozenset({"started", "ready"})  # said in better words elsewhere
_BETWEEN_SECONDS = 5.0  # progress lines where the output is no terminal


class Narrator:
    """Writes to `out`. On a terminal progress overwrites its line; elsewhere it is a line now and then; as JSON, one object a line."""

    def __init__(self, out: TextIO, as_json: bool = False) -> None:
        self._out = out
        self._as_json = as_json
        self._live = not as_json and out.isatty()
        self._on_line = False
        self._last: tuple[str, float] = ("", 0.0)

    def say(self, *lines: str) -> None:
        self.end_progress()
        for line in lines:
            self._write({"event": "note", "message": line.strip()}, line)

    def event(self, event: Event) -> None:
        """One of the supervisor's events; the everyday ones only in JSON."""
        if event.kind in _QUIET and not self._as_json:
            return
        self.end_progress()
        moment = datetime.fromtimestamp(event.unix_seconds).strftime("%H:%M:%S")
        cause = f" [{event.cause}]" if event.cause else ""
        fields: dict[str, object] = {"event": event.kind, "engine": event.engine, "message": event.message, "cause": event.cause}
        self._write(fields, f"{moment} {event.engine} {event.kind.replace('_', ' ')}{cause}: {event.message}")

    def progress(self, what: str, fraction: float | None) -> None:
        """How far something is; `fraction` 0..1 or None."""
        text = what if fraction is None else f"{what}: {fraction:4.0%}"
        if self._live:
            self._out.write(f"\r\x1b[K{text}")
            self._out.flush()
            self._on_line = True
            return
        now = time.monotonic()
        if what == self._last[0] and now - self._last[1] < _BETWEEN_SECONDS and fraction != 1.0:
            return
        if (text, what) == (self._last[0], what):
            return
        self._last = (what, now)
        self._write({"event": "progress", "message": what, "fraction": fraction}, text)

    def end_progress(self) -> None:
        """Leave the line that progress is written on."""
        if self._on_line:
            self._out.write("\r\x1b[K")
            self._on_line = False

    def _write(self, fields: dict[str, object], text: str) -> None:
        if self._as_json:
            moment = datetime.now(UTC).isoformat(timespec="milliseconds")
            text = json.dumps({"time": moment, **{key: value for key, value in fields.items() if value is not None}})
        print(text, file=self._out, flush=True)

"""Tells a person, or a log collector, what the server is doing: lines, progress, engines' events.

    narrator = Narrator(sys.stderr, as_json=True)
    narrator.take_logging(requests=True)        # Python's logging goes the same way

As JSON every line is one object with `time` (ISO 8601, UTC) and `event`: note, progress, request,
log, engine_output, or a serving.supervisor.supervisor.EventKind. A line of a request has its
`request_id`.
"""

from __future__ import annotations

import json
import logging
import time
from datetime import UTC, datetime
from typing import TextIO

from serving.supervisor.supervisor import Event, EventKind

_QUIET = (EventKind.started, EventKind.ready)  # said in better words elsewhere
_BETWEEN_SECONDS = 5.0  # progress lines where the output is no terminal


class Narrator:
    """Writes to `out`. On a terminal progress overwrites its line; elsewhere it is a line at times.

    `name_models`: say of which model an event is; for servers that hold several.
    """

    def __init__(self, out: TextIO, as_json: bool = False) -> None:
        self._out = out
        self._as_json = as_json
        self._live = not as_json and out.isatty()
        self._on_line = False
        self._last: tuple[str, float] = ("", 0.0)
        self.name_models = False

    def take_logging(self, requests: bool) -> None:
        """Let Python's logging write here. `requests`: a line for each request, too."""
        handler = logging.StreamHandler(self._out)
        handler.setFormatter(
            _JsonFormatter() if self._as_json else logging.Formatter("%(message)s")
        )
        logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)
        logging.getLogger("crossover.http").setLevel(logging.INFO if requests else logging.WARNING)

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
        who = f"{event.model} ({event.engine})" if self.name_models else event.engine
        fields: dict[str, object] = {
            "event": event.kind,
            "model": event.model or None,
            "engine": event.engine,
            "message": event.message,
            "cause": event.cause,
        }
        self._write(
            fields, f"{moment} {who} {event.kind.replace('_', ' ')}{cause}: {event.message}"
        )

    def output(self, line: str) -> None:
        """A line that an engine's process printed. From any thread."""
        self._write({"event": "engine_output", "message": line}, line)

    def progress(self, what: str, fraction: float | None) -> None:
        """How far something is; `fraction` 0..1 or None."""
        text = what if fraction is None else f"{what}: {fraction:4.0%}"
        if self._live:
            self._put(f"\r\x1b[K{text}")
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
            self._put("\r\x1b[K")
            self._on_line = False

    def _write(self, fields: dict[str, object], text: str) -> None:
        self._put((_json_line(**fields) if self._as_json else text) + "\n")

    def _put(self, text: str) -> None:
        try:
            self._out.write(text)
            self._out.flush()
        except (OSError, ValueError):  # nobody reads it, or the disk is full; the server lives on
            pass


class _JsonFormatter(logging.Formatter):
    """A record of Python's logging as one JSON object; a request's line is one already."""

    def format(self, record: logging.LogRecord) -> str:
        if record.name == "crossover.http" and record.levelno == logging.INFO:
            return record.getMessage()
        trace = self.formatException(record.exc_info) if record.exc_info else None
        return _json_line(
            event="log",
            level=record.levelname.lower(),
            logger=record.name,
            message=record.getMessage(),
            request_id=getattr(record, "request_id", None),
            traceback=trace,
        )


def _json_line(**fields: object) -> str:
    """One object of a log in JSON: the time, and what is known."""
    now = datetime.now(UTC).isoformat(timespec="milliseconds")
    return json.dumps({"time": now, **{k: v for k, v in fields.items() if v is not None}})

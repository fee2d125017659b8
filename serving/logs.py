"""Tells a person, or a log collector, what the server is doing: lines, progress, engines' events.

narrator = Narrator(sys.stderr)
narrator.take_logging(requests=True)        # Python's logging goes the same way
"""

from __future__ import annotations

import contextlib
import logging
import time
from datetime import datetime
from typing import TextIO

from serving.supervisor.supervisor import Event

_QUIET = ("started", "ready")  # said in better words elsewhere
_BETWEEN_SECONDS = 5.0  # progress lines where the output is no terminal


class Narrator:
    """Writes to `out`. On a terminal progress overwrites its line; elsewhere it is a line at times.

    `name_models`: say of which model an event is; for servers that hold several.
    """

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._live = out.isatty()
        self._on_line = False
        self._last: tuple[str, float] = ("", 0.0)
        self.name_models = False

    def take_logging(self, requests: bool) -> None:
        """Let Python's logging write here. `requests`: a line for each request, too."""
        logging.basicConfig(
            stream=self._out, format="%(message)s", level=logging.WARNING, force=True
        )
        logging.getLogger("crossover.http").setLevel(logging.INFO if requests else logging.WARNING)

    def say(self, *lines: str) -> None:
        self.end_progress()
        for line in lines:
            self.output(line)

    def event(self, event: Event) -> None:
        """One of the supervisor's events, but for the everyday ones."""
        if event.kind not in _QUIET:
            moment = datetime.fromtimestamp(event.unix_seconds).strftime("%H:%M:%S")
            cause = f" [{event.cause}]" if event.cause else ""
            who = f"{event.model} ({event.engine})" if self.name_models else event.engine
            self.say(f"{moment} {who} {event.kind.replace('_', ' ')}{cause}: {event.message}")

    def output(self, line: str) -> None:
        """A line as it is, such as one that an engine's process printed. From any thread."""
        self._put(line + "\n")

    def progress(self, what: str, fraction: float | None) -> None:
        """How far something is; `fraction` 0..1 or None."""
        text = what if fraction is None else f"{what}: {fraction:4.0%}"
        if self._live:
            self._put(f"\r\x1b[K{text}")
            self._on_line = True
            return
        now = time.monotonic()
        said, at = self._last
        is_soon = now - at < _BETWEEN_SECONDS and fraction != 1.0
        if what != said or (text != what and not is_soon):
            self._last = (what, now)
            self.output(text)

    def end_progress(self) -> None:
        """Leave the line that progress is written on."""
        if self._on_line:
            self._put("\r\x1b[K")
            self._on_line = False

    def _put(self, text: str) -> None:
        # Nobody reads it, or the disk is full; the server lives on.
        with contextlib.suppress(OSError, ValueError):
            self._out.write(text)
            self._out.flush()

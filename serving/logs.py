"""Tells a person, or a log collector, what the server is doing: lines, progress, engines' events.

narrator = Narrator(sys.stderr)
narrator.say("listening")
"""

from __future__ import annotations

import contextlib
import time
from datetime import datetime
from typing import TextIO

from serving.supervisor.engine_supervisor import Event

_QUIET = ("started", "ready")  # said in better words elsewhere
_BETWEEN_SECONDS = 3.0  # lines of one progress


class Narrator:
    """Writes lines to `out`, from any thread. `name_models`: say of which model an event is; for
    servers that hold several."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._last = ("", "", 0.0)  # what was said last, in which words, when
        self.name_models = False

    def say(self, *lines: str) -> None:
        # Where nobody reads it, or the disk is full, the server lives on.
        with contextlib.suppress(OSError, ValueError):
            self._out.write("".join(f"{line}\n" for line in lines))
            self._out.flush()

    def event(self, event: Event) -> None:
        """One of the supervisor's events, but for the everyday ones."""
        if event.kind not in _QUIET:
            moment = datetime.fromtimestamp(event.unix_seconds).strftime("%H:%M:%S")
            cause = f" [{event.cause}]" if event.cause else ""
            who = f"{event.model} ({event.engine})" if self.name_models else event.engine
            self.say(f"{moment} {who} {event.kind.replace('_', ' ')}{cause}: {event.message}")

    def progress(self, what: str, fraction: float | None) -> None:
        """How far something is, every few seconds and at its end, once each; `fraction` 0..1 or
        None."""
        now, (said, told, at) = time.monotonic(), self._last
        text = what if fraction is None else f"{what}: {fraction:.0%}"
        is_due = fraction == 1.0 or now - at >= _BETWEEN_SECONDS
        if what != said or (text != told and is_due):
            self._last = (what, text, now)
            self.say(text)

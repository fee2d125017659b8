"""The server's log for people and log collectors: lines, progress and the events of engines.

log = ConsoleLog(sys.stderr)
log.say("listening")
"""

from __future__ import annotations

import contextlib
import time
from datetime import datetime
from typing import NamedTuple, TextIO

from crossover.serving.supervisor.engine_supervisor import EngineEvent

_UNLOGGED_EVENTS = ("started", "ready")  # other lines report these in more detail
_MIN_SECONDS_BETWEEN = 3.0  # between two lines about the same progress


class _Progress(NamedTuple):
    """A line of progress that was written. `written_at`: by time.monotonic()."""

    subject: str
    text: str
    written_at: float


class ConsoleLog:
    """Writes lines to `out`, from any thread.

    `name_models`: start each event with the name of its model, for servers with several models.
    """

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._last_progress = _Progress("", "", 0.0)
        self.name_models = False

    def say(self, *lines: str) -> None:
        """Write lines."""
        # A closed pipe or a full disk must not stop the server.
        with contextlib.suppress(OSError, ValueError):
            self._out.write("".join(f"{line}\n" for line in lines))
            self._out.flush()

    def event(self, event: EngineEvent) -> None:
        """Write a line about an event of a supervisor, unless it is one of _UNLOGGED_EVENTS."""
        if event.kind in _UNLOGGED_EVENTS:
            return
        time_of_day = datetime.fromtimestamp(event.unix_seconds).strftime("%H:%M:%S")
        subject = f"{event.model} ({event.engine})" if self.name_models else event.engine
        kind = event.kind.replace("_", " ")
        cause = f" [{event.cause}]" if event.cause else ""
        self.say(f"{time_of_day} {subject} {kind}{cause}: {event.message}")

    def progress(self, what: str, fraction: float | None) -> None:
        """Write how far `what` is, at most every few seconds and once at its end.

        `fraction`: 0 to 1; None: not known.
        """
        now = time.monotonic()
        last = self._last_progress
        text = what if fraction is None else f"{what}: {fraction:.0%}"
        is_due = fraction == 1.0 or now - last.written_at >= _MIN_SECONDS_BETWEEN
        if what != last.subject or (text != last.text and is_due):
            self._last_progress = _Progress(what, text, now)
            self.say(text)

"""The server's log for people and log collectors: lines, progress and the events of engines.

narrator = ConsoleLog(sys.stderr)
narrator.say("listening")
"""

from __future__ import annotations

import contextlib
import time
from datetime import datetime
from typing import TextIO

from crossover.serving.supervisor.engine_supervisor import Event

_QUIET = ("started", "ready")  # other lines report these in more detail
_BETWEEN_SECONDS = 3.0  # the minimum time between two lines of the same progress


class ConsoleLog:
    """Writes lines to `out`, from any thread.

    `name_models`: start each event with the name of its model, for servers with several models.
    """

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._last = ("", "", 0.0)  # the last progress: its subject, its text, when it was written
        self.name_models = False

    def say(self, *lines: str) -> None:
        """Write lines."""
        # A closed pipe or a full disk must not stop the server.
        with contextlib.suppress(OSError, ValueError):
            self._out.write("".join(f"{line}\n" for line in lines))
            self._out.flush()

    def event(self, event: Event) -> None:
        """Write a line about an event of the supervisor, unless it is an everyday one."""
        if event.kind not in _QUIET:
            moment = datetime.fromtimestamp(event.unix_seconds).strftime("%H:%M:%S")
            cause = f" [{event.cause}]" if event.cause else ""
            subject = f"{event.model} ({event.engine})" if self.name_models else event.engine
            self.say(f"{moment} {subject} {event.kind.replace('_', ' ')}{cause}: {event.message}")

    def progress(self, what: str, fraction: float | None) -> None:
        """Write how far `what` is, at most every few seconds and once at its end.

        `fraction`: 0 to 1; None: not known.
        """
        now = time.monotonic()
        last_subject, last_text, written_at = self._last
        text = what if fraction is None else f"{what}: {fraction:.0%}"
        is_due = fraction == 1.0 or now - written_at >= _BETWEEN_SECONDS
        if what != last_subject or (text != last_text and is_due):
            self._last = (what, text, now)
            self.say(text)

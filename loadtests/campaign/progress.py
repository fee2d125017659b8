"""Progress of a run: lines that stay, and one that moves (terminal) or repeats (elsewhere).

with Progress() as progress:
    progress.say("smollm2-135m Q4_0: ready in 1.2 s")
    progress.tick("level 3: 0.8 requests/s", fraction=0.4)
"""

from __future__ import annotations

import sys
import time
from typing import TextIO

from rich.console import Console
from rich.status import Status

from models.errors import printable

PLAIN_EVERY_SECONDS = 10.0


class Progress:
    """Writes to `stream`, by default standard error."""

    def __init__(
        self, stream: TextIO | None = None, *, plain_every_seconds: float = PLAIN_EVERY_SECONDS
    ) -> None:
        self._console = Console(file=stream or sys.stderr, highlight=False, soft_wrap=True)
        self._status: Status | None = None
        self._every = plain_every_seconds
        self._spoke = 0.0
        self._started = time.monotonic()

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self.quiet()

    def say(self, text: str, style: str | None = None) -> None:
        """A line that stays, with the time since the start in front of it."""
        self._console.print(f"[dim]{_clock(time.monotonic() - self._started)}[/dim] ", end="")
        self._console.print(printable(text), style=style, markup=False)
        self._spoke = time.monotonic()

    def tick(self, what: str, *, fraction: float | None = None) -> None:
        """How far the present thing is; may be called as often as one likes."""
        parts = [what]
        if fraction is not None:
            parts.append(f"{min(1.0, max(0.0, fraction)):.0%}")
        line = printable(", ".join(parts))
        if self._console.is_terminal:
            if self._status is None:
                self._status = self._console.status("")
                self._status.start()
            self._status.update(line.replace("[", r"\["))
        elif time.monotonic() - self._spoke >= self._every:
            self.say(f"... {line}")

    def quiet(self) -> None:
        """Takes the moving line away."""
        if self._status is not None:
            self._status.stop()
            self._status = None


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 60:02d}:{int(seconds) % 60:02d}"

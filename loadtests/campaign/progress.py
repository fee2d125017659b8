"""Progress of a run that a person follows: a line a cell that changes, and lines that stay.

    with Progress() as progress:
        progress.found("360m", "now", left_seconds=480)
        progress.say("cell 1 of 2, 360m: at most 4 min of measuring")
        progress.tick("360m, 1.6 requests/s: 84 answered, 43 s left", fraction=0.4)
        progress.found("360m", "no rate confirmed, estimated capacity 2.0/s (1.6–2.5)")

On a terminal the cells stand below what was said, each with what is known of it so far, and below
them what is done now and how long it may still take; `detail` is not shown there. Elsewhere (a log,
a pipe) every line stays, and what moves is repeated now and then.
"""

from __future__ import annotations

import sys
import time
from typing import TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from crossover.models import formatting
from crossover.models.errors import printable

PLAIN_EVERY_SECONDS = 10.0


def console_of(width: int = 160) -> Console:
    """Standard output; where it is no terminal, as wide as the tables are."""
    return Console(
        highlight=False, markup=False, soft_wrap=True, width=None if sys.stdout.isatty() else width
    )


class Progress:
    """Writes to `stream`, by default standard error."""

    def __init__(
        self, stream: TextIO | None = None, *, plain_every_seconds: float = PLAIN_EVERY_SECONDS
    ) -> None:
        self._console = Console(file=stream or sys.stderr, highlight=False, soft_wrap=True)
        self._live: Live | None = None
        self._every = plain_every_seconds
        self._started = self._spoke = time.monotonic()
        self._found: dict[str, str] = {}  # by cell
        self._now = ""
        self._until: float | None = None  # when all is done at the latest
        self._spinner = Spinner("dots")

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self.quiet()

    def found(self, cell: str, words: str, left_seconds: float | None = None) -> None:
        """What is known of a cell now, and how long all cells may still take at most."""
        self._found[cell] = words
        if left_seconds is not None:
            self._until = time.monotonic() + left_seconds

    def say(self, text: str, style: str | None = None) -> None:
        """A line that stays, with the time since the start in front of it."""
        minutes, seconds = divmod(int(time.monotonic() - self._started), 60)
        line = Text(f"{minutes:02d}:{seconds:02d} ", style="dim")
        line.append(printable(text), style=style or "not dim")
        self._console.print(line)
        self._spoke = time.monotonic()

    def detail(self, text: str) -> None:
        """A line for a log; on a terminal the cell's own line says it."""
        if not self._console.is_terminal:
            self.say(text)

    def tick(self, what: str, fraction: float | None = None) -> None:
        """How far the present thing is; may be called as often as one likes."""
        part = "" if fraction is None else f", {min(1.0, max(0.0, fraction)):.0%}"
        self._now = printable(what) + part
        if self._console.is_terminal and self._live is None:
            self._live = Live(
                console=self._console,
                transient=True,
                refresh_per_second=4,
                get_renderable=self._lines,
            )
            self._live.start()
        elif self._live is None and time.monotonic() - self._spoke >= self._every:
            self.say(f"... {self._now}")

    def quiet(self) -> None:
        """Takes the moving lines away."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _lines(self) -> RenderableType:
        table = Table.grid(padding=(0, 2))
        for cell, words in self._found.items():
            table.add_row(Text(f"  {printable(cell)}"), Text(printable(words), style="dim"))
        left = ""
        if self._until is not None and (seconds := self._until - time.monotonic()) > 0:
            left = f"  (at most {formatting.duration(seconds)} left)"
        self._spinner.update(text=Text(f"{self._now}{left}", overflow="ellipsis", no_wrap=True))
        return Group(table, self._spinner)

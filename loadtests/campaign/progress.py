"""The progress of a run, for a person who follows it: one line per cell, which changes, and a log.

    with Progress() as progress:
        progress.set_status("360m", "now", left_seconds=480)
        progress.say("cell 1 of 2, 360m: at most 4 min of measuring")
        progress.tick("360m, 1.6 requests/s: 84 answered, 43 s left", fraction=0.4)
        progress.set_status("360m", "no rate confirmed, estimated capacity 2.0/s (1.6–2.5)")

On a terminal, the lines of the cells stand below the log, each with what is known about it so far,
and below them what is done now and how long all of it may still take. The lines of `log` are not
shown there, since the line of the cell says the same. If the output is a file or a pipe, all lines
are logged, and what is done now is logged every ten seconds.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Iterator
from typing import TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from crossover.models import formatting
from crossover.models.errors import printable

LOG_INTERVAL_SECONDS = 10.0


def console_of(width: int = 160) -> Console:
    """Return a console for standard output. If that is not a terminal, lines are `width` wide, so
    that tables fit."""
    return Console(
        highlight=False, markup=False, soft_wrap=True, width=None if sys.stdout.isatty() else width
    )


class _ErrorConsole(Console):
    """Goes silent when nobody reads standard error any more. rich would end the thread that writes,
    and close standard output, so that the result would be lost."""

    def on_broken_pipe(self) -> None:
        self.quiet = True


class Progress:
    """Writes to `stream`, by default standard error."""

    def __init__(
        self, stream: TextIO | None = None, *, log_interval_seconds: float = LOG_INTERVAL_SECONDS
    ) -> None:
        self.rate_units = formatting.RateUnits()  # of all lines
        self._console = _ErrorConsole(file=stream or sys.stderr, highlight=False, soft_wrap=True)
        self._live: Live | None = None
        self._log_interval_seconds = log_interval_seconds
        self._started_at = self._last_line_at = time.monotonic()
        self._statuses: dict[str, str] = {}  # by cell
        self._activity = ""  # what is done now
        self._done_at: float | None = None  # when all cells are done at the latest
        self._spinner = Spinner("dots")

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self.clear()

    def set_status(self, cell: str, words: str, left_seconds: float | None = None) -> None:
        """Set the line of a cell, and how long all cells together may still take at most."""
        self._statuses[cell] = words
        if left_seconds is not None:
            self._done_at = time.monotonic() + left_seconds

    def say(self, text: str, style: str | None = None) -> None:
        """Print a line, after the time since the start."""
        minutes, seconds = divmod(int(time.monotonic() - self._started_at), 60)
        line = Text(f"{minutes:02d}:{seconds:02d} ", style="dim")
        line.append(printable(text), style=style or "not dim")
        self._console.print(line)
        self._last_line_at = time.monotonic()

    def log(self, text: str) -> None:
        """Print a line unless the output is a terminal, where the line of the cell says the
        same."""
        if not self._console.is_terminal:
            self.say(text)

    def tick(self, activity: str, fraction: float | None = None) -> None:
        """Show what is done now and how far it is, 0..1. It may be called at any rate."""
        percentage = "" if fraction is None else f", {min(1.0, max(0.0, fraction)):.0%}"
        self._activity = printable(activity) + percentage
        if not self._console.is_terminal:
            self._repeat()
        elif self._live is None:  # once it runs, it shows the activity by itself
            self._live = Live(
                console=self._console,
                transient=True,
                refresh_per_second=4,
                get_renderable=self._lines,
            )
            self._live.start()

    @contextlib.contextmanager
    def kept_alive(self) -> Iterator[None]:
        """While the block runs, the last activity is logged again at intervals, even if nothing
        calls `tick`."""
        is_over = threading.Event()

        def repeat() -> None:
            while not is_over.wait(self._log_interval_seconds / 4):
                # On a terminal, the live lines refresh themselves.
                if self._activity and self._live is None:
                    self._repeat()

        thread = threading.Thread(target=repeat, name="progress", daemon=True)
        thread.start()
        try:
            yield
        finally:
            is_over.set()
            thread.join()

    def _repeat(self) -> None:
        """Write what is done now, unless a line was written a moment ago."""
        if time.monotonic() - self._last_line_at >= self._log_interval_seconds:
            self.say(f"... {self._activity}")

    def clear(self) -> None:
        """Remove the lines that change; the log stays."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _lines(self) -> RenderableType:
        table = Table.grid(padding=(0, 2))
        for cell, words in self._statuses.items():
            table.add_row(Text(f"  {printable(cell)}"), Text(printable(words), style="dim"))
        left = ""
        if self._done_at is not None and (seconds := self._done_at - time.monotonic()) > 0:
            left = f"  (at most {formatting.duration(seconds)} left)"
        activity = Text(f"{self._activity}{left}", overflow="ellipsis", no_wrap=True)
        self._spinner.update(text=activity)
        return Group(table, self._spinner)

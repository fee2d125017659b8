"""Recorded traffic from a file: a JSON object a line, other keys left out.

    {"prompt_tokens": 320, "output_tokens": 90}
    {"prompt_tokens": 320, "output_tokens": 90, "seconds": 12.5}

    {"session": "a", "prompt_tokens": 320, "output_tokens": 90}
    {"session": "a", "prompt_tokens": 40, "output_tokens": 120, "think_seconds": 30}

Lines of one `session` are the turns of a conversation, in their order: `prompt_tokens` are what the
user adds, and `think_seconds` pass between the answer before and the turn.

`seconds` is when the request came; all lines have it, or none. Requests are sorted by it. Blank
lines and a byte order mark are skipped. Rows without prompt or answer, which recordings of real
traffic hold, are left out and counted.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Meta

from crossover.models.errors import printable
from crossover.serving.errors import WorkloadError

MAX_TOKENS = 10_000_000  # of a prompt or an answer: the longest context that is sold
MAX_SECONDS = 1e18  # of a stamp: nanoseconds since 1970 too
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_Tokens = Annotated[int, Meta(ge=0, le=MAX_TOKENS)] | Annotated[float, Meta(ge=0, le=MAX_TOKENS)]


class Row(msgspec.Struct):
    """A line."""

    prompt_tokens: _Tokens
    output_tokens: _Tokens
    seconds: Annotated[float, Meta(ge=-MAX_SECONDS, le=MAX_SECONDS)] | None = None
    session: str | int | None = None
    think_seconds: Annotated[float, Meta(ge=0, le=1e6)] | None = None


class TraceRows(NamedTuple):
    """n requests."""

    seconds: npt.NDArray[np.float64]  # from 0, ascending; empty: the file has no stamps
    pairs: npt.NDArray[np.int64]  # (prompt tokens, output tokens)
    left_out: int = 0  # rows with no prompt or no answer

    def note(self, path: str) -> str | None:
        """Return what a person should know of the file."""
        if not self.left_out:
            return None
        rows = "1 row" if self.left_out == 1 else f"{self.left_out} rows"
        return f"{shown_path(path)}: {rows} without prompt or answer tokens left out"


@functools.lru_cache(maxsize=8)
def load_trace(path: str) -> TraceRows:
    """Raises WorkloadError for a file that is missing or empty, or has a bad line."""
    name, rows = shown_path(path), _rows_of(path)
    kept = [row for row in rows if row.prompt_tokens and row.output_tokens]
    stamps = [row.seconds for row in kept if row.seconds is not None]
    if not kept:
        raise WorkloadError(f"trace {name}: no line has both prompt tokens and output tokens")
    if len(stamps) not in (0, len(kept)):
        raise WorkloadError(
            f"trace {name}: {len(stamps)} of {len(kept)} lines have `seconds`. Add it to all lines "
            "or to none"
        )
    kept.sort(key=lambda row: row.seconds or 0.0)  # stable: as they stand without stamps
    return TraceRows(
        np.sort(np.array(stamps, dtype=np.float64)) - min(stamps, default=0.0),
        np.array([(row.prompt_tokens, row.output_tokens) for row in kept], dtype=np.int64),
        len(rows) - len(kept),
    )


@functools.lru_cache(maxsize=8)
def load_sessions(path: str) -> list[list[Row]]:
    """Return the turns of each session, in the order in which they begin; none: the file has no
    sessions.

    Raises WorkloadError, also where only some lines have a session.
    """
    sessions: dict[str | int | None, list[Row]] = {}
    for row in _rows_of(path):
        if row.prompt_tokens and row.output_tokens:
            sessions.setdefault(row.session, []).append(row)
    if None in sessions and len(sessions) > 1:
        raise WorkloadError(
            f"trace {shown_path(path)}: {len(sessions[None])} lines have no `session`. Add it to "
            "all lines or to none"
        )
    return [turns for name, turns in sessions.items() if name is not None]


def _rows_of(path: str) -> list[Row]:
    """Return all rows of a file. Raises WorkloadError."""
    name = shown_path(path)
    try:
        if not Path(path).is_file():
            raise WorkloadError(f"trace {name}: there is no such file")
        text = Path(path).read_bytes()
    except OSError as problem:
        raise WorkloadError(f"trace {name} cannot be read: {problem.strerror}") from None
    rows: list[Row] = []
    for number, line in enumerate(text.splitlines(), 1):
        line = line.removeprefix(_BYTE_ORDER_MARK)  # files that were joined have several
        if not line.strip():
            continue
        try:
            rows.append(_whole(msgspec.json.decode(line, type=Row)))
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, ValueError) as problem:
            raise WorkloadError(f"trace {name}, line {number}: {problem}") from None
    return rows


def shown_path(path: str | os.PathLike[str]) -> str:
    """Return a path for people and JSON, whatever bytes it has."""
    return printable(os.fsdecode(path))


def _whole(row: Row) -> Row:
    """Counts such as 320.0, which data frames write, are whole. Raises ValueError for others."""
    for name in ("prompt_tokens", "output_tokens"):
        value = getattr(row, name)
        if value != int(value):
            raise ValueError(f"{name} must be an integer, got {value}")
    return row

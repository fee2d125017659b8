"""Reads recorded traffic from a file: in Crossover's own format, or as a public trace is published.

The formats of public traces (published_traces.py) are recognized by their content. Crossover's own
has one JSON object per line. Unknown keys are ignored.

    {"prompt_tokens": 320, "output_tokens": 90}
    {"prompt_tokens": 320, "output_tokens": 90, "seconds": 12.5}

    {"session": "a", "prompt_tokens": 320, "output_tokens": 90}
    {"session": "a", "prompt_tokens": 40, "output_tokens": 120, "think_seconds": 30}

Lines with the same `session` are the turns of one conversation, in their order. Their
`prompt_tokens` are those that the user adds, and `think_seconds` is the time from the end of the
previous answer to the turn.

    {"prompt_tokens": 1300, "output_tokens": 90, "hash_ids": [0, 7, 9]}

Each of `hash_ids` names BLOCK_TOKENS tokens at the start of a prompt. Prompts that begin with the
same ids begin with the same text.

`seconds` is the time at which the request arrived. Either all lines have it or none has, and
requests are sorted by it. Blank lines and byte order marks are skipped. Rows without prompt or
output tokens, which recordings of real traffic contain, are left out and counted.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from crossover.models.errors import printable
from crossover.serving.errors import WorkloadError
from crossover.serving.workload.published_traces import reader_of
from crossover.serving.workload.trace_row import TraceRow

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class TraceRows(NamedTuple):
    """The n usable requests of a file, as arrays, in the order of their arrival."""

    # Arrival times [n], from 0, ascending. The array is empty if the file has no times.
    seconds: npt.NDArray[np.float64]
    pairs: npt.NDArray[np.int64]  # (prompt tokens, output tokens): [n, 2]
    blocks: list[tuple[int, ...]]  # hash_ids of each request
    left_out: int = 0  # rows without prompt or output tokens

    def note(self, path: str) -> str | None:
        """Return a note for the user if rows were left out."""
        if not self.left_out:
            return None
        rows = "1 row" if self.left_out == 1 else f"{self.left_out} rows"
        return f"{shown_path(path)}: {rows} without prompt or answer tokens left out"


@functools.lru_cache(maxsize=8)
def load_trace(path: str) -> TraceRows:
    """Return the requests of a file. Raises WorkloadError if the file is missing, has an invalid
    line, or has no row with both prompt and output tokens."""
    name, rows = shown_path(path), _read_rows(path)
    usable = [row for row in rows if row.prompt_tokens and row.output_tokens]
    stamps = [row.seconds for row in usable if row.seconds is not None]
    if not usable:
        raise WorkloadError(f"trace {name}: no line has both prompt tokens and output tokens")
    if len(stamps) not in (0, len(usable)):
        raise WorkloadError(
            f"trace {name}: {len(stamps)} of {len(usable)} lines have `seconds`. Add it to all "
            "lines or to none"
        )
    usable.sort(key=lambda row: row.seconds or 0.0)  # stable: keeps the order without timestamps
    return TraceRows(
        np.sort(np.array(stamps, dtype=np.float64)) - min(stamps, default=0.0),
        np.array([(row.prompt_tokens, row.output_tokens) for row in usable], dtype=np.int64),
        [row.hash_ids for row in usable],
        len(rows) - len(usable),
    )


@functools.lru_cache(maxsize=8)
def load_sessions(path: str) -> list[list[TraceRow]]:
    """Return the turns of each session, in the order in which the sessions begin. Empty if the file
    has no sessions.

    Raises WorkloadError if the file cannot be read, or only some of its lines have a session.
    """
    sessions: dict[str | int | None, list[TraceRow]] = {}
    for row in _read_rows(path):
        if row.prompt_tokens and row.output_tokens:
            sessions.setdefault(row.session, []).append(row)
    if None in sessions and len(sessions) > 1:
        raise WorkloadError(
            f"trace {shown_path(path)}: {len(sessions[None])} lines have no `session`. Add it to "
            "all lines or to none"
        )
    return [turns for name, turns in sessions.items() if name is not None]


def _read_rows(path: str) -> list[TraceRow]:
    """Return all rows of a file. Raises WorkloadError if it is missing or has an invalid line."""
    name = shown_path(path)
    try:
        if not Path(path).is_file():
            raise WorkloadError(f"trace {name}: there is no such file")
        text = Path(path).read_bytes()
    except OSError as problem:
        raise WorkloadError(f"trace {name} cannot be read: {problem.strerror}") from None
    rows: list[TraceRow] = []
    number = 1
    try:
        lines = text.splitlines()
        reader = reader_of(lines)
        for number, line in enumerate(lines, 1):  # noqa: B007  # of errors
            line = line.removeprefix(_BYTE_ORDER_MARK)  # concatenated files have several
            if line.strip():
                rows += map(_checked, reader(line))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, ValueError) as problem:
        raise WorkloadError(f"trace {name}, line {number}: {problem}") from None
    return rows


def shown_path(path: str | os.PathLike[str]) -> str:
    """Return a path as text that can be printed and written as JSON, whatever bytes it has."""
    return printable(os.fsdecode(path))


def _checked(row: TraceRow) -> TraceRow:
    """Return the row. Raises ValueError if a token count is not an integer; 320.0, as data frames
    write it, is one."""
    for name in ("prompt_tokens", "output_tokens"):
        value = getattr(row, name)
        if value != int(value):
            raise ValueError(f"{name} must be an integer, got {value}")
    return row

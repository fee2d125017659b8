"""Recorded traffic from a file: a JSON object a line, other keys left out.

    {"prompt_tokens": 320, "output_tokens": 90}
    {"prompt_tokens": 320, "output_tokens": 90, "seconds": 12.5}

`seconds` is when the request came; all lines have it, or none. Requests are sorted by it.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Meta

from loadtests.errors import LoadError

_Tokens = Annotated[int, Meta(ge=1)]


class _Row(msgspec.Struct):
    prompt_tokens: _Tokens
    output_tokens: _Tokens
    seconds: float | None = None


class TraceRows(NamedTuple):
    """n requests."""

    seconds: npt.NDArray[np.float64]  # from 0, ascending; empty: the file has no stamps
    pairs: npt.NDArray[np.int64]  # (prompt tokens, output tokens)


@functools.lru_cache(maxsize=8)
def load_trace(path: str) -> TraceRows:
    """Raises LoadError for a file that is missing or empty, or has a bad line."""
    if not Path(path).is_file():
        raise LoadError(f"trace {path}: there is no such file")
    rows: list[_Row] = []
    try:
        for line in Path(path).read_bytes().splitlines():
            rows.append(msgspec.json.decode(line, type=_Row))
    except (OSError, msgspec.MsgspecError) as problem:
        raise LoadError(f"trace {path}, line {len(rows) + 1}: {problem}") from None
    stamps = [row.seconds for row in rows if row.seconds is not None]
    if not rows or len(stamps) not in (0, len(rows)):
        raise LoadError(
            f"trace {path}: {len(stamps)} of {len(rows)} lines have `seconds`; it needs lines, and "
            "that all of them have it or none"
        )
    rows.sort(key=lambda row: row.seconds or 0.0)  # stable: as they stand without stamps
    return TraceRows(
        np.sort(np.array(stamps, dtype=np.float64)) - min(stamps, default=0.0),
        np.array([(row.prompt_tokens, row.output_tokens) for row in rows], dtype=np.int64),
    )

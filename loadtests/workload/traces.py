"""Recorded traffic from a file: stamps and lengths.

Known by their columns, whatever the file is called; CSV, or a JSON object a line:

    Azure 2023 and 2024   CSV    TIMESTAMP, ContextTokens, GeneratedTokens
    BurstGPT              CSV    Timestamp, Request tokens, Response tokens
    ShareGPT lengths      CSV    num_prefill_tokens, num_decode_tokens (no stamps)
    Mooncake              JSONL  timestamp (ms), input_length, output_length
    OpenAI-style logs     JSONL  usage {prompt_tokens, completion_tokens}, and optionally created
    one's own             any    prompt_tokens, output_tokens, and optionally seconds

Rows are sorted by stamp where there are stamps. Rows without a prompt or an answer are left out.
"""

from __future__ import annotations

import csv
import functools
import json
import re
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from loadtests.errors import LoadError


class TraceRows(msgspec.Struct, frozen=True):
    """n requests."""

    seconds: npt.NDArray[np.float64]  # from 0, ascending; empty: the file has no stamps
    pairs: npt.NDArray[np.int64]  # (prompt tokens, output tokens)


class _Columns(NamedTuple):
    """Where a kind of trace has what."""

    prompt: str
    output: str
    stamp: str
    units_per_second: float = 1.0


_KINDS = (
    _Columns("ContextTokens", "GeneratedTokens", "TIMESTAMP"),
    _Columns("Request tokens", "Response tokens", "Timestamp"),
    _Columns("num_prefill_tokens", "num_decode_tokens", ""),
    _Columns("input_length", "output_length", "timestamp", 1e3),
    _Columns("prompt_tokens", "completion_tokens", "created"),
    _Columns("prompt_tokens", "output_tokens", "seconds"),
)


@functools.lru_cache(maxsize=4)
def load_trace(path: str) -> TraceRows:
    """Raises LoadError for a file that is missing, of no known kind, empty, or has a bad line."""
    if not Path(path).is_file():
        raise LoadError(f"trace {path}: there is no such file")
    rows: list[tuple[float | None, int, int]] = []
    number = 1
    try:
        for number, raw in _rows(Path(path)):
            row = _of_line(raw) if isinstance(raw, str) else raw
            kind = next((one for one in _KINDS if one.prompt in row and one.output in row), None)
            if kind is None:
                known = "; ".join(f"{one.prompt}, {one.output}" for one in _KINDS)
                raise LoadError(
                    f"trace {path}, line {number}: columns {', '.join(sorted(map(str, row)))} are "
                    f"of no known kind; known are: {known}"
                )
            prompt, output = int(float(row[kind.prompt])), int(float(row[kind.output]))
            stamp = row.get(kind.stamp)
            seconds = None if stamp is None else _seconds(stamp) / kind.units_per_second
            if prompt > 0 and output > 0:
                rows.append((seconds, prompt, output))
    except (OSError, ValueError, TypeError, AttributeError, csv.Error) as problem:
        raise LoadError(f"trace {path}, line {number}: cannot be read ({problem})") from None
    if not rows:
        raise LoadError(f"trace {path}: it has no rows with a prompt and an answer")
    stamps = [seconds for seconds, _, _ in rows if seconds is not None]
    if stamps and len(stamps) < len(rows):
        raise LoadError(
            f"trace {path}: {len(rows) - len(stamps)} of {len(rows)} rows have no stamp; "
            "give all of them one, or none"
        )
    rows.sort(key=lambda row: row[0] or 0.0)  # stable: as they stand without stamps
    return TraceRows(
        seconds=np.sort(np.array(stamps, dtype=np.float64)) - min(stamps, default=0.0),
        pairs=np.array([pair for _, *pair in rows], dtype=np.int64),
    )


def _rows(file: Path) -> Iterator[tuple[int, dict[str, Any] | str]]:
    """Each row of a CSV, or line of JSON, with the number of its line."""
    with file.open(encoding="utf-8-sig", newline="") as lines:
        is_csv = not lines.readline().lstrip().startswith("{")
        lines.seek(0)
        if is_csv:
            yield from enumerate(csv.DictReader(lines, skipinitialspace=True), start=2)
        else:
            yield from ((n, line) for n, line in enumerate(lines, start=1) if line.strip())


def _of_line(line: str) -> dict[str, Any]:
    row: dict[str, Any] = json.loads(line)
    row = row.get("response", {}).get("body", row)
    return {**row, **row.get("usage", {})}


def _seconds(stamp: Any) -> float:
    """A number, or a date with seven decimals (.NET ticks), which are more than Python reads."""
    if isinstance(stamp, str) and ":" in stamp:
        moment = datetime.fromisoformat(re.sub(r"(\.\d{6})\d+", r"\1", stamp.strip()))
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    return float(stamp)

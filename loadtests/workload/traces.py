"""Recorded traffic from a file: stamps and lengths.

Known by their columns, whatever the file is called:

    Azure 2023 and 2024   CSV    TIMESTAMP, ContextTokens, GeneratedTokens
    BurstGPT              CSV    Timestamp, Model, Request tokens, Response tokens, ...
    ShareGPT lengths      CSV    num_prefill_tokens, num_decode_tokens (no stamps)
    Mooncake              JSONL  timestamp (ms), input_length, output_length
    one's own             JSONL  prompt_tokens, output_tokens, and optionally seconds
    OpenAI-style logs     JSONL  usage {prompt_tokens, completion_tokens}, and optionally created

Rows are sorted by stamp where there are stamps. Rows without a prompt or an answer are left out.
"""

from __future__ import annotations

import csv
import functools
import json
from collections.abc import Callable, Iterator
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

    def __len__(self) -> int:
        return len(self.pairs)


class _Row(NamedTuple):
    seconds: float | None
    prompt_tokens: int
    output_tokens: int


@functools.lru_cache(maxsize=4)
def load_trace(path: str) -> TraceRows:
    """Raises LoadError for a file that is missing, of no known kind, empty, or has a bad line."""
    file = Path(path)
    if not file.is_file():
        raise LoadError(f"trace {path}: there is no such file")
    rows: list[_Row] = []
    for number, row in enumerate(_rows(file), start=1):
        if row.prompt_tokens < 0 or row.output_tokens < 0:
            raise LoadError(
                f"trace {path}, row {number}: lengths must be 0 or more, "
                f"got {row.prompt_tokens} and {row.output_tokens}"
            )
        if row.prompt_tokens and row.output_tokens:
            rows.append(row)
    if not rows:
        raise LoadError(f"trace {path}: it has no rows with a prompt and an answer")
    stamps = [row.seconds for row in rows if row.seconds is not None]
    if stamps and len(stamps) < len(rows):
        raise LoadError(
            f"trace {path}: {len(rows) - len(stamps)} of {len(rows)} rows have no stamp; "
            "give all of them one, or none"
        )
    if stamps:
        rows.sort(key=lambda row: row.seconds or 0.0)
    return TraceRows(
        seconds=np.sort(np.array(stamps, dtype=np.float64)) - min(stamps, default=0.0),
        pairs=np.array([(row.prompt_tokens, row.output_tokens) for row in rows], dtype=np.int64),
    )


def _rows(file: Path) -> Iterator[_Row]:
    with file.open(encoding="utf-8-sig", newline="") as lines:
        first = lines.readline()
        lines.seek(0)
        if first.lstrip().startswith("{"):
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield _read(file, number, _json_row, line)
            return
        reader = csv.DictReader(lines)
        columns = frozenset(name.strip() for name in reader.fieldnames or ())
        kind = next((read for needed, read in _CSV_KINDS.items() if set(needed) <= columns), None)
        if kind is None:
            known = "; ".join(", ".join(needed) for needed in _CSV_KINDS)
            raise LoadError(
                f"trace {file}: columns {', '.join(sorted(columns)) or 'none'} are of no known "
                f"kind; known are: {known}"
            )
        for number, cells in enumerate(reader, start=2):
            yield _read(file, number, kind, cells)


def _read(file: Path, number: int, read: Callable[[Any], _Row], line: Any) -> _Row:
    try:
        return read(line)
    except (ValueError, TypeError, KeyError, AttributeError) as problem:
        raise LoadError(
            f"trace {file}, line {number}: cannot be read ({type(problem).__name__}: {problem})"
        ) from None


def _azure(cells: dict[str, str]) -> _Row:
    # Seven decimals (.NET ticks) are more than Python reads; an offset such as +00:00 may follow.
    whole, _, rest = cells["TIMESTAMP"].strip().partition(".")
    digits = rest[: len(rest) - len(rest.lstrip("0123456789"))]
    moment = datetime.fromisoformat(whole + rest[len(digits) :])
    start = (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    seconds = start + float(f"0.{digits or 0}")
    return _Row(seconds, int(cells["ContextTokens"]), int(cells["GeneratedTokens"]))


def _burstgpt(cells: dict[str, str]) -> _Row:
    prompt, output = float(cells["Request tokens"]), float(cells["Response tokens"])
    return _Row(float(cells["Timestamp"]), int(prompt), int(output))


def _sharegpt(cells: dict[str, str]) -> _Row:
    prompt, output = float(cells["num_prefill_tokens"]), float(cells["num_decode_tokens"])
    return _Row(None, int(prompt), int(output))


_CSV_KINDS: dict[tuple[str, ...], Callable[[dict[str, str]], _Row]] = {
    ("TIMESTAMP", "ContextTokens", "GeneratedTokens"): _azure,
    ("Timestamp", "Request tokens", "Response tokens"): _burstgpt,
    ("num_prefill_tokens", "num_decode_tokens"): _sharegpt,
}


def _json_row(line: str) -> _Row:
    row = json.loads(line)
    if "input_length" in row:
        milliseconds = _number(row.get("timestamp"))
        return _Row(
            None if milliseconds is None else milliseconds / 1e3,
            int(row["input_length"]),
            int(row["output_length"]),
        )
    body = row.get("response", {}).get("body", {})
    usage = row.get("usage") or body.get("usage")
    if usage is not None:
        created = _number(row.get("created", body.get("created")))
        return _Row(created, int(usage["prompt_tokens"]), int(usage["completion_tokens"]))
    return _Row(_number(row.get("seconds")), int(row["prompt_tokens"]), int(row["output_tokens"]))


def _number(value: Any) -> float | None:
    return None if value is None else float(value)

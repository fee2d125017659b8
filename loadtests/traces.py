"""Recorded traffic from a file: stamps, lengths and, where there are any, block hashes that say which prompts start alike.

Known by their columns, whatever the file is called:

    Azure 2023 and 2024   CSV    TIMESTAMP, ContextTokens, GeneratedTokens
    BurstGPT              CSV    Timestamp, Model, Request tokens, Response tokens, ... (failed rows of 0 answer tokens are left out)
    ShareGPT lengths      CSV    num_prefill_tokens, num_decode_tokens (no stamps)
    Mooncake              JSONL  timestamp (ms), input_length, output_length, hash_ids (blocks of 512 tokens)
    one's own             JSONL  prompt_tokens, output_tokens, and optionally seconds
    OpenAI-style logs     JSONL  usage {prompt_tokens, completion_tokens}, and optionally created (Unix seconds)

Rows keep the file's order, sorted by stamp where there are stamps. A line that cannot be read is an error that names file and line.
"""

from __future__ import annotations

import csv
import functools
import json
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from loadtests.errors import LoadError

MOONCAKE_BLOCK_TOKENS = 512


class TraceRows(msgspec.Struct, frozen=True):
    """n requests. `seconds` start at 0 and ascend; empty where the file has no stamps. `blocks` is empty or has n entries."""

    seconds: npt.NDArray[np.float64]
    prompt_tokens: npt.NDArray[np.int64]
    output_tokens: npt.NDArray[np.int64]
    blocks: list[tuple[int, ...]] = []
    block_tokens: int = 0

    def __len__(self) -> int:
        return len(self.prompt_tokens)


Row = tuple[float | None, int, int, tuple[int, ...]]


@functools.lru_cache(maxsize=4)
def load_trace(path: str) -> TraceRows:
    """The rows of a trace file. Raises LoadError when it is not there, of no known kind, empty, or broken in a line."""
    file = Path(path)
    if not file.is_file():
        raise LoadError(f"trace {path}: there is no such file")
    rows: list[Row] = []
    for number, row in enumerate(_rows(file), start=1):
        if row[1] < 0 or row[2] < 0:
            raise LoadError(f"trace {path}, row {number}: lengths must be 0 or more, got {row[1]} and {row[2]}")
        if row[1] and row[2]:  # a request without a prompt or an answer cannot be asked again
            rows.append(row)
    if not rows:
        raise LoadError(f"trace {path}: it has no rows with a prompt and an answer")
    stamps = [row[0] for row in rows if row[0] is not None]
    if stamps and len(stamps) < len(rows):
        raise LoadError(f"trace {path}: {len(rows) - len(stamps)} of {len(rows)} rows have no stamp; give all of them one, or none")
    if stamps:
        rows.sort(key=lambda row: row[0] or 0.0)
    has_blocks = any(row[3] for row in rows)
    return TraceRows(
        seconds=np.array([(row[0] or 0.0) for row in rows], dtype=np.float64) - min(stamps) if stamps else np.empty(0),
        prompt_tokens=np.array([row[1] for row in rows], dtype=np.int64),
        output_tokens=np.array([row[2] for row in rows], dtype=np.int64),
        blocks=[row[3] for row in rows] if has_blocks else [],
        block_tokens=MOONCAKE_BLOCK_TOKENS if has_blocks else 0,
    )


def _rows(file: Path) -> Iterator[Row]:
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
            raise LoadError(f"trace {file}: columns {', '.join(sorted(columns)) or 'none'} are of no known kind; known are: {known}")
        for number, cells in enumerate(reader, start=2):
            yield _read(file, number, kind, cells)


def _read(file: Path, number: int, read: Callable[[Any], Row], line: Any) -> Row:
    try:
        return read(line)
    except (ValueError, TypeError, KeyError, AttributeError) as problem:
        raise LoadError(f"trace {file}, line {number}: cannot be read ({type(problem).__name__}: {problem})") from None


def _azure(cells: dict[str, str]) -> Row:
    # Seven decimals (.NET ticks) are one more than Python reads; an offset such as +00:00 may follow them.
    stamp = cells["TIMESTAMP"].strip()
    whole, _, rest = stamp.partition(".")
    digits = rest[: len(rest) - len(rest.lstrip("0123456789"))]
    moment = datetime.fromisoformat(whole + rest[len(digits) :])
    start = (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    return start + (float(f"0.{digits}") if digits else 0.0), int(cells["ContextTokens"]), int(cells["GeneratedTokens"]), ()


def _burstgpt(cells: dict[str, str]) -> Row:
    return float(cells["Timestamp"]), int(float(cells["Request tokens"])), int(float(cells["Response tokens"])), ()


def _sharegpt(cells: dict[str, str]) -> Row:
    return None, int(float(cells["num_prefill_tokens"])), int(float(cells["num_decode_tokens"])), ()


_CSV_KINDS: dict[tuple[str, ...], Callable[[dict[str, str]], Row]] = {
    ("TIMESTAMP", "ContextTokens", "GeneratedTokens"): _azure,
    ("Timestamp", "Request tokens", "Response tokens"): _burstgpt,
    ("num_prefill_tokens", "num_decode_tokens"): _sharegpt,
}


def _json_row(line: str) -> Row:
    row = json.loads(line)
    if "input_length" in row:
        stamp = row.get("timestamp")
        blocks = tuple(int(block) for block in row.get("hash_ids", ()))
        return (None if stamp is None else float(stamp) / 1e3), int(row["input_length"]), int(row["output_length"]), blocks
    usage = row.get("usage") or row.get("response", {}).get("body", {}).get("usage")
    if usage is not None:
        created = row.get("created", row.get("response", {}).get("body", {}).get("created"))
        return (None if created is None else float(created)), int(usage["prompt_tokens"]), int(usage["completion_tokens"]), ()
    seconds = row.get("seconds")
    return (None if seconds is None else float(seconds)), int(row["prompt_tokens"]), int(row["output_tokens"]), ()

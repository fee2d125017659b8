"""The formats in which public traces are published, recognized by their content.

- CSV with a header: the Azure LLM inference traces, BurstGPT, and the lengths of Vidur.
- JSON Lines with input_length: Mooncake, whose hash_ids name shared parts of prompts.
- JSON Lines with prompt: the custom dataset of `vllm bench serve`.
- One JSON list: ShareGPT. As vLLM's benchmark does, the first prompt and its answer are read.

Texts are not sent; only their lengths are kept, as CHARACTERS_PER_TOKEN estimates them.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec

from crossover.serving.workload.trace_row import TraceRow

CHARACTERS_PER_TOKEN = 4.0  # of English text
CUSTOM_OUTPUT_TOKENS = 256  # of vLLM's custom dataset, if a line has none: its own default
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
# Columns of CSV files, in lower case.
_PROMPT_COLUMNS = ("contexttokens", "request tokens", "num_prefill_tokens", "prompt_tokens")
_OUTPUT_COLUMNS = ("generatedtokens", "response tokens", "num_decode_tokens", "output_tokens")
_TIME_COLUMNS = ("timestamp", "arrived_at", "seconds")

LineReader = Callable[[bytes], Sequence[TraceRow]]  # line -> its requests


class _MooncakeLine(msgspec.Struct):
    timestamp: float  # milliseconds
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...] = ()


class _CustomLine(msgspec.Struct):
    prompt: str
    output_tokens: int | None = None


class _Message(msgspec.Struct):
    value: str = ""


class _Conversation(msgspec.Struct):
    conversations: list[_Message] = []


def reader_of(lines: Sequence[bytes]) -> LineReader:
    """Return the function that reads a line of a file with these lines. Raises ValueError."""
    first = next((line for line in lines if line.strip(_BYTE_ORDER_MARK + b" \t")), b"")
    first = first.removeprefix(_BYTE_ORDER_MARK).strip()
    if first.startswith(b"["):
        return _ListReader(b"\n".join(lines).removeprefix(_BYTE_ORDER_MARK))
    if not first.startswith(b"{"):
        return _CsvReader(first.decode()) if b"," in first else _own_line
    try:
        keys: Any = msgspec.json.decode(first)
    except msgspec.DecodeError:
        keys = {}
    if "prompt_tokens" not in keys and "input_length" in keys:
        return _mooncake_line
    if "prompt_tokens" not in keys and "prompt" in keys:
        return _custom_line
    return _own_line


def _own_line(line: bytes) -> Sequence[TraceRow]:
    return (msgspec.json.decode(line, type=TraceRow),)


def _mooncake_line(line: bytes) -> Sequence[TraceRow]:
    read = msgspec.json.decode(line, type=_MooncakeLine)
    seconds = read.timestamp / 1e3
    return (_row(read.input_length, read.output_length, seconds, read.hash_ids),)


def _custom_line(line: bytes) -> Sequence[TraceRow]:
    read = msgspec.json.decode(line, type=_CustomLine)
    output_tokens = CUSTOM_OUTPUT_TOKENS if read.output_tokens is None else read.output_tokens
    return (_row(_tokens(read.prompt), output_tokens),)


class _ListReader:
    """Reads all requests of a JSON list with its first line."""

    def __init__(self, text: bytes) -> None:
        self._rows = list(self._rows_of(text))

    def __call__(self, line: bytes) -> Sequence[TraceRow]:
        rows, self._rows = self._rows, []
        return rows

    def _rows_of(self, text: bytes) -> Iterator[TraceRow]:
        for item in msgspec.json.decode(text, type=list[_Conversation]):
            if len(item.conversations) >= 2:
                prompt, answer = item.conversations[:2]
                yield _row(_tokens(prompt.value), _tokens(answer.value))


class _CsvReader:
    """Reads a line of a CSV file. Raises ValueError if the header has no lengths."""

    def __init__(self, header: str) -> None:
        names = [name.strip().lower() for name in next(csv.reader([header]))]
        prompt, output = _column(names, _PROMPT_COLUMNS), _column(names, _OUTPUT_COLUMNS)
        if prompt is None or output is None:
            raise ValueError(
                f"The header {header[:200]!r} has no known columns of prompt and output tokens. "
                "Name them prompt_tokens and output_tokens."
            )
        self._prompt, self._output = prompt, output
        self._time = _column(names, _TIME_COLUMNS)
        self._is_header = True

    def __call__(self, line: bytes) -> Sequence[TraceRow]:
        if self._is_header:
            self._is_header = False
            return ()
        fields = next(csv.reader([line.decode()]))
        try:
            prompt, output = float(fields[self._prompt]), float(fields[self._output])
            seconds = None if self._time is None else _seconds(fields[self._time])
        except IndexError:
            raise ValueError(f"The line has only {len(fields)} columns.") from None
        return (_row(prompt, output, seconds),)


def _row(
    prompt_tokens: float,
    output_tokens: float,
    seconds: float | None = None,
    hash_ids: tuple[int, ...] = (),
) -> TraceRow:
    """Return a request, with the bounds of Crossover's own format. Raises ValidationError."""
    fields = {
        "prompt_tokens": prompt_tokens,
        "output_tokens": output_tokens,
        "seconds": seconds,
        "hash_ids": hash_ids,
    }
    return msgspec.convert(fields, TraceRow)


def _column(names: Sequence[str], known_names: Sequence[str]) -> int | None:
    return next((names.index(name) for name in known_names if name in names), None)


def _seconds(text: str) -> float:
    """Return a time that is given in seconds or as a date. Raises ValueError."""
    try:
        seconds = float(text)
    except ValueError:
        moment = datetime.fromisoformat(text.strip())
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    if not math.isfinite(seconds):
        raise ValueError(f"The time {text!r} is not finite.")
    return seconds


def _tokens(text: str) -> int:
    """Return the estimated tokens of a text."""
    return round(len(text) / CHARACTERS_PER_TOKEN)

"""Files with a record a line: written line by line, read whichever lines are broken.

appender = Appender(Path("requests.jsonl"))
appender.append(record)
read_lines(Path("requests.jsonl"), RequestRecord).records
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec

from loadtests.errors import BadRunFolder

_PASSWORD = re.compile(rb"://[^/@\s\"\\]+@")
_CONTROL = re.compile(
    rb"\\u00(?:0[0-8bcef]|1[0-9a-f]|7f|[89][0-9a-f])|\x7f|\xc2[\x80-\x9f]", re.IGNORECASE
)
_MARKS = (b"\\u00", b"\x7f", b"\xc2")

T = TypeVar("T")


class Read(msgspec.Struct, Generic[T], frozen=True):
    """What a file of records holds; `dropped_bytes` is the length of a cut-off last line.

    `broken_lines` are numbers (1..) of other lines that are no record and are left out.
    """

    records: list[T]
    dropped_bytes: int = 0
    broken_lines: tuple[int, ...] = ()


class Appender(Generic[T]):
    """Appends records to one file, each as one line in one write()."""

    def __init__(self, path: Path) -> None:
        self._encoder = msgspec.json.Encoder()
        self._path = path
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        self._file = os.open(path, flags, 0o600)
        self._is_torn: bool | None = None  # the last line is cut off; None: to be looked at

    def append(self, record: T) -> None:
        """Raises BadRunFolder where the disk is full; the records before are whole."""
        if self._is_torn is None:
            size = os.fstat(self._file).st_size
            self._is_torn = size > 0 and os.pread(self._file, 1, size - 1) != b"\n"
        line = b"\n" * self._is_torn + self._encoder.encode(record) + b"\n"
        try:
            self._is_torn = os.write(self._file, line) != len(line)
        except OSError as problem:
            raise BadRunFolder(f"{self._path} cannot be written: {problem.strerror}") from problem
        if self._is_torn:
            raise BadRunFolder(f"{self._path}: a record was written in part: is the disk full?")

    def sync(self) -> None:
        """Returns when all is on disk. Raises BadRunFolder."""
        try:
            os.fsync(self._file)
        except OSError as problem:
            raise BadRunFolder(f"{self._path} cannot be written: {problem.strerror}") from problem

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def cleaned(text: bytes) -> bytes:
    """JSON without passwords in URLs, and without what a terminal would obey."""
    if b"://" in text:
        text = _PASSWORD.sub(b"://***@", text)
    if any(mark in text for mark in _MARKS):  # hardly ever, and the expression takes time
        text = _CONTROL.sub(rb"\\ufffd", text)
    return text


def read_plain(path: Path) -> bytes:
    """The whole file. Raises OSError; BadRunFolder for a pipe or device, which may have no end."""
    if path.exists() and not path.is_file():
        raise BadRunFolder(f"{path} is no plain file")
    return path.read_bytes()


def read_lines(path: Path, kind: Any) -> Read[Any]:
    """One record of `kind` a line; a missing file is empty. Raises BadRunFolder."""
    decode = msgspec.json.Decoder(kind).decode
    return read_as(path, lambda line: decode(cleaned(line)))


def read_as(path: Path, record_of: Callable[[bytes], T]) -> Read[T]:
    """As read_lines; `record_of` raises msgspec.MsgspecError for a line that is no record."""
    try:
        data = read_plain(path)
    except FileNotFoundError:
        return Read([])
    except OSError as problem:
        raise BadRunFolder(f"{path} cannot be read: {problem.strerror}") from problem
    whole, _, rest = data.rpartition(b"\n")
    records: list[T] = []
    broken: list[int] = []
    for number, line in enumerate(whole.split(b"\n") if whole else [], 1):
        try:
            records.append(record_of(line))
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            broken.append(number)
    return Read(records, len(rest), tuple(broken))

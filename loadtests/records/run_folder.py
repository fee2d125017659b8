"""The folder of a run. It is written while the run goes on, so it can be read at any time.

    runs/<id>/manifest.json    RunManifest, written once, atomically
    runs/<id>/requests.jsonl   one RequestRecord per line; may be compressed as requests.jsonl.xz
    runs/<id>/samples.jsonl    one ResourceSample per line
    runs/<id>/events.jsonl     one Event per line: the journal
    runs/<id>/logs/            output of servers and load generators; never read back

    run = read_records(folder)
    for level in levels_of(run): ...           # crossover.loadtests.levels.level_columns

Each line is written by one write() to a file opened with O_APPEND. So a killed writer or a full
disk leaves at most one incomplete line, and the next record begins a new line. Readers leave out
lines that are not records, and report that. Requests of a level without a level_finished event stay
in the file and are not counted. Only its owner may read the folder, since it contains prompts and
addresses.
"""

from __future__ import annotations

import lzma
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec

from crossover.loadtests.errors import BadRunFolder
from crossover.loadtests.records.file_lock import take_lock
from crossover.loadtests.records.journal_events import (
    FORMAT_VERSION,
    AnyEvent,
    E,
    Event,
    LevelFinished,
    LevelStarted,
    of_kind,
)
from crossover.loadtests.records.request_record import RequestRecord
from crossover.loadtests.records.resource_sample import ResourceSample
from crossover.models.weights.weights_manifest import write_atomically

MAX_NUMBER = 1e15  # of the floats in a run, above times, bytes and rates
MANIFEST = "manifest.json"
REQUESTS = "requests.jsonl"
SAMPLES = "samples.jsonl"
EVENTS = "events.jsonl"
LOCK = ".lock"
COMPRESSED = ".xz"  # suffix of a compressed file of records

# Control characters that a terminal would obey, as they are or escaped in JSON.
_CONTROL = re.compile(
    rb"\\u00(?:0[0-8bcef]|1[0-9a-f]|7f|[89][0-9a-f])|\x7f|\xc2[\x80-\x9f]", re.IGNORECASE
)
T = TypeVar("T")


class RunManifest(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that is needed to understand a run and to repeat it; written when it starts."""

    format_version: int
    run_id: str
    created: str  # ISO 8601, UTC
    crossover_version: str
    command: list[str]
    campaign: dict[str, Any]  # the campaign as read, including defaults
    campaign_text: str  # the campaign file itself
    cells: list[dict[str, Any]]
    server_facts: dict[str, Any]  # HardwareFacts of the machine that serves, or the endpoint's URL
    client_facts: dict[str, Any]
    versions: dict[str, str]


class RunRecords:
    """The records of a run. Requests are read from the file each time, since there may be many."""

    def __init__(self, folder: Path) -> None:
        """Raises BadRunFolder."""
        self.folder = folder
        self.manifest = read_run_manifest(folder)
        self._broken: dict[str, list[int]] = {}  # file -> numbers (1..) of lines that are no record
        self.events: list[Event] = list(self._read(EVENTS, AnyEvent))
        self.samples: list[ResourceSample] = list(self._read(SAMPLES, ResourceSample))
        # The levels that were started, and those of them that were finished: name -> event.
        started_events = of_kind(self.events, LevelStarted)
        self.started_levels = {event.level: event for event in started_events}
        finished_events = of_kind(self.events, LevelFinished)
        self.finished_levels = {
            event.level: event for event in finished_events if event.level in self.started_levels
        }

    def requests(self) -> Iterator[RequestRecord]:
        """Yield all requests in the order in which they ended, including those of abandoned
        levels."""
        return self._read(REQUESTS, RequestRecord)

    def damage(self) -> list[str]:
        """Return a phrase for each file that was read and has lines that are not records."""
        return [
            f"{len(lines)} of the lines of {name} (the first is line {lines[0]})"
            for name, lines in self._broken.items()
            if lines
        ]

    def _read(self, name: str, kind: Any) -> Iterator[Any]:
        """Yield the record of type `kind` in each line of a file; a missing file has none. Raises
        BadRunFolder."""
        decode = msgspec.json.Decoder(kind).decode
        broken_lines = self._broken[name] = list[int]()
        path = self.folder / name
        compressed = path.with_name(f"{name}{COMPRESSED}")
        try:
            check_plain(path)
            check_plain(compressed)
            is_compressed = not path.exists() and compressed.exists()
            with lzma.open(compressed) if is_compressed else open(path, "rb") as file:
                for number, line in enumerate(file, 1):
                    try:
                        record = decode(cleaned(line))
                        if kind is not RequestRecord:
                            check_numbers(msgspec.to_builtins(record))
                    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
                        broken_lines.append(number)
                        continue
                    yield record
        except FileNotFoundError:
            return
        except OSError as problem:
            raise BadRunFolder(f"{path} cannot be read: {problem.strerror}") from None
        except (lzma.LZMAError, EOFError) as problem:
            raise BadRunFolder(f"{compressed} cannot be decompressed: {problem}.") from None


read_records = RunRecords


class RunFolder(RunRecords):
    """The folder of a run, opened for writing. Only one process at a time can open it so."""

    def __init__(self, folder: Path) -> None:
        """Open an existing run to continue it. Raises BadRunFolder, and writes nothing if there is
        no run in the folder."""
        read_run_manifest(folder)
        for path in (*folder.glob("*"), *folder.glob("logs/*")):
            if path.is_symlink():  # in another user's run, it could point outside the folder
                raise BadRunFolder(f"{path} is a symbolic link, but a run needs its own files")
        try:
            lock = take_lock(folder / LOCK, f"process {os.getpid()}")
            if isinstance(lock, str):
                raise BadRunFolder(f"{folder} is in use by {lock}. Wait for it, or end it")
            self._lock = open(lock)  # closed once, at the end
            self._events: Appender[Event] = Appender(folder / EVENTS)
            self._samples: Appender[ResourceSample] = Appender(folder / SAMPLES)
            self._requests: Appender[RequestRecord] = Appender(folder / REQUESTS)
        except OSError as problem:
            raise BadRunFolder(f"{folder} cannot be written: {problem.strerror}") from problem
        self.append_sample = self._samples.append
        self.append_request = self._requests.append
        super().__init__(folder)

    @classmethod
    def create(cls, folder: Path, manifest: RunManifest) -> RunFolder:
        """Create the folder of a new run. Raises BadRunFolder if it has a run already or cannot be
        written."""
        if (folder / MANIFEST).exists():
            raise BadRunFolder(f"{folder} has a run already. Resume it, or choose another folder")
        text = msgspec.json.format(msgspec.json.encode(manifest), indent=2) + b"\n"
        try:
            (folder / "logs").mkdir(parents=True, exist_ok=True)
            folder.chmod(0o700)
            write_atomically(folder / MANIFEST, text)
        except OSError as problem:
            raise BadRunFolder(f"{folder} cannot be written: {problem.strerror}") from problem
        return cls(folder)

    def append_event(self, event: E) -> E:
        """Write an event to the journal, append it to `events`, and return it."""
        self._events.append(event)
        self.events.append(event)
        return event

    def finish_level(self, level: LevelFinished) -> None:
        """Write that a level has finished. Its requests and samples have been written before.

        Returns when everything is on disk, so that a finished level survives a power failure.
        """
        self._requests.sync()
        self._samples.sync()
        self.append_event(level)
        self._events.sync()

    def close(self) -> None:
        for file in (self._events, self._samples, self._requests, self._lock):
            file.close()

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Appender(Generic[T]):
    """Appends records to a file, each as one line by one write()."""

    def __init__(self, path: Path) -> None:
        """Raises OSError."""
        self._encode = msgspec.json.Encoder().encode
        self._file = open(
            path, "a+b", buffering=0, opener=lambda name, flags: os.open(name, flags, 0o600)
        )
        size = self._file.seek(0, os.SEEK_END)
        last_byte = os.pread(self._file.fileno(), 1, max(0, size - 1))
        self._is_torn = last_byte not in (b"", b"\n")  # the last line is incomplete
        self.close = self._file.close

    def append(self, record: T) -> None:
        """Write a record. Raises BadRunFolder, for example if the disk is full; earlier records are
        then still complete."""
        line = b"\n" * self._is_torn + self._encode(record) + b"\n"
        try:
            self._is_torn = self._file.write(line) != len(line)
        except OSError as problem:
            message = f"{self._file.name} cannot be written: {problem.strerror}"
            raise BadRunFolder(message) from problem
        if self._is_torn:
            message = f"{self._file.name}: only part of a record was written"
            raise BadRunFolder(f"{message}. The disk may be full")

    def sync(self) -> None:
        """Return when all records are on disk. Raises BadRunFolder."""
        try:
            os.fsync(self._file)
        except OSError as problem:
            message = f"{self._file.name} cannot be written: {problem.strerror}"
            raise BadRunFolder(message) from problem


def cleaned(text: bytes) -> bytes:
    """Return JSON with its control characters replaced, so that none reaches a terminal.

    A terminal would obey escape sequences in the words of a server that were recorded.
    """
    # The regular expression is slow, and hardly any line has such a character.
    is_suspect = b"\\u00" in text or b"\x7f" in text or b"\xc2" in text
    return _CONTROL.sub(rb"\\ufffd", text) if is_suspect else text


def read_run_manifest(folder: Path) -> RunManifest:
    """Return the manifest of a run. Raises BadRunFolder."""
    path = folder / MANIFEST
    try:
        check_plain(path)
        raw = msgspec.json.decode(cleaned(path.read_bytes()))
        if (version := raw["format_version"]) != FORMAT_VERSION:
            other = "newer" if version > FORMAT_VERSION else "older"
            raise BadRunFolder(
                f"{path} has format_version {version}. This version of Crossover reads "
                f"{FORMAT_VERSION}: use the {other} one that wrote it."
            )
        check_numbers(raw)
        return msgspec.convert(raw, RunManifest)
    except OSError as problem:
        raise BadRunFolder(
            f"{folder} is not a run folder: {path.name} cannot be read ({problem.strerror})"
        ) from problem
    except (msgspec.MsgspecError, ValueError, RecursionError, LookupError, TypeError) as problem:
        raise BadRunFolder(f"{path} is not a manifest: {problem}") from problem


def check_numbers(value: Any) -> None:
    """Raise msgspec.ValidationError for a number that no run has, and with which formulas would
    fail. `value`: JSON as msgspec decodes it."""
    if isinstance(value, float) and not abs(value) <= MAX_NUMBER:
        raise msgspec.ValidationError(f"{value:g} is out of range")
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, list):
        return
    for item in value:
        check_numbers(item)


def check_plain(path: Path) -> None:
    """Raise BadRunFolder for a pipe or a device, whose content may have no end."""
    if path.exists() and not path.is_file():
        raise BadRunFolder(f"{path} is not a regular file")

"""The folder of a run, written as things happen: what is on disk is a run, perhaps a short one.

    runs/<id>/manifest.json    RunManifest, written once, atomically
    runs/<id>/requests.jsonl   one RequestRecord a line
    runs/<id>/samples.jsonl    one ResourceSample a line
    runs/<id>/events.jsonl     one Event a line: the journal
    runs/<id>/logs/            output of servers and load generators; never read back

    run = read_records(folder)
    for level in levels_of(run): ...           # loadtests.analysis.level

A line is written by one write() to a file opened with O_APPEND: a killed writer, or a full disk,
leaves at most one cut-off line. Readers leave out a line that is no record, and say so. Requests of
a level without a level_finished event stay in the file and are not counted. Nobody else may read
the folder: prompts and addresses are in it.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import re
import shutil
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import IO, Any, BinaryIO, Generic, TypeVar

import msgspec

from loadtests.errors import BadRunFolder
from loadtests.records.request_record import RequestRecord
from loadtests.records.resource_sample import ResourceSample
from loadtests.records.run_journal import (
    FORMAT_VERSION,
    AnyEvent,
    E,
    Event,
    LevelFinished,
    LevelStarted,
    of_kind,
)
from models import formatting
from models.manifest import write_atomically

LEAST_FREE_BYTES = 64 << 20  # of disk, for a level to begin
MANIFEST = "manifest.json"
REQUESTS = "requests.jsonl"
SAMPLES = "samples.jsonl"
EVENTS = "events.jsonl"
LOCK = ".lock"

_PASSWORD = re.compile(rb"://[^/@\s\"\\]+@")
_CONTROL = re.compile(
    rb"\\u00(?:0[0-8bcef]|1[0-9a-f]|7f|[89][0-9a-f])|\x7f|\xc2[\x80-\x9f]", re.IGNORECASE
)
_MARKS = (b"\\u00", b"\x7f", b"\xc2")

T = TypeVar("T")


class RunManifest(msgspec.Struct, frozen=True, kw_only=True):
    """Everything needed to know a run and to do it again; written when it starts."""

    format_version: int
    run_id: str
    created: str  # ISO 8601, UTC
    crossover_version: str
    git_commit: str | None
    command: list[str]
    campaign: dict[str, Any]  # the campaign as read, defaults filled in
    campaign_text: str  # the file itself
    cells: list[dict[str, Any]]
    server_facts: dict[str, Any]  # HardwareFacts of the machine that serves, or the endpoint's url
    client_facts: dict[str, Any]
    versions: dict[str, str]
    seed: int


class RunRecords:
    """A run folder, read. Requests are read anew each time: there may be very many."""

    def __init__(self, folder: Path) -> None:
        """Raises BadRunFolder."""
        self.folder = folder
        self.manifest = read_manifest(folder)
        # By file: bytes of a cut-off last line; numbers (1..) of other lines that are no record.
        self.dropped_bytes: dict[str, int] = {}
        self.broken_lines: dict[str, list[int]] = {}
        self.events: list[Event] = list(self._read(EVENTS, AnyEvent))
        self.samples: list[ResourceSample] = list(self._read(SAMPLES, ResourceSample))

    @cached_property
    def started_levels(self) -> dict[str, LevelStarted]:
        """All levels that were begun, by name, in order."""
        return {event.level: event for event in of_kind(self.events, LevelStarted)}

    @cached_property
    def finished_levels(self) -> dict[str, LevelFinished]:
        """The levels that were measured to their end, by name, in order."""
        begun = self.started_levels
        return {e.level: e for e in of_kind(self.events, LevelFinished) if e.level in begun}

    def requests(self) -> Iterator[RequestRecord]:
        """All on record, in the order they ended, those of abandoned levels included."""
        return self._read(REQUESTS, RequestRecord)

    def samples_of(self, level: str) -> list[ResourceSample]:
        """Of one level, in order of time."""
        return [sample for sample in self.samples if sample.level == level]

    def damage(self) -> list[str]:
        """What is left out of each file that was read, in words."""
        cut = [
            f"the cut-off last line of {name} ({count} bytes)"
            for name, count in self.dropped_bytes.items()
        ]
        broken = [
            f"{len(lines)} of the lines of {name} (the first is line {lines[0]})"
            for name, lines in self.broken_lines.items()
        ]
        return cut + broken

    def _read(self, name: str, kind: Any) -> Iterator[Any]:
        """One record of `kind` a line; a missing file is empty. Raises BadRunFolder."""
        decode = msgspec.json.Decoder(kind).decode
        broken: list[int] = []
        line = b"\n"
        try:
            with _opened(self.folder / name) as file:
                for number, line in enumerate(file, 1):
                    if not line.endswith(b"\n"):
                        break
                    try:
                        record = decode(cleaned(line))
                    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
                        broken.append(number)
                        continue
                    yield record
        except FileNotFoundError:
            return
        except OSError as problem:
            raise BadRunFolder(
                f"{self.folder / name} cannot be read: {problem.strerror}"
            ) from problem
        if not line.endswith(b"\n"):
            self.dropped_bytes[name] = len(line)
        if broken:
            self.broken_lines[name] = broken


read_records = RunRecords


class RunFolder:
    """The folder of one run, open for writing by this process alone: a second writer is refused."""

    def __init__(self, folder: Path, manifest: RunManifest) -> None:
        """Use `create` or `open_existing`. Raises BadRunFolder, OSError."""
        self.folder = folder
        self.manifest = manifest
        self.events: list[Event] = []  # the journal: what was read at first, and all since
        for path in (*folder.glob("*"), *folder.glob("logs/*")):
            if path.is_symlink():  # a stranger's run would have ours written into any file
                raise BadRunFolder(
                    f"{path} is a link: a run is written into its own files alone; put the file in "
                    "its place, or remove it"
                )
        self._lock = _take_lock(folder)
        self._events: Appender[Event] = Appender(folder / EVENTS)
        self._samples: Appender[ResourceSample] = Appender(folder / SAMPLES)
        self._requests: Appender[RequestRecord] = Appender(folder / REQUESTS)
        self.sample, self.request = self._samples.append, self._requests.append

    @classmethod
    def create(cls, folder: Path, manifest: RunManifest) -> RunFolder:
        """A new run. Raises BadRunFolder where there is one already, or nothing can be written."""
        if (folder / MANIFEST).exists():
            raise BadRunFolder(f"{folder} holds a run already; resume it, or choose another folder")
        text = msgspec.json.format(msgspec.json.encode(manifest), indent=2) + b"\n"
        try:
            (folder / "logs").mkdir(parents=True, exist_ok=True)
            folder.chmod(0o700)
            write_atomically(folder / MANIFEST, text)
            return cls(folder, manifest)
        except OSError as problem:
            raise BadRunFolder(f"{folder} cannot be written: {problem.strerror}") from problem

    @classmethod
    def open_existing(cls, folder: Path) -> tuple[RunFolder, RunRecords]:
        """A run to go on with, and what is on record; cut-off last lines are taken off first."""
        opened = cls(folder, read_manifest(folder))
        cut = {name: _cut_last_line(folder / name) for name in (REQUESTS, SAMPLES, EVENTS)}
        records = read_records(folder)
        records.dropped_bytes = {name: count for name, count in cut.items() if count}
        opened.events = list(records.events)
        return opened, records

    def event(self, event: E) -> E:
        """Writes one line of the journal."""
        self._events.append(event)
        self.events.append(event)
        return event

    def check_room(self) -> None:
        """Raises BadRunFolder where the disk is too full for a level to begin."""
        free = shutil.disk_usage(self.folder).free
        if free < LEAST_FREE_BYTES:
            raise BadRunFolder(
                f"{self.folder} has {formatting.size(free)} of disk free, and a level wants "
                f"{formatting.size(LEAST_FREE_BYTES)}: make room and resume"
            )

    def finish(self, level: LevelFinished) -> None:
        """Writes that a level has finished; its requests and samples are in their files already.

        Returns when all is on disk: a level that has finished survives a power cut.
        """
        self._requests.sync()
        self._samples.sync()
        self.event(level)
        self._events.sync()

    def close(self) -> None:
        for one in (self._events, self._samples, self._requests, self._lock):
            one.close()

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Appender(Generic[T]):
    """Appends records to one file, each as one line in one write(). Raises BadRunFolder."""

    def __init__(self, path: Path) -> None:
        self._encode = msgspec.json.Encoder().encode
        self._file = open(path, "ab", buffering=0, opener=_private)
        self._is_torn = False  # the last line is cut off
        self.close = self._file.close

    def append(self, record: T) -> None:
        """Where the disk is full, the records before are whole."""
        line = b"\n" * self._is_torn + self._encode(record) + b"\n"
        try:
            self._is_torn = self._file.write(line) != len(line)
        except OSError as problem:
            raise self._unwritable(problem) from problem
        if self._is_torn:
            raise BadRunFolder(f"{self._file.name}: a record was written in part: full disk?")

    def sync(self) -> None:
        """Returns when all is on disk."""
        try:
            os.fsync(self._file)
        except OSError as problem:
            raise self._unwritable(problem) from problem

    def _unwritable(self, problem: OSError) -> BadRunFolder:
        return BadRunFolder(f"{self._file.name} cannot be written: {problem.strerror}")


def cleaned(text: bytes) -> bytes:
    """JSON without passwords in URLs, and without what a terminal would obey."""
    if b"://" in text:
        text = _PASSWORD.sub(b"://***@", text)
    if any(mark in text for mark in _MARKS):  # hardly ever, and the expression takes time
        text = _CONTROL.sub(rb"\\ufffd", text)
    return text


def read_manifest(folder: Path) -> RunManifest:
    """The manifest of a run. Raises BadRunFolder."""
    path = folder / MANIFEST
    try:
        with _opened(path) as file:
            text = cleaned(file.read())
    except OSError as problem:
        raise BadRunFolder(
            f"{path.parent} holds no run: {path.name} cannot be read ({problem.strerror})"
        ) from problem
    try:
        version = msgspec.json.decode(text, type=_Versioned).format_version
        if version != FORMAT_VERSION:
            other = "a newer" if version > FORMAT_VERSION else "an older"
            raise BadRunFolder(
                f"{path} has format_version {version}; this crossover reads {FORMAT_VERSION}: "
                f"use {other} one"
            )
        return msgspec.json.decode(text, type=RunManifest)
    except (msgspec.MsgspecError, UnicodeDecodeError) as problem:
        raise BadRunFolder(f"{path} is no manifest: {problem}") from problem


class _Versioned(msgspec.Struct):
    format_version: int


def _opened(path: Path) -> BinaryIO:
    """Raises BadRunFolder for a pipe or device, which may have no end, and OSError."""
    if path.exists() and not path.is_file():
        raise BadRunFolder(f"{path} is no plain file")
    return open(path, "rb")


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _cut_last_line(path: Path) -> int:
    """Takes a line without an end off a file; its bytes."""
    size = path.stat().st_size
    if not size:
        return 0
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:
        whole = text.rfind(b"\n") + 1
    os.truncate(path, whole)
    return size - whole


def _take_lock(folder: Path) -> IO[str]:
    """A lock that ends with this process, however it ends."""
    try:
        lock = open(folder / LOCK, "a+", opener=_private)
    except OSError as problem:
        raise BadRunFolder(f"{folder} cannot be written to: {problem.strerror}") from problem
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        with lock:
            lock.seek(0)
            holder = lock.read(64).strip() or "unknown"
        raise BadRunFolder(
            f"{folder} is in use by process {holder}; wait for it, or end it"
        ) from None
    lock.truncate(0)
    lock.write(f"{os.getpid()}\n")
    lock.flush()
    return lock

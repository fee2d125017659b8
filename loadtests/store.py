"""One folder per run, written as things happen: what is on disk is always a good run, only perhaps a short one.

    runs/<id>/manifest.json    RunManifest, written once, atomically
    runs/<id>/requests.jsonl   one RequestRecord a line
    runs/<id>/samples.jsonl    one ResourceSample a line
    runs/<id>/events.jsonl     one Event a line: the journal
    runs/<id>/logs/            what servers and load generators printed; nothing reads it back
    runs/<id>/levels/          one JSON file per level and process: plans and outcomes on their way between runner and Locust

Lines leave whole, in one write() each or many together, on a file opened with O_APPEND, so several processes may write to one file and a
killed writer leaves at most one cut-off line, at the end. Readers drop that line and report it; a broken line anywhere else is an error.
Records of a level that has no `level_finished` event stay in the file and are counted by nobody (`measured_records`).
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec

from loadtests.errors import BadRunFolder
from loadtests.records import FORMAT_VERSION, Event, RequestRecord, ResourceSample, RunManifest

MANIFEST = "manifest.json"
REQUESTS = "requests.jsonl"
SAMPLES = "samples.jsonl"
EVENTS = "events.jsonl"
LOCK = ".lock"

T = TypeVar("T")


class LevelStarted(msgspec.Struct, frozen=True, kw_only=True):
    """The `detail` of a level_started event."""

    purpose: str  # "lone" (one request at a time), "search" or "load"
    rate_per_second: float | None  # open loop; None: closed loop
    concurrency: int | None  # closed loop; None: open loop
    arrivals: dict[str, Any]  # the arrival process, as loadtests.arrivals names it
    warmup_seconds: float  # requests due before this count for nothing
    window_seconds: float  # requests due in [warmup_seconds, warmup_seconds + window_seconds) count
    seed: int
    attempt: int  # 1..: how often this level was tried, this time included
    started_unix_seconds: float  # the moment that RequestRecord's times count from
    target: float | None = None  # share of good requests that the search asked for


class Read(msgspec.Struct, Generic[T], frozen=True):
    """What a file of records holds; `dropped_bytes` is the length of a cut-off last line, 0 where the file ends well."""

    records: list[T]
    dropped_bytes: int = 0


class Appender(Generic[T]):
    """Appends records to one file, each as one line in one write()."""

    def __init__(self, path: Path) -> None:
        self._encoder = msgspec.json.Encoder()
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)

    def append(self, record: T) -> None:
        line = self._encoder.encode(record) + b"\n"
        if os.write(self._file, line) != len(line):
            raise BadRunFolder("a record was written only in part: is the disk full?")

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


class Spool(Generic[T]):
    """An Appender for a process that must not wait for a disk: lines are made at once and written by somebody else, many in one write().

    `append` in the event loop, `flush` now and then from a thread; what is not written yet is lost with the process, at most one interval.
    """

    def __init__(self, path: Path) -> None:
        self._encode = msgspec.json.Encoder().encode
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self._lines: list[bytes] = []

    def append(self, record: T) -> None:
        self._lines.append(self._encode(record))

    def flush(self) -> None:
        """Writes what has gathered. Raises BadRunFolder where the disk took less."""
        if not self._lines:
            return
        lines, self._lines = self._lines, []
        lines.append(b"")
        data = b"\n".join(lines)
        if os.write(self._file, data) != len(data):
            raise BadRunFolder("records were written only in part: is the disk full?")

    def close(self) -> None:
        if self._file >= 0:
            self.flush()
            os.close(self._file)
            self._file = -1


class RunFolder:
    """The folder of one run, open for writing by this process alone: a second writer is refused.

    Load generators append to `requests.jsonl` on behalf of the one runner that holds the lock.
    """

    def __init__(self, folder: Path, manifest: RunManifest) -> None:
        """Use `create` or `open_existing`."""
        self.folder = folder
        self.manifest = manifest
        self._lock = _take_lock(folder)
        self._events: Appender[Event] = Appender(folder / EVENTS)
        self._samples: Appender[ResourceSample] = Appender(folder / SAMPLES)
        self._requests: Appender[RequestRecord] = Appender(folder / REQUESTS)

    @classmethod
    def create(cls, folder: Path, manifest: RunManifest) -> RunFolder:
        """A new run. Raises BadRunFolder where there is one already."""
        if (folder / MANIFEST).exists():
            raise BadRunFolder(f"{folder} holds a run already; resume it, or choose another folder")
        for name in ("logs", "levels"):
            (folder / name).mkdir(parents=True, exist_ok=True)
        write_atomically(folder / MANIFEST, msgspec.json.format(msgspec.json.encode(manifest), indent=2) + b"\n")
        return cls(folder, manifest)

    @classmethod
    def open_existing(cls, folder: Path) -> tuple[RunFolder, dict[str, int]]:
        """A run to go on with, and how many bytes of cut-off last lines were taken off which file."""
        opened = cls(folder, read_manifest(folder))
        return opened, {name: cut for name in (REQUESTS, SAMPLES, EVENTS) if (cut := _drop_cut_off_line(folder / name))}

    def event(self, kind: str, *, cell: str | None = None, level: str | None = None, detail: Any = None) -> Event:
        """Writes one line of the journal; `detail` may be a dict or a Struct."""
        event = Event(
            kind=kind, unix_seconds=time.time(), cell=cell, level=level, detail={} if detail is None else msgspec.to_builtins(detail)
        )
        self._events.append(event)
        return event

    def sample(self, sample: ResourceSample) -> None:
        self._samples.append(sample)

    def request(self, record: RequestRecord) -> None:
        self._requests.append(record)

    def close(self) -> None:
        for appender in (self._events, self._samples, self._requests):
            appender.close()
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_manifest(folder: Path) -> RunManifest:
    """The run's manifest. Raises BadRunFolder for a folder that holds no run, a broken manifest or a newer format."""
    path = folder / MANIFEST
    try:
        text = path.read_bytes()
    except OSError as problem:
        raise BadRunFolder(f"{folder} holds no run: {path.name} cannot be read ({problem.strerror})") from problem
    try:
        version = msgspec.json.decode(text, type=_Versioned).format_version
        if version > FORMAT_VERSION:
            raise BadRunFolder(f"{path} has format_version {version}; this crossover reads up to {FORMAT_VERSION}: use a newer one")
        return msgspec.json.decode(text, type=RunManifest)
    except msgspec.MsgspecError as problem:
        raise BadRunFolder(f"{path} is no manifest: {problem}") from problem


class _Versioned(msgspec.Struct):
    format_version: int


def read_requests(folder: Path) -> Read[RequestRecord]:
    """All requests on record, in the order they ended, those of abandoned levels included."""
    return read_lines(folder / REQUESTS, RequestRecord)


def read_samples(folder: Path) -> Read[ResourceSample]:
    return read_lines(folder / SAMPLES, ResourceSample)


def read_events(folder: Path) -> Read[Event]:
    return read_lines(folder / EVENTS, Event)


def read_lines(path: Path, kind: type[T]) -> Read[T]:
    """One record a line. A file that is not there is empty. Raises BadRunFolder for a broken line that is not the cut-off last one."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return Read([])
    decoder = msgspec.json.Decoder(kind)
    whole, _, rest = data.rpartition(b"\n")
    records: list[T] = []
    for number, line in enumerate(whole.split(b"\n") if whole else [], 1):
        try:
            records.append(decoder.decode(line))
        except msgspec.MsgspecError as problem:
            raise BadRunFolder(f"{path} line {number} is broken: {problem}") from problem
    return Read(records, len(rest))


def completed_levels(events: Iterable[Event]) -> dict[str, Event]:
    """The levels that were measured to their end: name -> their level_finished event, in order."""
    return {event.level: event for event in events if event.kind == "level_finished" and event.level is not None}


def started_levels(events: Iterable[Event]) -> dict[str, Event]:
    """All levels that were ever begun: name -> their level_started event, in order."""
    return {event.level: event for event in events if event.kind == "level_started" and event.level is not None}


def measured_records(records: Iterable[RequestRecord], events: Iterable[Event]) -> list[RequestRecord]:
    """The records that numbers may be made of: those of completed levels."""
    complete = completed_levels(events)
    return [record for record in records if record.level in complete]


def write_atomically(path: Path, data: bytes) -> None:
    """The whole file or none of it, also after a power cut."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    with open(part, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(part, path)


def _drop_cut_off_line(path: Path) -> int:
    """Takes a cut-off last line off, so that the next record does not continue it; returns its length in bytes."""
    cut = read_tail_length(path)
    if cut:
        os.truncate(path, path.stat().st_size - cut)
    return cut


def read_tail_length(path: Path) -> int:
    """Bytes after the last newline; 0 for a file that ends well or is not there."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return 0
    return len(data) - (data.rfind(b"\n") + 1)


def _take_lock(folder: Path) -> int:
    """A lock that ends with this process, however it ends."""
    try:
        lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as problem:
        raise BadRunFolder(f"{folder} cannot be written to: {problem.strerror}") from problem
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        holder = os.pread(lock, 64, 0).decode(errors="replace").strip()
        os.close(lock)
        raise BadRunFolder(f"{folder} is in use by process {holder or 'unknown'}; wait for it, or end it") from None
    os.truncate(lock, 0)
    os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
    return lock

"""The folder of a run, written as things happen: what is on disk is a run, perhaps a short one.

    runs/<id>/manifest.json    RunManifest, written once, atomically
    runs/<id>/requests.jsonl   one RequestRecord a line
    runs/<id>/samples.jsonl    one ResourceSample a line
    runs/<id>/events.jsonl     one Event a line: the journal
    runs/<id>/logs/            output of servers and load generators; never read back

    run = read_records(folder)
    for level in run.levels(): level.started, level.finished, level.requests, level.samples

A line is written by one write() to a file opened with O_APPEND: a killed writer, or a full disk,
leaves at most one cut-off line, and whoever writes next begins a new one. Readers leave out a line
that is no record, and say so. Requests of a level without a level_finished event stay in the file
and are not counted. Nobody else may read the folder: prompts and addresses are in it.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from loadtests.errors import BadRunFolder
from loadtests.records.events import (
    AnyEvent,
    E,
    Event,
    LevelFinished,
    LevelStarted,
    completed_levels,
    started_levels,
)
from loadtests.records.lines import Appender, Read, cleaned, read_as, read_lines, read_plain
from loadtests.records.schema import (
    FORMAT_VERSION,
    RequestRecord,
    ResourceSample,
    RunManifest,
)
from models import formatting
from models.manifest import write_atomically

LEAST_FREE_BYTES = 64 << 20  # of disk, for a level to begin
MANIFEST = "manifest.json"
REQUESTS = "requests.jsonl"
SAMPLES = "samples.jsonl"
EVENTS = "events.jsonl"
LOCK = ".lock"

_decode_event = msgspec.json.Decoder(AnyEvent).decode


class LevelRecords(msgspec.Struct, frozen=True):
    """A level that was measured to its end, with everything on record of it."""

    started: LevelStarted
    finished: LevelFinished
    requests: list[RequestRecord]
    samples: list[ResourceSample]

    @property
    def name(self) -> str:
        return self.started.level

    @property
    def cell(self) -> str:
        return self.started.cell

    @property
    def is_whole(self) -> bool:
        """No request is missing: no line of it is broken."""
        return len(self.requests) == self.finished.due


class RunFolder:
    """The folder of one run, open for writing by this process alone: a second writer is refused."""

    def __init__(self, folder: Path, manifest: RunManifest) -> None:
        """Use `create` or `open_existing`."""
        self.folder = folder
        self.manifest = manifest
        self.events: list[Event] = []  # the journal: what was read at first, and all since
        self.levels: list[LevelRecords] = []  # the finished ones
        self.broken_lines: dict[str, tuple[int, ...]] = {}  # as in RunRecords
        _check_no_links(folder)
        self._lock = _take_lock(folder)
        self._events: Appender[Event] = Appender(folder / EVENTS)
        self._samples: Appender[ResourceSample] = Appender(folder / SAMPLES)
        self._requests: Appender[RequestRecord] = Appender(folder / REQUESTS)

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
    def open_existing(cls, folder: Path) -> tuple[RunFolder, dict[str, int]]:
        """A run to go on with, and the bytes of cut-off last lines taken off, by file."""
        opened = cls(folder, read_manifest(folder))
        records = read_records(folder)
        for name, cut in records.dropped_bytes.items():
            os.truncate(folder / name, (folder / name).stat().st_size - cut)
        opened.events = records.events
        opened.levels = records.levels()
        opened.broken_lines = records.broken_lines
        return opened, records.dropped_bytes

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

    def finish(self, level: LevelRecords) -> None:
        """Writes that a level has finished; its requests and samples are in their files already.

        Returns when all is on disk: a level that has finished survives a power cut.
        """
        self._requests.sync()
        self._samples.sync()
        self.event(level.finished)
        self._events.sync()
        self.levels.append(level)

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


class RunRecords(msgspec.Struct, frozen=True):
    """A run folder as read; `dropped_bytes` and `broken_lines` as in Read, by file."""

    folder: Path
    manifest: RunManifest
    events: list[Event]
    requests: list[RequestRecord]
    samples: list[ResourceSample]
    dropped_bytes: dict[str, int] = {}
    broken_lines: dict[str, tuple[int, ...]] = {}

    def damage(self) -> list[str]:
        """What is left out of each file, in words."""
        cut = [
            f"the cut-off last line of {name} ({count} bytes)"
            for name, count in self.dropped_bytes.items()
        ]
        broken = [
            f"{len(lines)} of the lines of {name} (the first is line {lines[0]})"
            for name, lines in self.broken_lines.items()
        ]
        return cut + broken

    def levels(self) -> list[LevelRecords]:
        """The finished levels, in the order they were measured."""
        return join_levels(self.events, self.requests, self.samples)


def join_levels(
    events: Iterable[Event], requests: Iterable[RequestRecord], samples: Iterable[ResourceSample]
) -> list[LevelRecords]:
    """The finished levels with their requests and samples."""
    events = list(events)
    started = started_levels(events)
    levels = {
        name: LevelRecords(started[name], finished, [], [])
        for name, finished in completed_levels(events).items()
        if name in started
    }
    for record in requests:
        if record.level in levels:
            levels[record.level].requests.append(record)
    for sample in samples:
        if sample.level in levels:
            levels[sample.level].samples.append(sample)
    return list(levels.values())


def read_records(folder: Path) -> RunRecords:
    """All of a run folder. Raises BadRunFolder."""
    manifest = read_manifest(folder)
    events, requests, samples = read_events(folder), read_requests(folder), read_samples(folder)
    files: dict[str, Read[Any]] = {REQUESTS: requests, SAMPLES: samples, EVENTS: events}
    return RunRecords(
        folder,
        manifest,
        events.records,
        requests.records,
        samples.records,
        {name: read.dropped_bytes for name, read in files.items() if read.dropped_bytes},
        {name: read.broken_lines for name, read in files.items() if read.broken_lines},
    )


def read_manifest(folder: Path) -> RunManifest:
    """The manifest of a run. Raises BadRunFolder."""
    path = folder / MANIFEST
    try:
        text = cleaned(read_plain(path))
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
    """The journal."""
    return read_as(folder / EVENTS, lambda line: _decode_event(cleaned(line)))


def _check_no_links(folder: Path) -> None:
    """A stranger's run could have the records and logs of this one written into any file."""
    for path in (*folder.glob("*"), *folder.glob("logs/*")):
        if path.is_symlink():
            raise BadRunFolder(
                f"{path} is a link: a run is written into its own files alone; put the file in its "
                "place, or remove it"
            )


def _take_lock(folder: Path) -> int:
    """A lock that ends with this process, however it ends."""
    try:
        lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as problem:
        raise BadRunFolder(f"{folder} cannot be written to: {problem.strerror}") from problem
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        holder = os.pread(lock, 64, 0).decode(errors="replace").strip()
        os.close(lock)
        raise BadRunFolder(
            f"{folder} is in use by process {holder or 'unknown'}; wait for it, or end it"
        ) from None
    os.truncate(lock, 0)
    os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
    return lock

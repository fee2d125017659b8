"""The run folder: what a kill leaves behind, full disks, several runners, other people's
folders."""

from __future__ import annotations

import json
import lzma
import os
import resource
from itertools import accumulate
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crossover.loadtests.errors import BadRunFolder
from crossover.loadtests.levels.level_columns import levels_of
from crossover.loadtests.records.journal_events import (
    FORMAT_VERSION,
    AnyEvent,
    Event,
    LevelAbandoned,
    of_kind,
)
from crossover.loadtests.records.resource_sample import ResourceSample
from crossover.loadtests.records.run_folder import (
    COMPRESSED,
    EVENTS,
    LOCK,
    MANIFEST,
    REQUESTS,
    SAMPLES,
    RunFolder,
    read_records,
    read_run_manifest,
)
from tests.loadtests.records.written import MANIFEST_RECORD, finished, record, started


def indices(folder: Path) -> list[int]:
    return [one.index for one in read_records(folder).requests()]


def test_what_was_written_is_read(tmp_path: Path) -> None:
    sample = ResourceSample(cell="c", level="l", unix_seconds=1.0)
    with RunFolder.create(tmp_path / "run", MANIFEST_RECORD) as folder:
        folder.append_request(record("l", 0))
        folder.append_sample(sample)
        folder.append_sample(msgspec.structs.replace(sample, level=None))
        event = started("l")
        assert folder.append_event(event) is event
    run = read_records(tmp_path / "run")
    assert list(run.requests()) == list(run.requests()) == [record("l", 0)]
    assert len(run.samples) == 2 and run.samples[0] == sample
    assert run.events == [event] and run.manifest == MANIFEST_RECORD
    assert run.started_levels == {"l": event} and not run.finished_levels and not run.damage()


def lines_of(*records: dict[str, object]) -> str:
    return "".join(json.dumps(one, separators=(",", ":")) + "\n" for one in records)


@pytest.mark.parametrize("line", [b"{broken", b"", b"\0" * 40, b"\xff{}", b"[" * 100_000])
def test_a_broken_line_in_the_middle_is_left_out_and_reported(tmp_path: Path, line: bytes) -> None:
    with RunFolder.create(tmp_path, MANIFEST_RECORD) as folder:
        folder.append_request(record("l", 0))
    with open(tmp_path / REQUESTS, "ab") as file:
        file.write(line + b"\n" + msgspec.json.encode(record("l", 1)) + b"\n")
    read = read_records(tmp_path)
    assert list(read.requests()) == [record("l", 0), record("l", 1)]
    assert read.damage() == ["1 of the lines of requests.jsonl (the first is line 2)"]


@pytest.mark.parametrize("number", ["1e308", "-1e18"])
def test_a_number_that_no_run_has_is_damage(number: str, tmp_path: Path) -> None:
    with RunFolder.create(tmp_path, MANIFEST_RECORD) as folder:
        folder.append_event(msgspec.structs.replace(started("l"), unix_seconds=1.5))
    events = tmp_path / EVENTS
    events.write_text(events.read_text().replace("1.5", number))
    read = read_records(tmp_path)
    assert read.events == [] and "events.jsonl" in read.damage()[0]


def test_a_full_disk_loses_the_record_being_written_and_no_other(tmp_path: Path) -> None:
    """The limit on file sizes, as a disk on which the third record has no room but for a part."""
    lines = [msgspec.json.encode(record("l", index)) + b"\n" for index in range(4)]
    room = len(lines[0] + lines[1]) + 20
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with RunFolder.create(tmp_path, MANIFEST_RECORD) as folder:
        folder.append_request(record("l", 0))
        folder.append_request(record("l", 1))
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, limits[1]))
        try:
            with pytest.raises(
                BadRunFolder, match="requests.jsonl: only part of a record was written"
            ):
                folder.append_request(record("l", 2))
            with pytest.raises(BadRunFolder, match="requests.jsonl cannot be written: File too"):
                folder.append_request(record("l", 2))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        folder.append_request(record("l", 3))
    assert indices(tmp_path) == [0, 1, 3]


def test_only_finished_levels_count_and_each_has_its_own_requests(tmp_path: Path) -> None:
    with RunFolder.create(tmp_path, MANIFEST_RECORD) as folder:
        for name in ("c-1.1", "c-1.2", "c-2.1"):
            folder.append_event(started(name))
        folder.append_event(LevelAbandoned(cell="c", level="c-1.1", reason="why"))
        for name, index in (("c-1.2", 1), ("c-1.1", 0), ("c-1.2", 0), ("c-2.1", 0)):
            folder.append_request(record(name, index))
        folder.finish_level(finished("c-1.2"))
        folder.append_event(finished("never begun"))
    run = read_records(tmp_path)
    assert list(run.started_levels) == ["c-1.1", "c-1.2", "c-2.1"]
    (level,) = levels_of(run)
    assert level.name == "c-1.2" and level.due.tolist() == [0.0, 1.0] and level.is_whole


def test_two_runners_do_not_work_on_one_run(tmp_path: Path) -> None:
    (tmp_path / ".lock").write_text("12345678901234567890\n")
    with (
        RunFolder.create(tmp_path, MANIFEST_RECORD),
        pytest.raises(BadRunFolder, match=f"in use by process {os.getpid()}. Wait"),
    ):
        RunFolder(tmp_path)
    assert (tmp_path / ".lock").read_text() == f"process {os.getpid()}\n"
    RunFolder(tmp_path).close()  # free again
    with pytest.raises(BadRunFolder, match="has a run already"):
        RunFolder.create(tmp_path, MANIFEST_RECORD)


def test_a_run_folder_is_made_with_its_parents_and_private_to_its_owner(tmp_path: Path) -> None:
    path = tmp_path / "runs" / "one"
    (path / "logs").mkdir(parents=True)
    mask = os.umask(0)
    try:
        folder = RunFolder.create(path, MANIFEST_RECORD)
    finally:
        os.umask(mask)
    assert b'\n  "run_id": "r",\n' in (path / MANIFEST).read_bytes(), "for people"
    for name in (REQUESTS, EVENTS, LOCK):
        assert (path / name).stat().st_mode & 0o777 == 0o600
    assert path.stat().st_mode & 0o777 == 0o700
    folder.close()
    (tmp_path / "file").touch()
    with pytest.raises(BadRunFolder, match="file/run cannot be written: Not a directory"):
        RunFolder.create(tmp_path / "file" / "run", MANIFEST_RECORD)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_whatever_a_kill_leaves_is_a_readable_prefix(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Writers append in any order; a kill cuts each file at any byte; then another goes on."""
    path = tmp_path_factory.mktemp("runs") / "run"
    writers = data.draw(st.lists(st.integers(0, 3), max_size=12), label="who appends")
    with RunFolder.create(path, MANIFEST_RECORD) as folder:
        records = [record(f"c#{writer}", index) for index, writer in enumerate(writers)]
        for one in records:
            folder.append_request(one)
        events = [started(f"c#{index}.1") for index in range(len(writers) // 3)]
        for event in events:
            folder.append_event(event)
    kept: dict[str, list[Any]] = {}
    for name, whole in ((REQUESTS, records), (EVENTS, events)):
        text = (path / name).read_bytes()
        size = data.draw(st.integers(0, len(text)), label=name)
        (path / name).write_bytes(text[:size])
        # A record without its newline is whole.
        ends = [end - 1 for end in accumulate(map(len, text.splitlines(keepends=True)))]
        kept[name] = list(whole[: sum(end <= size for end in ends)])
    read = read_records(path)
    assert (list(read.requests()), read.events) == (kept[REQUESTS], kept[EVENTS])
    with RunFolder(path) as opened:
        assert opened.events == read.events
        opened.append_request(record("after", 0))
        opened.append_event(started("after"))
    after = read_records(path)
    assert list(after.requests()) == [*kept[REQUESTS], record("after", 0)]
    assert after.events == [*kept[EVENTS], started("after")]


def test_every_kind_of_event_has_a_name_of_its_own_and_survives() -> None:
    kinds = list(get_args(AnyEvent))
    assert set(kinds) == set(Event.__subclasses__())
    assert len({kind.__struct_config__.tag for kind in kinds}) == len(kinds)
    for event in (started("x"), finished("x")):
        assert msgspec.json.decode(msgspec.json.encode(event), type=AnyEvent) == event
    assert LevelAbandoned.__struct_config__.tag == "level_abandoned"


@pytest.mark.parametrize(("version", "other"), [(6, "older"), (8, "newer")])
def test_another_format_is_refused(tmp_path: Path, version: int, other: str) -> None:
    """By one sentence, whatever else its manifest holds."""
    (tmp_path / MANIFEST).write_text(f'{{"format_version": {version}, "something_else": 1}}')
    wanted = rf"format_version {version}\. This version .* reads {FORMAT_VERSION}: use the {other}"
    with pytest.raises(BadRunFolder, match=wanted):
        read_records(tmp_path)


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadRunFolder, match="is not a run folder"):
        read_run_manifest(tmp_path)
    (tmp_path / MANIFEST).write_text(f'{{"format_version": {FORMAT_VERSION}}}')
    with pytest.raises(BadRunFolder, match="is not a manifest: .*run_id"):
        read_run_manifest(tmp_path)
    (tmp_path / MANIFEST).write_bytes(b'{"format_version": %d, "run_id": "\xff"}' % FORMAT_VERSION)
    with pytest.raises(BadRunFolder, match="is not a manifest: .*0xff"):
        read_run_manifest(tmp_path)


@pytest.mark.parametrize("name", [LOCK, REQUESTS, "logs", "logs/server.log"])
def test_a_strangers_run_is_not_written_into_files_elsewhere(tmp_path: Path, name: str) -> None:
    """A lock that was a link to a file of its reader's once emptied that file."""
    RunFolder.create(tmp_path / "run", MANIFEST_RECORD).close()
    elsewhere = tmp_path / "elsewhere"
    if name == "logs":
        elsewhere.mkdir()
        (tmp_path / "run" / name).rmdir()
    else:
        elsewhere.write_text("precious, and cut off")
        (tmp_path / "run" / name).unlink(missing_ok=True)
    (tmp_path / "run" / name).symlink_to(elsewhere)
    with pytest.raises(BadRunFolder, match=f"{name} is a symbolic link"):
        RunFolder(tmp_path / "run")
    assert name == "logs" or elsewhere.read_text() == "precious, and cut off"


@pytest.mark.parametrize("name", [MANIFEST, SAMPLES])
def test_a_file_without_an_end_is_not_read(tmp_path: Path, name: str) -> None:
    RunFolder.create(tmp_path, MANIFEST_RECORD).close()
    (tmp_path / name).unlink()
    (tmp_path / name).symlink_to("/dev/full")
    with pytest.raises(BadRunFolder, match=f"{name} is not a regular file"):
        read_records(tmp_path)


def test_records_contain_no_terminal_escapes(tmp_path: Path) -> None:
    """The run may be somebody else's."""
    text = "load \x1b]0;x\x07 \x9b2J, tab\there"
    manifest = msgspec.structs.replace(MANIFEST_RECORD, command=[text])
    with RunFolder.create(tmp_path, manifest) as folder:
        folder.append_event(LevelAbandoned(cell="c", level="l", reason=text))
        folder.append_request(msgspec.structs.replace(record("l", 0), error=text))
    read = read_records(tmp_path)
    (event,) = of_kind(read.events, LevelAbandoned)
    wanted = "load \ufffd]0;x\ufffd \ufffd2J, tab\there"
    assert read.manifest.command == [wanted] and event.reason == wanted
    assert next(iter(read.requests())).error == wanted
    ascii = json.dumps(json.loads((tmp_path / EVENTS).read_text()))  # \x9b as \\u009b
    (tmp_path / EVENTS).write_text(f"{ascii}\n")
    assert read_records(tmp_path).events == read.events


def test_a_kept_run_may_have_its_requests_compressed(tmp_path: Path) -> None:
    with RunFolder.create(tmp_path / "run", MANIFEST_RECORD) as folder:
        folder.append_request(record("l", 0))
    plain = tmp_path / "run" / REQUESTS
    packed = plain.with_name(f"{REQUESTS}{COMPRESSED}")
    packed.write_bytes(lzma.compress(plain.read_bytes() + b"{broken\n"))
    plain.unlink()
    run = read_records(tmp_path / "run")
    assert list(run.requests()) == [record("l", 0)] and "line 2" in run.damage()[0]
    for broken, message in (
        (packed.read_bytes()[:-20], "decompressed"),
        (b"no xz", "decompressed"),
    ):
        packed.write_bytes(broken)
        with pytest.raises(BadRunFolder, match=message):
            list(read_records(tmp_path / "run").requests())

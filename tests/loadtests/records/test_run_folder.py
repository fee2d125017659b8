"""The run folder as it is written: what a kill leaves behind, full disks, several runners."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadtests.errors import BadRunFolder
from loadtests.records import old_run_folder as run_folder
from loadtests.records.events import (
    Event,
)
from loadtests.records.lines import Appender, Read
from loadtests.records.old_run_folder import (
    EVENTS,
    MANIFEST,
    REQUESTS,
    LevelRecords,
    RunFolder,
    read_events,
    read_manifest,
    read_records,
    read_requests,
    read_samples,
)
from loadtests.records.schema import (
    RequestRecord,
    ResourceSample,
)
from tests.loadtests.records.made import MANIFEST_RECORD, finished, record, started


def test_what_was_written_is_read(tmp_path: Path) -> None:
    with RunFolder.create(tmp_path / "run", MANIFEST_RECORD) as folder:
        folder.request(record("l", 0))
        folder.sample(ResourceSample(cell="c", unix_seconds=1.0))
        folder.event(started("l"))
    assert read_requests(tmp_path / "run").records == [record("l", 0)]
    assert read_samples(tmp_path / "run").records == [ResourceSample(cell="c", unix_seconds=1.0)]
    (event,) = read_events(tmp_path / "run").records
    assert event == started("l")
    assert read_manifest(tmp_path / "run") == MANIFEST_RECORD


def test_missing_stays_missing(tmp_path: Path) -> None:
    """A request that never got a token reads back as None, and the line does not even name the
    field.
    """
    with RunFolder.create(tmp_path, MANIFEST_RECORD) as folder:
        folder.request(
            RequestRecord(cell="c", level="l", index=0, due_seconds=0.0, error="refused")
        )
    assert b"first_content" not in (tmp_path / REQUESTS).read_bytes()
    (read,) = read_requests(tmp_path).records
    assert read.first_content_seconds is None and read.output_tokens is None


@pytest.mark.parametrize("cut", [1, 5, 40])
def test_a_cut_off_last_line_is_dropped_and_reported(tmp_path: Path, cut: int) -> None:
    with RunFolder.create(tmp_path, MANIFEST_RECORD) as folder:
        for index in range(3):
            folder.request(record("l", index))
    path = tmp_path / REQUESTS
    whole = path.read_bytes()
    path.write_bytes(whole[:-cut])
    read = read_requests(tmp_path)
    assert [r.index for r in read.records] == [0, 1]
    assert read.dropped_bytes == len(whole.splitlines(keepends=True)[2]) - cut
    folder, dropped = RunFolder.open_existing(tmp_path)
    with folder:
        assert dropped == {REQUESTS: read.dropped_bytes}
        folder.request(record("l", 9))  # must not continue the cut-off line
    assert [r.index for r in read_requests(tmp_path).records] == [0, 1, 9]


@pytest.mark.parametrize("line", [b"{broken", b"", b"\0" * 40, b"\xff{}", b"[" * 100_000])
def test_a_broken_line_in_the_middle_is_left_out_and_said(tmp_path: Path, line: bytes) -> None:
    with RunFolder.create(tmp_path, MANIFEST_RECORD) as folder:
        folder.request(record("l", 0))
    with open(tmp_path / REQUESTS, "ab") as file:
        file.write(line + b"\n" + msgspec.json.encode(record("l", 1)) + b"\n")
    read = read_requests(tmp_path)
    assert read == Read([record("l", 0), record("l", 1)], broken_lines=(2,))
    (what,) = read_records(tmp_path).damage()
    assert what == "1 of the lines of requests.jsonl (the first is line 2)"
    opened, _ = RunFolder.open_existing(tmp_path)
    with opened:
        assert opened.broken_lines == {REQUESTS: (2,)}


def test_a_full_disk_loses_the_record_being_written_and_no_other(tmp_path: Path) -> None:
    """The limit on file sizes, as a disk on which the third record has no room but for a part."""
    lines = [msgspec.json.encode(record("l", index)) + b"\n" for index in range(4)]
    room = len(lines[0] + lines[1]) + 20
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with RunFolder.create(tmp_path, MANIFEST_RECORD) as folder:
        folder.request(record("l", 0))
        folder.request(record("l", 1))
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, limits[1]))
        try:
            with pytest.raises(BadRunFolder, match="requests.jsonl: a record was written in part"):
                folder.request(record("l", 2))
            with pytest.raises(BadRunFolder, match="requests.jsonl cannot be written: File too"):
                folder.request(record("l", 2))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        folder.request(record("l", 3))
    read = read_requests(tmp_path)
    assert [one.index for one in read.records] == [0, 1, 3] and read.broken_lines == (3,)


def test_an_appender_begins_a_line_of_its_own(tmp_path: Path) -> None:
    """After a writer that was killed within a line."""
    (tmp_path / REQUESTS).write_bytes(b'{"cell": "c", "le')
    appender: Appender[Any] = Appender(tmp_path / REQUESTS)
    for index in range(2):
        appender.append(record("l", index))
    appender.close()
    read = read_requests(tmp_path)
    assert [one.index for one in read.records] == [0, 1] and read.broken_lines == (1,)


def test_a_folder_that_cannot_be_made_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(BadRunFolder, match="file/run cannot be written: Not a directory"):
        RunFolder.create(tmp_path / "file" / "run", MANIFEST_RECORD)


def test_a_level_does_not_begin_on_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with RunFolder.create(tmp_path, MANIFEST_RECORD) as folder:
        folder.check_room()
        monkeypatch.setattr(run_folder, "LEAST_FREE_BYTES", 1 << 60)
        with pytest.raises(BadRunFolder, match="of disk free, and a level wants .* make room"):
            folder.check_room()


def test_a_finished_level_with_a_broken_line_is_not_whole(tmp_path: Path) -> None:
    pair = [record("l", 0), record("l", 1)]
    assert LevelRecords(started("l"), finished("l"), pair, []).is_whole
    assert not LevelRecords(started("l"), finished("l"), pair[:1], []).is_whole


def test_two_runners_do_not_work_on_one_run(tmp_path: Path) -> None:
    with (
        RunFolder.create(tmp_path, MANIFEST_RECORD),
        pytest.raises(BadRunFolder, match=f"in use by process {os.getpid()}"),
    ):
        RunFolder.open_existing(tmp_path)
    RunFolder.open_existing(tmp_path)[0].close()  # free again


def test_many_writers_and_a_kill_lose_no_whole_line(tmp_path: Path) -> None:
    """Four processes append to one file and are killed at once: every line but perhaps the last is
    whole.
    """
    script = (
        "import sys; from pathlib import Path; from loadtests.records.lines import Appender; "
        "from tests.loadtests.records.test_run_folder import record\n"
        "out = Appender(Path(sys.argv[1])); print('up', flush=True); i = 0\n"
        "while True:\n    out.append(record(sys.argv[2], i)); i += 1\n"
    )
    path = tmp_path / REQUESTS
    root = Path(__file__).parents[3]
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", script, str(path), f"w{number}"],
            stdout=subprocess.PIPE,
            cwd=root,
        )
        for number in range(4)
    ]
    for writer in writers:
        assert writer.stdout is not None and writer.stdout.readline() == b"up\n"
    while path.stat().st_size < 200_000:
        pass
    for writer in writers:
        writer.send_signal(signal.SIGKILL)
    for writer in writers:
        writer.communicate()
    records = read_requests(tmp_path).records
    for number in range(4):
        mine = [r.index for r in records if r.level == f"w{number}"]
        assert mine == list(range(len(mine))), "a line was lost or came out of order"


def test_an_appender_does_not_leak_to_children(tmp_path: Path) -> None:
    appender: Appender[Event] = Appender(tmp_path / EVENTS)
    assert not os.get_inheritable(appender._file)
    appender.close()


def test_a_folder_is_made_with_its_parents_and_a_manifest_for_people(tmp_path: Path) -> None:
    path = tmp_path / "runs" / "one"
    (path / "logs").mkdir(parents=True)
    mask = os.umask(0)
    try:
        with RunFolder.create(path, MANIFEST_RECORD) as folder:
            event = started("l")
            assert folder.event(event) is event
    finally:
        os.umask(mask)
    assert b'\n  "run_id": "r",\n' in (path / MANIFEST).read_bytes()
    for name in (REQUESTS, EVENTS, ".lock"):
        assert (path / name).stat().st_mode & 0o777 == 0o600
    assert path.stat().st_mode & 0o777 == 0o700
    RunFolder.create(tmp_path / "not" / "there", MANIFEST_RECORD).close()


def test_a_finished_level_is_on_record_at_once(tmp_path: Path) -> None:
    level = LevelRecords(started("l"), finished("l"), [record("l", 0)], [])
    with RunFolder.create(tmp_path, MANIFEST_RECORD) as folder:
        folder.event(level.started)
        folder.request(record("l", 0))
        folder.finish(level)
        assert folder.levels == [level] and folder.events == [level.started, level.finished]
    opened, dropped = RunFolder.open_existing(tmp_path)
    with opened:
        assert opened.levels == [level] and dropped == {}


def test_a_folder_that_is_closed_twice_closes_no_file_of_others(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, MANIFEST_RECORD)
    folder.close()
    others = [os.open(os.devnull, os.O_RDONLY) for _ in range(8)]
    folder.close()
    for file in (1, *others):
        os.fstat(file)
    for file in others:
        os.close(file)


def test_the_lock_names_its_holder_and_not_the_one_before(tmp_path: Path) -> None:
    (tmp_path / ".lock").write_text("12345678901234567890\n")
    with (
        RunFolder.create(tmp_path, MANIFEST_RECORD),
        pytest.raises(BadRunFolder, match=f"in use by process {os.getpid()};"),
    ):
        RunFolder.open_existing(tmp_path)
    assert (tmp_path / ".lock").read_text() == f"{os.getpid()}\n"


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
            folder.request(one)
        events = [started(f"c#{index}.1") for index in range(len(writers) // 3)]
        for event in events:
            folder.event(event)
    cuts = {}
    for name, whole in ((REQUESTS, records), (EVENTS, events)):
        text = (path / name).read_bytes()
        size = data.draw(st.integers(0, len(text)), label=name)
        (path / name).write_bytes(text[:size])
        kept = text[:size].count(b"\n")
        cuts[name] = (whole[:kept], size - (text[:size].rfind(b"\n") + 1))
    read = read_records(path)
    assert (read.requests, read.events) == (cuts[REQUESTS][0], cuts[EVENTS][0])
    dropped = {name: cut for name, (_, cut) in cuts.items() if cut}
    assert read.dropped_bytes == dropped
    opened, taken_off = RunFolder.open_existing(path)
    with opened:
        assert taken_off == dropped and opened.events == read.events
        opened.request(record("after", 0))
        opened.event(started("after"))
    after = read_records(path)
    assert after.requests == [*read.requests, record("after", 0)] and not after.dropped_bytes
    assert after.events == [*read.events, started("after")]

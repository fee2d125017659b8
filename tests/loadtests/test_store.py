"""The run folder: what a kill leaves behind, what is refused, what counts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from loadtests.errors import BadRunFolder
from loadtests.records import FORMAT_VERSION, Event, RequestRecord, ResourceSample, RunManifest
from loadtests.store import (
    EVENTS,
    MANIFEST,
    REQUESTS,
    Appender,
    RunFolder,
    completed_levels,
    measured_records,
    read_events,
    read_manifest,
    read_requests,
    read_samples,
    started_levels,
)

MANIFEST_RECORD = RunManifest(
    format_version=FORMAT_VERSION, run_id="r", created="2026-01-01T00:00:00Z", crossover_version="0", git_commit=None, command=["x"],
    campaign={}, campaign_text="", cells=[], server_facts={}, client_facts={}, versions={}, seed=1,
)  # fmt: skip


def record(level: str, index: int) -> RequestRecord:
    return RequestRecord(cell="c", level=level, index=index, due_seconds=float(index), content_seconds=[0.5, 0.75])


def test_what_was_written_is_read(tmp_path: Path) -> None:
    with RunFolder.create(tmp_path / "run", MANIFEST_RECORD) as folder:
        folder.request(record("l", 0))
        folder.sample(ResourceSample(cell="c", unix_seconds=1.0))
        folder.event("level_started", cell="c", level="l", detail={"rate": 2})
    assert read_requests(tmp_path / "run").records == [record("l", 0)]
    assert read_samples(tmp_path / "run").records == [ResourceSample(cell="c", unix_seconds=1.0)]
    (event,) = read_events(tmp_path / "run").records
    assert (event.kind, event.cell, event.level, event.detail) == ("level_started", "c", "l", {"rate": 2})
    assert read_manifest(tmp_path / "run") == MANIFEST_RECORD


def test_missing_stays_missing(tmp_path: Path) -> None:
    """A request that never got a token reads back as None, and the line does not even name the field."""
    with RunFolder.create(tmp_path, MANIFEST_RECORD) as folder:
        folder.request(RequestRecord(cell="c", level="l", index=0, due_seconds=0.0, error="refused"))
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


def test_a_broken_line_in_the_middle_is_an_error(tmp_path: Path) -> None:
    with RunFolder.create(tmp_path, MANIFEST_RECORD) as folder:
        folder.request(record("l", 0))
    with open(tmp_path / REQUESTS, "ab") as file:
        file.write(b"{broken\n" + msgspec.json.encode(record("l", 1)) + b"\n")
    with pytest.raises(BadRunFolder, match="requests.jsonl line 2 is broken"):
        read_requests(tmp_path)


def test_a_newer_format_is_refused(tmp_path: Path) -> None:
    newer = msgspec.to_builtins(MANIFEST_RECORD) | {"format_version": FORMAT_VERSION + 1, "something_new": 1}
    (tmp_path / MANIFEST).write_bytes(msgspec.json.encode(newer))
    with pytest.raises(BadRunFolder, match=f"format_version {FORMAT_VERSION + 1}; this crossover reads up to {FORMAT_VERSION}"):
        read_manifest(tmp_path)


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadRunFolder, match="holds no run"):
        read_manifest(tmp_path)
    (tmp_path / MANIFEST).write_text('{"format_version": 1}')
    with pytest.raises(BadRunFolder, match="is no manifest: .*run_id"):
        read_manifest(tmp_path)
    with pytest.raises(BadRunFolder, match="holds a run already"):
        RunFolder.create(tmp_path, MANIFEST_RECORD)


def test_two_runners_do_not_work_on_one_run(tmp_path: Path) -> None:
    with RunFolder.create(tmp_path, MANIFEST_RECORD), pytest.raises(BadRunFolder, match=f"in use by process {os.getpid()}"):
        RunFolder.open_existing(tmp_path)
    RunFolder.open_existing(tmp_path)[0].close()  # free again


def test_only_completed_levels_count() -> None:
    events = [
        Event(kind="level_started", unix_seconds=1, cell="c", level="c-1.1"),
        Event(kind="level_abandoned", unix_seconds=2, cell="c", level="c-1.1"),
        Event(kind="level_started", unix_seconds=3, cell="c", level="c-1.2"),
        Event(kind="level_finished", unix_seconds=4, cell="c", level="c-1.2"),
        Event(kind="level_started", unix_seconds=5, cell="c", level="c-2.1"),
    ]
    assert list(started_levels(events)) == ["c-1.1", "c-1.2", "c-2.1"]
    assert list(completed_levels(events)) == ["c-1.2"]
    records = [record("c-1.1", 0), record("c-1.2", 0), record("c-1.2", 1), record("c-2.1", 0)]
    assert [(r.level, r.index) for r in measured_records(records, events)] == [("c-1.2", 0), ("c-1.2", 1)]


def test_many_writers_and_a_kill_lose_no_whole_line(tmp_path: Path) -> None:
    """Four processes append to one file and are killed at once: every line but perhaps the last is whole."""
    script = (
        "import sys; from pathlib import Path; from loadtests.store import Appender; from tests.loadtests.test_store import record\n"
        "out = Appender(Path(sys.argv[1])); print('up', flush=True); i = 0\n"
        "while True:\n    out.append(record(sys.argv[2], i)); i += 1\n"
    )
    path = tmp_path / REQUESTS
    root = Path(__file__).parents[2]
    writers = [
        subprocess.Popen([sys.executable, "-c", script, str(path), f"w{number}"], stdout=subprocess.PIPE, cwd=root) for number in range(4)
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

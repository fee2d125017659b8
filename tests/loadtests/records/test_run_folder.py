"""The run folder: what a kill leaves behind, what is refused, what counts."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
from io import StringIO
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from loadtests.campaign.run_state import campaign_of, prediction_on_record
from loadtests.errors import BadRunFolder
from loadtests.records import run_folder
from loadtests.records.comparability import differences
from loadtests.records.events import (
    AnyEvent,
    CellFinished,
    CellSkipped,
    Event,
    LevelAbandoned,
    LevelFinished,
    LevelPurpose,
    LevelStarted,
    SkipCause,
    completed_levels,
    of_kind,
    started_levels,
)
from loadtests.records.lines import Appender, Read
from loadtests.records.run_folder import (
    EVENTS,
    LOCK,
    MANIFEST,
    REQUESTS,
    SAMPLES,
    LevelRecords,
    RunFolder,
    RunRecords,
    join_levels,
    read_events,
    read_manifest,
    read_records,
    read_requests,
    read_samples,
)
from loadtests.records.schema import (
    FORMAT_VERSION,
    RequestRecord,
    ResourceSample,
    RunManifest,
)
from loadtests.terminal.run import show_run

MANIFEST_RECORD = RunManifest(
    format_version=FORMAT_VERSION,
    run_id="r",
    created="2026-01-01T00:00:00Z",
    crossover_version="0",
    git_commit=None,
    command=["x"],
    campaign={},
    campaign_text="",
    cells=[],
    server_facts={},
    client_facts={},
    versions={},
    seed=1,
)


def record(level: str, index: int) -> RequestRecord:
    return RequestRecord(
        cell="c", level=level, index=index, due_seconds=float(index), content_seconds=[0.5, 0.75]
    )


def started(level: str) -> LevelStarted:
    return LevelStarted(
        unix_seconds=1.0,
        cell="c",
        level=level,
        purpose=LevelPurpose.SEARCH,
        rate_per_second=2.0,
        concurrency=None,
        arrivals={"kind": "poisson"},
        warmup_seconds=1.0,
        window_seconds=10.0,
        seed=1,
        attempt=1,
        started_unix_seconds=1.0,
    )


def finished(level: str) -> LevelFinished:
    return LevelFinished(
        cell="c",
        level=level,
        due=2,
        good=2,
        failed=0,
        window_due=2,
        window_seconds=10.0,
        spent_seconds=12.0,
        verdict="holds",
        is_valid=True,
    )


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


def test_a_newer_format_is_refused(tmp_path: Path) -> None:
    newer = msgspec.to_builtins(MANIFEST_RECORD) | {
        "format_version": FORMAT_VERSION + 1,
        "something_new": 1,
    }
    (tmp_path / MANIFEST).write_bytes(msgspec.json.encode(newer))
    with pytest.raises(
        BadRunFolder,
        match=f"format_version {FORMAT_VERSION + 1}; this crossover reads {FORMAT_VERSION}: "
        "use a newer one",
    ):
        read_manifest(tmp_path)


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadRunFolder, match="holds no run"):
        read_manifest(tmp_path)
    (tmp_path / MANIFEST).write_text('{"format_version": 3}')
    with pytest.raises(BadRunFolder, match="is no manifest: .*run_id"):
        read_manifest(tmp_path)
    with pytest.raises(BadRunFolder, match="holds a run already"):
        RunFolder.create(tmp_path, MANIFEST_RECORD)


def test_two_runners_do_not_work_on_one_run(tmp_path: Path) -> None:
    with (
        RunFolder.create(tmp_path, MANIFEST_RECORD),
        pytest.raises(BadRunFolder, match=f"in use by process {os.getpid()}"),
    ):
        RunFolder.open_existing(tmp_path)
    RunFolder.open_existing(tmp_path)[0].close()  # free again


def test_only_completed_levels_count() -> None:
    events = [
        started("c-1.1"),
        LevelAbandoned(cell="c", level="c-1.1", reason="why"),
        started("c-1.2"),
        finished("c-1.2"),
        started("c-2.1"),
    ]
    assert list(started_levels(events)) == ["c-1.1", "c-1.2", "c-2.1"]
    assert list(completed_levels(events)) == ["c-1.2"]
    records = [record("c-1.1", 0), record("c-1.2", 0), record("c-1.2", 1), record("c-2.1", 0)]
    samples = [
        ResourceSample(cell="c", level=name, unix_seconds=1.0) for name in ("c-1.1", "c-1.2")
    ]
    (level,) = join_levels(events, records, samples)
    assert (level.cell, level.name, level.requests) == ("c", "c-1.2", records[1:3])
    assert level.samples == samples[1:]


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


# A cell with two SLOs, and one that did not fit.
TWO_CELLS = Path(__file__).parent / "fixtures" / "two_cells"


def test_a_run_is_read() -> None:
    run = read_records(TWO_CELLS)
    assert run.manifest.format_version == FORMAT_VERSION and not run.dropped_bytes
    campaign, cells = campaign_of(run.manifest)
    assert [slo.name for slo in campaign.all_slos] == ["quick", "chat"]
    assert campaign.search.single_stream_requests == 2 and len(cells) == 2
    levels = run.levels()
    assert [level.started.purpose for level in levels] == [
        LevelPurpose.SINGLE_STREAM,
        *[LevelPurpose.SEARCH] * 4,
    ]
    for level in levels:
        assert len(level.requests) == level.finished.due > 0
    assert levels[0].finished.warnings == ["TooFewSamples"]
    (ended,) = of_kind(run.events, CellFinished)
    assert list(ended.capacities) == ["quick", "chat"] and ended.capacity is not None
    assert ended.capacity.held is None
    assert ended.capacity.low is not None and ended.capacity.low > 0
    (skipped,) = of_kind(run.events, CellSkipped)
    assert skipped.cause is SkipCause.MEMORY and "4.76 GiB" in skipped.reason
    made = prediction_on_record(run.events, cells[0].key)
    assert made is not None and made.law is not None and set(made.rates) == {"quick", "chat"}


def test_a_kv_dtype_that_was_asked_for_is_asked_for_again() -> None:
    """It was taken for `auto` once: a run that was resumed served another type."""
    manifest = read_manifest(TWO_CELLS)
    server = {**manifest.campaign["server"], "kv_dtype": "fp16"}
    asked = msgspec.structs.replace(manifest, campaign=manifest.campaign | {"server": server})
    assert campaign_of(asked)[0].server.kv_dtype == "fp16"
    (found,) = differences(manifest, asked)
    assert (found.name, found.first, found.second) == ("server.kv_dtype", "auto", "fp16")


def test_every_kind_of_event_has_a_name_of_its_own_and_survives() -> None:
    kinds = list(get_args(AnyEvent))
    assert set(kinds) == set(Event.__subclasses__())
    assert len({kind.__struct_config__.tag for kind in kinds}) == len(kinds)
    for event in (started("x"), finished("x")):
        assert msgspec.json.decode(msgspec.json.encode(event), type=AnyEvent) == event
    assert finished("x").kind == "level_finished"


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


def test_a_file_that_is_not_there_is_empty(tmp_path: Path) -> None:
    assert read_samples(tmp_path) == Read([])
    assert read_events(tmp_path) == Read([])
    (tmp_path / EVENTS).write_bytes(msgspec.json.encode(started("l")) + b"\n")
    assert read_events(tmp_path).records == [started("l")]


def test_a_broken_event_is_left_out(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(TWO_CELLS, tmp_path / "run"))
    lines = (folder / EVENTS).read_bytes().splitlines(keepends=True)
    for bad in (b"{}\n", b'{"kind": 3}\n', b'{"kind": "level_started"}\n', b"[]\n"):
        (folder / EVENTS).write_bytes(b"".join([*lines[:2], bad, *lines[3:]]))
        read = read_events(folder)
        assert read.broken_lines == (3,) and len(read.records) == len(lines) - 1


def test_records_as_read_do_not_change() -> None:
    for kind in (Read, LevelRecords, RunRecords):
        assert kind.__struct_config__.frozen


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


def test_a_run_is_shown_whichever_line_of_its_journal_is_broken(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(TWO_CELLS, tmp_path / "run"))
    lines = (folder / EVENTS).read_bytes().splitlines(keepends=True)
    for broken in range(len(lines)):
        (folder / EVENTS).write_bytes(b"".join([*lines[:broken], b"{\n", *lines[broken + 1 :]]))
        said = StringIO()
        show_run(folder, Console(file=said))
        assert f"events.jsonl (the first is line {broken + 1})" in said.getvalue()


def test_a_cell_of_a_strangers_run_names_no_file_elsewhere() -> None:
    cell = {"key": "../../etc/x", "model": "m", "weight_format": "", "backend": "fake"}
    campaign = read_manifest(TWO_CELLS).campaign
    manifest = msgspec.structs.replace(MANIFEST_RECORD, campaign=campaign, cells=[cell])
    with pytest.raises(BadRunFolder, match="run r has a cell '../../etc/x'"):
        campaign_of(manifest)


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
    with pytest.raises(BadRunFolder, match=f"{name} is a link"):
        RunFolder.open_existing(tmp_path / "run")
    assert name == "logs" or elsewhere.read_text() == "precious, and cut off"


@pytest.mark.parametrize("name", [MANIFEST, SAMPLES])
def test_a_file_without_an_end_is_not_read(tmp_path: Path, name: str) -> None:
    RunFolder.create(tmp_path, MANIFEST_RECORD).close()
    (tmp_path / name).unlink()
    (tmp_path / name).symlink_to("/dev/full")
    with pytest.raises(BadRunFolder, match=f"{name} is no plain file"):
        read_records(tmp_path)


def test_what_is_read_holds_no_password_and_nothing_for_a_terminal(tmp_path: Path) -> None:
    """Of a run before URLs with passwords were refused, or of a stranger's."""
    text = "load http://bob:hunter2@h:1/v1 \x1b]0;x\x07 \x9b2J, tab\there"
    manifest = msgspec.structs.replace(MANIFEST_RECORD, command=[text])
    with RunFolder.create(tmp_path, manifest) as folder:
        folder.event(LevelAbandoned(cell="c", level="l", reason=text))
        folder.request(msgspec.structs.replace(record("l", 0), error=text))
    read = read_records(tmp_path)
    (event,) = of_kind(read.events, LevelAbandoned)
    wanted = "load http://***@h:1/v1 \ufffd]0;x\ufffd \ufffd2J, tab\there"
    assert read.manifest.command == [wanted] and event.reason == wanted
    assert read.requests[0].error == wanted
    ascii = json.dumps(json.loads((tmp_path / EVENTS).read_text()))  # \x9b as \\u009b
    (tmp_path / EVENTS).write_text(f"{ascii}\n")
    assert read_events(tmp_path).records == read.events

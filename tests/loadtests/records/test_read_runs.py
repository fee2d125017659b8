"""A run folder as it is read: what counts, what is refused, what strangers put into one."""

from __future__ import annotations

import json
import shutil
from io import StringIO
from pathlib import Path
from typing import get_args

import msgspec
import pytest
from rich.console import Console

from loadtests.campaign.run_state import campaign_of, prediction_on_record
from loadtests.errors import BadRunFolder
from loadtests.records.comparability import differences
from loadtests.records.events import (
    AnyEvent,
    CellFinished,
    CellSkipped,
    Event,
    LevelAbandoned,
    LevelPurpose,
    SkipCause,
    completed_levels,
    of_kind,
    started_levels,
)
from loadtests.records.lines import Read
from loadtests.records.old_run_folder import (
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
    read_samples,
)
from loadtests.records.schema import (
    FORMAT_VERSION,
    ResourceSample,
)
from loadtests.terminal.run import show_run
from tests.loadtests.records.made import MANIFEST_RECORD, finished, record, started


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

"""A run that is given away: the same numbers, and no name in it."""

from __future__ import annotations

import getpass
import io
import re
import tarfile
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from crossover import app
from loadtests.records.events import (
    Calibrated,
    Capacity,
    CapacityStatus,
    CellFinished,
    Interrupted,
    LevelFinished,
    LevelStarted,
    Waited,
)
from loadtests.records.schema import Disturbance, Stranger, WorkerFacts
from reports.errors import ReportError
from reports.reference import archive
from reports.reference.archive import FILES, REMOVED, anonymised, opened, write_archive
from reports.run import numbers_of, read_records, read_run
from tests.reports.example_run import RUNGS, write_example_run

ONE = {"smollm2-135m": RUNGS["smollm2-135m"]}
NAMES = ("secret-host", "bob", "firefox", "corp.example", "/home", "sk-1", "our-model", "GPU-1a2b")


ENGINE = {
    "name": "vllm",
    "command": "docker run registry.corp.example:5000/vllm --port {port} {model}",
    "version": "ssh secret-host vllm --version",
    "names": {"smollm2-135m": "acme/our-model"},
    "environment": {"VLLM_HOST_IP": "gpu-7.corp.example"},
    "variables": ["KEY_OF_bob"],
    "api": "chat",
}


def named_run(folder: Path):
    """A run in which a host, a user, a process, an address and a path are named all over."""
    run = read_records(write_example_run(folder, ONE))
    manifest = run.manifest
    facts = manifest.server_facts | {"hostname": "secret-host", "note": "/home/bob"}
    facts |= {"gpus": [{"name": "NVIDIA H200", "uuid": "GPU-1a2b"}]}
    server = manifest.campaign.get("server") or {}
    events = []
    for event in run.events:
        if isinstance(event, LevelFinished):
            strangers = [Stranger("firefox", 7, 1.0)]
            found = Disturbance(subject="engine", seconds=1.0, strangers=strangers)
            workers = [WorkerFacts(worker=0, name="secret-host", due=1)]
            event = msgspec.structs.replace(event, disturbance=found, workers=workers)
        if isinstance(event, LevelStarted):
            trace = {"kind": "trace", "path": "traces/bob.csv"}
            event = msgspec.structs.replace(event, arrivals=trace)
        if isinstance(event, CellFinished):
            busy = Capacity(status=CapacityStatus.NONE, reason="the machine was busy: firefox")
            event = msgspec.structs.replace(event, capacities={"demo": busy})
        events.append(event)
    events.append(
        Waited(cell="x", reason="firefox (0.3 cores)", spent_seconds=1, became_quiet=True)
    )
    events.append(Calibrated(cell="x", spent_seconds=1, reason="our-model takes no time"))
    events.append(Interrupted(reason="no file /home/bob/our-model.gguf"))
    return msgspec.structs.replace(
        run,
        manifest=msgspec.structs.replace(
            manifest,
            server_facts=facts,
            client_facts=facts,
            command=["crossover", "campaign", "run", "/home/bob/our-model.toml"],
            campaign_text="# https://corp.example sk-1",
            campaign=manifest.campaign
            | {
                "server": server | {"cache": "/home/bob"},
                "workloads": {
                    "a": {"file": "bob.csv", "replay": None},
                    "b": {"file": None, "replay": "lengths-of-bob.jsonl"},
                },
                "arrivals": {"kind": "trace", "path": "bob.csv"},
                "engines": {"vllm": ENGINE},
            },
        ),
        events=events,
        requests=[
            msgspec.structs.replace(
                r,
                error_message="sk-1 at corp.example",
                request_id="bob-1",
                session="bob-2",
                backend="llama_cpp/cpu",
                finish_reason="length",
            )
            for r in run.requests
        ],
    )


def test_no_name_is_left_and_every_number_is(tmp_path: Path) -> None:
    run = named_run(tmp_path / "run")
    archive = anonymised(run)
    for name in NAMES:
        assert not any(name.encode() in data for data in archive.files.values()), name
        assert not any(name in line for line in archive.held), name
    write_archive(archive, tmp_path / "shared.tar.xz")
    with opened(tmp_path / "shared.tar.xz") as folder:
        shared = read_run(folder)
    own = numbers_of(run)
    for mine, theirs in zip(own.cells, shared.cells, strict=True):
        assert mine.capacity == theirs.capacity and mine.law == theirs.law
        assert [one.summary.latencies for one in mine.levels] == [
            one.summary.latencies for one in theirs.levels
        ]
        assert [one.energy for one in mine.levels] == [one.energy for one in theirs.levels]
    engine = shared.manifest.campaign["engines"]["vllm"]
    assert engine == {"name": "vllm", "api": "chat", "command": REMOVED}
    write_archive(anonymised(run), tmp_path / "again.tar.xz")
    same = (tmp_path / "again.tar.xz").read_bytes()
    assert (tmp_path / "shared.tar.xz").read_bytes() == same, "whoever packs it, and when"


def test_an_endpoint_is_not_named(tmp_path: Path) -> None:
    run = read_records(write_example_run(tmp_path / "run", ONE))
    (cell,) = run.manifest.cells
    key, new = str(cell["key"]), "our-model@corp.example"
    cells = [cell | {"key": new, "model": "our-model", "url": "https://corp.example/v1"}]
    target = {"url": "https://corp.example/v1", "model": "our-model", "api_key_env": "CORP_KEY"}

    def renamed(one):
        level = one.level and one.level.replace(key, new)
        return msgspec.structs.replace(one, cell=one.cell and new, level=level)

    archive = anonymised(
        msgspec.structs.replace(
            run,
            manifest=msgspec.structs.replace(
                run.manifest,
                cells=cells,
                campaign=run.manifest.campaign | {"target": target},
                server_facts={"url": "https://corp.example/v1"},
            ),
            events=[renamed(one) for one in run.events],
            requests=[renamed(one) for one in run.requests],
            samples=[renamed(one) for one in run.samples],
        )
    )
    whole = b"".join(archive.files.values())
    assert b"corp" not in whole and b"our-model" not in whole and b"CORP_KEY" not in whole
    assert b'"cell-1#' in whole and b"http://endpoint" in whole


def test_what_the_server_said_is_shown_and_an_unknown_error_is_not(tmp_path: Path) -> None:
    run = named_run(tmp_path / "run")
    timeout, other, *rest = run.requests
    timeout = msgspec.structs.replace(timeout, error="timeout")
    other = msgspec.structs.replace(other, error="bob", backend="/home/bob", finish_reason="a@bob")
    archive = anonymised(msgspec.structs.replace(run, requests=[timeout, other, *rest]))
    shown = archive.held[-1].removeprefix("texts in it: ").split(", ")
    expected = {"backend llama_cpp/cpu", "finish_reason length", "error timeout"}
    assert expected | {"error (removed)", "backend (removed)"} <= set(shown)
    assert not any(b"bob" in data for data in archive.files.values())


@pytest.mark.parametrize("problem", [KeyError("uid not found"), OSError("No username")])
def test_a_user_without_a_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, problem: Exception
) -> None:
    def nameless() -> str:
        raise problem

    monkeypatch.setattr(getpass, "getuser", nameless)
    assert anonymised(read_records(write_example_run(tmp_path / "run", ONE))).requests


def test_an_archive_with_a_flipped_byte_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "broken.tar.xz"
    write_archive(anonymised(read_records(write_example_run(tmp_path / "run", ONE))), path)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0xFF
    path.write_bytes(data)
    with pytest.raises(ReportError, match=re.escape(f"{path} is no archive")), opened(path):
        pass


def test_a_name_that_would_stay_stops_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOGNAME", "smollm2-135m")
    with pytest.raises(ReportError, match="still holds 'smollm2-135m'.*nothing was written"):
        anonymised(read_records(write_example_run(tmp_path / "run", ONE)))


def test_a_strangers_archive_writes_four_files_at_most(tmp_path: Path) -> None:
    path = tmp_path / "theirs.tar.xz"
    with tarfile.open(path, "w:xz") as tar:
        for name in ("../../evil", "/etc/evil", "x/.lock", f"x/{FILES[0]}"):
            member = tarfile.TarInfo(name)
            member.size = 2
            tar.addfile(member, io.BytesIO(b"{}"))
        link = tarfile.TarInfo(f"x/{FILES[1]}")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(link)
    with opened(path) as folder:
        assert [one.name for one in folder.iterdir()] == [FILES[0]]
        assert not (folder.parent / "evil").exists()
    (tmp_path / "text.tar.xz").write_text("no archive")
    with (
        pytest.raises(ReportError, match="is no archive of a run"),
        opened(tmp_path / "text.tar.xz"),
    ):
        pass


@pytest.mark.parametrize("where", ["a file's name", "a file that is not kept"])
def test_an_archive_is_unpacked_no_further_than_the_most_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """10 GB of zeros are 1.5 MB packed; a header was read whole, whatever its size."""
    monkeypatch.setattr(archive, "MOST_BYTES", 1 << 20)
    path = tmp_path / "bomb.tar.xz"
    with tarfile.open(path, "w:xz", format=tarfile.GNU_FORMAT) as tar:
        member = tarfile.TarInfo("x" * (2 << 20) if where == "a file's name" else "x")
        member.size = 0 if where == "a file's name" else 2 << 20
        tar.addfile(member, io.BytesIO(b"0" * member.size))
    with pytest.raises(ReportError, match="bomb.tar.xz holds more than 1 MiB"), opened(path):
        pass


def test_the_verb_says_first_and_writes_when_told(tmp_path: Path) -> None:
    folder = write_example_run(tmp_path / "run", ONE)
    said = CliRunner().invoke(app, ["share", str(folder)])
    assert said.exit_code == 0 and "nothing was written" in said.output
    assert "requests (times and token counts)" in said.output and "texts in it: " in said.output
    out = tmp_path / "x.tar.xz"
    done = CliRunner().invoke(app, ["share", str(folder), "--out", str(out)])
    assert done.exit_code == 0 and f"written: {out}" in done.output
    with opened(out) as shared:
        assert read_run(shared).cells[0].capacity == read_run(folder).cells[0].capacity

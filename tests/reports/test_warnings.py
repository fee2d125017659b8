from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from loadtests.metrics.named_warning import NamedWarning, Severity
from loadtests.records.events import Event, Interrupted, LevelAbandoned, RunResumed
from loadtests.records.schema import RequestRecord, ResourceSample
from reports.numbers import RunNumbers
from reports.run import read_records, read_run
from reports.warnings import Evidence, of_levels
from tests.reports.example_run import FACTS, RUNGS, SLO, write_example_run

SMALL = {"smollm2-135m": (RUNGS["smollm2-135m"][0], (1.6, 3.2))}


def warnings(folder: Path) -> dict[str, NamedWarning]:
    return {warning.code: warning for warning in read_run(folder).warnings}


def small(folder: Path, **changes: Any) -> Path:
    return write_example_run(folder, SMALL, window=30.0, **changes)


def append_events(folder: Path, *events: Event) -> None:
    with open(folder / "events.jsonl", "ab") as file:
        for event in events:
            file.write(msgspec.json.encode(event) + b"\n")


def change_samples(folder: Path, change: Any) -> None:
    samples = [
        msgspec.json.decode(line, type=ResourceSample)
        for line in (folder / "samples.jsonl").read_bytes().splitlines()
    ]
    (folder / "samples.jsonl").write_bytes(
        b"".join(msgspec.json.encode(change(sample)) + b"\n" for sample in samples)
    )


def change_ready(folder: Path, **detail: Any) -> None:
    events = [
        msgspec.json.decode(line) for line in (folder / "events.jsonl").read_bytes().splitlines()
    ]
    for event in events:
        if event["kind"] == "cell_ready":
            event |= detail
    (folder / "events.jsonl").write_bytes(
        b"".join(msgspec.json.encode(event) + b"\n" for event in events)
    )


def test_a_clean_run_on_machines_of_their_own_has_few(tmp_path: Path) -> None:
    slo = msgspec.structs.replace(SLO, name="own")
    folder = small(tmp_path / "run", slo=slo, facts=FACTS | {"virtualisation": None})
    manifest = msgspec.json.decode((folder / "manifest.json").read_bytes())
    manifest["client_facts"] = FACTS | {"hostname": "another"}
    (folder / "manifest.json").write_bytes(msgspec.json.encode(manifest))
    # A window of 30 s confirms nothing.
    assert set(warnings(folder)) <= {"AloneOnly", "TooFewSamples"}


def test_the_setting(run: RunNumbers) -> None:
    found = {warning.code: warning for warning in run.warnings}
    assert (
        "90 %" in found["LowerTarget"].text
        and "99 %" in found["LowerTarget"].text
        and found["LowerTarget"].severity == "warning"
    )
    assert "0.040 of a core" in found["OneMachine"].text
    assert "virtual machine" in found["Virtualised"].text
    assert all(
        warning.advice.endswith(".") and warning.text.endswith(".") for warning in run.warnings
    )


def test_interruption_is_on_record(tmp_path: Path) -> None:
    folder = small(tmp_path / "run")
    at = 1.8e9
    append_events(
        folder,
        LevelAbandoned(unix_seconds=at, cell="c", level="x", reason="the runner ended within it"),
        Interrupted(unix_seconds=at, reason="the runner was killed"),
        RunResumed(unix_seconds=at),
    )
    assert (
        warnings(folder)["Interrupted"].text
        == "The run was interrupted once and resumed once; 1 level begun and not counted."
    )


def test_level_that_the_client_spoiled_does_not_count(tmp_path: Path) -> None:
    """Late sends are the client's fault: the level is shown and left out of the capacity."""

    def late(record: RequestRecord) -> RequestRecord:
        return (
            msgspec.structs.replace(record, sent_seconds=record.due_seconds + 0.1)
            if record.level.endswith("3.2")
            else record
        )

    folder = small(tmp_path / "run", tweak=late)
    found = warnings(folder)
    assert (
        found["LateSends"].severity == "serious"
        and "left out of the capacity" in found["LateSends"].text
        and "SmolLM2-135M" in found["LateSends"].text
    )
    capacity = read_run(folder).cells[0].capacity
    assert capacity is not None and capacity.high is None  # the level that failed says nothing
    assert next(iter(found.values())).severity == "serious"  # serious ones first


def test_swap_and_noise_and_bad_samples(tmp_path: Path) -> None:
    folder = small(tmp_path / "run")
    start = 0.0

    def spoil(sample: ResourceSample) -> ResourceSample:
        nonlocal start
        start = start or sample.unix_seconds
        return msgspec.structs.replace(
            sample,
            swap_used_bytes=int((sample.unix_seconds - start) * (4 << 20)),
            machine_cpu_share=0.95,
            valid=False,
            reasons=["engine process changed"],
        )

    change_samples(folder, spoil)
    found = warnings(folder)
    assert {"Swapping", "NoisyMachine", "BadSamples", "EngineRestarted"} <= set(found)
    assert "0.84 cores" in found["NoisyMachine"].text  # 2 cores x 0.95, less 0.97 + 0.05 + 0.04


def test_what_the_server_said_when_it_was_ready(tmp_path: Path) -> None:
    folder = small(tmp_path / "run")
    change_ready(
        folder,
        synthetic=True,
        layout={"shared": ["the engine shares core 0 with the client"]},
        target={"notes": ["no token counts"]},
    )
    found = warnings(folder)
    assert "seeded random numbers" in found["RandomWeights"].text
    assert found["SharedCores"].text == "The engine shares core 0 with the client."
    assert found["EndpointLacks"].text == "No token counts."


def test_memory_that_was_predicted_wrong(tmp_path: Path) -> None:
    folder = small(tmp_path / "run")
    assert "MemoryPrediction" not in warnings(folder)
    change_ready(folder, info={"measured": {"weight_bytes": 200 << 20, "kv_bytes": 900 << 20}})
    assert "%" in warnings(folder)["MemoryPrediction"].text


def test_levels_that_contradict_each_other(tmp_path: Path) -> None:
    """A rate that fails below one that holds."""

    def spoil(record: RequestRecord) -> RequestRecord:
        if record.level.endswith("1.0") and record.first_content_seconds is not None:
            changes = {
                name: getattr(record, name) + 9
                for name in ("first_content_seconds", "last_content_seconds", "ended_seconds")
            }
            return msgspec.structs.replace(
                record, content_seconds=[at + 9 for at in record.content_seconds], **changes
            )
        return record

    folder = write_example_run(
        tmp_path / "run",
        {"smollm2-135m": (RUNGS["smollm2-135m"][0], (1.0, 1.6))},
        window=60.0,
        tweak=spoil,
    )
    assert "met the SLO at 1.6/s and missed it at 1.0/s" in warnings(folder)["Contradiction"].text


@pytest.mark.parametrize("code", ["Unsteady", "LittlesLaw"])
def test_an_overloaded_level_is_unsteady_by_nature(
    folder: Path, run: RunNumbers, code: str
) -> None:
    """The same warning counts on a level that meets the SLO, and not on one that misses it."""
    warning = NamedWarning(code, Severity.WARNING, "in flight rose", "read the verdict")
    evidence = read_records(folder)

    def warned(verdict: str) -> list[NamedWarning]:
        cells = tuple(
            msgspec.structs.replace(
                cell,
                levels=tuple(
                    msgspec.structs.replace(
                        level, summary=msgspec.structs.replace(level.summary, warnings=(warning,))
                    )
                    for level in cell.levels
                    if level.verdict == verdict
                ),
            )
            for cell in run.cells
        )
        assert any(cell.levels for cell in cells)
        numbers = msgspec.structs.replace(run, cells=cells)
        return list(of_levels(Evidence(evidence, numbers)))

    assert warned("fails") == []
    (found,) = warned("holds")
    assert found.code == code and "in flight rose" in found.text and len(found.cells) == 3

"""From a run folder to numbers: what is cut short, broken, missing or under another SLO."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from loadtests.capacity.words import in_words
from loadtests.metrics.named_warning import NamedWarning, Severity
from loadtests.metrics.slo import SLO_PRESETS
from loadtests.records.events import CapacityStatus
from loadtests.records.schema import RequestRecord
from models.ladder import rung
from reports.errors import BadRun
from reports.findings import crossover
from reports.numbers import MemoryNumbers, RunNumbers
from reports.run import read_run
from reports.sentences import headline
from tests.reports.example_run import FACTS, RUNGS, SLO, write_example_run
from tests.reports.small_runs import SMALL, change_manifest, read_small


def test_no_level_finished(tmp_path: Path) -> None:
    folder = write_example_run(tmp_path / "run", SMALL, window=30.0)
    kept = [
        line
        for line in (folder / "events.jsonl").read_text().splitlines()
        if '"level_finished"' not in line and '"run_finished"' not in line
    ]
    (folder / "events.jsonl").write_text("\n".join(kept) + "\n")
    run = read_run(folder)
    assert (
        run.cells[0].state == "unfinished"
        and run.cells[0].levels == ()
        and run.cells[0].capacity is None
    )
    assert "no level was measured to its end" in headline(run, crossover(run))
    assert "NotFinished" in {warning.code for warning in run.warnings}


def test_a_level_that_was_cut_short_ends_where_it_ended(tmp_path: Path) -> None:
    folder = write_example_run(tmp_path / "run", SMALL, window=30.0)
    whole = read_run(folder).cells[0].levels[-1]
    text = (folder / "events.jsonl").read_text()
    last = next(line for line in reversed(text.splitlines()) if '"level_finished"' in line)
    event = msgspec.json.decode(last)
    event |= {"window_seconds": 10.0, "cut_short": "12 requests were bad"}
    (folder / "events.jsonl").write_text(text.replace(last, msgspec.json.encode(event).decode()))
    level = read_run(folder).cells[0].levels[-1]
    assert (
        level.summary.window.seconds == 10.0
        and 0 < level.summary.counts.due < whole.summary.counts.due
        and level.cut_short == "12 requests were bad"
    )


def test_lines_left_out_are_said(tmp_path: Path) -> None:
    folder = write_example_run(tmp_path / "run", SMALL, window=30.0)
    before = read_run(folder)
    requests = folder / "requests.jsonl"
    with open(requests, "ab") as file:
        file.write(b'{"cell":"smollm2-135m/Q4_0/llama_cpp","level":"smo')

    def said(run: RunNumbers) -> NamedWarning:
        return next(warning for warning in run.warnings if warning.code == "LinesLeftOut")

    after = read_run(folder)
    assert after.cells == before.cells and said(after).severity is Severity.NOTE
    assert "the cut-off last line of requests.jsonl (50 bytes)" in said(after).text
    lines = requests.read_bytes().split(b"\n")
    requests.write_bytes(b"\n".join([lines[0][:-5], *lines[1:-1], b""]))
    damaged = said(read_run(folder))
    assert damaged.severity is Severity.SERIOUS
    assert "Requests of 1 finished levels are missing, " in damaged.text


def test_a_run_is_read_whichever_line_of_its_journal_is_broken(tmp_path: Path) -> None:
    folder = write_example_run(tmp_path / "run", SMALL, window=30.0)
    journal = folder / "events.jsonl"
    lines = journal.read_bytes().splitlines(keepends=True)
    for broken in range(len(lines)):
        journal.write_bytes(b"".join([*lines[:broken], b"{\n", *lines[broken + 1 :]]))
        run = read_run(folder)
        assert "LinesLeftOut" in {warning.code for warning in run.warnings}
        headline(run, crossover(run))


def test_skipped_cell_keeps_its_reason(run: RunNumbers) -> None:
    cell = next(cell for cell in run.cells if cell.model == "qwen2.5-14b")
    assert cell.state == "skipped" and "needs 14 GiB" in cell.reason and cell.levels == ()
    assert cell.memory.measured_peak_bytes is None and cell.memory.predicted_bytes is not None


def test_memory_is_predicted_for_the_cpu_that_was_measured(tmp_path: Path) -> None:
    """AMX keeps a tied embedding twice: of the cell, and of the rungs above it."""

    def predicted(name: str, facts: dict[str, Any]) -> dict[str, MemoryNumbers]:
        run = read_small(tmp_path / name, facts=facts)
        return {one.spec.name: one.memory for one in crossover(run).rungs}

    plain = predicted("plain", FACTS)
    with_amx = predicted("amx", FACTS | {"isa": ["avx2", "avx512_vnni", "amx_int8"]})
    assert predicted("unknown", {}) == plain
    for name in ("smollm2-135m", "llama-3.2-1b"):
        spec = rung(name).spec
        twice = (with_amx[name].weight_bytes or 0) - (plain[name].weight_bytes or 0)
        assert twice > spec.vocabulary * spec.hidden / 2
        assert (with_amx[name].predicted_bytes or 0) - (plain[name].predicted_bytes or 0) == twice


def test_a_skipped_cells_kv_cache_is_that_of_the_cpu(tmp_path: Path) -> None:
    """torch computes bf16 weights in fp32 where the CPU has no bf16."""

    def kv_bytes(name: str, isa: list[str]) -> int | None:
        folder = write_example_run(tmp_path / name, {}, facts=FACTS | {"isa": isa})
        cell = {"key": "x", "model": "135m", "backend": "torch", "weight_format": "bf16"}
        sizes = {"slots": 2, "context_tokens": 512}
        return read_run(change_manifest(folder, cells=[cell | sizes])).cells[0].memory.kv_bytes

    whole = 2 * 512 * rung("135m").spec.kv_bytes_per_token("fp32")
    assert kv_bytes("plain", ["avx2"]) == whole
    assert kv_bytes("wide", ["avx512f", "avx512bw", "avx512vl"]) == whole // 2


def test_failed_requests_are_lost_not_dropped(tmp_path: Path) -> None:
    def break_some(record: RequestRecord) -> RequestRecord:
        if record.index % 3 or not record.level.endswith("1.6"):
            return record
        return RequestRecord(
            cell=record.cell,
            level=record.level,
            index=record.index,
            due_seconds=record.due_seconds,
            sent_seconds=record.sent_seconds,
            ended_seconds=record.due_seconds + 0.01,
            status=429,
            error="refused",
        )

    run = read_small(
        tmp_path / "run", {"smollm2-135m": (RUNGS["smollm2-135m"][0], (1.6,))}, tweak=break_some
    )
    level = run.cells[0].levels[-1]
    assert 0.6 < (level.summary.counts.attainment or 0) < 0.7
    assert level.verdict == "fails" and sum(level.summary.counts.failed.values()) > 10
    lost = sum(one.ttft_seconds is None for one in level.answers)
    assert lost == sum(level.summary.counts.failed.values())


def test_another_slo_needs_no_new_measurement(folder: Path) -> None:
    strict = read_run(folder, msgspec.structs.replace(SLO_PRESETS["interactive"], target=0.9))
    states = {cell.model: cell.status for cell in strict.cells}
    assert states["llama-3.2-1b"] is CapacityStatus.NONE
    assert states["smollm2-135m"] is not CapacityStatus.NONE
    lax = read_run(folder, msgspec.structs.replace(SLO_PRESETS["reading"], target=0.9))
    own = read_run(folder)
    for loose, cell in zip(lax.cells, own.cells, strict=True):
        assert (loose.held or 0) >= (cell.held or 0)


def cut(folder: Path, rate: float) -> Path:
    """The run, with the level at `rate` cut short under the run's SLO."""
    out = []
    for line in (folder / "events.jsonl").read_text().splitlines():
        event = msgspec.json.decode(line)
        if event["kind"] == "level_finished" and event["level"].endswith(f"-{rate}"):
            event["cut_short"] = "12 requests were bad"
        out.append(msgspec.json.encode(event).decode())
    (folder / "events.jsonl").write_text("\n".join(out) + "\n")
    return folder


def test_a_level_that_was_cut_short_says_nothing_of_a_looser_slo(tmp_path: Path) -> None:
    """It fails by the run's SLO, and so by stricter ones; the looser are not to blame for it."""
    folder = write_example_run(tmp_path / "run", SMALL)
    whole = read_run(folder)
    cut(folder, 3.2)

    def high(**limits: float) -> float | None:
        slo = msgspec.structs.replace(SLO, **limits)
        (cell,) = read_run(folder, slo).cells
        assert cell.capacity is not None
        is_left_out = "1 level is not counted" in in_words(cell.capacity)
        assert is_left_out is (cell.capacity.left_out == 1) is (cell.capacity.high is None)
        return cell.capacity.high

    assert whole.cells[0].capacity is not None
    assert high() == pytest.approx(whole.cells[0].capacity.high)
    assert high(ttft_seconds=1.0) is not None and high(target=0.95) is not None
    assert high(tpot_seconds=0.2) is None
    assert high(target=0.8) is None
    assert high(ttft_seconds=1.0, tpot_seconds=0.2) is None


def test_unknown_model_and_missing_facts_are_no_crash(tmp_path: Path) -> None:
    folder = write_example_run(tmp_path / "run", SMALL, facts={}, predicted={})
    manifest = msgspec.json.decode((folder / "manifest.json").read_bytes())
    manifest["cells"][0]["model"] = "somebody/elses-model"
    (folder / "manifest.json").write_bytes(msgspec.json.encode(manifest))
    run = read_run(folder)
    found = crossover(run)
    assert headline(run, found).startswith(
        "On this machine (llama_cpp, 2 threads on 2 cores, shared with HTTP and the load "
        "generator at a higher priority), somebody/elses-model Q4_0 holds up to"
    )
    assert run.cells[0].memory.predicted_bytes is None and found.takeovers == ()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ("manifest", "holds no run"),
        ("events", "nothing was begun"),
        ("slo", "has no slo that can be read"),
    ],
)
def test_bad_folders_are_refused_in_one_sentence(tmp_path: Path, damage: str, message: str) -> None:
    folder = write_example_run(tmp_path / "run", SMALL, window=30.0)
    if damage == "manifest":
        (folder / "manifest.json").unlink()
    elif damage == "events":
        (folder / "events.jsonl").unlink()
    else:
        manifest = msgspec.json.decode((folder / "manifest.json").read_bytes())
        manifest["campaign"]["slo"] = {"name": "x"}
        (folder / "manifest.json").write_bytes(msgspec.json.encode(manifest))
    with pytest.raises(BadRun, match=message):
        read_run(folder)

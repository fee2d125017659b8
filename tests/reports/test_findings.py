from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from loadtests.metrics.slo import SLO_PRESETS
from loadtests.records.schema import RequestRecord
from models import formatting
from reports.errors import BadRun, NotComparable
from reports.findings import crossover, machines
from reports.merge import check_comparable, merged
from reports.numbers import RunNumbers
from reports.render.tables import engine_words
from reports.run import read_run
from reports.sentences import headline, machine_words, sentences
from tests.reports.example_run import FACTS, RUNGS, SLO, cell_key, write_example_run

SMALL = {"smollm2-135m": (RUNGS["smollm2-135m"][0], (1.6, 3.2))}
LARGE = {"llama-3.2-3b": RUNGS["llama-3.2-3b"]}


def read_small(folder: Path, rungs: dict[str, Any] = SMALL, **changes: Any) -> RunNumbers:
    return read_run(write_example_run(folder, rungs, window=30.0, **changes))


def headline_of(run: RunNumbers) -> str:
    return headline(run, crossover(run))


def test_the_sentence(run: RunNumbers) -> None:
    found = crossover(run)
    cell = next(cell for cell in run.cells if cell.model == "llama-3.2-1b")
    capacity = cell.capacity
    expected = formatting.rate_with_interval(capacity.estimate, capacity.low, capacity.high)
    assert headline(run, found) == (
        "On this machine (AMD EPYC 7B13, 2 cores, 8 GiB of memory), "
        "Llama-3.2-1B Q4_0 meets the chat target "
        "(first token within 2 s, then 100 ms a token, for 90 % of requests) "
        f"up to {expected}; Llama-3.2-3B does not meet it at any rate."
    )
    assert (
        found.largest is cell
        and found.first_not is not None
        and found.first_not.model == "llama-3.2-3b"
    )


def test_three_ways_to_stop(run: RunNumbers) -> None:
    found = crossover(run, asked_rate=1.0)
    by = {stop.model: stop.by for stop in found.stops}
    assert by["llama-3.2-3b"] == "latency"
    assert by["smollm2-360m"] == "throughput" and by["llama-3.2-1b"] == "throughput"
    assert by["qwen2.5-14b"] == "memory" and by["llama-3.3-70b"] == "memory"
    assert "smollm2-135m" not in by
    latency = next(text for text in sentences(run, found) if text.startswith("By latency"))
    assert (
        "first token" in latency
        and "per token" in latency
        and "SLO 2 s" in latency
        and "SLO 100 ms" in latency
    )


def test_only_the_part_that_is_broken_is_named(tmp_path: Path) -> None:
    run = read_small(tmp_path / "run", LARGE, slo=msgspec.structs.replace(SLO, ttft_seconds=30.0))
    found = crossover(run)
    assert "200 ms per token (SLO 100 ms)" in headline(run, found) and "waits" not in headline(
        run, found
    )


def test_gpu_that_takes_over_is_big_enough_and_labelled(run: RunNumbers) -> None:
    found = crossover(run)
    takeover = next(one for one in found.takeovers if one.cell.model == "llama-3.2-3b")
    assert takeover.options
    for option in takeover.options:
        assert (option.device.memory_gib or 0) * 2**30 > takeover.need.total_bytes
        assert option.within_slo is True
    assert takeover.need_16bit.weight_bytes > 3 * takeover.need.weight_bytes
    text = next(text for text in sentences(run, found) if text.startswith("A GPU"))
    assert (
        "predicted" in text
        and "published" in text
        and formatting.size(takeover.need.total_bytes) in text
    )


def test_asked_rate_is_answered_with_machines(run: RunNumbers) -> None:
    found = crossover(run, asked_rate=1.0)
    text = next(text for text in sentences(run, found) if text.startswith("At your 1.0 requests/s"))
    assert "SmolLM2-135M Q4_0 is the largest" in text
    cell = next(cell for cell in run.cells if cell.model == "smollm2-360m")
    needed = machines(cell, 1.0)
    assert needed is not None and needed * (cell.capacity.low or 0) >= 1.0 > (needed - 1) * (
        cell.capacity.low or 0
    )
    assert f"SmolLM2-360M Q4_0 would take {needed} such machines" in text


def test_all_hold(tmp_path: Path) -> None:
    run = read_small(tmp_path / "run")
    found = crossover(run)
    assert "SmolLM2-135M Q4_0 meets the chat target" in headline(
        run, found
    ) and "no larger model was found" in headline(run, found)
    assert found.first_not is None


def test_none_hold(tmp_path: Path) -> None:
    run = read_small(tmp_path / "run", LARGE)
    found = crossover(run)
    assert "no model that was measured meets the chat target" in headline(
        run, found
    ) and "Llama-3.2-3B" in headline(run, found)
    assert found.largest is None


def test_nothing_was_seen_to_be_too_much(tmp_path: Path) -> None:
    run = read_small(tmp_path / "run", {"smollm2-135m": (RUNGS["smollm2-135m"][0], (0.5, 1.0))})
    assert run.cells[0].capacity.state == "at_least" and run.cells[0].capacity.high is None
    assert "up to at least" in headline(run, crossover(run))
    assert "OpenEnded" in {warning.code for warning in run.warnings}


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
        and run.cells[0].capacity.state == "not_measured"
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


def test_cut_off_last_line_is_left_out_and_said(tmp_path: Path) -> None:
    folder = write_example_run(tmp_path / "run", SMALL, window=30.0)
    before = read_run(folder)
    with open(folder / "requests.jsonl", "ab") as file:
        file.write(b'{"cell":"smollm2-135m/Q4_0/llama_cpp","level":"smo')
    after = read_run(folder)
    assert after.cells == before.cells
    assert "requests.jsonl (50 bytes)" in next(
        warning.text for warning in after.warnings if warning.code == "CutOffLine"
    )


def test_skipped_cell_keeps_its_reason(run: RunNumbers) -> None:
    cell = next(cell for cell in run.cells if cell.model == "qwen2.5-14b")
    assert cell.state == "skipped" and "needs 14 GiB" in cell.reason and cell.levels == ()
    assert cell.memory.measured_peak_bytes is None and cell.memory.predicted_bytes is not None


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
    assert sum(ttft is None for ttft, _ in level.answers) == sum(
        level.summary.counts.failed.values()
    )


def test_another_slo_needs_no_new_measurement(folder: Path) -> None:
    strict = read_run(folder, msgspec.structs.replace(SLO_PRESETS["interactive"], target=0.9))
    states = {cell.model: cell.capacity.state for cell in strict.cells}
    assert (
        states["smollm2-360m"] == states["llama-3.2-1b"] == "none"
        and states["smollm2-135m"] != "none"
    )
    lax = read_run(folder, msgspec.structs.replace(SLO_PRESETS["reading"], target=0.9))
    assert (
        next(cell for cell in lax.cells if cell.model == "llama-3.2-1b").capacity.state
        == "interval"
    )


def test_unknown_model_and_missing_facts_are_no_crash(tmp_path: Path) -> None:
    folder = write_example_run(tmp_path / "run", SMALL, window=30.0, facts={})
    manifest = msgspec.json.decode((folder / "manifest.json").read_bytes())
    manifest["cells"][0]["model"] = "somebody/elses-model"
    (folder / "manifest.json").write_bytes(msgspec.json.encode(manifest))
    run = read_run(folder)
    found = crossover(run)
    assert headline(run, found).startswith("On this machine, somebody/elses-model Q4_0 meets")
    assert run.cells[0].memory.predicted_bytes is None and found.takeovers == ()


def test_endpoint_is_named_in_place_of_this_machine(tmp_path: Path) -> None:
    folder = write_example_run(tmp_path / "run", SMALL, window=30.0)
    manifest = msgspec.json.decode((folder / "manifest.json").read_bytes())
    manifest["cells"][0] |= {"url": "http://10.0.0.9:8000", "backend": "external"}
    (folder / "manifest.json").write_bytes(msgspec.json.encode(manifest))
    assert headline_of(read_run(folder)).startswith("At http://10.0.0.9:8000, ")


def test_machine_words_say_no_more_than_is_known() -> None:
    assert machine_words(FACTS) == "AMD EPYC 7B13, 2 cores, 8 GiB of memory"
    assert (
        machine_words(FACTS | {"cgroup_cores": 1.5}) == "AMD EPYC 7B13, 1.5 cores, 8 GiB of memory"
    )
    assert machine_words({}) == ""


def test_runs_of_different_machines_are_not_mixed(tmp_path: Path) -> None:
    one = read_small(tmp_path / "one")
    other = read_small(tmp_path / "other", facts=FACTS | {"cpu_model": "Intel Xeon 6980P"})
    with pytest.raises(
        NotComparable, match="runs one and other differ in CPU: AMD EPYC 7B13 and Intel Xeon 6980P"
    ):
        check_comparable([one, other])
    more = read_small(tmp_path / "more", facts=FACTS | {"memory_total_bytes": 16 << 30})
    with pytest.raises(NotComparable, match=r"differ in memory: 8 GiB and 16 GiB"):
        check_comparable([one, more])
    slo = read_small(tmp_path / "slo", slo=msgspec.structs.replace(SLO, target=0.95))
    with pytest.raises(NotComparable, match=r"differ in their SLO: target 0\.9 and 0\.95"):
        check_comparable([one, slo])
    close = read_small(
        tmp_path / "close",
        facts=FACTS | {"memory_total_bytes": (8 << 30) - (20 << 20), "kernel": "6.2"},
    )
    check_comparable([one, close])


def test_runs_of_one_machine_become_one(tmp_path: Path) -> None:
    one = read_small(tmp_path / "one")
    again = read_small(
        tmp_path / "again",
        {"smollm2-135m": (RUNGS["smollm2-135m"][0], (2.0, 2.4)), **LARGE},
        seed=8,
    )
    both = merged([one, again])
    assert [cell.model for cell in both.cells] == ["smollm2-135m", "llama-3.2-3b"]
    cell = both.cells[0]
    assert cell.key == cell_key("smollm2-135m") and len(cell.levels) == len(
        one.cells[0].levels
    ) + len(again.cells[0].levels)
    low, high = cell.capacity.low, cell.capacity.high
    assert low is not None and high is not None and 1.0 < low < high < 3.2
    assert both.requests == one.requests + again.requests and both.name == "one, again"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ("manifest", "holds no run"),
        ("events", "nothing was begun"),
        ("middle", "line 3 is broken"),
        ("slo", "has no slo that can be read"),
    ],
)
def test_bad_folders_are_refused_in_one_sentence(tmp_path: Path, damage: str, message: str) -> None:
    folder = write_example_run(tmp_path / "run", SMALL, window=30.0)
    if damage == "manifest":
        (folder / "manifest.json").unlink()
    elif damage == "events":
        (folder / "events.jsonl").unlink()
    elif damage == "middle":
        text = (folder / "requests.jsonl").read_text().splitlines()
        (folder / "requests.jsonl").write_text("\n".join([*text[:2], "{", *text[2:]]) + "\n")
    else:
        manifest = msgspec.json.decode((folder / "manifest.json").read_bytes())
        manifest["campaign"]["slo"] = {"name": "x"}
        (folder / "manifest.json").write_bytes(msgspec.json.encode(manifest))
    with pytest.raises(BadRun, match=message):
        read_run(folder)


def change_manifest(folder: Path, **changes: Any) -> Path:
    manifest = msgspec.json.decode((folder / "manifest.json").read_bytes())
    (folder / "manifest.json").write_bytes(msgspec.json.encode(manifest | changes))
    return folder


@pytest.mark.parametrize(
    ("key", "one", "other", "message"),
    [
        ("server", {"slots": 4}, {"slots": 64}, "differ in their server.slots: 4 and 64"),
        ("workloads", [{"name": "a"}], [{"name": "b"}], "differ in their workloads"),
    ],
)
def test_runs_of_other_settings_are_not_mixed(
    tmp_path: Path, key: str, one: Any, other: Any, message: str
) -> None:
    runs = []
    for name, value in (("one", one), ("other", other)):
        folder = write_example_run(tmp_path / name, SMALL, window=30.0)
        campaign = {"slo": msgspec.to_builtins(SLO), "seed": 7, key: value}
        runs.append(read_run(change_manifest(folder, campaign=campaign)))
    with pytest.raises(NotComparable, match=message):
        merged(runs)


def test_only_a_cell_skipped_for_want_of_memory_does_not_fit(tmp_path: Path) -> None:
    """The words of the reason do not count: "needs" and "fit" stand in reasons of other causes."""
    reason = "kv_dtype q8_0 needs flash attention, which does not fit this backend"
    run = read_small(tmp_path / "run", skipped={"qwen2.5-14b": reason}, skip_cause="settings")
    assert crossover(run).first_not is None and "does not fit" not in headline_of(run)
    run = read_small(tmp_path / "memory", skipped={"qwen2.5-14b": "no room"})
    assert "Qwen2.5-14B does not fit in memory" in headline_of(run)


def test_the_device_behind_an_endpoint_is_not_made_up(tmp_path: Path) -> None:
    folder = write_example_run(tmp_path / "run", {}, window=30.0)
    cell = {"key": "x", "model": "135m", "backend": "external", "url": "http://10.0.0.9:8000"}
    run = read_run(change_manifest(folder, cells=[cell]))
    assert run.cells[0].device is None and run.cells[0].memory.predicted_bytes is None
    assert engine_words(run.cells[0]) == "external"

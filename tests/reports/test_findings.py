from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from loadtests.metrics.named_warning import NamedWarning, Severity
from loadtests.metrics.slo import SLO_PRESETS
from loadtests.records.events import CapacityStatus
from loadtests.records.schema import RequestRecord
from models import formatting
from reports.charts.crossover_map import UNKNOWN, above_words, map_rows
from reports.errors import BadRun, NotComparable
from reports.findings import GpuOption, crossover, machines
from reports.merge import check_comparable, merged
from reports.numbers import RunNumbers
from reports.render.page import cards
from reports.render.tables import cell_records, engine_words, state_words
from reports.run import read_run
from reports.sentences import headline, machine_words, sentences, thread_words
from tests.reports.example_run import FACTS, RUNGS, SLO, Law, cell_key, write_example_run

SMALL = {"smollm2-135m": (RUNGS["smollm2-135m"][0], (1.6, 3.2))}
LARGE = {"llama-3.2-3b": RUNGS["llama-3.2-3b"]}


def read_small(folder: Path, rungs: dict[str, Any] = SMALL, **changes: Any) -> RunNumbers:
    return read_run(write_example_run(folder, rungs, window=30.0, **changes))


def headline_of(run: RunNumbers) -> str:
    return headline(run, crossover(run))


def test_the_sentence(run: RunNumbers) -> None:
    """What is held, what it rests on, lengths, SLO with its share, threads of cores."""
    found = crossover(run)
    cell = next(cell for cell in run.cells if cell.model == "llama-3.2-1b")
    assert cell.capacity is not None and cell.held == 0.15
    by = cell.capacity.confirmed_by
    assert by is not None and by.levels == 1 and by.requests == cell.loaded[0].summary.counts.due
    words = headline(run, found)
    assert words.startswith(
        "On this machine (AMD EPYC 7B13, 2 cores, 8 GiB of memory; "
        "llama_cpp, 2 threads on 2 of 2 cores, shared with HTTP and the load generator at a "
        "higher priority), Llama-3.2-1B Q4_0 holds up to 0.15 requests/s "
        f"(confirmed: a level of 6.7 min, {by.requests} requests; capacity "
    )
    assert (
        " by the levels of 1 start), for requests of on average 161 prompt and 40 output tokens. "
        in words
    )
    assert (
        "SLO chat: first token within 2 s, then 100 ms a token, for 90 % of requests. "
        "Llama-3.2-3B at no rate: a single-stream request to Llama-3.2-3B already waits "
    ) in words
    assert found.largest is cell and found.between == ()
    assert found.first_not is not None and found.first_not.model == "llama-3.2-3b"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, "2 threads on 2 of 2 cores, shared with HTTP and the load generator at a higher pri"),
        ({"nice": 0}, "2 threads on 2 of 2 cores, shared with HTTP and the load generator"),
        ({"threads": 1, "engine_cores": 1, "shares_cores": False}, "1 thread on 1 of 2 cores"),
        ({"engine_cores": None, "shares_cores": False}, "2 threads on 2 cores"),
        ({"threads": None}, ""),
    ],
)
def test_on_how_many_threads_of_how_many_cores(
    run: RunNumbers, changes: dict[str, Any], words: str
) -> None:
    said = thread_words(msgspec.structs.replace(run.cells[0], **changes), run.facts)
    assert said.startswith(f"llama_cpp, {words}") if words else said == ""


@pytest.mark.parametrize(
    ("window", "status", "words"),
    [
        (30.0, CapacityStatus.ALONE_ONLY, "SmolLM2-135M alone only: single-stream requests meet"),
        (None, CapacityStatus.UNRESOLVED, "SmolLM2-135M unresolved: "),
    ],
)
def test_what_no_level_confirmed_is_not_said_to_hold(
    tmp_path: Path, window: float | None, status: CapacityStatus, words: str
) -> None:
    """Levels too short to confirm; a single-stream level of which most requests were lost."""

    def lost(record: RequestRecord) -> RequestRecord | None:
        return record if window is not None or record.index < 3 else None

    rates = (0.8, 2.4) if window is not None else ()
    rungs = {"smollm2-135m": (RUNGS["smollm2-135m"][0], rates)}
    folder = write_example_run(
        tmp_path / "run", rungs, window=window or 30.0, tweak=lost, predicted={}
    )
    run = read_run(folder)
    (cell,) = run.cells
    assert cell.status is status and cell.held is None
    found = crossover(run, asked_rate=1.0)
    shown = [headline(run, found), *sentences(run, found), state_words(cell)]
    shown += [card.name + card.value + card.note for card in cards(run, found)]
    shown += [warning.text for warning in run.warnings]
    assert "no rate is confirmed for requests" in shown[0] and words in shown[0]
    assert not any("holds up to" in text for text in shown)
    assert cell_records(run)[0]["capacity_status"] == status.value
    column = map_rows(run.cells).columns[0]
    assert column["floor"] is None and column["label"] == status.value.replace("_", " ")


def test_a_slow_rate_is_said_per_minute(tmp_path: Path) -> None:
    law = Law(0.4, 0.05, 0.02)
    slo = msgspec.structs.replace(SLO, ttft_seconds=30.0, tpot_seconds=1.0)
    run = read_run(
        write_example_run(tmp_path / "run", {"1b": (law, (0.02, 0.09))}, slo=slo, window=4000.0)
    )
    assert run.cells[0].held == 0.02
    assert " holds up to 1.2 requests/min (confirmed: " in headline_of(run)


def test_three_ways_to_stop(run: RunNumbers) -> None:
    found = crossover(run, asked_rate=1.0)
    by = {stop.model: stop.by for stop in found.stops}
    assert by["llama-3.2-3b"] == "latency"
    assert by["smollm2-360m"] == "throughput" and by["llama-3.2-1b"] == "throughput"
    assert by["qwen2.5-14b"] == "memory" and by["llama-3.3-70b"] == "memory"
    assert "smollm2-135m" not in by
    latency = headline(run, found)
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
        assert option.roofline.tpot_seconds > 0 and option.roofline.ttft_seconds
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
    assert "SmolLM2-135M Q4_0 is the largest model that is confirmed" in text
    cell = next(cell for cell in run.cells if cell.model == "smollm2-360m")
    needed = machines(cell, 1.0)
    assert cell.held and needed is not None and needed * cell.held >= 1.0
    assert (needed - 1) * cell.held < 1.0
    assert f"SmolLM2-360M Q4_0 would take {needed} such machines" in text


def test_all_hold(tmp_path: Path) -> None:
    run = read_run(write_example_run(tmp_path / "run", SMALL))
    found = crossover(run)
    words = headline(run, found)
    assert "SmolLM2-135M Q4_0 holds up to 1.6 requests/s" in words
    assert words.endswith("No larger model was measured.")
    assert found.first_not is None


def test_none_hold(tmp_path: Path) -> None:
    run = read_small(tmp_path / "run", LARGE)
    found = crossover(run)
    assert "no rate is confirmed for requests of" in headline(run, found)
    assert "Llama-3.2-3B at no rate: a single-stream request" in headline(run, found)
    assert found.largest is None


def test_nothing_was_seen_to_be_too_much(tmp_path: Path) -> None:
    rungs = {"smollm2-135m": (RUNGS["smollm2-135m"][0], (0.5, 1.0))}
    run = read_run(write_example_run(tmp_path / "run", rungs))
    capacity = run.cells[0].capacity
    assert capacity is not None and capacity.status is CapacityStatus.AT_LEAST
    assert capacity.held == 1.0 and capacity.high is None
    assert "holds up to at least 1.0 requests/s" in headline(run, crossover(run))
    assert "OpenEnded" in {warning.code for warning in run.warnings}
    column = map_rows(run.cells).columns[0]
    assert (column["floor"], column["roof"], column["middle"]) == (1.0, None, UNKNOWN)


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
    one = read_run(write_example_run(tmp_path / "one", SMALL))
    again = read_run(
        write_example_run(
            tmp_path / "again",
            {"smollm2-135m": (RUNGS["smollm2-135m"][0], (2.0, 2.4)), **LARGE},
            seed=8,
        )
    )
    both = merged([one, again])
    assert [cell.model for cell in both.cells] == ["smollm2-135m", "llama-3.2-3b"]
    cell = both.cells[0]
    assert cell.key == cell_key("smollm2-135m") and len(cell.levels) == len(
        one.cells[0].levels
    ) + len(again.cells[0].levels)
    assert cell.capacity is not None and cell.capacity.reason.startswith("4 levels")
    assert cell.held == 1.6 and cell.predicted is None
    assert both.requests == one.requests + again.requests and both.name == "one, again"


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


def test_a_gpu_is_chosen_by_memory_ttft_tpot_and_rate_together(run: RunNumbers) -> None:
    """Each limit rules out what its bound cannot meet; the cheapest of the rest is named."""
    takeover = crossover(run, asked_rate=1.0).takeovers[0]
    cheapest = takeover.cheapest
    assert cheapest is not None and cheapest.may_suffice
    line = cheapest.roofline
    assert line.ttft_seconds and line.rate_per_second and line.rate_per_second > 1.0

    def best(rate: float = 1.0, **limits: float) -> GpuOption | None:
        slo = msgspec.structs.replace(run.slo, **limits)
        found = crossover(msgspec.structs.replace(run, slo=slo), asked_rate=rate)
        same = next(one for one in found.takeovers if one.cell.key == takeover.cell.key)
        for option in same.options:
            if option.device == cheapest.device:
                assert option.misses
        return same.cheapest

    for other in (
        best(tpot_seconds=line.tpot_seconds * 0.9),
        best(ttft_seconds=line.ttft_seconds * 0.9),
        best(line.rate_per_second * 1.1),
    ):
        assert other is not None and other.device != cheapest.device
        assert (other.device.dollars_per_hour or 0) > (cheapest.device.dollars_per_hour or 0)
    assert best(1e6) is None
    found = crossover(run, asked_rate=1e6)
    assert any("is too slow by memory, TTFT, TPOT and" in text for text in sentences(run, found))


def test_a_gpu_without_its_arithmetic_peak_is_not_known_to_suffice(
    run: RunNumbers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    facts = {"kind": "gpu", "memory_type": "gddr", "memory_gib": 48, "source_date": "2026-01-01"}
    row = {"name": "Ours", "bandwidth_gb_per_second": 900, "source": "us", "confidence": "low"}
    lines = [f"{key} = {json.dumps(value)}" for key, value in {**row, **facts}.items()]
    (tmp_path / "crossover").mkdir()
    (tmp_path / "crossover" / "hardware.toml").write_text("\n".join(["[[device]]", *lines]))
    takeover = crossover(run, asked_rate=1.0).takeovers[0]
    (ours,) = (one for one in takeover.options if one.device.name == "Ours")
    assert ours.may_suffice is not True
    assert {"TTFT", "rate"} <= set(ours.unknown + ours.misses)


def test_what_lies_above_an_endpoint_of_unknown_hardware_is_no_cpus(
    tmp_path: Path, run: RunNumbers
) -> None:
    assert above_words(run.cells) == "above what this CPU holds"
    folder = write_example_run(tmp_path / "run", SMALL, window=30.0)
    text = (folder / "events.jsonl").read_text()
    (folder / "events.jsonl").write_text(text.replace('"device":"cpu",', ""))
    manifest = msgspec.json.decode((folder / "manifest.json").read_bytes())
    manifest["cells"][0]["url"] = "http://10.0.0.9:8000"
    endpoint = read_run(change_manifest(folder, cells=manifest["cells"]))
    assert above_words(endpoint.cells) == "above what this server holds"
    assert crossover(endpoint, asked_rate=100.0).takeovers == ()
    assert "thread" not in headline_of(endpoint)


def test_the_device_behind_an_endpoint_is_not_made_up(tmp_path: Path) -> None:
    folder = write_example_run(tmp_path / "run", {}, window=30.0)
    cell = {"key": "x", "model": "135m", "backend": "external", "url": "http://10.0.0.9:8000"}
    run = read_run(change_manifest(folder, cells=[cell]))
    assert run.cells[0].device is None and run.cells[0].memory.predicted_bytes is None
    assert engine_words(run.cells[0]) == "external"

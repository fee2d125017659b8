from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from loadtests.records.events import CapacityStatus
from loadtests.records.schema import RequestRecord
from models import formatting
from reports.charts.crossover_map import UNKNOWN, above_words, map_rows
from reports.findings import GpuOption, crossover, machines
from reports.numbers import RunNumbers
from reports.render.page import cards
from reports.render.tables import cell_records, engine_words, state_words
from reports.run import read_run
from reports.sentences import headline, machine_words, sentences, thread_words
from tests.reports.example_run import FACTS, RUNGS, SLO, Law, write_example_run
from tests.reports.small_runs import LARGE, SMALL, change_manifest, read_small


def headline_of(run: RunNumbers) -> str:
    return headline(run, crossover(run))


def test_the_sentence(run: RunNumbers) -> None:
    """What is held, what it rests on, lengths, SLO with its share, threads of cores."""
    found = crossover(run)
    cell = next(cell for cell in run.cells if cell.model == "llama-3.2-1b")
    assert cell.capacity is not None
    by = cell.capacity.confirmed_by
    assert by is not None and by.levels == 1 and by.requests == cell.loaded[0].summary.counts.due
    assert cell.held == by.requests / by.seconds < by.asked_rate == 0.15
    words = headline(run, found)
    assert words.startswith(
        "On this machine (AMD EPYC 7B13 with AVX2, 2 cores, 8 GiB of memory; "
        "llama_cpp, 2 threads on 2 of 2 cores, shared with HTTP and the load generator at a "
        "higher priority), Llama-3.2-1B Q4_0 holds up to 0.13 requests/s "
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
    assert run.cells[0].held == 73 / 4000.0  # asked were 0.02
    assert " holds up to 1.0 requests/min (confirmed: " in headline_of(run)


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
    assert capacity.held == 0.99 and capacity.high is None
    assert "holds up to at least 0.99 requests/s" in headline(run, crossover(run))
    assert "OpenEnded" in {warning.code for warning in run.warnings}
    column = map_rows(run.cells).columns[0]
    assert (column["floor"], column["roof"], column["middle"]) == (0.99, None, UNKNOWN)


def test_endpoint_is_named_in_place_of_this_machine(tmp_path: Path) -> None:
    folder = write_example_run(tmp_path / "run", SMALL, window=30.0)
    manifest = msgspec.json.decode((folder / "manifest.json").read_bytes())
    manifest["cells"][0] |= {"url": "http://10.0.0.9:8000", "backend": "external"}
    (folder / "manifest.json").write_bytes(msgspec.json.encode(manifest))
    assert headline_of(read_run(folder)).startswith("At http://10.0.0.9:8000, ")


def test_machine_words_say_no_more_than_is_known() -> None:
    rest = "2 cores, 8 GiB of memory"
    assert machine_words(FACTS) == f"AMD EPYC 7B13 with AVX2, {rest}"
    assert machine_words(FACTS | {"isa": []}) == f"AMD EPYC 7B13, {rest}"
    wide = {"isa": ["avx2", "avx512f", "avx512_vnni"], "cgroup_cores": 1.5}
    told = machine_words(FACTS | wide)
    assert told == "AMD EPYC 7B13 with AVX-512, VNNI, 1.5 cores, 8 GiB of memory"
    assert machine_words({}) == ""


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

"""The side-by-side benchmarks: who may take part, rows that are kept, ratios of pairs; an engine in
a process of its own that dies.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from crossover.serving.backends.backend_interface import EngineConfig
from crossover.serving.capacity.scheduler_settings import SchedulerSettings
from tests.bench.engine_child import EngineChild
from tests.bench.paired import Figures, ratios
from tests.bench.peers import servers
from tests.bench.peers.compare import LINES, Measured, Rows, requests_of, table
from tests.bench.peers.conversations import Row, arm_of, best_of

FIGURES = {key: 1.0 for key, _, _ in LINES} | {"failed": 0, "cut": 0}
ROW = Measured(cpu="c", contestant="us", model="m", streams=4, round=0, asked={"cores": [0]})


def test_a_contestant_is_an_engine_and_a_format() -> None:
    found = servers.parsed("onnx:int8@/there")
    assert found.is_ours and found[1:] == ("onnx", "int8", "/there")
    for wrong in ("onnx", "nobody:int8", "vllm:bf16@/there"):
        with pytest.raises(ValueError, match=wrong):
            servers.parsed(wrong)


def test_a_missing_peer_is_reported_with_its_install_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(servers, "PEERS", tmp_path)
    peer = servers.parsed("vllm:bf16")
    assert "tests/bench/peers/install.sh vllm" in (servers.missing(peer) or "")
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / ".complete").touch()
    assert servers.missing(peer) is None
    assert servers.missing(servers.parsed("onnx:int8")) is None


def test_a_row_that_is_in_the_file_is_not_measured_again(tmp_path: Path) -> None:
    file = tmp_path / "below" / "rows.jsonl"
    Rows(file).add(msgspec.structs.replace(ROW, figures=FIGURES))
    again = Rows(file)
    assert again.has(ROW)
    for other in ({"streams": 1}, {"round": 1}, {"cpu": "d"}, {"asked": {"cores": [1]}}):
        assert not again.has(msgspec.structs.replace(ROW, **other))


def test_the_table_has_the_ratios_of_rounds_that_both_have_measured() -> None:
    key = LINES[0][0]
    rows = [
        msgspec.structs.replace(ROW, contestant=name, round=number, figures=FIGURES | {key: rate})
        for name, rates in (("us", (10.0, 30.0)), ("they", (5.0, 10.0, 1.0)))
        for number, rate in enumerate(rates)
    ]
    rows.append(msgspec.structs.replace(ROW, contestant="they", round=3, error="it died"))
    line = table(rows, ["us", "they"], ["m"])[-1]
    assert "| m, 4 | they | 5.0 |" in line and "| 2.50 (2.00-3.00, 2) | 0; it died |" in line


def test_the_arms_of_conversations_have_slots_and_a_prompt_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arm = arm_of("llama-server:Q4_0/16/4GiB")
    assert (arm.contestant.engine, arm.slots, arm.cache) == ("llama-server", 16, "4GiB")
    for wrong in ("onnx:int8", "onnx:int8/16", "onnx:int8/many/0", "nobody:int8/4/0"):
        with pytest.raises(ValueError, match=wrong.partition("/")[0]):
            arm_of(wrong)
    monkeypatch.setattr(servers, "PEERS", tmp_path)
    (tmp_path / "llama-server-1" / "bin").mkdir(parents=True)
    (tmp_path / "llama-server-1" / "bin" / "llama-server").touch()
    setup = servers.Setup("m", 16, 2048, (0,), (1,), prompt_cache="4GiB")
    theirs = servers.llama_server(arm.contestant, setup, "m.gguf")
    assert theirs[theirs.index("--cache-ram") + 1] == "4096"
    ours = servers.crossover(arm_of("onnx:int8/16/0").contestant, setup, "")
    assert ours[ours.index("--prompt-cache") + 1] == "4GiB"
    default = servers.llama_server(arm.contestant, setup._replace(prompt_cache=""), "m.gguf")
    assert "--cache-ram" not in default


def test_the_users_under_the_slo_are_those_below_the_first_level_that_misses_it() -> None:
    def row(users: float, meets_slo: bool) -> Row:
        return Row(
            contestant="us",
            turns_per_minute=30.0,
            users=users,
            attainment=0.95 if meets_slo else 0.4,
            ttft_p50=None,
            ttft_p95=1.0,
            tpot_p95=0.1,
            found_share=0.5,
            failed=0,
            turns=40,
            meets_slo=meets_slo,
        )

    rows = [row(8, True), row(16, True), row(24, False), row(32, True)]
    best = best_of(rows)
    assert best is not None and best.users == 16
    assert best_of(rows[2:]) is None
    assert "TTFT p50     - p95   1.0 s" in rows[0].text


def test_a_ratio_leaves_out_rounds_that_did_not_measure() -> None:
    ours: list[Figures] = [{"x": 10.0}, {"x": 30.0}, {"x": None}]
    theirs: list[Figures] = [{"x": 5.0}, {"x": 10.0}, {"x": 1.0}]
    assert ratios(ours, theirs, "x") == [2.0, 3.0]


def test_big_models_get_one_request_a_stream() -> None:
    assert [requests_of("135m", streams) for streams in (1, 4, 16)] == [4, 8, 32]
    assert [requests_of("8b", streams) for streams in (1, 4, 16)] == [2, 4, 16]


def test_an_engine_that_dies_is_reported_with_its_reason() -> None:
    config = EngineConfig(
        "tests.serving.fakes:Nothing",
        "",
        "m",
        settings=SchedulerSettings(slots=1, context_tokens=64),
    )
    with pytest.raises(RuntimeError, match="ended with status 1"):
        EngineChild(config, [0])

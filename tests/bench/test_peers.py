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
from tests.bench.paired import ratios
from tests.bench.peers import servers
from tests.bench.peers.compare import LINES, Measured, Rows, requests_of, table

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


def test_a_ratio_leaves_out_rounds_that_did_not_measure() -> None:
    ours = [{"x": 10.0}, {"x": 30.0}, {"x": None}]
    theirs = [{"x": 5.0}, {"x": 10.0}, {"x": 1.0}]
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

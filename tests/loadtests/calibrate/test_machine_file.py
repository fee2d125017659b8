"""A machine file is read as it was written; a wrong one is refused with key and value."""

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from loadtests.calibrate.machine_file import (
    BadMachineFile,
    read_machine_file,
    write_machine_file,
)
from tests.loadtests.calibrate.machine_files import machine_file

LAW, MODEL = ("engines", 0, "law"), ("engines", 0, "model")


def test_what_is_read_is_what_was_written(tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    write_machine_file(path, machine_file())
    assert read_machine_file(path) == machine_file()
    assert [one.name for one in tmp_path.iterdir()] == ["machine.json"]


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (("version",), 2, "version is 2"),
        (("engines", 0, "threads"), 0, "engines[0].threads must be at least 1, got 0"),
        (("engines", 1, "law", "rows", 2, 1), -1.0, "rows[2] must be at least 0 s, got -1.0"),
        (("engines", 0, "law", "colour"), "red", "colour"),
        (("engines", 0, "steps", 0, "seconds"), 0.0, "seconds must be above 0, got 0.0"),
        (("engines",), [], "engines is wrong: Expected `array` of length >= 1"),
        (("hardware", "cpu_model"), 3, "hardware.cpu_model is wrong: Expected `str`, got `int`"),
        (("bandwidth", 0, "bytes_per_second"), 0, "bandwidth[0].bytes_per_second must be above 0"),
        (("bandwidth",), [], "bandwidth is wrong: Expected `array` of length >= 1"),
        ((*LAW, "rows"), [], "rows must have at least one entry"),
        ((*LAW, "rows"), [[0, 1.0]], "rows[0] must be of more than 0 rows, got 0"),
        ((*LAW, "rows"), [[1, 2.0], [2, 1.0]], "rows must not fall in seconds, got [2.0, 1.0]"),
        ((*LAW, "form"), "max", "form must be 'sum' with weights_seconds 0, got 'max'"),
        ((*LAW, "weights_seconds"), 1.0, "got 'sum' with weights_seconds 1.0"),
        (LAW, {"base_seconds": 0, "rows": [[1, 0]]}, "base_seconds + rows[0] must be above 0 s"),
        (("engines", 0, "kv_dtype"), "fp9", "kv_dtype must be one of fp32, fp16"),
        (("engines", 0, "head"), [[0, 1.0]], "head[0] must be of more than 0 rows, got 0"),
        (("engines", 0, "head"), [[4, 1.0], [1, 0.5]], "head must ascend, got [4.0, 1.0]"),
        (("engines", 0, "head"), [[1, 1.0], [4, 0.5]], "head must not fall in seconds"),
        (("engines", 0, "head"), [[1, -1.0]], "head[0] must be at least 0 s, got -1.0"),
        ((*MODEL, "layers"), 0, "model.layers must be 1 to 1000, got 0"),
        ((*MODEL, "layers"), 300_000, "model.layers must be 1 to 1000, got 300000"),
        ((*MODEL, "hidden"), 0, "model.hidden must be 1 to"),
        ((*MODEL, "vocabulary"), 0, "model.vocabulary must be 1 to"),
        (("host",), "mine", "unknown field `host`"),
    ],
)
def test_a_wrong_file_is_refused_with_key_and_value(
    tmp_path: Path, place: tuple[Any, ...], value: Any, message: str
) -> None:
    raw = msgspec.to_builtins(machine_file())
    inner = raw = msgspec.json.decode(msgspec.json.encode(raw))
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    path = tmp_path / "machine.json"
    path.write_bytes(msgspec.json.encode(raw))
    with pytest.raises(BadMachineFile, match=re.escape(message)) as found:
        read_machine_file(path)
    assert str(path) in str(found.value)


def test_what_is_no_json_or_not_there_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    with pytest.raises(BadMachineFile, match="No such file"):
        read_machine_file(path)
    path.write_text("{")
    with pytest.raises(BadMachineFile, match="is no JSON"):
        read_machine_file(path)
    path.write_text("[]")
    with pytest.raises(BadMachineFile, match="version is None"):
        read_machine_file(path)

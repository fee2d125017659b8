"""machine.json: what is written is read again; what is wrong is one sentence."""

from pathlib import Path

import msgspec
import pytest

from crossover.loadtests.capacity.machine_file import (
    BadMachineFile,
    hardware_of,
    read_machine_file,
    write_machine_file,
)
from crossover.serving.hardware.machine_facts import hardware_facts
from tests.loadtests.capacity.known_server import EXPERTS_STEP_TIMES
from tests.loadtests.capacity.machine_files import machine_file, steps_of


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    file = tmp_path / "machine.json"
    write_machine_file(file, machine_file())
    assert read_machine_file(file) == machine_file()
    assert [one.model.name for one in read_machine_file(file).models] == [
        "smollm2-135m",
        "smollm2-360m",
    ]


def test_a_mixture_keeps_its_experts_and_a_file_without_them_has_none(tmp_path: Path) -> None:
    file = tmp_path / "machine.json"
    mixture = msgspec.structs.replace(steps_of("135m", EXPERTS_STEP_TIMES))
    write_machine_file(file, machine_file(mixture))
    assert read_machine_file(file).models[0].server.step_times == EXPERTS_STEP_TIMES
    raw = msgspec.to_builtins(machine_file())
    for one in raw["models"]:
        for name in ("expert_seconds", "experts", "shares_pass"):
            del one["server"]["step_times"][name]
    file.write_bytes(msgspec.json.encode(raw))
    assert read_machine_file(file) == machine_file()
    raw["models"][0]["server"]["step_times"]["experts"] = {"count": 8, "used": 9}
    file.write_bytes(msgspec.json.encode(raw))
    with pytest.raises(BadMachineFile, match="9 of 8 experts cannot be used; use 1 to 8"):
        read_machine_file(file)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"version": 4}, "version is 4. Run `crossover calibrate` again"),
        ({"models": []}, "models"),
        ({"taken_share": -3}, "taken_share must be at least 0, got -3"),
        ({"measured_on": "today"}, "measured_on"),
        ({"colour": "red"}, "colour"),
    ],
)
def test_a_wrong_value_is_one_sentence(
    tmp_path: Path, changed: dict[str, object], message: str
) -> None:
    file = tmp_path / "machine.json"
    raw = msgspec.to_builtins(machine_file()) | changed
    file.write_bytes(msgspec.json.encode(raw))
    with pytest.raises(BadMachineFile) as caught:
        read_machine_file(file)
    assert message in str(caught.value) and str(file) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", [b"", b"{", b"[1]", b"\xff\xfe", b"[" * 100_000])
def test_no_machine_file_at_all(tmp_path: Path, text: bytes) -> None:
    file = tmp_path / "machine.json"
    with pytest.raises(BadMachineFile, match="cannot be read"):
        read_machine_file(file)
    file.write_bytes(text)
    with pytest.raises(BadMachineFile):
        read_machine_file(file)


def test_it_names_no_host_and_no_path() -> None:
    facts = hardware_facts()
    encoded = msgspec.json.encode(hardware_of(msgspec.to_builtins(facts), 1 << 30)).decode()
    assert facts.cpu_model in encoded
    assert "hostname" not in encoded and "kernel" not in encoded
    assert not [text for text in msgspec.json.decode(encoded).values() if str(text).startswith("/")]

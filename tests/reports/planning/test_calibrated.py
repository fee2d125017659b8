"""From two small rungs to bigger ones."""

from pathlib import Path

import msgspec
import pytest

from loadtests.calibrate.machine_file import write_machine_file
from models.formats import weight_bytes
from models.ladder import rung
from models.spec import ModelSpec
from reports.errors import ReportError
from reports.planning.calibrated import load_machine
from reports.planning.machines import Machine, step_law
from tests.loadtests.calibrate.machine_files import law_of, machine_file


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    write_machine_file(tmp_path / "machine.json", machine_file())
    return load_machine(tmp_path / "machine.json")


@pytest.mark.parametrize("name", ["smollm2-135m", "llama-3.2-1b", "llama-3.2-3b"])
def test_costs_that_go_with_the_shape_are_told_for_every_rung(machine: Machine, name: str) -> None:
    spec = rung(name).spec
    law, half_width = step_law(machine, spec, "Q4_0", slots=8)
    truth = law_of(spec)
    assert half_width > 0
    for counts in ((1, 0, 32), (3, 0, 900), (8, 0, 8000), (0, 256, 0), (4, 64, 400)):
        assert law.seconds(*counts) == pytest.approx(truth.seconds(*counts), rel=0.02), counts


def test_what_another_pass_costs_goes_with_the_matrices(tmp_path: Path) -> None:
    def body(spec: ModelSpec) -> int:
        return spec.matrix_parameters - spec.vocabulary * spec.hidden

    file = machine_file()
    engines = tuple(
        msgspec.structs.replace(
            one, law=msgspec.structs.replace(one.law, pass_seconds=1e-11 * body(one.model))
        )
        for one in file.engines
    )
    path = tmp_path / "machine.json"
    write_machine_file(path, msgspec.structs.replace(file, engines=engines))
    spec = rung("1b").spec
    law, _ = step_law(load_machine(path), spec, "Q4_0", slots=8)
    assert law.pass_seconds == pytest.approx(1e-11 * body(spec), rel=0.01)


def test_a_format_that_one_model_was_measured_in_is_told_for_bigger_ones(tmp_path: Path) -> None:
    file = machine_file()
    eight = msgspec.structs.replace(
        file.engines[0],
        weight_format="Q8_0",
        law=file.engines[0].law.slower(1.5),
        head=tuple((rows, 1.5 * seconds) for rows, seconds in file.engines[0].head),
    )
    file = msgspec.structs.replace(file, engines=(*file.engines, eight))
    write_machine_file(tmp_path / "machine.json", file)
    law, _ = step_law(load_machine(tmp_path / "machine.json"), rung("3b").spec, "Q8_0", slots=8)
    truth = law_of(rung("3b").spec)
    assert law.seconds(4, 0, 0) == pytest.approx(1.5 * truth.seconds(4, 0, 0), rel=0.02)


def test_a_format_that_was_not_measured_has_a_wider_band_and_the_bandwidth_as_its_floor(
    machine: Machine,
) -> None:
    spec = rung("1b").spec
    _, narrow = step_law(machine, spec, "Q4_0", slots=8)
    law, wide = step_law(machine, spec, "F16", slots=8)
    assert wide > narrow
    assert law.seconds(1, 0, 0) == pytest.approx(weight_bytes(spec, "F16") / 10e9, rel=0.01)


def test_a_format_of_other_engines_is_refused_by_name(machine: Machine) -> None:
    assert machine.kind == "calibrated"
    with pytest.raises(ReportError, match="calibrated with Q4_0, which says nothing of bf16"):
        step_law(machine, rung("1b").spec, "bf16", slots=8)


def test_the_measured_model_keeps_its_law(machine: Machine) -> None:
    law, half_width = step_law(machine, rung("135m").spec, "Q4_0", slots=8)
    assert law == machine_file().engines[0].law
    assert half_width < step_law(machine, rung("1b").spec, "Q4_0", slots=8)[1]

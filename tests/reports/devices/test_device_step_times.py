"""The step law of a device that is not here: the five numbers nearest to the predicted steps."""

import math

import msgspec
import pytest

from models.ladder import rung
from reports.devices.device_catalog import Device, device_named
from reports.devices.device_step_times import (
    Case,
    chip_of,
    half_width,
    law_of,
    predicted_law,
    predictor,
)
from reports.errors import ReportError

SPEC = rung("8b").spec
H100 = device_named("NVIDIA H100 SXM")
CPU = device_named("Intel Xeon 6980P")


@pytest.mark.parametrize("name", ["NVIDIA H100 SXM", "NVIDIA T4", "NVIDIA L4", "NVIDIA A10G"])
def test_five_numbers_say_what_the_predictor_says(name: str) -> None:
    device = device_named(name)
    case = Case(
        chip=chip_of(device),
        engine="vllm",
        fmt="F16",
        macs=SPEC.parameters - SPEC.vocabulary * SPEC.hidden,
        layers=SPEC.layers,
        hidden=SPEC.hidden,
        attention=SPEC.layers * SPEC.heads * SPEC.head_dim,
        kv_bytes=SPEC.kv_bytes_per_token("fp16"),
        read_bytes=SPEC.weight_bytes("bf16"),
        all_bytes=SPEC.weight_bytes("bf16"),
    )
    law = law_of(case, slots=64)
    for rows, context in ((1, 500), (7, 900), (40, 1500), (64, 300)):
        asked = msgspec.structs.replace(case, rows=rows, context=context)
        said = float(predictor().decode([asked])[0])
        assert law.seconds(rows, 0, rows * context) == pytest.approx(said, rel=0.1)
    said = float(predictor().prefill([msgspec.structs.replace(case, prompt=1024)])[0])
    assert law.seconds(0, 1024, 0) == pytest.approx(said, rel=0.2)


def test_steps_are_shared_by_links_that_cost() -> None:
    """Two GPUs are faster than one, more by NVLink than by PCIe, less between nodes."""

    def step(one: Device, devices: int) -> float:
        return predicted_law(one, SPEC, "bf16", 256, devices)[0].seconds(64, 0, 64 * 500)

    by_pcie = msgspec.structs.replace(H100, link_gb_per_second=25.0)
    assert step(H100, 2) < step(H100, 1)
    assert step(H100, 8) < step(by_pcie, 8)
    assert step(H100, 16) > step(H100, 8)
    with pytest.raises(ReportError, match="not shared"):
        predicted_law(device_named("M4 Max"), SPEC, "Q4_0", 8, devices=2)


def test_bands_are_those_of_the_classes_and_a_factor_of_three_where_nothing_was_published() -> None:
    known = half_width(H100)
    assert known == predictor().errors["tpot|hbm|serve"].half_width
    assert half_width(device_named("NVIDIA T4")) > known
    assert half_width(msgspec.structs.replace(H100, maker="google")) == math.log(3)


def test_what_cannot_be_predicted_is_one_sentence() -> None:
    with pytest.raises(ReportError, match="16-bit peak is not known"):
        predicted_law(msgspec.structs.replace(H100, tflops=type(H100.tflops)()), SPEC, "bf16", 8)
    with pytest.raises(ReportError, match="calibrate it"):
        predicted_law(CPU, SPEC, "Q4_0", 8)
    with pytest.raises(ReportError, match="Q9"):
        predicted_law(H100, SPEC, "Q9", 8)

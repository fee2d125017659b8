"""The step-time model of a device that is not here: the numbers nearest to the predicted steps."""

import math

import msgspec
import numpy as np
import pytest

from crossover.models.identity.model_ladder import ladder_model
from crossover.models.shape.model_spec import ModelSpec
from crossover.reports.devices.device_catalog import Device, device_named
from crossover.reports.devices.device_step_times import constants_of, predicted_step_times
from crossover.reports.errors import ReportError
from tests.bench.device_fit import fit
from tests.bench.device_fit.step_model import (
    ACCELERATOR,
    Case,
    Chip,
    accelerator_decode,
    accelerator_prefill,
    features,
)

SPEC = ladder_model("8b").spec
MIXTURE = ladder_model("qwen3-30b-a3b").spec  # 8 of 128 experts
H100 = device_named("NVIDIA H100 SXM")
CPU = device_named("Intel Xeon 6980P")


@pytest.mark.parametrize("devices", [1, 2, 16])
@pytest.mark.parametrize("name", ["NVIDIA H100 SXM", "NVIDIA T4", "NVIDIA L4", "AMD MI300X"])
@pytest.mark.parametrize("spec", [SPEC, MIXTURE], ids=["dense", "experts"])
def test_step_times_agree_with_the_fitted_model(spec: ModelSpec, name: str, devices: int) -> None:
    device = device_named(name)

    def read_bytes(tokens: float) -> float:
        return spec.step_weight_bytes(tokens, 2 * spec.parameters)

    link = device.link_gb_per_second or 25.0
    case = Case(
        chip=Chip(
            name=name,
            memory=device.memory_type,
            chip=device.maker,
            gbs=device.bandwidth_gb_per_second,
            tflops16=device.tflops.fp16 or 0.0,
            link_gbs=link if devices <= 8 else min(link, 50.0),
        ),
        engine="vllm",
        fmt="F16",
        macs=spec.active_parameters,
        layers=spec.layers,
        hidden=spec.hidden,
        attention=spec.layers * spec.heads * spec.head_dim,
        kv_bytes=spec.kv_bytes_per_token("fp16"),
        read_bytes=read_bytes(1),
        all_bytes=read_bytes(1e9),
        devices=devices,
        prompt=1024,
    )
    step_times, _ = predicted_step_times(device, spec, "bf16", 64, devices)
    for rows, context in ((1, 500), (7, 900), (40, 1500), (64, 300)):
        queries = [
            msgspec.structs.replace(case, rows=rows, context=context, read_bytes=read_bytes(rows))
        ]
        facts, v = features(queries), fit.fitted().values(ACCELERATOR, queries)
        fitted = accelerator_decode(v, facts, np.array([float(rows)]))[0]
        assert step_times.seconds(rows, 0, rows * context) == pytest.approx(fitted, rel=0.13)
    facts, v = features([case]), fit.fitted().values(ACCELERATOR, [case])
    fitted = accelerator_prefill(v, facts, 1.0)[0]
    assert step_times.seconds(0, 1024, 0) == pytest.approx(fitted, rel=0.2)


def test_steps_are_shared_by_links_that_cost() -> None:
    """Two GPUs are faster than one, more by NVLink than by PCIe, less between nodes."""

    def step(one: Device, devices: int) -> float:
        return predicted_step_times(one, SPEC, "bf16", 256, devices)[0].seconds(64, 0, 64 * 500)

    by_pcie = msgspec.structs.replace(H100, link_gb_per_second=25.0)
    assert step(H100, 2) < step(H100, 1)
    assert step(H100, 8) < step(by_pcie, 8)
    assert step(H100, 16) > step(H100, 8)
    with pytest.raises(ReportError, match="cannot share a step"):
        predicted_step_times(device_named("M4 Max"), SPEC, "Q4_0", 8, devices=2)


def test_bands_are_those_of_the_classes_and_a_factor_of_three_where_nothing_was_published() -> None:
    known = constants_of(H100).half_width
    assert known == fit.fitted().errors["tpot|hbm|serve"].half_width
    assert constants_of(device_named("NVIDIA T4")).half_width > known
    unknown = constants_of(msgspec.structs.replace(H100, maker="google")).half_width
    assert unknown == pytest.approx(math.log(3))


def test_what_cannot_be_predicted_is_one_sentence() -> None:
    with pytest.raises(ReportError, match="16-bit peak is unknown"):
        predicted_step_times(
            msgspec.structs.replace(H100, tflops=type(H100.tflops)()), SPEC, "bf16", 8
        )
    with pytest.raises(ReportError, match="calibrate it"):
        predicted_step_times(CPU, SPEC, "Q4_0", 8)
    with pytest.raises(ReportError, match="Q9"):
        predicted_step_times(H100, SPEC, "Q9", 8)

"""The step-time model of a device under llama.cpp, and what cannot be predicted."""

import msgspec
import numpy as np
import pytest

from crossover.models.identity.model_ladder import ladder_model
from crossover.models.shape.model_spec import ModelSpec
from crossover.reports.devices.device_catalog import device_named
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
M4 = device_named("Apple M4 Max")
CPU = device_named("Intel Xeon 6980P")


@pytest.mark.parametrize("name", ["Apple M4 Max", "Apple M2 Ultra", "AMD Ryzen AI Max+ 395"])
@pytest.mark.parametrize("spec", [SPEC, MIXTURE], ids=["dense", "experts"])
def test_step_times_agree_with_the_fitted_model(spec: ModelSpec, name: str) -> None:
    device = device_named(name)

    def read_bytes(tokens: float) -> float:
        return spec.step_weight_bytes(tokens, 2 * spec.parameters)

    case = Case(
        chip=Chip(
            name=name,
            memory=device.memory_type,
            chip=device.maker,
            gbs=device.bandwidth_gb_per_second,
            tflops16=device.tflops.fp16 or 0.0,
        ),
        engine="llama.cpp",
        fmt="F16",
        macs=spec.active_parameters,
        layers=spec.layers,
        hidden=spec.hidden,
        attention=spec.layers * spec.heads * spec.head_dim,
        kv_bytes=spec.kv_bytes_per_token("fp16"),
        read_bytes=read_bytes(1),
        all_bytes=read_bytes(1e9),
        prompt=1024,
    )
    step_times = predicted_step_times(device, spec, "BF16", 16).step_times
    for rows, context in ((1, 500), (7, 900), (16, 300)):
        queries = [
            msgspec.structs.replace(case, rows=rows, context=context, read_bytes=read_bytes(rows))
        ]
        facts, v = features(queries), fit.fitted().values(ACCELERATOR, queries)
        fitted = accelerator_decode(v, facts, np.array([float(rows)]))[0]
        assert step_times.seconds(rows, 0, rows * context) == pytest.approx(fitted, rel=0.13)
    facts, v = features([case]), fit.fitted().values(ACCELERATOR, [case])
    fitted = accelerator_prefill(v, facts, 1.0)[0]
    assert step_times.seconds(0, 1024, 0) == pytest.approx(fitted, rel=0.2)


def test_the_band_of_llama_cpp_is_that_of_its_class() -> None:
    errors = fit.fitted().errors
    widest = max(errors[f"{metric}|apple|llama"].half_width for metric in ("decode", "prefill"))
    assert constants_of(M4).half_width == widest


def test_what_cannot_be_predicted_is_one_sentence() -> None:
    with pytest.raises(ReportError, match="16-bit peak is unknown"):
        predicted_step_times(
            msgspec.structs.replace(H100, tflops=type(H100.tflops)()), SPEC, "bf16", 8
        )
    with pytest.raises(ReportError, match="calibrate it"):
        predicted_step_times(CPU, SPEC, "Q4_0", 8)
    with pytest.raises(ReportError, match="Q9"):
        predicted_step_times(H100, SPEC, "Q9", 8)
    with pytest.raises(ReportError, match="cannot share a step"):
        predicted_step_times(M4, SPEC, "Q4_0", 8, devices=2)
    with pytest.raises(ReportError, match=r"llama.cpp, which does not have the format fp8. Use"):
        predicted_step_times(M4, SPEC, "fp8", 8)

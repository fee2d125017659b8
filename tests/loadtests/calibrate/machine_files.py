"""A machine file for tests, made by hand: two small rungs whose steps cost what a formula says."""

from loadtests.calibrate.machine_file import (
    Bandwidth,
    Disturbed,
    EngineSteps,
    Hardware,
    Law,
    MachineFile,
    MatrixRate,
    Step,
)
from models.formats import weight_bytes
from models.ladder import rung
from models.spec import ModelSpec

HARDWARE = Hardware(
    cpu_model="Test CPU",
    architecture="x86_64",
    isa=("avx2",),
    logical_cores=2,
    physical_cores=2,
    usable_cores=2.0,
    memory_bytes=16 << 30,
    system="Linux",
    kernel="6.1",
    python="3.11.9",
    packages={"llama-cpp-python": "0.3.36"},
)


def law_of(spec: ModelSpec) -> Law:
    """A step 1 ms, a row 0.1 ns a parameter, a token of context 1 ns a head value.

    A prompt token 0.05 ns a parameter without the head's.
    """
    each = spec.matrix_parameters * 1e-10
    body = spec.matrix_parameters - spec.vocabulary * spec.hidden
    return Law(
        base_seconds=1e-3,
        rows=tuple((float(rows), rows * each) for rows in (1, 4, 8)),
        row_seconds=each,
        prompt_token_seconds=body * 5e-11,
        kv_token_seconds=spec.layers * spec.heads * spec.head_dim * 1e-9,
    )


def engine_steps(name: str, weight_format: str = "Q4_0") -> EngineSteps:
    spec = rung(name).spec
    return EngineSteps(
        backend="llama_cpp",
        version="0.3.36",
        model=spec,
        weight_format=weight_format,
        weight_bytes=weight_bytes(spec, weight_format),
        kv_dtype="fp16",
        threads=2,
        slots=8,
        steps=(Step(1.0, 0.0, 32.0, 0.02),),
        head=tuple((float(n), n * spec.vocabulary * spec.hidden * 1e-10) for n in (1, 4, 8)),
        law=law_of(spec),
        waited_share=0.0,
    )


def machine_file() -> MachineFile:
    return MachineFile(
        crossover="0.1.0",
        measured_on="2026-01-31",
        name="Test CPU, 2 cores",
        hardware=HARDWARE,
        bandwidth=(Bandwidth(threads=1, bytes_per_second=10e9),),
        matrix_rates=(
            MatrixRate(numbers="fp32", threads=1, operations_per_second=5e10, by="numpy"),
        ),
        engines=(engine_steps("smollm2-135m"), engine_steps("smollm2-360m")),
        disturbance=Disturbed(share=0.0, steal_share=0.0, is_quiet=True),
        spent_seconds=50.0,
    )

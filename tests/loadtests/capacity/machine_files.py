"""machine.json as tests need it."""

from __future__ import annotations

from typing import Any

import msgspec

from crossover.loadtests.capacity.machine_file import Hardware, MachineFile, ModelSteps
from crossover.models.identity.model_ladder import ladder_model
from crossover.serving.capacity.scheduler_settings import SchedulerSettings
from crossover.serving.capacity.simulated_capacity import ServerModel
from crossover.serving.capacity.step_time_model import StepTimeModel


def steps_of(
    model: str, step_times: StepTimeModel, weight_format: str = "Q4_0", slots: int = 8
) -> ModelSteps:
    return ModelSteps(
        backend="llama_cpp",
        version="0.3.16",
        model=ladder_model(model).spec,
        weight_format=weight_format,
        threads=2,
        server=ServerModel(
            step_times, SchedulerSettings(slots=slots, step_seconds_target=0.3, step_tokens=2048)
        ),
        spent_seconds=20.0,
    )


def machine_file(*models: ModelSteps, **changes: Any) -> MachineFile:
    """Of 135M and 360M where no models are given; steps go with the parameters."""
    small = StepTimeModel(
        base_seconds=0.002,
        row_seconds=0.004,
        prompt_token_seconds=0.0014,
        context_token_seconds=3e-6,
        pass_seconds=0.01,
        error=0.1,
        observations=300,
    )
    found = MachineFile(
        crossover="1.0",
        measured_on="2026-11-24",
        name="lab",
        hardware=Hardware(
            cpu_model="CPU",
            architecture="x86_64",
            isa=("avx2",),
            logical_cores=2,
            physical_cores=2,
            usable_cores=2.0,
            memory_bytes=8 << 30,
            system="Linux",
        ),
        models=models or (steps_of("135m", small), steps_of("360m", small.slower(2.7))),
    )
    return msgspec.structs.replace(found, **changes)

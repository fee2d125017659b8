"""Step-time laws that are known exactly."""

from loadtests.simulation.step_time import StepLaw

LAWS = [
    StepLaw(
        base_seconds=0.02, row_seconds=0.003, prompt_token_seconds=0.0005, kv_token_seconds=2e-6
    ),
    StepLaw(base_seconds=0.01),
    StepLaw(
        form="max",
        base_seconds=0.001,
        row_seconds=0.004,
        prompt_token_seconds=0.0002,
        kv_token_seconds=5e-6,
        weights_seconds=0.015,
    ),
]

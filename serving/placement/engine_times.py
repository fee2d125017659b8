"""Measures an engine's step times in seconds, in a child process, by the backend that serves.

    times = measured_times(config, spec, prompt_tokens=64)

The child loads the backend as a server does and gives it steps: a prompt alone, single decode rows,
and decode rows of all slots. Each figure is a low quantile of several: whatever else the machine
does only makes a step longer.
"""

from __future__ import annotations

import os
import sys
import time

import msgspec

from models.isolated import run_python
from models.spec import ModelSpec
from serving.backends.backend_interface import Backend, EngineConfig
from serving.errors import ServingError
from serving.placement.engine_choice import EngineTimes
from serving.placement.timed_steps import MOST_STEPS, Clock, TimedSteps, in_child

CONFIG_VARIABLE = "CROSSOVER_MEASURED_ENGINE"
PART_SECONDS = 0.5  # of each of: prompts, filling the slots, single rows, rows of all slots
LEAST_STEPS = 4  # of each part; at most MOST_STEPS
DECODED_TOKENS = 2 * MOST_STEPS + 1  # at most, in one slot
WARM_UP_TOKENS = 16
LONGEST_PROMPT = 256  # longer ones cost as much a token, but for attention
TIMEOUT_SECONDS = 120.0


class StepTimes(msgspec.Struct, frozen=True):
    """What the child says."""

    prompt_tokens_per_second: float
    decode_seconds: float
    decode_slots_seconds: float
    waited_share: float = 0.0  # see EngineTimes


class MeasuringFailed(ServingError):
    """The engine could not be loaded, or did not answer in time."""


def prompt_class(prompt_tokens: float) -> int:
    """The length that stands for prompts of a mean length: a power of two, 16 to 256."""
    length = WARM_UP_TOKENS
    while length < min(prompt_tokens, LONGEST_PROMPT):
        length *= 2
    return length


def measured_times(
    config: EngineConfig, spec: ModelSpec, prompt_tokens: int, part_seconds: float = PART_SECONDS
) -> EngineTimes:
    """The engine's times with this configuration; its context is cut to what is measured.

    Raises MeasuringFailed.
    """
    context = min(spec.context, prompt_tokens + DECODED_TOKENS)
    small = msgspec.structs.replace(config, context_tokens=context, kv_tokens=None)
    began = time.monotonic()
    ran = run_python(
        *("-m", "serving.placement.engine_times", str(prompt_tokens), str(part_seconds)),
        environment={CONFIG_VARIABLE: msgspec.json.encode(small).decode()},
        timeout_seconds=TIMEOUT_SECONDS,
    )
    name = f"{config.backend} {config.weight_format}"
    if ran.status is None:
        raise MeasuringFailed(f"{name} was not measured within {TIMEOUT_SECONDS:g} s")
    if ran.status:
        raise MeasuringFailed(f"{name} could not be measured: {ran.reason}")
    found = msgspec.json.decode(ran.output.splitlines()[-1], type=StepTimes)
    return EngineTimes(
        model=spec.name,
        parameters=spec.parameters,
        backend=config.backend,
        weight_format=config.weight_format,
        threads=config.threads or 0,
        slots=config.slots,
        prompt_tokens=prompt_tokens,
        **msgspec.structs.asdict(found),
        spent_seconds=round(time.monotonic() - began, 3),
        unix_seconds=time.time(),
        kv_dtype=config.kv_dtype,
    )


def step_times(
    backend: Backend,
    prompt_tokens: int,
    part_seconds: float = PART_SECONDS,
    clock: Clock | None = None,
) -> StepTimes:
    """The times of a loaded backend."""
    steps = TimedSteps(backend, clock or time.perf_counter)
    info = backend.info
    steps.prompt(0, WARM_UP_TOKENS)
    most = min(prompt_tokens, info.step_tokens, info.context_tokens - DECODED_TOKENS)
    guess = WARM_UP_TOKENS / steps.prompt(0, WARM_UP_TOKENS)
    length = int(min(most, max(WARM_UP_TOKENS, guess * part_seconds)))
    prefill = steps.quick(lambda: steps.prompt(0, length), part_seconds, 1)
    # The others hold as much as there is time to fill them with.
    each = int(min(length, max(4, part_seconds * length / prefill / max(1, info.slots - 1))))
    for slot in range(1, info.slots):
        steps.prompt(slot, each)
    alone = steps.quick(lambda: steps.decode(1), part_seconds, LEAST_STEPS)
    together = steps.quick(lambda: steps.decode(info.slots), part_seconds, LEAST_STEPS)
    return StepTimes(length / prefill, alone, together)


def main() -> None:
    """The child: one line of JSON."""
    config = msgspec.json.decode(os.environ[CONFIG_VARIABLE].encode(), type=EngineConfig)
    prompt_tokens, part_seconds = int(sys.argv[1]), float(sys.argv[2])
    found, waited = in_child(
        config, lambda backend: step_times(backend, prompt_tokens, part_seconds)
    )
    found = msgspec.structs.replace(found, waited_share=waited)
    print(f"\n{msgspec.json.encode(found).decode()}", flush=True)


if __name__ == "__main__":
    main()

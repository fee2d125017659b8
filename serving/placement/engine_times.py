"""Measures an engine's step times in seconds, in a child process, by the backend that serves.

    times = measured_times(config, spec, prompt_tokens=64)

The child loads the backend as a server does and gives it steps: a prompt alone, single decode rows,
and decode rows of all slots. Each figure is a low quantile of several: whatever else the machine
does only makes a step longer.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np

from models.isolated import run_python
from models.spec import ModelSpec
from serving.backends import backend_class
from serving.backends.base import Backend, EngineConfig
from serving.errors import ServingError
from serving.placement.engine_choice import EngineTimes
from serving.sampling.types import Row

CONFIG_VARIABLE = "CROSSOVER_MEASURED_ENGINE"
PART_SECONDS = 0.5  # of each of: prompts, filling the slots, single rows, rows of all slots
LEAST_STEPS, MOST_STEPS = 4, 64  # of each part
DECODED_TOKENS = 2 * MOST_STEPS + 1  # at most, in one slot
WARM_UP_TOKENS = 16
LONGEST_PROMPT = 256  # longer ones cost as much a token, but for attention
TIMEOUT_SECONDS = 120.0
_FIRST_TOKEN = 3  # ids below it are special


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
    )


def step_times(
    backend: Backend,
    prompt_tokens: int,
    part_seconds: float = PART_SECONDS,
    clock: Callable[[], float] = time.perf_counter,
) -> StepTimes:
    """The times of a loaded backend."""
    info = backend.info
    random = np.random.default_rng(1)

    def tokens(count: int) -> np.ndarray:
        return random.integers(_FIRST_TOKEN, info.vocabulary, count, np.int32)

    def took(rows: list[Row]) -> float:
        began = clock()
        backend.step(rows)
        return max(clock() - began, 1e-9)

    def prompt(slot: int, count: int) -> Row:
        return Row(slot, tokens(count), 0, True)

    took([prompt(0, WARM_UP_TOKENS)])
    most = min(prompt_tokens, info.step_tokens, info.context_tokens - DECODED_TOKENS)
    guess = WARM_UP_TOKENS / took([prompt(0, WARM_UP_TOKENS)])
    length = int(min(most, max(WARM_UP_TOKENS, guess * part_seconds)))
    prefill = _quick(lambda: took([prompt(0, length)]), part_seconds, 1, clock)
    # The others hold as much as there is time to fill them with.
    each = int(min(length, max(4, part_seconds * length / prefill / max(1, info.slots - 1))))
    held = [length] + [each] * (info.slots - 1)
    for slot in range(1, info.slots):
        backend.step([prompt(slot, each)])

    def decode(slots: int) -> float:
        rows = [Row(slot, tokens(1), held[slot], True) for slot in range(slots)]
        for slot in range(slots):
            held[slot] += 1
        return took(rows)

    alone = _quick(lambda: decode(1), part_seconds, LEAST_STEPS, clock)
    together = _quick(lambda: decode(info.slots), part_seconds, LEAST_STEPS, clock)
    return StepTimes(length / prefill, alone, together)


def _quick(
    measure: Callable[[], float], seconds: float, least: int, clock: Callable[[], float]
) -> float:
    """The lower quartile of as many measurements as `seconds` hold."""
    until = clock() + seconds
    found: list[float] = []
    while len(found) < least or (clock() < until and len(found) < MOST_STEPS):
        found.append(measure())
    return sorted(found)[len(found) // 4]


def _waited_seconds() -> dict[str, float]:
    """Of each thread, how long it was runnable and had no core (man 5 proc, schedstat)."""
    found = {}
    for thread in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # it has ended
            found[thread.name] = int((thread / "schedstat").read_text().split()[1]) / 1e9
    return found or {"": 0.0}


def main() -> None:
    """The child: one line of JSON."""
    config = msgspec.json.decode(os.environ[CONFIG_VARIABLE].encode(), type=EngineConfig)
    if config.cores:
        os.sched_setaffinity(0, config.cores)
    backend: Backend = backend_class(config.backend)(config, lambda what, fraction: None)
    began, waited = time.perf_counter(), _waited_seconds()
    try:
        found = step_times(backend, int(sys.argv[1]), float(sys.argv[2]))
        more = max(seconds - waited.get(name, 0.0) for name, seconds in _waited_seconds().items())
        share = round(more / (time.perf_counter() - began), 4)
        found = msgspec.structs.replace(found, waited_share=share)
    finally:
        backend.close()
    print(f"\n{msgspec.json.encode(found).decode()}", flush=True)


if __name__ == "__main__":
    main()

"""The times of an engine's steps on this machine, measured in a child process and saved in a table.

    times = measured_times(config, spec)                  # seconds of prefill and decode steps
    save_times(cache, facts, key, times)                  # CACHE/engine-times.json
    read_table(cache, facts)[key]

The child process measures the backend that would serve: prompts of two lengths alone, decode steps
of one row and of all slots, and a prompt beside decode rows. A table is used until the CPU or the
version of an engine's library changes.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import msgspec
import numpy as np

from crossover.models.child_process import end_with_parent, run_python
from crossover.models.machine_limits import read_text
from crossover.models.shape.model_spec import ModelSpec
from crossover.models.weights.weights_manifest import cache_dir, write_atomically
from crossover.serving.backends.backend_interface import Backend, EngineConfig
from crossover.serving.backends.backend_table import backend_class, library_versions
from crossover.serving.capacity.step_time_model import StepTimeModel
from crossover.serving.errors import ServingError
from crossover.serving.hardware.machine_facts import HardwareFacts
from crossover.serving.hardware.numa import run_on
from crossover.serving.sampling.step_inputs import Row

PART_SECONDS = 0.5  # time spent measuring each kind of step
MAX_STEPS = 64  # of each kind
SHORT_PROMPT, LONG_PROMPT = 16, 256  # tokens; the second prompt is as long as there is time for
MIN_LONG_PROMPT = 64  # at least, so that a further token can be told from the pass itself
TIMEOUT_SECONDS = 300.0  # of the child process that measures one engine


class EngineTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Measured step times of one engine for one model on one machine."""

    slots: int
    prompt_tokens_per_second: float  # from the difference between two prompt lengths
    # Extra seconds if a prompt shares a step with decode rows: CPU engines then read the weights
    # again.
    pass_seconds: float
    decode_seconds: float  # of a decode step with one row
    decode_slots_seconds: float  # of a decode step with one row per slot
    # Of the CPU time that the engine could have used, the share that other processes took.
    taken_share: float = 0.0


def step_times_of_timings(times: EngineTimes) -> StepTimeModel:
    """Return the step-time model through the two decode times, of one row and of all slots:

    seconds = base_seconds + row_seconds * decode rows + prompt_token_seconds * prompt tokens
              + pass_seconds * (passes - 1)
    """
    row_seconds = (times.decode_slots_seconds - times.decode_seconds) / max(1, times.slots - 1)
    row_seconds = min(max(row_seconds, 0.0), times.decode_seconds)  # so that base_seconds >= 0
    return StepTimeModel(
        base_seconds=times.decode_seconds - row_seconds,
        row_seconds=row_seconds,
        prompt_token_seconds=1 / times.prompt_tokens_per_second,
        pass_seconds=times.pass_seconds,
    )


# The table of saved times.


def table_path(cache: str | Path | None) -> Path:
    """Return the file with the saved times in this cache folder (None: the default one)."""
    return cache_dir(cache) / "engine-times.json"


def read_table(cache: str | Path | None, facts: HardwareFacts) -> dict[str, EngineTimes]:
    """Return the saved times by their keys (EngineQuestion.key). Empty if the file cannot be read,
    or was written on another machine or with other versions of the engines' libraries."""
    try:
        content = table_path(cache).read_bytes()
        machine, times_by_key = msgspec.json.decode(
            content, type=tuple[str, dict[str, EngineTimes]]
        )
    except (OSError, msgspec.MsgspecError):
        return {}
    return times_by_key if machine == _machine(facts) else {}


def save_times(
    cache: str | Path | None, facts: HardwareFacts, key: str, times: EngineTimes
) -> None:
    """Save the times of one engine in the table, atomically; older ones of the same key are
    replaced. Raises OSError."""
    table = _machine(facts), read_table(cache, facts) | {key: times}
    path = table_path(cache)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, msgspec.json.format(msgspec.json.encode(table), indent=1))


def _machine(facts: HardwareFacts) -> str:
    """Return what all times in a table depend on: the CPU and the engines' library versions."""
    versions = [f"{name} {version}" for name, version in library_versions().items()]
    cores = f"{facts.physical_cores} cores, {facts.logical_cores} threads"
    return "; ".join([facts.cpu_model, " ".join(facts.isa), cores, *versions])


# Measuring.


def measured_times(config: EngineConfig, spec: ModelSpec) -> EngineTimes:
    """Return the step times of the engine with this configuration, measured in a child process with
    the shortest context that the measurement needs.

    Raises ServingError if the child process fails or takes longer than TIMEOUT_SECONDS.
    """
    context = min(spec.context, LONG_PROMPT + 4 * MAX_STEPS)
    settings = msgspec.structs.replace(config.settings, context_tokens=context, kv_tokens=None)
    config = msgspec.structs.replace(config, settings=settings)
    child = run_python(
        "-m",
        "crossover.serving.placement.engine_times",
        msgspec.json.encode(config).decode(),
        timeout_seconds=TIMEOUT_SECONDS,
    )
    if child.status == 0:
        return msgspec.json.decode(child.output.splitlines()[-1], type=EngineTimes)
    why = f"no result after {TIMEOUT_SECONDS:g} s" if child.status is None else child.reason
    raise ServingError(f"{config.backend} {config.weight_format} failed: {why}")


def measure(backend: Backend, clock: Callable[[], float] = time.perf_counter) -> EngineTimes:
    """Return the step times of a loaded backend, measured with random tokens.

    `clock` returns seconds. `taken_share` is left at 0.
    """
    info, settings = backend.info, backend.info.settings
    generator = np.random.default_rng(1)
    tokens_in_slot = [0] * settings.slots
    first_token = 3  # lower ids are usually special tokens

    def run_step(tokens_of_slots: Mapping[int, int]) -> float:
        """Run a step that appends so many tokens to each of these slots; return its seconds."""
        rows = []
        for slot, tokens in tokens_of_slots.items():
            token_ids = generator.integers(first_token, info.vocabulary, tokens, np.int32)
            rows.append(Row(slot, token_ids, tokens_in_slot[slot], True))
            tokens_in_slot[slot] += tokens
        started = clock()
        backend.step(rows)
        return max(clock() - started, 1e-9)

    def prefill(slot: int, tokens: int, decoding: Iterable[int] = ()) -> float:
        """Run a step with a new prompt in this slot and a decode row in others; return its
        seconds."""
        tokens_in_slot[slot] = 0
        return run_step({slot: tokens, **dict.fromkeys(decoding, 1)})

    def lower_quartile(step: Callable[[], float], min_steps: int) -> float:
        """Repeat a step and return the lower quartile of its seconds, since other work on the
        machine can only make steps longer."""
        deadline = clock() + PART_SECONDS
        timings: list[float] = []
        while len(timings) < min_steps or (clock() < deadline and len(timings) < MAX_STEPS):
            timings.append(step())
        return sorted(timings)[len(timings) // 4]

    # A prompt that takes about PART_SECONDS by the speed of a short one, of MIN_LONG_PROMPT to
    # LONG_PROMPT tokens, with room for a decode row of each other slot in the same step.
    other_slots = range(1, settings.slots)
    max_tokens = min(settings.step_tokens - len(other_slots), settings.context_tokens - 2)
    max_tokens = max(2, min(LONG_PROMPT, max_tokens))
    short_tokens = min(SHORT_PROMPT, max_tokens // 2)
    prefill(0, short_tokens)  # the first step of an engine may take longer
    short_seconds = lower_quartile(lambda: prefill(0, short_tokens), 2)
    affordable_tokens = short_tokens / short_seconds * PART_SECONDS
    prompt_tokens = int(min(max_tokens, max(MIN_LONG_PROMPT, affordable_tokens)))
    prompt_seconds = lower_quartile(lambda: prefill(0, prompt_tokens), 1)
    further_seconds = (prompt_seconds - short_seconds) / (prompt_tokens - short_tokens)
    token_seconds = min(max(further_seconds, 1e-9), prompt_seconds / prompt_tokens)
    # The other slots need some context for the decode steps: together as many tokens as the prompt.
    for slot in other_slots:
        prefill(slot, max(4, prompt_tokens // settings.slots))
    every_slot = dict.fromkeys(range(settings.slots), 1)
    times = EngineTimes(
        slots=settings.slots,
        prompt_tokens_per_second=1 / token_seconds,
        pass_seconds=0.0,
        decode_seconds=lower_quartile(lambda: run_step({0: 1}), 4),
        decode_slots_seconds=lower_quartile(lambda: run_step(every_slot), 4),
    )
    if not other_slots:  # a prompt is never beside decode rows
        return times
    mixed_seconds = lower_quartile(lambda: prefill(0, prompt_tokens, other_slots), 1)
    in_one_pass = step_times_of_timings(times).seconds(len(other_slots), prompt_tokens, 0)
    pass_seconds = max(0.0, mixed_seconds - in_one_pass)
    return msgspec.structs.replace(times, pass_seconds=pass_seconds)


def _cpu_seconds() -> tuple[float, float]:
    """Return the CPU seconds that this process's threads used, and the CPU seconds that they lost:
    they were ready to run but had no core, or the hypervisor took the core (steal time)."""
    running_nanoseconds, waiting_nanoseconds = 0, 0
    for path in Path("/proc/self/task").glob("*/schedstat"):
        fields = read_text(path).split()  # running, waiting in a run queue, time slices
        if fields:  # empty: the thread has ended
            running_nanoseconds += int(fields[0])
            waiting_nanoseconds += int(fields[1])
    own_cpus = {f"cpu{core}" for core in os.sched_getaffinity(0)}
    steal_ticks = 0
    for line in read_text(Path("/proc/stat")).splitlines():
        name, *ticks = line.split()
        if name in own_cpus:
            steal_ticks += int(ticks[7])  # user, nice, system, idle, iowait, irq, softirq, steal
    lost_seconds = 1e-9 * waiting_nanoseconds + steal_ticks / os.sysconf("SC_CLK_TCK")
    return 1e-9 * running_nanoseconds, lost_seconds


def main() -> None:
    """Run in the child process: measure on the engine's cores and print one line of JSON."""
    end_with_parent()
    config = msgspec.json.decode(sys.argv[1], type=EngineConfig)
    run_on(config.cores, config.memory_nodes)
    backend = backend_class(config.backend)(config, lambda what, fraction: None)
    used_before, lost_before = _cpu_seconds()
    times = measure(backend)
    used_after, lost_after = _cpu_seconds()
    used, lost = used_after - used_before, lost_after - lost_before
    times = msgspec.structs.replace(times, taken_share=round(lost / max(used + lost, 1e-9), 4))
    backend.close()
    print(f"\n{msgspec.json.encode(times).decode()}", flush=True)


if __name__ == "__main__":
    main()

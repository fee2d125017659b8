"""Chooses the CPU engine with the highest capacity for a model under a workload and an SLO.

    choice = fastest_backend(question, hardware_facts(), say, progress)
    choice.backend, choice.weight_format, choice.reason

Memory and installed packages decide which backends are candidates. A child process measures each
candidate with the backend that would serve: prefill, decode steps of one row, and decode steps of
all slots. An engine that would use more than 8 threads is measured with half of them too, because
logical CPUs may share a core, and every step waits for its slowest thread. The times are saved in
CACHE/engine-times.json and reused until the CPU or the version of an engine's library changes.
Times that other processes disturbed are measured again.

A step-time model is fitted to the times of each engine, and `capacity()` computes the engine's
capacity under the workload and the SLO. The engine with the highest capacity is chosen. If another
engine's capacity lies within the 90 % confidence interval of the highest one, the difference is not
significant, and the engine with more bits per weight is chosen. If no engine meets the SLO even
unloaded, the capacities without latency limits decide.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from crossover.models.child_process import run_python
from crossover.models.errors import CrossoverError
from crossover.models.formatting import count, duration, of_requests, rate, share, significant
from crossover.models.machine_limits import read_text
from crossover.models.model_ladder import ladder_model
from crossover.models.model_spec import ModelSpec
from crossover.models.resolve_model import resolve
from crossover.models.weight_formats import weight_bytes
from crossover.models.weights_manifest import Progress, cache_dir, write_atomically
from crossover.serving.backends.backend_interface import Backend, EngineConfig
from crossover.serving.backends.backend_table import (
    BACKENDS,
    backend_class,
    format_of,
    library_versions,
    missing_backends,
    weights_of,
)
from crossover.serving.capacity.scheduler_settings import DEFAULT_SETTINGS, SchedulerSettings
from crossover.serving.capacity.simulated_capacity import (
    SEED,
    Z_90,
    SimulatedCapacity,
    capacity,
    lengths_of,
    sd_of,
)
from crossover.serving.capacity.slo import DEFAULT_SLO, SLO_PRESETS, Slo
from crossover.serving.capacity.step_time_model import StepTimeModel
from crossover.serving.errors import ServingError
from crossover.serving.hardware.cpu_topology import SHARED_CORES
from crossover.serving.hardware.machine_facts import HardwareFacts
from crossover.serving.placement.placement_policy import (
    NoPlacement,
    PlacementRequest,
    backends_with,
    consider,
)
from crossover.serving.sampling.step_inputs import Row
from crossover.serving.workload.request_lengths import DEFAULT_WORKLOAD, Workload

BEST = "best"  # a campaign writes it in place of a backend's name
# The candidates if no weight format is requested: (backend, weight format).
USUAL = tuple(
    (name, format_of(name, None)) for name, row in BACKENDS.items() if row.is_cpu_candidate
)
# CPUs with one of these flags multiply bf16, which is torch's default format. On them torch is a
# candidate too.
BF16_FLAGS = frozenset({"amx_bf16", "avx512_bf16"})
REFERENCE = ("torch", format_of("torch", None))  # (backend, weight format)
MIN_HALVED_THREADS = SHARED_CORES + 1  # from this many threads on, half of them are measured too
# The weights of a model with more than MAX_MEASURED_PARAMETERS would take too long to prepare, so
# PROXY is measured instead, and its times are scaled.
PROXY, MAX_MEASURED_PARAMETERS = "llama-3.2-1b", 2_000_000_000
PART_SECONDS = 0.5  # time spent measuring each kind of step
MAX_STEPS = 64  # maximum steps of each kind
SHORT_PROMPT, LONG_PROMPT = 16, 256  # tokens; the long prompt is used if there is time for it
TIMEOUT_SECONDS = 300.0  # of the child process that measures one engine
# Times are measured again if other processes took more than this share of the CPU time that the
# engine wanted.
MAX_TAKEN_SHARE = 0.1

# Simulated requests at each rate. So few requests raise all capacities by 5 to 8 % compared with
# 8,000, but all engines get the same sample, so their order does not change. One engine takes 0.1 s
# of CPU time.
CHOICE_REQUESTS = 500

Say = Callable[[str], None]


class EngineTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Measured step times of one engine for one model on one machine."""

    slots: int
    prompt_tokens_per_second: float
    decode_seconds: float  # of a decode step with one row
    decode_slots_seconds: float  # of a decode step with one row per slot
    taken_share: float = 0.0  # share of the engine's CPU time that other processes took


class EngineCandidate(msgspec.Struct, frozen=True, kw_only=True):
    """An engine that may be chosen, with what is known about it so far."""

    backend: str
    weight_format: str
    why_not: str = ""  # why it cannot be chosen; "": it can
    times: EngineTimes | None = None  # for the requested model; None: not measured
    capacity: SimulatedCapacity | None = None  # under the workload and the SLO, from `times`
    is_without_slo: bool = False  # `capacity` is without latency limits
    threads: int | None = None  # None: as in the question, if only one number is measured

    @property
    def name(self) -> str:
        """The backend and weight format, and the number of threads if several are compared."""
        threads = "" if self.threads is None else f" with {self.threads} threads"
        return f"{self.backend} {self.weight_format}".strip() + threads

    @property
    def rate(self) -> float:
        """The capacity in requests/s; 0.0 if it was not measured or misses the SLO unloaded."""
        return 0.0 if self.capacity is None else self.capacity.rate

    @property
    def low_rate(self) -> float:
        """The lower end of the capacity's 90 % confidence interval, in requests/s."""
        steepness = 1.0 if self.capacity is None else self.capacity.steepness
        return self.rate * math.exp(-Z_90 * sd_of(0) * steepness)


class EngineChoice(NamedTuple):
    """The chosen engine, the reason in one sentence, and all candidates."""

    backend: str
    weight_format: str
    reason: str
    candidates: tuple[EngineCandidate, ...]
    threads: int | None = None  # None: only the requested number was measured


class EngineQuestion(msgspec.Struct, frozen=True, kw_only=True):
    """Which engine serves this model best on the CPU, under this workload and SLO?"""

    source: str  # a ladder model, a file or a folder
    request: PlacementRequest
    threads: int
    cores: tuple[int, ...]  # logical CPUs that the engine may use; (): all
    formats: tuple[str, ...] = ()  # requested weight formats; (): USUAL
    # (backend, weight format) pairs of a model whose files exist already; (): follow from `formats`
    engines: tuple[tuple[str, str], ...] = ()
    workload: Workload = DEFAULT_WORKLOAD
    slo: Slo = DEFAULT_SLO
    cache: str | None = None  # the cache folder; None: the default one
    may_measure: bool = True  # False: use only saved times
    # Whether REFERENCE may be measured too; its saved times are used in any case. Its weights are
    # twice as large as the others', which takes too long to prepare while a server starts.
    may_measure_reference: bool = False
    are_threads_open: bool = False  # the user set no number of threads, so half are tried too

    @property
    def settings(self) -> SchedulerSettings:
        """The engine's settings, with the CPU's defaults for those that are not set."""
        return self.request.settings.filled(DEFAULT_SETTINGS["cpu"])

    def key(self, engine: EngineCandidate) -> str:
        """Return the key of an engine's saved times: all that they depend on, except the
        machine."""
        model, settings = self.request.model, self.settings
        engine_name = f"{engine.backend} {engine.weight_format}".strip()
        threads = engine.threads or self.threads
        return (
            f"{model.name} ({model.parameters}), {engine_name}, {threads} threads, "
            f"{settings.slots} slots, KV {settings.kv_dtype}"
        )

    @property
    def thread_counts(self) -> tuple[int | None, ...]:
        """The numbers of threads to measure each engine with; (None,) stands for `threads`
        only."""
        if not self.are_threads_open or self.threads < MIN_HALVED_THREADS:
            return (None,)
        return (self.threads, self.threads // 2)


def fastest_backend(
    question: EngineQuestion, facts: HardwareFacts, say: Say, progress: Progress
) -> EngineChoice:
    """Return the best engine for the question.

    This takes several seconds for each engine that has not been measured on this machine yet.
    `say` is called with a sentence for each engine that was measured, `progress` meanwhile.

    Raises NoPlacement if no engine can run the model on this machine.
    """
    format_engines = [
        pair for weight_format in question.formats for pair in backends_with("cpu", weight_format)
    ]
    engines = question.engines or (format_engines if question.formats else usual_candidates(facts))
    candidates = [_candidate(question, facts, *pair) for pair in engines]
    candidates = [
        msgspec.structs.replace(candidate, threads=threads)
        for candidate in candidates
        for threads in question.thread_counts[: 1 if candidate.why_not else None]
    ]
    if sum(not candidate.why_not for candidate in candidates) > 1:
        candidates = [
            _with_times(question, candidate, facts, say, progress) for candidate in candidates
        ]
        if not (question.engines or question.formats):  # REFERENCE counts only if it was measured
            candidates = [
                candidate
                for candidate in candidates
                if candidate.times or (candidate.backend, candidate.weight_format) != REFERENCE
            ]
        candidates = _with_capacities(question, candidates)
    ranking = rank(candidates, question.request.model)
    if not ranking:
        reasons = "; ".join(f"{candidate.name}: {candidate.why_not}" for candidate in candidates)
        reasons = reasons or f"no CPU engine has the format {', '.join(question.formats)}"
        raise NoPlacement(f"No engine here can run {question.request.model.name}: {reasons}")
    best = ranking[0]
    reason = _reason(question, best, candidates)
    return EngineChoice(best.backend, best.weight_format, reason, tuple(candidates), best.threads)


def usual_candidates(facts: HardwareFacts) -> tuple[tuple[str, str], ...]:
    """Return the candidates if no weight format is requested, as (backend, weight format): USUAL,
    and REFERENCE if torch is installed and the CPU multiplies bf16."""
    has_bf16 = bool(BF16_FLAGS & {*facts.isa}) and REFERENCE[0] not in missing_backends()
    return (*USUAL, REFERENCE) if has_bf16 else USUAL


def rank(candidates: Sequence[EngineCandidate], model: ModelSpec) -> list[EngineCandidate]:
    """Return the candidates that can be chosen, best first.

    They are ordered by capacity, with one exception: of the candidates whose capacity lies within
    the 90 % confidence interval of the highest one, the one with the largest weights comes first.
    Candidates that were not measured come last, in their given order.
    """
    usable = [candidate for candidate in candidates if not candidate.why_not]
    by_rate = sorted(usable, key=lambda candidate: candidate.rate, reverse=True)
    if not by_rate or not by_rate[0].rate:
        return by_rate
    tied_for_best = [candidate for candidate in by_rate if candidate.rate >= by_rate[0].low_rate]
    best = max(tied_for_best, key=lambda candidate: weight_bytes(model, candidate.weight_format))
    return [best, *(candidate for candidate in by_rate if candidate is not best)]


def _reason(
    question: EngineQuestion, best: EngineCandidate, candidates: Sequence[EngineCandidate]
) -> str:
    """Return why this engine was chosen, in one sentence with the workload, the SLO and the
    capacities of all candidates."""
    if len(candidates) == 1:
        return f"{best.name} is the only engine of the CPU that runs it"
    rates = [candidate.rate for candidate in candidates if candidate.rate]
    unit_rate = min(rates, default=0.0)
    capacities = "; ".join(
        f"{candidate.name}: {candidate.why_not or _capacity_text(candidate.capacity, unit_rate)}"
        for candidate in candidates
    )
    slots, slo = count(question.settings.slots), question.slo.name
    lengths = lengths_of(question.workload, CHOICE_REQUESTS, SEED)
    work = (
        f"for the workload {question.workload.preset or 'given'} (prompts of "
        f"{significant(float(lengths.prompt.mean()))} and answers of "
        f"{significant(float(lengths.output.mean()))} tokens on average, {slots} slots)"
    )
    if any(candidate.is_without_slo for candidate in candidates):
        return (
            f"{best.name} is the best engine by its step times {work}; no engine meets the SLO "
            f"{slo} unloaded, and without it they carry: {capacities}"
        )
    text = (
        f"{best.name} is the best engine by its step times under the SLO {slo} {work}: {capacities}"
    )
    if rates and best.rate < max(rates):
        text += "; where the capacities cannot be told apart, more bits are preferred"
    return text


def _capacity_text(simulated: SimulatedCapacity | None, unit_rate: float) -> str:
    """Return the capacity with its unit, which is the one that suits `unit_rate` (requests/s)."""
    if simulated is None:
        return "not measured"
    if not simulated.rate:
        return "misses the SLO unloaded"
    return of_requests(rate(simulated.rate, like=unit_rate))


def known_times(
    question: EngineQuestion,
    engine: EngineCandidate,
    facts: HardwareFacts,
    say: Say,
    progress: Progress,
) -> EngineTimes | None:
    """Return the engine's times for the model: saved times if they were undisturbed, else times
    measured now, even if other processes disturb these too.

    Without permission to measure, any saved times are returned, or None if there are none. Raises
    CrossoverError if measuring fails.
    """
    cache, began = question.cache, time.monotonic()
    saved = read_table(cache, facts).get(question.key(engine))
    may_measure = question.may_measure and (
        question.may_measure_reference
        or bool(question.engines or question.formats)
        or (engine.backend, engine.weight_format) != REFERENCE
    )
    if not may_measure or (saved is not None and saved.taken_share <= MAX_TAKEN_SHARE):
        return saved
    kind, file_format = weights_of(engine.backend, engine.weight_format)
    files = resolve(
        question.source, kind=kind, weight_format=file_format, cache=cache, progress=progress
    )
    config = EngineConfig(
        backend=engine.backend,
        model_path=files.path,
        model_name=files.name,
        weight_format=files.weight_format,
        tokenizer_path=files.tokenizer_path,
        settings=question.settings,
        threads=engine.threads or question.threads,
        cores=question.cores,
    )
    progress(f"measuring {engine.name} on {files.name}", None)
    times = measured_times(config, question.request.model)
    elapsed = duration(time.monotonic() - began)
    where = f"saved in {table_path(cache)}"
    try:
        save_times(cache, facts, question.key(engine), times)
    except OSError as problem:  # such as a cache on a read-only disk
        where = f"not saved: {table_path(cache)} cannot be written to ({problem.strerror})"
    if times.taken_share > MAX_TAKEN_SHARE:
        taken_text = share(times.taken_share, 2)
        where = f"other processes took {taken_text} of its CPU time: it is measured again next time"
    say(f"measured {engine.name} on {files.name} in {elapsed}, {where}")
    return times


def _candidate(
    question: EngineQuestion, facts: HardwareFacts, backend: str, weight_format: str
) -> EngineCandidate:
    """Return the engine as a candidate, with the reason if it cannot run on this machine."""
    why_not = missing_backends().get(backend, "")
    request = msgspec.structs.replace(question.request, weight_format=weight_format)
    attempt, reason = consider(request, facts, backend, None)
    if attempt is None and reason is not None:
        why_not = why_not or reason.text
    return EngineCandidate(backend=backend, weight_format=weight_format, why_not=why_not)


def _with_times(
    question: EngineQuestion,
    candidate: EngineCandidate,
    facts: HardwareFacts,
    say: Say,
    progress: Progress,
) -> EngineCandidate:
    """Return the candidate with its times for the requested model, scaled from those of PROXY if
    the model is large. If measuring fails, the error becomes `why_not`."""
    if candidate.why_not:
        return candidate
    spec, measured_question = question.request.model, question
    if spec.parameters > MAX_MEASURED_PARAMETERS:
        request = msgspec.structs.replace(measured_question.request, model=ladder_model(PROXY).spec)
        measured_question = msgspec.structs.replace(
            measured_question, source=PROXY, request=request
        )
    try:
        times = known_times(measured_question, candidate, facts, say, progress)
    except CrossoverError as problem:
        return msgspec.structs.replace(candidate, why_not=f"cannot be measured: {problem}")
    if times is None:
        return candidate
    measured_model = measured_question.request.model

    def weight_ratio(rows: int) -> float:
        """Return the weight bytes that a step of this many rows reads, as a multiple of those that
        it reads of the measured model."""
        model_bytes = spec.step_weight_bytes(rows, spec.parameters)
        return model_bytes / measured_model.step_weight_bytes(rows, measured_model.parameters)

    # Prefill is compute-bound, so its time follows the active parameters. Decode is memory-bound,
    # so its time follows the bytes of the weights that a step reads.
    compute_ratio = spec.active_parameters / measured_model.active_parameters
    times = EngineTimes(
        slots=times.slots,
        prompt_tokens_per_second=times.prompt_tokens_per_second / compute_ratio,
        decode_seconds=times.decode_seconds * weight_ratio(1),
        decode_slots_seconds=times.decode_slots_seconds * weight_ratio(times.slots),
    )
    return msgspec.structs.replace(candidate, times=times)


def _with_capacities(
    question: EngineQuestion, candidates: Sequence[EngineCandidate]
) -> list[EngineCandidate]:
    """Return the candidates with the capacities of those that were measured. If none of them meets
    the SLO unloaded, all capacities are without latency limits."""

    def capacities_under(slo: Slo, is_without_slo: bool) -> list[EngineCandidate]:
        return [
            candidate
            if candidate.times is None or candidate.why_not
            else msgspec.structs.replace(
                candidate,
                capacity=capacity(
                    step_times_of_timings(candidate.times),
                    question.settings,
                    question.workload,
                    slo,
                    requests=CHOICE_REQUESTS,
                ),
                is_without_slo=is_without_slo,
            )
            for candidate in candidates
        ]

    with_slo = capacities_under(question.slo, False)
    if any(candidate.capacity for candidate in with_slo) and not any(
        candidate.rate for candidate in with_slo
    ):
        return capacities_under(SLO_PRESETS["batch"], True)
    return with_slo


def step_times_of_timings(times: EngineTimes) -> StepTimeModel:
    """Return the step-time model through the two decode times, of one row and of all slots:

    seconds = base + row_seconds * decode rows + prompt_token_seconds * prompt tokens
    """
    row_seconds = (times.decode_slots_seconds - times.decode_seconds) / max(1, times.slots - 1)
    row_seconds = min(max(row_seconds, 0.0), times.decode_seconds)
    return StepTimeModel(
        base_seconds=times.decode_seconds - row_seconds,
        row_seconds=row_seconds,
        prompt_token_seconds=1 / times.prompt_tokens_per_second,
    )


# --- the table of saved times


def table_path(cache: str | Path | None) -> Path:
    """Return the file with the saved times in this cache folder (None: the default one)."""
    return cache_dir(cache) / "engine-times.json"


def read_table(cache: str | Path | None, facts: HardwareFacts) -> dict[str, EngineTimes]:
    """Return the saved times by EngineQuestion.key. Empty if the file cannot be read, or was
    written on another machine or with other versions of the engines' libraries."""
    try:
        content = table_path(cache).read_bytes()
        machine, rows = msgspec.json.decode(content, type=tuple[str, dict[str, EngineTimes]])
    except (OSError, msgspec.MsgspecError):
        return {}
    return rows if machine == _machine(facts) else {}


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


# --- measuring


def measured_times(config: EngineConfig, spec: ModelSpec) -> EngineTimes:
    """Measure the engine with this configuration in a child process, with the shortest context
    that the measurement needs.

    Raises ServingError if the child process fails or takes longer than TIMEOUT_SECONDS.
    """
    context = min(spec.context, LONG_PROMPT + 4 * MAX_STEPS)
    settings = msgspec.structs.replace(config.settings, context_tokens=context, kv_tokens=None)
    config = msgspec.structs.replace(config, settings=settings)
    child = run_python(
        "-m",
        "crossover.serving.placement.fastest_backend",
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
    generator, slot_tokens = np.random.default_rng(1), [0] * settings.slots
    first_token = 3  # lower ids are usually special tokens

    def seconds_of(slots: Iterable[int], tokens: int) -> float:
        """Run a step that appends this many tokens to each of these slots; return its seconds."""
        rows = []
        for slot in slots:
            token_ids = generator.integers(first_token, info.vocabulary, tokens, np.int32)
            rows.append(Row(slot, token_ids, slot_tokens[slot], True))
            slot_tokens[slot] += tokens
        started = clock()
        backend.step(rows)
        return max(clock() - started, 1e-9)

    def prefill(slot: int, tokens: int) -> float:
        """Run a step with a new prompt in this slot; return its seconds."""
        slot_tokens[slot] = 0
        return seconds_of([slot], tokens)

    def lower_quartile(step: Callable[[], float], min_steps: int) -> float:
        """Repeat a step and return the lower quartile of its seconds, since other work on the
        machine can only make steps longer."""
        deadline, timings = clock() + PART_SECONDS, list[float]()
        while len(timings) < min_steps or (clock() < deadline and len(timings) < MAX_STEPS):
            timings.append(step())
        return sorted(timings)[len(timings) // 4]

    max_prompt = min(LONG_PROMPT, settings.step_tokens, settings.context_tokens - 2)
    tokens_per_second = SHORT_PROMPT / min(prefill(0, SHORT_PROMPT) for _ in range(2))
    length = int(min(max_prompt, max(SHORT_PROMPT, tokens_per_second * PART_SECONDS)))
    prompt_seconds = lower_quartile(lambda: prefill(0, length), 1)
    # The other slots need some context for the decode steps: together as many tokens as the prompt.
    for slot in range(1, settings.slots):
        prefill(slot, max(4, length // settings.slots))
    return EngineTimes(
        slots=settings.slots,
        prompt_tokens_per_second=length / prompt_seconds,
        decode_seconds=lower_quartile(lambda: seconds_of([0], 1), 4),
        decode_slots_seconds=lower_quartile(lambda: seconds_of(range(settings.slots), 1), 4),
    )


def _cpu_seconds() -> tuple[float, float]:
    """Return the CPU seconds that this process's threads used, and the CPU seconds that they lost:
    they were ready to run but had no core, or the hypervisor took the core (steal time)."""
    # schedstat: nanoseconds running, nanoseconds waiting in a run queue, time slices
    schedstats = [read_text(path).split() for path in Path("/proc/self/task").glob("*/schedstat")]
    running_seconds, waiting_seconds = (
        1e-9 * sum(int(fields[index]) for fields in schedstats if fields) for index in (0, 1)
    )
    cpu_names = {f"cpu{core}" for core in os.sched_getaffinity(0)}
    cpu_lines = (line.split() for line in read_text(Path("/proc/stat")).splitlines())
    steal_ticks = sum(int(fields[8]) for fields in cpu_lines if fields[0] in cpu_names)
    return running_seconds, waiting_seconds + steal_ticks / os.sysconf("SC_CLK_TCK")


def main() -> None:
    """Run in the child process: measure on the engine's cores and print one line of JSON."""
    config = msgspec.json.decode(sys.argv[1], type=EngineConfig)
    if config.cores:
        os.sched_setaffinity(0, config.cores)
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

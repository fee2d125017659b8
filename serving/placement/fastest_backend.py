"""Chooses the CPU engine with the highest capacity for a model under a workload and an SLO.

    choice = fastest_backend(question, hardware_facts(), say, progress)
    choice.backend, choice.weight_format, choice.reason

Memory and installed packages decide which backends are candidates. A child process measures each
candidate with the backend that would serve: prefill, decode steps of one row, and decode steps of
all slots. An engine that would use more than 8 threads is measured with half of them too, because
logical CPUs may share a core, and every step waits for its slowest thread. The times are saved in
CACHE/engine-times.json and reused until the CPU or the version of an engine's library changes.
Times that other processes disturbed are measured again.

A step-time model is fitted to the times of each engine, and `ServerModel.capacity` computes the
engine's capacity under the workload and the SLO. The engine with the highest capacity is chosen. If
another engine's capacity lies within the 90 % confidence interval of the highest one, the
difference is not significant, and the engine with more bits per weight is chosen. If no engine
meets the SLO even unloaded, the capacities without latency limits decide.
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
from crossover.models.identity.model_ladder import ladder_model
from crossover.models.identity.resolve_model import resolve
from crossover.models.machine_limits import read_text
from crossover.models.shape.model_spec import ModelSpec
from crossover.models.weights.weight_formats import weight_bytes
from crossover.models.weights.weights_manifest import Progress, cache_dir, write_atomically
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
    Demand,
    ServerModel,
    SimulatedCapacity,
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

BEST = "best"  # in a campaign file: the backend that this module chooses
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
MAX_STEPS = 64  # of each kind
SHORT_PROMPT, LONG_PROMPT = 16, 256  # tokens; the long prompt is used if there is time for it
TIMEOUT_SECONDS = 300.0  # of the child process that measures one engine
# Times are measured again if other processes took more than this share of the CPU time that the
# engine wanted.
MAX_TAKEN_SHARE = 0.1

# Simulated requests at each rate, which take 0.1 s of CPU time for one engine. Compared with 8,000
# requests, so few raise all capacities by 5 to 8 %, but all engines get the same sample, so their
# order does not change.
CHOICE_REQUESTS = 500

Say = Callable[[str], None]


class EngineTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Measured step times of one engine for one model on one machine."""

    slots: int
    prompt_tokens_per_second: float
    decode_seconds: float  # of a decode step with one row
    decode_slots_seconds: float  # of a decode step with one row per slot
    # Of the CPU time that the engine could have used, the share that other processes took.
    taken_share: float = 0.0


class EngineCandidate(msgspec.Struct, frozen=True, kw_only=True):
    """An engine that may be chosen, with what is known about it so far."""

    backend: str
    weight_format: str
    why_not: str = ""  # why it cannot be chosen; "": it can
    times: EngineTimes | None = None  # for the requested model; None: not measured
    capacity: SimulatedCapacity | None = None  # under the workload and the SLO, from `times`
    is_without_slo: bool = False  # `capacity` is without latency limits
    threads: int | None = None  # None: the question's, the only number that is measured

    @property
    def name(self) -> str:
        """The backend and weight format, and the number of threads if several are compared."""
        engine = f"{self.backend} {self.weight_format}".strip()
        return engine if self.threads is None else f"{engine} with {self.threads} threads"

    @property
    def is_reference(self) -> bool:
        """Whether this is REFERENCE."""
        return (self.backend, self.weight_format) == REFERENCE

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
    # Whether REFERENCE may be measured although no engine is named; its saved times are used in any
    # case. Its weights are twice as large as the others', which takes too long to prepare while a
    # server starts.
    may_measure_reference: bool = False
    are_threads_open: bool = False  # the user set no number of threads, so half are tried too

    @property
    def settings(self) -> SchedulerSettings:
        """The engine's settings, with the CPU's defaults for those that are not set."""
        return self.request.settings.filled(DEFAULT_SETTINGS["cpu"])

    @property
    def names_engines(self) -> bool:
        """Whether the user named engines or weight formats; else the candidates are the usual
        ones."""
        return bool(self.engines or self.formats)

    def may_measure_engine(self, engine: EngineCandidate) -> bool:
        """Return whether this engine may be measured."""
        is_allowed = self.may_measure_reference or self.names_engines or not engine.is_reference
        return self.may_measure and is_allowed

    def key(self, engine: EngineCandidate) -> str:
        """Return the key of an engine's saved times: all that they depend on except the machine."""
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
    candidates = _candidates_of(question, facts)
    usable_count = sum(not candidate.why_not for candidate in candidates)
    if usable_count > 1:  # otherwise there is nothing to compare
        candidates = [
            _with_times(question, candidate, facts, say, progress) for candidate in candidates
        ]
        if not question.names_engines:  # REFERENCE counts only if it was measured
            candidates = [
                candidate
                for candidate in candidates
                if candidate.times is not None or not candidate.is_reference
            ]
        candidates = _with_capacities(question, candidates)
    ranking = rank(candidates, question.request.model)
    if not ranking:
        reasons = "; ".join(f"{candidate.name}: {candidate.why_not}" for candidate in candidates)
        if not candidates:
            reasons = f"no CPU engine has the format {', '.join(question.formats)}"
        raise NoPlacement(f"No engine here can run {question.request.model.name}: {reasons}")
    best = ranking[0]
    reason = _reason(question, best, candidates)
    return EngineChoice(best.backend, best.weight_format, reason, tuple(candidates), best.threads)


def _candidates_of(question: EngineQuestion, facts: HardwareFacts) -> list[EngineCandidate]:
    """Return the engines of the question as candidates, each with every number of threads that is
    to be measured. Those that cannot run on this machine have the reason."""
    engines: list[tuple[str, str]] = []  # (backend, weight format)
    if question.engines:
        engines += question.engines
    elif question.formats:
        for weight_format in question.formats:
            engines += backends_with("cpu", weight_format)
    else:
        engines += usual_candidates(facts)
    candidates: list[EngineCandidate] = []
    for backend, weight_format in engines:
        candidate = _candidate(question, facts, backend, weight_format)
        for threads in question.thread_counts:
            candidates.append(msgspec.structs.replace(candidate, threads=threads))
            if candidate.why_not:
                break  # the number of threads does not matter
    return candidates


def usual_candidates(facts: HardwareFacts) -> tuple[tuple[str, str], ...]:
    """Return the candidates if no weight format is requested, as (backend, weight format): USUAL,
    and REFERENCE if torch is installed and the CPU multiplies bf16."""
    has_bf16 = not BF16_FLAGS.isdisjoint(facts.isa)
    has_torch = REFERENCE[0] not in missing_backends()
    return (*USUAL, REFERENCE) if has_bf16 and has_torch else USUAL


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
    unit_rate = min(rates, default=0.0)  # one unit for all capacities
    descriptions: list[str] = []
    for candidate in candidates:
        result = candidate.why_not or _capacity_text(candidate.capacity, unit_rate)
        descriptions.append(f"{candidate.name}: {result}")
    capacities = "; ".join(descriptions)
    slots, slo = count(question.settings.slots), question.slo.name
    lengths = lengths_of(question.workload, CHOICE_REQUESTS, SEED)
    prompt_tokens = significant(float(lengths.prompt.mean()))
    output_tokens = significant(float(lengths.output.mean()))
    workload_text = (
        f"for the workload {question.workload.preset or 'given'} (prompts of {prompt_tokens} and "
        f"answers of {output_tokens} tokens on average, {slots} slots)"
    )
    best_text = f"{best.name} is the best engine by its step times"
    if any(candidate.is_without_slo for candidate in candidates):
        return (
            f"{best_text} {workload_text}; no engine meets the SLO {slo} unloaded, and without it "
            f"they carry: {capacities}"
        )
    text = f"{best_text} under the SLO {slo} {workload_text}: {capacities}"
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

    If the question forbids measuring this engine, any saved times are returned, or None if there
    are none. Raises CrossoverError if measuring fails.
    """
    cache = question.cache
    started = time.monotonic()
    saved = read_table(cache, facts).get(question.key(engine))
    is_undisturbed = saved is not None and saved.taken_share <= MAX_TAKEN_SHARE
    if is_undisturbed or not question.may_measure_engine(engine):
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
    elapsed = duration(time.monotonic() - started)
    outcome = f"saved in {table_path(cache)}"
    try:
        save_times(cache, facts, question.key(engine), times)
    except OSError as problem:  # such as a cache on a read-only disk
        outcome = f"not saved: {table_path(cache)} cannot be written to ({problem.strerror})"
    if times.taken_share > MAX_TAKEN_SHARE:
        taken = share(times.taken_share, 2)
        outcome = f"other processes took {taken} of its CPU time: it is measured again next time"
    say(f"measured {engine.name} on {files.name} in {elapsed}, {outcome}")
    return times


def _candidate(
    question: EngineQuestion, facts: HardwareFacts, backend: str, weight_format: str
) -> EngineCandidate:
    """Return the engine as a candidate, with the reason if it cannot run on this machine."""
    request = msgspec.structs.replace(question.request, weight_format=weight_format)
    attempt, reason = consider(request, facts, backend, None)
    why_not = missing_backends().get(backend, "")
    if not why_not and attempt is None and reason is not None:
        why_not = reason.text
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
    spec = question.request.model
    measured_model = spec
    measured_question = question
    if spec.parameters > MAX_MEASURED_PARAMETERS:
        measured_model = ladder_model(PROXY).spec
        request = msgspec.structs.replace(question.request, model=measured_model)
        measured_question = msgspec.structs.replace(question, source=PROXY, request=request)
    try:
        times = known_times(measured_question, candidate, facts, say, progress)
    except CrossoverError as problem:
        return msgspec.structs.replace(candidate, why_not=f"cannot be measured: {problem}")
    if times is None:
        return candidate

    def weight_ratio(rows: int) -> float:
        """Return how many times as many weights a step of this many rows reads as a step of the
        measured model."""
        weights = spec.step_weight_bytes(rows, spec.parameters)
        measured_weights = measured_model.step_weight_bytes(rows, measured_model.parameters)
        return weights / measured_weights

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

    def with_capacity(
        candidate: EngineCandidate, slo: Slo, is_without_slo: bool = False
    ) -> EngineCandidate:
        if candidate.times is None or candidate.why_not:
            return candidate
        server = ServerModel(step_times_of_timings(candidate.times), question.settings)
        simulated = server.capacity(Demand(question.workload), slo, CHOICE_REQUESTS)
        return msgspec.structs.replace(candidate, capacity=simulated, is_without_slo=is_without_slo)

    with_slo = [with_capacity(candidate, question.slo) for candidate in candidates]
    was_measured = any(candidate.capacity is not None for candidate in with_slo)
    meets_slo = any(candidate.rate for candidate in with_slo)
    if was_measured and not meets_slo:
        no_limits = SLO_PRESETS["batch"]
        return [with_capacity(candidate, no_limits, True) for candidate in candidates]
    return with_slo


def step_times_of_timings(times: EngineTimes) -> StepTimeModel:
    """Return the step-time model through the two decode times, of one row and of all slots:

    seconds = base_seconds + row_seconds * decode rows + prompt_token_seconds * prompt tokens
    """
    row_seconds = (times.decode_slots_seconds - times.decode_seconds) / max(1, times.slots - 1)
    row_seconds = min(max(row_seconds, 0.0), times.decode_seconds)  # so that base_seconds >= 0
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


# --- measuring


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
    generator = np.random.default_rng(1)
    tokens_in_slot = [0] * settings.slots
    first_token = 3  # lower ids are usually special tokens

    def run_step(slots: Iterable[int], tokens: int) -> float:
        """Run a step that appends this many tokens to each of these slots; return its seconds."""
        rows = []
        for slot in slots:
            token_ids = generator.integers(first_token, info.vocabulary, tokens, np.int32)
            rows.append(Row(slot, token_ids, tokens_in_slot[slot], True))
            tokens_in_slot[slot] += tokens
        started = clock()
        backend.step(rows)
        return max(clock() - started, 1e-9)

    def prefill(slot: int, tokens: int) -> float:
        """Run a step with a new prompt in this slot; return its seconds."""
        tokens_in_slot[slot] = 0
        return run_step([slot], tokens)

    def lower_quartile(step: Callable[[], float], min_steps: int) -> float:
        """Repeat a step and return the lower quartile of its seconds, since other work on the
        machine can only make steps longer."""
        deadline = clock() + PART_SECONDS
        timings: list[float] = []
        while len(timings) < min_steps or (clock() < deadline and len(timings) < MAX_STEPS):
            timings.append(step())
        return sorted(timings)[len(timings) // 4]

    # A prompt that takes about PART_SECONDS by the speed of a short one, of SHORT_PROMPT to
    # LONG_PROMPT tokens.
    short_seconds = min(prefill(0, SHORT_PROMPT) for _ in range(2))
    affordable_tokens = SHORT_PROMPT / short_seconds * PART_SECONDS
    max_tokens = min(LONG_PROMPT, settings.step_tokens, settings.context_tokens - 2)
    prompt_tokens = int(min(max_tokens, max(SHORT_PROMPT, affordable_tokens)))
    prompt_seconds = lower_quartile(lambda: prefill(0, prompt_tokens), 1)
    # The other slots need some context for the decode steps: together as many tokens as the prompt.
    for slot in range(1, settings.slots):
        prefill(slot, max(4, prompt_tokens // settings.slots))
    return EngineTimes(
        slots=settings.slots,
        prompt_tokens_per_second=prompt_tokens / prompt_seconds,
        decode_seconds=lower_quartile(lambda: run_step([0], 1), 4),
        decode_slots_seconds=lower_quartile(lambda: run_step(range(settings.slots), 1), 4),
    )


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

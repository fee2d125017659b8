"""Chooses the best engine of this CPU for a model, a workload and an SLO; measured only once.

    choice = fastest_backend(question, hardware_facts(), say, progress)
    choice.backend, choice.weight_format, choice.reason

Memory and installed packages decide which backends are candidates. A child process measures each
candidate with the backend that would serve: prompts alone, decode steps of one row, and decode
steps of all slots. An engine that would have more than 8 threads is measured with half of them too:
CPUs may be hyperthreads, and a step waits for the last of its threads. The times are saved in
CACHE/engine-times.json until the CPU or the version of an engine's library changes; disturbed times
are measured again.

The times give a step-time model of each engine, and `capacity()` computes its capacity under the
workload and the SLO. The engine with the most capacity is chosen. If the capacity of another engine
lies in the 90 % interval of that capacity, the two cannot be told apart, and the one whose weights
have more bits is chosen. If no engine meets the SLO even unloaded, the capacity without limits
decides.
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
    fitted,
)
from crossover.serving.sampling.step_inputs import Row
from crossover.serving.workload.request_lengths import DEFAULT_WORKLOAD, Workload

BEST = "best"  # a campaign writes it in place of a backend's name
# Looked at where no format is asked for.
USUAL = tuple(
    (name, format_of(name, None)) for name, row in BACKENDS.items() if row.is_cpu_candidate
)
# CPUs with these flags have instructions for torch's usual format, so torch is a candidate too.
BF16_FLAGS = frozenset({"amx_bf16", "avx512_bf16"})
REFERENCE = ("torch", format_of("torch", None))
MIN_HALVED_THREADS = SHARED_CORES + 1  # from this many on, half of the threads are measured too
# A bigger model, whose weights would first have to be made, is judged by this ladder model's times,
# scaled.
PROXY, MAX_MEASURED_PARAMETERS = "llama-3.2-1b", 2_000_000_000
PART_SECONDS = 0.5  # measuring time of each kind of step
MAX_STEPS = 64  # of one kind
SHORT_PROMPT, LONG_PROMPT = 16, 256  # tokens; the long one where there is time for it
TIMEOUT_SECONDS = 300.0
MAX_TAKEN = 0.1  # of the CPU time that an engine wanted: more, and it is measured again

# Simulated at each rate. All engines get the same draws, so that what so few requests add to all
# capacities (5 to 8 % against 8,000) does not change their order; an engine takes 0.1 s of CPU.
CHOICE_REQUESTS = 500

Say = Callable[[str], None]


class EngineTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Measured times of one engine for one model on one machine."""

    slots: int
    prompt_tokens_per_second: float
    decode_seconds: float  # time of a decode step of one row
    decode_slots_seconds: float  # time of a decode step of `slots` rows
    taken_share: float = 0.0  # share of the engine's CPU time that other processes took


class EngineCandidate(msgspec.Struct, frozen=True, kw_only=True):
    """A candidate engine. `why_not`: why it cannot be chosen; "": it can."""

    backend: str
    weight_format: str
    why_not: str = ""
    times: EngineTimes | None = None  # for the model that is asked for; None: not measured
    capacity: SimulatedCapacity | None = None  # under the workload and SLO, by `times`

    is_without_slo: bool = False  # the capacity is that without limits
    threads: int | None = None  # None: those of the question, the only number that is measured

    @property
    def name(self) -> str:
        """Return the engine and its format, and the threads where several numbers are tried."""
        threads = "" if self.threads is None else f" with {self.threads} threads"
        return f"{self.backend} {self.weight_format}".strip() + threads

    @property
    def rate(self) -> float:
        """Requests/s of its capacity; 0.0: not measured, or the SLO is missed even unloaded."""
        return 0.0 if self.capacity is None else self.capacity.rate

    @property
    def low_rate(self) -> float:
        """Requests/s at the lower end of the 90 % interval of its capacity."""
        steepness = 1.0 if self.capacity is None else self.capacity.steepness
        return self.rate * math.exp(-Z_90 * sd_of(0) * steepness)


class EngineChoice(NamedTuple):
    """The chosen engine, the reason, and all candidates."""

    backend: str
    weight_format: str
    reason: str
    candidates: tuple[EngineCandidate, ...]
    threads: int | None = None  # None: only the requested number was measured


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """A model that is to be served on the CPU, and under which workload and SLO."""

    source: str  # a ladder model, a file or a folder
    request: PlacementRequest
    threads: int
    cores: tuple[int, ...]
    formats: tuple[str, ...] = ()  # none: USUAL
    # (backend, format) pairs, of a model that is there already; none: those of `formats`
    engines: tuple[tuple[str, str], ...] = ()
    workload: Workload = DEFAULT_WORKLOAD
    slo: Slo = DEFAULT_SLO
    cache: str | None = None
    may_measure: bool = True  # False: use only times that are saved already
    # Whether torch may be measured too; saved times are used in any case. Its weights take twice
    # the room of the others, which is too much to prepare for a server that only starts.
    may_measure_reference: bool = False
    are_threads_open: bool = False  # the user named no number: measure half of them too

    @property
    def settings(self) -> SchedulerSettings:
        """Return the engine's settings, with a CPU's defaults for those that are not set."""
        return self.request.settings.filled(DEFAULT_SETTINGS["cpu"])

    def key(self, engine: EngineCandidate) -> str:
        """Return the key of the times in the table: all they depend on except the machine."""
        model, settings = self.request.model, self.settings
        engine_name = f"{engine.backend} {engine.weight_format}".strip()
        threads = engine.threads or self.threads
        return (
            f"{model.name} ({model.parameters}), {engine_name}, {threads} threads, "
            f"{settings.slots} slots, KV {settings.kv_dtype}"
        )

    @property
    def thread_counts(self) -> tuple[int | None, ...]:
        """Return the numbers of threads that each engine is measured with; None: `threads`
        alone."""
        if not self.are_threads_open or self.threads < MIN_HALVED_THREADS:
            return (None,)
        return (self.threads, self.threads // 2)


def fastest_backend(
    question: Question, facts: HardwareFacts, say: Say, progress: Progress
) -> EngineChoice:
    """Return the choice; takes seconds for each engine that has not been measured here yet.

    Raises NoPlacement if no engine can run the model here.
    """
    format_engines = [
        pair for candidate in question.formats for pair in backends_with("cpu", candidate)
    ]
    engines = question.engines or (format_engines if question.formats else usual_candidates(facts))
    candidates = [_looked_at(question, facts, *pair) for pair in engines]
    candidates = [
        msgspec.structs.replace(candidate, threads=threads)
        for candidate in candidates
        for threads in question.thread_counts[: 1 if candidate.why_not else None]
    ]
    if sum(not candidate.why_not for candidate in candidates) > 1:
        measured = [
            _measured(question, candidate, facts, say, progress) for candidate in candidates
        ]
        is_reference = not (question.engines or question.formats)
        candidates = _with_capacities(
            question,
            [
                candidate
                for candidate in measured
                if not is_reference
                or candidate.times
                or (candidate.backend, candidate.weight_format) != REFERENCE
            ],
        )
    possible = ranked(candidates, question.request.model)
    if not possible:
        reasons = "; ".join(f"{candidate.name}: {candidate.why_not}" for candidate in candidates)
        reasons = reasons or f"no CPU engine has the format {', '.join(question.formats)}"
        raise NoPlacement(f"No engine here can run {question.request.model.name}: {reasons}")
    best = possible[0]
    reason = _reason(question, best, candidates)
    return EngineChoice(best.backend, best.weight_format, reason, tuple(candidates), best.threads)


def usual_candidates(facts: HardwareFacts) -> tuple[tuple[str, str], ...]:
    """Return the engines that are looked at where no format is asked for, with their formats: torch
    too where it is installed and the CPU multiplies bf16."""
    has_bf16 = bool(BF16_FLAGS & {*facts.isa}) and REFERENCE[0] not in missing_backends()
    return (*USUAL, REFERENCE) if has_bf16 else USUAL


def ranked(candidates: Sequence[EngineCandidate], model: ModelSpec) -> list[EngineCandidate]:
    """Return the candidates that can be chosen, best first: by capacity, but the first is the one
    with the most bits among those that the interval of the largest capacity does not tell apart.
    Those that were not measured come last, in the order that they were given."""
    possible = [candidate for candidate in candidates if not candidate.why_not]
    order = sorted(possible, key=lambda candidate: candidate.rate, reverse=True)
    if not order or not order[0].rate:
        return order
    indistinguishable = [candidate for candidate in order if candidate.rate >= order[0].low_rate]
    best = max(
        indistinguishable, key=lambda candidate: weight_bytes(model, candidate.weight_format)
    )
    return [best, *(candidate for candidate in order if candidate is not best)]


def _reason(
    question: Question, best: EngineCandidate, candidates: Sequence[EngineCandidate]
) -> str:
    """Return a sentence: why this engine, under which workload and SLO, and what others carry."""
    if len(candidates) == 1:
        return f"{best.name} is the only engine of the CPU that runs it"
    rates = [candidate.rate for candidate in candidates if candidate.rate]
    unit_rate = min(rates, default=0.0)
    capacities = "; ".join(
        f"{candidate.name}: {candidate.why_not or _carried(candidate.capacity, unit_rate)}"
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


def _carried(simulated: SimulatedCapacity | None, unit_rate: float) -> str:
    if simulated is None:
        return "not measured"
    if not simulated.rate:
        return "misses the SLO unloaded"
    return of_requests(rate(simulated.rate, like=unit_rate))


def known_times(
    question: Question, engine: EngineCandidate, facts: HardwareFacts, say: Say, progress: Progress
) -> EngineTimes | None:
    """Return the engine's times for the model, from the table or measured now, also if other
    processes disturbed them.

    None: not in the table, and measuring is not allowed. Raises CrossoverError if measuring fails.
    """
    cache, began = question.cache, time.monotonic()
    saved = read_table(cache, facts).get(question.key(engine))
    may_measure = question.may_measure and (
        question.may_measure_reference
        or bool(question.engines or question.formats)
        or (engine.backend, engine.weight_format) != REFERENCE
    )
    if not may_measure or (saved is not None and saved.taken_share <= MAX_TAKEN):
        return saved
    kind, spelt = weights_of(engine.backend, engine.weight_format)
    files = resolve(question.source, kind=kind, weight_format=spelt, cache=cache, progress=progress)
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
    spent = duration(time.monotonic() - began)
    where = f"saved in {table_path(cache)}"
    try:
        keep(cache, facts, question.key(engine), times)
    except OSError as problem:  # such as a cache on a read-only disk
        where = f"not saved: {table_path(cache)} cannot be written to ({problem.strerror})"
    if times.taken_share > MAX_TAKEN:
        taken_text = share(times.taken_share, 2)
        where = f"other processes took {taken_text} of its CPU time: it is measured again next time"
    say(f"measured {engine.name} on {files.name} in {spent}, {where}")
    return times


def _looked_at(
    question: Question, facts: HardwareFacts, backend: str, weight_format: str
) -> EngineCandidate:
    """Return the candidate, with the reason if it cannot run here."""
    why_not = missing_backends().get(backend, "")
    request = msgspec.structs.replace(question.request, weight_format=weight_format)
    attempt, reason = fitted(request, facts, backend, None)
    if attempt is None and reason is not None:
        why_not = why_not or reason.text
    return EngineCandidate(backend=backend, weight_format=weight_format, why_not=why_not)


def _measured(
    question: Question,
    candidate: EngineCandidate,
    facts: HardwareFacts,
    say: Say,
    progress: Progress,
) -> EngineCandidate:
    """Return the candidate with its times; one that cannot be measured cannot be chosen."""
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
        """Return the weight bytes that a step reads, relative to those of the measured model."""
        model_bytes = spec.step_weight_bytes(rows, spec.parameters)
        return model_bytes / measured_model.step_weight_bytes(rows, measured_model.parameters)

    # Prompts are compute-bound; decode steps are bound by reading weights (only experts in use).
    factor = spec.active_parameters / measured_model.active_parameters
    times = EngineTimes(
        slots=times.slots,
        prompt_tokens_per_second=times.prompt_tokens_per_second / factor,
        decode_seconds=times.decode_seconds * weight_ratio(1),
        decode_slots_seconds=times.decode_slots_seconds * weight_ratio(times.slots),
    )
    return msgspec.structs.replace(candidate, times=times)


def _with_capacities(
    question: Question, candidates: Sequence[EngineCandidate]
) -> list[EngineCandidate]:
    """Return the candidates with the capacities of those that were measured: under the SLO, or
    without limits where none of them meets it unloaded."""

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
    """Return the step-time model of an engine whose steps of one row and of all slots were
    timed."""
    row = (times.decode_slots_seconds - times.decode_seconds) / max(1, times.slots - 1)
    row = min(max(row, 0.0), times.decode_seconds)
    return StepTimeModel(
        base_seconds=times.decode_seconds - row,
        row_seconds=row,
        prompt_token_seconds=1 / times.prompt_tokens_per_second,
    )


# --- the kept table


def table_path(cache: str | Path | None) -> Path:
    return cache_dir(cache) / "engine-times.json"


def read_table(cache: str | Path | None, facts: HardwareFacts) -> dict[str, EngineTimes]:
    """Return the saved times by Question.key; {} if the file is from another machine or other
    library versions, or cannot be read."""
    try:
        content = table_path(cache).read_bytes()
        machine, rows = msgspec.json.decode(content, type=tuple[str, dict[str, EngineTimes]])
    except (OSError, msgspec.MsgspecError):
        return {}
    return rows if machine == _machine(facts) else {}


def keep(cache: str | Path | None, facts: HardwareFacts, key: str, times: EngineTimes) -> None:
    """Write the table with these times, which replace older ones of the same key, atomically."""
    table = _machine(facts), read_table(cache, facts) | {key: times}
    path = table_path(cache)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, msgspec.json.format(msgspec.json.encode(table), indent=1))


def _machine(facts: HardwareFacts) -> str:
    """Return the facts of the machine that all times depend on."""
    versions = [f"{name} {version}" for name, version in library_versions().items()]
    cores = f"{facts.physical_cores} cores, {facts.logical_cores} threads"
    return "; ".join([facts.cpu_model, " ".join(facts.isa), cores, *versions])


# --- measuring


def measured_times(config: EngineConfig, spec: ModelSpec) -> EngineTimes:
    """Return the engine's times with this configuration and a context as short as possible.

    Raises ServingError.
    """
    context = min(spec.context, LONG_PROMPT + 4 * MAX_STEPS)
    settings = msgspec.structs.replace(config.settings, context_tokens=context, kv_tokens=None)
    small = msgspec.structs.replace(config, settings=settings)
    ran = run_python(
        *("-m", "crossover.serving.placement.fastest_backend", msgspec.json.encode(small).decode()),
        timeout_seconds=TIMEOUT_SECONDS,
    )
    if ran.status == 0:
        return msgspec.json.decode(ran.output.splitlines()[-1], type=EngineTimes)
    why = f"no result after {TIMEOUT_SECONDS:g} s" if ran.status is None else ran.reason
    raise ServingError(f"{config.backend} {config.weight_format} failed: {why}")


def measure(backend: Backend, clock: Callable[[], float] = time.perf_counter) -> EngineTimes:
    """Return the times of a loaded backend, measured with steps of random tokens."""
    info, settings = backend.info, backend.info.settings
    generator, slot_tokens = np.random.default_rng(1), [0] * settings.slots

    def seconds_of(slots: Iterable[int], tokens: int) -> float:
        """Return the seconds of a step that appends this many tokens to each of these slots."""
        step = []
        for slot in slots:
            token_ids = generator.integers(
                3, info.vocabulary, tokens, np.int32
            )  # below: special ones
            step.append(Row(slot, token_ids, slot_tokens[slot], True))
            slot_tokens[slot] += tokens
        started = clock()
        backend.step(step)
        return max(clock() - started, 1e-9)

    def prompt(slot: int, tokens: int) -> float:
        slot_tokens[slot] = 0
        return seconds_of([slot], tokens)

    def lower_quartile(step: Callable[[], float], min_steps: int) -> float:
        """Return the lower quartile, since other work on the machine only makes steps longer."""
        deadline, timings = clock() + PART_SECONDS, list[float]()
        while len(timings) < min_steps or (clock() < deadline and len(timings) < MAX_STEPS):
            timings.append(step())
        return sorted(timings)[len(timings) // 4]

    max_prompt = min(LONG_PROMPT, settings.step_tokens, settings.context_tokens - 2)
    rate_guess = SHORT_PROMPT / min(prompt(0, SHORT_PROMPT) for _ in range(2))
    length = int(min(max_prompt, max(SHORT_PROMPT, rate_guess * PART_SECONDS)))
    prompt_seconds = lower_quartile(lambda: prompt(0, length), 1)
    for slot in range(1, settings.slots):  # all together in the time of one long prompt
        prompt(slot, max(4, length // settings.slots))
    return EngineTimes(
        slots=settings.slots,
        prompt_tokens_per_second=length / prompt_seconds,
        decode_seconds=lower_quartile(lambda: seconds_of([0], 1), 4),
        decode_slots_seconds=lower_quartile(lambda: seconds_of(range(settings.slots), 1), 4),
    )


def _cpu_seconds() -> tuple[float, float]:
    """Return the seconds that threads of this process ran, and those that they were ready but had
    no core, or that the hypervisor took."""
    schedstats = [read_text(one).split() for one in Path("/proc/self/task").glob("*/schedstat")]
    ran, waited = (1e-9 * sum(int(fields[at]) for fields in schedstats if fields) for at in (0, 1))
    names = {f"cpu{core}" for core in os.sched_getaffinity(0)}
    cores = (line.split() for line in read_text(Path("/proc/stat")).splitlines())
    stolen = sum(int(fields[8]) for fields in cores if fields[0] in names)
    return ran, waited + stolen / os.sysconf("SC_CLK_TCK")


def main() -> None:
    """The child process: measure on the engine's cores and print one line of JSON."""
    config = msgspec.json.decode(sys.argv[1], type=EngineConfig)
    if config.cores:
        os.sched_setaffinity(0, config.cores)
    backend = backend_class(config.backend)(config, lambda what, fraction: None)
    cpu_before = _cpu_seconds()
    times = measure(backend)
    ran, lost = (now - was for now, was in zip(_cpu_seconds(), cpu_before, strict=True))
    times = msgspec.structs.replace(times, taken_share=round(lost / max(ran + lost, 1e-9), 4))
    backend.close()
    print(f"\n{msgspec.json.encode(times).decode()}", flush=True)


if __name__ == "__main__":
    main()

"""Chooses the CPU engine with the highest capacity for a model under a workload and an SLO.

    choice = fastest_backend(question, hardware_facts(), say, progress)
    choice.backend, choice.weight_format, choice.reason

The candidates are the engines of the CPU (crossover.serving.placement.engines) that fit in memory.
Each is timed in a child process (engine_times.py). An engine that would use more than 8 threads is
measured with half of them too, because logical CPUs may share a core, and every step waits for its
slowest thread. On several NUMA nodes it is measured on one node and on all of them: the capacity of
one engine on each node follows from the times on one. The times are saved and reused; those that
other processes disturbed are measured again.

A step-time model is fitted to the times of each engine, and `ServerModel.capacity` computes the
engine's capacity under the workload and the SLO. The engine with the highest capacity is chosen. If
another engine's capacity lies within the 90 % confidence interval of the highest one, the
difference is not significant, and the engine with more bits per weight is chosen. If no engine
meets the SLO even unloaded, the capacities without latency limits decide.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import msgspec

from crossover.models.errors import CrossoverError
from crossover.models.formatting import (
    common_unit_rate,
    count,
    duration,
    rate,
    requests,
    share,
    significant,
)
from crossover.models.identity.identify_model import identify
from crossover.models.identity.resolve_model import find_files
from crossover.models.shape.model_spec import ModelSpec
from crossover.models.weights.weight_formats import weight_bytes
from crossover.models.weights.weights_manifest import Progress
from crossover.serving.backends.backend_interface import EngineConfig
from crossover.serving.backends.backend_table import (
    format_of,
    missing_backends,
    spec_of,
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
from crossover.serving.capacity.slot_count import MIN_GAIN, SlotsChoice, best_slots
from crossover.serving.hardware.cpu_topology import (
    SHARED_CORES,
    Arrangement,
    CoreSplit,
    threads_text,
)
from crossover.serving.hardware.machine_facts import HardwareFacts
from crossover.serving.placement.engine_times import (
    LONG_PROMPT,
    EngineTimes,
    measured_times,
    read_table,
    save_times,
    step_times_of_timings,
    table_path,
)
from crossover.serving.placement.engines import (
    Engine,
    Obstacles,
    engines,
    in_requested_spelling,
)
from crossover.serving.placement.node_splits import SplitOf, fitting_splits
from crossover.serving.placement.placement_policy import (
    NoPlacement,
    PlacementRequest,
    consider,
    max_slots,
    with_settings,
)
from crossover.serving.workload.request_lengths import DEFAULT_WORKLOAD, Workload

BEST = "best"  # in a campaign file: the backend that this module chooses
# CPUs with one of these flags multiply bf16, which is torch's default format. On them torch is a
# candidate too.
BF16_FLAGS = frozenset({"amx_bf16", "avx512_bf16", "bf16"})
REFERENCE = ("torch", format_of("torch", None))  # (backend, weight format)
MIN_HALVED_THREADS = SHARED_CORES + 1  # from this many threads on, half of them are measured too
# The weights of a model with more than MAX_MEASURED_PARAMETERS would take too long to prepare, so
# PROXY is measured instead, and its times are scaled.
PROXY, MAX_MEASURED_PARAMETERS = "llama-3.2-1b", 2_000_000_000
# Times are measured again if other processes took more than this share of the CPU time that the
# engine wanted.
MAX_TAKEN_SHARE = 0.1

# Simulated requests at each rate, which take 0.1 s of CPU time for one engine. Compared with 8,000
# requests, so few raise all capacities by 5 to 8 %, but all engines get the same sample, so their
# order does not change.
CHOICE_REQUESTS = 500

Say = Callable[[str], None]


class EngineCandidate(msgspec.Struct, frozen=True, kw_only=True):
    """An engine that may be chosen, with what is known about it so far."""

    backend: str
    weight_format: str
    why_not: str = ""  # why it cannot be chosen; "": it can
    times: EngineTimes | None = None  # for the requested model; None: not measured
    capacity: SimulatedCapacity | None = None  # under the workload and the SLO, from `times`
    is_without_slo: bool = False  # `capacity` is without latency limits
    # On which cores how many such engines serve, with how many threads; None: as the question's
    # first arrangement.
    split: CoreSplit | None = None
    names_split: bool = False  # several splits are compared

    @property
    def name(self) -> str:
        """The backend and weight format, and if several splits are compared, the NUMA nodes and the
        number of threads."""
        engine = f"{self.backend} {self.weight_format}".strip()
        if self.split is None or not self.names_split:
            return engine
        engines, nodes = self.split.arrangement
        where = ""
        if nodes is not None and nodes > 1:
            where = f" on {'each of ' if engines > 1 else ''}{nodes} NUMA nodes"
        return f"{engine}{where} with {threads_text(self.split.threads)}"

    @property
    def is_reference(self) -> bool:
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
    split: CoreSplit
    threads: int | None = None  # None: only the requested number was measured
    slots: int | None = None  # None: as requested, or the default, since nothing was measured


class EngineQuestion(msgspec.Struct, frozen=True, kw_only=True):
    """Which engine serves this model best on the CPU, under this workload and SLO?"""

    request: PlacementRequest
    split_of: SplitOf
    arrangements: tuple[Arrangement, ...] = (Arrangement(),)  # that are compared
    workload: Workload = DEFAULT_WORKLOAD
    slo: Slo = DEFAULT_SLO
    cache: str | None = None  # the cache folder; None: the default one
    may_measure: bool = True  # False: use only saved times
    # Whether REFERENCE may be measured although no format is named; its saved times are used in any
    # case. Its weights are twice as large as the others', which takes too long to prepare while a
    # server starts.
    may_measure_reference: bool = False
    are_threads_open: bool = False  # the user set no number of threads, so half are tried too

    @property
    def settings(self) -> SchedulerSettings:
        """The engine's settings, with the CPU's defaults for those that are not set."""
        return self.request.settings.filled(DEFAULT_SETTINGS["cpu"])

    def split(self, engine: EngineCandidate) -> CoreSplit:
        """Return the cores and threads of an engine."""
        return engine.split or self.split_of(self.arrangements[0], 0)

    def server(self, engine: EngineCandidate, times: EngineTimes) -> ServerModel:
        """Return all engines of a candidate as one server, by the times of one of them."""
        engines = self.split(engine).arrangement.engines
        settings = msgspec.structs.replace(self.settings, engines=engines)
        return ServerModel(step_times_of_timings(times), settings)

    @property
    def is_of_usual_engines(self) -> bool:
        """Whether the usual engines of ladder models are the candidates. Of a model that has files,
        and in formats that the user named, all engines are."""
        return self.request.model.kind == "ladder" and not self.request.wanted.formats

    def may_measure_engine(self, engine: EngineCandidate) -> bool:
        """Return whether this engine may be measured."""
        is_excluded = self.is_of_usual_engines and engine.is_reference
        return self.may_measure and (self.may_measure_reference or not is_excluded)

    def key(self, engine: EngineCandidate) -> str:
        """Return the key of an engine's saved times: all that they depend on except the machine."""
        model, settings = self.request.spec, self.settings
        engine_name = f"{engine.backend} {engine.weight_format}".strip()
        split = self.split(engine)
        nodes = len(split.engines[0].memory_nodes)
        where = f" on {nodes} NUMA nodes" if nodes > 1 else ""
        return (
            f"{model.name} ({model.parameters}), {engine_name}, {split.threads} threads{where}, "
            f"{settings.slots} slots, KV {settings.kv_dtype}"
        )

    def splits_to_compare(self, engine: Engine, facts: HardwareFacts) -> list[CoreSplit]:
        """Return the splits in which an engine is compared, each with every number of threads."""
        splits: list[CoreSplit] = []
        for split in fitting_splits(self.request, facts, engine, self.arrangements, self.split_of):
            splits.append(split)
            if self.are_threads_open and split.threads >= MIN_HALVED_THREADS:
                splits.append(msgspec.structs.replace(split, threads=split.threads // 2))
        return splits


def fastest_backend(
    question: EngineQuestion,
    facts: HardwareFacts,
    say: Say,
    progress: Progress,
    unit_rate_of: Callable[[Iterable[float]], float | None] = common_unit_rate,
) -> EngineChoice:
    """Return the best engine for the question.

    This takes several seconds for each engine that has not been measured on this machine yet.
    `say` is called with a sentence for each engine that was measured, `progress` meanwhile.
    `unit_rate_of`: returns the rate in whose unit the capacities are written.

    Raises NoPlacement if no engine can run the model on this machine.
    """
    candidates = _candidates_of(question, facts)
    usable_count = sum(not candidate.why_not for candidate in candidates)
    if usable_count > 1:  # otherwise there is nothing to compare
        candidates = [
            _with_times(question, candidate, facts, say, progress) for candidate in candidates
        ]
        if question.is_of_usual_engines:  # REFERENCE counts only if it was measured
            candidates = [
                candidate
                for candidate in candidates
                if candidate.times is not None or not candidate.is_reference
            ]
        candidates = _with_capacities(question, candidates)
    ranking = rank(candidates, question.request.spec)
    if not ranking:
        reasons = "; ".join(f"{candidate.name}: {candidate.why_not}" for candidate in candidates)
        raise NoPlacement(f"No engine here can run {question.request.model.name}: {reasons}")
    best = ranking[0]
    unit_rate = unit_rate_of([candidate.rate for candidate in candidates])
    reason, slots = _reason(question, best, candidates, unit_rate), None
    if best.times is not None and best.rate and question.request.settings.slots is None:
        chosen = _slots_of(question, best, best.times, facts)
        slots = chosen.slots
        if slots != chosen.present_slots:
            reason += f"; with {slots} slots {_slots_reason(chosen, unit_rate)}"
    split = question.split(best)
    return EngineChoice(
        best.backend,
        best.weight_format,
        reason,
        tuple(candidates),
        split,
        split.threads if best.names_split else None,
        slots,
    )


def _slots_of(
    question: EngineQuestion, engine: EngineCandidate, times: EngineTimes, facts: HardwareFacts
) -> SlotsChoice:
    """Return the number of slots with which the engine has the highest capacity."""
    server = question.server(engine, times)
    request = with_settings(question.request, engines=server.settings.engines)
    on_cpu = Engine(engine.backend, engine.weight_format, "cpu")
    return best_slots(
        server.simulated(Demand(question.workload), CHOICE_REQUESTS),
        SLO_PRESETS["batch"] if engine.is_without_slo else question.slo,
        max_slots=max_slots(request, facts, on_cpu),
        doubling_cost=spec_of(engine.backend).slot_doubling_cost,
        prefers_more=True,
    )


def _slots_reason(chosen: SlotsChoice, unit_rate: float | None) -> str:
    """Return what the chosen slots give."""
    if chosen.gain < MIN_GAIN:
        return "its capacity is as high, and it keeps more conversation histories"
    more, fewer = (rate(value, like=unit_rate) for value in (chosen.rate, chosen.present_rate))
    return f"it carries {more} in place of {fewer}"


def _candidates_of(question: EngineQuestion, facts: HardwareFacts) -> list[EngineCandidate]:
    """Return the engines of the CPU as candidates, each with every split that is to be compared.
    Those that cannot run on this machine have the reason."""
    candidates: list[EngineCandidate] = []
    for engine in _engines_to_compare(question, facts):
        candidate = EngineCandidate(backend=engine.backend, weight_format=engine.weight_format)
        splits = question.splits_to_compare(engine, facts)
        for split in splits:
            candidates.append(
                msgspec.structs.replace(candidate, split=split, names_split=len(splits) > 1)
            )
        if not splits:
            reason = consider(question.request, facts, engine).reason
            why_not = "" if reason is None else reason.text
            candidates.append(msgspec.structs.replace(candidate, why_not=why_not))
    return candidates


def _engines_to_compare(question: EngineQuestion, facts: HardwareFacts) -> list[Engine]:
    """Return the engines of the CPU. Of the usual ones these are those with `is_cpu_candidate`, and
    REFERENCE if its package is installed and the CPU multiplies bf16."""
    request, obstacles = question.request, Obstacles(missing_backends())
    found = engines(request.model, facts, obstacles, request.wanted)
    on_cpu = [engine for engine in found if engine.device == "cpu"]
    if question.is_of_usual_engines:
        has_bf16 = not BF16_FLAGS.isdisjoint(facts.isa)
        return [
            engine
            for engine in on_cpu
            if spec_of(engine.backend).is_cpu_candidate
            or (has_bf16 and engine[:2] == REFERENCE and engine.backend not in obstacles.missing)
        ]
    return in_requested_spelling(on_cpu, request.wanted.formats)


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
    question: EngineQuestion,
    best: EngineCandidate,
    candidates: Sequence[EngineCandidate],
    unit_rate: float | None,
) -> str:
    """Return why this engine was chosen, in one sentence with the workload, the SLO and the
    capacities of all candidates."""
    if len(candidates) == 1:
        return f"{best.name} is the only engine of the CPU that runs it"
    rates = [candidate.rate for candidate in candidates if candidate.rate]
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


def _capacity_text(simulated: SimulatedCapacity | None, unit_rate: float | None) -> str:
    """Return the capacity, in the unit that suits `unit_rate` (requests/s)."""
    if simulated is None:
        return "not measured"
    if not simulated.rate:
        return "misses the SLO unloaded"
    return requests(simulated.rate, like=unit_rate)


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
    cache, key = question.cache, question.key(engine)
    started = time.monotonic()
    saved = read_table(cache, facts).get(key)
    is_undisturbed = saved is not None and saved.taken_share <= MAX_TAKEN_SHARE
    if is_undisturbed or not question.may_measure_engine(engine):
        return saved
    kind, file_format = weights_of(engine.backend, engine.weight_format)
    files = find_files(
        question.request.model,
        kind=kind,
        weight_format=file_format,
        cache=cache,
        progress=progress,
    )
    split = question.split(engine)
    config = EngineConfig(
        backend=engine.backend,
        model_path=files.path,
        model_name=files.name,
        weight_format=files.weight_format,
        tokenizer_path=files.tokenizer_path,
        settings=question.settings,
        threads=split.threads,
        cores=split.engines[0].cores,
        memory_nodes=split.engines[0].memory_nodes,
    )
    name = f"one engine of {engine.name}" if len(split.engines) > 1 else engine.name
    progress(f"measuring {name} on {files.name}", None)
    times = measured_times(config, question.request.spec)
    elapsed = duration(time.monotonic() - started)
    outcome = f"saved in {table_path(cache)}"
    try:
        save_times(cache, facts, key, times)
    except OSError as problem:  # such as a cache on a read-only disk
        outcome = f"not saved: {table_path(cache)} cannot be written to ({problem.strerror})"
    if times.taken_share > MAX_TAKEN_SHARE:
        taken = share(times.taken_share, 2)
        outcome = f"other processes took {taken} of its CPU time: it is measured again next time"
    say(f"measured {name} on {files.name} in {elapsed}, {outcome}")
    return times


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
    spec = question.request.spec
    measured_question = question
    if spec.parameters > MAX_MEASURED_PARAMETERS:
        request = msgspec.structs.replace(question.request, model=identify(PROXY))
        measured_question = msgspec.structs.replace(question, request=request)
    measured_model = measured_question.request.spec
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
    # so its time follows the bytes of the weights that a step reads, and so does a further pass.
    compute_ratio = spec.active_parameters / measured_model.active_parameters
    times = EngineTimes(
        slots=times.slots,
        prompt_tokens_per_second=times.prompt_tokens_per_second / compute_ratio,
        pass_seconds=times.pass_seconds * weight_ratio(LONG_PROMPT),
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
        server = question.server(candidate, candidate.times)
        simulated = server.capacity(Demand(question.workload), slo, CHOICE_REQUESTS)
        return msgspec.structs.replace(candidate, capacity=simulated, is_without_slo=is_without_slo)

    with_slo = [with_capacity(candidate, question.slo) for candidate in candidates]
    was_measured = any(candidate.capacity is not None for candidate in with_slo)
    meets_slo = any(candidate.rate for candidate in with_slo)
    if was_measured and not meets_slo:
        no_limits = SLO_PRESETS["batch"]
        return [with_capacity(candidate, no_limits, True) for candidate in candidates]
    return with_slo

"""The best engine of this CPU for a model and its work: looked at, measured once, chosen.

    choice = best_engine(question, hardware_facts(), say, progress)
    "\\n".join(choice_lines(choice))

Memory, packages and weights decide by arithmetic who can be chosen. Those who can are measured, or
read from the kept table (times_table.py). Where the weights of one of them are not made, all are
measured on the smallest rung of the ladder and scaled by the arithmetic of a token.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from models.errors import CrossoverError
from models.formatting import duration, requests, share, significant, size
from models.ladder import LADDER
from models.manifest import Progress
from models.resolve import is_made, resolve
from models.spec import ModelSpec
from serving.backends.backend_interface import EngineConfig
from serving.backends.backend_table import BACKENDS, missing_backends, weights_of
from serving.hardware.machine_facts import HardwareFacts
from serving.placement.engine_choice import (
    BUSY,
    EngineCandidate,
    EngineChoice,
    EngineTimes,
    Work,
    choose,
)
from serving.placement.engine_times import measured_times, prompt_class
from serving.placement.placement_policy import NoPlacement, PlacementRequest, plan
from serving.placement.times_table import find, keep, read_table, table_path
from serving.server_options import Policy

BEST = "best"  # in place of a backend's name in a campaign
# Looked at where no format is asked for. torch's dynamic-int8 is the slower one where tried.
USUAL = (("llama_cpp", "Q4_0"), ("onnx", "dynamic-int8"))
MOST_CONVERSION_SECONDS = 120.0
CONVERSION_MEMORY_SHARE = 0.8  # of the free memory, at most
# Seconds and peak bytes of a conversion: fixed, and for each parameter. By conversions of 135M and
# 360M (onnx: 43 and 79 s, 2.7 and 6.5 GB) and of 135M and 1.2B (hf: 9 and 75 s, at most 14.7 GB)
# by one thread of an AMD EPYC.
CONVERSION_SECONDS = {"onnx": (22.0, 160e-9), "hf": (2.0, 60e-9)}
CONVERSION_BYTES = {"onnx": (0.5e9, 17.0), "hf": (0.5e9, 12.0)}


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """A model that is to be served on the CPU, and what will be asked of it."""

    source: str  # a rung, a file or a folder
    request: PlacementRequest
    work: Work
    threads: int
    cores: tuple[int, ...]
    formats: tuple[str, ...] = ()  # none: USUAL
    cache: str | None = None
    may_convert: bool = False  # weights that are not there, within MOST_CONVERSION_SECONDS
    usual: tuple[str, str] | None = None  # backend and format whose weights are made in any case
    may_measure: bool = True  # False: what the table does not hold is not known


Say = Callable[[str], None]


def best_engine(
    question: Question, facts: HardwareFacts, say: Say, progress: Progress
) -> EngineChoice:
    """The choice; seconds for each engine that this machine's table does not hold yet.

    Raises NoPlacement where no engine can run the model here.
    """
    looked = [_looked_at(question, facts, *pair) for pair in _pairs(question.formats)]
    possible = [one for one, _ in looked if not one.why_not]
    measurable = [one for one, can_run in looked if can_run]
    if question.may_convert and len(measurable) > 1 or len(possible) > 1:
        wanted = measurable if question.may_convert else possible
        timed = {one.name: one for one in _measured(question, wanted, facts, say, progress)}
        candidates = [timed.get(one.name, one) for one, _ in looked]
    else:
        candidates = [one for one, _ in looked]
    try:
        return choose(candidates, question.work)
    except ValueError:
        why = "; ".join(f"{one.name}: {one.why_not}" for one in candidates)
        asked = ", ".join(question.formats)
        text = why or f"no engine of the CPU has the format {asked}"
        raise NoPlacement(f"{question.request.model.name} has no engine here: {text}") from None


def known_times(
    question: Question,
    engine: EngineCandidate,
    spec: ModelSpec,
    facts: HardwareFacts,
    say: Say,
    progress: Progress,
) -> EngineTimes | None:
    """The engine's times for `spec`, whose weights are `question.source`: kept, or measured now.

    None: not kept, and not to be measured. Raises CrossoverError where measuring fails.
    """
    table, note = read_table(question.cache, facts)
    if note:
        say(note)
    prompt_tokens = prompt_class(question.work.prompt_tokens)
    row = find(table, _key(question, engine, spec, prompt_tokens))
    if row is not None or not question.may_measure:
        return row
    config = _config(question, engine, question.source, progress)
    progress(f"measuring {engine.name} on {spec.name}", None)
    row = measured_times(config, spec, prompt_tokens)
    kept = f"kept in {table_path(question.cache)}"
    if row.waited_share > BUSY:
        kept = f"not kept: other work took {share(row.waited_share)} of its time"
    else:
        keep(question.cache, facts, row)
    say(f"measured {engine.name} on {spec.name} in {duration(row.spent_seconds)}, {kept}")
    return row


def choice_lines(choice: EngineChoice) -> list[str]:
    """The choice for people: why, then a line for each engine that was looked at."""
    lines = [f"best engine: {choice.reason}"]
    for one in choice.candidates:
        told = []
        if one.times is not None:
            told.append(times_words(one.times))
        if one.requests_per_second is not None:
            told.append(requests(one.requests_per_second))
        if one.measured_on:
            told.append(f"measured on {one.measured_on}, scaled")
        if one.why_not:
            told.append(f"cannot be chosen: {one.why_not}")
        lines.append(f"  {one.name}: {'; '.join(told) or 'not measured'}")
    return lines


def times_words(times: EngineTimes) -> str:
    """Tokens/s of prompts, of one stream and of all slots."""
    return (
        f"prompts {significant(times.prompt_tokens_per_second)} tokens/s, decode "
        f"{significant(1 / times.decode_seconds)} tokens/s for one stream, "
        f"{significant(times.slots / times.decode_slots_seconds)} for {times.slots}"
    )


def _pairs(formats: tuple[str, ...]) -> list[tuple[str, str]]:
    """Backends of the CPU with each of the formats that they have."""
    if not formats:
        return list(USUAL)
    found = []
    for asked in formats:
        known = [
            (name, one)
            for name, spec in BACKENDS.items()
            if "cpu" in spec.devices
            for one in spec.formats
            if one.lower() == asked.lower()
        ]
        # BF16 is a GGUF format, bf16 one of torch.
        found += [pair for pair in known if pair[1] == asked] or known
    return found


def _looked_at(
    question: Question, facts: HardwareFacts, backend: str, weight_format: str
) -> tuple[EngineCandidate, bool]:
    """The candidate, and whether it could run here if its weights were made."""
    one = EngineCandidate(backend=backend, weight_format=weight_format)
    if backend in (missing := missing_backends()):
        return msgspec.structs.replace(one, why_not=missing[backend]), False
    request = msgspec.structs.replace(
        question.request, policy=Policy.cpu_only, backend=backend, weight_format=weight_format
    )
    try:
        plan(request, facts)
    except NoPlacement as problem:
        why = problem.reasons[-1].text if problem.reasons else str(problem)
        return msgspec.structs.replace(one, why_not=why), False
    return msgspec.structs.replace(one, why_not=_no_weights(question, facts, one)), True


def _is_at_hand(question: Question, one: EngineCandidate, source: str = "") -> bool:
    """Whether the weights are there. A GGUF file is made about as quickly as it is read."""
    kind, weight_format = weights_of(one.backend, one.weight_format)
    source = source or question.source
    there = is_made(source, kind=kind, weight_format=weight_format, cache=question.cache)
    return kind == "gguf" or there


def _no_weights(question: Question, facts: HardwareFacts, one: EngineCandidate) -> str:
    """Why the weights cannot be had now; "" where they can."""
    if _is_at_hand(question, one) or (one.backend, one.weight_format) == question.usual:
        return ""
    spec = question.request.model
    kind = weights_of(one.backend)[0]
    fixed, each = CONVERSION_SECONDS[kind]
    seconds = fixed + each * spec.parameters
    fixed, each = CONVERSION_BYTES[kind]
    need = fixed + each * spec.parameters
    free = CONVERSION_MEMORY_SHARE * facts.usable_memory_bytes
    make = (
        f"crossover models make {question.source} --backend {one.backend} "
        f"--format {one.weight_format}"
    )
    if need > free:
        need_words = f"making them takes {size(need)} of memory, of which {size(free)} may be used"
        return f"its weights are not made, and {need_words}"
    if not question.may_convert:
        return f"its weights are not made: {make}"
    if seconds > MOST_CONVERSION_SECONDS:
        return f"its weights are not made, which takes about {duration(seconds)}: {make}"
    return ""


def _measured(
    question: Question,
    wanted: list[EngineCandidate],
    facts: HardwareFacts,
    say: Say,
    progress: Progress,
) -> list[EngineCandidate]:
    """The candidates with their times; one that fails to be measured cannot be chosen.

    Where only one can be chosen the others' times are for the reader: no weights are made for them.
    """
    spec, source = question.request.model, question.source
    smallest = min((one.spec for one in LADDER), key=lambda one: one.parameters)
    is_proxy = not all(_is_at_hand(question, one) for one in wanted) and spec.name != smallest.name
    measured, source = (smallest, smallest.name) if is_proxy else (spec, source)
    found = []
    is_open = sum(not one.why_not for one in wanted) > 1
    can_show = all(_is_at_hand(question, one, source) for one in wanted)
    may_measure = question.may_measure and (is_open or can_show)
    asked = msgspec.structs.replace(question, source=source, may_measure=may_measure)
    for one in wanted:
        try:
            row = known_times(asked, one, measured, facts, say, progress)
        except CrossoverError as problem:
            found.append(msgspec.structs.replace(one, why_not=one.why_not or str(problem)))
            continue
        if row is None:
            found.append(one)
            continue
        if is_proxy:
            factor = spec.matrix_parameters / measured.matrix_parameters
            row = row.scaled(spec.name, spec.parameters, factor)
        on = measured.name if is_proxy else ""
        found.append(msgspec.structs.replace(one, times=row, measured_on=on))
    return found


def _config(
    question: Question, one: EngineCandidate, source: str, progress: Progress
) -> EngineConfig:
    """What the engine is measured with; its weights are made where they are not there."""
    kind, weight_format = weights_of(one.backend, one.weight_format)
    files = resolve(
        source, kind=kind, weight_format=weight_format, cache=question.cache, progress=progress
    )
    return EngineConfig(
        backend=one.backend,
        model_path=files.path,
        model_name=files.name,
        weight_format=files.weight_format,
        tokenizer_path=files.tokenizer_path,
        slots=question.request.slots,
        kv_dtype=question.request.kv_dtype,
        threads=question.threads,
        cores=question.cores,
    )


def _key(
    question: Question, one: EngineCandidate, spec: ModelSpec, prompt_tokens: int
) -> tuple[object, ...]:
    """What a row of the table is found by."""
    return (
        *(spec.name, spec.parameters, one.backend, one.weight_format),
        *(question.threads, question.request.slots, prompt_tokens, question.request.kv_dtype),
    )

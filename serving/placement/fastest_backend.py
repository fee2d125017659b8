"""The fastest backend of this CPU for a model and its work: measured once in seconds, then kept.

    choice = fastest_backend(question, hardware_facts(), say, progress)
    "\\n".join(choice_lines(choice))

Memory and packages decide by arithmetic who can be chosen. Those who can are measured in a child
process, by the backend that serves: prompts alone, decode rows of one, four and all slots, both in
one step (`EngineTimes.steps`). The times are kept in CACHE/engine-times.json until the CPU or the
version of an engine's library changes. One request costs its prompt's time alone and its share of
the decode steps that it makes together with the other streams; the most requests/s win.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

import msgspec
import numpy as np

from models.errors import CrossoverError
from models.formatting import count, duration, requests, share, significant
from models.isolated import run_python
from models.ladder import rung
from models.manifest import Progress, write_atomically
from models.resolve import cache_dir, is_made, resolve
from models.spec import BITS_PER_WEIGHT, ModelSpec
from serving.backends.backend_interface import Backend, EngineConfig
from serving.backends.backend_table import (
    BACKENDS,
    backend_class,
    missing_backends,
    weights_of,
)
from serving.errors import ServingError
from serving.hardware.machine_facts import HardwareFacts
from serving.placement.placement_policy import NoPlacement, PlacementRequest, plan
from serving.sampling.step_rows import Row
from serving.server_options import Policy

BEST = "best"  # in place of a backend's name in a campaign
USUAL = (("llama_cpp", "Q4_0"), ("onnx", "int8"))  # looked at where no format is asked for
# A bigger model whose weights are not all made is judged by this rung's times, scaled.
PROXY, MOST_MEASURED_PARAMETERS = "llama-3.2-1b", 2_000_000_000
BUSY = 0.05  # of the time, waited for a core: other work made the steps longer
NEAR = 0.10  # of the best rate: what two measurements of a second differ by on a machine at work
PART_SECONDS = 0.5  # of each kind of step
MOST_STEPS = 64  # of one kind
SHORT_PROMPT, LONG_PROMPT = 16, 256
TIMEOUT_SECONDS = 300.0
VERSION = 2
PACKAGES = ("llama-cpp-python", "onnxruntime", "torch")
CONFIG_VARIABLE = "CROSSOVER_MEASURED_ENGINE"

T = TypeVar("T")
Clock = Callable[[], float]
Say = Callable[[str], None]


class MeasuringFailed(ServingError):
    """The engine could not be loaded, or did not answer in time."""


class Work(msgspec.Struct, frozen=True):
    """What is asked of an engine: mean tokens of a request, and how many requests run at once."""

    prompt_tokens: float
    output_tokens: float
    streams: int


class MeasuredStep(msgspec.Struct, frozen=True):
    """A step of an engine, and the lower quartile of its seconds."""

    decode_rows: int
    context_tokens: int  # that the decode rows attend to, all together
    prompts: int  # each from its first token
    prompt_tokens: int  # of all prompts together
    seconds: float


class EngineTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Measured times of one engine on one machine; a row of the kept table."""

    model: str
    parameters: int
    backend: str
    weight_format: str
    threads: int
    slots: int
    prompt_tokens: int  # of a prompt, rounded up to a power of two
    prompt_tokens_per_second: float
    decode_seconds: float  # of a step of one row
    decode_slots_seconds: float  # of a step of `slots` rows
    spent_seconds: float  # of the measurement, loading included
    unix_seconds: float
    waited_share: float = 0.0  # of the time, by the engine's thread that waited most for a core
    kv_dtype: str = "auto"
    steps: tuple[MeasuredStep, ...] = ()  # all that was measured: for a law of the step time

    @property
    def key(self) -> tuple[object, ...]:
        """What was measured; the rest is what came out."""
        return (
            *(self.model, self.parameters, self.backend, self.weight_format),
            *(self.threads, self.slots, self.prompt_tokens, self.kv_dtype),
        )

    def scaled(self, spec: ModelSpec, factor: float) -> EngineTimes:
        """The times of another model that takes `factor` times the arithmetic for a token."""
        return msgspec.structs.replace(
            self,
            model=spec.name,
            parameters=spec.parameters,
            prompt_tokens_per_second=self.prompt_tokens_per_second / factor,
            decode_seconds=self.decode_seconds * factor,
            decode_slots_seconds=self.decode_slots_seconds * factor,
            steps=tuple(
                msgspec.structs.replace(one, seconds=one.seconds * factor) for one in self.steps
            ),
        )


class EngineCandidate(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An engine that was looked at. `why_not`: why it cannot be chosen; "": it can."""

    backend: str
    weight_format: str
    why_not: str = ""
    times: EngineTimes | None = None  # of the model that is asked for; None: not measured
    measured_on: str = ""  # the model measured, where that is another one; its times are scaled
    requests_per_second: float | None = None  # under the work asked for, by `times`

    @property
    def name(self) -> str:
        return f"{self.backend} {self.weight_format}".strip()

    @property
    def bits(self) -> float:
        """Bits of a weight; formats with more are nearer to the float model."""
        return BITS_PER_WEIGHT.get(self.weight_format, 0.0)


class EngineChoice(msgspec.Struct, frozen=True, kw_only=True):
    """The engine chosen, why, and all that were looked at."""

    backend: str
    weight_format: str
    reason: str
    candidates: tuple[EngineCandidate, ...]


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """A model that is to be served on the CPU, and what will be asked of it."""

    source: str  # a rung, a file or a folder
    request: PlacementRequest
    work: Work
    threads: int
    cores: tuple[int, ...]
    formats: tuple[str, ...] = ()  # none: USUAL
    cache: str | None = None
    may_measure: bool = True  # False: what the table does not hold is not known


def fastest_backend(
    question: Question, facts: HardwareFacts, say: Say, progress: Progress
) -> EngineChoice:
    """The choice; seconds for each engine that this machine's table does not hold yet.

    Raises NoPlacement where no engine can run the model here.
    """
    candidates = [_looked_at(question, facts, *pair) for pair in _pairs(question.formats)]
    if sum(not one.why_not for one in candidates) > 1:
        candidates = [_measured(question, one, facts, say, progress) for one in candidates]
    try:
        return choose(candidates, question.work)
    except ValueError:
        why = "; ".join(f"{one.name}: {one.why_not}" for one in candidates)
        text = why or f"no engine of the CPU has the format {', '.join(question.formats)}"
        raise NoPlacement(f"{question.request.model.name} has no engine here: {text}") from None


def choose(candidates: Sequence[EngineCandidate], work: Work) -> EngineChoice:
    """Most requests/s; of those within NEAR of that, most bits a weight. Without times the first.

    Raises ValueError where none can be chosen.
    """
    rated = [
        one
        if one.times is None
        else msgspec.structs.replace(one, requests_per_second=requests_per_second(one.times, work))
        for one in candidates
    ]
    possible = [one for one in rated if not one.why_not]
    if not possible:
        raise ValueError("no candidate can be chosen")
    best = max(possible, key=_rate)
    near = [one for one in possible if _rate(one) >= (1 - NEAR) * _rate(best)]
    if _rate(best):
        best = max(near, key=lambda one: (one.bits, _rate(one)))
    reason = _reason(best, possible, work)
    if any(one.times is not None and one.times.waited_share > BUSY for one in possible):
        reason += "; other work on the machine disturbed the measurement"
    return EngineChoice(
        backend=best.backend,
        weight_format=best.weight_format,
        reason=reason,
        candidates=tuple(rated),
    )


def requests_per_second(times: EngineTimes, work: Work) -> float:
    """The rate at which an engine that never idles ends requests, `work.streams` at once.

    A request takes its prompt's time alone, which gives the first token, and its share of the
    decode steps for the others.
    """
    streams = max(1, min(work.streams, times.slots))
    part = (streams - 1) / max(1, times.slots - 1)  # linear between one row and all slots
    step = times.decode_seconds + part * (times.decode_slots_seconds - times.decode_seconds)
    prompt = work.prompt_tokens / times.prompt_tokens_per_second
    return 1 / (prompt + max(0.0, work.output_tokens - 1) * step / streams)


def known_times(
    question: Question,
    engine: EngineCandidate,
    spec: ModelSpec,
    facts: HardwareFacts,
    say: Say,
    progress: Progress,
    source: str = "",
) -> EngineTimes | None:
    """The engine's times for `spec`, whose weights are `source`: kept, or measured now.

    `source` "": the question's. None: not kept, and not to be measured. Raises CrossoverError
    where measuring fails.
    """
    rows, note = read_table(question.cache, facts)
    if note:
        say(note)
    length = prompt_class(question.work.prompt_tokens)
    key = (spec.name, spec.parameters, engine.backend, engine.weight_format, question.threads)
    key += (question.request.slots, length, question.request.kv_dtype)  # type: ignore[assignment]
    row = next((one for one in rows if one.key == key), None)
    if row is not None or not question.may_measure:
        return row
    kind, weight_format = weights_of(engine.backend, engine.weight_format)
    files = resolve(
        source or question.source,
        kind=kind,
        weight_format=weight_format,
        cache=question.cache,
        progress=progress,
    )
    config = EngineConfig(
        backend=engine.backend,
        model_path=files.path,
        model_name=files.name,
        weight_format=files.weight_format,
        tokenizer_path=files.tokenizer_path,
        slots=question.request.slots,
        kv_dtype=question.request.kv_dtype,
        threads=question.threads,
        cores=question.cores,
    )
    progress(f"measuring {engine.name} on {spec.name}", None)
    row = measured_times(config, spec, length)
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


def work_words(work: Work) -> str:
    """`prompts of 36 and answers of 6.5 tokens, 8 at once`."""
    return (
        f"prompts of {significant(work.prompt_tokens)} and answers of "
        f"{significant(work.output_tokens)} tokens, {count(work.streams)} at once"
    )


def _rate(one: EngineCandidate) -> float:
    return one.requests_per_second or 0.0


def _reason(best: EngineCandidate, possible: Sequence[EngineCandidate], work: Work) -> str:
    others = [one for one in possible if one is not best]
    if not others:
        return f"{best.name}: the only engine that can run this model here now"
    if best.requests_per_second is None:
        return f"{best.name}: the first of {len(possible)} engines, none of which was measured"
    rival = max(others, key=_rate)
    on = f", measured on {best.measured_on} and scaled" if best.measured_on else ""
    text = f"{best.name}: {requests(_rate(best))} by its step times ({work_words(work)}{on})"
    if rival.requests_per_second is None:
        return f"{text}; no other engine was measured"
    ratio = _rate(best) / _rate(rival)
    if ratio < 1 or 1 - 1 / ratio <= NEAR:
        tie = f"{text}; a near tie with {rival.name} ({requests(_rate(rival))})"
        if best.bits > rival.bits:
            tie += f", whose weights of {rival.bits:g} bits are further from the float model's"
        return tie
    return f"{text}, {significant(ratio)} x that of {rival.name}"


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
) -> EngineCandidate:
    """The candidate, with the reason where it cannot run here."""
    one = EngineCandidate(backend=backend, weight_format=weight_format)
    if backend in (missing := missing_backends()):
        return msgspec.structs.replace(one, why_not=missing[backend])
    request = msgspec.structs.replace(
        question.request, policy=Policy.cpu_only, backend=backend, weight_format=weight_format
    )
    try:
        plan(request, facts)
    except NoPlacement as problem:
        why = problem.reasons[-1].text if problem.reasons else str(problem)
        return msgspec.structs.replace(one, why_not=why)
    return one


def _measured(
    question: Question, one: EngineCandidate, facts: HardwareFacts, say: Say, progress: Progress
) -> EngineCandidate:
    """The candidate with its times; one that fails to be measured cannot be chosen."""
    if one.why_not:
        return one
    spec, measured, source = question.request.model, question.request.model, question.source
    kind, weight_format = weights_of(one.backend, one.weight_format)
    there = is_made(source, kind=kind, weight_format=weight_format, cache=question.cache)
    if not there and spec.parameters > MOST_MEASURED_PARAMETERS:
        measured, source = rung(PROXY).spec, PROXY
    try:
        row = known_times(question, one, measured, facts, say, progress, source)
    except CrossoverError as problem:
        return msgspec.structs.replace(one, why_not=str(problem))
    if row is None or measured is spec:
        return msgspec.structs.replace(one, times=row)
    row = row.scaled(spec, spec.matrix_parameters / measured.matrix_parameters)
    return msgspec.structs.replace(one, times=row, measured_on=measured.name)


# --- the kept table


class Table(msgspec.Struct, frozen=True):
    """The file. `machine`: fact -> value, all of which must be as they are now."""

    version: int
    machine: dict[str, str]
    rows: tuple[EngineTimes, ...] = ()


def table_path(cache: str | Path | None) -> Path:
    return cache_dir(cache) / "engine-times.json"


def machine_of(facts: HardwareFacts) -> dict[str, str]:
    """What the times depend on beside the engine's own settings."""
    machine = {
        "CPU": facts.cpu_model,
        "instructions": " ".join(facts.isa),
        "logical cores": str(facts.logical_cores),
        "physical cores": str(facts.physical_cores),
    }
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            machine[package] = importlib.metadata.version(package)
    return machine


def read_table(
    cache: str | Path | None, facts: HardwareFacts
) -> tuple[tuple[EngineTimes, ...], str]:
    """The rows that are valid on this machine, and why a file that is there is not."""
    machine, path = machine_of(facts), table_path(cache)
    try:
        table = msgspec.json.decode(path.read_bytes(), type=Table)
    except FileNotFoundError:
        return (), ""
    except (OSError, msgspec.MsgspecError) as problem:
        return (), f"{path} cannot be read ({problem}): the engines are measured anew"
    if table.version != VERSION:
        return (), f"{path} has version {table.version}, not {VERSION}: measured anew"
    if table.machine != machine:
        names = sorted(set(table.machine) | set(machine))
        name = next(one for one in names if table.machine.get(one) != machine.get(one))
        then, now = (one.get(name, "none") for one in (table.machine, machine))
        return (), f"{path} is of another machine: {name} {then} then, {now} now"
    return table.rows, ""


def keep(cache: str | Path | None, facts: HardwareFacts, row: EngineTimes) -> None:
    """Write the table with this row in place of an older one of the same key, atomically."""
    rows, _ = read_table(cache, facts)
    rows = (*(one for one in rows if one.key != row.key), row)
    path = table_path(cache)
    path.parent.mkdir(parents=True, exist_ok=True)
    content = msgspec.json.encode(Table(VERSION, machine_of(facts), rows))
    write_atomically(path, msgspec.json.format(content, indent=1))


# --- measuring


def prompt_class(prompt_tokens: float) -> int:
    """The length that stands for prompts of a mean length: a power of two, 16 to 256."""
    length = SHORT_PROMPT
    while length < min(prompt_tokens, LONG_PROMPT):
        length *= 2
    return length


def measured_times(
    config: EngineConfig, spec: ModelSpec, prompt_tokens: int, part_seconds: float = PART_SECONDS
) -> EngineTimes:
    """The engine's times with this configuration; its context is cut to what is measured.

    Raises MeasuringFailed.
    """
    context = min(spec.context, prompt_tokens + 4 * MOST_STEPS)
    small = msgspec.structs.replace(config, context_tokens=context, kv_tokens=None)
    began = time.monotonic()
    ran = run_python(
        *("-m", "serving.placement.fastest_backend", str(prompt_tokens), str(part_seconds)),
        environment={CONFIG_VARIABLE: msgspec.json.encode(small).decode()},
        timeout_seconds=TIMEOUT_SECONDS,
    )
    name = f"{config.backend} {config.weight_format}"
    if ran.status is None:
        raise MeasuringFailed(f"{name} was not measured within {TIMEOUT_SECONDS:g} s")
    if ran.status:
        raise MeasuringFailed(f"{name} could not be measured: {ran.reason}")
    said = msgspec.json.decode(ran.output.splitlines()[-1], type=_Said)
    alone = {one.decode_rows: one.seconds for one in said.steps if not one.prompts}
    prompts = [one for one in said.steps if not one.decode_rows]
    prompt = max(prompts, key=lambda one: one.prompt_tokens)
    return EngineTimes(
        model=spec.name,
        parameters=spec.parameters,
        backend=config.backend,
        weight_format=config.weight_format,
        threads=config.threads or 0,
        slots=config.slots,
        prompt_tokens=prompt_tokens,
        prompt_tokens_per_second=prompt.prompt_tokens / prompt.seconds,
        decode_seconds=alone[1],
        decode_slots_seconds=alone[config.slots],
        spent_seconds=round(time.monotonic() - began, 3),
        unix_seconds=time.time(),
        waited_share=said.waited_share,
        kv_dtype=config.kv_dtype,
        steps=said.steps,
    )


def measured_steps(
    backend: Backend,
    prompt_tokens: int,
    part_seconds: float = PART_SECONDS,
    clock: Clock | None = None,
) -> tuple[MeasuredStep, ...]:
    """Steps of a loaded backend: prompts of two lengths, decode rows of 1, 4 and all slots, and
    all slots but one together with a prompt."""
    steps, slots = TimedSteps(backend, clock or time.perf_counter), backend.info.slots
    most = min(prompt_tokens, backend.info.step_tokens, backend.info.context_tokens - 2)
    guess = SHORT_PROMPT / min(steps.prompt(0, SHORT_PROMPT) for _ in range(2))
    length = int(min(most, max(SHORT_PROMPT, guess * part_seconds)))
    found = []
    for tokens in sorted({SHORT_PROMPT, length}):
        seconds = steps.quick(partial(steps.prompt, 0, tokens), part_seconds, 1)
        found.append(MeasuredStep(0, 0, 1, tokens, seconds))
    # The others hold as much as there is time to fill them with.
    each = int(min(length, max(4, part_seconds * length / seconds / max(1, slots - 1))))
    for slot in range(1, slots):
        steps.prompt(slot, each)
    for rows in sorted({1, min(4, slots), slots}):
        before = sum(steps.held[:rows])
        seconds = steps.quick(partial(steps.decode, rows), part_seconds, 4)
        held = (before + sum(steps.held[:rows])) // 2
        found.append(MeasuredStep(rows, held, 0, 0, seconds))
    if slots > 1:
        held = sum(steps.held[:-1])
        seconds = steps.quick(partial(steps.mixed, slots - 1, 1, SHORT_PROMPT), part_seconds, 4)
        found.append(MeasuredStep(slots - 1, held, 1, SHORT_PROMPT, seconds))
    return tuple(found)


class TimedSteps:
    """Gives a loaded backend steps of random tokens; knows what each slot holds."""

    def __init__(self, backend: Backend, clock: Clock = time.perf_counter) -> None:
        self.info = backend.info
        self.held = [0] * backend.info.slots
        self._backend = backend
        self._clock = clock
        self._random = np.random.default_rng(1)

    def prompt(self, slot: int, count: int, start: int = 0) -> float:
        """Seconds of `count` prompt tokens behind the first `start` tokens of a slot."""
        self.held[slot] = start + count
        return self._took([Row(slot, self._tokens(count), start, True)])

    def decode(self, rows: int, wants_token: bool = True) -> float:
        """Seconds of a step with one token for each of the first `rows` slots.

        `wants_token` False: without logits, and nothing is drawn.
        """
        return self._took(self._decoding(rows, wants_token))

    def mixed(self, rows: int, prompts: int, tokens: int) -> float:
        """Seconds of a step that decodes the first `rows` slots and computes prompts in the last.

        Each prompt has `tokens` tokens and takes the place of all that its slot holds.
        """
        step = self._decoding(rows)
        for slot in range(len(self.held) - prompts, len(self.held)):
            step.append(Row(slot, self._tokens(tokens), 0, True))
            self.held[slot] = tokens
        return self._took(step)

    def share(self, tokens: int) -> None:
        """All slots with the first `tokens` tokens of slot 0."""
        for slot in range(len(self.held)):
            if slot:
                self._backend.copy(0, slot, tokens)
            self.held[slot] = tokens

    def quick(
        self, measure: Callable[[], float], seconds: float, least: int, most: int = MOST_STEPS
    ) -> float:
        """The lower quartile of as many measurements as `seconds` hold.

        Whatever else the machine does only makes a step longer.
        """
        until = self._clock() + seconds
        found: list[float] = []
        while len(found) < least or (self._clock() < until and len(found) < most):
            found.append(measure())
        return sorted(found)[len(found) // 4]

    def _decoding(self, rows: int, wants_token: bool = True) -> list[Row]:
        for slot in range(rows):
            self.held[slot] += 1
        return [
            Row(slot, self._tokens(1), self.held[slot] - 1, wants_token) for slot in range(rows)
        ]

    def _tokens(self, count: int) -> np.ndarray:
        return self._random.integers(3, self.info.vocabulary, count, np.int32)  # below: special

    def _took(self, rows: list[Row]) -> float:
        began = self._clock()
        self._backend.step(rows)
        return max(self._clock() - began, 1e-9)


def in_child(config: EngineConfig, measure: Callable[[Backend], T]) -> tuple[T, float]:
    """What is measured on the loaded backend, and the share of the time that its threads waited.

    Of the thread that waited most for a core. Moves this process to the engine's cores.
    """
    if config.cores:
        os.sched_setaffinity(0, config.cores)
    backend: Backend = backend_class(config.backend)(config, lambda what, fraction: None)
    began, waited = time.perf_counter(), _waited_seconds()
    try:
        found = measure(backend)
        more = max(seconds - waited.get(name, 0.0) for name, seconds in _waited_seconds().items())
        return found, round(more / (time.perf_counter() - began), 4)
    finally:
        backend.close()


def _waited_seconds() -> dict[str, float]:
    """Of each thread, how long it was runnable and had no core (man 5 proc, schedstat)."""
    found = {}
    for thread in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # it has ended
            found[thread.name] = int((thread / "schedstat").read_text().split()[1]) / 1e9
    return found or {"": 0.0}


class _Said(msgspec.Struct, frozen=True):
    """What the child says."""

    steps: tuple[MeasuredStep, ...]
    waited_share: float


def main() -> None:
    """The child: one line of JSON."""
    config = msgspec.json.decode(os.environ[CONFIG_VARIABLE].encode(), type=EngineConfig)
    tokens, seconds = int(sys.argv[1]), float(sys.argv[2])
    found = in_child(config, lambda backend: measured_steps(backend, tokens, seconds))
    print(f"\n{msgspec.json.encode(_Said(*found)).decode()}", flush=True)


if __name__ == "__main__":
    main()

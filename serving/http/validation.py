"""From a decoded request to the GenerationRequest that the engine is sent.

    valid = validate(request, facts, limits)               # shared by its sequences
    room = token_limit(request, len(prompt), facts, limits, 16)    # serving.http.prompts
    [valid.sequence(prompt, room, choice) for choice in range(valid.choices)]

Pure functions. What a backend cannot do is a 400 that names the parameter.
"""

from __future__ import annotations

import secrets

import msgspec

from serving.engine.messages import GenerationRequest
from serving.errors import Unsupported
from serving.http.chat.tools import must_call, schema_of
from serving.http.limits import Limits
from serving.http.prompts import check_ids
from serving.http.wire.errors import invalid
from serving.http.wire.requests import (
    ChatRequest,
    CompletionRequest,
    Generation,
    JsonFormat,
    JsonObjectFormat,
)
from serving.http.wire.sse import encode
from serving.registry.model import Facts
from serving.sampling.grammar import text_of
from serving.sampling.types import GREEDY_BELOW, Sampling

_SMALLEST_TOP_P = 1e-6  # top_p 0 means "the best token only", and a nucleus must hold one
_SEED_MASK = (1 << 63) - 1
_ODD = 0x9E3779B97F4A7C15  # golden ratio * 2^64: seeds of sibling answers far apart


class ValidRequest(msgspec.Struct, frozen=True):
    """What all sequences of one request share."""

    generation: GenerationRequest  # without a prompt; `sampling.seed` is the first answer's
    choices: int  # answers to make of each prompt
    kept: int  # of these, how many come back: all, or with best_of the most probable ones
    shows_logprobs: bool  # in the answer; best_of asks the engine for them either way

    def sequence(self, prompt: list[int], max_tokens: int, choice: int) -> GenerationRequest:
        """One sequence of the request, its `choice`-th answer to this prompt."""
        return msgspec.structs.replace(
            self.generation,
            prompt=prompt,
            max_tokens=max_tokens,
            sampling=seeded(self.generation.sampling, choice),
        )

    def ends_reasoning(self, mark: list[int]) -> ValidRequest:
        """The same, with its reasoning counted up to this mark; only a single token can be."""
        end = mark[0] if len(mark) == 1 else None
        generation = msgspec.structs.replace(self.generation, thought_end=end)
        return msgspec.structs.replace(self, generation=generation)


def validate(request: Generation, facts: Facts, limits: Limits) -> ValidRequest:
    """The request's sampling and stops, checked. Raises ApiError 400 that names the parameter."""
    if request.stream_options is not None and not request.stream:
        raise invalid("stream_options: only allowed together with stream: true", "stream_options")
    kept = request.n or 1
    made = _made(request, kept)
    sampling = sampling_of(request, facts, limits)
    shows_logprobs = wanted_logprobs(request) is not None
    if made > kept and not shows_logprobs:
        _need("logprobs", "best_of", facts)
        sampling = msgspec.structs.replace(sampling, logprobs=0)
    deadlines = (request.deadline_seconds, limits.deadline_seconds)
    generation = GenerationRequest(
        prompt=[],
        max_tokens=0,
        sampling=sampling,
        stop=_stops(request.stop, limits),
        stop_token_ids=_stop_ids(request.stop_token_ids or [], facts, limits),
        min_tokens=request.min_tokens or 0,
        ignore_eos=bool(request.ignore_eos),
        deadline_seconds=min((d for d in deadlines if d is not None), default=None),
        include_stop=bool(request.include_stop_str_in_output),
        whole=not request.stream,
    )
    return ValidRequest(generation, made, kept, shows_logprobs)


def _made(request: Generation, kept: int) -> int:
    """Answers to make of each prompt: `n`, or `best_of` to choose `n` from."""
    made = (request.best_of if isinstance(request, CompletionRequest) else None) or kept
    if made < kept:
        text = f"best_of: {made} answers are too few to return n = {kept} of them"
        raise invalid(text, "best_of")
    if made > kept and request.stream:
        text = "best_of: the best answers are known at the end; not together with stream"
        raise invalid(text, "best_of")
    return made


def _need(capability: str, param: str, facts: Facts) -> None:
    """Raises ApiError 400, by the parameter's name, for what the backend cannot do."""
    if capability not in facts.capabilities:
        text = f"{param} is not supported by the {facts.backend} backend"
        raise invalid(text, param.partition(" ")[0], "unsupported_parameter")


def sampling_of(request: Generation, facts: Facts, limits: Limits) -> Sampling:
    """How tokens are drawn. `temperature` left out: 1.0, or 0 where the backend is greedy only."""
    temperature = request.temperature
    if temperature is None:
        temperature = 1.0 if "temperature" in facts.capabilities else 0.0
    if temperature < GREEDY_BELOW:
        temperature = 0.0
    logprobs = wanted_logprobs(request)
    echoes = isinstance(request, CompletionRequest) and bool(request.echo)
    grammar, schema = _grammar(request)
    sampling = Sampling(
        temperature=temperature,
        top_p=1.0 if request.top_p is None else max(request.top_p, _SMALLEST_TOP_P),
        top_k=min(max(request.top_k or 0, 0), facts.vocabulary),
        min_p=request.min_p or 0.0,
        seed=secrets.randbits(63) if request.seed is None else request.seed & _SEED_MASK,
        presence_penalty=request.presence_penalty or 0.0,
        frequency_penalty=request.frequency_penalty or 0.0,
        repetition_penalty=_repetition_penalty(request),
        logit_bias=_logit_bias(request.logit_bias or {}, facts, limits),
        logprobs=None if logprobs is None else min(logprobs, facts.vocabulary),
        prompt_logprobs=min(logprobs, facts.vocabulary)
        if echoes and logprobs is not None
        else None,
        grammar=grammar,
        json_schema=schema,
    )
    constrained_by = "tool_choice" if request.response_format is None else "response_format"
    drawn = temperature > 0  # greedy decoding is the same whatever the first five say
    needs = (
        ("temperature", "temperature", drawn),
        ("top_p", "top_p", drawn and sampling.top_p < 1),
        ("top_k", "top_k", drawn and sampling.top_k > 0),
        ("min_p", "min_p", drawn and sampling.min_p > 0),
        ("seed", "seed", drawn and request.seed is not None),
        ("penalties", "presence_penalty", sampling.presence_penalty != 0),
        ("penalties", "frequency_penalty", sampling.frequency_penalty != 0),
        ("penalties", "repetition_penalty", sampling.repetition_penalty != 1),
        ("logit_bias", "logit_bias", bool(sampling.logit_bias)),
        ("grammar", "grammar", grammar is not None),
        ("json_schema", constrained_by, schema is not None),
        ("logprobs", "logprobs", logprobs is not None),
        ("prompt_logprobs", "logprobs together with echo", sampling.prompt_logprobs is not None),
    )
    for capability, param, asked in needs:
        if asked:
            _need(capability, param, facts)
    return sampling


def _repetition_penalty(request: Generation) -> float:
    """Under either of its names; 1.0: none."""
    ours, theirs = request.repetition_penalty, request.repeat_penalty
    if ours is not None and theirs not in (None, ours):
        text = "repetition_penalty and repeat_penalty differ; send one of them"
        raise invalid(text, "repeat_penalty")
    found = theirs if ours is None else ours
    return 1.0 if found is None else found


def wanted_logprobs(request: Generation) -> int | None:
    """Alternatives to report at each position; None: no log-probabilities at all."""
    if isinstance(request, CompletionRequest):
        return request.logprobs
    if isinstance(request, ChatRequest):
        if request.logprobs:
            return request.top_logprobs or 0
        if request.top_logprobs:
            raise invalid("top_logprobs: needs logprobs: true", "top_logprobs")
    return None


def seeded(sampling: Sampling, choice: int) -> Sampling:
    """The sampling of the `choice`-th answer, with its own seed; the first keeps the request's."""
    if choice == 0:
        return sampling
    return msgspec.structs.replace(sampling, seed=(sampling.seed + choice * _ODD) & _SEED_MASK)


def _grammar(request: Generation) -> tuple[str | None, str | None]:
    """(GBNF, JSON schema) that the output must follow; at most one. The engine reads them."""
    schema: str | None = None
    is_call = False
    if isinstance(request, ChatRequest) and must_call(request):
        is_call = True
        schema = encode(schema_of(request)).decode()
    match request.response_format:
        case JsonObjectFormat():
            schema = '{"type":"object"}'
        case JsonFormat(json_schema=given):
            if given.schema is None:
                key = "response_format.json_schema.schema"
                raise invalid(f"{key}: missing", key)
            schema = encode(given.schema).decode()
    if request.grammar is not None and schema is not None:
        raise invalid("grammar: not together with response_format", "grammar")
    try:
        text_of(Sampling(grammar=request.grammar, json_schema=schema))
    except Unsupported as problem:
        about = "tools" if is_call else problem.parameter
        raise invalid(str(problem), about, "unsupported_parameter") from None
    return request.grammar, schema


def _most(param: str, count: int, what: str, most: int) -> None:
    if count > most:
        raise invalid(f"{param}: {count} {what}; {most} are allowed", param)


def _stops(stop: str | list[str] | None, limits: Limits) -> list[str]:
    stops = [stop] if isinstance(stop, str) else stop or []
    _most("stop", len(stops), "strings", limits.stop_strings)
    for text in stops:
        if not text:
            raise invalid("stop: an empty string would stop everything", "stop")
        if len(text) > limits.stop_characters:
            size = f"{len(text)} characters; {limits.stop_characters} are allowed"
            raise invalid(f"stop: a string of {size}", "stop")
    return stops


def _stop_ids(ids: list[int], facts: Facts, limits: Limits) -> list[int]:
    _most("stop_token_ids", len(ids), "ids", limits.stop_token_ids)
    if ids:
        check_ids(ids, facts, "stop_token_ids")
    return ids


def _logit_bias(bias: dict[int, float], facts: Facts, limits: Limits) -> dict[int, float]:
    _most("logit_bias", len(bias), "keys", limits.logit_bias_keys)
    if bias:
        check_ids(list(bias), facts, "logit_bias")
    return bias

"""From a decoded request to the GenerationRequest that the engine is sent.

    generation = validate(body, facts)               # shared by its sequences
    most = token_limit(body, len(ids), facts)

Pure functions. What a backend cannot do is a 400 that names the parameter.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import cast

from serving.engine.ipc_messages import GenerationRequest
from serving.errors import ContextOverflow, Unsupported
from serving.http.api_errors import invalid
from serving.http.api_schemas import ChatRequest, CompletionRequest, Generation, encode
from serving.registry.model_registry import Facts
from serving.sampling.grammar import check_size
from serving.sampling.step_rows import GREEDY_BELOW, Sampling

ALL_TOKENS = -1  # as max_tokens: all that the context leaves
COMPLETION_TOKENS = 16  # OpenAI's default of max_tokens for completions
_SMALLEST_TOP_P = 1e-6  # top_p 0 means "the best token only", and a nucleus must hold one
_SEED_MASK = (1 << 63) - 1


def validate(
    body: Generation, facts: Facts, calls_schema: bytes | None = None
) -> GenerationRequest:
    """The request's sampling and stops, without prompt, length and deadline. Raises ApiError 400.

    `calls_schema`: of the calls that the answer must consist of.
    """
    if body.stream_options is not None and not body.stream:
        raise invalid("stream_options: only allowed together with stream: true", "stream_options")
    if body.stop_token_ids:
        check_ids(body.stop_token_ids, facts, "stop_token_ids")
    if body.logit_bias:
        check_ids(list(body.logit_bias), facts, "logit_bias")
    sampling = _sampling_of(body, facts, calls_schema)
    try:  # here, too: each sequence of the request would carry it to the engine
        check_size(sampling)
    except Unsupported as problem:
        param = problem.parameter if calls_schema is None else "tools"
        raise invalid(str(problem), param, "unsupported_parameter") from None
    drawn = sampling.temperature > 0  # greedy decoding is the same whatever the first five say
    asked = {
        "temperature": drawn,
        "top_p": drawn and sampling.top_p < 1,
        "top_k": drawn and sampling.top_k > 0,
        "min_p": drawn and sampling.min_p > 0,
        "seed": drawn and body.seed is not None,
        "penalties": sampling.has_penalties,
        "logit_bias": bool(sampling.logit_bias),
        "grammar": sampling.grammar is not None,
        "json_schema": sampling.json_schema is not None,
        "logprobs": sampling.logprobs is not None,
    }
    for name, is_asked in asked.items():
        if is_asked and name not in facts.capabilities:
            text = f"{name} is not supported by the {facts.backend} backend"
            raise invalid(text, name, "unsupported_parameter")
    return GenerationRequest(
        prompt=[],
        max_tokens=0,
        sampling=sampling,
        stop=[body.stop] if isinstance(body.stop, str) else body.stop or [],
        stop_token_ids=body.stop_token_ids or [],
        min_tokens=body.min_tokens or 0,
        ignore_eos=bool(body.ignore_eos),
        include_stop=bool(body.include_stop_str_in_output),
        whole=not body.stream,
    )


def _sampling_of(body: Generation, facts: Facts, calls_schema: bytes | None) -> Sampling:
    """How tokens are drawn. `temperature` left out: 1.0, or 0 where the backend is greedy only."""
    temperature = body.temperature
    if temperature is None:
        temperature = 1.0 if "temperature" in facts.capabilities else 0.0
    logprobs: int | None = None
    if isinstance(body, CompletionRequest):
        logprobs = body.logprobs
    elif isinstance(body, ChatRequest):
        if body.top_logprobs and not body.logprobs:
            raise invalid("top_logprobs: needs logprobs: true", "top_logprobs")
        logprobs = (body.top_logprobs or 0) if body.logprobs else None
    schema, form = calls_schema, body.response_format
    if form is not None and form.type != "text":
        if form.type == "json_schema" and form.json_schema is None:
            key = "response_format.json_schema"
            raise invalid(f"{key}: needed with this type", key)
        if calls_schema is not None:
            text = "response_format: not together with calls of tools that must come"
            raise invalid(text, "response_format")
        found = {"type": "object"} if form.json_schema is None else form.json_schema.schema
        schema = encode(found)
    if body.grammar is not None and schema is not None:
        text = "grammar: not together with response_format or calls of tools that must come"
        raise invalid(text, "grammar")
    return Sampling(
        temperature=0.0 if temperature < GREEDY_BELOW else temperature,
        top_p=1.0 if body.top_p is None else max(body.top_p, _SMALLEST_TOP_P),
        top_k=min(max(body.top_k or 0, 0), facts.vocabulary),
        min_p=body.min_p or 0.0,
        seed=secrets.randbits(63) if body.seed is None else body.seed & _SEED_MASK,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        repetition_penalty=body.repetition_penalty or 1.0,
        logit_bias=body.logit_bias or {},
        logprobs=None if logprobs is None else min(logprobs, facts.vocabulary),
        grammar=body.grammar,
        json_schema=None if schema is None else schema.decode(),
    )


def prompts_of(body: CompletionRequest, facts: Facts, most: int) -> list[str | list[int]]:
    """The completion's prompts, each a text or token ids. `most`: sequences of one request.

    Raises ApiError 400.
    """
    prompt = body.prompt
    if not isinstance(prompt, str) and len(prompt) > facts.context_tokens + most:
        # before a walk through a million ids
        raise ContextOverflow(len(prompt), None, facts.context_tokens, "prompt")
    if isinstance(prompt, str) or {type(item) for item in prompt} == {int}:
        prompt = [cast("str | list[int]", prompt)]
    if {type(item) for item in prompt} not in ({str}, {list}):
        text = "prompt: texts, token ids or lists of token ids are needed, all of one kind"
        raise invalid(text, "prompt")
    found, choices = cast("list[str | list[int]]", prompt), body.n or 1
    if len(found) * choices > most:
        param = "n" if choices > 1 else "prompt"
        asked = f"{len(found)} prompts times {choices} answers"
        raise invalid(f"{param}: {asked}; {most} sequences a request are allowed", param)
    for ids in found:
        if isinstance(ids, list):
            check_ids(ids, facts, "prompt")
        elif not ids:
            raise invalid("prompt: an empty text; at least one token is needed", "prompt")
    return found


def check_ids(ids: Sequence[int], facts: Facts, param: str) -> None:
    """Raises ApiError 400 for no ids, or one that the model does not have."""
    if not ids:
        raise invalid(f"{param}: an empty list of token ids; at least one is needed", param)
    for token in (max(ids), min(ids)):
        if not 0 <= token < facts.vocabulary:
            range_ = f"the model has {facts.vocabulary} tokens"
            raise invalid(f"{param}: token id {token} is out of range; {range_}", param)


def token_limit(body: Generation, prompt_tokens: int, facts: Facts) -> int:
    """Most output tokens after a prompt: what is asked for, cut to what the context leaves.

    Raises ApiError 400 for an empty prompt, ContextOverflow.
    """
    param, wanted = "messages", ALL_TOKENS
    if not isinstance(body, ChatRequest):
        param, wanted = "prompt", COMPLETION_TOKENS
    key, asked = "max_completion_tokens", body.max_completion_tokens
    if asked is None:
        key, asked = "max_tokens", body.max_tokens
    elif body.max_tokens not in (None, asked):
        raise invalid("max_tokens and max_completion_tokens differ; send one of them", key)
    if asked == 0:
        raise invalid(f"{key}: at least 1 is needed, got 0", key)
    if prompt_tokens < 1:
        raise invalid(f"{param}: no tokens in it; at least one is needed", param)
    room = facts.context_tokens - prompt_tokens
    if room < 1:
        raise ContextOverflow(prompt_tokens, asked, facts.context_tokens, param)
    wanted = wanted if asked is None else asked
    limit = room if wanted == ALL_TOKENS else min(wanted, room)
    if (body.min_tokens or 0) > limit:
        text = f"min_tokens: {body.min_tokens} is more than the {limit} that {key} allows"
        raise invalid(text, "min_tokens")
    return limit

"""From a decoded request to the GenerationRequest that is sent to the engine.

    generation = validate(body, limits)               # shared by the sequences of the request
    most = token_limit(body, len(ids), limits)

Pure functions. A request that cannot be served is a 400 that names the parameter.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection
from typing import cast

from crossover.serving.engine.ipc_messages import GenerationRequest
from crossover.serving.errors import ContextOverflow
from crossover.serving.http.api_errors import refused
from crossover.serving.http.body_types import ChatRequest, CompletionRequest, Generation, encode
from crossover.serving.registry.served_model import EngineLimits
from crossover.serving.sampling.grammar import MAX_CHARACTERS
from crossover.serving.sampling.step_inputs import GREEDY_BELOW, Sampling

MAX_SEQUENCES = 128  # prompts * n of one request
COMPLETION_TOKENS = 16  # OpenAI's default of max_tokens for completions
_SMALLEST_TOP_P = 1e-6  # top_p 0 means "only the best token", and a nucleus needs one token
_SEED_MASK = (1 << 63) - 1


def validate(
    body: Generation, limits: EngineLimits, logprobs: int | None = None, calls: bytes | None = None
) -> GenerationRequest:
    """Return the request's sampling and stops, without prompt and limits. Raises ApiError 400.

    `logprobs`: number of alternatives. `calls`: the forced tool calls, as JSON of ToolCalls.
    """
    if body.stream_options is not None and not body.stream:
        raise refused("stream_options", "This needs stream: true.")
    for key in ("stop_token_ids", "logit_bias"):
        if ids := getattr(body, key):
            check_ids(ids, limits, key)
    schema = _schema_of(body, calls)
    if body.grammar is not None and (schema is not None or calls is not None):
        raise refused("grammar", "This cannot be combined with response_format or forced calls.")
    temperature = 1.0 if body.temperature is None else body.temperature
    sampling = Sampling(
        temperature=0.0 if temperature < GREEDY_BELOW else temperature,
        top_p=1.0 if body.top_p is None else max(body.top_p, _SMALLEST_TOP_P),
        top_k=min(max(body.top_k or 0, 0), limits.vocabulary),
        min_p=body.min_p or 0.0,
        seed=secrets.randbits(63) if body.seed is None else body.seed & _SEED_MASK,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        repetition_penalty=body.repetition_penalty or 1.0,
        logit_bias=body.logit_bias or {},
        logprobs=None if logprobs is None else min(logprobs, limits.vocabulary),
        grammar=body.grammar,
        json_schema=None if schema is None else schema.decode(),
        tool_calls=None if calls is None else calls.decode(),
    )
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


def _schema_of(body: Generation, calls: bytes | None) -> bytes | None:
    """Return the JSON schema that constrains the answer. Raises ApiError 400."""
    form, key = body.response_format, "response_format"
    if form is None or form.type == "text":
        return None
    if calls is not None:
        raise refused(key, "This cannot be combined with forced tool calls.")
    if form.type == "json_schema" and form.json_schema is None:
        raise refused(f"{key}.json_schema", "This key is required for type 'json_schema'.")
    schema = encode({"type": "object"} if form.json_schema is None else form.json_schema.schema)
    if len(schema) > MAX_CHARACTERS:  # each sequence of the request carries it to the engine
        why = f"The schema has {len(schema)} bytes; the maximum is {MAX_CHARACTERS}."
        raise refused(key, why)
    return schema


def prompts_of(body: CompletionRequest, limits: EngineLimits) -> list[str | list[int]]:
    """Return the prompts, each a text or token ids. Raises ApiError 400."""
    prompt = body.prompt
    if isinstance(prompt, str) or {type(item) for item in prompt} == {int}:
        prompt = [cast("str | list[int]", prompt)]
    if {type(item) for item in prompt} not in ({str}, {list}):
        why = "Send a text, texts, token ids or lists of token ids, all of one kind."
        raise refused("prompt", why)
    prompts, choices = cast("list[str | list[int]]", prompt), body.n or 1
    if len(prompts) * choices > MAX_SEQUENCES:
        why = f"{len(prompts)} prompts times {choices} answers exceed the maximum {MAX_SEQUENCES}."
        raise refused("n" if choices > 1 else "prompt", why)
    for ids in prompts:
        if isinstance(ids, list):
            check_ids(ids, limits, "prompt")
    return prompts


def check_ids(ids: Collection[int], limits: EngineLimits, param: str) -> None:
    """Check that the model has these token ids. Raises ApiError 400."""
    for token in (max(ids, default=0), min(ids, default=0)):
        if not 0 <= token < limits.vocabulary:
            why = f"The token id {token} is out of range; the model has {limits.vocabulary} tokens."
            raise refused(param, why)


def token_limit(body: Generation, prompt_tokens: int, limits: EngineLimits) -> int:
    """Return the maximum output tokens: as requested, or what the prompt leaves of the context.

    Raises ApiError 400 for an empty prompt, ContextOverflow.
    """
    is_chat = isinstance(body, ChatRequest)
    asked = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    if body.max_tokens not in (None, asked):
        raise refused("max_completion_tokens", "This and max_tokens differ. Send only one of them.")
    param = "messages" if is_chat else "prompt"
    if prompt_tokens < 1:
        raise refused(param, "This has no tokens. Send at least one.")
    room = limits.context_tokens - prompt_tokens
    if room < 1:
        raise ContextOverflow(prompt_tokens, limits.context_tokens, param)
    limit = min(room, asked or (room if is_chat else COMPLETION_TOKENS))
    if (body.min_tokens or 0) > limit:
        raise refused("min_tokens", f"{body.min_tokens} exceeds the {limit} tokens allowed here.")
    return limit

"""Validates a decoded request, as far as the model's limits are needed for that.

    generation = validate(body, limits, defaults)     # shared by the sequences of the request
    max_tokens = token_limit(body, len(ids), limits)  # of each prompt

Pure functions. A request that cannot be served is a 400 that names the parameter.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection
from typing import cast

from crossover.models.text.sampling_defaults import SamplingDefaults
from crossover.serving.engine.ipc_messages import GenerationRequest
from crossover.serving.errors import ContextOverflow
from crossover.serving.http.api_errors import invalid_parameter
from crossover.serving.http.body_types import ChatRequest, CompletionRequest, Generation, encode
from crossover.serving.registry.served_model import EngineLimits
from crossover.serving.sampling.grammar import MAX_CHARACTERS
from crossover.serving.sampling.step_inputs import GREEDY_BELOW, Sampling

MAX_TEMPERATURE = 1e6  # any higher one draws all tokens alike
MAX_PENALTY = 1e4  # beyond any difference of logits
MAX_SEQUENCES = 128  # prompts times answers to each of them
NO_LIMIT = -1  # of max_tokens, as llama.cpp writes it
DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's default of max_tokens for completions
# OpenAI allows top_p 0, which means greedy decoding. Any share this small leaves only one token.
_MIN_TOP_P = 1e-6
_SEED_MASK = (1 << 63) - 1  # the sampler's seeds have 63 bits


def validate(
    body: Generation,
    limits: EngineLimits,
    defaults: SamplingDefaults,
    logprobs: int | None = None,
    forced_calls: bytes | None = None,
) -> GenerationRequest:
    """Return what all sequences of the request share: sampling and stop conditions.

    Prompt and maximum tokens are empty; GenerationResponse sets them for each sequence.
    `defaults`: what the request leaves out. `logprobs`: log-probabilities to return besides that of
    each token; None: return none.
    `forced_calls`: JSON of ToolCalls. Raises ApiError 400.
    """
    if body.stream_options is not None and not body.stream:
        raise invalid_parameter("stream_options", "This needs stream: true.")
    for key in ("stop_token_ids", "logit_bias"):
        if ids := getattr(body, key):
            check_ids(ids, limits, key)
    schema = _schema_of(body, forced_calls)
    if body.grammar is not None and (schema is not None or forced_calls is not None):
        raise invalid_parameter(
            "grammar", "This cannot be combined with response_format or forced calls."
        )
    temperature = defaults.temperature if body.temperature is None else body.temperature
    top_k = defaults.top_k if body.top_k is None else body.top_k
    top_p = defaults.top_p if body.top_p is None else body.top_p
    repetition_penalty = body.repetition_penalty or defaults.repetition_penalty
    has_seed = body.seed is not None and body.seed >= 0
    sampling = Sampling(
        temperature=0.0 if temperature < GREEDY_BELOW else min(temperature, MAX_TEMPERATURE),
        top_p=max(top_p, _MIN_TOP_P),
        top_k=min(max(top_k, 0), limits.vocabulary),
        min_p=defaults.min_p if body.min_p is None else body.min_p,
        seed=(body.seed or 0) & _SEED_MASK if has_seed else secrets.randbits(63),
        presence_penalty=_within(body.presence_penalty or 0.0, -MAX_PENALTY, MAX_PENALTY),
        frequency_penalty=_within(body.frequency_penalty or 0.0, -MAX_PENALTY, MAX_PENALTY),
        repetition_penalty=_within(repetition_penalty, 1 / MAX_PENALTY, MAX_PENALTY),
        logit_bias=body.logit_bias or {},
        logprobs=None if logprobs is None else min(logprobs, limits.vocabulary),
        grammar=body.grammar,
        json_schema=None if schema is None else schema.decode(),
        tool_calls=None if forced_calls is None else forced_calls.decode(),
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
        cache_salt=body.cache_salt or "",
    )


def check_salt(body: Generation, is_required: bool) -> None:
    """Check that the request has a cache salt if it needs one. Raises ApiError 400."""
    if is_required and body.cache_salt is None:
        why = (
            "This server reuses cached prefixes only within a tenant (--require-cache-salt). Have "
            "the proxy in front of it set this key to a secret of the tenant."
        )
        raise invalid_parameter("cache_salt", why)


def _within(value: float, lowest: float, highest: float) -> float:
    return min(max(value, lowest), highest)


def _schema_of(body: Generation, forced_calls: bytes | None) -> bytes | None:
    """Return the JSON schema of `response_format`; None: it has none. Raises ApiError 400."""
    response_format, key = body.response_format, "response_format"
    if response_format is None or response_format.type == "text" or forced_calls is not None:
        return None  # a call is forced first; the answer by the schema follows its result
    json_schema = response_format.json_schema
    given_schema = response_format.schema if json_schema is None else json_schema.schema
    if given_schema is None and response_format.type == "json_schema":
        raise invalid_parameter(
            f"{key}.json_schema", "This key is required for type 'json_schema'."
        )
    schema = encode({"type": "object"} if given_schema is None else given_schema)
    if len(schema) > MAX_CHARACTERS:  # each sequence of the request carries it to the engine
        why = f"The schema has {len(schema)} bytes; the maximum is {MAX_CHARACTERS}."
        raise invalid_parameter(key, why)
    return schema


def prompts_of(body: CompletionRequest, limits: EngineLimits) -> list[str | list[int]]:
    """Return the prompts, each a text or token ids. Raises ApiError 400."""
    prompt = body.prompt
    is_single = isinstance(prompt, str) or {type(item) for item in prompt} == {int}
    prompts = cast("list[str | list[int]]", [prompt] if is_single else prompt)
    if {type(item) for item in prompts} not in ({str}, {list}):
        why = "Send a text, texts, token ids or lists of token ids, all of one kind."
        raise invalid_parameter("prompt", why)
    answers = body.n or 1
    if len(prompts) * answers > MAX_SEQUENCES:
        why = f"{len(prompts)} prompts times {answers} answers exceed the maximum {MAX_SEQUENCES}."
        raise invalid_parameter("n" if answers > 1 else "prompt", why)
    for ids in prompts:
        if isinstance(ids, list):
            check_ids(ids, limits, "prompt")
    return prompts


def check_ids(ids: Collection[int], limits: EngineLimits, param: str) -> None:
    """Check that the model has these token ids. Raises ApiError 400."""
    for token in (max(ids, default=0), min(ids, default=0)):  # all others lie between the two
        if not 0 <= token < limits.vocabulary:
            why = f"The token id {token} is out of range; the model has {limits.vocabulary} tokens."
            raise invalid_parameter(param, why)


def token_limit(body: Generation, prompt_tokens: int, limits: EngineLimits) -> int:
    """Return the maximum output tokens: as requested, but not more than the prompt leaves of the
    context. By default a chat may use all of these, and a completion DEFAULT_COMPLETION_TOKENS.

    Raises ApiError 400 for an empty prompt, and ContextOverflow.
    """
    is_chat = isinstance(body, ChatRequest)
    key = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    requested = getattr(body, key)
    if body.max_tokens not in (None, requested):
        raise invalid_parameter(key, "This and max_tokens differ. Send only one of them.")
    if requested == 0:
        raise invalid_parameter(key, "This must be at least 1, or -1 for no limit, but it is 0.")
    param = "messages" if is_chat else "prompt"
    if prompt_tokens < 1:
        raise invalid_parameter(param, "This has no tokens. Send at least one.")
    tokens_left = limits.context_tokens - prompt_tokens
    if tokens_left < 1:
        raise ContextOverflow(prompt_tokens, limits.context_tokens, param)
    if requested is None and not is_chat:
        requested = DEFAULT_COMPLETION_TOKENS
    limit = tokens_left if requested in (None, NO_LIMIT) else min(tokens_left, requested)
    if (body.min_tokens or 0) > limit:
        raise invalid_parameter(
            "min_tokens", f"{body.min_tokens} exceeds the {limit} tokens allowed here."
        )
    return limit

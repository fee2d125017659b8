"""From a decoded request to what the engine is asked: every check that needs the model, the backend or the server's limits.

    wish = wishes(request, info, limits)                   # sampling, stops: the same for every sequence of the request
    room = token_limit(request, len(prompt), info, 16)     # most output tokens, or 400 context_length_exceeded
    [seeded(wish.sampling, i) for i in range(n)]

Pure functions. What a backend cannot do is refused by the parameter's name; nothing that was asked for is left out in silence.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from functools import partial
from typing import Any

import msgspec

from serving.access import Limits
from serving.backends.base import BackendInfo, EngineConfig, Sampling
from serving.errors import Unsupported
from serving.gbnf import check_grammar, check_schema
from serving.protocol import ApiError, ChatRequest, CompletionRequest, Generation, JsonFormat, JsonObjectFormat, Message, invalid
from serving.replies import encode

COMPLETION_TOKENS = 16  # OpenAI's default of max_tokens for completions
_COLDEST = 1e-4  # a lower temperature draws the best token anyway, and logits / temperature would overflow
_SMALLEST_TOP_P = 1e-6  # top_p 0 means "the best token only", and a nucleus must hold one
_SEED_MASK = (1 << 63) - 1
_ODD = 0x9E3779B97F4A7C15  # golden ratio * 2^64: seeds of sibling answers far apart


class Facts(msgspec.Struct, frozen=True):
    """What the checks need to know of the engine. While none is loaded, only what its configuration promises."""

    backend: str
    context_tokens: int
    vocabulary: int
    capabilities: frozenset[str]


def facts_of(info: BackendInfo) -> Facts:
    """Of a loaded backend. One sequence can have no more than the whole KV pool."""
    return Facts(info.name, min(info.context_tokens, info.kv_tokens), info.vocabulary, info.capabilities)


def promised(config: EngineConfig, vocabulary: int) -> Facts:
    """Of an engine that is still loading: only for routes that need no engine, such as /tokenize."""
    tokens = config.kv_tokens or config.slots * config.context_tokens
    return Facts(config.backend, min(config.context_tokens, tokens), vocabulary, frozenset())


class Wishes(msgspec.Struct, frozen=True):
    """What all sequences of one request share. `sampling.seed` is the first answer's."""

    sampling: Sampling
    stop: list[str]
    stop_token_ids: list[int]
    min_tokens: int
    ignore_eos: bool
    include_stop: bool
    deadline_seconds: float | None
    choices: int  # answers to make of each prompt
    kept: int  # of these, how many come back: all, or with best_of the most probable ones
    shows_logprobs: bool  # in the answer; best_of asks the engine for them either way


def wishes(request: Generation, facts: Facts, limits: Limits) -> Wishes:
    """The request's sampling and stops, checked. Raises ApiError 400 that names the parameter."""
    if request.stream_options is not None and not request.stream:
        raise invalid("stream_options: only allowed together with stream: true", "stream_options")
    kept = request.n or 1
    made = _made(request, kept)
    sampling, shows_logprobs = sampling_of(request, facts, limits), wanted_logprobs(request) is not None
    if made > kept and not shows_logprobs:
        _need("logprobs", "best_of", facts)
        sampling = msgspec.structs.replace(sampling, logprobs=0)
    deadlines = [seconds for seconds in (request.deadline_seconds, limits.deadline_seconds) if seconds is not None]
    return Wishes(
        sampling=sampling,
        stop=_stops(request.stop, limits),
        stop_token_ids=_stop_ids(request.stop_token_ids or [], facts, limits),
        min_tokens=request.min_tokens or 0,
        ignore_eos=bool(request.ignore_eos),
        include_stop=bool(request.include_stop_str_in_output),
        deadline_seconds=min(deadlines, default=None),
        choices=made,
        kept=kept,
        shows_logprobs=shows_logprobs,
    )


def _made(request: Generation, kept: int) -> int:
    """How many answers are made of each prompt: `n`, or `best_of` to choose `n` from. Raises ApiError 400 where these contradict."""
    made = (request.best_of if isinstance(request, CompletionRequest) else None) or kept
    if made < kept:
        raise invalid(f"best_of: {made} answers are too few to return n = {kept} of them", "best_of")
    if made > kept and request.stream:
        raise invalid("best_of: the best answers are known at the end; not together with stream", "best_of")
    return made


def _need(capability: str, param: str, facts: Facts) -> None:
    """Raises ApiError 400, by the parameter's name, for what the backend cannot do."""
    if capability not in facts.capabilities:
        text = f"{param} is not supported by the {facts.backend} backend"
        raise invalid(text, param.partition(" ")[0], "unsupported_parameter")


def sampling_of(request: Generation, facts: Facts, limits: Limits) -> Sampling:
    """How the tokens are drawn. A temperature that is not given is 1.0 (OpenAI's), or 0 where the backend only knows greedy."""
    need = partial(_need, facts=facts)
    temperature = request.temperature
    if temperature is None:
        temperature = 1.0 if "temperature" in facts.capabilities else 0.0
    if temperature < _COLDEST:
        temperature = 0.0
    top_p = 1.0 if request.top_p is None else max(request.top_p, _SMALLEST_TOP_P)
    top_k, min_p = max(request.top_k or 0, 0), request.min_p or 0.0
    if temperature > 0:  # greedy decoding is the same whatever these say
        need("temperature", "temperature")
        shaped = {"top_p": top_p < 1, "top_k": top_k > 0, "min_p": min_p > 0, "seed": request.seed is not None}
        for name, asked in shaped.items():
            if asked:
                need(name, name)
    presence, frequency = request.presence_penalty or 0.0, request.frequency_penalty or 0.0
    repetition = 1.0 if request.repetition_penalty is None else request.repetition_penalty
    penalties = {"presence_penalty": presence != 0, "frequency_penalty": frequency != 0, "repetition_penalty": repetition != 1}
    for name, asked in penalties.items():
        if asked:
            need("penalties", name)
    if request.logit_bias:
        need("logit_bias", "logit_bias")
    grammar, schema = _grammar(request)
    if grammar is not None:
        need("grammar", "grammar")
    if schema is not None:
        need("json_schema", "response_format")
    logprobs = wanted_logprobs(request)
    prompt_logprobs = logprobs if isinstance(request, CompletionRequest) and request.echo else None
    if logprobs is not None:
        need("logprobs", "logprobs")
    if prompt_logprobs is not None:
        need("prompt_logprobs", "logprobs together with echo")
    return Sampling(
        temperature=temperature,
        top_p=top_p,
        top_k=min(top_k, facts.vocabulary),
        min_p=min_p,
        seed=secrets.randbits(63) if request.seed is None else request.seed & _SEED_MASK,
        presence_penalty=presence,
        frequency_penalty=frequency,
        repetition_penalty=repetition,
        logit_bias=_logit_bias(request.logit_bias or {}, facts, limits),
        logprobs=None if logprobs is None else min(logprobs, facts.vocabulary),
        prompt_logprobs=None if prompt_logprobs is None else min(prompt_logprobs, facts.vocabulary),
        grammar=grammar,
        json_schema=schema,
    )


def wanted_logprobs(request: Generation) -> int | None:
    """How many alternatives to report at each position; None: no log-probabilities at all."""
    if isinstance(request, CompletionRequest):
        return request.logprobs
    if isinstance(request, ChatRequest):
        if request.logprobs:
            return request.top_logprobs or 0
        if request.top_logprobs:
            raise invalid("top_logprobs: needs logprobs: true", "top_logprobs")
    return None


def seeded(sampling: Sampling, choice: int) -> Sampling:
    """The sampling of the request's `choice`-th answer: the same, with a seed of its own. The first keeps the request's."""
    return sampling if choice == 0 else msgspec.structs.replace(sampling, seed=(sampling.seed + choice * _ODD) & _SEED_MASK)


def token_limit(request: Generation, prompt_tokens: int, facts: Facts, default: int | None) -> int:
    """Most output tokens after a prompt of this length; `default` None: what the context leaves.

    0 where max_tokens is 0. Raises ApiError 400 for an empty prompt, for one that leaves no room, and for a max_tokens beyond the room.
    """
    param = "messages" if isinstance(request, ChatRequest) else "prompt"
    asked, asked_by = request.max_tokens, "max_tokens"
    if request.max_completion_tokens is not None:
        if asked is not None and asked != request.max_completion_tokens:
            raise invalid("max_tokens and max_completion_tokens differ; send one of them", "max_completion_tokens")
        asked, asked_by = request.max_completion_tokens, "max_completion_tokens"
    if prompt_tokens < 1:
        raise invalid(f"{param}: no tokens in it; at least one is needed", param)
    room = facts.context_tokens - prompt_tokens
    # Nothing is to be generated after a prompt of max_tokens 0, but scoring it takes a sequence, which generates one token at least.
    scored = isinstance(request, CompletionRequest) and request.echo and request.logprobs is not None
    if room < (1 if asked is None or scored else 0) or room < (asked or 0):
        raise context_overflow(prompt_tokens, asked, facts.context_tokens, param)
    limit = asked if asked is not None else room if default is None else min(default, room)
    if (request.min_tokens or 0) > limit:
        raise invalid(f"min_tokens: {request.min_tokens} is more than the {limit} that {asked_by} allows", "min_tokens")
    return limit


def context_overflow(prompt_tokens: int, max_tokens: int | None, context_tokens: int, param: str, at_least: bool = False) -> ApiError:
    """The 400 of a prompt (and answer) that the context does not hold, in the words that clients look for."""
    parts = f"{'at least ' if at_least else ''}{prompt_tokens} in the {param}" + (f", {max_tokens} in the completion" if max_tokens else "")
    text = (
        f"This model's maximum context length is {context_tokens} tokens. However, you requested {prompt_tokens + (max_tokens or 0)} tokens"
        f" ({parts}). Please reduce the length of the {param}{' or completion' if max_tokens else ''}."
    )
    return ApiError(400, text, code="context_length_exceeded", param=param, counts=(prompt_tokens, context_tokens))


def prompts_of(request: CompletionRequest, facts: Facts, limits: Limits) -> list[str | list[int]]:
    """The completion's prompts, each a text or token ids. Raises ApiError 400 for an empty or mixed list or an id out of range."""
    prompt = request.prompt
    found: list[str | list[int]]
    if isinstance(prompt, str):
        found = [prompt]
    elif prompt and isinstance(prompt[0], int) and len(prompt) > facts.context_tokens:  # before a walk through a million ids
        raise context_overflow(len(prompt), None, facts.context_tokens, "prompt")
    elif all(isinstance(item, int) for item in prompt):
        found = [[item for item in prompt if isinstance(item, int)]]
    else:
        found = [item for item in prompt if not isinstance(item, int)]
        if len(found) != len(prompt) or len({type(item) for item in found}) > 1:
            raise invalid("prompt: a list of texts, of token ids, or of lists of token ids; not a mixture", "prompt")
    check_sequences(len(found), request.best_of or request.n or 1, limits, "best_of" if request.best_of else "n")
    for ids in found:
        if isinstance(ids, list):
            check_ids(ids, facts, "prompt")
        elif not ids:
            raise invalid("prompt: an empty text; at least one token is needed", "prompt")
    return found


def check_sequences(prompts: int, choices: int, limits: Limits, asked_by: str = "n") -> None:
    """Raises ApiError 400 where one request asks for too many sequences."""
    if prompts * choices > limits.sequences:
        param = asked_by if choices > 1 else "prompt"
        raise invalid(f"{param}: {prompts} prompts times {choices} answers; {limits.sequences} sequences a request are allowed", param)


def check_ids(ids: Sequence[int], facts: Facts, param: str) -> None:
    """Raises ApiError 400 for no ids, or one that the model does not have."""
    if not ids:
        raise invalid(f"{param}: an empty list of token ids; at least one is needed", param)
    highest = max(ids)
    if highest >= facts.vocabulary:
        raise invalid(f"{param}: token id {highest} is out of range; the model has {facts.vocabulary} tokens", param)


def turns(messages: Sequence[Message], limits: Limits) -> list[dict[str, Any]]:
    """The messages as a chat template wants them: texts only, parts joined by newlines, `developer` as `system`."""
    if len(messages) > limits.messages:
        raise invalid(f"messages: {len(messages)} of them; {limits.messages} are allowed", "messages")
    found: list[dict[str, Any]] = []
    for index, message in enumerate(messages):
        content = message.content
        if content is None:
            if message.role != "assistant":
                raise invalid(f"messages[{index}].content: null; a text is needed", f"messages[{index}].content")
            content = ""
        elif isinstance(content, list):
            content = "\n".join(part.text for part in content)
        turn = {"role": "system" if message.role == "developer" else message.role, "content": content}
        if message.name is not None:
            turn["name"] = message.name
        found.append(turn)
    return found


def _grammar(request: Generation) -> tuple[str | None, str | None]:
    """(GBNF, JSON schema) that the output must follow; at most one of them."""
    schema: str | None = None
    match request.response_format:
        case JsonObjectFormat():
            schema = '{"type":"object"}'
        case JsonFormat(json_schema=given):
            if given.schema is None:
                raise invalid("response_format.json_schema.schema: missing", "response_format.json_schema.schema")
            schema = encode(given.schema).decode()
    if request.grammar is not None and schema is not None:
        raise invalid("grammar: not together with response_format", "grammar")
    try:
        if request.grammar is not None:
            check_grammar(request.grammar)
        if schema is not None:
            check_schema(schema)
    except Unsupported as problem:
        raise invalid(str(problem), "grammar" if schema is None else "response_format") from None
    return request.grammar, schema


def _stops(stop: str | list[str] | None, limits: Limits) -> list[str]:
    stops = [stop] if isinstance(stop, str) else stop or []
    if len(stops) > limits.stop_strings:
        raise invalid(f"stop: {len(stops)} strings; {limits.stop_strings} are allowed", "stop")
    for text in stops:
        if not text:
            raise invalid("stop: an empty string would stop everything", "stop")
        if len(text) > limits.stop_characters:
            raise invalid(f"stop: a string of {len(text)} characters; {limits.stop_characters} are allowed", "stop")
    return stops


def _stop_ids(ids: list[int], facts: Facts, limits: Limits) -> list[int]:
    if len(ids) > limits.stop_token_ids:
        raise invalid(f"stop_token_ids: {len(ids)} ids; {limits.stop_token_ids} are allowed", "stop_token_ids")
    if ids:
        check_ids(ids, facts, "stop_token_ids")
    return ids


def _logit_bias(bias: dict[int, float], facts: Facts, limits: Limits) -> dict[int, float]:
    if len(bias) > limits.logit_bias_keys:
        raise invalid(f"logit_bias: {len(bias)} keys; {limits.logit_bias_keys} are allowed", "logit_bias")
    for token in bias:
        if not 0 <= token < facts.vocabulary:
            raise invalid(f"logit_bias: token id {token} is out of range; the model has {facts.vocabulary} tokens", "logit_bias")
    return bias

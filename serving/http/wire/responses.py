"""The answers of the HTTP interface, as types.

Every field of OpenAI's types is there, null where it says nothing.
"""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from serving.errors import EngineState
from serving.http.wire.errors import ErrorDetail

LOWEST_LOGPROB = -9999.0  # JSON has no -inf; vLLM sends this number in its place
Finish = Literal["stop", "length", "tool_calls"]


def finite(logprob: float) -> float:
    """The log-probability as JSON can hold it."""
    return max(logprob, LOWEST_LOGPROB)


class PromptTokensDetails(msgspec.Struct, frozen=True):
    cached_tokens: int


class CompletionTokensDetails(msgspec.Struct, frozen=True):
    reasoning_tokens: int


class Usage(msgspec.Struct, frozen=True):
    """`prompt_tokens_details`: the prompt tokens that were found in the KV cache, where known.
    `completion_tokens_details`: of a model that reasons, where known."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | None = None
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET


class TopLogprob(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True):
    content: list[TokenLogprob]
    refusal: None = None


class CompletionLogprobs(msgspec.Struct, frozen=True):
    """OpenAI's older shape. `text_offset`: characters in the choice's text, echo included."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class FunctionCall(msgspec.Struct, frozen=True):
    """`arguments`: JSON as text, as the model wrote it."""

    name: str
    arguments: str


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """`index`: in a chunk, which of the answer's calls this is. A call comes in one chunk."""

    index: int | UnsetType = UNSET
    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class AssistantMessage(msgspec.Struct, frozen=True):
    """`content`: null where the answer consists of calls."""

    role: Literal["assistant"]
    content: str | None
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(msgspec.Struct, frozen=True):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: Finish


class ChatCompletion(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    system_fingerprint: str | None
    choices: list[ChatChoice]
    usage: Usage


class ChatDelta(msgspec.Struct, frozen=True):
    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct, frozen=True):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: Finish | None = None


class ChatChunk(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    system_fingerprint: str | None = None
    choices: list[ChatChunkChoice]
    usage: Usage | None | UnsetType = UNSET


class CompletionChoice(msgspec.Struct, frozen=True):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: Finish | None = None


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """The whole answer, and (with some of these left out) each chunk of a streamed one."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    system_fingerprint: str | None
    choices: list[CompletionChoice]
    usage: Usage | None | UnsetType = UNSET


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    """`max_model_len`: vLLM's name of the context. `state`: of the model's engine."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str
    root: str
    max_model_len: int | None
    state: EngineState = EngineState.ready


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    object: Literal["list"] = "list"
    data: list[ModelCard]


class Tokenized(msgspec.Struct, frozen=True):
    tokens: list[int]
    count: int
    max_model_len: int
    token_strs: list[str] | UnsetType = UNSET


class Detokenized(msgspec.Struct, frozen=True):
    prompt: str


class Health(msgspec.Struct, frozen=True):
    """The process is alive, whatever the engine is doing."""

    status: Literal["ok"] = "ok"


class Readiness(msgspec.Struct, frozen=True, kw_only=True):
    """200 when `ready` (or `unloaded`: the next request loads it); 503 with an error otherwise.

    `models`: the state of each, where there are several.
    """

    state: EngineState
    model: str
    backend: str
    reason: str | None = None
    error: ErrorDetail | UnsetType = UNSET
    models: dict[str, EngineState] | UnsetType = UNSET


def usage_of(prompt_tokens: int, completion_tokens: int, cached_tokens: int | None) -> Usage:
    """The counts as OpenAI lays them out; unknown cached tokens leave their part out."""
    details = None if cached_tokens is None else PromptTokensDetails(cached_tokens)
    return Usage(prompt_tokens, completion_tokens, prompt_tokens + completion_tokens, details)

"""The wire, outwards: what an answer looks like, and how it becomes server-sent events.

    head, tail = content_frame(chunk)             # constant parts of one stream's content events; the chunk's text is MARK
    data = head + encode("hello") + tail

Every field that OpenAI's types have is there, null where it says nothing, since some clients read without asking.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from serving.protocol import ErrorDetail

DONE = b"data: [DONE]\n\n"
LOWEST_LOGPROB = -9999.0  # JSON has no -inf; vLLM sends this number in its place
FinishReason = Literal["stop", "length"]


class PromptTokensDetails(msgspec.Struct, frozen=True):
    cached_tokens: int


class Usage(msgspec.Struct, frozen=True):
    """`cached_tokens`: prompt tokens that were not computed again, because an earlier sequence had left them in the KV cache."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | None = None


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
    """OpenAI's older shape. `text_offset` counts characters in the choice's text, an echoed prompt included."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class AssistantMessage(msgspec.Struct, frozen=True):
    role: Literal["assistant"]
    content: str
    refusal: None = None


class ChatChoice(msgspec.Struct, frozen=True):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason


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


class ChatChunkChoice(msgspec.Struct, frozen=True):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason | None = None


class ChatChunk(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | None | UnsetType = UNSET


class CompletionChoice(msgspec.Struct, frozen=True):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: FinishReason | None = None


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """The whole answer, and (with some of these left out) each chunk of a streamed one."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    system_fingerprint: str | None | UnsetType = UNSET
    choices: list[CompletionChoice]
    usage: Usage | None | UnsetType = UNSET


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    """`max_model_len` is vLLM's name of the context; None while no engine is ready. `state`: what its engine is doing."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str
    root: str
    max_model_len: int | None
    state: str = "ready"


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    object: Literal["list"] = "list"
    data: list[ModelCard]


class Tokenized(msgspec.Struct, frozen=True):
    tokens: list[int]
    count: int
    max_model_len: int


class Detokenized(msgspec.Struct, frozen=True):
    prompt: str


class Health(msgspec.Struct, frozen=True):
    """The process is alive, whatever the engine is doing."""

    status: Literal["ok"] = "ok"


class Readiness(msgspec.Struct, frozen=True, kw_only=True):
    """200 when `ready` (or `unloaded`: the next request loads it); 503, with an error beside it, in every other state.

    `models`: the state of each, where there are several.
    """

    state: str
    model: str
    backend: str
    reason: str | None = None
    error: ErrorDetail | UnsetType = UNSET
    models: dict[str, str] | UnsetType = UNSET


def usage_of(prompt_tokens: int, completion_tokens: int, cached_tokens: int | None) -> Usage:
    """The counts as OpenAI lays them out; unknown cached tokens leave their part out."""
    details = None if cached_tokens is None else PromptTokensDetails(cached_tokens)
    return Usage(prompt_tokens, completion_tokens, prompt_tokens + completion_tokens, details)


# --- server-sent events -------------------------------------------------------------------------------------------------------

_encoder = msgspec.json.Encoder()
encode = _encoder.encode
_MARK = "\u0001text\u0001"
_MARK_JSON = encode(_MARK)


def event(value: Any) -> bytes:
    """One server-sent event with `value` as JSON."""
    return b"data: " + encode(value) + b"\n\n"


def content_frame(chunk: ChatChunk | Completion) -> tuple[bytes, bytes]:
    """The event of a chunk whose text is `MARK`, cut at the text: an event is head + JSON of the text + tail.

    Only the text differs between the content chunks of one choice, so the rest is encoded once for each stream.
    """
    head, found, tail = event(chunk).partition(_MARK_JSON)
    assert found, "the chunk does not hold MARK"
    return head, tail


MARK = _MARK

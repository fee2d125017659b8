"""POST /v1/responses on the wire: OpenAI's newer interface, text alone and without memory."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from serving.http.wire.requests import (
    Deadline,
    Effort,
    JsonObjectFormat,
    MaxTokens,
    ModelName,
    Nothing,
    Seed,
    Share,
    Temperature,
    TextFormat,
    Wire,
)
from serving.http.wire.responses import CompletionTokensDetails, PromptTokensDetails

Role = Literal["system", "developer", "user", "assistant"]


class InputPart(Wire, kw_only=True, frozen=True):
    """Text of a message, or of earlier reasoning."""

    type: Literal["input_text", "output_text", "reasoning_text", "summary_text"]
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


class InputItem(Wire, kw_only=True, frozen=True):
    """A message, or the reasoning before one, as it came in an earlier answer's `output`."""

    type: Literal["message", "reasoning"] = "message"
    role: Role | None = None
    content: str | list[InputPart] | None = None
    summary: list[InputPart] | None = None
    id: str | None = None
    status: str | None = None
    encrypted_content: None = None


class SchemaFormat(Wire, kw_only=True, frozen=True, tag="json_schema", tag_field="type"):
    name: str
    schema: dict[str, Any]
    strict: bool | None = None
    description: str | None = None


class TextOptions(Wire, kw_only=True, frozen=True):
    format: TextFormat | JsonObjectFormat | SchemaFormat | None = None
    verbosity: None = None


class ReasoningOptions(Wire, kw_only=True, frozen=True):
    effort: Effort | None = None
    summary: None = None


class ResponseRequest(Wire, kw_only=True, frozen=True):
    """What needs a memory of earlier answers, or tools, must be left out. `store` is taken: nothing
    is stored, and the answer says so."""

    model: ModelName | None = None
    input: str | Annotated[list[InputItem], Meta(min_length=1)]
    instructions: str | None = None
    max_output_tokens: MaxTokens | None = None
    temperature: Temperature | None = None
    top_p: Share | None = None
    seed: Seed | None = None
    deadline_seconds: Deadline | None = None
    stream: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    tools: Nothing | None = None
    tool_choice: Literal["none", "auto"] | None = None
    parallel_tool_calls: bool | None = None
    include: Nothing | None = None
    truncation: Literal["disabled"] | None = None
    background: Literal[False] | None = None
    previous_response_id: None = None
    conversation: None = None
    prompt: None = None
    store: bool | None = None
    user: str | None = None
    metadata: dict[str, str] | None = None
    service_tier: Literal["auto", "default"] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None


class OutputText(msgspec.Struct, frozen=True):
    text: str
    type: Literal["output_text"] = "output_text"
    annotations: list[Any] = []
    logprobs: list[Any] = []


class ReasoningText(msgspec.Struct, frozen=True):
    text: str
    type: Literal["reasoning_text"] = "reasoning_text"


Status = Literal["in_progress", "completed", "incomplete"]


class OutputMessage(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    status: Status
    content: list[OutputText]


class OutputReasoning(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    type: Literal["reasoning"] = "reasoning"
    status: Status
    summary: list[Any] = []
    content: list[ReasoningText]


class ResponseUsage(msgspec.Struct, frozen=True, kw_only=True):
    """The details stand where they are known."""

    input_tokens: int
    input_tokens_details: PromptTokensDetails | UnsetType = UNSET
    output_tokens: int
    output_tokens_details: CompletionTokensDetails | UnsetType = UNSET
    total_tokens: int


class Incomplete(msgspec.Struct, frozen=True):
    reason: Literal["max_output_tokens"]


class Response(msgspec.Struct, frozen=True, kw_only=True):
    """The whole answer, and (in progress) the first events of a streamed one. `output`: at most the
    reasoning and a message."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: Status
    model: str
    output: list[Any]
    usage: ResponseUsage | None = None
    error: None = None
    incomplete_details: Incomplete | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    metadata: dict[str, str] = {}
    tools: list[Any] = []
    tool_choice: Literal["none"] = "none"
    parallel_tool_calls: bool = False
    truncation: Literal["disabled"] = "disabled"
    previous_response_id: None = None
    store: Literal[False] = False

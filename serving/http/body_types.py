"""The types of request and response bodies; `decode` turns a body into a request.

    request = decode(CHAT, body)          # ApiError 400 names the key that is wrong

An unknown key of a request is refused, because it asks for something. In messages, their parts and
calls, and tools it is ignored: clients of other providers send such keys back, and they cannot
change the answer. Null means that a key is not set. An integer may be written as 2.0. If a key is
left out, the model's sampling defaults apply (crossover.models.text.sampling_defaults), and
`max_tokens` is 16 for completions.
"""

from __future__ import annotations

import codecs
import gc
from typing import Annotated, Any, Generic, Literal, TypeVar

import msgspec
from msgspec import UNSET, Meta, UnsetType

from crossover.serving.http.api_errors import ApiError
from crossover.serving.http.request_words import explain_fault
from crossover.serving.sampling.grammar import MAX_CHARACTERS

T = TypeVar("T")
# Of a body: more values than a context has tokens, and more texts and keys than any list may have.
MAX_VALUES, MAX_STRINGS = 500_000, 100_000
_MAX_INT32 = 2**31 - 1
MAX_LOGPROBS = 128  # alternatives of a token
MAX_STOPS = 256  # stop texts of a request

# --- requests


class RequestStruct(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Base of every request: an unknown key is refused."""


class LenientStruct(msgspec.Struct, kw_only=True, frozen=True):
    """Base of messages, their parts and calls, and tools: an unknown key is ignored."""


def _about(text: str, **bounds: Any) -> Meta:
    """Return a key's description for /openapi.json, with its bounds as msgspec takes them."""
    return Meta(description=text, **bounds)


class StreamOptions(RequestStruct, kw_only=True, frozen=True):
    """`include_usage`: usage in the last chunk. `continuous_usage_stats` (vLLM): in every chunk."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: Literal[False] | None = None


class JsonSchemaFormat(RequestStruct, kw_only=True, frozen=True):
    name: str | None = None
    schema: dict[str, Any]
    strict: bool | None = None
    description: str | None = None


class ResponseFormat(RequestStruct, kw_only=True, frozen=True):
    """`schema`: a JSON schema without the object around it, as llama.cpp takes it."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None
    schema: dict[str, Any] | None = None


TokenId = Annotated[int, Meta(ge=0, le=_MAX_INT32)]
Probability = Annotated[float, Meta(ge=0, le=1)]
LogitBias = Annotated[float, Meta(ge=-100, le=100)]
LogprobCount = Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)]
StopText = Annotated[str, Meta(min_length=1, max_length=1024)]
TokenIds = Annotated[list[TokenId], Meta(min_length=1)]
NoEffect = Annotated[Any, _about("Accepted without effect.")]
NotOffered = Annotated[None, _about("Not supported: only null is accepted.")]
MaxTokens = Annotated[
    int, _about("Maximum output tokens; the context may leave fewer. -1: no other limit.", ge=-1)
]


class Generation(RequestStruct, kw_only=True, frozen=True):
    """The keys that chat and completions have in common."""

    model: Annotated[str, _about("Default: the only model that is served.")] | None = None
    max_tokens: MaxTokens | None = None
    max_completion_tokens: MaxTokens | None = None
    min_tokens: Annotated[int, Meta(ge=0)] | None = None
    temperature: Annotated[float, _about("0 is greedy.", ge=0)] | None = None
    top_p: Probability | None = None
    top_k: Annotated[int, _about("-1 or 0 keeps all.", ge=-1)] | None = None
    min_p: Probability | None = None
    seed: Annotated[int, _about("Negative, like the default: random.")] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: Annotated[float, Meta(gt=0)] | None = None
    logit_bias: Annotated[dict[int, LogitBias], Meta(max_length=1024)] | None = None
    n: Annotated[int, _about("Answers to each prompt.", ge=1, le=128)] | None = None
    stop: StopText | Annotated[list[StopText], Meta(max_length=MAX_STOPS)] | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=256)] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    grammar: Annotated[str, _about("A grammar in GBNF.", max_length=MAX_CHARACTERS)] | None = None
    deadline_seconds: Annotated[float, Meta(ge=0.001, le=86400)] | None = None
    cache_salt: (
        Annotated[
            str,
            _about(
                "A secret of the tenant: cached prefixes are reused only among requests with it.",
                min_length=1,
                max_length=256,
            ),
        ]
        | None
    ) = None
    # Clients send these keys, in many forms; they have no effect.
    user: NoEffect = None
    metadata: NoEffect = None
    store: NoEffect = None
    service_tier: NoEffect = None
    safety_identifier: NoEffect = None
    prompt_cache_key: NoEffect = None
    # Keys of OpenAI's API that are not supported (crossover.serving.http.request_words names
    # alternatives).
    audio: NotOffered = None
    function_call: NotOffered = None
    functions: NotOffered = None
    moderation: NotOffered = None
    prediction: NotOffered = None
    prompt_cache_options: NotOffered = None
    prompt_cache_retention: NotOffered = None
    suffix: NotOffered = None
    verbosity: NotOffered = None
    web_search_options: NotOffered = None


class CompletionRequest(Generation, kw_only=True, frozen=True):
    """POST /v1/completions. `prompt`: a text, texts, token ids, or lists of token ids."""

    prompt: str | Annotated[list[str | TokenId | TokenIds], Meta(min_length=1)]
    echo: Literal[False] | None = None
    logprobs: LogprobCount | None = None
    add_special_tokens: bool | None = None  # prepend the model's BOS token; default: true
    best_of: Literal[1] | None = None  # clients send it; it has no effect


class TextPart(LenientStruct, kw_only=True, frozen=True, tag="text", tag_field="type"):
    text: str | None


class InputTextPart(TextPart, kw_only=True, frozen=True, tag="input_text"):
    """A text part as OpenAI's Responses API writes it."""


class OutputTextPart(TextPart, kw_only=True, frozen=True, tag="output_text"):
    """A text part of an answer of OpenAI's Responses API."""


class RefusalPart(LenientStruct, kw_only=True, frozen=True, tag="refusal", tag_field="type"):
    refusal: str | None


class RedactedThinkingPart(LenientStruct, kw_only=True, frozen=True, tag="redacted_thinking"):
    """Encrypted reasoning of Anthropic's models. Ignored."""


class ReferencePart(LenientStruct, kw_only=True, frozen=True, tag="reference", tag_field="type"):
    """The sources of an answer, as Mistral writes them. Ignored."""


class ThinkingPart(LenientStruct, kw_only=True, frozen=True, tag="thinking", tag_field="type"):
    """A part of an earlier answer's reasoning, as Anthropic and Mistral write it."""

    thinking: str | list[TextPart | ReferencePart] | None


class ReasoningPart(LenientStruct, kw_only=True, frozen=True, tag="reasoning", tag_field="type"):
    """Reasoning of an earlier answer, as LangChain and others write it."""

    text: str | None = None
    reasoning: str | None = None


ContentPart = (
    TextPart
    | InputTextPart
    | OutputTextPart
    | RefusalPart
    | ThinkingPart
    | ReasoningPart
    | RedactedThinkingPart
    | ReferencePart
)


class PastFunction(LenientStruct, kw_only=True, frozen=True):
    """`arguments`: what a model wrote, as text; some servers return the object itself."""

    name: str
    arguments: str | dict[str, Any] | list[Any] | None = None


class PastCall(LenientStruct, kw_only=True, frozen=True):
    """A tool call in an earlier assistant message."""

    id: str | None = None
    function: PastFunction


class Message(LenientStruct, kw_only=True, frozen=True):
    """One message. UNSUPPORTED_MESSAGE_KEYS are refused if they have a value. The role `function`
    and the key `function_call` are OpenAI's before tools: a tool's result, and a call."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    reasoning_content: Any = None  # a text; the forms of other servers are ignored
    reasoning: Any = None
    tool_calls: list[PastCall] | None = None
    tool_call_id: str | None = None
    refusal: str | None = None
    audio: Any = None
    documents: Any = None
    files: Any = None
    function_call: PastFunction | None = None
    images: Any = None
    partial: Any = None
    prefix: Any = None
    videos: Any = None


# Keys of a message that would change the answer if this server supported them.
UNSUPPORTED_MESSAGE_KEYS = (
    "audio",
    "documents",
    "files",
    "images",
    "partial",
    "prefix",
    "videos",
)


class Function(LenientStruct, kw_only=True, frozen=True):
    """`parameters`: a JSON schema. `strict`: forced calls follow all of it, or the request is
    refused; without it they follow as much of it as the grammar supports."""

    name: Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_.:-]{1,128}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(LenientStruct, kw_only=True, frozen=True):
    type: Literal["function"] | None = "function"
    function: Function


class ChatRequest(Generation, kw_only=True, frozen=True):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Meta(min_length=1, max_length=4096)]
    logprobs: bool | None = None
    top_logprobs: LogprobCount | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: (
        Annotated[bool, _about("Continue the last message of the assistant.")] | None
    ) = None
    chat_template_kwargs: Annotated[dict[str, Any], Meta(max_length=256)] | None = None
    reasoning_effort: (
        Annotated[str, _about("For templates that read it. 'none' turns thinking off.")] | None
    ) = None
    tools: Annotated[list[Tool], Meta(max_length=128)] | None = None
    # A Tool names the function that must be called.
    tool_choice: Literal["none", "auto", "required"] | Tool | None = None
    parallel_tool_calls: bool | None = None
    modalities: list[Literal["text"]] | None = None


class TokenizeRequest(RequestStruct, kw_only=True, frozen=True):
    """POST /tokenize."""

    model: str | None = None
    prompt: str
    add_special_tokens: bool | None = None  # prepend the model's BOS token; default: true


class DetokenizeRequest(RequestStruct, kw_only=True, frozen=True):
    """POST /detokenize. Control tokens become no text."""

    model: str | None = None
    tokens: list[TokenId]


CHAT = msgspec.json.Decoder(ChatRequest)
COMPLETION = msgspec.json.Decoder(CompletionRequest)
TOKENIZE = msgspec.json.Decoder(TokenizeRequest)
DETOKENIZE = msgspec.json.Decoder(DetokenizeRequest)

encode = msgspec.json.Encoder().encode

# Keys whose values are passed on unchanged: in a JSON schema or in arguments, 2.0 may differ from
# 2.
_OPAQUE_KEYS = frozenset({"schema", "parameters", "arguments", "chat_template_kwargs"})


def decode(decoder: msgspec.json.Decoder[T], body: bytes) -> T:
    """Return the decoded body. Raises ApiError 400 that names the key."""
    body = body.removeprefix(codecs.BOM_UTF8)
    # The decoder holds the GIL, 20 ms for so many numbers or strings. Quotes in a text are escaped.
    if body.count(b",") > MAX_VALUES:
        text = f"The body has more than {MAX_VALUES} values, as commas between them show."
        raise ApiError(400, text, "too_many_values")
    if body.count(b'"') - body.count(b'\\"') > 2 * MAX_STRINGS:
        text = f"The body has more than {MAX_STRINGS} texts and keys, as quotes around them show."
        raise ApiError(400, text, "too_many_values")
    # Decoding makes no reference cycles, yet Python would start a collection for every few hundred
    # objects that it makes.
    gc.disable()
    try:
        try:
            return decoder.decode(body)
        except msgspec.ValidationError as problem:
            if "got `float`" not in str(problem):
                raise
        with_integers = _with_integers(msgspec.json.decode(body))  # 2.0 is accepted as 2
        return msgspec.convert(with_integers, decoder.type, str_keys=True)
    except msgspec.ValidationError as problem:
        path, sentence = explain_fault(str(problem), decoder.type)
        raise ApiError(400, f"{path or 'the body'}: {sentence}", param=path or None) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as problem:
        raise ApiError(400, f"The body is not JSON: {problem}.", "invalid_json") from None
    finally:
        gc.enable()


def _with_integers(value: Any) -> Any:
    """Return decoded JSON with 2 in place of 2.0, except under _OPAQUE_KEYS."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [_with_integers(item) for item in value]
    if isinstance(value, dict):
        return {
            key: item if key in _OPAQUE_KEYS else _with_integers(item)
            for key, item in value.items()
        }
    return value


# --- responses

Finish = Literal["stop", "length", "tool_calls"]
Choice = TypeVar("Choice")


class CalledFunction(msgspec.Struct, frozen=True, kw_only=True):
    """`arguments`: a JSON object as text, or in a chunk what this adds to it."""

    name: str | UnsetType = UNSET
    arguments: str


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """A tool call in an answer. `index`: in a chunk, which of the answer's calls this is; only the
    first chunk of a call has its id, type and name."""

    index: int | UnsetType = UNSET
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET
    function: CalledFunction


class Usage(msgspec.Struct, frozen=True):
    """Token counts. `prompt_tokens_details`: `cached_tokens`, those of the prompt that were found
    in the KV cache; None: not known."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: dict[str, int] | None = None


class ChatDelta(msgspec.Struct, frozen=True, kw_only=True):
    """A message, or what a chunk adds to it. `content`: null if there are only tool calls."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | None | UnsetType = UNSET
    refusal: None | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(msgspec.Struct, frozen=True):
    """A choice: a complete answer has `message`, a chunk has `delta`."""

    index: int
    message: ChatDelta | UnsetType = UNSET
    delta: ChatDelta | UnsetType = UNSET
    logprobs: dict[str, Any] | None = None
    finish_reason: Finish | None = None


class TextChoice(msgspec.Struct, frozen=True):
    index: int
    text: str
    logprobs: dict[str, Any] | None = None  # in OpenAI's format of the legacy completions API
    finish_reason: Finish | None = None


class Completion(msgspec.Struct, Generic[Choice], frozen=True):
    """A complete answer, or a chunk of a streamed one."""

    id: str
    object: str
    created: int
    model: str
    choices: list[Choice]
    usage: Usage | None | UnsetType = UNSET

"""What the HTTP interface takes and says, as types; `decode` makes a request of a body.

    request = decode(CHAT, body)          # ApiError 400 names the key that is wrong

An unknown key is refused where it asks for something. In what marks the past (messages, their
parts and calls, tools) it is ignored: other providers' clients send it back, and it cannot change
the answer. Null says nothing. A whole number may be written with a fraction of zero (2.0).
`temperature` 1.0 and `max_tokens` 16 (completions) are OpenAI's defaults where a key is left out.
"""

from __future__ import annotations

import codecs
import gc
from typing import Annotated, Any, Generic, Literal, TypeVar

import msgspec
from msgspec import UNSET, Meta, UnsetType

from serving.http.api_errors import ApiError
from serving.http.request_words import explain
from serving.sampling.grammar import MAX_CHARACTERS

T = TypeVar("T")
_INT31 = 2**31 - 1
_INT64 = 2**63

# --- requests


class Wire(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Base of every request: an unknown key is refused."""


class Past(msgspec.Struct, kw_only=True, frozen=True):
    """Base of what a client sends back, or describes: unknown keys are ignored."""


def _about(text: str, **bounds: Any) -> Meta:
    return Meta(description=text, **bounds)


class StreamOptions(Wire, kw_only=True, frozen=True):
    """`include_usage`: in a last chunk. `continuous_usage_stats` (vLLM): in every chunk."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: Literal[False] | None = None


class JsonSchemaFormat(Wire, kw_only=True, frozen=True):
    name: str
    schema: dict[str, Any]
    strict: bool | None = None
    description: str | None = None


class ResponseFormat(Wire, kw_only=True, frozen=True):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


TokenId = Annotated[int, Meta(ge=0, le=_INT31)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Share = Annotated[float, Meta(ge=0, le=1)]
Alternatives = Annotated[int, Meta(ge=0, le=20)]
Bias = Annotated[float, Meta(ge=-100, le=100)]
StopText = Annotated[str, Meta(min_length=1, max_length=1024)]
Text = Annotated[str, Meta(min_length=1)]
TokenIds = Annotated[list[TokenId], Meta(min_length=1)]
NotOffered = Annotated[None, _about("Not offered: null alone is taken.")]
MaxTokens = Annotated[int, _about("At most what the context leaves.", ge=1, le=_INT31)]


class Generation(Wire, kw_only=True, frozen=True):
    """What chat and completions have in common."""

    model: Annotated[str, _about("Left out: the only model that is served.")] | None = None
    max_tokens: MaxTokens | None = None
    max_completion_tokens: MaxTokens | None = None
    min_tokens: Annotated[int, Meta(ge=0, le=_INT31)] | None = None
    temperature: Annotated[float, _about("0 is greedy; left out: 1.0.", ge=0, le=2)] | None = None
    top_p: Share | None = None
    top_k: Annotated[int, _about("-1 or 0: all tokens.", ge=-1, le=_INT31)] | None = None
    min_p: Share | None = None
    seed: Annotated[int, _about("Left out: drawn.", ge=-_INT64, le=_INT64 - 1)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=100)] | None = None
    logit_bias: Annotated[dict[int, Bias], Meta(max_length=1024)] | None = None
    n: Annotated[int, _about("Answers to each prompt.", ge=1, le=128)] | None = None
    stop: StopText | Annotated[list[StopText], Meta(max_length=64)] | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=256)] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    grammar: Annotated[str, _about("GBNF.", max_length=MAX_CHARACTERS)] | None = None
    deadline_seconds: Annotated[float, Meta(ge=0.001, le=86400)] | None = None
    # Without effect: clients send them.
    user: str | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    service_tier: Literal["auto", "default"] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    # Keys of OpenAI's that are not offered (serving.http.request_words says what is instead).
    audio: NotOffered = None
    function_call: NotOffered = None
    functions: NotOffered = None
    moderation: NotOffered = None
    prediction: NotOffered = None
    prompt_cache_options: NotOffered = None
    prompt_cache_retention: NotOffered = None
    reasoning_effort: NotOffered = None
    suffix: NotOffered = None
    verbosity: NotOffered = None
    web_search_options: NotOffered = None


class CompletionRequest(Generation, kw_only=True, frozen=True):
    """POST /v1/completions. `prompt`: a text, texts, token ids, or lists of token ids."""

    prompt: Text | Annotated[list[Text | TokenId | TokenIds], Meta(min_length=1)]
    echo: Literal[False] | None = None
    logprobs: Alternatives | None = None
    add_special_tokens: bool | None = None  # begin with the model's BOS token; left out: do
    best_of: Literal[1] | None = None  # as clients send it: without effect


class TextPart(Past, kw_only=True, frozen=True, tag="text", tag_field="type"):
    text: str | None


class InputTextPart(TextPart, kw_only=True, frozen=True, tag="input_text"):
    """The same as OpenAI's Responses write it."""


class OutputTextPart(TextPart, kw_only=True, frozen=True, tag="output_text"):
    """The same in an answer of OpenAI's Responses."""


class RefusalPart(Past, kw_only=True, frozen=True, tag="refusal", tag_field="type"):
    refusal: str | None


class RedactedThinkingPart(Past, kw_only=True, frozen=True, tag="redacted_thinking"):
    """Reasoning of Anthropic's that nobody else can read. Ignored."""


class ReferencePart(Past, kw_only=True, frozen=True, tag="reference", tag_field="type"):
    """Where an answer of Mistral's has its words from. Ignored."""


class ThinkingPart(Past, kw_only=True, frozen=True, tag="thinking", tag_field="type"):
    """A part of an earlier answer's reasoning, as Anthropic and Mistral write it."""

    thinking: str | list[TextPart | ReferencePart] | None


class ReasoningPart(Past, kw_only=True, frozen=True, tag="reasoning", tag_field="type"):
    """The same as LangChain and others write it."""

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


class PastFunction(Past, kw_only=True, frozen=True):
    """`arguments`: whatever a model wrote, as text; some servers give out the object itself."""

    name: str
    arguments: str | dict[str, Any] | list[Any] | None = None


class PastCall(Past, kw_only=True, frozen=True):
    """A call in an assistant's turn."""

    id: str | None = None
    function: PastFunction


class Message(Past, kw_only=True, frozen=True):
    """One turn. The last keys would change the answer, and are refused with a value."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    reasoning_content: Any = None  # a text; other servers' forms of it are ignored
    reasoning: Any = None
    tool_calls: list[PastCall] | None = None
    tool_call_id: str | None = None
    refusal: str | None = None
    audio: Any = None
    documents: Any = None
    files: Any = None
    function_call: Any = None
    images: Any = None
    partial: Any = None
    prefix: Any = None
    videos: Any = None


# Keys of a message that ask for something which this server does not do.
ASKING = (
    "audio",
    "documents",
    "files",
    "function_call",
    "images",
    "partial",
    "prefix",
    "videos",
)


class Function(Past, kw_only=True, frozen=True):
    """`parameters`: a JSON schema. `strict`: calls that must come are held to all of it, else to
    what of it can be held to."""

    name: Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_.:-]{1,128}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Past, kw_only=True, frozen=True):
    type: Literal["function"] | None = "function"
    function: Function


class ChatRequest(Generation, kw_only=True, frozen=True):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Meta(min_length=1, max_length=4096)]
    logprobs: bool | None = None
    top_logprobs: Alternatives | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: (
        Annotated[bool, _about("Go on with the assistant's last turn.")] | None
    ) = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Annotated[list[Tool], Meta(max_length=128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | Tool | None = None  # its name counts
    parallel_tool_calls: bool | None = None
    modalities: list[Literal["text"]] | None = None


class TokenizeRequest(Wire, kw_only=True, frozen=True):
    """POST /tokenize."""

    model: str | None = None
    prompt: str
    add_special_tokens: bool | None = None  # begin with the model's BOS token; left out: do


class DetokenizeRequest(Wire, kw_only=True, frozen=True):
    """POST /detokenize. Control tokens have no text."""

    model: str | None = None
    tokens: list[TokenId]


CHAT = msgspec.json.Decoder(ChatRequest)
COMPLETION = msgspec.json.Decoder(CompletionRequest)
TOKENIZE = msgspec.json.Decoder(TokenizeRequest)
DETOKENIZE = msgspec.json.Decoder(DetokenizeRequest)

encode = msgspec.json.Encoder().encode

# Parts of a request that are somebody else's JSON: their numbers stay as they are.
_OPAQUE = frozenset({"schema", "parameters", "arguments", "chat_template_kwargs"})


def decode(decoder: msgspec.json.Decoder[T], body: bytes) -> T:
    """The body as its type. Raises ApiError 400 that names the key."""
    body = body.removeprefix(codecs.BOM_UTF8)
    gc.disable()  # else it walks through all there is for every 700 values; JSON has no cycles
    try:
        try:
            return decoder.decode(body)
        except msgspec.ValidationError as problem:
            if "got `float`" not in str(problem):
                raise
        loose = _with_whole_numbers(msgspec.json.decode(body))
        return msgspec.convert(loose, decoder.type, str_keys=True)
    except msgspec.ValidationError as problem:
        path, sentence = explain(str(problem), decoder.type)
        raise ApiError(400, f"{path or 'the body'}: {sentence}", param=path or None) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as problem:
        raise ApiError(400, f"The body is not JSON: {problem}.", "invalid_json") from None
    finally:
        gc.enable()


def _with_whole_numbers(value: Any) -> Any:
    """JSON with 2 for 2.0, but in what is opaque to this server."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [_with_whole_numbers(item) for item in value]
    if isinstance(value, dict):
        return {
            key: item if key in _OPAQUE else _with_whole_numbers(item)
            for key, item in value.items()
        }
    return value


# --- answers

Finish = Literal["stop", "length", "tool_calls"]
Choice = TypeVar("Choice")


class CalledFunction(msgspec.Struct, frozen=True, kw_only=True):
    """`arguments`: a JSON object as text."""

    name: str
    arguments: str


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """A call in an answer. `index`: in a chunk, which of the answer's calls this is."""

    index: int | UnsetType = UNSET
    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class Usage(msgspec.Struct, frozen=True):
    """`prompt_tokens_details`: cached_tokens, found in the KV cache, where that is known."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: dict[str, int] | None = None


class ChatDelta(msgspec.Struct, frozen=True, kw_only=True):
    """What a chunk adds to a message, or a whole one. `content`: null in one of calls alone."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | None | UnsetType = UNSET
    refusal: None | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(msgspec.Struct, frozen=True):
    """`message`: of a whole answer; `delta`: of a chunk."""

    index: int
    message: ChatDelta | UnsetType = UNSET
    delta: ChatDelta | UnsetType = UNSET
    logprobs: dict[str, Any] | None = None
    finish_reason: Finish | None = None


class TextChoice(msgspec.Struct, frozen=True):
    index: int
    text: str
    logprobs: dict[str, Any] | None = None  # in OpenAI's older shape
    finish_reason: Finish | None = None


class Completion(msgspec.Struct, Generic[Choice], frozen=True):
    """A whole answer, or a chunk of a streamed one."""

    id: str
    object: str
    created: int
    model: str
    choices: list[Choice]
    usage: Usage | None | UnsetType = UNSET

"""The wire, inwards: what a request may hold, and what a wrong one is told. (Outwards: serving/replies.py.)

The types here and there are the only description of the HTTP interface: requests are decoded into them (an unknown key is refused by
name, a value out of range names its path), answers are encoded from them, and serving/openapi.py makes the document from them.
Everything is a pure function of its arguments; nothing here knows a socket or an engine.

    request = decode(CHAT, body)

Defaults that differ between servers are stated at their fields: `temperature` 1.0 and `max_tokens` 16 (completions only) are OpenAI's.
"""

from __future__ import annotations

import math
import re
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import UNSET, Meta, UnsetType

from serving.errors import ServingError

MOST_CHOICES = 128
MOST_LOGPROBS = 20  # alternatives at one position
_INT64 = 2**63

T = TypeVar("T")


# --- errors -------------------------------------------------------------------------------------------------------------------


class ErrorDetail(msgspec.Struct, frozen=True):
    """OpenAI's error object. The last three are only there where they say something."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None
    n_prompt_tokens: int | UnsetType = UNSET
    n_ctx: int | UnsetType = UNSET


class ErrorBody(msgspec.Struct, frozen=True):
    """The body of every answer that is not a success, and of an `error` event inside a stream."""

    error: ErrorDetail


class ApiError(ServingError):
    """An answer other than 2xx. `headers` are added to it; `counts` are (n_prompt_tokens, n_ctx) of a context overflow."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        headers: dict[str, str] | None = None,
        counts: tuple[int, int] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.param = status, message, code, param
        self.headers, self.counts = headers or {}, counts

    @property
    def body(self) -> ErrorBody:
        tokens, context = self.counts or (UNSET, UNSET)
        return ErrorBody(ErrorDetail(self.message, error_type(self.status), self.param, self.code, tokens, context))


def error_type(status: int) -> str:
    """The `type` that goes with a status in an OpenAI error body."""
    if status == 401:
        return "authentication_error"
    if status == 429:
        return "rate_limit_error"
    if status == 503:
        return "service_unavailable_error"
    return "invalid_request_error" if status < 500 else "server_error"


def invalid(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """A 400: the request itself is wrong."""
    return ApiError(400, message, code=code, param=param)


def try_again(status: int, message: str, code: str, retry_after_seconds: float) -> ApiError:
    """A 429 or 503 with the time after which it is worth asking again, in whole seconds and (OpenAI's clients) in milliseconds."""
    seconds = max(0.0, retry_after_seconds)
    headers = {"Retry-After": str(max(1, math.ceil(seconds))), "Retry-After-Ms": str(max(1, math.ceil(seconds * 1000)))}
    return ApiError(status, message, code=code, headers=headers)


_PATH = re.compile(r"(?<![\w:/.])(?!/v1/)(?:~|\.{1,2})?(?:/[\w.@+%=-]+){2,}/?|\b[A-Za-z]:\\[^\s'\"]+")
_ADDRESS = re.compile(r"\b0x[0-9a-fA-F]{5,}\b|\b\d{1,3}(?:\.\d{1,3}){3}(?::\d+)?\b")


def scrubbed(message: str) -> str:
    """The message without file paths and addresses of the server's machine: what may be shown to a stranger."""
    return _ADDRESS.sub("<address>", _PATH.sub("<path>", message))


# --- requests -----------------------------------------------------------------------------------------------------------------


class Wire(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Base of every request: keys by name, unknown ones refused."""


class StreamOptions(Wire, kw_only=True, frozen=True):
    """`include_usage`: a last chunk with the usage. `continuous_usage_stats` (vLLM): the usage so far in every chunk."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: Literal[False] | None = None


class JsonSchemaFormat(Wire, kw_only=True, frozen=True):
    name: str
    schema: dict[str, Any] | None = None
    strict: bool | None = None
    description: str | None = None


class TextFormat(Wire, kw_only=True, frozen=True, tag="text", tag_field="type"):
    pass


class JsonObjectFormat(Wire, kw_only=True, frozen=True, tag="json_object", tag_field="type"):
    pass


class JsonFormat(Wire, kw_only=True, frozen=True, tag="json_schema", tag_field="type"):
    json_schema: JsonSchemaFormat


ResponseFormat = TextFormat | JsonObjectFormat | JsonFormat
Nothing = Annotated[list[Any], Meta(max_length=0, description="not supported: must be empty")]
TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Positive = Annotated[int, Meta(ge=1, le=2**31 - 1)]


class Generation(Wire, kw_only=True, frozen=True):
    """What both ways of asking for text have in common.

    user, metadata, store, service_tier, safety_identifier and prompt_cache_key are taken because clients send them, and only with values
    that cannot change the answer: they have no effect.
    """

    model: Annotated[str, Meta(description="As /v1/models names it; left out: the model that is served.")] | None = None
    max_tokens: Annotated[Positive, Meta(description="Left out: what the context leaves.")] | None = None
    max_completion_tokens: Annotated[Positive, Meta(description="OpenAI's newer name of max_tokens.")] | None = None
    min_tokens: Annotated[int, Meta(ge=0, le=2**31 - 1, description="No end before so many tokens.")] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2, description="0 is greedy. Left out: 1.0.")] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1, description="-1 or 0: all tokens.")] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    seed: Annotated[int, Meta(ge=-_INT64, le=_INT64 - 1, description="Left out: drawn by the server.")] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=100)] | None = None
    logit_bias: dict[int, Annotated[float, Meta(ge=-100, le=100)]] | None = None
    n: Annotated[int, Meta(ge=1, le=MOST_CHOICES, description="Answers to the same prompt, each with a seed of its own.")] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[TokenId] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    grammar: Annotated[str, Meta(description="GBNF, where the backend can.")] | None = None
    deadline_seconds: Annotated[float, Meta(ge=0.001, le=86400, description="From arrival; past it the answer is an error.")] | None = None
    user: str | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    service_tier: Literal["auto", "default"] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None


class CompletionRequest(Generation, kw_only=True, frozen=True):
    """POST /v1/completions. `prompt` is a text, several texts, token ids, or several lists of token ids."""

    prompt: str | list[str | TokenId | list[TokenId]]
    max_tokens: (
        Annotated[int, Meta(ge=0, le=2**31 - 1, description="Left out: 16. 0: no answer; with `echo` the prompt comes back.")] | None
    ) = None
    echo: Annotated[bool, Meta(description="The prompt before the answer; with `logprobs`, those of its tokens too.")] | None = None
    logprobs: Annotated[int, Meta(ge=0, le=MOST_LOGPROBS)] | None = None
    add_special_tokens: Annotated[bool, Meta(description="Begin a text with the model's BOS, where it has one; default true.")] | None = (
        None
    )
    best_of: (
        Annotated[int, Meta(ge=1, le=MOST_CHOICES, description="Answers to make, of which the `n` most probable per token come back.")]
        | None
    ) = None
    suffix: Annotated[Literal[""], Meta(description="not supported: must be empty")] | None = None


class TextPart(Wire, kw_only=True, frozen=True):
    type: Literal["text"]  # a field and not msgspec's tag: a tag of one struct alone may be left out
    text: str


class Message(Wire, kw_only=True, frozen=True):
    """One turn. Of an assistant's turn as clients send it back, the empty fields are taken too."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    refusal: None = None
    annotations: Nothing | None = None
    audio: None = None
    tool_calls: Nothing | None = None
    function_call: None = None


class ChatRequest(Generation, kw_only=True, frozen=True):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Meta(min_length=1)]
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MOST_LOGPROBS)] | None = None
    add_generation_prompt: (
        Annotated[bool, Meta(description="End the prompt with the head of the assistant's turn; default true.")] | None
    ) = None
    tools: Nothing | None = None
    functions: Nothing | None = None
    tool_choice: Literal["none", "auto"] | None = None
    function_call: Literal["none", "auto"] | None = None
    parallel_tool_calls: bool | None = None
    modalities: list[Literal["text"]] | None = None
    audio: None = None
    prediction: None = None
    reasoning_effort: None = None
    verbosity: None = None
    web_search_options: None = None


class TokenizeRequest(Wire, kw_only=True, frozen=True):
    """POST /tokenize: exactly one of `prompt` and `messages`."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Meta(min_length=1)] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None


class DetokenizeRequest(Wire, kw_only=True, frozen=True):
    """POST /detokenize."""

    model: str | None = None
    tokens: list[TokenId]


CHAT = msgspec.json.Decoder(ChatRequest)
COMPLETION = msgspec.json.Decoder(CompletionRequest)
TOKENIZE = msgspec.json.Decoder(TokenizeRequest)
DETOKENIZE = msgspec.json.Decoder(DetokenizeRequest)

# What a client may well send and this server cannot do: said in words, instead of "expected an array of length 0".
REFUSED: dict[str, str] = {
    "tools": "tools: function calling is not supported",
    "functions": "functions: function calling is not supported",
    "tool_choice": "tool_choice: function calling is not supported; only 'none' and 'auto' (without tools) are taken",
    "function_call": "function_call: function calling is not supported",
    "tool_calls": "tool_calls: function calling is not supported, also in a message",
    "suffix": "suffix: insertion is not supported",
    "modalities": "modalities: only text is supported",
    "audio": "audio is not supported; only text is",
    "prediction": "prediction: predicted outputs are not supported",
    "reasoning_effort": "reasoning_effort is not supported",
    "verbosity": "verbosity is not supported",
    "web_search_options": "web_search_options: this server opens no connections",
    "service_tier": "service_tier: only 'auto' and 'default' are there",
    "include_obfuscation": "include_obfuscation is not supported",
}
_LONGEST = 600  # characters of msgspec's sentences
_WHERE = re.compile(r"^(?P<what>.*?)(?: - at (?:`key` in )?`\$\.?(?P<path>.*)`)?$", re.DOTALL)
_UNKNOWN = re.compile(r"unknown field `(.*)`")
_MISSING = re.compile(r"missing required field `(.*)`")


def decode(decoder: msgspec.json.Decoder[T], body: bytes) -> T:
    """The body as its type. Raises ApiError 400 that names the key."""
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as problem:
        raise invalid(*_explained(str(problem))) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as problem:
        raise invalid(f"the body is not JSON: {problem}", code="invalid_json") from None
    except RecursionError:
        raise invalid("the body is nested too deeply", code="nested_too_deeply") from None


def _explained(message: str) -> tuple[str, str | None]:
    """msgspec's sentence -> (ours, the parameter's path as OpenAI writes it).

    The sentence may repeat a key or a value of the request, of any length: it is cut before a regular expression sees it, for what a
    stranger wrote can make one take hours. Its end, which says where, is kept.
    """
    if len(message) > _LONGEST:
        message = f"{message[: _LONGEST // 2]}...{message[-_LONGEST // 2 :]}"
    found = _WHERE.match(message)
    what, path = (found["what"], found["path"] or "") if found else (message, "")
    field = _UNKNOWN.search(what)
    if field:
        param = f"{path}.{field[1]}" if path else field[1]
        return f"unknown field {param!r}", param
    field = _MISSING.search(what)
    if field:
        param = f"{path}.{field[1]}" if path else field[1]
        return f"missing field {param!r}", param
    last = re.sub(r"(\[[^\]]*\])+$", "", path).rsplit(".", 1)[-1]
    if last in REFUSED:
        return REFUSED[last], path
    if last == "role":
        return f"{path}: system, developer, user and assistant are taken; {what[:1].lower()}{what[1:]}", path
    if last == "type" and ".content[" in path:
        return f"{path}: only parts of type 'text' are supported; {what[:1].lower()}{what[1:]}", path
    if not path:
        return f"the body: {what[:1].lower()}{what[1:]}", None
    return f"{path}: {what[:1].lower()}{what[1:]}", path

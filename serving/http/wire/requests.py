"""The requests of the HTTP interface, as types: what a body may hold. Unknown keys are refused.

    request = decode(CHAT, body)      # serving.http.wire.decoding

`temperature` 1.0 and `max_tokens` 16 (completions) are OpenAI's defaults where a key is left out.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

MOST_CHOICES = 128
MOST_TOOLS = 128
MOST_LOGPROBS = 20  # alternatives at one position
_INT31 = 2**31 - 1
_INT64 = 2**63


class Wire(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Base of every request."""


class StreamOptions(Wire, kw_only=True, frozen=True):
    """`include_usage`: in a last chunk. `continuous_usage_stats` (vLLM): in every chunk."""

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


def _about(text: str, **bounds: Any) -> Meta:
    return Meta(description=text, **bounds)


TokenId = Annotated[int, Meta(ge=0, le=_INT31)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Share = Annotated[float, Meta(ge=0, le=1)]
Alternatives = Annotated[int, Meta(ge=0, le=MOST_LOGPROBS)]
Nothing = Annotated[list[Any], _about("not supported: must be empty", max_length=0)]
Empty = Annotated[Literal[""], _about("not supported: must be empty")]
Bias = Annotated[float, Meta(ge=-100, le=100)]

ModelName = Annotated[str, _about("As /v1/models names it; left out: the model that is served.")]
MaxTokens = Annotated[
    int,
    _about(
        "More than the context leaves is cut. -1: all that it leaves, as where it is left out "
        "(completions: 16). 0: no answer; with `echo` the prompt comes back.",
        ge=-1,
        le=_INT31,
    ),
]
NewMaxTokens = Annotated[int, _about("OpenAI's newer name of max_tokens.", ge=-1, le=_INT31)]
MinTokens = Annotated[int, _about("No end before so many tokens.", ge=0, le=_INT31)]
Temperature = Annotated[float, _about("0 is greedy. Left out: 1.0.", ge=0, le=2)]
TopK = Annotated[int, _about("-1 or 0: all tokens.", ge=-1, le=_INT31)]
Seed = Annotated[int, _about("Left out: drawn by the server.", ge=-_INT64, le=_INT64 - 1)]
Repetition = Annotated[float, Meta(ge=0.01, le=100)]
Choices = Annotated[
    int, _about("Answers to the same prompt, each with its own seed.", ge=1, le=MOST_CHOICES)
]
BestOf = Annotated[
    int,
    _about("Answers to make; the `n` most probable per token come back.", ge=1, le=MOST_CHOICES),
]
Deadline = Annotated[
    float, _about("From arrival; past it the answer is an error.", ge=0.001, le=86400)
]
Grammar = Annotated[str, _about("GBNF, where the backend can.")]
ContinueFinal = Annotated[
    bool,
    _about(
        "Go on with the last message, which is the assistant's. Left out: where it has text and "
        "add_generation_prompt is left out too."
    ),
]
TemplateVariables = Annotated[
    dict[str, Any], _about("Variables of the model's chat template, such as enable_thinking.")
]
Effort = Annotated[
    Literal["none", "minimal", "low", "medium", "high", "xhigh"],
    _about("Where the model's chat template knows reasoning_effort or enable_thinking."),
]
RepeatPenalty = Annotated[float, _about("llama.cpp's name of repetition_penalty.", ge=0.01, le=100)]
CachePrompt = Annotated[bool, _about("No effect: an answer does not depend on what is reused.")]
CacheSalt = Annotated[
    str,
    _about(
        "Only requests with the same one (and key) share prefixes.", min_length=1, max_length=256
    ),
]
SlotId = Annotated[int, _about("No effect: a prompt gets the slot that holds most of it.", ge=-1)]
SkipSpecial = Annotated[bool, _about("false: control tokens as their text; default true.")]
Echo = Annotated[
    bool, _about("The prompt before the answer; with `logprobs`, those of its tokens too.")
]
SpecialTokens = Annotated[bool, _about("Begin a text with the model's BOS token; default true.")]
AssistantHead = Annotated[
    bool, _about("End the prompt with the head of the assistant's turn; default true.")
]


class Generation(Wire, kw_only=True, frozen=True):
    """What chat and completions have in common. The last eight keys have no effect."""

    model: ModelName | None = None
    max_tokens: MaxTokens | None = None
    max_completion_tokens: NewMaxTokens | None = None
    min_tokens: MinTokens | None = None
    temperature: Temperature | None = None
    top_p: Share | None = None
    top_k: TopK | None = None
    min_p: Share | None = None
    seed: Seed | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Repetition | None = None
    repeat_penalty: RepeatPenalty | None = None
    logit_bias: dict[int, Bias] | None = None
    n: Choices | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[TokenId] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    grammar: Grammar | None = None
    deadline_seconds: Deadline | None = None
    user: str | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    service_tier: Literal["auto", "default"] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    cache_salt: CacheSalt | None = None
    cache_prompt: CachePrompt | None = None
    id_slot: SlotId | None = None


class CompletionRequest(Generation, kw_only=True, frozen=True):
    """POST /v1/completions. `prompt`: a text, texts, token ids, or lists of token ids."""

    prompt: str | list[str | TokenId | list[TokenId]]
    echo: Echo | None = None
    logprobs: Alternatives | None = None
    add_special_tokens: SpecialTokens | None = None
    best_of: BestOf | None = None
    suffix: Empty | None = None


class TextPart(Wire, kw_only=True, frozen=True):
    type: Literal["text"]  # not msgspec's tag, which may be left out where there is one struct
    text: str


class CalledFunction(Wire, kw_only=True, frozen=True):
    """`arguments`: a JSON object as text."""

    name: str
    arguments: str


class CallMade(Wire, kw_only=True, frozen=True):
    """A call in an assistant's turn, as it came in an answer."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None


class Message(Wire, kw_only=True, frozen=True):
    """One turn; the empty fields of an assistant's turn are taken as clients send them back."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: None = None
    annotations: Nothing | None = None
    audio: None = None
    tool_calls: list[CallMade] | None = None
    tool_call_id: str | None = None
    function_call: None = None
    provider_specific_fields: dict[str, Any] | None = None  # LiteLLM's, in what it sends back


class Function(Wire, kw_only=True, frozen=True):
    """`parameters`: a JSON schema. `strict` has no effect: calls that must come always keep it."""

    name: Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_.:-]{1,128}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Wire, kw_only=True, frozen=True):
    type: Literal["function"]
    function: Function


class FunctionName(Wire, kw_only=True, frozen=True):
    name: str


class Named(Wire, kw_only=True, frozen=True):
    """The function that must be called."""

    type: Literal["function"]
    function: FunctionName


Tools = Annotated[list[Tool], Meta(max_length=MOST_TOOLS)]
ToolChoice = Literal["none", "auto", "required"] | Named


class ChatRequest(Generation, kw_only=True, frozen=True):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Meta(min_length=1)]
    logprobs: bool | None = None
    top_logprobs: Alternatives | None = None
    add_generation_prompt: AssistantHead | None = None
    continue_final_message: ContinueFinal | None = None
    chat_template_kwargs: TemplateVariables | None = None
    reasoning_effort: Effort | None = None
    tools: Tools | None = None
    functions: Nothing | None = None
    tool_choice: ToolChoice | None = None
    function_call: Literal["none", "auto"] | None = None
    parallel_tool_calls: bool | None = None
    modalities: list[Literal["text"]] | None = None
    audio: None = None
    prediction: None = None
    verbosity: None = None
    web_search_options: None = None


class TokenizeRequest(Wire, kw_only=True, frozen=True):
    """POST /tokenize: exactly one of `prompt` and `messages`. `return_token_strs`: each token as
    the vocabulary writes it too."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Meta(min_length=1)] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    add_generation_prompt: AssistantHead | None = None
    continue_final_message: ContinueFinal | None = None
    chat_template_kwargs: TemplateVariables | None = None
    reasoning_effort: Effort | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None


class DetokenizeRequest(Wire, kw_only=True, frozen=True):
    """POST /detokenize."""

    model: str | None = None
    tokens: list[TokenId]
    skip_special_tokens: SkipSpecial | None = None

"""POST /v1/chat/completions: renders the chat as a prompt and answers with text and tool calls."""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import UNSET

from crossover.models.errors import BadChat
from crossover.models.text.template_process import AsWritten
from crossover.serving.engine.ipc_messages import TokenDetail
from crossover.serving.http.answer_parts import Part, call_openings, format_of_output, thought_marks
from crossover.serving.http.api_errors import invalid_parameter
from crossover.serving.http.body_types import (
    CHAT,
    UNSUPPORTED_MESSAGE_KEYS,
    CalledFunction,
    ChatChoice,
    ChatDelta,
    ChatRequest,
    ContentPart,
    Finish,
    Message,
    PastCall,
    ReasoningPart,
    RefusalPart,
    TextPart,
    ThinkingPart,
    ToolCall,
    encode,
)
from crossover.serving.http.generation_response import (
    LOWEST_LOGPROB,
    ROLE,
    Choice,
    GenerationResponse,
    Prompt,
)
from crossover.serving.http.http_request import Request
from crossover.serving.http.request_validation import check_salt, token_limit, validate
from crossover.serving.http.tool_calls import (
    CallChoice,
    choose_call_format,
    offered_tools,
    show_tools,
)
from crossover.serving.registry.served_model import INLINE_CHARACTERS, ServedModel, in_text_thread

logger = logging.getLogger("crossover.http")

# Marks the end of the last message's content in a rendered prompt. Letters and digits alone, which
# no template changes.
_END_MARKER = "Q8crossover3E"
# Roles of messages that templates know under another name.
_TEMPLATE_ROLES = {"developer": "system", "function": "tool"}
# Variables of chat templates that the request sets in other ways than by chat_template_kwargs.
_RESERVED_VARIABLES = frozenset(
    {"messages", "add_generation_prompt", "continue_final_message", "tools"}
)


async def chat_completions(request: Request) -> ChatResponse:
    body = await request.read(CHAT)
    check_salt(body, request.requires_cache_salt)
    if body.stream:
        request.keep_alive()
    model = await request.acquire_model(body.model, body.deadline_seconds)
    limits = model.engine_limits()
    template = template_of(model, body)
    has_tools = body.tools or body.tool_choice
    calls = choose_call_format(body, template) if has_tools else CallChoice(None, None)
    if body.top_logprobs and not body.logprobs:
        raise invalid_parameter("top_logprobs", "This needs logprobs: true.")
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    generation = validate(body, limits, model.sampling_defaults, logprobs, calls.forced_calls)
    model.supervisor.requests.check_room()  # before a long prompt is tokenized
    is_constrained = generation.sampling.is_constrained
    is_long = request.body_bytes > INLINE_CHARACTERS
    text = await render_prompt(model, body, is_constrained, is_long)
    ids = await model.tokens(text, "messages", limits)
    prompt = Prompt(ids, token_limit(body, len(ids), limits))
    schemas = {tool.function.name: tool.function.parameters or {} for tool in offered_tools(body)}
    output_format = format_of_output(template, text, calls.call_format, schemas, is_constrained)
    if output_format is not None:
        at_most_one_call = body.parallel_tool_calls is False
        output_format = output_format._replace(at_most_one_call=at_most_one_call)
        generation = msgspec.structs.replace(generation, thoughts=thought_marks(output_format))
        if output_format.is_call_or_content and generation.sampling.json_schema is not None:
            # The model either calls a function or answers by the schema.
            sampling = msgspec.structs.replace(
                generation.sampling, call_openings=call_openings(output_format)
            )
            generation = msgspec.structs.replace(generation, sampling=sampling)
    return ChatResponse(request, body, generation, [prompt], output_format)


# --- the prompt


def template_of(model: ServedModel, body: ChatRequest) -> str:
    """Return the text of the chat template for the request. Raises ApiError 400."""
    try:
        return model.tokenizer.template_for(bool(offered_tools(body)))
    except BadChat as problem:
        raise invalid_parameter("messages", str(problem)) from None


async def render_prompt(
    model: ServedModel, body: ChatRequest, is_constrained: bool, is_long: bool
) -> str:
    """Return the chat as text, rendered with the model's template.

    `is_constrained`: a grammar constrains the answer. `is_long`: the work that this process does
    for it must not keep the event loop from others. Raises ApiError 400.
    """
    if is_long:
        turns, variables = await in_text_thread(turns_of, model, body, is_constrained)
    else:
        turns, variables = turns_of(model, body, is_constrained)
    add_generation_prompt = body.add_generation_prompt is not False
    try:
        prompt = await model.render_chat(turns, add_generation_prompt, variables, is_long)
        model.tokenizer.check_shown(turns, bool(variables["tools"]))
    except BadChat as problem:
        raise invalid_parameter("messages", str(problem)) from None
    if not body.continue_final_message:
        return prompt
    prompt, marker, _ = prompt.rpartition(_END_MARKER)
    if not marker:
        text = "The model's chat template does not show the end of the last message."
        raise invalid_parameter("continue_final_message", text)
    return prompt


def turns_of(
    model: ServedModel, body: ChatRequest, is_constrained: bool
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return the messages as templates take them, and the template's other variables. Raises
    ApiError 400."""
    template = template_of(model, body)
    variables = dict(body.chat_template_kwargs or {})
    if reserved := sorted(_RESERVED_VARIABLES & variables.keys()):
        text = "The request has a key of its own for this."
        raise invalid_parameter(f"chat_template_kwargs.{reserved[0]}", text)
    _set_reasoning_effort(body, template, variables)
    if is_constrained and "enable_thinking" in template:
        variables.setdefault("enable_thinking", False)  # the grammar leaves no room to reason
    turns: list[dict[str, Any]] = []
    called_functions: dict[str | None, str] = {}  # names by the id of the call
    for index, message in enumerate(body.messages):
        turn = _template_message(message, index)
        # A tool's result without a name gets that of the function that was called.
        name = message.name or called_functions.get(message.tool_call_id)
        if name is not None:
            turn["name"] = name
        for call in turn.get("tool_calls", ()):
            called_functions[call["id"]] = call["function"]["name"]
        turns.append(turn)
    if body.continue_final_message:
        _mark_end(body, turns)
    variables["tools"] = None
    if body.tools or called_functions:
        tools = offered_tools(body)
        turns, variables["tools"] = show_tools(turns, tools, model.tokenizer, template)
    return turns, variables


def _set_reasoning_effort(body: ChatRequest, template: str, variables: dict[str, Any]) -> None:
    """Give the template the request's `reasoning_effort`, if it reads that; "none" turns thinking
    off. A template that reads neither shows no difference, and the request is answered without."""
    effort = body.reasoning_effort
    if effort is None:
        return
    if effort == "none" and "enable_thinking" in template:
        variables.setdefault("enable_thinking", False)
    elif "reasoning_effort" in template:
        variables.setdefault("reasoning_effort", effort)
    elif "enable_thinking" in template:
        variables.setdefault("enable_thinking", True)
    else:
        _warn_of_ignored_effort()


@functools.cache
def _warn_of_ignored_effort() -> None:
    """Log once per server that a request's `reasoning_effort` had no effect."""
    logger.warning(
        "A request has reasoning_effort, which the model's chat template does not read: it has no "
        "effect. This is said once."
    )


def _template_message(message: Message, index: int) -> dict[str, Any]:
    """Return a message in the form that templates take: with their roles, reasoning under
    `reasoning_content`, and the arguments of calls as objects.

    Raises ApiError 400 for an unsupported key that would change the answer.
    """
    for key in UNSUPPORTED_MESSAGE_KEYS:
        if getattr(message, key):
            text = "This server does not support this. Send text and tool calls only."
            raise invalid_parameter(f"messages[{index}].{key}", text)
    if message.content is None and message.role not in ("assistant", "tool", "function"):
        raise invalid_parameter(f"messages[{index}].content", "This is null. Send a text.")
    content: Any = message.content
    if isinstance(content, list):
        text_parts = (_text_part(part) for part in content)
        content = [part for part in text_parts if part is not None]
    if message.refusal and not content:
        content = message.refusal
    role = _TEMPLATE_ROLES.get(message.role, message.role)
    turn: dict[str, Any] = {"role": role, "content": content or ""}
    if reasoning := _reasoning_of(message):
        turn["reasoning_content"] = reasoning
    if calls := _calls_of(message):
        turn["tool_calls"] = calls
    if message.tool_call_id is not None:
        turn["tool_call_id"] = message.tool_call_id
    return turn


def _text_part(part: ContentPart) -> dict[str, str] | None:
    """Return a part of the visible content as templates take it; None: it is reasoning."""
    if isinstance(part, TextPart):
        return {"type": "text", "text": part.text or ""}
    if isinstance(part, RefusalPart):
        return {"type": "text", "text": part.refusal or ""}
    return None


def _reasoning_of(message: Message) -> str:
    """Return the reasoning of an earlier answer; "": it has none."""
    # Some servers return the same text under both keys, so only one of them is taken.
    for text in (message.reasoning_content, message.reasoning):
        if text and isinstance(text, str):
            return text
    texts: list[Any] = []
    for part in message.content if isinstance(message.content, list) else ():
        if isinstance(part, ReasoningPart):
            texts.append(part.reasoning or part.text)
        elif isinstance(part, ThinkingPart) and isinstance(part.thinking, list):
            texts += [item.text for item in part.thinking if isinstance(item, TextPart)]
        elif isinstance(part, ThinkingPart):
            texts.append(part.thinking)
    return "\n".join(text for text in texts if text)


def _mark_end(body: ChatRequest, turns: list[dict[str, Any]]) -> None:
    """Append _END_MARKER to the last message, which the answer continues. Raises ApiError 400."""
    key = "continue_final_message"
    if body.add_generation_prompt is not False:
        raise invalid_parameter(key, "This needs add_generation_prompt: false.")
    last_turn = turns[-1]
    content = last_turn["content"]
    if last_turn["role"] != "assistant" or not content or "tool_calls" in last_turn:
        raise invalid_parameter(key, "The last message must be a text message of the assistant.")
    if isinstance(content, str):
        last_turn["content"] = content + _END_MARKER
    else:
        content[-1]["text"] += _END_MARKER


def _calls_of(message: Message) -> list[dict[str, Any]]:
    """Return the calls of an earlier message in the form that templates take."""
    past_calls = list(message.tool_calls or ())
    if message.function_call is not None and not past_calls:
        past_calls = [PastCall(function=message.function_call)]
    calls = []
    for call in past_calls:
        arguments = _arguments_object(call.function.arguments)
        function = {"name": call.function.name, "arguments": arguments}
        calls.append({"id": call.id, "type": "function", "function": function})
    return calls


def _arguments_object(arguments: str | dict[str, Any] | list[Any] | None) -> Any:
    """Return the arguments of a call as a dict. Arguments that are not a JSON object are rendered
    unchanged, because a model wrote them."""
    if isinstance(arguments, dict):
        return arguments
    text = arguments if isinstance(arguments, str) else encode(arguments or {}).decode()
    try:
        return msgspec.json.decode(text or "{}", type=dict)
    except (msgspec.DecodeError, RecursionError):
        return AsWritten(text)


# --- the answer


class ChatResponse(GenerationResponse):
    id_prefix = "chatcmpl"
    object_type = "chat.completion"
    chunk_type = "chat.completion.chunk"
    opening_parts = (ROLE,)

    def chunk_choice(self, choice: Choice, part: Part) -> ChatChoice:
        delta = ChatDelta()
        finish: Finish | None = None
        if part.kind == "content":
            delta = ChatDelta(content=part.text)
        elif part.kind == "role":
            delta = ChatDelta(role="assistant", content="")
        elif part.kind == "reasoning":
            delta = ChatDelta(reasoning_content=part.text)
        elif part.kind == "arguments":
            function = CalledFunction(arguments=part.text)
            delta = ChatDelta(tool_calls=[ToolCall(index=choice.call_count - 1, function=function)])
        elif part.call is not None:
            call = msgspec.structs.replace(part.call, index=choice.call_count)
            delta = ChatDelta(tool_calls=[call])
            choice.call_count += 1
        else:
            finish = _finish_of(choice, choice.call_count > 0)
        logprobs = self.take_logprobs(choice) if choice.details else None
        return ChatChoice(choice.index, UNSET, delta, logprobs, finish)

    def complete_choice(self, choice: Choice, parts: Sequence[Part]) -> ChatChoice:
        content = "".join(part.text for part in parts if part.kind == "content")
        reasoning = "".join(part.text for part in parts if part.kind == "reasoning")
        calls = [part.call for part in parts if part.call is not None]
        message = ChatDelta(
            role="assistant",
            content=content if content or not calls else None,
            refusal=None,
            reasoning_content=reasoning or UNSET,
            tool_calls=calls or UNSET,
        )
        finish = _finish_of(choice, bool(calls))
        return ChatChoice(choice.index, message, UNSET, self.take_logprobs(choice), finish)

    def format_logprobs(self, details: Sequence[TokenDetail]) -> dict[str, Any]:
        content = []
        for detail in details:
            alternatives = zip(detail.top_ids, detail.top_values, strict=True)
            top_logprobs = [self._logprob_entry(token, value) for token, value in alternatives]
            entry = self._logprob_entry(detail.token, detail.logprob)
            content.append(entry | {"top_logprobs": top_logprobs})
        return {"content": content, "refusal": None}

    def _logprob_entry(self, token: int, logprob: float) -> dict[str, Any]:
        """Return one log-probability; a control token has no text, so its id stands for it."""
        data = self.model.bytes_of(token)
        text = data.decode("utf-8", "replace") if data else f"token_id:{token}"
        value = max(logprob, LOWEST_LOGPROB)
        return {"token": text, "logprob": value, "bytes": list(data) or None}


def _finish_of(choice: Choice, has_calls: bool) -> Finish | None:
    """Return the finish reason as OpenAI gives it for a chat: an answer with calls that ended by
    itself ends with "tool_calls"."""
    return "tool_calls" if has_calls and choice.finish == "stop" else choice.finish

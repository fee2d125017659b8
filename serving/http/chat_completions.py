"""POST /v1/chat/completions: a chat becomes a prompt, its answer text, reasoning and tool calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import UNSET

from crossover.models.chat_template import AsWritten
from crossover.models.errors import BadChat
from crossover.serving.engine.ipc_messages import TokenDetail
from crossover.serving.http.answer_parts import Part, format_of_output
from crossover.serving.http.api_errors import refused
from crossover.serving.http.body_types import (
    ASKING,
    CHAT,
    ChatChoice,
    ChatDelta,
    ChatRequest,
    ContentPart,
    Message,
    ReasoningPart,
    RefusalPart,
    TextPart,
    ThinkingPart,
    encode,
)
from crossover.serving.http.generation_response import (
    LOWEST_LOGPROB,
    ROLE,
    Choice,
    GenerationResponse,
)
from crossover.serving.http.http_request import Request
from crossover.serving.http.request_validation import token_limit, validate
from crossover.serving.http.tool_calls import format_of, offered_tools, show_tools
from crossover.serving.registry.served_model import INLINE_CHARACTERS, ServedModel, in_text_thread

_END_OF_TURN = "Q8crossover3E"  # marks where the last message's content ends in a prompt
# Variables of chat templates that a request sets by keys of its own.
_REQUEST_VARIABLES = frozenset(
    {"messages", "add_generation_prompt", "continue_final_message", "tools"}
)


async def chat_completions(request: Request) -> ChatResponse:
    body = await request.read(CHAT)
    model = await request.acquire_model(body.model, body.deadline_seconds)
    limits = model.engine_limits()
    template = template_of(model, body)
    has_tools = body.tools or body.tool_choice
    call_format, forced_calls = format_of(body, template) if has_tools else (None, None)
    if body.top_logprobs and not body.logprobs:
        raise refused("top_logprobs", "This needs logprobs: true.")
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    generation = validate(body, limits, logprobs, forced_calls)
    model.supervisor.requests.check_room()  # before a long prompt is tokenised
    is_free = not generation.sampling.is_constrained
    if request.body_bytes <= INLINE_CHARACTERS:
        prompt = render_prompt(model, body, is_free)
    else:
        prompt = await in_text_thread(render_prompt, model, body, is_free)
    ids = await model.tokens(prompt, "messages", limits, parse_special=True)
    prompts = [(ids, token_limit(body, len(ids), limits))]
    parameters = {
        tool.function.name: tool.function.parameters or {} for tool in offered_tools(body)
    }
    output_format = format_of_output(template, prompt, call_format, parameters, is_free)
    return ChatResponse(request, body, generation, prompts, output_format)


# --- the prompt


def template_of(model: ServedModel, body: ChatRequest) -> str:
    """Return the text of the chat template for the request. Raises ApiError 400."""
    try:
        return model.tokenizer.template_for(bool(offered_tools(body)))
    except BadChat as problem:
        raise refused("messages", str(problem)) from None


def render_prompt(model: ServedModel, body: ChatRequest, is_free: bool) -> str:
    """Render the chat with the model's template: `developer` becomes `system`, and the arguments of
    calls become objects. `is_free`: no grammar constrains the answer. Raises ApiError 400."""
    template = template_of(model, body)
    variables = dict(body.chat_template_kwargs or {})
    for name in sorted(_REQUEST_VARIABLES & variables.keys()):
        text = "The request has a key of its own for this."
        raise refused(f"chat_template_kwargs.{name}", text)
    if not is_free and "enable_thinking" in template:
        variables.setdefault("enable_thinking", False)  # the grammar leaves no room to reason
    turns: list[dict[str, Any]] = []
    called_functions: dict[str | None, str] = {}  # by the id of the call
    for index, message in enumerate(body.messages):
        turn = _turn_of(message, index)
        speaker = message.name or called_functions.get(message.tool_call_id)
        if speaker is not None:
            turn["name"] = speaker
        for call in turn.get("tool_calls", ()):
            called_functions[call["id"]] = call["function"]["name"]
        turns.append(turn)
    if body.continue_final_message:
        _mark_end(body, turns)
    variables["tools"] = None
    if body.tools or called_functions:
        tokenizer = model.tokenizer
        turns, variables["tools"] = show_tools(turns, offered_tools(body), tokenizer, template)
    add_generation_prompt = body.add_generation_prompt is not False
    try:  # a template is an untrusted program
        prompt = model.tokenizer.render_chat(turns, add_generation_prompt, variables=variables)
        model.tokenizer.check_shown(turns, bool(variables["tools"]))
    except BadChat as problem:
        raise refused("messages", str(problem)) from None
    if not body.continue_final_message:
        return prompt
    prompt, mark, _ = prompt.rpartition(_END_OF_TURN)
    if not mark:
        text = "The model's chat template does not show the end of the last message."
        raise refused("continue_final_message", text)
    return prompt


def _turn_of(message: Message, index: int) -> dict[str, Any]:
    """Return a message in the form that templates take. Raises ApiError 400 for an unsupported key
    that would change the answer."""
    for key in ASKING:
        if getattr(message, key):
            text = "This server does not support this. Send text and tool calls only."
            raise refused(f"messages[{index}].{key}", text)
    content: Any = message.content
    # The same text may be under two keys, because some servers return both.
    reasoning_keys = [message.reasoning_content, message.reasoning]
    thoughts: list[str] = [text for text in reasoning_keys if _is_text(text)][:1]
    has_reasoning_key = bool(thoughts)
    if content is None and message.role not in ("assistant", "tool"):
        raise refused(f"messages[{index}].content", "This is null. Send a text.")
    if isinstance(content, list):
        parts = []
        for part in content:
            if isinstance(part, TextPart):
                parts.append({"type": "text", "text": part.text or ""})
            elif isinstance(part, RefusalPart):
                parts.append({"type": "text", "text": part.refusal or ""})
            elif not has_reasoning_key:
                thoughts += _thoughts_of(part)
        content = parts
    if message.refusal and not content:
        content = message.refusal
    role = "system" if message.role == "developer" else message.role
    turn: dict[str, Any] = {"role": role, "content": content or ""}
    if thoughts:
        turn["reasoning_content"] = "\n".join(thoughts)
    if message.tool_calls:
        turn["tool_calls"] = _calls_of(message)
    if message.tool_call_id is not None:
        turn["tool_call_id"] = message.tool_call_id
    return turn


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and value != ""


def _thoughts_of(part: ContentPart) -> list[str]:
    """Return the texts of a part that contains reasoning."""
    if isinstance(part, ReasoningPart):
        texts: list[Any] = [part.reasoning or part.text]
    elif not isinstance(part, ThinkingPart):
        texts = []
    elif isinstance(part.thinking, list):
        texts = [item.text for item in part.thinking if isinstance(item, TextPart)]
    else:
        texts = [part.thinking]
    return [text for text in texts if _is_text(text)]


def _mark_end(body: ChatRequest, turns: list[dict[str, Any]]) -> None:
    """Mark the end of the last message's content, where the answer continues. Raises ApiError
    400."""
    key = "continue_final_message"
    if body.add_generation_prompt is not False:
        raise refused(key, "This needs add_generation_prompt: false.")
    last, content = turns[-1], turns[-1]["content"]
    if last["role"] != "assistant" or not content or "tool_calls" in last:
        raise refused(key, "The last message must be a text message of the assistant.")
    if isinstance(content, str):
        last["content"] = content + _END_OF_TURN
    else:
        content[-1]["text"] += _END_OF_TURN


def _calls_of(message: Message) -> list[dict[str, Any]]:
    """Return the calls of an earlier message in the form that templates take. Arguments that are
    not a JSON object are rendered unchanged, because a model wrote them."""
    calls = []
    for call in message.tool_calls or ():
        arguments: Any = call.function.arguments
        if not isinstance(arguments, dict):
            text = arguments if isinstance(arguments, str) else encode(arguments or {}).decode()
            try:
                arguments = msgspec.json.decode(text or "{}", type=dict)
            except (msgspec.DecodeError, RecursionError):
                arguments = AsWritten(text)
        function = {"name": call.function.name, "arguments": arguments}
        calls.append({"id": call.id, "type": "function", "function": function})
    return calls


# --- the answer


class ChatResponse(GenerationResponse):
    id_prefix = "chatcmpl"
    object_type = "chat.completion"
    chunk_type = "chat.completion.chunk"
    opening_parts = (ROLE,)

    def chunk_choice(self, choice: Choice, part: Part) -> ChatChoice:
        delta, finish = ChatDelta(), None
        if part.kind == "content":
            delta = ChatDelta(content=part.text)
        elif part.kind == "role":
            delta = ChatDelta(role="assistant", content="")
        elif part.kind == "reasoning":
            delta = ChatDelta(reasoning_content=part.text)
        elif part.call is not None:
            delta = ChatDelta(
                tool_calls=[msgspec.structs.replace(part.call, index=choice.call_count)]
            )
            choice.call_count += 1
        else:
            finish = (
                "tool_calls" if choice.finish == "stop" and choice.call_count else choice.finish
            )
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
        finish = "tool_calls" if calls and choice.finish == "stop" else choice.finish
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
        """Return one log-probability; a control token is shown by its id and has no bytes."""
        data = self.model.bytes_of(token)
        text = data.decode("utf-8", "replace") if data else f"token_id:{token}"
        value = max(logprob, LOWEST_LOGPROB)
        return {"token": text, "logprob": value, "bytes": list(data) or None}

"""What a chat template is given: the messages as turns, and variables beside them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from serving.http.chat.tools import must_call
from serving.http.limits import Limits
from serving.http.wire.errors import invalid
from serving.http.wire.requests import CallMade, ChatRequest, Message, TextFormat, TokenizeRequest

_OURS = frozenset({"messages", "add_generation_prompt", "continue_final_message", "tools"})


def template_variables(request: ChatRequest | TokenizeRequest, template: str) -> dict[str, Any]:
    """What the chat template may read beside the messages. Raises ApiError 400."""
    found = dict(request.chat_template_kwargs or {})
    for name in sorted(_OURS & found.keys()):
        key = f"chat_template_kwargs.{name}"
        raise invalid(f"{key}: the request has a key of its own for it", key)
    effort = request.reasoning_effort
    if is_constrained(request) and "enable_thinking" in template:
        found = {"enable_thinking": False} | found  # it could not think
    if effort is None:
        return found
    if "reasoning_effort" in template:
        return {"reasoning_effort": effort} | found
    if "enable_thinking" in template:
        return {"enable_thinking": effort != "none"} | found
    if effort != "none" or "</think>" in template:
        text = f"the model's chat template has no such thing; {effort!r} would change nothing"
        raise invalid(f"reasoning_effort: {text}", "reasoning_effort", "unsupported_parameter")
    return found


def is_constrained(request: ChatRequest | TokenizeRequest) -> bool:
    """Whether the answer is held to a form from its first token on."""
    if must_call(request):
        return True
    if isinstance(request, TokenizeRequest):
        return False
    is_text = isinstance(request.response_format, TextFormat | None)
    return request.grammar is not None or not is_text


def is_continued(request: ChatRequest | TokenizeRequest, last: Message) -> bool:
    """Whether the answer goes on with the last message. Raises ApiError 400."""
    asked, generation = request.continue_final_message, request.add_generation_prompt
    may_be = last.role == "assistant" and bool(last.content)
    if not asked:
        return may_be and asked is None and generation is None
    key = "continue_final_message"
    if generation:
        raise invalid(f"{key}: not together with add_generation_prompt", key)
    if not may_be:
        raise invalid(f"{key}: the last message must be the assistant's, with text", key)
    return True


def turns(messages: Sequence[Message], limits: Limits) -> list[dict[str, Any]]:
    """The messages as a chat template wants them: parts joined, `developer` as `system`, the
    arguments of calls as objects."""
    if len(messages) > limits.messages:
        text = f"messages: {len(messages)} of them; {limits.messages} are allowed"
        raise invalid(text, "messages")
    found: list[dict[str, Any]] = []
    called: dict[str | None, str] = {}  # id of a call -> name of its function
    for index, message in enumerate(messages):
        content = message.content
        if content is None:
            if message.role != "assistant":
                key = f"messages[{index}].content"
                raise invalid(f"{key}: null; a text is needed", key)
            content = ""
        elif isinstance(content, list):
            content = "\n".join(part.text for part in content)
        role = "system" if message.role == "developer" else message.role
        turn: dict[str, Any] = {"role": role, "content": content}
        if message.name is not None:
            turn["name"] = message.name
        if (reasoning := message.reasoning_content or message.reasoning) is not None:
            turn["reasoning_content"] = reasoning
        if message.tool_calls:
            called |= {made.id: made.function.name for made in message.tool_calls}
            turn["tool_calls"] = [
                _call(made, f"messages[{index}].tool_calls[{place}]")
                for place, made in enumerate(message.tool_calls)
            ]
        if message.tool_call_id is not None:
            turn["tool_call_id"] = message.tool_call_id
            if message.tool_call_id in called:
                turn.setdefault("name", called[message.tool_call_id])
        found.append(turn)
    return found


def _call(made: CallMade, key: str) -> dict[str, Any]:
    """An earlier call for the template. Raises ApiError 400."""
    key = f"{key}.function.arguments"
    try:
        arguments = msgspec.json.decode(made.function.arguments or "{}", type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError) as problem:
        raise invalid(f"{key}: no JSON object: {problem}", key) from None
    function = {"name": made.function.name, "arguments": arguments}
    return {"id": made.id, "type": "function", "function": function}

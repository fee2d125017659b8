"""Function calling: which tools of a request reach the model, and how it must write its calls.

Forced calls (`required`, a named function) are a JSON list, enforced by constrained decoding.
Optional calls (`auto`) are in the format that the model was trained on, if its chat template shows
one that crossover.serving.http.answer_parts reads.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from crossover.models.text.answer_marks import dialect_of
from crossover.models.text.chat_template import (
    CallsForm,
    RendersChat,
    append_calls_as_text,
    arguments_as_text,
)
from crossover.serving.http.answer_parts import (
    CALL_OPEN,
    GRANITE_CALL,
    CallFormat,
)
from crossover.serving.http.api_errors import invalid_parameter
from crossover.serving.http.body_types import ChatRequest, Tool, encode
from crossover.serving.http.call_readers import FUNCTION_OPEN
from crossover.serving.sampling.grammar import MAX_CHARACTERS, CallableTool, ToolCalls


def offered_tools(body: ChatRequest) -> Sequence[Tool]:
    """Return the tools that the prompt shows to the model."""
    return () if body.tool_choice == "none" else body.tools or ()


class CallChoice(NamedTuple):
    """How the model writes its calls, and which calls it must make.

    `call_format`: None: no calls are parsed. `forced_calls`: JSON of ToolCalls; None: the model may
    call functions or not.
    """

    call_format: CallFormat | None
    forced_calls: bytes | None


def choose_call_format(body: ChatRequest, template: str) -> CallChoice:
    """Return how the model calls functions for this request. Raises ApiError 400."""
    choice = body.tool_choice
    tools = offered_tools(body)
    if isinstance(choice, Tool):
        tools = [tool for tool in tools if tool.function.name == choice.function.name]
        if not tools:
            why = f"tools contains no function {choice.function.name!r}."
            raise invalid_parameter("tool_choice", why)
    if not tools and choice == "required":
        raise invalid_parameter("tool_choice", "tools contains no function.")
    if not tools:
        return CallChoice(None, None)
    if choice in (None, "auto"):
        call_format = call_format_of(template)
        if call_format is not None:
            return CallChoice(call_format, None)
        text = (
            "tool_choice 'auto' needs a chat template in a tool format that this server parses "
            "(Hermes, Qwen, Granite, gpt-oss or Gemma 4), which this model does not have. Use "
            "'required', 'none', or name a function."
        )
        raise invalid_parameter("tools", text, "unsupported_parameter")
    size_bytes = len(encode(tools))
    if size_bytes > MAX_CHARACTERS:
        why = f"The forced tools have {size_bytes} bytes; the maximum is {MAX_CHARACTERS}."
        raise invalid_parameter("tools", why)
    callable_tools = [
        CallableTool(tool.function.name, _parameters_of(tool), bool(tool.function.strict))
        for tool in tools
    ]
    at_most_one = isinstance(choice, Tool) or body.parallel_tool_calls is False
    return CallChoice("list", encode(ToolCalls(callable_tools, at_most_one)))


def _parameters_of(tool: Tool) -> dict[str, Any]:
    """Return the JSON schema of a tool's arguments. Null means no parameters. An empty schema means
    that any object is valid."""
    parameters = tool.function.parameters
    if parameters is None:
        return {"type": "object", "properties": {}}
    return parameters or {"type": "object"}


def call_format_of(template: str) -> CallFormat | None:
    """Return the format of tool calls that a chat template asks for; None: no supported one."""
    if dialect_of(template) != "tags":
        return "native"
    unescaped = template.replace('\\"', '"')  # as inside the strings of the template
    shows_hermes_calls = '"arguments"' in unescaped or FUNCTION_OPEN in unescaped
    if CALL_OPEN in unescaped and shows_hermes_calls:
        return "hermes"
    return "trailing" if GRANITE_CALL in unescaped else None


def show_tools(
    turns: list[dict[str, Any]], tools: Sequence[Tool], tokenizer: RendersChat, template: str
) -> tuple[list[dict[str, Any]], list[dict[str, Any]] | None]:
    """Return the turns and the tools as the chat template takes them; the tools are None if there
    are none. Calls and tools that the template does not show become text of a turn."""
    calls_form = tokenizer.calls_form(template)
    for turn in turns:
        _show_calls(turn, calls_form)
    functions = [
        {
            "name": tool.function.name,  # some templates fail without the other two
            "description": tool.function.description or "",
            "parameters": tool.function.parameters or {"type": "object", "properties": {}},
        }
        for tool in tools
    ]
    if functions and not tokenizer.shows_tools(template):
        turns = _with_tools_as_text(turns, functions, tokenizer, template)
    return turns, [{"type": "function", "function": function} for function in functions] or None


def _show_calls(turn: dict[str, Any], calls_form: CallsForm | None) -> None:
    """Change a turn's calls to the form that the template shows. Calls that it would not show are
    appended to the content as text. `calls_form`: None: it shows no calls."""
    if calls_form is None:
        append_calls_as_text(turn)
        return
    if calls_form.content_is_null:
        if turn["content"]:  # the template shows calls only beside null content
            append_calls_as_text(turn)
            return
        if "tool_calls" in turn:
            turn["content"] = None
    if calls_form.arguments_are_text:
        for call in turn.get("tool_calls", ()):
            call["function"]["arguments"] = arguments_as_text(call["function"]["arguments"])


def _with_tools_as_text(
    turns: list[dict[str, Any]],
    functions: Sequence[Mapping[str, Any]],
    tokenizer: RendersChat,
    template: str,
) -> list[dict[str, Any]]:
    """Return the turns with the functions described in the first one: in a system message, or in
    a user message if the template shows no system messages."""
    lines = "\n".join(json.dumps(function, ensure_ascii=False) for function in functions)
    text = (
        f"You can call these functions:\n{lines}\n"
        'Answer with a JSON list of calls: [{"name": ..., "arguments": {...}}]'
    )
    has_system = tokenizer.content_form("system", template) not in ("dropped", "refused")
    role = "system" if has_system else "user"
    if turns[0]["role"] != role:
        return [{"role": role, "content": text}, *turns]
    first = turns[0]["content"]
    if isinstance(first, list):
        first = "\n".join(part["text"] for part in first)
    text = f"{first}\n\n{text}" if has_system else f"{text}\n\n{first}"
    return [{"role": role, "content": text}, *turns[1:]]

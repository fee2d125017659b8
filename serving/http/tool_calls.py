"""Function calling: which tools of a request reach the model, and how it must write its calls.

Forced calls (`required`, a named function) are a JSON list, enforced by constrained decoding.
Optional calls (`auto`) are in the format that the model was trained on, if its chat template shows
one that crossover.serving.http.answer_parts reads.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from crossover.models.answer_marks import dialect_of
from crossover.models.chat_template import AsWritten, RendersChat
from crossover.serving.http.answer_parts import CALL, CALLED, TRAILING_CALL, Format
from crossover.serving.http.api_errors import refused
from crossover.serving.http.body_types import ChatRequest, Tool, encode
from crossover.serving.sampling.grammar import MAX_CHARACTERS, CallableTool, ToolCalls


def offered_tools(body: ChatRequest) -> Sequence[Tool]:
    """Return the tools that the prompt shows to the model."""
    return () if body.tool_choice == "none" else body.tools or ()


def format_of(body: ChatRequest, template: str) -> tuple[Format | None, bytes | None]:
    """Return the format of the model's calls (None: no calls), and forced calls as JSON of
    ToolCalls. Raises ApiError 400."""
    choice, tools = body.tool_choice, offered_tools(body)
    if isinstance(choice, Tool):
        tools = [tool for tool in tools if tool.function.name == choice.function.name]
    if not tools and (choice == "required" or isinstance(choice, Tool)):
        name = "" if isinstance(choice, str) else f" {choice.function.name!r}"
        raise refused("tool_choice", f"tools contains no function{name}.")
    if not tools:
        return None, None
    if choice in (None, "auto"):
        readable = readable_calls(template)
        if readable is not None:
            return readable, None
        text = (
            "tool_choice 'auto' needs a chat template in a tool format that this server parses "
            "(Hermes, Qwen, Granite, gpt-oss or Gemma 4), which this model does not have. Use "
            "'required', 'none', or name a function."
        )
        raise refused("tools", text, "unsupported_parameter")
    if (size := len(encode(tools))) > MAX_CHARACTERS:
        why = f"The forced tools have {size} bytes; the maximum is {MAX_CHARACTERS}."
        raise refused("tools", why)
    callable_tools = [
        CallableTool(
            tool.function.name,
            _parameters_of(tool),
            bool(tool.function.strict),
        )
        for tool in tools
    ]
    at_most_one = isinstance(choice, Tool) or body.parallel_tool_calls is False
    return "list", encode(ToolCalls(callable_tools, at_most_one))


def _parameters_of(tool: Tool) -> dict[str, Any]:
    parameters = tool.function.parameters
    if parameters is None:  # the function takes none
        return {"type": "object", "properties": {}}
    return parameters or {"type": "object"}


def readable_calls(template: str) -> Format | None:
    """Return the format of tool calls that a chat template asks for; None: no supported one."""
    if dialect_of(template) != "tags":
        return "native"
    plain = template.replace('\\"', '"')
    if CALL in plain and ('"arguments"' in plain or "<function=" in plain):
        return "hermes"
    return "trailing" if TRAILING_CALL in plain else None


def show_tools(
    turns: list[dict[str, Any]], tools: Sequence[Tool], tokenizer: RendersChat, template: str
) -> tuple[list[dict[str, Any]], list[dict[str, Any]] | None]:
    """Return (turns, tools) for the chat template; what the template does not show becomes text."""
    form = tokenizer.calls_form(template)
    for turn in turns:
        if form is not None and not (form.content_is_null and turn["content"]):
            if form.content_is_null and "tool_calls" in turn:
                turn["content"] = None
            for call in turn.get("tool_calls", ()) if form.arguments_are_text else ():
                call["function"]["arguments"] = _as_text(call["function"]["arguments"])
            continue
        calls = [_written(call["function"]) for call in turn.pop("tool_calls", ())]
        calls_text = "\n".join(f"{CALL}\n{call}\n{CALLED}" for call in calls)
        if calls_text and isinstance(turn["content"], list):
            turn["content"] = [*turn["content"], {"type": "text", "text": calls_text}]
        elif calls_text:
            turn["content"] = f"{turn['content']}\n{calls_text}".lstrip("\n")
    shown = [
        {
            "name": tool.function.name,  # some templates fail without the other two
            "description": tool.function.description or "",
            "parameters": tool.function.parameters or {"type": "object", "properties": {}},
        }
        for tool in tools
    ]
    if shown and not tokenizer.shows_tools(template):
        lines = "\n".join(json.dumps(function, ensure_ascii=False) for function in shown)
        text = (
            f"You can call these functions:\n{lines}\n"
            'Answer with a JSON list of calls: [{"name": ..., "arguments": {...}}]'
        )
        role = "system"
        if tokenizer.content_form("system", template) in ("dropped", "refused"):
            role = "user"
        if turns[0]["role"] == role:
            first = turns[0]["content"]
            if isinstance(first, list):
                first = "\n".join(part["text"] for part in first)
            text = f"{first}\n\n{text}" if role == "system" else f"{text}\n\n{first}"
            turns = turns[1:]
        turns = [{"role": role, "content": text}, *turns]
    return turns, [{"type": "function", "function": function} for function in shown] or None


def _as_text(arguments: Any) -> str:
    is_written = isinstance(arguments, AsWritten)
    return str(arguments) if is_written else json.dumps(arguments, ensure_ascii=False)


def _written(function: dict[str, Any]) -> str:
    """Return an earlier call as JSON."""
    name = json.dumps(function["name"], ensure_ascii=False)
    return f'{{"name": {name}, "arguments": {_as_text(function["arguments"])}}}'

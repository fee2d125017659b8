"""Function calling: what of a request reaches the model, and the calls in what it says.

Calls that must come (`required`, a named function) are a JSON list, held to by constrained
decoding. Calls that may come (`auto`) are what the model was trained to write, where its chat
template shows one of these formats:

    hermes   <tool_call>{"name": ..., "arguments": {...}}</tool_call>, as often as it likes
    llama3   {"name": ..., "parameters": {...}} as the whole answer
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Sequence
from typing import Any, Literal

from serving.http.wire.errors import invalid
from serving.http.wire.requests import ChatRequest, Named, TokenizeRequest, Tool
from serving.http.wire.responses import FunctionCall, ToolCall
from serving.http.wire.sse import encode
from serving.sampling.grammar import MAX_CHARACTERS

Format = Literal["hermes", "llama3", "list"]
_SEPARATORS = re.compile(r"[\s,;\[\]]*")


def offered(request: ChatRequest | TokenizeRequest) -> list[Tool]:
    """The tools that the model is told of."""
    return [] if request.tool_choice == "none" else list(request.tools or [])


def must_call(request: ChatRequest | TokenizeRequest) -> bool:
    """Whether the answer must be calls."""
    return request.tool_choice == "required" or isinstance(request.tool_choice, Named)


def tool_of(tool: Tool) -> dict[str, Any]:
    """A tool as chat templates want it: some fail without description or parameters."""
    said = tool.function
    function = {"name": said.name, "description": said.description or ""}
    parameters = said.parameters or {"type": "object", "properties": {}}
    return {"type": "function", "function": function | {"parameters": parameters}}


def format_of(request: ChatRequest, template: str) -> Format | None:
    """How the model is to write its calls; None: it makes none. Raises ApiError 400."""
    choice, tools = request.tool_choice, offered(request)
    key = "tool_choice"
    names = [tool.function.name for tool in tools]
    if len(set(names)) < len(names):
        raise invalid("tools: two functions of the same name", "tools")
    if isinstance(choice, Named) and choice.function.name not in names:
        raise invalid(f"{key}: tools has no function {choice.function.name!r}", key)
    if choice == "required" and not tools:
        raise invalid(f"{key}: required, and tools names no function", key)
    if not tools:
        return None
    constrained = "response_format" if request.response_format is not None else "grammar"
    if getattr(request, constrained) is not None:
        text = f"{constrained}: not together with tools, unless tool_choice is none"
        raise invalid(text, constrained)
    if must_call(request):
        return "list"
    plain = template.replace('\\"', '"')
    if "<tool_call>" in plain and '"arguments"' in plain and "<function=" not in plain:
        return "hermes"
    if "<|start_header_id|>" in plain and '"parameters"' in plain and "<TOOLCALL>" not in plain:
        return "llama3"
    text = (
        "tools: this model's chat template has neither the Hermes and Qwen format of calls "
        '(<tool_call>) nor that of Llama 3 ({"name": ..., "parameters": ...}), so tool_choice '
        "auto cannot be read; required, a named function and none can"
    )
    raise invalid(text, "tools", "unsupported_parameter")


def schema_of(request: ChatRequest) -> dict[str, Any]:
    """The JSON schema of the calls that must come. Raises ApiError 400."""
    choice, tools = request.tool_choice, offered(request)
    if isinstance(choice, Named):
        tools = [tool for tool in tools if tool.function.name == choice.function.name]
    size = len(encode(tools))
    if size > MAX_CHARACTERS:
        text = f"{size} characters of JSON; {MAX_CHARACTERS} can be held to"
        raise invalid(f"tools: {text}", "tools")
    definitions: dict[str, Any] = {}
    calls: list[Any] = []
    for number, tool in enumerate(tools):
        given = tool.function.parameters
        arguments: Any = {"type": "object"}
        if given is not None:
            try:
                definitions[f"f{number}"] = _moved(given, f"#/$defs/f{number}")
            except RecursionError:
                raise invalid("tools: nested too deeply", "tools", "nested_too_deeply") from None
            arguments = {"$ref": f"#/$defs/f{number}"}
        properties = {"name": {"const": tool.function.name}, "arguments": arguments}
        calls.append(
            {
                "type": "object",
                "properties": properties,
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
        )
    schema: dict[str, Any] = {"type": "array", "items": {"anyOf": calls}, "minItems": 1}
    if isinstance(choice, Named) or request.parallel_tool_calls is False:
        schema["maxItems"] = 1
    return schema | {"$defs": definitions}


def _moved(schema: Any, place: str) -> Any:
    """A schema whose references to itself hold where it stands at `place` in another one."""
    if isinstance(schema, list):
        return [_moved(item, place) for item in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {key: _moved(item, place) for key, item in schema.items()}
    reference = moved.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        moved["$ref"] = place + reference[1:]
    return moved


def calls_in(text: str, names: frozenset[str]) -> list[ToolCall]:
    """The calls that a text consists of; none where it is anything else, or cut off."""
    calls: list[ToolCall] = []
    place = _past_separators(text, 0)
    try:
        while place < len(text):
            said, end = json.JSONDecoder().raw_decode(text, place)
            calls.append(_call(said, names))
            place = _past_separators(text, end)
    except (ValueError, RecursionError):
        return []
    return calls


def _past_separators(text: str, place: int) -> int:
    found = _SEPARATORS.match(text, place)
    return place if found is None else found.end()


def _call(said: Any, names: frozenset[str]) -> ToolCall:
    """Raises ValueError for what is no call of one of these functions."""
    if not isinstance(said, dict) or said.get("name") not in names:
        raise ValueError("no call")
    arguments = said.get("arguments", said.get("parameters", {}))
    shown = arguments if isinstance(arguments, str) else json.dumps(arguments, allow_nan=False)
    text = shown.encode(errors="replace").decode()  # half a surrogate pair is no text
    return ToolCall(id=f"call_{secrets.token_hex(12)}", function=FunctionCall(said["name"], text))


# --- for templates that know nothing of tools


def spelled_out(turns: Sequence[dict[str, Any]], tools: list[Any], template: str) -> list[Any]:
    """The turns, with tools, calls and their results as text where the template has no such
    things: it would leave them out without a word."""
    if "tool_calls" not in template:
        turns = [_without_calls(turn) for turn in turns]
    if not tools or "tools" in template:
        return list(turns)
    lines = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    text = (
        f"You can call these functions:\n{lines}\n"
        'Answer with a JSON list of calls: [{"name": ..., "arguments": {...}}]'
    )
    if turns and turns[0]["role"] == "system":
        head = turns[0] | {"content": f"{turns[0]['content']}\n\n{text}"}
        return [head, *turns[1:]]
    return [{"role": "system", "content": text}, *turns]


def _without_calls(turn: dict[str, Any]) -> dict[str, Any]:
    if turn["role"] == "tool":
        text = f"<tool_response>\n{turn['content']}\n</tool_response>"
        return {"role": "user", "content": text}
    calls = turn.get("tool_calls", [])
    shown = [json.dumps(call["function"], ensure_ascii=False) for call in calls]
    parts = [turn["content"]] if turn["content"] or not calls else []
    parts += [f"<tool_call>\n{text}\n</tool_call>" for text in shown]
    return {key: value for key, value in turn.items() if key != "tool_calls"} | {
        "content": "\n".join(parts)
    }

"""Function calling: what of a request reaches the model, and the calls in what it says.

Calls that must come (`required`, a named function) are a JSON list, held to by constrained
decoding. Calls that may come (`auto`) are what the model was trained to write, where its chat
template shows the Hermes format: <tool_call>{"name": ..., "arguments": {...}}</tool_call>.

    splitter = Splitter(Form("maybe", "hermes", frozenset({"add"})))
    splitter.push("<think>2+2</think>Four", True)
    # [Part("reasoning", "2+2"), Part("content", "Four")]

Text is given on as it comes, a call whole. What looks like a call and is none, or was cut off, is
content.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import msgspec

from models.chat_template import AsWritten
from serving.http.api_errors import refused
from serving.http.body_types import CalledFunction, ChatRequest, Tool, ToolCall, encode
from serving.sampling.grammar import MAX_CHARACTERS

THINK, THOUGHT = "<think>", "</think>"
_CALL, _CALLED = "<tool_call>", "</tool_call>"

Format = Literal["hermes", "list"]


class Form(NamedTuple):
    """What there may be in a text. `reasoning`: "maybe" (the text may open it), "open" (the prompt
    has opened it). `calls`: their format; None: none are looked for."""

    reasoning: Literal["maybe", "open"] | None
    calls: Format | None
    names: frozenset[str]  # of functions


def offered(body: ChatRequest) -> Sequence[Tool]:
    """The tools that the model is told of."""
    return () if body.tool_choice == "none" else body.tools or ()


def format_of(body: ChatRequest, template: str) -> tuple[Format | None, bytes | None]:
    """How the model is to write its calls, None: it makes none; and the JSON schema of calls that
    must come. Raises ApiError 400."""
    choice, tools = body.tool_choice, offered(body)
    if isinstance(choice, Tool):
        tools = [tool for tool in tools if tool.function.name == choice.function.name]
    if not tools and (choice == "required" or isinstance(choice, Tool)):
        name = "" if isinstance(choice, str) else f" {choice.function.name!r}"
        raise refused("tool_choice", f"tools has no function{name}")
    if not tools:
        return None, None
    if choice in (None, "auto"):
        plain = template.replace('\\"', '"')
        if _CALL in plain and '"arguments"' in plain and "<function=" not in plain:
            return "hermes", None
        text = (
            "this model's chat template has not the Hermes and Qwen format of calls "
            "(<tool_call>): tool_choice auto cannot be read; required, a named function, none can"
        )
        raise refused("tools", text, "unsupported_parameter")
    if (size := len(encode(tools))) > MAX_CHARACTERS:
        why = f"calls that must come, of {size} bytes; {MAX_CHARACTERS} are allowed"
        raise refused("tools", why)
    definitions: dict[str, msgspec.Raw] = {}
    calls: list[Any] = []
    for number, tool in enumerate(tools):
        place = f"#/$defs/f{number}"
        # Its references to itself hold where it now stands.
        arguments = encode(tool.function.parameters or {"type": "object"})
        moved = arguments.replace(b'"$ref":"#', b'"$ref":"' + place.encode())
        definitions[f"f{number}"] = msgspec.Raw(moved)
        call = {"name": {"const": tool.function.name}, "arguments": {"$ref": place}}
        needed = {"required": [*call], "additionalProperties": False}
        calls.append({"type": "object", "properties": call, **needed})
    schema: dict[str, Any] = {"type": "array", "items": {"anyOf": calls}, "minItems": 1}
    if isinstance(choice, Tool) or body.parallel_tool_calls is False:
        schema["maxItems"] = 1
    return "list", encode(schema | {"$defs": definitions})


def told_of_tools(
    turns: list[dict[str, Any]], tools: Sequence[Tool], template: str
) -> tuple[list[dict[str, Any]], list[dict[str, Any]] | None]:
    """(turns, tools) for the chat template; what it has no place for becomes text."""
    for turn in turns if "tool_calls" not in template else ():
        calls = [_written(one["function"]) for one in turn.pop("tool_calls", ())]
        said = "\n".join(f"{_CALL}\n{one}\n{_CALLED}" for one in calls)
        if said and isinstance(turn["content"], list):
            turn["content"] = [*turn["content"], {"type": "text", "text": said}]
        elif said:
            turn["content"] = f"{turn['content']}\n{said}".lstrip("\n")
    shown = [
        {
            "name": tool.function.name,  # some templates fail without the other two
            "description": tool.function.description or "",
            "parameters": tool.function.parameters or {"type": "object", "properties": {}},
        }
        for tool in tools
    ]
    if shown and "tools" not in template:
        lines = "\n".join(json.dumps(function, ensure_ascii=False) for function in shown)
        text = (
            f"You can call these functions:\n{lines}\n"
            'Answer with a JSON list of calls: [{"name": ..., "arguments": {...}}]'
        )
        if turns[0]["role"] == "system":
            first = turns[0]["content"]
            if isinstance(first, list):
                first = "\n".join(part["text"] for part in first)
            turns, text = turns[1:], f"{first}\n\n{text}"
        turns = [{"role": "system", "content": text}, *turns]
    return turns, [{"type": "function", "function": function} for function in shown] or None


def _written(function: dict[str, Any]) -> str:
    """An earlier call as JSON."""
    arguments = function["arguments"]
    if isinstance(arguments, AsWritten):
        name = json.dumps(function["name"], ensure_ascii=False)
        return f'{{"name": {name}, "arguments": {arguments}}}'
    return json.dumps(function, ensure_ascii=False)


# --- what the model says


class Part(NamedTuple):
    kind: Literal["role", "reasoning", "content", "call", "end"]
    text: str
    call: ToolCall | None = None


class Splitter:
    """Finds the parts of one sequence's text, of this Form. It holds back no more than the
    beginning of a mark, white space before a part, and calls."""

    def __init__(self, form: Form) -> None:
        self._names = form.names
        self._held = ""
        self._fresh = True  # nothing of this part has come yet
        said = "list" if form.calls == "list" else "content"
        self._kind = {"maybe": "start", "open": "reasoning", None: said}[form.reasoning]
        # kind -> the mark that ends it, and the kind of what follows
        self._ends = {
            "start": ("", said),
            "reasoning": (THOUGHT, said),
            "content": (_CALL if form.calls == "hermes" else "", "call"),
            "call": (_CALLED, "content"),
            "list": ("", ""),
        }

    def push(self, text: str, last: bool) -> list[Part]:
        """The parts that this text adds; with the last one, what was held back."""
        self._held += text
        parts: list[Part] = []
        while True:
            mark, following = self._ends[self._kind]
            if self._fresh:
                self._held = self._held.lstrip()
                if self._kind == "start":
                    if THINK.startswith(self._held) and not last:
                        return parts
                    self._kind = "reasoning" if self._held.startswith(THINK) else following
                    self._held = self._held.removeprefix(THINK)
                    continue
                self._fresh = not self._held
            before, found, rest = self._held.partition(mark) if mark else (self._held, "", "")
            if not found and not last:
                if self._kind in ("call", "list"):
                    return parts
                keep = next(
                    (n for n in range(len(mark) - 1, 0, -1) if before.endswith(mark[:n])), 0
                )
                before, rest = before[: len(before) - keep], before[len(before) - keep :]
            self._held = rest
            if self._kind == "list":
                parts += self._calls(before, before)
            elif self._kind == "call":
                parts += self._calls(before if found else "", f"{_CALL}{before}{found}")
            elif before:
                parts.append(Part("reasoning" if self._kind == "reasoning" else "content", before))
            if not found:
                return parts
            self._kind, self._fresh = following, True

    def _calls(self, text: str, shown: str) -> list[Part]:
        """The calls that a text consists of; content where it is anything else, or cut off."""
        try:
            said = json.loads(text)
            calls = [self._call(one) for one in (said if isinstance(said, list) else [said])]
        except (ValueError, TypeError, RecursionError):
            calls = []
        return calls or ([Part("content", shown)] if shown else [])

    def _call(self, said: Any) -> Part:
        """Raises ValueError for what is no call of one of these functions."""
        if not isinstance(said, dict) or said.get("name") not in self._names:
            raise ValueError("no call")
        arguments = said.get("arguments", said.get("parameters"))
        shown = arguments if isinstance(arguments, str) else json.dumps(arguments, allow_nan=False)
        if arguments is None:
            shown = "{}"
        elif not isinstance(json.loads(shown), dict):
            raise ValueError("no object")
        text = shown.encode(errors="replace").decode()  # half a surrogate pair is no text
        function = CalledFunction(name=said["name"], arguments=text)
        return Part("call", "", ToolCall(id=f"call_{secrets.token_hex(12)}", function=function))

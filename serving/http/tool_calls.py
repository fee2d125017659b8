"""Function calling: what of a request reaches the model, and the calls in what it says.

Calls that must come (`required`, a named function) are a JSON list, held to by constrained
decoding. Calls that may come (`auto`) are what the model was trained to write, where its chat
template shows the Hermes format: <tool_call>{"name": ..., "arguments": {...}}</tool_call>.

    splitter = Splitter(AnswerForm(reasoning="maybe", calls="hermes", names=frozenset({"add"})))
    [*splitter.push("<think>2+2</think>Four"), *splitter.finish()]
    # [Part("reasoning", "2+2"), Part("content", "Four")]

Text is given on as it comes; a call is given on whole. What looks like a call and is none, or was
cut off, is content.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import msgspec

from serving.http.api_schemas import (
    ChatInput,
    ChatRequest,
    FunctionCall,
    NamedTool,
    Tool,
    ToolCall,
    encode,
)
from serving.http.errors import invalid
from serving.sampling.grammar import MAX_CHARACTERS

THINK, THOUGHT = "<think>", "</think>"
MOST_BLANK = 1000  # characters before a reasoning; looked at again with each token
_CALL, _CALLED = "<tool_call>", "</tool_call>"
_SEPARATORS = re.compile(r"[\s,;\[\]]*")

Format = Literal["hermes", "list"]
Reasoning = Literal["maybe", "open"]


def offered(body: ChatInput) -> list[Tool]:
    """The tools that the model is told of."""
    return [] if body.tool_choice == "none" else list(body.tools or [])


def must_call(body: ChatInput) -> bool:
    """Whether the answer must be calls."""
    return body.tool_choice == "required" or isinstance(body.tool_choice, NamedTool)


def format_of(body: ChatRequest, template: str) -> Format | None:
    """How the model is to write its calls; None: it makes none. Raises ApiError 400."""
    choice, tools = body.tool_choice, offered(body)
    names = [tool.function.name for tool in tools]
    if len(set(names)) < len(names):
        raise invalid("tools: two functions of the same name", "tools")
    if isinstance(choice, NamedTool) and choice.function.name not in names:
        text = f"tool_choice: tools has no function {choice.function.name!r}"
        raise invalid(text, "tool_choice")
    if choice == "required" and not tools:
        raise invalid("tool_choice: required, and tools names no function", "tool_choice")
    if not tools:
        return None
    constrained = "response_format" if body.response_format is not None else "grammar"
    if getattr(body, constrained) is not None:
        text = f"{constrained}: not together with tools, unless tool_choice is none"
        raise invalid(text, constrained)
    if must_call(body):
        return "list"
    plain = template.replace('\\"', '"')
    if "<tool_call>" in plain and '"arguments"' in plain and "<function=" not in plain:
        return "hermes"
    text = (
        "tools: this model's chat template has not the Hermes and Qwen format of calls "
        "(<tool_call>), so tool_choice auto cannot be read; required, a named function and none can"
    )
    raise invalid(text, "tools", "unsupported_parameter")


def schema_of(body: ChatRequest) -> dict[str, Any]:
    """The JSON schema of the calls that must come. Raises ApiError 400."""
    choice, tools = body.tool_choice, offered(body)
    if isinstance(choice, NamedTool):
        tools = [tool for tool in tools if tool.function.name == choice.function.name]
    size = len(encode(tools))
    if size > MAX_CHARACTERS:
        text = f"{size} characters of JSON; {MAX_CHARACTERS} can be held to"
        raise invalid(f"tools: {text}", "tools")
    definitions: dict[str, Any] = {}
    calls: list[Any] = []
    for number, tool in enumerate(tools):
        arguments: Any = {"type": "object"}
        if tool.function.parameters is not None:
            arguments = {"$ref": f"#/$defs/f{number}"}
            try:
                moved = _moved(tool.function.parameters, arguments["$ref"])
            except RecursionError:
                raise invalid("tools: nested too deeply", "tools", "nested_too_deeply") from None
            definitions[f"f{number}"] = moved
        calls.append(
            {
                "type": "object",
                "properties": {"name": {"const": tool.function.name}, "arguments": arguments},
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
        )
    schema: dict[str, Any] = {"type": "array", "items": {"anyOf": calls}, "minItems": 1}
    if isinstance(choice, NamedTool) or body.parallel_tool_calls is False:
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


def told_of_tools(
    turns: Sequence[dict[str, Any]], tools: Sequence[Tool], template: str
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """(turns, tools) for the chat template. Tools, calls and their results become text where the
    template has no such things: it would leave them out without a word."""
    shown = [
        {
            "name": tool.function.name,  # some templates fail without the other two
            "description": tool.function.description or "",
            "parameters": tool.function.parameters or {"type": "object", "properties": {}},
        }
        for tool in tools
    ]
    told = list(turns)
    if "tool_calls" not in template:
        told = [_without_calls(turn) for turn in turns]
    if shown and "tools" not in template:
        lines = "\n".join(json.dumps(function, ensure_ascii=False) for function in shown)
        text = (
            f"You can call these functions:\n{lines}\n"
            'Answer with a JSON list of calls: [{"name": ..., "arguments": {...}}]'
        )
        if told and told[0]["role"] == "system":
            told[0] = told[0] | {"content": f"{told[0]['content']}\n\n{text}"}
        else:
            told.insert(0, {"role": "system", "content": text})
    return told, [{"type": "function", "function": function} for function in shown]


def _without_calls(turn: dict[str, Any]) -> dict[str, Any]:
    if turn["role"] == "tool":
        text = f"<tool_response>\n{turn['content']}\n</tool_response>"
        return {"role": "user", "content": text}
    calls = turn.get("tool_calls", [])
    if not calls:
        return turn
    parts = [turn["content"]] if turn["content"] else []
    for call in calls:
        parts.append(f"{_CALL}\n{json.dumps(call['function'], ensure_ascii=False)}\n{_CALLED}")
    kept = {key: value for key, value in turn.items() if key != "tool_calls"}
    return kept | {"content": "\n".join(parts)}


# --- what the model says


class AnswerForm(msgspec.Struct, frozen=True):
    """What to look for. `reasoning`: None, "maybe" (the text may open it), "open" (the prompt has
    opened it). `calls`: their format; None: none are looked for."""

    reasoning: Reasoning | None = None
    calls: Format | None = None
    names: frozenset[str] = frozenset()

    @property
    def is_plain(self) -> bool:
        return self.reasoning is None and self.calls is None


class Part(NamedTuple):
    kind: Literal["reasoning", "content", "call"]
    text: str
    call: ToolCall | None = None


class Splitter:
    """Of one sequence. It holds back no more than the beginning of a mark, and calls."""

    def __init__(self, form: AnswerForm) -> None:
        self._form = form
        self._held = ""
        self._pieces: list[str] = []  # of a call, or of an answer that may be one
        self._state = {"maybe": "start", "open": "opened", None: "blank"}[form.reasoning]

    def push(self, text: str) -> list[Part]:
        """The parts that this text adds."""
        self._held += text
        parts: list[Part] = []
        while self._step(parts):
            pass
        return parts

    def finish(self) -> list[Part]:
        """What was held back, at the end of the text."""
        text = "".join(self._pieces) + self._held
        self._held = ""
        self._pieces = []
        if self._state == "whole":
            return self._calls(text, text)
        if self._state == "call":
            text = _CALL + text
        elif self._state == "blank":
            text = text.strip()
        kind: Literal["reasoning", "content"] = "content"
        if self._state in ("opened", "reasoning"):
            kind = "reasoning"
        return [Part(kind, text)] if text else []

    def _step(self, parts: list[Part]) -> bool:
        """One piece of what is held; False: more text is needed."""
        match self._state:
            case "start" | "blank":
                return self._begin()
            case "opened":
                self._held = self._held.lstrip("\n")
                if self._held:
                    self._state = "reasoning"
                return bool(self._held)
            case "reasoning":
                before, ended = self._until(THOUGHT)
                if before:
                    parts.append(Part("reasoning", before))
                if ended:
                    self._state = "blank"
                return ended
            case "content" if self._form.calls == "hermes":
                before, ended = self._until(_CALL)
                if before:
                    parts.append(Part("content", before))
                if ended:
                    self._state = "call"
                return ended
            case "call":
                before, ended = self._until(_CALLED)
                self._pieces.append(before)
                if ended:
                    text = "".join(self._pieces)
                    self._pieces = []
                    parts += self._calls(text, f"{_CALL}{text}{_CALLED}")
                    self._state = "blank"
                return ended
            case "whole":
                self._pieces.append(self._held)
            case _:
                if self._held:
                    parts.append(Part("content", self._held))
        self._held = ""
        return False

    def _begin(self) -> bool:
        """Before the first word: of the text, or of what follows the reasoning."""
        text = self._held.lstrip()
        if self._state == "start":
            if text.startswith(THINK):
                self._held = text[len(THINK) :]
                self._state = "opened"
                return True
            if THINK.startswith(text) and len(self._held) <= MOST_BLANK:
                return False
        else:
            self._held = text
            if not text:
                return False
        self._state = "whole" if self._form.calls == "list" else "content"
        return True

    def _until(self, mark: str) -> tuple[str, bool]:
        """Text up to the mark, which is taken away, or up to what may be its beginning."""
        before, found, rest = self._held.partition(mark)
        if not found:
            sizes = range(min(len(mark) - 1, len(before)), 0, -1)
            keep = next((size for size in sizes if before.endswith(mark[:size])), 0)
            before, rest = before[: len(before) - keep], before[len(before) - keep :]
        self._held = rest
        return before, bool(found)

    def _calls(self, text: str, shown: str) -> list[Part]:
        """The calls that a text consists of; content where it is anything else, or cut off."""
        calls: list[Part] = []
        place = _past_separators(text, 0)
        try:
            while place < len(text):
                said, end = json.JSONDecoder().raw_decode(text, place)
                calls.append(Part("call", "", self._call(said)))
                place = _past_separators(text, end)
        except (ValueError, RecursionError):
            calls = []
        return calls or ([Part("content", shown)] if shown else [])

    def _call(self, said: Any) -> ToolCall:
        """Raises ValueError for what is no call of one of these functions."""
        if not isinstance(said, dict) or said.get("name") not in self._form.names:
            raise ValueError("no call")
        arguments = said.get("arguments", said.get("parameters", {}))
        shown = arguments if isinstance(arguments, str) else json.dumps(arguments, allow_nan=False)
        text = shown.encode(errors="replace").decode()  # half a surrogate pair is no text
        return ToolCall(
            id=f"call_{secrets.token_hex(12)}", function=FunctionCall(said["name"], text)
        )


def _past_separators(text: str, place: int) -> int:
    found = _SEPARATORS.match(text, place)
    return place if found is None else found.end()

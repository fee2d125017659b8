"""Parses a model's output, as it is generated, into reasoning, content and tool calls.

    parser = OutputParser(OutputFormat("maybe", "hermes", frozenset({"add"})))
    parser.push("<think>2+2</think>Four", True)
    # [Part("reasoning", "2+2"), Part("content", "Four")]

Text is passed on as it arrives, and a call once it is complete. Text that looks like a call but
cannot be parsed as one, or was cut off, is content. The marks of a dialect
(crossover.models.answer_marks) are removed from what they mark.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from crossover.models.answer_marks import Dialect, dialect_of
from crossover.serving.http.body_types import CalledFunction, ToolCall

THINK, THOUGHT = "<think>", "</think>"
CALL, CALLED = "<tool_call>", "</tool_call>"
FUNCTION = "<function="  # Qwen3-Coder leaves <tool_call> before it out now and then
TRAILING_CALL = "<|tool_call|>"  # Granite 3: a JSON list up to the end
GEMMA_THINK, GEMMA_THOUGHT = "<|channel>", "<channel|>"
_GEMMA_CALL, _GEMMA_CALLED, _GEMMA_QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
_START, _CHANNEL, _MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>")
_NO_SCHEMAS: Mapping[str, Mapping[str, Any]] = MappingProxyType({})

# Formats of tool calls:
#   hermes    JSON in <tool_call>, or <function=f><parameter=p>, as Qwen3-Coder and Qwen3.5 write it
#   trailing  that of Granite 3
#   native    that of the dialect
#   list      a JSON list and nothing else
Format = Literal["hermes", "trailing", "native", "list"]
Kind = Literal["start", "reasoning", "content", "call", "list", "header"]
RESPONSE_MARKS = ("<response>", "</response>")  # of Granite 3, around what is not reasoning


class OutputFormat(NamedTuple):
    """How an output marks reasoning and tool calls.

    `reasoning`: "maybe": the output may begin with it; "open": the prompt ends inside it; None: the
    output has none. `calls`: their format; None: no calls are parsed.
    """

    reasoning: Literal["maybe", "open"] | None
    calls: Format | None
    names: frozenset[str]  # of functions
    dialect: Dialect = "tags"
    parameters: Mapping[str, Mapping[str, Any]] = _NO_SCHEMAS  # JSON schemas, by function
    dropped: tuple[str, ...] = ()  # marks around content, which are removed
    is_tagged: bool = False  # the template shows calls as <function=f>


def format_of_output(
    template: str,
    prompt: str,
    calls: Format | None,
    parameters: Mapping[str, Mapping[str, Any]],
    is_free: bool,
) -> OutputFormat | None:
    """Return the format of the answer to a prompt; None: all of it is content.

    `calls`: the format of tool calls; None: no calls. `parameters`: JSON schemas of the functions
    in the prompt, by name. `is_free`: no grammar constrains the answer.
    """
    dialect, end = dialect_of(template), prompt.rstrip()
    names = frozenset(parameters)
    if not is_free:
        return None if calls is None else OutputFormat(None, calls, names)
    if dialect == "harmony":
        is_open = end.endswith(f"{_CHANNEL}analysis{_MESSAGE}")
        return OutputFormat("open" if is_open else "maybe", calls, names, dialect, parameters)
    if dialect == "gemma":
        is_open = end.endswith(f"{GEMMA_THINK}thought")
        return OutputFormat("open" if is_open else "maybe", calls, names, dialect, parameters)
    dropped = tuple(mark for mark in RESPONSE_MARKS if mark in template)
    is_tagged = calls == "hermes" and FUNCTION in template
    form = OutputFormat(None, calls, names, dialect, parameters, dropped, is_tagged)
    if THOUGHT not in template:
        return None if calls is None and not dropped else form
    return form._replace(reasoning="open" if end.endswith(THINK) else "maybe")


class Part(NamedTuple):
    """A piece of an answer: its text, or a complete call."""

    kind: Literal["role", "reasoning", "content", "call", "end"]
    text: str
    call: ToolCall | None = None


class OutputParser:
    """Parses the output of one sequence. It holds back only the beginning of a possible mark, white
    space before a part, and incomplete calls."""

    def __init__(self, form: OutputFormat) -> None:
        self._form = form
        self._held = ""
        self._fresh = True  # the current part has no text yet
        self._opened = ""  # the mark that began this call
        self._recipient = ""  # of a Harmony message: the function that it calls
        plain_kind: Kind = "list" if form.calls == "list" else "content"
        self._plain_kind = plain_kind  # of text without marks
        self._kind: Kind = {"maybe": "start", "open": "reasoning", None: plain_kind}[form.reasoning]
        # The marks that an output may begin with, and the marks that end each kind of part, each
        # with the kind of the part after it.
        self._openers: dict[str, Kind] = {THINK: "reasoning"}
        self._marks: dict[Kind, dict[str, Kind]] = {"reasoning": {THOUGHT: plain_kind}}
        opening_mark = {"hermes": CALL, "trailing": TRAILING_CALL}.get(form.calls or "")
        self._marks["content"] = dict.fromkeys(form.dropped, "content")
        if opening_mark is not None:
            self._marks["content"][opening_mark] = "call"
            self._marks["call"] = {CALLED: "content"} if opening_mark == CALL else {}
        if form.is_tagged:  # known functions only, because content may have such tags, too
            self._marks["content"] |= {f"{FUNCTION}{name}>": "call" for name in form.names}
        if form.dialect == "gemma":
            self._openers = {GEMMA_THINK: "reasoning"}
            self._marks = {
                "reasoning": {GEMMA_THOUGHT: plain_kind},
                "content": {GEMMA_THINK: "reasoning", _GEMMA_CALL: "call"},
                "call": {_GEMMA_CALLED: "content"},
            }
        elif form.dialect == "harmony":
            self._kind = "reasoning" if form.reasoning == "open" else "start"
            self._openers = {_START: "header", _CHANNEL: "header", " to=": "header"}
            body: dict[str, Kind] = {_START: "header", _CHANNEL: "header"}
            body |= dict.fromkeys(_ENDS, "header")
            self._marks = {"reasoning": body, "content": body, "call": body}
            self._marks["header"] = {_MESSAGE: "content"}  # or what the header names

    def push(self, text: str, last: bool) -> list[Part]:
        """Return the parts that this text adds. `last`: also return what was held back."""
        self._held += text
        parts: list[Part] = []
        while True:
            if self._kind == "start":
                if not self._begin(last):
                    return parts
                continue
            if self._fresh:
                self._held = self._held.lstrip()
                if self._kind == "reasoning" and self._form.dialect == "gemma":
                    if "thought\n".startswith(self._held) and not last:
                        return parts  # the name of the channel
                    self._held = self._held.removeprefix("thought\n").lstrip()
                self._fresh = not self._held
            marks = self._marks.get(self._kind, {})
            places = [(at, mark) for mark in marks if (at := self._held.find(mark)) >= 0]
            at, mark = min(places, default=(len(self._held), ""))
            content, remainder = self._held[:at], self._held[at + len(mark) :]
            if not mark and not last:
                if self._kind in ("call", "list", "header"):
                    return parts
                held_characters = max(
                    (_overlap(content, end_mark) for end_mark in marks), default=0
                )
                content, remainder = (
                    content[: len(content) - held_characters],
                    content[len(content) - held_characters :],
                )
            self._held = remainder
            self._take(content, mark, parts)
            if not mark:
                return parts
            self._kind, self._fresh = marks[mark], True
            self._follow(content, mark)

    def _begin(self, last: bool) -> bool:
        """Decide what the output begins with. Return False if that is not known yet."""
        self._held = self._held.lstrip() if self._form.dialect != "harmony" else self._held
        if not last and any(opener.startswith(self._held) for opener in self._openers):
            return False
        mark = next((opener for opener in self._openers if self._held.startswith(opener)), "")
        self._kind, self._fresh = self._openers.get(mark, self._plain_kind), True
        if self._kind != "header":  # a header is parsed with its mark
            self._held = self._held.removeprefix(mark)
        return True

    def _take(self, text: str, mark: str, parts: list[Part]) -> None:
        """Add a piece of the current part. `mark`: the mark that ends the part; "": none has
        arrived."""
        if self._kind == "list":
            parts += self._calls(text, text)
        elif self._kind == "call":
            is_whole = bool(mark) or self._form.dialect == "harmony"
            is_whole = is_whole or self._opened == TRAILING_CALL
            raw_text = text
            if self._opened == CALL:
                raw_text = f"{CALL}{text}{mark}"
            elif self._opened.startswith(FUNCTION):
                text = f"{self._opened}{text}"
                is_whole, raw_text = True, f"{text}{mark}"
            parts += self._calls(text if is_whole else "", raw_text)
        elif text and self._kind in ("reasoning", "content"):
            parts.append(Part("reasoning" if self._kind == "reasoning" else "content", text))

    def _follow(self, before: str, mark: str) -> None:
        """Set the kind of the part after a mark that does not determine it alone. `before`: the
        text before the mark."""
        self._opened = mark
        if self._form.dialect != "harmony":
            return
        if self._kind == "header":
            self._held = (mark if mark == _CHANNEL else "") + self._held
            return
        recipient = re.search(r"\bto=(?:functions\.)?([\w.-]+)", before)
        channel = re.search(re.escape(_CHANNEL) + r"\s*(\w+)", before)
        self._recipient = recipient[1] if recipient else ""
        if recipient:
            self._kind = "call"
        elif channel and channel[1] == "analysis":
            self._kind = "reasoning"

    def _calls(self, text: str, raw_text: str) -> list[Part]:
        """Return the calls in a text, or `raw_text` as content if it cannot be parsed."""
        try:
            calls = [self._call(call) for call in self._decode_calls(text)]
        except (ValueError, TypeError, LookupError, RecursionError):
            calls = []
        return calls or ([Part("content", raw_text)] if raw_text else [])

    def _decode_calls(self, text: str) -> list[Any]:
        """Return the calls as decoded JSON. Raises ValueError, LookupError, RecursionError."""
        if self._form.dialect == "harmony" and self._kind == "call":
            return [{"name": self._recipient, "arguments": json.loads(text or "{}")}]
        if self._form.dialect == "gemma" and self._kind == "call":
            return [_gemma_call(text)]
        if text.lstrip().startswith("<function="):
            return [_tagged_call(text, self._form.parameters)]
        decoded = json.loads(text)
        return decoded if isinstance(decoded, list) else [decoded]

    def _call(self, decoded: Any) -> Part:
        """Return a decoded call as a part. Raises ValueError unless it calls a known function."""
        if not isinstance(decoded, dict) or decoded.get("name") not in self._form.names:
            raise ValueError("no call")
        arguments = decoded.get("arguments", decoded.get("parameters"))
        arguments_text = (
            arguments if isinstance(arguments, str) else json.dumps(arguments, allow_nan=False)
        )
        if arguments is None:
            arguments_text = "{}"
        elif not isinstance(json.loads(arguments_text), dict):
            raise ValueError("no object")
        text = arguments_text.encode(errors="replace").decode()  # without lone surrogates
        function = CalledFunction(name=decoded["name"], arguments=text)
        return Part("call", "", ToolCall(id=f"call_{secrets.token_hex(12)}", function=function))


def _overlap(text: str, mark: str) -> int:
    """Return how many characters at the end of a text may be the beginning of a mark."""
    sizes = range(min(len(mark) - 1, len(text)), 0, -1)
    return next((size for size in sizes if text.endswith(mark[:size])), 0)


# --- calls that are not JSON


def _tagged_call(text: str, schemas: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Parse <function=f>\n<parameter=p>\nvalue\n</parameter>\n</function>, as Qwen3-Coder and
    Qwen3.5 write it. A value is text if the schema says so or it is not JSON. Raises ValueError."""
    match = re.fullmatch(r"\s*<function=([^>\n]+)>(.*?)</function>\s*", text, re.DOTALL)
    if match is None:
        raise ValueError("no call")
    name, body = match[1].strip(), match[2]
    pattern = r"<parameter=([^>\n]+)>(.*?)</parameter>"
    if re.sub(pattern, "", body, flags=re.DOTALL).strip():
        raise ValueError("no parameters")
    properties = schemas.get(name, {}).get("properties", {})
    arguments: dict[str, Any] = {}
    for key, value in re.findall(pattern, body, re.DOTALL):
        schema = properties.get(key.strip(), {})
        raw_value = value.removeprefix("\n").removesuffix("\n")
        arguments[key.strip()] = raw_value
        if schema.get("type") != "string":
            try:
                arguments[key.strip()] = json.loads(raw_value)
            except ValueError:
                pass
    return {"name": name, "arguments": arguments}


def _gemma_call(text: str) -> dict[str, Any]:
    """Parse call:name{key:<|"|>text<|"|>,other:1,list:[true]}, as Gemma 4 writes it. Raises
    ValueError, LookupError."""
    match = re.match(r"\s*call:\s*([\w.-]+)\s*(?=\{)", text)
    if match is None:
        raise ValueError("no call")
    arguments, end = _gemma_value(text, match.end())
    if text[end:].strip():
        raise ValueError("more than a call")
    return {"name": match[1], "arguments": arguments}


def _gemma_value(text: str, at: int) -> tuple[Any, int]:
    """Return the value that begins at a place, and where it ends. Raises ValueError,
    LookupError."""
    at = _past_spaces(text, at)
    if text.startswith(_GEMMA_QUOTE, at):
        end = text.index(_GEMMA_QUOTE, at + len(_GEMMA_QUOTE))
        return text[at + len(_GEMMA_QUOTE) : end], end + len(_GEMMA_QUOTE)
    if text[at] == "{":
        entries: dict[str, Any] = {}
        at = _past_spaces(text, at + 1)
        while text[at] != "}":
            key, at = _gemma_key(text, at)
            entries[key], at = _gemma_value(text, at)
            at = _past_comma(text, at, "}")
        return entries, at + 1
    if text[at] == "[":
        items: list[Any] = []
        at = _past_spaces(text, at + 1)
        while text[at] != "]":
            item, at = _gemma_value(text, at)
            items.append(item)
            at = _past_comma(text, at, "]")
        return items, at + 1
    value, end = json.JSONDecoder().raw_decode(text, at)
    return value, end


def _gemma_key(text: str, at: int) -> tuple[str, int]:
    """Return a key and where its value begins. Raises ValueError, LookupError."""
    if text.startswith(_GEMMA_QUOTE, at) or text[at] == '"':
        key, at = _gemma_value(text, at)
    else:
        end = text.index(":", at)
        key, at = text[at:end].strip(), end
    at = _past_spaces(text, at)
    if text[at] != ":":
        raise ValueError("a key without a value")
    return str(key), at + 1


def _past_comma(text: str, at: int, end: str) -> int:
    """Return the next entry of a list, or its end. Raises ValueError, LookupError."""
    at = _past_spaces(text, at)
    if text[at] == ",":
        return _past_spaces(text, at + 1)
    if text[at] != end:
        raise ValueError("no comma")
    return at


def _past_spaces(text: str, at: int) -> int:
    while text[at].isspace():
        at += 1
    return at

"""Parses a model's output, as it is generated, into reasoning, content and tool calls.

    parser = OutputParser(OutputFormat("maybe", "hermes", frozenset({"add"})))
    parser.push("<think>2+2</think>Four", True)
    # [Part("reasoning", "2+2"), Part("content", "Four")]

Text is passed on as it arrives, and a call once it is complete. Text that looks like a call but
cannot be parsed as one, or was cut off, is content. The marks of a dialect
(crossover.models.text.answer_marks) are removed from what they mark.
"""

from __future__ import annotations

import contextlib
import json
import re
import secrets
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from crossover.models.text.answer_marks import Dialect, dialect_of
from crossover.serving.http.body_types import CalledFunction, ToolCall

# The marks of each dialect (crossover.models.text.answer_marks).
THINK_OPEN, THINK_CLOSE = "<think>", "</think>"
CALL_OPEN, CALL_CLOSE = "<tool_call>", "</tool_call>"
FUNCTION_OPEN = "<function="  # inside <tool_call>, which Qwen3-Coder sometimes leaves out
GRANITE_CALL = "<|tool_call|>"  # Granite 3: a JSON list follows, up to the end of the output
GRANITE_RESPONSE_MARKS = ("<response>", "</response>")  # Granite 3: around what is not reasoning
GEMMA_CHANNEL_OPEN, GEMMA_CHANNEL_CLOSE = "<|channel>", "<channel|>"
_GEMMA_CALL_OPEN, _GEMMA_CALL_CLOSE = "<|tool_call>", "<tool_call|>"
_GEMMA_QUOTE = '<|"|>'
_HARMONY_START, _HARMONY_CHANNEL, _HARMONY_MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
_HARMONY_ENDS = ("<|end|>", "<|call|>", "<|return|>")
_PARAMETER = re.compile(r"<parameter=([^>\n]+)>")
_PARAMETER_CLOSE, _FUNCTION_CLOSE = "</parameter>", "</function>"
_NO_SCHEMAS: Mapping[str, Mapping[str, Any]] = MappingProxyType({})

# Formats of tool calls:
#   hermes    JSON in <tool_call>, or <function=f><parameter=p>, as Qwen3-Coder and Qwen3.5 write it
#   trailing  a JSON list at the end, as Granite 3 writes it
#   native    the format of the gemma or the harmony dialect
#   list      a JSON list and nothing else, as forced calls are generated
CallFormat = Literal["hermes", "trailing", "native", "list"]
# What the parser is reading. "start": not known yet. "header": of a Harmony message.
State = Literal["start", "reasoning", "content", "call", "list", "header"]


class OutputFormat(NamedTuple):
    """How an output marks reasoning and tool calls.

    `reasoning`: "maybe": the output may begin with it; "open": the prompt ends inside it; None: the
    output has none. `calls`: their format; None: no calls are parsed.
    """

    reasoning: Literal["maybe", "open"] | None
    calls: CallFormat | None
    function_names: frozenset[str]
    dialect: Dialect = "tags"
    schemas: Mapping[str, Mapping[str, Any]] = _NO_SCHEMAS  # of parameters, by function
    content_marks: tuple[str, ...] = ()  # marks around content, which are removed
    has_function_tags: bool = False  # the template shows calls as <function=f>


def format_of_output(
    template: str,
    prompt: str,
    calls: CallFormat | None,
    schemas: Mapping[str, Mapping[str, Any]],
    is_constrained: bool,
) -> OutputFormat | None:
    """Return the format of the answer to a prompt; None: all of it is content.

    `calls`: the format of tool calls; None: no calls. `schemas`: JSON schemas of the parameters of
    the functions in the prompt, by name. `is_constrained`: a grammar constrains the answer, which
    then has no marks.
    """
    function_names = frozenset(schemas)
    if is_constrained:
        return None if calls is None else OutputFormat(None, calls, function_names)
    dialect = dialect_of(template)
    prompt_end = prompt.rstrip()
    if dialect != "tags":
        reasoning_open = f"{_HARMONY_CHANNEL}analysis{_HARMONY_MESSAGE}"
        if dialect == "gemma":
            reasoning_open = f"{GEMMA_CHANNEL_OPEN}thought"
        is_open = prompt_end.endswith(reasoning_open)
        reasoning: Literal["maybe", "open"] = "open" if is_open else "maybe"
        return OutputFormat(reasoning, calls, function_names, dialect, schemas)
    output_format = OutputFormat(
        reasoning=None,
        calls=calls,
        function_names=function_names,
        dialect=dialect,
        schemas=schemas,
        content_marks=tuple(mark for mark in GRANITE_RESPONSE_MARKS if mark in template),
        has_function_tags=calls == "hermes" and FUNCTION_OPEN in template,
    )
    if THINK_CLOSE in template:
        is_open = prompt_end.endswith(THINK_OPEN)
        return output_format._replace(reasoning="open" if is_open else "maybe")
    has_marks = calls is not None or output_format.content_marks
    return output_format if has_marks else None


class Part(NamedTuple):
    """A piece of an answer: its text, or a complete call."""

    kind: Literal["role", "reasoning", "content", "call", "end"]
    text: str
    call: ToolCall | None = None


class _Marks(NamedTuple):
    """`openers`: the marks that an output may begin with. `ends`: by state, the marks that end it.
    Each mark is given with the state that follows it."""

    openers: dict[str, State]
    ends: dict[State, dict[str, State]]


def _marks_of(output_format: OutputFormat, plain_state: State) -> _Marks:
    """Return the marks of a format. `plain_state`: the state of text without marks."""
    if output_format.dialect == "gemma":
        return _Marks(
            openers={GEMMA_CHANNEL_OPEN: "reasoning"},
            ends={
                "reasoning": {GEMMA_CHANNEL_CLOSE: plain_state},
                "content": {GEMMA_CHANNEL_OPEN: "reasoning", _GEMMA_CALL_OPEN: "call"},
                "call": {_GEMMA_CALL_CLOSE: "content"},
            },
        )
    if output_format.dialect == "harmony":
        end_of_message: dict[str, State] = {_HARMONY_START: "header", _HARMONY_CHANNEL: "header"}
        end_of_message |= dict.fromkeys(_HARMONY_ENDS, "header")
        return _Marks(
            # After a prompt that ends with "<|start|>assistant", the output may go on with the
            # recipient of a call.
            openers={_HARMONY_START: "header", _HARMONY_CHANNEL: "header", " to=": "header"},
            ends={
                "reasoning": end_of_message,
                "content": end_of_message,
                "call": end_of_message,
                "header": {_HARMONY_MESSAGE: "content"},  # unless the header says otherwise
            },
        )
    # Content goes on after a content mark, so that only the mark is removed.
    content_ends: dict[str, State] = dict.fromkeys(output_format.content_marks, "content")
    call_ends: dict[str, State] = {}
    if output_format.calls == "hermes":
        content_ends[CALL_OPEN] = "call"
        call_ends[CALL_CLOSE] = "content"
    elif output_format.calls == "trailing":
        content_ends[GRANITE_CALL] = "call"
    if output_format.has_function_tags:
        # Only with the names of known functions, because content may contain such tags too.
        for name in output_format.function_names:
            content_ends[f"{FUNCTION_OPEN}{name}>"] = "call"
    return _Marks(
        openers={THINK_OPEN: "reasoning"},
        ends={
            "reasoning": {THINK_CLOSE: plain_state},
            "content": content_ends,
            "call": call_ends,
        },
    )


class OutputParser:
    """Parses the output of one sequence. It holds back only the beginning of a possible mark, white
    space before a part, and incomplete calls."""

    def __init__(self, output_format: OutputFormat) -> None:
        self._format = output_format
        self._buffer = ""  # text that is held back
        self._searched = 0  # characters of it in which no mark begins
        self._plain_state: State = "list" if output_format.calls == "list" else "content"
        self._state: State = self._plain_state
        if output_format.reasoning == "open":
            self._state = "reasoning"
        elif output_format.reasoning == "maybe" or output_format.dialect == "harmony":
            self._state = "start"
        self._is_part_empty = True  # no text of the current part has arrived
        self._opening_mark = ""  # the mark that began the current call
        self._recipient = ""  # of a Harmony message: the function that it calls
        self._openers, self._ends = _marks_of(output_format, self._plain_state)

    def push(self, text: str, last: bool) -> list[Part]:
        """Return the parts that this text adds. `last`: also return what was held back."""
        # Python appends in place to a local variable only, if nothing else refers to the text.
        buffer, self._buffer = self._buffer, ""
        buffer += text
        self._buffer = buffer
        del buffer
        parts: list[Part] = []
        while True:
            if self._state == "start":
                if not self._leave_start(last):
                    return parts
                continue
            if self._is_part_empty and not self._begin_part(last):
                return parts
            marks = self._ends.get(self._state, {})
            start = self._searched
            ends = [(end, mark) for mark in marks if (end := self._buffer.find(mark, start)) >= 0]
            self._searched = 0
            if ends:
                end, mark = min(ends)
                before = self._buffer[:end]
                self._buffer = self._buffer[end + len(mark) :]
                self._add(before, mark, parts)
                self._state = marks[mark]
                self._is_part_empty = True
                self._enter_part(before, mark)
                continue
            end = len(self._buffer)
            if not last:
                if self._state in ("call", "list", "header"):
                    longest = max(map(len, marks), default=0)
                    self._searched = max(0, len(self._buffer) - longest)
                    return parts
                end -= max((_overlap(self._buffer, mark) for mark in marks), default=0)
            complete = self._buffer[:end]
            self._buffer = self._buffer[end:]
            self._add(complete, "", parts)
            return parts

    def _leave_start(self, last: bool) -> bool:
        """Set the state by the mark that the output begins with. Return False if more text is
        needed for that."""
        if self._format.dialect != "harmony":
            self._buffer = self._buffer.lstrip()
        if not last and any(opener.startswith(self._buffer) for opener in self._openers):
            return False
        mark = next((opener for opener in self._openers if self._buffer.startswith(opener)), "")
        self._state = self._openers.get(mark, self._plain_state)
        self._is_part_empty = True
        if self._state != "header":  # the mark is part of a header, and needed to parse it
            self._buffer = self._buffer.removeprefix(mark)
        return True

    def _begin_part(self, last: bool) -> bool:
        """Skip the white space before a part. Return False if more text is needed for that."""
        self._buffer = self._buffer.lstrip()
        if self._state == "reasoning" and self._format.dialect == "gemma":
            channel_name = "thought\n"  # between the mark and the reasoning
            if channel_name.startswith(self._buffer) and not last:
                return False
            self._buffer = self._buffer.removeprefix(channel_name).lstrip()
        self._is_part_empty = not self._buffer
        return True

    def _add(self, text: str, mark: str, parts: list[Part]) -> None:
        """Add text of the current state to `parts`. `mark`: the mark that ends the state; "": none
        has arrived."""
        if self._state == "list":
            parts += self._calls(text, text)
        elif self._state == "call":
            is_complete = bool(mark) or self._format.dialect == "harmony"
            is_complete = is_complete or self._opening_mark == GRANITE_CALL
            raw_text = text
            if self._opening_mark == CALL_OPEN:
                raw_text = f"{CALL_OPEN}{text}{mark}"
            elif self._opening_mark.startswith(FUNCTION_OPEN):
                is_complete = True  # if </function> is missing, it is not parsed as a call
                text = f"{self._opening_mark}{text}"
                raw_text = f"{text}{mark}"
            parts += self._calls(text if is_complete else "", raw_text)
        elif text and self._state in ("reasoning", "content"):
            parts.append(Part("reasoning" if self._state == "reasoning" else "content", text))

    def _enter_part(self, before: str, mark: str) -> None:
        """Prepare for the part after a mark: remember how a call began, and set the state that a
        Harmony header asks for. `before`: the text before the mark."""
        self._opening_mark = mark
        if self._format.dialect != "harmony":
            return
        if self._state == "header":
            if mark == _HARMONY_CHANNEL:  # it is part of the header, and needed to parse it
                self._buffer = mark + self._buffer
            return
        recipient = re.search(r"\bto=(?:functions\.)?([\w.-]+)", before)
        channel = re.search(re.escape(_HARMONY_CHANNEL) + r"\s*(\w+)", before)
        self._recipient = recipient[1] if recipient else ""
        if recipient:
            self._state = "call"
        elif channel and channel[1] == "analysis":
            self._state = "reasoning"

    def _calls(self, text: str, raw_text: str) -> list[Part]:
        """Return the calls in a text, or `raw_text` as content if it cannot be parsed."""
        try:
            calls = [self._call(call) for call in self._decode_calls(text)]
        except (ValueError, TypeError, LookupError, RecursionError):
            calls = []
        if calls:
            return calls
        return [Part("content", raw_text)] if raw_text else []

    def _decode_calls(self, text: str) -> list[Any]:
        """Return the calls as decoded JSON. Raises ValueError, LookupError, RecursionError."""
        dialect = "tags" if self._state == "list" else self._format.dialect
        if dialect == "harmony":
            return [{"name": self._recipient, "arguments": json.loads(text or "{}")}]
        if dialect == "gemma":
            return [_gemma_call(text)]
        if text.lstrip().startswith(FUNCTION_OPEN):
            return [_tagged_call(text, self._format.schemas)]
        decoded = json.loads(text)
        return decoded if isinstance(decoded, list) else [decoded]

    def _call(self, decoded: Any) -> Part:
        """Return a decoded call as a part. Raises ValueError unless it calls a known function."""
        if not isinstance(decoded, dict) or decoded.get("name") not in self._format.function_names:
            raise ValueError("not a call of a known function")
        arguments: Any = decoded.get("arguments", decoded.get("parameters"))
        if arguments is None:
            arguments_text = "{}"
        elif isinstance(arguments, str):
            arguments_text = arguments
        else:
            arguments_text = json.dumps(arguments, allow_nan=False)
        if not isinstance(json.loads(arguments_text), dict):
            raise ValueError("the arguments are not an object")
        # Lone surrogates, which JSON can escape, cannot be encoded in the response.
        arguments_text = arguments_text.encode(errors="replace").decode()
        function = CalledFunction(name=decoded["name"], arguments=arguments_text)
        return Part("call", "", ToolCall(id=f"call_{secrets.token_hex(12)}", function=function))


def _overlap(text: str, mark: str) -> int:
    """Return how many characters at the end of a text may be the beginning of a mark."""
    for length in range(min(len(mark) - 1, len(text)), 0, -1):
        if text.endswith(mark[:length]):
            return length
    return 0


# --- calls that are not JSON


def _tagged_call(text: str, schemas: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Parse <function=f>\n<parameter=p>\nvalue\n</parameter>\n</function>, as Qwen3-Coder and
    Qwen3.5 write it. A value is text if the schema says so or it is not JSON. Raises ValueError."""
    head = re.match(r"\s*<function=([^>\n]+)>", text)
    body = text.rstrip()
    if head is None or not body.endswith(_FUNCTION_CLOSE):
        raise ValueError("not a call")
    name = head[1].strip()
    properties = schemas.get(name, {}).get("properties", {})
    arguments: dict[str, Any] = {}
    position, end = head.end(), len(body) - len(_FUNCTION_CLOSE)
    # Forward only: a search that starts again at each tag takes time quadratic in their number.
    while (position := _next_tag(body, position, end)) < end:
        parameter = _PARAMETER.match(body, position, end)
        if parameter is None:
            raise ValueError("text outside of the parameters")
        close = body.find(_PARAMETER_CLOSE, parameter.end(), end)
        if close < 0:
            raise ValueError("a parameter without an end")
        key = parameter[1].strip()
        text_value = body[parameter.end() : close].removeprefix("\n").removesuffix("\n")
        arguments[key] = text_value
        if properties.get(key, {}).get("type") != "string":
            with contextlib.suppress(ValueError):
                arguments[key] = json.loads(text_value)
        position = close + len(_PARAMETER_CLOSE)
    return {"name": name, "arguments": arguments}


def _next_tag(text: str, position: int, end: int) -> int:
    """Return the position of the next character that is no white space, at most `end`."""
    while position < end and text[position].isspace():
        position += 1
    return position


def _gemma_call(text: str) -> dict[str, Any]:
    """Parse call:name{key:<|"|>text<|"|>,other:1,list:[true]}, as Gemma 4 writes it. Raises
    ValueError, LookupError."""
    match = re.match(r"\s*call:\s*([\w.-]+)\s*(?=\{)", text)
    if match is None:
        raise ValueError("not a call")
    arguments, end = _gemma_value(text, match.end())
    if text[end:].strip():
        raise ValueError("text after the call")
    return {"name": match[1], "arguments": arguments}


def _gemma_value(text: str, position: int) -> tuple[Any, int]:
    """Return the value that begins at a position of the text, and the position after it. Raises
    ValueError, LookupError."""
    position = _skip_spaces(text, position)
    if text.startswith(_GEMMA_QUOTE, position):
        start = position + len(_GEMMA_QUOTE)
        end = text.index(_GEMMA_QUOTE, start)
        return text[start:end], end + len(_GEMMA_QUOTE)
    if text[position] == "{":
        entries: dict[str, Any] = {}
        position = _skip_spaces(text, position + 1)
        while text[position] != "}":
            key, position = _gemma_key(text, position)
            entries[key], position = _gemma_value(text, position)
            position = _skip_comma(text, position, "}")
        return entries, position + 1
    if text[position] == "[":
        items: list[Any] = []
        position = _skip_spaces(text, position + 1)
        while text[position] != "]":
            item, position = _gemma_value(text, position)
            items.append(item)
            position = _skip_comma(text, position, "]")
        return items, position + 1
    return json.JSONDecoder().raw_decode(text, position)


def _gemma_key(text: str, position: int) -> tuple[str, int]:
    """Return a key, and the position after its colon. Raises ValueError, LookupError."""
    if text.startswith(_GEMMA_QUOTE, position) or text[position] == '"':
        key, position = _gemma_value(text, position)
    else:
        end = text.index(":", position)
        key, position = text[position:end].strip(), end
    position = _skip_spaces(text, position)
    if text[position] != ":":
        raise ValueError("a key without a value")
    return str(key), position + 1


def _skip_comma(text: str, position: int, closing: str) -> int:
    """Return the position of the next entry, or of the closing bracket if there is none. Raises
    ValueError, LookupError."""
    position = _skip_spaces(text, position)
    if text[position] == ",":
        return _skip_spaces(text, position + 1)
    if text[position] != closing:
        raise ValueError("no comma between two entries")
    return position


def _skip_spaces(text: str, position: int) -> int:
    while text[position].isspace():
        position += 1
    return position

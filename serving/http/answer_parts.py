"""Parses a model's output, as it is generated, into reasoning, content and tool calls.

    parser = OutputParser(OutputFormat("maybe", "hermes", frozenset({"add"})))
    parser.push("<think>2+2</think>Four", True)
    # [Part("reasoning", "2+2"), Part("content", "Four")]

Text is passed on as it arrives. In a streamed answer the arguments of calls are, too; otherwise a
call is passed on once it is complete. Text that looks like a call but cannot be parsed as one, or
was cut off, is content. The marks of a dialect (crossover.models.text.answer_marks) are removed
from what they mark. All other text stays as the model wrote it, except line feeds behind a mark and
white space between two marks.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, NoReturn

import msgspec

from crossover.models.text.answer_marks import Dialect, dialect_of
from crossover.serving.engine.detokenize_and_stop import ThoughtMarks
from crossover.serving.http.body_types import CalledFunction, ToolCall
from crossover.serving.http.call_readers import (
    FUNCTION_OPEN,
    GEMMA_CALL_CLOSE,
    Arguments,
    CallReader,
    Complete,
    Event,
    GemmaCallReader,
    JsonArgumentsReader,
    JsonCallReader,
    Name,
    NoCall,
    TagCallReader,
    Whole,
    overlap,
)

# The marks of each dialect (crossover.models.text.answer_marks).
THINK_OPEN, THINK_CLOSE = "<think>", "</think>"
CALL_OPEN, CALL_CLOSE = "<tool_call>", "</tool_call>"
GRANITE_CALL = "<|tool_call|>"  # Granite 3: a JSON list follows, up to the end of the output
GRANITE_RESPONSE_MARKS = ("<response>", "</response>")  # Granite 3: around what is not reasoning
GEMMA_CHANNEL_OPEN, GEMMA_CHANNEL_CLOSE = "<|channel>", "<channel|>"
_GEMMA_CALL_OPEN = "<|tool_call>"
_HARMONY_START, _HARMONY_CHANNEL, _HARMONY_MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
_HARMONY_ENDS = ("<|end|>", "<|call|>", "<|return|>")
_MAX_BROKEN_CALLS = 8  # of an output are looked at again, for what follows them
_NO_SCHEMAS: Mapping[str, Mapping[str, Any]] = MappingProxyType({})

# Formats of tool calls:
#   hermes    JSON in <tool_call>, or <function=f><parameter=p>, as Qwen3-Coder and Qwen3.5 write it
#   trailing  a JSON list at the end, as Granite 3 writes it
#   native    the format of the gemma or the harmony dialect
#   list      a JSON list and nothing else, as forced calls are generated
CallFormat = Literal["hermes", "trailing", "native", "list"]
# What the parser is reading. "start": not known yet. "header": of a Harmony message.
State = Literal["start", "reasoning", "content", "call", "header"]


class OutputFormat(NamedTuple):
    """How an output marks reasoning and tool calls.

    `reasoning`: "maybe": the output may begin with it; "open": the prompt ends inside it; None: the
    output has none. `calls`: their format; None: no calls are parsed. `is_call_or_content`: the
    output is either calls or, if it does not begin with one, content without any marks.
    """

    reasoning: Literal["maybe", "open"] | None
    calls: CallFormat | None
    function_names: frozenset[str]
    dialect: Dialect = "tags"
    schemas: Mapping[str, Mapping[str, Any]] = _NO_SCHEMAS  # of parameters, by function
    content_marks: tuple[str, ...] = ()  # marks around content, which are removed
    has_function_tags: bool = False  # the template shows calls as <function=f>
    is_call_or_content: bool = False
    at_most_one_call: bool = False  # further ones are dropped


def format_of_output(
    template: str,
    prompt: str,
    calls: CallFormat | None,
    schemas: Mapping[str, Mapping[str, Any]],
    is_constrained: bool,
) -> OutputFormat | None:
    """Return the format of the answer to a prompt; None: all of it is content.

    `calls`: the format of tool calls; None: no calls. `schemas`: JSON schemas of the parameters of
    the functions in the prompt, by name. `is_constrained`: a grammar constrains the answer, so that
    it is calls or has no marks.
    """
    function_names = frozenset(schemas)
    dialect = dialect_of(template)
    has_function_tags = calls == "hermes" and FUNCTION_OPEN in template
    if is_constrained:
        if calls is None:
            return None
        if calls == "list":
            return OutputFormat(None, calls, function_names)
        return OutputFormat(
            reasoning=None,
            calls=calls,
            function_names=function_names,
            dialect=dialect,
            schemas=schemas,
            has_function_tags=has_function_tags,
            is_call_or_content=True,
        )
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
        has_function_tags=has_function_tags,
    )
    if THINK_CLOSE in template:
        is_open = prompt_end.endswith(THINK_OPEN)
        return output_format._replace(reasoning="open" if is_open else "maybe")
    has_marks = calls is not None or output_format.content_marks
    return output_format if has_marks else None


def call_openings(output_format: OutputFormat) -> tuple[str, ...]:
    """Return the texts that a call may begin with in this format."""
    if output_format.dialect == "harmony":
        return (f"{_HARMONY_CHANNEL}commentary to=functions.", " to=functions.")
    return tuple(
        mark for mark, state in _marks_of(output_format).ends["content"].items() if state == "call"
    )


def thought_marks(output_format: OutputFormat) -> ThoughtMarks | None:
    """Return how the output marks its thoughts; None: it has none."""
    if output_format.reasoning is None:
        return None
    is_open = output_format.reasoning == "open"
    if output_format.dialect == "gemma":
        return ThoughtMarks([GEMMA_CHANNEL_OPEN], [GEMMA_CHANNEL_CLOSE], is_open)
    if output_format.dialect == "harmony":
        # The headers between two messages belong to no answer either.
        opens = [f"{_HARMONY_CHANNEL}analysis", _HARMONY_START]
        answers = [f"{_HARMONY_CHANNEL}{name}" for name in ("final", "commentary")]
        return ThoughtMarks(opens, answers, is_open)
    return ThoughtMarks([THINK_OPEN], [THINK_CLOSE], is_open, only_first=True)


class Part(NamedTuple):
    """A piece of an answer.

    `call`: a complete one, or in a streamed answer also one without arguments, to which parts of
    the kind "arguments" add theirs.
    """

    kind: Literal["role", "reasoning", "content", "call", "arguments", "end"]
    text: str
    call: ToolCall | None = None


class _Marks(NamedTuple):
    """`openers`: the marks that an output may begin with. `ends`: by state, the marks that end it.
    Each mark is given with the state that follows it."""

    openers: dict[str, State]
    ends: dict[State, dict[str, State]]


def _marks_of(output_format: OutputFormat) -> _Marks:
    if output_format.dialect == "gemma":
        return _Marks(
            openers={GEMMA_CHANNEL_OPEN: "reasoning"},
            ends={
                "reasoning": {GEMMA_CHANNEL_CLOSE: "content"},
                "content": {GEMMA_CHANNEL_OPEN: "reasoning", _GEMMA_CALL_OPEN: "call"},
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
                "header": {_HARMONY_MESSAGE: "content"},  # unless the header says otherwise
            },
        )
    # Content goes on after a content mark, so that only the mark is removed.
    content_ends: dict[str, State] = dict.fromkeys(output_format.content_marks, "content")
    if output_format.calls == "hermes":
        content_ends[CALL_OPEN] = "call"
    elif output_format.calls == "trailing":
        content_ends[GRANITE_CALL] = "call"
    if output_format.has_function_tags:
        # Only with the names of known functions, because content may contain such tags too.
        for name in output_format.function_names:
            content_ends[f"{FUNCTION_OPEN}{name}>"] = "call"
    return _Marks(
        openers={THINK_OPEN: "reasoning"},
        ends={
            "reasoning": {THINK_CLOSE: "content"},
            "content": content_ends,
        },
    )


class OutputParser:
    """Parses the output of one sequence. It holds back only the beginning of a possible mark, white
    space before a part, and calls that cannot be told from other text yet.

    `is_streamed`: pass on the arguments of calls as they arrive.
    """

    def __init__(self, output_format: OutputFormat, is_streamed: bool = False) -> None:
        self._format = output_format
        self._is_streamed = is_streamed
        self._buffer = ""  # text that is held back
        self._state: State = "content"
        if output_format.calls == "list":
            self._state = "call"
        elif output_format.reasoning == "open":
            self._state = "reasoning"
        elif (
            output_format.reasoning == "maybe"
            or output_format.dialect == "harmony"
            or output_format.is_call_or_content
        ):
            self._state = "start"
        # White space is held back until what follows it is known.
        self._gap: Literal["at start", "behind mark"] | None = "at start"
        if self._state == "reasoning":
            self._gap = "behind mark"
        self._openers, self._ends = _marks_of(output_format)
        self._reader: CallReader | None = None  # of the current call
        self._opening_mark = ""  # the mark that began the current call
        self._recipient = ""  # of a Harmony message: the function that it calls
        self._pending_name: str | None = None  # of a call that is being read
        self._pending_arguments: list[str] = []
        self._is_dropped = False  # the current call is one too many
        self._is_behind_call = False  # its closing mark may follow
        self._call_count = 0
        self._broken_count = 0
        self._closing_mark = ""
        if output_format.dialect == "gemma":
            self._closing_mark = GEMMA_CALL_CLOSE
        elif output_format.calls == "hermes" and output_format.dialect == "tags":
            self._closing_mark = CALL_CLOSE
        if output_format.is_call_or_content:
            self._openers = dict.fromkeys(call_openings(output_format), "call")
            if output_format.dialect == "harmony":
                self._openers = dict.fromkeys(self._openers, "header")

    def push(self, text: str, last: bool) -> list[Part]:
        """Return the parts that this text adds. `last`: also return what was held back."""
        buffer, self._buffer = self._buffer, ""
        self._buffer = buffer + text
        parts: list[Part] = []
        while True:
            if self._state == "start":
                if not self._leave_start(last):
                    return parts
                continue
            if self._state == "call":
                if not self._read_calls(last, parts):
                    return parts
                continue
            if self._gap is not None:
                if not self._leave_gap(last):
                    return parts
                continue
            marks = self._ends.get(self._state, {})
            ends = [(end, mark) for mark in marks if (end := self._buffer.find(mark)) >= 0]
            if ends:
                end, mark = min(ends)
                before = self._buffer[:end]
                self._buffer = self._buffer[end + len(mark) :]
                self._add(before, parts)
                self._state = marks[mark]
                self._gap = "behind mark"
                self._enter_part(before, mark)
                continue
            end = len(self._buffer)
            if not last:
                if self._state == "header":
                    return parts
                end -= max((overlap(self._buffer, mark) for mark in marks), default=0)
            complete = self._buffer[:end]
            self._buffer = self._buffer[end:]
            self._add(complete, parts)
            return parts

    def _leave_start(self, last: bool) -> bool:
        """Set the state by the mark that the output begins with. Return False if more text is
        needed for that."""
        text = self._buffer
        if self._format.dialect != "harmony":
            text = text.lstrip()
        if not last and any(opener.startswith(text) for opener in self._openers):
            return False
        mark = next((opener for opener in self._openers if text.startswith(opener)), "")
        if not mark:
            self._state = "content"
            if self._format.is_call_or_content:
                self._ends = {}
            return True
        self._state = self._openers[mark]
        self._gap = "behind mark"
        if self._state == "header":  # the mark is part of a header, and needed to parse it
            return True
        self._buffer = text.removeprefix(mark)
        self._enter_part("", mark)
        return True

    def _leave_gap(self, last: bool) -> bool:
        """Skip what does not belong to the part that begins here: white space before another mark,
        and line feeds behind one. Return False if more text is needed to know."""
        text = self._buffer.lstrip()
        marks = [*self._ends.get(self._state, {})]
        if self._is_behind_call and self._closing_mark:
            if text.startswith(self._closing_mark):
                self._buffer = text.removeprefix(self._closing_mark)
                return True
            marks.append(self._closing_mark)
        if self._state == "reasoning" and self._format.dialect == "gemma":
            channel_name = "thought\n"  # between the mark and the reasoning
            if text.startswith(channel_name):
                self._buffer = text.removeprefix(channel_name)
                return True
            marks.append(channel_name)
        if not last and any(mark.startswith(text) and mark != text for mark in marks or [" "]):
            return False
        if any(text.startswith(mark) for mark in marks) or (not text and self._call_count):
            self._buffer = text
        elif self._gap == "behind mark":
            self._buffer = self._buffer.lstrip("\r\n")
        self._gap = None
        self._is_behind_call = False
        return True

    def _add(self, text: str, parts: list[Part]) -> None:
        """Add text of the current state to `parts`."""
        if self._state == "reasoning":
            _append_text(parts, "reasoning", text)
        elif self._state == "content":
            _append_text(parts, "content", text)

    def _enter_part(self, before: str, mark: str) -> None:
        """Prepare for the part after a mark: remember how a call began, and set the state that a
        Harmony header asks for. `before`: the text before the mark."""
        self._opening_mark = mark
        if mark.startswith(FUNCTION_OPEN):  # it is a part of the call
            self._buffer = mark + self._buffer
            self._opening_mark = FUNCTION_OPEN
        if self._format.dialect != "harmony":
            return
        if self._state == "header":
            if mark == _HARMONY_CHANNEL:  # it is part of the header, and needed to parse it
                self._buffer = mark + self._buffer
            self._gap = None
            return
        recipient = re.search(r"\bto=(?:functions\.)?([\w.-]+)", before)
        channel = re.search(re.escape(_HARMONY_CHANNEL) + r"\s*(\w+)", before)
        self._recipient = recipient[1] if recipient else ""
        if recipient:
            self._state = "call"
        elif channel and channel[1] == "analysis":
            self._state = "reasoning"

    # --- calls

    def _read_calls(self, last: bool, parts: list[Part]) -> bool:
        """Read the calls behind a mark. Return False if more text is needed."""
        if self._reader is None:
            self._reader = self._make_reader(last)
            if self._reader is None:
                return False
        text, self._buffer = self._buffer, ""
        is_call = self._is_behind_call
        while True:
            for event in self._reader.push(text, last):
                is_call = self._take_event(event, parts)
                if not is_call:
                    self._reader.stop()
            if not self._reader.is_paused or self._reader.rest is not None:
                break
            text = ""
        self._is_behind_call = is_call
        if self._reader.rest is None:
            return False
        self._buffer += self._reader.rest
        self._reader = None
        self._state = "content"
        # White space behind a text that is no call belongs to it.
        self._is_behind_call = is_call or self._format.dialect != "tags"
        self._gap = "behind mark" if self._is_behind_call else None
        return True

    def _make_reader(self, last: bool) -> CallReader | None:
        """Return a reader for the call that begins here; None: more text is needed to choose."""
        if self._format.calls == "list":
            return JsonCallReader(self._format.function_names)
        if self._format.dialect == "harmony":
            return JsonArgumentsReader(self._recipient, self._format.function_names)
        if self._format.dialect == "gemma":
            return GemmaCallReader()
        text = self._buffer.lstrip()
        if not last and FUNCTION_OPEN.startswith(text) and text != FUNCTION_OPEN:
            return None
        if text.startswith(FUNCTION_OPEN):
            return TagCallReader(self._format.schemas)
        return JsonCallReader(self._format.function_names)

    def _take_event(self, event: Event, parts: list[Part]) -> bool:
        """Add what a reader found to `parts`. Return whether it is, or belongs to, a call."""
        if isinstance(event, Name):
            self._pending_name = event.name
            self._pending_arguments = []
            if self._is_streamed:
                self._begin_call(event.name, "", parts)
        elif isinstance(event, Arguments):
            if not self._is_streamed:
                self._pending_arguments.append(event.text)
            elif not self._is_dropped:
                _append_arguments(parts, event.text)
        elif isinstance(event, Complete):
            return self._end_call(event.raw_text, parts)
        elif isinstance(event, Whole):
            try:
                calls = event.call if isinstance(event.call, list) else [event.call]
                checked = [self._checked(call) for call in calls]
            except (ValueError, TypeError):
                return self._add_no_call(NoCall(event.raw_text), parts)
            for name, arguments in checked:
                self._begin_call(name, arguments, parts)
            self._opening_mark = ""
        else:
            return self._add_no_call(event, parts)
        return True

    def _begin_call(self, name: str, arguments: str, parts: list[Part]) -> None:
        self._is_dropped = self._format.at_most_one_call and self._call_count > 0
        if self._is_dropped:
            return
        self._call_count += 1
        # Lone surrogates, which JSON can escape, cannot be encoded in the response.
        arguments = arguments.encode(errors="replace").decode()
        function = CalledFunction(name=name, arguments=arguments)
        call = ToolCall(id=f"call_{secrets.token_hex(12)}", type="function", function=function)
        parts.append(Part("call", "", call))

    def _end_call(self, raw_text: str, parts: list[Part]) -> bool:
        """Add a call of which the end was read, if it was not passed on yet. Return whether it is
        one."""
        name, self._pending_name = self._pending_name, None
        assert name is not None
        if not self._is_streamed:
            arguments = "".join(self._pending_arguments)
            try:
                if not isinstance(_decoded(arguments), dict):
                    raise ValueError("the arguments are not an object")
            except (ValueError, RecursionError):
                return self._add_no_call(NoCall(raw_text), parts)
            self._begin_call(name, arguments, parts)
        self._opening_mark = ""
        return True

    def _add_no_call(self, event: NoCall, parts: list[Part]) -> bool:
        """Add a text that is no call as content; a forced call that was cut off is added as far as
        it came. Return whether it is a call."""
        name, self._pending_name = self._pending_name, None
        if name is not None and self._is_streamed:
            return True  # it was passed on
        is_forced = self._format.calls == "list"
        if is_forced and (name or event.name) in self._format.function_names:
            self._begin_call(name or event.name or "", "".join(self._pending_arguments), parts)
            self._pending_arguments = []
            return True
        self._pending_arguments = []
        text = f"{CALL_OPEN if self._opening_mark == CALL_OPEN else ''}{event.raw_text}"
        self._opening_mark = ""
        # What follows the closing mark of a broken call may be another call.
        end = text.find(self._closing_mark) if self._closing_mark else -1
        if end >= 0 and self._broken_count < _MAX_BROKEN_CALLS:
            self._broken_count += 1
            end += len(self._closing_mark)
            self._buffer = text[end:]
            text = text[:end].removesuffix(GEMMA_CALL_CLOSE)
        _append_text(parts, "content", text)
        return False

    def _checked(self, call: Any) -> tuple[str, str]:
        """Return the name and the arguments of a decoded call. Raises ValueError, TypeError unless
        it calls a known function with an object."""
        if not isinstance(call, dict) or call.get("name") not in self._format.function_names:
            raise ValueError("not a call of a known function")
        arguments = call.get("arguments", call.get("parameters"))
        if arguments is None:
            return call["name"], "{}"
        text = arguments
        if not isinstance(arguments, str):
            text = json.dumps(arguments, allow_nan=False, ensure_ascii=False)
        if not isinstance(_decoded(text), dict):
            raise ValueError("the arguments are not an object")
        return call["name"], text


def _append_text(parts: list[Part], kind: Literal["reasoning", "content"], text: str) -> None:
    """Add text to the last part, if that is of this kind, or else as a new part."""
    if parts and parts[-1].kind == kind:
        parts[-1] = Part(kind, parts[-1].text + text)
    elif text:
        parts.append(Part(kind, text))


def _append_arguments(parts: list[Part], text: str) -> None:
    """Add arguments to the call that is the last part, or to one that was passed on before."""
    last = parts[-1] if parts else None
    if last is not None and last.call is not None:
        function = last.call.function
        function = msgspec.structs.replace(function, arguments=function.arguments + text)
        call = msgspec.structs.replace(last.call, function=function)
        parts[-1] = last._replace(call=call)
    elif last is not None and last.kind == "arguments":
        parts[-1] = last._replace(text=last.text + text)
    else:
        parts.append(Part("arguments", text))


def _decoded(text: str) -> Any:
    """Return decoded JSON. Raises ValueError, also for NaN and Infinity, which JSON has not."""
    return json.loads(text, parse_constant=_refuse_constant)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")

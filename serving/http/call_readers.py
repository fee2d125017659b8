"""Reads tool calls while a model writes them, in each format that models were trained on.

    reader = JsonCallReader(frozenset({"add"}))
    reader.push('{"name": "add", "arguments": {"a"', False)
    # [Name("add"), Arguments('{"a"')]
    reader.push(": 1}}</tool_call> Done", True)
    # [Arguments(": 1}"), Complete(...)], and reader.rest is "</tool_call> Done"

A call ends where its own syntax ends, not at the first mark: its arguments may contain any mark as
text. The arguments are passed on as the model wrote them. Each character is looked at a bounded
number of times, however the text is cut.
"""

from __future__ import annotations

import contextlib
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, NamedTuple

FUNCTION_OPEN = "<function="
GEMMA_CALL_CLOSE = "<tool_call|>"
_GEMMA_QUOTE = '<|"|>'
_PARAMETER_OPEN, _PARAMETER_CLOSE, _FUNCTION_CLOSE = "<parameter=", "</parameter>", "</function>"
# The usual beginning of a call, up to its arguments. Others are read when they are complete.
_HEAD = re.compile(
    r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)
_NAME = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")')
_MAX_HEAD_CHARACTERS = 1000
_BRACKET_OR_QUOTE = re.compile(r'["{}\[\]]')
_QUOTE_OR_BACKSLASH = re.compile(r'["\\]')
_TAG = re.compile(r"<(?:function|parameter)=([^>\n]+)>")
_MAX_TAG_CHARACTERS = 300
# A closing tag inside of a value is text, unless another tag of the call follows it.
_VALUE_END = re.compile(rf"{_PARAMETER_CLOSE}\s*(?={_PARAMETER_OPEN}|{_FUNCTION_CLOSE})")
_GEMMA_QUOTE_OR_CLOSE = re.compile(rf"{re.escape(_GEMMA_QUOTE)}|{re.escape(GEMMA_CALL_CLOSE)}")


class Name(NamedTuple):
    """A call of this function begins."""

    name: str


class Arguments(NamedTuple):
    """The next piece of the arguments' JSON."""

    text: str


class Complete(NamedTuple):
    """The call has ended. `raw_text`: as it was written."""

    raw_text: str


class Whole(NamedTuple):
    """A call that was read at its end, as decoded JSON. `raw_text`: as it was written."""

    call: Any
    raw_text: str


class NoCall(NamedTuple):
    """What was read since the last complete call is not a call, or was cut off. `name`: the
    function that it calls, if it says so."""

    raw_text: str
    name: str | None = None


Event = Name | Arguments | Complete | Whole | NoCall


class CallReader(ABC):
    """Reads the calls after one opening mark. `rest`: the text after them, once they have ended."""

    def __init__(self) -> None:
        self.rest: str | None = None
        self._buffer = ""  # text that has not been read yet
        self._read: list[str] = []  # what has been read of the current call
        self._events: list[Event] = []
        self._is_paused = False  # until the caller has seen whether the last event is a call

    def push(self, text: str, last: bool) -> list[Event]:
        """Return what this text adds. `last`: the text ends here."""
        # Python appends in place to a local variable only, if nothing else refers to the text.
        buffer, self._buffer = self._buffer, ""
        buffer += text
        self._buffer = buffer
        del buffer
        self._is_paused = False
        while self.rest is None and not self._is_paused and self._advance(last):
            pass
        if last and self.rest is None and not self._is_paused:
            self._fail()
        events, self._events = self._events, []
        return events

    @property
    def is_paused(self) -> bool:
        """Return whether there is more to read in what was pushed."""
        return self._is_paused

    def stop(self) -> None:
        """Read no further calls: what was read last is none."""
        if self.rest is None:
            self._end()

    @abstractmethod
    def _advance(self, last: bool) -> bool:
        """Read on. Return False if more text is needed."""

    def _take(self, count: int) -> str:
        """Read so many characters of the buffer and return them."""
        text = self._buffer[:count]
        self._buffer = self._buffer[count:]
        self._read.append(text)
        return text

    def _complete(self) -> None:
        self._events.append(Complete("".join(self._read)))
        self._read = []

    def _end(self) -> None:
        """End the calls before the buffer."""
        self.rest = self._buffer
        self._buffer = ""

    def _fail(self, name: str | None = None) -> None:
        """What is in the buffer and what was read of this call is not a call."""
        self._take(len(self._buffer))
        self._events.append(NoCall("".join(self._read), name))
        self.rest = ""


class _JsonScanner:
    """Finds the end of a JSON object or list that comes in pieces."""

    def __init__(self, depth: int = 0) -> None:
        self._depth = depth
        self._is_in_text = False
        self._is_escaped = False  # the next character follows a backslash

    def end(self, text: str, start: int = 0) -> int | None:
        """Return where in the piece the value ends; None: it goes on. Scans from `start`."""
        position = start
        while position < len(text):
            if self._is_escaped:
                self._is_escaped = False
                position += 1
                continue
            pattern = _QUOTE_OR_BACKSLASH if self._is_in_text else _BRACKET_OR_QUOTE
            match = pattern.search(text, position)
            if match is None:
                return None
            position = match.end()
            if match[0] == "\\":
                self._is_escaped = True
            elif match[0] == '"':
                self._is_in_text = not self._is_in_text
            else:
                self._depth += 1 if match[0] in "{[" else -1
                if self._depth <= 0:
                    return position
        return None


class JsonCallReader(CallReader):
    """Reads {"name": ..., "arguments": {...}}, or a list of such objects."""

    def __init__(self, function_names: frozenset[str]) -> None:
        super().__init__()
        self._names = function_names
        self._state = self._read_item
        self._is_list = False
        self._scanner = _JsonScanner()
        self._scanned = 0  # characters of the buffer that the scanner has seen

    def _advance(self, last: bool) -> bool:
        return self._state(last)

    def _read_item(self, last: bool) -> bool:
        """Read up to the arguments of the next call."""
        spaces = len(self._buffer) - len(self._buffer.lstrip())
        if spaces == len(self._buffer):
            return False
        first = self._buffer[spaces]
        if self._scanned == 0:
            if first == "[" and not self._is_list:
                self._is_list = True
                self._take(spaces + 1)
                return True
            if first in ",]" and self._is_list:
                self._take(spaces + 1)
                if first == "]":
                    self._end()
                return True
            if first != "{":
                self._fail_at_once()
                return False
        head = _HEAD.match(self._buffer, 0, _MAX_HEAD_CHARACTERS)
        if head is not None and _text_of(head[1]) in self._names:
            self._events.append(Name(_text_of(head[1])))
            self._take(head.end())
            self._scanner = _JsonScanner()
            self._scanned = 0
            self._state = self._read_arguments
            return True
        end = self._scanner.end(self._buffer, self._scanned)
        self._scanned = len(self._buffer)
        if end is not None:
            self._read_whole(end)
            return True
        if last and (name := _NAME.match(self._buffer)) is not None:
            self._fail(_text_of(name[1]))
        elif len(self._buffer) > _MAX_HEAD_CHARACTERS:
            self._take(len(self._buffer))
            self._state = self._read_to_end
        return False

    def _read_to_end(self, last: bool) -> bool:
        """Read on to the end of a call with another beginning than the usual one."""
        end = self._scanner.end(self._buffer)
        if end is None:
            self._take(len(self._buffer))
            return False
        self._read_whole(end)
        return True

    def _read_whole(self, end: int) -> None:
        """Read a call that ends in the buffer."""
        self._take(end)
        raw_text = "".join(self._read)
        try:
            self._events.append(Whole(json.loads(raw_text.lstrip("[, \t\r\n")), raw_text))
        except (ValueError, RecursionError):
            self._events.append(NoCall(raw_text))
        self._next_call()

    def _next_call(self) -> None:
        self._read = []
        self._scanner = _JsonScanner()
        self._scanned = 0
        self._state = self._read_item
        self._is_paused = self._is_list
        if not self._is_list:
            self._end()

    def _read_arguments(self, last: bool) -> bool:
        end = self._scanner.end(self._buffer)
        text = self._take(len(self._buffer) if end is None else end)
        if text:
            self._events.append(Arguments(text))
        if end is None:
            return False
        self._complete()
        self._state = self._read_behind_arguments
        return True

    def _read_behind_arguments(self, last: bool) -> bool:
        """Read the end of the object around the arguments, which some models leave out."""
        stripped = self._buffer.lstrip()
        if stripped.startswith(","):  # more keys, which say nothing
            self._scanner = _JsonScanner(depth=1)
            self._state = self._skip_keys
            return True
        if not stripped and not last:
            return False
        if stripped.startswith("}"):
            self._buffer = stripped[1:]
        self._next_call()
        if self._is_list and last and not self._buffer:
            self._end()
        return True

    def _skip_keys(self, last: bool) -> bool:
        end = self._scanner.end(self._buffer)
        self._buffer = "" if end is None else self._buffer[end:]
        if end is None and not last:
            return False
        self._next_call()
        return True

    def _fail_at_once(self) -> None:
        """The text is no JSON: give all of it back."""
        rest = "".join([*self._read, self._buffer])
        self._events.append(NoCall(""))
        self.rest = rest

    def _fail(self, name: str | None = None) -> None:
        if self._is_list and not "".join(self._read).strip("[, \t\r\n") and not self._buffer:
            self._end()  # the list was cut off between two calls
            return
        super()._fail(name)


class JsonArgumentsReader(CallReader):
    """Reads the arguments of a call whose function is known already, up to a mark that begins with
    "<|" (of Harmony). Without text, there are no arguments."""

    def __init__(self, name: str, function_names: frozenset[str]) -> None:
        super().__init__()
        self._name = name if name in function_names else None
        self._scanner = _JsonScanner()
        self._has_begun = False

    def _advance(self, last: bool) -> bool:
        if not self._has_begun:
            stripped = self._buffer.lstrip()
            if not last and (not stripped or stripped == "<"):
                return False
            if self._name is None or (stripped and not stripped.startswith(("{", "<|"))):
                self._events.append(NoCall(""))
                self._end()
                return False
            self._events.append(Name(self._name))
            if not stripped.startswith("{"):
                self._events.append(Arguments("{}"))
                self._complete()
                self._end()
                return False
            self._has_begun = True
        end = self._scanner.end(self._buffer)
        if text := self._take(len(self._buffer) if end is None else end):
            self._events.append(Arguments(text.lstrip() if len(self._read) == 1 else text))
        if end is not None:
            self._complete()
            self._end()
        return False


class TagCallReader(CallReader):
    r"""Reads <function=f>\n<parameter=p>\nvalue\n</parameter>\n</function>, as Qwen3-Coder and
    Qwen3.5 write it. A value is a text if its schema says so or it is not JSON."""

    def __init__(self, schemas: Mapping[str, Mapping[str, Any]]) -> None:
        super().__init__()
        self._schemas = schemas
        self._state = self._read_function
        self._properties: Mapping[str, Any] = {}
        self._separator = "{"  # before the next key
        self._value: list[str] = []  # of a parameter that is not a text
        self._is_text = False
        self._is_value_empty = True  # nothing of the value was read

    def _advance(self, last: bool) -> bool:
        return self._state(last)

    def _read_function(self, last: bool) -> bool:
        spaces = len(self._buffer) - len(self._buffer.lstrip())
        tag = _TAG.match(self._buffer, spaces)
        if tag is None:
            if ">" in self._buffer or len(self._buffer) > _MAX_TAG_CHARACTERS:
                self._give_up()
            return False
        name = tag[1].strip()
        if name not in self._schemas:
            self._give_up()
            return False
        self._events.append(Name(name))
        properties = self._schemas[name].get("properties")
        self._properties = properties if isinstance(properties, Mapping) else {}
        self._take(tag.end())
        self._state = self._read_tag
        return True

    def _read_tag(self, last: bool) -> bool:
        """Read the tag of the next parameter, or the end of the function."""
        self._take(len(self._buffer) - len(self._buffer.lstrip()))
        if self._buffer.startswith(_FUNCTION_CLOSE):
            self._take(len(_FUNCTION_CLOSE))
            self._events.append(Arguments("{}" if self._separator == "{" else "}"))
            self._complete()
            self._end()
            return True
        tag = _TAG.match(self._buffer)
        if tag is not None and self._buffer.startswith(_PARAMETER_OPEN):
            key = tag[1].strip()
            schema = self._properties.get(key)
            self._is_text = isinstance(schema, Mapping) and schema.get("type") == "string"
            quote = '"' if self._is_text else ""
            self._events.append(Arguments(f"{self._separator}{json.dumps(key)}: {quote}"))
            self._separator = ", "
            self._is_value_empty = True
            self._take(tag.end())
            self._state = self._read_value
            return True
        is_tag = any(_begins(self._buffer, tag) for tag in (_PARAMETER_OPEN, _FUNCTION_CLOSE))
        if not is_tag or len(self._buffer) > _MAX_TAG_CHARACTERS:
            self._give_up()
        return False

    def _read_value(self, last: bool) -> bool:
        end = _VALUE_END.search(self._buffer)
        if end is not None:
            self._read_piece(end.start(), is_last=True)
            if not self._is_text:
                text = "".join(self._value)
                self._value = []
                value: Any = text
                with contextlib.suppress(ValueError, RecursionError):
                    value = json.loads(text)
                self._events.append(Arguments(json.dumps(value, ensure_ascii=False)))
            else:
                self._events.append(Arguments('"'))
            self._take(len(_PARAMETER_CLOSE))
            self._state = self._read_tag
            return True
        # The end of the buffer may be the beginning of the value's end.
        start = self._buffer.rfind(_PARAMETER_CLOSE)
        following = self._buffer[start + len(_PARAMETER_CLOSE) :].lstrip()
        if start < 0 or not (
            _begins(following, _PARAMETER_OPEN) or _begins(following, _FUNCTION_CLOSE)
        ):
            start = len(self._buffer) - overlap(self._buffer, _PARAMETER_CLOSE)
        if start > 0 and self._buffer[start - 1] == "\n":
            start -= 1
        self._read_piece(start, is_last=False)
        return False

    def _read_piece(self, count: int, *, is_last: bool) -> None:
        """Read so many characters of the value. The line feeds at its beginning and end belong to
        the tags."""
        text = self._take(count)
        if not text:
            return
        if self._is_value_empty:
            text = text.removeprefix("\n")
            self._is_value_empty = False
        if is_last:
            text = text.removesuffix("\n")
        if not self._is_text:
            self._value.append(text)
        elif text:
            self._events.append(Arguments(json.dumps(text, ensure_ascii=False)[1:-1]))

    def _give_up(self) -> None:
        """This is no call: give the text back that has not been read."""
        self._events.append(NoCall("".join(self._read)))
        self._end()


class GemmaCallReader(CallReader):
    """Reads call:name{key:<|"|>text<|"|>,other:1,list:[true]}, as Gemma 4 writes it, when it is
    complete."""

    def __init__(self) -> None:
        super().__init__()
        self._is_in_text = False
        self._searched = 0  # characters of the buffer

    def _advance(self, last: bool) -> bool:
        for match in _GEMMA_QUOTE_OR_CLOSE.finditer(self._buffer, self._searched):
            self._searched = match.end()
            if match[0] == _GEMMA_QUOTE:
                self._is_in_text = not self._is_in_text
            elif not self._is_in_text:
                self._read_whole(match.start())
                return False
        longest = max(len(_GEMMA_QUOTE), len(GEMMA_CALL_CLOSE)) - 1
        self._searched = max(self._searched, len(self._buffer) - longest)
        if last:
            self._read_whole(len(self._buffer))
        return False

    def _read_whole(self, end: int) -> None:
        raw_text = self._take(end)
        try:
            self._events.append(Whole(_gemma_call(raw_text), raw_text))
        except (ValueError, LookupError, RecursionError):
            self._events.append(NoCall(raw_text))
        self._end()


def _text_of(json_text: str) -> str:
    """Return the text that a JSON string stands for; "" if it is not valid."""
    try:
        return str(json.loads(json_text))
    except ValueError:
        return ""


def _begins(text: str, tag: str) -> bool:
    """Return whether the text begins with the tag, or may do so when more of it has come."""
    return text.startswith(tag) or tag.startswith(text)


def overlap(text: str, mark: str) -> int:
    """Return how many characters at the end of a text may be the beginning of a mark."""
    for length in range(min(len(mark) - 1, len(text)), 0, -1):
        if text.endswith(mark[:length]):
            return length
    return 0


# --- Gemma's values


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

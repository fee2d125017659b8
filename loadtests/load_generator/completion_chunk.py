"""One event of a streamed completion, as the various servers with OpenAI's API write it.

    chunk = read_chunk(b'{"choices":[{"delta":{"content":"a"}}]}')
    chunk.choices[0].delta.shows, chunk.usage, words_of(chunk.error)

The rule: what OpenAI's own client reads without an error is not a failure. A field that is null,
empty or missing means nothing. `decode_chunk` is fast and reads nearly all events, but raises an
error if a field has another type. `read_chunk` reads these events too, more slowly.
"""

from __future__ import annotations

import html
import json
import re
from typing import Any

import msgspec

MAX_WORDS = 500  # characters of a server's error message that are kept
# Levels of lists and objects that are searched. Each takes a call, and a server may nest them as
# deep as it likes.
MAX_DEPTH = 64
_ERROR_KEYS = ("error", "errors", "error_message", "error_msg")
_WORD_KEYS = ("message", "detail", "details", "msg", "status_msg", "title")
_MESSAGE_KEYS = (*_ERROR_KEYS, *_WORD_KEYS, "reason")
_CODE_KEYS = ("code", "status_code", "status")
# Keys that describe a part of a message but have no content. OpenRouter sends parts of reasoning
# with nothing but a format or a signature.
_PLACE_KEYS = frozenset(("type", "index", "id", "role", "name_index", "format", "signature"))
_OPEN_TAG, _CLOSE_TAG = "<think>", "</think>"
MAX_BLANKS = 16  # whitespace characters that may precede <think>
MAX_PAGE = 1 << 14  # characters of an HTML page that are searched for its words
_PAGE = re.compile(r"\s*<(!doctype|\?xml|!--|html|head|title|body|center|div|h1|p|pre)\b", re.I)
_UNSEEN = re.compile(r"<!--.*?-->|<(head|script|style)\b.*?</\1\s*>", re.I | re.DOTALL)
_TITLE = re.compile(r"<title\b[^>]*>(.*?)</title", re.I | re.DOTALL)
_TAG = re.compile(r"<[^<>]*>")
_THINKING_TYPES = ("thinking", "reasoning", "redacted_thinking", "reasoning_text")


class ChunkDelta(msgspec.Struct, gc=False):
    """What a chunk adds to a chat answer. Each field may be a text, a list of parts, or null."""

    content: Any = None
    reasoning_content: Any = None
    reasoning: Any = None
    tool_calls: Any = None
    thinking: Any = None
    reasoning_details: Any = None
    refusal: Any = None
    function_call: Any = None
    audio: Any = None
    images: Any = None  # OpenRouter
    thinking_blocks: Any = None  # LiteLLM
    reasoning_text: Any = None  # GitHub Copilot

    @property
    def shows(self) -> bool:
        """Whether it has any content that a reader would see."""
        return any(shows(getattr(self, name)) for name in self.__struct_fields__)

    @property
    def acts(self) -> bool:
        """Whether it answers by something other than text: a tool call, a refusal, sound or a
        picture."""
        fields = (self.tool_calls, self.refusal, self.function_call, self.audio, self.images)
        parts = self.content if isinstance(self.content, list) else ()
        return any(map(shows, fields)) or any(map(_is_picture, parts))


class ChunkChoice(msgspec.Struct, gc=False):
    """One choice of a chunk. /v1/completions sends `text`, and the chat route `delta`; some servers
    send `message` instead of `delta`.
    """

    text: Any = None
    delta: ChunkDelta | None = None
    message: ChunkDelta | None = None
    finish_reason: Any = None
    error: Any = None  # OpenRouter: the error of a provider


class PromptDetails(msgspec.Struct, gc=False):
    cached_tokens: int | None = None


class ChunkUsage(msgspec.Struct, gc=False):
    """Token counts."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: PromptDetails | None = None

    @property
    def cached_tokens(self) -> int | None:
        details = self.prompt_tokens_details
        return None if details is None else details.cached_tokens

    def over(self, earlier: ChunkUsage) -> ChunkUsage:
        """Return these counts, completed with earlier ones."""
        prompt, answer, cached = self.prompt_tokens, self.completion_tokens, self.cached_tokens
        return ChunkUsage(
            earlier.prompt_tokens if prompt is None else prompt,
            earlier.completion_tokens if answer is None else answer,
            PromptDetails(earlier.cached_tokens if cached is None else cached),
        )


class Chunk(msgspec.Struct, gc=False):
    """One event of /v1/completions or /v1/chat/completions."""

    choices: tuple[ChunkChoice, ...] | None = None
    usage: ChunkUsage | None = None
    error: Any = None
    x_groq: Any = None  # Groq: token counts, or why a stream was stopped early


decode_chunk = msgspec.json.Decoder(Chunk).decode


class ReasoningWatch:
    """Finds where the answer of a stream begins, behind its reasoning. Reasoning comes in fields of
    its own, in parts of a list, or between <think> and </think> at the start of the text.

    `keeps_text`: collect the pieces of the answer in `texts`.
    """

    def __init__(self, *, keeps_text: bool = False) -> None:
        self.texts: list[str] | None = [] if keeps_text else None
        # Start of the text that may still become <think> or </think>; None: the answer has begun.
        self._opening: str | None = ""
        self._has_reasoned = False
        self._is_in_tags = False

    def reads_answer(self, chunk: Chunk) -> bool:
        """Whether a chunk contains a part of the answer. Call it with every chunk with content, in
        order."""
        has_answer = False
        for choice in chunk.choices or ():
            delta = choice.delta or choice.message
            text = text_of(choice.text)
            if delta is not None:
                text = text_of(delta.content) or text
            if delta is not None:
                has_answer = has_answer or delta.acts
                self._has_reasoned = self._has_reasoned or (not text and not delta.acts)
            text = self._behind_tags(text) if text else ""
            if text and self.texts is not None:  # sent again, and so encoded, in the next turn
                self.texts.append(text.encode("utf-8", "replace").decode())
            # Blank lines between reasoning and answer are not a part of the answer.
            has_answer = has_answer or bool(text.strip() if self._has_reasoned else text)
        return has_answer

    def _behind_tags(self, text: str) -> str:
        """Return the part of a piece of text that is behind <think> and </think>."""
        if self._opening is None:
            return text
        opening = self._opening + text
        if not self._is_in_tags:
            opening = opening.lstrip() if len(opening) <= MAX_BLANKS else opening
            if opening in _OPEN_TAG[: len(opening)]:  # blank, or a start of the tag
                self._opening = opening
                return ""
            if not opening.startswith(_OPEN_TAG):
                self._opening = None
                return opening
            self._is_in_tags = self._has_reasoned = True
        _, close_tag, answer = opening.partition(_CLOSE_TAG)
        self._opening = None if close_tag else opening[-len(_CLOSE_TAG) :]
        return answer


def read_chunk(data: bytes) -> Chunk | None:
    """Return the chunk in an event's data; None: it has no content. Raises ValueError if the data
    is not JSON."""
    event = read_json(data)
    if isinstance(event, list):  # Gemini's API writes errors as a list
        errors = (item for item in event if isinstance(item, dict) and is_error(item))
        event = next(errors, None)
    if not isinstance(event, dict):
        return None
    choices = [_choice(item) for item in _list(event.get("choices")) if isinstance(item, dict)]
    error = event.get("error")
    if isinstance(error, int | float) and error:  # `true` or a code; the message is beside it
        error = event
    if not error and not choices and is_error(event):
        error = event
    return Chunk(tuple(choices), _usage_of(event.get("usage")), error, event.get("x_groq"))


def read_json(data: bytes) -> Any:
    """Return a JSON value as read by Python's json, which OpenAI's client uses: it accepts NaN and
    lone surrogates. Raises ValueError.
    """
    try:
        return json.loads(data)
    except RecursionError as problem:
        raise ValueError("JSON that is nested too deeply") from problem


def shows(value: Any, depth: int = MAX_DEPTH) -> bool:
    """Whether a text, a list of parts or a tool call has content that a reader would see, in at
    most `depth` levels."""
    if isinstance(value, str):
        return bool(value)
    if isinstance(value, list) and depth:
        return any(shows(item, depth - 1) for item in value)
    if isinstance(value, dict) and depth:
        items = value.items()
        return any(shows(item, depth - 1) for key, item in items if key not in _PLACE_KEYS)
    return False


def text_of(value: Any, depth: int = MAX_DEPTH) -> str:
    """Return the text in a message's content, which may be a text or a list of parts, in at most
    `depth` levels; thinking is left out."""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and depth:
        return "".join(text_of(part, depth - 1) for part in value)
    if isinstance(value, dict) and depth and value.get("type") not in _THINKING_TYPES:
        return text_of(value.get("text"), depth - 1)
    return ""


def usage_of_event(data: bytes) -> ChunkUsage | None:
    """Return the token counts of an event, wherever and under whatever names the server writes
    them; None: there are none."""
    try:
        event = read_json(data)
    except ValueError:  # in a part that decode_chunk skipped
        return None
    if not isinstance(event, dict):
        return None
    choices = [item for item in _list(event.get("choices")) if isinstance(item, dict)]
    groq = event.get("x_groq")
    usage_fields = [event.get("usage"), groq.get("usage") if isinstance(groq, dict) else None]
    usage_fields += [choice.get("usage") for choice in choices]  # Moonshot
    for field in usage_fields:
        if (usage := _usage_of(field)) is not None:
            return usage
    return _usage_of_timings(event.get("timings"))


def _usage_of(value: Any) -> ChunkUsage | None:
    """Return the token counts in a `usage` field; None: there are none."""
    if not isinstance(value, dict):
        return None
    details = value.get("prompt_tokens_details") or value.get("input_tokens_details")
    cached = details.get("cached_tokens") if isinstance(details, dict) else None
    prompt = _count(value, "prompt_tokens", "input_tokens")
    answer = _count(value, "completion_tokens", "output_tokens")
    cached = _count({"": cached, **value}, "", "prompt_cache_hit_tokens", "cache_read_input_tokens")
    if not prompt and not answer:  # some servers write zeros if they do not count tokens
        return None
    return ChunkUsage(prompt, answer, PromptDetails(cached))


def _usage_of_timings(timings: Any) -> ChunkUsage | None:
    """Return the token counts in llama-server's `timings`, for events without usage."""
    if not isinstance(timings, dict):
        return None
    processed, cached = _count(timings, "prompt_n"), _count(timings, "cache_n")
    answer = _count(timings, "predicted_n")
    prompt = None if processed is None else processed + (cached or 0)
    return None if answer is None else ChunkUsage(prompt, answer, PromptDetails(cached))


def is_error(event: dict[str, Any], depth: int = MAX_DEPTH) -> bool:
    """Whether an object without choices is an error, in whatever form the server writes it, in at
    most `depth` levels."""
    kinds = (event.get("object"), event.get("type"))
    if any(map(event.get, _ERROR_KEYS)) or any(
        isinstance(kind, str) and kind.lower().endswith("error") for kind in kinds
    ):
        return True
    if event.get("detail") or event.get("success") is False:  # FastAPI; Cloudflare
        return True
    inner = event.get("base_resp")  # MiniMax
    if isinstance(inner, dict) and depth and is_error(inner, depth - 1):
        return True
    has_words = any(map(event.get, _WORD_KEYS))
    return has_words and any(_is_error_code(event.get(key), key) for key in _CODE_KEYS)


def _is_error_code(code: Any, key: str) -> bool:
    """Return whether a code, which is a number or a word, stands for a failure.

    `key`: the field of the code.
    """
    if isinstance(code, str) and code.strip().isdecimal():
        # Nine digits decide, and int() raises an error for a text of more than 4,300.
        code = int(code.strip()[:9])
    if isinstance(code, int) and not isinstance(code, bool):
        return code >= 400 or (key == "code" and 0 < code < 100)  # an HTTP status; a gRPC code
    words = code.lower() if isinstance(code, str) else ""
    return words.startswith(("error", "fail")) or words.endswith(("error", "exceeded", "failed"))


def is_text(value: str) -> bool:
    """Whether a text can be encoded in UTF-8. JSON may contain half of a surrogate pair."""
    return not any("\ud800" <= character <= "\udfff" for character in value)


def words_of(error: Any) -> str:
    """Return the server's message in an error, whatever the form of the error."""
    return printable_words(_words_of(error))


def printable_words(text: str) -> str:
    """Return a message as records have it: one line of at most MAX_WORDS characters, valid UTF-8,
    and of an HTML page, as proxies send it, the text that a browser would show."""
    if _PAGE.match(text):
        text = _text_of_page(text[:MAX_PAGE])
    return " ".join(text.split())[:MAX_WORDS].encode("utf-8", "replace").decode()


def _text_of_page(page: str) -> str:
    """Return the text of an HTML page, or its title if it has no text."""
    text = html.unescape(_TAG.sub(" ", _UNSEEN.sub(" ", page)))
    if text.strip():
        return text
    title = _TITLE.search(page)
    return "" if title is None else html.unescape(title[1])


def words_of_event(data: bytes) -> str:
    """Return the server's message in an event that has an error."""
    try:
        chunk = read_chunk(data)
    except ValueError:
        chunk = None
    if chunk is None or not chunk.error:
        return printable_words(data.decode(errors="replace"))
    return words_of(chunk.error)


def words_of_body(body: bytes) -> str:
    """Return the server's message in a response body, which may be JSON, an event, text or HTML."""
    for text in (body, *(line[5:] for line in body.splitlines() if line.startswith(b"data:"))):
        try:
            return words_of(read_json(text))
        except ValueError:
            continue
    return printable_words(body.decode(errors="replace"))


def _words_of(error: Any, depth: int = MAX_DEPTH) -> str:
    """Return the message in an error, or else the error as JSON. What lies more than `depth` levels
    deep has no words."""
    if isinstance(error, str):
        return error
    if not depth:
        return "..."
    if isinstance(error, dict):
        for key in _MESSAGE_KEYS:
            if error.get(key) and not isinstance(error[key], int | float):
                return _words_of(error[key], depth - 1)
        if isinstance(error.get("base_resp"), dict):
            return _words_of(error["base_resp"], depth - 1)
    if isinstance(error, list) and error:
        return "; ".join(_words_of(item, depth - 1) for item in error)
    try:
        return json.dumps(error)
    except RecursionError:
        return "..."


def _choice(fields: dict[str, Any]) -> ChunkChoice:
    return ChunkChoice(
        fields.get("text"),
        _delta(fields.get("delta")),
        _delta(fields.get("message")),
        fields.get("finish_reason"),
        fields.get("error"),
    )


def _delta(fields: Any) -> ChunkDelta | None:
    if not isinstance(fields, dict):
        return None
    return ChunkDelta(*(fields.get(name) for name in ChunkDelta.__struct_fields__))


def _is_picture(part: Any) -> bool:
    """Whether a part of a message is neither text nor thinking, and shows something."""
    kind = part.get("type") if isinstance(part, dict) else None
    return kind is not None and kind not in ("text", *_THINKING_TYPES) and shows(part)


def _list(value: Any) -> list[Any]:
    """Return a list as it is, an object as a list of one, and anything else as []."""
    if isinstance(value, dict):
        return [value]
    return value if isinstance(value, list) else []


def _count(counts: dict[str, Any], *names: str) -> int | None:
    """Return the first of these fields that is a count, such as 8, 8.0 or "8"; None: none is."""
    for name in names:
        value = counts.get(name)
        if isinstance(value, str) and value.strip().isdecimal():
            value = int(value.strip()[:18])
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 53:
            return value
    return None

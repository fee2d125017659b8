"""One event of a streamed completion, in the dialects of the servers that speak OpenAI's API.

    chunk = read_chunk(b'{"choices":[{"delta":{"content":"a"}}]}')
    chunk.choices[0].delta.shows, chunk.usage, words_of(chunk.error)

The rule: what OpenAI's own client reads without an error is no failure. Fields that are null, empty
or missing carry nothing. `decode_chunk` reads nearly all events in one step, and refuses those with
a field of another type; `read_chunk` reads these as well, more slowly.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec

MAX_WORDS = 500  # characters of a server's words that are kept
_ERROR_KEYS = ("error", "errors", "error_message", "error_msg")
_WORD_KEYS = ("message", "detail", "details", "msg", "status_msg", "title")
_MESSAGE_KEYS = (*_ERROR_KEYS, *_WORD_KEYS, "reason")
_CODE_KEYS = ("code", "status_code", "status")
# What describes a part of a message without being any of it. OpenRouter sends parts of reasoning
# that hold only a format or a signature.
_PLACE_KEYS = frozenset(("type", "index", "id", "role", "name_index", "format", "signature"))
_OPEN_TAG, _CLOSE_TAG = "<think>", "</think>"
MAX_BLANKS = 16  # characters before <think>
_THINKING_TYPES = ("thinking", "reasoning", "redacted_thinking", "reasoning_text")


class Delta(msgspec.Struct, gc=False):
    """What a chunk adds to a chat answer. Any of it may be text, a list of parts, or null."""

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
        """Whether a reader sees anything of it."""
        return any(shows(getattr(self, name)) for name in self.__struct_fields__)

    @property
    def acts(self) -> bool:
        """Whether it answers by other things than text: a call, a refusal, sound, a picture."""
        others = (self.tool_calls, self.refusal, self.function_call, self.audio, self.images)
        parts = self.content if isinstance(self.content, list) else ()
        return any(map(shows, others)) or any(map(_is_picture, parts))


class Choice(msgspec.Struct, gc=False):
    """One of the answers of a chunk. `text` is of /v1/completions, `delta` of chats, `message` of
    servers that stream it in place of `delta`.
    """

    text: Any = None
    delta: Delta | None = None
    message: Delta | None = None
    finish_reason: Any = None
    error: Any = None  # where OpenRouter puts what a provider said


class PromptDetails(msgspec.Struct, gc=False):
    cached_tokens: int | None = None


class Usage(msgspec.Struct, gc=False):
    """Token counts."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: PromptDetails | None = None

    @property
    def cached_tokens(self) -> int | None:
        details = self.prompt_tokens_details
        return None if details is None else details.cached_tokens

    def over(self, earlier: Usage) -> Usage:
        """These counts, and earlier ones where there are none."""
        prompt, answer, cached = self.prompt_tokens, self.completion_tokens, self.cached_tokens
        return Usage(
            earlier.prompt_tokens if prompt is None else prompt,
            earlier.completion_tokens if answer is None else answer,
            PromptDetails(earlier.cached_tokens if cached is None else cached),
        )


class Chunk(msgspec.Struct, gc=False):
    """What is read of one event of /v1/completions or /v1/chat/completions."""

    choices: tuple[Choice, ...] | None = None
    usage: Usage | None = None
    error: Any = None
    x_groq: Any = None  # counts, or why Groq stopped a stream early


decode_chunk = msgspec.json.Decoder(Chunk).decode


class ReasoningWatch:
    """Tells where the answer of a stream begins: behind reasoning in fields of its own, in parts of
    a list, or between <think> and </think> at the start of the text.
    """

    def __init__(self, *, keeps_text: bool = False) -> None:
        self.texts: list[str] | None = [] if keeps_text else None  # pieces of the answer
        self._opening: str | None = ""  # of the text, until it is known what it is; None: answer
        self._has_reasoned = self._is_inside = False

    def reads_answer(self, chunk: Chunk) -> bool:
        """Whether a chunk holds some of the answer itself. All chunks with content are given."""
        found = False
        for choice in chunk.choices or ():
            delta = choice.delta or choice.message
            text = text_of(choice.text)
            if delta is not None:
                text = text_of(delta.content) or text
            if delta is not None:
                found = found or delta.acts
                self._has_reasoned = self._has_reasoned or (not text and not delta.acts)
            text = self._behind_tags(text) if text else ""
            if text and self.texts is not None:
                self.texts.append(text)
            # Between reasoning and answer stand blank lines.
            found = found or bool(text.strip() if self._has_reasoned else text)
        return found

    def _behind_tags(self, text: str) -> str:
        """What of the text is answer."""
        if self._opening is None:
            return text
        opening = self._opening + text
        if not self._is_inside:
            opening = opening.lstrip() if len(opening) <= MAX_BLANKS else opening
            if opening in _OPEN_TAG[: len(opening)]:  # blank, or not yet known
                self._opening = opening
                return ""
            if not opening.startswith(_OPEN_TAG):
                self._opening = None
                return opening
            self._is_inside = self._has_reasoned = True
        _, tag, rest = opening.partition(_CLOSE_TAG)
        self._opening = None if tag else opening[-len(_CLOSE_TAG) :]
        return rest


def read_chunk(data: bytes) -> Chunk | None:
    """The chunk in an event's data; None: it carries nothing. Raises ValueError: no JSON."""
    event = read_json(data)
    if isinstance(event, list):  # as Gemini's API writes errors
        event = next((one for one in event if isinstance(one, dict) and is_error(one)), None)
    if not isinstance(event, dict):
        return None
    listed = event.get("choices")
    choices = [_choice(one) for one in _list(listed) if isinstance(one, dict)]
    error = event.get("error")
    if isinstance(error, int | float) and error:  # `true` or a code, beside the words
        error = event
    if not error and not choices and is_error(event):
        error = event
    return Chunk(tuple(choices), _usage_of(event.get("usage")), error, event.get("x_groq"))


def read_json(data: bytes) -> Any:
    """As Python's json reads it, which OpenAI's client uses: NaN and lone surrogates are taken.

    Raises ValueError.
    """
    try:
        return json.loads(data)
    except RecursionError as problem:
        raise ValueError("JSON that is nested too deeply") from problem


def shows(value: Any) -> bool:
    """Whether a reader sees anything of a text, a list of parts, or a call."""
    if isinstance(value, str):
        return bool(value)
    if isinstance(value, list):
        return any(map(shows, value))
    if isinstance(value, dict):
        return any(shows(one) for key, one in value.items() if key not in _PLACE_KEYS)
    return False


def text_of(value: Any) -> str:
    """The answer's text in a message's content: a text, or those parts of a list."""
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        return "".join(text_of(part) for part in value)
    if isinstance(value, dict) and value.get("type") not in _THINKING_TYPES:
        return text_of(value.get("text"))
    return ""


def usage_of_event(data: bytes) -> Usage | None:
    """Token counts of an event in any spelling and place; None: there are none."""
    try:
        event = read_json(data)
    except ValueError:  # in a field that nobody needed so far
        return None
    if not isinstance(event, dict):
        return None
    choices = [one for one in _list(event.get("choices")) if isinstance(one, dict)]
    groq = event.get("x_groq")
    places = [event.get("usage"), groq.get("usage") if isinstance(groq, dict) else None]
    places += [choice.get("usage") for choice in choices]  # Moonshot
    found = [usage for place in places if (usage := _usage_of(place)) is not None]
    return found[0] if found else _usage_of_timings(event.get("timings"))


def _usage_of(value: Any) -> Usage | None:
    if not isinstance(value, dict):
        return None
    details = value.get("prompt_tokens_details") or value.get("input_tokens_details")
    cached = details.get("cached_tokens") if isinstance(details, dict) else None
    prompt = _count(value, "prompt_tokens", "input_tokens")
    answer = _count(value, "completion_tokens", "output_tokens")
    cached = _count({"": cached, **value}, "", "prompt_cache_hit_tokens", "cache_read_input_tokens")
    if not prompt and not answer:  # some servers write zeros for what they did not count
        return None
    return Usage(prompt, answer, PromptDetails(cached))


def _usage_of_timings(timings: Any) -> Usage | None:
    """What llama-server counts in `timings`, where it gives no usage."""
    if not isinstance(timings, dict):
        return None
    read, cached = _count(timings, "prompt_n"), _count(timings, "cache_n")
    answer = _count(timings, "predicted_n")
    prompt = None if read is None else read + (cached or 0)
    return None if answer is None else Usage(prompt, answer, PromptDetails(cached))


def is_error(event: dict[str, Any]) -> bool:
    """Whether an object without choices is an error that does not say so by an `error` key."""
    kinds = (event.get("object"), event.get("type"))
    if any(map(event.get, _ERROR_KEYS)) or any(
        isinstance(kind, str) and kind.lower().endswith("error") for kind in kinds
    ):
        return True
    if event.get("detail") or event.get("success") is False:  # FastAPI; Cloudflare
        return True
    inner = event.get("base_resp")  # MiniMax
    if isinstance(inner, dict) and is_error(inner):
        return True
    has_words = any(map(event.get, _WORD_KEYS))
    return has_words and any(_is_error_code(event.get(key), key) for key in _CODE_KEYS)


def _is_error_code(code: Any, key: str) -> bool:
    """Whether a code, as a number or a word, stands for a failure."""
    if isinstance(code, str) and code.strip().isdecimal():
        code = int(code.strip()[:9])
    if isinstance(code, int) and not isinstance(code, bool):
        return code >= 400 or (key == "code" and 0 < code < 100)  # HTTP's; gRPC's
    words = code.lower() if isinstance(code, str) else ""
    return words.startswith(("error", "fail")) or words.endswith(("error", "exceeded", "failed"))


def is_text(value: str) -> bool:
    """Whether UTF-8 can carry it: JSON may hold half of a surrogate pair."""
    return not any("\ud800" <= character <= "\udfff" for character in value)


def words_of(error: Any) -> str:
    """A server's own words in an error, whatever form that has."""
    return printable_words(_words_of(error))


def printable_words(text: str) -> str:
    """Words that a record can carry."""
    return text.strip()[:MAX_WORDS].encode("utf-8", "replace").decode()


def words_of_event(data: bytes) -> str:
    """The same of an event that has an error."""
    try:
        chunk = read_chunk(data)
    except ValueError:
        chunk = None
    if chunk is None or not chunk.error:
        return printable_words(data.decode(errors="replace"))
    return words_of(chunk.error)


def words_of_body(body: bytes) -> str:
    """The same of a body, which may be JSON, an event, text or a page."""
    for text in (body, *(line[5:] for line in body.splitlines() if line.startswith(b"data:"))):
        try:
            return words_of(read_json(text))
        except ValueError:
            continue
    return printable_words(body.decode(errors="replace"))


def _words_of(error: Any) -> str:
    if isinstance(error, str):
        return error
    if isinstance(error, dict):
        for key in _MESSAGE_KEYS:
            if error.get(key) and not isinstance(error[key], int | float):
                return _words_of(error[key])
        if isinstance(error.get("base_resp"), dict):
            return _words_of(error["base_resp"])
    if isinstance(error, list) and error:
        return "; ".join(map(_words_of, error))
    return json.dumps(error)


def _choice(given: dict[str, Any]) -> Choice:
    return Choice(
        given.get("text"),
        _delta(given.get("delta")),
        _delta(given.get("message")),
        given.get("finish_reason"),
        given.get("error"),
    )


def _delta(given: Any) -> Delta | None:
    if not isinstance(given, dict):
        return None
    return Delta(*(given.get(name) for name in Delta.__struct_fields__))


def _is_picture(part: Any) -> bool:
    """Whether a part of a message is neither text nor thinking, and shows something."""
    kind = part.get("type") if isinstance(part, dict) else None
    return kind is not None and kind not in ("text", *_THINKING_TYPES) and shows(part)


def _list(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [value]
    return value if isinstance(value, list) else []


def _count(counts: dict[str, Any], *names: str) -> int | None:
    """The first of these that is a count: 8, 8.0 or "8"."""
    for name in names:
        value = counts.get(name)
        if isinstance(value, str) and value.strip().isdecimal():
            value = int(value.strip()[:18])
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 53:
            return value
    return None

"""From a request's body to its type, and what a wrong body is told."""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import islice
from typing import Any, TypeVar

import msgspec

from serving.http.wire.errors import ApiError, invalid
from serving.http.wire.pruning import pruned
from serving.http.wire.requests import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)

T = TypeVar("T")

CHAT = msgspec.json.Decoder(ChatRequest)
COMPLETION = msgspec.json.Decoder(CompletionRequest)
TOKENIZE = msgspec.json.Decoder(TokenizeRequest)
DETOKENIZE = msgspec.json.Decoder(DetokenizeRequest)

# What clients send and this server cannot do, in words instead of msgspec's.
REFUSED: dict[str, str] = {
    "functions": "functions: the older form of tools; send tools",
    "function_call": "function_call: the older form of tool_choice and tool_calls; send those",
    "tool_choice": "tool_choice: none, auto, required or {type: function, function: {name}}",
    "suffix": "suffix: insertion is not supported",
    "modalities": "modalities: only text is supported",
    "audio": "audio is not supported; only text is",
    "prediction": "prediction: predicted outputs are not supported",
    "verbosity": "verbosity is not supported",
    "web_search_options": "web_search_options: this server opens no connections",
    "service_tier": "service_tier: only 'auto' and 'default' are there",
    "include_obfuscation": "include_obfuscation is not supported",
}
_TOKEN_ID = re.compile("0|[1-9][0-9]{0,9}")
_LONGEST = 600  # characters of msgspec's sentences
_WHERE = re.compile(r"^(?P<what>.*?)(?: - at (?:`key` in )?`\$\.?(?P<path>.*)`)?$", re.DOTALL)
_UNKNOWN = re.compile(r"unknown field `(.*)`")
_MISSING = re.compile(r"missing required field `(.*)`")


def check_work(body: bytes, most: int) -> None:
    """Raises ApiError 400 for JSON whose many small values would take long to decode.

    In units of 50 ns: 5 a list or object, 2.5 a string, 1 a comma. Whatever stands within strings
    does not count.
    """
    bare = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    strings = bare.count(b'"') // 2
    work = strings * 5 // 2
    if work <= most:
        bare = b"".join(bare.split(b'"')[::2])
        work += 5 * (bare.count(b"[") + bare.count(b"{")) + bare.count(b",")
    if work > most:
        text = "the body holds more lists, objects, strings and numbers than one request may"
        raise invalid(text, code="too_many_values")


def check_values(texts: Iterable[bytes], most: int) -> None:
    """Raises ApiError 400 for JSON that templates would take long to write out: one call of
    Python's own encoder, which lets no other thread in.

    In units of 80 ns: 3 a quotation mark, 1 any other character outside of strings.
    """
    for text in texts:
        bare = text.replace(b"\\\\", b"").replace(b'\\"', b"")
        most -= 3 * bare.count(b'"')
        if most >= 0:
            most -= sum(map(len, bare.split(b'"')[::2]))
        if most < 0:
            what = "tools, their calls and chat_template_kwargs hold"
            said = f"{what} more numbers, lists, objects and strings than one request may"
            raise invalid(said, "tools", "too_many_values")


def decode(decoder: msgspec.json.Decoder[T], body: bytes, ignored: set[str] | None = None) -> T:
    """The body as its type. Raises ApiError 400 that names the key.

    `ignored`: leave unknown keys out, and name them there.
    """
    try:
        try:
            return decoder.decode(body)
        except msgspec.ValidationError:
            if ignored is None:
                raise
            kind = msgspec.inspect.type_info(decoder.type)
            return msgspec.convert(pruned(msgspec.json.decode(body), kind, ignored), decoder.type)
    except msgspec.ValidationError as problem:
        if "logit_bias" in str(problem):
            _check_biases(body)
        raise _explained(str(problem)) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as problem:
        raise invalid(f"the body is not JSON: {problem}", code="invalid_json") from None
    except RecursionError:
        raise invalid("the body is nested too deeply", code="nested_too_deeply") from None


class _Biases(msgspec.Struct):
    logit_bias: Any = None


def _check_biases(body: bytes) -> None:
    """Raises ApiError 400 that names the key of logit_bias that is wrong; msgspec does not."""
    try:
        given = msgspec.json.decode(body, type=_Biases).logit_bias
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):  # it is wrong elsewhere too
        return
    for key, bias in islice(given.items(), 1024) if isinstance(given, dict) else ():
        shown = repr(key[:80])
        if not _TOKEN_ID.fullmatch(key):
            raise invalid(f"logit_bias: {shown} is no token id", "logit_bias")
        if type(bias) not in (int, float) or not -100 <= bias <= 100:
            raise invalid(f"logit_bias: of {shown}, not a number from -100 to 100", "logit_bias")


def _explained(message: str) -> ApiError:
    """msgspec's sentence as ours, with the parameter's path as OpenAI writes it.

    The sentence may repeat a key or value of any length: it is cut before a regular expression
    sees it. Its end, which says where, is kept.
    """
    if len(message) > _LONGEST:
        message = f"{message[: _LONGEST // 2]}...{message[-_LONGEST // 2 :]}"
    found = _WHERE.match(message)
    what = found["what"] if found else message
    path = (found["path"] if found else None) or ""
    for pattern, text in ((_UNKNOWN, "unknown"), (_MISSING, "missing")):
        field = pattern.search(what)
        if field:
            param = f"{path}.{field[1]}" if path else field[1]
            return invalid(f"{text} field {param!r}", param)
    what = what[:1].lower() + what[1:]
    last = re.sub(r"(\[[^\]]*\])+$", "", path).rsplit(".", 1)[-1]
    if last in REFUSED:
        return invalid(REFUSED[last], path)
    if not path:
        return invalid(f"the body: {what}")
    if last == "role":
        what = f"system, developer, user, assistant and tool are taken; {what}"
    elif last == "type" and ".content[" in path:
        what = f"only parts of type 'text' are supported; {what}"
    return invalid(f"{path}: {what}", path)

"""The endpoint under load and what it can do, asked once before anything is measured.

    target = Target(url="http://127.0.0.1:8000")
    facts = probe(target)          # TargetFacts: model, usage in streams, ignore_eos ...

OpenAI-compatible endpoints differ in the fields they accept. All are tried; what an endpoint
refuses is left out of all requests or written in another way, and `notes` say so. A model that is
named is asked for, whatever the endpoint lists. What a tiny request could not show (no text within
eight tokens) is a note: only the load can tell whether it is a fault.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import gevent
import msgspec

from crossover.loadtests.errors import EndpointRefuses, TargetUnusable
from crossover.loadtests.load_generator import http_connection as http
from crossover.loadtests.load_generator.completion_chunk import (
    is_error,
    is_text,
    read_json,
    words_of,
    words_of_body,
)
from crossover.loadtests.load_generator.http_connection import Pool, clock, connect
from crossover.loadtests.load_generator.sse_timestamps import stream
from crossover.loadtests.records.request_record import RequestRecord
from crossover.models.identify_model import name_of
from crossover.serving.option_help import Positive, option
from crossover.serving.workload.exact_prompts import WORDS

PROBE_TOKENS = (8, 64)  # of an answer; the second where the endpoint refuses the first
PROBE_WORDS = (4, 64)  # of two prompts, whose counts say what a word costs, and the rest
MAX_PROBES = 16  # requests that may be refused before the endpoint is said to refuse
MODELS = "/v1/models"
KEY_ADVICE = "; name the variable of its key with --api-key-env (api_key_env in a campaign)"
REFUSALS = (400, 404, 415, 422, 501)  # that may be about a field
BUSY = (429, 503)  # an endpoint that is loading its model, or that has others to serve
BUSY_SECONDS = (0.5, 1.0, 2.0, 4.0, 8.0)  # waits before it is asked again


class Target(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The endpoint to load: a table of a campaign, and options of `crossover load`."""

    url: Annotated[
        str,
        option(
            "",
            "Base URL of the endpoint, such as http://127.0.0.1:8000. Its routes are below the "
            "path of the URL, or below /v1 if the URL has no path.",
            is_argument=True,
        ),
    ]
    model: Annotated[
        str | None, option("", "Model name. Default: the first model that /v1/models lists.")
    ] = None
    api: Annotated[Literal["completions", "chat"], option("", "Route to measure.")] = "completions"
    ignore_eos: Annotated[
        bool,
        option(
            "",
            "Make answers as long as the workload says. Without it, they end where the model ends "
            "them.",
        ),
    ] = True
    api_key_env: Annotated[
        str | None,
        option(
            "",
            "Environment variable that holds the API key. A campaign reads it only with --trust.",
            metavar="NAME",
        ),
    ] = None
    extra_body: Annotated[
        dict[str, Any],
        option("", "Key and value to add to the body of every request.", metavar="KEY=VALUE"),
    ] = {}
    timeout_seconds: Annotated[
        Positive, option("", "Maximum seconds that one request may take.")
    ] = 600.0
    ready_seconds: Annotated[
        Positive, option("", "Maximum seconds to wait until the endpoint answers.")
    ] = 60.0


def check_target(target: Target) -> None:
    """Raises TargetUnusable for a URL that is none or holds a password, and for bytes of a command
    line that no JSON can carry.
    """
    for name in Target.__struct_fields__:
        try:
            msgspec.json.encode(getattr(target, name))
        except UnicodeEncodeError:
            raise TargetUnusable(
                f"{name} {getattr(target, name)!r} has bytes that are not UTF-8. Write them as %FF "
                "in a URL"
            ) from None
    connect(target.url)


class TargetFacts(msgspec.Struct, frozen=True, omit_defaults=True):
    """What an endpoint said of itself when it was probed."""

    model: str
    usage: bool  # token counts at the end of a stream are given where they are asked for
    continuous_usage: bool  # token counts beside every chunk
    ignore_eos: bool  # outputs of the asked length
    length_key: Literal["max_tokens", "max_completion_tokens"] = "max_tokens"
    is_greedy: bool = True  # temperature 0; else the endpoint's own, where it takes no other
    backend: str | None = None  # X-Crossover-Backend
    word_tokens: float = 1.0  # of a word of our prompts
    fixed_tokens: float = 0.0  # of every prompt: BOS, chat template
    notes: list[str] = []
    api: Literal["completions", "chat"] = "completions"  # the route


def route_words(facts: TargetFacts) -> str:
    """By which route requests go and how answers end, where that is not the usual way; ""."""
    parts = []
    if facts.api == "chat":
        parts.append("requests go through the model's chat template (/v1/chat/completions)")
    if not facts.ignore_eos and not any("ignore_eos" in note for note in facts.notes):
        parts.append(
            "answers end where the model ends them, but are no longer than the workload's lengths"
        )
    elif parts:
        parts.append("answers have the workload's lengths (ignore_eos)")
    return "; ".join(parts)


def pool_for(target: Target) -> Pool:
    """Connections to the target. Raises TargetUnusable where its key is not set."""
    key = None
    if target.api_key_env is not None and not (key := os.environ.get(target.api_key_env)):
        raise TargetUnusable(
            f"api_key_env: The environment variable {target.api_key_env!r} is not set. Set it to "
            "the API key"
        )
    return connect(target.url, api_key=key)


Message = dict[str, str]  # role and content


def request_bytes(
    pool: Pool,
    target: Target,
    facts: TargetFacts,
    prompt: str | list[Message],
    output_tokens: int,
) -> bytes:
    """A request for `output_tokens` greedy tokens. A list of messages is sent as a chat."""
    body: dict[str, Any] = {
        "model": facts.model,
        "stream": True,
        facts.length_key: output_tokens,
    }
    if facts.is_greedy:
        body["temperature"] = 0
    is_chat = target.api == "chat" or not isinstance(prompt, str)
    if is_chat:
        alone = [{"role": "user", "content": prompt}]
        body["messages"] = alone if isinstance(prompt, str) else prompt
    else:
        body["prompt"] = prompt
    if facts.usage:
        body["stream_options"] = {"include_usage": True}
        if facts.continuous_usage:
            body["stream_options"]["continuous_usage_stats"] = True
    if facts.ignore_eos:
        body["ignore_eos"] = True
    return http.post_bytes(
        pool, _route("chat" if is_chat else "completions"), body | target.extra_body
    )


def _route(api: str) -> str:
    return "/v1/completions" if api == "completions" else "/v1/chat/completions"


def probe(target: Target, pool: Pool | None = None) -> TargetFacts:
    """Ask the endpoint what it can, by a handful of tiny requests. Raises TargetUnusable."""
    if pool is None:
        with pool_for(target) as pool:
            return probe(target, pool)
    facts = TargetFacts(_model_of(target, pool), True, True, target.ignore_eos, api=target.api)
    first = _Way(facts)
    way, by_words, tried = first, first, [first]
    while True:
        records: list[RequestRecord] = []
        for words in PROBE_WORDS:
            if all(_is_answered(record) for record in records):
                records.append(_asked(target, pool, way, words))
        record = records[-1]
        if _is_answered(record):
            return _seen(way, *records, may_end=not target.ignore_eos)
        named = [one for one in _ways_by_words(way, record.error_message) if one not in tried]
        others = [one for one in _other_ways(by_words) if one not in tried]
        # A server may also refuse a field by a 500, or by an error in its stream. Only a field that
        # its words name is left out then.
        following = [*named, *(others if record.status in REFUSALS else ())]
        if record.status in (None, 401, 403, *BUSY) or not following or len(tried) == MAX_PROBES:
            raise _refusal(target, pool, way.facts.model, record)
        way = following[0]
        by_words = way if named else by_words
        tried.append(way)


def _model_of(target: Target, pool: Pool) -> str:
    """The name of the model there. One that is named by its file, folder or alias is called as
    `crossover serve` calls it, where the endpoint lists that name and not the other."""
    if target.model is None:
        return _first_model(target, pool)
    short = name_of(target.model)
    if short != target.model:
        with contextlib.suppress(TargetUnusable):
            listed = _models(target, pool)
            if short in listed and target.model not in listed:
                return short
    return target.model


def _is_answered(record: RequestRecord) -> bool:
    """Whether a request was answered, if only by tokens that nobody sees."""
    return record.error in (None, "empty")


class _Way(msgspec.Struct, frozen=True):
    """A way to ask: with these fields, for so many tokens."""

    facts: TargetFacts
    tokens: int = PROBE_TOKENS[0]

    def but(self, **changes: Any) -> _Way:
        return _Way(msgspec.structs.replace(self.facts, **changes), self.tokens)


def _ways_by_words(way: _Way, words: str | None) -> Iterator[_Way]:
    """Without what the words of a refusal name."""
    words = words or ""
    if "continuous_usage" in words:
        yield way.but(continuous_usage=False)
    if "stream_options" in words or "include_usage" in words:
        yield from (way.but(continuous_usage=False), way.but(continuous_usage=False, usage=False))
    if "ignore_eos" in words:
        yield way.but(ignore_eos=False)
    if re.search(r"max_(completion_|output_|new_)?tokens", words):
        other = way.but(length_key="max_completion_tokens")
        first = way.but(length_key="max_tokens")
        yield other
        yield from (_Way(one.facts, PROBE_TOKENS[1]) for one in (first, other))
    if "temperature" in words:
        yield way.but(is_greedy=False)


def _other_ways(way: _Way) -> Iterator[_Way]:
    """Without one field after the other, where no words name one: the most wanted are left out
    last.
    """
    no_counts: dict[str, Any] = {"continuous_usage": False}
    other_key: dict[str, Any] = {"length_key": "max_completion_tokens"}
    sampled: dict[str, Any] = {"is_greedy": False}
    bare: dict[str, Any] = {"continuous_usage": False, "usage": False, "ignore_eos": False}
    yield from (way.but(**no_counts), way.but(**no_counts, ignore_eos=False))
    yield way.but(**no_counts, usage=False)
    for base in ({}, bare):
        yield from (
            way.but(**base, **more) for more in ({}, other_key, sampled, other_key | sampled)
        )
    for more in ({}, other_key | sampled):
        yield _Way(way.but(**bare, **more).facts, PROBE_TOKENS[1])


def _refusal(target: Target, pool: Pool, model: str, record: RequestRecord) -> TargetUnusable:
    """Why the endpoint cannot be measured, with its words and what it lists."""
    if record.status is None:
        return TargetUnusable(f"{pool.host} cannot be reached: {record.error_message}")
    is_refused = 400 <= record.status < 500 and record.status not in (408, 425, 429)
    route = pool.path_of(_route(target.api))
    advice = KEY_ADVICE if record.status in (401, 403) else ""
    if record.status in (404, 405) and pool.base != "/v1":
        advice += "; the path of a URL is the base of its routes: give another, or none for /v1"
    if is_refused:
        with contextlib.suppress(TargetUnusable):
            listed = _models(target, pool)
            if listed and model not in listed:
                advice += f". It does not list the model {model!r}, but {', '.join(listed)}"
            elif target.model is None and listed[1:]:
                advice += f". It also lists {', '.join(listed[1:])}: choose one with `model`"
    return (EndpointRefuses if is_refused else TargetUnusable)(
        f"{pool.host}{route} did not stream an answer from {model!r}: {record.error}: "
        f"{record.error_message or 'no message'}{advice}"
    )


def _asked(target: Target, pool: Pool, way: _Way, words: int) -> RequestRecord:
    wire = request_bytes(pool, target, way.facts, " ".join(WORDS[:words]), way.tokens)
    asked = RequestRecord(cell="", level="", index=0, scheduled_seconds=0.0)
    waits = _waits(target)
    while True:
        record = stream(pool, wire, asked, clock(), timeout_seconds=target.timeout_seconds)
        if record.status not in BUSY or not next(waits, False):
            return record


def _waits(target: Target) -> Iterator[bool]:
    """Wait before an endpoint that is busy is asked again, at most for its `ready_seconds`."""
    left = target.ready_seconds
    for seconds in BUSY_SECONDS:
        left -= seconds
        if left < 0:
            return
        gevent.sleep(seconds)
        yield True


def _seen(way: _Way, short: RequestRecord, long: RequestRecord, *, may_end: bool) -> TargetFacts:
    """The facts corrected by what really came back, with a note for each thing that is missing."""
    facts, tokens = way.facts, way.tokens
    has_counts = long.output_tokens is not None
    continuous = facts.continuous_usage and long.first_chunk_tokens is not None
    ignore_eos = facts.ignore_eos and long.output_tokens in (None, tokens)
    notes: list[str] = []
    word, fixed = 1.0, 0.0
    if not has_counts:
        notes.append("streams have no token counts, so output tokens and TPOT are unknown")
    elif not continuous:
        notes.append("chunks have no token counts, so the first chunk counts as one token")
    if long.first_answer_seconds is None:
        notes.append(
            f"there is no text in the first {tokens} tokens; a reasoning model needs longer answers"
        )
    if facts.length_key != "max_tokens":
        notes.append(f"max_tokens is refused, so {facts.length_key} limits the answers")
    if not facts.is_greedy:
        notes.append("temperature 0 is refused, so answers are sampled at the endpoint's default")
    if not ignore_eos and not may_end:
        notes.append("ignore_eos is not supported, so answers may be shorter than requested")
    few, many = short.prompt_tokens or 0, long.prompt_tokens or 0
    if 0 < few < many:
        word = (many - few) / (PROBE_WORDS[1] - PROBE_WORDS[0])
        fixed = few - PROBE_WORDS[0] * word
    else:
        notes.append("prompts have no token counts, so each word counts as one token")
    return msgspec.structs.replace(
        facts,
        usage=facts.usage and has_counts,
        continuous_usage=continuous,
        ignore_eos=ignore_eos,
        backend=long.backend,
        word_tokens=word,
        fixed_tokens=fixed,
        notes=notes,
    )


def _first_model(target: Target, pool: Pool) -> str:
    """The first that the endpoint lists. Raises TargetUnusable."""
    if not (models := _models(target, pool)):
        raise TargetUnusable(
            f"{pool.host}{pool.path_of(MODELS)} lists no models. Name one with `model`"
        )
    return models[0]


def _models(target: Target, pool: Pool) -> list[str]:
    """Names of models; none: the endpoint does not list them. Raises TargetUnusable."""
    where = f"{pool.host}{pool.path_of(MODELS)}"
    waits = _waits(target)
    while True:
        wire = http.get_bytes(pool, MODELS)
        status, headers, body = http.fetch(pool, wire, target.ready_seconds)
        if status not in BUSY or target.model is not None or not next(waits, False):
            break
    if status == 404:
        return []
    if not 200 <= status < 300:
        advice = KEY_ADVICE if status in (401, 403) else "; say which model with `model`"
        moved = [value.decode("latin-1") for name, value in headers if name.lower() == b"location"]
        words = words_of_body(body) or "".join(f"redirected to {place}" for place in moved[:1])
        raise TargetUnusable(f"{where} answered {status}: {words or 'no message'}{advice}")
    try:
        listed = read_json(body)
        names = names_of_models(listed)
    except ValueError as problem:
        raise TargetUnusable(
            f"{where} is not what OpenAI's API returns. Name the model with `model`"
        ) from problem
    if not names and isinstance(listed, dict) and is_error(listed):
        raise TargetUnusable(f"{where} answered with an error: {words_of(listed)}")
    return names


def names_of_models(listed: Any) -> list[str]:
    """Of a list as OpenAI's API has it, of a bare one, and of Ollama's. Raises ValueError."""
    if isinstance(listed, dict):
        listed = listed.get("data") or listed.get("models") or []
        listed = [listed] if isinstance(listed, dict) else listed
    if not isinstance(listed, list):
        raise ValueError("no list of models")
    names = [
        next((one[key] for key in ("id", "name", "model") if one.get(key)), None)
        if isinstance(one, dict)
        else one
        for one in listed
    ]
    return [name for name in names if isinstance(name, str) and name and is_text(name)]

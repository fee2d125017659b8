"""The endpoint under load and what it can do, asked once before anything is measured.

    target = Target(url="http://127.0.0.1:8000")
    facts = probe(target)          # TargetFacts: model, usage in streams, ignore_eos ...

OpenAI-compatible endpoints differ in the optional fields they accept. Each is tried; what is
refused is left out of all requests, and `notes` say so.
"""

from __future__ import annotations

import os
from typing import Annotated, Any, Literal

import msgspec

from loadtests.errors import EndpointRefuses, TargetUnusable
from loadtests.load_generator import http_connection as http
from loadtests.load_generator.http_connection import Pool, clock, connect
from loadtests.load_generator.sse_timestamps import stream
from loadtests.records.request_record import RequestRecord
from loadtests.workload.exact_prompts import WORDS
from serving.option_help import Positive, option

PROBE_TOKENS = 8
PROBE_WORDS = (4, 64)  # of two prompts, whose counts say what a word costs, and the rest
# usage, continuous_usage, ignore_eos: the first set that the endpoint accepts is used.
EXTRAS = ((True, True, True), (True, False, True), (True, False, False), (False, False, False))


class Target(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Where load is sent to: a table of a campaign, and options of `crossover load`."""

    url: Annotated[
        str,
        option("", "the endpoint's base URL, e.g. http://127.0.0.1:8000", is_argument=True),
    ]
    model: Annotated[
        str | None, option("", "model name; none: the first that /v1/models lists")
    ] = None
    api: Annotated[Literal["completions", "chat"], option("", "the route that is measured")] = (
        "completions"
    )
    api_key_env: Annotated[
        str | None,
        option(
            "",
            "environment variable that holds the key; a campaign reads it only with --trust",
            metavar="NAME",
        ),
    ] = None
    extra_body: Annotated[
        dict[str, Any], option("", "added to every request", metavar="KEY=VALUE")
    ] = {}
    timeout_seconds: Annotated[Positive, option("", "limit of one request")] = 600.0
    ready_seconds: Annotated[
        Positive, option("", "how long to wait for the endpoint's first answer")
    ] = 60.0


def check_target(target: Target) -> None:
    """Raises TargetUnusable for a URL that is none, or that holds a password."""
    connect(target.url)


class TargetFacts(msgspec.Struct, frozen=True, omit_defaults=True):
    """What an endpoint said of itself when it was probed."""

    model: str
    usage: bool  # token counts at the end of a stream
    continuous_usage: bool  # token counts beside every chunk
    ignore_eos: bool  # outputs of the asked length
    backend: str | None = None  # X-Crossover-Backend
    word_tokens: float = 1.0  # of a word of our prompts
    fixed_tokens: float = 0.0  # of every prompt: BOS, chat template
    notes: list[str] = []


def pool_for(target: Target) -> Pool:
    """Connections to the target. Raises TargetUnusable where its key is not set."""
    key = None
    if target.api_key_env is not None and not (key := os.environ.get(target.api_key_env)):
        raise TargetUnusable(
            f"api_key_env names {target.api_key_env!r}, and that environment variable is not set"
        )
    return connect(target.url, api_key=key)


def request_bytes(
    pool: Pool, target: Target, facts: TargetFacts, prompt: str, output_tokens: int
) -> bytes:
    """A request for `output_tokens` greedy tokens."""
    body: dict[str, Any] = {
        "model": facts.model,
        "stream": True,
        "temperature": 0,
        "max_tokens": output_tokens,
    }
    path = "/v1/completions"
    if target.api == "completions":
        body["prompt"] = prompt
    else:
        path = "/v1/chat/completions"
        body["messages"] = [{"role": "user", "content": prompt}]
    if facts.usage:
        body["stream_options"] = {"include_usage": True}
        if facts.continuous_usage:
            body["stream_options"]["continuous_usage_stats"] = True
    if facts.ignore_eos:
        body["ignore_eos"] = True
    return http.post_bytes(pool, path, body | target.extra_body)


def probe(target: Target, pool: Pool | None = None) -> TargetFacts:
    """Ask the endpoint what it can, by a handful of tiny requests. Raises TargetUnusable."""
    if pool is None:
        with pool_for(target) as pool:
            return probe(target, pool)
    models = _models(target, pool)
    model = target.model or (models[0] if models else None)
    if model is None:
        raise TargetUnusable(f"{target.url} lists no models; say which one with `model`")
    if models and model not in models:
        raise TargetUnusable(f"{target.url} has no model {model!r}; it has {', '.join(models)}")
    for extras in EXTRAS:
        facts = TargetFacts(model, *extras)
        records = [_asked(target, pool, facts, words) for words in PROBE_WORDS]
        record = records[-1]
        if record.error is None:
            return _seen(facts, *records)
        if record.status not in (400, 404, 415, 422):
            break
    status = record.status or 0
    is_refused = 400 <= status < 500 and status not in (408, 425, 429)
    raise (EndpointRefuses if is_refused else TargetUnusable)(
        f"{target.url} did not stream an answer of {PROBE_TOKENS} tokens by its route for "
        f"{target.api} from {model!r}: {record.error}: {record.error_message}"
    )


def _asked(target: Target, pool: Pool, facts: TargetFacts, words: int) -> RequestRecord:
    wire = request_bytes(pool, target, facts, " ".join(WORDS[:words]), PROBE_TOKENS)
    asked = RequestRecord(cell="", level="", index=0, due_seconds=0.0)
    return stream(pool, wire, asked, origin=clock(), timeout_seconds=target.timeout_seconds)


def _seen(facts: TargetFacts, short: RequestRecord, long: RequestRecord) -> TargetFacts:
    """The facts corrected by what really came back, with a note for each thing that is missing."""
    usage = long.output_tokens is not None
    continuous = facts.continuous_usage and long.first_chunk_tokens is not None
    ignore_eos = facts.ignore_eos and long.output_tokens in (None, PROBE_TOKENS)
    notes: list[str] = []
    word, fixed = 1.0, 0.0
    if not usage:
        notes.append("no token counts in streams: output tokens and TPOT are unknown")
    elif not continuous:
        notes.append("no token counts beside chunks: the first chunk is taken as one token")
    if not ignore_eos:
        notes.append("ignore_eos is not honoured: answers may be shorter than asked")
    few, many = short.prompt_tokens or 0, long.prompt_tokens or 0
    if 0 < few < many:
        word = (many - few) / (PROBE_WORDS[1] - PROBE_WORDS[0])
        fixed = few - PROBE_WORDS[0] * word
    else:
        notes.append("no counts of prompts: a word of them is taken for a token")
    return msgspec.structs.replace(
        facts,
        usage=usage,
        continuous_usage=continuous,
        ignore_eos=ignore_eos,
        backend=long.backend,
        word_tokens=word,
        fixed_tokens=fixed,
        notes=notes,
    )


def _models(target: Target, pool: Pool) -> list[str]:
    """Names of models; none: the endpoint does not list them."""
    status, _, body = http.fetch(pool, http.get_bytes(pool, "/v1/models"), target.ready_seconds)
    if status == 404:
        return []
    if status != 200:
        said = body[:200].decode(errors="replace")
        hint = "; name the variable of its key with api_key_env" if status in (401, 403) else ""
        raise TargetUnusable(f"{target.url}/v1/models answered {status}: {said}{hint}")
    try:
        return [str(model["id"]) for model in msgspec.json.decode(body)["data"]]
    except (msgspec.MsgspecError, LookupError, TypeError) as problem:
        raise TargetUnusable(
            f"{target.url}/v1/models is not what OpenAI's API returns"
        ) from problem

"""The endpoint under load, and a probe of what it supports before anything is measured.

    target = Target(url="http://127.0.0.1:8000")
    facts = probe_endpoint(target)          # TargetFacts: model, usage in streams, ignore_eos ...

OpenAI-compatible endpoints differ in the fields that they accept. The probe tries all fields that
Crossover uses; those that the endpoint refuses are left out of all requests or replaced, and
`notes` say so. A model that the target names is used, even if the endpoint does not list it. What
a tiny request cannot show, such as text within eight tokens, is only a note.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from typing import Any

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
from crossover.loadtests.load_generator.endpoint_access import (
    private_values,
    redact,
)
from crossover.loadtests.load_generator.http_connection import Pool, clock, connect
from crossover.loadtests.load_generator.sse_timestamps import stream
from crossover.loadtests.load_generator.target import UNCHECKED, Target, TargetFacts
from crossover.loadtests.records.request_record import RequestRecord
from crossover.serving.workload.exact_prompts import WORDS

PROBE_TOKENS = (8, 64)  # output tokens; the second number if the endpoint refuses the first
PROBE_WORDS = (4, 64)  # of two prompts, whose token counts give the tokens per word and the rest
MAX_PROBES = 16  # forms of a request that are tried
MODELS = "/v1/models"
MODEL_OPTION = "--model (model in a campaign)"
KEY_ADVICE = "; name the variable of its key with --api-key-env (api_key_env in a campaign)"
BASE_ADVICE = "; the path of a URL is the base of its routes: give another, or none for /v1"
# Names of models that do not generate text.
NO_CHAT_MODEL = re.compile(r"embed|rerank|whisper|tts|clip", re.IGNORECASE)
REFUSALS = (400, 404, 415, 422, 501)  # statuses that may be due to a field of the request
BUSY = (429, 503)  # the endpoint is loading its model or serving others
BUSY_SECONDS = (0.5, 1.0, 2.0, 4.0, 8.0)  # waits before a busy endpoint is tried again


def pool_for(target: Target) -> Pool:
    """Return a connection pool for the target. Raises TargetUnusable if an environment variable
    that the target names is not set, or a certificate cannot be read."""
    return connect(target.url, values=private_values(target), access=target)


Message = dict[str, str]  # role and content


def request_bytes(
    pool: Pool,
    target: Target,
    facts: TargetFacts,
    prompt: str | list[Message],
    output_tokens: int,
) -> bytes:
    """Return a request for `output_tokens` tokens with greedy decoding, if the endpoint supports
    that. A list of messages is sent to the chat route."""
    body: dict[str, Any] = {
        "model": facts.model,
        "stream": True,
        facts.length_key: output_tokens,
    }
    if facts.is_greedy:
        body["temperature"] = 0
    is_chat = target.api == "chat" or not isinstance(prompt, str)
    if is_chat:
        user_message = {"role": "user", "content": prompt}
        body["messages"] = [user_message] if isinstance(prompt, str) else prompt
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


def probe_endpoint(target: Target, pool: Pool | None = None) -> TargetFacts:
    """Find out what the endpoint supports, with a few tiny requests. Raises TargetUnusable, and
    EndpointRefuses if it refuses every form of the request."""
    if pool is None:
        with pool_for(target) as pool:
            return probe_endpoint(target, pool)
    facts = TargetFacts(_model_of(target, pool), True, True, target.ignore_eos, api=target.api)
    form = _RequestForm(facts)
    # The last form that followed from an error message: other fields are left out starting from it.
    base_form = form
    tried_forms = [form]
    while True:
        records: list[RequestRecord] = []
        for words in PROBE_WORDS:
            if all(_is_answered(record) for record in records):
                records.append(_probe_record(target, pool, form, words))
        record = records[-1]
        if _is_answered(record):
            facts = _facts_of(form, *records, may_end=not target.ignore_eos)
            if target.insecure:
                facts.notes.append(UNCHECKED)
            return facts
        by_message = [
            other
            for other in _forms_by_message(form, record.error_message)
            if other not in tried_forms
        ]
        next_forms = list(by_message)
        # A server may also refuse a field with a 500 or an error in its stream. Only fields that
        # the message names are left out then.
        if record.status in REFUSALS:
            next_forms += [other for other in _other_forms(base_form) if other not in tried_forms]
        is_final = record.status in (None, 401, 403, *BUSY)
        if is_final or not next_forms or len(tried_forms) == MAX_PROBES:
            raise _refusal(target, pool, form.facts.model, record)
        form = next_forms[0]
        base_form = form if by_message else base_form
        tried_forms.append(form)


def _model_of(target: Target, pool: Pool) -> str:
    """Return the model name for requests. If the target names a file, folder or alias, it is the
    name that `crossover serve` gives that model, provided that the endpoint lists only that
    name."""
    if target.model is None:
        return _first_model(target, pool)
    from crossover.models.identity.identify_model import (
        name_of,  # takes 0.2 s, mostly for GGUF's constants
    )

    served_name = name_of(target.model)
    if served_name != target.model:
        with contextlib.suppress(TargetUnusable):
            listed_names = _models(target, pool)
            if served_name in listed_names and target.model not in listed_names:
                return served_name
    return target.model


def _is_answered(record: RequestRecord) -> bool:
    """Whether a request was answered, even if its tokens show no text."""
    return record.error in (None, "empty")


class _RequestForm(msgspec.Struct, frozen=True):
    """A form of the probe's request: the fields that it has, and its output tokens."""

    facts: TargetFacts
    tokens: int = PROBE_TOKENS[0]

    def changed(self, **changes: Any) -> _RequestForm:
        """Return the form with changed facts."""
        return _RequestForm(msgspec.structs.replace(self.facts, **changes), self.tokens)


def _forms_by_message(form: _RequestForm, message: str | None) -> Iterator[_RequestForm]:
    """Yield forms without the fields that an error message names."""
    message = message or ""
    if "continuous_usage" in message:
        yield form.changed(continuous_usage=False)
    if "stream_options" in message or "include_usage" in message:
        yield form.changed(continuous_usage=False)
        yield form.changed(continuous_usage=False, usage=False)
    if "ignore_eos" in message:
        yield form.changed(ignore_eos=False)
    if re.search(r"max_(completion_|output_|new_)?tokens", message):
        with_completion_key = form.changed(length_key="max_completion_tokens")
        with_usual_key = form.changed(length_key="max_tokens")
        yield with_completion_key
        yield _RequestForm(with_usual_key.facts, PROBE_TOKENS[1])
        yield _RequestForm(with_completion_key.facts, PROBE_TOKENS[1])
    if "temperature" in message:
        yield form.changed(is_greedy=False)


def _other_forms(form: _RequestForm) -> Iterator[_RequestForm]:
    """Yield forms that leave out one field after the other, for error messages that name none. The
    fields that the measurement needs most are left out last."""
    yield form.changed(continuous_usage=False)
    yield form.changed(continuous_usage=False, ignore_eos=False)
    yield form.changed(continuous_usage=False, usage=False)
    # Without all fields that OpenAI's API does not have, and with other forms of those that it has.
    minimal = form.changed(continuous_usage=False, usage=False, ignore_eos=False)
    for base in (form, minimal):
        yield base
        yield base.changed(length_key="max_completion_tokens")
        yield base.changed(is_greedy=False)
        yield base.changed(length_key="max_completion_tokens", is_greedy=False)
    # Some endpoints require a larger number of output tokens.
    yield _RequestForm(minimal.facts, PROBE_TOKENS[1])
    reasoning = minimal.changed(length_key="max_completion_tokens", is_greedy=False)
    yield _RequestForm(reasoning.facts, PROBE_TOKENS[1])


def _refusal(target: Target, pool: Pool, model: str, record: RequestRecord) -> TargetUnusable:
    """Return the error for an endpoint that cannot be measured, with its own message and the models
    that it lists."""
    if record.status is None:
        return TargetUnusable(f"{pool.host} cannot be reached: {record.error_message}")
    is_refused = 400 <= record.status < 500 and record.status not in (408, 425, 429)
    route = pool.path_of(_route(target.api))
    advice = KEY_ADVICE if record.status in (401, 403) else ""
    if record.status in (404, 405) and pool.base != "/v1":
        advice += BASE_ADVICE
    if is_refused:
        with contextlib.suppress(TargetUnusable):
            listed_names = _models(target, pool)
            if listed_names and model not in listed_names:
                advice += f". It does not list the model {model!r}, but {', '.join(listed_names)}"
            elif target.model is None and listed_names[1:]:
                others = ", ".join(name for name in listed_names if name != model)
                advice += f". It also lists {others}: choose one with {MODEL_OPTION}"
    return (EndpointRefuses if is_refused else TargetUnusable)(
        f"{pool.host}{route} did not stream an answer from {model!r}: {record.error}: "
        f"{record.error_message or 'no message'}{advice}"
    )


def _probe_record(target: Target, pool: Pool, form: _RequestForm, words: int) -> RequestRecord:
    """Send one request with a prompt of so many words, again while the endpoint is busy, and return
    its record."""
    wire = request_bytes(pool, target, form.facts, " ".join(WORDS[:words]), form.tokens)
    unsent_record = RequestRecord(cell="", level="", index=0, scheduled_seconds=0.0)
    waits = _waits(target)
    while True:
        record = stream(pool, wire, unsent_record, clock(), timeout_seconds=target.timeout_seconds)
        if record.status not in BUSY or not next(waits, False):
            return record


def _waits(target: Target) -> Iterator[bool]:
    """Wait once per item before a busy endpoint is tried again, and end before the waits exceed the
    target's `ready_seconds`."""
    remaining_seconds = target.ready_seconds
    for seconds in BUSY_SECONDS:
        remaining_seconds -= seconds
        if remaining_seconds < 0:
            return
        gevent.sleep(seconds)
        yield True


def _facts_of(
    form: _RequestForm, short: RequestRecord, long: RequestRecord, *, may_end: bool
) -> TargetFacts:
    """Return the facts that the answers to a short and a long prompt show, with a note for each
    feature that is missing. `may_end`: answers may be shorter than requested."""
    facts, tokens = form.facts, form.tokens
    has_counts = long.output_tokens is not None
    continuous = facts.continuous_usage and long.first_chunk_tokens is not None
    ignore_eos = facts.ignore_eos and long.output_tokens in (None, tokens)
    notes: list[str] = []
    word_tokens, fixed_tokens = 1.0, 0.0
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
    short_tokens, long_tokens = short.prompt_tokens or 0, long.prompt_tokens or 0
    if 0 < short_tokens < long_tokens:
        word_tokens = (long_tokens - short_tokens) / (PROBE_WORDS[1] - PROBE_WORDS[0])
        fixed_tokens = short_tokens - PROBE_WORDS[0] * word_tokens
    else:
        notes.append("prompts have no token counts, so each word counts as one token")
    return msgspec.structs.replace(
        facts,
        usage=facts.usage and has_counts,
        continuous_usage=continuous,
        ignore_eos=ignore_eos,
        backend=long.backend,
        word_tokens=word_tokens,
        fixed_tokens=fixed_tokens,
        notes=notes,
    )


def _first_model(target: Target, pool: Pool) -> str:
    """Return the first model that the endpoint lists and that can generate text. Raises
    TargetUnusable if it lists none."""
    if not (models := _models(target, pool)):
        raise TargetUnusable(
            f"{pool.host}{pool.path_of(MODELS)} lists no models. Name one with {MODEL_OPTION}"
        )
    return generating_models(models)[0]


def _models(target: Target, pool: Pool) -> list[str]:
    """Return the names of the endpoint's models. Raises TargetUnusable if it answers no list."""
    where = f"{pool.host}{pool.path_of(MODELS)}"
    waits = _waits(target)
    while True:
        wire = http.get_bytes(pool, MODELS)
        status, headers, body = http.fetch(pool, wire, target.ready_seconds)
        if status not in BUSY or target.model is not None or not next(waits, False):
            break
    if not 200 <= status < 300:
        advice = KEY_ADVICE if status in (401, 403) else f"; name the model with {MODEL_OPTION}"
        if status == 404 and pool.base != "/v1":
            advice = f"{BASE_ADVICE}. If that is right, name the model with {MODEL_OPTION}"
        locations = [value for name, value in headers if name.lower() == b"location"]
        message = words_of_body(body)
        if not message and locations:
            message = f"redirected to {locations[0].decode('latin-1').partition('?')[0]}"
        message = redact(message, pool.values)
        raise TargetUnusable(f"{where} answered {status}: {message or 'no message'}{advice}")
    try:
        response = read_json(body)
        names = names_of_models(response)
    except ValueError as problem:
        raise TargetUnusable(
            f"{where} is not what OpenAI's API returns. Name the model with {MODEL_OPTION}"
        ) from problem
    if not names and isinstance(response, dict) and is_error(response):
        message = redact(words_of(response), pool.values)
        raise TargetUnusable(f"{where} answered with an error: {message}")
    return names


def generating_models(names: Sequence[str]) -> Sequence[str]:
    """Return the models that can generate text, as far as their names tell; all, if none can."""
    return [name for name in names if not NO_CHAT_MODEL.search(name)] or names


def names_of_models(response: Any) -> list[str]:
    """Return the model names in a response: a list as in OpenAI's API or Ollama's, or a bare list.
    Raises ValueError for anything else."""
    models = response
    if isinstance(response, dict):
        models = response.get("data") or response.get("models") or []
        models = [models] if isinstance(models, dict) else models
    if not isinstance(models, list):
        raise ValueError("no list of models")
    names = []
    for model in models:
        name = model
        if isinstance(model, dict):
            name = model.get("id") or model.get("name") or model.get("model")
        if isinstance(name, str) and name and is_text(name):
            names.append(name)
    return names

"""Endpoints as they are: where their routes lie, what they list, which fields they refuse."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec
import pytest

from crossover.loadtests.errors import EndpointRefuses, TargetUnusable
from crossover.loadtests.load_generator.http_connection import clock, connect, get_bytes
from crossover.loadtests.load_generator.openai_endpoint import (
    pool_for,
    probe_endpoint,
    request_bytes,
)
from crossover.loadtests.load_generator.sse_timestamps import stream
from crossover.loadtests.load_generator.target import Target, TargetFacts, route_words
from crossover.loadtests.records.request_record import RequestRecord
from tests.loadtests.load_generator.scripted_endpoint import (
    ReceivedRequest,
    answered,
    scripted,
    sse,
)

Refuse = Callable[[dict[str, Any]], str | None]
ROLE = b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}'
TEXT = b'data: {"choices":[{"index":0,"delta":{"content":"a"}}]}'
LENGTH = b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"length"}]}'
USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":8}}'
DONE = b"data: [DONE]"
BAD_GATEWAY = b"""<html>\r\n<head><title>502 Bad Gateway</title></head>\r\n<body>
<center><h1>502 Bad Gateway</h1></center>\r\n<hr><center>nginx/1.24.0</center>\r\n</body></html>"""
LISTED = {"object": "list", "data": [{"id": "m", "object": "model"}]}


def compressed(body: Any) -> bytes:
    """An answer in gzip, which was not asked for."""
    answer = answered(gzip.compress(json.dumps(body).encode(), mtime=0))
    return answer.replace(b"Content-Type", b"Content-Encoding: gzip\r\nContent-Type", 1)


class Endpoint:
    """One that answers chats below a path, and keeps what it was asked."""

    def __init__(
        self,
        *,
        base: str = "/v1",
        models: bytes | Any = LISTED,
        serves: str = "m",
        refuse: Refuse = lambda body: None,
        events: tuple[bytes, ...] = (ROLE, TEXT, LENGTH, USAGE, DONE),
    ) -> None:
        self.base, self.models, self.serves = base, models, serves
        self.refuse, self.events = refuse, events
        self.bodies: list[dict[str, Any]] = []

    def __call__(self, request: ReceivedRequest) -> bytes:
        if request.path == f"{self.base}/models":
            return self.models if isinstance(self.models, bytes) else answered(self.models)
        if request.path != f"{self.base}/chat/completions":
            return answered({"error": {"message": f"no route {request.path}"}}, 404)
        self.bodies.append(request.body)
        if request.body["model"] != self.serves:
            message = f"The model `{request.body['model']}` does not exist."
            return answered({"error": {"message": message, "code": "model_not_found"}}, 404)
        if (words := self.refuse(request.body)) is not None:
            return answered({"error": {"message": words, "type": "invalid_request_error"}}, 400)
        return sse(*self.events)


def measured(endpoint: Endpoint, path: str = "", model: str | None = None) -> list[str]:
    """Probes an endpoint, sends it a request of the load as the probe allows, and returns the notes
    of the probe.
    """
    with scripted(endpoint) as url:
        target = Target(url=url + path, model=model, api="chat")
        with pool_for(target) as pool:
            facts = probe_endpoint(target, pool)
            wire = request_bytes(pool, target, facts, "some words", 100)
            record_of_request = RequestRecord(cell="c", level="l", index=0, scheduled_seconds=0.0)
            record = stream(pool, wire, record_of_request, origin=clock(), timeout_seconds=5.0)
    assert record.error in (None, "empty"), record
    return facts.notes


@pytest.mark.parametrize(
    ("path", "base"),
    [
        ("", "/v1"),
        ("/", "/v1"),
        ("/v1", "/v1"),
        ("/v1/", "/v1"),
        ("/v3", "/v3"),
        ("/v1/chat/completions", "/v1"),
        ("/v1beta/openai", "/v1beta/openai"),
        ("/api/v1", "/api/v1"),
        ("/a b/é", "/a%20b/%C3%A9"),
        ("/a%20b/v1", "/a%20b/v1"),
    ],
)
def test_a_path_is_the_base_of_the_routes(path: str, base: str) -> None:
    measured(Endpoint(base=base), path)


def test_errors_name_the_route_that_was_called() -> None:
    with scripted(Endpoint(base="/v3")) as url:
        with pytest.raises(TargetUnusable, match=r":\d+/v1/models answered 404: no route /v1"):
            probe_endpoint(Target(url=f"{url}/v1", api="chat"))
        with pytest.raises(
            TargetUnusable, match=r"404: no route /v4/models; .* base of its routes"
        ):
            probe_endpoint(Target(url=f"{url}/v4", api="chat"))
        with pytest.raises(EndpointRefuses, match=r"/v4/chat/completions .*the base of its routes"):
            probe_endpoint(Target(url=f"{url}/v4", api="chat", model="m"))


@pytest.mark.parametrize(
    ("models", "model", "serves"),
    [
        ({"data": [{"id": "smollm2:latest"}]}, "smollm2", "smollm2"),
        ([{"id": "other"}], "m", "m"),
        (answered({"error": "no"}, 403), "m", "m"),
        (answered(b"<html>", kind="text/html"), "m", "m"),
        (b"", "m", "m"),  # it closes the connection
        ([{"id": "m"}], None, "m"),
        (["m"], None, "m"),
        ({"models": [{"name": "m:latest", "model": "m:latest"}]}, None, "m:latest"),
        ({"data": [{"id": "a\nb"}]}, None, "a\nb"),
        ({"data": {"id": "m"}}, None, "m"),
        (answered(b"\xef\xbb\xbf" + json.dumps(LISTED).encode()), None, "m"),
        (answered(b'{"data":[{"id":"m","created":NaN}]}'), None, "m"),
        (compressed(LISTED), None, "m"),
        (answered(b'{"data":[{"id":"\\ud800"},{"id":"m","owned_by":"\\ud800"}]}'), None, "m"),
    ],
    ids=str,
)
def test_a_named_model_is_requested(models: Any, model: str | None, serves: str) -> None:
    measured(Endpoint(models=models, serves=serves), model=model)


@pytest.mark.parametrize(
    ("models", "message"),
    [
        (answered({"error": {"message": "who are you?"}}, 401), "401: who are you\\?; .*api_key"),
        (answered({"error": "later"}, 500), "500: later; name the model with --model"),
        (answered({"detail": "Not Found"}, 404), "answered 404: Not Found; name the model with"),
        (answered(b"", 404), "answered 404: no message; name the model with"),
        (answered(BAD_GATEWAY, 502, "text/html"), "502: 502 Bad Gateway nginx/1.24.0; name the"),
        (answered(b"<html>", kind="text/html"), "Name the model with --model"),
        ({"data": None}, "lists no models"),
        ({"data": [{"name": 3}, None]}, "lists no models"),
        ({"error": {"message": "the account is closed"}}, "an error: the account is closed"),
        ({"detail": "the account is closed"}, "an error: the account is closed"),
        (answered(b"[" * 5000), "Name the model with --model"),
        (
            b"HTTP/1.1 307 X\r\nLocation: https://h/v1\r\nContent-Length: 0\r\n\r\n",
            "307: redirected to https://h/v1; name the",
        ),
        ({"data": [{"id": "n"}, {"id": "m"}]}, "also lists m: choose one"),
    ],
    ids=str,
)
def test_without_a_name_the_list_must_have_one(models: Any, message: str) -> None:
    with scripted(Endpoint(models=models)) as url, pytest.raises(TargetUnusable, match=message):
        probe_endpoint(Target(url=url, api="chat"))


def test_without_a_name_the_first_model_that_generates_text_is_requested() -> None:
    names = ["text-embedding-nomic-embed-text-v1.5", "qwen3-4b", "whisper-large"]
    for listed, chosen in ((names, "qwen3-4b"), (names[:1], names[0])):
        models = answered({"data": [{"id": name} for name in listed]})
        answer = sse(b'data: {"choices":[{"text":"a"}]}', b"data: [DONE]")
        with scripted(lambda request, m=models, a=answer: a if request.body else m) as url:  # type: ignore[misc]
            assert probe_endpoint(Target(url=url)).model == chosen


def test_an_unknown_model_is_refused_with_the_models_there_are() -> None:
    with scripted(Endpoint()) as url:
        with pytest.raises(EndpointRefuses, match="does not exist.*not list the model 'x', but m"):
            probe_endpoint(Target(url=url, api="chat", model="x"))


def without(*names: str, words: str = "Unsupported parameter: '{}'.") -> Refuse:
    """Refuses fields, of stream_options too."""

    def refuse(body: dict[str, Any]) -> str | None:
        fields = body | (body.get("stream_options") or {})
        return next((words.format(name) for name in names if name in fields), None)

    return refuse


def openai_of_2025(body: dict[str, Any]) -> str | None:
    """A reasoning model: its words name the key in place of another, as OpenAI's API has them."""
    if "max_tokens" in body:
        return (
            "Unsupported parameter: 'max_tokens' is not supported with this model. "
            "Use 'max_completion_tokens' instead."
        )
    if body.get("temperature", 1) != 1:
        return (
            "Unsupported value: 'temperature' does not support 0 with this model. "
            "Only the default (1) value is supported."
        )
    return without("ignore_eos", words="Unrecognized request argument supplied: {}")(body)


class Refusing(NamedTuple):
    """An endpoint that refuses something, and fields of the load that follows."""

    name: str
    refuse: Refuse
    sent: dict[str, Any]
    note: str = ""


ALL = {"max_tokens": 100, "temperature": 0, "ignore_eos": True}
REFUSING = [
    Refusing("nothing", lambda body: None, ALL),
    Refusing(
        "max_tokens",
        without("max_tokens"),
        {"max_completion_tokens": 100, "temperature": 0, "ignore_eos": True},
        "max_completion_tokens",
    ),
    Refusing(
        "max_tokens without words",
        without("max_tokens", words="bad request"),
        {"max_completion_tokens": 100, "temperature": 0, "ignore_eos": True},
    ),
    Refusing(
        "temperature", without("temperature"), {"max_tokens": 100, "ignore_eos": True}, "sampled"
    ),
    Refusing(
        "temperature without words",
        without("temperature", words="no"),
        {"max_tokens": 100, "ignore_eos": True},
    ),
    Refusing("OpenAI", openai_of_2025, {"max_completion_tokens": 100}, "sampled"),
    Refusing("ignore_eos", without("ignore_eos"), {"max_tokens": 100, "temperature": 0}),
    Refusing("counts", without("continuous_usage_stats", words="no"), ALL),
    Refusing("options", without("stream_options"), ALL),
    Refusing("options without words", without("stream_options", words="no"), ALL),
    Refusing(
        "short answers without words",
        lambda body: "no" if body.get("max_tokens", 0) < 16 else None,
        {"max_tokens": 100, "temperature": 0},
    ),
    Refusing(
        "short answers",
        lambda body: "max_tokens must be at least 16" if body.get("max_tokens", 0) < 16 else None,
        {"max_tokens": 100, "temperature": 0},
    ),
]


@pytest.mark.parametrize("case", REFUSING, ids=lambda case: case.name)
def test_the_load_is_sent_as_the_endpoint_takes_it(case: Refusing) -> None:
    endpoint = Endpoint(refuse=case.refuse)
    notes = measured(endpoint, model="m")
    assert len(endpoint.bodies) <= 16
    names = {"max_tokens", "max_completion_tokens", "temperature", "ignore_eos"}
    assert {key: endpoint.bodies[-1][key] for key in names & endpoint.bodies[-1].keys()} == (
        case.sent
    )
    assert any(case.note in note for note in notes) or not case.note


class Faulty(Endpoint):
    """One that gives an answer in place of others: the first `times` that are asked with a field.

    `key`: of that field.
    """

    def __init__(self, answer: bytes, times: int, key: str = "model") -> None:
        super().__init__()
        self.answer, self.times, self.key = answer, times, key

    def __call__(self, request: ReceivedRequest) -> bytes:
        if request.body is not None and self.key in request.body and self.times > 0:
            self.times -= 1
            return self.answer
        return super().__call__(request)


NO_FIELD = {"error": {"message": "ignore_eos is not supported", "code": 400}}


@pytest.mark.parametrize(
    "answer",
    [
        answered(NO_FIELD),
        answered(NO_FIELD, 500),
        sse(b"data: " + json.dumps(NO_FIELD).encode(), DONE),
        answered(b"data: " + json.dumps(NO_FIELD).encode() + b"\n\n", 422),
    ],
    ids=["body", "500", "event", "event of a refusal"],
)
def test_a_field_may_be_refused_in_any_form_that_names_it(answer: bytes) -> None:
    notes = measured(Faulty(answer, times=99, key="ignore_eos"), model="m")
    assert any("ignore_eos is not supported" in note for note in notes)


@pytest.mark.parametrize("status", [429, 503])
def test_a_busy_endpoint_is_probed_again(status: int) -> None:
    busy = answered({"error": {"message": "the model is being loaded"}}, status)
    measured(Faulty(busy, times=1), model="m")
    with scripted(Faulty(busy, times=99)) as url:
        with pytest.raises(TargetUnusable, match="the model is being loaded"):
            probe_endpoint(Target(url=url, api="chat", model="m", ready_seconds=0.1))


def test_what_an_endpoint_refuses_in_any_form_is_refused_with_its_words() -> None:
    endpoint = Endpoint(refuse=lambda body: "your account is closed")
    with scripted(endpoint) as url, pytest.raises(EndpointRefuses, match="account is closed"):
        probe_endpoint(Target(url=url, api="chat", model="m"))


@pytest.mark.parametrize(
    "events",
    [
        (ROLE, LENGTH, USAGE, DONE),
        (ROLE, LENGTH, DONE),
        (ROLE, LENGTH.replace(b"}]}", b'}],"usage":{"prompt_tokens":9,"completion_tokens":8}}')),
        (TEXT.replace(b'"content"', b'"reasoning_content"'), LENGTH, USAGE, DONE),
    ],
    ids=["counted", "not counted", "at the end", "reasoning"],
)
def test_no_text_within_a_few_tokens_is_a_note(events: tuple[bytes, ...]) -> None:
    assert any(
        "no text in the first 8 tokens" in note for note in measured(Endpoint(events=events))
    )


@pytest.mark.parametrize(
    ("url", "host", "head"),
    [
        ("127.0.0.1:8000", "http://127.0.0.1:8000", b"GET /v1/models HTTP/1.1\r\nHost: 127"),
        (
            "https://host/api/v1",
            "https://host:443",
            b"GET /api/v1/models HTTP/1.1\r\nHost: host:443",
        ),
        (
            "http://例え.jp",
            "http://xn--r8jz45g.jp:80",
            b"GET /v1/models HTTP/1.1\r\nHost: xn--r8jz45g.jp",
        ),
        ("http://BÜCHER.example/v2", "http://xn--bcher-kva.example:80", b"GET /v2/models "),
        ("http://h/例/v1/", "http://h:80", b"GET /%E4%BE%8B/v1/models HTTP/1.1"),
        ("http://h/a%2Fb?", "http://h:80", b"GET /a%2Fb/models HTTP/1.1"),
        ("http://h/\udcff/v1", "http://h:80", b"GET /%FF/v1/models HTTP/1.1"),
        ("http://[::1]:8000", "http://[::1]:8000", b"GET /v1/models HTTP/1.1\r\nHost: [::1]:8000"),
        ("http://[fe80::1%25eth0]", "http://[fe80::1]:80", b"GET /v1/models HTTP/1.1\r\nHost: [f"),
        (" http://h/v1 \n", "http://h:80", b"GET /v1/models HTTP/1.1"),
        ("http://h/a\r\nX: 1", "http://h:80", b"GET /aX:%201/models HTTP/1.1\r\nHost: h:80\r\n"),
    ],
)
def test_urls_are_read_as_people_write_them(url: str, host: str, head: bytes) -> None:
    pool = connect(url)
    assert pool.host == host and get_bytes(pool, "/v1/models").startswith(head)


@pytest.mark.parametrize(
    "url",
    [
        *("ftp://host", "http://", "http://host:99999", "http://host/?a=b", "http://a b"),
        *("http://a..b", "http://" + "a" * 64 + ".example"),
        *("http://.例", "http://h\x7f", "http://\udcff", "http://" + "例" * 80, "http://[::1"),
        "http://u:p@host",
        "8080",  # a port alone would be the host 0.0.31.144
    ],
)
def test_a_url_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(TargetUnusable):
        connect(url)


def test_a_query_in_a_url_is_refused_by_name() -> None:
    """A URL is recorded, so that a connection takes its query apart from it."""
    with pytest.raises(TargetUnusable, match=r"'https://h/openai/m' has a query.*Give it as query"):
        connect("https://h/openai/m?api-version=1")


def test_a_request_is_plain_json_whatever_the_model_is_called() -> None:
    pool = connect("http://h")
    facts = TargetFacts("例/\n|model", True, True, True)
    wire = request_bytes(pool, Target(url="http://h"), facts, "x", 8)
    assert json.loads(wire.partition(b"\r\n\r\n")[2])["model"] == "例/\n|model"


def test_answers_have_the_workload_s_lengths_only_where_the_endpoint_can_do_that() -> None:
    can = TargetFacts("m", True, True, ignore_eos=True, api="chat")
    assert "answers have the workload's lengths" in route_words(can)
    cannot = TargetFacts("m", True, True, ignore_eos=False, api="chat")
    assert "answers end where the model ends them" in route_words(cannot)
    with_note = msgspec.structs.replace(cannot, notes=["it does not know ignore_eos"])
    assert "answers" not in route_words(with_note)

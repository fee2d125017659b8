"""Around every answer of the routes: errors in OpenAI's shape that say what, headers, the key,
limits, log lines; and nothing is a 5xx.
"""

from __future__ import annotations

import asyncio
import re
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from crossover.serving.errors import Overloaded
from crossover.serving.http.body_types import ChatRequest, CompletionRequest
from tests.serving.fakes import (
    ByteTokenizer,
    FakeSupervisor,
    app_on,
    ask,
    chat,
    complete,
    served,
)

SECRET = "s3cret-key"


# --- errors


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/", 404, "not_found"),
        ("GET", "/v1/nothing", 404, "not_found"),
        ("GET", "/v1/models/../../etc/passwd", 404, "not_found"),
        ("GET", "/v1/chat/completions", 405, "method_not_allowed"),
        ("OPTIONS", "/v1/completions", 405, "method_not_allowed"),
    ],
)
def test_wrong_addresses_have_openais_error_body_too(
    port: int, method: str, path: str, status: int, code: str
) -> None:
    answer = ask(port, method, path)
    assert (answer.status, answer.error["code"], answer.error["type"]) == (
        status,
        code,
        "invalid_request_error",
    )


@pytest.mark.parametrize(
    "kind", ["application/json", "Application/JSON; charset=utf-8", "application/vnd.api+json"]
)
def test_json_has_several_names(port: int, kind: str) -> None:
    assert complete(port, {"Content-Type": kind}).status == 200


def test_a_template_that_refuses_is_a_400(supervisor: FakeSupervisor) -> None:
    complaint = "{{ raise_exception('begin with a system turn') }}"
    strict = "{% if messages[0]['role'] != 'system' %}" + complaint + "{% endif %}ok"
    with served(app_on(supervisor, tokenizer=ByteTokenizer(template=strict))) as port:
        answer = chat(port)
        assert answer.status == 400 and "begin with a system turn" in answer.error["message"]
    with served(app_on(supervisor, tokenizer=ByteTokenizer(template=None))) as port:
        assert chat(port).status == 400 and complete(port).status == 200


@pytest.mark.parametrize("streamed", [False, True])
def test_a_full_queue_is_a_429_with_the_time_to_come_back(
    port: int, supervisor: FakeSupervisor, streamed: bool
) -> None:
    supervisor.refuse_after, supervisor.refusal = 0, Overloaded("full", 2.4, "queue_wait")
    answer = chat(port, stream=streamed)
    assert answer.status == 429
    assert (answer.error["type"], answer.error["code"]) == ("rate_limit_error", "queue_wait")
    assert (answer.headers["retry-after"], answer.headers["retry-after-ms"]) == ("3", "2400")


def test_a_request_is_admitted_whole_or_not_at_all(port: int, supervisor: FakeSupervisor) -> None:
    supervisor.by_hand, supervisor.refuse_after = True, 2
    assert complete(port, n=4).status == 429
    assert supervisor.cancelled == [1, 2]


@pytest.mark.parametrize("state", ["loading", "restarting", "failed", "draining", "stopped"])
def test_without_an_engine_it_is_a_503_with_the_reason(
    port: int, supervisor: FakeSupervisor, state: str
) -> None:
    supervisor.state, supervisor.reason = state, "load_failed: no room"
    answer = chat(port)
    assert answer.status == 503
    assert (answer.error["type"], answer.error["code"]) == ("service_unavailable_error", state)
    assert "load_failed: no room" in answer.error["message"]
    assert answer.headers["retry-after"] == "3"


def test_a_bug_is_a_500_without_details(
    port: int, supervisor: FakeSupervisor, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("/srv/secret/state is inconsistent at 0x7fff00001111")

    supervisor.submit = broken  # type: ignore[method-assign]
    answer = chat(port)
    assert (answer.status, answer.error["code"], answer.error["type"]) == (
        500,
        "internal_error",
        "server_error",
    )
    assert "secret" not in answer.body.decode()
    assert "is inconsistent" in caplog.text  # in the log, with its traceback


# --- headers, key, limits


def test_every_answer_names_its_server_and_has_a_request_id(port: int) -> None:
    bad = [chat(port, bad=1), ask(port, "GET", "/nothing"), ask(port, "PUT", "/health")]
    answers = [chat(port), chat(port, stream=True), *bad]
    assert {answer.headers["x-crossover-backend"] for answer in answers} == {"fake/cpu"}
    identities = {answer.headers["x-request-id"] for answer in answers}
    assert len(identities) == len(answers)
    assert all(re.fullmatch(r"req-[0-9a-f]{24}", identity) for identity in identities)


@pytest.mark.parametrize(
    ("given", "kept"),
    [("trace-1:a.b/c", True), ("x" * 129, False), ("a b", False), ("\x85", False)],
)
def test_a_clients_identity_is_kept_where_it_is_harmless(port: int, given: str, kept: bool) -> None:
    answer = ask(port, "GET", "/health", None, {"X-Request-Id": given})
    assert (answer.headers["x-request-id"] == given) is kept


def test_a_key_is_required_everywhere_but_for_probes(supervisor: FakeSupervisor) -> None:
    with served(app_on(supervisor, api_key=SECRET)) as port:
        for given in (None, "Bearer wrong", f"Basic {SECRET}", f"Bearer {SECRET}x"):
            answer = chat(port, {"Authorization": given} if given else {})
            assert (answer.status, answer.error["code"]) == (401, "invalid_api_key")
            assert answer.headers["www-authenticate"] == "Bearer"
            assert SECRET not in answer.body.decode()
        for path in ("/metrics", "/v1/placement", "/openapi.json", "/v1/models", "/nothing"):
            assert ask(port, "GET", path).status == 401
        assert ask(port, "GET", "/health").status == ask(port, "GET", "/ready").status == 200
        assert chat(port, {"Authorization": f"Bearer {SECRET}"}).status == 200
        assert chat(port, {"Authorization": f"bearer {SECRET}"}).status == 200


VALUES = st.sampled_from(
    [
        *(0, 1, -1, 2, 16, 128, 129, 2**31, 2**63, -(2**63), 10**30, 0.5, -0.5, 1e-300, 1e300),
        *(None, True, False, "", "x", "\x00", "é" * 9, [], [1], ["x"], [[1]], [300], {}, {"1": 1}),
        {"type": "text"},
    ]
)
FIELDS = sorted(
    {*ChatRequest.__struct_fields__, *CompletionRequest.__struct_fields__} - {"stream", "n"}
)


@settings(deadline=None, max_examples=300, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.sampled_from(["/v1/chat/completions", "/v1/completions", "/tokenize"]),
    st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=3),
)
def test_no_body_makes_a_5xx(path: str, fields: dict[str, Any]) -> None:
    """Near-valid requests straight into the app: each is answered, or refused with a 4xx whose
    error is complete.
    """
    needed = {"messages": [{"role": "user", "content": "x"}]} if "chat" in path else {"prompt": "x"}
    sent: list[dict[str, Any]] = []
    body = msgspec.json.encode({**needed, **fields})

    async def call() -> None:
        app, gone = app_on(FakeSupervisor()), asyncio.Event()
        messages = iter([{"type": "http.request", "body": body, "more_body": False}])

        async def receive() -> dict[str, Any]:
            for message in messages:
                return message
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: dict[str, Any]) -> None:
            sent.append(message)

        scope = {"type": "http", "method": "POST", "path": path, "raw_path": path.encode()}
        scope |= {"query_string": b"", "headers": [(b"content-type", b"application/json")]}
        await app(scope, receive, send)

    asyncio.run(call())
    status, answer = sent[0]["status"], msgspec.json.decode(sent[1]["body"])
    assert status in (200, 400, 404), answer
    assert ("error" in answer) == (status != 200)
    if status != 200:
        assert answer["error"]["message"] and answer["error"]["type"] == "invalid_request_error"
